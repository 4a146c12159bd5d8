"""Predictions to plotly figures: pure functions, no streamlit.

Colour = tile of the recipe, grey = BF16, hollow = predicted, dashed = a limit: as everywhere.
"""

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from fp8dash.predict.roofline import Gemm
from fp8dash.report.numbers import three
from fp8dash.ui.charts.dress import dressed, html
from fp8dash.ui.charts.looks import GREY, Look

DASHES = ("solid", "dash", "dot", "dashdot")


def throughput(curves: Mapping[str, Sequence[tuple[int, float]]], looks: Mapping[str, Look], batch: int) -> go.Figure:
    """Predicted output tokens per second against batch, each line up to the largest batch that fits."""
    figure = go.Figure()
    for place, (name, points) in enumerate(curves.items()):
        if points:
            _line(figure, name, points, looks[name], place, "batch %{x:,}: %{y:,.4g} tokens/s")
    figure.add_vline(x=batch, line={"color": GREY, "width": 1.2, "dash": "dash"})
    figure.update_xaxes(
        title="concurrent requests (log); lines end where memory is full", type="log", **_doublings(curves)
    )
    speeds = [speed for points in curves.values() for _, speed in points]
    figure.update_yaxes(title="output tokens/s, predicted", type="log", **_steps(min(speeds), max(speeds)))
    return dressed(figure, 400, bottom=90)


def requests(curves: Mapping[str, Sequence[tuple[int, float]]], looks: Mapping[str, Look], context: int) -> go.Figure:
    """The largest batch that fits against the tokens of a request; 0 is left out."""
    figure = go.Figure()
    for place, (name, points) in enumerate(curves.items()):
        if points:
            _line(figure, name, points, looks[name], place, "%{x:,} tokens: %{y:,} requests")
    figure.add_vline(x=context, line={"color": GREY, "width": 1.2, "dash": "dash"})
    figure.update_xaxes(title="tokens per request, prompt and output (log)", type="log", **_doublings(curves))
    rooms = [room for points in curves.values() for _, room in points] or [1.0]
    figure.update_yaxes(title="requests that fit", type="log", **_steps(min(rooms), max(rooms)))
    return dressed(figure, 400, bottom=90)


def roofline(
    tflops: Mapping[str, float], points: Mapping[str, Sequence[Gemm]], looks: Mapping[str, Look], bandwidth: float
) -> go.Figure:
    """The roof of each recipe, its peak in TFLOPS over a bandwidth in TB/s, and its products on it."""
    figure = go.Figure()
    xs = [gemm.intensity for gemms in points.values() for gemm in gemms] + [
        peak / bandwidth for peak in tflops.values()
    ]
    low, high = min(xs) / 2, max(xs) * 3
    for name, peak in tflops.items():
        figure.add_scatter(
            x=[low, peak / bandwidth, high],
            y=[low * bandwidth, peak, peak],
            mode="lines",
            hoverinfo="skip",
            name=f"{html(name)}: {three(peak)} TFLOPS, ridge at {peak / bandwidth:.0f}",
            line={"color": looks[name].colour, "width": 1.6, "dash": "dash"},
        )
        figure.add_scatter(
            x=[gemm.intensity for gemm in points[name]],
            y=[gemm.tflops for gemm in points[name]],
            mode="markers",
            text=[html(gemm.name) for gemm in points[name]],
            showlegend=False,
            name=html(name),
            marker={"symbol": _hollow(looks[name].symbol), "size": 11, "color": looks[name].colour, "line_width": 2},
            hovertemplate="%{text}: %{x:.3g} FLOP/byte, at most %{y:.3g} TFLOPS<extra>%{fullData.name}</extra>",
        )
    _name(figure, list(points.values())[-1])
    span = [math.log10(low), math.log10(high)]
    figure.update_xaxes(title="FLOP/byte (log)", type="log", range=span, **_steps(low, high))
    figure.update_yaxes(title="attainable TFLOPS (log)", type="log", **_steps(low * bandwidth, max(tflops.values())))
    return dressed(figure, 420, bottom=90)


def _line(
    figure: go.Figure, name: str, points: Sequence[tuple[int, float]], look: Look, place: int, hover: str
) -> None:
    figure.add_scatter(
        x=[x for x, _ in points],
        y=[y for _, y in points],
        mode="lines+markers",
        name=html(name),
        line={"color": look.colour, "width": 1.8, "dash": DASHES[place % len(DASHES)]},
        marker={"symbol": _hollow(look.symbol), "size": 8, "color": look.colour, "line_width": 1.5},
        hovertemplate=hover + "<extra>%{fullData.name}</extra>",
    )


def _hollow(symbol: str) -> str:
    return symbol if symbol.endswith("-open") or symbol == "x" else f"{symbol}-open"


def _name(figure: go.Figure, gemms: Sequence[Gemm]) -> None:
    """Names of points that lie apart, beneath them; those close to a named one are left to the hover."""
    named: list[float] = []
    for gemm in sorted(gemms, key=lambda gemm: -gemm.flops):
        at = math.log10(gemm.intensity)
        if all(abs(at - other) > 0.12 for other in named):
            named.append(at)
            figure.add_annotation(
                x=at,
                y=math.log10(gemm.tflops),
                text=html(gemm.name.rsplit(".", 1)[-1]),
                showarrow=False,
                yshift=-16,
                font={"size": 11},
            )


def _steps(low: float, high: float) -> dict[str, list[object]]:
    """Ticks at 1, 2 and 5 of each decade; at 1 alone over more than three decades."""
    digits = (1, 2, 5) if high / low < 1000 else (1,)
    powers_of_ten = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers_of_ten for digit in digits]
    return {"tickvals": list(ticks), "ticktext": [f"{tick:,g}" for tick in ticks]}


def _doublings(curves: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, list[object]]:
    """Ticks at powers of two, at most ten."""
    xs = [x for points in curves.values() for x, _ in points] or [1]
    low, high = math.floor(math.log2(min(xs))), math.ceil(math.log2(max(xs)))
    step = max(1, math.ceil((high - low) / 10))
    ticks = [1 << power for power in range(low, high + 1, step)]
    return {"tickvals": list(ticks), "ticktext": [f"{tick:,}" for tick in ticks]}
