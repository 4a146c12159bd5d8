"""Integer codes out of the words that checkpoints pack them in, with their zero points and groups. Numpy, no torch.

Layouts: compressed-tensors 0.20 `compressors/pack_quantized`; AutoGPTQ `nn_modules/qlinear` and GPTQModel, whose
second version no longer stores zero points less one; AutoAWQ `modules/linear/gemm.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8dash.choose.models.quantized import AWQ, GPTQ, WORDS
from fp8dash.model.xray.matrices import StoredMatrix
from fp8dash.model.xray.tensors import Opened

AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # nibble of each of eight outputs: AutoAWQ, AWQ_PACK_ORDER inverted
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Integers:
    """A matrix of integer codes: value = (code - zero) * scale, zero and scale by row and group."""

    codes: Array  # int16 [rows, cols]
    zeros: Array  # int16 [rows, groups]
    groups: Array  # [cols]: the group of each column
    scales: Array  # [rows, groups], as float32


def integers_of(checkpoint: Opened, matrix: StoredMatrix, rows: int | None = None) -> Integers:
    """The codes of a matrix packed as WORDS, GPTQ or AWQ whose tensors all have the shapes that they should.

    Of its first `rows` alone where they are given: no others are read.
    """
    bits, rows = matrix.format.bits if matrix.format else 4, min(rows or matrix.rows, matrix.rows)
    codes, zeros = UNPACKERS[matrix.packing](checkpoint, matrix, bits, rows)
    less_one = matrix.packing == GPTQ and (matrix.claim is None or matrix.claim.zeros_less_one)
    if matrix.packing != WORDS and f"{matrix.module}.qzeros" not in checkpoint.tensors:
        zeros = np.full((1, 1), 1 << (bits - 1), np.int16)
    elif less_one:
        zeros = zeros + 1
    scales = checkpoint.values(matrix.scale).astype(np.float32)
    scales = scales.T if matrix.packing in (GPTQ, AWQ) else scales.reshape(matrix.grid)
    scales = scales[:rows]
    return Integers(codes, np.broadcast_to(zeros, scales.shape), _groups(checkpoint, matrix), scales)


def _groups(checkpoint: Opened, matrix: StoredMatrix) -> Array:
    """The group of each column: in their order, unless the checkpoint stores another."""
    count = matrix.grid[1]
    for name in (f"{matrix.module}.g_idx", f"{matrix.module}.weight_g_idx"):
        if name in checkpoint.tensors:
            stored = checkpoint.values(name).astype(np.int64)
            if stored.shape == (matrix.cols,) and stored.min(initial=0) >= 0 and stored.max(initial=0) < count:
                return stored
    width = matrix.tile.cols if matrix.tile and matrix.tile.cols else matrix.cols
    return np.minimum(np.arange(matrix.cols) // width, count - 1)


def _words(checkpoint: Opened, matrix: StoredMatrix, bits: int, rows: int) -> tuple[Array, Array]:
    half = 1 << (bits - 1)
    codes = unpacked(checkpoint.raw(matrix.codes)[:rows], bits)[:, : matrix.cols] - half
    name = f"{matrix.module}.weight_zero_point"
    if name not in checkpoint.tensors:
        return codes, np.zeros((1, 1), np.int16)
    zeros = checkpoint.raw(name)  # int32 [rows * bits / 32, groups]: packed along the rows
    return codes, unpacked(zeros.T, bits).T[:rows] - half


def _gptq(checkpoint: Opened, matrix: StoredMatrix, bits: int, rows: int) -> tuple[Array, Array]:
    codes = unpacked(checkpoint.raw(matrix.codes)[:, :rows].T, bits)
    return codes, _zeros(checkpoint, matrix, bits, rows)


def _awq(checkpoint: Opened, matrix: StoredMatrix, bits: int, rows: int) -> tuple[Array, Array]:
    words = checkpoint.raw(matrix.codes)[:, : -(-rows * bits // 32)]
    return unpacked(words, bits, AWQ_ORDER).T[:rows], _zeros(checkpoint, matrix, bits, rows, AWQ_ORDER)


def _zeros(checkpoint: Opened, matrix: StoredMatrix, bits: int, rows: int, order: Array | None = None) -> Array:
    """Zero points [rows, groups] of words that are packed along the rows; none where none are stored."""
    name = f"{matrix.module}.qzeros"
    if name not in checkpoint.tensors:
        return np.zeros((1, 1), np.int16)
    return unpacked(checkpoint.raw(name), bits, order).T[:rows]


UNPACKERS: dict[str, Callable[[Opened, StoredMatrix, int, int], tuple[Array, Array]]] = {
    WORDS: _words,
    GPTQ: _gptq,
    AWQ: _awq,
}


def unpacked(words: Array, bits: int, order: Array | None = None) -> Array:
    """Int32 words [rows, n] to unsigned codes [rows, n * 32 / bits] as int16, lowest bits first, or by `order`.

    >>> unpacked(np.array([[0x76543210]], np.int32), 4).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    places = np.arange(32 // bits) if order is None else order
    shifts = (places * bits).astype(np.uint32)
    mask = np.uint32((1 << bits) - 1)
    codes = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & mask
    return codes.reshape(len(words), -1).astype(np.int16)
