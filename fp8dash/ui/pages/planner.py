"""What a recipe will do on an accelerator, before anything runs: throughput, memory, cost, all by arithmetic.

Every number computed here is a prediction and labelled as one; measurements are kept apart, in planner_measured.py.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import streamlit as st

from fp8dash.choose.architecture import CONFIGS, FAMILIES, KNOWN, SOURCE, Architecture, read_config
from fp8dash.choose.casts import KV_FORMATS, parse_kv
from fp8dash.choose.presets import PRESETS, recipe_from
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.records import EMULATED
from fp8dash.predict.accelerators import ACCELERATORS, BF16, Accelerator
from fp8dash.predict.roofline import REACH, USABLE, Plan, curve, per_million
from fp8dash.report.numbers import DASH, three
from fp8dash.ui import linked
from fp8dash.ui.charts import planner as charts_planner
from fp8dash.ui.charts.looks import Look, look
from fp8dash.ui.frame import Frame, answer_first, draw
from fp8dash.ui.parts.planner_measured import dollars, here, own
from fp8dash.ui.words import lasted, plain

PASTED = "A config.json …"
EXAMPLE = json.dumps(CONFIGS["Qwen3-8B"][0])
START = ("FP8_DYNAMIC", "W4A16")
OFFERED = [name for name, preset in PRESETS.items() if preset.recipe.casts_linears]
KV = {"BF16": None, **{name.upper(): parse_kv(f"{name}/tensor") for name in KV_FORMATS}}
SPEEDS, REQUESTS, ROOFLINE = "Throughput by batch", "Requests by context", "Roofline"
MOST_DRAWN = 4096  # requests at once
STYLE = """<style>
.st-key-planner_tables [data-testid="stMarkdownContainer"] {overflow-x: auto;}
.st-key-planner_tables th, .st-key-planner_tables td {padding: 0.3rem 0.6rem !important; white-space: nowrap;}
.st-key-planner_tables th {white-space: normal; vertical-align: bottom;}
.st-key-planner_tables td:last-child {white-space: normal; min-width: 9rem;}
</style>"""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the requests are like, and what an hour costs."""

    prompt: int
    output: int
    batch: int
    price: float
    measured: float = 0.0  # output tokens per second, from the reader; 0 if not measured

    @property
    def context(self) -> int:
        """Tokens a request holds when it ends."""
        return self.prompt + self.output

    @property
    def average(self) -> float:
        """Tokens it holds on average while it is decoded."""
        return self.prompt + self.output / 2


def page(frame: Frame) -> None:
    """The choices, the answer in words, then the numbers behind it."""
    st.html(STYLE)
    head = st.container()
    answer_first(head, "Cannot plan this configuration", "planner_tables", partial(_plan, frame))


def _plan(frame: Frame) -> tuple[str, str]:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        model = _model()
        accelerator = ACCELERATORS[
            str(
                linked.selectbox(
                    "Accelerator",
                    list(ACCELERATORS),
                    list(ACCELERATORS).index("H200 SXM"),
                    key="gpu",
                    width=170,
                )
            )
        ]
        devices = int(linked.number_input("Devices", 1, 64, 1, key="gpus", width=110))
        kv = linked.segmented_control(
            "KV cache",
            list(KV),
            default="BF16",
            required=True,
            key="kv",
            help="One scale per tensor. A recipe with its own kv= keeps it.",
        )
    recipes = _recipes()
    traffic, reach = _traffic()
    plans = {
        name: Plan(model, _with_kv(recipe, str(kv)), accelerator, devices, reach) for name, recipe in recipes.items()
    }
    base = Plan(model, _with_kv(Recipe(), "BF16"), accelerator, devices, reach)
    st.header("By recipe, predicted", anchor=False)
    st.markdown("\n".join(_by_recipe({"BF16": base, **plans}, traffic)))
    _figure({"BF16": base, **plans}, traffic)
    lead = next(iter(plans))
    if traffic.measured:
        batch = min(traffic.batch, plans[lead].largest_batch(traffic.context))
        own(lead, plans[lead], batch, traffic.average, traffic.measured, traffic.price)
    here(frame, model, accelerator, traffic.price)
    st.header(f"{plain(lead)} on other accelerators, predicted", anchor=False)
    st.markdown("\n".join(_by_accelerator(plans[lead], traffic)))
    _method(model, accelerator, reach)
    return _answer(lead, plans[lead], base, traffic)


