"""The quantization_config of each library, read in the words of recipes; raises ModelError for what is not read.

Values only: no torch, and no file is opened here.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fp8dash.choose.casts import KV_FORMATS, Cast, KvCast
from fp8dash.choose.formats import E2M1, E4M3FN, INT4, INT8, Format
from fp8dash.choose.models.checkpoint import FLOAT, INT, KV_STRATEGIES, PLAIN
from fp8dash.choose.models.quantized import (
    AWQ,
    BLOCKS,
    CODES,
    GPTQ,
    INVERSE,
    LINEAR,
    MODELOPT,
    NIBBLES,
    WORDS,
    Quantization,
    StoredGroup,
    shown,
    texts,
    unreadable,
)
from fp8dash.choose.scaling import (
    BLOCK_128X128,
    CT,
    EXACT,
    FLOAT32,
    GROUP_1X16,
    GROUP_1X32,
    NVFP4,
    ONE_BIT,
    POW2,
    RCEIL,
    ROW,
    STATIC,
    TENSOR,
    ScaleRule,
    Tile,
    tile_of,
)
from fp8dash.errors import ModelError


def quantized_of(config: Any) -> Quantization:
    """What a `quantization_config`, or the `quantization` of hf_quant_config.json, claims; raises ModelError.

    >>> quantized_of({"quant_method": "fp8", "weight_block_size": [128, 128]}).recipe.text
    'w=e4m3fn/128x128 a=e4m3fn/1x128'
    """
    if not isinstance(config, dict):
        raise unreadable("it is no object")
    method = config.get("quant_method") or ("modelopt" if "quant_algo" in config else None)
    if not isinstance(method, str) or method not in METHODS:
        raise ModelError(
            f"The checkpoint's quantization_config says quant_method {shown(method)}, which is not read: choose a "
            f"checkpoint of {', '.join(METHODS)}."
        )
    try:
        return METHODS[method](config)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise unreadable(str(error)) from error


def _compressed_tensors(config: dict[str, Any]) -> Quantization:
    """The names of compressed-tensors 0.20, `quantization/quant_config.py`."""
    whole = str(config.get("format") or "")
    groups = tuple(_group(group, whole) for group in config.get("config_groups", {}).values())
    kv = config.get("kv_cache_scheme")
    return Quantization(
        "compressed-tensors", _scheme(groups), whole, groups, texts(config.get("ignore")), _kv(kv) if kv else None
    )


def _group(group: dict[str, Any], whole: str) -> StoredGroup:
    layout = str(group.get("format") or whole)
    unsaid: list[str] = []
    weights, activations = group.get("weights"), group.get("input_activations")
    casts: list[Cast | None] = []
    for args, of_activations in ((weights, False), (activations, True)):
        cast = _cast(args, layout, of_activations) if args else None
        if args and cast is None:
            unsaid.append(f"{'activations' if of_activations else 'weights'} {shown(_essence(args))}")
        casts.append(cast)
    zeros = weights is not None and weights.get("symmetric") is False
    if zeros:
        unsaid.append("weights have zero points")
    if activations and activations.get("symmetric") is False:
        unsaid.append("activations have zero points")
    ordered = weights is not None and weights.get("actorder") in ("group", True)
    if ordered:
        unsaid.append("activation order: columns are grouped by weight_g_idx")
    return StoredGroup(
        texts(group["targets"]), casts[0], casts[1], _packing(layout), zeros, ordered=ordered, unsaid=tuple(unsaid)
    )


def _cast(args: dict[str, Any], layout: str, of_activations: bool) -> Cast | None:
    """The cast of QuantizationArgs in files of a layout; None where ours cannot say it."""
    fmt = FORMATS_OF.get((args.get("type", INT), args.get("num_bits", 8)))
    tile, rule = _tile(args, of_activations), _rule(args, layout)
    if fmt is None or tile is None:
        return None
    static = of_activations and args.get("dynamic", False) is False
    if static and tile != TENSOR:
        return None
    guard = CT if fmt in (INT4, INT8) and not of_activations else EXACT  # vLLM divides an activation's amax by 127
    return Cast(fmt, tile, rule, guard, STATIC) if static else Cast(fmt, tile, rule, guard)


def _tile(args: dict[str, Any], of_activations: bool) -> Tile | None:
    strategy, size = args.get("strategy"), args.get("group_size")
    if strategy is None:  # as QuantizationArgs fills it in
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy in ("group", "tensor_group"):
        return tile_of(f"1x{int(size or 0)}")
    if strategy == "block":
        rows, cols = (int(side) for side in args["block_structure"])
        return tile_of(f"{rows}x{cols}")
    if strategy == "token" and of_activations:
        return ROW
    return next((tile for tile, plain in PLAIN.items() if plain["strategy"] == strategy), None)


def _rule(args: dict[str, Any], layout: str) -> ScaleRule:
    dtype = str(args.get("scale_dtype") or SCALE_DTYPES.get(layout, "")).removeprefix("torch.")
    if args.get("strategy") == "tensor_group":
        return NVFP4
    return ONE_BIT if dtype in ("uint8", "float8_e8m0fnu") else FLOAT32


def _kv(args: dict[str, Any]) -> KvCast:
    fmt = FORMATS_OF[args.get("type", INT), args.get("num_bits", 8)]
    if fmt.name not in KV_FORMATS:
        raise unreadable(f"a kv_cache_scheme of {fmt.name}")
    share = {strategy: share for share, strategy in KV_STRATEGIES.items()}[args.get("strategy") or "tensor"]
    return KvCast(fmt, share, "dynamic" if args.get("dynamic") else "static")


def _scheme(groups: tuple[StoredGroup, ...]) -> str:
    """llm-compressor's name for the one group, by what its presets are (`quantization/quant_scheme.py`)."""
    if len(groups) != 1:
        return "mixed-precision" if groups else "none"
    weights, activations = groups[0].weights, groups[0].activations
    if weights is None:
        return "custom"
    key = (weights.format.name, weights.tile.name, activations.tile.name if activations else "")
    name = SCHEMES.get(key, "custom")
    if weights.format in (INT4, INT8) and activations is None and weights.tile.rows == 1:
        name = f"W{weights.format.bits}A16{'_ASYM' * groups[0].zero_points}"
    static = activations is not None and activations.is_observed
    return {"FP8": "FP8" if static else "custom"}.get(name, name)


