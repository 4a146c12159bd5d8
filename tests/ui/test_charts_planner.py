"""Figures of predictions: points lie under their roof, lines end at what fits, and all is hollow."""

import pytest

from fp8dash.choose.architecture import KNOWN
from fp8dash.choose.presets import recipe_from
from fp8dash.predict.accelerators import ACCELERATORS
from fp8dash.predict.roofline import Plan, curve
from fp8dash.ui.charts.looks import look
from fp8dash.ui.charts.planner import requests, roofline, throughput

NAMES = ("BF16", "FP8_DYNAMIC", "NVFP4")
LOOKS = {name: look(recipe_from(name).text, "emulated") for name in NAMES}


def plans(model, devices):
    return {name: Plan(KNOWN[model], recipe_from(name), ACCELERATORS["B200"], devices) for name in NAMES}


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "DeepSeek-V3"])
@pytest.mark.parametrize("tokens", [1, 64, 8192])
def test_every_product_lies_on_or_under_its_recipes_roof(model, tokens):
    planned = plans(model, 8)
    peaks = {name: plan.product.tflops * 8 for name, plan in planned.items()}
    figure = roofline(peaks, {name: plan.gemms(tokens) for name, plan in planned.items()}, LOOKS, 7.7 * 8)
    for name in NAMES:
        points = next(t for t in figure.data if t.name == name)
        for x, y in zip(points.x, points.y, strict=True):
            assert y <= min(x * 7.7 * 8, peaks[name]) * (1 + 1e-9)
        assert points.marker.symbol.endswith("-open") or name == "BF16"


def test_lines_end_at_the_largest_batch_and_are_named():
    planned = plans("Llama-3.1-8B", 1)
    rooms = {name: plan.largest_batch(4096) for name, plan in planned.items()}
    figure = throughput({name: list(curve(p, 4096, rooms[name])) for name, p in planned.items()}, LOOKS, 32)
    assert {t.name: max(t.x) for t in figure.data} == rooms


def test_what_fits_nowhere_is_not_drawn():
    figure = requests({"BF16": [], "FP8_DYNAMIC": [(512, 9.0)]}, LOOKS, 512)
    assert [t.name for t in figure.data] == ["FP8_DYNAMIC"]
