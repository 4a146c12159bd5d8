"""The planner page without a browser: what it predicts, that it says so, and what cannot be planned."""

import dataclasses
import json
import re
from itertools import cycle

import pytest

from fp8dash.choose.architecture import CONFIGS, KNOWN
from fp8dash.choose.casts import parse_kv
from fp8dash.choose.presets import recipe_from
from fp8dash.choose.recipe import parse_recipe
from fp8dash.predict.accelerators import ACCELERATORS
from fp8dash.predict.roofline import Plan
from fp8dash.report.numbers import DASH, three
from fp8dash.ui.pages.planner import PASTED, REQUESTS, ROOFLINE, SPEEDS, _with_kv
from fp8dash.ui.parts.planner_measured import dollars
from fp8dash.ui.words import plain
from tests.ui.drawn import opened, page_text, widget

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
FIGURES = (SPEEDS, REQUESTS, ROOFLINE)


def test_the_answer_comes_first_and_is_a_prediction():
    app = opened("planner")
    plan = Plan(KNOWN["Llama-3.1-8B"], recipe_from("FP8_DYNAMIC"), ACCELERATORS["H200 SXM"])
    speed = three(32 / plan.decode_s(32, 2048 + 128))
    assert app.title[0].value == (
        f"{plain('Llama-3.1-8B')} in {plain('FP8_DYNAMIC')} on one H200 SXM: {speed} tokens/s at batch 32, "
        "1.41× BF16 (predicted)"
    )
    assert "390 requests of 2,304 tokens fit. Weights take 9.09 GB, the KV cache 9.66 GB at batch 32." in page_text(app)
    assert "GEMMs are memory-bound below 232 tokens per step." in page_text(app)
    assert [h.value for h in app.header if "predicted" not in h.value] == []


def test_the_pages_cache_changes_nothing_else_of_a_recipe():
    """Projections kept in BF16 and the accumulator stay as they are where the page brings the KV cache."""
    recipe = parse_recipe("w=e4m3fn/row a=e4m3fn/row w[*.down_proj]=bf16 a[*.down_proj]=bf16 skip=*.o_proj")
    assert _with_kv(recipe, "E4M3FN") == dataclasses.replace(recipe, kv=parse_kv("e4m3fn/tensor"))
    added = parse_recipe("w=e4m3fn/row a=e4m3fn/row acc=hopper")
    assert _with_kv(added, "E4M3FN").accumulator == added.accumulator
    kept = opened("planner", recipes="w=e4m3fn/row a=e4m3fn/row w[*.down_proj]=bf16 a[*.down_proj]=bf16", kv="E4M3FN")
    assert "Weights take 11.0 GB" in page_text(kept) and "5,250 tokens/s" in kept.title[0].value


def test_how_many_long_requests_fit_takes_four_choices():
    app = opened("planner", prompt="32512", kv="E4M3FN")  # the model and the accelerator are the first offered
    assert "54 requests of 32,768 tokens fit" in page_text(app) and "with its cache in E4M3FN" in app.title[0].value


@pytest.mark.parametrize(("model", "figure"), list(zip(KNOWN, cycle(FIGURES), strict=False)))
def test_every_model_and_every_figure_is_drawn(model, figure):
    app = opened("planner", model=model, gpus="8", recipes="FP8_BLOCK", figure=figure)
    assert not app.exception and not app.error
    assert app.title[0].value.startswith(plain(model)) and len(app.get("plotly_chart")) == 1


@pytest.mark.parametrize(
    ("gpu", "preset"), [("MI300X", "FP8_FNUZ"), ("B200", "NVFP4"), ("L4", "KV_FP8"), ("RTX 5090", "MOSS")]
)
def test_accelerators_and_presets_are_planned_with_their_source(gpu, preset):
    app = opened("planner", gpu=gpu, recipes=preset)
    assert not app.exception and not app.error
    assert plain(preset) in app.title[0].value and plain(ACCELERATORS[gpu].source) in page_text(app)


def test_a_model_that_does_not_fit_is_said_with_what_would_hold_it():
    app = opened("planner", model="Llama-3.1-405B")
    assert "does not fit: 283 GB short" in app.title[0].value
    assert "4 × H200 SXM hold it" in page_text(app)


def test_a_recipe_can_be_typed_and_a_wrong_one_is_one_sentence():
    assert "2\\.304" not in page_text(opened("planner", recipes="w=int8/row also=lm_head"))
    app = opened("planner")
    widget(app, "recipes").set_value(["w=e9m9/row"]).run()
    assert len(app.error) == 1 and app.title[0].value == "Cannot plan this configuration"


