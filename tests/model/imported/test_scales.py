"""Scales that a checkpoint stores for activations and the KV cache are those that its run reads by."""

import json
import shutil

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import load_file, save_file

from fp8dash.choose.casts import parse_cast
from fp8dash.choose.records import Artefact, Measurement, StageResult
from fp8dash.choose.request import Request
from fp8dash.errors import ModelError
from fp8dash.model.imported.checkpoint import read_checkpoint
from fp8dash.model.imported.load import load_checkpoint
from fp8dash.model.imported.swap import keep_stored_kv, stored_swaps
from fp8dash.model.linears import EmulatedLinear
from fp8dash.pipeline import run_stages
from fp8dash.quant.activations import ActivationCast
from fp8dash.quant.calibrate import GivenOuter
from fp8dash.quant.kv_cache import SCALES

CPU, DOWN = torch.device("cpu"), "model.layers.1.mlp.down_proj"


def exported(tiny, corpus_file, place, recipe):
    asked = Request.of(model=str(tiny), corpus=str(corpus_file), recipe=recipe, measures=("export",))
    asked = asked.but(windows=2, window_length=64, calibration_windows=2)
    stages = [one for one in run_stages(asked, frozenset(), place) if isinstance(one, StageResult)]
    return next(row.path for stage in stages for row in stage.rows if isinstance(row, Artefact))


def changed(folder, place, change, config=lambda read: read):
    """A copy of a checkpoint with other tensors and another configuration."""
    shutil.copytree(folder, place)
    tensors = load_file(place / "model.safetensors")
    change(tensors)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    (place / "config.json").write_text(json.dumps(config(json.loads((place / "config.json").read_text()))))
    return str(place)


def swapped(folder, cache):
    checkpoint = read_checkpoint(folder)
    loaded, origins = load_checkpoint(checkpoint, cache, CPU)
    list(stored_swaps(loaded.model, None, checkpoint.place, origins))
    return checkpoint, loaded.model


def test_activations_are_cast_by_the_stored_scale(tiny, corpus_file, tmp_path):
    folder = exported(tiny, corpus_file, tmp_path, "w=e4m3fn/tensor a=e4m3fn/tensor/static")
    other = changed(folder, tmp_path / "other", lambda t: t.update({f"{DOWN}.input_scale": torch.tensor([0.125])}))
    _, model = swapped(other, tmp_path)
    x = torch.randn(1, 5, 160).bfloat16()
    linear = model.get_submodule(DOWN)
    assert isinstance(linear, EmulatedLinear) and linear.activations.scale.present == 0.125
    expected = (x.float() / 0.125).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.125
    assert torch.equal(linear.activations.emulated(x).float(), expected.bfloat16().float())


@pytest.mark.parametrize("largest", [1.0, 5.0])
def test_nvfp4_activations_under_a_stored_global_scale_equal_compressed_tensors(largest):
    args = QuantizationArgs(
        num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16, dynamic="local",
        scale_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    torch.manual_seed(4)
    x, outer = torch.randn(7, 64) * largest, torch.tensor([448 * 6 / 4.0])
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Linear(64, 8), outer)
    theirs = fake_quantize(x, scale, zero, args, global_scale=outer)
    cast = parse_cast("e2m1/1x16/nvfp4")
    own = ActivationCast(cast, GivenOuter(1 / outer.view(1, 1), cast)).emulated(x)
    assert torch.allclose(own, theirs, rtol=1e-6)
    assert (own == theirs).float().mean() > 0.9, "the two only round the same factors apart"


def test_nvfp4_weights_and_activations_are_read_from_a_checkpoint(tiny, corpus_file, tmp_path):
    folder = exported(tiny, corpus_file, tmp_path, "w=e2m1/1x16/nvfp4")

    def calibrate(tensors):
        names = [name for name in tensors if name.endswith(".weight_packed")]
        tensors.update({name.replace("weight_packed", "input_global_scale"): torch.tensor([512.0]) for name in names})

    def cast(config):
        group = config["quantization_config"]["config_groups"]["group_0"]
        group["input_activations"] = group["weights"] | {"dynamic": "local"}
        return config

    checkpoint, model = swapped(changed(folder, tmp_path / "other", calibrate, cast), tmp_path)
    assert checkpoint.recipe.activations.text == "e2m1/1x16/nvfp4"
    scale = model.get_submodule(DOWN).activations.scale
    assert isinstance(scale, GivenOuter) and scale.present == 1 / 512


def test_kv_scales_are_the_stored_ones_and_a_missing_one_is_1_and_told(tiny, corpus_file, tmp_path):
    folder = exported(tiny, corpus_file, tmp_path, "w=e4m3fn/row a=e4m3fn/row kv=e4m3fn/tensor/static")
    stored = load_file(f"{folder}/model.safetensors")
    checkpoint, model = swapped(folder, tmp_path)
    assert keep_stored_kv(model, checkpoint) == 0
    kept = [tuple(float(scale) for scale in pair) for pair in getattr(model, SCALES)]
    names = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    assert kept == [(float(stored[f"{name}.k_scale"]), float(stored[f"{name}.v_scale"])) for name in names]
    other = changed(folder, tmp_path / "other", lambda t: t.pop("model.layers.1.self_attn.v_scale"))
    checkpoint, model = swapped(other, tmp_path)
    assert keep_stored_kv(model, checkpoint) == 1 and float(getattr(model, SCALES)[1][1]) == 1.0
    asked = Request.of(model=str(tiny), corpus=str(corpus_file), recipe=f"stored={other}", windows=2, window_length=64)
    stages = [one for one in run_stages(asked.but(measures=("perplexity",)), frozenset(), tmp_path)]
    facts = {key: fact for one in stages if isinstance(one, StageResult) for key, fact in one.facts.items()}
    assert facts["kv_scales_missing"] == 1 and any("kv scale" in text for text in facts["faults"])
    assert any(isinstance(row, Measurement) and row.name == "kld" for one in stages[-1:] for row in one.rows)


def test_scales_under_their_other_names_are_read(tiny, corpus_file, tmp_path):
    folder = exported(tiny, corpus_file, tmp_path, "w=e4m3fn/tensor a=e4m3fn/tensor/static kv=e4m3fn/tensor/static")
    stored = load_file(f"{folder}/model.safetensors")

    def renamed(tensors):
        for name in list(tensors):
            other = name.replace(".weight_scale", ".weight_scale_inv").replace(".input_scale", ".activation_scale")
            for part in "kv":
                other = other.replace(f".self_attn.{part}_scale", f".self_attn.{part}_proj.output_scale")
            tensors[other] = tensors.pop(name)

    def config(read):
        read["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
        return read

    checkpoint, model = swapped(changed(folder, tmp_path / "fp8", renamed, config), tmp_path)
    assert model.get_submodule(DOWN).activations.scale.present == float(stored[f"{DOWN}.input_scale"])
    scales = checkpoint.kv_scales()
    for layer in range(2):
        for part in "kv":
            assert torch.equal(scales[layer][part], stored[f"model.layers.{layer}.self_attn.{part}_scale"])


def test_a_static_scale_that_is_no_single_number_is_refused(tiny, corpus_file, tmp_path):
    folder = exported(tiny, corpus_file, tmp_path, "w=e4m3fn/tensor a=e4m3fn/tensor/static")
    other = changed(folder, tmp_path / "other", lambda t: t.update({f"{DOWN}.input_scale": torch.ones(160)}))
    with pytest.raises(ModelError, match=r"down_proj.input_scale, which is no single number"):
        swapped(other, tmp_path)
