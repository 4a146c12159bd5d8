"""What is wrong with a checkpoint: each fault by its kind, the tensors that show it, and what comes of it.

A fault is something that an engine refuses, or that makes it multiply other numbers than were meant. What is merely
unusual is none. Parts of a fused group are one matrix in vLLM.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fp8dash.choose.formats import INT4, INT8
from fp8dash.choose.models.groups import FUSED, group_of, is_outside, is_routed_expert
from fp8dash.choose.models.quantized import (
    AWQ,
    BLOCKS,
    GPTQ,
    INVERSE,
    MODELOPT,
    NIBBLES,
    WORDS,
    Quantization,
    StoredGroup,
)
from fp8dash.choose.records import ROUTER
from fp8dash.choose.scaling import POW2
from fp8dash.model.xray.matrices import SCALES, StoredMatrix, is_head
from fp8dash.model.xray.scales import input_scale_of, kv_scale_of
from fp8dash.model.xray.tensors import Opened, powers

SHARED = ("weight_global_scale", "weight_scale_2", "input_global_scale", "input_scale")  # one of a fused matrix
WIDE_SCALES = ("F32", "BF16", "F16")
KV_SCALES = ("k_scale", "v_scale")
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
WORD_DTYPES = {WORDS: "I32", GPTQ: "I32", AWQ: "I32", NIBBLES: "U8", MODELOPT: "U8", BLOCKS: "U8"}
GLOBAL_SCALES = {NIBBLES: "weight_global_scale", MODELOPT: "weight_scale_2"}
INDICES = {GPTQ: "g_idx", WORDS: "weight_g_idx"}


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault, and where it shows."""

    kind: str  # of FAULTS
    where: tuple[str, ...]  # modules, tensors or files
    detail: str  # of the first place


FAULTS = {  # kind: what it means, and what comes of it
    "missing file": "the index names a weight file that is not there",
    "truncated": "a weight file ends before its tensors do",
    "byte count": "a tensor has other bytes than its shape and type ask for, which loaders refuse",
    "misplaced tensor": "the index places a tensor in a file that does not hold it",
    "missing scale": "codes have no scale beside them: their values cannot be told",
    "missing global scale": "a matrix of two-level scales lacks its second",
    "scale of 1.0": "every scale is 1.0: nothing was calibrated, or the scales were lost",
    "scale not finite": "a scale is NaN, infinite, zero or negative",
    "scale dtype": "scales are stored in another type than engines read",
    "swapped scale axes": "the scales lie transposed",
    "group size": "the scales' shape fits another group size than the config says",
    "not powers of two": "the config says UE8M0, and scales are no powers of two",
    "other format": "codes are stored in another format than the config says",
    "claimed, not cast": "the config says that it is cast, and it is stored uncast",
    "cast, not claimed": "it is stored as codes, and the config says that it is not cast",
    "split fused group": "parts that vLLM multiplies as one matrix are cast differently, which it refuses",
    "global scales": "parts that vLLM multiplies as one matrix have unlike global scales, of which it takes one",
    "missing kv scale": "the config promises scales of the KV cache, and some are missing: engines take 1.0",
    "missing input scale": "the config says static activations, and their scale is missing",
    "zero points": "zero points are stored where the config has none, or missing where it has them",
    "group index": "the group of each column is missing or is none, or the config says nothing of an order",
    "packed shape": "the packed words hold another shape than weight_shape says",
    "tied head": "the config ties the head to the embedding, and a cast head of its own is stored",
    "dtype": "a matrix is stored in another dtype than the config says of the model",
    "rounding, not GPTQ": "the config says GPTQ, and every code is what plain rounding gives",
}


