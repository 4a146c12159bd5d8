"""Figures from rows: what is drawn, how, and what is left out."""

import csv
import dataclasses
import io
import math

import pytest

from fp8dash.choose.formats import FORMATS
from fp8dash.choose.metrics import METRICS
from fp8dash.choose.presets import PRESETS
from fp8dash.choose.records import GemmPoint, Layer, NeedleCell, Sensitivity, Window
from fp8dash.choose.scaling import TILES
from fp8dash.report.comparison import Standing
from fp8dash.ui.charts.dress import INKS, inked
from fp8dash.ui.charts.figure_data import data_csv
from fp8dash.ui.charts.gemm import gemm_bars, gemm_rates
from fp8dash.ui.charts.layers import layer_map
from fp8dash.ui.charts.looks import COLOURS, GREY, SYMBOLS, look
from fp8dash.ui.charts.needles import (
    needle_changes,
    needle_differences,
    needle_grade_changes,
    needle_grades,
    needle_maps,
)
from fp8dash.ui.charts.scatter import LABEL_PIXELS, apart, quality_scatter
from fp8dash.ui.charts.sensitivity import RANKED, sensitivity_bars
from fp8dash.ui.charts.windows import window_differences
from fp8dash.ui.parts.glyph import CUTS, recipe_glyph
from fp8dash.ui.words import plain

SPEED, SIZE = METRICS["gemm_speedup"], METRICS["model_bytes"]


def standing(name: str = "FP8_DYNAMIC", **values: object) -> Standing:
    """A finished row."""
    numbers = {"kld": 0.03, "gemm_speedup": 1.5, "model_bytes": 1.6e8, "bits_per_weight": 8.05} | values
    row = Standing(name, "demo", PRESETS[name].text, name, "finished", "ada", "native", "H200")
    return dataclasses.replace(row, **numbers)  # type: ignore[arg-type]


def drawn(figure: object) -> list[object]:
    """The traces that stand for runs."""
    return [trace for trace in figure.data if trace.customdata is not None]  # type: ignore[attr-defined]


@pytest.mark.parametrize("tile", TILES)
def test_every_tile_has_a_colour_and_a_picture_of_its_own(tile: str) -> None:
    assert COLOURS[tile] != GREY
    assert list(COLOURS.values()).count(COLOURS[tile]) == 1
    assert tile in CUTS


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_symbol_of_its_own(name: str) -> None:
    assert list(SYMBOLS.values()).count(SYMBOLS[name]) == 1


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_filled_where_native_and_hollow_where_emulated(name: str) -> None:
    native, emulated = (look(PRESETS[name].text, backend).symbol for backend in ("native", "emulated"))
    if PRESETS[name].recipe.is_baseline:
        assert look("bf16", "baseline").colour == GREY
    else:
        assert emulated == f"{native}-open"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_glyph_without_script(name: str) -> None:
    picture = recipe_glyph(PRESETS[name].recipe)
    assert picture.startswith("<svg") and "script" not in picture


def test_the_scatter_draws_what_has_both_numbers_and_nothing_else() -> None:
    rows = [
        standing(),
        standing("MXFP8", gemm_speedup=None),
        standing("INT8", kld=math.nan),
        standing("FP8_BLOCK", kld=None),
        standing("BF16", kld=0.0),
    ]
    figure = quality_scatter(rows, SPEED, front=[], intervals={})
    assert [trace.customdata[0] for trace in drawn(figure)] == ["FP8_DYNAMIC"]
    assert figure.layout.yaxis.type == "log"


def test_the_scatter_of_no_rows_is_empty_and_not_an_error() -> None:
    assert not drawn(quality_scatter([], SIZE, front=[], intervals={}))


def test_intervals_are_drawn_where_they_exist() -> None:
    rows = [standing(), standing("MXFP8", kld=0.02)]
    figure = quality_scatter(rows, SPEED, front=[], intervals={"MXFP8": (0.018, 0.023)})
    bars = {trace.customdata[0]: trace.error_y for trace in drawn(figure)}
    assert bars["MXFP8"].array[0] == pytest.approx(0.003) and bars["MXFP8"].arrayminus[0] == pytest.approx(0.002)
    assert bars["FP8_DYNAMIC"].array is None


