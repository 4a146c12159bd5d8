"""The tables of methods.md list what can be chosen and measured, as the values themselves say it."""

from fp8dash.choose.measurements import MEASUREMENTS
from fp8dash.choose.metrics import METRICS
from fp8dash.measure.provenance import METHODS
from tests.docs import tables


def test_the_tables_of_the_methods_are_those_of_the_values():
    text = tables.FILE.read_text("utf-8")
    assert text == tables.filled(text), "run python -m tests.docs.tables"


def test_a_changed_value_shows_as_a_changed_document():
    text = tables.FILE.read_text("utf-8")
    assert (
        tables.filled(text.replace("| `top1` | Top-1 | share | higher |", "| `top1` | Top-1 | share | lower |")) == text
    )


def test_the_methods_tell_of_every_measurement_and_every_method_version():
    text = tables.FILE.read_text("utf-8")
    for metric in METRICS.values():
        assert f"| `{metric.name}` | {metric.title} | {metric.unit or 'none'} |" in text
    for method in METHODS.values():
        assert method in text
    for metric in MEASUREMENTS.values():
        assert metric.end_of or f"| `{metric.name}` | {metric.title} | {metric.unit or 'none'} |" in text
