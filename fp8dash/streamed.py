"""Runs whose model is larger than memory: it passes block by block under all recipes that wait for the same pass.

What the pass gives of each recipe is kept, so that the run of another recipe of the study finds it and reads no weight.
The numbers are those of the model loaded whole, bit for bit.
"""

import json
import tempfile
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fp8dash.bench import Bench, Passed, baseline_file_of
from fp8dash.choose.recipe import Recipe, parse_recipe
from fp8dash.choose.records import BASELINE, EMULATED, Layer, Progress, Row, StageResult
from fp8dash.errors import InvalidChoice, ModelError
from fp8dash.measure.baseline import Baseline, Writing, read_baseline
from fp8dash.measure.kept import keep, kept, name_of
from fp8dash.measure.perplexity import Scoring
from fp8dash.measure.weight_error import METHOD, backend_of, weight_error
from fp8dash.model.streaming.layout import why_not_streamed
from fp8dash.model.streaming.states import WIDENED, Heads, RecipeSwap, Streamed, last_hidden_states
from fp8dash.model.swap import Swap

MEASURED = frozenset({"perplexity"})  # what a pass block by block can measure
FORMAT = f"rows of a pass block by block, v1; {METHOD}"
MOST_BESIDE = 15  # recipes that share a pass with the first


@dataclass(slots=True)
class _Gathered:
    """What comes of one recipe while a pass goes on."""

    recipe: Recipe
    swaps: list[Swap] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    scoring: Scoring | None = None

    def finish(self) -> None:
        """Adds what all windows together give, and frees what their comparison held."""
        self.rows += self.scoring.measurements() if self.scoring else ()
        self.scoring = None


def passed(bench: Bench, beside: Sequence[str]) -> Iterator[Progress | Passed]:
    """Progress, then what the pass gave of the run's recipe: kept by an earlier run's pass, or made now.

    `beside` are recipes of runs that wait for the same pass: they are measured with it.
    """
    recipe = bench.recipe
    if (own := _kept(bench, recipe)) is not None:
        yield own
        return
    others = [one for text in beside if (one := _readable(text)) and one != recipe and not why_not_streamed(one)]
    missing = [one for one in dict.fromkeys(others) if not one.is_baseline and _kept(bench, one) is None]
    yield from _pass(bench, [recipe, *missing[:MOST_BESIDE]])
    own = _kept(bench, recipe)
    if own is None:
        raise ModelError(
            f"What was measured cannot be read back from {bench.cache}: check the disk and its free space."
        )
    yield own


def forget_pass(bench: Bench) -> None:
    """Removes what was kept of the run's recipe: its numbers are recorded now."""
    _file(bench, bench.recipe).unlink(missing_ok=True)


def check_streamed(bench: Bench) -> None:
    """Raises InvalidChoice where the run asks for what needs the whole model at once."""
    if why := why_not_streamed(bench.recipe):
        raise InvalidChoice(f"“{bench.recipe.text}” cannot be measured block by block: {why}. Load the model whole.")
    if others := [name for name in bench.request.measures if name not in MEASURED]:
        raise InvalidChoice(
            f"The model passes block by block, which measures perplexity alone: leave {', '.join(others)} out, or load "
            "it whole where there is more memory."
        )
    if bench.request.backend == "native":
        raise InvalidChoice("The backend native is refused block by block: its casts are emulated; choose auto.")


def _readable(text: str) -> Recipe | None:
    """A recipe, or None for one that another version wrote."""
    try:
        return parse_recipe(text)
    except InvalidChoice:
        return None


@torch.no_grad()
def _pass(bench: Bench, recipes: Sequence[Recipe]) -> Iterator[Progress]:
    """One pass under the uncast weights and these recipes; keeps the baseline and what each recipe gave."""
    baseline = read_baseline(baseline_file_of(bench))
    gathered = [_Gathered(recipe) for recipe in dict.fromkeys((Recipe(), *recipes))]
    bench.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pass-", dir=bench.cache) as scratch:
        states = last_hidden_states(
            bench.loaded.folder,
            [one.recipe for one in gathered],
            bench.windows.ids,
            bench.device,
            bench.where,
            backend=EMULATED,
            scratch=Path(scratch),
            stage="baseline",
            widened=baseline is None,
        )
        heads = yield from _walk(bench, gathered, baseline, states)
    for one in gathered:
        if one.recipe in recipes:
            _keep(bench, one, heads)


