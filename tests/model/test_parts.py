"""Reports about a model are made from its parameters: over families, each stands in it once, and none is missing."""

import copy

import pytest
import torch
from torch import nn

from fp8dash.choose.catalog import estimate
from fp8dash.choose.hardware import Device
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import LAYER_GROUPS, Layer, Measurement, StageResult
from fp8dash.choose.request import Request
from fp8dash.errors import InvalidChoice, ModelError
from fp8dash.measure.weight_error import weight_error
from fp8dash.model.as_linears import make_linears
from fp8dash.model.fit import check_fit
from fp8dash.model.parts import active_share
from fp8dash.model.swap import cast_model
from fp8dash.pipeline import run_stages
from fp8dash.report.recorded import shape_of_layers
from tests.families import FAMILIES, KEPT_MIXTURE, MIXTURES, family_model, write_family

CPU = Device("cpu", "CPU")
MOST_UNCAST = 0.1
FP8 = "w=e4m3fn/row a=e4m3fn/row"


def prepared(family):
    """A model of a family as a run has it: all that it multiplies by is a Linear."""
    model = family_model(family)
    make_linears(model)
    return model


def cast_layers(model, text, backend="emulated"):
    """The layers and measurements of a recipe on a model, which is cast."""
    items = list(weight_error(cast_model(model, parse_recipe(text), CPU, backend), 1, active_share(model)))
    layers = [item for item in items if isinstance(item, Layer)]
    return layers, {item.name: item.value for item in items if isinstance(item, Measurement)}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parameters_told_of_are_the_models_each_once(family):
    model = prepared(family)
    names = [name.removesuffix(".weight") for name, _ in model.named_parameters()]
    count = sum(parameter.numel() for parameter in family_model(family).parameters())
    stored = sum(8 * p.numel() * p.element_size() for p in model.parameters())
    for text in ("bf16", FP8):
        layers, values = cast_layers(model, text)
        assert [layer.name for layer in layers] == names
        assert sum(layer.rows * layer.cols for layer in layers) == count
        assert all(layer.group in LAYER_GROUPS and layer.reason for layer in layers)
        cast = sum(layer.rows * layer.cols for layer in layers if layer.cast)
        assert values["coverage"] == pytest.approx(cast / count)
        assert cast or values["model_bytes"] == pytest.approx(stored / 8)
        assert not cast or (values["uncast_share"] > MOST_UNCAST) == (family == KEPT_MIXTURE)


@pytest.mark.parametrize("family", [*MIXTURES, KEPT_MIXTURE])
def test_each_expert_is_a_matrix_of_its_own_and_routers_are_never_cast(family):
    layers, values = cast_layers(prepared(family), f"{FP8} also=lm_head,embeddings,norms")
    experts = [layer for layer in layers if layer.group == "experts"]
    assert experts
    kept = [layer.reason for layer in experts if layer.backend == "kept"]
    if family == KEPT_MIXTURE:
        assert len(kept) == len(experts) and all("does not use them one by one" in reason for reason in kept)
        assert values["gemm_coverage"] < 0.95
    else:
        assert all("biases" in reason for reason in kept)
        assert values["uncast_share"] == 0.0 and values["gemm_coverage"] == 1.0
    routers = [layer for layer in layers if layer.group == "router"]
    assert routers and {layer.backend for layer in routers} == {"kept"}
    named = {layer.name for layer in layers if "router" in layer.name or layer.name.endswith((".gate", "expert_gate"))}
    assert named <= {layer.name for layer in routers}


def test_nothing_beside_the_language_model_is_cast():
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.families import PLAIN

    vision = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    text = {**PLAIN, **FAMILIES["gemma3_text"]}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False)
    count = sum(parameter.numel() for parameter in model.parameters())
    layers, values = cast_layers(model, f"{FP8} also=norms,embeddings")
    beside = [layer for layer in layers if "vision" in layer.name or "projector" in layer.name]
    assert beside and {layer.backend for layer in beside} == {"kept"}
    assert all("no text passes" in layer.reason for layer in beside)
    assert values["uncast_share"] == 0.0
    head = next(layer for layer in layers if layer.group == "head")
    assert sum(layer.rows * layer.cols for layer in layers) == count + head.rows * head.cols, "untied by the cast"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("first", ["", " also=norms skip=*norm,*.o_proj"])
