"""Queue runs: model, recipe and measure at once, with what the choice costs beside it."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from db.rows import Worker, at_work
from fp8dash.choose.advice import Advice, advise, advise_request
from fp8dash.choose.casts import KV_FORMATS, KV_SCALE_MEANINGS, KV_SHARES, Cast, KvCast, parse_cast
from fp8dash.choose.catalog import CORPORA, MODELS, OWN_TASKS, USUAL_TASKS, ModelShape, estimate
from fp8dash.choose.formats import FORMATS
from fp8dash.choose.hardware import Device
from fp8dash.choose.mixed import GRANULARITIES
from fp8dash.choose.needles import CHATS, HAYSTACKS, KINDS, MOST_REPEATS, REFUSED
from fp8dash.choose.presets import PRESETS, preset_of, recipe_from
from fp8dash.choose.recipe import BASELINE_TEXT, GROUPS, Recipe, parse_recipe
from fp8dash.choose.request import BACKENDS, MEASURES, TASK_PRECISIONS, TASK_PROMPTS, Request, usual_request
from fp8dash.choose.scaling import DELAYED, DYNAMIC, FLOAT32, RULES, STATIC, TILES, When, tile_of, when_of
from fp8dash.choose.windows import BOS, CONVENTIONS
from fp8dash.errors import Fp8dashError, InvalidChoice
from fp8dash.report.numbers import three
from fp8dash.report.pace import pace_of
from fp8dash.report.recorded import known_shape
from fp8dash.ui import linked
from fp8dash.ui.forms.address import FROM, LONGEST, NAMES, OWNER, STUDY, Address, Form, read, written
from fp8dash.ui.frame import Frame, glyph, say_error, worker_line
from fp8dash.ui.parts.recipe_words import shared
from fp8dash.ui.words import lasted, listed, many, plain

CATALOGUE, FOLDER, HUB = "Catalogue", "Local folder", "Hub id"
CARDS, BUILDER, TYPED = "Presets", "Custom", "Typed"
FILE = "A text file …"
VISIT = "new_run_visit"  # in the session
USUAL = ("e4m3fn/128x128", "e4m3fn/1x128", "e4m3fn/tensor")  # of weights, activations, attention, when switched on
USUAL_WHENS = (DYNAMIC, STATIC, when_of("static:p99.9") or STATIC, when_of("static:mse") or STATIC, DELAYED)
MEASURED = {
    "gemm": "GEMM speed", "perplexity": "Perplexity and KLD", "needle": "Needle", "gradients": "Gradients in FP8",
    "kv": "KV cache as it is read", "tasks": "lm-eval tasks", "export": "Checkpoint",
    "sensitivity": "Sensitivity", "decode": "Decode speed", "profile": "Profile of tensors",
}  # fmt: skip
CARD_WIDTH, CARD_HEIGHT = 165, 218  # pixels; wider where there is room


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """Widget keys of one visit: another's widgets start from its own defaults."""

    visit: int

    def __call__(self, name: str) -> str:
        """The key of a widget."""
        return f"new_run_new{self.visit or ''}_{name}"


@dataclasses.dataclass(frozen=True, slots=True)
class Visit:
    """One filling in of the form: what it started as, and what it has come to."""

    number: int
    start: Form
    form: Form
    wrong: str = ""  # why the address could not be read

    @property
    def key(self) -> Names:
        """The keys of its widgets."""
        return Names(self.number)


