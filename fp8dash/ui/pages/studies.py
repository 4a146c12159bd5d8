"""Questions that are queued in one click, the studies there are, and what each answered. `?study=` opens one."""

from collections.abc import Callable, Sequence
from functools import partial

import pandas as pd
import streamlit as st

from db.rows import FINISHED, QUEUED, STATES, Study, Worker, at_work
from fp8dash.choose.catalog import DEMO, MODELS
from fp8dash.choose.formats import FORMATS
from fp8dash.choose.request import Request, usual_request
from fp8dash.choose.scaling import RULES, TILES
from fp8dash.choose.studies import GRID, QUESTIONS, Question, RecipeGrid
from fp8dash.errors import Fp8dashError, InvalidChoice
from fp8dash.report import study as study_report
from fp8dash.report import study_evidence, study_files
from fp8dash.report.pace import Pace, pace_of
from fp8dash.report.study import WriteUp
from fp8dash.report.study_evidence import Evidence, StudyPlan
from fp8dash.ui import linked
from fp8dash.ui.charts.study import study_points
from fp8dash.ui.frame import Frame, draw, guarded, say_error, worker_line, zone
from fp8dash.ui.words import lasted, listed, many, moment, plain

LIVE = 3.0  # seconds between two looks at a study that is not finished
ACROSS = 3  # cards in a row
PAGE = 20  # studies
MOST_COMPARED = 6
LINKED = "question"  # and `runs`: an answer that needed no study of its own
GRID_LINK = ("formats", "tiles", "rules")  # the parts of a grid that is the question, joined by commas


def page(frame: Frame) -> None:
    """One study's answer, or the questions and all studies."""
    studies = linked.known_ids("study", lambda ids: {study.id for study in frame.store.studies(ids=ids)}, "study")
    runs = frame.linked_runs()
    asked = _asked(linked.text(LINKED))
    if studies:
        _answer(frame, lambda: study_evidence.of_study(frame.store, studies[0]))
    elif runs and asked:
        _answer(frame, lambda: study_evidence.of_runs(frame.store, asked, runs, reused=runs))
    else:
        _index(frame)


def _asked(name: str) -> Question | None:
    """The question of a link."""
    if name == GRID:
        try:
            return RecipeGrid(*(tuple(linked.ids(part)) for part in GRID_LINK)).question
        except InvalidChoice as error:
            linked.leave_out(LINKED, name, f"is not a usable grid: {error}")
            return None
    if name and name not in QUESTIONS:
        linked.leave_out(LINKED, name, f"is not a question: choose one of {', '.join(QUESTIONS)}")
    return QUESTIONS.get(name)


def _index(frame: Frame) -> None:
    head = st.empty()
    workers = frame.store.workers()
    base, owner = _whose(workers)
    here = [device.name for device in at_work(workers)]
    pace = pace_of(frame.store, base.model, base.backend, here)
    usual = pace.seconds(base)
    timed = f"A typical run of this model takes about {lasted(usual)} here. " if usual else ""
    st.caption(f"{timed}Identical requests reuse the results of earlier runs.")
    questions = list(QUESTIONS.values())
    for start in range(0, len(questions), ACROSS):
        for column, question in zip(st.columns(ACROSS), questions[start : start + ACROSS], strict=False):
            with column, st.container(border=True, height="stretch", key=f"studies_card_{question.name}"):
                _card(frame, question, base, owner, pace)
    _grid(frame, base, owner, pace)
    worker_line(workers, waiting=frame.store.counts()[QUEUED])
    studies_so_far = _list(frame)
    with head.container():
        st.title(
            f"{many(len(questions), 'question')} to ask about a model, one click each; {studies_so_far}", anchor=False
        )


