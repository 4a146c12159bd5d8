"""Time and rate of the model’s GEMMs by M. Rows to plotly figures; no streamlit, no database."""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from fp8dash.choose.records import GemmPoint
from fp8dash.ui.charts.dress import BREAK, dressed, html
from fp8dash.ui.charts.looks import GREY, Look

SIDE_BY_SIDE = 2  # runs; more GEMM bars get a line of their own for each M


def gemm_bars(points: Mapping[str, Sequence[GemmPoint]], looks: Mapping[str, Look]) -> go.Figure:
    """Time of all the model's Linears at each M: BF16 beside cast + multiply, where a native kernel is legal."""
    sizes = sorted({point.m for run_points in points.values() for point in run_points})
    stacked = len(points) > SIDE_BY_SIDE  # else the names under the bars would lie on each other
    titles = [f"M = {m} tokens" for m in sizes]
    shape = {"rows": max(1, len(sizes)), "cols": 1} if stacked else {"rows": 1, "cols": max(1, len(sizes))}
    figure = make_subplots(**shape, subplot_titles=titles, vertical_spacing=0.14 if stacked else None)
    for index, m in enumerate(sizes, start=1):
        panel = {"row": index, "col": 1} if stacked else {"row": 1, "col": index}
        runs = {name: [point for point in run_points if point.m == m] for name, run_points in points.items()}
        for name, run_points in runs.items():
            if run_points:
                _gemm_pair(figure, panel, name, run_points, looks[name].colour)
        top = max(map(_milliseconds, runs.values())) * 1.08
        figure.update_yaxes(title="time (ms)" if stacked or index == 1 else None, range=[0, top or 1], **panel)
    shade = next((drawn.colour for drawn in looks.values()), GREY)
    hatched = {"shape": "/", "fgcolor": shade, "bgcolor": "rgba(0,0,0,0)"}
    for name, colour, pattern in (
        ("BF16", GREY, None),
        ("multiply", shade, None),
        ("cast the activations", shade, hatched),
    ):
        figure.add_bar(x=[None], y=[None], name=name, marker={"color": colour, "pattern": pattern}, row=1, col=1)
    figure.update_xaxes(tickangle=0)
    figure.update_layout(barmode="stack", bargap=0.25, bargroupgap=0.05)
    return dressed(figure, 210 * len(sizes) + 90 if stacked else 380, bottom=85)


def gemm_rates(points: Mapping[str, Sequence[GemmPoint]], looks: Mapping[str, Look]) -> go.Figure:
    """TFLOPS of all the model's Linears by M: BF16, each run's product and, dashed, its product with the cast."""
    figure = go.Figure()
    for index, (name, run_points) in enumerate(points.items()):
        drawn = looks[name]
        rates = {
            m: _rates([point for point in run_points if point.m == m])
            for m in sorted({point.m for point in run_points})
        }
        lines: list[tuple[str, str, str, str]] = [("BF16", "base", GREY, "solid")] if index == 0 else []
        lines += [(name, "product", drawn.colour, "solid"), (f"{name} with the cast", "whole", drawn.colour, "dash")]
        for title, key, colour, dash in lines:
            rate_by_m = {m: rate[key] for m, rate in rates.items() if key in rate}
            if rate_by_m:
                figure.add_scatter(
                    x=list(rate_by_m),
                    y=list(rate_by_m.values()),
                    name=html(title),
                    mode="lines+markers",
                    line={"color": colour, "width": 1.8, "dash": dash},
                    hovertemplate="M = %{x}: %{y:.3g} TFLOPS",
                )
    sizes = sorted({point.m for run_points in points.values() for point in run_points})
    figure.update_xaxes(title="M (tokens, log)", type="log", tickvals=sizes, ticktext=[f"{m:,}" for m in sizes])
    figure.update_yaxes(title="TFLOPS", rangemode="tozero")
    return dressed(figure, 330, bottom=85)


def _milliseconds(points: Sequence[GemmPoint]) -> float:
    """The longer of BF16 and cast + multiply."""
    base = sum(p.baseline_us * p.count for p in points)
    return max(base, sum(((p.cast_us or 0) + (p.matmul_us or 0)) * p.count for p in points)) / 1000


def _gemm_pair(figure: go.Figure, panel: dict[str, int], name: str, points: Sequence[GemmPoint], colour: str) -> None:
    """BF16's bar and, where every Linear has a kernel, a bar of multiply and cast; the ratio under the name."""
    base = sum(p.baseline_us * p.count for p in points) / 1000
    multiply = sum((p.matmul_us or 0) * p.count for p in points) / 1000
    cast = sum((p.cast_us or 0) * p.count for p in points) / 1000
    timed = all(p.matmul_us is not None for p in points) and multiply + cast > 0
    ratio = f"{base / (multiply + cast):.2f}× BF16" if timed else "no native kernel"
    place = [f"{html(name)}{BREAK}{ratio}"]
    bars: list[tuple[str, float, str, dict[str, Any]]] = [("BF16", base, "base", {"color": GREY})]
    if timed:
        edge = {"color": colour, "width": 1}
        bars.append(("multiply", multiply, "cast", {"color": colour, "line": edge}))
        hatched = {"shape": "/", "fgcolor": colour, "bgcolor": "rgba(0,0,0,0)"}
        bars.append(("cast", cast, "cast", {"color": colour, "line": edge, "pattern": hatched}))
    for what, value, group, marker in bars:
        figure.add_bar(
            x=place,
            y=[value],
            name=what,
            offsetgroup=group,
            marker=marker,
            showlegend=False,
            **panel,
            hovertemplate=f"{what} %{{y:.3g}} ms<extra></extra>",
        )


def _rates(points: Sequence[GemmPoint]) -> dict[str, float]:
    """TFLOPS over all Linears: "base", and "product" and "whole" where every one of them has a kernel."""
    base, cast, product = (
        sum(p.count * (getattr(p, field) or 0.0) for p in points) for field in ("baseline_us", "cast_us", "matmul_us")
    )
    work = sum(2 * p.count * p.m * p.n * p.k for p in points) / 1e6
    timed = all(p.matmul_us is not None for p in points) and product > 0
    return {"base": work / base} | ({"product": work / product, "whole": work / (cast + product)} if timed else {})