def page(frame: Frame) -> None:
    """The form, and what it will do."""
    workers = frame.store.workers()
    visit, devices = _visit(frame, workers), at_work(workers)
    base, key = visit.form.request, visit.key
    head, about = st.empty(), st.container()
    left, right = st.columns([1.9, 1], gap="large")
    with left:
        model = _model(base, key)
        recipes = _recipes(visit.form.recipes, key)
        request = _measure(dataclasses.replace(base, model=model), key)
    with right, st.container(key="new_run_panel"):
        shape = known_shape(frame.store, model)
        head.title(_headline(recipes, model, shape), anchor=False)
        _panel(recipes, shape, request, devices)
        with st.container(border=True):
            study, owner = _names(visit.form, recipes, key)
            requests = [dataclasses.replace(request, recipe=recipe.text) for recipe in recipes]
            pressed = st.button(
                f"Queue {many(len(recipes), 'run')}{_about(frame, requests, devices)}", type="primary",
                disabled=not recipes, width="stretch", key=key("submit"),
            )  # fmt: skip
        visit = _kept(visit, Form(request, tuple(recipes), visit.start.source, study, owner))
        with about:
            _say_where_from(visit)
        if pressed:
            _submit(frame, requests, study or _study(recipes), owner)
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
            request = dataclasses.replace(old.request, recipe=BASELINE_TEXT)
            start = Form(request, (parse_recipe(old.recipe),), source, owner=usual.owner)
        return Visit(number, start, read(_address(), start))
    except Fp8dashError as error:
        return Visit(number, usual, usual, str(error))


def _say_where_from(visit: Visit) -> None:
    if visit.wrong:
        st.error(plain(visit.wrong))
    if source := visit.start.source:
        other = "" if visit.form.recipes == visit.start.recipes else ", with another recipe"
        st.info(f"Filled in from run {plain(source)}{other}: change what was wrong, then queue it.")


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


def _headline(recipes: Sequence[Recipe], model: str, shape: ModelShape | None) -> str:
    """What is about to be queued, and what it makes of the model."""
    name = MODELS[model].title if model in MODELS else Path(model).name or "no model yet"
    if not recipes:
        return f"Choose a recipe for {plain(name)}"
    who = preset_of(recipes[0]) or "A custom recipe" if len(recipes) == 1 else f"{len(recipes)} recipes"
    if shape is None:
        return f"{plain(who)} on {plain(name)}"
    found = [estimate(recipe, shape) for recipe in recipes]
    sizes, base = sorted(e.size_bytes for e in found), found[0].baseline_bytes
    size = (
        f"{three(sizes[0] / 1e6)} MB"
        if sizes[0] == sizes[-1]
        else f"{three(sizes[0] / 1e6)} to {three(sizes[-1] / 1e6)} MB"
    )
    return f"{plain(who)} on {plain(name)}: {size} instead of {three(base / 1e6)} MB"


def _model(base: Request, key: Names) -> str:
    st.header("1  Model", anchor=False)
    kind = CATALOGUE if base.model in MODELS else FOLDER if base.model.startswith(("/", "~")) else HUB
    with st.container(horizontal=True, vertical_alignment="bottom"):
        source = st.segmented_control(
            "Where it comes from", [CATALOGUE, FOLDER, HUB], default=kind, required=True, key=key("source")
        )
        if source == CATALOGUE:
            names = list(MODELS)
            name = st.selectbox(
                "Model", names, names.index(base.model) if kind == CATALOGUE else 0,
                format_func=lambda n: MODELS[n].title, key=key("model"), help=MODELS[names[0]].summary,
            )  # fmt: skip
            return str(name)
        hints = {
            FOLDER: (
                "Folder",
                "/models/Llama-3.1-8B",
                "Hugging Face layout: config.json and safetensors, on the worker.",
            ),
            HUB: ("Hub id", "org/name", "The worker downloads it. Size and coverage are known after its first run."),
        }
        label, example, text = hints[str(source)]
        given = st.text_input(
            label, base.model if kind == source else "", placeholder=example, key=key(label), help=text
        )
        return (given or "").strip()


def _recipes(start: Sequence[Recipe], key: Names) -> list[Recipe]:
    st.header("2  Recipe", anchor=False)
    way = st.segmented_control(
        "How to choose", [CARDS, BUILDER, TYPED], default=_way(start), required=True, key=key("way"),
        label_visibility="collapsed",
    )  # fmt: skip
    ways: dict[str, Callable[[], list[Recipe]]] = {
        CARDS: lambda: _cards([name for recipe in start if (name := preset_of(recipe))], key),
        BUILDER: lambda: _builder(next(filter(_buildable, start), PRESETS["FP8_BLOCK"].recipe), key),
        TYPED: lambda: _typed(start, key),
    }
    try:
        recipes = list(dict.fromkeys(ways[str(way)]()))
    except InvalidChoice as error:
        say_error(error)
        return []
    if way != CARDS:
        for recipe in recipes:
            known = preset_of(recipe)
            st.code(f"{recipe.text}{f'   # {known}' if known else ''}", language=None, wrap_lines=True)
    return recipes


