"""Casting: edges for every format, tile, rule and guard, and values against independent oracles.

Each test walks all tiles itself: formats x rules are the parameters, so that a failure names the pair. What holds for
any tensor is in test_laws.py.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8dash.choose.casts import Cast, parse_cast
from fp8dash.choose.formats import FORMATS
from fp8dash.choose.scaling import FLOAT32, GUARDS, RULES, TILES, UNIT, tile_of
from fp8dash.errors import NotFinite
from fp8dash.quant.cast import (
    decode,
    dequantize,
    quantize,
    round_trip,
    rounded,
    scale_from_amax,
    scales_of,
    tile_amax,
    to_grid,
)
from tests.choose.test_formats import FLOATS, ORACLES
from tests.reference import FORMATS as REFERENCE

PAIRS = [(f, r) for f in FORMATS.values() for r in RULES.values()]
ODD_TILES = [*TILES.values(), tile_of("3x5"), tile_of("64x1")]
every_pair = pytest.mark.parametrize(("fmt", "rule"), PAIRS, ids=lambda p: p.name)


def data(shape, *, seed=0, outliers=False):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if outliers:
        x[:, ::37] *= 60
    return x


def casts(fmt, rule, tiles=ODD_TILES):
    return [Cast(fmt, tile, rule) for tile in tiles]


@every_pair
def test_a_tile_of_zeros_gives_exact_zeros(fmt, rule):
    for guard in GUARDS.values():
        for tile in ODD_TILES:
            cast = Cast(fmt, tile, rule, guard)
            x = data((150, 140))
            x[:128] = 0
            x[140, :] = 0
            decoded = dequantize(quantize(x, cast))
            assert not decoded[:128].any() and not decoded[140].any(), cast.text
            assert not dequantize(quantize(torch.zeros(5, 7), cast)).any(), cast.text


@every_pair
@pytest.mark.parametrize("size", [2.0**-100, 2.0**100])
def test_tiny_and_huge_tensors_keep_their_relative_error(fmt, rule, size):
    if rule == UNIT:
        return  # nothing is scaled, so nothing can keep its error
    for cast in casts(fmt, rule):
        x = data((100, 200))
        moderate, extreme = (dequantize(quantize(x * s, cast)).double() / s for s in (1.0, size))
        errors = [(decoded - x).norm() / x.norm() for decoded in (moderate, extreme)]
        assert torch.isfinite(extreme).all()
        assert errors[1] < 1.001 * errors[0] + 1e-6, cast.text  # by a power of two, so that all scales move alike


@every_pair
def test_a_tensor_that_is_not_finite_is_refused_and_never_silently_cast(fmt, rule):
    for cast in casts(fmt, rule, TILES.values()):
        for bad in (float("nan"), float("inf"), float("-inf")):
            x = data((64, 64))
            x[3, 5] = bad
            with pytest.raises(NotFinite, match="NaN or infinity"):
                quantize(x, cast)
            assert not torch.isfinite(round_trip(x, cast)[3, 5]), cast.text


@pytest.mark.parametrize("rule", ["float32", "pow2", "rceil"])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_the_scale_of_a_cast_is_found_again_where_no_rule_clips(fmt, rule):
    """To float32's rounding; a searched or clipping scale may be another one."""
    for cast in casts(fmt, RULES[rule]):
        x = data((130, 200), outliers=True)
        once = round_trip(x, cast)
        twice = round_trip(once, cast)
        assert (twice - once).abs().max() <= 2**-22 * once.abs().max(), cast.text


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_the_largest_of_each_tile_takes_the_top_code(fmt):
    x = data((256, 256))
    for cast in casts(fmt, FLOAT32, TILES.values()):
        tops = tile_amax(decode(quantize(x, cast).codes, fmt), cast.tile)
        assert (tops == fmt.max).all(), cast.text