def faults_of(checkpoint: Opened, matrices: tuple[StoredMatrix, ...], claim: Quantization | None) -> tuple[Fault, ...]:
    """What is wrong, one fault a kind, in the order of FAULTS."""
    places: dict[str, dict[str, str]] = defaultdict(dict)
    for kind, where, detail in _all(checkpoint, matrices, claim):
        places[kind].setdefault(where, detail)
    return tuple(
        Fault(kind, tuple(places[kind]), next(iter(places[kind].values()))) for kind in FAULTS if kind in places
    )


Named = Iterator[tuple[str, str, str]]  # kind, where, detail


def _all(checkpoint: Opened, matrices: tuple[StoredMatrix, ...], claim: Quantization | None) -> Named:
    yield from (("missing file", name, "") for name in checkpoint.absent)
    yield from (("truncated", file.name, f"{name} ends behind it") for name, file in checkpoint.short.items())
    yield from (
        ("byte count", name, f"{checkpoint.tensors[name].dtype} {list(checkpoint.tensors[name].shape)}")
        for name in checkpoint.misfit
    )
    yield from (("misplaced tensor", name, "") for name in checkpoint.misplaced)
    for matrix in matrices:
        if matrix.packing:
            yield from _codes(checkpoint, matrix)
            yield from _group_index(checkpoint, matrix)
            yield from _scales(checkpoint, matrix, claim)
        yield from _claims(checkpoint, matrix, claim)
    yield from _fused(matrices)
    yield from _global_scales(checkpoint, matrices)
    yield from _kv(checkpoint, claim)
    yield from _tied(checkpoint, matrices)


def _codes(checkpoint: Opened, matrix: StoredMatrix) -> Named:
    """Zero points, packed shapes and the words' dtype."""
    tensor, claimed = checkpoint.tensors[matrix.codes], matrix.claim
    expected = WORD_DTYPES.get(matrix.packing)
    if expected and tensor.dtype != expected:
        yield "other format", matrix.codes, f"{tensor.dtype} where {matrix.packing} are {expected}"
    if matrix.packing == WORDS:
        name = f"{matrix.module}.weight_shape"
        shape = checkpoint.values(name) if name in checkpoint.tensors else np.zeros(0)
        if shape.tolist() != [matrix.rows, matrix.cols]:
            yield "packed shape", matrix.module, f"{shape.tolist()} over words of {list(tensor.shape)}"
        zeros = f"{matrix.module}.weight_zero_point" in checkpoint.tensors
        if claimed and claimed.zero_points != zeros:
            yield "zero points", matrix.module, "missing" if claimed.zero_points else "stored"
    if matrix.packing in (GPTQ, AWQ) and claimed:
        yield from _zero_points(checkpoint, matrix, claimed)


def _zero_points(checkpoint: Opened, matrix: StoredMatrix, claimed: StoredGroup) -> Named:
    """GPTQ's and AWQ's: without them, engines take the middle of the range, whatever is stored."""
    name, bits = f"{matrix.module}.qzeros", matrix.format.bits if matrix.format else 0
    if name not in checkpoint.tensors:
        if claimed.zero_points:
            yield "zero points", matrix.module, "missing"
        return
    words = checkpoint.raw(name)
    if claimed.zero_points or not bits or words.dtype != np.int32 or not words.size:
        return
    middle = (1 << bits - 1) - claimed.zeros_less_one
    due = sum(middle << place for place in range(0, 32, bits))
    if (words.view(np.uint32) != due).any():
        yield "zero points", matrix.module, f"the config has none, and {name} holds others than {middle}"