def _model() -> Architecture:
    names = [*KNOWN, PASTED]
    name = str(linked.selectbox("Model", names, key="model", width=230))
    if name != PASTED:
        return KNOWN[name]
    text = linked.text_area(
        "config.json",
        EXAMPLE,
        key="config",
        height=68,
        width=420,
        help="Replace this with your model’s whole config.json. " + f"Model types: {', '.join(FAMILIES)}.",
    )
    return read_config(text or "", "Your model")


def _recipes() -> dict[str, Recipe]:
    """The chosen recipes by name; anything typed is read as a recipe's text."""
    chosen = linked.multiselect(
        "Recipes (the headline is about the first)",
        OFFERED,
        list(START),
        key="recipes",
        max_selections=6,
        valid=recipe_from,
        help="A preset, or a recipe’s text as w=e4m3fn/row a=e4m3fn/row.",
    )
    names = [str(name) for name in chosen] or list(START[:1])
    return {name: recipe_from(name) for name in names}


def _traffic() -> tuple[Traffic, float]:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        prompt = _whole("Prompt (tokens)", 2048, "prompt", 1 << 22)
        output = _whole("Output (tokens)", 256, "output", 1 << 20)
        batch = _whole("Concurrent requests", 32, "batch", 1 << 16)
        price = linked.number_input("Price ($ per device-hour)", 0.0, 1000.0, 2.5, 0.1, key="price", width=225)
        reach = linked.number_input(
            "Efficiency (%)",
            1,
            100,
            round(100 * REACH),
            5,
            key="reach",
            width=190,
            help=(
                "Share of the roofline bound that your server reaches. Published runs reach 37 to 73 % on an H100 "
                "or H200."
            ),
        )
        measured = linked.number_input(
            "Measured (output tokens/s)",
            0.0,
            1e9,
            0.0,
            100.0,
            key="measured",
            width=225,
            help="What your own server reaches with the first recipe on all devices together; 0 if not measured.",
        )
    return Traffic(prompt, output, batch, float(price), float(measured)), reach / 100


def _whole(label: str, value: int, key: str, most: int) -> int:
    return int(linked.number_input(label, 1, most, value, key=key, width=150))


def _with_kv(recipe: Recipe, kv: str) -> Recipe:
    """The recipe with the page's cache, unless it names its own."""
    return dataclasses.replace(recipe, kv=recipe.kv or KV[kv])


def _answer(name: str, plan: Plan, base: Plan, traffic: Traffic) -> tuple[str, str]:
    """How many tokens per second, compared with BF16, and what limits it."""
    where = ("one " if plan.devices == 1 else f"{plan.devices} × ") + plan.accelerator.name
    room = plan.largest_batch(traffic.context)
    cache = f" with its cache in {plan.recipe.kv.format.name.upper()}" if plan.recipe.kv else ""
    who = f"{plain(plan.model.name)} in {plain(name)}{cache} on {plain(where)}"
    if not room:
        lack = (plan.weight_bytes - USABLE * plan.accelerator.memory_gb * 1e9 * plan.devices) / 1e9
        need = f"{three(lack)} GB short" if lack > 0 else "no room for one request"
        return f"{who} does not fit: {need}", _fits_on(plan, traffic)
    batch = min(traffic.batch, room)
    speed = batch / plan.decode_s(batch, traffic.average)
    beside = ""
    if base.largest_batch(traffic.context) >= batch:
        times = base.decode_s(batch, traffic.average) / plan.decode_s(batch, traffic.average)
        beside = f", {times:.2f}× BF16"
    title = f"{who}: {three(speed)} tokens/s at batch {batch}{beside} (predicted)"
    return title, " ".join(_reasons(plan, traffic, room, batch))


def _reasons(plan: Plan, traffic: Traffic, room: int, batch: int) -> list[str]:
    """Room, what binds, the wait for a prompt, the price."""
    sentences = [f"{room:,} requests of {traffic.context:,} tokens fit."]
    if batch < traffic.batch:
        sentences.append(f"{traffic.batch:,} do not, so the batch is {batch:,}.")
    weights, cache = (three(size / 1e9) for size in (plan.weight_bytes, plan.kv_bytes * batch * traffic.context))
    sentences.append(f"Weights take {weights} GB, the KV cache {cache} GB at batch {batch:,}.")
    turn = plan.turning_point()
    sentences.append(
        f"GEMMs are memory-bound below {turn:,} tokens per step." if turn else "GEMMs are memory-bound at every batch."
    )
    sentences.append(f"A prompt of {traffic.prompt:,} tokens takes {_waited(plan.prefill_s(traffic.prompt))}.")
    if traffic.price:
        speed = batch / plan.decode_s(batch, traffic.average)
        sentences.append(
            f"A million output tokens cost ${dollars(per_million(traffic.price, plan.devices, speed))} (predicted)."
        )
    if plan.product.kind == BF16 and plan.recipe.casts_linears:
        sentences.append(f"Matrix products: {plain(plan.product.reason)}.")
    return sentences


