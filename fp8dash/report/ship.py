"""What to ship: the fastest of a model's recipes within a quality budget on a target, and why each other one lost.

Values only: the sentences are in `ship_words.py`. Speeds are those measured on the target, or, for an accelerator, what
the planner predicts of decoding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from db.board import Group, Standing
from db.rows import FINISHED
from db.store import Store
from fp8dash.choose.catalog import architecture_of
from fp8dash.choose.records import BASELINE
from fp8dash.errors import InvalidChoice
from fp8dash.predict.accelerators import ACCELERATORS, Accelerator
from fp8dash.report.contest import CLOSE, Contest, contest, is_measured
from fp8dash.report.planned import predicted_times
from fp8dash.stats import SPEED_TIE

BUDGETED = ("kld", "ln_ppl_diff")  # metrics that a budget can be of
MOST_TIES = 30  # recipes compared with the best, window by window: each is a bootstrap

Basis = Literal["measured", "predicted"]
Reason = Literal[
    "partly cast", "not measured", "over budget", "nothing fits", "no speed", "slower", "larger", "loses more"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class QualityBudget:
    """How much quality may be lost: one metric and its limit, in nats."""

    metric: str = "kld"
    limit: float = CLOSE


@dataclass(frozen=True, slots=True)
class Target:
    """Where a recipe will be served: a device that was measured, or an accelerator and the batch to predict for."""

    name: str
    accelerator: Accelerator | None = None
    batch: int = 0


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """How fast a recipe is on the target, as a multiple of BF16: its GEMMs as measured, or decoding as predicted."""

    times: float
    basis: Basis
    batch: int = 0  # of the prediction


@dataclass(frozen=True, slots=True)
class Loser:
    """A recipe that is not shipped, and why."""

    row: Standing
    reason: Reason
    is_tied: bool = False  # its KLD cannot be told from that of the recipe to ship


@dataclass(frozen=True, slots=True)
class Decision:
    """What to ship, or nothing that fits; and why each of the others lost."""

    budget: QualityBudget
    best: Standing | None
    lost: tuple[Loser, ...]
    speeds: Mapping[str, SpeedUp]  # by run, where known
    by: Literal["speed", "size"]  # what decided within the budget: size where none is faster than BF16
    basis: Basis | None  # of the speeds within the budget; None where none is known

    @property
    def speed(self) -> SpeedUp | None:
        """Of the recipe to ship, where it is known."""
        return self.speeds.get(self.best.run) if self.best else None


@dataclass(frozen=True, slots=True)
class Board:
    """Runs that may be ranked together, who leads among them, and what to ship."""

    group: Group
    rows: tuple[Standing, ...]  # the newest of each recipe, the baseline among them
    contest: Contest
    decision: Decision


def parse_quality_budget(text: str) -> QualityBudget:
    """A budget from its text; raises InvalidChoice.

    >>> parse_quality_budget("kld=0.02")
    QualityBudget(metric='kld', limit=0.02)
    """
    name, _, number = text.partition("=")
    try:
        limit = float(number)
    except ValueError:
        limit = -1.0
    if name not in BUDGETED or not 0.0 <= limit < float("inf"):
        raise InvalidChoice(f"“{text}” is not a quality budget: give kld=0.05 or ln_ppl_diff=0.02, in nats.")
    return QualityBudget(name, limit)


def target_of(name: str, batch: int, devices: Sequence[str]) -> Target:
    """The target of a name: a device that was measured, else an accelerator to predict; raises InvalidChoice."""
    if name in devices:
        return Target(name)
    if name in ACCELERATORS:
        return Target(name, ACCELERATORS[name], batch)
    raise InvalidChoice(
        f"“{name}” is not a target: nothing was measured on it, and no accelerator has that name. Choose one of "
        f"{', '.join(dict.fromkeys([*devices, *ACCELERATORS]))}."
    )


def board(store: Store, group: Group, mates: Sequence[Group], budget: QualityBudget, target: Target) -> Board:
    """The newest run of each recipe of a group, judged, and the decision; `mates` are the model's other groups."""
    rows = [row for row in store.newest_by_recipe([group.key]) if row.backend in (group.backend, BASELINE)]
    ranked = candidates(rows)[:MOST_TIES]
    judged = contest(ranked, store.windows([row.run for row in ranked]))
    return Board(group, tuple(rows), judged, decide(rows, budget, speeds(store, group, rows, mates, target), judged))


def candidates(rows: Sequence[Standing]) -> list[Standing]:
    """The rows that may be shipped: finished, not the baseline, cast as their recipe says, with a divergence."""
    kept = [row for row in rows if _takes_part(row) and not row.is_partly_cast and is_measured(row, "kld")]
    return sorted(kept, key=lambda row: (row.divergence, row.kld or 0.0))


def _takes_part(row: Standing) -> bool:
    return row.state == FINISHED and not row.is_baseline


