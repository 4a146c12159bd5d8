"""Rows to plotly figures: pure functions, no streamlit, no database. The only importer of plotly.

One encoding everywhere: colour = tile (Okabe-Ito), symbol = format, filled = native, hollow = emulated, grey =
baseline.
"""

import csv
import io
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from fp8dash.choose.casts import Cast
from fp8dash.choose.metrics import METRICS, Metric
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import GemmPoint, Layer, NeedleCell, Sensitivity, Window
from fp8dash.errors import InvalidChoice
from fp8dash.report.comparison import Standing
from fp8dash.report.numbers import heading, inert, powers, shown, signed, three
from fp8dash.report.study import Bar
from fp8dash.stats import paired_difference

GREY = "#7f8c92"
COLOURS = {
    "tensor": "#d55e00", "row": "#0072b2", "1x128": "#cc79a7", "128x128": "#009e73", "1x32": "#e69f00",
    "1x16": "#56b4e9", "column": "#8a6d3b",
}  # fmt: skip
SYMBOLS = {
    "e4m3fn": "circle", "e5m2": "square", "int8": "diamond", "e2m1": "triangle-up", "int4": "triangle-down",
    "e3m2": "pentagon", "e2m3": "hexagon", "e4m3fnuz": "star", "e5m2fnuz": "star-square", "e4m3": "octagon",
    "e3m4": "star-diamond",
}  # fmt: skip
TEAL = [[0.0, "#f4efe2"], [0.5, "#7fb8b0"], [1.0, "#0f6b6b"]]
AROUND_ZERO = [[0.0, "#b2182b"], [0.5, "#f7f7f7"], [1.0, "#2166ac"]]
INKS = {False: "#2b3b43", True: "#d3dee1"}  # text on light and on dark
RANKED = 20  # groups of Linears that are drawn, at most
LABELLED = 8  # points that are named directly, at most
LABEL_PIXELS, PLOT_PIXELS = 17, 280  # a label's line, and the plot's height without its margins
SIDE_BY_SIDE = 2  # runs; more GEMM bars get a line of their own for each M
CAMERA = 34  # pixels that the toolbar's button takes at the top right
IMAGES = ("svg", "png")  # what the camera of a figure's toolbar saves


