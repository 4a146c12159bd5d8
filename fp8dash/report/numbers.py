"""How numbers are written everywhere: digits, signs, powers of ten, and text that no spreadsheet runs."""

import math
import re
import unicodedata

from fp8dash.choose.metrics import METRICS as METRICS
from fp8dash.choose.metrics import Metric

DASH = "—"


LINE_ENDS = ("Cc", "Zl", "Zp")  # Unicode's categories of control characters and separators of lines
UNSEEN = (*LINE_ENDS, "Zs", "Cf", "Mn")  # what a spreadsheet may skip before it looks for a sign
SIGNS = ("=", "+", "-", "@")  # what begins a formula
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def inert(text: str) -> str:
    """A text of one line that no spreadsheet runs as a formula, whatever stands before its sign.

    Spreadsheets skip leading blanks, take full-width signs for plain ones, and end a row at a lone CR.

    >>> inert("=SUM(A1)"), inert("FP8"), inert("\\u00a0＝1"), inert("a\\r=1")
    ("'=SUM(A1)", 'FP8', "'\\xa0＝1", 'a =1')
    """
    line = "".join(" " if unicodedata.category(char) in LINE_ENDS else char for char in text)
    first = next((char for char in line if unicodedata.category(char) not in UNSEEN), "")
    return f"'{line}" if unicodedata.normalize("NFKC", first)[:1] in SIGNS and first else line


def three(value: float | None) -> str:
    """Three significant digits, zeros kept, a proper minus sign.

    >>> three(0.0172), three(-0.5), three(162.9), three(1234.0), three(None), three(0.0), three(1.837e-6)
    ('0.0172', '−0.500', '163', '1,230', '—', '0', '1.84×10⁻⁶')
    """
    if value is None or math.isnan(value):
        return DASH
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")
    text = f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:#.3g}".rstrip(".")
    return powers(text).replace("-", "−")


def powers(text: str) -> str:
    """A number's text with its exponent as a power of ten.

    >>> powers("2e-05"), powers("0.5")
    ('2×10⁻⁵', '0.5')
    """
    return re.sub(r"e([+-]\d+)", lambda match: "×10" + str(int(match[1])).translate(RAISED), text)


def signed(value: float | None) -> str:
    """Three significant digits with their sign.

    >>> signed(0.0124), signed(-0.0124)
    ('+0.0124', '−0.0124')
    """
    return f"+{three(value)}" if value is not None and value > 0 else three(value)


def shown(metric: Metric, value: float | None) -> str:
    """A metric's value without its unit, alike in every row of a column.

    >>> shown(METRICS["top1"], 0.91), shown(METRICS["model_bytes"], 162.9e6), shown(METRICS["kld"], 0.03)
    ('0.910', '163', '0.0300')
    >>> shown(METRICS["ln_ppl_diff"], 0.0125), shown(METRICS["ln_ppl_diff"], None)
    ('+0.0125', '—')
    """
    if metric.signed:
        return signed(value)
    if value is None or not math.isfinite(value) or not metric.digits:
        return three(value if value is None else value / metric.per)
    return f"{value / metric.per:{metric.digits}}".rstrip(".").replace("-", "−")


def heading(metric: Metric) -> str:
    """A column's title with its unit.

    >>> heading(METRICS["kld"]), heading(METRICS["model_bytes"]), heading(METRICS["top1"])
    ('KLD (nats)', 'Size (MB)', 'Top-1')
    """
    return f"{metric.title} ({metric.unit})" if metric.unit not in ("", "share", "bits") else metric.title


def exactly(value: float) -> str:
    """All digits of a number, as people write it.

    >>> exactly(0.1015625), exactly(-448.0), exactly(2.0**-16), exactly(57344.0), exactly(math.nan)
    ('0.1015625', '−448', '1.52587890625×10⁻⁵', '57,344', 'NaN')
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    text = f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"
    return powers(text).replace("-", "−")


def as_power(value: float) -> str:
    """A power of two as such, any other number by three digits.

    >>> as_power(2.0**-9), as_power(0.134)
    ('2⁻⁹', '0.134')
    """
    mantissa, exponent = math.frexp(value)
    return "2" + str(exponent - 1).translate(RAISED) if mantissa == 0.5 else three(value)
