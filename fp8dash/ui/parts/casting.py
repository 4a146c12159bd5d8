"""A cast of a few typed numbers, and scale rules on a typed amax: two views of the formats page.

Casts are `explain.numerics`, computed at once and in this process.
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import streamlit as st

from fp8dash.choose.casts import Cast, parse_cast
from fp8dash.choose.formats import FORMATS, Format
from fp8dash.choose.scaling import GUARDS, RULES, TENSOR, TILES
from fp8dash.errors import InvalidChoice
from fp8dash.explain.codes import CLIPPED, EXACT, FLUSHED, ROUNDED, Code, read, title
from fp8dash.explain.numerics import Floats, on_grid, quantize, scale_from_amax, sqnr_db
from fp8dash.report.numbers import as_power, exactly, signed, three
from fp8dash.ui import linked
from fp8dash.ui.charts import formats as charts_formats
from fp8dash.ui.frame import draw
from fp8dash.ui.words import listed, many, plain

MOST_NUMBERS = 256
SAMPLE = "0.02 -0.5 1.2 0.003 -2.1 0.7 0.0004 60\n0.11 0.9 -0.04 0.25 -1.3 0.6 0.002 -0.8"
LEVEL_RULES = {name: rule for name, rule in RULES.items() if rule.stored and not rule.outer and name != "mse"}
POWER_RULES = [name for name, rule in LEVEL_RULES.items() if rule.power_of and rule.bits == 8]
ROUNDING_SLACK = 1 + 2**-20  # amax / (amax / max) may exceed max by float32's rounding: that is no clipping


def cast_numbers() -> tuple[str, str]:
    """Typed numbers through a whole cast: tiles, scales, codes, and what was lost."""
    cast = _cast_boxes()
    text = linked.text_area(
        "Numbers, one row per line",
        SAMPLE,
        key="numbers",
        height=110,
        help=f"At most {MOST_NUMBERS} numbers, separated by spaces or commas. Short rows are padded with zeros.",
    )
    x = _matrix(text or SAMPLE)
    table = _elements(x, cast)
    digits = {
        name: st.column_config.NumberColumn(format="%.5g") for name in map(str, table) if table[name].dtype == float
    }
    height = min(36 * (len(table) + 1), 430)
    st.dataframe(table, hide_index=True, key="formats_elements", height=height, column_config=digits)
    st.header("The same numbers in every format, with this tile and rule", anchor=False)
    st.markdown("\n".join(_cast_in_all(x, cast)))
    other = FORMATS["e4m3fn" if cast.format.name == "int8" else "int8"]
    beside = f"{title(other)} with the same tile and rule: {_lost(x, Cast(other, cast.tile, cast.rule, cast.guard))}."
    answer = f"{title(cast.format)} by {cast.tile.name}: {_lost(x, cast)}"
    return plain(answer), plain(beside) + "  \n" + _scales_in_words(x, cast)


def _cast_boxes() -> Cast:
    """The cast that is chosen; raises InvalidChoice where a typed tile is none."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        fmt = format_box("Format", "f", "e4m3fn")
        tile = linked.selectbox(
            "Tile",
            ["1x4", *TILES],
            list(TILES).index("row") + 1,
            key="tile",
            width=150,
            accept_new_options=True,
            help="Who shares a scale; you can type any rows x columns.",
        )
        rule = linked.selectbox(
            "Scale rule",
            list(RULES),
            key="rule",
            width=150,
            help="  \n".join(f"`{name}`: {r.meaning}" for name, r in RULES.items()),
        )
        guard = linked.selectbox(
            "Guard",
            list(GUARDS),
            key="guard",
            width=150,
            help="  \n".join(f"`{name}`: {g.meaning}" for name, g in GUARDS.items()),
        )
    return parse_cast(f"{fmt.name}/{str(tile).strip()}/{rule}/{guard}")