def test_the_front_is_a_line_through_its_rows_in_order_of_x() -> None:
    rows = [standing("INT8", gemm_speedup=1.7), standing("MXFP8", kld=0.02, gemm_speedup=1.1)]
    figure = quality_scatter(rows, SPEED, front=["INT8", "MXFP8"], intervals={})
    assert list(figure.data[0].x) == [1.1, 1.7]


@pytest.mark.parametrize(("count", "named"), [(8, True), (9, False)])
def test_up_to_eight_points_are_named_directly(count: int, named: bool) -> None:
    rows = [dataclasses.replace(standing(kld=0.01 * (i + 1)), run=str(i)) for i in range(count)]
    figure = quality_scatter(rows, SPEED, front=[], intervals={})
    assert any(a.text == "FP8_DYNAMIC" for a in figure.layout.annotations) is named


def test_labels_do_not_lie_on_each_other() -> None:
    heights = [0.0, 1.0, 2.0, 40.0, 41.0, 300.0]
    moved = apart(heights)
    assert all(b - a >= LABEL_PIXELS - 1e-9 for a, b in zip(moved, moved[1:], strict=False))
    assert moved[-1] == 300.0


def test_names_that_users_typed_are_no_markup_in_a_figure() -> None:
    row = dataclasses.replace(standing(), preset=None, recipe="w=int8/row skip=<b>x</b>")
    figure = quality_scatter([row], SPEED, front=[], intervals={})
    assert "<b>x" not in figure.to_json().replace("\\u003c", "<")


def test_a_gemm_without_a_native_kernel_has_no_bar() -> None:
    points = [GemmPoint(16, 64, 64, 2, 100.0, None, None, "", "no native kernel")]
    figure = gemm_bars({"MXFP8": points}, {"MXFP8": look(PRESETS["MXFP8"].text, "emulated")})
    bars = [trace for trace in figure.data if trace.y[0] is not None]
    assert [bar.name for bar in bars] == ["BF16"] and bars[0].y[0] == pytest.approx(0.2)
    assert "no native kernel" in bars[0].x[0]


def test_cast_and_multiply_are_apart_and_the_ratio_is_said() -> None:
    points = [GemmPoint(16, 64, 64, 1, 100.0, 10.0, 40.0, "scaled_mm", "")]
    figure = gemm_bars({"INT8": points}, {"INT8": look(PRESETS["INT8"].text, "native")})
    bars = {trace.name: trace.y[0] for trace in figure.data if trace.y[0] is not None}
    assert bars == pytest.approx({"BF16": 0.1, "multiply": 0.04, "cast": 0.01})
    assert figure.data[0].x[0] == "INT8<br>2.00× BF16"


def cell(length: int, depth: int, score: float) -> NeedleCell:
    """A needle."""
    return NeedleCell(length, depth, score, length, "1", "1")


def test_needle_maps_have_depth_downwards_and_the_number_in_each_cell() -> None:
    figure = needle_maps({"INT8": [cell(256, 0, 1.0), cell(256, 50, 0.0), cell(1024, 50, 0.5)]})
    assert figure.layout.yaxis.autorange == "reversed"
    assert [list(line) for line in figure.data[0].text] == [["1", ""], ["0", "0.5"]]


def test_needle_differences_are_centred_at_zero_and_leave_out_what_only_one_has() -> None:
    figure = needle_differences({"INT8": [cell(256, 0, 0.0), cell(512, 0, 1.0)]}, [cell(256, 0, 1.0)])
    assert (figure.data[0].zmin, figure.data[0].zmax) == (-1.0, 1.0)
    assert [list(line) for line in figure.data[0].text] == [["−1"]]


