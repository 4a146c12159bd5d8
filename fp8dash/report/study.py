"""A study written up: the answer its runs give, by how much, how certain it is, and what stays open. No streamlit.

Pure functions of what `study_evidence.py` read; `study_files.py` makes documents of what comes out. Texts are as people
typed them: whoever shows them escapes them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from db.rows import ACTIVE, CANCELLED, FAILED, FINISHED
from fp8dash.choose.metrics import METRICS
from fp8dash.choose.records import Sensitivity
from fp8dash.report.comparison import Standing
from fp8dash.report.contest import Contest, Rival, contest, is_measured, ln_ppl_change, over, spread, window_difference
from fp8dash.report.headline import NAMED, headline, listed
from fp8dash.report.numbers import DASH, heading, shown, three
from fp8dash.report.study_evidence import Evidence
from fp8dash.stats import FEWEST_WINDOWS, Outcome

BY_INTERVAL = (
    "Paired bootstrap intervals over windows, adjusted so that all of them hold together at 95 % (Holm). Tied: the "
    "interval contains zero and nothing larger than the lowest KLD itself. Too few windows: it contains zero and "
    "larger differences too."
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
    """The answer first, then why, then what stays open."""

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


OUTCOMES: dict[Outcome, str] = {"apart": "", "tied": ", tied", "open": ", too few windows"}


def written(evidence: Evidence) -> WriteUp:
    """The write-up; which numbers decide is the question's."""
    return ANSWERS.get(evidence.question.metric, _by_windows)(evidence)


def _by_windows(evidence: Evidence) -> WriteUp:
    """Answered by a metric that each window has: which recipe is best, and which are tied with it."""
    judged, others = _judged(evidence)
    rows = _ordered(evidence, judged)
    question = evidence.question
    return WriteUp(
        question.question,
        question.why,
        _headline(evidence, judged),
        _reasons(evidence, judged),
        _limits(evidence, judged, others),
        _table(evidence, judged, rows),
        heading(METRICS[question.metric]),
        tuple(_bar(row) for row in judged.rows),
        rows,
        BY_INTERVAL,
    )


def _judged(evidence: Evidence) -> tuple[Contest, list[Standing]]:
    """The most runs that may be ranked together, judged; and those that cannot be ranked with them."""
    metric = evidence.question.metric
    ranked = [row for row in evidence.rows if _takes_part(row) and is_measured(row, metric)]
    groups: dict[tuple[str, str], list[Standing]] = {}
    for row in ranked:
        groups.setdefault((row.group, str(row.backend)), []).append(row)
    peers = max(groups.values(), key=lambda rows: (len(rows), rows[-1].finished), default=[])
    return contest(peers, evidence.windows, metric), [row for row in ranked if row not in peers]


def _takes_part(row: Standing) -> bool:
    return row.state == FINISHED and not row.is_baseline and not row.is_partly_cast


def _headline(evidence: Evidence, judged: Contest) -> str:
    """The answer in one sentence, without its full stop."""
    if not judged.rows:
        return _none_yet(evidence)
    return f"{'So far, ' if evidence.active and judged.rivals else ''}{headline(judged)}"


def _none_yet(evidence: Evidence) -> str:
    return f"No answer yet: {evidence.finished} of {len(evidence.rows) + len(evidence.missing)} runs have finished"


def _reasons(evidence: Evidence, judged: Contest) -> tuple[str, ...]:
    """What else matters for the answer, if it was measured."""
    best = judged.leader
    if best is None:
        return ()
    sentences = []
    if best.ln_ppl_diff is not None:
        sentences.append(f"Against BF16, {best.name} changes ln PPL by {ln_ppl_change(best)}.")
    sentences += [_perplexity(evidence, best, rival) for rival in judged.rivals[:1]]
    sentences += [_smallest(judged), _fastest(judged), _worst(judged)]
    return tuple(sentence for sentence in sentences if sentence)


def _perplexity(evidence: Evidence, best: Standing, rival: Rival) -> str:
    """Whether perplexity tells the leader from the nearest rival, at 95 %: one comparison."""
    gap = window_difference(best, rival.row, evidence.windows, "nll")
    if gap is None or gap.low is None:
        return ""
    how = "cannot tell it from" if gap.is_tie else "tells it from"
    return f"Perplexity {how} {rival.row.name}: ln PPL {spread(gap)} nats."


def _smallest(judged: Contest) -> str:
    rows = [row for row in judged.rows if row.bits_per_weight is not None]
    bits = sorted({round(row.bits_per_weight or 0.0, 3) for row in rows})
    if len(bits) < 2:
        return ""
    least = [row for row in rows if round(row.bits_per_weight or 0.0, 3) == bits[0]]
    best = min(least, key=lambda row: row.kld or 0.0)
    return f"Fewest bits: {best.name}, {best.bits_per_weight:.2f} per cast weight, at KLD {three(best.kld)} nats."