def _scales_in_words(x: Floats, cast: Cast) -> str:
    """The first six scales, their count, and the bits per number including scales."""
    encoded = quantize(x, cast)
    scales = sorted(set(encoded.scales.ravel().tolist()))
    shown = listed([as_power(s) for s in scales[:6]]) + (" …" if len(scales) > 6 else "")
    bits = three(cast.bits_per_element(*x.shape))
    return f"{many(encoded.scales.size, 'scale')}: {shown}. {bits} bits per number, scales included."


def _matrix(text: str) -> Floats:
    """Typed lines as rows of float32, short ones filled up with zeros; raises InvalidChoice."""
    rows = [line.replace(",", " ").replace("−", "-").split() for line in text.splitlines() if line.strip()]
    count = sum(map(len, rows))
    if not 0 < count <= MOST_NUMBERS:
        raise InvalidChoice(f"{many(count, 'number')} cannot be cast here: type 1 to {MOST_NUMBERS}.")
    width = max(map(len, rows))
    return np.array([[*_numbers(row), *[0.0] * (width - len(row))] for row in rows], np.float32)


def _numbers(words: Sequence[str]) -> list[float]:
    numbers = [read(word, FORMATS["int8"])[0] for word in words]
    if not all(map(math.isfinite, numbers)):
        raise InvalidChoice("NaN and infinity cannot be cast: a tile’s amax must be finite.")
    return numbers


def _elements(x: Floats, cast: Cast) -> pd.DataFrame:
    """One row per element."""
    encoded = quantize(x, cast)
    factors, decoded = encoded.factors, encoded.values
    rows = []
    for (row, column), number in np.ndenumerate(x):
        code = Code(cast.format, int(encoded.codes[row, column]))
        factor, value = factors[row, column], decoded[row, column]
        rows.append(
            {
                "Row": row + 1,
                "Column": column + 1,
                "Number": float(number),
                "Scale": float(factor),
                "Number ÷ scale": float(number / factor),
                "Code": code.hex,
                "Bits": code.spaced,
                "Code value": code.value,
                "Becomes": float(value),
                "Error": float(value) - float(number),
                "What happened": _element_fate(float(number), float(value), float(number / factor), cast.format),
            }
        )
    return pd.DataFrame(rows)


def _element_fate(number: float, value: float, scaled: float, fmt: Format) -> str:
    if abs(scaled) > fmt.max * ROUNDING_SLACK:
        return CLIPPED
    return EXACT if value == number else FLUSHED if value == 0 else ROUNDED


def _fates(x: Floats, cast: Cast) -> tuple[int, int]:
    """How many were clipped, and how many flushed to zero."""
    encoded = quantize(x, cast)
    clipped = np.abs(x) > encoded.factors * np.float32(cast.format.max * ROUNDING_SLACK)
    return int(clipped.sum()), int(((x != 0) & (encoded.values == 0)).sum())


def _lost(x: Floats, cast: Cast) -> str:
    clipped, flushed = _fates(x, cast)
    sqnr = sqnr_db(x, quantize(x, cast).values)
    quality = "nothing lost" if math.isinf(sqnr) else f"{three(sqnr)} dB SQNR"
    return f"{quality}, {clipped} clipped and {flushed} flushed to zero of {many(x.size, 'number')}"


def _cast_in_all(x: Floats, cast: Cast) -> list[str]:
    lines = ["| Format | SQNR (dB) | Clipped | Flushed to zero | Bits per number |", "|:--|--:|--:|--:|--:|"]
    for fmt in FORMATS.values():
        own = Cast(fmt, cast.tile, cast.rule, cast.guard)
        clipped, flushed = _fates(x, own)
        name = f"**{title(fmt)}**" if fmt == cast.format else title(fmt)
        sqnr, bits = three(sqnr_db(x, quantize(x, own).values)), three(own.bits_per_element(*x.shape))
        lines.append(f"| {name} | {sqnr} | {clipped} | {flushed} | {bits} |")
    return lines


