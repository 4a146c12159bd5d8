"""What a checkpoint stores that was measured as it is: the X-ray of its files, taken by the run."""

import pandas as pd
import streamlit as st

from db.rows import Run
from fp8dash.report.numbers import DASH, three
from fp8dash.ui.words import plain


def stored_of(run: Run) -> None:
    """How its matrices are cast, what its configuration calls that, and what our words cannot say of it."""
    castings = run.facts.get("castings")
    if not isinstance(castings, list) or not castings:
        return
    st.header("What the checkpoint stores", anchor=False)
    cast = sum(one["elements"] for one in castings if one["layout"])
    share = 100 * cast / sum(one["elements"] for one in castings)
    st.markdown(
        f"{plain(str(run.facts.get('checkpoint_scheme', '')))}: {three(share)} % of the matrix weights are codes."
    )
    table = pd.DataFrame(
        {
            "Cast": [one["cast"] or DASH for one in castings],
            "Stored as": [one["layout"] or "uncast" for one in castings],
            "Matrices": [one["matrices"] for one in castings],
            "Million weights": [round(one["elements"] / 1e6, 2) for one in castings],
        }
    )
    st.dataframe(table, hide_index=True, key="run_stored", height="content")
    if unsaid := run.facts.get("unsaid"):
        st.caption(plain(f"Beyond what a recipe can say: {'; '.join(map(str, unsaid))}."))