def graded(length: int, depth: int, score: float, *, repeat: int = 0, ln_p: float | None = -0.5) -> NeedleCell:
    """A needle beside the baseline's."""
    return NeedleCell(length, depth, score, length, "1", "1", "single_1", repeat, ln_p, 1.0, -0.25)


def test_graded_needles_are_means_over_repeats_from_their_lowest_to_certainty() -> None:
    cells = [graded(256, 0, 1.0), graded(256, 0, 1.0, repeat=1, ln_p=-0.3), graded(256, 50, 1.0, ln_p=None)]
    figure = needle_grades({"INT8": cells, "MXFP8": [graded(256, 0, 1.0, ln_p=-2.0)]})
    assert [list(line) for line in figure.data[0].text] == [["−0.400"]]  # what is not graded is left out
    assert {(trace.zmin, trace.zmax) for trace in figure.data} == {(-2.0, 0.0)}


def test_changes_from_the_baseline_are_those_of_the_cells_own_prompt_and_centred_at_zero() -> None:
    cells = [graded(256, 0, 0.0), graded(256, 50, 1.0, ln_p=-0.25), cell(512, 0, 1.0)]
    scores, grades = needle_changes({"INT8": cells}), needle_grade_changes({"INT8": cells})
    assert [list(line) for line in scores.data[0].text] == [["−1"], ["0"]]
    assert [list(line) for line in grades.data[0].text] == [["−0.250"], ["0"]]
    assert (grades.data[0].zmin, grades.data[0].zmax) == (-0.25, 0.25)


def test_window_differences_say_mean_and_interval() -> None:
    windows = [Window(i, 511, 3.0 + 0.01 * i, 3.0, 0.02 + 0.001 * i, 0.9) for i in range(8)]
    figure = window_differences({"INT8": windows}, {"INT8": look("w=int8/row", "native")}, "nll")
    assert list(figure.data[0].y) == pytest.approx([0.01 * i for i in range(8)])
    assert figure.data[1].y[0] == pytest.approx(0.035) and figure.data[1].error_y.array[0] > 0


def test_the_noise_floor_is_a_line_where_it_is_in_sight_and_said_where_it_is_not() -> None:
    near = [standing(kld=0.03, kld_noise_floor=0.02), standing("MXFP8", kld=0.01, kld_noise_floor=0.02)]
    far = [standing(kld=0.03, kld_noise_floor=0.0001)]
    for rows, lines, text in ((near, 1, "0.0200 nats"), (far, 0, "0.000100 nats ↓"), ([standing()], 0, "")):
        figure = quality_scatter(rows, SIZE, front=[], intervals={})
        texts = [a.text for a in figure.layout.annotations if a.text.startswith("BF16 against float32")]
        level = [shape for shape in figure.layout.shapes if shape.y0 == shape.y1 and shape.y0 not in (0, 1)]
        assert len(level) == lines and (texts == [f"BF16 against float32: {text}"] if text else not texts)
    windows = [Window(i, 511, 3.0, 3.0, 0.02 + 0.001 * i, 0.9) for i in range(8)]
    for field, lines in (("kld", 1), ("nll", 0)):
        figure = window_differences({"a": windows}, {"a": look("w=int8/row", "native")}, field, 0.021)
        assert sum(a.text.startswith("BF16 against") for a in figure.layout.annotations) == lines


def test_layers_outside_the_blocks_are_drawn_too() -> None:
    layers = [
        Layer("model.layers.0.mlp.up_proj", 8, 8, "int8/row", "native", "", 8.0, 30.0),
        Layer("lm_head", 8, 8, "int8/row", "native", "", 8.0, 40.0),
        Layer("model.norm", 8, 1, "", "kept", "norms are kept", 16.0),
    ]
    figure = layer_map(layers)
    assert list(figure.data[0].y) == ["other", "0"] and list(figure.data[0].x) == ["up", "lm_head"]


@pytest.mark.parametrize("dark", [False, True])
def test_text_takes_the_ink_of_the_theme(dark: bool) -> None:
    figure = inked(quality_scatter([standing()], SPEED, front=[], intervals={}), dark=dark)
    assert figure.layout.xaxis.tickfont.color == INKS[dark]


