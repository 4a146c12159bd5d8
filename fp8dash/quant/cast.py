"""Tensors to codes and scales, and back. Torch only; operands are 2-D, [rows, cols].

Rounding is ties to even after clamping: a bare cast past the maximum differs by format and torch release. A tile of
zeros gives zeros. NaN and infinity are refused by `quantize` and stay loud (NaN) in `round_trip`, which must not wait
for the device; whoever measures checks its result.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8dash.choose.formats import FloatFormat, Format
from fp8dash.choose.recipe import Cast
from fp8dash.choose.scaling import ScaleRule, Tile
from fp8dash.errors import NotFinite

DTYPES = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny  # a subnormal scale would lose bits of its own
BLOCK = {"cpu": 1 << 19, "cuda": 1 << 26}  # elements cast at a time
FRACTION, EXPONENT = 0x007FFFFF, 0x7F800000  # fields of a float32


@dataclass(frozen=True, slots=True)
class Quantized:
    """Codes [rows, cols] in the format's dtype and float32 scales, one per tile; value = code * scale."""

    codes: Tensor
    scales: Tensor
    cast: Cast


def quantize(x: Tensor, cast: Cast) -> Quantized:
    """The codes and scales of a [rows, cols] tensor; raises NotFinite for NaN or infinity."""
    q = codes_of(x, cast)
    if not torch.isfinite(q.scales).all():
        raise NotFinite(f"A tensor of shape {list(x.shape)} holds NaN or infinity and cannot be cast to {cast.text}.")
    return q


def codes_of(x: Tensor, cast: Cast) -> Quantized:
    """As `quantize`, without waiting for the device to say whether x is finite: scales are NaN where it is not."""
    scales = scales_of(x, cast)
    codes = torch.empty_like(x, dtype=DTYPES[cast.format.name])
    for rows, block, factors in _blocks(x, scales, cast.tile):
        scaled = _scaled(block, factors, cast.format)
        scaled = scaled if isinstance(cast.format, FloatFormat) else scaled.round_()
        codes[rows] = _untiled(scaled, x.shape[1])
    return Quantized(codes, scales, cast)


def dequantize(q: Quantized) -> Tensor:
    """The float32 values of codes and scales."""
    return q.codes.to(torch.float32) * spread(q.scales, q.cast.tile, *q.codes.shape)


def round_trip(x: Tensor, cast: Cast) -> Tensor:
    """A [rows, cols] tensor cast and decoded, in its own dtype: the values of `dequantize(quantize(x))`, faster."""
    scales, out = scales_of(x, cast), torch.empty_like(x)
    for rows, block, factors in _blocks(x, scales, cast.tile):
        values = to_grid(_scaled(block, factors, cast.format), cast.format).mul_(factors)
        out[rows] = _untiled(values, x.shape[1])
    return out


def scales_of(x: Tensor, cast: Cast) -> Tensor:
    """Float32 scales of a [rows, cols] tensor, [grid rows, grid cols]: NaN where a tile is not finite."""
    return scale_from_amax(tile_amax(x, cast.tile), cast.format, cast.rule)


def tile_amax(x: Tensor, tile: Tile) -> Tensor:
    """Float32 largest magnitude of each tile of a [rows, cols] tensor: [grid rows, grid cols]."""
    amax = torch.cat([_tiled(x[rows], tile).abs().amax(-1) for rows in _slices(x)])  # [rows, grid cols]
    if tile.rows == 0:
        amax = amax.amax(0, keepdim=True)
    elif tile.rows > 1:
        amax = pad(amax, (0, 0, 0, -len(amax) % tile.rows)).reshape(-1, tile.rows, amax.shape[1]).amax(1)
    return amax.float()


