"""Number formats, told apart by exponent, mantissa, bias and reserved top codes. Values only: no torch.

Sources: OCP OFP8 1.0 and arXiv 2209.05433 Table 1 (E4M3FN, E5M2), OCP MX 1.0 (E3M2, E2M3, E2M1), AMD CDNA3 (FNUZ),
arXiv 2503.09975 (E4M3 with IEEE's reserved binade: Gaudi 2, Trainium). Integers are symmetric.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A signed mini-float, told apart from its cousins by bias and top codes."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    reserved: int  # codes at the top of the positive half that are inf or NaN
    negative_zero: bool = True  # False: its code is the only NaN (FNUZ)

    @property
    def bits(self) -> int:
        """Bits of one code, the sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value.

        >>> E4M3FN.min_exponent, E5M2.min_exponent
        (-6, -14)
        """
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest value: what MX calls emax.

        >>> [f.max_exponent for f in (E4M3FN, E5M2, E3M2, E2M3, E2M1)]
        [8, 15, 4, 2, 2]
        """
        return math.frexp(self.max)[1] - 1

    @property
    def max_code(self) -> int:
        """Code of the largest finite value.

        >>> hex(E4M3FN.max_code), hex(E5M2.max_code), hex(E2M1.max_code)
        ('0x7e', '0x7b', '0x7')
        """
        return (1 << (self.bits - 1)) - 1 - self.reserved

    @property
    def max(self) -> float:
        """Largest finite value.

        >>> E4M3FN.max, E5M2.max, E4M3FNUZ.max, E3M4.max
        (448.0, 57344.0, 240.0, 15.5)
        """
        return self.decode(self.max_code)

    @property
    def min_normal(self) -> float:
        """Smallest value of full precision."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value, and the distance between codes below `min_normal`.

        >>> E4M3FN.min_subnormal == 2**-9, E5M2.min_subnormal == 2**-16
        (True, True)
        """
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding a normal value.

        >>> E4M3FN.unit_roundoff, E5M2.unit_roundoff
        (0.0625, 0.125)
        """
        return math.ldexp(1.0, -self.mantissa_bits - 1)

    @property
    def decades(self) -> float:
        """Powers of ten from the smallest normal value to the largest.

        >>> round(E4M3FN.decades, 2), round(E5M2.decades, 2)
        (4.46, 8.97)
        """
        return math.log10(self.max / self.min_normal)

    @property
    def has_infinity(self) -> bool:
        """True where a whole binade is reserved, IEEE style, so that its first code is infinity."""
        return self.reserved == 1 << self.mantissa_bits

    def decode(self, code: int) -> float:
        """The value of a code.

        >>> E4M3FN.decode(0x01), E4M3FN.decode(0x88), E5M2.decode(0xFC), E4M3FN.decode(0x7F), E4M3FNUZ.decode(0x80)
        (0.001953125, -0.015625, -inf, nan, nan)
        """
        if not 0 <= code < 1 << self.bits:
            raise ValueError(f"{code} is not a {self.bits}-bit code of {self.name}")
        magnitude = code & ((1 << (self.bits - 1)) - 1)
        sign = -1.0 if code != magnitude else 1.0
        if magnitude > self.max_code:
            first = magnitude == self.max_code + 1
            return sign * math.inf if self.has_infinity and first else math.nan
        if magnitude == 0 and sign < 0 and not self.negative_zero:
            return math.nan
        exponent, fraction = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        hidden = 1 << self.mantissa_bits if exponent else 0
        return sign * math.ldexp(hidden + fraction, max(exponent, 1) - self.bias - self.mantissa_bits)


@dataclass(frozen=True, slots=True)
class IntFormat:
    """A symmetric integer: codes -max..max, ties to even."""

    name: str
    bits: int

    @property
    def max(self) -> float:
        """Largest code, as a float.

        >>> INT8.max, INT4.max
        (127.0, 7.0)
        """
        return float((1 << (self.bits - 1)) - 1)

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest code."""
        return self.bits - 2

    def decode(self, code: int) -> float:
        """The value of a two's-complement code.

        >>> INT8.decode(0xFF), INT8.decode(127), INT4.decode(0xF)
        (-1.0, 127.0, -1.0)
        """
        if not 0 <= code < 1 << self.bits:
            raise ValueError(f"{code} is not a {self.bits}-bit code of {self.name}")
        half = 1 << (self.bits - 1)
        return float(code - 2 * half if code >= half else code)


Format = FloatFormat | IntFormat

E4M3FN = FloatFormat("e4m3fn", exponent_bits=4, mantissa_bits=3, bias=7, reserved=1)
E5M2 = FloatFormat("e5m2", exponent_bits=5, mantissa_bits=2, bias=15, reserved=4)
E4M3FNUZ = FloatFormat("e4m3fnuz", exponent_bits=4, mantissa_bits=3, bias=8, reserved=0, negative_zero=False)
E5M2FNUZ = FloatFormat("e5m2fnuz", exponent_bits=5, mantissa_bits=2, bias=16, reserved=0, negative_zero=False)
E4M3 = FloatFormat("e4m3", exponent_bits=4, mantissa_bits=3, bias=7, reserved=8)
E3M4 = FloatFormat("e3m4", exponent_bits=3, mantissa_bits=4, bias=3, reserved=16)
E3M2 = FloatFormat("e3m2", exponent_bits=3, mantissa_bits=2, bias=3, reserved=0)
E2M3 = FloatFormat("e2m3", exponent_bits=2, mantissa_bits=3, bias=1, reserved=0)
E2M1 = FloatFormat("e2m1", exponent_bits=2, mantissa_bits=1, bias=1, reserved=0)
INT8 = IntFormat("int8", bits=8)
INT4 = IntFormat("int4", bits=4)

FORMATS: dict[str, Format] = {
    f.name: f for f in (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, E4M3, E3M4, E3M2, E2M3, E2M1, INT8, INT4)
}


def values(fmt: Format) -> list[float]:
    """All finite values, ascending, zero once.

    >>> values(E2M1)[7:]
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """
    decoded = {fmt.decode(code) for code in range(1 << fmt.bits)}
    return sorted(value + 0.0 for value in decoded if math.isfinite(value) and abs(value) <= fmt.max)


def neighbours(fmt: Format, x: float) -> tuple[float, float]:
    """The values at or next below and above x; x beyond the range has the largest on both sides.

    >>> neighbours(E4M3FN, 0.1), neighbours(E2M1, 100.0)
    ((0.09375, 0.1015625), (6.0, 6.0))
    """
    decoded = values(fmt)
    above = min(bisect_left(decoded, x), len(decoded) - 1)
    below = above if decoded[above] <= x else max(above - 1, 0)
    return decoded[below], decoded[above]


def midpoints(fmt: Format) -> list[float]:
    """The points where rounding changes its mind, ascending.

    >>> midpoints(E2M1)[-3:]
    [2.5, 3.5, 5.0]
    """
    decoded = values(fmt)
    return [(a + b) / 2 for a, b in zip(decoded, decoded[1:], strict=False)]
