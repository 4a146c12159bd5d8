"""What each group of Linears costs. Rows to a plotly figure; no streamlit, no database."""

from collections.abc import Sequence

import plotly.graph_objects as go

from fp8dash.choose.records import Sensitivity
from fp8dash.ui.charts.dress import dressed, html
from fp8dash.ui.charts.looks import COLOURS, GREY

RANKED = 20  # groups of Linears that are drawn, at most


def sensitivity_bars(rows: Sequence[Sensitivity], whole: float | None) -> go.Figure:
    """The costliest groups, worst at the top: KLD where each is cast alone, and what keeping it saves of the whole."""
    ranked = sorted(rows, key=lambda row: row.alone_kld, reverse=True)[:RANKED][::-1]
    names = [html(row.group) + (" (kept)" if row.kept else "") for row in ranked]
    figure = go.Figure()
    bars = [("cast alone", [row.alone_kld for row in ranked], COLOURS["row"])]
    if whole is not None:
        bars.insert(0, ("saved by keeping it in BF16", [whole - row.all_but_kld for row in ranked], COLOURS["1x16"]))
    for title, values, colour in bars:
        figure.add_bar(
            y=names,
            x=values,
            name=title,
            orientation="h",
            marker={"color": colour},
            hovertemplate=f"%{{y}}, {title}: %{{x:.3g}} nats<extra></extra>",
        )
    figure.update_xaxes(title="KLD (nats)", zeroline=True, zerolinecolor=GREY)
    figure.update_yaxes(type="category")
    figure.update_layout(barmode="group", bargap=0.3, bargroupgap=0.05, legend_traceorder="reversed")
    return dressed(figure, 120 + 32 * max(1, len(ranked)), bottom=85)