@pytest.mark.parametrize("tile", ODD_TILES, ids=lambda t: t.name)
def test_a_scale_is_that_of_its_tile_and_ragged_edges_are_smaller_tiles(tile):
    x = data((200, 300))
    (scales, outer), (rows, cols) = scales_of(x, Cast(FORMATS["e4m3fn"], tile)), tile.grid(200, 300)
    assert scales.shape == (rows, cols) and outer is None
    height, width = tile.rows or 200, tile.cols or 300
    for i, j in {(0, 0), (rows - 1, cols - 1), (rows // 2, cols // 2)}:
        part = x[i * height : (i + 1) * height, j * width : (j + 1) * width]
        assert scales[i, j] == part.abs().max() / 448


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
def test_saturating_ties_to_even_vectors_hold(fmt):
    vectors = [v for v in REFERENCE["saturating_rne_vectors"] if fmt.name in v]
    assert vectors or fmt.name == "e3m4"  # the only format without vectors
    for vector in vectors:
        x = torch.tensor([int(vector["x_hex"], 16)], dtype=torch.int64).to(torch.uint32).view(torch.float32)
        on_grid, expected = to_grid(x.clamp(-fmt.max, fmt.max), fmt).item(), vector[fmt.name]
        assert on_grid == expected or (expected is None and on_grid != on_grid), vector


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=64))
def test_the_grid_is_ml_dtypes_cast_of_clamped_values(fmt, values):
    clamped = np.clip(np.array(values, np.float32), -fmt.max, fmt.max)
    expected = clamped.astype(ORACLES[fmt.name]).astype(np.float32)
    np.testing.assert_array_equal(to_grid(torch.from_numpy(clamped.copy()), fmt).numpy(), expected)


RULE_KEYS = {"floor": "floor", "ceil": "ceil", "even": "even", "rceil": "rceil", "onebit": "compressed_tensors"}


@pytest.mark.parametrize("rule", RULE_KEYS)
@pytest.mark.parametrize("fmt", [n for n in REFERENCE["mx_scale_rules"] if n in FORMATS])
def test_power_of_two_scales_are_the_reference_vectors(fmt, rule):
    for vector in REFERENCE["mx_scale_rules"][fmt]:
        amax = torch.tensor([int(vector["amax_hex"], 16)], dtype=torch.int64).to(torch.uint32).view(torch.float32)
        scales = scale_from_amax(amax, Cast(FORMATS[fmt], TILES["1x32"], RULES[rule]))
        assert scales.item() == 2.0 ** max(-127, vector[RULE_KEYS[rule]]), vector


def test_what_mxfp8_does_to_448_under_each_rule():
    amax = torch.tensor([448.0])
    scales = {name: scale_from_amax(amax, parse_cast(f"e4m3fn/1x32/{name}")).item() for name in RULE_KEYS}
    assert scales == {"floor": 1.0, "ceil": 2.0, "even": 1.0, "rceil": 1.0, "onebit": 2.0}


def test_round_up_scales_stay_within_e8m0():
    amax = torch.tensor([0.0, 1e-45, 2.0**-126, 3.4e38])
    scales = scale_from_amax(amax, parse_cast("e4m3fn/1x32/rceil"))
    assert scales.tolist() == [2.0**-127, 2.0**-127, 2.0**-127, 2.0**120]


def test_guards_keep_scales_off_zero_each_in_its_way():
    amax = torch.tensor([0.0, 1e-6, 1.0])
    scales = {
        name: scale_from_amax(amax, parse_cast(f"e4m3fn/row/{name}")).tolist() for name in GUARDS if name != "exact"
    }
    of = [(torch.tensor(a) / 448).item() for a in (1e-10, 1e-6, 1e-4, 1e-12, 1.0)]
    least = torch.tensor(1 / (448 * 512)).item()
    assert scales["ct"] == [2.0**-23, of[1], of[4]]
    assert scales["vllm"] == [least, least, of[4]]
    assert scales["vllm-group"] == [of[0], of[1], of[4]]
    assert scales["deepgemm"] == [of[2], of[2], of[4]]
    assert scales["torchao"] == [of[3], of[1], of[4]]
    assert scales["te"] == [1.0, of[1], of[4]]