def test_what_is_estimated_from_what_a_run_recorded_is_what_the_next_one_measures(family, first):
    model = prepared(family)
    recipe = parse_recipe(FP8 + first)
    shape = shape_of_layers(cast_layers(copy.deepcopy(model), recipe.text)[0], recipe)
    for words in ("", " also=embeddings", " also=lm_head", " also=norms,lm_head,embeddings skip=*norm"):
        recipe = parse_recipe(FP8 + words)
        layers, values = cast_layers(copy.deepcopy(model), recipe.text)
        expected = estimate(recipe, shape)
        wide = sum(2 * x.rows * x.cols for x in layers if not x.cast and x.bits_per_weight == 32)
        assert values["model_bytes"] - wide == pytest.approx(expected.size_bytes, abs=1), words
        assert values["coverage"] == pytest.approx(expected.coverage), words


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_run_of_a_model_that_is_cast_in_part_does_not_look_good(family, tmp_path, corpus_file):
    measures = ("gemm", "perplexity")
    asked = {"model": str(write_family(family, tmp_path / family)), "corpus": str(corpus_file), "measures": measures}
    asked |= {"windows": 2, "window_length": 64, "gemm_m": (16,), "backend": "auto"}
    baseline = measured(Request.of(recipe="BF16", **asked), tmp_path)
    assert "uncast_share" not in baseline and baseline["gemm_speedup"] == 1.0
    values = measured(Request.of(recipe="w=e4m3fn/row a=e4m3fn/row skip=*.experts.*", **asked), tmp_path)
    assert values["uncast_share"] > 0.5 and values["gemm_speedup"] is None and values["coverage"] < 0.3


def measured(request, cache):
    """The unlabelled numbers of a run."""
    results = [item for item in run_stages(request, frozenset(), cache) if isinstance(item, StageResult)]
    rows = [row for result in results for row in result.rows if isinstance(row, Measurement)]
    return {row.name: row.value for row in rows if not row.label}


def test_a_weight_recipe_that_casts_nothing_is_refused_and_says_what_was_looked_for():
    with pytest.raises(InvalidChoice, match="casts nothing in GPT2LMHeadModel: it looks for Linears of the blocks"):
        check_fit(family_model("gpt2"), parse_recipe(FP8), exported=False)
    with pytest.raises(InvalidChoice, match="left out by skip="):
        check_fit(family_model("llama"), parse_recipe(f"{FP8} skip=model.*"), exported=False)
    check_fit(family_model("gpt2"), parse_recipe(f"{FP8} also=lm_head"), exported=False)


def test_a_cast_attention_of_a_model_without_one_is_refused():
    with pytest.raises(ModelError, match="has no attention with operands"):
        check_fit(family_model("mamba"), parse_recipe("attn=e4m3fn/tensor"), exported=False)


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        ("skip=down_proj", r"closest alternative: skip=\*\.down_proj\."),
        ("w[*.nosuch]=bf16", r"closest alternative: w\[\*\.\w+\]=."),
        ("a[*.down]=bf16", r"closest alternative: a\[\*\.down_proj\]=."),
        ("skip=model.layers.0", r"closest alternative: skip=model.layers.0.\*."),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_that_does(words, nearest):
    with pytest.raises(InvalidChoice, match=f"matches no module of this model; {nearest}"):
        check_fit(family_model("llama"), parse_recipe(f"{FP8} {words}"), exported=False)


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba", "lfm2", "qwen3_next", "phimoe", "llama4_text"])
@torch.no_grad()
def test_a_model_that_reads_its_weights_itself_runs_when_it_is_cast(family):
    model, ids = family_model(family), torch.arange(32)[None]
    before = model(input_ids=ids).logits.float()
    cast_layers(model, FP8, "auto")
    after = model(input_ids=ids).logits.float()
    assert torch.isfinite(after).all() and (after - before).norm() < 0.5 * before.norm()


def test_a_linear_with_a_forward_of_its_own_is_left_alone():
    model = family_model("llama")

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model.model.layers[0].mlp.up_proj.__class__ = Doubled
    layers, _ = cast_layers(model, FP8)
    layer = next(layer for layer in layers if layer.name == "model.layers.0.mlp.up_proj")
    assert layer.backend == "kept" and layer.reason == "Doubled computes more than a matrix product"
