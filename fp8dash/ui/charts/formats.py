"""Number formats to plotly figures: pure functions, no streamlit.

A format has no tile here, so its hue is not a tile's: lines are told apart by a palette of their own and by names
written beside them.
"""

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from fp8dash.choose.formats import FloatFormat, Format, values
from fp8dash.report.numbers import powers
from fp8dash.ui.charts.dress import dressed
from fp8dash.ui.charts.looks import GREY

HUES = ("#14898a", "#8561b8", "#b0792a", "#5b7f3f", "#c2556e", "#4d79b3")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
LIMIT = "#c2453d"


def number_lines(formats: Sequence[Format], x: float | None, *, scaled: float | None = None) -> go.Figure:
    """Where each format's positive codes lie, and how far rounding may move a number there, on one log axis.

    With `scaled`, every format's largest code lies at that amax; else formats are drawn as they are.
    """
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.42, 0.58], vertical_spacing=0.06)
    for place, fmt in enumerate(formats):
        factor = scaled / fmt.max if scaled else 1.0
        hue, dash = HUES[place % len(HUES)], DASHES[place % len(DASHES)]
        codes = [value * factor for value in values(fmt) if value > 0]
        figure.add_scatter(
            x=codes,
            y=[fmt.name.upper()] * len(codes),
            mode="markers",
            showlegend=False,
            row=1,
            col=1,
            marker={"symbol": "line-ns", "size": 16, "line": {"width": 1.3, "color": hue}},
            hovertemplate="%{x:.6g}<extra>" + fmt.name.upper() + "</extra>",
        )
        edge_x, edge_y = _largest_errors(fmt, factor)
        figure.add_scatter(
            x=edge_x,
            y=edge_y,
            mode="lines",
            name=fmt.name.upper(),
            row=2,
            col=1,
            line={"color": hue, "width": 2, "dash": dash},
            hovertemplate="at %{x:.3g} at most %{y:.3g} %<extra>" + fmt.name.upper() + "</extra>",
        )
    if x:
        figure.add_vline(x=abs(x), line={"color": GREY, "width": 1.5, "dash": "dash"}, row="all", col=1)
    figure.update_yaxes(autorange="reversed", row=1, col=1)
    figure.update_yaxes(title="largest rounding error (%)", type="log", range=[-0.8, 2.1], row=2, col=1)
    figure.update_yaxes(tickvals=[0.2, 0.5, 1, 2, 5, 10, 20, 50, 100], row=2, col=1)
    figure.update_xaxes(type="log", **_decade_ticks(formats, x, scaled))
    figure.update_xaxes(
        title="magnitude (log)" if not scaled else f"magnitude (log), each format’s largest code at {scaled:g}",
        row=2,
        col=1,
    )
    return dressed(figure, 240 + 34 * len(formats) + 80, top=10, bottom=90)


def landings(
    curves: Mapping[str, Sequence[tuple[float, float]]], top: float, at: tuple[float, Mapping[str, float]]
) -> go.Figure:
    """Where an amax lands, amax over scale, for each rule over one binade of amax; beyond `top` it is clipped.

    `at` is the typed amax and its landing by rule. One small panel per rule, since most rules agree most of the time.
    """
    columns = max(1, len(curves))
    figure = make_subplots(
        rows=1, cols=columns, shared_yaxes=True, subplot_titles=list(curves), horizontal_spacing=0.02
    )
    ceiling = 1.4 * top  # floor lets an amax land at 2^(emax + 1): at most 1.33 of the largest code, in E2M1
    shapes: list[dict[str, object]] = []
    for column, (name, points) in enumerate(curves.items(), start=1):
        clips = at[1][name] > top
        number = "" if column == 1 else column
        axes = {"xref": f"x{number} domain", "yref": f"y{number}", "x0": 0, "x1": 1}
        shapes.append({**axes, "type": "rect", "y0": top, "y1": ceiling, "fillcolor": _faint(LIMIT), "line_width": 0})
        shapes.append(
            {**axes, "type": "line", "y0": top, "y1": top, "line": {"color": LIMIT, "width": 1.2, "dash": "dash"}}
        )
        for xs, ys, mode in (
            ([x for x, _ in points], [y for _, y in points], "lines"),
            ([at[0]], [at[1][name]], "markers"),
        ):
            figure.add_scatter(
                x=xs,
                y=ys,
                mode=mode,
                showlegend=False,
                row=1,
                col=column,
                line={"color": HUES[0], "width": 2},
                marker={"color": LIMIT if clips else HUES[0], "size": 11},
                hovertemplate="amax %{x:.6g} lands at %{y:.6g}<extra></extra>",
            )
    figure.update_layout(shapes=shapes)
    figure.update_yaxes(range=[0, ceiling], zeroline=False, tickvals=[0, top / 2, top])
    figure.update_yaxes(title="amax ÷ scale", col=1)
    figure.update_xaxes(title="amax", nticks=3, tickformat=".3~g", zeroline=False)
    return dressed(figure, 300, top=40, bottom=50)


def _faint(colour: str) -> str:
    """A colour to lie under others, on light and dark alike."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.12)"


def _largest_errors(fmt: Format, factor: float) -> tuple[list[float], list[float]]:
    """The most that rounding moves a number, in %, by magnitude: flat in the normals, steep where steps are equal."""
    smallest = fmt.min_subnormal if isinstance(fmt, FloatFormat) else 1.0
    flat = fmt.min_normal if isinstance(fmt, FloatFormat) else fmt.max
    knee = 50 * smallest / flat
    xs, ys = [smallest / 2, flat], [100.0, knee]
    if fmt.max > flat:
        xs, ys = [*xs, fmt.max], [*ys, knee]
    return [x * factor for x in xs], ys


def _decade_ticks(formats: Sequence[Format], x: float | None, scaled: float | None) -> dict[str, list[object]]:
    """Ticks at every decade, or every second or third, that the formats and the number span."""
    spans = []
    for fmt in formats:
        factor = scaled / fmt.max if scaled else 1.0
        smallest = fmt.min_subnormal if isinstance(fmt, FloatFormat) else 1.0
        spans += [math.log10(smallest / 2 * factor), math.log10(fmt.max * factor)]
    spans += [math.log10(abs(x))] if x else []
    low, high = math.floor(min(spans)), math.ceil(max(spans))
    step = max(1, math.ceil((high - low) / 12))
    ticks = [10.0**power for power in range(low, high + 1, step)]
    names = [powers(f"{tick:.0e}") if not 1e-3 <= tick <= 1e5 else f"{tick:,g}" for tick in ticks]
    return {"tickvals": list(ticks), "ticktext": list(names), "range": [min(spans) - 0.1, max(spans) + 0.1]}