def _fastest(judged: Contest) -> str:
    rows = [row for row in judged.rows if row.gemm_speedup is not None]
    if not rows:
        return ""
    best = max(rows, key=lambda row: row.gemm_speedup or 0.0)
    measured = f"{best.name}, {best.gemm_speedup:.2f}× BF16, measured on {best.device}."
    return (
        f"Fastest GEMMs: {measured}"
        if (best.gemm_speedup or 0.0) > 1
        else f"No GEMMs are faster than BF16’s; the closest: {measured}"
    )


def _worst(judged: Contest) -> str:
    last = judged.rivals[-1] if len(judged.rivals) > 1 else None
    if last is None or last.outcome != "apart" or judged.leader is None:
        return ""
    return f"{last.row.name} loses most: KLD {three(last.row.kld)} nats{over(last.row.kld, judged.leader.kld)}."


def _limits(evidence: Evidence, judged: Contest, others: Sequence[Standing]) -> tuple[str, ...]:
    """Why some of the question stays open."""
    sentences = list(_unfinished(evidence))
    if judged.leader and any(rival.difference and rival.difference.low is None for rival in judged.rivals):
        count = judged.leader.windows
        sentences.append(f"{count} windows give no interval: at least {FEWEST_WINDOWS} are needed. Queue more of them.")
    if judged.leader and others:
        unlike = {row.backend for row in others} != {judged.leader.backend}
        advice = " The backend “emulated” takes every recipe." if unlike else ""
        sentences.append(f"Not ranked with the rest: {listed([row.name for row in others])}.{advice}")
    sentences += evidence.unlike
    if partly := [row.name for row in evidence.rows if row.is_partly_cast]:
        sentences.append(f"Applied to only a part of the model, so not ranked: {listed(partly)}.")
    metric = METRICS[evidence.question.metric]
    bare = [row for row in evidence.rows if _takes_part(row) and not is_measured(row, metric.name)]
    if bare:
        sentences.append(f"{listed([row.name for row in bare])}: {metric.title} is missing or not a number.")
    if judged.rows and all(row.gemm_speedup is None for row in judged.rows):
        sentences.append("No native kernel was timed here, so speed is not known.")
    return (*sentences, *_scope(judged.rows))


def _unfinished(evidence: Evidence) -> list[str]:
    """Runs that are unfinished, that ended without an answer, or that do not exist yet."""
    sentences = []
    if rows := [row for row in evidence.rows if row.state in ACTIVE]:
        sentences.append(
            f"Not finished: {listed([f'{row.name} ({row.state})' for row in rows])}. The answer may change."
        )
    sentences += [
        f"{row.name} failed: {row.error or 'without a message'}" for row in evidence.rows if row.state == FAILED
    ]
    if rows := [row for row in evidence.rows if row.state == CANCELLED]:
        sentences.append(f"Cancelled: {listed([row.name for row in rows])}.")
    if evidence.missing:
        sentences.append(f"Not measured: {listed(evidence.missing)}.")
    return [*sentences, *_elsewhere(evidence.elsewhere)]


def _elsewhere(rows: Sequence[Standing]) -> list[str]:
    """Runs that measured something else under the study's names, by what that was."""
    contents: dict[tuple[str, str, str, str], list[str]] = {}
    for row in rows:
        key = (row.model, row.model_hash[:12], row.corpus, row.corpus_hash[:12])
        contents.setdefault(key, []).append(f"{row.name} ({row.run})")
    return [
        f"Left out, since they measured different contents than the newest run (model {model}, SHA-256 "
        f"{model_hash or 'unknown'}; text {corpus}, {corpus_hash or 'unknown'}): {listed(names)}. Queue them again "
        "to measure the current contents."
        for (model, model_hash, corpus, corpus_hash), names in contents.items()
    ]


def _scope(rows: Sequence[Standing]) -> list[str]:
    if not rows:
        return []
    one = rows[0]
    setting = f"{one.windows} windows of {one.window_length} tokens"
    where = f"one model, {one.model}, on one text, {one.corpus} ({setting}), on {one.device or 'an unknown device'}"
    return [f"This is {where}. Another model or text may give another answer."]


def _ordered(evidence: Evidence, judged: Contest) -> tuple[Standing, ...]:
    """Baselines, the contest in its order, then the rest."""
    bases = [row for row in evidence.rows if row.is_baseline]
    return tuple(dict.fromkeys([*bases, *judged.rows, *evidence.rows]))