def _way(recipes: Sequence[Recipe]) -> str:
    """Where recipes are shown as they are and in their order."""
    cards = [name for name, preset in PRESETS.items() if preset.everyday]
    names = [preset_of(recipe) or "" for recipe in recipes]
    if all(names) and names == sorted(names, key=lambda name: cards.index(name) if name in cards else len(cards)):
        return CARDS
    return BUILDER if len(recipes) == 1 and _buildable(recipes[0]) else TYPED


def _buildable(recipe: Recipe) -> bool:
    """True where the builder has a widget for all that is cast, or carries it along."""
    return not recipe.is_baseline and recipe.accumulator is None


def _cards(chosen: Sequence[str], key: Names) -> list[Recipe]:
    """The presets as cards; several may be ticked and are queued as one study."""
    picked = []
    with st.container(horizontal=True, gap="small", key="new_run_cards"):
        for name, preset in ((n, p) for n, p in PRESETS.items() if p.everyday):
            with st.container(border=True, width=CARD_WIDTH, height=CARD_HEIGHT, key=key(f"card_{name}")):
                glyph(preset.recipe)
                if st.checkbox(f"**{plain(name)}**", name in chosen, key=key(f"preset_{name}")):
                    picked.append(preset.recipe)
                st.caption(plain(preset.summary), help=_called(name))
    st.caption(
        "Left square weights, second activations, third the KV cache where it is cast; cut into the tiles that share a "
        "scale. BF16 is the baseline."
    )
    rarer = [name for name, preset in PRESETS.items() if not preset.everyday]
    more = st.multiselect(
        "More presets", rarer, [name for name in chosen if name in rarer], key=key("rarer"),
        format_func=lambda name: f"{name} · {PRESETS[name].summary}", placeholder="other rules, MXFP4, FP6 …",
    )  # fmt: skip
    return picked + [PRESETS[name].recipe for name in more]


def _called(name: str) -> str:
    preset = PRESETS[name]
    lines = [f"`{preset.text}`", *(f"{plain(library)}: {plain(said)}" for library, said in preset.called)]
    return "  \n".join(lines)


def _builder(start: Recipe, key: Names) -> list[Recipe]:
    """One recipe, part by part."""
    weights, activations = st.columns(2)
    with weights, st.container(border=True):
        w = _cast("Weights", 0, start.weights, key)
    with activations, st.container(border=True):
        a = _cast("Activations", 1, start.activations, key)
    cache, path = st.columns(2)
    with cache, st.container(border=True):
        kv = _kv_cast(start.kv, key)
    with path, st.container(border=True):
        attention = _cast("Attention", 2, start.attention, key)
    with st.container(horizontal=True):
        also = st.multiselect(
            "Cast too", GROUPS, default=list(start.also), key=key("also"), placeholder="nothing: they stay in BF16",
            help="The Linears of the blocks are cast. The head, the embeddings and the norms are only when named here.",
        )  # fmt: skip
        skip = st.text_input(
            "Leave out", ", ".join(start.skip), key=key("skip"), placeholder="*.down_proj, model.layers.0.*",
            help="Patterns over module names, divided by commas; * stands for anything.",
        )  # fmt: skip
    patterns = tuple(part.strip() for part in (skip or "").split(",") if part.strip())
    recipe = dataclasses.replace(
        start, weights=w, activations=a, kv=kv, attention=attention, also=tuple(also), skip=patterns
    )
    if recipe.is_baseline:
        raise InvalidChoice("Nothing is cast: switch on one of the four, or choose the preset BF16.")
    glyph(recipe)
    if any(" " in pattern for pattern in patterns):
        raise InvalidChoice(
            "A module pattern has no spaces: divide patterns by commas, as in *.down_proj, model.layers.0.*"
        )
    return [parse_recipe(recipe.text)]


