"""Stacked experts and Conv1D as Linears: the same function, cast expert by expert as one would by hand."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from fp8dash.choose.casts import parse_cast
from fp8dash.choose.hardware import Device
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import Measurement, StageResult
from fp8dash.choose.request import Request
from fp8dash.errors import ModelError
from fp8dash.model.as_linears import ExpertLinear, Stack, make_linears
from fp8dash.model.load import load, locate
from fp8dash.model.parts import linears_of
from fp8dash.model.swap import cast_model
from fp8dash.pipeline import run_stages
from fp8dash.quant.cast import round_trip
from tests.families import FAMILIES, MIXTURES, family_model, write_family
from tests.model.test_swap import observed_on

CPU, IDS = Device("cpu", "CPU"), torch.arange(48)[None] * 7 % 272
ROW = parse_cast("e4m3fn/row")


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_model_computes_what_transformers_own_loop_computes(family):
    model = family_model(family)
    model.set_experts_implementation("eager")
    before, count = model(input_ids=IDS, use_cache=False).logits, sum(p.numel() for p in model.parameters())
    make_linears(model)
    assert torch.equal(model(input_ids=IDS, use_cache=False).logits, before)
    assert sum(p.numel() for p in model.parameters()) == count
    experts = [name for name, module in model.named_modules() if isinstance(module, ExpertLinear)]
    assert bool(experts) == (family in MIXTURES)
    assert set(experts) <= {name for name, _ in linears_of(model)}
    assert not any(isinstance(module, Conv1D) for module in model.modules())


@pytest.mark.parametrize("family", MIXTURES)
@torch.no_grad()
def test_an_experts_linears_stand_on_the_stacks_own_memory_or_take_its_place(family):
    model = family_model(family)
    stacks = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters() if p.dim() == 3}
    make_linears(model)
    stand_ins = [one for module in model.modules() for one in vars(module).values() if isinstance(one, Stack)]
    assert stand_ins
    for module in (module for module in model.modules() if isinstance(module, ExpertLinear)):
        at = module.weight.data_ptr()
        inside = any(start <= at < start + size for start, size in stacks.items())
        assert inside or any(one.is_transposed for one in stand_ins)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "llama4_text"])
@torch.no_grad()
def test_an_emulated_run_is_a_loop_over_experts_that_casts_by_hand(family):
    """Weights a scale a row, activations a scale a token, gate and up apart where checkpoints hold them so."""
    model, plain = family_model(family).float(), family_model(family).float()
    make_linears(model)
    list(cast_model(model, parse_recipe("w=e4m3fn/row a=e4m3fn/row skip=*self_attn*"), CPU, "emulated"))
    for layer in plain.model.layers:
        feed = layer.feed_forward if family == "llama4_text" else layer.mlp
        feed.experts.forward = by_hand(feed.experts, family)
        if family == "llama4_text":
            for name in ("gate_proj", "up_proj", "down_proj"):
                shared = getattr(feed.shared_expert, name)
                shared.forward = partial(multiplied, matrix=shared.weight)
    logits, expected = model(input_ids=IDS, use_cache=False).logits, plain(input_ids=IDS).logits
    uncast = family_model(family).float()(input_ids=IDS).logits
    assert (logits - expected).norm() < 0.01 * (uncast - expected).norm(), "float32's rounding, in another order"


def multiplied(x, matrix, bias=None):
    """x by a matrix [out, in], both cast by hand."""
    out = F.linear(cast_rows(x), round_trip(matrix, ROW))
    return out if bias is None else out + bias


def cast_rows(x):
    return round_trip(x.reshape(-1, x.shape[-1]), ROW).view(x.shape)


def by_hand(experts, family):
    """The experts' sum for each token, from the stacked weights cast by hand."""

    def expert(index, x):
        gate_up, down = experts.gate_up_proj[index], experts.down_proj[index]
        if family == "gpt_oss":
            both = multiplied(x, gate_up.T.contiguous(), experts.gate_up_proj_bias[index])
            gate, up = both[..., ::2].clamp(max=experts.limit), both[..., 1::2].clamp(-experts.limit, experts.limit)
            inner = (up + 1) * gate * torch.sigmoid(gate * experts.alpha)
            return multiplied(inner, down.T.contiguous(), experts.down_proj_bias[index])
        if family == "llama4_text":
            gate, up = multiplied(x, gate_up.T.contiguous()).chunk(2, dim=-1)
            return multiplied(up * experts.act_fn(gate), down.T.contiguous())
        gate, up = (multiplied(x, half) for half in gate_up.chunk(2))
        return multiplied(experts.act_fn(gate) * up, down)

    def forward(states, chosen=None, weights=None):
        if family == "llama4_text":
            groups = states.view(experts.gate_up_proj.shape[0], -1, states.shape[-1])
            return torch.stack([expert(index, x) for index, x in enumerate(groups)]).view(-1, states.shape[-1])
        out = torch.zeros_like(states)
        for token in range(len(states)):
            for place, index in enumerate(chosen[token]):
                out[token] += expert(int(index), states[token : token + 1])[0] * weights[token, place]
        return out

    return forward


