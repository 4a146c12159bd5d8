"""How long a run will take: from how long the stages of the newest runs of its model took here. No streamlit."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from db.rows import FINISHED
from db.store import Store
from fp8dash.choose.presets import recipe_from
from fp8dash.choose.records import PREPARING
from fp8dash.choose.request import Request

NEWEST = 20  # runs that are looked at
AMOUNTS: dict[str, Callable[[Request], float]] = {  # what a stage's time grows with; others: fixed
    "perplexity": lambda asked: asked.windows.tokens,
    "needle": lambda asked: sum(asked.needles.lengths) * len(asked.needles.depths) * asked.needles.repeats,
    "decode": lambda asked: len(asked.decode.batches),
}


@dataclass(frozen=True, slots=True)
class Pace:
    """Median seconds that each stage takes per unit of its amount, if it was ever timed."""

    each: dict[str, float]

    def seconds(self, request: Request) -> float | None:
        """Of one run; None if a stage of it was never timed, or its products are simulated, which takes far longer.

        >>> pace = Pace({"load": 1.0, "baseline": 2.0, "quantize": 1.0, "perplexity": 0.001})
        >>> pace.seconds(Request.of(windows=4, window_length=500, measures=("perplexity",)))
        6.0
        >>> pace.seconds(Request())
        """
        stages = (*PREPARING, *request.measures)
        if recipe_from(request.recipe).accumulator or not all(stage in self.each for stage in stages):
            return None
        return sum(self.each[stage] * _amount(stage, request) for stage in stages)

    def together(self, requests: Sequence[Request]) -> float | None:
        """Of one worker for all of them, one after another."""
        each = [self.seconds(request) for request in requests]
        return sum(one for one in each if one) if each and None not in each else None


def pace_of(store: Store, model: str, backend: str, devices: Sequence[str]) -> Pace:
    """The pace of a model's newest runs through a backend, on these devices; on any, where none is named."""
    runs = {
        run.id: run
        for run in store.runs(states=(FINISHED,), model=model, limit=NEWEST)
        if run.request.backend == backend and (run.device in devices or not devices)
    }
    took: dict[str, list[float]] = defaultdict(list)
    for run_id, stages in store.stages(list(runs)).items():
        for stage in stages:
            took[stage.stage].append(stage.seconds / _amount(stage.stage, runs[run_id].request))
    return Pace({stage: median(seconds) for stage, seconds in took.items()})


def _amount(stage: str, request: Request) -> float:
    return max(1.0, AMOUNTS[stage](request)) if stage in AMOUNTS else 1.0