def _cast(title: str, operand: int, start: Cast | None, key: Names) -> Cast | None:
    if not st.toggle(f"**{title}**", start is not None, key=key(f"{title}_on")):
        return None
    start = start or parse_cast(USUAL[operand])
    formats, tiles, rules = list(FORMATS), list(dict.fromkeys([*TILES, start.tile.name])), list(RULES)
    name = st.selectbox(
        f"{title}: format", formats, formats.index(start.format.name), key=key(f"{title}_format"),
        format_func=lambda f: f"{f} · largest value {FORMATS[f].max:g}",
    )  # fmt: skip
    tile = st.selectbox(
        f"{title}: tile", tiles, tiles.index(start.tile.name), key=key(f"{title}_tile"),
        format_func=lambda t: f"{t} · {shared(t, operand)}", help="Who shares a scale.",
    )  # fmt: skip
    rule = st.selectbox(
        f"{title}: scale rule",
        rules,
        rules.index(start.rule.name),
        key=key(f"{title}_rule"),
        format_func=lambda r: f"{r} · {RULES[r].bits} bits a scale",
        help="  \n".join(f"{r.name}: {r.meaning}" for r in RULES.values()),
    )
    cast = Cast(FORMATS[name], tile_of(tile) or start.tile, RULES.get(rule, FLOAT32), start.guard)
    return dataclasses.replace(cast, when=_when(start.when, key)) if operand == 1 else cast


def _when(start: When, key: Names) -> When:
    """When the activations' scale is made; what a team is likely to want, and what the link brought."""
    offered = {when.text: when for when in (*USUAL_WHENS, start)}
    text = st.selectbox(
        "Activations: when the scale is made", list(offered), list(offered).index(start.text), key=key("when"),
        format_func=lambda t: f"{t} · {offered[t].meaning}",
        help="Static and delayed scales are one per tensor. Both are made from calibration text, never from what is "
        "measured.",
    )  # fmt: skip
    return offered[text]


def _kv_cast(start: KvCast | None, key: Names) -> KvCast | None:
    """What the KV cache holds; a scale of 1.0 is one for all."""
    if not st.toggle("**KV cache**", start is not None, key=key("kv_on")):
        return None
    start = start or KvCast(KV_FORMATS["e4m3fn"], "tensor")
    formats, shares, scales = list(KV_FORMATS), list(KV_SHARES), list(KV_SCALE_MEANINGS)
    name = st.selectbox(
        "KV cache: format", formats, formats.index(start.format.name), key=key("kv_format"),
        format_func=lambda f: f"{f} · largest value {KV_FORMATS[f].max:g}",
    )  # fmt: skip
    scale = st.selectbox(
        "KV cache: scale", scales, scales.index(start.scale), key=key("kv_scale"),
        help="  \n".join(f"{scale}: {meaning}" for scale, meaning in KV_SCALE_MEANINGS.items()),
    )  # fmt: skip
    if scale == "unit":
        return KvCast(KV_FORMATS[name], "tensor", scale)
    share = st.selectbox(
        "KV cache: who shares a scale", shares, shares.index(start.share), key=key("kv_share"),
        format_func=lambda s: f"{s} · {KV_SHARES[s]}",
    )  # fmt: skip
    return KvCast(KV_FORMATS[name], share, scale)


def _typed(start: Sequence[Recipe], key: Names) -> list[Recipe]:
    """Recipes as text, one a line."""
    text = st.text_area(
        "Recipes, one a line",
        "\n".join(recipe.text for recipe in start),
        key=key("typed"),
        help="A preset’s name, or w=format/tile[/rule] a=format/tile[/rule][/static] kv=format/share[/scale] "
        "attn=format/tile also=lm_head skip=pattern; w[pattern]= and a[pattern]= for some layers alone.",
    )
    return [recipe_from(line) for line in (text or "").splitlines() if line.strip()]


