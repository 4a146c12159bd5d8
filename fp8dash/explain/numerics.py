"""Casting in numpy, for the pages: numbers to codes and scales and back, a few hundred at a time.

`fp8dash.quant.cast` is what runs use. This is a second implementation, since the web process has no torch and a page
must respond while the user types: `tests/explain/test_numerics.py` holds both equal, code for code and scale for scale,
over
formats, tiles, rules and guards. Operands are 2-D, [rows, cols]; scales float32, as everywhere.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8dash.choose.casts import Cast
from fp8dash.choose.formats import E4M3FN, FloatFormat, Format
from fp8dash.choose.scaling import ERROR_POWER, FRACTION, SHRINK_STEP, SHRINKS, Tile
from fp8dash.errors import NotFinite

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Codes = NDArray[np.int64]

SMALLEST_NORMAL = np.float32(2.0**-126)


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a number between two codes is rounded to one of them."""

    name: str
    meaning: str


EVEN = Rounding("ties to even", "the nearer code; halfway, the even one: what tensor casts do")
AWAY = Rounding("ties away", "the nearer code; halfway, the larger magnitude")
ZERO = Rounding("toward zero", "always the smaller magnitude: cheap, but biased towards zero")
ROUNDINGS = {r.name: r for r in (EVEN, AWAY, ZERO)}  # stochastic rounding has no one answer: `chance_up`


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Codes [rows, cols] as unsigned bit patterns, and each tile's stored scale [grid rows, grid cols]."""

    codes: Codes
    scales: Floats
    cast: Cast
    outer: np.float32 | None = None

    @property
    def factors(self) -> Floats:
        """The whole factor of each element, [rows, cols]."""
        whole = self.scales if self.outer is None else np.maximum(self.scales * self.outer, SMALLEST_NORMAL)
        return spread(whole, self.cast.tile, *self.codes.shape)

    @property
    def values(self) -> Floats:
        """What the codes stand for, [rows, cols]."""
        table = np.array([self.cast.format.decode(code) for code in range(1 << self.cast.format.bits)], np.float32)
        return table[self.codes] * self.factors


def quantize(x: Floats, cast: Cast) -> Encoded:
    """The codes and scales of a [rows, cols] operand; raises NotFinite for NaN or infinity.

    >>> from fp8dash.choose.recipe import parse_cast
    >>> found = quantize(np.array([[448.0, 0.1]], np.float32), parse_cast("e4m3fn/tensor"))
    >>> [hex(code) for code in found.codes[0]], found.scales.item()
    (['0x7e', '0x1d'], 1.0)
    """
    if not np.isfinite(x).all():
        raise NotFinite(f"Numbers of shape {list(x.shape)} contain NaN or infinity and cannot be cast to {cast.text}.")
    amax = tile_amax(x, cast.tile)
    outer = None
    if cast.rule.outer:
        scales, outer = _two_level(amax, cast)
    elif cast.rule.name == "mse":
        scales = _searched(x, amax, cast)
    else:
        scales = scale_from_amax(amax, cast)
    empty = Encoded(np.zeros(x.shape, np.int64), scales, cast, outer)
    return Encoded(encode(_scaled(x, empty.factors, cast), cast.format), scales, cast, outer)


def on_grid(y: NDArray[Any], fmt: Format, rounding: Rounding = EVEN) -> Doubles:
    """Numbers rounded to the format's values and saturated at its largest; NaN stays. Exact: steps are powers of two.

    >>> on_grid(np.array([0.1, 464.0, -1e9]), E4M3FN).tolist()
    [0.1015625, 448.0, -448.0]
    """
    y = np.clip(np.asarray(y, np.float64), -fmt.max, fmt.max)
    steps = _steps(y, fmt)
    return _rounded(y / steps, rounding) * steps


def chance_up(x: float, below: float, above: float) -> float:
    """The probability that stochastic rounding takes the upper of two neighbours, so that the mean is x.

    >>> chance_up(0.1, 0.09375, 0.1015625)
    0.8
    """
    return round((x - below) / (above - below), 12) if above > below else 0.0


def encode(y: NDArray[Any], fmt: Format) -> Codes:
    """Codes, as unsigned bit patterns, of scaled and clamped numbers, ties to even.

    >>> [hex(code) for code in encode(np.array([0.1, -0.0, 7.0]), E4M3FN)]
    ['0x1d', '0x80', '0x4e']
    """
    y = np.asarray(y, np.float64)
    if not isinstance(fmt, FloatFormat):
        whole: Codes = np.rint(y).astype(np.int64) & ((1 << fmt.bits) - 1)
        return whole
    units = np.abs(np.rint(y / _steps(y, fmt))).astype(np.int64)  # 2^m ... 2^(m + 1) for a normal number
    codes: Codes = units + ((_exponents(y, fmt) - fmt.min_exponent) << fmt.mantissa_bits)
    negative = np.signbit(y) & ((codes > 0) | fmt.negative_zero)
    codes |= negative.astype(np.int64) << (fmt.bits - 1)
    return codes


def tile_amax(x: Floats, tile: Tile) -> Floats:
    """Largest magnitude of each tile, [grid rows, grid cols]."""
    return _reduced(np.abs(x), tile, np.maximum)


def scale_from_amax(amax: Floats, cast: Cast) -> Floats:
    """The stored scale of each amax under a rule of one level.

    >>> from fp8dash.choose.recipe import parse_cast
    >>> [scale_from_amax(np.float32([500.0]), parse_cast(f"e4m3fn/1x32/{r}")).item() for r in ("floor", "rceil")]
    [1.0, 2.0]
    """
    rule, guard = cast.rule, cast.guard
    amax = np.maximum(amax, np.float32(guard.amax_floor))
    if not rule.stored:
        return np.ones_like(amax)
    if rule.power_of:
        return _power_of_two(amax, cast)
    scales = np.maximum(amax / np.float32(cast.divisor), max(np.float32(guard.scale_floor), SMALLEST_NORMAL))
    return np.where(amax == 0, np.float32(guard.zero_scale), scales)


