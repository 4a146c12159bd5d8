"""A study written up: what its runs answer, by how much, how sure that is, and what cannot be said. No streamlit.

Pure functions of what `study_evidence.py` read; `study_files.py` makes documents of what comes out. Texts are as people
typed them: whoever shows them escapes them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from db.rows import ACTIVE, CANCELLED, FAILED, FINISHED
from fp8dash.choose.metrics import METRICS
from fp8dash.choose.records import Sensitivity
from fp8dash.report.comparison import Standing, window_difference
from fp8dash.report.export import interval
from fp8dash.report.numbers import DASH, heading, shown, signed, three
from fp8dash.report.study_evidence import Evidence
from fp8dash.stats import FEWEST_WINDOWS, Difference, told_apart

NAMED = 4  # recipes that a sentence names, at most
BY_INTERVAL = (
    "Paired 95 % bootstrap intervals over windows, each by itself. Tied: not told from the best with 95 % for all "
    "pairs together (Holm)."
)


@dataclass(frozen=True, slots=True)
class Table:
    """Texts in rows, under titles with units."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """A number of the figure with its interval, the recipe that it is of, and where it was measured."""

    label: str
    value: float
    low: float | None
    high: float | None
    recipe: str
    backend: str | None


@dataclass(frozen=True, slots=True)
class WriteUp:
    """The answer first, then why, then what cannot be said."""

    title: str
    why: str
    headline: str
    reasons: tuple[str, ...]
    limits: tuple[str, ...]
    table: Table
    axis: str  # of the bars, with its unit
    bars: tuple[Bar, ...]
    runs: tuple[Standing, ...]
    method: str


@dataclass(frozen=True, slots=True)
class Contest:
    """Runs that may be ranked together, the best first, and each one's difference from the best, which has none."""

    rows: tuple[Standing, ...]
    behind: tuple[Difference, ...]  # of rows[1:], in nats

    @property
    def is_unsure(self) -> bool:
        """True where windows are too few for an interval."""
        return any(difference.low is None for difference in self.behind)

    @property
    def apart(self) -> list[tuple[Standing, Difference]]:
        """The runs that differ from the best one, all of them with 95 % together, nearest first."""
        fallen = told_apart(self.behind)
        pairs = zip(self.rows[1:], self.behind, strict=True)
        return [pair for pair, is_apart in zip(pairs, fallen, strict=True) if is_apart]

    @property
    def tied(self) -> list[Standing]:
        """The runs that cannot be told from the best one; empty where nothing can be said."""
        apart = {row.run for row, _ in self.apart}
        return [] if self.is_unsure else [row for row in self.rows[1:] if row.run not in apart]


def written(found: Evidence) -> WriteUp:
    """The write-up; which numbers decide is the question's."""
    return ANSWERS.get(found.question.metric, _by_windows)(found)


def _by_windows(found: Evidence) -> WriteUp:
    """Answered by a metric that each window has: who is best, and who is tied with it."""
    contest, others = _contest(found)
    rows = _ordered(found, contest)
    return WriteUp(
        found.question.question, found.question.why, _headline(found, contest), _reasons(found, contest),
        _limits(found, contest, others), _table(found, contest, rows), heading(METRICS[found.question.metric]),
        tuple(_bar(row) for row in contest.rows), rows, BY_INTERVAL,
    )  # fmt: skip


def _contest(found: Evidence) -> tuple[Contest, list[Standing]]:
    """The most runs that may be ranked together; and those that cannot be ranked with them."""
    metric = METRICS[found.question.metric]
    ranked = [row for row in found.rows if row.state == FINISHED and not row.is_baseline and _known(row, metric.name)]
    groups: dict[tuple[str, str], list[Standing]] = {}
    for row in ranked:
        groups.setdefault((row.group, str(row.backend)), []).append(row)
    peers = max(groups.values(), key=lambda rows: (len(rows), rows[-1].finished), default=[])
    peers = sorted(peers, key=lambda row: getattr(row, metric.name))
    behind = tuple(_difference(found, peers[0], row, "kld") for row in peers[1:])
    return Contest(tuple(peers), behind), [row for row in ranked if row not in peers]


