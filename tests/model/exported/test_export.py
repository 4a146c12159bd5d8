"""Exported checkpoints: read back by compressed-tensors and by transformers, they hold what was measured."""

import copy
import json
import shutil

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fp8dash.choose.casts import parse_cast
from fp8dash.choose.models.checkpoint import quantization_config
from fp8dash.choose.presets import PRESETS
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import Artefact, StageResult
from fp8dash.choose.request import Request
from fp8dash.errors import InvalidChoice, ModelError
from fp8dash.model.calibration import NOTHING
from fp8dash.model.exported.export import export
from fp8dash.model.exported.names import stored_names
from fp8dash.model.load import load
from fp8dash.model.swap import cast_model
from fp8dash.pipeline import run_stages
from fp8dash.quant.cast import dequantize, quantize
from fp8dash.report.deploy import deployments
from tests.model.test_swap import CPU, IDS, observed_on

HELD = (
    "w=e4m3fn/tensor a=e4m3fn/tensor/static",
    "w=e4m3fn/tensor a=e4m3fn/tensor",
    "w=e4m3fn/row a=e4m3fn/row",
    "w=e4m3fn/row",
    "w=e4m3fn/128x128 a=e4m3fn/1x128",
    "w=e4m3fn/1x32/rceil a=e4m3fn/1x32/rceil",
    "w=e2m1/1x32/even",
    "w=e2m1/1x16/nvfp4",
    "w=int8/row a=int8/row",
    "w=int4/1x32/ct",
    "w=e4m3fn/row a=e4m3fn/row kv=e4m3fn/head/static skip=*.down_proj",
    "w=e4m3fn/row a=e4m3fn/row w[*.down_proj]=int8/row a[*.down_proj]=int8/row",
)


def exported(tiny, place, text, backend="emulated"):
    """A cast model and what its export left."""
    model, recipe = load(tiny, torch.device("cpu")).model, parse_recipe(text)
    observed = observed_on(model, recipe) if recipe.needs_calibration else NOTHING
    names = stored_names(model, tiny, recipe)
    list(cast_model(model, recipe, CPU, backend, observed))
    walk = export(model, tiny, names, recipe, place)
    while True:
        try:
            next(walk)
        except StopIteration as end:
            return model, end.value


def shared_outer(weights, name, layout):
    """NVFP4's float32 scale of the largest weight of q, k and v, or of gate and up: one matrix in vLLM."""
    above, _, last = name.rpartition(".")
    parts = next((parts for parts in ("q_proj k_proj v_proj", "gate_proj up_proj") if last in parts.split()), last)
    largest = max(float(weights[f"{above}.{part}.weight"].abs().max()) for part in parts.split())
    return torch.tensor([[largest]]) / (448 * 6) if layout == "nvfp4-pack-quantized" else None


