"""One run: its numbers with their provenance, its layers, stages and log."""

from collections.abc import Sequence

import streamlit as st

from db.board import Choice, Standing
from db.rows import FINISHED, Run
from db.standings import NOTE_LENGTH
from fp8dash.choose.measurements import PERCENTILES, metric_of
from fp8dash.choose.metrics import METRICS
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import BASELINE, Measurement
from fp8dash.errors import InvalidChoice
from fp8dash.report.numbers import shown
from fp8dash.report.ship_words import beside_loss
from fp8dash.report.tasks import task_lines
from fp8dash.ui import linked
from fp8dash.ui.charts.gemm import gemm_bars
from fp8dash.ui.charts.looks import look
from fp8dash.ui.charts.needles import needle_maps
from fp8dash.ui.frame import Frame, draw, glyph, guarded, zone
from fp8dash.ui.parts import decoding, needles
from fp8dash.ui.parts.answer import loss
from fp8dash.ui.parts.recipe_words import in_words
from fp8dash.ui.parts.run_costs import sensitivity
from fp8dash.ui.parts.run_experts import experts_of
from fp8dash.ui.parts.run_facts import how_to_serve, provenance
from fp8dash.ui.parts.run_gemm import rates
from fp8dash.ui.parts.run_layers import BY_LAYER, gradients_of, layers_of, scales
from fp8dash.ui.parts.run_numbers import all_numbers, divergence, task_scores
from fp8dash.ui.parts.run_stored import stored_of
from fp8dash.ui.parts.stages import progress
from fp8dash.ui.words import moment, plain, setting, short


def page(frame: Frame, run_id: str) -> None:
    """The run in full: each section by itself, so that a section that fails does not take the others down."""
    run = frame.store.run(run_id)
    numbers = frame.store.measurements([run_id])[run_id]
    (row,) = frame.store.standings(Choice(ids=(run_id,)))
    _head(frame, run, row)
    st.fragment(guarded(_live), run_every=1.0 if run.is_active else None)(frame, run.id, run.state)
    _warnings(run, numbers, row)
    _note(frame, row)
    for section in (_measured, _by_layer, _costs, _speed_and_needles, _served):
        guarded(section)(frame, run, numbers)


def _head(frame: Frame, run: Run, row: Standing) -> None:
    """The answer, what was run, and the buttons to go on."""
    st.title(_headline(run, row), anchor=False)
    if row.kld is not None and not row.is_baseline:
        st.markdown(plain(f"{beside_loss(row)}."))
    where = f"{plain(short(run.model))}, {plain(short(run.corpus))}"
    how = "" if run.unreadable else f", {setting(run.request, run.facts)}"
    st.markdown(f"`{run.recipe}` on {where}{how}")
    _recipe(run.recipe)
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button("All runs", key="run_all"):
            frame.go("runs")
        if st.button("Again with changes", key="run_again", disabled=bool(run.unreadable)):
            frame.go("new_run", **{"from": run.id})


def _warnings(run: Run, numbers: Sequence[Measurement], row: Standing) -> None:
    if faults := run.facts.get("faults"):
        st.warning(plain(f"Wrong in the checkpoint: {'; '.join(map(str, faults))}."))
    if row.is_partly_cast:
        st.warning(
            f"{row.uncast_share:.0%} of the blocks’ matrix weights were left in BF16: loss, size and speed are those "
            "of a partly cast model. The tree under “Layers” shows which weights were not cast, and why."
        )
    if any(m.name == "kv_scales_at_one" and m.value == 1.0 for m in numbers):
        st.warning(
            "Every KV scale is 1.0: nothing was calibrated, and keys and values beyond the format’s range are clipped."
        )


def _measured(frame: Frame, run: Run, numbers: Sequence[Measurement]) -> None:
    """All numbers in a table, then the divergence by token, calibrated scales and tasks."""
    all_numbers([m for m in numbers if not m.label or not _has_a_place_of_its_own(m)])
    percentiles = [m for m in numbers if m.name in PERCENTILES]
    if percentiles and run.backend != BASELINE:
        divergence(percentiles, _unlabelled(numbers))
    if calibrated := [m for m in numbers if m.label and m.name in BY_LAYER]:
        scales(calibrated)
    if lines := task_lines(frame.store, [run.id]):
        task_scores(lines)


