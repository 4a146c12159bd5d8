"""The numbers that a figure draws, as CSV. No streamlit."""

import csv
import io
from collections.abc import Callable, Iterator
from typing import Any

import plotly.graph_objects as go

from fp8dash.report.numbers import inert
from fp8dash.ui.charts.dress import from_html


def data_csv(figure: go.Figure) -> str:
    """What a figure draws, one line per mark: series, x, y, the number in a cell, and the ends of its interval."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    titles = (_axis_title(figure.layout.xaxis) or "x", _axis_title(figure.layout.yaxis) or "y")
    writer.writerow(["series", *map(_cell, titles), "value", "low", "high"])
    for trace in figure.data:
        marks = MARKS.get(trace.type, _marks)(trace)
        writer.writerows([_cell(value) for value in mark] for mark in marks)
    return out.getvalue()


def _cells(trace: Any) -> Iterator[tuple[Any, ...]]:
    numbers = trace.z if trace.customdata is None else trace.customdata  # z may be a place on a log scale
    for y, row in zip(trace.y, numbers, strict=True):
        for x, number in zip(trace.x, row, strict=True):
            yield trace.name or "", x, y, number, None, None


def _marks(trace: Any) -> Iterator[tuple[Any, ...]]:
    for i, (x, y) in enumerate(zip(*(axis if axis is not None else () for axis in (trace.x, trace.y)), strict=True)):
        if x is not None:
            yield trace.ids[i] if trace.ids is not None else trace.name or "", x, y, None, *_ends(trace, i, y)


def _areas(trace: Any) -> Iterator[tuple[Any, ...]]:
    for name, area in zip(trace.ids, trace.values, strict=True):
        yield name, None, None, area, None, None


MARKS: dict[str, Callable[[Any], Iterator[tuple[Any, ...]]]] = {"heatmap": _cells, "treemap": _areas}


def _ends(trace: Any, i: int, y: Any) -> tuple[float | None, float | None]:
    bars = getattr(trace, "error_y", None)
    if not bars or bars.array is None or i >= len(bars.array):
        return None, None
    return y - bars.arrayminus[i], y + bars.array[i]


def _axis_title(axis: Any) -> str:
    return str(axis.title.text or "") if axis.title else ""


def _cell(value: Any) -> Any:
    """A number in full; text as people read it, and never a formula."""
    if value is None or isinstance(value, (int, float)):
        return value
    return inert(from_html(str(value)))