def _whose(workers: Sequence[Worker]) -> tuple[Request, str]:
    """Model and backend of the runs to queue, and who asks."""
    usual = usual_request(at_work(workers))
    backends = ["auto", "emulated"]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        model = linked.selectbox(
            "Model",
            list(MODELS),
            format_func=lambda name: MODELS[name].title if name in MODELS else name,
            accept_new_options=True,
            key="ask_model",
            width=320,
            help="From the catalogue, or type a folder on the worker or a Hub id.",
        )
        backend = linked.selectbox(
            "Backend",
            backends,
            backends.index(usual.backend),
            key="ask_backend",
            width=160,
            help="auto: native where a kernel is legal. Emulated is the default where all live workers are CPUs.",
        )
        owner = linked.text_input(
            "Owner",
            key="owner",
            max_chars=60,
            placeholder="your name",
            width=220,
            help="Kept in this page’s address.",
        )
    return usual.but(model=(model or DEMO).strip(), backend=backend), owner or ""


def _card(frame: Frame, question: Question, base: Request, owner: str, pace: Pace) -> None:
    st.markdown(f"**{plain(question.question)}**")
    st.markdown(f":small[{plain(question.why)}]")
    _queue(frame, question, base, owner, pace)


def _queue(frame: Frame, question: Question, base: Request, owner: str, pace: Pace) -> None:
    """What a click does, and the click."""
    try:
        plan = study_evidence.plan(frame.store, question.requests(base))
    except Fp8dashError as error:
        say_error(error)
        return
    st.caption(_costs(question, plan, pace))
    label = f"Queue {many(len(plan.missing), 'run')}" if plan.missing else "Read the answer"
    if st.button(label, key=f"studies_ask_{question.name}", type="primary" if plan.missing else "secondary"):
        _ask(frame, question, plan, owner)


def _costs(question: Question, plan: StudyPlan, pace: Pace) -> str:
    count = len(plan.missing) + len(plan.answered)
    have = sum(run.state == FINISHED for run in plan.answered)
    already = [f"{have} already measured"] if have else []
    already += [f"{len(plan.answered) - have} already queued"] if len(plan.answered) > have else []
    sentence = f"{many(count, 'run')}{', ' if already else ''}{listed(already)}."
    if not plan.missing:
        return sentence
    if seconds := pace.together(plan.missing):
        return f"{sentence} About {lasted(seconds)} of one worker’s time."
    return f"{sentence} {plain(question.cost)}"


def _ask(frame: Frame, question: Question, plan: StudyPlan, owner: str) -> None:
    """Queue what is missing as one study; open its answer."""
    if not plan.missing:
        parts = question.grid.to_json() if question.grid else {}
        link = {LINKED: question.name, "runs": ",".join(run.id for run in plan.answered)}
        frame.go("studies", **link, **{part: ",".join(parts[part]) for part in GRID_LINK if part in parts})
        return
    try:
        ids = frame.queue.submit(plan.missing, owner=owner, study=question.question, question=question)
        study = frame.store.run(ids[0]).study_id
    except Fp8dashError as error:
        say_error(error)
        return
    frame.go("studies", study=study or "")


def _grid(frame: Frame, base: Request, owner: str, pace: Pace) -> None:
    """Formats by tiles by rules: one run per combination that makes sense."""
    with st.expander("A grid of your own"):
        st.markdown(
            "Weights and activations are cast alike, except that 128×128 blocks of weights go with 1×128 groups of "
            "activations."
        )
        with st.container(horizontal=True):
            formats, tiles, rules = (
                tuple(linked.multiselect(label, list(options), default=default, key=f"grid_{key}", width=320))
                for label, key, options, default in (
                    ("Formats", "formats", FORMATS, ["e4m3fn"]),
                    ("Tiles", "tiles", TILES, ["tensor", "row"]),
                    ("Scale rules", "rules", RULES, ["float32"]),
                )
            )
        grid = RecipeGrid(formats, tiles, rules)
        for sentence in grid.cells().left_out:
            st.caption(f"Left out: {plain(sentence)}")
        try:
            question = grid.question
        except InvalidChoice as error:
            st.info(plain(str(error)))
            return
        _queue(frame, question, base, owner, pace)


