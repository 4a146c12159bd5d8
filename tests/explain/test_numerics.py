"""The pages' cast in numpy is the runs' cast in torch: code for code, scale for scale, value for value."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8dash.choose.casts import Cast
from fp8dash.choose.formats import FORMATS, FloatFormat, midpoints, neighbours, values
from fp8dash.choose.scaling import GUARDS, RULES, TENSOR, TILES, tile_of
from fp8dash.errors import NotFinite
from fp8dash.explain import numerics
from fp8dash.quant import cast as torch_cast

PAIRS = [(f, r) for f in FORMATS.values() for r in RULES.values()]
ODD_TILES = [*TILES.values(), tile_of("3x5"), tile_of("64x1")]
every_pair = pytest.mark.parametrize(("fmt", "rule"), PAIRS, ids=lambda p: p.name)
SIZES = {"ordinary": 1.0, "tiny": 1e-30, "subnormal": 1e-41, "huge": 1e36}


def data(shape: tuple[int, int], size: float = 1.0) -> np.ndarray:
    """Gaussian numbers with outlier columns, a row of zeros and zeros of both signs."""
    x = np.random.default_rng(5).normal(size=shape).astype(np.float32)
    x[:, ::37] *= 60
    x[0], x[-1, -1] = 0.0, -0.0
    return (x * np.float32(size)).astype(np.float32)


def same(x: np.ndarray, cast: Cast) -> None:
    """Both implementations agree on every bit of codes, scales and values."""
    in_numpy, in_torch = numerics.quantize(x, cast), torch_cast.quantize(torch.from_numpy(x), cast)
    codes = in_torch.codes.view(torch.uint8).numpy() & ((1 << cast.format.bits) - 1)
    np.testing.assert_array_equal(in_numpy.scales, in_torch.scales.numpy(), cast.text)
    np.testing.assert_array_equal(in_numpy.codes, codes, cast.text)
    np.testing.assert_array_equal(in_numpy.values, torch_cast.dequantize(in_torch).numpy(), cast.text)


@every_pair
def test_numpy_and_torch_cast_alike(fmt, rule):
    for tile in ODD_TILES:
        same(data((35, 70)), Cast(fmt, tile, rule))


@pytest.mark.parametrize("size", SIZES)
@every_pair
def test_numpy_and_torch_cast_alike_at_the_ends_of_float32(fmt, rule, size):
    same(data((7, 40), SIZES[size]), Cast(fmt, tile_of("1x16"), rule))


@pytest.mark.parametrize("guard", GUARDS.values(), ids=lambda g: g.name)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_numpy_and_torch_guard_alike(fmt, guard):
    for rule in RULES.values():
        for size in (1.0, 1e-5, 1e-9, 1e-14):
            same(data((5, 33), size), Cast(fmt, tile_of("1x16"), rule, guard))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_every_code_encodes_to_itself(fmt):
    by_code = {code: fmt.decode(code) for code in range(1 << fmt.bits)}
    kept = {code: value for code, value in by_code.items() if abs(value) <= fmt.max}
    assert numerics.encode(np.array(list(kept.values())), fmt).tolist() == list(kept)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_the_grid_is_the_nearest_value_and_a_tie_goes_to_the_even_code(fmt):
    for middle in midpoints(fmt):
        below, above = neighbours(fmt, middle)
        even, away, zero = (float(numerics.on_grid(middle, fmt, r)) for r in numerics.ROUNDINGS.values())
        assert even in (below, above) and numerics.encode(np.array([even]), fmt)[0] % 2 == 0
        assert away == max(below, above, key=abs) and zero == min(below, above, key=abs)


@given(st.floats(-1e5, 1e5), st.sampled_from([f for f in FORMATS.values() if isinstance(f, FloatFormat)]))
@settings(max_examples=200, deadline=None)
def test_rounded_numbers_are_values_and_none_is_nearer(x, fmt):
    grid = np.array(values(fmt))
    nearest = float(numerics.on_grid(x, fmt))
    assert nearest in grid
    assert abs(nearest - x) == np.abs(grid - x).min()


def test_stochastic_rounding_keeps_the_mean():
    for x in (0.1, -0.07, 300.0):
        below, above = neighbours(FORMATS["e4m3fn"], x)
        up = numerics.chance_up(x, below, above)
        assert up * above + (1 - up) * below == pytest.approx(x, rel=1e-12)
    assert numerics.chance_up(448.0, 448.0, 448.0) == 0.0


def test_what_is_not_finite_is_refused():
    with pytest.raises(NotFinite, match="NaN or infinity"):
        numerics.quantize(np.array([[1.0, np.nan]], np.float32), Cast(FORMATS["int8"], TENSOR))
