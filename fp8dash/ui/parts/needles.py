"""How likely the hidden values were: the graded needles of one run, and of several side by side."""

from collections.abc import Collection, Mapping, Sequence

import streamlit as st

from fp8dash.choose.records import NeedleCell
from fp8dash.report.needles import baseline_difference, graded_difference, mean_grade
from fp8dash.report.numbers import DASH, signed, three
from fp8dash.stats import Difference
from fp8dash.ui.charts.needles import needle_changes, needle_grade_changes, needle_grades
from fp8dash.ui.frame import draw
from fp8dash.ui.words import many, plain

MEANING = (
    "ln p is the mean log-probability of the hidden values’ tokens, teacher-forced after the same prompt through "
    "the same cache, in nats per token: 0 is certainty. It separates recipes that all find every needle."
)


def of_run(name: str, cells: Sequence[NeedleCell]) -> None:
    """The graded map of a run and what it lost to the unquantized model, cell by cell."""
    difference = baseline_difference(cells)
    if difference is None:
        return
    st.header("How likely the hidden values were", anchor=False)
    st.markdown(
        f"ln p is {three(mean_grade(cells))} nats per token over {many(len(cells), 'cell')}; difference from BF16 on "
        f"the same prompts: {in_words(difference)}."
    )
    left, right = st.columns(2, gap="large")
    with left:
        draw(needle_grades({"ln p": cells}), key="run_needle_grades", alt=f"Needle ln p of {name}")
    with right:
        title = {"ln p minus BF16’s": cells}
        draw(needle_grade_changes(title), key="run_needle_changes", alt=f"Needle ln p of {name} minus BF16’s")
    if any(cell.baseline_score not in (None, cell.score) for cell in cells):
        figure = needle_changes({"share found minus BF16’s": cells})
        draw(figure, key="run_needle_lost", alt=f"Needle scores of {name} minus BF16’s")
    st.caption(MEANING)


def changed(by_run: Mapping[str, Sequence[NeedleCell]]) -> bool:
    """Exact scores minus the unquantized model's; False if some cell does not store them."""
    cells = [cell for run_cells in by_run.values() for cell in run_cells]
    if any(cell.baseline_score is None for cell in cells):
        return False
    if all(cell.score == cell.baseline_score for cell in cells):
        st.markdown("All needle scores equal BF16’s on the same prompts.")
        return True
    st.markdown("Share found minus BF16’s on the same prompts:")
    draw(needle_changes(by_run), key="compare_needles_lost", alt="Needle scores minus BF16’s")
    return True


def compared(by_run: Mapping[str, Sequence[NeedleCell]], baselines: Collection[str]) -> None:
    """Graded needles of several runs: a row each, minus BF16's and minus the first cast run's, and the maps."""
    graded = {name: cells for name, cells in by_run.items() if mean_grade(cells) is not None}
    if not graded:
        return
    st.header("How likely the hidden values were", anchor=False)
    cast = {name: cells for name, cells in graded.items() if name not in baselines}
    st.markdown(_table(graded, cast))
    st.caption(f"{MEANING} Differences are paired over cells, with their 95 % bootstrap interval.")
    draw(needle_grades(graded), key="compare_needle_grades", alt="Needle ln p")
    if changed := {name: cells for name, cells in cast.items() if baseline_difference(cells)}:
        st.markdown("ln p minus BF16’s on the same prompts:")
        draw(needle_grade_changes(changed), key="compare_needle_changes", alt="Needle ln p minus BF16’s")


def in_words(difference: Difference | None) -> str:
    """A difference with its interval, and whether it is a tie.

    >>> in_words(Difference(-0.0123, -0.02, -0.004)), in_words(Difference(0.001, -0.002, 0.004)), in_words(None)
    ('−0.0123 [−0.0200, −0.00400]', '+0.00100 [−0.00200, +0.00400], tied', '—')
    """
    if difference is None:
        return DASH
    if difference.low is None or difference.high is None:
        return f"{signed(difference.mean)}, too few cells for an interval"
    tie = ", tied" if difference.is_tie else ""
    return f"{signed(difference.mean)} [{signed(difference.low)}, {signed(difference.high)}]{tie}"


def _table(graded: Mapping[str, Sequence[NeedleCell]], cast: Mapping[str, Sequence[NeedleCell]]) -> str:
    first = next(iter(cast), None)
    others = len(cast) > 1
    last = f" minus {plain(first)} |" if first and others else ""
    lines = [
        f"| Run | Cells | ln p (nats per token) | minus BF16 |{last}",
        "|:--|--:|--:|--:|" + ("--:|" if last else ""),
    ]
    for name, cells in graded.items():
        base = in_words(baseline_difference(cells)) if name in cast else DASH
        row = f"| {plain(name)} | {len(cells)} | {three(mean_grade(cells))} | {plain(base)} |"
        if last and first:
            against = in_words(graded_difference(cells, cast[first])) if name in cast and name != first else DASH
            row += f" {plain(against)} |"
        lines.append(row)
    return "\n".join(lines)
