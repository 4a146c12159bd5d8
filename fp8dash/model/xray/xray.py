"""A checkpoint looked through: what is cast how, what it takes, and what is wrong. No torch, no GPU, no weights read.

Beside the headers, only scales are read, one tensor at a time; weights are read where the original is at hand.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8dash.choose.casts import Cast
from fp8dash.choose.models.claims import quantized_of
from fp8dash.choose.models.groups import group_of
from fp8dash.choose.models.quantized import Quantization, StoredGroup
from fp8dash.choose.recipe import Override, Recipe
from fp8dash.choose.records import ATTENTION, EXPERTS, MLP
from fp8dash.model.xray.faults import Fault, faults_of
from fp8dash.model.xray.gguf import GgufTensor, gguf_tensors
from fp8dash.model.xray.matrices import StoredMatrix, is_head, matrices_of
from fp8dash.model.xray.original import RoundedShare, rounding_of
from fp8dash.model.xray.tensors import WIDE, Opened, claim_of, opened


@dataclass(frozen=True, slots=True)
class Casting:
    """Matrices that are stored alike."""

    cast: str  # the cast's text; empty for those that are not cast
    packing: str
    matrices: int
    elements: int
    modules: tuple[str, ...]

    @property
    def fact(self) -> dict[str, Any]:
        """What is stored of it with a run."""
        return {"cast": self.cast, "layout": self.packing, "matrices": self.matrices, "elements": self.elements}


@dataclass(frozen=True, slots=True)
class Xray:
    """What a checkpoint is, by its own files."""

    path: str
    method: str  # of its quantization_config; empty where it has none
    scheme: str
    recipe: str  # as it is stored, in the words of recipes; empty where they cannot say it
    unsaid: tuple[str, ...]  # what of it recipes cannot say
    castings: tuple[Casting, ...]
    coverage: float  # share of the matrix weights, embeddings aside, that is cast
    bits_per_weight: float  # of the matrices, scales and packing included
    size_bytes: int
    dtypes: tuple[tuple[str, int], ...]  # dtype, and how many tensors have it
    rounding: RoundedShare | None
    faults: tuple[Fault, ...]


def xray(path: Path, original: Path | None = None) -> Xray:
    """What lies in a checkpoint folder or a safetensors file; raises ModelError for what is none of them.

    `original` is the folder of the weights that it was made from.
    """
    if path.suffix == ".gguf" and path.is_file():
        return _gguf(path)
    checkpoint = opened(path)
    config = claim_of(checkpoint)
    claim = quantized_of(config) if config else None
    matrices = matrices_of(checkpoint, claim)
    rounding = rounding_of(checkpoint, matrices, opened(original)) if original else None
    faults = faults_of(checkpoint, matrices, claim)
    if rounding and rounding.is_plain and claim and claim.method == "gptq":
        faults += (Fault("rounding, not GPTQ", ("the model",), f"all of {rounding.matrices} matrices"),)
    elements = sum(matrix.elements for matrix in matrices) or 1
    return Xray(
        str(path),
        claim.method if claim else "",
        claim.scheme if claim else "",
        recipe_of(matrices, claim),
        _unsaid(matrices, claim),
        castings_of(matrices),
        sum(matrix.elements for matrix in matrices if matrix.packing) / elements,
        8 * sum(bytes_of(checkpoint, matrix) for matrix in matrices) / elements,
        sum(tensor.end - tensor.begin for tensor in checkpoint.tensors.values()),
        tuple(Counter(tensor.dtype for tensor in checkpoint.tensors.values()).most_common()),
        rounding,
        faults,
    )


def _gguf(path: Path) -> Xray:
    """A GGUF file: its block types are ggml's own, which recipes cannot say."""
    tensors, is_short = gguf_tensors(path)
    matrices = [t for t in tensors if len(t.shape) >= 2 and not t.name.startswith(GGUF_EMBEDDINGS)]
    kinds = {t.type: [m for m in matrices if m.type == t.type] for t in matrices}
    castings = (
        Casting(
            "" if kind in WIDE else kind, "" if kind in WIDE else "gguf blocks", len(alike), _sum(alike), _names(alike)
        )
        for kind, alike in kinds.items()
    )
    elements = _sum(matrices) or 1
    usual = max(kinds, key=lambda kind: _sum(kinds[kind]), default="")
    return Xray(
        path=str(path),
        method="gguf",
        scheme=usual,
        recipe=Recipe().text if set(kinds) <= set(WIDE) else "",
        unsaid=("blocks of ggml's own types",) if not set(kinds) <= set(WIDE) else (),
        castings=tuple(sorted(castings, key=lambda casting: -casting.elements)),
        coverage=_sum([t for t in matrices if t.type not in WIDE]) / elements,
        bits_per_weight=8 * sum(t.size for t in matrices) / elements,
        size_bytes=sum(t.size for t in tensors),
        dtypes=tuple(Counter(t.type for t in tensors).most_common()),
        rounding=None,
        faults=(Fault("truncated", (path.name,), ""),) if is_short else (),
    )