def _waited(seconds: float) -> str:
    return lasted(seconds) if seconds >= 1 else f"{three(1e3 * seconds)} ms"


def _fits_on(plan: Plan, traffic: Traffic) -> str:
    """The fewest devices of this kind that hold the model and one request."""
    for devices in (2, 4, 8, 16, 32, 64):
        if devices > plan.devices and _on(plan, plan.accelerator, devices).largest_batch(traffic.context):
            return f"{devices} × {plain(plan.accelerator.name)} hold it with one request of {traffic.context:,} tokens."
    return "Choose a smaller format, a shorter context or more devices."


def _by_recipe(plans: Mapping[str, Plan], traffic: Traffic) -> list[str]:
    """One row per recipe."""
    columns: dict[str, Callable[[Plan, int], str]] = {
        "Weights (GB)": lambda p, b: three(p.weight_bytes / 1e9),
        "KV per token (KB)": lambda p, b: three(p.kv_bytes / 1e3),
        "Requests that fit": lambda p, b: f"{p.largest_batch(traffic.context):,}" if b else "none",
        "Batch": lambda p, b: f"{b:,}" if b else DASH,
        "Output tokens/s": lambda p, b: three(b / p.decode_s(b, traffic.average)) if b else DASH,
        "ms per token": lambda p, b: three(1e3 * p.decode_s(b, traffic.average)) if b else DASH,
        "Tokens/s when full": lambda p, b: three(_full_speed(p, traffic)) if b else DASH,
        "Prompt (ms)": lambda p, b: three(1e3 * p.prefill_s(traffic.prompt)) if b else DASH,
        "$ / M output": lambda p, b: _cost(p, traffic, b),
        "$ / M prompt": lambda p, b: _prompt_cost(p, traffic, b),
        "Memory-bound below (tokens)": lambda p, b: f"{p.turning_point():,}" if p.turning_point() else "always",
    }
    lines = ["| Recipe | " + " | ".join(columns) + " | Products |", "|:--|" + "--:|" * len(columns) + ":--|"]
    for name, plan in plans.items():
        batch = min(traffic.batch, plan.largest_batch(traffic.context))
        cells = " | ".join(write(plan, batch) for write in columns.values())
        lines.append(f"| **{plain(name)}** | {cells} | {plain(plan.product.reason)} |")
    return lines


def _full_speed(plan: Plan, traffic: Traffic) -> float:
    room = plan.largest_batch(traffic.context)
    return room / plan.decode_s(room, traffic.average)


def _cost(plan: Plan, traffic: Traffic, batch: int) -> str:
    if not batch or not traffic.price:
        return DASH
    return dollars(per_million(traffic.price, plan.devices, batch / plan.decode_s(batch, traffic.average)))


def _prompt_cost(plan: Plan, traffic: Traffic, batch: int) -> str:
    if not batch or not traffic.price:
        return DASH
    speed = batch * traffic.prompt / plan.prefill_s(traffic.prompt, batch)
    return dollars(per_million(traffic.price, plan.devices, speed))


def _figure(plans: Mapping[str, Plan], traffic: Traffic) -> None:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        choice = linked.segmented_control(
            "Figure",
            [SPEEDS, REQUESTS, ROOFLINE],
            default=SPEEDS,
            required=True,
            key="figure",
            label_visibility="collapsed",
        )
    looks = {name: look(plan.recipe.text, EMULATED) for name, plan in plans.items()}
    drawing: dict[str, Callable[[], None]] = {
        SPEEDS: lambda: _draw_speeds(plans, looks, traffic),
        REQUESTS: lambda: _draw_requests(plans, looks, traffic),
        ROOFLINE: lambda: _draw_roofline(plans, looks, traffic),
    }
    drawing[str(choice)]()


def _draw_speeds(plans: Mapping[str, Plan], looks: Mapping[str, Look], traffic: Traffic) -> None:
    curves = {
        name: list(curve(plan, round(traffic.average), min(room, MOST_DRAWN)))
        for name, plan in plans.items()
        if (room := plan.largest_batch(traffic.context))
    }
    if not curves:
        st.info("No recipe fits: there is nothing to draw.")
        return
    figure = charts_planner.throughput(curves, looks, traffic.batch)
    draw(figure, key="planner_speeds", alt="Predicted output tokens per second against batch")


