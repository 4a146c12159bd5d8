"""A run’s measurements, each with its interval, unit and method, and how tokens differ from the baseline’s."""

import pandas as pd
import streamlit as st

from fp8dash.choose.measurements import HIGH, INTERVALS, LOW, MEASUREMENTS, PERCENTILES, end_name, metric_of
from fp8dash.choose.records import Measurement
from fp8dash.report.numbers import DASH, heading, shown, signed, three
from fp8dash.report.tasks import TaskLine
from fp8dash.ui.frame import metric_help

NUMBERS_HEIGHT = 420  # pixels: the table of all numbers scrolls, so that the figures are in reach
MEANS = ("kld", "kld_reverse", "top1", "top5", "delta_p", "delta_p_rms")  # what stands above the percentiles


def all_numbers(numbers: list[Measurement]) -> None:
    st.header("Measurements", anchor=False)
    metric_help()
    if not numbers:
        st.info("Nothing has been measured yet: the stages above show the run’s progress.")
        return
    values = {(m.name, m.label): m.value for m in numbers}
    listed = [m for m in numbers if not metric_of(m).end_of]
    metrics = [metric_of(m) for m in listed]
    table = pd.DataFrame(
        {
            "Measurement": [metric.title for metric in metrics],
            "Part": [m.label for m in listed],
            "Value": [shown(metric, m.value) for metric, m in zip(metrics, listed, strict=True)],
            "95 % interval": [_interval(m, values) for m in listed],
            "Unit": [metric.unit for metric in metrics],
            "Better": [metric.better or DASH for metric in metrics],
            "Backend": [m.backend for m in listed],
            "Note": [m.note for m in listed],
            "Method": [m.method for m in listed],
        }
    )
    table = table[[column for column in table if (table[column] != "").any()]]
    config = {
        "Measurement": st.column_config.TextColumn(width=190),
        "Part": st.column_config.TextColumn(width=70),
        "Value": st.column_config.TextColumn(width=100, alignment="right"),
        "95 % interval": st.column_config.TextColumn(width=175),
        "Note": st.column_config.TextColumn(width=200),
    }
    st.dataframe(table, hide_index=True, key="run_numbers", height=NUMBERS_HEIGHT, column_config=config)


def task_scores(lines: list[TaskLine]) -> None:
    """The numbers of lm-eval's tasks, as lm-eval reports them."""
    st.header("Tasks", anchor=False)
    scores = [(line, score) for line in lines for score in line.scores if score]
    table = pd.DataFrame(
        {
            "Task": [line.task for line, _ in scores],
            "Metric": [line.metric for line, _ in scores],
            "Value": [three(score.value) for _, score in scores],
            "Standard error": [three(score.stderr) for _, score in scores],
            "Better": [line.better or DASH for line, _ in scores],
            "Documents": [score.note for _, score in scores],
            "Method": [score.method for _, score in scores],
        }
    )
    right = st.column_config.TextColumn(alignment="right")
    columns = {"Value": right, "Standard error": right}
    st.dataframe(table, hide_index=True, key="run_tasks", height="content", column_config=columns)


def _interval(m: Measurement, values: dict[tuple[str, str], float | None]) -> str:
    """The interval of a number that has one; a dash if it has too few units."""
    ends = [(end_name(m.name, end), m.label) for end in (LOW, HIGH)]
    if m.name not in INTERVALS or not all(end in values for end in ends):
        return ""
    low, high = (values[end] for end in ends)
    return DASH if low is None or high is None else f"[{signed(low)}, {signed(high)}]"


def divergence(percentiles: list[Measurement], by_name: dict[str, Measurement]) -> None:
    """How tokens differ from the baseline's: what llama.cpp's --kl-divergence lists, one row per percentile."""
    st.header("Divergence from BF16, token by token", anchor=False)
    metrics = [MEASUREMENTS[name] for name in MEANS if name in by_name]
    means = [f"{metric.title} {shown(metric, by_name[metric.name].value)}" for metric in metrics]
    st.markdown(f"Means over tokens: {'; '.join(means)}. {_noise(by_name)}")
    table: dict[str, dict[str, str]] = {name: {} for name in PERCENTILES}
    for m in percentiles:
        table[m.name][m.label] = shown(metric_of(m), m.value)
    order = list(table["delta_p_tokens"])  # has the most percentiles
    columns = {heading(MEASUREMENTS[name]): [row.get(label, DASH) for label in order] for name, row in table.items()}
    st.dataframe(
        pd.DataFrame({"Tokens": order, **columns}),
        hide_index=True,
        key="run_divergence",
        height="content",
        column_config={title: st.column_config.TextColumn(alignment="right") for title in columns},
    )


def _noise(by_name: dict[str, Measurement]) -> str:
    """How the run's KLD compares with the noise floor."""
    floor, low = (by_name[name].value if name in by_name else None for name in ("kld_noise_floor", "kld_low"))
    if floor is None:
        return ""
    sentence = f"The same weights in float32 are {three(floor)} nats from BF16"
    if low is None:
        return f"{sentence}; too few windows to tell whether this run is above that."
    return (
        f"{sentence}: this run is indistinguishable from BF16."
        if low <= floor
        else f"{sentence}; this run is above that."
    )
