"""A study’s numbers side by side. Bars of the report to a plotly figure; no streamlit, no database."""

from collections.abc import Sequence

import plotly.graph_objects as go

from fp8dash.report.study import Bar
from fp8dash.ui.charts.dress import dressed, error_bars, html, log_span, log_ticks
from fp8dash.ui.charts.looks import look


def study_points(bars: Sequence[Bar], axis: str) -> go.Figure:
    """A study's numbers on a log axis, the lowest at the top, each with its interval where it has one."""
    drawn = [bar for bar in bars if bar.value > 0]
    figure = go.Figure()
    for bar in drawn:
        mark = look(bar.recipe, bar.backend)
        figure.add_scatter(
            x=[bar.value],
            y=[html(bar.label)],
            mode="markers",
            name=html(bar.label),
            showlegend=False,
            error_x=error_bars(bar.value, bar.low, bar.high),
            marker={"symbol": mark.symbol, "size": 12, "color": mark.colour, "line": {"width": 2}},
            hovertemplate="%{y}: %{x:.3g}<extra></extra>",
        )
    ends = [end for bar in drawn for end in (bar.value, bar.low, bar.high) if end is not None and end > 0]
    span = log_span(ends)
    figure.update_xaxes(title=f"{axis}, log, lower is better", type="log", range=span, **log_ticks(span))
    figure.update_yaxes(type="category", autorange="reversed")
    return dressed(figure, 100 + 30 * max(1, len(drawn)))
