"""Casting: laws for every format, tile and rule, and values against independent oracles."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8dash.choose.formats import FORMATS, FloatFormat
from fp8dash.choose.recipe import Cast, parse_cast
from fp8dash.choose.scaling import FLOAT32, RULES, TILES
from fp8dash.errors import NotFinite
from fp8dash.quant.cast import dequantize, quantize, round_trip, scale_from_amax, scales_of, spread, to_grid
from tests.reference import FORMATS as REFERENCE

CASTS = [Cast(f, t, r) for f in FORMATS.values() for t in TILES.values() for r in RULES.values()]
FLOATS = [f for f in FORMATS.values() if isinstance(f, FloatFormat)]
SHAPES = [(1, 1), (100, 200), (576, 576), (3, 7168), (130, 33)]
every_cast = pytest.mark.parametrize("cast", CASTS, ids=lambda c: c.text)


def data(shape, *, seed=0, outliers=False):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if outliers:
        x[:, ::37] *= 60
    return x


def step(y, fmt):
    """The distance between neighbouring codes at each scaled value."""
    if not isinstance(fmt, FloatFormat):
        return torch.ones_like(y)
    exponent = torch.frexp(y.abs().double()).exponent - 1
    return torch.ldexp(
        torch.ones_like(y, dtype=torch.float64), exponent.clamp(min=fmt.min_exponent) - fmt.mantissa_bits
    )


@every_cast
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_fast_round_trip_has_the_bits_of_the_codes(cast, shape):
    for dtype in (torch.float32, torch.bfloat16):
        x = data(shape, outliers=True).to(dtype)
        assert torch.equal(round_trip(x, cast), dequantize(quantize(x, cast)).to(dtype))


@every_cast
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_error_is_at_most_half_a_step(cast, shape):
    x = data(shape, outliers=True)
    q = quantize(x, cast)
    scaled = x.double() / spread(q.scales, cast.tile, *shape).double()
    error = (q.codes.double() - scaled).abs()
    assert (
        error <= step(scaled, cast.format) / 2 * (1 + 2**-20)
    ).all()  # the scaled value is itself rounded to float32


@every_cast
def test_a_tile_of_zeros_gives_exact_zeros(cast):
    x = data((256, 256))
    x[:128] = 0
    x[200, :] = 0
    found = dequantize(quantize(x, cast))
    assert torch.equal(found[:128], torch.zeros(128, 256)) and torch.equal(found[200], torch.zeros(256))
    assert torch.equal(dequantize(quantize(torch.zeros(5, 7), cast)), torch.zeros(5, 7))


@every_cast
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_tiny_and_huge_tensors_keep_their_relative_error(cast, size):
    x = data((100, 200))
    moderate, extreme = (dequantize(quantize(x * s, cast)).double() / s for s in (1.0, size))
    x, limit = x.double(), 0.06 if cast.format.name == "e5m2" else 0.03
    for found in (moderate, extreme):
        assert torch.isfinite(found).all()
        assert (found - x).norm() / x.norm() < limit


@every_cast
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_tensor_that_is_not_finite_is_refused_and_never_silently_cast(cast, bad):
    x = data((64, 64))
    x[3, 5] = bad
    with pytest.raises(NotFinite, match="NaN or infinity"):
        quantize(x, cast)
    assert not torch.isfinite(round_trip(x, cast)[3, 5])


@every_cast
def test_casting_twice_changes_nothing_more(cast):
    x = data((130, 200), outliers=True)
    once = round_trip(x, cast)
    twice = round_trip(once, cast)
    assert (twice - once).abs().max() <= 2**-22 * once.abs().max()  # amax / max * max may be an ulp off amax


@every_cast
def test_a_power_of_two_passes_through_the_cast(cast):
    x = data((130, 200), outliers=True)
    assert torch.equal(round_trip(x * 2**9, cast), round_trip(x, cast) * 2**9)


@every_cast
def test_signs_are_symmetric(cast):
    x = data((130, 200))
    assert torch.equal(round_trip(-x, cast), -round_trip(x, cast))


@pytest.mark.parametrize("cast", [c for c in CASTS if c.rule == FLOAT32], ids=lambda c: c.text)
def test_the_largest_of_each_tile_takes_the_top_code(cast):
    x = data((256, 256))
    codes = quantize(x, cast).codes.float().abs()
    assert codes.max() == cast.format.max
    if cast.tile.name == "1x128":
        assert (codes.view(256, 2, 128).amax(-1) == cast.format.max).all()


@pytest.mark.parametrize("tile", TILES.values(), ids=lambda t: t.name)
def test_a_scale_is_that_of_its_tile_and_ragged_edges_are_smaller_tiles(tile):
    x = data((200, 300))
    cast = Cast(FORMATS["e4m3fn"], tile)
    found, (rows, cols) = scales_of(x, cast), tile.grid(200, 300)
    assert found.shape == (rows, cols)
    height, width = tile.rows or 200, tile.cols or 300
    for i, j in {(0, 0), (rows - 1, cols - 1), (rows // 2, cols // 2)}:
        part = x[i * height : (i + 1) * height, j * width : (j + 1) * width]
        assert found[i, j] == part.abs().max() / 448


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
def test_saturating_ties_to_even_vectors_hold(fmt):
    for vector in REFERENCE["saturating_rne_vectors"]:
        x = torch.tensor([int(vector["x_hex"], 16)], dtype=torch.int64).to(torch.uint32).view(torch.float32)
        clamped = x.clamp(-fmt.max, fmt.max)
        expected = vector[fmt.name]
        found = to_grid(clamped.clone(), fmt).item()
        assert found == expected or (expected is None and found != found), vector


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=64))
def test_the_grid_is_ml_dtypes_cast_of_clamped_values(fmt, values):
    clamped = np.clip(np.array(values, np.float32), -fmt.max, fmt.max)
    expected = clamped.astype(getattr(ml_dtypes, f"float8_{fmt.name}")).astype(np.float32)
    np.testing.assert_array_equal(to_grid(torch.from_numpy(clamped.copy()), fmt).numpy(), expected)


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
def test_round_up_scales_are_the_reference_vectors(fmt):
    for vector in REFERENCE["mx_rceil"][fmt.name]:
        amax = torch.tensor([int(vector["amax_hex"], 16)], dtype=torch.int64).to(torch.uint32).view(torch.float32)
        found = scale_from_amax(amax, fmt, RULES["rceil"])
        assert found.item() == 2.0 ** vector["rceil"], vector


def test_round_up_scales_stay_within_e8m0():
    amax = torch.tensor([0.0, 1e-45, 2.0**-126, 3.4e38])
    found = scale_from_amax(amax, FORMATS["e4m3fn"], RULES["rceil"])
    assert found.tolist() == [2.0**-127, 2.0**-127, 2.0**-127, 2.0**120]


TILE_NAMES = {"tensor": "tensor", "row": "row", "1x128": "1x128", "128x128": "128x128", "1x128_ue8m0": "1x128/rceil"}


@pytest.mark.parametrize("key", REFERENCE["sqnr_reference"]["sqnr_db"])
def test_sqnr_is_the_reference_to_a_hundredth_of_a_decibel(key):
    source, fmt, tile = key.split("/")
    rng = np.random.default_rng(0)
    x = rng.laplace(size=(512, 4096)) if source == "laplace" else rng.standard_normal((512, 4096))
    x = x.astype(np.float32)
    if source == "outlier":
        x[:, np.random.default_rng(1).choice(4096, 6, replace=False)] *= 60
    text = "1x32/rceil" if tile == "mx32_rceil" else TILE_NAMES[tile]
    cast = parse_cast(f"{fmt.removesuffix('_127')}/{text}")
    error = dequantize(quantize(torch.from_numpy(x), cast)).numpy().astype(np.float64) - x
    found = 10 * np.log10((x.astype(np.float64) ** 2).sum() / (error**2).sum())
    assert found == pytest.approx(REFERENCE["sqnr_reference"]["sqnr_db"][key], abs=0.01)
