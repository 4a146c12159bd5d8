"""How a compressed-tensors checkpoint describes a recipe, or why it cannot. Values only: no torch.

The names are those of compressed-tensors 0.20 (`quantization/quant_args.py`, `quant_scheme.py`, `compressors/`), which
vLLM, SGLang and transformers read. An 8-bit float there is E4M3FN, always.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fp8dash.choose.casts import Cast, KvCast
from fp8dash.choose.formats import E2M1, E4M3FN, INT4, INT8
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.scaling import BLOCK_128X128, GROUP_1X16, GROUP_1X32, GROUP_1X128, ROW, TENSOR, ScaleRule
from fp8dash.errors import InvalidChoice

MIXED = "mixed-precision"
INT, FLOAT = "int", "float"
KV_STRATEGIES = {"tensor": "tensor", "head": "attn_head"}  # by who shares a scale


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one kind of Linear is stored: the format's name, and the arguments of its weights and input activations."""

    format: str
    weights: dict[str, Any]
    activations: dict[str, Any] | None


def scheme_of(recipe: Recipe) -> Scheme:
    """The scheme of a Linear under a recipe as that Linear sees it (`Recipe.of`); raises InvalidChoice.

    >>> from fp8dash.choose.recipe import parse_recipe
    >>> scheme_of(parse_recipe("w=e4m3fn/row a=e4m3fn/row")).format
    'float-quantized'
    >>> scheme_of(parse_recipe("w=int4/1x128/ct")).weights["group_size"]
    128
    """
    if recipe.weights is None:
        raise _refused("activations alone", "a Linear's weights must be cast too", "w=e4m3fn/row")
    weights = _weights(recipe.weights)
    activations = _activations(recipe.activations, recipe.weights) if recipe.activations else None
    return Scheme(_format(recipe.weights, activations), weights, activations)


def kv_scheme_of(kv: KvCast | None) -> dict[str, Any] | None:
    """The checkpoint's `kv_cache_scheme`; None where no scale is stored. Raises InvalidChoice for INT8 and E5M2."""
    if kv is None:
        return None
    if kv.format != E4M3FN:
        raise _refused(f"kv={kv.text}", "a KV scheme of 8 bits is E4M3FN", "kv=e4m3fn/tensor/static")
    if kv.scale != "static":  # engines that find no scales take 1.0, and some compute them as they go
        return None
    strategy = KV_STRATEGIES[kv.share]
    return _args(FLOAT, 8, strategy=strategy, dynamic=False)


