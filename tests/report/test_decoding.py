"""Decoding speeds set side by side: what is a tie, what may be compared, what is drawn, and what is said instead."""

from dataclasses import replace

import pytest

from fp8dash.report.decoding import Decoding, Speed, alike, contests
from fp8dash.ui.charts.decode import decode_rates, token_gaps
from fp8dash.ui.charts.figure_data import data_csv
from fp8dash.ui.charts.looks import COLOURS, GREY, look
from fp8dash.ui.parts.decoding import in_words
from tests.seed import CPU, H200

NAMES = {"a": "FP8_TENSOR", "b": "FP8_DYNAMIC", "c": "BF16"}


def speed(batch, tokens_per_s, gap=2.0):
    return Speed(batch, tokens_per_s, 128, 64, 30.0, gap, 1.1 * gap, 1.5 * gap)


def decoding(run, *speeds, recipe="FP8_DYNAMIC", **other):
    made = Decoding(run, recipe, "native", "demo (5f1d)", "5f1d", H200, "v1", "128 tokens in", speeds, ())
    return replace(made, **other)


def test_the_fastest_leads_and_five_per_cent_less_is_a_tie():
    decodings = [decoding("a", speed(8, 130.0)), decoding("b", speed(8, 123.6)), decoding("c", speed(8, 100.0))]
    (row,) = contests(decodings)
    assert row.best == ("a", "b") and in_words(row, NAMES) == "tied: FP8_TENSOR, FP8_DYNAMIC; 1.30× BF16"
    (row,) = contests([decodings[0], decoding("b", speed(8, 123.4)), decodings[2]])
    assert row.best == ("a",) and in_words(row, NAMES) == "FP8_TENSOR: 1.05× FP8_DYNAMIC, 1.30× BF16"


def test_the_unquantized_model_wins_where_it_is_faster():
    (row,) = contests([decoding("a", speed(1, 50.0)), decoding("c", speed(1, 100.0))])
    assert in_words(row, NAMES) == "BF16: 2.00× FP8_TENSOR"


def test_only_batches_that_two_runs_share_are_judged():
    rows = contests([decoding("a", speed(1, 10.0), speed(8, 80.0)), decoding("b", speed(8, 60.0), speed(64, 400.0))])
    assert [row.batch for row in rows] == [8] and contests([decoding("a", speed(1, 10.0))]) == []


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"device": CPU}, f"on another device: {CPU}, not {H200}"),
        ({"method": "v2"}, "by another method: v2, not v1"),
        ({"weights": "c0ff", "model": "demo (c0ff)"}, "on another model: demo (c0ff), not demo (5f1d)"),
        ({"way": "eager"}, "decoded another way: eager, not 128 tokens in"),
    ],
)
def test_runs_that_differ_are_left_out_with_what_differs(other, why):
    same = [decoding("b", speed(1, 1.0)), decoding("c", speed(1, 1.0))]
    drawn, others = alike([decoding("a", speed(1, 9.0), **other), *same])
    assert drawn == same and [(one.run, reason) for one, reason in others] == [("a", why)]


def test_runs_without_a_number_are_neither_drawn_nor_compared():
    assert alike([decoding("a", missing=("layers are emulated",))]) == ([], [])


def test_rates_are_a_line_a_run_over_batches_on_log_axes():
    speeds = {"FP8 <b>": [speed(1, 600.0), speed(8, 4200.0)], "BF16": [speed(1, 500.0)]}
    looks = {"FP8 <b>": look("w=e5m2/row a=e5m2/row", "native"), "BF16": look("bf16", "baseline")}
    figure = decode_rates(speeds, looks)
    fp8, bf16 = figure.data
    assert (list(fp8.x), list(fp8.y)) == ([1, 8], [600.0, 4200.0]) and fp8.name == "FP8 &lt;b&gt;"
    assert fp8.marker.symbol == "square" and fp8.line.color == COLOURS["row"] and bf16.line.color == GREY
    assert figure.layout.xaxis.type == figure.layout.yaxis.type == "log"
    assert list(figure.layout.xaxis.ticktext) == ["1", "8"]


def test_runs_that_look_alike_have_dashes_of_their_own():
    looks = dict.fromkeys("abc", look("w=e4m3fn/row a=e4m3fn/row", "native"))
    lines = decode_rates({name: [speed(1, 1.0)] for name in "abc"}, looks).data
    assert len({line.line.dash for line in lines}) == 3


def test_gaps_reach_from_the_median_over_p90_to_p99_and_are_written_out_as_numbers():
    figure = token_gaps({"a": [speed(1, 1.0, 2.0), speed(16, 9.0, 4.0)]}, {"a": look("bf16", "baseline")})
    median, p90 = figure.data
    assert list(median.x) == ["1", "16"] and list(median.y) == [2.0, 4.0] and list(median.error_y.array) == [1.0, 2.0]
    assert list(p90.y) == pytest.approx([2.2, 4.4]) and list(median.error_y.arrayminus) == [0.0, 0.0]
    assert "a,16,4.0,,4.0,6.0" in data_csv(figure)
