"""Decoding speeds to plotly figures: pure functions, no streamlit.

Colour = tile, symbol = format, grey = BF16, as everywhere; runs that look alike are told apart by dashes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from fp8dash.report.decoding import Speed
from fp8dash.ui.charts.dress import dressed, html, log_span, log_ticks
from fp8dash.ui.charts.looks import Look

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def decode_rates(speeds: Mapping[str, Sequence[Speed]], looks: Mapping[str, Look]) -> go.Figure:
    """Tokens per second of all requests together against batch, both on log axes, one line per run."""
    figure, seen = go.Figure(), Counter[Look]()
    for name, run_speeds in speeds.items():
        drawn = looks[name]
        figure.add_scatter(
            x=[speed.batch for speed in run_speeds],
            y=[speed.tokens_per_s for speed in run_speeds],
            name=html(name),
            mode="lines+markers",
            marker=_marker(drawn),
            line={"color": drawn.colour, "width": 1.8, "dash": DASHES[seen[drawn] % len(DASHES)]},
            hovertemplate="batch %{x:,}: %{y:,.4g} tokens/s",
        )
        seen[drawn] += 1
    batches = _batches(speeds)
    span = log_span([speed.tokens_per_s for run_speeds in speeds.values() for speed in run_speeds])
    figure.update_xaxes(
        title="batch: concurrent requests (log)", type="log", tickvals=batches, ticktext=[f"{b:,}" for b in batches]
    )
    figure.update_yaxes(title="decoded tokens/s, measured (log)", type="log", range=span, **log_ticks(span))
    return dressed(figure, 360, bottom=90)


def token_gaps(speeds: Mapping[str, Sequence[Speed]], looks: Mapping[str, Look]) -> go.Figure:
    """Time between two tokens of a request by batch: the median, a dash at p90, a line up to p99."""
    figure = go.Figure()
    for name, every in speeds.items():
        timed, drawn = [speed for speed in every if speed.gap_ms is not None], looks[name]
        x, shared = [f"{speed.batch:,}" for speed in timed], {"offsetgroup": name, "legendgroup": name}
        medians = [speed.gap_ms or 0.0 for speed in timed]
        tails = [(speed.gap_p99_ms or middle) - middle for speed, middle in zip(timed, medians, strict=True)]
        figure.add_scatter(
            x=x,
            y=medians,
            mode="markers",
            name=html(name),
            marker=_marker(drawn),
            hovertemplate="batch %{x}: median %{y:.3g} ms",
            **shared,
            error_y={"array": tails, "arrayminus": [0.0] * len(tails), "thickness": 1.2, "width": 4},
        )
        figure.add_scatter(
            x=x,
            y=[speed.gap_p90_ms for speed in timed],
            mode="markers",
            name=f"{html(name)}, p90",
            showlegend=False,
            marker={"symbol": "line-ew", "size": 12, "line": {"width": 2.5, "color": drawn.colour}},
            hovertemplate="batch %{x}: p90 %{y:.3g} ms",
            **shared,
        )
    order = [f"{batch:,}" for batch in _batches(speeds)]
    figure.update_xaxes(title="batch: concurrent requests", type="category", categoryorder="array", categoryarray=order)
    figure.update_yaxes(title="ms between tokens: median, p90, p99", rangemode="tozero")
    figure.update_layout(scattermode="group", scattergap=0.5)
    return dressed(figure, 360, bottom=90)


def _marker(drawn: Look) -> dict[str, object]:
    return {"symbol": drawn.symbol, "size": 9, "color": drawn.colour, "line": {"width": 1.5, "color": drawn.colour}}


def _batches(speeds: Mapping[str, Sequence[Speed]]) -> list[int]:
    return sorted({speed.batch for run_speeds in speeds.values() for speed in run_speeds})
