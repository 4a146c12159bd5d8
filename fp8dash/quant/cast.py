"""Tensors to codes and scales, and back. Torch only; operands are 2-D, [rows, cols].

Rounding is ties to even after clamping: a bare cast past the maximum differs by format and torch release. A tile of
zeros gives zeros. NaN and infinity are refused by `quantize` and stay loud (NaN) in `round_trip`, which must not wait
for the device; whoever measures checks its result.

Tensors are cast in blocks that a CPU's cache holds, and all blocks of a tensor take turns in the same memory: fetching
new pages for each costs more than the arithmetic.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8dash.choose.casts import Cast
from fp8dash.choose.formats import E4M3FN, FloatFormat, Format
from fp8dash.choose.scaling import ERROR_POWER, FRACTION, SHRINK_STEP, SHRINKS, Tile
from fp8dash.errors import NotFinite

DTYPES = {  # of codes; those of the other formats are uint8, one a byte
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
    "int8": torch.int8,
    "int4": torch.int8,
}
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny  # a subnormal scale would lose bits of its own
BLOCK = {"cpu": 1 << 19, "cuda": 1 << 26}  # elements cast at a time
SHORT = 64  # elements of a row below which a CPU takes ten times longer to reduce 16-bit numbers than 32-bit ones
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # as wide as floats of so many bytes
EXPONENT = 0x7F800000  # a float32's exponent field


@dataclass(frozen=True, slots=True)
class Quantized:
    """Codes [rows, cols] in the format's dtype, and scales [grid rows, grid cols] as stored, in float32.

    value = code * scale, times `outer` [1, 1] where the rule is two-level.
    """

    codes: Tensor
    scales: Tensor
    cast: Cast
    outer: Tensor | None = None

    @property
    def factors(self) -> Tensor:
        """The whole factor of each tile."""
        return _whole(self.scales, self.outer)


def quantize(x: Tensor, cast: Cast, outer: Tensor | None = None) -> Quantized:
    """The codes and scales of a [rows, cols] tensor, under an outer scale [1, 1] where it is not its own.

    Raises NotFinite for NaN or infinity.
    """
    q = codes_of(x, cast, outer)
    _refuse_not_finite(q.scales, x, cast)
    return q


def codes_of(x: Tensor, cast: Cast, outer: Tensor | None = None) -> Quantized:
    """As `quantize`, without waiting for the device to say whether x is finite: scales are NaN where it is not."""
    return codes_by(x, *scales_of(x, cast, outer), cast)


def codes_by(x: Tensor, scales: Tensor, outer: Tensor | None, cast: Cast) -> Quantized:
    """The codes of a [rows, cols] tensor by given stored scales [grid rows, grid cols] and outer scale [1, 1]."""
    codes = torch.empty(x.shape, dtype=code_dtype(cast.format), device=x.device)
    for rows, _, block, _ in blocks_of_codes(x, _whole(scales, outer), cast):
        codes[rows] = _untiled(block, x.shape[1])
    return Quantized(codes, scales, cast, outer)


def dequantize(q: Quantized) -> Tensor:
    """The float32 values of codes and scales."""
    return decode(q.codes, q.cast.format) * spread(q.factors, q.cast.tile, *q.codes.shape)


def round_trip(x: Tensor, cast: Cast, outer: Tensor | None = None) -> Tensor:
    """A [rows, cols] tensor cast and decoded, in its own dtype: the values of `dequantize(quantize(x))`, faster."""
    return rounded(x, _whole(*scales_of(x, cast, outer)), cast)


def rounded(x: Tensor, factors: Tensor, cast: Cast) -> Tensor:
    """A [rows, cols] tensor cast with given factors [grid rows, grid cols] and decoded, in its own dtype."""
    out = torch.empty_like(x)
    for rows, _, values, _ in _blocks_of_values(x, factors, cast):
        out[rows] = _untiled(values, x.shape[1])
    return out


def blocks_of_values(
    x: Tensor, cast: Cast, outer: Tensor | None = None
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Rows of a [rows, cols] tensor, its tiles in them [rows, grid cols, width], the same cast and decoded in float32,
    and their factors [rows or 1, grid cols, 1]; raises NotFinite before the first. The values hold until the next."""
    return _blocks_of_values(x, _whole(*finite_scales_of(x, cast, outer)), cast)


