"""The answer to a page's question, in words with numbers. Plain values in, Markdown out; no streamlit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fp8dash.choose.metrics import METRICS
from fp8dash.choose.records import Window
from fp8dash.report.comparison import Comparison, Standing, Verdict, leading
from fp8dash.report.export import interval
from fp8dash.report.numbers import shown, signed, three
from fp8dash.stats import SPEED_TIE
from fp8dash.ui.words import listed, plain

SAID = {  # metric: what one run does, what several do, the number
    "kld": ("loses least to BF16", "lose least to BF16", "KLD {} nats"),
    "ln_ppl_diff": ("raises ln PPL least", "raise ln PPL least", "{} nats"),
    "gemm_speedup": ("has the fastest GEMMs", "have the fastest GEMMs", "{}× BF16"),
    "model_bytes": ("is smallest", "are smallest", "{} MB"),
    "needle": ("finds most needles", "find most needles", "share {}"),
}
PARTS = {
    "w": "weights", "a": "activations", "kv": "KV cache", "attn": "attention", "also": "also cast", "skip": "left out",
}  # fmt: skip
CLOSE = 0.05  # nats: an ln PPL that grew more than this is seen by readers
NAMED = 4  # recipes that a sentence names, at most
MEASURED, PREDICTED = "measured", "predicted for decoding at batch {:,}"


@dataclass(frozen=True, slots=True)
class Budget:
    """How much quality may go: one metric and the most of it, in nats."""

    metric: str = "kld"
    limit: float = CLOSE


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a recipe is on the target, as a multiple of BF16: its GEMMs as measured, or decoding as predicted."""

    times: float
    how: str  # MEASURED, or PREDICTED and for what


@dataclass(frozen=True, slots=True)
class Answer:
    """What to ship, or nothing that fits; and why each of the others lost."""

    best: Standing | None
    speed: Speed | None  # of the best, where it is known
    lost: tuple[tuple[Standing, str], ...]
    by: str = "size"  # what decided within the budget: "speed", or "size" where none is faster than BF16
    known: str = ""  # how speeds within the budget are known, where any is


def choose(rows: Sequence[Standing], budget: Budget, speeds: Mapping[str, Speed], tied: Sequence[str] = ()) -> Answer:
    """The fastest within the budget, or the smallest where none is known to be faster than BF16; within 5 % of it,
    the lowest KLD.

    `speeds` are by run, on the target; the KLDs of `tied` runs, the best among them, cannot be told apart.
    """
    ranked = candidates(rows)
    within = [row for row in ranked if _spent(row, budget) <= budget.limit]
    found = [speeds[row.run] for row in within if row.run in speeds]
    gains = max((speed.times for speed in found), default=0.0) > 1 + SPEED_TIE
    decisive = speeds if gains else {}
    best = min(_nearest(within, decisive), key=lambda row: row.kld or 0.0, default=None)
    lost = tuple((row, _why(row, best, budget, decisive, tied)) for row in ranked if row is not best)
    return Answer(
        best, speeds.get(best.run) if best else None, lost, "speed" if gains else "size", found[0].how if found else ""
    )


def _nearest(rows: Sequence[Standing], speeds: Mapping[str, Speed]) -> list[Standing]:
    """The fastest and what is within 5 % of it; where nothing is timed, the same by size."""
    timed = [row for row in rows if row.run in speeds]
    if timed:
        top = max(speeds[row.run].times for row in timed)
        return [row for row in timed if speeds[row.run].times >= top / (1 + SPEED_TIE)]
    sizes = [row.model_bytes for row in rows if row.model_bytes is not None]
    return [row for row in rows if not sizes or (row.model_bytes or 0) <= min(sizes) * (1 + SPEED_TIE)]


def _spent(row: Standing, budget: Budget) -> float:
    value: float | None = getattr(row, budget.metric)
    return float("inf") if value is None else value


