"""All runs, live: how far each is, why one failed, cancel, retry and run again. `?run=` opens one, `?log=` its log."""

from collections.abc import Callable, Sequence

import streamlit as st

from db.rows import CANCELLED, FAILED, QUEUED, RUNNING, STATES, Run, Stage
from fp8dash.choose.recipe import Recipe, parse_recipe
from fp8dash.errors import Fp8dashError, InvalidChoice
from fp8dash.ui import linked
from fp8dash.ui.frame import Frame, glyph, guarded, say_error, worker_line, zone
from fp8dash.ui.pages import run as one_run
from fp8dash.ui.parts.stages import BADGES, progress
from fp8dash.ui.words import listed, many, moment, plain

PAGE = 25  # runs
LOG_LINES = 60
LIVE, IDLE = 1.0, 4.0  # seconds between two looks at the runs


def page(frame: Frame) -> None:
    """The list, or one run of it."""
    for run_id in frame.linked_runs("run"):
        one_run.page(frame, run_id)
        return
    head = st.empty()
    counts = frame.store.counts()
    worker_line(frame.store.workers(), waiting=counts[QUEUED])
    if queued := linked.ids("queued"):
        st.success(f"{many(len(queued), 'run')} queued. A request identical to an unfinished run joins that run.")
    with st.container(horizontal=True, vertical_alignment="bottom"):
        state = linked.pills("State", STATES, key="state")
        search = linked.text_input("Search", key="find", placeholder="recipe, model, study, owner or run", width=280)
    active = counts[QUEUED] + counts[RUNNING] > 0
    with head.container():
        st.title(_headline(counts), anchor=False)
    matching = frame.store.count(states=[state] if state else STATES, search=search or "")
    list_place = st.container()
    pages = -(-matching // PAGE)
    number = linked.pagination(pages)
    with list_place:
        live = st.fragment(guarded(_list), run_every=LIVE if active else IDLE)
        live(frame, state, search or "", number, counts)


def _headline(counts: dict[str, int]) -> str:
    if not sum(counts.values()):
        return "No run yet"
    by_state = [f"{counts[state]} {state}" for state in STATES if counts[state]]
    return f"{many(sum(counts.values()), 'run')}: {listed(by_state)}"


def _list(frame: Frame, state: str | None, search: str, number: int, counts: dict[str, int]) -> None:
    if counts != frame.store.counts():
        st.rerun()  # the headline, the pace and the number of pages belong to the page
    states = [state] if state else STATES
    shown = frame.store.runs(states=states, search=search, limit=PAGE, offset=(number - 1) * PAGE)
    if not shown:
        st.info("No run matches. Clear the state and the search, or queue a run on the page “New run”.")
        return
    stages = frame.store.stages([run.id for run in shown])
    for study in _studies(shown):
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.header(plain(study[0].study or "Single run"), anchor=False, width="content")
            st.caption(f"{plain(study[0].owner)}, {moment(study[0].created_at, zone())}", width="content")
        for run in study:
            guarded(_card)(frame, run, stages[run.id])


def _studies(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs of each study together, studies newest first, runs in the order in which they were submitted."""
    studies: dict[str, list[Run]] = {}
    for run in runs:
        studies.setdefault(run.study_id or run.id, []).append(run)
    return [sorted(study, key=lambda run: run.created_at) for study in studies.values()]


def _card(frame: Frame, run: Run, stages: Sequence[Stage]) -> None:
    with st.container(border=True, key=f"runs_card_{run.id}"):
        picture, what, strip, doors = st.columns([0.6, 1.85, 4.1, 3.4], vertical_alignment="center")
        with picture:
            glyph(_recipe(run))
        with what:
            st.markdown(
                f"**{plain(run.preset or 'Custom')}** :{BADGES[run.state]}-badge[{run.state}]  \n"
                f":small[{plain(run.recipe)}]"
            )
        with strip:
            progress(run, stages)
        with doors:
            _doors(frame, run)
        if run.error:
            st.error(plain(run.error))
        if run.unreadable:
            st.warning(plain(run.unreadable))
        if run.id in linked.ids("log"):
            st.code(frame.queue.log_tail(run.id, LOG_LINES) or "The log is empty so far.", language=None, height=260)


def _recipe(run: Run) -> Recipe:
    try:
        return parse_recipe(run.recipe)
    except InvalidChoice:
        return Recipe()


def _doors(frame: Frame, run: Run) -> None:
    """Cancel or retry, open, run again, log."""
    asked = f"runs_sure_{run.id}"
    if run.is_active and st.session_state.get(asked):
        st.markdown("Cancel this run? Finished stages are kept.")
        with st.container(horizontal=True, gap="small"):
            sure = st.button("Yes, cancel", key=f"runs_yes_{run.id}", type="primary")
            st.button("No", key=f"runs_no_{run.id}", on_click=_remember, args=(asked, False))
        if sure:
            _remember(asked, False)
            _act(frame.queue.cancel, run.id)
        return
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        if run.is_active:
            st.button("Cancel", key=f"runs_cancel_{run.id}", on_click=_remember, args=(asked, True))
        if run.state in (FAILED, CANCELLED) and st.button("Retry", key=f"runs_retry_{run.id}"):
            _act(frame.queue.retry, run.id)
        if st.button("Open", key=f"runs_open_{run.id}"):
            frame.go("runs", run=run.id)
        if st.button("Again with changes", key=f"runs_again_{run.id}", disabled=bool(run.unreadable)):
            frame.go("new_run", **{"from": run.id})
        if run.state != QUEUED:
            st.session_state.setdefault(f"runs_log_{run.id}", run.id in linked.ids("log"))
            st.toggle("Log", key=f"runs_log_{run.id}", on_change=_open_log, args=(run.id,))


def _open_log(run_id: str) -> None:
    """The open logs, in the address."""
    others = [other for other in linked.ids("log") if other != run_id]
    opened = [*others, run_id] if st.session_state[f"runs_log_{run_id}"] else others
    linked.write("log", ",".join(opened))


def _remember(key: str, value: bool) -> None:
    """Keeps a value for the next rerun."""
    st.session_state[key] = value


def _act(what: Callable[[str], None], run_id: str) -> None:
    try:
        what(run_id)
    except Fp8dashError as error:
        say_error(error)
        return
    st.rerun()