def blocks_of_codes(x: Tensor, factors: Tensor, cast: Cast) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """As `blocks_of_values`, with the codes of each block in place of its values, by given factors."""
    for rows, block, scaled, own in _scaled_blocks(x, factors, cast):
        yield rows, block, encode(scaled, cast.format), own


def finite_scales_of(x: Tensor, cast: Cast, outer: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """As `scales_of`; raises NotFinite."""
    scales, outer = scales_of(x, cast, outer)
    _refuse_not_finite(scales, x, cast)
    return scales, outer


def scales_of(x: Tensor, cast: Cast, outer: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Stored scales [grid rows, grid cols] and the outer scale [1, 1] of a tensor, float32: NaN where not finite.

    The outer scale is the tensor's own unless another is given, which must not be smaller.
    """
    amax = tile_amax(x, cast.tile)
    if cast.rule.outer:
        outer = outer_of(amax, cast) if outer is None else outer
        return _inner(amax, outer, cast), outer
    if cast.rule.name == "mse":
        return _searched(x, amax, cast), None
    return scale_from_amax(amax, cast), None


def factors_under(x: Tensor, outer: Tensor, cast: Cast) -> Tensor:
    """The whole factors [grid rows, grid cols] of a tensor whose outer scale [1, 1] is given; NaN where not finite."""
    return _whole(_inner(tile_amax(x, cast.tile), outer, cast), outer)


def tile_amax(x: Tensor, tile: Tile) -> Tensor:
    """Float32 largest magnitude of each tile of a [rows, cols] tensor: [grid rows, grid cols].

    Without their signs, floats are in the order of their bits, NaN above all: integers are reduced faster.
    """
    kind = torch.float32 if (tile.cols or x.shape[1]) < SHORT else x.dtype
    integer = INTEGERS[kind.itemsize]
    by_row = torch.empty(len(x), tile.grid(*x.shape)[1], dtype=integer, device=x.device)
    room = None
    for rows in _slices(x):
        block = _tiled(x[rows], tile)
        room = _room(room, block, kind)
        sizes = room.copy_(block).view(integer).bitwise_and_(torch.iinfo(integer).max)
        torch.amax(sizes, dim=-1, out=by_row[rows])
    return _over_rows(by_row, tile, torch.amax).view(kind).to(torch.float32)


def scale_from_amax(amax: Tensor, cast: Cast) -> Tensor:
    """The stored scale of each amax under a rule of one level, as float32; NaN where amax is not finite."""
    rule, guard = cast.rule, cast.guard
    amax = amax.clamp_min(guard.amax_floor) if guard.amax_floor else amax
    if not rule.stored:
        return torch.ones_like(amax).masked_fill_(~torch.isfinite(amax), torch.nan)
    if rule.power_of:
        return _power_of_two(amax, cast)
    scales = (amax / cast.divisor).clamp_min(max(guard.scale_floor, SMALLEST_NORMAL))
    scales = torch.where(amax == 0, guard.zero_scale, scales)
    return scales.masked_fill(~torch.isfinite(amax), torch.nan)


def to_grid(y: Tensor, fmt: Format, room: Tensor | None = None) -> Tensor:
    """Scaled float32 values rounded to the nearest code's value, ties to even; NaN stays. Works in place.

    What is held beside them takes `room`, int32 of the same shape.

    Adding 1.5 * 2^(e + 23 - m) leaves float32 no bits below 2^(e - m), a code's step at exponent e, so its own
    rounding does the work; taking it off again is exact.
    """
    if not isinstance(fmt, FloatFormat):
        return y.round_()
    lowest = (127 + fmt.min_exponent) << 23  # below the normals, codes are as far apart as in their first binade
    power = torch.bitwise_and(y.view(torch.int32), EXPONENT, out=room).clamp_(min=lowest).view(torch.float32)
    lift = 1.5 * 2 ** (23 - fmt.mantissa_bits)
    return y.add_(power, alpha=lift).sub_(power, alpha=lift)


def encode(y: Tensor, fmt: Format) -> Tensor:
    """Codes of scaled, clamped float32 values, in the format's dtype. May work in place."""
    if not isinstance(fmt, FloatFormat):
        return y.round_().to(DTYPES[fmt.name])
    if fmt.name in DTYPES:
        return y.to(DTYPES[fmt.name])
    negative = y.signbit()
    size = to_grid(y, fmt).abs_()
    normal = (size.view(torch.int32) >> (23 - fmt.mantissa_bits)) - ((127 - fmt.bias) << fmt.mantissa_bits)
    codes = torch.where(size < fmt.min_normal, (size / fmt.min_subnormal).to(torch.int32), normal)
    if not fmt.negative_zero:  # its code is NaN
        negative &= codes > 0
    return (codes | (negative.to(torch.int32) << (fmt.bits - 1))).to(torch.uint8)


def code_dtype(fmt: Format) -> torch.dtype:
    """The dtype of codes, one byte each."""
    return DTYPES.get(fmt.name, torch.uint8)


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """Float32 values of codes."""
    if fmt.name in DTYPES:
        return codes.to(torch.float32)
    return _table(fmt).to(codes.device)[codes.int()]


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


def _scaled_blocks(x: Tensor, factors: Tensor, cast: Cast) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Rows, the tiles in them [rows, grid cols, width], these over their factors and clamped to the format's range, in
    float32 that holds until the next, and their factors [rows or 1, grid cols, 1]."""
    by_row, top, room = _by_row(factors, cast.tile, len(x))[..., None], cast.format.max, None
    for rows in _slices(x):
        block, own = _tiled(x[rows], cast.tile), by_row if len(by_row) == 1 else by_row[rows]
        room = _room(room, block, torch.float32)
        yield rows, block, torch.div(block, own, out=room).clamp_(-top - cast.is_full, top), own


def _blocks_of_values(x: Tensor, factors: Tensor, cast: Cast) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """As `_scaled_blocks`, rounded and multiplied by their factors again."""
    room = None
    for rows, block, scaled, own in _scaled_blocks(x, factors, cast):
        room = _room(room, block, torch.int32)
        yield rows, block, to_grid(scaled, cast.format, room).mul_(own), own


def _room(held: Tensor | None, block: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a block: that of the block before it, which had no fewer rows, or new for the first."""
    return torch.empty(block.shape, dtype=dtype, device=block.device) if held is None else held[: len(block)]


def _tiled(x: Tensor, tile: Tile) -> Tensor:
    """x [rows, cols] as [rows, grid cols, width]; a ragged edge is padded with zeros, which change no amax."""
    width = tile.cols or x.shape[1]
    ragged = -x.shape[1] % width
    return (pad(x, (0, ragged)) if ragged else x).reshape(len(x), -1, width)


def _untiled(x: Tensor, cols: int) -> Tensor:
    """The inverse of `_tiled`."""
    return x.flatten(1)[:, :cols]


def _over_rows(by_row: Tensor, tile: Tile, reduce: Callable[..., Tensor]) -> Tensor:
    """[rows, grid cols] reduced over the rows of each tile: [grid rows, grid cols]. The edge is padded with zeros."""
    if tile.rows == 1:
        return by_row
    height = tile.rows or len(by_row)
    return reduce(pad(by_row, (0, 0, 0, -len(by_row) % height)).reshape(-1, height, by_row.shape[1]), dim=1)


def _refuse_not_finite(scales: Tensor, x: Tensor, cast: Cast) -> None:
    if not torch.isfinite(scales).all():
        raise NotFinite(
            f"A tensor of shape {list(x.shape)} contains NaN or infinity and cannot be cast to {cast.text}."
        )


def _whole(scales: Tensor, outer: Tensor | None) -> Tensor:
    """The factor of each tile; a product that underflows is kept off zero."""
    return scales if outer is None else (scales * outer).clamp_min(SMALLEST_NORMAL)


def _power_of_two(amax: Tensor, cast: Cast) -> Tensor:
    """Powers of two 2^-127 ... 2^127 by a rule: integer arithmetic on float32's fields, never log2."""
    quotient = cast.rule.power_of == "quotient"
    top = torch.tensor(cast.divisor, dtype=torch.float32)
    x = amax * (1 / top).item() if quotient else amax
    bits = x.view(torch.int32)
    exponent = ((bits + cast.carry) >> 23) - (0 if quotient else cast.format.max_exponent)
    if quotient:  # up to 2^-127, the smallest scale, the carry would say 2^-126
        exponent = exponent.masked_fill(bits <= 1 << 22, 0)
    return _from_exponent(exponent.clamp(0, 254)).masked_fill(~torch.isfinite(amax), torch.nan)


def _from_exponent(exponent: Tensor) -> Tensor:
    """2^(exponent - 127) as float32; 0 is the subnormal 2^-127."""
    return torch.where(exponent == 0, 1 << 22, exponent << 23).to(torch.int32).view(torch.float32)


def outer_of(amax: Tensor, cast: Cast) -> Tensor:
    """The float32 [1, 1] over these magnitudes' scales: amax / (448 * max) over E4M3, amax / max over powers of two.

    NaN where one of them is not finite.
    """
    finite = torch.isfinite(amax)
    outer = amax.amax().view(1, 1) / (E4M3FN.max * cast.format.max if _is_fine(cast) else cast.format.max)
    outer = torch.where(outer == 0, 1.0, outer.clamp_min(SMALLEST_NORMAL))
    return outer.masked_fill(~finite.all(), torch.nan)


def _inner(amax: Tensor, outer: Tensor, cast: Cast) -> Tensor:
    """The stored scale of each amax under an outer scale [1, 1]; NaN where amax is not finite."""
    relative = amax / cast.format.max / outer
    if _is_fine(cast):
        inner = to_grid(relative.clamp_max(E4M3FN.max), E4M3FN).clamp_min(E4M3FN.min_subnormal)
    else:
        inner = _from_exponent(((relative.view(torch.int32) + FRACTION) >> 23).clamp(0, 254))
    inner = torch.where(amax == 0, 1.0, inner)
    return inner.masked_fill(~torch.isfinite(amax), torch.nan)


def _is_fine(cast: Cast) -> bool:
    return cast.rule.stored == "e4m3"


def _searched(x: Tensor, amax: Tensor, cast: Cast) -> Tensor:
    """For each tile the scale, shrunk by up to 20 %, of least sum |error|^2.4; the largest of equals."""
    best = scale_from_amax(amax, cast)
    unit = spread(best, cast.tile, *x.shape)  # errors are taken in these, so that no power of them underflows
    least = _tile_error(x, best, unit, cast)
    for step in range(1, SHRINKS):
        tried = scale_from_amax(amax * (1 - step * SHRINK_STEP), cast)
        error = _tile_error(x, tried, unit, cast)
        best = torch.where(error < least, tried, best)
        least = torch.minimum(error, least)
    return best


def _tile_error(x: Tensor, scales: Tensor, unit: Tensor, cast: Cast) -> Tensor:
    """Sum of |error / unit|^2.4 over each tile: [grid rows, grid cols]."""
    error = ((rounded(x.float(), scales, cast) - x) / unit).abs_().pow_(ERROR_POWER)
    return _over_rows(_tiled(error, cast.tile).sum(-1), cast.tile, torch.sum)


@cache
def _table(fmt: Format) -> Tensor:
    """Every code's value, float32."""
    return torch.tensor([fmt.decode(code) for code in range(1 << fmt.bits)], dtype=torch.float32)
