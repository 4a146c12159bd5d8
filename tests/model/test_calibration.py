"""Scales made beforehand: static ones from calibration text, delayed ones from earlier passes, and what they clip."""

import dataclasses

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from torch import nn

from fp8dash.choose.casts import parse_cast
from fp8dash.choose.hardware import Device
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import Measurement, StageResult
from fp8dash.choose.request import Request
from fp8dash.errors import CorpusError, NotFinite
from fp8dash.measure.corpora import calibration_windows, cut_windows, load_corpus
from fp8dash.model.calibration import rewind, scales
from fp8dash.model.linears import EmulatedLinear, NativeLinear
from fp8dash.model.swap import cast_model
from fp8dash.pipeline import run_stages
from fp8dash.quant.calibrate import DelayedScale, Observer, StaticScale
from fp8dash.quant.cast import quantize, round_trip
from tests.model.test_swap import observed_on

CPU = Device("cpu", "CPU")
WINDOWS = torch.arange(256).view(4, 64) % 250
FP8 = "w=e4m3fn/tensor a=e4m3fn/tensor"


def outliers(seed, shape=(64, 48)):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[:, 3] *= 40
    return x.bfloat16()


def cast(model, text, backend="emulated"):
    recipe = parse_recipe(text)
    return list(cast_model(model, recipe, CPU, backend, observed_on(model, recipe, WINDOWS)))


@torch.no_grad()
def inputs_of(model, windows=WINDOWS):
    """What each Linear of the blocks reads in each window, by plain hooks."""
    seen, handles = {}, []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            keep = seen.setdefault(name, [])
            handles.append(module.register_forward_pre_hook(lambda _, args, keep=keep: keep.append(args[0].clone())))
    for ids in windows:
        model(input_ids=ids[None])
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("text", [f"{FP8}/static", "w=int8/row a=int8/tensor/ct/static"])
def test_static_scales_are_those_compressed_tensors_makes_of_the_same_activations(loaded, text):
    seen, recipe = inputs_of(loaded.model), parse_recipe(text)
    kind = "int" if "int8" in text else "float"
    args = QuantizationArgs(num_bits=8, type=kind, strategy="tensor", symmetric=True, dynamic=False)
    observed = observed_on(loaded.model, recipe, WINDOWS)
    assert set(observed.inputs) >= set(seen)
    for name, tensors in seen.items():
        values = torch.cat([t.float().flatten() for t in tensors])
        theirs, _ = calculate_qparams(values.min().view(1), values.max().view(1), args)
        assert observed.inputs[name].static_scale(recipe.activations).item() == theirs.item(), name


def test_linears_that_read_one_tensor_share_one_scale(loaded):
    cast(loaded.model, f"{FP8}/static")
    by_name = dict(scales(loaded.model))
    readers = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    assert list(by_name) == [f"model.layers.{layer}.{reader}" for layer in (0, 1) for reader in readers]
    block = loaded.model.model.layers[0].self_attn
    assert block.k_proj.activations.scale is block.q_proj.activations.scale


@pytest.mark.parametrize("percent", [50.0, 99.0, 99.9])
def test_a_percentile_is_numpys_nearest_rank_over_all_passes(percent):
    tensors, observer = [outliers(seed) for seed in range(3)], Observer(counts_magnitudes=True)
    for x in tensors:
        observer.see(x)
    values = torch.cat(tensors).float().abs().numpy()
    theirs = np.quantile(values, percent / 100, method="inverted_cdf")
    assert observer.static_scale(parse_cast(f"e4m3fn/tensor/static:p{percent:g}")).item() == np.float32(theirs) / 448


@pytest.mark.parametrize("fmt", ["int8", "e2m1", "e4m3fn"])
def test_the_least_error_over_counted_magnitudes_is_that_over_all_values(fmt):
    tensors, observer = [outliers(seed) for seed in range(3)], Observer(counts_magnitudes=True)
    for x in tensors:
        observer.see(x)
    scale = observer.static_scale(parse_cast(f"{fmt}/tensor/static:mse"))
    theirs = quantize(
        torch.cat(tensors).float(), parse_cast(f"{fmt}/tensor/mse")
    ).scales  # searches the values themselves
    assert scale.item() == theirs.item()


