"""Standings and comparisons from stored rows, and their CSV, Parquet, Markdown and JSON. No torch, no streamlit.

Numbers are ranked only among runs that share a `group`: model and corpus by their contents, windows, method and device;
and a backend. A baseline belongs to both backends, since nothing in it is cast.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from db.board import Choice
from db.board import Standing as Standing
from db.rows import FINISHED, STATES
from db.store import Store
from fp8dash.choose.metrics import METRICS, Metric
from fp8dash.choose.records import BASELINE, LOWER, NEITHER, NeedleCell, Window
from fp8dash.errors import InvalidChoice
from fp8dash.report.contest import BY_WINDOW, contest, is_measured, read_alike
from fp8dash.stats import SPEED_TIE, Difference, hits_tie

PROVENANCE: dict[str, Callable[[dict[str, Any]], Any]] = {  # of a run's facts: what affects its numbers
    "versions of fp8dash": lambda facts: facts.get("versions", {}).get("fp8dash"),
    "versions of torch": lambda facts: facts.get("versions", {}).get("torch"),
    "versions of transformers": lambda facts: facts.get("versions", {}).get("transformers"),
    "commits of fp8dash": lambda facts: facts.get("commit", "")[:12],
    "drivers": lambda facts: facts.get("driver"),
    "numbers of threads": lambda facts: facts.get("threads"),
    "seeds": lambda facts: facts.get("seed"),
}
NOT_FOR_ALL = "not measured for every run"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One metric over the compared runs: which is best, which tie, and which the windows cannot tell from it."""

    metric: Metric
    values: tuple[float | None, ...]
    best: tuple[int, ...]  # indices; more than one: tied. Empty where no run leads, and `why` gives the reason
    open: tuple[int, ...] = ()  # too few windows to tell them from the best
    more: int | None = None  # windows that would settle ties and open comparisons
    why: str = ""
    behind: tuple[Difference | None, ...] = ()  # each run minus the best, at the level of its verdict; None: not judged

    @property
    def is_tied(self) -> bool:
        """True where several runs are best."""
        return len(self.best) > 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two to six runs side by side, and every difference that limits the comparison."""

    standings: tuple[Standing, ...]
    verdicts: tuple[Verdict, ...]
    unlike: tuple[str, ...]  # sentences: why some numbers may not be compared


def standings(store: Store, *, states: Sequence[str] = (FINISHED,), ids: Sequence[str] | None = None) -> list[Standing]:
    """All rows, or those of some runs: by group, within a group by KLD."""
    rows = store.standings(Choice(states=tuple(states), ids=None if ids is None else tuple(ids)))
    return sorted(rows, key=lambda row: row.group)


def comparison(store: Store, run_ids: Sequence[str]) -> Comparison:
    """Two to six runs compared metric by metric; raises InvalidChoice for fewer, more or unknown ones."""
    if not 2 <= len(run_ids) <= 6:
        raise InvalidChoice(f"{len(run_ids)} runs are chosen: choose two to six to compare.")
    by_run = {row.run: row for row in standings(store, states=STATES, ids=run_ids)}
    if missing := [run_id for run_id in run_ids if run_id not in by_run]:
        raise InvalidChoice(
            f"There is no run {', '.join(missing)}: it may have been deleted, or the link is truncated."
        )
    rows = tuple(by_run[run_id] for run_id in run_ids)
    windows, needles = store.windows(run_ids), store.needle_cells(run_ids)
    verdicts = [_verdict(metric, rows, windows, needles) for metric in METRICS.values()]
    facts = {run.id: run.facts for run in store.runs(ids=run_ids)}
    return Comparison(rows, tuple(verdicts), unlike(rows, [facts[run_id] for run_id in run_ids]))


def unlike(rows: Sequence[Standing], facts: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """What differs in what the runs measured and in what made them, a sentence each; `facts` are the runs' own."""
    return (*_unlike(rows), *_made_unlike(facts))


def _verdict(
    metric: Metric,
    rows: Sequence[Standing],
    windows: Mapping[str, Sequence[Window]],
    needles: Mapping[str, Sequence[NeedleCell]],
) -> Verdict:
    values = tuple(getattr(row, metric.name) for row in rows)
    measured = [i for i in range(len(rows)) if is_measured(rows[i], metric.name)]
    if why := _not_ranked(metric, [rows[i] for i in measured], len(rows), needles):
        return Verdict(metric, values, (), why=why)
    if metric.name in BY_WINDOW:
        return _by_window(metric, rows, values, measured, windows)
    sign = 1 if metric.better == LOWER else -1
    lead = min(measured, key=lambda i: sign * values[i])
    best = [i for i in measured if i == lead or _tied(metric, rows[lead], rows[i], needles)]
    return Verdict(metric, values, tuple(best))


