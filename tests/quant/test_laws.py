"""Laws of casting, for every format, tile and scale rule, on drawn tensors.

Formats x rules are the parameters and each example walks all tiles, so that a failure names its pair and shrinks to one
tensor. Examples are derived from the tests themselves: a run repeats the last one. Tolerances are float32's rounding of
a quotient and nothing else.
"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8dash.choose.casts import Cast, parse_cast
from fp8dash.choose.formats import FORMATS, FloatFormat
from fp8dash.choose.recipe import Recipe, parse_recipe
from fp8dash.choose.scaling import GUARDS, LARGEST_TILE, MSE, RULES, TILES, UNIT, tile_of
from fp8dash.quant.cast import decode, dequantize, quantize, round_trip, rounded, spread

ODD_TILES = [*TILES.values(), tile_of("3x5"), tile_of("64x1")]
SIZES = st.integers(1, 7) | st.sampled_from([31, 33, 127, 130, 150])  # ragged against every tile, or one short of it
SPANS = st.sampled_from([0, 0, 3, 12, 60])  # binades that the bulk of a tensor is spread over
QUOTIENT = 2.0**-24  # largest relative error of a float32 division, and of its operands being none
LOWEST, HIGHEST = -149, 120  # exponents of float32's least subnormal, and of what every cast of it is finite

every_pair = pytest.mark.parametrize(
    ("fmt", "rule"), [(f, r) for f in FORMATS.values() for r in RULES.values()], ids=lambda p: p.name
)
law = settings(max_examples=6, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors this small gain nothing by threads, which wait for each other where a machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@st.composite
def tensors(draw, lowest=LOWEST, highest=HIGHEST):
    """A float32 matrix of normal noise over some binades, with values from anywhere laid over it, and zeros."""
    shape = draw(SIZES), draw(SIZES)
    noise = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    centre, span = draw(st.integers(lowest, highest)), draw(SPANS)
    exponents = noise.uniform(centre - span, centre + span, shape).clip(lowest, highest - 3)  # noise stays under 2^3
    x = noise.standard_normal(shape).clip(-7, 7) * np.exp2(exponents)
    x[: draw(st.integers(0, shape[0]))] *= draw(st.sampled_from([0.0, 1.0, 1.0]))
    size = st.floats(2.0**lowest, 2.0**highest, width=32)
    for value in draw(st.lists(size | size.map(lambda v: -v) | st.just(0.0), max_size=4)):
        x.flat[draw(st.integers(0, x.size - 1))] = value
    return torch.from_numpy(x.astype(np.float32))


def casts(fmt, rule):
    """Of every tile; a searched scale costs twenty casts, so that it is left out of the two odd ones."""
    return [Cast(fmt, tile, rule) for tile in (TILES.values() if rule == MSE else ODD_TILES)]


def step(y, fmt):
    """The distance between neighbouring codes at each scaled value."""
    if not isinstance(fmt, FloatFormat):
        return torch.ones_like(y)
    exponent = (torch.frexp(y.abs()).exponent - 1).clamp(min=fmt.min_exponent)
    return torch.ldexp(torch.ones_like(y), exponent - fmt.mantissa_bits)


@every_pair
@law
@given(tensors(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_fast_round_trip_has_the_values_of_the_codes(fmt, rule, x, dtype):
    for cast in casts(fmt, rule):
        like = x.to(dtype)
        assert torch.equal(round_trip(like, cast), dequantize(quantize(like, cast)).to(dtype)), cast.text


@every_pair
@law
@given(tensors())
def test_casting_a_cast_again_by_the_same_scales_changes_nothing(fmt, rule, x):
    for cast in casts(fmt, rule):
        factors = quantize(x, cast).factors
        once = rounded(x, factors, cast)
        assert torch.equal(rounded(once, factors, cast), once), cast.text


@every_pair
@law
@given(tensors())
def test_the_error_is_at_most_half_a_step_and_what_is_beyond_the_range_takes_the_top(fmt, rule, x):
    for cast in casts(fmt, rule):
        q = quantize(x, cast)
        scaled = x.double() / spread(q.factors, cast.tile, *x.shape).double()
        decoded, rounding = decode(q.codes, fmt).double(), scaled.abs() * QUOTIENT
        within = scaled.abs() - rounding <= fmt.max
        assert ((decoded - scaled).abs() <= step(scaled, fmt) / 2 + rounding)[within].all(), cast.text
        assert torch.equal(decoded[~within], (scaled.sign() * fmt.max)[~within]), cast.text


@every_pair
@law
@given(tensors())
def test_the_cast_of_the_negative_is_the_negative_of_the_cast(fmt, rule, x):
    for cast in casts(fmt, rule):
        assert torch.equal(round_trip(-x, cast), -round_trip(x, cast)), cast.text


@every_pair
@law
@given(tensors())
def test_order_is_kept_within_a_tile(fmt, rule, x):
    for cast in casts(fmt, rule):
        grid = cast.tile.grid(*x.shape)
        tile = spread(torch.arange(grid[0] * grid[1]).view(grid), cast.tile, *x.shape).expand(x.shape).flatten()
        order = np.lexsort((x.flatten(), tile))
        steps, same = round_trip(x, cast).flatten()[order].diff(), tile[order].diff() == 0
        assert (steps[same] >= 0).all(), cast.text


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if rule != UNIT], ids=lambda r: r.name)
@law
@given(tensors(-30, 30), st.integers(-40, 40))
def test_a_power_of_two_passes_through_where_scales_follow_the_tensor(fmt, rule, x, power):
    """Far from float32's ends, where the scales themselves would round or stop."""
    for cast in casts(fmt, rule):
        assert torch.equal(round_trip(x * 2.0**power, cast), round_trip(x, cast) * 2.0**power), cast.text


@every_pair
@law
@given(st.integers(1, LARGEST_TILE), st.integers(1, LARGEST_TILE))
def test_a_casts_text_reads_back_alone_and_in_a_recipe(fmt, rule, rows, cols):
    for guard in GUARDS.values():
        for tile in (*TILES.values(), tile_of(f"{rows}x{cols}")):
            cast = Cast(fmt, tile, rule, guard)
            assert parse_cast(cast.text) == cast
            recipe = Recipe(weights=cast, activations=cast, attention=cast)
            assert parse_recipe(recipe.text) == recipe
