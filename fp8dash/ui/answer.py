"""The answer to a page's question, in words with numbers. Plain values in, Markdown out; no streamlit."""

from collections.abc import Mapping, Sequence

from fp8dash.choose.records import Window
from fp8dash.metrics import shown, three
from fp8dash.report import Comparison, Standing, Verdict
from fp8dash.stats import paired_difference
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
    best = [w.kld for w in windows.get(ranked[0].run, ())]
    found = []
    for row in ranked[1:]:
        ours = [w.kld for w in windows.get(row.run, ())]
        if len(ours) == len(best) > 0 and paired_difference(ours, best).is_tie:
            found.append(row.run)
    return found


def headline(rows: Sequence[Standing], tied: Sequence[str]) -> str:
    """Which recipe loses least, by how much, and how sure that is."""
    ranked = candidates(rows)
    if not ranked:
        return "No cast recipe is measured here yet"
    best = ranked[0]
    others = [plain(row.name) for row in ranked if row.run in tied]
    lead = f"{plain(best.name)} loses least to BF16"
    if others:
        lead = f"{listed([plain(best.name), *others])} lose least to BF16 and cannot be told apart"
    bits = f" at {best.bits_per_weight:.2f} bits per weight" if best.bits_per_weight else ""
    return f"{lead}: KLD {three(best.kld)} nats{bits}"


def reasons(rows: Sequence[Standing], tied: Sequence[str]) -> str:
    """What else one would be told: the next, the fastest, the ones to avoid."""
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
    timed = [row for row in ranked if row.gemm_speedup is not None and row not in avoid]
    if timed:
        fast = max(timed, key=lambda row: row.gemm_speedup or 0.0)
        said.append(
            f"Fastest GEMMs among those worth shipping: {plain(fast.name)}, {fast.gemm_speedup:.2f}× BF16 at KLD "
            f"{three(fast.kld)} nats" + (", so none beats BF16 here." if (fast.gemm_speedup or 0) < 1 else ".")
        )
    else:
        said.append("No native kernel was timed here: sizes and quality are exact, speeds are missing.")
    if avoid:
        names = listed([plain(row.name) for row in avoid])
        said.append(f"Avoid {names}: ln PPL grows by more than {CLOSE} nats.")
    return " ".join(said)


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
