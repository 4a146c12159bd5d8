"""Queue runs: model, recipe and measure at once, with what the choice costs beside it."""

import dataclasses
from collections.abc import Sequence

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from db.rows import Worker, at_work
from fp8dash.choose.hardware import Device
from fp8dash.choose.presets import PRESETS, preset_of
from fp8dash.choose.recipe import BASELINE_TEXT, Recipe, parse_recipe
from fp8dash.choose.request import Request, usual_request
from fp8dash.errors import Fp8dashError, InvalidChoice
from fp8dash.report.pace import pace_of
from fp8dash.report.recorded import recorded_shape
from fp8dash.ui import linked
from fp8dash.ui.forms.address import FROM, LONGEST, NAMES, OWNER, STUDY, Address, Form, read, written
from fp8dash.ui.forms.cost import headline, panel
from fp8dash.ui.forms.fields import Names
from fp8dash.ui.forms.measure import measured
from fp8dash.ui.forms.model import model_of
from fp8dash.ui.forms.recipe import recipes_of
from fp8dash.ui.frame import Frame, say_error, worker_line
from fp8dash.ui.words import lasted, listed, many, plain

VISIT = "new_run_visit"  # in the session
ANONYMOUS = "anonymous"  # who asks, where nobody says


@dataclasses.dataclass(frozen=True, slots=True)
class Visit:
    """One visit to the form: what it started as, and what it holds now."""

    number: int
    start: Form
    form: Form
    wrong: str = ""  # why the address could not be read

    @property
    def key(self) -> Names:
        """The keys of its widgets."""
        return Names(self.number)


def page(frame: Frame) -> None:
    """The form, and what submitting it will do."""
    workers = frame.store.workers()
    visit, devices = _visit(frame, workers), at_work(workers)
    base, key = visit.form.request, visit.key
    head, about = st.empty(), st.container()
    left, right = st.columns([1.9, 1], gap="large")
    with left:
        model = model_of(base.model, key)
        recipes = recipes_of(visit.form.recipes, key)
        request = measured(base.but(model=model), key)
    with right, st.container(key="new_run_panel"):
        shape = recorded_shape(frame.store, model)
        head.title(headline(recipes, model, shape), anchor=False)
        panel(recipes, shape, request, devices)
        with st.container(border=True):
            study, owner = _names(visit.form, recipes, key)
            requests = [request.but(recipe=recipe.text) for recipe in recipes]
            label, is_empty = f"Queue {many(len(recipes), 'run')}{_about(frame, requests, devices)}", not recipes
            pressed = st.button(label, type="primary", disabled=is_empty, width="stretch", key=key("submit"))
        visit = _kept(visit, Form(request, tuple(recipes), visit.start.source, study, owner))
        with about:
            _say_where_from(visit)
        if pressed:
            _submit(frame, requests, study or _study(recipes), owner or ANONYMOUS)
        worker_line(workers, waiting=1)


def _visit(frame: Frame, workers: Sequence[Worker]) -> Visit:
    """The form as it was left, or as the address has it where the page is opened or the browser went back."""
    visit: Visit | None = st.session_state.get(VISIT)
    context = get_script_run_ctx()
    back = context is not None and context.is_history_navigation
    if visit is None or back or visit.key("measures") not in st.session_state:
        visit = _opened(frame, workers, visit.number + back if visit else 0)
        st.session_state[VISIT] = visit
    return visit


def _opened(frame: Frame, workers: Sequence[Worker], number: int) -> Visit:
    """What the address stands for: an old run's request or the defaults, and what differs; or the defaults, and why."""
    request = usual_request(at_work(workers))
    usual = Form(request, (PRESETS["FP8_DYNAMIC"].recipe,), owner=st.session_state.get(OWNER, ""))
    try:
        start = usual
        if source := linked.text(FROM):
            old = frame.store.run(source)
            request = old.request.but(recipe=BASELINE_TEXT)
            start = Form(request, (parse_recipe(old.recipe),), source, owner=usual.owner)
        return Visit(number, start, read(_address(), start))
    except Fp8dashError as error:
        return Visit(number, usual, usual, str(error))


def _say_where_from(visit: Visit) -> None:
    if visit.wrong:
        st.error(plain(visit.wrong))
    if source := visit.start.source:
        other = "" if visit.form.recipes == visit.start.recipes else ", with a different recipe"
        st.info(f"Filled in from run {plain(source)}{other}. Change what you need, then queue it.")


def _kept(visit: Visit, form: Form) -> Visit:
    """The visit with the form as it is now, which is written into the address too.

    What is half typed and could not be read back is not: it is said when it is queued.
    """
    form = dataclasses.replace(form, recipes=form.recipes or visit.form.recipes)
    try:
        form.request.checked()
    except InvalidChoice:
        return visit
    address = written(form, visit.start)
    if address != _address():
        linked.write_all({name: address.get(name, []) for name in NAMES})
    visit = dataclasses.replace(visit, form=form, wrong=visit.wrong if form == visit.form else "")
    st.session_state[VISIT] = visit
    return visit


def _address() -> Address:
    """What the form owns of the page's address."""
    return {name: given for name in NAMES if (given := linked.values(name))}


def _names(start: Form, recipes: Sequence[Recipe], key: Names) -> tuple[str, str]:
    """What the runs are called together, empty for their recipes' names, and whose they are."""
    together = "A name for the runs queued together. If empty, the study is named after its recipes."
    study = st.text_input(
        "Study",
        start.study,
        key=key("study"),
        max_chars=LONGEST[STUDY],
        placeholder=_study(recipes),
        help=together,
    )
    owner = st.text_input(
        "Owner",
        start.owner,
        key=key("owner"),
        max_chars=LONGEST[OWNER],
        placeholder=ANONYMOUS,
        help="Your name. Like every choice here, it is kept in the page’s address.",
    )
    st.session_state[OWNER] = owner
    return study or "", owner or ""


def _about(frame: Frame, requests: Sequence[Request], devices: Sequence[Device]) -> str:
    """How long one worker will take, if runs like these were timed on the working devices."""
    if not requests:
        return ""
    pace = pace_of(frame.store, requests[0].model, requests[0].backend, [device.name for device in devices])
    seconds = pace.together(requests)
    return f", about {lasted(seconds)}" if seconds else ""


def _submit(frame: Frame, requests: Sequence[Request], study: str, owner: str) -> None:
    try:
        ids = frame.queue.submit(requests, owner=owner, study=study)
    except Fp8dashError as error:
        say_error(error)
        return
    frame.go("runs", queued=",".join(ids))


def _study(recipes: Sequence[Recipe]) -> str:
    names = [preset_of(recipe) or "custom recipe" for recipe in recipes]
    return listed(names) if len(names) <= 3 else f"{len(names)} recipes"
