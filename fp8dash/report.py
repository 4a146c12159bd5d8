"""Standings and comparisons from stored rows, and their CSV, Markdown and JSON. No torch, no streamlit.

Numbers are ranked only among runs that share a `group`: model, corpus, windows, method, device and backend. A baseline
belongs to both backends, since nothing in it is cast.
"""

import csv
import dataclasses
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from db.store import FINISHED, Run, Store
from fp8dash.choose.records import LOWER, NEITHER, Measurement, NeedleCell, Window
from fp8dash.errors import InvalidChoice
from fp8dash.metrics import DASH, METRICS, Metric, heading, shown, signed
from fp8dash.stats import SPEED_TIE, mcnemar, paired_difference, pareto_front

BASELINE_BACKEND = "baseline"
VALUES = (*METRICS, "ln_ppl_diff_low", "ln_ppl_diff_high")
PROVENANCE: dict[str, Callable[[dict[str, Any]], Any]] = {  # of a run's facts: what bears on its numbers
    "versions of fp8dash": lambda facts: facts.get("versions", {}).get("fp8dash"),
    "versions of torch": lambda facts: facts.get("versions", {}).get("torch"),
    "versions of transformers": lambda facts: facts.get("versions", {}).get("transformers"),
    "commits of fp8dash": lambda facts: facts.get("commit", "")[:12],
    "drivers": lambda facts: facts.get("driver"),
    "numbers of threads": lambda facts: facts.get("threads"),
    "seeds": lambda facts: facts.get("seed"),
}


@dataclass(frozen=True, slots=True)
class Standing:
    """A run's row on the leaderboard. A value of None was not measured, and is never ranked."""

    run: str
    model: str
    recipe: str
    preset: str | None
    state: str
    owner: str
    backend: str | None
    device: str | None
    ppl: float | None = None
    ln_ppl_diff: float | None = None
    ln_ppl_diff_low: float | None = None
    ln_ppl_diff_high: float | None = None
    kld: float | None = None
    top1: float | None = None
    needle: float | None = None
    gemm_speedup: float | None = None
    bits_per_weight: float | None = None
    coverage: float | None = None
    model_bytes: float | None = None
    weight_sqnr_db: float | None = None
    rank: int | None = None  # by KLD within the group; ties by interval are said, not ranked
    study: str = ""
    corpus: str = ""
    windows: int = 0
    window_length: int = 0
    method: str = ""  # of the quality numbers
    group: str = ""
    error: str | None = None
    created: str = ""  # ISO 8601, UTC
    finished: str = ""

    @property
    def name(self) -> str:
        """What people call it."""
        return self.preset or self.recipe

    @property
    def is_baseline(self) -> bool:
        """True for the unquantized run."""
        return self.preset == "BF16"


COLUMNS = tuple(field.name for field in dataclasses.fields(Standing))


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
    """The leaderboard: runs by group, within a group by KLD."""
    runs = store.runs(states=states, ids=ids)
    measured = store.measurements([run.id for run in runs], VALUES)
    rows = [_standing(run, measured[run.id]) for run in runs]
    return _ranked(rows)


def comparison(store: Store, run_ids: Sequence[str]) -> Comparison:
    """Two to six runs compared metric by metric; raises InvalidChoice for fewer, more or unknown ones."""
    if not 2 <= len(run_ids) <= 6:
        raise InvalidChoice(f"{len(run_ids)} runs are chosen: choose two to six to compare.")
    found = {
        row.run: row
        for row in standings(store, states=("queued", "running", "finished", "failed", "cancelled"), ids=run_ids)
    }
    if missing := [run_id for run_id in run_ids if run_id not in found]:
        raise InvalidChoice(
            f"There is no run {', '.join(missing)}: it may have been deleted, or the link is cut short."
        )
    rows = tuple(found[run_id] for run_id in run_ids)
    windows, needles = store.windows(run_ids), store.needle_cells(run_ids)
    verdicts = [_verdict(metric, rows, windows, needles) for metric in METRICS.values()]
    facts = {run.id: run.facts for run in store.runs(ids=run_ids)}
    return Comparison(rows, tuple(verdicts), (*_unlike(rows), *_made_unlike([facts[run_id] for run_id in run_ids])))


def front(rows: Sequence[Standing], quality: str = "kld", speed: str = "gemm_speedup") -> list[Standing]:
    """The rows that no other beats in both quality (lower) and speed (higher)."""
    points = [(_number(getattr(row, quality)), _number(getattr(row, speed))) for row in rows]
    return [rows[i] for i in pareto_front(points)]


def to_json(rows: Iterable[Standing]) -> str:
    """One list; what JSON cannot hold is null."""
    return json.dumps([{k: _json(v) for k, v in dataclasses.asdict(row).items()} for row in rows], indent=2)


