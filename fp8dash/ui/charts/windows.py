"""Divergence window by window and token by token. Rows to plotly figures; no streamlit, no database."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from fp8dash.choose.records import Window
from fp8dash.stats import paired_difference
from fp8dash.ui.charts.dress import dressed, error_bars, floor_line, html, log_span, log_ticks
from fp8dash.ui.charts.looks import GREY, Look, dash_of


def window_differences(
    windows: Mapping[str, Sequence[Window]], looks: Mapping[str, Look], field: str, floor: float | None = None
) -> go.Figure:
    """Each window's KLD, or its ln PPL minus the baseline's, with each run's mean and 95 % interval at the left.

    `floor` is the KLD of the unquantized weights in float32.
    """
    figure = go.Figure()
    for place, (name, run_windows) in enumerate(windows.items()):
        ys = [w.kld if field == "kld" else w.nll - w.baseline_nll for w in run_windows]
        if not ys:
            continue
        drawn = looks[name]
        figure.add_scatter(
            x=[w.index for w in run_windows],
            y=ys,
            name=html(name),
            mode="lines+markers",
            line={"color": drawn.colour, "width": 1},
            marker={"symbol": drawn.symbol, "size": 9, "color": drawn.colour, "line": {"width": 1.5}},
            hovertemplate="window %{x}: %{y:.4f} nats",
        )
        mean = paired_difference(ys, [0.0] * len(ys), weights=[w.tokens for w in run_windows])
        figure.add_scatter(
            x=[-1.2 - 0.35 * place],
            y=[mean.mean],
            mode="markers",
            showlegend=False,
            name=f"{html(name)}, mean",
            marker={"color": drawn.colour, "size": 9, "symbol": "line-ew", "line": {"width": 3, "color": drawn.colour}},
            error_y=error_bars(mean.mean, mean.low, mean.high),
            hovertemplate="mean %{y:.4f} nats",
        )
    title = "Δ ln PPL (nats)"
    if field == "kld":
        span = log_span([w.kld for run_windows in windows.values() for w in run_windows])
        figure.update_yaxes(type="log", range=span, **log_ticks(span))
        floor_line(figure, {floor}, span)
        title = "KLD (nats, log)"
    else:
        figure.add_hline(y=0, line={"color": GREY, "width": 1})
    count = max((len(run_windows) for run_windows in windows.values()), default=1)
    figure.update_xaxes(title="window (means with 95 % interval at the left)", tickvals=_ticks(count), zeroline=False)
    figure.update_yaxes(title=f"{title}, lower is better", zeroline=False)
    return dressed(figure, 360, bottom=100)


def kld_quantiles(percentiles: Mapping[str, Mapping[str, float]], looks: Mapping[str, Look]) -> go.Figure:
    """Percentiles of the KLD over tokens: by run, values by the percentile's label, in ascending order.

    They are evenly spaced, so that the tail, where recipes differ most, has room.
    """
    figure = go.Figure()
    for name, values in percentiles.items():
        drawn = looks[name]
        figure.add_scatter(
            x=list(values),
            y=[value if value > 0 else None for value in values.values()],
            name=html(name),
            mode="lines+markers",
            line={"color": drawn.colour, "width": 1.5, "dash": dash_of(drawn.symbol)},
            marker={"symbol": drawn.symbol, "size": 9, "color": drawn.colour, "line": {"width": 1.5}},
            hovertemplate="%{x} of the tokens: at most %{y:.3g} nats",
        )
    span = log_span([value for values in percentiles.values() for value in values.values() if value > 0])
    figure.update_yaxes(title="KLD of one token (nats, log)", type="log", range=span, **log_ticks(span))
    figure.update_xaxes(title="share of tokens below", type="category")
    return dressed(figure, 360, bottom=100)


def _ticks(count: int) -> list[int]:
    return list(range(0, count, max(1, count // 10)))
