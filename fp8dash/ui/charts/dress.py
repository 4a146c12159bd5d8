"""What all figures share: margins, type, ink, log axes, intervals and the toolbar. Pure functions, no streamlit."""

import math
from collections.abc import Collection, Sequence
from html import unescape
from typing import Any

import plotly.graph_objects as go

from fp8dash.report.numbers import powers, three
from fp8dash.ui.charts.looks import GREY

INKS = {False: "#2b3b43", True: "#d3dee1"}  # text on light and on dark
CAMERA = 34  # pixels that the toolbar's button takes at the top right
IMAGES = ("svg", "png")  # what the camera of a figure's toolbar saves


def config(key: str, image: str) -> dict[str, Any]:
    """Plotly's toolbar: one button, which saves the figure as an image; nothing is sent anywhere."""
    saved = {"format": image, "filename": f"fp8dash-{key.replace('_', '-')}", "scale": 2}
    return {
        "displaylogo": False,
        "scrollZoom": False,
        "displayModeBar": True,
        "modeBarButtons": [["toImage"]],
        "toImageButtonOptions": saved,
    }


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


def error_bars(mean: float, low: float | None, high: float | None) -> dict[str, object]:
    if low is None or high is None:
        return {"visible": False}
    return {"array": [high - mean], "arrayminus": [mean - low], "thickness": 1.2, "width": 4}


def floor_line(figure: go.Figure, floors: Collection[float | None], span: Sequence[float] | None) -> None:
    """The noise floor of the rows' baseline, where they have one; said at the edge where it is out of sight."""
    measured = [floor for floor in floors if floor]
    if not measured or not span:
        return
    floor = max(measured)
    seen = span[0] <= math.log10(floor) <= span[1]
    if seen:
        figure.add_hline(y=floor, line={"color": GREY, "width": 1, "dash": "dash"})
    figure.add_annotation(
        x=0,
        xref="paper",
        xanchor="left",
        yanchor="bottom",
        showarrow=False,
        font={"color": GREY, "size": 11},
        text=f"BF16 against float32: {three(floor)} nats{'' if seen else ' ↓'}",
        **({"y": math.log10(floor), "yref": "y"} if seen else {"y": 0, "yref": "paper"}),
    )


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


def log_span(values: Sequence[float]) -> list[float] | None:
    """A log axis's range with some room; what is not positive has no place on it."""
    drawable = [value for value in values if value > 0 and math.isfinite(value)]
    return [math.log10(min(drawable)) - 0.18, math.log10(max(drawable)) + 0.18] if drawable else None


BREAK = "<br>"  # a new line in Plotly's text


def html(text: str) -> str:
    """Plotly draws a few HTML tags in text: none may come from a name. `from_html` undoes it.

    >>> html("<b>x</b>")
    '&lt;b&gt;x&lt;/b&gt;'
    """
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def from_html(text: str) -> str:
    """The text of names and breaks that a figure draws.

    >>> from_html(html("a & <b>") + BREAK + "1.25")
    'a & <b> 1.25'
    """
    return unescape(text.replace(BREAK, " "))


def dressed(figure: go.Figure, height: int, *, top: int = 34, bottom: int = 60) -> go.Figure:
    """The figure with the height (pixels), margins, legend and type size that all have."""
    figure.update_layout(
        height=height,
        margin={"l": 10, "r": 20, "t": top, "b": bottom},
        hoverlabel={"align": "left"},
        separators=".,",
        legend={"orientation": "h", "yref": "container", "yanchor": "bottom", "y": 0, "x": 0},
        font={"size": 13},
    )
    return figure