def _packing(layout: str) -> str:
    if layout not in LAYOUTS:
        raise ModelError(
            f"The checkpoint's quantization_config says format {shown(layout)}, which is not read: "
            f"choose a checkpoint of {', '.join(LAYOUTS)}."
        )
    return LAYOUTS[layout]


def _fp8(config: dict[str, Any]) -> Quantization:
    """DeepSeek's blocks (transformers, `FineGrainedFP8Config`), or vLLM's one scale a tensor without a block size."""
    ignored = texts(config.get("modules_to_not_convert") or config.get("ignored_layers"))
    if config.get("expert_dtype") == "fp4":
        raise ModelError(
            "The checkpoint's quantization_config says expert_dtype fp4, two FP4 codes a byte under FP8's names, which "
            "are not read: choose a checkpoint whose experts are FP8."
        )
    block = config.get("weight_block_size")
    static = config.get("activation_scheme") == "static"
    if not block:
        casts = Cast(E4M3FN, TENSOR), Cast(E4M3FN, TENSOR, when=STATIC) if static else Cast(E4M3FN, TENSOR)
        return Quantization("fp8", "FP8", "fp8", (StoredGroup((LINEAR,), *casts, CODES),), ignored)
    rows, cols = (int(side) for side in block)
    tile, along = tile_of(f"{rows}x{cols}"), tile_of(f"1x{cols}")
    if tile is None or along is None:
        raise unreadable(f"weight_block_size {shown(block)}")
    power = str(config.get("scale_fmt") or "").lower() == "ue8m0"
    rule, name = (POW2, "FP8_BLOCK_UE8M0") if power else (FLOAT32, "FP8_BLOCK")
    group = StoredGroup((LINEAR,), Cast(E4M3FN, tile, rule), Cast(E4M3FN, along, rule), INVERSE)
    return Quantization("fp8", name, "fp8", (group,), ignored)


