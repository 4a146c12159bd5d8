"""Codes seen closely: fields, kinds, and the code that a typed number becomes."""

import math
import struct

import ml_dtypes
import numpy as np
import pytest

from fp8dash.choose.formats import FORMATS, FloatFormat, values
from fp8dash.errors import InvalidChoice
from fp8dash.explain.codes import CLIPPED, FLUSHED, NO_CODE, Code, nearest, read, special_codes
from tests.reference import FORMATS as REFERENCE

FLOATS = [f for f in FORMATS.values() if isinstance(f, FloatFormat)]


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
def test_the_formula_of_every_finite_code_is_its_value(fmt):
    for code in (Code(fmt, c) for c in range(1 << fmt.bits)):
        if math.isfinite(code.value):
            text = code.formula.replace("−", "-").replace("×", "*").replace("^", "**")
            assert eval(text) == code.value, code.hex  # noqa: S307 - the text is ours


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_fields_cover_the_bits_and_turning_a_bit_over_twice_changes_nothing(fmt):
    assert sum(width for _, width in Code(fmt, 0).fields) == fmt.bits
    for place in range(fmt.bits):
        turned = Code(fmt, 5).toggled(place)
        assert turned.toggled(place) == Code(fmt, 5)
        assert [a != b for a, b in zip(turned.bits, Code(fmt, 5).bits, strict=True)].index(True) == place


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
def test_a_number_becomes_the_code_that_the_reference_has(fmt):
    vectors = [v for v in REFERENCE["saturating_rne_vectors"] if fmt.name in v]
    assert len(vectors) > 10 or fmt.name == "e3m4"  # the only format without vectors
    for vector in vectors:
        (x,) = struct.unpack(">f", bytes.fromhex(vector["x_hex"][2:]))
        if math.isfinite(x):  # what is not has a code of its own here, where a cast saturates
            assert nearest(x, fmt).code.value == vector[fmt.name], vector


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("e4m3fn", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2), ("e3m4", ml_dtypes.float8_e3m4)],
)
def test_codes_within_the_range_are_ml_dtypes_codes(name, dtype):
    fmt = FORMATS[name]
    xs = np.random.default_rng(3).normal(size=300).astype(np.float32) * np.float32(fmt.max / 5)
    xs = xs[np.abs(xs) <= fmt.max]
    assert [nearest(float(x), fmt).code.code for x in xs] == xs.astype(dtype).view(np.uint8).tolist()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_kinds_say_what_a_code_is(fmt):
    kinds = [Code(fmt, code).kind for code in range(1 << fmt.bits)]
    assert kinds.count("NaN") + kinds.count("infinity") == len(special_codes(fmt))
    if isinstance(fmt, FloatFormat):
        assert kinds.count("zero") == 1 + fmt.negative_zero
        assert kinds.count("subnormal") == 2 * ((1 << fmt.mantissa_bits) - 1)
    else:
        assert kinds.count("integer, unused") == 1


def test_fates_are_told_apart():
    e4m3, int8 = FORMATS["e4m3fn"], FORMATS["int8"]
    assert nearest(1e6, e4m3).fate == CLIPPED and nearest(1e-6, e4m3).fate == FLUSHED
    assert nearest(math.nan, int8).fate == NO_CODE and nearest(-math.inf, e4m3).fate == NO_CODE
    assert nearest(-math.inf, FORMATS["e5m2"]).code.hex == "0xFC"
    assert nearest(-300.0, e4m3).relative == pytest.approx(-0.04)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_a_formats_own_values_are_exact(fmt):
    assert {nearest(value, fmt).fate for value in values(fmt)} == {"exact"}


@pytest.mark.parametrize("text", ["abc", "", "0x100", "0xg1", "1e40", "0b111111111", "--1", "1,2"])
def test_what_is_no_number_or_code_is_one_sentence(text):
    with pytest.raises(InvalidChoice, match="write"):
        read(text, FORMATS["e4m3fn"])