@torch.no_grad()
def test_an_expert_that_calibration_never_reached_is_named_and_its_input_has_the_scale_one():
    model = family_model("mixtral")
    make_linears(model)
    recipe = parse_recipe("w=e4m3fn/tensor a=e4m3fn/tensor/static")
    observed = observed_on(model, recipe, IDS[:, :1])  # one token, which meets two of four experts
    reached = {name for name, _ in linears_of(model)} & set(observed.inputs)
    swaps = {swap.part.name: swap for swap in cast_model(model, recipe, CPU, "emulated", observed)}
    experts = {name: swap for name, swap in swaps.items() if ".experts." in name}
    dead = {name for name, swap in experts.items() if "no calibration text reached it" in swap.reason}
    assert dead == set(experts) - reached
    assert len(dead) == len(experts) / 2
    for name in dead:
        assert model.get_submodule(name).activations.scale.present == 1.0


@torch.no_grad()
def test_a_conv1d_is_cast_by_the_rows_of_its_transposed_weight():
    model, plain = family_model("gpt2"), family_model("gpt2")
    make_linears(model)
    list(cast_model(model, parse_recipe("w=e4m3fn/row"), CPU, "emulated"))
    for module in plain.modules():
        if isinstance(module, Conv1D):
            module.weight.copy_(round_trip(module.weight.T.contiguous(), ROW).T)
    logits, expected = model(input_ids=IDS, use_cache=False).logits.float(), plain(input_ids=IDS).logits.float()
    assert (logits - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gpt2"])
def test_a_run_of_a_cast_mixture_measures_all_that_is_asked(family, tmp_path, corpus_file):
    request = Request.of(
        model=str(write_family(family, tmp_path / family)), corpus=str(corpus_file), recipe="FP8_DYNAMIC",
        measures=("perplexity", "sensitivity", "profile", "gradients", "gemm"), windows=2, window_length=64,
        gemm_m=(4,), backend="emulated",
    )  # fmt: skip
    results = [item for item in run_stages(request, frozenset(), tmp_path) if isinstance(item, StageResult)]
    values = {r.name: r.value for result in results for r in result.rows if isinstance(r, Measurement) and not r.label}
    assert values["uncast_share"] == 0.0 and 0 < values["kld"] < 1
    assert values["sensitivity_kld"] > 0 and values["weight_amax_over_rms"] > 1


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss"])
def test_what_is_stored_otherwise_than_it_is_cast_is_not_exported(family, tmp_path, corpus_file):
    folder = write_family(family, tmp_path / family)
    request = Request.of(model=str(folder), corpus=str(corpus_file), recipe="FP8_DYNAMIC", measures=("export",))
    with pytest.raises(ModelError, match="this model cannot be exported. Leave the measure export out."):
        list(run_stages(request, frozenset(), tmp_path))


def test_a_qwen_mixture_is_exported_expert_by_expert_under_its_checkpoints_names(tmp_path, corpus_file):
    from safetensors import safe_open

    folder = write_family("qwen3_moe", tmp_path / "qwen3_moe")
    request = Request.of(model=str(folder), corpus=str(corpus_file), recipe="FP8_DYNAMIC", measures=("export",))
    results = [item for item in run_stages(request, frozenset(), tmp_path) if isinstance(item, StageResult)]
    (artefact,) = [row for result in results for row in result.rows if hasattr(row, "sha256")]
    with safe_open(f"{artefact.path}/model.safetensors", framework="pt") as tensors:
        keys = set(tensors.keys())
    assert {f"model.layers.1.mlp.experts.3.{name}_proj.weight_scale" for name in ("gate", "up", "down")} <= keys
    assert "model.layers.1.mlp.gate.weight_scale" not in keys


def test_a_loaded_mixture_is_one_whose_experts_are_linears(tmp_path):
    model = load(locate(str(write_family("olmoe", tmp_path / "olmoe")), tmp_path), torch.device("cpu")).model
    assert sum(isinstance(module, ExpertLinear) for module in model.modules()) == 24