def _mxfp4(config: dict[str, Any]) -> Quantization:
    """GPT-OSS: only the experts are cast (transformers, `integrations/mxfp4.py`)."""
    group = StoredGroup(("re:.*experts",), Cast(E2M1, GROUP_1X32, RCEIL), None, BLOCKS)
    return Quantization("mxfp4", "MXFP4A16", "mxfp4", (group,), texts(config.get("modules_to_not_convert")))


def _gptq(config: dict[str, Any]) -> Quantization:
    """AutoGPTQ and GPTQModel: `quantize_config.json`, and the same fields in config.json.

    GPTQModel's `dynamic` gives modules fields of their own, or leaves them out (vLLM, `utils/gptq_utils.py`);
    optimum's `modules_in_block_to_quantize` names all that are cast.
    """
    ignored = texts(config.get("modules_in_block_to_not_quantize") or config.get("modules_to_not_convert"))
    inside = config.get("modules_in_block_to_quantize") or [LINEAR]
    targets = texts([name for part in inside for name in (part if isinstance(part, list) else [part])])
    groups: list[StoredGroup] = []
    for pattern, fields in (config.get("dynamic") or {}).items():
        if pattern.startswith("-:"):
            ignored += texts([f"re:{pattern.removeprefix('-:')}"])
        else:
            own = texts([f"re:{pattern.removeprefix('+:')}"])
            groups.append(_gptq_group(config | fields, own))
    whole = _gptq_group(config, targets)
    scheme = f"W{int(config['bits'])}A16{'_ASYM' * whole.zero_points}"
    return Quantization("gptq", scheme, "gptq", (*groups, whole), ignored)


def _gptq_group(config: dict[str, Any], targets: tuple[str, ...]) -> StoredGroup:
    zeros = config.get("sym", True) is not True
    group = _integers(config, int(config["bits"]), GPTQ, zeros, targets)
    group = replace(group, zeros_less_one=config.get("checkpoint_format") != "gptq_v2")
    if not config.get("desc_act") or int(config.get("group_size") or -1) == -1:
        return group  # one group a row: its order is none
    return replace(group, ordered=True, unsaid=("activation order: columns are grouped by g_idx", *group.unsaid))


def _awq(config: dict[str, Any]) -> Quantization:
    """AutoAWQ (transformers, `AwqConfig`): w_bit and q_group_size in older files."""
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version not in AWQ_VERSIONS:
        raise ModelError(
            f"The checkpoint's quantization_config says AWQ version {shown(version)}, whose words lie otherwise and "
            f"are not read: choose a checkpoint of {', '.join(AWQ_VERSIONS)}."
        )
    bits, zeros = int(config.get("bits") or config["w_bit"]), bool(config.get("zero_point", True))
    group = _integers(config, bits, AWQ, zeros, (LINEAR,))
    ignored = texts(config.get("modules_to_not_convert"))
    return Quantization("awq", f"W{bits}A16{'_ASYM' * zeros}", "awq", (group,), ignored)


AWQ_VERSIONS = ("gemm", "exllama")  # the second repacks the first's words: AutoAWQ, modules/linear/exllama.py


def _integers(config: dict[str, Any], bits: int, packing: str, zeros: bool, targets: tuple[str, ...]) -> StoredGroup:
    size = int(config.get("group_size") or config.get("q_group_size") or -1)
    tile = ROW if size == -1 else tile_of(f"1x{size}")
    fmt = FORMATS_OF.get((INT, bits))
    if tile is None:
        raise unreadable(f"group_size {size}")
    unsaid = ["weights have zero points"] * zeros + [f"weights have {bits} bits"] * (fmt is None)
    return StoredGroup(targets, Cast(fmt, tile, guard=CT) if fmt else None, None, packing, zeros, unsaid=tuple(unsaid))


