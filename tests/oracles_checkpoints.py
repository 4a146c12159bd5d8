"""Matrices as other libraries store them, and what those libraries decode from it: the oracles of imported checkpoints.

Each function takes plain weights [out, in] and gives the tensors of one matrix, named as they stand behind the module's
name, and the weights in float32 that the library makes of exactly these tensors. compressed-tensors and transformers do
both themselves where they are installed; for the others, the packing and the decoding are written after the file that
is named. Nothing of ours is used here.
"""

from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
E2M1_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER, AWQ_REVERSE_ORDER = [0, 2, 4, 6, 1, 3, 5, 7], [0, 4, 1, 5, 2, 6, 3, 7]


# GPTQ: AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda.py (pack, forward); auto_gptq/quantization/quantizer.py.
def gptq(
    weights: torch.Tensor,
    group: int,
    *,
    bits: int = 4,
    sym: bool = True,
    version: int = 1,
    order: torch.Tensor | None = None,
) -> Stored:
    """qweight [in / 8, out], qzeros [groups, out / 8], scales [groups, out] float16 and g_idx [in].

    Version 1 stores zero points less one, version 2 (GPTQModel, checkpoint_format "gptq_v2") as they are. `order` is
    the permutation of desc_act: columns order[0 : group] are the first group.
    """
    rows, cols = weights.shape
    largest = 2**bits - 1
    order = torch.arange(cols) if order is None else order
    groups = torch.empty(cols, dtype=torch.int32)
    groups[order] = torch.arange(cols, dtype=torch.int32) // group
    blocks = weights.float()[:, order].unflatten(1, (-1, group))  # [out, groups, group]
    least, most = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    if sym:
        most = torch.maximum(-least, most)
        least = -most
    scales = ((most - least) / largest).half()
    zeros = torch.full(scales.shape, (largest + 1) // 2) if sym else torch.round(-least / scales.float()).int()
    zeros = zeros.clamp(1, largest)  # version 1 cannot store a zero point of zero
    each, points = scales.float()[:, groups.long()], zeros[:, groups.long()]
    codes = (torch.round(weights.float() / each) + points).clamp(0, largest).int()
    tensors = {
        "qweight": packed(codes, bits).T.contiguous(),
        "qzeros": packed(zeros.T.int() - int(version == 1), bits),
        "scales": scales.T.contiguous(),
        "g_idx": groups,
    }
    return tensors, gptq_decoded(tensors, bits, version)


def gptq_decoded(tensors: dict[str, torch.Tensor], bits: int = 4, version: int = 1) -> torch.Tensor:
    """scales[g_idx] * (codes - (qzeros + 1)[g_idx]), transposed; version 2 adds no one."""
    shifts, largest = torch.arange(0, 32, bits), 2**bits - 1
    zeros = (tensors["qzeros"][:, :, None] >> shifts) & largest
    zeros = (zeros + int(version == 1)).reshape(tensors["scales"].shape)
    codes = (tensors["qweight"][:, None, :] >> shifts[:, None]) & largest
    codes = codes.reshape(-1, codes.shape[-1])  # [in, out]
    groups = tensors["g_idx"].long()
    return (tensors["scales"].float()[groups] * (codes - zeros[groups])).T.contiguous()


# AWQ: AutoAWQ, awq/quantize/quantizer.py (pseudo_quantize_tensor), awq/modules/linear/gemm.py (from_linear) and
# awq/utils/packing_utils.py (dequantize_gemm).
def awq(weights: torch.Tensor, group: int) -> Stored:
    """qweight [in, out / 8], qzeros [groups, out / 8] and scales [groups, out] float16; zero points as they are."""
    blocks = weights.float().unflatten(1, (-1, group))
    least, most = blocks.amin(-1), blocks.amax(-1)
    scales = (most - least).clamp(min=1e-5) / 15
    zeros = (-torch.round(least / scales)).clamp(0, 15)
    half = scales.half().float()
    shifted = weights.float() + (zeros * scales).repeat_interleave(group, 1)
    codes = torch.round(shifted / half.repeat_interleave(group, 1)).clamp(0, 15).int()
    tensors = {
        "qweight": packed(codes.T.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4),
        "qzeros": packed(zeros.T.int().unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4),
        "scales": scales.T.half().contiguous(),
    }
    return tensors, awq_decoded(tensors, group)


def awq_decoded(tensors: dict[str, torch.Tensor], group: int) -> torch.Tensor:
    """(codes - zeros) * scales, each nibble taken back to its place."""
    shifts = torch.arange(0, 32, 4)
    codes, zeros = (
        ((tensors[name][:, :, None] >> shifts) & 15)[..., AWQ_REVERSE_ORDER].flatten(1)
        for name in ("qweight", "qzeros")
    )
    scales, zeros = (part.repeat_interleave(group, 0) for part in (tensors["scales"].float(), zeros))
    return ((codes - zeros) * scales).T.contiguous()


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes along the last axis in int32 words, the first in the lowest bits."""
    split = codes.long().unflatten(-1, (-1, 32 // bits))
    words = (split << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int().contiguous()


# DeepSeek: DeepSeek-V3, inference/kernel.py (weight_quant_kernel, weight_dequant_kernel).
def deepseek_fp8(
    weights: torch.Tensor,
    block: tuple[int, int] = (128, 128),
    *,
    ue8m0: bool = False,
    scale_dtype: torch.dtype = torch.float32,
) -> Stored:
    """weight in E4M3 and weight_scale_inv [out / 128, in / 128], which multiplies; a ragged edge has its own blocks.

    UE8M0 scales are powers of two, rounded up (DeepGEMM, deep_gemm/utils/math.py, ceil_to_ue8m0), in float32 or in
    float8_e8m0fnu (transformers, integrations/finegrained_fp8.py).
    """
    rows, cols = (-(-size // side) for size, side in zip(weights.shape, block, strict=True))
    scales = torch.empty(rows, cols)
    codes = torch.empty(weights.shape, dtype=E4M3)
    for row in range(rows):
        for col in range(cols):
            place = (slice(row * block[0], (row + 1) * block[0]), slice(col * block[1], (col + 1) * block[1]))
            scale = weights[place].float().abs().amax() / 448
            scales[row, col] = torch.exp2(torch.ceil(torch.log2(scale))) if ue8m0 else scale
            codes[place] = (weights[place].float() / scales[row, col]).to(E4M3)
    tensors = {"weight": codes, "weight_scale_inv": scales.to(scale_dtype)}
    each = tensors["weight_scale_inv"].float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return tensors, codes.float() * each[: weights.shape[0], : weights.shape[1]]


# GPT-OSS: transformers, integrations/mxfp4.py (convert_moe_packed_tensors), which is called.
def gpt_oss_mxfp4(weights: torch.Tensor) -> Stored:
    """Of weights [experts, out, in]: _blocks [experts, out, in / 32, 16], _scales [experts, out, in / 32], uint8."""
    blocks = weights.float().unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(blocks.abs().amax(-1).clamp(min=2.0**-100))) - 2
    codes = e2m1(blocks / torch.exp2(exponents)[..., None])
    tensors = {
        "_blocks": (codes[..., 1::2] << 4) | codes[..., 0::2],
        "_scales": (exponents + 127).to(torch.uint8),
    }
    decoded = convert_moe_packed_tensors(tensors["_blocks"], tensors["_scales"], dtype=torch.float32)
    return tensors, decoded.transpose(1, 2).contiguous()  # it gives [experts, in, out]


# ModelOpt: Model-Optimizer, modelopt/torch/export/quant_utils.py (to_quantized_weight) and
# modelopt/torch/quantization/qtensor/fp8_tensor.py, nvfp4_tensor.py (quantize, dequantize).
def modelopt_fp8(weights: torch.Tensor, *, input_scale: float = 0.02) -> Stored:
    """weight in E4M3, and weight_scale and input_scale, which are float32 without an axis."""
    scale = weights.float().abs().amax() / 448
    codes = (weights.float() / scale).to(E4M3)
    tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(input_scale)}
    return tensors, codes.float() * scale


def modelopt_nvfp4(
    weights: torch.Tensor, *, amax: torch.Tensor | None = None, input_scale: float | None = 0.0003
) -> Stored:
    """weight [out, in / 2] uint8, weight_scale [out, in / 16] in E4M3, weight_scale_2 and input_scale without an axis.

    Both scales multiply. ModelOpt gives fused projections one `amax`, and weight-only NVFP4 no input_scale.
    """
    blocks = weights.float().unflatten(-1, (-1, 16))
    second = (weights.float().abs().amax() if amax is None else amax) / (6 * 448)
    first = blocks.abs().amax(-1) / (6 * second)
    first = torch.where(first == 0, 1.0, first).to(E4M3)
    codes = e2m1(blocks / (first.float() * second)[..., None]).flatten(1)
    tensors = {"weight": (codes[:, 1::2] << 4) | codes[:, 0::2], "weight_scale": first, "weight_scale_2": second}
    tensors |= {"input_scale": torch.tensor(input_scale)} if input_scale else {}
    nibbles = torch.stack([tensors["weight"] & 15, tensors["weight"] >> 4], -1).flatten(1)
    values = E2M1_VALUES[nibbles.long()].unflatten(1, (-1, 16))
    return tensors, (values * (first.float() * second)[..., None]).flatten(1)


def e2m1(values: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 code of each value, ties to the even code (Model-Optimizer, nvfp4_tensor.py, _cast_fp4)."""
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    size = values.abs()
    above = torch.isin(size, bounds[[1, 3, 5]])
    return ((values < 0).to(torch.uint8) << 3) + torch.searchsorted(bounds, size).to(torch.uint8) + above


# compressed-tensors: its own observers' arithmetic, compressors and decompressors.
COMPRESSED = {  # scheme: format of the files
    "FP8": "float-quantized",
    "FP8_DYNAMIC": "float-quantized",
    "FP8_BLOCK": "float-quantized",
    "W8A8": "int-quantized",
    "W8A16": "pack-quantized",
    "W4A16": "pack-quantized",
    "W4A16_ASYM": "pack-quantized",
    "NVFP4": "nvfp4-pack-quantized",
    "NVFP4A16": "nvfp4-pack-quantized",
    "MXFP4": "mxfp4-pack-quantized",
    "MXFP4A16": "mxfp4-pack-quantized",
    "MXFP8": "mxfp8-quantized",
    "MXFP8A16": "mxfp8-quantized",
}


def compressed(weights: torch.Tensor, name: str, *, group: int | None = None, amax: float | None = None) -> Stored:
    """A matrix as compressed-tensors writes it under one of COMPRESSED; scales have the dtype of the weights.

    `group` replaces the group size of W4A16 or both sides of a block. `amax` replaces the largest weight in NVFP4's
    global scale. Decoded are codes by scales in float32: `decompress` itself would round to the scales' dtype.
    """
    scheme = compressed_scheme(name, group)
    least, most = extremes(weights, scheme.weights)
    state: dict[str, Any] = {"weight": weights}
    if name.startswith("NVFP4"):
        largest = weights.abs().amax().float() if amax is None else torch.tensor(amax)
        state["weight_global_scale"] = generate_gparam(-largest, largest)
    scale, zero = calculate_qparams(least, most, scheme.weights, state.get("weight_global_scale"))
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    if name in ("FP8", "NVFP4"):
        state |= {
            "input_scale" if name == "FP8" else "input_global_scale": torch.tensor([0.02 if name == "FP8" else 800.0])
        }
    written = BaseCompressor.get_value_from_registry(COMPRESSED[name]).compress(state, scheme)
    tensors = {part: tensor for part, tensor in written.items() if tensor is not None}
    return tensors, compressed_decoded(tensors, name, group)


def compressed_decoded(tensors: dict[str, torch.Tensor], name: str, group: int | None = None) -> torch.Tensor:
    """What the library makes of these tensors, in float32."""
    scheme, scale = compressed_scheme(name, group), tensors["weight_scale"]
    if name.startswith("NVFP4"):  # as NVFP4PackedCompressor.decompress, which unpacks to bfloat16
        codes = tensors["weight_packed"]
        values = unpack_fp4_from_uint8(codes, codes.shape[0], 2 * codes.shape[1], torch.float32)
        second = tensors["weight_global_scale"]
        return dequantize(values, scale.float(), None, scheme.weights, torch.float32, second)
    wide = scale.float() if scale.dtype in (torch.bfloat16, torch.float16) else scale
    compressor = BaseCompressor.get_value_from_registry(COMPRESSED[name])
    return compressor.decompress(tensors | {"weight_scale": wide}, scheme)["weight"].float()


def compressed_scheme(name: str, group: int | None = None) -> QuantizationScheme:
    scheme = QuantizationScheme(targets=["Linear"], format=COMPRESSED[name], **PRESET_SCHEMES[name])
    scheme = scheme.model_copy(deep=True)
    if group and scheme.weights.strategy == "block":
        scheme.weights.block_structure = [group, group]
    elif group:
        scheme.weights.group_size = group
    return scheme


def compressed_config(name: str, group: int | None = None, ignore: tuple[str, ...] = ("lm_head",)) -> dict[str, Any]:
    """The quantization_config that goes with it."""
    scheme = compressed_scheme(name, group)
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=COMPRESSED[name], ignore=list(ignore))
    return config.model_dump(mode="json") | {"quant_method": "compressed-tensors"}