def _why(row: Standing, best: Standing | None, budget: Budget, speeds: Mapping[str, Speed], tied: Sequence[str]) -> str:
    """Why a row is not the answer, in one sentence."""
    metric = METRICS[budget.metric]
    if _spent(row, budget) > budget.limit:
        value = getattr(row, budget.metric)
        given = f"{shown(metric, value)} nats" if value is not None else "not measured"
        return f"over the budget: {metric.title} {given}, at most {three(budget.limit)}"
    if best is None:
        return ""
    ours, theirs = speeds.get(row.run), speeds.get(best.run)
    if theirs and not ours:
        return "no speed is known for it on this target"
    if ours and theirs and ours.times * (1 + SPEED_TIE) < theirs.times:
        return f"slower: {ours.times:.2f}× BF16, not {theirs.times:.2f}×"
    if not theirs and (row.model_bytes or 0) > (best.model_bytes or 0) * (1 + SPEED_TIE):
        return f"larger: {shown(METRICS['model_bytes'], row.model_bytes)} MB"
    near = "as fast within 5 %" if theirs else "as small within 5 %"
    same = ", which windows this few cannot tell apart" if {row.run, best.run} <= set(tied) else ""
    return f"{near}, but KLD {three(row.kld)} nats, not {three(best.kld)}{same}"


def shipping(answer: Answer, budget: Budget, model: str, target: str) -> str:
    """The answer in one line."""
    best = answer.best
    if best is None:
        return f"No recipe keeps {METRICS[budget.metric].title} of {plain(model)} within {three(budget.limit)} nats"
    speed = f", {answer.speed.times:.2f}× BF16 {answer.speed.how}" if answer.speed else ", speed not known"
    return f"Ship {plain(best.name)} on {plain(target)}: KLD {three(best.kld)} nats{speed}"


def evidence(answer: Answer) -> str:
    """The other numbers of the recipe to ship."""
    best = answer.best
    if best is None:
        return "Raise the budget, or queue finer recipes: smaller tiles, or layers left out."
    none = {"": "no speed is known", MEASURED: "none that was timed is faster than BF16"}
    why = none.get(answer.known, "none is predicted to be faster than BF16")
    fastest = f"fastest within the budget{'' if answer.known == MEASURED else ', as predicted'}"
    how = fastest if answer.by == "speed" else f"smallest within the budget, as {why}"
    return f"{beside_loss(best)}. It is the {how}; within 5 % of that, the lowest KLD."


def beside_loss(row: Standing) -> str:
    """A run's other numbers in one line."""
    bounds = f" {plain(interval(row))}" if interval(row) else ", no interval from so few windows"
    parts = [
        f"Δ ln PPL {signed(row.ln_ppl_diff)}{bounds} nats" if row.ln_ppl_diff is not None else "",
        f"needles {shown(METRICS['needle'], row.needle)}" if row.needle is not None else "no needle was looked for",
        f"{shown(METRICS['model_bytes'], row.model_bytes)} MB" if row.model_bytes is not None else "",
        f"{row.bits_per_weight:.2f} bits a weight" if row.bits_per_weight else "",
    ]
    return "; ".join(part for part in parts if part)


def candidates(rows: Sequence[Standing]) -> list[Standing]:
    """The rows that may be shipped: finished, not the baseline, with a divergence; the best first."""
    found = [
        row for row in rows if row.state == "finished" and not row.is_baseline and row.kld is not None and row.kld >= 0
    ]
    return sorted(found, key=lambda row: row.kld or 0.0)


def tied_with_best(rows: Sequence[Standing], windows: Mapping[str, Sequence[Window]]) -> list[str]:
    """Runs whose KLD cannot be told from the best one's on the same windows, the best not among them."""
    ranked = candidates(rows)
    if not ranked:
        return []
    apart, _ = leading(ranked[0], ranked[1:], windows, "kld")
    return [row.run for row in ranked[1:] if row.run not in apart]


