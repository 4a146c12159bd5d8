"""Measured decoding beside its prediction: the runs of a planned model on an accelerator. No streamlit.

A run is of the planned model where the Linears it recorded are the plan's, shape by shape and in number. A mixture of
experts is matched by its name alone, since its experts' weights are not recorded as Linears.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath

from db.rows import Run
from db.store import Store
from fp8dash.choose.architecture import Architecture
from fp8dash.choose.recipe import Recipe, parse_recipe
from fp8dash.choose.records import BASELINE, NATIVE
from fp8dash.errors import InvalidChoice
from fp8dash.predict.accelerators import DEVICES, Accelerator
from fp8dash.predict.roofline import Plan
from fp8dash.report.decoding import Decoding, Speed, decodings

BACKENDS = (BASELINE, NATIVE)  # whose times mean something
CONTEXT = 2176  # tokens that each request holds on average: the planner's own, a prompt of 2,048 and half of 256
NEWEST = 200  # timed runs that are looked through


@dataclass(frozen=True, slots=True)
class Point:
    """One batch that a run decoded, and the most that its plan allows, in output tokens per second."""

    run: Run
    speed: Speed
    bound: float | None  # None where the recipe cannot be planned
    way: str

    @property
    def share(self) -> float | None:
        """The share of the bound that was reached."""
        return self.speed.tokens_per_s / self.bound if self.bound else None


def measured_points(store: Store, model: Architecture, hub: str, accelerator: Accelerator) -> list[Point]:
    """The newest timed run of each recipe of a model on one such accelerator: by batch, the fastest first.

    `hub` is the model's name on the Hub, or empty.
    """
    devices = [device for device, name in DEVICES.items() if name == accelerator.name]
    runs = store.decoded(devices, BACKENDS, limit=NEWEST)
    newest: dict[tuple[str, str], Run] = {}
    for run in _of_model(store, runs, model, hub):
        newest.setdefault((run.model_hash or run.model, run.recipe), run)
    kept = {run.id: run for run in newest.values()}
    points = [
        Point(kept[one.run], speed, bound(one, speed, model, accelerator), one.way)
        for one in decodings(store, list(kept.values()))
        for speed in one.speeds
    ]
    return sorted(points, key=lambda point: (point.speed.batch, -point.speed.tokens_per_s))


def predicted_times(
    model: Architecture, recipes: Sequence[str], accelerator: Accelerator, batch: int
) -> dict[str, float]:
    """How many times faster than BF16 each recipe decodes, by its text: however many devices share the work."""
    speedups = {}
    base = Plan(model, Recipe(), accelerator).decode_s(batch, CONTEXT)
    for text in recipes:
        with suppress(InvalidChoice):  # written by another version
            speedups[text] = base / Plan(model, parse_recipe(text), accelerator).decode_s(batch, CONTEXT)
    return speedups


def by_name(model: Architecture) -> bool:
    """True if only its name identifies a run's model."""
    return any(linear.copies > 1 for linear in model.linears)


def bound(one: Decoding, speed: Speed, model: Architecture, accelerator: Accelerator) -> float | None:
    """Output tokens per second that the roofline allows one such accelerator at this batch and context.

    None where the tokens are not known, or the recipe is of another version.
    """
    try:
        recipe = parse_recipe(one.recipe)
    except InvalidChoice:  # written by another version
        return None
    if speed.prompt is None or speed.output is None:
        return None
    return speed.batch / Plan(model, recipe, accelerator, reach=1.0).decode_s(
        speed.batch, speed.prompt + speed.output / 2
    )


def _of_model(store: Store, runs: list[Run], model: Architecture, hub: str) -> Iterator[Run]:
    if by_name(model):
        names = {model.name, hub, PurePath(hub).name} - {""}
        yield from (run for run in runs if run.model in names or PurePath(run.model).name in names)
        return
    examples = {run.model_hash or run.model: run.id for run in runs}
    shapes, wanted = store.linear_shapes(list(examples.values())), model.shapes()
    yield from (run for run in runs if shapes[examples[run.model_hash or run.model]] == wanted)