def scale_rules() -> tuple[str, str]:
    """What each rule makes of one amax."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        text = linked.text_input("Amax of a tile", "448", key="amax", width=220)
        fmt = format_box("Elements", "element", "e4m3fn")
    amax = read(text or "448", FORMATS["int8"])[0]
    if not math.isfinite(amax) or amax <= 0:
        raise InvalidChoice(f"“{plain(text or '')}” is not an amax: write a number above zero.")
    amax = float(np.float32(amax))
    st.markdown("\n".join(_rule_table(amax, fmt)))
    st.header("Over one binade of amax, the MX rules", anchor=False)
    binade = 2.0 ** math.floor(math.log2(amax))
    curves = {name: _curve(binade, fmt, name) for name in POWER_RULES}
    at = (amax, {name: amax / _scale_of(amax, fmt, name) for name in POWER_RULES})
    figure = charts_formats.landings(curves, fmt.max, at)
    draw(figure, key="formats_rules", alt="Where an amax lands in the format's range under each scale rule")
    st.caption(
        f"Above the dashed line, {exactly(fmt.max)}, the amax is clipped; below half of it, a binade of range is "
        "unused. The dot is the typed amax."
    )
    return _rules_in_words(amax, fmt)


def _rules_in_words(amax: float, fmt: Format) -> tuple[str, str]:
    """Which rules clip, which keep the amax, which waste range."""
    landed = {name: amax / _scale_of(amax, fmt, name) for name in POWER_RULES}
    clipping = [name for name, at in landed.items() if at > fmt.max]
    wasting = [name for name, at in landed.items() if at <= fmt.max / 2]
    answer = f"An amax of {exactly(amax)} in {title(fmt)}: "
    answer += f"{listed(clipping)} clip{'s' if len(clipping) == 1 else ''} it" if clipping else "no MX rule clips it"
    answer += f", {listed(wasting)} leave{'s' if len(wasting) == 1 else ''} half the range unused" if wasting else ""
    scales: dict[str, list[str]] = {}
    for name in POWER_RULES:
        scales.setdefault(as_power(_scale_of(amax, fmt, name)), []).append(name)
    return answer, "Scales: " + "; ".join(f"{scale} by {listed(names)}" for scale, names in scales.items()) + "."


def _rule_table(amax: float, fmt: Format) -> list[str]:
    lines = [
        "| Rule | Scale | Amax ÷ scale | Amax becomes | Relative error (%) | Range used (%) | How |",
        "|:--|--:|--:|--:|--:|--:|:--|",
    ]
    for name, rule in LEVEL_RULES.items():
        scale = _scale_of(amax, fmt, name)
        landed = float(np.float32(amax) / np.float32(scale))
        becomes = float(on_grid(np.array(landed), fmt)) * scale
        clipped = " :orange-badge[clipped]" if landed > fmt.max * ROUNDING_SLACK else ""
        lines.append(
            f"| **{name}** | {as_power(scale)} | {exactly(landed)} | {exactly(becomes)}{clipped} | "
            f"{signed(100 * (becomes / amax - 1))} | {three(100 * landed / fmt.max)} | {plain(rule.meaning)} |"
        )
    return lines


def _scale_of(amax: float, fmt: Format, rule: str) -> float:
    return scale_from_amax(np.array([amax], np.float32), Cast(fmt, TENSOR, RULES[rule])).item()


def _curve(binade: float, fmt: Format, rule: str) -> list[tuple[float, float]]:
    """Amax and where it lands, over one binade; a gap where the scale jumps."""
    xs = binade * np.linspace(1.0, 2.0, 129)[:-1]
    scales = scale_from_amax(xs.astype(np.float32), Cast(fmt, TENSOR, RULES[rule]))
    points: list[tuple[float, float]] = []
    for x, scale, before in zip(xs.tolist(), scales.tolist(), [scales[0], *scales[:-1].tolist()], strict=True):
        points += [(x, math.nan)] if scale != before else []
        points.append((x, x / scale))
    return points


def format_box(label: str, key: str, default: str) -> Format:
    """The choice of a format, in the address under its key."""
    names = list(FORMATS)
    name = linked.selectbox(label, names, names.index(default), key=key, width=190, format_func=lambda n: n.upper())
    return FORMATS[str(name)]
