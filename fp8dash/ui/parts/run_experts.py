"""A run's mixture of experts: whom the router chose, and how often the recipe made it choose others."""

import streamlit as st

from fp8dash.choose.measurements import BY_EXPERT
from fp8dash.choose.records import Measurement
from fp8dash.report.numbers import three
from fp8dash.ui.charts.experts import expert_map
from fp8dash.ui.frame import draw
from fp8dash.ui.words import many, plain


def experts_of(numbers: list[Measurement]) -> None:
    """The answer in a sentence, then tokens by expert."""
    shares = {m.label: m.value for m in numbers if m.name == BY_EXPERT and m.value is not None}
    if not shares:
        return
    whole = {m.name: m for m in numbers if not m.label}
    st.header("Experts", anchor=False)
    st.markdown(f"{_changed(numbers)} {_unreached(whole['experts_unreached'])}")
    draw(expert_map(shares), key="run_experts", alt="Share of tokens by expert and layer")


def _changed(numbers: list[Measurement]) -> str:
    by_layer = {m.label: m.value or 0.0 for m in numbers if m.name == "routing_changed" and m.label}
    mean = sum(by_layer.values()) / len(by_layer)
    if not mean:
        return "The router chooses the baseline’s experts for every token."
    most = max(by_layer, key=lambda name: by_layer[name])
    return (
        f"The router chooses other experts than the baseline’s for {three(100 * mean)} % of the tokens, most often in "
        f"{plain(most)}: {three(100 * by_layer[most])} %."
    )


def _unreached(row: Measurement) -> str:
    if not row.value:
        return "Every expert was reached by some token."
    return (
        f"{many(int(row.value), 'expert')} reached by no token of the windows read: {plain(row.note)}. What this run "
        "says of them rests on their weights alone."
    )