def config(key: str, image: str) -> dict[str, Any]:
    """Plotly's toolbar: one button, which saves the figure as an image; nothing is sent anywhere."""
    saved = {"format": image, "filename": f"fp8dash-{key.replace('_', '-')}", "scale": 2}
    return {
        "displaylogo": False, "scrollZoom": False, "displayModeBar": True, "modeBarButtons": [["toImage"]],
        "toImageButtonOptions": saved,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Look:
    """How a run is drawn."""

    colour: str
    symbol: str


def tile_colour(name: str) -> str:
    """The colour of a tile; grey for one that is unknown here."""
    return COLOURS.get(name, GREY)


def look(recipe: str, backend: str | None) -> Look:
    """How a run of this recipe is drawn.

    >>> look("w=e5m2/row a=e5m2/row", "emulated")
    Look(colour='#0072b2', symbol='square-open')
    """
    cast = _main_cast(recipe)
    if cast is None:
        return Look(GREY, "x")
    symbol = SYMBOLS.get(cast.format.name, "cross")
    return Look(tile_colour(cast.tile.name), symbol if backend == "native" else f"{symbol}-open")


def quality_scatter(
    rows: Sequence[Standing],
    x: Metric,
    *,
    front: Collection[str],
    intervals: Mapping[str, tuple[float, float]],
    predicted: Collection[str] = (),
) -> go.Figure:
    """KLD on a log axis against a second metric, the Pareto front drawn through, the baseline as a grey line.

    A point's custom data is its run. Points whose second number is `predicted` are hollow, as emulated ones are.
    """
    figure = go.Figure()
    points = [row for row in rows if _drawable(row, x)]
    best = sorted((row for row in points if row.run in front), key=lambda row: _x(row, x))
    figure.add_scatter(
        x=[_x(row, x) for row in best], y=[row.kld for row in best], mode="lines", name="Pareto front",
        line={"color": GREY, "width": 1.5, "dash": "dot"}, hoverinfo="skip",
    )  # fmt: skip
    alike: dict[Look, list[Standing]] = {}
    for row in points:
        alike.setdefault(look(row.recipe, "predicted" if row.run in predicted else row.backend), []).append(row)
    for drawn, some in alike.items():
        figure.add_trace(_points(drawn, some, x, intervals))
    _legend(figure, points)
    _baseline_line(figure, rows, points, x)
    _floor_line(figure, {row.kld_noise_floor for row in points}, _y_range(points, intervals))
    if points and len(points) <= LABELLED:
        _label(figure, points, x, _y_range(points, intervals) or [0.0, 1.0])
    figure.update_xaxes(title=heading(x), range=_x_range(points, x), zeroline=False)
    span = _y_range(points, intervals)
    figure.update_yaxes(title="KLD from BF16 (nats, log)", type="log", range=span, **log_ticks(span))
    _better(figure, right=x.better == "higher")
    return dressed(figure, PLOT_PIXELS + 114, bottom=80)


def gemm_bars(points: Mapping[str, Sequence[GemmPoint]], looks: Mapping[str, Look]) -> go.Figure:
    """Time of all the model's Linears at each M: BF16 beside cast + multiply, where a native kernel is legal."""
    sizes = sorted({point.m for found in points.values() for point in found})
    stacked = len(points) > SIDE_BY_SIDE  # else the names under the bars would lie on each other
    titles = [f"M = {m} tokens" for m in sizes]
    shape = {"rows": max(1, len(sizes)), "cols": 1} if stacked else {"rows": 1, "cols": max(1, len(sizes))}
    figure = make_subplots(**shape, subplot_titles=titles, vertical_spacing=0.14 if stacked else None)
    for index, m in enumerate(sizes, start=1):
        panel = {"row": index, "col": 1} if stacked else {"row": 1, "col": index}
        runs = {name: [point for point in found if point.m == m] for name, found in points.items()}
        for name, found in runs.items():
            if found:
                _gemm_pair(figure, panel, name, found, looks[name].colour)
        top = max(map(_milliseconds, runs.values())) * 1.08
        figure.update_yaxes(title="time (ms)" if stacked or index == 1 else None, range=[0, top or 1], **panel)
    shade = next((drawn.colour for drawn in looks.values()), GREY)
    for name, colour in (("BF16", GREY), ("multiply", shade), ("cast the activations", shade)):
        pattern = {"shape": "/", "fgcolor": shade, "bgcolor": "rgba(0,0,0,0)"} if name.startswith("cast") else None
        figure.add_bar(x=[None], y=[None], name=name, marker={"color": colour, "pattern": pattern}, row=1, col=1)
    figure.update_xaxes(tickangle=0)
    figure.update_layout(barmode="stack", bargap=0.25, bargroupgap=0.05)
    return dressed(figure, 210 * len(sizes) + 90 if stacked else 380, bottom=85)


def gemm_rates(points: Mapping[str, Sequence[GemmPoint]], looks: Mapping[str, Look]) -> go.Figure:
    """TFLOPS of all the model's Linears by M: BF16, each run's product and, dashed, its product with the cast."""
    figure = go.Figure()
    for index, (name, found) in enumerate(points.items()):
        drawn = looks[name]
        rates = {m: _rates([point for point in found if point.m == m]) for m in sorted({point.m for point in found})}
        lines: list[tuple[str, str, str, str]] = [("BF16", "base", GREY, "solid")] if index == 0 else []
        lines += [(name, "product", drawn.colour, "solid"), (f"{name} with the cast", "whole", drawn.colour, "dash")]
        for title, key, colour, dash in lines:
            known = {m: rate[key] for m, rate in rates.items() if key in rate}
            if known:
                figure.add_scatter(
                    x=list(known), y=list(known.values()), name=html(title), mode="lines+markers",
                    line={"color": colour, "width": 1.8, "dash": dash}, hovertemplate="M = %{x}: %{y:.3g} TFLOPS",
                )  # fmt: skip
    sizes = sorted({point.m for found in points.values() for point in found})
    figure.update_xaxes(title="M (tokens, log)", type="log", tickvals=sizes, ticktext=[f"{m:,}" for m in sizes])
    figure.update_yaxes(title="TFLOPS", rangemode="tozero")
    return dressed(figure, 330, bottom=85)


def sensitivity_bars(rows: Sequence[Sensitivity], whole: float | None) -> go.Figure:
    """The costliest groups, worst at the top: KLD where each is cast alone, and what keeping it saves of the whole."""
    ranked = sorted(rows, key=lambda row: row.alone_kld, reverse=True)[:RANKED][::-1]
    names = [html(row.group) + (" (kept)" if row.kept else "") for row in ranked]
    figure = go.Figure()
    bars = [("cast alone", [row.alone_kld for row in ranked], COLOURS["row"])]
    if whole is not None:
        bars.insert(0, ("saved by keeping it", [whole - row.all_but_kld for row in ranked], COLOURS["1x16"]))
    for title, values, colour in bars:
        figure.add_bar(
            y=names, x=values, name=title, orientation="h", marker={"color": colour},
            hovertemplate=f"%{{y}}, {title}: %{{x:.3g}} nats<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title="KLD (nats)", zeroline=True, zerolinecolor=GREY)
    figure.update_yaxes(type="category")
    figure.update_layout(barmode="group", bargap=0.3, bargroupgap=0.05, legend_traceorder="reversed")
    return dressed(figure, 120 + 32 * max(1, len(ranked)), bottom=85)


def study_points(bars: Sequence[Bar], axis: str) -> go.Figure:
    """A study's numbers on a log axis, the lowest at the top, each with its interval where it has one."""
    drawn = [bar for bar in bars if bar.value > 0]
    figure = go.Figure()
    for bar in drawn:
        mark = look(bar.recipe, bar.backend)
        figure.add_scatter(
            x=[bar.value], y=[html(bar.label)], mode="markers", name=html(bar.label), showlegend=False,
            error_x=_error(bar.value, bar.low, bar.high),
            marker={"symbol": mark.symbol, "size": 12, "color": mark.colour, "line": {"width": 2}},
            hovertemplate="%{y}: %{x:.3g}<extra></extra>",
        )  # fmt: skip
    ends = [end for bar in drawn for end in (bar.value, bar.low, bar.high) if end is not None and end > 0]
    span = log_span(ends)
    figure.update_xaxes(title=f"{axis}, log, lower is better", type="log", range=span, **log_ticks(span))
    figure.update_yaxes(type="category", autorange="reversed")
    return dressed(figure, 100 + 30 * max(1, len(drawn)))


def needle_maps(cells: Mapping[str, Sequence[NeedleCell]]) -> go.Figure:
    """Each run's retrieval score by length and depth, the number in each cell."""
    return _maps({name: _scores(found) for name, found in cells.items()}, TEAL, 0.0, 1.0, share_text)


def needle_differences(cells: Mapping[str, Sequence[NeedleCell]], baseline: Sequence[NeedleCell]) -> go.Figure:
    """Each run's score minus the baseline's, on a scale centred at zero; cells that only one has are left out."""
    base = _scores(baseline)
    grids = {
        name: {key: score - base[key] for key, score in _scores(found).items() if key in base}
        for name, found in cells.items()
    }
    return _maps(grids, AROUND_ZERO, -1.0, 1.0, _signed_share)


def needle_changes(cells: Mapping[str, Sequence[NeedleCell]]) -> go.Figure:
    """Each run's score minus the unquantized model's on the same prompts, on a scale centred at zero."""
    grids = {
        name: _grid(found, lambda c: None if c.baseline_score is None else c.score - c.baseline_score)
        for name, found in cells.items()
    }
    return _maps(grids, AROUND_ZERO, -1.0, 1.0, _signed_share)


def needle_grades(cells: Mapping[str, Sequence[NeedleCell]]) -> go.Figure:
    """Each run's mean log-probability of the values' tokens by length and depth, nats a token; 0 is certain."""
    grids = {name: _grid(found, lambda c: c.logprob) for name, found in cells.items()}
    lowest = min((value for grid in grids.values() for value in grid.values()), default=0.0)
    return _maps(grids, TEAL, lowest or -1.0, 0.0, three)


def needle_grade_changes(cells: Mapping[str, Sequence[NeedleCell]]) -> go.Figure:
    """Each run's log-probability minus the unquantized model's on the same prompts, on a scale centred at zero."""
    grids = {
        name: _grid(found, lambda c: None if None in (c.logprob, c.baseline_logprob) else _graded_change(c))
        for name, found in cells.items()
    }
    most = max((abs(value) for grid in grids.values() for value in grid.values()), default=0.0) or 1.0
    return _maps(grids, AROUND_ZERO, -most, most, signed)


def window_differences(
    windows: Mapping[str, Sequence[Window]], looks: Mapping[str, Look], field: str, floor: float | None = None
) -> go.Figure:
    """Each window's KLD, or its ln PPL minus the baseline's, with each run's mean and 95 % interval at the left.

    `floor` is the KLD of the unquantized weights in float32.
    """
    figure = go.Figure()
    for place, (name, found) in enumerate(windows.items()):
        ys = [w.kld if field == "kld" else w.nll - w.baseline_nll for w in found]
        if not ys:
            continue
        drawn = looks[name]
        figure.add_scatter(
            x=[w.index for w in found], y=ys, name=name, mode="lines+markers", line={"color": drawn.colour, "width": 1},
            marker={"symbol": drawn.symbol, "size": 9, "color": drawn.colour, "line": {"width": 1.5}},
            hovertemplate="window %{x}: %{y:.4f} nats",
        )  # fmt: skip
        mean = paired_difference(ys, [0.0] * len(ys), weights=[w.tokens for w in found])
        figure.add_scatter(
            x=[-1.2 - 0.35 * place], y=[mean.mean], mode="markers", showlegend=False, name=f"{name}, mean",
            marker={"color": drawn.colour, "size": 9, "symbol": "line-ew", "line": {"width": 3, "color": drawn.colour}},
            error_y=_error(mean.mean, mean.low, mean.high), hovertemplate="mean %{y:.4f} nats",
        )  # fmt: skip
    title = "Δ ln PPL (nats)"
    if field == "kld":
        span = log_span([w.kld for found in windows.values() for w in found])
        figure.update_yaxes(type="log", range=span, **log_ticks(span))
        _floor_line(figure, {floor}, span)
        title = "KLD (nats, log)"
    else:
        figure.add_hline(y=0, line={"color": GREY, "width": 1})
    count = max((len(found) for found in windows.values()), default=1)
    figure.update_xaxes(title="window (means with 95 % interval at the left)", tickvals=_ticks(count), zeroline=False)
    figure.update_yaxes(title=f"{title}, lower is better", zeroline=False)
    return dressed(figure, 360, bottom=100)


def kld_quantiles(found: Mapping[str, Mapping[str, float]], looks: Mapping[str, Look]) -> go.Figure:
    """The KLD that so many tokens stay below: by run, values by percentile's label, from the least to the most.

    Percentiles stand at even steps, so that the tail, where recipes differ most, has room.
    """
    figure = go.Figure()
    for name, values in found.items():
        drawn = looks[name]
        figure.add_scatter(
            x=list(values), y=[value if value > 0 else None for value in values.values()], name=html(name),
            mode="lines+markers", line={"color": drawn.colour, "width": 1.5, "dash": _dash(drawn.symbol)},
            marker={"symbol": drawn.symbol, "size": 9, "color": drawn.colour, "line": {"width": 1.5}},
            hovertemplate="%{x} of the tokens: at most %{y:.3g} nats",
        )  # fmt: skip
    span = log_span([value for values in found.values() for value in values.values() if value > 0])
    figure.update_yaxes(title="KLD of one token (nats, log)", type="log", range=span, **log_ticks(span))
    figure.update_xaxes(title="share of tokens below", type="category")
    return dressed(figure, 360, bottom=100)


def layer_map(layers: Sequence[Layer]) -> go.Figure:
    """Weight SQNR of every cast layer: blocks downwards, projections rightwards."""
    return sqnr_maps({"": {layer.name: layer.sqnr_db for layer in layers if layer.sqnr_db is not None}})


def sqnr_maps(maps: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """SQNR by layer name, one map a title: blocks downwards, projections rightwards, one colour scale for all."""
    figure, rows = layer_maps(maps, hover="%{z:.1f} dB", bar={"title": "dB"})
    titled = any(maps)
    return dressed(figure, max(220, 15 * rows + (100 if titled else 80)), top=60 if titled else 40, bottom=20)


def layer_maps(
    maps: Mapping[str, Mapping[str, float]], *, hover: str, bar: Mapping[str, Any],
    colour: Callable[[float], float | None] = float, written: Callable[[float], str] = str,
) -> tuple[go.Figure, int]:  # fmt: skip
    """Heat maps of numbers by layer name, one a title, all of one colour scale, and how many blocks they show.

    A cell's place on the scale is `colour` of its number; `hover` may name it as z, and as text what is `written`.
    """
    grids = [{place_of(name): value for name, value in found.items()} for found in maps.values()]
    parts = list(dict.fromkeys(part for grid in grids for _, part in grid))
    blocks = sorted({block for grid in grids for block, _ in grid})
    figure = make_subplots(rows=1, cols=max(1, len(grids)), shared_yaxes=True, horizontal_spacing=0.04)
    for column, (title, grid) in enumerate(zip(maps, grids, strict=True), start=1):
        cells = [[grid.get((block, part)) for part in parts] for block in blocks]
        figure.add_heatmap(
            z=[[None if value is None else colour(value) for value in line] for line in cells],
            text=[["" if value is None else written(value) for value in line] for line in cells],
            x=[short_part(part) for part in parts], y=[str(block) if block >= 0 else "other" for block in blocks],
            hovertemplate=f"block %{{y}} %{{x}}: {hover}<extra></extra>", coloraxis="coloraxis", xgap=2, ygap=1,
            name=title, customdata=cells, row=1, col=column,
        )  # fmt: skip
        figure.update_xaxes(title=html(title) or None, side="top", row=1, col=column)
    figure.update_yaxes(autorange="reversed", type="category", dtick=max(1, len(blocks) // 10))
    figure.update_yaxes(title="block", col=1)
    whole = {"thickness": 12, "outlinewidth": 0, **bar}
    figure.update_layout(coloraxis={"colorscale": TEAL, "colorbar": whole})
    return figure, len(blocks)


def layer_lines(layers: Mapping[str, Sequence[Layer]], looks: Mapping[str, Look]) -> go.Figure:
    """Weight SQNR of the same projection in every block, one small panel a projection, one line a run."""
    named = {name: [layer for layer in found if layer.sqnr_db is not None] for name, found in layers.items()}
    parts = list(dict.fromkeys(place_of(layer.name)[1] for found in named.values() for layer in found))[:8]
    columns = min(4, max(1, len(parts)))
    figure = make_subplots(
        rows=max(1, math.ceil(len(parts) / columns)), cols=columns, shared_yaxes="all", shared_xaxes=True,
        subplot_titles=[short_part(part) for part in parts], vertical_spacing=0.16, horizontal_spacing=0.02,
    )  # fmt: skip
    for i, part in enumerate(parts):
        for name, found in named.items():
            here = sorted(
                (place_of(layer.name)[0], layer.sqnr_db) for layer in found if place_of(layer.name)[1] == part
            )
            figure.add_scatter(
                x=[block for block, _ in here], y=[sqnr for _, sqnr in here], mode="lines", name=name,
                line={"color": looks[name].colour, "width": 1.8, "dash": _dash(looks[name].symbol)}, legendgroup=name,
                showlegend=i == 0, row=i // columns + 1, col=i % columns + 1,
                hovertemplate="block %{x}: %{y:.1f} dB",
            )  # fmt: skip
    figure.update_yaxes(title="SQNR (dB)", col=1)
    figure.update_xaxes(tickformat="d", nticks=5)
    figure.update_xaxes(title="block", row=math.ceil(len(parts) / columns) or 1)
    return dressed(figure, 420, top=40, bottom=100)


def inked(figure: go.Figure, *, dark: bool) -> go.Figure:
    """The figure with its text in the theme's ink; text that has a colour of its own keeps it."""
    ink = INKS[dark]
    figure.update_layout(font_color=ink, legend_font_color=ink)
    figure.update_xaxes(title_font_color=ink, tickfont_color=ink)
    figure.update_yaxes(title_font_color=ink, tickfont_color=ink)
    for annotation in figure.layout.annotations:
        if annotation.font.color is None:
            annotation.font.color = ink
    return figure


def data_csv(figure: go.Figure) -> str:
    """What a figure draws, one line a mark: series, x, y, the number in a cell, and the ends of its interval."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    titles = (_axis_title(figure.layout.xaxis) or "x", _axis_title(figure.layout.yaxis) or "y")
    writer.writerow(["series", *titles, "value", "low", "high"])
    for trace in figure.data:
        marks = MARKS.get(trace.type, _marks)(trace)
        writer.writerows([_cell(value) for value in mark] for mark in marks)
    return out.getvalue()


def share_text(value: float) -> str:
    """A share in a cell.

    >>> share_text(1.0), share_text(0.333)
    ('1', '0.33')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".") if value not in (0, 1) else f"{value:.0f}"


def _signed_share(value: float) -> str:
    return share_text(value) if value == 0 else f"{'+' if value > 0 else '−'}{share_text(abs(value))}"


def _main_cast(recipe: str) -> Cast | None:
    try:
        found = parse_recipe(recipe)
    except InvalidChoice:  # written by another version: drawn grey
        return None
    return found.weights or found.activations or found.attention or (found.kv.picture if found.kv else None)


def _drawable(row: Standing, x: Metric) -> bool:
    values = (row.kld, getattr(row, x.name))
    return not row.is_baseline and all(v is not None and math.isfinite(v) for v in values) and (row.kld or 0) > 0


def _x(row: Standing, x: Metric) -> float:
    return float(getattr(row, x.name)) / x.per


def _points(
    drawn: Look, rows: Sequence[Standing], x: Metric, intervals: Mapping[str, tuple[float, float]]
) -> go.Scatter:
    """The runs of one look: a trace each would make a figure of hundreds slow."""
    klds, spreads = [row.kld or 0.0 for row in rows], [intervals.get(row.run) for row in rows]
    known = [spread or (kld, kld) for kld, spread in zip(klds, spreads, strict=True)]
    bars: dict[str, object] = {"visible": False}
    if any(spreads):
        lows, highs = zip(*known, strict=True)
        downs, ups = ([abs(end - kld) for end, kld in zip(ends, klds, strict=True)] for ends in (lows, highs))
        bars = {"array": ups, "arrayminus": downs, "thickness": 1.2, "width": 4}
    return go.Scatter(
        x=[_x(row, x) for row in rows], y=klds, mode="markers", showlegend=False,
        customdata=[row.run for row in rows], ids=[row.name for row in rows], error_y=bars,
        text=[_provenance(row, spread) for row, spread in zip(rows, spreads, strict=True)],
        hovertemplate="%{text}<extra></extra>",
        marker={"symbol": drawn.symbol, "size": 13, "color": drawn.colour,
                "line": {"width": 2.5 if "open" in drawn.symbol else 1}},
    )  # fmt: skip


def _provenance(row: Standing, spread: tuple[float, float] | None) -> str:
    """What the pointer is told: recipe, values with the interval, and where they come from."""
    said = [
        f"{heading(METRICS[m])} {shown(METRICS[m], getattr(row, m))}"
        for m in ("kld", "gemm_speedup", "bits_per_weight")
    ]
    bounds = f"95 % interval [{three(spread[0])}, {three(spread[1])}]" if spread else "no interval: too few windows"
    said.insert(1, bounds)
    source = [f"{row.backend} on {html(str(row.device))}", f"run {row.run} of {html(row.owner)}, {row.created[:10]}"]
    return "<br>".join([f"<b>{html(row.name)}</b>", html(row.recipe), *said, *source, "click: open the run"])


def _error(mean: float, low: float | None, high: float | None) -> dict[str, object]:
    if low is None or high is None:
        return {"visible": False}
    return {"array": [high - mean], "arrayminus": [mean - low], "thickness": 1.2, "width": 4}


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
    """A number in full; text without tags, and never a formula."""
    if value is None or isinstance(value, (int, float)):
        return value
    text = re.sub(r"<[^>]*>", " ", str(value))
    return inert(text)


def _legend(figure: go.Figure, points: Sequence[Standing]) -> None:
    casts = [cast for cast in (_main_cast(row.recipe) for row in points) if cast]
    for tile in dict.fromkeys(cast.tile.name for cast in casts):
        figure.add_scatter(
            x=[None],
            y=[None],
            mode="markers",
            name=f"{tile}",
            marker={"symbol": "circle", "size": 11, "color": tile_colour(tile)},
        )
    for name in dict.fromkeys(cast.format.name for cast in casts):
        figure.add_scatter(
            x=[None],
            y=[None],
            mode="markers",
            name=name,
            marker={"symbol": SYMBOLS.get(name, "cross"), "size": 11, "color": GREY},
        )
    kinds = {"native": "circle", "emulated": "circle-open"}
    for name in sorted({row.backend or "" for row in points} & set(kinds)):
        figure.add_scatter(
            x=[None],
            y=[None],
            mode="markers",
            name=name,
            marker={"symbol": kinds[name], "size": 11, "color": GREY, "line": {"width": 2}},
        )


def _baseline_line(figure: go.Figure, rows: Sequence[Standing], points: Sequence[Standing], x: Metric) -> None:
    at: float | None
    if x.name == "gemm_speedup":
        at = 1.0
    else:
        at = next((_x(row, x) for row in rows if row.is_baseline and getattr(row, x.name) is not None), None)
    if at is None:
        return
    low, high = _x_range(points, x)
    if low <= at <= high:
        figure.add_vline(x=at, line={"color": GREY, "width": 1, "dash": "dash"})
        figure.add_annotation(
            x=at, y=1, yref="paper", text="BF16", showarrow=False, xanchor="right", yanchor="top", xshift=-4
        )
    else:  # far off: said, since a line would push all else into a corner
        figure.add_annotation(
            x=1,
            xref="paper",
            y=1,
            yref="paper",
            text=f"BF16: {three(at)} →",
            showarrow=False,
            xanchor="right",
            xshift=-CAMERA,
            yanchor="bottom",
        )


def _floor_line(figure: go.Figure, floors: Collection[float | None], span: Sequence[float] | None) -> None:
    """The noise floor of the rows' baseline, where they have one; said at the edge where it is out of sight."""
    known = [floor for floor in floors if floor]
    if not known or not span:
        return
    floor = max(known)
    seen = span[0] <= math.log10(floor) <= span[1]
    if seen:
        figure.add_hline(y=floor, line={"color": GREY, "width": 1, "dash": "dash"})
    figure.add_annotation(
        x=0, xref="paper", xanchor="left", yanchor="bottom", showarrow=False, font={"color": GREY, "size": 11},
        text=f"BF16 against float32: {three(floor)} nats{'' if seen else ' ↓'}",
        **({"y": math.log10(floor), "yref": "y"} if seen else {"y": 0, "yref": "paper"}),
    )  # fmt: skip


def _x_range(points: Sequence[Standing], x: Metric) -> list[float]:
    """Room for the points and, at the right, for a name; 1x is always within sight on the speed axis."""
    values = [_x(row, x) for row in points] + ([1.0] if x.name == "gemm_speedup" else [])
    if not values:
        return [0.0, 1.0]
    low, high = min(values), max(values)
    pad = max(high - low, high * 0.02) * 0.1
    return [low - pad, high + pad * 2.5]


def log_ticks(span: Sequence[float] | None) -> dict[str, list[object]]:
    """Ticks at 1, 2 and 5 of each decade, closer where that leaves fewer than three."""
    if not span:
        return {}
    low, high = 10 ** span[0], 10 ** span[1]
    decades = range(math.floor(span[0]), math.ceil(span[1]) + 1)
    for digits in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), [n / 10 for n in range(10, 100)]):
        ticks = [digit * 10.0**power for power in decades for digit in digits if low <= digit * 10.0**power <= high]
        if len(ticks) > 2:
            break
    return {"tickvals": list(ticks), "ticktext": [powers(f"{tick:.3g}") for tick in ticks]}


def _y_range(points: Sequence[Standing], intervals: Mapping[str, tuple[float, float]]) -> list[float] | None:
    return log_span([row.kld or 0.0 for row in points] + [v for row in points for v in intervals.get(row.run, ())])


def log_span(values: Sequence[float]) -> list[float] | None:
    """A log axis's range with some room; what is not positive has no place on it."""
    known = [value for value in values if value > 0 and math.isfinite(value)]
    return [math.log10(min(known)) - 0.18, math.log10(max(known)) + 0.18] if known else None


def _label(figure: go.Figure, points: Sequence[Standing], x: Metric, span: Sequence[float]) -> None:
    """Names beside the points, pushed apart where they would lie on each other."""
    ordered = sorted(points, key=lambda row: row.kld or 0.0)
    heights = [(math.log10(row.kld or 1.0) - span[0]) / (span[1] - span[0]) * PLOT_PIXELS for row in ordered]
    for row, height, moved in zip(ordered, heights, _apart(heights), strict=True):
        figure.add_annotation(
            x=_x(row, x), y=math.log10(row.kld or 1.0), text=html(row.name), ax=34, ay=height - moved, showarrow=True,
            arrowhead=0, arrowwidth=0.8, arrowcolor=GREY, xanchor="left", standoff=8, font={"size": 12},
        )  # fmt: skip


def _apart(heights: Sequence[float]) -> list[float]:
    """Ascending heights moved as little as needed to stand a label's line apart.

    >>> _apart([0.0, 2.0, 100.0])
    [-7.5, 9.5, 100.0]
    """
    groups: list[list[float]] = []  # [sum of wished places of the first, count]
    for height in heights:
        groups.append([height, 1.0])
        while (
            len(groups) > 1
            and groups[-2][0] / groups[-2][1] + groups[-2][1] * LABEL_PIXELS > groups[-1][0] / groups[-1][1]
        ):
            total, count = groups.pop()
            groups[-1] = [groups[-1][0] + total - count * groups[-1][1] * LABEL_PIXELS, groups[-1][1] + count]
    return [total / count + i * LABEL_PIXELS for total, count in groups for i in range(int(count))]


def _better(figure: go.Figure, *, right: bool) -> None:
    corner = {"x": 1.0, "xanchor": "right", "xshift": -CAMERA} if right else {"x": 0.0, "xanchor": "left"}
    text = "better ↘" if right else "↙ better"
    figure.add_annotation(
        y=1.0, yref="paper", xref="paper", yanchor="bottom", text=text, showarrow=False, font={"color": GREY}, **corner
    )


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
    said = f"{base / (multiply + cast):.2f}× BF16" if timed else "no native kernel"
    place = [f"{html(name)}<br>{said}"]
    bars: list[tuple[str, float, str, dict[str, Any]]] = [("BF16", base, "base", {"color": GREY})]
    if timed:
        edge = {"color": colour, "width": 1}
        bars.append(("multiply", multiply, "cast", {"color": colour, "line": edge}))
        hatched = {"shape": "/", "fgcolor": colour, "bgcolor": "rgba(0,0,0,0)"}
        bars.append(("cast", cast, "cast", {"color": colour, "line": edge, "pattern": hatched}))
    for what, value, group, marker in bars:
        figure.add_bar(
            x=place, y=[value], name=what, offsetgroup=group, marker=marker, showlegend=False, **panel,
            hovertemplate=f"{what} %{{y:.3g}} ms<extra></extra>",
        )  # fmt: skip


def _rates(points: Sequence[GemmPoint]) -> dict[str, float]:
    """TFLOPS over all Linears: "base", and "product" and "whole" where every one of them has a kernel."""
    base, cast, product = (
        sum(p.count * (getattr(p, field) or 0.0) for p in points) for field in ("baseline_us", "cast_us", "matmul_us")
    )
    work = sum(2 * p.count * p.m * p.n * p.k for p in points) / 1e6
    timed = all(p.matmul_us is not None for p in points) and product > 0
    return {"base": work / base} | ({"product": work / product, "whole": work / (cast + product)} if timed else {})


def _scores(cells: Sequence[NeedleCell]) -> dict[tuple[int, int], float]:
    return _grid(cells, lambda cell: cell.score)


def _grid(cells: Sequence[NeedleCell], value: Callable[[NeedleCell], float | None]) -> dict[tuple[int, int], float]:
    """Means over the repeats by length and depth; a cell without a value is left out."""
    found: dict[tuple[int, int], list[float]] = {}
    for cell in cells:
        if (known := value(cell)) is not None:
            found.setdefault((cell.length, cell.depth), []).append(known)
    return {key: sum(values) / len(values) for key, values in found.items()}


def _graded_change(cell: NeedleCell) -> float:
    return (cell.logprob or 0.0) - (cell.baseline_logprob or 0.0)


def _maps(
    grids: Mapping[str, Mapping[tuple[int, int], float]],
    scale: Sequence[Sequence[object]],
    low: float,
    high: float,
    write: Callable[[float], str],
) -> go.Figure:
    figure = make_subplots(rows=1, cols=max(1, len(grids)), subplot_titles=[html(n) for n in grids], shared_yaxes=True)
    for column, grid in enumerate(grids.values(), start=1):
        lengths, depths = sorted({key[0] for key in grid}), sorted({key[1] for key in grid})
        table = [[grid.get((length, depth)) for length in lengths] for depth in depths]
        figure.add_heatmap(
            z=table, x=[f"{length:,}" for length in lengths], y=[f"{depth} %" for depth in depths], zmin=low, zmax=high,
            colorscale=scale, showscale=False, xgap=3, ygap=3, row=1, col=column,
            text=[["" if value is None else write(value) for value in line] for line in table], texttemplate="%{text}",
            hovertemplate="length %{x} tokens, depth %{y}: %{text}<extra></extra>",
        )  # fmt: skip
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_yaxes(title="depth", col=1)
    figure.update_xaxes(title="length (tokens)", type="category")
    return dressed(figure, 280, bottom=55)


def place_of(name: str) -> tuple[int, str]:
    """Block and projection of a layer's name; -1 outside the blocks.

    >>> place_of("model.layers.3.mlp.down_proj"), place_of("lm_head")
    ((3, 'mlp.down_proj'), (-1, 'lm_head'))
    """
    found = re.search(r"\.(\d+)\.(.+)$", name)
    return (int(found[1]), found[2]) if found else (-1, name)


def short_part(part: str) -> str:
    """A projection's name as an axis bears it, escaped."""
    return html(part.rsplit(".", 1)[-1].removesuffix("_proj"))


def _dash(symbol: str) -> str:
    return {"square": "dash", "diamond": "dot"}.get(symbol.removesuffix("-open"), "solid")


def _ticks(count: int) -> list[int]:
    return list(range(0, count, max(1, count // 10)))


def html(text: str) -> str:
    """Plotly draws a few HTML tags in text: none may come from a name.

    >>> html("<b>x</b>")
    '&lt;b&gt;x&lt;/b&gt;'
    """
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def dressed(figure: go.Figure, height: int, *, top: int = 34, bottom: int = 60) -> go.Figure:
    """The figure with the height (pixels), margins, legend and type size that all have."""
    figure.update_layout(
        height=height, margin={"l": 10, "r": 20, "t": top, "b": bottom}, hoverlabel={"align": "left"}, separators=".,",
        legend={"orientation": "h", "yref": "container", "yanchor": "bottom", "y": 0, "x": 0}, font={"size": 13},
    )  # fmt: skip
    return figure