def _measure(base: Request, key: Names) -> Request:
    st.header("3  Measure", anchor=False)
    measures = st.pills(
        "What to measure", MEASURES, default=list(base.measures), selection_mode="multi", key=key("measures"),
        wrap=True, format_func=lambda m: MEASURED.get(m, m),
        help="Bits, size, coverage and weight error are always measured.",
    )  # fmt: skip
    base = _tasks(base, key) if "tasks" in measures else base.but(tasks=())
    corpus = _corpus(base, key)
    with st.container(horizontal=True):
        backend = st.selectbox(
            "Backend",
            list(BACKENDS),
            list(BACKENDS).index(base.backend),
            key=key("backend"),
            width=180,
            help=_backends(),
        )
        windows = st.number_input(
            "Windows",
            1,
            100_000,
            base.windows.count,
            key=key("windows"),
            width=150,
            help="More windows, narrower intervals.",
        )
        length = st.number_input(
            "Tokens a window", 16, 1_048_576, base.windows.length, 16, key=key("length"), width=170
        )
        seed = st.number_input("Seed", 0, 2**31 - 1, base.seed, key=key("seed"), width=150)
    base = _reading(base, int(length), key)
    with st.expander("Calibration, GEMM sizes and needles"):
        with st.container(horizontal=True):
            calibration = st.text_input(
                "Calibration text", base.calibration.corpus, key=key("calibration"), placeholder="the corpus’s end",
                help="“pydocs” or the path of a text on the worker. Static and delayed scales are made from its last "
                "windows; empty, from the end of the corpus. What is measured is never calibrated on.",
            )  # fmt: skip
            calibrated = st.number_input(
                "Calibration windows", 1, 4_096, base.calibration.windows, key=key("calibrated"), width=190
            )
        with st.container(horizontal=True):
            ms = st.text_input(
                "GEMM M (tokens)",
                _join(base.gemm.m),
                key=key("gemm_m"),
                help="Rows of the activations, divided by commas.",
            )
            lengths = st.text_input("Needle lengths (tokens)", _join(base.needles.lengths), key=key("lengths"))
            depths = st.text_input("Needle depths (%)", _join(base.needles.depths), key=key("depths"))
        needles = _needles(base, key)
    with st.expander("Sensitivity and decoding"), st.container(horizontal=True):
        granularity = st.selectbox(
            "Sensitivity of", list(GRANULARITIES), list(GRANULARITIES).index(base.sensitivity.granularity),
            key=key("sensitivity"), format_func=lambda g: f"{g} · {GRANULARITIES[g]}",
        )  # fmt: skip
        budget = st.text_input(
            "Budget of the mixed recipe", base.sensitivity.budget, key=key("budget"),
            help="kld=0.01 (nats), kld=50% of the whole recipe’s, or bits=9.5 (a weight).",
        )  # fmt: skip
        batches = st.text_input("Decode batches", _join(base.decode.batches), key=key("batches"))
    request = base.but(
        corpus=corpus, windows=int(windows), window_length=int(length), seed=int(seed), backend=backend,
        sensitivity=granularity, sensitivity_budget=budget or "",
        measures=tuple(m for m in MEASURES if m in measures), **needles,
        calibration=(calibration or "").strip(), calibration_windows=int(calibrated),
    )  # fmt: skip
    try:
        return request.but(
            gemm_m=_whole("GEMM M", ms), needle_lengths=_whole("needle length", lengths),
            needle_depths=_whole("needle depth", depths), decode_batches=_whole("decode batch", batches),
        )  # fmt: skip
    except InvalidChoice as error:
        say_error(error)
        return request.but(gemm_m=())  # refused when checked, with a sentence of its own


