"""Checkpoints for the X-ray: our own exports, and other libraries' layouts written by hand after their packing code."""

import json

import torch
from safetensors.torch import save_file

from fp8dash.choose.models.checkpoint import quantization_config
from fp8dash.choose.presets import PRESETS
from fp8dash.errors import InvalidChoice

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


def deepseek(folder, power=False):
    """DeepSeek-V3, `inference/kernel.py` (weight_dequant): code * weight_scale_inv over 128 by 128."""
    tensors = {}
    for name, weight in weights().items():
        if name in REST:
            tensors[f"{name}.weight"] = weight
            continue
        scales = torch.full((-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)), float(weight.abs().max()) / 448)
        scales = torch.exp2(torch.ceil(torch.log2(scales))) if power else scales
        tensors[f"{name}.weight"] = (weight.float() / scales.max()).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale_inv"] = scales
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    return write(folder, tensors, config | ({"scale_fmt": "ue8m0"} if power else {}))


def gpt_oss(folder):
    """GPT-OSS: experts as blocks [experts, out, in / 32, 16] and scales [experts, out, in / 32]."""
    tensors = {f"{name}.weight": weight for name, weight in weights().items() if ".mlp." not in name}
    for layer in range(2):
        for name, rows, cols in (("gate_up_proj", 128, 64), ("down_proj", 64, 64)):
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            tensors[f"{stem}_blocks"] = torch.randint(0, 256, (4, rows, cols // 32, 16), dtype=torch.uint8)
            tensors[f"{stem}_scales"] = torch.randint(118, 124, (4, rows, cols // 32), dtype=torch.uint8)
            tensors[f"{stem}_bias"] = torch.zeros(4, rows, dtype=torch.bfloat16)
        tensors[f"model.layers.{layer}.mlp.router.weight"] = torch.randn(4, 64).bfloat16()
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return write(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": kept})


def rounded(weight, group):
    """Codes 0 ... 15 [out, in] around 8, and scales [out, groups]."""
    blocks = weight.float().view(weight.shape[0], -1, group)
    scales = (blocks.abs().amax(-1) / 7).half().float()
    codes = torch.round(blocks / scales[..., None]).clamp(-8, 7) + 8
    return codes.view(weight.shape).int(), scales


def words(codes, order=range(8)):
    """Eight codes along the last axis in an int32, in this order of nibbles."""
    split = codes.view(*codes.shape[:-1], -1, 8).long()
    packed = sum(split[..., source] << (4 * place) for place, source in enumerate(order))
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def moved(codes, share):
    """Some codes moved by one, as GPTQ leaves them."""
    return torch.where(torch.rand(codes.shape) < share, (codes + 1).clamp(0, 15), codes)


def gptq(folder, share=0.3, group=32):
    """AutoGPTQ, `qlinear_cuda_old.py` pack: eight inputs a word; qzeros hold the zero point less one."""
    tensors = {}
    for name, weight in weights().items():
        if name in REST:
            tensors[f"{name}.weight"] = weight
            continue
        codes, scales = rounded(weight, group)
        tensors[f"{name}.qweight"] = words(moved(codes, share)).T  # [in / 8, out]
        tensors[f"{name}.scales"] = scales.T.half()
        tensors[f"{name}.qzeros"] = words(torch.full((scales.shape[1], weight.shape[0]), 7))
        tensors[f"{name}.g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // group
    return write(folder, tensors, {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True})


def awq(folder, share=0.0):
    """AutoAWQ, `awq/modules/linear/gemm.py`: eight outputs a word, in the order 0 2 4 6 1 3 5 7."""
    tensors, order = {}, (0, 2, 4, 6, 1, 3, 5, 7)
    for name, weight in weights().items():
        if name in REST:
            tensors[f"{name}.weight"] = weight
            continue
        codes, scales = rounded(weight, 32)
        tensors[f"{name}.qweight"] = words(moved(codes, share).T.contiguous(), order)  # [in, out / 8]
        tensors[f"{name}.scales"] = scales.T.half()
        tensors[f"{name}.qzeros"] = words(torch.full((scales.shape[1], weight.shape[0]), 8), order)
    return write(folder, tensors, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True})


def modelopt(folder):
    """ModelOpt, `export/unified_export_hf.py`: per-tensor FP8 and its hf_quant_config.json."""
    tensors = {}
    for name, weight in weights().items():
        if name in REST:
            tensors[f"{name}.weight"] = weight
            continue
        scale = weight.float().abs().max() / 448
        tensors[f"{name}.weight"] = (weight.float() / scale).to(torch.float8_e4m3fn)
        tensors |= {f"{name}.weight_scale": scale, f"{name}.input_scale": torch.tensor(0.02)}
        if name.endswith(("k_proj", "v_proj")):
            tensors[f"{name}.{name[-6]}_scale"] = torch.tensor(0.05)
    write(folder, tensors)
    claim = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": claim}))
    return folder


def ue8m0(folder):
    return deepseek(folder, power=True)


MADE = {"plain": plain, "deepseek": deepseek, "ue8m0": ue8m0, "gpt_oss": gpt_oss, "gptq": gptq, "awq": awq}
MADE |= {"modelopt": modelopt}
