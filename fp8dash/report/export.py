"""Standings as CSV, Parquet, Markdown and JSON. No torch, no streamlit."""

import csv
import dataclasses
import io
import json
import math
import typing
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from db.board import Standing as Standing
from db.rows import FINISHED
from fp8dash.choose.metrics import METRICS, Metric
from fp8dash.report.contest import interval_of
from fp8dash.report.numbers import DASH, heading, inert, shown

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
        parts = typing.get_args(hints[name])  # of a union, or the words of a Literal
        kind = next(kind for kind in kinds if kind in (hints[name], *parts, *map(type, parts)))
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
    """A table for each group of runs that may be ranked together, to paste into a review.

    Only finished runs are in it; how many are not is said beneath.
    """
    finished = [row for row in rows if row.state == FINISHED]
    groups: dict[str, list[Standing]] = {}
    for row in finished:
        groups.setdefault(row.group, []).append(row)
    blocks = []
    for of_group in groups.values():
        title = [f"{_setting(of_group[0])}\n"] if len(groups) > 1 else []
        blocks.append("\n".join([*title, *_lines(of_group)]) + "\n")
    states = Counter(row.state for row in rows if row.state != FINISHED)
    if states:
        left_out = ", ".join(f"{count} {state}" for state, count in states.items())
        blocks.append(f"Not in the table: {left_out}.\n")
    return "\n".join(blocks or ["No run has finished yet.\n"])


def _setting(row: Standing) -> str:
    """What a group of runs shares."""
    contents = f" ({row.model_hash[:12]})" if row.model_hash else ""
    windows = f"{row.windows} windows of {row.window_length} tokens"
    return _inert_cell(f"{row.model}{contents} on {row.corpus}, {windows}, {row.device or 'device unknown'}")


def _lines(rows: Sequence[Standing]) -> list[str]:
    titles = ["Rank", "Recipe", *(heading(metric) for metric in METRICS.values()), "Backend"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in rows:
        cells = [
            DASH if row.rank is None else str(row.rank),
            row.name,
            *(_written(row, metric) for metric in METRICS.values()),
            row.backend or DASH,
        ]
        lines.append("| " + " | ".join(map(_inert_cell, cells)) + " |")
    return lines


def _inert_cell(text: str) -> str:
    return text.replace("|", "\\|")


def _written(row: Standing, metric: Metric) -> str:
    text, bounds = shown(metric, getattr(row, metric.name)), interval_of(row)
    return f"{text} {bounds}" if metric.name == "ln_ppl_diff" and bounds else text


def _json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return inert(value)
    return "" if value is None else value