@torch.no_grad()
def test_parts_of_a_fused_matrix_share_nvfp4s_global_scale_as_they_were_measured(tiny, tmp_path):
    model, _ = exported(tiny, tmp_path / "out", "w=e2m1/1x16/nvfp4")
    before, after = load_file(tiny / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for name in [key.removesuffix(".weight_packed") for key in after if key.endswith(".weight_packed")]:
        outer = shared_outer(before, name, "nvfp4-pack-quantized")
        assert after[f"{name}.weight_global_scale"].item() == pytest.approx(1 / outer.item())
        cast = quantize(before[f"{name}.weight"], parse_cast("e2m1/1x16/nvfp4"), outer)
        assert torch.equal(model.get_submodule(name).weight, dequantize(cast).bfloat16())
        assert after[f"{name}.weight_scale"].float().max() <= 448


@pytest.mark.parametrize("text", HELD)
def test_compressed_tensors_decompresses_what_our_codes_decode_to(tiny, tmp_path, text):
    _, artefact = exported(tiny, tmp_path / "out", text)
    recipe, before = parse_recipe(text), load_file(tiny / "model.safetensors")
    after, config = (
        load_file(tmp_path / "out" / "model.safetensors"),
        json.loads((tmp_path / "out/config.json").read_text()),
    )
    theirs = QuantizationConfig.model_validate(config["quantization_config"])
    schemes = {target: scheme for scheme in theirs.config_groups.values() for target in scheme.targets}
    assert artefact.format == config["quantization_config"]["format"]
    for key, weight in before.items():
        name = key.removesuffix(".weight")
        if key in after and after[key].dtype == weight.dtype:
            assert torch.equal(after[key], weight) and (name in theirs.ignore or "proj" not in name)
            continue
        scheme = schemes.get(name) or schemes["Linear"]
        state = {part.removeprefix(f"{name}."): tensor for part, tensor in after.items() if part.startswith(f"{name}.")}
        decompressed = BaseCompressor.get_value_from_registry(scheme.format).decompress(state, scheme)["weight"]
        decoded = dequantize(quantize(weight, recipe.of(name).weights, shared_outer(before, name, scheme.format)))
        if scheme.format == "nvfp4-pack-quantized":  # there the two scales meet in bfloat16
            assert torch.allclose(decompressed.float(), decoded, rtol=2**-7, atol=0), name
        else:
            assert torch.equal(decompressed.float(), decoded.to(decompressed.dtype).float()), name


@pytest.mark.parametrize("text", [text for text in HELD if "kv=" not in text and "128" not in text])
@torch.no_grad()
def test_transformers_loads_it_as_the_model_that_was_measured(tiny, tmp_path, text):
    """transformers keeps scales in bfloat16 and has its own order of products, so logits are near, not equal.
    It takes no group of 128 over the tiny model's 64 columns."""
    model, _ = exported(tiny, tmp_path / "out", text)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    plain = load(tiny, torch.device("cpu")).model
    cast, served, whole = (m(input_ids=IDS).logits.float() for m in (model, theirs, plain))
    assert (served - cast).norm() < 0.05 * whole.norm() or (served - cast).norm() < (cast - whole).norm()


def test_calibrated_scales_travel_under_the_names_that_engines_read(tiny, tmp_path):
    model, _ = exported(tiny, tmp_path / "out", "w=e4m3fn/tensor a=e4m3fn/tensor/static kv=e4m3fn/tensor/static")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for part in ("q_proj", "k_proj", "o_proj"):
        scale = model.get_submodule(f"model.layers.1.self_attn.{part}").activations.scale.present
        assert tensors[f"model.layers.1.self_attn.{part}.input_scale"].item() == pytest.approx(scale)
    assert torch.equal(tensors["model.layers.1.self_attn.k_scale"], model.kv_scales[1][0])
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"]["strategy"] == "tensor" and config["kv_cache_scheme"]["dynamic"] is False


def test_a_native_run_exports_the_same_files(tiny, tmp_path):
    text = "w=e4m3fn/row a=e4m3fn/row"
    _, emulated = exported(tiny, tmp_path / "a", text)
    _, native = exported(tiny, tmp_path / "b", text, "native")
    assert emulated.sha256 == native.sha256
    assert emulated.size_bytes == sum(file.stat().st_size for file in (tmp_path / "a").iterdir())


def test_nothing_that_could_run_travels(tiny, tmp_path):
    source = tmp_path / "copy"
    shutil.copytree(tiny, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "evil.Model"}}))
    (source / "evil.py").write_text("raise SystemExit")
    exported(source, tmp_path / "out", "w=e4m3fn/row a=e4m3fn/row")
    assert "auto_map" not in json.loads((tmp_path / "out/config.json").read_text())
    assert not list((tmp_path / "out").glob("*.py"))


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("w=e5m2/row a=e5m2/row", "closest alternative: w=e4m3fn/row"),
        ("w=e4m3fn/64x64", "closest alternative: w=e4m3fn/row"),
        ("w=e4m3fn/1x32/float32", "closest alternative: w=e4m3fn/1x32/rceil"),
        ("w=int8/128x128 a=int8/row", "closest alternative: w=int8/row"),
        ("w=e2m1/1x16/nvfp4 a=e2m1/1x16/nvfp4", "weights alone, w=e2m1/1x16/nvfp4"),
        ("w=e4m3fn/row a=e4m3fn/tensor/delayed", "closest alternative: a=e4m3fn/row"),
        ("a=e4m3fn/row", "closest alternative: w=e4m3fn/row"),
        ("w=e4m3fn/row a=e4m3fn/row kv=int8/token", "closest alternative: kv=e4m3fn/tensor/static"),
        ("w=e4m3fn/row attn=e4m3fn/tensor", "the recipe without attn="),
        ("w=e4m3fn/row also=embeddings", "the recipe without it"),
        ("kv=e4m3fn/tensor", "closest alternative: FP8_DYNAMIC"),
    ],
)
def test_what_no_checkpoint_holds_is_refused_with_the_nearest_that_one_does(text, nearest):
    with pytest.raises(InvalidChoice, match="A checkpoint cannot hold .*compressed-tensors") as caught:
        quantization_config(parse_recipe(text), ["model.layers.0.mlp.up_proj"], [])
    assert nearest in str(caught.value)


