"""Standings and comparisons from stored rows, and their CSV, Parquet, Markdown and JSON. No torch, no streamlit.

Numbers are ranked only among runs that share a `group`: model, corpus, windows, method and device; and a backend. A
baseline belongs to both backends, since nothing in it is cast.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from db.rows import FINISHED, STATES
from db.standings import BASELINE_BACKEND as BASELINE_BACKEND
from db.standings import Choice
from db.standings import Standing as Standing
from db.store import Store
from fp8dash.choose.metrics import METRICS, Metric
from fp8dash.choose.records import LOWER, NEITHER, NeedleCell, Window
from fp8dash.errors import InvalidChoice
from fp8dash.stats import SPEED_TIE, Difference, hits_tie, paired_difference, pairs, told_apart, windows_to_settle

PROVENANCE: dict[str, Callable[[dict[str, Any]], Any]] = {  # of a run's facts: what bears on its numbers
    "versions of fp8dash": lambda facts: facts.get("versions", {}).get("fp8dash"),
    "versions of torch": lambda facts: facts.get("versions", {}).get("torch"),
    "versions of transformers": lambda facts: facts.get("versions", {}).get("transformers"),
    "commits of fp8dash": lambda facts: facts.get("commit", "")[:12],
    "drivers": lambda facts: facts.get("driver"),
    "numbers of threads": lambda facts: facts.get("threads"),
    "seeds": lambda facts: facts.get("seed"),
}


BY_WINDOW = {"kld": "kld", "ln_ppl_diff": "nll", "ppl": "nll", "top1": "top1"}  # metrics, and a window's field of each


MOST_WINDOWS = 100_000  # that a request may ask for


@dataclass(frozen=True, slots=True)
class Verdict:
    """One metric over the compared runs: values, the best ones' indices, and whether that is a tie."""

    metric: Metric
    values: tuple[float | None, ...]
    best: tuple[int, ...]  # more than one: tied
    note: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two to six runs side by side, and every difference that makes them unlike."""

    standings: tuple[Standing, ...]
    verdicts: tuple[Verdict, ...]
    unlike: tuple[str, ...]  # sentences: why some numbers may not be compared


def standings(store: Store, *, states: Sequence[str] = (FINISHED,), ids: Sequence[str] | None = None) -> list[Standing]:
    """All rows, or those of some runs: by group, within a group by KLD."""
    found = store.standings(Choice(states=tuple(states), ids=None if ids is None else tuple(ids)))
    return sorted(found, key=lambda row: row.group)


def comparison(store: Store, run_ids: Sequence[str]) -> Comparison:
    """Two to six runs compared metric by metric; raises InvalidChoice for fewer, more or unknown ones."""
    if not 2 <= len(run_ids) <= 6:
        raise InvalidChoice(f"{len(run_ids)} runs are chosen: choose two to six to compare.")
    found = {row.run: row for row in standings(store, states=STATES, ids=run_ids)}
    if missing := [run_id for run_id in run_ids if run_id not in found]:
        raise InvalidChoice(
            f"There is no run {', '.join(missing)}: it may have been deleted, or the link is cut short."
        )
    rows = tuple(found[run_id] for run_id in run_ids)
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
    windows: dict[str, list[Window]],
    needles: dict[str, list[NeedleCell]],
) -> Verdict:
    values = tuple(getattr(row, metric.name) for row in rows)
    known = [i for i, value in enumerate(values) if value is not None and math.isfinite(value)]
    if metric.name == "needle" and len({frozenset(c.key for c in needles[rows[i].run]) for i in known}) > 1:
        return Verdict(metric, values, (), "different needles")
    if metric.better == NEITHER or len(known) < 2:
        return Verdict(metric, values, (), "" if len(known) == len(rows) else "not measured for every run")
    sign = 1 if metric.better == LOWER else -1
    lead = min(known, key=lambda i: sign * values[i])
    if metric.name in BY_WINDOW:
        others = [rows[i] for i in known if i != lead and values[i] != values[lead]]
        apart, more = leading(rows[lead], others, windows, BY_WINDOW[metric.name])
        best, note = [i for i in known if rows[i].run not in apart], settling(more)
    else:
        best, note = [i for i in known if i == lead or _tied(metric, rows[lead], rows[i], needles)], ""
    note = f"tied{note}" if len(best) > 1 else ""
    return Verdict(metric, values, tuple(sorted(best)), note)


def leading(
    leader: Standing, others: Sequence[Standing], windows: Mapping[str, Sequence[Window]], field: str
) -> tuple[set[str], int | None]:
    """The runs that differ from the leader, all of them with 95 % together, and how many windows would settle the rest.

    Windows are paired where text, cut and method are the same; runs that share none differ.
    """
    found = {row.run: window_difference(leader, row, windows, field) for row in others}
    known = {run: difference for run, difference in found.items() if difference}
    fallen = dict(zip(known, told_apart(list(known.values())), strict=True))
    apart = {run for run in found if fallen.get(run, True)}
    tied = [windows_to_settle(known[run], family=pairs(len(known) + 1)) for run in found if run not in apart]
    return apart, max((more for more in tied if more is not None), default=None)


def settling(more: int | None) -> str:
    """What a tie needs, to be said after it.

    >>> settling(1204), settling(10**7), settling(None)
    ('; about 1,204 more windows would settle it', '; more than 100,000 windows would be needed to settle it', '')
    """
    if not more:
        return ""
    if more > MOST_WINDOWS:
        return f"; more than {MOST_WINDOWS:,} windows would be needed to settle it"
    return f"; about {more:,} more windows would settle it"


def window_difference(
    a: Standing, b: Standing, windows: Mapping[str, Sequence[Window]], field: str
) -> Difference | None:
    """The mean of b minus a over the windows that both runs read; None where they read none alike."""
    alike = (a.corpus, a.window_length, a.method) == (b.corpus, b.window_length, b.method)
    shared = list(zip(windows.get(a.run, ()), windows.get(b.run, ()), strict=False)) if alike else []
    if not shared:
        return None
    ours, theirs = ([getattr(window, field) for window in side] for side in zip(*shared, strict=True))
    return paired_difference(theirs, ours, weights=[window.tokens for window, _ in shared])


def _tied(metric: Metric, a: Standing, b: Standing, needles: dict[str, list[NeedleCell]]) -> bool:
    left, right = getattr(a, metric.name), getattr(b, metric.name)
    if left == right:
        return True
    if metric.name == "needle":
        hits = [{c.key: c.score >= 1 for c in needles[row.run]} for row in (a, b)]
        shared = sorted(set(hits[0]) & set(hits[1]))
        return bool(shared) and hits_tie([hits[0][key] for key in shared], [hits[1][key] for key in shared])
    return metric.name == "gemm_speedup" and abs(left - right) <= SPEED_TIE * max(left, right)


def _unlike(rows: Sequence[Standing]) -> tuple[str, ...]:
    said = []
    for field, what in (
        ("model", "models"),
        ("corpus", "corpora"),
        ("device", "devices"),
        ("method", "methods"),
    ):
        if len(names := {str(getattr(row, field)) for row in rows}) > 1:
            said.append(f"Different {what}: {', '.join(sorted(names))}.")
    if len({(row.windows, row.window_length) for row in rows}) > 1:
        said.append("Different windows: their perplexities are not on one scale.")
    if len(backends := {row.backend for row in rows} - {BASELINE_BACKEND, None}) > 1:
        said.append(f"Different backends: {', '.join(sorted(str(b) for b in backends))}.")
    return tuple(said)


def _made_unlike(facts: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """What made the runs, where it differs: versions, driver, threads, seed. What was not told is no difference."""
    said = []
    for what, read in PROVENANCE.items():
        known = {str(value) for found in facts if (value := read(found)) not in (None, "")}
        if len(known) > 1:
            said.append(f"Different {what}: {', '.join(sorted(known))}.")
    return tuple(said)