def _group_index(checkpoint: Opened, matrix: StoredMatrix) -> Named:
    """vLLM reads the index only where the config orders columns by activation; AutoGPTQ always."""
    name = f"{matrix.module}.{INDICES.get(matrix.packing, '')}"
    ordered = matrix.claim is not None and matrix.claim.ordered
    if matrix.packing not in INDICES or matrix.tile is None:
        return
    if name not in checkpoint.tensors:
        if ordered:
            yield "group index", matrix.module, f"no {name}"
        return
    index, groups = checkpoint.values(name), matrix.grid[1]
    if matrix.packing == WORDS and not ordered and (index == -1).all():
        return  # compressed-tensors: not ordered
    if index.shape != (matrix.cols,) or index.min() < 0 or index.max() >= groups:
        yield "group index", name, f"not {matrix.cols:,} numbers below {groups:,}"
    elif matrix.claim and not ordered and (index != np.arange(matrix.cols) // (matrix.tile.cols or matrix.cols)).any():
        yield "group index", name, "columns are out of order, of which the config says nothing"


def _scales(checkpoint: Opened, matrix: StoredMatrix, claim: Quantization | None) -> Named:
    if not matrix.scale:
        due = matrix.claim.packing if matrix.claim else matrix.packing
        yield "missing scale", matrix.module, f"no {matrix.module}{SCALES.get(due, SCALES[matrix.packing])}"
        return
    tensor = checkpoint.tensors[matrix.scale]
    if tensor.dtype not in _scale_dtypes(checkpoint, matrix):
        yield "scale dtype", matrix.scale, f"{tensor.dtype}, not {' or '.join(_scale_dtypes(checkpoint, matrix))}"
        return  # what its values mean is not known
    yield from _shape(matrix)
    second = GLOBAL_SCALES.get(matrix.packing)
    is_two_level = second is not None and tensor.dtype == "F8_E4M3"
    if is_two_level and f"{matrix.module}.{second}" not in checkpoint.tensors:
        yield "missing global scale", matrix.module, f"no {second}"
    values = checkpoint.values(matrix.scale)
    values = powers(values) if tensor.dtype == "U8" else values
    if not values.size:
        return
    least = 0.0 if is_two_level else math.nextafter(0.0, 1.0)  # an E4M3 scale of a tiny block rounds to zero
    if not (np.isfinite(values).all() and (values >= least).all()):
        yield "scale not finite", matrix.scale, f"between {np.min(values):g} and {np.max(values):g}"
    if (values == 1.0).all() and not _is_zero(checkpoint, matrix):
        yield "scale of 1.0", matrix.scale, f"all {values.size:,}"
    power = claim is not None and claim.scheme == "FP8_BLOCK_UE8M0"
    if power and matrix.packing == INVERSE and (np.frexp(values)[0] != 0.5).any():
        yield "not powers of two", matrix.scale, f"{values.flat[int(np.argmax(np.frexp(values)[0] != 0.5))]:g}"
    yield from _input_scale(checkpoint, matrix)


def _scale_dtypes(checkpoint: Opened, matrix: StoredMatrix) -> tuple[str, ...]:
    """What engines read; a float16 scale of FP8 weights would be subnormal, unless the whole model is float16."""
    claimed = matrix.claim.weights.rule.stored if matrix.claim and matrix.claim.weights else matrix.rule.stored
    if matrix.packing in (GPTQ, AWQ):
        return WIDE_SCALES
    if matrix.packing == BLOCKS or claimed == "e8m0":
        return ("U8", "F8_E8M0")
    if claimed == "e4m3":
        return ("F8_E4M3",)
    half = checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype")) == "float16"
    wide = WIDE_SCALES if half or matrix.packing == WORDS or matrix.format in (INT4, INT8) else ("F32", "BF16")
    power = matrix.packing == INVERSE and matrix.claim and matrix.claim.weights and matrix.claim.weights.rule == POW2
    return (*wide, "F8_E8M0", *(["U8"] if power else [])) if matrix.packing == INVERSE else wide


def _shape(matrix: StoredMatrix) -> Named:
    """Scales that lie the other way round, or whose groups are of another size than the config says."""
    claimed = matrix.claim.weights if matrix.claim else None
    if claimed is None:
        if matrix.tile is None:
            yield "group size", matrix.module, f"{matrix.grid} scales of {matrix.rows} × {matrix.cols}"
        return
    due = claimed.tile.grid(matrix.rows, matrix.cols)
    if matrix.grid == due:
        return
    if matrix.grid == (due[1], due[0]):
        yield "swapped scale axes", matrix.scale, f"{matrix.grid}, not {due}"
    else:
        fits = f", which is {matrix.tile.name}" if matrix.tile else ""
        yield "group size", matrix.scale, f"{matrix.grid} scales{fits}; {claimed.tile.name} has {due}"


def _input_scale(checkpoint: Opened, matrix: StoredMatrix) -> Named:
    claimed = matrix.claim.activations if matrix.claim else None
    if claimed is None or not (claimed.is_observed or claimed.rule.outer):
        return
    name, is_stored = input_scale_of(checkpoint, matrix)
    if not is_stored:
        yield "missing input scale", matrix.module, f"no {name}"
        return
    values = checkpoint.values(name)
    if values.size and not (np.isfinite(values).all() and (values > 0).all()):
        yield "scale not finite", name, f"{values.flat[0]:g}"
    elif values.size and (values == 1.0).all():
        yield "scale of 1.0", name, "of activations"


def _is_zero(checkpoint: Opened, matrix: StoredMatrix) -> bool:
    """Whether a matrix holds nothing but zeros, whose scale is rightly 1.0: read row by row until a code differs."""
    codes = checkpoint.raw(matrix.codes)
    middle = 0x80808080 if matrix.format == INT8 else 0x88888888
    blank = middle - (1 << 32) if matrix.packing == WORDS else 0
    return all((row == blank).all() for row in codes.reshape(-1, codes.shape[-1])) if codes.size else True


def _claims(checkpoint: Opened, matrix: StoredMatrix, claim: Quantization | None) -> Named:
    """What the config says of a matrix against what is stored of it."""
    claimed = matrix.claim
    if not matrix.packing:
        if claimed and claimed.weights and not _may_be_kept(matrix, claim):
            yield "claimed, not cast", matrix.module, checkpoint.tensors[matrix.codes].dtype
        yield from _dtype(checkpoint, matrix)
    elif claimed is None and checkpoint.path.is_dir():  # a lone file has no config that could say it
        yield "cast, not claimed", matrix.module, matrix.format.name if matrix.format else ""
    elif claimed and claimed.weights and matrix.format and claimed.weights.format != matrix.format:
        yield "other format", matrix.module, f"{matrix.format.name}, not {claimed.weights.format.name}"


def _may_be_kept(matrix: StoredMatrix, claim: Quantization | None) -> bool:
    """Whether engines leave it out without being told: heads, routers, towers, and what is no Linear's weight."""
    method = claim.method if claim else ""
    group = group_of(matrix.module)
    unnamed = is_head(matrix) and method in ("fp8", "gptq", "awq", "mxfp4")
    return unnamed or group in (ROUTER, "other", "convolution") or is_outside(matrix.module)


def _dtype(checkpoint: Opened, matrix: StoredMatrix) -> Named:
    stated = checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype"))
    due = DTYPES.get(stated) if isinstance(stated, str) else None
    actual = checkpoint.tensors[matrix.codes].dtype
    if due and actual != due and group_of(matrix.module) != ROUTER:
        yield "dtype", matrix.codes, f"{actual}, not {due}"


def _fused(matrices: tuple[StoredMatrix, ...]) -> Named:
    """Parts of one matrix of vLLM's, and experts of one layer, that are not cast alike."""
    by_module = {matrix.module: matrix for matrix in matrices}
    for names in FUSED:
        for module in by_module:
            above, _, last = module.rpartition(".")
            siblings = [by_module[name] for part in names if (name := f"{above}.{part}") in by_module]
            if last == names[0] and (kinds := _kinds(siblings)):
                yield "split fused group", above, f"{', '.join(names)}: {kinds}"
    experts: dict[str, list[StoredMatrix]] = defaultdict(list)
    for matrix in matrices:
        if is_routed_expert(matrix.module) and ".experts." in matrix.module:
            experts[matrix.module.partition(".experts.")[0]].append(matrix)
    for above, parts in experts.items():
        if kinds := _kinds(parts):
            yield "split fused group", f"{above}.experts", kinds


def _global_scales(checkpoint: Opened, matrices: tuple[StoredMatrix, ...]) -> Named:
    """vLLM takes the largest of a matrix's, or the first of an expert's, and leaves all other scales as they are.

    vLLM, `schemes/compressed_tensors_w4a4_nvfp4.py` and `quantization/modelopt.py`. One scale of FP8 codes may differ:
    there the codes are cast anew.
    """
    modules = {matrix.module for matrix in matrices if matrix.packing}
    for names in FUSED:
        for above in dict.fromkeys(m.rpartition(".")[0] for m in modules if m.rpartition(".")[2] == names[0]):
            for part in SHARED:
                stored = [name for own in names if (name := f"{above}.{own}.{part}") in checkpoint.tensors]
                values = [float(own) for name in stored for own in checkpoint.values(name).reshape(-1)]
                if len(set(values)) > 1:
                    yield "global scales", above, f"{part} of {', '.join(names)}: {min(values):g} to {max(values):g}"


def _kinds(parts: list[StoredMatrix]) -> str:
    """The unlike casts of parts, in words; empty where they are alike."""
    kinds = {_kind(matrix) for matrix in parts}
    return " and ".join(sorted(kinds)) if len(kinds) > 1 else ""


def _kind(matrix: StoredMatrix) -> str:
    """What an engine will take a part for: what the config says of it, before what is stored."""
    if matrix.claim:
        casts = {"w": matrix.claim.weights, "a": matrix.claim.activations}
        return " ".join(f"{key}={cast.text}" for key, cast in casts.items() if cast)
    return matrix.cast.text if matrix.cast else matrix.packing or "uncast"


def _kv(checkpoint: Opened, claim: Quantization | None) -> Named:
    """Scales of keys and values, which each layer must have where the config promises them."""
    modules = {
        name.rpartition(".")[0]: "" for name in checkpoint.tensors if ".k_proj." in name or ".kv_b_proj." in name
    }
    attentions = {module.rpartition(".")[0] for module in modules}
    promised = claim is not None and claim.kv is not None and claim.kv.scale == "static"
    suffixes = {name.rpartition(".")[2] for name in checkpoint.tensors}
    scaled = {kv_scale_of(name) for name in checkpoint.tensors}
    stored = [name for name in checkpoint.tensors if name.rpartition(".")[2] in KV_SCALES]
    by_default = claim is not None and claim.method == "modelopt"  # it writes 1 for all smaller scales of FP8 caches
    if promised and not {"k_scale", "v_scale"} <= suffixes and not attentions:
        yield "missing kv scale", "the model", "none is stored"
    for above in sorted(attentions) if promised else ():
        for part in "kv":
            if (above, part) not in scaled:
                yield "missing kv scale", above, f"no {above}.{part}_scale"
    for name in stored:
        values = checkpoint.values(name)
        if values.size and not (np.isfinite(values).all() and (values > 0).all()):
            yield "scale not finite", name, f"{values.flat[0]:g}"
        elif values.size and (values == 1.0).all() and not by_default:
            yield "scale of 1.0", name, "of the KV cache"


def _tied(checkpoint: Opened, matrices: tuple[StoredMatrix, ...]) -> Named:
    text = checkpoint.config.get("text_config")
    nested = text.get("tie_word_embeddings") if isinstance(text, dict) else None
    if checkpoint.config.get("tie_word_embeddings", nested) is True:
        for matrix in matrices:
            if is_head(matrix) and matrix.packing:
                yield "tied head", matrix.module, matrix.format.name if matrix.format else ""