def test_a_weight_that_is_not_in_the_files_is_named(tiny, tmp_path, loaded):
    recipe = parse_recipe("w=e4m3fn/row a=e4m3fn/row")
    list(cast_model(loaded.model, recipe, CPU, "emulated"))
    loaded.model.add_module("other", copy.deepcopy(loaded.model.model.layers[0].mlp.up_proj))
    with pytest.raises(ModelError, match="has no weight named other"):
        for _ in export(loaded.model, tiny, {}, recipe, tmp_path / "out"):
            pass
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_a_run_leaves_a_checkpoint_and_says_where(tiny, corpus_file, tmp_path):
    request = Request.of(model=str(tiny), recipe="FP8", corpus=str(corpus_file), measures=("export",))
    rows = [
        row
        for result in run_stages(request, frozenset(), tmp_path)
        if isinstance(result, StageResult)
        for row in result.rows
    ]
    (artefact,) = (row for row in rows if isinstance(row, Artefact))
    assert artefact.path.startswith(str(tmp_path / "checkpoints")) and artefact.format == "float-quantized"


def test_a_checkpoint_that_cannot_be_is_refused_before_the_run_and_bf16_needs_none():
    with pytest.raises(InvalidChoice, match="A checkpoint cannot hold w=e5m2/row"):
        Request.of(recipe="FP8_E5M2", measures=("gemm", "export")).checked()
    with pytest.raises(InvalidChoice, match="A checkpoint cannot hold w=e5m2/row"):
        Request.of(recipe="w=int8/row a=int8/row w[*.o_proj]=e5m2/row", measures=("export",)).checked()
    assert Request.of(recipe="w=int8/row a=int8/row w[*.o_proj]=bf16 a[*.o_proj]=bf16", measures=("export",)).checked()
    assert Request.of(recipe="KV_FP8", measures=("gemm", "export")).checked().measures == ("gemm",)
    assert Request.of(recipe="BF16", measures=("gemm", "export")).checked().measures == ("gemm",)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_deployed_or_says_why_not(name):
    for way in deployments(PRESETS[name].recipe, "org/name; rm -rf", None):
        assert way.text or way.note.endswith("."), way
        assert "name; rm" not in way.text or "'org/name; rm -rf'" in way.text


def test_only_the_files_that_the_loader_reads_are_exported(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "model")
    doubled = {key: 2 * tensor for key, tensor in load_file(folder / "model.safetensors").items()}
    save_file(doubled, folder / "model-old.safetensors", metadata={"format": "pt"})  # sorts before the model's own
    (folder / "model-old.safetensors.index.json").write_text("{}")
    _, plain = exported(tiny, tmp_path / "plain", "w=e4m3fn/row")
    _, beside = exported(folder, tmp_path / "beside", "w=e4m3fn/row")
    assert (beside.size_bytes, beside.sha256) == (plain.size_bytes, plain.sha256)
    assert not list((tmp_path / "beside").glob("model-old*"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_wider_files_are_exported_as_the_run_read_them_in_bfloat16(tiny, tmp_path, dtype):
    """To the byte: their last bits, which bfloat16 does not hold, are in no code and in no scale."""
    text, drawn = "w=e4m3fn/row a=e4m3fn/row skip=*.o_proj", torch.Generator().manual_seed(0)
    wide, read = (shutil.copytree(tiny, tmp_path / name) for name in ("wide", "read"))
    tensors = {
        key: (tensor.float() * (1 + torch.rand(tensor.shape, generator=drawn) / 64)).to(dtype)
        for key, tensor in load_file(tiny / "model.safetensors").items()
    }
    rounded = {key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()}
    assert not any(torch.equal(rounded[key].to(dtype), tensor) for key, tensor in tensors.items())
    save_file(tensors, wide / "model.safetensors", metadata={"format": "pt"})
    save_file(rounded, read / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tiny / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
    _, of_wide = exported(wide, tmp_path / "out_of_wide", text)
    _, of_read = exported(read, tmp_path / "out_of_read", text)
    assert of_wide.sha256 == of_read.sha256


def test_a_model_in_many_shards_is_exported_in_as_many(tiny, tmp_path):
    text, shards = "w=e4m3fn/row a=e4m3fn/row", tmp_path / "shards"
    AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).save_pretrained(shards, max_shard_size="5KB")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny / file, shards / file)
    exported(tiny, tmp_path / "one", text)
    exported(shards, tmp_path / "many", text)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())["weight_map"]
    parts = {name: load_file(tmp_path / "many" / name) for name in set(index.values())}
    assert len(parts) == len(list(shards.glob("*.safetensors"))) > 15
    for key, tensor in load_file(tmp_path / "one" / "model.safetensors").items():
        assert torch.equal(parts[index[key]][key], tensor)
    assert sum(map(len, parts.values())) == len(index)
