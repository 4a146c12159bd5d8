"""One code in detail: its fields, its value, and which code a typed number becomes. No torch.

A number is first rounded to float32, since that is what is cast; rounding is ties to even, after saturation.
"""

import math
import re
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from fp8dash.choose.formats import FloatFormat, Format
from fp8dash.errors import InvalidChoice
from fp8dash.explain.numerics import encode, on_grid

LARGEST = float(np.finfo(np.float32).max)
EXACT, ROUNDED, CLIPPED, FLUSHED, NO_CODE = "exact", "rounded", "clipped", "flushed to zero", "has no code"


@dataclass(frozen=True, slots=True)
class Code:
    """A code of a format."""

    format: Format
    code: int

    @property
    def value(self) -> float:
        """What it stands for."""
        return self.format.decode(self.code)

    @property
    def bits(self) -> str:
        """Its bits, the sign first.

        >>> from fp8dash.choose.formats import E4M3FN, INT4
        >>> Code(E4M3FN, 0x1D).bits, Code(INT4, 0xF).bits
        ('00011101', '1111')
        """
        return f"{self.code:0{self.format.bits}b}"

    @property
    def hex(self) -> str:
        """Its hexadecimal form, as wide as the format.

        >>> from fp8dash.choose.formats import E2M1, E4M3FN
        >>> Code(E4M3FN, 7).hex, Code(E2M1, 7).hex
        ('0x07', '0x7')
        """
        return f"0x{self.code:0{math.ceil(self.format.bits / 4)}X}"

    @property
    def fields(self) -> tuple[tuple[str, int], ...]:
        """The fields and their widths, from the left.

        >>> from fp8dash.choose.formats import E4M3FN
        >>> Code(E4M3FN, 0).fields
        (('sign', 1), ('exponent', 4), ('mantissa', 3))
        """
        fmt = self.format
        if not isinstance(fmt, FloatFormat):
            return (("sign", 1), ("two's complement", fmt.bits - 1))
        return (("sign", 1), ("exponent", fmt.exponent_bits), ("mantissa", fmt.mantissa_bits))

    @property
    def spaced(self) -> str:
        """Its bits, a gap between fields.

        >>> from fp8dash.choose.formats import E4M3FN
        >>> Code(E4M3FN, 0x1D).spaced
        '0 0011 101'
        """
        ends = list(accumulate(width for _, width in self.fields))
        return " ".join(self.bits[a:b] for a, b in zip([0, *ends], ends, strict=False))

    @property
    def exponent_field(self) -> int:
        """The exponent's bits as a number; 0 for an integer."""
        fmt = self.format
        return (self.code >> fmt.mantissa_bits) % (1 << fmt.exponent_bits) if isinstance(fmt, FloatFormat) else 0

    @property
    def kind(self) -> str:
        """What kind of number it is.

        >>> from fp8dash.choose.formats import E4M3FN, E5M2, INT8
        >>> [Code(E4M3FN, code).kind for code in (0x00, 0x01, 0x08, 0x7F)], Code(E5M2, 0x7C).kind, Code(INT8, 0x80).kind
        (['zero', 'subnormal', 'normal', 'NaN'], 'infinity', 'integer, unused')
        """
        value = self.value
        if not isinstance(self.format, FloatFormat):
            return "integer, unused" if abs(value) > self.format.max else "integer"
        if math.isnan(value) or math.isinf(value):
            return "NaN" if math.isnan(value) else "infinity"
        return "zero" if value == 0 else "normal" if self.exponent_field else "subnormal"

    @property
    def formula(self) -> str:
        """How the fields make the value.

        >>> from fp8dash.choose.formats import E4M3FN
        >>> Code(E4M3FN, 0x9D).formula, Code(E4M3FN, 0x03).formula
        ('−1 × 2^(3 − 7) × (1 + 5/8)', '+1 × 2^(1 − 7) × 3/8')
        """
        fmt = self.format
        if not isinstance(fmt, FloatFormat) or self.kind in ("NaN", "infinity"):
            return self.kind
        sign = "−1" if self.code >> (fmt.bits - 1) else "+1"
        fraction = f"{self.code % (1 << fmt.mantissa_bits)}/{1 << fmt.mantissa_bits}"
        size = f"(1 + {fraction})" if self.exponent_field else fraction
        return f"{sign} × 2^({max(self.exponent_field, 1)} − {fmt.bias}) × {size}"

    def toggled(self, place: int) -> "Code":
        """The code with one bit flipped; place 0 is the leftmost.

        >>> from fp8dash.choose.formats import E4M3FN
        >>> Code(E4M3FN, 0x7E).toggled(7).hex
        '0x7F'
        """
        return Code(self.format, self.code ^ (1 << (self.format.bits - 1 - place)))


