"""Number formats, code by code, against torch, ml_dtypes and computed tables."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8dash.choose.formats import FORMATS, FloatFormat, midpoints, neighbours, values
from fp8dash.quant.cast import DTYPES, decode, encode
from tests.reference import FORMATS as REFERENCE

FLOATS = [f for f in FORMATS.values() if isinstance(f, FloatFormat)]
ORACLES = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e4m3": ml_dtypes.float8_e4m3,
    "e3m4": ml_dtypes.float8_e3m4,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "int8": np.int8,
    "int4": ml_dtypes.int4,
}
every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)


def by_code(fmt):
    return np.array([fmt.decode(code) for code in range(1 << fmt.bits)])


@pytest.mark.parametrize("name", [n for n in DTYPES if n != "int4"])
def test_every_code_has_torchs_value(name):
    codes = torch.arange(256, dtype=torch.uint8).view(DTYPES[name])
    np.testing.assert_array_equal(by_code(FORMATS[name]), codes.to(torch.float64).numpy())


@every_format
def test_every_code_has_ml_dtypes_value(fmt):
    codes = np.arange(1 << fmt.bits, dtype=np.uint8).view(ORACLES[fmt.name])
    np.testing.assert_array_equal(by_code(fmt), codes.astype(np.float64))


@pytest.mark.parametrize("fmt", [f for f in FLOATS if f.name in REFERENCE["element_formats"]], ids=lambda f: f.name)
def test_every_code_and_fact_is_the_reference_tables(fmt):
    facts = REFERENCE["element_formats"][fmt.name]
    np.testing.assert_array_equal(by_code(fmt), [math.nan if v is None else float(v) for v in facts["values_by_code"]])
    assert (fmt.max, fmt.max_code) == (facts["max"], int(facts["max_code"], 16))
    assert (fmt.min_exponent, fmt.max_exponent) == (facts["emin"], facts["emax"])
    assert (fmt.min_normal, fmt.min_subnormal) == (facts["min_normal"], facts["min_subnormal"])
    assert fmt.unit_roundoff == facts["unit_roundoff"]
    assert fmt.decades == pytest.approx(facts["decades_normal"], abs=1e-3)
    assert len(values(fmt)) == facts["distinct_finite_values"]
    assert fmt.has_infinity == bool(facts["inf_codes"])
    not_numbers = {code for code, value in enumerate(by_code(fmt)) if math.isnan(value)}
    assert not_numbers == {int(code, 16) for code in facts["nan_codes"]}


@every_format
def test_every_finite_code_encodes_to_itself(fmt):
    """Zero and the integer that symmetry leaves out aside, codes and values are one to one."""
    finite = [v for v in by_code(fmt) if math.isfinite(v) and abs(v) <= fmt.max]
    decoded = decode(encode(torch.tensor(finite, dtype=torch.float32), fmt), fmt)
    assert decoded.tolist() == finite


@every_format
def test_neighbours_and_midpoints_are_where_rounding_says(fmt):
    for middle in midpoints(fmt):
        below, above = neighbours(fmt, middle)
        assert below < middle < above and middle == (below + above) / 2
        around = torch.tensor([middle * (1 - 1e-6), middle * (1 + 1e-6)], dtype=torch.float32).sort().values
        assert decode(encode(around, fmt), fmt).tolist() == [below, above]
        (tie,) = decode(encode(torch.tensor([middle]), fmt), fmt).tolist()
        assert tie == min((below, above), key=lambda v: int(round(abs(v) / spacing(fmt, v))) % 2)
    assert neighbours(fmt, fmt.max * 2) == (fmt.max, fmt.max)
    assert all(neighbours(fmt, value) == (value, value) for value in values(fmt))


def spacing(fmt, value):
    if not isinstance(fmt, FloatFormat):
        return 1.0
    exponent = max(math.frexp(value)[1] - 1, fmt.min_exponent) if value else fmt.min_exponent
    return math.ldexp(1.0, exponent - fmt.mantissa_bits)


def test_an_ocp_byte_read_as_fnuz_is_half_its_value():
    """REFERENCE["fnuz_reinterpretation"]: true of every finite code but minus zero, which becomes NaN."""
    for ocp, fnuz in (("e4m3fn", "e4m3fnuz"), ("e5m2", "e5m2fnuz")):
        ocp_values, fnuz_values = by_code(FORMATS[ocp]), by_code(FORMATS[fnuz])
        finite = np.isfinite(ocp_values)
        finite[0x80] = False
        np.testing.assert_array_equal(fnuz_values[finite], ocp_values[finite] / 2)
        assert math.isnan(fnuz_values[0x80])
    assert by_code(FORMATS["e4m3fnuz"])[[0x7E, 0x7F, 0xFF]].tolist() == [224.0, 240.0, -240.0]


@every_format
def test_a_code_of_too_many_bits_is_refused(fmt):
    with pytest.raises(ValueError, match=f"is not a {fmt.bits}-bit code"):
        fmt.decode(1 << fmt.bits)


def test_a_format_without_minus_zero_and_without_a_dtype_of_torch_flushes_to_zero():
    """Its code for minus zero is NaN: Graphcore's and TPU's E4M3 with bias 11."""
    fmt = FloatFormat("e4m3b11fnuz", exponent_bits=4, mantissa_bits=3, bias=11, reserved=0, negative_zero=False)
    tiny = torch.tensor([-fmt.min_subnormal / 4, -0.0, -fmt.min_subnormal], dtype=torch.float32)
    assert decode(encode(tiny, fmt), fmt).tolist() == [0.0, 0.0, -fmt.min_subnormal]
