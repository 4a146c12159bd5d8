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
from fp8dash.model.xray.codes import Integers, integers_of
from fp8dash.model.xray.matrices import StoredMatrix
from fp8dash.model.xray.tensors import WIDE, Opened

ROWS = 128  # of each matrix that are compared
ROUNDED = 0.995  # share from which codes count as rounded: scales that were rounded to 16 bits afterwards flip a few
HALF = 0.5 + 2**-5  # of a step: compressed-tensors divides in bfloat16, whose quotients up to 16 are off by as much
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
        yield _rounded(_rows(original, name, ROWS), integers_of(checkpoint, matrix, ROWS), matrix.packing)


def _is_whole(checkpoint: Opened, matrix: StoredMatrix) -> bool:
    """Whether codes, scales and zero points have the shapes and types by which they can be unpacked together."""
    rows, cols, groups = matrix.rows, matrix.cols, matrix.grid[1]
    due = {
        WORDS: {
            "weight_packed": (rows, -(-cols // 8)),
            "weight_scale": matrix.grid,
            "weight_zero_point": (-(-rows // 8), groups),
        },
        GPTQ: {"qweight": (cols // 8, rows), "scales": (groups, rows), "qzeros": (groups, rows // 8)},
        AWQ: {"qweight": (cols, rows // 8), "scales": (groups, rows), "qzeros": (groups, rows // 8)},
    }[matrix.packing]
    for part, shape in due.items():
        name = f"{matrix.module}.{part}"
        tensor = checkpoint.tensors.get(name)
        if tensor is None and "zero" in part:
            continue
        dtypes = WIDE if "scale" in part else ("I32",)
        if tensor is None or tensor.shape != shape or tensor.dtype not in dtypes or not checkpoint.raw(name).size:
            return False
    return matrix.grid[0] == rows and bool((checkpoint.values(matrix.scale) > 0).all())


def _rounded(weights: Array, stored: Integers, packing: str) -> float:
    """The share of codes that lie half a step at most from their weight; a tie may fall either way."""
    least = -8 if packing == WORDS else 0
    steps = weights / stored.scales[:, stored.groups] + stored.zeros[:, stored.groups]
    return float(np.mean(np.abs(np.clip(steps, least, least + 15) - stored.codes) <= HALF))


def _rows(checkpoint: Opened, name: str, rows: int) -> Array:
    """The first rows of a matrix, as float64."""
    raw = np.asarray(checkpoint.raw(name)[:rows])
    if checkpoint.tensors[name].dtype == "BF16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(raw, np.float64)