def test_a_wrong_recipe_in_the_address_is_left_out_and_said_in_one_line():
    app = opened("planner", recipes="w=e9m9/row")
    assert app.title[0].value == opened("planner").title[0].value and not app.error
    assert len(app.warning) == 1 and "e9m9" in app.warning[0].value


def test_a_pasted_config_is_planned_and_a_wrong_one_is_one_sentence():
    config = json.dumps(CONFIGS["Qwen3-8B"][0])
    app = opened("planner", model=PASTED, config=config)
    pasted, named = (re.sub(r"^.*? in ", "", a.title[0].value) for a in (app, opened("planner", model="Qwen3-8B")))
    assert pasted == named
    for text in ("{}", "nonsense", '{"model_type": "<b>"}', "[" * 9999):
        app = opened("planner", model=PASTED, config=text)
        assert len(app.error) == 1 and not app.exception


def test_cards_without_fp8_say_that_they_multiply_in_bf16():
    app = opened("planner", gpu="A100 SXM")
    assert plain("in BF16: A100 SXM does not multiply FP8") in page_text(app)


def test_the_price_is_of_all_devices_and_none_is_shown_without_one():
    one, two = (cost(opened("planner", gpus=n, recipes="FP8_DYNAMIC")) for n in ("1", "2"))
    assert one == pytest.approx(two, abs=0.01)  # twice the price and twice the speed
    assert "A million" not in page_text(opened("planner", price="0"))


def test_what_runs_measured_here_stands_apart_with_its_cost_and_share_of_the_bound(ids):
    app = opened("planner", model="SmolLM2-135M-Instruct", price="3.6", gpus="2")
    rows = table(app, "Batch")
    assert [row[:3] for row in rows[:3]] == [
        ["1", "**FP8_TENSOR**", "793"], ["1", "**FP8_DYNAMIC**", "768"], ["1", "**BF16**", "610"],
    ]  # fmt: skip
    plan = Plan(KNOWN["SmolLM2-135M-Instruct"], recipe_from("BF16"), ACCELERATORS["H200 SXM"], reach=1.0)
    measured = 1e3 / (1.6 * (1 + 1 / 40))  # of one device, whatever the number that is planned for
    share = three(100 * measured * plan.decode_s(1, 160))
    assert rows[2][3:6] == [f"{share} %", dollars(1e3 / measured), f"[{ids['H200 BF16']}](runs?run={ids['H200 BF16']})"]
    assert "Measured here" in [header.value for header in app.header] and "by the number and shapes" in page_text(app)
    assert table(opened("planner", model="SmolLM2-135M-Instruct", price="0"), "Batch")[0][4] == DASH


@pytest.mark.parametrize("query", [{"gpu": "H100 SXM"}, {"model": "Qwen3-8B"}])
def test_runs_of_another_device_or_model_are_not_shown(ids, query):
    app = opened("planner", **{"model": "SmolLM2-135M-Instruct", **query})
    assert "Measured here" not in page_text(app) and not app.exception


def test_a_speed_of_ones_own_stands_beside_the_prediction_and_never_for_it():
    app = opened("planner", measured="2000", price="3.6", gpus="2", recipes="FP8_DYNAMIC")
    plan = Plan(KNOWN["Llama-3.1-8B"], recipe_from("FP8_DYNAMIC"), ACCELERATORS["H200 SXM"], 2)
    predicted = 32 / plan.decode_s(32, 2048 + 128)
    assert table(app, "FP8_DYNAMIC") == [
        ["**Your measurement**", "2,000", f"{three(100 * 2000 / (predicted / 0.5))} %", "1.00"],
        ["Predicted at batch 32", three(predicted), "50.0 %", dollars(2000 / predicted)],
        ["Bound, predicted", three(2 * predicted), "100 %", dollars(1000 / predicted)],
    ]
    assert three(predicted) in app.title[0].value and "2,000" not in app.title[0].value
    assert "Measured by you" not in page_text(opened("planner"))


def test_a_speed_above_the_bound_is_called_one():
    assert "exceeds the bound" in page_text(opened("planner", measured="1000000"))


def test_a_speed_of_ones_own_needs_no_plan_that_fits():
    app = opened("planner", model="Llama-3.1-405B", measured="100", price="3.6")
    assert table(app, "FP8_DYNAMIC") == [["**Your measurement**", "100", DASH, "10.00"]] and not app.exception


def table(app, first):
    """The rows of the table whose first column is so called."""
    tables = [m.value.replace("\\", "") for m in app.markdown if m.value.startswith("|")]
    (shown,) = (text for text in tables if text.split("|")[1].strip() == first)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines()[2:]]


def cost(app):
    return float(re.search(r"A million output tokens cost \$(\d+\.\d+)", page_text(app))[1])