def _list(frame: Frame) -> str:
    """The studies, newest first; how many there are."""
    count = frame.store.study_count()
    st.header("Studies", anchor=False)
    if not count:
        st.info("No study yet. Ask one of the questions above, or queue several recipes on the page “New run”.")
        return "no study yet"
    pages = -(-count // PAGE)
    listed_here = st.container()
    number = linked.pagination(pages)
    with listed_here:
        for study in frame.store.studies(limit=PAGE, offset=(number - 1) * PAGE):
            _line(frame, study)
    return f"{count} {'study' if count == 1 else 'studies'} so far"


def _line(frame: Frame, study: Study) -> None:
    """One study: name, owner, how far it is, and the way to its answer."""
    done = study.states.get(FINISHED, 0)
    states = [f"{study.states[state]} {state}" for state in STATES if study.states.get(state)]
    with st.container(border=True, key=f"studies_line_{study.id}"):
        what, how, door = st.columns([3, 3, 1], vertical_alignment="center")
        with what:
            st.markdown(f"**{plain(study.name)}**  \n:small[{plain(study.owner)}, {moment(study.created_at, zone())}]")
        with how:
            st.progress(done / study.count if study.count else 0.0, text=listed(states) or "no run")
        with door:
            if st.button("Read", key=f"studies_read_{study.id}"):
                frame.go("studies", study=study.id)


def _answer(frame: Frame, read: Callable[[], Evidence]) -> None:
    """The write-up; drawn again and again until all runs have ended."""
    evidence = read()
    if not evidence.active:
        _write_up(frame, evidence)
        return
    worker_line(frame.store.workers(), waiting=evidence.active)
    live = st.fragment(guarded(_live), run_every=LIVE)
    live(frame, read)


def _live(frame: Frame, read: Callable[[], Evidence]) -> None:
    evidence = read()
    if not evidence.active:
        st.rerun()
    _write_up(frame, evidence)


def _write_up(frame: Frame, evidence: Evidence) -> None:
    """Answer, figure, table, why, and what cannot be said."""
    write_up = study_report.written(evidence)
    st.title(plain(write_up.headline), anchor=False)
    st.markdown(f"**{plain(write_up.title)}** {plain(write_up.why)}")
    _progress(evidence)
    if any(bar.value > 0 for bar in write_up.bars):
        alt = f"{write_up.axis}: " + ", ".join(f"{bar.label} {bar.value:.3g}" for bar in write_up.bars)
        draw(study_points(write_up.bars, write_up.axis), key="studies_points", alt=alt)
        st.caption("Colour is the tile, symbol the format; hollow where emulated. Lines are 95 % intervals.")
    _table(write_up)
    for title, sentences in (("Why", write_up.reasons), ("What cannot be said", write_up.limits)):
        if sentences:
            st.header(title, anchor=False)
            st.markdown("\n".join(f"- {plain(sentence)}" for sentence in sentences))
    st.caption(plain(write_up.method))
    _take_along(frame, write_up)


def _progress(evidence: Evidence) -> None:
    if evidence.reused:
        count = sum(row.run in evidence.reused for row in evidence.rows)
        st.caption(f"{many(count, 'run')} reused from other studies with identical requests.")
    if evidence.active:
        st.progress(
            evidence.finished / len(evidence.rows), text=f"{evidence.finished} of {len(evidence.rows)} runs finished"
        )


def _table(write_up: WriteUp) -> None:
    if not write_up.table.rows:
        return
    table = pd.DataFrame(list(write_up.table.rows), columns=list(write_up.table.titles))
    right = {title: st.column_config.TextColumn(alignment="right") for title in write_up.table.titles[1:]}
    config = {write_up.table.titles[0]: st.column_config.TextColumn(width=240), **right}
    st.dataframe(table, hide_index=True, key="studies_table", height="content", column_config=config)


def _take_along(frame: Frame, write_up: WriteUp) -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        for label, end, kind, write in (
            ("Markdown", "md", "text/markdown", study_files.to_markdown),
            ("HTML", "html", "text/html", study_files.to_html),
            ("CSV", "csv", "text/csv", study_files.to_csv),
        ):
            st.download_button(
                label, partial(write, write_up), f"fp8dash-study.{end}", kind, key=f"studies_{end}", on_click="ignore"
            )
        frame.link("studies", "All questions and studies")
        done = [row.run for row in write_up.runs if row.state == FINISHED][:MOST_COMPARED]
        if len(done) > 1:
            frame.link("compare", f"Compare {many(len(done), 'run')} side by side", runs=",".join(done))
