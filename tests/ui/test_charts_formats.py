"""Figures of number formats: every code is drawn, errors are the format's, and clipping is where it should be."""

import math

import pytest

from fp8dash.choose.formats import FORMATS, FloatFormat, midpoints, values
from fp8dash.ui.charts.formats import landings, number_lines
from fp8dash.ui.parts.casting import POWER_RULES, _curve


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_every_positive_code_is_on_the_line_and_no_rounding_exceeds_the_drawn_bound(fmt):
    codes, bound = number_lines([fmt], 1.0).data
    assert list(codes.x) == [value for value in values(fmt) if value > 0]
    for middle in midpoints(fmt):
        if middle > 0:  # halfway between two codes rounding errs most
            below = max(value for value in values(fmt) if value < middle)
            assert 100 * (middle - below) / middle <= drawn_at(middle, bound) * (1 + 1e-12)


def drawn_at(x, line):
    """The line's height at x; both axes are logarithmic."""
    points = list(zip(line.x, line.y, strict=True))
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if x0 <= x <= x1:
            share = math.log(x / x0) / math.log(x1 / x0)
            return y0 * (y1 / y0) ** share
    raise AssertionError(f"{x} is not drawn")


def test_formats_can_be_laid_with_their_largest_codes_at_one_amax():
    figure = number_lines(list(FORMATS.values()), None, scaled=1.0)
    assert {max(trace.x) for trace in figure.data if trace.mode == "markers"} == {1.0}


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if isinstance(f, FloatFormat)], ids=lambda f: f.name)
def test_only_rules_that_clip_cross_the_line(fmt):
    curves = {name: _curve(1.0, fmt, name) for name in POWER_RULES}
    figure = landings(curves, fmt.max, (1.0, dict.fromkeys(curves, 1.0)))
    highest = {name: max(y for _, y in points if not math.isnan(y)) for name, points in curves.items()}
    assert highest["rceil"] <= fmt.max and highest["ceil"] <= fmt.max
    assert (highest["floor"] > fmt.max) == (fmt.max < 2 ** (fmt.max_exponent + 1) * 127 / 128)
    assert max(highest.values()) <= figure.layout.yaxis.range[1]