def spread(scales: Floats, tile: Tile, rows: int, cols: int) -> Floats:
    """Scales [grid rows, grid cols] repeated over their tiles, [rows, cols]."""
    tall = np.repeat(scales, tile.rows or rows, axis=0)[:rows]
    return np.repeat(tall, tile.cols or cols, axis=1)[:, :cols]


def _scaled(x: Floats, factors: Floats, cast: Cast) -> Floats:
    """Numbers over their factors in float32, clamped to the format's range."""
    lowest, highest = np.float32(-cast.format.max - cast.is_full), np.float32(cast.format.max)
    return np.asarray(np.clip(x / factors, lowest, highest), np.float32)


def _steps(y: Doubles, fmt: Format) -> Doubles:
    """The distance between codes at each number."""
    if not isinstance(fmt, FloatFormat):
        return np.ones_like(y)
    return np.ldexp(1.0, _exponents(y, fmt) - fmt.mantissa_bits)


def _exponents(y: Doubles, fmt: FloatFormat) -> Codes:
    """Binary exponents; below the normal numbers the smallest one, where codes are as far apart as in it."""
    exponents = np.where(y == 0, fmt.min_exponent, np.frexp(y)[1] - 1)
    return np.maximum(exponents, fmt.min_exponent).astype(np.int64)


def _rounded(units: Doubles, rounding: Rounding) -> Doubles:
    if rounding is EVEN:
        return np.rint(units)
    whole = np.trunc(units)
    return whole + np.sign(units) * (np.abs(units - whole) >= 0.5) if rounding is AWAY else whole


def _reduced(x: Floats, tile: Tile, reduce: np.ufunc) -> Floats:
    """x [rows, cols] reduced over each tile; a ragged edge is padded with zeros."""
    rows, cols = x.shape
    height, width = tile.rows or rows, tile.cols or cols
    padded = np.pad(x, ((0, -rows % height), (0, -cols % width)))
    blocks = padded.reshape(padded.shape[0] // height, height, -1, width)
    return np.asarray(reduce.reduce(blocks, axis=(1, 3)), np.float32)


def _power_of_two(amax: Floats, cast: Cast) -> Floats:
    """Powers of two 2^-127 ... 2^127 by a rule: integer arithmetic on float32's fields, never log2."""
    quotient = cast.rule.power_of == "quotient"
    x = amax * (np.float32(1) / np.float32(cast.divisor)) if quotient else amax
    bits = x.view(np.int32)
    exponents = ((bits + cast.carry) >> 23) - (0 if quotient else cast.format.max_exponent)
    if quotient:  # up to 2^-127, the smallest scale, the carry would say 2^-126
        exponents = np.where(bits <= 1 << 22, 0, exponents)
    return _from_exponent(exponents)


def _from_exponent(exponents: NDArray[Any]) -> Floats:
    """2^(exponent - 127); 0 is the subnormal 2^-127."""
    return np.asarray(np.ldexp(np.float32(1), np.clip(exponents, 0, 254) - 127), np.float32)


def _two_level(amax: Floats, cast: Cast) -> tuple[Floats, np.float32]:
    """Scales under one float32 of the whole: E4M3 under amax / (448 * max), or powers of two under amax / max."""
    fine, largest = cast.rule.stored == "e4m3", np.float32(cast.format.max)
    outer = amax.max() / (np.float32(E4M3FN.max) * largest if fine else largest)
    outer = np.float32(1) if outer == 0 else max(outer, SMALLEST_NORMAL)
    relative = amax / largest / outer
    if fine:
        inner = np.maximum(on_grid(relative, E4M3FN), E4M3FN.min_subnormal)
    else:
        inner = _from_exponent((relative.view(np.int32) + FRACTION) >> 23)
    return np.where(amax == 0, 1.0, inner).astype(np.float32), outer


def _searched(x: Floats, amax: Floats, cast: Cast) -> Floats:
    """For each tile the scale, shrunk by up to 20 %, of least sum |error|^2.4; the largest of equals."""
    best = scale_from_amax(amax, cast)
    unit = spread(best, cast.tile, *x.shape)
    least = _tile_error(x, best, unit, cast)
    for step in range(1, SHRINKS):
        tried = scale_from_amax(amax * np.float32(1 - step * SHRINK_STEP), cast)
        error = _tile_error(x, tried, unit, cast)
        best = np.where(error < least, tried, best)
        least = np.minimum(error, least)
    return best


def _tile_error(x: Floats, scales: Floats, unit: Floats, cast: Cast) -> Floats:
    """Sum of |error / unit|^2.4 over each tile."""
    factors = spread(scales, cast.tile, *x.shape)
    scaled = _scaled(x, factors, cast)
    steps = _steps(scaled.astype(np.float64), cast.format)
    decoded = (np.rint(scaled / steps) * steps).astype(np.float32) * factors
    error = np.abs((decoded - x) / unit) ** np.float32(ERROR_POWER)
    return _reduced(error.astype(np.float32), cast.tile, np.add)


def sqnr_db(x: Floats, values: Floats) -> float:
    """Signal over error in dB: infinite where nothing was lost, NaN where there is no signal.

    >>> round(sqnr_db(np.float32([[1.0]]), np.float32([[1.1]])), 1)
    20.0
    """
    signal, noise = (float(np.square(part.astype(np.float64)).sum()) for part in (x, values - x))
    if signal == 0:
        return math.nan
    return 10 * math.log10(signal / noise) if noise else math.inf
