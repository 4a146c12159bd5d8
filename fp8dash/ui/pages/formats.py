"""Number formats by hand: one number in all formats, a cast of a few numbers, scale rules on an amax, and the facts.

Casts are `explain.numerics`, computed at once and in this process; all that is chosen is in the address.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import streamlit as st

from fp8dash.choose.formats import FORMATS, FloatFormat, Format, neighbours, values
from fp8dash.explain.codes import CLIPPED, EXACT, FLUSHED, ROUNDED, Code, Nearest, nearest, read, special_codes, title
from fp8dash.explain.numerics import ROUNDINGS, chance_up, on_grid
from fp8dash.report.numbers import DASH, as_power, exactly, signed, three
from fp8dash.ui import linked
from fp8dash.ui.charts import formats as charts_formats
from fp8dash.ui.frame import Frame, answer_first, draw
from fp8dash.ui.parts import casting
from fp8dash.ui.parts.casting import format_box
from fp8dash.ui.words import plain

ONE, CAST, SCALES, FACTS = "One number", "Cast a few numbers", "Scale rules", "All formats"
AS_IS, ALIGNED = "As they are", "Largest code at one amax"
ORIGINS = {
    "e4m3fn": "OCP FP8: weights and activations; H100, Ada, Blackwell, MI350",
    "e5m2": "OCP FP8: range for gradients",
    "e4m3fnuz": "AMD CDNA3 (MI300X); an OCP byte read in this format has half its value",
    "e5m2fnuz": "AMD CDNA3 (MI300X)",
    "e4m3": "IEEE’s reserved binade kept: Gaudi 2, Trainium",
    "e3m4": "IEEE style; proposed for vision models",
    "e3m2": "OCP MXFP6, the wider half",
    "e2m3": "OCP MXFP6, the finer half",
    "e2m1": "OCP MXFP4 and NVFP4",
    "int8": "W8A8: uniform steps, so the amax sets every value’s error",
    "int4": "W4A16 weights",
}
FIELD_KEYS = {"sign": "sign", "exponent": "exponent", "mantissa": "mantissa", "two's complement": "integer"}
STYLE = """<style>
[class*="st-key-formats_bit_"] button {min-width: 2.6rem; padding: 0.35rem 0; border-width: 1.5px;}
[class*="st-key-formats_bit_"] button p {font-size: 1.25rem; font-variant-numeric: tabular-nums;}
[class*="st-key-formats_bit_sign"] button {border-color: #c2556e;}
[class*="st-key-formats_bit_exponent"] button {border-color: #14898a;}
[class*="st-key-formats_bit_mantissa"] button, [class*="st-key-formats_bit_integer"] button {border-color: #b0792a;}
.st-key-formats_strip [data-testid="stMetricValue"] {font-size: 2.2rem;}
.st-key-formats_tables [data-testid="stMarkdownContainer"] {overflow-x: auto;}
.st-key-formats_tables th, .st-key-formats_tables td {padding: 0.3rem 0.6rem !important;}
.st-key-formats_tables td {white-space: nowrap;}
.st-key-formats_tables td:last-child {white-space: normal; min-width: 11rem;}
.st-key-formats_tables th {white-space: normal; vertical-align: bottom;}
.st-key-formats_tables code {color: inherit; background: none; padding: 0; font-size: 0.93em;}
</style>"""


def page(frame: Frame) -> None:
    """The chosen view; each answers a question of its own."""
    st.html(STYLE)
    head = st.container()
    view = linked.segmented_control(
        "View", list(VIEWS), default=ONE, required=True, key="view", label_visibility="collapsed"
    )
    answer_first(head, "This input cannot be cast", "formats_tables", VIEWS[str(view)])


def one_number() -> tuple[str, str]:
    """A number or code in one format bit by bit, then in all of them."""
    if not linked.values("number") and "number" not in st.session_state:
        st.session_state["number"] = "0.1"
    with st.container(horizontal=True, vertical_alignment="bottom"):
        text = linked.text_input(
            "Number or code",
            key="number",
            width=220,
            help="0.1, 448, 1e-3, nan, or a code of the format on the right: 0x7E, 0b01111110. Clicking a bit "
            "writes the code here.",
        )
        fmt = format_box("Format", "format", "e4m3fn")
    x, typed = read(text or "0.1", fmt)
    closest = nearest(x, fmt)
    _strip(typed or closest.code or Code(fmt, 0), closest if typed is None else None)
    st.header("In every format, unscaled", anchor=False)
    st.markdown("\n".join(_in_all(x, fmt)))
    if math.isfinite(x):
        st.header(f"Rounding to {title(fmt)}", anchor=False)
        st.markdown("\n".join(_roundings(x, fmt)))
    _spacing(x if math.isfinite(x) else None)
    return _in_chosen_format(x, typed, closest), _in_other_formats(x, fmt)


def _in_chosen_format(x: float, typed: Code | None, closest: Nearest) -> str:
    if typed is not None:
        kind = f": {typed.kind}" if math.isfinite(typed.value) else ""
        return plain(f"{typed.hex} is {exactly(typed.value)} in {title(typed.format)}{kind}")
    name = title(_of(closest, x))
    if closest.code is None:
        return plain(f"{name} has no code for {exactly(x)}")
    becomes = f"{exactly(x)} becomes {exactly(closest.code.value)} in {name} ({closest.code.hex})"
    return plain(f"{becomes}: {_fate(closest)}")


def _in_other_formats(x: float, fmt: Format) -> str:
    """What it becomes in the two FP8 formats and INT8, except those named in the title."""
    sentences = []
    for name in ("e4m3fn", "e5m2", "int8"):
        closest = nearest(x, FORMATS[name])
        if name != fmt.name and closest.code is not None:
            sentences.append(
                f"{title(FORMATS[name])} has {exactly(closest.code.value)} ({closest.code.hex}), {_fate(closest)}"
            )
    return plain("; ".join(sentences) + ".") if sentences else ""


def _of(closest: Nearest, x: float) -> Format:
    return closest.code.format if closest.code else FORMATS[str(st.session_state.get("format", "e4m3fn"))]


def _fate(closest: Nearest) -> str:
    """What happened, with the error where there is one."""
    if closest.fate == EXACT or closest.relative is None:
        return closest.fate
    error = percent(closest.relative)
    return f"off by {error}" if closest.fate == ROUNDED else f"{closest.fate}, {error}"


def _strip(code: Code, closest: Nearest | None) -> None:
    """The bits to click, and the value they stand for."""
    with st.container(horizontal=True, key="formats_strip", vertical_alignment="bottom", gap="medium"):
        place = 0
        for field, width in code.fields:
            with st.container(width="content", gap="small"):
                st.caption(_field_caption(code, field))
                with st.container(horizontal=True, gap="xsmall", width="content"):
                    for _ in range(width):
                        st.button(
                            code.bits[place],
                            key=f"formats_bit_{FIELD_KEYS[field]}_{place}",
                            on_click=_write,
                            args=(code.toggled(place).hex,),
                            help=f"Flip this {field} bit",
                        )
                        place += 1
        with st.container(width="content"):
            st.metric(f"{code.hex} · {code.kind}", exactly(code.value))
    formula = f"{code.formula} = {exactly(code.value)}" if "×" in code.formula else code.formula
    error = closest.error if closest else None
    st.caption(plain(f"{formula}; error {signed(error)}" if error else formula))


def _field_caption(code: Code, field: str) -> str:
    if field != "exponent" or not isinstance(code.format, FloatFormat):
        return field
    return f"exponent {code.exponent_field} − {code.format.bias}"


def _write(text: str) -> None:
    st.session_state["number"] = text


def _in_all(x: float, chosen: Format) -> list[str]:
    """A Markdown table, one row per format."""
    lines = [
        "| Format | Code | Bits | Becomes | Error | Relative error (%) | What happened |",
        "|:--|:--|:--|--:|--:|--:|:--|",
    ]
    for fmt in FORMATS.values():
        closest = nearest(x, fmt)
        name = f"**{title(fmt)}**" if fmt is chosen else title(fmt)
        code, bits = (f"`{closest.code.hex}`", f"`{closest.code.spaced}`") if closest.code else (DASH, DASH)
        becomes = exactly(closest.code.value) if closest.code else DASH
        error = DASH if closest.error is None else signed(closest.error)
        relative = DASH if closest.relative is None else signed(100 * closest.relative)
        fate = f":orange-badge[{closest.fate}]" if closest.fate in (CLIPPED, FLUSHED) else closest.fate
        lines.append(f"| {name} | {code} | {bits} | {becomes} | {error} | {relative} | {fate} |")
    return lines


def _roundings(typed: float, fmt: Format) -> list[str]:
    """A Markdown table, one row per rounding mode, stochastic last."""
    x = float(np.float32(typed))
    below, above = neighbours(fmt, x)
    lines = ["| Rounding | Becomes | Error | How |", "|:--|--:|--:|:--|"]
    for rounding in ROUNDINGS.values():
        value = float(on_grid(np.array(x), fmt, rounding))
        lines.append(f"| {rounding.name} | {exactly(value)} | {signed(value - x)} | {rounding.meaning} |")
    up = chance_up(min(max(x, below), above), below, above)
    how = f"up with probability {three(100 * up)} %, so that the mean stays {exactly(typed)}: used for gradients"
    if below == above or abs(x) > fmt.max:
        how = "nothing to round: " + ("exactly a code’s value" if abs(x) <= fmt.max else "beyond the largest code")
    both = exactly(below) if below == above else f"{exactly(below)} or {exactly(above)}"
    return [*lines, f"| stochastic | {both} | {DASH} | {how} |"]


def _spacing(x: float | None) -> None:
    st.header("Where the codes lie", anchor=False)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        names = linked.multiselect(
            "Formats drawn",
            list(FORMATS),
            ["e4m3fn", "e5m2", "int8"],
            key="show",
            width=560,
            format_func=lambda name: title(FORMATS[name]),
            max_selections=6,
        )
        axis = linked.segmented_control("Scale", [AS_IS, ALIGNED], default=AS_IS, required=True, key="axis")
    chosen = [FORMATS[name] for name in names] or [FORMATS["e4m3fn"]]
    figure = charts_formats.number_lines(chosen, x, scaled=1.0 if axis == ALIGNED else None)
    draw(figure, key="formats_lines", alt="Codes of each format on a log axis, and the largest rounding error there")
    st.caption(
        "A float’s error is proportional to the number, down to the subnormals; an integer’s to the amax. "
        + ("The grey line is the typed number." if x else "")
    )


def all_formats() -> tuple[str, str]:
    """The facts of every format."""
    st.markdown("\n".join(_facts()))
    st.caption(
        "Decades: powers of ten from the smallest normal number to the largest; “with subnormals” from the smallest "
        "of all. Unit roundoff: the largest relative error of rounding a number in the normal range. E8M0, the "
        "scale of MX tiles, is a bare power of two, 2⁻¹²⁷ to 2¹²⁷, with one NaN, no zero and no sign."
    )
    answer = "E4M3FN keeps 4.46 decades at 2⁻⁴, E5M2 8.97 at 2⁻³"
    return answer, "One bit of mantissa moved to the exponent doubles the error and nearly doubles the range."


@cache
def _facts() -> list[str]:
    columns: dict[str, Callable[[Format], str]] = {
        "Bits": lambda f: str(f.bits),
        "Largest": lambda f: exactly(f.max),
        "Smallest normal": lambda f: as_power(f.min_normal) if isinstance(f, FloatFormat) else "1",
        "Smallest subnormal": lambda f: as_power(f.min_subnormal) if isinstance(f, FloatFormat) else DASH,
        "Values": lambda f: str(len(values(f))),
        "Unit roundoff": lambda f: as_power(f.unit_roundoff) if isinstance(f, FloatFormat) else DASH,
        "Decades": lambda f: _decades(f, f.min_normal if isinstance(f, FloatFormat) else 1.0),
        "Decades with subnormals": lambda f: _decades(f, f.min_subnormal) if isinstance(f, FloatFormat) else DASH,
        "NaN": lambda f: _ranges([c for c in special_codes(f) if math.isnan(c.value)]),
        "Infinity": lambda f: _ranges([c for c in special_codes(f) if math.isinf(c.value)]),
        "Where": lambda f: ORIGINS[f.name],
    }
    lines = ["| Format | " + " | ".join(columns) + " |", "|:--|" + "--:|" * (len(columns) - 3) + ":--|:--|:--|"]
    for fmt in FORMATS.values():
        lines.append(f"| **{title(fmt)}** | " + " | ".join(write(fmt) for write in columns.values()) + " |")
    return lines


def _ranges(codes: Sequence[Code]) -> str:
    """Codes as ranges: 0x7D–0x7F, 0xFD–0xFF."""
    runs: list[list[Code]] = []
    for code in codes:
        if runs and code.code == runs[-1][-1].code + 1:
            runs[-1].append(code)
        else:
            runs.append([code])
    ranges = [run[0].hex if len(run) == 1 else f"{run[0].hex}–{run[-1].hex}" for run in runs]
    return ", ".join(ranges) or "none"


def _decades(fmt: Format, smallest: float) -> str:
    return f"{math.log10(fmt.max / smallest):.2f}"


def percent(share: float) -> str:
    """A signed share in %."""
    return f"{signed(100 * share)} %"


VIEWS: dict[str, Callable[[], tuple[str, str]]] = {
    ONE: one_number,
    CAST: casting.cast_numbers,
    SCALES: casting.scale_rules,
    FACTS: all_formats,
}
