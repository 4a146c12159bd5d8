"""Checkpoints for the X-ray: the recipes of our own exports, and whole models in other libraries' layouts."""

import json

import torch
from safetensors.torch import save_file

from fp8dash.choose.models.checkpoint import quantization_config
from fp8dash.choose.presets import PRESETS
from fp8dash.errors import InvalidChoice
from tests import oracles_checkpoints as oracles

SIZES = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
SIZES |= {"gate_proj": (160, 64), "up_proj": (160, 64), "down_proj": (64, 160)}
MODULES = {
    f"model.layers.{layer}.{'mlp' if name[0] in 'gud' else 'self_attn'}.{name}": size
    for layer in range(2)
    for name, size in SIZES.items()
}
REST = {"model.embed_tokens": (272, 64), "lm_head": (272, 64)}


def can_be_written(recipe):
    try:
        return bool(quantization_config(recipe, ["a.b"], []))
    except InvalidChoice:
        return False


EXPORTED = [preset.text for preset in PRESETS.values() if can_be_written(preset.recipe)] + [
    "w=int4/1x32/ct",
    "w=e2m1/1x16/nvfp4",
    "w=e2m1/1x32/rceil",
    "w=e4m3fn/row a=e4m3fn/row kv=e4m3fn/head/static skip=*.down_proj",
    "w=e4m3fn/row a=e4m3fn/row w[*.down_proj]=int8/row a[*.down_proj]=int8/row",
    "w=e4m3fn/row a=e4m3fn/row also=lm_head",
]


def weights():
    """Plain weights of every module, in BF16."""
    torch.manual_seed(3)
    return {name: (torch.randn(size) / 8).bfloat16() for name, size in (MODULES | REST).items()}


def write(folder, tensors, quantization=None, **config):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    claim = {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16"} | config | claim))
    return folder


def plain(folder):
    return write(folder, {f"{name}.weight": weight for name, weight in weights().items()})


def each(make):
    """Every module's tensors as `make` stores its weight; the embedding and the head as they are."""
    tensors = {}
    for name, weight in weights().items():
        own = {"weight": weight} if name in REST else make(weight)
        tensors |= {f"{name}.{part}": tensor for part, tensor in own.items()}
    return tensors


def deepseek(folder, power=False):
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    tensors = each(lambda weight: oracles.deepseek_fp8(weight, ue8m0=power)[0])
    return write(folder, tensors, config | ({"scale_fmt": "ue8m0"} if power else {}))


def gpt_oss(folder):
    tensors = {f"{name}.weight": weight for name, weight in weights().items() if ".mlp." not in name}
    for layer in range(2):
        for name, rows, cols in (("gate_up_proj", 128, 64), ("down_proj", 64, 64)):
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            own, _ = oracles.gpt_oss_mxfp4(torch.randn(4, rows, cols) / 8)
            tensors |= {f"{stem}{part}": tensor for part, tensor in own.items()}
            tensors[f"{stem}_bias"] = torch.zeros(4, rows, dtype=torch.bfloat16)
        tensors[f"model.layers.{layer}.mlp.router.weight"] = torch.randn(4, 64).bfloat16()
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return write(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": kept})


def moved(words, share):
    """Packed codes [in / 8, out] some of which are moved by one, as GPTQ leaves them."""
    codes = oracles.packed_nibbles(words.T)
    codes = torch.where(torch.rand(codes.shape) < share, (codes + 1).clamp(0, 15), codes)
    return oracles.packed(codes, 4).T


def gptq(folder, share=0.3):
    def make(weight):
        tensors, _ = oracles.gptq(weight, 32)
        return tensors | {"qweight": moved(tensors["qweight"], share)}

    return write(folder, each(make), {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True})


def awq(folder):
    tensors = each(lambda weight: oracles.awq(weight, 32)[0])
    return write(folder, tensors, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True})


def modelopt(folder):
    """With KV scales, and the claim in hf_quant_config.json."""
    tensors = each(lambda weight: oracles.modelopt_fp8(weight)[0])
    for name in MODULES:
        if name.endswith(("k_proj", "v_proj")):
            tensors[f"{name}.{name[-6]}_scale"] = torch.tensor(1.5)
    write(folder, tensors)
    claim = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": claim}))
    return folder


def ue8m0(folder):
    return deepseek(folder, power=True)


MADE = {"plain": plain, "deepseek": deepseek, "ue8m0": ue8m0, "gpt_oss": gpt_oss, "gptq": gptq, "awq": awq}
MADE |= {"modelopt": modelopt}