def _table(evidence: Evidence, judged: Contest, rows: Sequence[Standing]) -> Table:
    """One row per run: the deciding metric, the difference from the best, what else the question looks at."""
    metric = METRICS[evidence.question.metric]
    beside = [METRICS[name] for name in evidence.question.beside]
    extras = evidence.question.extras
    titles = ("Recipe", heading(metric), "Difference from the lowest (nats)", *map(heading, beside))
    lines = [
        (
            row.name,
            shown(metric, getattr(row, metric.name)),
            _behind(judged, row),
            *(shown(m, getattr(row, m.name)) for m in beside),
            *(_extra(evidence, row, extra.name, extra.label) for extra in extras),
            row.backend or DASH,
            row.state,
            row.run,
        )
        for row in rows
    ]
    return Table((*titles, *(extra.title for extra in extras), "Backend", "State", "Run"), tuple(lines))


def _behind(judged: Contest, row: Standing) -> str:
    if row == judged.leader:
        return "lowest"
    rival = next((rival for rival in judged.rivals if rival.row == row), None)
    return f"{rival.spread}{OUTCOMES[rival.outcome]}" if rival else DASH


def _extra(evidence: Evidence, row: Standing, name: str, label: str) -> str:
    values = [m.value for m in evidence.extras.get(row.run, ()) if (m.name, m.label) == (name, label)]
    value = values[-1] if values else None
    return f"{value:,.0f}" if value is not None and value >= 1000 else three(value)


def _bar(row: Standing) -> Bar:
    return Bar(row.name, row.kld or 0.0, row.kld_low, row.kld_high, row.recipe, row.backend)


def _by_parts(evidence: Evidence) -> WriteUp:
    """Answered by what each part of the model costs, cast alone."""
    rows = tuple(row for row in evidence.rows if evidence.parts.get(row.run))
    ranked = {row.run: sorted(evidence.parts[row.run], key=lambda p: p.alone_kld, reverse=True) for row in rows}
    limits = [*_unfinished(evidence), *evidence.unlike]
    if rows:
        limits.append("These divergences have no interval: parts that are close may be tied.")
    return WriteUp(
        evidence.question.question,
        evidence.question.why,
        _parts_headline(evidence, rows, ranked),
        tuple(_parts_reason(row, ranked[row.run]) for row in rows),
        (*limits, *_scope(rows)),
        _parts_table(rows, ranked),
        "KLD, cast alone (nats)",
        tuple(_part_bar(row, part) for row in rows for part in ranked[row.run][:NAMED]),
        evidence.rows,
        "Each kind of Linear cast alone, emulated, then all others without it; KLD over the first two windows.",
    )


def _parts_headline(evidence: Evidence, rows: Sequence[Standing], ranked: dict[str, list[Sensitivity]]) -> str:
    if not rows:
        return _none_yet(evidence)
    worst = {row.name: ranked[row.run][0] for row in rows}
    if len(groups := {part.group for part in worst.values()}) == 1:
        where = f"in {rows[0].name}" if len(rows) == 1 else f"in all {len(rows)} recipes"
        return (
            f"{groups.pop()} costs most {where}: {_range([part.alone_kld for part in worst.values()])} nats cast alone"
        )
    each = [f"{part.group} in {name} ({three(part.alone_kld)} nats)" for name, part in worst.items()]
    return f"What costs most depends on the recipe: {listed(each)}"


def _range(values: Sequence[float]) -> str:
    low, high = three(min(values)), three(max(values))
    return low if low == high else f"{low} to {high}"


def _parts_reason(row: Standing, parts: Sequence[Sensitivity]) -> str:
    worst, least = parts[0], parts[-1]
    total = sum(part.alone_kld for part in parts)
    share = f", {100 * worst.alone_kld / total:.0f} % of the sum over parts" if total > 0 else ""
    return (
        f"{row.name}: {worst.group} {three(worst.alone_kld)} nats{share}; {least.group} costs least, "
        f"{three(least.alone_kld)}."
    )


def _parts_table(rows: Sequence[Standing], ranked: dict[str, list[Sensitivity]]) -> Table:
    titles = ("Recipe", "Part", "KLD, cast alone (nats)", "KLD, all others cast (nats)", "Bits/weight", "Parameters")
    return Table(
        (*titles, "Kept in the mixed recipe"),
        tuple(
            (
                row.name,
                p.group,
                three(p.alone_kld),
                three(p.all_but_kld),
                f"{p.bits_per_weight:.2f}",
                f"{p.parameters:,}",
                "yes" if p.kept else "no",
            )
            for row in rows
            for p in ranked[row.run]
        ),
    )


def _part_bar(row: Standing, part: Sensitivity) -> Bar:
    return Bar(f"{row.name}, {part.group}", part.alone_kld, None, None, row.recipe, row.backend)


ANSWERS: dict[str, Callable[[Evidence], WriteUp]] = {"sensitivity": _by_parts}