def _modelopt(config: dict[str, Any]) -> Quantization:
    """ModelOpt's `hf_quant_config.json` (`export/quant_utils.py`), or the same in config.json, where
    `export/convert_hf_config.py` renames fields; `quantized_layers` of MIXED_PRECISION names each layer's algorithm.
    """
    config = config.get("quantization") or config
    ignored = texts(config.get("exclude_modules") or config.get("ignore"))
    whole = str(config.get("quant_algo") or "").upper()
    layers: dict[str, list[str]] = {}
    for name, fields in (config.get("quantized_layers") or {}).items():
        layers.setdefault(str(fields["quant_algo"]).upper(), []).append(name)
    if whole and whole != "MIXED_PRECISION":
        layers[whole] = [LINEAR]
    if unread := next((name for name in layers if name not in ALGORITHMS), None):
        raise unreadable(f"quant_algo {shown(unread)} is none of {', '.join(ALGORITHMS)}")
    groups = tuple(StoredGroup(texts(names), *ALGORITHMS[algorithm]) for algorithm, names in layers.items())
    return Quantization("modelopt", whole or "none", "modelopt", groups, ignored, _modelopt_kv(config))


def _modelopt_kv(config: dict[str, Any]) -> KvCast | None:
    algorithm = config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme")
    if isinstance(algorithm, dict):
        algorithm = "FP8" if (algorithm.get("type"), algorithm.get("num_bits")) == (FLOAT, 8) else ""
    return KvCast(E4M3FN, "tensor", "static") if str(algorithm).upper() == "FP8" else None


METHODS: dict[str, Callable[[dict[str, Any]], Quantization]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "awq": _awq,
    "modelopt": _modelopt,
}
FORMATS_OF: dict[tuple[Any, Any], Format] = {(FLOAT, 8): E4M3FN, (FLOAT, 4): E2M1, (INT, 8): INT8, (INT, 4): INT4}
LAYOUTS = {
    "pack-quantized": WORDS,
    "nvfp4-pack-quantized": NIBBLES,
    "mxfp4-pack-quantized": NIBBLES,
    "mxfp8-quantized": CODES,
    "float-quantized": CODES,
    "int-quantized": CODES,
    "naive-quantized": CODES,
}
SCALE_DTYPES = {"mxfp4-pack-quantized": "torch.uint8", "mxfp8-quantized": "torch.uint8"}  # where args say none
SCHEMES = {  # format and tile of the weights, tile of the activations
    ("e4m3fn", "tensor", "tensor"): "FP8",
    ("e4m3fn", "row", "row"): "FP8_DYNAMIC",
    ("e4m3fn", "128x128", "1x128"): "FP8_BLOCK",
    ("e4m3fn", "1x32", "1x32"): "MXFP8",
    ("e4m3fn", "1x32", ""): "MXFP8A16",
    ("e2m1", "1x32", "1x32"): "MXFP4",
    ("e2m1", "1x32", ""): "MXFP4A16",
    ("e2m1", "1x16", "1x16"): "NVFP4",
    ("e2m1", "1x16", ""): "NVFP4A16",
    ("int8", "row", "row"): "W8A8",
}
ALGORITHMS: dict[str, tuple[Cast, Cast | None, str]] = {
    "FP8": (Cast(E4M3FN, TENSOR), Cast(E4M3FN, TENSOR, when=STATIC), CODES),
    "FP8_PER_CHANNEL_PER_TOKEN": (Cast(E4M3FN, ROW), Cast(E4M3FN, ROW), CODES),
    "FP8_PB_WO": (Cast(E4M3FN, BLOCK_128X128), None, CODES),
    "MXFP8": (Cast(E4M3FN, GROUP_1X32, RCEIL), Cast(E4M3FN, GROUP_1X32, RCEIL), CODES),
    "NVFP4": (Cast(E2M1, GROUP_1X16, NVFP4), Cast(E2M1, GROUP_1X16, NVFP4), MODELOPT),
    "W4A16_NVFP4": (Cast(E2M1, GROUP_1X16, NVFP4), None, MODELOPT),
}


def _essence(args: dict[str, Any]) -> str:
    fields = ("num_bits", "type", "strategy", "group_size", "block_structure", "dynamic")
    return " ".join(f"{name}={args[name]}" for name in fields if args.get(name) is not None)
