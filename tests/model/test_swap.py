"""Casting a model in place: what is cast, what is kept, and that each weight says why."""

import copy

import pytest
import torch
from torch import nn

from fp8dash.choose.catalog import estimate
from fp8dash.choose.hardware import Device
from fp8dash.choose.presets import PRESETS
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import Layer, Measurement
from fp8dash.errors import KernelRefused, NotFinite
from fp8dash.measure.weight_error import backend_of, weight_error
from fp8dash.model.calibration import NOTHING, observe
from fp8dash.model.linears import EmulatedLinear
from fp8dash.model.load import load
from fp8dash.model.swap import cast_model
from fp8dash.report.recorded import shape_of_layers

CPU = Device("cpu", "CPU")
IDS = torch.arange(64)[None] % 250


def walked(model, text, backend="emulated"):
    recipe = parse_recipe(text)
    observed = observed_on(model, recipe) if recipe.needs_calibration else NOTHING
    items = list(weight_error(cast_model(model, recipe, CPU, backend, observed), 1))
    layers = [item for item in items if isinstance(item, Layer)]
    return layers, {item.name: item.value for item in items if isinstance(item, Measurement)}


def observed_on(model, recipe, windows=IDS):
    walk = observe(model, recipe, windows)
    while True:
        try:
            next(walk)
        except StopIteration as end:
            return end.value


@pytest.fixture
def model(tiny):
    return load(tiny, torch.device("cpu")).model


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits.float()


@pytest.mark.parametrize(
    "text",
    [p.text for p in PRESETS.values()]
    + ["w=e4m3fn/row", "a=int8/1x32", "w=e5m2/128x128/rceil", "w=e4m3fn/row w[*.down_proj]=int8/1x32 skip=*.o_proj"],
)
def test_every_weight_is_told_of_with_a_reason_and_logits_stay_close(model, tiny, text):
    named = {
        name for name, module in model.named_modules() if isinstance(getattr(module, "weight", None), torch.Tensor)
    }
    before = logits(model)
    layers, values = walked(model, text)
    assert {layer.name for layer in layers} == named and all(layer.reason for layer in layers)
    assert torch.isfinite(logits(model)).all()
    assert (logits(model) - before).norm() / before.norm() < 0.2
    shape = estimate(parse_recipe(text), shape_of_layers(layers, parse_recipe(text)))
    assert values["bits_per_weight"] == pytest.approx(shape.bits_per_weight)
    assert values["model_bytes"] == pytest.approx(shape.size_bytes, abs=1)
    assert values["coverage"] == pytest.approx(shape.coverage)


def test_the_head_embeddings_and_norms_stay_unless_asked_for(model):
    layers, _ = walked(model, "w=e4m3fn/row a=e4m3fn/row")
    kept = {layer.name for layer in layers if layer.backend == "kept"}
    assert kept == {"lm_head", "model.embed_tokens", *(name for name in kept if "norm" in name)}


def test_all_is_cast_when_asked_for_and_a_pattern_leaves_layers_out(model):
    layers, values = walked(model, "w=e4m3fn/row a=e4m3fn/row also=lm_head,embeddings,norms skip=*.down_proj")
    assert {layer.name for layer in layers if not layer.cast} == {f"model.layers.{i}.mlp.down_proj" for i in (0, 1)}
    assert values["coverage"] < 1


def test_a_tied_head_is_untied_before_it_is_cast(model):
    model.lm_head.weight = model.model.embed_tokens.weight
    table = model.model.embed_tokens.weight.clone()
    walked(model, "w=e5m2/tensor also=lm_head")
    assert torch.equal(model.model.embed_tokens.weight, table)
    assert not torch.equal(model.lm_head.weight, table)


@pytest.mark.parametrize("backend", ["emulated", "native"])
def test_layers_that_share_a_weight_are_cast_each_from_its_own(tiny, backend):
    """Casting where a weight lies must not change what another layer is still to be cast from."""
    pair = [load(tiny, torch.device("cpu")).model for _ in range(2)]
    for model, is_tied in zip(pair, (True, False), strict=True):
        first, second = (layer.mlp.up_proj for layer in model.model.layers)
        second.weight = first.weight if is_tied else nn.Parameter(first.weight.clone(), requires_grad=False)
        walked(model, "w=e4m3fn/row a=e4m3fn/row", backend)
    assert torch.equal(*(logits(model) for model in pair))


@pytest.mark.parametrize(
    "text",
    ["w=e4m3fn/row a=e4m3fn/row", "w=e4m3fn/tensor a=e4m3fn/tensor", "w=e5m2/row a=e5m2/row", "w=int8/row a=int8/row"],
)
@torch.no_grad()
def test_each_native_layer_agrees_with_the_emulated_one_to_bf16_rounding(tiny, text):
    """Layer by layer on one input: over a whole model a single rounding flips codes downstream, in any two
    implementations, so logits agree in distribution only."""
    pair = [load(tiny, torch.device("cpu")).model for _ in range(2)]
    for model, backend in zip(pair, ("emulated", "native"), strict=True):
        layers, _ = walked(model, text, backend)
        assert backend_of(layers) == backend
    for name, layer in pair[0].named_modules():
        if isinstance(layer, EmulatedLinear):
            x = torch.randn(32, layer.weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
            native, theirs = layer(x).float(), pair[1].get_submodule(name)(x).float()
            sizes = layer.activations.emulated(x).float().abs() @ layer.weight.float().abs().T
            assert (native - theirs).norm() / native.norm() < 2**-7, name  # operands and result round by 2^-9 each
            assert ((native - theirs).abs() <= sizes * 3 * 2**-9 + native.abs() * 2**-8).all(), name


def test_auto_says_of_each_layer_what_it_took(model):
    layers, _ = walked(model, "w=e4m3fn/128x128 a=e4m3fn/1x128", "auto")
    assert {layer.backend for layer in layers} == {"emulated", "kept"}
    assert any("128x128 weights" in layer.reason for layer in layers)


def test_native_without_a_kernel_names_the_layer(model):
    with pytest.raises(KernelRefused, match="model.layers.0.self_attn.q_proj cannot run natively"):
        walked(model, "w=e4m3fn/1x32/rceil a=e4m3fn/1x32/rceil", "native")


def test_a_weight_that_is_not_finite_names_the_layer(model):
    model.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    with pytest.raises(NotFinite, match="model.layers.1.mlp.up_proj"):
        walked(model, "w=e4m3fn/row a=e4m3fn/row")


def test_flushed_and_clipped_shares_are_counted(model):
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.fill_(1.0)
    weight[0, 0] = 2.0**-20
    weight[:, 1] = 0
    layers, _ = walked(model, "w=e4m3fn/tensor")
    layer = next(layer for layer in layers if layer.name == "model.layers.0.mlp.up_proj")
    assert layer.flushed == pytest.approx(1 / (weight.numel() - len(weight)))
    assert layer.clipped == 0.0


def test_a_bias_survives_the_swap():
    linear = nn.Linear(32, 16, dtype=torch.bfloat16).requires_grad_(False)

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.only = copy.deepcopy(linear)

        def get_output_embeddings(self):
            return None

        get_input_embeddings = get_output_embeddings

    for backend in ("emulated", "native"):
        model, x = One(), torch.randn(2, 3, 32).bfloat16()
        expected = linear(x)
        list(cast_model(model, parse_recipe("w=e4m3fn/row a=e4m3fn/row"), CPU, backend))
        assert (model.only(x) - expected).float().norm() / expected.float().norm() < 0.06