def _known(row: Standing, metric: str) -> bool:
    value = getattr(row, metric)
    return value is not None and math.isfinite(value)


def _difference(found: Evidence, best: Standing, row: Standing, field: str) -> Difference:
    """A run's mean minus the best one's over the same windows; without an interval where they have none."""
    known = window_difference(best, row, found.windows, field)
    return known or Difference((row.kld or 0.0) - (best.kld or 0.0), None, None)


def _headline(found: Evidence, contest: Contest) -> str:
    """The answer in one sentence, without its full stop."""
    metric = METRICS[found.question.metric]
    if not contest.rows:
        return _none_yet(found)
    best, others = contest.rows[0], contest.rows[1:]
    value = f"{metric.title} {shown(metric, getattr(best, metric.name))} {metric.unit}"
    if not others:
        return f"{best.name} costs {value}; no other recipe of this study can be compared with it yet"
    if contest.is_unsure:
        return f"{best.name} has the lowest {value}, but its windows are too few to tell it from the others"
    return f"{'So far, ' if found.active else ''}{_leader(contest, value)}{_next(contest)}"


def _none_yet(found: Evidence) -> str:
    return f"No answer yet: {found.finished} of {len(found.rows) + len(found.missing)} runs have finished"


def _leader(contest: Contest, value: str) -> str:
    best, tied = contest.rows[0], contest.tied
    if not tied:
        return f"{best.name} loses least: {value}"
    names, least = _listed([best.name, *(row.name for row in tied)]), len(tied) + 1
    every = least == len(contest.rows)
    who = f"{names} are tied" if least <= NAMED or not every else f"All {least} recipes are tied"
    top = max(row.kld or 0.0 for row in tied)
    return f"{who}{'' if every else ' for the least loss'}: {value.rsplit(' ', 1)[0]} to {three(top)} nats"


def _next(contest: Contest) -> str:
    """The best run that is not tied, and how far behind it is."""
    if not contest.apart:
        return f"; they differ by {_spread(contest.behind[-1])} nats at most"
    row, difference = contest.apart[0]
    return f"; next is {row.name}, {_spread(difference)} nats"


def _spread(difference: Difference) -> str:
    bounds = "" if difference.low is None else f" [{signed(difference.low)}, {signed(difference.high)}]"
    return f"{signed(difference.mean)}{bounds}"


def _reasons(found: Evidence, contest: Contest) -> tuple[str, ...]:
    """What else one would be told of the answer, where it was measured."""
    if not contest.rows:
        return ()
    best, said = contest.rows[0], []
    if best.ln_ppl_diff is not None:
        bounds = interval(best)
        sure = f" {bounds}" if bounds else ", no interval from so few windows"
        said.append(f"Against BF16, {best.name} changes ln PPL by {signed(best.ln_ppl_diff)} nats{sure}.")
    if len(contest.rows) > 1 and found.windows[best.run]:
        rival = contest.rows[1]
        gap = _difference(found, best, rival, "nll")
        if gap.low is not None:
            how = "cannot tell it from" if gap.is_tie else "tells it from"
            said.append(f"Perplexity {how} {rival.name}: ln PPL {_spread(gap)} nats.")
    said += [sentence for sentence in (_smallest(contest), _fastest(contest), _worst(contest)) if sentence]
    return tuple(said)


def _smallest(contest: Contest) -> str:
    rows = [row for row in contest.rows if row.bits_per_weight is not None]
    bits = sorted({round(row.bits_per_weight or 0.0, 3) for row in rows})
    if len(bits) < 2:
        return ""
    least = [row for row in rows if round(row.bits_per_weight or 0.0, 3) == bits[0]]
    best = min(least, key=lambda row: row.kld or 0.0)
    return f"Fewest bits: {best.name}, {best.bits_per_weight:.2f} a cast weight, at KLD {three(best.kld)} nats."


def _fastest(contest: Contest) -> str:
    rows = [row for row in contest.rows if row.gemm_speedup is not None]
    if not rows:
        return ""
    best = max(rows, key=lambda row: row.gemm_speedup or 0.0)
    told = f"{best.name}, {best.gemm_speedup:.2f}× BF16, measured on {best.device}."
    return (
        f"Fastest GEMMs: {told}"
        if (best.gemm_speedup or 0.0) > 1
        else f"No GEMMs are faster than BF16’s; nearest: {told}"
    )


