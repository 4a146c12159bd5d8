"""No name that comes from outside is markup in a figure, and each leaves it in the CSV as it was written."""

import csv
import io
from collections.abc import Iterator

import plotly.graph_objects as go
import pytest

from fp8dash.choose.metrics import METRICS
from fp8dash.choose.records import (
    BINADES,
    GemmPoint,
    LadderPoint,
    Layer,
    NeedleCell,
    Sensitivity,
    TensorProfile,
    Window,
)
from fp8dash.predict.roofline import Gemm
from fp8dash.report.comparison import Standing
from fp8dash.report.decoding import Speed
from fp8dash.report.study import Bar
from fp8dash.ui.charts import decode, gemm, layers, needles, planner, study, tensors, windows
from fp8dash.ui.charts.coverage import coverage_tree
from fp8dash.ui.charts.figure_data import data_csv
from fp8dash.ui.charts.looks import look
from fp8dash.ui.charts.scatter import quality_scatter
from fp8dash.ui.charts.sensitivity import sensitivity_bars

HOSTILE = ["<img src=x onerror=alert(1)>", "<a href='https://x.y'>BF16</a>", "<b>best</b> & <i>fastest</i>"]
NOT_DRAWN = {"legendgroup", "offsetgroup", "customdata"}


def figures(name: str) -> dict[str, go.Figure]:
    """Every figure whose text holds names from outside, each with this one in every place that takes a name."""
    looks = {name: look("w=int8/row", "native")}
    points = [GemmPoint(m, 64, 64, 1, 100.0, 10.0, 40.0, "scaled_mm", "") for m in (1, 16)]
    cells = {name: [NeedleCell(256, 50, 0.5, 250, "1", "1", "single_1", 0, -0.5, 1.0, -0.25)]}
    row = Standing("run", name, name, None, "finished", name, "native", name, kld=0.1, gemm_speedup=1.5)
    layer = Layer(f"model.layers.0.{name}", 8, 8, "int8/row", "native", name, 8.0, 30.0)
    kept = Layer(f"model.{name}", 8, 8, "", "kept", name, 16.0)
    profile = TensorProfile(f"model.layers.0.{name}", "weight", 8, 8, 1.0, 0.1, 0, 0, (1,) * len(BINADES), ())
    ladder = LadderPoint(name, "weight", "e4m3fn/tensor", 30.0, 30.0, 0.0, 0.0, 8.0)
    speeds = {name: [Speed(1, 10.0, 64, 64, 1.0, 1.0, 1.1, 1.2)]}
    product = Gemm(name, 1.0, 1.0, 1.0, 1.0)
    return {
        "scatter": quality_scatter([row], METRICS["gemm_speedup"], front=[], intervals={}),
        "windows": windows.window_differences({name: [Window(0, 511, 3.1, 3.0, 0.02, 0.9)] * 2}, looks, "kld"),
        "tokens": windows.kld_quantiles({name: {"median": 0.1}}, looks),
        "bars": gemm.gemm_bars({name: points}, looks),
        "rates": gemm.gemm_rates({name: points}, looks),
        "needles": needles.needle_maps(cells),
        "layers": layers.layer_lines({name: [layer]}, looks),
        "layer maps": layers.sqnr_maps({name: {layer.name: 30.0}}),
        "coverage": coverage_tree([layer, kept], dark=False),
        "sensitivity": sensitivity_bars([Sensitivity(name, "p", 1, 10, 8.0, 0.1, 0.05, False)], 0.1),
        "study": study.study_points([Bar(name, 0.1, None, None, "w=int8/row", "native")], "KLD"),
        "decoding": decode.decode_rates(speeds, looks),
        "gaps": decode.token_gaps(speeds, looks),
        "throughput": planner.throughput({name: [(1, 1.0), (2, 2.0)]}, looks, 1),
        "requests": planner.requests({name: [(512, 9.0)]}, looks, 512),
        "roofline": planner.roofline({name: 100.0}, {name: [product]}, looks, 1.0),
        "histograms": tensors.histograms({name: profile}, {name: tensors.Grid(0.001, 0.01, 448.0)}),
        "ladder": tensors.ladder_lines({name: [ladder]}),
    }


def texts(part: object) -> Iterator[str]:
    """All text that plotly may draw."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict):
        for key, value in part.items():
            if key not in NOT_DRAWN:
                yield from texts(value)
    elif isinstance(part, list | tuple):
        for value in part:
            yield from texts(value)


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_is_markup_in_any_figure(name: str) -> None:
    for title, figure in figures(name).items():
        markup = [text for text in texts(figure.to_plotly_json()) if name[:4] in text]
        assert not markup, title


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(
    "title", ["windows", "tokens", "rates", "layers", "scatter", "study", "decoding", "throughput"]
)
def test_a_name_leaves_a_figure_as_csv_as_it_was_written(title: str, name: str) -> None:
    table = list(csv.reader(io.StringIO(data_csv(figures(name)[title]))))
    assert name in {line[0] for line in table}
