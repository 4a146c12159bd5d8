"""Standings as CSV, Parquet, Markdown and JSON. No torch, no streamlit."""

import csv
import dataclasses
import io
import json
import math
import typing
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from db.standings import BASELINE_BACKEND as BASELINE_BACKEND
from db.standings import Standing as Standing
from fp8dash.choose.metrics import METRICS, Metric
from fp8dash.report.numbers import DASH, heading, inert, shown, signed

COLUMNS = tuple(field.name for field in dataclasses.fields(Standing))


UNITS = {  # of the columns, as they are stored: in the CSV's header and the Parquet file's fields
    **{name: metric.unit if metric.per == 1 else "bytes" for name, metric in METRICS.items() if metric.unit},
    "ln_ppl_diff_low": "nats", "ln_ppl_diff_high": "nats", "kld_low": "nats", "kld_high": "nats",
    "kld_noise_floor": "nats",
    "window_length": "tokens", "created": "UTC", "finished": "UTC", "note_at": "UTC",
}  # fmt: skip


MOMENTS = ("created", "finished", "note_at")


def to_json(rows: Iterable[Standing]) -> str:
    """One list; what JSON cannot hold is null."""
    return json.dumps([{k: _json(v) for k, v in dataclasses.asdict(row).items()} for row in rows], indent=2)


def to_csv(rows: Iterable[Standing]) -> str:
    """Comma separated, UTF-8, one header line with units, numbers in full, moments in ISO 8601.

    Text that a spreadsheet would run as a formula is quoted.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([titled(column) for column in COLUMNS])
    for row in rows:
        writer.writerow([_cell(getattr(row, column)) for column in COLUMNS])
    return out.getvalue()


def titled(column: str) -> str:
    """A column's name with its unit, in plain ASCII: a spreadsheet that knows no UTF-8 reads it too.

    >>> titled("kld"), titled("model_bytes"), titled("recipe")
    ('kld (nats)', 'model_bytes (bytes)', 'recipe')
    """
    return f"{column} ({UNITS[column].replace('×', 'x')})" if column in UNITS else column


def to_parquet(rows: Sequence[Standing]) -> bytes:
    """The columns of the CSV with their types: numbers as float64, moments in UTC, each field's unit beside it."""
    import pyarrow  # a tenth of a second, which other commands need not wait for
    from pyarrow import parquet

    kinds = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_()}
    hints = typing.get_type_hints(Standing)
    fields, columns = [], []
    for name in COLUMNS:
        kind = next(kind for kind in kinds if kind in (hints[name], *typing.get_args(hints[name])))
        values = [getattr(row, name) for row in rows]
        if name in MOMENTS:
            values = [datetime.fromisoformat(text) if text else None for text in values]
        typed = pyarrow.timestamp("s", "UTC") if name in MOMENTS else kinds[kind]
        fields.append(pyarrow.field(name, typed, metadata={"unit": UNITS.get(name, "")}))
        columns.append(pyarrow.array(values, typed))
    out = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_arrays(columns, schema=pyarrow.schema(fields)), out)
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


def _json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return inert(value)
    return "" if value is None else value
