"""The comparison's answer, in words with numbers. Plain values in, Markdown out; no streamlit."""

from collections.abc import Callable, Sequence

from fp8dash.choose.recipe import Recipe, parse_recipe
from fp8dash.errors import InvalidChoice
from fp8dash.report.comparison import Comparison, Standing, Verdict
from fp8dash.report.contest import TOO_FEW, needed
from fp8dash.report.numbers import shown, three
from fp8dash.ui.words import listed, plain

LEADS = {  # metric: what one run does, what several do, the number
    "kld": ("loses least to BF16", "lose least to BF16", "KLD {} nats"),
    "ln_ppl_diff": ("raises ln PPL least", "raise ln PPL least", "{} nats"),
    "gemm_speedup": ("has the fastest GEMMs", "have the fastest GEMMs", "{}× BF16"),
    "model_bytes": ("is the smallest", "are the smallest", "{} MB"),
    "needle": ("finds the most needles", "find the most needles", "share {}"),
}
PARTS: dict[str, Callable[[Recipe], str]] = {  # what two recipes may differ in, and how each writes it
    "weights": lambda recipe: recipe.weights.text if recipe.weights else "BF16",
    "activations": lambda recipe: recipe.activations.text if recipe.activations else "BF16",
    "KV cache": lambda recipe: recipe.kv.text if recipe.kv else "BF16",
    "attention": lambda recipe: recipe.attention.text if recipe.attention else "BF16",
    "accumulator": lambda recipe: recipe.accumulator.name if recipe.accumulator else "float32",
    "overrides": lambda recipe: ", ".join(override.text for override in recipe.overrides) or "none",
    "also cast": lambda recipe: ",".join(recipe.also) or "nothing",
    "left out": lambda recipe: ",".join(recipe.skip) or "nothing",
}


def verdict(compared: Comparison, contest: Comparison | None, metrics: Sequence[str]) -> str:
    """Who leads in these metrics; `contest` leaves the baseline out, which always wins against itself."""
    judged = contest or compared
    rows = [next(v for v in judged.verdicts if v.metric.name == name) for name in metrics]
    sentences: list[str] = []
    before: tuple[int, ...] = ()
    for row in rows:
        if row.open:
            sentences.append(f"{row.metric.title}: {TOO_FEW}{f', {needed(row.more)}' if row.more else ''}")
        elif not row.best:
            continue
        elif row.best == before:  # the same runs again: no need to name them twice
            sentences[-1] += f" and {_verb(row)}"
        elif _all_tie(row):
            sentences.append(f"{row.metric.title} ties")
        else:
            sentences.append(f"{listed([plain(judged.standings[i].name) for i in row.best])} {_verb(row)}")
        before = () if row.open or _all_tie(row) else row.best
    return "; ".join(sentences)


def loss(row: Standing) -> str:
    """What a single recipe loses against the baseline; empty if that was not measured."""
    return f"{plain(row.name)} loses {three(row.kld)} nats to BF16" if row.kld is not None else ""


def _all_tie(row: Verdict) -> bool:
    return len(row.best) == len([value for value in row.values if value is not None]) > 1


def _verb(row: Verdict) -> str:
    one, several, unit = LEADS[row.metric.name]
    value = unit.format(shown(row.metric, row.values[row.best[0]]))
    return f"{several if len(row.best) > 1 else one} ({value}{', tied' if len(row.best) > 1 else ''})"


def difference(a: Standing, b: Standing) -> str:
    """What differs between two recipes, part by part."""
    try:
        first, second = parse_recipe(a.recipe), parse_recipe(b.recipe)
    except InvalidChoice:  # written by another version
        return "a recipe that this version cannot read"
    parts = [
        f"{what} {plain(write(second))}, not {plain(write(first))}"
        for what, write in PARTS.items()
        if write(first) != write(second)
    ]
    return "; ".join(parts) or "the same recipe"
