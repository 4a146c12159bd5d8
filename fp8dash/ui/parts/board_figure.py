"""The leaderboard's figure: KLD against speed, size or bits, the Pareto front drawn through."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import streamlit as st

from db.board import Choice, Standing
from fp8dash.choose.metrics import METRICS, Metric
from fp8dash.report.numbers import shown
from fp8dash.report.ship import SpeedUp
from fp8dash.report.ship_words import basis
from fp8dash.stats import pareto_front
from fp8dash.ui import linked
from fp8dash.ui.charts.scatter import quality_scatter
from fp8dash.ui.frame import Frame, draw_points
from fp8dash.ui.words import plain

AXES = {
    "gemm_speedup": "KLD against speed",
    "model_bytes": "KLD against size",
    "bits_per_weight": "KLD against bits per weight",
}
MOST_POINTS = 150  # the front, then the lowest KLDs


def figure(
    frame: Frame, choice: Choice, base: Sequence[Standing], speeds: Mapping[str, SpeedUp], elsewhere: str
) -> None:
    """The figure of a choice; `elsewhere` names a target other than the device that was measured on, or is empty."""
    some = frame.store.standings(dataclasses.replace(choice, sort="kld", order="ascending", limit=MOST_POINTS))
    timed = {row.run for row in some if row.gemm_speedup is not None} if not elsewhere else set(speeds)
    default = AXES["gemm_speedup" if all(row.run in timed for row in some) else "model_bytes"]
    axis = linked.segmented_control(
        "Figure",
        list(AXES.values()),
        default=default,
        required=True,
        key="x",
        label_visibility="collapsed",
    )
    metric = METRICS[next(name for name, title in AXES.items() if title == axis)]
    front = frame.store.front(choice, metric.name, metric.better)
    rows = list({row.run: row for row in (*front, *some)}.values())
    best = {row.run for row in front}
    predicted = {run for run, speed in speeds.items() if speed.basis == "predicted"}
    if elsewhere and metric.name == "gemm_speedup":  # the target is another device: its speeds, where they are known
        metric = _retitled(metric, speeds)
        times = {run: speed.times for run, speed in speeds.items()}
        rows = [dataclasses.replace(row, gemm_speedup=times.get(row.run)) for row in rows]
        best = _front(rows, metric.name)
    drawn = [row for row in rows if _is_drawn(row) and getattr(row, metric.name) is not None]
    if not drawn:
        st.info("No row has both a KLD and this number: choose another axis.")
        return
    scatter = quality_scatter([*base, *rows], metric, front=best, intervals=intervals(drawn), predicted=predicted)
    chosen = draw_points(scatter, key="leaderboard_scatter", alt=_described(drawn))
    if chosen:
        frame.go("runs", run=chosen[0])
    st.caption(" ".join(_notes(frame, choice, rows, drawn, metric.name, elsewhere)))


def _is_drawn(row: Standing) -> bool:
    """Whether a KLD has a place on a log axis."""
    return row.kld is not None and row.kld > 0


def _retitled(metric: Metric, speeds: Mapping[str, SpeedUp]) -> Metric:
    """The speed-up's axis, where what is drawn is predicted."""
    predicted = next((basis(speed) for speed in speeds.values() if speed.basis == "predicted"), "")
    return dataclasses.replace(metric, title=f"Speed-up {predicted}") if predicted else metric


def _front(rows: Sequence[Standing], x: str) -> set[str]:
    points = [(row.divergence, math.nan if (value := getattr(row, x)) is None else value) for row in rows]
    return {rows[i].run for i in pareto_front(points)}


def _notes(
    frame: Frame, choice: Choice, rows: Sequence[Standing], drawn: Sequence[Standing], x: str, elsewhere: str
) -> list[str]:
    """What the figure's marks mean, and what it leaves out."""
    notes = ["Colour is the tile, symbol the format; hollow where quality is emulated or speed predicted."]
    if elsewhere:
        notes.append(f"Speeds are those known for {plain(elsewhere)}.")
    if len(rows) >= MOST_POINTS:
        count = frame.store.standing_count(choice)
        notes.append(f"{len(drawn)} of {count:,} runs are drawn: the Pareto front and the lowest KLDs.")
    untimed = [plain(row.name) for row in rows if row.gemm_speedup is None]
    if below := [plain(row.name) for row in rows if not _is_drawn(row) and row.kld is not None]:
        notes.append(f"Not drawn, as a KLD of zero or less has no place on a log axis: {', '.join(below[:6])}.")
    if x == "gemm_speedup" and untimed:
        notes.append(f"Not drawn, as no native kernel was timed: {', '.join(untimed[:6])}.")
    return notes


def _described(rows: Sequence[Standing]) -> str:
    return "KLD of " + ", ".join(f"{row.name} {shown(METRICS['kld'], row.kld)}" for row in rows[:20])


def intervals(rows: Sequence[Standing]) -> dict[str, tuple[float, float]]:
    """The 95 % interval of each run's mean KLD over its windows."""
    return {
        row.run: (row.kld_low, row.kld_high) for row in rows if row.kld_low is not None and row.kld_high is not None
    }
