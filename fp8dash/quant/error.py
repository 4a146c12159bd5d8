"""What casting cost a tensor: sums over its elements, taken block by block while it is cast. Torch only.

Weights are cast where they lie: a checkpoint is mapped, and the pages of a weight that is dropped stay in memory until
the whole file is.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8dash.choose.casts import Cast
from fp8dash.quant.cast import Quantized, blocks_of_codes, blocks_of_values, code_dtype, decode, finite_scales_of

ROUNDING = 1 + 2**-20  # amax / (amax / max) may exceed max by float32's rounding: that is no clipping

SAFE_EXPONENT = 30  # of a largest magnitude whose squares are far from float32's ends
ROWS_AT_ONCE = 1024  # of weights whose float32 copies are compared
MOST_EXPONENT = 126  # of a power of two that float32 holds, and its inverse


@dataclass(slots=True)
class CastError:
    """Energies in float64, and counts of flushed, clipped and non-zero elements."""

    signal: float = 0.0
    noise: float = 0.0
    flushed: int = 0
    clipped: int = 0
    nonzero: int = 0
    elements: int = 0

    def add(self, other: "CastError") -> None:
        """Adds another's sums."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def sqnr_db(self) -> float | None:
        """Signal over noise in dB; None where there is no noise or no signal."""
        return 10 * math.log10(self.signal / self.noise) if self.signal and self.noise else None

    @property
    def relative_error(self) -> float:
        """Norm of the error over the norm of the tensor; 0 for a tensor of zeros."""
        return math.sqrt(self.noise / self.signal) if self.signal else 0.0

    @property
    def flushed_share(self) -> float:
        """Share of the non-zero elements that became zero."""
        return self.flushed / max(1, self.nonzero)

    @property
    def clipped_share(self) -> float:
        """Share of the elements beyond the largest code."""
        return self.clipped / max(1, self.elements)


def error_of_cast(x: Tensor, cast: Cast) -> CastError:
    """The error that casting a [rows, cols] tensor makes, x untouched; raises NotFinite."""
    error = CastError(elements=x.numel())
    for _, before, after, factors in blocks_of_values(x, cast):
        _watch(error, before, after, factors, cast)
    return error


def error_between(before: Tensor, after: Tensor) -> CastError:
    """The error of weights [rows, cols] that somebody else cast and decoded; what they clipped cannot be known."""
    error = CastError(elements=before.numel())
    for start in range(0, len(before), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        x, y = before[rows].float(), after[rows].float()
        alive = x != 0
        error.signal += energy(x)
        error.noise += energy(x - y)
        error.flushed += int((alive & (y == 0)).sum())
        error.nonzero += int(alive.sum())
    return error


def cast_in_place(x: Tensor, cast: Cast, outer: Tensor | None = None) -> CastError:
    """Casts and decodes a [rows, cols] tensor where it lies, and tells the error; raises NotFinite, x untouched.

    No second copy of it is made: a block's float32 values, whose error is taken, are all that is held beside it.
    """
    error = CastError(elements=x.numel())
    for rows, before, after, factors in blocks_of_values(x, cast, outer):
        _watch(error, before, after, factors, cast)
        x[rows] = after.flatten(1)[:, : x.shape[1]].to(x.dtype)
    return error


def codes_in_place(x: Tensor, cast: Cast, outer: Tensor | None = None) -> tuple[Quantized, CastError]:
    """The codes and scales of a [rows, cols] tensor, and their error; raises NotFinite, x untouched.

    On a CPU the codes take the first bytes of x's own memory, and x is lost. A GPU maps no files: codes are new there,
    and x's memory is free once x is dropped.
    """
    scales, outer = finite_scales_of(x, cast, outer)
    q, error = Quantized(_room_for_codes(x, cast), scales, cast, outer), CastError(elements=x.numel())
    for rows, before, codes, factors in blocks_of_codes(x, q.factors, cast):
        _watch(error, before, decode(codes, cast.format) * factors, factors, cast)
        q.codes[rows] = codes.flatten(1)[:, : x.shape[1]]  # lies below the rows that are still to be read
    return q, error


def _room_for_codes(x: Tensor, cast: Cast) -> Tensor:
    dtype = code_dtype(cast.format)
    if x.device.type != "cpu" or not x.is_contiguous():
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    return x.view(-1).view(torch.uint8)[: x.numel()].view(dtype).view(x.shape)


def energy(x: Tensor) -> float:
    """The sum of a float32 tensor's squares, in float64.

    Float32 has no square of 1e-22 or of 1e20: those are taken of x over a power of two, which changes no other digit.
    """
    peak = float(torch.linalg.vector_norm(x, math.inf)) if x.numel() else 0.0
    exponent = math.frexp(peak)[1] if math.isfinite(peak) else 0
    if abs(exponent) <= SAFE_EXPONENT:
        return float(x.square().sum(dtype=torch.float64))
    unit = 2.0 ** max(-MOST_EXPONENT, min(MOST_EXPONENT, exponent))
    return float((x * (1 / unit)).square().sum(dtype=torch.float64)) * unit**2


def _watch(sums: CastError, before: Tensor, after: Tensor, factors: Tensor, cast: Cast) -> None:
    """Adds a block; zeros that pad a ragged edge add nothing."""
    before = before.float()
    alive = before != 0
    sums.signal += energy(before)
    sums.noise += energy(before - after)
    sums.flushed += int((alive & (after == 0)).sum())
    sums.clipped += int((before.abs() > factors * (cast.format.max * ROUNDING)).sum())
    sums.nonzero += int(alive.sum())