def _draw_requests(plans: Mapping[str, Plan], looks: Mapping[str, Look], traffic: Traffic) -> None:
    most = max(traffic.context, next(iter(plans.values())).model.context, 2048)
    sizes = [1 << power for power in range(9, math.ceil(math.log2(most)) + 1)]
    curves = {
        name: [(size, float(room)) for size in sizes if (room := plan.largest_batch(size))]
        for name, plan in plans.items()
    }
    figure = charts_planner.requests(curves, looks, traffic.context)
    draw(figure, key="planner_requests", alt="Requests that fit against tokens per request")


def _draw_roofline(plans: Mapping[str, Plan], looks: Mapping[str, Look], traffic: Traffic) -> None:
    phase = linked.segmented_control(
        "Tokens per step",
        ["Decoding", "Reading a prompt"],
        default="Decoding",
        required=True,
        key="phase",
    )
    tokens = traffic.batch if phase == "Decoding" else traffic.prompt
    drawn = dict(list(plans.items())[:2])  # BF16 and the answer's recipe: more roofs hide each other
    points = {name: plan.gemms(tokens) for name, plan in drawn.items()}
    tflops = {name: plan.product.tflops * plan.devices for name, plan in drawn.items()}
    plan = next(iter(plans.values()))
    figure = charts_planner.roofline(tflops, points, looks, plan.accelerator.bandwidth_tbps * plan.devices)
    draw(figure, key="planner_roofline", alt="Roofline of the accelerator with the model's products on it")
    st.caption(
        f"Products over {tokens:,} tokens, one point per kind of Linear, on all devices together. Points left of the "
        "ridge are bound by memory, points right of it by the tensor cores. The head stays in BF16 unless a recipe "
        "says also=lm_head."
    )


def _by_accelerator(plan: Plan, traffic: Traffic) -> list[str]:
    """One row per accelerator, with the chosen number of devices, fastest first."""
    lines = [
        "| Accelerator | Memory (GB) | TB/s | BF16 TFLOPS | FP8 TFLOPS | Requests that fit | Batch | Output "
        "tokens/s | ms per token | Prompt (ms) | Products |",
        "|:--|" + "--:|" * 9 + ":--|",
    ]
    plans = [_on(plan, accelerator, plan.devices) for accelerator in ACCELERATORS.values()]
    for other in sorted(plans, key=lambda p: -_speed(p, traffic)):
        a, room = other.accelerator, other.largest_batch(traffic.context)
        batch = min(room, traffic.batch)
        step = other.decode_s(batch, traffic.average) if batch else None
        name = f"**{plain(a.name)}**" if a == plan.accelerator else plain(a.name)
        speeds = (
            f"{three(batch / step)} | {three(1e3 * step)} | {three(1e3 * other.prefill_s(traffic.prompt))}"
            if step
            else " | ".join([DASH] * 3)
        )
        peaks = f"{three(a.bf16)} | {three(a.fp8)}"
        fits = f"{room:,}" if room else "none"
        lines.append(
            f"| {name} | {three(a.memory_gb)} | {three(a.bandwidth_tbps)} | {peaks} | {fits} | "
            f"{batch or DASH} | {speeds} | {plain(other.product.reason)} |"
        )
    return lines


def _speed(plan: Plan, traffic: Traffic) -> float:
    batch = min(traffic.batch, plan.largest_batch(traffic.context))
    return batch / plan.decode_s(batch, traffic.average) if batch else 0.0


def _on(plan: Plan, accelerator: Accelerator, devices: int) -> Plan:
    return Plan(plan.model, plan.recipe, accelerator, devices, plan.reach)


def _method(model: Architecture, accelerator: Accelerator, reach: float) -> None:
    source = SOURCE.format(CONFIGS[model.name][1]) if model.name in CONFIGS else "the config.json above"
    note = f" ({plain(accelerator.note)})" if accelerator.note else ""
    st.caption(
        f"{plain(model.name)}: {three(model.parameters / 1e9)} billion parameters, "
        f"{three(model.active_parameters / 1e9)} billion active per token, {model.attention} attention; "
        f"{plain(source)}. {plain(accelerator.name)}: {plain(accelerator.source)}{note}."
    )
    st.caption(
        "How: for each product and for attention, the longer of FLOPs ÷ dense peak and bytes ÷ bandwidth; summed "
        f"over a step and divided by the efficiency ({100 * reach:.0f} % here). Devices share the work evenly, "
        f"{100 * USABLE:.0f} % of memory is used, and experts are chosen evenly. Casting activations, communication, "
        "norms and scheduling are not counted. Published runs of Llama-3.1-8B reach 37 to 73 % of the bound on one "
        "H100 or H200, down to 20 % on a B200; FP8 gets less close to its bound than BF16, so a predicted speed-up "
        "over BF16 is an upper limit."
    )
