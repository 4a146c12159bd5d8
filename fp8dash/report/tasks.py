"""Tasks of lm-eval over several runs: each metric's values, and the differences document by document. No streamlit.

Differences are taken over the same documents only: runs whose task, prompts, shots, limit or lm-eval differ are shown
but not compared, with what differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from db.store import Store
from fp8dash.choose.measurements import TaskNumber
from fp8dash.choose.records import Better, Measurement, TaskItem
from fp8dash.errors import InvalidChoice
from fp8dash.stats import Difference, hits_difference, paired_difference

TaskNumbers = dict[tuple[str, TaskNumber], Measurement]  # of one run, by task and what the number is


@dataclass(frozen=True, slots=True)
class TaskScore:
    """One run's number for one metric of one task."""

    value: float | None
    stderr: float | None
    method: str
    note: str


@dataclass(frozen=True, slots=True)
class TaskLine:
    """One metric of one task over the runs. Where a difference was not taken it is None, and `unlike` says why."""

    task: str
    metric: str
    better: Better
    unit: str  # of the differences: "nats" where the number itself is the exponential of a mean
    scores: tuple[TaskScore | None, ...]
    differences: tuple[Difference | None, ...]
    unlike: tuple[str, ...]


def task_lines(store: Store, run_ids: Sequence[str], *, reference: int = 0) -> list[TaskLine]:
    """A line for each task metric that any of the runs has; differences are run minus reference.

    Raises InvalidChoice where the reference is not one of the runs.
    """
    if not 0 <= reference < len(run_ids):
        raise InvalidChoice(f"There is no run number {reference + 1} to compare with: choose one of {len(run_ids)}.")
    measured, items = store.measurements(run_ids), store.task_items(run_ids)
    numbers = [_by_task(measured[run]) for run in run_ids]
    sets = [_by_metric(items[run]) for run in run_ids]
    keys = dict.fromkeys((task, number.metric) for of_run in numbers for task, number in of_run if not number.is_stderr)
    return [_line(task, metric, numbers, sets, reference) for task, metric in keys]


def _by_task(rows: Sequence[Measurement]) -> TaskNumbers:
    numbers = ((row, TaskNumber.read(row.name)) for row in rows)
    return {(row.label, number): row for row, number in numbers if number}


def _by_metric(items: Sequence[TaskItem]) -> dict[tuple[str, str], list[TaskItem]]:
    by_metric: dict[tuple[str, str], list[TaskItem]] = {}
    for item in items:
        by_metric.setdefault((item.task, item.metric), []).append(item)
    return by_metric


def _line(
    task: str,
    metric: str,
    numbers: Sequence[TaskNumbers],
    sets: Sequence[dict[tuple[str, str], list[TaskItem]]],
    reference: int,
) -> TaskLine:
    scores = [_score(of_run, task, metric) for of_run in numbers]
    documents = [of_run.get((task, metric), []) for of_run in sets]
    basis, differences, unlike = scores[reference], list[Difference | None](), list[str]()
    for index, score in enumerate(scores):
        compared = index != reference and score is not None and basis is not None
        why = (
            _unlike(task, score, basis, documents[index], documents[reference]) if compared and score and basis else ""
        )
        differences.append(None if why or not compared else _difference(documents[index], documents[reference]))
        unlike += [why] if why else []
    key = (task, TaskNumber(metric))
    first = next(of_run[key] for of_run in numbers if key in of_run)
    unit = next((of[0].unit for of in documents if of), "") or first.unit
    return TaskLine(task, metric, first.better, unit, tuple(scores), tuple(differences), tuple(dict.fromkeys(unlike)))


def _score(numbers: TaskNumbers, task: str, metric: str) -> TaskScore | None:
    score, stderr = numbers.get((task, TaskNumber(metric))), numbers.get((task, TaskNumber(metric, is_stderr=True)))
    return TaskScore(score.value, stderr.value if stderr else None, score.method, score.note) if score else None


def _unlike(task: str, a: TaskScore, b: TaskScore, left: Sequence[TaskItem], right: Sequence[TaskItem]) -> str:
    """Why two runs' scores of a task are not compared, or nothing."""
    if a.method != b.method:
        return f"{task} is not compared: “{b.method}” and “{a.method}” are different methods."
    if len(left) != len(right):
        return f"{task} is not compared: one run scored {len(right):,} documents, the other {len(left):,}."
    if not left:
        return f"{task} is not compared: lm-eval stores no per-document score whose mean is this number."
    if apart := sum(x.digest != y.digest for x, y in zip(left, right, strict=True)):
        return f"{task} is not compared: {apart:,} of {len(left):,} documents, prompts or targets differ."
    return ""


def _difference(left: Sequence[TaskItem], right: Sequence[TaskItem]) -> Difference:
    """Left minus right: right and wrong answers with the interval of McNemar's test, all else with the bootstrap's."""
    a, b, weights = [x.value for x in left], [x.value for x in right], [x.weight for x in left]
    if {*a, *b} <= {0.0, 1.0} and len(set(weights)) == 1:
        return hits_difference([x == 1.0 for x in a], [x == 1.0 for x in b])
    return paired_difference(a, b, weights=weights, neighbours=0)