@dataclass(frozen=True, slots=True)
class Nearest:
    """What a number becomes in a format, with no scale."""

    x: float
    code: Code | None  # None: the format has no code for it
    fate: str

    @property
    def error(self) -> float | None:
        """Found minus given."""
        return self.code.value - self.x if self.code and math.isfinite(self.code.value) else None

    @property
    def relative(self) -> float | None:
        """The error over the given number, negative where its magnitude shrinks; None where it is zero."""
        return self.error / self.x if self.error is not None and self.x else None


def nearest(x: float, fmt: Format) -> Nearest:
    """The code a number becomes; NaN and infinity become codes only where the format has them.

    >>> from fp8dash.choose.formats import E4M3FN, E5M2
    >>> found = nearest(0.1, E4M3FN)
    >>> found.code.hex, found.code.value, round(found.relative, 4), nearest(math.inf, E5M2).code.hex
    ('0x1D', 0.1015625, 0.0156, '0x7C')
    """
    if not math.isfinite(x):
        code = next((c for c in special_codes(fmt) if str(c.value) == str(x)), None)
        return Nearest(x, code, EXACT if code else NO_CODE)
    x = float(np.float32(x))
    value = float(on_grid(np.array(x), fmt))
    fate = EXACT if value == x else CLIPPED if abs(x) > fmt.max else FLUSHED if value == 0 else ROUNDED
    return Nearest(x, Code(fmt, int(encode(np.array(value), fmt))), fate)


def special_codes(fmt: Format) -> list[Code]:
    """The codes that are not numbers: NaN and infinity.

    >>> from fp8dash.choose.formats import E4M3FN, E4M3FNUZ
    >>> [c.hex for c in special_codes(E4M3FN)], [c.hex for c in special_codes(E4M3FNUZ)]
    (['0x7F', '0xFF'], ['0x80'])
    """
    codes = (Code(fmt, code) for code in range(1 << fmt.bits))
    return [code for code in codes if not math.isfinite(code.value)]


def read(text: str, fmt: Format) -> tuple[float, Code | None]:
    """A typed number, or a typed code of the format; raises InvalidChoice.

    >>> from fp8dash.choose.formats import E4M3FN
    >>> read("1e-1", E4M3FN), read("0x7E", E4M3FN)[0], read("0b0111_1110", E4M3FN)[0]
    ((0.1, None), 448.0, 448.0)
    """
    text = text.strip().replace("−", "-").lower()
    if re.fullmatch(r"0x[0-9a-f_]+|0b[01_]+", text):
        return _read_code(text, fmt)
    try:
        x = float(text)
    except ValueError:
        raise InvalidChoice(f"“{text}” is not a number: write 0.1, 1e-3, nan, or a code such as 0x7E.") from None
    if math.isfinite(x) and abs(x) > LARGEST:
        raise InvalidChoice(f"“{text}” is beyond the range of float32, which is what is cast: write at most 3.4e38.")
    return x, None


def _read_code(text: str, fmt: Format) -> tuple[float, Code]:
    try:
        code = Code(fmt, int(text, 0))
        return code.value, code
    except ValueError:
        raise InvalidChoice(
            f"“{text}” is not a {fmt.bits}-bit code of {fmt.name}: write at most 0x{(1 << fmt.bits) - 1:X}."
        ) from None


def title(fmt: Format) -> str:
    """What people call a format."""
    return fmt.name.upper()
