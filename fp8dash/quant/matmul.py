"""Products of cast operands: emulated on any device, native where a kernel takes the codes. Torch only.

Emulated: cast, decode, multiply in the working precision. Native: the kernel multiplies the codes, accumulates, then
scales. The two differ by the working precision's rounding and the accumulator's alone. Layouts of scales are those
that torch 2.13 checks (`torch/_meta_registrations.py`, `aten/src/ATen/native/cuda/ScaledBlas.cpp`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8dash.choose.hardware import SCALED_MM
from fp8dash.choose.scaling import BLOCK_128X128, GROUP_1X32, GROUP_1X128, TENSOR
from fp8dash.errors import KernelRefused
from fp8dash.quant.cast import Quantized

CUDA_INT_ROWS = 17  # torch's CUDA int8 product refuses 16 rows or fewer
BLOCK_ROWS = 4  # cuBLASLt's block-wise kernels want M a multiple of this (vLLM pull request 49932)


@dataclass(frozen=True, slots=True)
class Operand:
    """One side of torch.scaled_mm: codes, and scales in the order and layout that its kernel reads."""

    codes: Tensor
    scales: Tensor
    kind: F.ScalingType
    swizzle: F.SwizzleType | None = None


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
            f"{str(error).splitlines()[0]} (torch); closest alternative: the backend emulated."
        ) from error


def activation_operand(q: Quantized) -> Operand:
    """The left operand, [M, K]. Block-wise, M is filled up to a multiple of 4 with zeros, and so are the scales."""
    if q.cast.tile != GROUP_1X128:
        return _operand(q)
    codes, scales = q.codes, q.scales
    if missing := -codes.shape[0] % BLOCK_ROWS:
        codes = F.pad(codes.view(torch.uint8), (0, 0, 0, missing)).view(codes.dtype)
        scales = F.pad(scales, (0, 0, 0, missing))
    return Operand(codes, _outer_major(scales), F.ScalingType.BlockWise1x128)


def weight_operand(q: Quantized) -> Operand:
    """The right operand, [K, N], of a weight's [N, K] codes."""
    if q.cast.tile == BLOCK_128X128:
        return Operand(q.codes.t(), _block_scales(q.scales), F.ScalingType.BlockWise128x128)
    if q.cast.tile == GROUP_1X128:
        return Operand(q.codes.t(), _outer_major(q.scales), F.ScalingType.BlockWise1x128)
    operand = _operand(q)
    scales = operand.scales.t() if operand.kind == F.ScalingType.RowWise else operand.scales
    return Operand(q.codes.t(), scales, operand.kind, operand.swizzle)


def scaled_mm(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """The kernel itself, on operands laid out for it: [M, N] in `dtype`."""
    return F.scaled_mm(
        a.codes,
        b.codes,
        a.scales,
        a.kind,
        b.scales,
        b.kind,
        swizzle_a=a.swizzle,
        swizzle_b=b.swizzle,
        output_dtype=dtype,
    )


def swizzled(scales: Tensor) -> Tensor:
    """E8M0 codes of [rows, groups] scales in cuBLASLt's 32_4_4 order: flat, filled up to whole tiles of 128 x 4.

    Tiles follow each other along the groups; in a tile the scale of row r and group g is at
    (r % 32) * 16 + (r // 32) * 4 + g (cuBLAS, "1D Block Scaling Factors Layout").

    >>> swizzled(torch.full((128, 4), 2.0)).view(torch.uint8).unique().tolist(), swizzled(torch.ones(1, 5)).shape
    ([128], torch.Size([1024]))
    """
    codes = scales.to(torch.float8_e8m0fnu).view(torch.uint8)
    rows, groups = codes.shape
    codes = F.pad(codes, (0, -groups % 4, 0, -rows % 128))
    tiles = codes.view(-1, 4, 32, codes.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)  # [row tile, group tile, 32, 4, 4]
    return tiles.reshape(-1).view(torch.float8_e8m0fnu)


def _operand(q: Quantized) -> Operand:
    """Codes and scales whose layout is the same on either side."""
    if q.cast.tile == TENSOR:
        return Operand(q.codes, q.scales.view(()), F.ScalingType.TensorWise)
    if q.cast.tile == GROUP_1X32:
        return Operand(q.codes, swizzled(q.scales), F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4)
    return Operand(q.codes, q.scales, F.ScalingType.RowWise)


def _outer_major(scales: Tensor) -> Tensor:
    """Scales [rows, groups] with strides (1, rows), as 1x128 tiles must have them."""
    return scales.t().contiguous().t()


def _block_scales(scales: Tensor) -> Tensor:
    """Scales [N / 128, K / 128] as [groups of K, N / 128] with strides (1, groups), groups filled up by fours."""
    missing = -scales.shape[1] % 4
    return (F.pad(scales, (0, missing)) if missing else scales.contiguous()).t()


def _scaled_mm(x: Quantized, w: Quantized, dtype: torch.dtype) -> Tensor:
    return scaled_mm(activation_operand(x), weight_operand(w), dtype)[: len(x.codes)]


def _int_mm(x: Quantized, w: Quantized, dtype: torch.dtype) -> Tensor:
    codes, rows = x.codes, x.codes.shape[0]
    if codes.is_cuda and rows < CUDA_INT_ROWS:
        codes = F.pad(codes, (0, 0, 0, CUDA_INT_ROWS - rows))
    sums = torch._int_mm(codes, w.codes.t())[:rows]
    return sums.to(torch.float32).mul_(x.scales).mul_(w.scales.view(1, -1)).to(dtype)