def test_a_searched_scale_never_errs_more_than_the_plain_one():
    x = data((64, 256), outliers=True)
    for fmt in ("int4", "e2m1", "e4m3fn"):
        for tile in ("tensor", "row", "1x128", "64x64"):
            errors = [
                (round_trip(x, parse_cast(f"{fmt}/{tile}{rule}")) - x).abs().pow(2.4).sum() for rule in ("", "/mse")
            ]
            assert errors[1] <= errors[0] * (1 + 1e-6)


def test_two_level_scales_multiply_to_the_whole():
    x = data((64, 256), outliers=True)
    q = quantize(x, parse_cast("e2m1/1x16/nvfp4"))
    assert q.outer.item() == (x.abs().max() / (448 * 6)).item()
    assert q.scales.max() == 448 and torch.equal(q.scales, q.scales.to(torch.float8_e4m3fn).float())
    moss = quantize(x, parse_cast("e4m3fn/1x32/moss"))
    assert moss.outer.item() == (x.abs().max() / 448).item()
    assert (torch.frexp(moss.scales).mantissa == 0.5).all() and moss.scales.max() == 1


TILE_TEXT = {"col": "column", "mx32_floor": "1x32/floor", "mx32_rceil": "1x32/rceil", "nvfp4": "1x16/nvfp4",
             "unscaled": "tensor/unit", "1x128_ue8m0": "1x128/pow2"}  # fmt: skip
FORMAT_TEXT = {"e4m3_ieee": ("e4m3", ""), "int8_127": ("int8", ""), "int8_127p5": ("int8", "/ct")}
SQNR = REFERENCE["sqnr_reference"]


@pytest.mark.parametrize("source", ["gauss", "laplace", "outlier"])
def test_sqnr_is_the_reference_to_a_hundredth_of_a_decibel(source):
    rng, outliers = np.random.default_rng(0), np.array(SQNR["outlier_cols"])
    x = rng.laplace(size=(512, 4096)) if source == "laplace" else rng.standard_normal((512, 4096))
    x = torch.from_numpy(x.astype(np.float32))
    if source == "outlier":
        x[:, outliers] *= 60
    bulk = torch.ones(4096, dtype=torch.bool)
    bulk[outliers] = False
    for key in (k for k in SQNR["sqnr_db"] if k.startswith(f"{source}/")):
        _, name, tile = key.split("/")
        fmt, guard = FORMAT_TEXT.get(name, (name, ""))
        error = (dequantize(quantize(x, parse_cast(f"{fmt}/{TILE_TEXT.get(tile, tile)}{guard}"))) - x).double()
        assert decibels(x, error) == pytest.approx(SQNR["sqnr_db"][key], abs=0.01), key
        if key in SQNR["sqnr_db_excluding_outlier_cols"]:
            expected = SQNR["sqnr_db_excluding_outlier_cols"][key]
            assert decibels(x[:, bulk], error[:, bulk]) == pytest.approx(expected, abs=0.01), key


def decibels(x, error):
    return float(10 * torch.log10(x.double().square().sum() / error.square().sum()))


def test_e4m3_is_blind_to_an_outlier_that_ruins_int8():
    table = REFERENCE["outlier_ratio_sweep_per_tensor"]["table"]
    bulk = torch.from_numpy(np.random.default_rng(0).standard_normal(2**20).astype(np.float32))[None]
    for amax, formats in table.items():
        for name, expected in formats.items():
            cast = parse_cast(f"{FORMAT_TEXT.get(name, (name, ''))[0]}/tensor")
            decoded = rounded(bulk, torch.tensor([[float(amax) / cast.format.max]]), cast)
            assert decibels(bulk, (decoded - bulk).double()) == pytest.approx(expected["sqnr_db"], abs=0.02), (
                amax,
                name,
            )
            assert 100 * float((decoded == 0).float().mean()) == pytest.approx(expected["zero_pct"], abs=0.01)