def quantization_config(recipe: Recipe, cast: Iterable[str], kept: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint whose Linears `cast` are cast and `kept` are not.

    Raises InvalidChoice with the rule that refuses and the nearest recipe.
    """
    _refuse_what_no_checkpoint_holds(recipe)
    groups: dict[str, list[str]] = {}
    schemes: dict[str, Scheme] = {}
    for name in cast:
        own = recipe.of(name)
        key = f"{own.weights and own.weights.text} {own.activations and own.activations.text}"
        groups.setdefault(key, []).append(name)
        schemes[key] = scheme_of(own)
    formats = {scheme.format for scheme in schemes.values()}
    alone = len(groups) == 1
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": next(iter(formats)) if len(formats) == 1 else MIXED,
        "config_groups": {
            f"group_{index}": {
                "targets": ["Linear"] if alone else names,
                "weights": schemes[key].weights,
                "input_activations": schemes[key].activations,
                "output_activations": None,
                "format": schemes[key].format,
            }
            for index, (key, names) in enumerate(groups.items())
        },
        "ignore": sorted(kept),
        "kv_cache_scheme": kv_scheme_of(recipe.kv),
    }


def refuse_no_checkpoint(recipe: Recipe) -> None:
    """Raises InvalidChoice where no checkpoint can hold the recipe, whatever the model's Linears are called."""
    kinds = ["", *(override.pattern for override in recipe.overrides)]
    quantization_config(recipe, [name for name in kinds if recipe.of(name).casts_linears], [])


def _refuse_what_no_checkpoint_holds(recipe: Recipe) -> None:
    if not recipe.casts_linears:
        raise _refused("a recipe that casts no Linear", "there is nothing to store in fewer bits", "FP8_DYNAMIC")
    if recipe.attention:
        raise _refused("attn=", "attention's products are up to the serving engine", "the recipe without attn=")
    if recipe.accumulator:
        raise _refused(f"acc={recipe.accumulator.name}", "accumulators are simulated", "the recipe without acc=")
    if groups := [group for group in recipe.also if group != "lm_head"]:
        raise _refused(f"also={groups[0]}", "only Linears are stored as codes", "the recipe without it")


def _weights(cast: Cast) -> dict[str, Any]:
    if cast.format == E4M3FN and cast.tile in PLAIN and _is_float32(cast.rule):
        return _args(FLOAT, 8, **PLAIN[cast.tile])
    if cast.format in (E4M3FN, E2M1) and cast.tile == GROUP_1X32 and _is_mx(cast.rule):
        return _args(FLOAT, cast.format.bits, strategy="group", group_size=32, scale_dtype="torch.uint8")
    if cast.format == E2M1 and cast.tile == GROUP_1X16 and cast.rule.name == "nvfp4":
        return _args(FLOAT, 4, strategy="tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
    if cast.format == INT8 and cast.tile in (TENSOR, ROW) and _is_float32(cast.rule):
        return _args(INT, 8, **PLAIN[cast.tile])
    if cast.format == INT4 and _is_float32(cast.rule):
        if cast.tile == ROW:
            return _args(INT, 4, strategy="channel")
        if cast.tile.rows == 1 and cast.tile.cols > 1:
            return _args(INT, 4, strategy="group", group_size=cast.tile.cols)
    raise _refused(f"w={cast.text}", "no scheme stores such codes and scales", _nearest(cast))


def _activations(cast: Cast, weights: Cast) -> dict[str, Any]:
    if cast.format not in (E4M3FN, INT8) or weights.format.bits != 8:
        raise _refused(
            f"a={cast.text} by w={weights.text}",
            "the global scale of four-bit activations is calibrated there, and dynamic here",
            f"weights alone, w={weights.text}",
        )
    kind = FLOAT if cast.format == E4M3FN else INT
    if cast.tile == TENSOR and cast.when.name in ("dynamic", "static") and _is_float32(cast.rule):
        return _args(kind, 8, strategy="tensor", dynamic=cast.when.name == "dynamic")
    if cast.tile == ROW and _is_float32(cast.rule):
        return _args(kind, 8, strategy="token", dynamic=True)
    if cast.tile == GROUP_1X128 and kind == FLOAT and _is_float32(cast.rule):
        return _args(kind, 8, strategy="group", group_size=128, dynamic=True)
    if cast.tile == GROUP_1X32 and kind == FLOAT and _is_mx(cast.rule):
        return _args(kind, 8, strategy="group", group_size=32, dynamic=True, scale_dtype="torch.uint8")
    raise _refused(f"a={cast.text}", "no scheme casts activations so", "a=e4m3fn/row")


def _format(weights: Cast, activations: dict[str, Any] | None) -> str:
    if weights.format == INT4:
        return "pack-quantized"
    if weights.format == E2M1:
        return "mxfp4-pack-quantized" if _is_mx(weights.rule) else "nvfp4-pack-quantized"
    if _is_mx(weights.rule):
        return "mxfp8-quantized"
    if activations is None:
        return "naive-quantized"
    return "float-quantized" if weights.format == E4M3FN else "int-quantized"


PLAIN: dict[Any, dict[str, Any]] = {
    TENSOR: {"strategy": "tensor"},
    ROW: {"strategy": "channel"},
    BLOCK_128X128: {"strategy": "block", "block_structure": [128, 128]},
}


def _args(kind: str, bits: int, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, **more}


def _is_float32(rule: ScaleRule) -> bool:
    return rule.stored == "float32" and not rule.outer


def _is_mx(rule: ScaleRule) -> bool:
    return rule.stored == "e8m0" and not rule.outer


def _nearest(cast: Cast) -> str:
    if cast.format == INT4:
        return "w=int4/1x128/ct"
    if cast.format == INT8:
        return "w=int8/row"
    if cast.format == E2M1:
        return "w=e2m1/1x16/nvfp4"
    return "w=e4m3fn/1x32/rceil" if cast.tile == GROUP_1X32 else "w=e4m3fn/row"


def _refused(what: str, why: str, nearest: str) -> InvalidChoice:
    return InvalidChoice(
        f"A checkpoint cannot hold {what}: {why} (compressed-tensors); closest alternative: {nearest}."
    )