def test_a_static_cast_uses_its_scale_whatever_comes_and_counts_what_is_beyond(loaded):
    cast(loaded.model, f"{FP8}/static")
    layer = loaded.model.model.layers[0].mlp.down_proj
    scale = layer.activations.scale.present
    x = torch.full((2, 160), scale * 448)
    x[0, :40] *= 3
    assert torch.equal(layer.activations.emulated(x), x.clamp(max=scale * 448))
    assert layer.activations.scale.clipped == 40 / 320
    rewind(loaded.model)
    assert layer.activations.scale.clipped is None


@torch.no_grad()
def test_static_scales_run_natively_on_the_same_codes(tiny, loaded):
    from fp8dash.model.load import load

    native = load(tiny, torch.device("cpu")).model
    cast(loaded.model, f"{FP8}/static")
    assert {swap.backend for swap in cast(native, f"{FP8}/static", "native") if swap.part.in_blocks} == {"native"}
    x = outliers(1, (32, 64))
    emulated, kernel = loaded.model.model.layers[0].mlp.up_proj, native.model.layers[0].mlp.up_proj
    assert isinstance(emulated, EmulatedLinear) and isinstance(kernel, NativeLinear)
    decoded, theirs = emulated(x).float(), kernel(x).float()
    assert (decoded - theirs).norm() / decoded.norm() < 2**-7  # both operands and the result round to bfloat16


def reference_delayed(amaxes, history, pick, margin, top=448.0):
    """Transformer Engine's DelayedScaling, from its description: the scale of each pass, first to last."""
    kept, scale, used = [], 1.0, []
    for amax in amaxes:
        used.append(scale)
        kept = [*kept, amax][-history:]
        chosen = max(kept) if pick == "max" else kept[-1]
        if 0 < chosen < float("inf"):
            scale = float(np.float32(np.float32(chosen * 2**margin) / np.float32(top)))
    return used


@pytest.mark.parametrize("text", ["delayed:3", "delayed:3:recent", "delayed:2:max:1", "delayed"])
def test_delayed_scales_follow_transformer_engines_rule(text):
    delay = parse_cast(f"e4m3fn/tensor/{text}")
    tensors = [outliers(seed) * size for seed, size in enumerate((1.0, 8.0, 0.0, 0.25, 2.0, 2.0, 0.5))]
    when = delay.when
    expected = reference_delayed([float(x.abs().max()) for x in tensors], when.history, when.by, when.margin)
    scale = DelayedScale([], delay, torch.device("cpu"))
    assert [scale.of(x).item() for x in tensors] == expected
    warmed = DelayedScale([x.float().abs().amax().view(1, 1) for x in tensors[:4]], delay, torch.device("cpu"))
    assert [warmed.of(x).item() for x in tensors[4:]] == expected[4:]


def test_a_delayed_scale_clips_what_grew_since_and_counts_it():
    scale, x = DelayedScale([torch.full((1, 1), 448.0)], parse_cast("e4m3fn/tensor/delayed"), torch.device("cpu")), None
    x = torch.full((4, 4), 448.0)
    x[0] = 1000.0
    assert scale.of(x).item() == 1.0 and scale.clipped == 0.25
    assert scale.of(x).item() == pytest.approx(1000 / 448)
    assert scale.clipped == 0.125


def test_an_activation_of_calibration_that_is_not_finite_names_its_layer(loaded):
    loaded.model.model.layers[1].mlp.up_proj.weight[3, 3] = float("inf")
    with pytest.raises(NotFinite, match=r"model.layers.1.mlp.down_proj: .*calibration"):
        observed_on(loaded.model, parse_recipe(f"{FP8}/static"), WINDOWS)