def _reading(base: Request, length: int, key: Names) -> Request:
    """How windows are cut, which of their tokens are scored, and when reading them may end."""
    with st.expander("How perplexity is read"), st.container(horizontal=True, vertical_alignment="bottom"):
        convention = st.selectbox(
            "Convention", list(CONVENTIONS), list(CONVENTIONS).index(base.reading.convention), key=key("convention"),
            format_func=lambda name: f"{name} · {CONVENTIONS[name].meaning}", width=470,
            help="Numbers of unlike conventions are never ranked together.",
        )  # fmt: skip
        stride = st.number_input(
            "Stride (tokens)", 0, length - 1, min(base.reading.stride or length // 2, length - 1), key=key("stride"),
            width=150, disabled=convention != "strided", help="From one window’s start to the next’s.",
        )  # fmt: skip
        bos = _told_choice("BOS", BOS, base.reading.bos, key("bos"))
        until = st.number_input(
            "Until ± (nats)", 0.0, None, base.windows.until, 0.001, "%.4f", key=key("until"), width=150,
            help="Stop once the 95 % interval of Δ ln PPL reaches no further to either side; looked at after 8, 16, 32 "
            "… windows. 0 reads all windows.",
        )  # fmt: skip
    return base.but(
        convention=convention, stride=int(stride) if convention == "strided" else 0, bos=bos, until=float(until)
    )


def _tasks(base: Request, key: Names) -> Request:
    """Which of lm-eval's tasks, on how many documents, and whether in the chat template."""
    known = OWN_TASKS | USUAL_TASKS
    with st.container(horizontal=True, vertical_alignment="bottom"):
        names = st.multiselect(
            "Tasks", list(dict.fromkeys([*known, *base.tasks.names])), list(base.tasks.names), key=key("tasks"),
            accept_new_options=True, placeholder="fp8dash_pydocs, or type a name of lm-eval’s",
            format_func=lambda name: f"{name} · {known[name]}" if name in known else name,
            help="Any task, group or tag of lm-eval. Those of fp8dash need no network; the worker fetches the data of "
            "the others from the Hub, or from its cache.",
        )  # fmt: skip
        limit = st.number_input(
            "Documents a task", 0, 10_000_000, base.tasks.limit, key=key("task_limit"), width=170,
            help="From the task’s start; 0 is all. Runs are compared on the same documents only.",
        )  # fmt: skip
        prompt = _told_choice("Task prompt", TASK_PROMPTS, base.tasks.prompt, key("task_prompt"))
        precision = _told_choice("Task precision", TASK_PRECISIONS, base.tasks.precision, key("task_precision"))
    return base.but(tasks=tuple(names), task_limit=int(limit), task_prompt=prompt, task_precision=precision)


def _told_choice(label: str, choices: dict[str, str], start: str, key: str) -> str:
    told = "  \n".join(f"**{name}**: {meaning}" for name, meaning in choices.items())
    return str(st.selectbox(label, list(choices), list(choices).index(start), key=key, width=150, help=told))


def _needles(base: Request, key: Names) -> dict[str, Any]:
    """The request's fields on what is hidden, where, and how it is asked for."""
    with st.container(horizontal=True):
        kind = st.selectbox(
            "Needle", list(KINDS), list(KINDS).index(base.needles.kind), key=key("needle_kind"),
            format_func=lambda k: f"{k} · {KINDS[k].meaning}", help="RULER’s tasks, without niah_.",
        )  # fmt: skip
        start = base.needles.haystack if kind == base.needles.kind else KINDS[kind].haystack
        offered = [name for name in HAYSTACKS if (kind, name) not in REFUSED]
        haystack = st.selectbox(
            "Haystack", offered, offered.index(start), key=key(f"haystack_{kind}"),
            format_func=lambda h: f"{h} · {HAYSTACKS[h]}",
        )  # fmt: skip
        chat = _told_choice("Chat template", CHATS, base.needles.chat, key("needle_chat"))
        repeats = st.number_input(
            "Repeats", 1, MOST_REPEATS, base.needles.repeats, key=key("needle_repeats"), width=130,
            help="Needles at each length and depth, each with a key and a value of its own: more, narrower intervals.",
        )  # fmt: skip
    return {"needle_kind": kind, "haystack": haystack, "needle_chat": chat, "needle_repeats": int(repeats)}


def _corpus(base: Request, key: Names) -> str:
    names = [*CORPORA, FILE]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        name = st.selectbox(
            "Corpus", names, names.index(base.corpus) if base.corpus in CORPORA else len(names) - 1, key=key("corpus"),
            format_func=lambda n: f"{n} · {CORPORA[n]}" if n in CORPORA else n,
        )  # fmt: skip
        if name != FILE:
            return str(name)
        given = st.text_input(
            "Path on the worker",
            "" if base.corpus in CORPORA else base.corpus,
            key=key("file"),
            placeholder="/data/wikitext2.txt",
        )
        return (given or "").strip()


def _backends() -> str:
    lines = [f"**{name}**: {text}." for name, text in BACKENDS.items()]
    lines.append(
        "Where all workers alive are CPUs, emulated is preset: FP8 kernels on a CPU are slow and gain nothing."
    )
    return "\n\n".join(lines)


def _join(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)


def _whole(what: str, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in (text or "").replace(",", " ").split()))
    except ValueError as error:
        raise InvalidChoice(
            f"“{text}” is not a list of whole numbers: write each {what} divided by commas, as in 1, 16, 128."
        ) from error


