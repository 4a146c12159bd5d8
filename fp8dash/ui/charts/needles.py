"""Retrieval by length and depth. Needle cells to plotly figures; no streamlit, no database."""

from collections.abc import Callable, Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from fp8dash.choose.records import NeedleCell
from fp8dash.report.numbers import signed, three
from fp8dash.ui.charts.dress import dressed, html
from fp8dash.ui.charts.looks import AROUND_ZERO, TEAL


def needle_maps(cells: Mapping[str, Sequence[NeedleCell]]) -> go.Figure:
    """Each run's retrieval score by length and depth, the number in each cell."""
    return _maps({name: _scores(run_cells) for name, run_cells in cells.items()}, TEAL, 0.0, 1.0, share_text)


def needle_differences(cells: Mapping[str, Sequence[NeedleCell]], baseline: Sequence[NeedleCell]) -> go.Figure:
    """Each run's score minus the baseline's, on a scale centred at zero; cells that only one has are left out."""
    base = _scores(baseline)
    grids = {
        name: {key: score - base[key] for key, score in _scores(run_cells).items() if key in base}
        for name, run_cells in cells.items()
    }
    return _maps(grids, AROUND_ZERO, -1.0, 1.0, _signed_share)


def needle_changes(cells: Mapping[str, Sequence[NeedleCell]]) -> go.Figure:
    """Each run's score minus the unquantized model's on the same prompts, on a scale centred at zero."""
    grids = {
        name: _grid(run_cells, lambda c: None if c.baseline_score is None else c.score - c.baseline_score)
        for name, run_cells in cells.items()
    }
    return _maps(grids, AROUND_ZERO, -1.0, 1.0, _signed_share)


def needle_grades(cells: Mapping[str, Sequence[NeedleCell]]) -> go.Figure:
    """Each run's mean log-probability of the values' tokens by length and depth, nats per token; 0 is certainty."""
    grids = {name: _grid(run_cells, lambda c: c.logprob) for name, run_cells in cells.items()}
    lowest = min((value for grid in grids.values() for value in grid.values()), default=0.0)
    return _maps(grids, TEAL, lowest or -1.0, 0.0, three)


def needle_grade_changes(cells: Mapping[str, Sequence[NeedleCell]]) -> go.Figure:
    """Each run's log-probability minus the unquantized model's on the same prompts, on a scale centred at zero."""
    grids = {
        name: _grid(run_cells, lambda c: None if None in (c.logprob, c.baseline_logprob) else _graded_change(c))
        for name, run_cells in cells.items()
    }
    most = max((abs(value) for grid in grids.values() for value in grid.values()), default=0.0) or 1.0
    return _maps(grids, AROUND_ZERO, -most, most, signed)


def share_text(value: float) -> str:
    """A share in a cell.

    >>> share_text(1.0), share_text(0.333)
    ('1', '0.33')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".") if value not in (0, 1) else f"{value:.0f}"


def _signed_share(value: float) -> str:
    return share_text(value) if value == 0 else f"{'+' if value > 0 else '−'}{share_text(abs(value))}"


def _scores(cells: Sequence[NeedleCell]) -> dict[tuple[int, int], float]:
    return _grid(cells, lambda cell: cell.score)


def _grid(cells: Sequence[NeedleCell], value: Callable[[NeedleCell], float | None]) -> dict[tuple[int, int], float]:
    """Means over the repeats by length and depth; a cell without a value is left out."""
    repeats: dict[tuple[int, int], list[float]] = {}
    for cell in cells:
        if (number := value(cell)) is not None:
            repeats.setdefault((cell.length, cell.depth), []).append(number)
    return {key: sum(values) / len(values) for key, values in repeats.items()}


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
            z=table,
            x=[f"{length:,}" for length in lengths],
            y=[f"{depth} %" for depth in depths],
            zmin=low,
            zmax=high,
            colorscale=scale,
            showscale=False,
            xgap=3,
            ygap=3,
            row=1,
            col=column,
            text=[["" if value is None else write(value) for value in line] for line in table],
            texttemplate="%{text}",
            hovertemplate="length %{x} tokens, depth %{y}: %{text}<extra></extra>",
        )
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_yaxes(title="depth", col=1)
    figure.update_xaxes(title="length (tokens)", type="category")
    return dressed(figure, 280, bottom=55)
