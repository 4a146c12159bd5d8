"""Profiles of tensors to plotly figures: pure functions, no streamlit.

Formats are told apart by a hue and a symbol of their own, as on the formats page; operands by panels.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from fp8dash.choose.casts import parse_cast
from fp8dash.choose.formats import FloatFormat, Format
from fp8dash.choose.records import BINADES, OUTLIER, LadderPoint, TensorProfile
from fp8dash.report.numbers import as_power, three
from fp8dash.ui.charts.dress import dressed, html
from fp8dash.ui.charts.formats import HUES
from fp8dash.ui.charts.layers import layer_maps, place_of
from fp8dash.ui.charts.looks import GREY, SYMBOLS

NORMAL, SUBNORMAL, LOST = "20,137,138", "176,121,42", "194,69,61"  # red, green, blue of a figure's shades
SHADE = 0.16
TICKS = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 100_000)


@dataclass(frozen=True, slots=True)
class Grid:
    """Where a format's codes lie once a scale has stretched them: magnitudes of the tensor's own numbers."""

    flushed: float  # at or below it a number becomes zero
    normal: float  # from here on full precision
    largest: float  # beyond it numbers are clipped


def grid_of(fmt: Format, scale: float) -> Grid:
    """A format's grid under a scale. An integer's steps are uniform: its whole range is drawn as subnormal.

    >>> from fp8dash.choose.formats import E4M3FN, INT8
    >>> grid_of(E4M3FN, 1.0), grid_of(INT8, 1.0)
    (Grid(flushed=0.0009765625, normal=0.015625, largest=448.0), Grid(flushed=0.5, normal=127.0, largest=127.0))
    """
    if isinstance(fmt, FloatFormat):
        return Grid(fmt.min_subnormal * scale / 2, fmt.min_normal * scale, fmt.max * scale)
    return Grid(scale / 2, fmt.max * scale, fmt.max * scale)


def histograms(profiles: Mapping[str, TensorProfile], grids: Mapping[str, Grid]) -> go.Figure:
    """Share of the non-zero elements in each binade, one panel per tensor, over the ranges of a format's grid there."""
    figure = make_subplots(
        rows=max(1, len(profiles)),
        cols=1,
        shared_xaxes=True,
        subplot_titles=list(map(html, profiles)),
        vertical_spacing=0.12,
    )
    low, high = _range(profiles.values(), grids.values())
    for row, (title, profile) in enumerate(profiles.items(), start=1):
        total = sum(profile.histogram) or 1
        kept = [(b, n) for b, n in zip(BINADES, profile.histogram, strict=True) if low <= b <= high]
        figure.add_bar(
            x=[b + 0.5 for b, _ in kept],
            y=[100 * n / total for _, n in kept],
            name=html(title),
            showlegend=False,
            width=0.9,
            marker={"color": GREY},
            customdata=[[as_power(2.0**b), as_power(2.0 ** (b + 1)), n] for b, n in kept],
            hovertemplate="%{customdata[0]} to %{customdata[1]}: %{y:.3g} %, %{customdata[2]:,} values<extra></extra>",
            row=row,
            col=1,
        )
        _shade(figure, grids[title], (low, high + 1.0), row)
    for name, colour in (("normals", NORMAL), ("subnormals, or an integer’s steps", SUBNORMAL), ("lost", LOST)):
        marker = {"symbol": "square", "size": 13, "color": f"rgba({colour},0.45)"}
        figure.add_scatter(x=[None], y=[None], mode="markers", name=name, marker=marker)
    ticks = range(low - low % 4, high + 2, 4)
    figure.update_xaxes(range=[low, high + 1], tickvals=list(ticks), ticktext=[as_power(2.0**b) for b in ticks])
    figure.update_xaxes(title="magnitude, by binade (log)", row=max(1, len(profiles)), col=1)
    figure.update_yaxes(title="elements (%)", rangemode="tozero")
    return dressed(figure, 60 + 190 * max(1, len(profiles)) + 80, top=34, bottom=90)