def _by_layer(frame: Frame, run: Run, numbers: Sequence[Measurement]) -> None:
    """Coverage, and error and gradients by layer."""
    stored_of(run)
    if layers := frame.store.layers([run.id])[run.id]:
        layers_of(layers, int(run.facts.get("parameters") or 0))
    experts_of([m for m in numbers if metric_of(m).stage == "experts"])
    if gradients := [m for m in numbers if metric_of(m).stage == "gradients"]:
        gradients_of(gradients)


def _costs(frame: Frame, run: Run, numbers: Sequence[Measurement]) -> None:
    """What each group of Linears costs."""
    if rows := frame.store.sensitivities([run.id])[run.id]:
        sensitivity(frame, run, rows, _unlabelled(numbers))


def _speed_and_needles(frame: Frame, run: Run, numbers: Sequence[Measurement]) -> None:
    """GEMM times beside needles, then decoding."""
    name = run.preset or run.recipe
    points, cells = frame.store.gemm_points([run.id])[run.id], frame.store.needle_cells([run.id])[run.id]
    left, right = st.columns([1.7, 1], gap="large")
    if points:
        looks = {name: look(run.recipe, run.backend)}
        with left:
            st.header("GEMM time of all Linears", anchor=False)
            draw(gemm_bars({name: points}, looks), key="run_gemm", alt="GEMM times")
            rates(name, points, looks, numbers)
    if cells:
        with right:
            st.header("Needles by length and depth", anchor=False)
            draw(needle_maps({name: cells}), key="run_needle", alt="Needle scores")
        needles.of_run(name, cells)
    decoding.of_run(frame, run, name)


def _served(frame: Frame, run: Run, numbers: Sequence[Measurement]) -> None:
    """How to serve the recipe, where its numbers come from, and the log."""
    if run.backend != BASELINE:
        how_to_serve(run, frame.store.artefacts([run.id])[run.id])
    provenance(frame, run)


def _unlabelled(numbers: Sequence[Measurement]) -> dict[str, Measurement]:
    """The numbers of the whole run, by name."""
    return {m.name: m for m in numbers if not m.label}


def _recipe(text: str) -> None:
    """What the recipe does to each operand, in a picture and in words."""
    try:
        recipe = parse_recipe(text)
    except InvalidChoice:  # written by another version
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        glyph(recipe)
        st.markdown(f":small[{plain(' '.join(in_words(recipe)))}]")


def _headline(run: Run, row: Standing) -> str:
    name = plain(run.preset or run.recipe)
    if run.state != FINISHED:
        return f"{name} is {run.state}" + (f" at {run.stage}" if run.stage else "")
    if row.kld is None and row.ppl is not None:
        return f"{name}: perplexity {shown(METRICS['ppl'], row.ppl)}, measured against no baseline"
    if row.kld is None or row.is_baseline:
        return f"{name} is finished"
    return loss(row)


def _live(frame: Frame, run_id: str, state: str) -> None:
    run = frame.store.run(run_id)
    if run.state != state:
        st.rerun()  # the rest of the page has new rows
    progress(run, frame.store.stages([run_id])[run_id])
    if run.error:
        st.error(plain(run.error))
    if run.unreadable:
        st.warning(plain(run.unreadable))


def _note(frame: Frame, row: Standing) -> None:
    """The note on the run, and whether it is pinned."""
    if row.note:
        st.info(plain(row.note))
        st.caption(f"{plain(row.note_by)}, {moment(row.note_at, zone())}")
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.toggle(
            "Pinned",
            row.pinned,
            key="run_pinned",
            on_change=guarded(_pin),
            args=(frame, row.run),
            help="Pinned runs have a star on the leaderboard, for everyone.",
        )
        with st.popover("Edit the note" if row.note else "Add a note", type="tertiary"):
            note = st.text_area("Note", row.note, max_chars=NOTE_LENGTH, key=f"run_note_{row.note_at}")
            owner = linked.text_input("By", key="owner", max_chars=60, placeholder="your name")
            if st.button("Save", key="run_note_save"):
                frame.store.annotate(row.run, note or "", owner or "")
                st.rerun()


def _pin(frame: Frame, run_id: str) -> None:
    (frame.store.pin if st.session_state["run_pinned"] else frame.store.unpin)(run_id)


def _has_a_place_of_its_own(m: Measurement) -> bool:
    return metric_of(m).stage in ("experts", "gradients", "tasks") or m.name in (*BY_LAYER, *PERCENTILES)