def to_csv(rows: Iterable[Standing]) -> str:
    """Comma separated, UTF-8, one header line; text that a spreadsheet would run as a formula is quoted."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([_cell(getattr(row, column)) for column in COLUMNS])
    return out.getvalue()


def to_markdown(rows: Sequence[Standing]) -> str:
    """A table to paste into a review."""
    titles = [
        "Rank",
        "Recipe",
        *(heading(m) for m in METRICS.values()),
        "Backend",
    ]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in rows:
        cells = [
            DASH if row.rank is None else str(row.rank),
            row.name,
            *(_written(row, m) for m in METRICS.values()),
            row.backend or DASH,
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _written(row: Standing, metric: Metric) -> str:
    text, bounds = shown(metric, getattr(row, metric.name)), interval(row)
    return f"{text} {bounds}" if metric.name == "ln_ppl_diff" and bounds else text


def interval(row: Standing) -> str:
    """The 95 % interval of Δ ln PPL, or nothing."""
    if row.ln_ppl_diff_low is None or row.ln_ppl_diff_high is None:
        return ""
    return f"[{signed(row.ln_ppl_diff_low)}, {signed(row.ln_ppl_diff_high)}]"


def _standing(run: Run, measured: list[Measurement]) -> Standing:
    values: dict[str, Any] = {m.name: m.value for m in measured if not m.label}
    method = next((m.method for m in measured if m.name == "kld"), "")
    request = run.request
    group = (
        run.model_hash or run.model,
        run.corpus_hash or run.corpus,
        request.windows,
        request.window_length,
        method,
        run.device,
    )
    return Standing(
        run=run.id, model=run.model, recipe=run.recipe, preset=run.preset, state=run.state, owner=run.owner,
        backend=run.backend, device=run.device, **values, study=run.study, corpus=run.corpus,
        windows=request.windows, window_length=request.window_length, method=method,
        group=" · ".join(str(part) for part in group), error=run.error, created=_iso(run.created_at),
        finished=_iso(run.finished_at),
    )  # fmt: skip


def _ranked(rows: list[Standing]) -> list[Standing]:
    """Rows by group and KLD; a rank counts the casts of the same group and backend that are strictly better.

    The baseline has no rank: it always wins against itself.
    """
    rows = sorted(rows, key=lambda row: (row.group, math.isnan(_number(row.kld)), _number(row.kld), row.created))
    ranked = []
    for row in rows:
        peers = [p.kld for p in rows if p.group == row.group and p.backend == row.backend and not p.is_baseline]
        known = not math.isnan(_number(row.kld)) and not row.is_baseline
        rank = 1 + sum(1 for kld in peers if known and _number(kld) < _number(row.kld)) if known else None
        ranked.append(dataclasses.replace(row, rank=rank))
    return ranked


def _verdict(
    metric: Metric,
    rows: Sequence[Standing],
    windows: dict[str, list[Window]],
    needles: dict[str, list[NeedleCell]],
) -> Verdict:
    values = tuple(getattr(row, metric.name) for row in rows)
    known = [i for i, value in enumerate(values) if value is not None and math.isfinite(value)]
    if metric.better == NEITHER or len(known) < 2:
        return Verdict(metric, values, (), "" if len(known) == len(rows) else "not measured for every run")
    sign = 1 if metric.better == LOWER else -1
    lead = min(known, key=lambda i: sign * values[i])
    best = [i for i in known if i == lead or _tied(metric, rows[lead], rows[i], windows, needles)]
    note = "tied" if len(best) > 1 else ""
    return Verdict(metric, values, tuple(sorted(best)), note)


def _tied(
    metric: Metric,
    a: Standing,
    b: Standing,
    windows: dict[str, list[Window]],
    needles: dict[str, list[NeedleCell]],
) -> bool:
    left, right = getattr(a, metric.name), getattr(b, metric.name)
    if left == right:
        return True
    if metric.name in ("kld", "ln_ppl_diff", "ppl", "top1"):
        field = {"ln_ppl_diff": "nll", "ppl": "nll"}.get(metric.name, metric.name)
        ours = [getattr(w, field) for w in windows[a.run]]
        theirs = [getattr(w, field) for w in windows[b.run]]
        return len(ours) == len(theirs) > 0 and a.corpus == b.corpus and paired_difference(ours, theirs).is_tie
    if metric.name == "needle":
        hits = [{(c.length, c.depth, c.expected): c.score >= 1 for c in needles[row.run]} for row in (a, b)]
        shared = sorted(set(hits[0]) & set(hits[1]))
        return bool(shared) and mcnemar([hits[0][key] for key in shared], [hits[1][key] for key in shared]) > 0.05
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


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return "'" + value
    return "" if value is None else value


def _iso(moment: Any) -> str:
    return moment.isoformat(timespec="seconds") if moment else ""
