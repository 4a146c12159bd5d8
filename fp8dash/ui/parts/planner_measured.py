"""Measurements beside the planner's predictions: from this database's runs, and from a reader's own server."""

from collections.abc import Sequence

import streamlit as st

from fp8dash.choose.architecture import CONFIGS, Architecture
from fp8dash.predict.accelerators import Accelerator
from fp8dash.predict.roofline import Plan, per_million
from fp8dash.report.numbers import DASH, three
from fp8dash.report.planned import Point, by_name, measured_points
from fp8dash.ui.frame import Frame
from fp8dash.ui.words import plain


def dollars(value: float) -> str:
    """A price, in dollars."""
    return f"{value:,.2f}" if value >= 0.1 else three(value)


def here(frame: Frame, model: Architecture, accelerator: Accelerator, price: float) -> None:
    """The table of the runs that decoded this model on one such accelerator; nothing where there are none."""
    hub = CONFIGS[model.name][1] if model.name in CONFIGS else ""
    points = measured_points(frame.store, model, hub, accelerator)
    if not points:
        return
    st.header("Measured here", anchor=False)
    st.markdown("\n".join(_table(points, price)))
    matched = "by their model’s name alone" if by_name(model) else "by the number and shapes of their Linears"
    st.caption(
        f"Runs of this database on one {plain(accelerator.name)}, matched {matched}; the newest of each recipe. "
        "Random prompts through a plain torch loop, no server. The bound is what the roofline allows at 100 %, for "
        "the run’s own batch and context. More than 100 % means that weights stay in the device’s caches."
    )


def _table(points: Sequence[Point], price: float) -> list[str]:
    lines = [
        "| Batch | Recipe | Output tokens/s, measured | Share of predicted bound | $ / M output, measured | Run | "
        "How |",
        "|--:|:--|" + "--:|" * 3 + ":--|:--|",
    ]
    for point in points:
        run, speed = point.run, point.speed
        cost = dollars(per_million(price, 1, speed.tokens_per_s)) if price else DASH
        lines.append(
            f"| {speed.batch:,} | **{plain(run.preset or run.recipe)}** | {three(speed.tokens_per_s)} | "
            f"{_per_cent(point.share)} | {cost} | [{run.id}](runs?run={run.id}) | {plain(point.way)} |"
        )
    return lines


def own(name: str, plan: Plan, batch: int, context: float, measured: float, price: float) -> None:
    """What a reader measured with a server of their own, beside the prediction for the same recipe and devices.

    `batch` is the planned one, 0 where not even one request fits; `context` the tokens that a request holds on average.
    """
    st.header("Your measurement beside the prediction", anchor=False)
    lines = ["| " + plain(name) + " | Output tokens/s | Share of the bound | $ / M output |", "|:--|--:|--:|--:|"]
    speeds = {"**Your measurement**": measured}
    if batch:
        predicted = batch / plan.decode_s(batch, context)
        speeds |= {f"Predicted at batch {batch:,}": predicted, "Bound, predicted": predicted / plan.reach}
    most = speeds.get("Bound, predicted")
    for title, speed in speeds.items():
        cost = dollars(per_million(price, plan.devices, speed)) if price else DASH
        lines.append(f"| {title} | {three(speed)} | {_per_cent(speed / most if most else None)} | {cost} |")
    st.markdown("\n".join(lines))
    if most and measured > most:
        st.warning(
            "Your measurement exceeds the bound: it cannot be of the recipe, batch, token counts and number of "
            "devices above."
        )


def _per_cent(share: float | None) -> str:
    return DASH if share is None else f"{three(100 * share)} %"
