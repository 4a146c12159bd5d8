"""Numbers by layer: maps of blocks and projections, lines over blocks. Plotly figures; no streamlit, no database."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from fp8dash.choose.records import Layer
from fp8dash.ui.charts.dress import dressed, html
from fp8dash.ui.charts.looks import TEAL, Look, dash_of


def layer_map(layers: Sequence[Layer]) -> go.Figure:
    """Weight SQNR of every cast layer: blocks downwards, projections rightwards."""
    return sqnr_maps({"": {layer.name: layer.sqnr_db for layer in layers if layer.sqnr_db is not None}})


def sqnr_maps(maps: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """SQNR by layer name, one map per title: blocks downwards, projections rightwards, one colour scale for all."""
    figure, rows = layer_maps(maps, hover="%{z:.1f} dB", bar={"title": "dB"})
    titled = any(maps)
    return dressed(figure, max(220, 15 * rows + (100 if titled else 80)), top=60 if titled else 40, bottom=20)


def layer_maps(
    maps: Mapping[str, Mapping[str, float]],
    *,
    hover: str,
    bar: Mapping[str, Any],
    colour: Callable[[float], float | None] = float,
    written: Callable[[float], str] = str,
) -> tuple[go.Figure, int]:
    """Heat maps of numbers by layer name, one per title, all on one colour scale, and how many blocks they show.

    A cell's place on the scale is `colour` of its number; `hover` may name it as z, and as text what is `written`.
    """
    grids = [by_place(by_name.items()) for by_name in maps.values()]
    parts = list(dict.fromkeys(part for grid in grids for _, part in grid))
    blocks = sorted({block for grid in grids for block, _ in grid})
    figure = make_subplots(rows=1, cols=max(1, len(grids)), shared_yaxes=True, horizontal_spacing=0.04)
    for column, (title, grid) in enumerate(zip(maps, grids, strict=True), start=1):
        cells = [[grid.get((block, part)) for part in parts] for block in blocks]
        figure.add_heatmap(
            z=[[None if value is None else colour(value) for value in line] for line in cells],
            text=[["" if value is None else written(value) for value in line] for line in cells],
            x=[short_part(part) for part in parts],
            y=[str(block) if block >= 0 else "other" for block in blocks],
            hovertemplate=f"block %{{y}} %{{x}}: {hover}<extra></extra>",
            coloraxis="coloraxis",
            xgap=2,
            ygap=1,
            name=html(title),
            customdata=cells,
            row=1,
            col=column,
        )
        figure.update_xaxes(title=html(title) or None, side="top", row=1, col=column)
    figure.update_yaxes(autorange="reversed", type="category", dtick=max(1, len(blocks) // 10))
    figure.update_yaxes(title="block", col=1)
    whole = {"thickness": 12, "outlinewidth": 0, **bar}
    figure.update_layout(coloraxis={"colorscale": TEAL, "colorbar": whole})
    return figure, len(blocks)


def layer_lines(layers: Mapping[str, Sequence[Layer]], looks: Mapping[str, Look]) -> go.Figure:
    """Weight SQNR of the same projection in every block, one small panel per projection, one line per run."""
    grids = {
        name: by_place((layer.name, layer.sqnr_db) for layer in run_layers if layer.sqnr_db is not None)
        for name, run_layers in layers.items()
    }
    parts = list(dict.fromkeys(part for grid in grids.values() for _, part in grid))[:8]
    columns = min(4, max(1, len(parts)))
    figure = make_subplots(
        rows=max(1, math.ceil(len(parts) / columns)),
        cols=columns,
        shared_yaxes="all",
        shared_xaxes=True,
        subplot_titles=[short_part(part) for part in parts],
        vertical_spacing=0.16,
        horizontal_spacing=0.02,
    )
    for i, part in enumerate(parts):
        for name, grid in grids.items():
            here = sorted((block, sqnr) for (block, of_part), sqnr in grid.items() if of_part == part)
            figure.add_scatter(
                x=[block for block, _ in here],
                y=[sqnr for _, sqnr in here],
                mode="lines",
                name=html(name),
                line={"color": looks[name].colour, "width": 1.8, "dash": dash_of(looks[name].symbol)},
                legendgroup=name,
                showlegend=i == 0,
                row=i // columns + 1,
                col=i % columns + 1,
                hovertemplate="block %{x}: %{y:.1f} dB",
            )
    figure.update_yaxes(title="SQNR (dB)", col=1)
    figure.update_xaxes(tickformat="d", nticks=5)
    figure.update_xaxes(title="block", row=math.ceil(len(parts) / columns) or 1)
    return dressed(figure, 420, top=40, bottom=100)


def place_of(name: str) -> tuple[int, str]:
    """Block and projection of a layer's name, the same for all experts of a block; -1 outside the blocks.

    >>> place_of("model.layers.3.mlp.down_proj"), place_of("lm_head")
    ((3, 'mlp.down_proj'), (-1, 'lm_head'))
    >>> place_of("model.layers.3.mlp.experts.17.up_proj")
    (3, 'mlp.experts.up_proj')
    """
    numbered = re.search(r"\.(\d+)\.(.+)$", name)
    return (int(numbered[1]), re.sub(r"\.\d+(?=\.)", "", numbered[2])) if numbered else (-1, name)


def short_part(part: str) -> str:
    """A projection's name for an axis, escaped.

    >>> short_part("self_attn.q_proj"), short_part("mlp.experts.gate_proj")
    ('q', 'experts gate')
    """
    *above, last = part.removesuffix("_proj").split(".")
    return html(f"{above[-1]} {last}" if above and "expert" in above[-1] else last)


def by_place(values: Iterable[tuple[str, float]]) -> dict[tuple[int, str], float]:
    """Numbers by layer name as numbers by place: the median over a block's experts."""
    places: dict[tuple[int, str], list[float]] = {}
    for name, value in values:
        places.setdefault(place_of(name), []).append(value)
    return {place: median(of_place) for place, of_place in places.items()}