def _panel(recipes: Sequence[Recipe], shape: ModelShape | None, request: Request, devices: Sequence[Device]) -> None:
    """Bits, size and coverage by arithmetic, and what an engineer would say."""
    st.header("What it costs", anchor=False)
    if not recipes:
        st.caption("Choose at least one recipe.")
        return
    if shape is None:
        st.caption("Size and coverage are known after this model’s first run: only workers read its folder.")
    else:
        lines = ["| Recipe | Bits | MB | of BF16 | Cast |", "|:--|--:|--:|--:|--:|"]
        for recipe in recipes:
            found = estimate(recipe, shape)
            share = found.size_bytes / found.baseline_bytes
            lines.append(
                f"| {plain(preset_of(recipe) or 'Custom')} | {found.bits_per_weight:.2f} | "
                f"{three(found.size_bytes / 1e6)} | "
                f"{share:.0%} | {found.coverage:.0%} |".replace("%", "\u00a0%")
            )
        st.markdown("\n".join(lines))
        st.caption("Bits of a cast weight and size of the model by arithmetic, scales included.")
    _advice(recipes, shape, request, devices)


def _advice(recipes: Sequence[Recipe], shape: ModelShape | None, request: Request, devices: Sequence[Device]) -> None:
    """Each remark once, with the recipes that it is about."""
    about: dict[Advice, list[str]] = {}
    device = devices[0] if devices else None
    for recipe in recipes:
        for remark in advise(recipe, shape, device, request.backend):
            about.setdefault(remark, []).append(preset_of(recipe) or "Custom")
    for remark in advise_request(request, shape):
        about.setdefault(remark, [])
    for remark, names in sorted(about.items(), key=lambda pair: pair[0].level != "warning"):
        who = f"**{plain(listed(names))}**: " if names and len(recipes) > 1 else ""
        mark = ":orange-badge[warning]" if remark.level == "warning" else ":gray-badge[note]"
        st.markdown(f"{mark} {who}{plain(remark.text)}")


def _names(start: Form, recipes: Sequence[Recipe], key: Names) -> tuple[str, str]:
    """What the runs are called together, empty for their recipes' names, and whose they are."""
    study = st.text_input(
        "Study", start.study, key=key("study"), max_chars=LONGEST[STUDY], placeholder=_study(recipes),
        help="Runs that are queued together; empty, it is named after its recipes.",
    )  # fmt: skip
    owner = st.text_input(
        "Owner", start.owner, key=key("owner"), max_chars=LONGEST[OWNER], placeholder="your name",
        help="Kept in this page’s address, as is all that is chosen here.",
    )  # fmt: skip
    st.session_state[OWNER] = owner
    return study or "", owner or ""


def _about(frame: Frame, requests: Sequence[Request], devices: Sequence[Device]) -> str:
    """How long one worker will be at it, where runs like these were timed on the devices at work."""
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