def spread_maps(maps: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """Amax over RMS by layer name, one map per kind: blocks downwards, projections rightwards, one log colour scale."""
    bar = {
        "title": "amax ÷ RMS",
        "tickvals": [math.log10(tick) for tick in TICKS],
        "ticktext": [f"{tick:,}" for tick in TICKS],
    }
    figure, rows = layer_maps(maps, hover="amax %{text} × RMS", bar=bar, colour=_decades, written=three)
    return dressed(figure, max(240, 15 * rows + 100), top=60, bottom=20)


def _decades(value: float) -> float | None:
    return math.log10(value) if value else None


def outlier_channels(profiles: Sequence[TensorProfile]) -> go.Figure:
    """The largest channels of one projection's inputs in every block: a channel that is large throughout is a line."""
    figure = go.Figure()
    marks = [
        (place_of(profile.name)[0], channel, ratio)
        for profile in profiles
        for channel, _, ratio in profile.outliers
        if ratio > OUTLIER
    ]
    figure.add_scatter(
        x=[block for block, _, _ in marks],
        y=[channel for _, channel, _ in marks],
        mode="markers",
        showlegend=False,
        text=[three(ratio) for *_, ratio in marks],
        name="outlier channels",
        marker={
            "size": [5 + 6 * math.log10(ratio) for *_, ratio in marks],
            "color": f"rgb({NORMAL})",
            "opacity": 0.75,
            "line": {"width": 0},
        },
        hovertemplate="block %{x}, channel %{y}: %{text} × the median channel<extra></extra>",
    )
    widest = max((profile.cols for profile in profiles), default=1)
    figure.update_yaxes(title="input channel", range=[-0.02 * widest, 1.02 * widest], zeroline=False)
    figure.update_xaxes(title="block", tickformat="d", zeroline=False, range=[-0.7, len(profiles) - 0.3])
    return dressed(figure, 330, bottom=60)


def ladder_lines(points: Mapping[str, Sequence[LadderPoint]]) -> go.Figure:
    """SQNR from coarse scales to fine, a panel per operand, a line per format; dashed: without outlier channels."""
    figure = make_subplots(
        rows=1,
        cols=max(1, len(points)),
        shared_yaxes=True,
        subplot_titles=list(map(html, points)),
        horizontal_spacing=0.04,
    )
    for column, operand_points in enumerate(points.values(), start=1):
        formats = dict.fromkeys(parse_cast(point.cast).format.name for point in operand_points)
        for place, name in enumerate(formats):
            mine = [point for point in operand_points if parse_cast(point.cast).format.name == name]
            _line(figure, mine, (name, HUES[place % len(HUES)]), column)
    for name, dash in (("all channels", "solid"), ("without the outlier channels", "dot")):
        figure.add_scatter(x=[None], y=[None], mode="lines", name=name, line={"color": GREY, "dash": dash})
    figure.update_yaxes(title="SQNR (dB)", col=1)
    figure.update_xaxes(title="scales, coarse to fine", type="category")
    return dressed(figure, 400, top=40, bottom=110)


def step(point: LadderPoint) -> str:
    """A cast's tile and rule, without its format.

    >>> step(LadderPoint("", "", "e4m3fn/1x32/rceil", None, None, 0.0, 0.0, 8.0))
    '1x32/rceil'
    """
    return point.cast.partition("/")[2]


def _line(figure: go.Figure, points: Sequence[LadderPoint], drawn: tuple[str, str], column: int) -> None:
    name, hue = drawn
    for field, dash, suffix in (("sqnr_db", "solid", ""), ("bulk_sqnr_db", "dot", "-open")):
        figure.add_scatter(
            x=[step(point) for point in points],
            y=[getattr(point, field) for point in points],
            mode="lines+markers",
            name=name.upper(),
            legendgroup=name,
            showlegend=column == 1 and not suffix,
            line={"color": hue, "width": 1.8, "dash": dash},
            marker={"symbol": SYMBOLS.get(name, "cross") + suffix, "size": 8, "color": hue},
            row=1,
            col=column,
            hovertemplate="%{x}: %{y:.1f} dB<extra>" + name.upper() + (", bulk" if suffix else "") + "</extra>",
        )


def _shade(figure: go.Figure, grid: Grid, span: tuple[float, float], row: int) -> None:
    """The ranges of the grid within the axis: lost, subnormal, normal, lost."""
    edges = [span[0], *(min(max(math.log2(x), span[0]), span[1]) for x in _edges(grid)), span[1]]
    for left, right, colour in zip(edges, edges[1:], (LOST, SUBNORMAL, NORMAL, LOST), strict=False):
        if right > left:
            figure.add_vrect(
                x0=left, x1=right, fillcolor=f"rgba({colour},{SHADE})", line_width=0, layer="below", row=row, col=1
            )


def _edges(grid: Grid) -> tuple[float, float, float]:
    return grid.flushed, grid.normal, grid.largest


def _range(profiles: Iterable[TensorProfile], grids: Iterable[Grid]) -> tuple[int, int]:
    """The first and last binade that holds an element, or is the grid's, within BINADES."""
    held = [b for profile in profiles for b, n in zip(BINADES, profile.histogram, strict=True) if n]
    edges = [math.floor(math.log2(x)) for grid in grids for x in _edges(grid)]
    binades = [min(max(b, BINADES[0]), BINADES[-1]) for b in (*held, *edges)]
    return min(binades), max(binades)