def _worst(contest: Contest) -> str:
    last, best = contest.rows[-1], contest.rows[0]
    if len(contest.rows) < 3 or last not in [row for row, _ in contest.apart]:
        return ""
    times = f", {three((last.kld or 0.0) / best.kld)}× the least" if best.kld else ""
    return f"{last.name} loses most: KLD {three(last.kld)} nats{times}."


def _limits(found: Evidence, contest: Contest, others: Sequence[Standing]) -> tuple[str, ...]:
    """Why some of the question stays open."""
    said = list(_unfinished(found))
    if contest.is_unsure:
        count = contest.rows[0].windows
        said.append(f"{count} windows give no interval: {FEWEST_WINDOWS} at least are needed. Queue more of them.")
    if others:
        unlike = {row.backend for row in others} != {contest.rows[0].backend}
        advice = " The backend “emulated” takes every recipe." if unlike else ""
        said.append(f"Not ranked with the rest: {_listed([row.name for row in others])}.{advice}")
    said += found.unlike
    metric = METRICS[found.question.metric]
    bare = [row for row in found.rows if row.state == FINISHED and not row.is_baseline and not _known(row, metric.name)]
    if bare:
        said.append(f"{_listed([row.name for row in bare])}: no {metric.title}, or one that is not a number.")
    if contest.rows and all(row.gemm_speedup is None for row in contest.rows):
        said.append("No native kernel was timed here: speed is not known.")
    return (*said, *_scope(contest.rows))


def _unfinished(found: Evidence) -> list[str]:
    """Runs that are on the way, that ended without an answer, and that there are none of."""
    said = []
    if rows := [row for row in found.rows if row.state in ACTIVE]:
        said.append(f"Not finished: {_listed([f'{row.name} ({row.state})' for row in rows])}. The answer may change.")
    said += [f"{row.name} failed: {row.error or 'without a message'}" for row in found.rows if row.state == FAILED]
    if rows := [row for row in found.rows if row.state == CANCELLED]:
        said.append(f"Cancelled: {_listed([row.name for row in rows])}.")
    if found.missing:
        said.append(f"Not measured: {_listed(found.missing)}.")
    return said


def _scope(rows: Sequence[Standing]) -> list[str]:
    if not rows:
        return []
    one = rows[0]
    setting = f"{one.windows} windows of {one.window_length} tokens"
    where = f"one model, {one.model}, on one text, {one.corpus} ({setting}), on {one.device or 'a device not told'}"
    return [f"This is {where}. Another model or text may answer otherwise."]


def _ordered(found: Evidence, contest: Contest) -> tuple[Standing, ...]:
    """Baselines, the contest in its order, then the rest."""
    bases = [row for row in found.rows if row.is_baseline]
    return tuple(dict.fromkeys([*bases, *contest.rows, *found.rows]))


def _table(found: Evidence, contest: Contest, rows: Sequence[Standing]) -> Table:
    """A row a run: the deciding metric, the difference from the best, what else the question looks at."""
    metric = METRICS[found.question.metric]
    beside = [METRICS[name] for name in found.question.beside]
    behind = {row.run: d for row, d in zip(contest.rows[1:], contest.behind, strict=True)}
    extras = found.question.extras
    titles = ("Recipe", heading(metric), "Minus the lowest (nats)", *map(heading, beside))
    lines = [
        (
            row.name, shown(metric, getattr(row, metric.name)), _behind(contest, row, behind.get(row.run)),
            *(shown(m, getattr(row, m.name)) for m in beside),
            *(_extra(found, row, extra.name, extra.label) for extra in extras),
            row.backend or DASH, row.state, row.run,
        )
        for row in rows
    ]  # fmt: skip
    return Table((*titles, *(extra.title for extra in extras), "Backend", "State", "Run"), tuple(lines))


def _behind(contest: Contest, row: Standing, difference: Difference | None) -> str:
    if difference is None:
        return "lowest" if contest.rows and row == contest.rows[0] else DASH
    if difference.low is None:
        return f"{signed(difference.mean)}, no interval"
    return f"{_spread(difference)}{', tied' if row in contest.tied else ''}"


