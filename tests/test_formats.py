"""Number formats, code by code, against torch, ml_dtypes and computed tables."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8dash.choose.formats import FORMATS, FloatFormat, Format
from fp8dash.quant.cast import DTYPES
from tests.reference import FORMATS as REFERENCE

FLOATS = [f for f in FORMATS.values() if isinstance(f, FloatFormat)]
ORACLES = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "int8": np.int8}


def values(fmt: Format) -> np.ndarray:
    return np.array([fmt.decode(code) for code in range(1 << fmt.bits)])


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_every_code_has_torchs_value(fmt):
    codes = torch.arange(256, dtype=torch.uint8).view(DTYPES[fmt.name])
    np.testing.assert_array_equal(values(fmt), codes.to(torch.float64).numpy())


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_every_code_has_ml_dtypes_value(fmt):
    codes = np.arange(256, dtype=np.uint8).view(ORACLES[fmt.name])
    np.testing.assert_array_equal(values(fmt), codes.astype(np.float64))


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
def test_every_code_and_fact_is_the_reference_tables(fmt):
    facts = REFERENCE["element_formats"][fmt.name]
    expected = [math.nan if v is None else float(v) for v in facts["values_by_code"]]
    np.testing.assert_array_equal(values(fmt), expected)
    assert (fmt.max, fmt.max_code, fmt.min_exponent) == (facts["max"], int(facts["max_code"], 16), facts["emin"])
    assert len({v for v in values(fmt) if math.isfinite(v)}) == facts["distinct_finite_values"]
    assert fmt.has_infinity == bool(facts["inf_codes"])


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_a_code_of_too_many_bits_is_refused(fmt):
    with pytest.raises(ValueError, match="is not a 8-bit code"):
        fmt.decode(1 << fmt.bits)