def _by_window(
    metric: Metric,
    rows: Sequence[Standing],
    values: tuple[float | None, ...],
    measured: Sequence[int],
    windows: Mapping[str, Sequence[Window]],
) -> Verdict:
    """The verdict of the judge of all boards."""
    judged = contest([rows[i] for i in measured], windows, metric.name)
    lead = judged.leader.run if judged.leader else ""
    outcomes = {row.run: judged.outcome_of(row.run) for row in rows}
    behind = {rival.row.run: None if rival.at_floor else rival.difference for rival in judged.rivals}
    best = tuple(i for i in measured if rows[i].run == lead or outcomes[rows[i].run] == "tied")
    undecided = tuple(i for i in measured if outcomes[rows[i].run] == "open")
    return Verdict(metric, values, best, undecided, judged.more, behind=tuple(behind.get(row.run) for row in rows))


def _not_ranked(
    metric: Metric, rows: Sequence[Standing], count: int, needles: Mapping[str, Sequence[NeedleCell]]
) -> str:
    """Why no row leads in a metric among those that have it; empty where one does."""
    if metric.better == NEITHER or len(rows) < 2:
        return "" if len(rows) == count else NOT_FOR_ALL
    if len({row.model_content for row in rows}) > 1:
        return "different models"
    if metric.name in BY_WINDOW and not all(read_alike(rows[0], row) for row in rows):
        return "different texts or windows"
    if metric.name == "needle" and len({frozenset(c.key for c in needles[row.run]) for row in rows}) > 1:
        return "different needles"
    return ""


def _tied(metric: Metric, a: Standing, b: Standing, needles: Mapping[str, Sequence[NeedleCell]]) -> bool:
    left, right = getattr(a, metric.name), getattr(b, metric.name)
    if left == right:
        return True
    if metric.name == "needle":
        hits = [{c.key: c.score >= 1 for c in needles[row.run]} for row in (a, b)]
        shared = sorted(set(hits[0]) & set(hits[1]))
        return bool(shared) and hits_tie([hits[0][key] for key in shared], [hits[1][key] for key in shared])
    return metric.name == "gemm_speedup" and abs(left - right) <= SPEED_TIE * max(left, right)


def _unlike(rows: Sequence[Standing]) -> tuple[str, ...]:
    sentences = [*_contents(rows, "models", "model"), *_contents(rows, "corpora", "corpus")]
    for field, what in (("device", "devices"), ("method", "methods")):
        if len(names := {str(getattr(row, field)) for row in rows}) > 1:
            sentences.append(f"Different {what}: {', '.join(sorted(names))}.")
    if len({(row.windows, row.window_length) for row in rows}) > 1:
        sentences.append("Different windows: their perplexities are not on the same scale.")
    if len(backends := {row.backend for row in rows} - {BASELINE, None}) > 1:
        sentences.append(f"Different backends: {', '.join(sorted(str(b) for b in backends))}.")
    return tuple(sentences)


def _contents(rows: Sequence[Standing], what: str, field: str) -> list[str]:
    """Different models or corpora by name, and names whose contents differ from run to run."""
    hashes: dict[str, set[str]] = {}
    for row in rows:
        hashes.setdefault(str(getattr(row, field)), set()).add(getattr(row, f"{field}_hash"))
    sentences = [f"Different {what}: {', '.join(sorted(hashes))}."] if len(hashes) > 1 else []
    for name, of_name in sorted(hashes.items()):
        if len(contents := sorted(of_name - {""})) > 1:
            sentences.append(
                f"Different {what} under the same name, {name}: its contents changed between the runs (SHA-256 "
                f"{', '.join(content[:12] for content in contents)})."
            )
    return sentences


def _made_unlike(facts: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """What produced the runs, where it differs: versions, driver, threads, seed. An unknown value is no difference."""
    sentences = []
    for what, read in PROVENANCE.items():
        values = {str(value) for of_run in facts if (value := read(of_run)) not in (None, "")}
        if len(values) > 1:
            sentences.append(f"Different {what}: {', '.join(sorted(values))}.")
    return tuple(sentences)
