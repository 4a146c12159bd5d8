"""Weights as each library stores them, and as it decodes them again: the oracles of `fp8dash.model.imported.decode`.

compressed-tensors and transformers are asked themselves. Of the libraries that need a GPU, or cannot be installed
beside these, their own unpacking is written out, after the file that each function names.
"""

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fp8dash.choose.casts import parse_cast
from fp8dash.quant.cast import quantize
from fp8dash.quant.packing import pack

NAME = "model.layers.0.mlp.up_proj"


def amaxes(weights, args):
    """The least and largest of what shares a scale."""
    strategy, (rows, cols) = args.strategy, weights.shape
    if strategy == "tensor":
        tiles = weights.view(1, 1, -1)
    elif strategy == "channel":
        tiles = weights.view(rows, 1, -1)
    elif strategy == "block":
        height, width = args.block_structure
        padded = torch.nn.functional.pad(weights, (0, -cols % width, 0, -rows % height))
        blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
        tiles = blocks.transpose(1, 2).flatten(2)
    else:
        tiles = weights.view(rows, cols // args.group_size, -1)
    return tiles.amin(-1), tiles.amax(-1)


def compressed(weights, layout, kept=torch.float32, **args):
    """compressed-tensors: tensors and config of a Linear that it stored, and what it decodes them to."""
    args = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
    least, largest = amaxes(weights.float(), args)
    outer = generate_gparam(least.amin(), largest.amax()) if args.strategy == "tensor_group" else None
    scale, zero = calculate_qparams(least, largest, args, global_scale=outer)
    if args.strategy == "tensor":
        scale, zero = scale.view(1), zero.view(1)
    state = {"weight": weights.float(), "weight_scale": scale.to(kept)}
    state |= {"weight_zero_point": zero} | ({"weight_global_scale": outer} if outer is not None else {})
    compressor = BaseCompressor.get_value_from_registry(layout)
    stored = compressor.compress(state, scheme)
    decoded = compressor.decompress(dict(stored), scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args.model_dump(mode="json")}},
        "ignore": [],
    }
    return {f"{NAME}.{key}": tensor for key, tensor in stored.items()}, config, decoded


def deepseek(weights, dtype=torch.float32):
    """DeepSeek-V3 `inference/kernel.py`, weight_dequant: code * weight_scale_inv over 128 by 128."""
    q = quantize(weights, parse_cast(f"e4m3fn/128x128/{'float32' if dtype == torch.float32 else 'rceil'}"))
    scales = q.scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(weights), : weights.shape[1]]
    decoded = q.codes.float() * scales
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config |= {"scale_fmt": "ue8m0"} if dtype != torch.float32 else {}
    return {f"{NAME}.weight": q.codes, f"{NAME}.weight_scale_inv": q.scales.to(dtype)}, config, decoded


def gptq(weights, *, symmetric, version="gptq", ordered=False, bits=4, group=32):
    """AutoGPTQ `nn_modules/qlinear/qlinear_cuda_old.py`, pack and forward: words along the inputs."""
    half, top, cols = 1 << (bits - 1), (1 << bits) - 1, weights.shape[1]
    order = torch.randperm(cols, generator=torch.Generator().manual_seed(1)) if ordered else torch.arange(cols)
    g_idx = torch.empty(cols, dtype=torch.int64)
    g_idx[order] = torch.arange(cols) // group
    tiles = weights[:, order].view(len(weights), -1, group)
    if symmetric:
        scales, zeros = tiles.abs().amax(-1) / half, torch.full(tiles.shape[:2], half)
    else:
        least, largest = tiles.amin(-1).clamp(max=0), tiles.amax(-1).clamp(min=0)
        scales = (largest - least) / top
        zeros = (-least / scales).round().clamp(1, top).long()
    scales = scales.half()
    each, points = scales[:, g_idx].float(), zeros[:, g_idx]
    codes = (weights / each + points).round().clamp(0, top).long()
    decoded = scales[:, g_idx] * (codes - points).half()
    stored_zeros = zeros.long() - int(version == "gptq")
    tensors = {"qweight": words(codes.T, bits, 0), "qzeros": words(stored_zeros.T, bits, 1)}
    tensors |= {"scales": scales.T, "g_idx": g_idx.int()}
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": ordered}
    return {f"{NAME}.{k}": v.contiguous() for k, v in tensors.items()}, config | {"checkpoint_format": version}, decoded


def awq(weights, group=32):
    """AutoAWQ `utils/packing_utils.py` and `modules/linear/gemm.py`: words along the outputs, 0 2 4 6 1 3 5 7."""
    tiles = weights.view(len(weights), -1, group)
    least, largest = tiles.amin(-1), tiles.amax(-1)
    scales = ((largest - least) / 15).half()
    zeros = (-least / scales).round().clamp(0, 15).long()
    each, points = scales.repeat_interleave(group, 1), zeros.repeat_interleave(group, 1)
    codes = (weights / each + points).round().clamp(0, 15).long()
    decoded = (codes - points).half() * each
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    packed, packed_zeros = (words(x.T.reshape(x.shape[1], -1, 8)[..., order].flatten(1), 4, 1) for x in (codes, zeros))
    tensors = {"qweight": packed, "qzeros": packed_zeros, "scales": scales.T}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return {f"{NAME}.{k}": v.contiguous() for k, v in tensors.items()}, config, decoded