def _extra(found: Evidence, row: Standing, name: str, label: str) -> str:
    values = [m.value for m in found.extras.get(row.run, ()) if (m.name, m.label) == (name, label)]
    value = values[-1] if values else None
    return f"{value:,.0f}" if value is not None and value >= 1000 else three(value)


def _bar(row: Standing) -> Bar:
    return Bar(row.name, row.kld or 0.0, row.kld_low, row.kld_high, row.recipe, row.backend)


def _by_parts(found: Evidence) -> WriteUp:
    """Answered by what each part of the model costs, cast alone."""
    rows = tuple(row for row in found.rows if found.parts.get(row.run))
    ranked = {row.run: sorted(found.parts[row.run], key=lambda p: p.alone_kld, reverse=True) for row in rows}
    limits = [*_unfinished(found), *found.unlike]
    if rows:
        limits.append("These divergences have no interval: parts that are close may be tied.")
    return WriteUp(
        found.question.question, found.question.why, _parts_headline(found, rows, ranked),
        tuple(_parts_reason(row, ranked[row.run]) for row in rows), (*limits, *_scope(rows)),
        _parts_table(rows, ranked), "KLD, cast alone (nats)",
        tuple(_part_bar(row, part) for row in rows for part in ranked[row.run][:NAMED]), found.rows,
        "Each kind of Linear cast alone, emulated, then everything but it; KLD over the first two windows.",
    )  # fmt: skip


def _parts_headline(found: Evidence, rows: Sequence[Standing], ranked: dict[str, list[Sensitivity]]) -> str:
    if not rows:
        return _none_yet(found)
    worst = {row.name: ranked[row.run][0] for row in rows}
    if len(groups := {part.group for part in worst.values()}) == 1:
        where = f"in {rows[0].name}" if len(rows) == 1 else f"in all {len(rows)} recipes"
        return (
            f"{groups.pop()} costs most {where}: {_range([part.alone_kld for part in worst.values()])} nats cast alone"
        )
    each = [f"{part.group} in {name} ({three(part.alone_kld)} nats)" for name, part in worst.items()]
    return f"What costs most depends on the recipe: {_listed(each)}"


def _range(values: Sequence[float]) -> str:
    low, high = three(min(values)), three(max(values))
    return low if low == high else f"{low} to {high}"


def _parts_reason(row: Standing, parts: Sequence[Sensitivity]) -> str:
    worst, least = parts[0], parts[-1]
    total = sum(part.alone_kld for part in parts)
    share = f", {100 * worst.alone_kld / total:.0f} % of the parts’ sum" if total > 0 else ""
    return (
        f"{row.name}: {worst.group} {three(worst.alone_kld)} nats{share}; {least.group} costs least, "
        f"{three(least.alone_kld)}."
    )


def _parts_table(rows: Sequence[Standing], ranked: dict[str, list[Sensitivity]]) -> Table:
    titles = ("Recipe", "Part", "KLD, cast alone (nats)", "KLD, all but it (nats)", "Bits/weight", "Parameters")
    return Table(
        (*titles, "Kept in the mixed recipe"),
        tuple(
            (row.name, p.group, three(p.alone_kld), three(p.all_but_kld), f"{p.bits_per_weight:.2f}",
             f"{p.parameters:,}", "yes" if p.kept else "no")
            for row in rows for p in ranked[row.run]
        ),
    )  # fmt: skip


def _part_bar(row: Standing, part: Sensitivity) -> Bar:
    return Bar(f"{row.name}, {part.group}", part.alone_kld, None, None, row.recipe, row.backend)


def _listed(names: Sequence[str]) -> str:
    """Names as people say them, the first few."""
    kept = list(names) if len(names) <= NAMED + 1 else [*names[:NAMED], f"{len(names) - NAMED} more"]
    return kept[0] if len(kept) == 1 else f"{', '.join(kept[:-1])} and {kept[-1]}"


ANSWERS: dict[str, Callable[[Evidence], WriteUp]] = {"sensitivity": _by_parts}