def scale_from_amax(amax: Tensor, fmt: Format, rule: ScaleRule) -> Tensor:
    """The stored scale of each amax, as float32: amax / max, or that rounded up to a power of two."""
    if rule.power_of_two:
        return _round_up_e8m0(amax * (1 / torch.tensor(fmt.max, dtype=torch.float32)).item())
    scales = (amax / fmt.max).clamp_min(SMALLEST_NORMAL)
    return torch.where(amax == 0, 1.0, scales.masked_fill(~torch.isfinite(amax), torch.nan))


def to_grid(y: Tensor, fmt: Format) -> Tensor:
    """Scaled float32 values rounded to the nearest code's value, ties to even; NaN stays. Works in place.

    Adding 1.5 * 2^(e + 23 - m) leaves float32 no bits below 2^(e - m), a code's step at exponent e, so its own
    rounding does the work; taking it off again is exact.
    """
    if not isinstance(fmt, FloatFormat):
        return y.round_()
    lowest = (127 + fmt.min_exponent) << 23  # below the normals, codes are as far apart as in their first binade
    anchor = y.view(torch.int32).bitwise_and(EXPONENT).clamp_(min=lowest)
    anchor = anchor.add_(((23 - fmt.mantissa_bits) << 23) | (1 << 22)).view(torch.float32)
    return y.add_(anchor).sub_(anchor)


def spread(scales: Tensor, tile: Tile, rows: int, cols: int) -> Tensor:
    """Scales [grid rows, grid cols] in a shape that multiplies a [rows, cols] tensor."""
    scales = _by_row(scales, tile, rows)
    return scales.repeat_interleave(tile.cols, dim=1)[:, :cols] if tile.cols > 1 else scales


def _by_row(scales: Tensor, tile: Tile, rows: int) -> Tensor:
    """Scales [grid rows, grid cols] as [rows or 1, grid cols]."""
    return scales.repeat_interleave(tile.rows, dim=0)[:rows] if tile.rows > 1 else scales


def _slices(x: Tensor) -> Iterator[slice]:
    """Rows whose float32 copies stay in a CPU's cache, or small beside a GPU's memory."""
    height = max(1, BLOCK.get(x.device.type, BLOCK["cuda"]) // x.shape[1])
    return (slice(start, start + height) for start in range(0, len(x), height))


def _blocks(x: Tensor, scales: Tensor, tile: Tile) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows, the tiles in them [rows, grid cols, width], and their scales [rows or 1, grid cols, 1]."""
    factors = _by_row(scales, tile, len(x))[..., None]
    for rows in _slices(x):
        yield rows, _tiled(x[rows], tile), factors if len(factors) == 1 else factors[rows]


def _tiled(x: Tensor, tile: Tile) -> Tensor:
    """x [rows, cols] as [rows, grid cols, width]; a ragged edge is padded with zeros, which change no amax."""
    width = tile.cols or x.shape[1]
    ragged = -x.shape[1] % width
    return (pad(x, (0, ragged)) if ragged else x).reshape(len(x), -1, width)


def _untiled(x: Tensor, cols: int) -> Tensor:
    """The inverse of `_tiled`."""
    return x.flatten(1)[:, :cols]


def _scaled(block: Tensor, factors: Tensor, fmt: Format) -> Tensor:
    """A new float32 tensor: a block over its scales, clamped to the format's range."""
    return (block / factors).clamp_(-fmt.max, fmt.max)


def _round_up_e8m0(x: Tensor) -> Tensor:
    """Each float32 rounded up to 2^-127 ... 2^127, as Transformer Engine's float_to_e8m0: bits, never log2."""
    bits = x.view(torch.int32)
    exponent, fraction = bits >> 23, bits & FRACTION
    halfway = (exponent == 0) & (fraction <= 1 << 22)  # at most 2^-127, which is the smallest scale
    exponent = (exponent + ((fraction != 0) & ~halfway)).clamp(max=254)
    power = torch.where(exponent == 0, 1 << 22, exponent << 23).to(torch.int32).view(torch.float32)
    return power.masked_fill(~torch.isfinite(x), torch.nan)