def decide(
    rows: Sequence[Standing], budget: QualityBudget, speeds: Mapping[str, SpeedUp], judged: Contest | None = None
) -> Decision:
    """The fastest within the budget, or the smallest where none is known to be faster than BF16; within 5 % of it, the
    lowest KLD. `speeds` are by run, on the target."""
    ranked = candidates(rows)
    within = [row for row in ranked if _spent(row, budget) <= budget.limit]
    timed = [speeds[row.run] for row in within if row.run in speeds]
    gains = max((speed.times for speed in timed), default=0.0) > 1 + SPEED_TIE
    decisive = speeds if gains else {}
    best = min(_nearest(within, decisive), key=lambda row: (row.divergence, row.kld or 0.0), default=None)
    equals = _equals(judged)
    lost = [
        Loser(row, _reason(row, best, budget, decisive), best is not None and {row.run, best.run} <= equals)
        for row in ranked
        if row is not best
    ]
    lost += [Loser(row, "partly cast") for row in rows if _takes_part(row) and row.is_partly_cast]
    return Decision(
        budget, best, tuple(lost), dict(speeds), "speed" if gains else "size", timed[0].basis if timed else None
    )


def _equals(judged: Contest | None) -> set[str]:
    """The leader and all that the windows cannot tell from it; empty where there are none."""
    if judged is None or judged.leader is None:
        return set()
    rivals = {rival.row.run for rival in judged.rivals if rival.outcome != "apart"}
    return {judged.leader.run, *rivals} if rivals else set()


def _nearest(rows: Sequence[Standing], speeds: Mapping[str, SpeedUp]) -> list[Standing]:
    """The fastest and what is within 5 % of it; where nothing is timed, the same by size."""
    timed = [row for row in rows if row.run in speeds]
    if timed:
        top = max(speeds[row.run].times for row in timed)
        return [row for row in timed if speeds[row.run].times >= top / (1 + SPEED_TIE)]
    sized = [(row, row.model_bytes) for row in rows if row.model_bytes is not None]
    if not sized:
        return list(rows)
    least = min(size for _, size in sized)
    return [row for row, size in sized if size <= least * (1 + SPEED_TIE)]


def _spent(row: Standing, budget: QualityBudget) -> float:
    value: float | None = getattr(row, budget.metric)
    return float("inf") if value is None else value


def _reason(row: Standing, best: Standing | None, budget: QualityBudget, speeds: Mapping[str, SpeedUp]) -> Reason:
    if not is_measured(row, budget.metric):
        return "not measured"
    if _spent(row, budget) > budget.limit:
        return "over budget"
    if best is None:
        return "nothing fits"
    own, other = speeds.get(row.run), speeds.get(best.run)
    if other and not own:
        return "no speed"
    if own and other and own.times * (1 + SPEED_TIE) < other.times:
        return "slower"
    sizes = (row.model_bytes, best.model_bytes)
    if not other and None not in sizes and (sizes[0] or 0.0) > (sizes[1] or 0.0) * (1 + SPEED_TIE):
        return "larger"
    return "loses more"


def speeds(
    store: Store, group: Group, rows: Sequence[Standing], mates: Sequence[Group], target: Target
) -> dict[str, SpeedUp]:
    """How fast each row's recipe is on the target: as measured there, by this run or by one of the same weights, or as
    predicted."""
    if target.accelerator:
        return _predicted(group.model, rows, target)
    same = [mate for mate in mates if mate.device == target.name and _weights(mate) == _weights(group)]
    keys = {mate.key for mate in same} - {row.group for row in rows}
    timed = [row for row in store.newest_by_recipe(list(keys)) if row.gemm_speedup is not None] if keys else []
    elsewhere = {row.recipe: row.gemm_speedup for row in timed}
    times = {row.run: row.gemm_speedup if row.device == target.name else elsewhere.get(row.recipe) for row in rows}
    return {run: SpeedUp(value, "measured") for run, value in times.items() if value is not None}


def _weights(group: Group) -> str:
    return group.model_hash or group.model


def _predicted(model: str, rows: Sequence[Standing], target: Target) -> dict[str, SpeedUp]:
    """By run; none for a model whose architecture is not known here."""
    architecture = architecture_of(model)
    if architecture is None or target.accelerator is None:
        return {}
    times = predicted_times(architecture, [row.recipe for row in rows], target.accelerator, target.batch)
    return {row.run: SpeedUp(times[row.recipe], "predicted", target.batch) for row in rows if row.recipe in times}


def shipped(store: Store, model: str, budget: QualityBudget, target: str, batch: int) -> tuple[Board, Target]:
    """The decision for a model from the newest of its largest groups; raises InvalidChoice where it has none."""
    mates = [group for group in store.groups() if group.backend not in ("", BASELINE) and group.model == model]
    if not mates:
        raise InvalidChoice(
            f"No finished run of “{model}” is stored: queue some with `fp8dash submit --model {model}`."
        )
    here = target_of(target or str(mates[0].device), batch, [str(mate.device) for mate in mates])
    on_target = [mate for mate in mates if mate.device == here.name] or mates
    return board(store, on_target[0], mates, budget, here), here
