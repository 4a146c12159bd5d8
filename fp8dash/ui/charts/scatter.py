"""Quality against a second metric, one point per run. Standings to a plotly figure; no streamlit, no database."""

import math
from collections.abc import Collection, Mapping, Sequence

import plotly.graph_objects as go

from fp8dash.choose.metrics import METRICS, Metric
from fp8dash.choose.records import EMULATED, NATIVE
from fp8dash.report.comparison import Standing
from fp8dash.report.numbers import heading, shown, three
from fp8dash.ui.charts.dress import CAMERA, dressed, floor_line, html, log_span, log_ticks
from fp8dash.ui.charts.looks import GREY, SYMBOLS, Look, look, main_cast, tile_colour

LABELLED = 8  # points that are named directly, at most
LABEL_PIXELS, PLOT_PIXELS = 17, 280  # a label's line, and the plot's height without its margins


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
        x=[_x(row, x) for row in best],
        y=[row.kld for row in best],
        mode="lines",
        name="Pareto front",
        line={"color": GREY, "width": 1.5, "dash": "dot"},
        hoverinfo="skip",
    )
    alike: dict[Look, list[Standing]] = {}
    for row in points:
        alike.setdefault(look(row.recipe, "predicted" if row.run in predicted else row.backend), []).append(row)
    for drawn, some in alike.items():
        figure.add_trace(_points(drawn, some, x, intervals))
    _legend(figure, points)
    _baseline_line(figure, rows, points, x)
    floor_line(figure, {row.kld_noise_floor for row in points}, _y_range(points, intervals))
    if points and len(points) <= LABELLED:
        _label(figure, points, x, _y_range(points, intervals) or [0.0, 1.0])
    figure.update_xaxes(title=heading(x), range=_x_range(points, x), zeroline=False)
    span = _y_range(points, intervals)
    figure.update_yaxes(title="KLD from BF16 (nats, log)", type="log", range=span, **log_ticks(span))
    _better(figure, right=x.better == "higher")
    return dressed(figure, PLOT_PIXELS + 114, bottom=80)


def _drawable(row: Standing, x: Metric) -> bool:
    values = (row.kld, getattr(row, x.name))
    return not row.is_baseline and all(v is not None and math.isfinite(v) for v in values) and (row.kld or 0) > 0


def _x(row: Standing, x: Metric) -> float:
    return float(getattr(row, x.name)) / x.per


def _points(
    drawn: Look, rows: Sequence[Standing], x: Metric, intervals: Mapping[str, tuple[float, float]]
) -> go.Scatter:
    """The runs of one look: one trace per run would be slow with hundreds of runs."""
    klds, spreads = [row.kld or 0.0 for row in rows], [intervals.get(row.run) for row in rows]
    bounds = [spread or (kld, kld) for kld, spread in zip(klds, spreads, strict=True)]
    bars: dict[str, object] = {"visible": False}
    if any(spreads):
        lows, highs = zip(*bounds, strict=True)
        downs, ups = ([abs(end - kld) for end, kld in zip(ends, klds, strict=True)] for ends in (lows, highs))
        bars = {"array": ups, "arrayminus": downs, "thickness": 1.2, "width": 4}
    return go.Scatter(
        x=[_x(row, x) for row in rows],
        y=klds,
        mode="markers",
        showlegend=False,
        customdata=[row.run for row in rows],
        ids=[html(row.name) for row in rows],
        error_y=bars,
        text=[_provenance(row, spread) for row, spread in zip(rows, spreads, strict=True)],
        hovertemplate="%{text}<extra></extra>",
        marker={
            "symbol": drawn.symbol,
            "size": 13,
            "color": drawn.colour,
            "line": {"width": 2.5 if "open" in drawn.symbol else 1},
        },
    )


def _provenance(row: Standing, spread: tuple[float, float] | None) -> str:
    """The hover text: recipe, values with the interval, and where they come from."""
    numbers = [
        f"{heading(METRICS[m])} {shown(METRICS[m], getattr(row, m))}"
        for m in ("kld", "gemm_speedup", "bits_per_weight")
    ]
    bounds = f"95 % interval [{three(spread[0])}, {three(spread[1])}]" if spread else "no interval: too few windows"
    numbers.insert(1, bounds)
    source = [f"{row.backend} on {html(str(row.device))}", f"run {row.run} of {html(row.owner)}, {row.created[:10]}"]
    return "<br>".join([f"<b>{html(row.name)}</b>", html(row.recipe), *numbers, *source, "click: open the run"])


def _legend(figure: go.Figure, points: Sequence[Standing]) -> None:
    casts = [cast for cast in (main_cast(row.recipe) for row in points) if cast]
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
    kinds: dict[str, str] = {NATIVE: "circle", EMULATED: "circle-open"}
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


def _x_range(points: Sequence[Standing], x: Metric) -> list[float]:
    """Room for the points and, at the right, for a name; 1x is always within sight on the speed axis."""
    values = [_x(row, x) for row in points] + ([1.0] if x.name == "gemm_speedup" else [])
    if not values:
        return [0.0, 1.0]
    low, high = min(values), max(values)
    pad = max(high - low, high * 0.02) * 0.1
    return [low - pad, high + pad * 2.5]


def _y_range(points: Sequence[Standing], intervals: Mapping[str, tuple[float, float]]) -> list[float] | None:
    return log_span([row.kld or 0.0 for row in points] + [v for row in points for v in intervals.get(row.run, ())])


def _label(figure: go.Figure, points: Sequence[Standing], x: Metric, span: Sequence[float]) -> None:
    """Names beside the points, pushed apart where they would lie on each other."""
    ordered = sorted(points, key=lambda row: row.kld or 0.0)
    heights = [(math.log10(row.kld or 1.0) - span[0]) / (span[1] - span[0]) * PLOT_PIXELS for row in ordered]
    for row, height, moved in zip(ordered, heights, apart(heights), strict=True):
        figure.add_annotation(
            x=_x(row, x),
            y=math.log10(row.kld or 1.0),
            text=html(row.name),
            ax=34,
            ay=height - moved,
            showarrow=True,
            arrowhead=0,
            arrowwidth=0.8,
            arrowcolor=GREY,
            xanchor="left",
            standoff=8,
            font={"size": 12},
        )


def apart(heights: Sequence[float]) -> list[float]:
    """Ascending heights moved as little as needed to stand a label's line apart.

    >>> apart([0.0, 2.0, 100.0])
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