def headline(rows: Sequence[Standing], tied: Sequence[str]) -> str:
    """Which recipe loses least, by how much, and how sure that is."""
    ranked = candidates(rows)
    if not ranked:
        return "No cast recipe is measured here yet"
    best = ranked[0]
    others = [row.name for row in ranked if row.run in tied]
    lead = f"{plain(best.name)} loses least to BF16"
    if others:
        lead = f"{_some([best.name, *others])} lose least to BF16 and cannot be told apart"
    bits = f" at {best.bits_per_weight:.2f} bits per weight" if best.bits_per_weight else ""
    noise = ", indistinguishable from BF16" if best.is_within_noise else ""
    partly = f", {best.uncast_share:.0%} of the blocks’ weights left in BF16" if best.is_partly_cast else ""
    return f"{lead}: KLD {three(best.kld)} nats{bits}{noise}{partly}"


def reasons(rows: Sequence[Standing], tied: Sequence[str]) -> str:
    """What else one would be told: the next, what is missing, the ones to avoid."""
    ranked = candidates(rows)
    if not ranked:
        return ""
    said = []
    rest = [row for row in ranked[1:] if row.run not in tied]
    if rest:
        times = (rest[0].kld or 0.0) / (ranked[0].kld or 1.0)
        said.append(
            f"Next is {plain(rest[0].name)} with {three(rest[0].kld)} nats ({times:.2f}× as much), "
            "beyond the paired 95 % interval."
        )
    avoid = [row for row in ranked if (row.ln_ppl_diff or 0) > CLOSE and (row.ln_ppl_diff_low or 0) > 0]
    if all(row.gemm_speedup is None for row in ranked):
        said.append("No native kernel was timed here: sizes and quality are exact, speeds are missing.")
    if avoid:
        said.append(f"Avoid {_some([row.name for row in avoid])}: ln PPL grows by more than {CLOSE} nats.")
    return " ".join(said)


def _some(names: Sequence[str]) -> str:
    """Names as people say them, the first few."""
    known = [plain(name) for name in dict.fromkeys(names)]
    return listed(known if len(known) <= NAMED + 1 else [*known[:NAMED], f"{len(known) - NAMED} more"])


def verdict(found: Comparison, contest: Comparison | None, metrics: Sequence[str]) -> str:
    """Who leads in these metrics; `contest` leaves the baseline out, which always wins against itself."""
    judged = contest or found
    rows = [next(v for v in judged.verdicts if v.metric.name == name) for name in metrics]
    said: list[str] = []
    before: tuple[int, ...] = ()
    for row in rows:
        if not row.best:
            continue
        if row.best == before:  # the same runs again: no need to name them twice
            said[-1] += f" and {_verb(row)}"
        elif _all_tie(row):
            said.append(f"{row.metric.title} ties")
        else:
            said.append(f"{listed([plain(judged.standings[i].name) for i in row.best])} {_verb(row)}")
        before = () if _all_tie(row) else row.best
    return "; ".join(said)


def loss(row: Standing) -> str:
    """What one recipe costs, where it stands beside the baseline alone; empty where that was not measured."""
    return f"{plain(row.name)} loses {three(row.kld)} nats to BF16" if row.kld is not None else ""


def _all_tie(row: Verdict) -> bool:
    return len(row.best) == len([value for value in row.values if value is not None]) > 1


def _verb(row: Verdict) -> str:
    one, several, unit = SAID[row.metric.name]
    value = unit.format(shown(row.metric, row.values[row.best[0]]))
    return f"{several if len(row.best) > 1 else one} ({value}{', tied' if len(row.best) > 1 else ''})"


def difference(a: Standing, b: Standing) -> str:
    """What differs between two recipes, part by part."""
    ours, theirs = _parts(a.recipe), _parts(b.recipe)
    said = []
    for key, what in PARTS.items():
        if ours.get(key) != theirs.get(key):
            absent = "nothing" if key in ("also", "skip") else "BF16"
            said.append(f"{what} {plain(theirs.get(key, absent))}, not {plain(ours.get(key, absent))}")
    return "; ".join(said) or "the same recipe"


def _parts(recipe: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in recipe.split() if "=" in word)
