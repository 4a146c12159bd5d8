"""Whom a router sends tokens to. Shares by expert to a plotly figure; no streamlit, no database."""

from collections.abc import Mapping

import plotly.graph_objects as go

from fp8dash.ui.charts.dress import dressed
from fp8dash.ui.charts.layers import place_of
from fp8dash.ui.charts.looks import TEAL

MOST_TICKS = 16
PALE = "#f2efe6"  # of a cell without a number: an expert that no token reached


def expert_map(shares: Mapping[str, float]) -> go.Figure:
    """The share of tokens that met each expert, by the expert's name: layers downwards, experts rightwards."""
    cells = {(place_of(f"{name}.")[0], int(name.rpartition(".")[2])): share for name, share in shares.items()}
    blocks, experts = (sorted({place[axis] for place in cells}) for axis in (0, 1))
    grid = [[cells.get((block, expert)) or None for expert in experts] for block in blocks]
    figure = go.Figure()
    figure.add_heatmap(
        z=grid,
        x=experts,
        y=[str(block) for block in blocks],
        colorscale=TEAL,
        zmin=0,
        zmax=max(cells.values()) or 1,
        colorbar={"title": "share of tokens", "thickness": 12, "outlinewidth": 0},
        hovertemplate="block %{y}, expert %{x}: %{z:.3f} of the tokens<extra></extra>",
        xgap=1,
        ygap=1,
        name="tokens",
    )
    figure.update_layout(plot_bgcolor=PALE)
    step = max(1, len(experts) // MOST_TICKS)
    figure.update_xaxes(title="expert", side="top", showgrid=False, tick0=0, dtick=step)
    figure.update_yaxes(title="block", autorange="reversed", type="category", dtick=max(1, len(blocks) // 10))
    return dressed(figure, max(220, 15 * len(blocks) + 120), top=70, bottom=20)
