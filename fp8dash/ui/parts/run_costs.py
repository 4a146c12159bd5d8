"""What each group of Linears costs, and the mixed recipe that it suggests."""

import pandas as pd
import streamlit as st

from db.rows import Run
from fp8dash.choose.records import Measurement, Sensitivity
from fp8dash.report.numbers import three
from fp8dash.ui.charts.sensitivity import sensitivity_bars
from fp8dash.ui.frame import Frame, draw
from fp8dash.ui.words import many, plain


def sensitivity(frame: Frame, run: Run, rows: list[Sensitivity], numbers: dict[str, Measurement]) -> None:
    """The groups ranked by what they cost, and the mixed recipe with a button to queue it."""
    whole, mixed = (numbers[name].value if name in numbers else None for name in ("sensitivity_kld", "mixed_kld"))
    worst = max(rows, key=lambda row: row.alone_kld)
    st.header("What each part costs", anchor=False)
    st.markdown(
        f"Of {many(len(rows), 'group')} of Linears, **{plain(worst.group)}** costs most: {three(worst.alone_kld)} nats "
        f"when cast alone. All groups together cost {three(whole)}; the sum of the single costs is "
        f"{three(sum(row.alone_kld for row in rows))}."
    )
    draw(sensitivity_bars(rows, whole), key="run_sensitivity", alt="KLD of each group of Linears")
    if mixed is not None:
        _mixed(frame, run, [row for row in rows if row.kept], numbers)
    with st.expander("Every group"):
        columns = {
            "Group": [row.group for row in rows],
            "Linears": [row.linears for row in rows],
            "Parameters": [row.parameters for row in rows],
            "Bits/weight": [row.bits_per_weight for row in rows],
            "KLD, cast alone": [row.alone_kld for row in rows],
            "KLD, all others cast": [row.all_but_kld for row in rows],
            "In the mixed recipe": ["kept" if row.kept else "cast" for row in rows],
        }
        st.dataframe(pd.DataFrame(columns), hide_index=True, key="run_all_groups")


def _mixed(frame: Frame, run: Run, kept: list[Sensitivity], numbers: dict[str, Measurement]) -> None:
    written, text = {name: three(m.value) for name, m in numbers.items()}, numbers["mixed_kld"].note
    if not kept:
        st.markdown(f"The budget {plain(run.request.sensitivity.budget)} needs no group kept in BF16.")
        return
    st.markdown(
        f"Suggested under the budget {plain(run.request.sensitivity.budget)}: keep "
        f"{plain(', '.join(row.group for row in kept))} in BF16. Measured: {written['mixed_kld']} nats at "
        f"{written['mixed_bits_per_weight']} bits per weight; predicted from its parts: "
        f"{written['mixed_kld_predicted']}. Linears only, first windows, emulated."
    )
    st.code(text, language=None, wrap_lines=True)
    if st.button("Queue the mixed recipe", key="run_mixed"):
        frame.go("new_run", **{"from": run.id, "recipe": text})
