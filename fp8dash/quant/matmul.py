"""Products of cast operands: emulated on any device, native where a kernel takes the codes. Torch only.

Emulated: cast, decode, multiply in the working precision. Native: the kernel multiplies the codes, accumulates, then
scales. The two differ by the working precision's rounding alone.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8dash.choose.hardware import SCALED_MM
from fp8dash.choose.recipe import Cast
from fp8dash.choose.scaling import TENSOR
from fp8dash.errors import KernelRefused
from fp8dash.quant.cast import Quantized, codes_of, round_trip

CUDA_INT_ROWS = 17  # torch's CUDA int8 product refuses 16 rows or fewer


class ActivationCast:
    """Casts a model's activations, each tensor once: q, k and v read the same input, and so do gate and up.

    The last tensor is recognised by identity and version, so that one changed in place is cast anew.
    """

    def __init__(self, cast: Cast) -> None:
        """A caster that has seen nothing yet."""
        self.cast = cast
        self._seen: tuple[Tensor, int] | None = None
        self._emulated: Tensor | None = None
        self._native: Quantized | None = None

    def emulated(self, x: Tensor) -> Tensor:
        """x [..., features] cast and decoded, in its own dtype and shape."""
        self._look_at(x)
        if self._emulated is None:
            self._emulated = round_trip(x.reshape(-1, x.shape[-1]), self.cast).view(x.shape)
        return self._emulated

    def native(self, x: Tensor) -> Quantized:
        """Codes [tokens, features] and scales of x [..., features]; NaN where x is not finite."""
        self._look_at(x)
        if self._native is None:
            self._native = codes_of(x.reshape(-1, x.shape[-1]), self.cast)
        return self._native

    def _look_at(self, x: Tensor) -> None:
        if self._seen is None or self._seen[0] is not x or self._seen[1] != x._version:
            self._seen, self._emulated, self._native = (x, x._version), None, None


def multiply(x: Quantized, w: Quantized, kernel: str, dtype: torch.dtype) -> Tensor:
    """x [M, K] by w [N, K] transposed through a native kernel: [M, N] in `dtype`; raises KernelRefused."""
    try:
        return _scaled_mm(x, w, dtype) if kernel == SCALED_MM else _int_mm(x, w, dtype)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        (m, k), n = x.codes.shape, w.codes.shape[0]
        raise KernelRefused(
            f"The native kernel {kernel} refused M={m}, K={k}, N={n} for {x.cast.text} by {w.cast.text}: "
            f"{str(error).splitlines()[0]} Choose the emulated backend."
        ) from error


def _scaled_mm(x: Quantized, w: Quantized, dtype: torch.dtype) -> Tensor:
    kind = F.ScalingType.TensorWise if x.cast.tile == TENSOR else F.ScalingType.RowWise
    x_scales, w_scales = (q.scales.view(()) if kind == F.ScalingType.TensorWise else q.scales for q in (x, w))
    return F.scaled_mm(x.codes, w.codes.t(), x_scales, kind, w_scales.t(), kind, output_dtype=dtype)


def _int_mm(x: Quantized, w: Quantized, dtype: torch.dtype) -> Tensor:
    codes, rows = x.codes, x.codes.shape[0]
    if codes.is_cuda and rows < CUDA_INT_ROWS:
        codes = F.pad(codes, (0, 0, 0, CUDA_INT_ROWS - rows))
    sums = torch._int_mm(codes, w.codes.t())[:rows]
    return sums.to(torch.float32).mul_(x.scales).mul_(w.scales.view(1, -1)).to(dtype)
