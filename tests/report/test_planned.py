"""Measured decoding beside the planner's predictions: which runs are of the planned model, and what they reach."""

import json

import pytest
from sqlalchemy import insert, update

from db.records import ROW_TABLES, row_values
from db.tables import LayerTable, MeasurementTable, RunTable
from fp8dash.choose.architecture import CONFIGS, KNOWN, read_config
from fp8dash.choose.hardware import Device
from fp8dash.choose.presets import recipe_from
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import Layer
from fp8dash.choose.request import Request
from fp8dash.measure.weight_error import weight_error
from fp8dash.model.swap import cast_model
from fp8dash.predict.accelerators import ACCELERATORS, DEVICES
from fp8dash.predict.roofline import Plan
from fp8dash.report.planned import measured_points
from tests.seed import H200

SMOL, HERE = KNOWN["SmolLM2-135M-Instruct"], ACCELERATORS["H200 SXM"]


def change(store, table, where, **values):
    with store.session() as session:
        session.execute(update(table).where(where).values(**values))


@pytest.mark.parametrize("recipe", ["bf16", "w=e4m3fn/row a=e4m3fn/row"])
def test_a_models_recorded_linears_are_those_of_its_config(loaded, store, recipe):
    swaps = cast_model(loaded.model, parse_recipe(recipe), Device("cpu", ""), "auto")
    layers = [row for row in weight_error(swaps, 1) if isinstance(row, Layer)]
    run, _ = store.add_run(Request(), owner="ada")
    with store.session() as session:
        session.execute(insert(ROW_TABLES[Layer]), [row_values(run, "quantize", layer) for layer in layers])
    config = (loaded.folder / "config.json").read_text("utf-8")
    assert store.linear_shapes([run])[run] == read_config(config).shapes()
    wider = json.dumps(json.loads(config) | {"vocab_size": 4096})
    assert store.linear_shapes([run])[run] != read_config(wider).shapes()


def test_no_two_known_models_have_the_same_linears():
    shapes = [frozenset(model.shapes().items()) for model in KNOWN.values()]
    assert len(set(shapes)) == len(shapes)


def test_every_device_is_an_accelerator():
    assert set(DEVICES.values()) == set(ACCELERATORS)


def test_the_timed_runs_of_a_model_on_a_device_are_found_with_their_share_of_the_bound(store, ids):
    points = measured_points(store, SMOL, "", HERE)
    assert [point.speed.batch for point in points] == [1] * 3 + [8] * 3 + [64] * 3
    assert [point.run.preset for point in points[:3]] == ["FP8_TENSOR", "FP8_DYNAMIC", "BF16"]
    for point in points:
        plan = Plan(SMOL, recipe_from(point.run.recipe), HERE, reach=1.0)
        most = point.speed.batch / plan.decode_s(point.speed.batch, 128 + 64 / 2)
        assert point.share == pytest.approx(point.speed.tokens_per_s / most)


def test_runs_of_other_models_and_devices_and_parts_of_a_device_are_left_out(store, ids):
    assert measured_points(store, KNOWN["Qwen3-8B"], "Qwen/Qwen3-8B", HERE) == []
    assert measured_points(store, SMOL, "", ACCELERATORS["H100 SXM"]) == []
    change(store, RunTable, RunTable.device == H200, device=f"{H200} MIG 1g.18gb")
    assert measured_points(store, SMOL, "", HERE) == []


def test_a_model_of_that_name_with_other_linears_is_another_model(store, ids):
    change(store, RunTable, RunTable.device == H200, model="HuggingFaceTB/SmolLM2-135M-Instruct")
    change(store, LayerTable, LayerTable.name == "lm_head", rows=50000)
    assert measured_points(store, SMOL, CONFIGS[SMOL.name][1], HERE) == []


@pytest.mark.parametrize("name", ["mistralai/Mixtral-8x7B-v0.1", "/models/Mixtral-8x7B-v0.1", "/models/Mixtral-8x7B"])
def test_a_mixture_of_experts_is_found_by_its_name(store, ids, name):
    mixtral = KNOWN["Mixtral-8x7B"]
    assert measured_points(store, mixtral, CONFIGS[mixtral.name][1], HERE) == []
    change(store, RunTable, RunTable.device == H200, model=name)
    assert len(measured_points(store, mixtral, CONFIGS[mixtral.name][1], HERE)) == 9


def test_the_newest_run_of_a_recipe_stands(store, ids):
    again = ids["H200 FP8_DYNAMIC"]
    change(store, RunTable, RunTable.id == again, recipe=recipe_from("FP8_TENSOR").text)
    newest = store.decoded([H200], ["native"], limit=1)[0].id
    assert {point.run.id for point in measured_points(store, SMOL, "", HERE)} == {newest, ids["H200 BF16"]}


def test_casts_by_layer_are_in_the_bound(store, ids):
    run = ids["H200 FP8_TENSOR"]
    bounds = []
    for words in ("", " w[*.down_proj]=bf16"):
        change(store, RunTable, RunTable.id == run, recipe=recipe_from("FP8_TENSOR").text + words)
        bounds.append([point.bound for point in measured_points(store, SMOL, "", HERE) if point.run.id == run])
    assert all(wide < cast for cast, wide in zip(*bounds, strict=True))


def test_a_speed_without_its_counts_of_tokens_leaves_the_bound_open(store, ids):
    change(store, MeasurementTable, MeasurementTable.name == "decode_tokens_per_s", prompt_tokens=None)
    assert {point.share for point in measured_points(store, SMOL, "", HERE)} == {None}