@pytest.mark.parametrize(
    "text", ["**x**", "[a](b)", ":red[c]", "<script>", "$x$", ":smile:", "a -> b", "www.a.b", "`x`"]
)
def test_text_is_escaped_but_for_zero_width_marks_the_same(text: str) -> None:
    shown = plain(text)
    assert shown.replace("\\", "").replace("\u2060", "") == text
    assert shown != text


def test_predicted_speeds_are_hollow_and_a_point_knows_its_run() -> None:
    rows = [standing(), standing("INT8", kld=0.02)]
    figure = quality_scatter(rows, SPEED, front=[], intervals={}, predicted=["INT8"])
    symbols = {trace.customdata[0]: trace.marker.symbol for trace in drawn(figure)}
    assert symbols == {"FP8_DYNAMIC": "circle", "INT8": "diamond-open"}


def test_many_runs_of_one_look_are_one_trace() -> None:
    rows = [dataclasses.replace(standing(kld=0.01 * (i + 1)), run=str(i)) for i in range(60)]
    (trace,) = drawn(quality_scatter(rows, SPEED, front=[], intervals={"3": (0.03, 0.05)}))
    assert len(trace.customdata) == len(trace.text) == 60
    assert trace.error_y.array[3] == pytest.approx(0.01) and trace.error_y.array[4] == 0


def test_a_figures_numbers_leave_as_csv_without_tags_or_formulas() -> None:
    rows = [standing(kld=1 / 3), dataclasses.replace(standing("INT8"), preset=None, recipe="=SUM(A1)")]
    figure = quality_scatter(rows, SPEED, front=[], intervals={"FP8_DYNAMIC": (0.3, 0.4)})
    table = list(csv.reader(io.StringIO(data_csv(figure))))
    assert table[0] == ["series", "GEMM speed-up (× BF16)", "KLD from BF16 (nats, log)", "value", "low", "high"]
    point = next(row for row in table if row[0] == "FP8_DYNAMIC")
    assert [float(number) for number in (point[1], point[2], *point[4:])] == pytest.approx([1.5, 1 / 3, 0.3, 0.4])
    assert any(row[0] == "'=SUM(A1)" for row in table)
    cells = [NeedleCell(256, 50, 0.5, 250, "1", "1")]
    assert ["", "256", "50 %", "0.5", "", ""] in csv.reader(io.StringIO(data_csv(needle_maps({"": cells}))))


def test_rates_are_drawn_for_what_was_timed_and_the_cast_apart() -> None:
    points = [GemmPoint(m, 100, 50, 2, 10.0, 5.0, 5.0, "scaled_mm", "") for m in (1, 16)]
    figure = gemm_rates({"a": points}, {"a": look("w=e4m3fn/row a=e4m3fn/row", "native")})
    lines = {trace.name: list(trace.y) for trace in figure.data}
    base = [2 * m * 100 * 50 / 10.0 / 1e6 for m in (1, 16)]
    assert lines["BF16"] == base and lines["a with the cast"] == base and lines["a"] == [2 * y for y in base]
    untimed = [GemmPoint(1, 100, 50, 2, 10.0, None, None, "", "no kernel")]
    figure = gemm_rates({"a": untimed}, {"a": look("bf16", "baseline")})
    assert [trace.name for trace in figure.data] == ["BF16"]


def test_groups_are_ranked_by_what_they_cost_and_the_kept_are_marked() -> None:
    rows = [Sensitivity(f"<{i}>", "p", 1, 10, 8.0, 0.001 * i, 0.05 - 0.001 * i, i == 29) for i in range(30)]
    figure = sensitivity_bars(rows, 0.05)
    saved, alone = figure.data
    assert len(alone.y) == RANKED and alone.y[-1] == "&lt;29&gt; (kept)" and list(alone.x) == sorted(alone.x)
    assert list(saved.x) == pytest.approx(list(alone.x))  # where costs add up, the two agree
    assert len(sensitivity_bars(rows, None).data) == 1
