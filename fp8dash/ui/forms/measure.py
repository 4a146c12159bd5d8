"""What is measured, and how: the fields of a request as widgets, in the order of what people change most."""

import streamlit as st

from fp8dash.choose.catalog import OWN_TASKS, USUAL_TASKS
from fp8dash.choose.mixed import GRANULARITIES
from fp8dash.choose.needles import CHATS, HAYSTACKS, KINDS, REFUSED
from fp8dash.choose.request import BACKENDS, LOADINGS, MEASURES, TASK_PRECISIONS, TASK_PROMPTS, Measure, Request
from fp8dash.choose.windows import BOS, CONVENTIONS
from fp8dash.ui.forms.fields import Fields, Names
from fp8dash.ui.forms.model import corpus_of

TITLES: dict[Measure, str] = {
    "gemm": "GEMM speed",
    "perplexity": "Perplexity and KLD",
    "needle": "Needle",
    "gradients": "Gradients in FP8",
    "sensitivity": "Sensitivity",
    "profile": "Tensor profile",
    "kv": "KV cache reads",
    "experts": "Experts",
    "decode": "Decode speed",
    "tasks": "lm-eval tasks",
    "export": "Checkpoint",
}
NOTHING = "No measure is chosen: choose at least one."
ON_CPUS = "Emulated is the default where all live workers are CPUs: FP8 kernels on a CPU are slow and gain nothing."
FROM_CALIBRATION = (
    "“pydocs” or the path of a text on the worker. Static and delayed scales are made from its last windows; if "
    "empty, from the end of the corpus. The measured text is never used for calibration."
)
ANY_TASK = (
    "Any task, group or tag of lm-eval. fp8dash’s own need no network; for the others the worker fetches the data "
    "from the Hub or its cache."
)
UNTIL = (
    "Stop once the 95 % interval of Δ ln PPL is within this distance on both sides; checked after 8, 16, 32 … "
    "windows. 0 reads all windows."
)
REPEATS = "Needles at each length and depth, each with its own key and value. More of them give narrower intervals."
BUDGETS = "kld=0.01 (nats), kld=50% (of the whole recipe’s), or bits=9.5 (per weight)."


def measured(start: Request, key: Names) -> Request:
    """The request with what is chosen here."""
    st.header("3  Measure", anchor=False)
    fields = Fields(start, key)
    measures = _measures(fields)
    if "tasks" in measures:
        _tasks(fields)
    else:
        fields.changed["tasks"] = ()
    fields.changed["corpus"] = corpus_of(start.corpus, key)
    with st.container(horizontal=True):
        fields.short_choice("backend", "Backend", BACKENDS, more=ON_CPUS, width=180)
        fields.short_choice("loading", "Loading", LOADINGS, width=140)
        fields.number("windows", "Windows", help="More windows give narrower intervals.")
        length = fields.number("window_length", "Tokens per window", step=16, width=170)
        fields.number("seed", "Seed")
    _reading(fields, length)
    with st.expander("Calibration, GEMM sizes and needles"):
        _calibration(fields)
        with st.container(horizontal=True):
            fields.wholes("gemm_m", "GEMM M (tokens)", help="Rows of the activations, separated by commas.")
            fields.wholes("needle_lengths", "Needle lengths (tokens)")
            fields.wholes("needle_depths", "Needle depths (%)")
        _needles(fields)
    with st.expander("Sensitivity and decoding"), st.container(horizontal=True):
        fields.choice("sensitivity", "Sensitivity by", GRANULARITIES)
        fields.text("sensitivity_budget", "Budget of the mixed recipe", help=BUDGETS)
        fields.wholes("decode_batches", "Decode batches")
    return fields.request


def _measures(fields: Fields) -> tuple[Measure, ...]:
    chosen = st.pills(
        "What to measure",
        MEASURES,
        default=list(fields.start.measures),
        selection_mode="multi",
        key=fields.key("measures"),
        wrap=True,
        format_func=lambda measure: TITLES[measure],
        help="Bits, size, coverage and weight error are always measured.",
    )
    if not chosen:
        st.warning(NOTHING)
    measures = tuple(measure for measure in MEASURES if measure in chosen)
    fields.changed["measures"] = measures
    return measures


def _tasks(fields: Fields) -> None:
    """Which of lm-eval's tasks, on how many documents, and whether in the chat template."""
    offered, start = OWN_TASKS | USUAL_TASKS, fields.start.tasks.names
    with st.container(horizontal=True, vertical_alignment="bottom"):
        names = st.multiselect(
            "Tasks",
            list(dict.fromkeys([*offered, *start])),
            list(start),
            key=fields.key("tasks"),
            accept_new_options=True,
            placeholder="fp8dash_pydocs, or type the name of an lm-eval task",
            format_func=lambda name: f"{name} · {offered[name]}" if name in offered else name,
            help=ANY_TASK,
        )
        fields.changed["tasks"] = tuple(names)
        few = "From the start of each task; 0 takes all. Runs are compared only on the same documents."
        fields.number("task_limit", "Documents per task", width=170, help=few)
        fields.short_choice("task_prompt", "Task prompt", TASK_PROMPTS)
        fields.short_choice("task_precision", "Task precision", TASK_PRECISIONS)


def _reading(fields: Fields, length: int) -> None:
    """How windows are cut, which of their tokens are scored, and when to stop early."""
    meanings = {name: convention.meaning for name, convention in CONVENTIONS.items()}
    unlike = "Numbers of different conventions are never ranked together."
    with st.expander("How perplexity is computed"), st.container(horizontal=True, vertical_alignment="bottom"):
        convention = fields.choice("convention", "Convention", meanings, width=470, help=unlike)
        strided, key = convention == "strided", fields.key("stride")
        start = min(fields.start.reading.stride or length // 2, length - 1)
        step = "Distance from the start of one window to the next."
        stride = st.number_input(
            "Stride (tokens)", 0, length - 1, start, key=key, width=150, disabled=not strided, help=step
        )
        fields.changed["stride"] = int(stride) if strided else 0
        fields.short_choice("bos", "BOS", BOS)
        until, key = fields.start.windows.until, fields.key("until")
        nats = st.number_input("Until ± (nats)", 0.0, None, until, 0.001, "%.4f", key=key, width=150, help=UNTIL)
        fields.changed["until"] = float(nats)


def _calibration(fields: Fields) -> None:
    with st.container(horizontal=True):
        fields.text("calibration", "Calibration text", placeholder="end of the corpus", help=FROM_CALIBRATION)
        fields.number("calibration_windows", "Calibration windows", width=190)


def _needles(fields: Fields) -> None:
    """What is hidden, in which haystack, and how it is asked for."""
    meanings = {name: kind.meaning for name, kind in KINDS.items()}
    with st.container(horizontal=True):
        kind = fields.choice("needle_kind", "Needle", meanings, help="RULER’s task names, without niah_.")
        needles = fields.start.needles
        start = needles.haystack if kind == needles.kind else KINDS[kind].haystack
        offered = [name for name in HAYSTACKS if (kind, name) not in REFUSED]
        haystack = st.selectbox(
            "Haystack",
            offered,
            offered.index(start),
            key=fields.key(f"haystack_{kind}"),
            format_func=lambda name: f"{name} · {HAYSTACKS[name]}",
        )
        fields.changed["haystack"] = str(haystack)
        fields.short_choice("needle_chat", "Chat template", CHATS)
        fields.number("needle_repeats", "Repeats", width=130, help=REPEATS)