def _walk(
    bench: Bench, gathered: Sequence[_Gathered], baseline: Baseline | None, states: Iterator[Streamed]
) -> Generator[Progress, None, Heads]:
    """Sorts what comes of a pass to the recipes' scores and, where none is kept, the baseline; returns the heads."""
    heads, writing = Heads((), 1.0), None
    for item in states:
        if isinstance(item, Progress):
            yield item
        elif isinstance(item, RecipeSwap):
            gathered[item.recipe].swaps.append(item.swap)
        elif isinstance(item, Heads):
            heads = item
            writing = Writing(heads.heads[0], bench.windows, baseline_file_of(bench)) if baseline is None else None
        elif item.recipe == WIDENED and writing:
            writing.widened(item.window, item.states[:-1])
        elif item.recipe == 0:
            if writing:
                writing.states(item.window, item.states[:-1])
        else:
            baseline, writing = _ready(baseline, writing), None
            one = gathered[item.recipe]
            scoring = one.scoring = one.scoring or _scoring(bench, heads, item.recipe, baseline)
            if not scoring.is_over:
                one.rows.append(scoring.score(item.window, item.states[:-1]))
            if item.window == len(bench.windows) - 1:
                one.finish()
    baseline = _ready(baseline, writing)
    scoring = gathered[0].scoring = _scoring(bench, heads, 0, baseline)
    for window in range(len(bench.windows)):
        if not scoring.is_over:
            gathered[0].rows.append(scoring.score_rows(window, baseline.window(window, bench.where)[0]))
    gathered[0].finish()
    return heads


def _ready(baseline: Baseline | None, writing: Writing | None) -> Baseline:
    """The baseline that was kept, or that this pass wrote; raises ModelError where it cannot be read back."""
    if writing:
        return writing.read_back()
    assert baseline is not None
    return baseline


def _scoring(bench: Bench, heads: Heads, recipe: int, baseline: Baseline) -> Scoring:
    backend = EMULATED if recipe else BASELINE
    given = (bench.windows, baseline, backend, bench.request.seed, bench.request.windows.until)
    return Scoring(heads.heads[recipe], heads.heads[0], *given)


def _keep(bench: Bench, one: _Gathered, heads: Heads) -> None:
    """Keeps the rows of a recipe's stages on the disk."""
    quantized = [row for row in weight_error(one.swaps, len(one.swaps), heads.active) if not isinstance(row, Progress)]
    layers = [row for row in quantized if isinstance(row, Layer)]
    backend = backend_of(layers, *((EMULATED,) if one.recipe.casts_attention else ()))
    stages = (
        StageResult("quantize", 0.0, tuple(quantized), {"backend": backend}),
        StageResult("perplexity", 0.0, tuple(one.rows)),
    )
    keep(json.dumps([stage.to_json() for stage in stages]).encode(), _file(bench, one.recipe))


def _kept(bench: Bench, recipe: Recipe) -> Passed | None:
    """What an earlier pass gave of a recipe; None where nothing was kept."""
    payload = kept(_file(bench, recipe))
    if payload is None:
        return None
    quantized, scored = (StageResult.from_json(stage) for stage in json.loads(payload))
    return Passed(quantized.rows, scored.rows, quantized.facts["backend"])


def _file(bench: Bench, recipe: Recipe) -> Path:
    """Where a recipe's rows are kept: one name for all that affects them."""
    request = bench.request
    read = (bench.loaded.content_hash, bench.corpus.content_hash, bench.windows.content_hash, bench.reading.method)
    asked = (recipe.text, request.seed, request.windows.until)
    made = (bench.device.label, torch.__version__, torch.get_num_threads())
    return bench.cache / "passes" / f"{name_of(FORMAT, *read, *asked, *made)}.json"