def test_dynamic_and_static_scales_meet_in_one_recipe(loaded):
    swaps = cast(
        loaded.model, "w=e4m3fn/row a=e4m3fn/row a[*.down_proj]=e4m3fn/tensor/static w[*.o_proj]=bf16 a[*.o_proj]=bf16"
    )
    assert [name for name, _ in scales(loaded.model)] == [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]
    kept = {swap.part.name: swap.reason for swap in swaps if swap.backend == "kept"}
    assert kept["model.layers.0.self_attn.o_proj"] == "kept by w[*.o_proj]=bf16"
    x = outliers(2, (16, 64))
    assert torch.equal(
        loaded.model.model.layers[0].mlp.up_proj.activations.emulated(x), round_trip(x, parse_cast("e4m3fn/row"))
    )


def test_calibration_text_is_never_what_is_measured(loaded, corpus_file):
    corpus = load_corpus(str(corpus_file))
    measured = cut_windows(loaded.tokenizer, corpus, 4, 64, 0).ids.flatten().tolist()
    whole = loaded.tokenizer(corpus.text, add_special_tokens=False, verbose=False)["input_ids"]
    assert whole[: len(measured)] == measured
    assert calibration_windows(loaded.tokenizer, corpus, 2, 64, 256).flatten().tolist() == whole[-128:]
    short = dataclasses.replace(corpus, text=corpus.text[:400])
    assert calibration_windows(loaded.tokenizer, short, 2, 64, 256).shape == (2, 64)
    with pytest.raises(CorpusError, match="has 144 tokens besides the measured ones"):
        calibration_windows(loaded.tokenizer, short, 3, 64, 256)


def run(request, cache, done=()):
    return {r.stage: r for r in run_stages(request, frozenset(done), cache) if isinstance(r, StageResult)}


SMALL = {"windows": 4, "window_length": 64, "gemm_m": (1,), "needle_lengths": (700,), "needle_depths": (0,)}


@pytest.mark.parametrize("recipe", ["FP8", "TE_DELAYED"])
def test_a_calibrated_run_records_its_text_its_scales_and_what_was_clipped(tiny, corpus_file, tmp_path, recipe):
    request = Request.of(model=str(tiny), recipe=recipe, corpus=str(corpus_file), backend="emulated", **SMALL)
    results = run(request, tmp_path)
    facts = results["load"].facts["calibration"]
    assert facts["hash"] == results["load"].facts["corpus_hash"] and facts["windows"] == 4
    rows = [row for result in results.values() for row in result.rows if isinstance(row, Measurement)]
    assert sum(row.name == "activation_scale" for row in rows) == 8
    (whole,) = (row for row in rows if row.name == "activation_clipped" and not row.label)
    assert 0 <= whole.value < 0.01
    again = run(request, tmp_path, ("load", "baseline", "quantize", "gemm"))
    assert again["perplexity"].rows == results["perplexity"].rows


def test_keys_and_values_are_cast_by_calibrated_scales(tiny, corpus_file, tmp_path):
    klds = {}
    for share in ("tensor", "head"):
        request = Request.of(model=str(tiny), recipe=f"kv=e4m3fn/{share}/static", corpus=str(corpus_file), **SMALL)
        rows = [
            row for result in run(request, tmp_path).values() for row in result.rows if isinstance(row, Measurement)
        ]
        assert sum(row.name == "kv_scale" for row in rows) == 4
        klds[share] = next(row.value for row in rows if row.name == "kld")
    assert min(klds.values()) > 0 and klds["head"] != klds["tensor"]


def test_fixed_scales_of_keys_are_amax_over_the_calibration_text(loaded):
    from transformers.cache_utils import DynamicCache

    recipe = parse_recipe("kv=e4m3fn/head/static")
    plain = []
    with torch.no_grad():
        for ids in WINDOWS:
            cache = DynamicCache(config=loaded.model.config)
            loaded.model(input_ids=ids[None], cache=cache)
            plain.append(cache.layers[1].keys.float().abs().amax(dim=(0, 2, 3)))
    list(cast_model(loaded.model, recipe, CPU, "emulated", observed_on(loaded.model, recipe, WINDOWS)))
    keys, _ = loaded.model.kv_scales[1]
    assert torch.equal(keys, torch.stack(plain).amax(0) / 448)


def test_a_static_scale_needs_no_more_than_its_value():
    assert StaticScale(torch.full((1, 1), 2.0), parse_cast("int8/tensor/static")).present == 2.0