def words(codes, bits, dim):
    """Unsigned codes as int32 words along a dimension, the lowest bits first."""
    codes = codes if dim == 1 else codes.T
    each = codes.reshape(len(codes), -1, 32 // bits).to(torch.int64) << torch.arange(0, 32, bits)
    packed = each.sum(-1).to(torch.uint32).view(torch.int32)
    return packed if dim == 1 else packed.T


def modelopt(weights):
    """ModelOpt `export/quant_utils.py` and `qtensor/nvfp4_tensor.py`: both scales multiply."""
    q = quantize(weights, parse_cast("e2m1/1x16/nvfp4"))
    nibbles = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    factors = (q.scales * q.outer).repeat_interleave(16, 1)
    decoded = (nibbles[q.codes.int()] * factors).bfloat16()
    tensors = {"weight": pack(q.codes, q.cast.format), "weight_scale": q.scales.to(torch.float8_e4m3fn)}
    tensors |= {"weight_scale_2": q.outer.view(()), "input_scale": torch.tensor(0.001)}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return {f"{NAME}.{k}": v for k, v in tensors.items()}, config, decoded


def gpt_oss(weights, experts=3):
    """transformers, `convert_moe_packed_tensors`, which decodes to [experts, in, out]."""
    packed, powers = [], []
    for index in range(experts):
        q = quantize(weights * (1 + index), parse_cast("e2m1/1x32/rceil"))
        packed.append(pack(q.codes, q.cast.format).view(len(weights), -1, 16))
        powers.append((torch.log2(q.scales) + 127).to(torch.uint8))
    blocks, scales = torch.stack(packed), torch.stack(powers)
    decoded = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, {"quant_method": "mxfp4"}, decoded


INT, FLOAT = {"type": "int", "symmetric": True}, {"type": "float", "symmetric": True, "num_bits": 8}
NIBBLE = {"type": "float", "symmetric": True, "num_bits": 4}
MX = {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
SCHEMES = {
    "FP8 tensor": lambda w: compressed(w, "float-quantized", strategy="tensor", **FLOAT),
    "FP8 channel": lambda w: compressed(w, "float-quantized", torch.bfloat16, strategy="channel", **FLOAT),
    "FP8 block": lambda w: compressed(w, "float-quantized", strategy="block", block_structure=[128, 128], **FLOAT),
    "FP8 naive": lambda w: compressed(w, "naive-quantized", strategy="channel", **FLOAT),
    "INT8 channel": lambda w: compressed(w, "int-quantized", strategy="channel", num_bits=8, **INT),
    "INT8 asymmetric": lambda w: compressed(
        w, "int-quantized", torch.bfloat16, strategy="channel", num_bits=8, type="int", symmetric=False
    ),
    "W4A16": lambda w: compressed(
        w, "pack-quantized", torch.bfloat16, strategy="group", group_size=32, num_bits=4, **INT
    ),
    "W4A16 channel": lambda w: compressed(w, "pack-quantized", torch.float16, strategy="channel", num_bits=4, **INT),
    "W4A16 asymmetric": lambda w: compressed(
        w, "pack-quantized", torch.bfloat16, strategy="group", group_size=32, num_bits=4, type="int", symmetric=False
    ),
    "W8A16": lambda w: compressed(w, "pack-quantized", torch.bfloat16, strategy="channel", num_bits=8, **INT),
    "NVFP4": lambda w: compressed(w, "nvfp4-pack-quantized", strategy="tensor_group", group_size=16, **NIBBLE),
    "MXFP4": lambda w: compressed(w, "mxfp4-pack-quantized", **NIBBLE, **MX),
    "MXFP4 unsaid": lambda w: compressed(w, "mxfp4-pack-quantized", strategy="group", group_size=32, **NIBBLE),
    "MXFP8": lambda w: compressed(w, "mxfp8-quantized", **FLOAT, **MX),
    "DeepSeek": deepseek,
    "DeepSeek UE8M0": lambda w: deepseek(w, torch.float8_e8m0fnu),
    "GPTQ": lambda w: gptq(w, symmetric=True),
    "GPTQ asymmetric": lambda w: gptq(w, symmetric=False),
    "GPTQ v2": lambda w: gptq(w, symmetric=False, version="gptq_v2"),
    "GPTQ ordered": lambda w: gptq(w, symmetric=False, ordered=True),
    "GPTQ 8 bits": lambda w: gptq(w, symmetric=True, bits=8),
    "AWQ": awq,
    "ModelOpt NVFP4": modelopt,
    "GPT-OSS": gpt_oss,
}
