"""Predictions: laws of the roofline, and published runs, which must lie below the bound and not far below."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from fp8dash.choose.architecture import KNOWN, Linear
from fp8dash.choose.presets import PRESETS, recipe_from
from fp8dash.choose.recipe import Recipe, parse_recipe
from fp8dash.predict.accelerators import ACCELERATORS
from fp8dash.predict.roofline import Plan, curve, kv_bits, per_million, product

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published.json").read_text("utf-8"))
LLAMA = KNOWN["Llama-3.1-8B"]
LINEARS = [name for name, preset in PRESETS.items() if preset.recipe.casts_linears]
KV = "kv=e4m3fn/tensor"


def bound(recipe: str, accelerator: str, model=LLAMA, devices: int = 1) -> Plan:
    """The plan that reaches all of its bound."""
    parsed = recipe_from(recipe) if recipe in PRESETS else parse_recipe(recipe)
    return Plan(model, parsed, ACCELERATORS[accelerator], devices, reach=1.0)


def published_shares():
    """Published over predicted, by what was published: prefill and decode throughput, and latencies."""
    torchao = PUBLISHED["torchao_inference_md"]["vllm_0.13_tok_s_prefill_decode"]
    names = {"bf16": "BF16", "float8_rowwise": "FP8_DYNAMIC", "nvfp4": "NVFP4"}
    for gpu, accelerator in (("h100", "H100 SXM"), ("b200", "B200")):
        for row, (prefill, decode) in torchao[gpu].items():
            if row in names:  # vllm bench: 32 prompts of 4096 tokens; 128 requests of 32 + 2048
                plan = bound(names[row], accelerator)
                yield f"{gpu} {row} prefill", prefill * plan.prefill_s(4096, 32) / (32 * 4096)
                yield f"{gpu} {row} decode", decode * plan.decode_s(128, 32 + 1024) / 128
    single = PUBLISHED["nvidia_modelopt_benchmark"]["bs1_8b_tok_s"]  # 2048 in, 128 out, an H200
    for recipe, speed in zip(("BF16", "FP8_DYNAMIC"), single, strict=True):
        yield f"h200 {recipe} batch 1", speed * bound(recipe, "H200 SXM").decode_s(1, 2048 + 64)
    table = PUBLISHED["vllm_fp8_kv_blog"]["table4"]  # 8 at once, about 20k in and 2k out, an H100
    for recipe, row in (("BF16", table["bf16"]), (KV, table["fp8"])):
        yield f"h100 {recipe} latency", bound(recipe, "H100 SXM").decode_s(8, 21_000) / (row[1] / 1e3)


SHARES = dict(published_shares())


@pytest.mark.parametrize("what", SHARES)
def test_published_runs_lie_below_the_bound_and_not_far_below(what):
    assert (0.19 if what.startswith("b200") else 0.36) < SHARES[what] < 0.75


def test_the_planners_own_share_is_what_bf16_reaches_on_an_h100():
    assert SHARES["h100 bf16 prefill"] == pytest.approx(0.5, abs=0.04)
    assert SHARES["h100 bf16 decode"] == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize(
    ("recipe", "row"),
    [("BF16", "bf16"), ("FP8_DYNAMIC", "float8_rowwise"), ("INT8", "int8_dynamic"), ("MXFP8", "mxfp8"),
     ("NVFP4", "nvfp4")],
)  # fmt: skip
def test_sizes_are_the_published_ones(recipe, row):
    size = PUBLISHED["torchao_inference_md"]["lm_eval_word_perplexity_winogrande_gb"][row][2]
    assert bound(recipe, "H100 SXM").weight_bytes / 1e9 == pytest.approx(size, rel=0.005)  # to their last digit


def test_an_fp8_cache_holds_twice_the_tokens_as_vllm_finds_on_an_l4():
    plans = [bound(r, "L4", KNOWN["Qwen3-4B"]) for r in ("BF16", KV)]
    tokens = [plan.free_bytes / plan.kv_bytes for plan in plans]
    published = PUBLISHED["vllm_docs_kv"]["capacity_L4_Qwen3_4B_tokens"]
    assert tokens[1] / tokens[0] == pytest.approx(published[1] / published[0], rel=1e-3)
    assert tokens[0] == pytest.approx(published[0], rel=0.12)  # vLLM also keeps activations and CUDA graphs


def test_how_many_long_requests_fit_on_one_h200():
    both = "w=e4m3fn/row a=e4m3fn/row kv=e4m3fn/tensor"
    assert [bound(r, "H200 SXM").largest_batch(32_768) for r in ("BF16", "FP8_DYNAMIC", both)] == [25, 27, 54]


@pytest.mark.parametrize("name", ["BF16", *LINEARS])
def test_a_step_is_never_shorter_than_reading_all_weights_or_than_its_flops(name):
    plan = bound(name, "H200 SXM")
    table = LLAMA.vocabulary * LLAMA.hidden * 2  # the embedding is looked up, not read
    assert plan.decode_s(1, 1) >= (plan.weight_bytes - table - 2 * LLAMA.vectors) / 4.8e12
    flops = 2 * (LLAMA.active_parameters - LLAMA.vocabulary * LLAMA.hidden) * 4096
    assert plan.prefill_s(4096) >= flops / (plan.product.tflops * 1e12)


@pytest.mark.parametrize("name", ["BF16", *LINEARS])
def test_throughput_grows_with_the_batch_and_latency_too(name):
    plan = bound(name, "H200 SXM")
    points = list(curve(plan, 1024, 300))
    assert [batch for batch, _ in points][-1] == 300
    for (small, slow), (large, fast) in zip(points, points[1:], strict=False):
        assert fast >= slow * (1 - 1e-12)  # equal, but for float64's rounding, where all is bound by compute
        assert large / fast >= small / slow


@pytest.mark.parametrize("model", KNOWN)
def test_devices_share_evenly_and_reach_divides(model):
    one, two = (bound("FP8_BLOCK", "H200 SXM", KNOWN[model], n) for n in (1, 2))
    assert one.decode_s(16, 500) == pytest.approx(2 * two.decode_s(16, 500))
    assert one.prefill_s(512) == pytest.approx(2 * two.prefill_s(512))
    half = dataclasses.replace(one, reach=0.5)
    assert half.decode_s(16, 500) == pytest.approx(2 * one.decode_s(16, 500))


def test_the_turning_point_of_one_huge_linear_is_its_ridge_over_the_flops_of_a_weights_byte():
    n = 1 << 24  # so wide that its operands weigh nothing beside its weights
    huge = dataclasses.replace(LLAMA, linears=(Linear("mlp.up_proj", n, n, (0,)),), vocabulary=1)
    for recipe, kind, size in (("BF16", "bf16", 2), ("FP8_TENSOR", "fp8", 1), ("W4A16", "bf16", 0.53)):
        ridge = ACCELERATORS["H100 SXM"].ridge(kind)
        assert bound(recipe, "H100 SXM", huge).turning_point() == pytest.approx(ridge * size / 2, rel=0.01)


@pytest.mark.parametrize("name", ["BF16", *LINEARS])
def test_at_the_turning_point_the_products_stop_being_bound_by_memory(name):
    plan = bound(name, "H100 SXM")
    turn = plan.turning_point()
    for tokens, bound_by_compute in ((turn - 1, False), (turn, True)):
        gemms = plan.gemms(tokens)
        assert (sum(g.compute_s for g in gemms) >= sum(g.memory_s for g in gemms)) is bound_by_compute


def test_an_expert_that_no_token_chose_is_not_read():
    mixtral = KNOWN["Mixtral-8x7B"]
    plan = bound("BF16", "H200 SXM", mixtral, 2)
    experts = [g for g in plan.gemms(1) if ".experts." in g.name]
    read = sum(linear.parameters for linear in mixtral.linears if ".experts." in linear.name) * 2
    assert sum(g.bytes for g in experts) == pytest.approx(read * 2 / 8, rel=1e-3)  # 2 of 8; activations weigh little
    all_read = sum(g.bytes for g in plan.gemms(256) if ".experts." in g.name)
    assert read < all_read < read * 1.1
    assert sum(g.flops for g in plan.gemms(7)) == pytest.approx(7 * 2 * mixtral.active_parameters, rel=1e-9)


def test_a_router_is_multiplied_in_bf16_whatever_the_recipe():
    plans = [bound(name, "H200 SXM", KNOWN["Mixtral-8x7B"], 2) for name in ("BF16", "FP8_BLOCK")]
    bf16, fp8 = (next(g for g in plan.gemms(512) if g.name == "mlp.gate") for plan in plans)
    assert bf16 == fp8


def test_skipped_layers_and_the_router_keep_sixteen_bits():
    whole, skipped = (bound(f"w=e4m3fn/row{more}", "H200 SXM") for more in ("", " skip=*.down_proj"))
    down = next(linear for linear in LLAMA.linears if linear.name == "mlp.down_proj")
    saved = recipe_from("w=e4m3fn/row").weights.bits_per_element(down.n, down.k)
    assert skipped.weight_bytes - whole.weight_bytes == pytest.approx(down.parameters * (16 - saved) / 8)
    first = bound("w=e4m3fn/row skip=model.layers.0.*", "H200 SXM")
    linears = sum(linear.parameters for linear in LLAMA.linears) / 32
    assert first.weight_bytes - whole.weight_bytes == pytest.approx(linears, rel=0.01)


def test_casts_by_layer_count_as_the_recipe_that_those_layers_have():
    model, h200 = KNOWN["Llama-3.1-8B"], ACCELERATORS["H200 SXM"]
    plain, int4 = (recipe_from(name) for name in ("FP8_DYNAMIC", "W4A16"))
    everywhere = parse_recipe(f"{plain.text} w[*]={int4.weights.text} a[*]=bf16")
    half = parse_recipe(f"{plain.text} " + " ".join(f"w[model.layers.{i}.*]=bf16" for i in range(16)))
    for tokens in (1, 4096):
        assert Plan(model, everywhere, h200).decode_s(tokens, 10) == Plan(model, int4, h200).decode_s(tokens, 10)
        cast, mixed, bare = (Plan(model, recipe, h200).decode_s(tokens, 10) for recipe in (plain, half, Recipe()))
        assert cast < mixed < bare
    assert Plan(model, everywhere, h200).weight_bytes == Plan(model, int4, h200).weight_bytes
    left_out = parse_recipe(f"{plain.text} skip=*.down_proj")
    apart = parse_recipe(f"{plain.text} w[*.down_proj]=bf16 a[*.down_proj]=bf16")
    assert Plan(model, left_out, h200).gemms(64) == Plan(model, apart, h200).gemms(64)


def test_a_cast_head_saves_memory_and_a_tied_one_is_stored_once_more():
    plain, head = (bound(r, "H200 SXM").weight_bytes for r in ("w=int8/row", "w=int8/row also=lm_head"))
    assert plain - head == pytest.approx(525_336_576, rel=0.01)
    tied = KNOWN["SmolLM2-135M-Instruct"]
    plain, head = (bound(r, "H200 SXM", tied).weight_bytes for r in ("w=int8/row", "w=int8/row also=lm_head"))
    assert head - plain == pytest.approx(tied.vocabulary * tied.hidden, rel=0.01)


@pytest.mark.parametrize(
    ("recipe", "accelerator", "kind"),
    [
        ("FP8_DYNAMIC", "H100 SXM", "fp8"), ("FP8_DYNAMIC", "A100 SXM", "bf16"), ("FP8_DYNAMIC", "MI300X", "fp8"),
        ("FP8_FNUZ", "MI300X", "fnuz"), ("FP8_FNUZ", "H100 SXM", "bf16"), ("MXFP8", "H200 SXM", "bf16"),
        ("MXFP8", "B200", "mx"), ("NVFP4", "B200", "fp4"), ("MXFP4", "H100 SXM", "bf16"), ("INT8", "A100 SXM", "int8"),
        ("INT8", "B200", "bf16"), ("W4A16", "B200", "bf16"), ("FP8_E5M2", "H100 SXM", "bf16"), ("BF16", "L4", "bf16"),
        ("FP8_BLOCK", "H100 SXM", "fp8"), ("w=e4m3fn/3x5 a=e4m3fn/row", "H100 SXM", "bf16"),
        ("MXFP6_E2M3", "B200", "mx"),
        ("MOSS", "B200", "mx"), ("FP8_CHANNEL_TENSOR", "H100 SXM", "fp8"),
    ],
)  # fmt: skip
def test_each_recipe_is_multiplied_as_the_hardware_can(recipe, accelerator, kind):
    multiplication = product(bound(recipe, accelerator).recipe, ACCELERATORS[accelerator])
    assert multiplication.kind == kind and multiplication.reason
    assert multiplication.tflops == ACCELERATORS[accelerator].peak(
        "fnuz" if kind == "fp8" and accelerator == "MI300X" else kind
    )


def test_nothing_that_is_missing_from_a_data_sheet_is_made_up():
    assert "no source here gives B200’s peak for INT8" in product(recipe_from("INT8"), ACCELERATORS["B200"]).reason
    assert "does not multiply MX tiles" in product(recipe_from("MXFP8"), ACCELERATORS["H100 SXM"]).reason


def test_scales_kept_for_each_token_are_counted():
    tensor, token = (kv_bits(LLAMA, parse_recipe(f"kv=e4m3fn/{share}").kv) for share in ("tensor", "token"))
    assert token - tensor == 32 * 2 * 8 * 32  # a float32 for keys and values of 8 heads in 32 layers
    assert kv_bits(LLAMA, None) == 2 * tensor


def test_a_model_that_does_not_fit_holds_no_request():
    plan = bound("BF16", "H100 SXM", KNOWN["Llama-3.1-70B"])
    assert plan.largest_batch(100) == 0 and plan.free_bytes < 0
    assert Plan(KNOWN["Llama-3.1-70B"], Recipe(), ACCELERATORS["H100 SXM"], 4).largest_batch(100) > 0


def test_money():
    assert per_million(2.5, 8, 2000) == pytest.approx(2.5 * 8 / (2000 * 3600) * 1e6)
    assert math.isclose(per_million(2.5, 8, 4000), per_million(2.5, 4, 2000))
