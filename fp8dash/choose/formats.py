"""Number formats, told apart by exponent, mantissa, bias and reserved top codes. Values only: no torch.

Sources: OCP OFP8 1.0 and arXiv 2209.05433 Table 1 for E4M3 and E5M2; symmetric INT8 keeps -127..127.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A signed mini-float, told apart from its cousins by bias and top codes."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    reserved: int  # codes at the top of the positive half that are inf or NaN

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
    def max_code(self) -> int:
        """Code of the largest finite value.

        >>> hex(E4M3FN.max_code), hex(E5M2.max_code)
        ('0x7e', '0x7b')
        """
        return (1 << (self.bits - 1)) - 1 - self.reserved

    @property
    def max(self) -> float:
        """Largest finite value.

        >>> E4M3FN.max, E5M2.max
        (448.0, 57344.0)
        """
        return self.decode(self.max_code)

    @property
    def has_infinity(self) -> bool:
        """True where a whole binade is reserved, IEEE style, so that its first code is infinity."""
        return self.reserved == 1 << self.mantissa_bits

    def decode(self, code: int) -> float:
        """The value of a code.

        >>> E4M3FN.decode(0x01), E4M3FN.decode(0x88), E5M2.decode(0xFC), E4M3FN.decode(0x7F)
        (0.001953125, -0.015625, -inf, nan)
        """
        if not 0 <= code < 1 << self.bits:
            raise ValueError(f"{code} is not a {self.bits}-bit code of {self.name}")
        magnitude = code & ((1 << (self.bits - 1)) - 1)
        sign = -1.0 if code != magnitude else 1.0
        if magnitude > self.max_code:
            first = magnitude == self.max_code + 1
            return sign * math.inf if self.has_infinity and first else math.nan
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

        >>> INT8.max
        127.0
        """
        return float((1 << (self.bits - 1)) - 1)

    def decode(self, code: int) -> float:
        """The value of a two's-complement code.

        >>> INT8.decode(0xFF), INT8.decode(127)
        (-1.0, 127.0)
        """
        if not 0 <= code < 1 << self.bits:
            raise ValueError(f"{code} is not a {self.bits}-bit code of {self.name}")
        half = 1 << (self.bits - 1)
        return float(code - 2 * half if code >= half else code)


Format = FloatFormat | IntFormat

E4M3FN = FloatFormat("e4m3fn", exponent_bits=4, mantissa_bits=3, bias=7, reserved=1)
E5M2 = FloatFormat("e5m2", exponent_bits=5, mantissa_bits=2, bias=15, reserved=4)
INT8 = IntFormat("int8", bits=8)

FORMATS: dict[str, Format] = {f.name: f for f in (E4M3FN, E5M2, INT8)}
