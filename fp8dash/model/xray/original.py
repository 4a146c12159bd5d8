"""Whether packed four-bit codes are plain rounding or were chosen: by the weights that they were made from.

Under its stored scale and zero point, plain rounding gives each weight the nearest code. GPTQ and AutoRound move codes
to make up for other codes' errors, AWQ scales the weights first: there many codes are others than rounding's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8dash.choose.formats import INT4
from fp8dash.choose.models.quantized import AWQ, GPTQ, WORDS
from fp8dash.model.xray.matrices import StoredMatrix
from fp8dash.model.xray.tensors import WIDE, Opened

ROWS = 128  # of each matrix that are compared
ROUNDED = 0.995  # share from which codes count as rounded: scales that were rounded to 16 bits afterwards flip a few
HALF = 0.5 + 2**-5  # of a step: compressed-tensors divides in bfloat16, whose quotients up to 16 are off by as much
AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # nibble of each of eight outputs: AutoAWQ, AWQ_PACK_ORDER inverted
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class RoundedShare:
    """How the codes of packed int4 compare with plain rounding of the original's weights."""

    matrices: int  # compared
    share: float  # of their codes that rounding gives, over the first rows of each
    least: float  # of one matrix

    @property
    def is_plain(self) -> bool:
        return self.least >= ROUNDED


def rounding_of(checkpoint: Opened, matrices: tuple[StoredMatrix, ...], original: Opened) -> RoundedShare | None:
    """How codes compare with the original's weights; None where no packed int4 has its weight there."""
    shares = list(_shares(checkpoint, matrices, original))
    return RoundedShare(len(shares), float(np.mean(shares)), min(shares)) if shares else None


def _shares(checkpoint: Opened, matrices: tuple[StoredMatrix, ...], original: Opened) -> Iterator[float]:
    for matrix in matrices:
        name = f"{matrix.module}.weight"
        stored = original.tensors.get(name)
        if matrix.format != INT4 or matrix.tile is None or stored is None or stored.dtype not in WIDE:
            continue
        if (
            stored.shape != (matrix.rows, matrix.cols)
            or not original.raw(name).size
            or not _is_whole(checkpoint, matrix)
        ):
            continue
        rows = min(ROWS, matrix.rows)
        weights = _rows(original, name, rows)
        yield max(_rounded(weights, each, zeros, codes) for codes, each, zeros in _unpacked(checkpoint, matrix, rows))


def _is_whole(checkpoint: Opened, matrix: StoredMatrix) -> bool:
    """Whether codes, scales and zero points have the shapes and types by which they can be unpacked together."""
    if f"{matrix.module}.weight_zero_point" in checkpoint.tensors:
        return False  # packed zero points of compressed-tensors are not read
    rows, cols, groups = matrix.rows, matrix.cols, matrix.grid[1]
    due = {
        WORDS: {"weight_packed": (rows, -(-cols // 8)), "weight_scale": matrix.grid},
        GPTQ: {"qweight": (cols // 8, rows), "scales": (groups, rows), "qzeros": (groups, rows // 8)},
        AWQ: {"qweight": (cols, rows // 8), "scales": (groups, rows), "qzeros": (groups, rows // 8)},
    }[matrix.packing]
    for part, shape in due.items():
        name = f"{matrix.module}.{part}"
        tensor = checkpoint.tensors.get(name)
        if tensor is None and part == "qzeros":
            continue
        dtypes = WIDE if "scale" in part else ("I32",)
        if tensor is None or tensor.shape != shape or tensor.dtype not in dtypes or not checkpoint.raw(name).size:
            return False
    return matrix.grid[0] == rows and bool((checkpoint.values(matrix.scale) > 0).all())


def _rounded(weights: Array, scales: Array, zeros: Array, codes: Array) -> float:
    """The share of codes that lie half a step at most from their weight; a tie may fall either way."""
    steps = np.clip(weights / scales + zeros, 0, 15)
    return float(np.mean(np.abs(steps - codes) <= HALF))


def _rows(checkpoint: Opened, name: str, rows: int) -> Array:
    """The first rows of a matrix, as float64."""
    raw = np.asarray(checkpoint.raw(name)[:rows])
    if checkpoint.tensors[name].dtype == "BF16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(raw, np.float64)


def _unpacked(checkpoint: Opened, matrix: StoredMatrix, rows: int) -> Iterator[tuple[Array, Array, Array]]:
    """Codes 0 ... 15 [rows, cols], and the scale and zero point of each; two readings where files do not tell which."""
    words, scales = checkpoint.raw(matrix.codes), checkpoint.values(matrix.scale)
    groups = _groups(checkpoint, matrix)
    if matrix.packing == WORDS:
        codes = nibbles(np.asarray(words[:rows])).reshape(rows, -1)[:, : matrix.cols]
        each = scales.reshape(matrix.grid)[:rows][:, groups]
        yield codes, each, np.full((1, 1), 8)
        return
    scales = scales.reshape(matrix.grid[1], matrix.grid[0])[:, :rows].T[:, groups]
    zeros = checkpoint.raw(f"{matrix.module}.qzeros") if f"{matrix.module}.qzeros" in checkpoint.tensors else None
    if matrix.packing == AWQ:
        codes = nibbles(np.asarray(words))[..., AWQ_ORDER].reshape(matrix.cols, -1)[:, :rows].T
        points = nibbles(np.asarray(zeros))[..., AWQ_ORDER].reshape(len(zeros), -1) if zeros is not None else None
        yield codes, scales, points[:, :rows].T[:, groups] if points is not None else np.full((1, 1), 8)
        return
    codes = nibbles(np.asarray(words)).transpose(0, 2, 1).reshape(matrix.cols, -1)[:, :rows].T
    points = nibbles(np.asarray(zeros)).reshape(len(zeros), -1)[:, :rows].T[:, groups] if zeros is not None else None
    for offset in (1, 0):  # the first GPTQ format stores a zero point less one, gptq_v2 as it is
        yield codes, scales, points + offset if points is not None else np.full((1, 1), 8)


def nibbles(words: Array) -> Array:
    """Each int32 as its eight nibbles, the low one first, in a new last axis.

    >>> nibbles(np.array([0x7654F210], np.int64)).tolist()
    [[0, 1, 2, 15, 4, 5, 6, 7]]
    """
    split: Array = np.right_shift(words[..., None], np.arange(0, 32, 4))
    return np.bitwise_and(split, 0xF, out=split)


def _groups(checkpoint: Opened, matrix: StoredMatrix) -> Array:
    """The group of each column: by g_idx where the columns were ordered, else by their place."""
    name = f"{matrix.module}.g_idx"
    order = checkpoint.tensors.get(name)
    ordered = order is not None and (order.shape, order.dtype) == ((matrix.cols,), "I32")
    if matrix.packing == GPTQ and ordered and checkpoint.raw(name).size:
        groups: Array = np.clip(checkpoint.values(name), 0, matrix.grid[1] - 1)
        return groups
    width = matrix.tile.cols if matrix.tile and matrix.tile.cols else matrix.cols
    return np.minimum(np.arange(matrix.cols) // width, matrix.grid[1] - 1)
