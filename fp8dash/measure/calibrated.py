"""Scales that were made beforehand, and the share of activations beyond the largest code that they reach."""

from collections.abc import Iterator
from typing import Any

from fp8dash.choose.recipe import Recipe
from fp8dash.choose.records import ARITHMETIC, LOWER, NEITHER, Measurement, RanBy
from fp8dash.model.calibration import scales
from fp8dash.quant.kv_cache import SCALES

METHOD = "scales from the unquantized model's activations, v1"


def calibrated(model: Any, recipe: Recipe) -> Iterator[Measurement]:
    """The scale of each Linear's input that calibration made, and of each layer's keys and values."""
    for name, scale in scales(model):
        note = scale.cast.when.meaning
        yield Measurement("activation_scale", scale.present, "", NEITHER, METHOD, ARITHMETIC, name, note)
    for index, pair in enumerate(getattr(model, SCALES, ())):
        for what, scale in zip(("keys", "values"), pair, strict=True):
            label, note = f"layer {index} {what}", recipe.kv.provenance if recipe.kv else ""
            yield Measurement("kv_scale", float(scale.amax()), "", NEITHER, METHOD, ARITHMETIC, label, note)


def clipped(model: Any, backend: RanBy) -> Iterator[Measurement]:
    """The share of activations beyond the largest code in the windows just measured: of each input, then of all."""
    beyond = elements = 0.0
    for name, scale in scales(model):
        if scale.clipped is None:
            continue
        beyond, elements = beyond + scale.clipped * scale.elements, elements + scale.elements
        yield _clipped(scale.clipped, backend, name)
    if elements:
        yield _clipped(beyond / elements, backend, "")


def _clipped(share: float, backend: RanBy, label: str) -> Measurement:
    return Measurement("activation_clipped", share, "share", LOWER, METHOD, backend, label)