GGUF_EMBEDDINGS = ("token_embd", "position_embd", "token_types")


def _sum(tensors: list[GgufTensor]) -> int:
    return sum(tensor.elements for tensor in tensors)


def _names(tensors: list[GgufTensor]) -> tuple[str, ...]:
    return tuple(tensor.name for tensor in tensors)


def castings_of(matrices: tuple[StoredMatrix, ...]) -> tuple[Casting, ...]:
    kinds: dict[tuple[str, str], list[StoredMatrix]] = {}
    for matrix in matrices:
        text = matrix.cast.text if matrix.cast else _unsayable(matrix)
        kinds.setdefault((text, matrix.packing), []).append(matrix)
    return tuple(
        Casting(*kind, len(alike), sum(m.elements for m in alike), tuple(m.module for m in alike))
        for kind, alike in sorted(kinds.items(), key=lambda item: -sum(m.elements for m in item[1]))
    )


def _unsayable(matrix: StoredMatrix) -> str:
    """What is stored where recipes have no words for it; empty for plain weights."""
    if not matrix.packing:
        return ""
    return f"{matrix.format.name}, no tile" if matrix.format else "codes of another width"


def bytes_of(checkpoint: Opened, matrix: StoredMatrix) -> int:
    """Bytes of a matrix's codes and of all that belongs to them."""
    prefix = f"{matrix.module}."
    names = {matrix.codes, matrix.scale} | {
        f"{prefix}{part}" for part in PARTS if f"{prefix}{part}" in checkpoint.tensors
    }
    stored = [checkpoint.tensors[name] for name in names if name]
    return sum(tensor.end - tensor.begin for tensor in stored)


CAST_GROUPS = (ATTENTION, MLP, EXPERTS)  # which a recipe casts unless it says otherwise
PARTS = (
    "weight_global_scale", "weight_scale_2", "weight_zero_point", "weight_shape", "weight_g_idx", "qzeros", "g_idx",
)  # fmt: skip


def recipe_of(matrices: tuple[StoredMatrix, ...], claim: Quantization | None) -> str:
    """The recipe of what is stored: the commonest cast for all, overrides by the last word of the names, and skips."""
    cast = [matrix for matrix in matrices if matrix.packing]
    kv = claim.kv if claim else None
    if not cast:
        return Recipe(kv=kv).text
    if any(matrix.cast is None for matrix in cast):
        return ""
    kinds = Counter(_pair(matrix) for matrix in cast)
    (weights, activations), _ = kinds.most_common(1)[0]
    blocks = [matrix for matrix in matrices if matrix.packing or group_of(matrix.module) in CAST_GROUPS]
    blocks = [matrix for matrix in blocks if not is_head(matrix)]
    overrides: list[Override] = []
    skip: list[str] = []
    for word in sorted({_word(matrix) for matrix in blocks}):
        alike = [matrix for matrix in blocks if _word(matrix) == word]
        whole = len({_pair(matrix) if matrix.packing else None for matrix in alike}) == 1
        for matrix in alike[:1] if whole else alike:
            pattern = f"*.{word}" if whole else matrix.module
            skip += [pattern] if not matrix.packing else []
            overrides += _overrides(pattern, matrix, (weights, activations)) if matrix.packing else []
    also = ("lm_head",) if any(is_head(matrix) for matrix in cast) else ()
    return Recipe(
        weights=weights, activations=activations, kv=kv, also=also, skip=tuple(skip), overrides=tuple(overrides)
    ).text


def _pair(matrix: StoredMatrix) -> tuple[Cast | None, Cast | None]:
    return matrix.cast, matrix.claim.activations if matrix.claim else None


def _word(matrix: StoredMatrix) -> str:
    return matrix.module.rpartition(".")[2]


def _overrides(pattern: str, matrix: StoredMatrix, usual: tuple[Cast | None, Cast | None]) -> list[Override]:
    return [
        Override(key, pattern, own)
        for key, own, common in zip("wa", _pair(matrix), usual, strict=True)
        if own != common
    ]


def _unsaid(matrices: tuple[StoredMatrix, ...], claim: Quantization | None) -> tuple[str, ...]:
    groups: list[StoredGroup] = list(claim.groups) if claim else []
    texts = [text for group in groups for text in group.unsaid]
    if any(matrix.rule.stored == "e8m0" for matrix in matrices if matrix.packing):
        texts.append("by which rule powers of two were chosen is not stored")
    return tuple(dict.fromkeys(texts))