def compressed_by_activations(weights: torch.Tensor, group: int, order: torch.Tensor, *, sym: bool = True) -> Stored:
    """W4A16 with actorder "group": as `compressed`, with weight_g_idx [in] that gives each column's group.

    Earlier releases wrote and read it (quantization/lifecycle/forward.py, _process_quantization: columns
    are sorted by g_idx, cast in groups, and sorted back); 0.20 refuses it, vLLM reads it (compressed_tensors_wNa16.py).
    """
    name = "W4A16" if sym else "W4A16_ASYM"
    sorted_tensors, sorted_decoded = compressed(weights[:, order].contiguous(), name, group=group)
    back = torch.argsort(order)
    unpacked = packed_nibbles(sorted_tensors["weight_packed"])[:, : weights.shape[1]]
    tensors = sorted_tensors | {
        "weight_packed": packed(unpacked[:, back], 4),
        "weight_g_idx": (torch.arange(weights.shape[1], dtype=torch.int32) // group)[back].contiguous(),
    }
    return tensors, sorted_decoded[:, back].contiguous()


def packed_nibbles(words: torch.Tensor) -> torch.Tensor:
    return ((words[..., None] >> torch.arange(0, 32, 4)) & 15).flatten(-2)


def extremes(weights: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and largest weight of each tile, in the shape of the scales."""
    if args.strategy == "tensor":
        return weights.amin().reshape(1), weights.amax().reshape(1)
    if args.strategy == "channel":
        return weights.amin(1, keepdim=True), weights.amax(1, keepdim=True)
    if args.strategy == "block":
        rows, cols = args.block_structure
        ragged = (0, -weights.shape[1] % cols, 0, -weights.shape[0] % rows)
        tiles = torch.nn.functional.pad(weights, ragged).unflatten(0, (-1, rows)).unflatten(2, (-1, cols))
        return tiles.amin((1, 3)), tiles.amax((1, 3))
    groups = weights.unflatten(1, (-1, args.group_size))
    return groups.amin(-1), groups.amax(-1)
