"""The coverage tree: every weight has a place, areas add up, and nothing that was kept looks cast."""

import csv
import io

import pytest

from fp8dash.choose.records import Layer
from fp8dash.ui.charts.coverage import coverage_tree, leaves_of, stored
from fp8dash.ui.charts.dress import INKS
from fp8dash.ui.charts.figure_data import data_csv
from fp8dash.ui.charts.looks import GREY, tile_colour


def layer(name, rows, cols, cast="", reason=""):
    return Layer(name, rows, cols, cast, "emulated" if cast else "kept", reason, 8.0 if cast else 16.0)


LAYERS = [
    layer("model.embed_tokens", 100, 8, reason="an embedding is looked up"),
    *(layer(f"model.layers.{i}.self_attn.q_proj", 8, 8, "e4m3fn/row") for i in range(3)),
    layer("model.layers.0.mlp.down_proj", 8, 16, reason="skip=model.layers.0.mlp.*"),
    *(layer(f"model.layers.{i}.mlp.down_proj", 8, 16, "e4m3fn/128x128/pow2") for i in (1, 2)),
    layer("lm_head", 100, 8, reason="<b>the head</b>"),
]


@pytest.fixture
def tree():
    (trace,) = coverage_tree(LAYERS, dark=False).data
    return {name: i for i, name in enumerate(trace.ids)}, trace


def test_weights_of_one_name_are_one_leaf_unless_they_were_treated_otherwise():
    counts = {(leaf.path[-1], leaf.cast): leaf.count for leaf in leaves_of(LAYERS)}
    assert counts == {
        ("embed_tokens", ""): 1, ("q_proj", "e4m3fn/row"): 3, ("down_proj", ""): 1,
        ("down_proj", "e4m3fn/128x128/pow2"): 2, ("lm_head", ""): 1,
    }  # fmt: skip


def test_each_branch_holds_just_what_its_leaves_hold(tree):
    places, trace = tree
    for name, i in places.items():
        inside = [trace.values[j] for j in places.values() if trace.parents[j] == name]
        assert not inside or sum(inside) == trace.values[i], name
    assert trace.values[places["model"]] == sum(one.rows * one.cols for one in LAYERS)
    assert all(parent in places or not parent for parent in trace.parents)


def test_colours_are_the_tiles_and_grey_is_what_was_kept(tree):
    _, trace = tree
    drawn = dict(zip(trace.labels, trace.marker.colors, strict=True))
    assert drawn["q_proj<br>e4m3fn/row · 3"] == tile_colour("row")
    assert drawn["down_proj<br>e4m3fn/128x128/pow2 · 2"] == tile_colour("128x128")
    assert {drawn[label] for label in drawn if "kept" in label} == {GREY}


def test_a_reason_is_never_markup_and_the_csv_has_the_areas(tree):
    _, trace = tree
    assert any("kept: &lt;b&gt;the head&lt;/b&gt;" in text for text in trace.hovertext)
    rows = list(csv.reader(io.StringIO(data_csv(coverage_tree(LAYERS, dark=True)))))
    assert ["model/model/embed_tokens", "800"] in [[row[0].rsplit("//", 1)[0], row[3]] for row in rows]


def test_a_tied_head_is_not_stored_and_a_cast_one_is():
    tied = sum(one.rows * one.cols for one in LAYERS) - 800
    assert [one.name for one in LAYERS if one not in stored(LAYERS, tied)] == ["lm_head"]
    assert stored(LAYERS, tied + 800) == LAYERS and stored(LAYERS, 0) == LAYERS
    cast_head = [*LAYERS[:-1], layer("lm_head", 100, 8, "e4m3fn/row")]
    assert stored(cast_head, tied) == cast_head, "it has a weight of its own now, the embedding has not gone"


@pytest.mark.parametrize("dark", [False, True])
def test_text_reads_on_whatever_lies_under_it(dark):
    (trace,) = coverage_tree(LAYERS, dark=dark).data
    under = dict(zip(trace.textfont.color, trace.marker.colors, strict=True))
    assert {INKS[dark], "#000000"} <= set(under) and "#ffffff" not in {INKS[dark]}
