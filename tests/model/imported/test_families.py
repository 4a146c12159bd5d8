"""What a checkpoint stores, over families: the numbers of the recipe that cast the same weights the same way."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8dash.choose.casts import parse_cast
from fp8dash.choose.records import Layer, StageResult, Window
from fp8dash.choose.request import Request
from fp8dash.pipeline import run_stages
from fp8dash.quant.cast import quantize
from fp8dash.quant.packing import pack
from tests.families import write_family

FP8 = "w=e4m3fn/row a=e4m3fn/row"
SMALL = {"backend": "emulated", "measures": ("perplexity",), "windows": 2, "window_length": 64}
CODED = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
FAMILIES = (  # biases, fused parts, renamed and shared experts, states; gpt2's files hold its matrices transposed
    "qwen2", "gpt_neox", "phi3", "gemma3_text", "mixtral", "phimoe", "qwen3_moe", "deepseek_v3", "minimax_m2",
    "lfm2_moe", "qwen3_next", "hunyuan_v1_moe", "dbrx", "mamba2", "jamba",
)  # fmt: skip


def rows(request, cache):
    """Windows, and the layers that were cast by name."""
    kept = [row for one in run_stages(request, frozenset(), cache) if isinstance(one, StageResult) for row in one.rows]
    layers = {row.name for row in kept if isinstance(row, Layer) and row.cast}
    return [row for row in kept if isinstance(row, Window)], layers


def store(folder, place, coded, quantization):
    """A copy of a model's folder with some of its tensors in place of others."""
    shutil.copytree(folder, place, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(coded, place / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return place


@pytest.mark.parametrize("family", FAMILIES)
def test_stored_fp8_gives_what_casting_the_model_gives(family, corpus_file, tmp_path):
    folder = write_family(family, tmp_path / family)
    asked = Request.of(model=str(folder), corpus=str(corpus_file), recipe=FP8, **SMALL)
    windows, cast = rows(asked, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    coded, names = {}, []
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        is_expert = ".experts." in module and not module.endswith("gate")
        if tensor.dim() == 2 and name.endswith(".weight") and (module in cast or is_expert):
            q = quantize(tensor, parse_cast("e4m3fn/row"))
            coded |= {name: q.codes, f"{module}.weight_scale": q.scales}
            names.append(module)
        else:
            coded[name] = tensor
    activations = CODED | {"strategy": "token", "dynamic": True}
    group = {"targets": names, "weights": CODED, "input_activations": activations}
    quantization = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": group}}
    place = store(folder, tmp_path / "stored", coded, quantization)
    again, cast_again = rows(asked.but(recipe=f"stored={place}"), tmp_path)
    assert names
    assert cast_again == cast
    assert again == windows


def test_gpt_oss_in_mxfp4_gives_what_casting_its_experts_gives(corpus_file, tmp_path):
    folder = write_family("gpt_oss", tmp_path / "plain")
    recipe = "w=e2m1/1x32/rceil skip=*.self_attn.*"
    asked = Request.of(model=str(folder), corpus=str(corpus_file), recipe=recipe, **SMALL)
    windows, cast = rows(asked, tmp_path)
    coded = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            coded[name] = tensor
            continue
        stacks = [quantize(expert.T.contiguous(), parse_cast("e2m1/1x32/rceil")) for expert in tensor]
        packed = [pack(q.codes, q.cast.format).view(len(q.codes), -1, 16) for q in stacks]
        coded[f"{name}_blocks"] = torch.stack(packed)
        coded[f"{name}_scales"] = torch.stack([(torch.log2(q.scales) + 127).to(torch.uint8) for q in stacks])
    place = store(folder, tmp_path / "stored", coded, {"quant_method": "mxfp4"})
    again, cast_again = rows(asked.but(recipe=f"stored={place}"), tmp_path)
    assert cast_again == cast and len(cast) > 4
    assert again == windows
