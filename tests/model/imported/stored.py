"""Weights as each library stores them, and as it decodes them again, to the bit: for `fp8dash.model.imported.decode`.

compressed-tensors is asked itself, in the dtypes that it keeps scales in; the others are `tests.oracles_checkpoints`.
"""

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from tests import oracles_checkpoints as oracles

NAME = "model.layers.0.mlp.up_proj"


def compressed(weights, layout, kept=torch.float32, **args):
    """compressed-tensors: tensors and config of a Linear that it stored, and what it decodes them to."""
    args = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
    least, largest = oracles.extremes(weights.float(), args)
    outer = generate_gparam(least.amin(), largest.amax()) if args.strategy == "tensor_group" else None
    scale, zero = calculate_qparams(least, largest, args, global_scale=outer)
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


def named(stored, config, dtype):
    """The tensors of an oracle under their module's name, its config, and what is decoded in this dtype."""
    tensors, decoded = stored
    return {f"{NAME}.{part}": tensor for part, tensor in tensors.items()}, config, decoded.to(dtype)


def deepseek(weights, dtype=torch.float32):
    power = dtype != torch.float32
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config |= {"scale_fmt": "ue8m0"} if power else {}
    return named(oracles.deepseek_fp8(weights, ue8m0=power, scale_dtype=dtype), config, torch.float32)


def order_of(weights):
    return torch.randperm(weights.shape[1], generator=torch.Generator().manual_seed(1))


def gptq(weights, *, symmetric, version=1, ordered=False, bits=4):
    order = order_of(weights) if ordered else None
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": symmetric, "desc_act": ordered}
    config |= {"checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    stored = oracles.gptq(weights, 32, bits=bits, sym=symmetric, version=version, order=order)
    return named(stored, config, torch.float16)


def awq(weights):
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    return named(oracles.awq(weights, 32), config, torch.float16)


def ordered_words(weights, symmetric):
    config = oracles.compressed_config("W4A16" if symmetric else "W4A16_ASYM", 32)
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    stored = oracles.compressed_by_activations(weights, 32, order_of(weights), sym=symmetric)
    return named(stored, config, torch.float32)


def modelopt(weights, algorithm):
    config = {"quant_method": "modelopt", "quant_algo": algorithm}
    if algorithm == "FP8":
        return named(oracles.modelopt_fp8(weights), config, torch.float32)
    return named(oracles.modelopt_nvfp4(weights), config, torch.bfloat16)


def gpt_oss(weights, experts=3):
    tensors, decoded = oracles.gpt_oss_mxfp4(torch.stack([weights * (1 + index) for index in range(experts)]))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {f"{name}{part}": tensor for part, tensor in tensors.items()}
    return tensors, {"quant_method": "mxfp4"}, decoded.bfloat16()


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
    "GPTQ v2": lambda w: gptq(w, symmetric=False, version=2),
    "GPTQ ordered": lambda w: gptq(w, symmetric=False, ordered=True),
    "GPTQ 8 bits": lambda w: gptq(w, symmetric=True, bits=8),
    "AWQ": awq,
    "ordered words": lambda w: ordered_words(w, symmetric=True),
    "ordered words, asymmetric": lambda w: ordered_words(w, symmetric=False),
    "ModelOpt FP8": lambda w: modelopt(w, "FP8"),
    "ModelOpt NVFP4": lambda w: modelopt(w, "NVFP4"),
    "GPT-OSS": gpt_oss,
}
