"""Profiles of tensors on a tiny model: against plain torch, against the casts' own errors, and on the page."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import streamlit as st
import torch
from torch import nn

from db.claims import Claims
from db.store import Store
from db.workers import Workers
from fp8dash.choose.casts import parse_cast
from fp8dash.choose.formats import E4M3FN, INT8
from fp8dash.choose.records import (
    ACTIVATION,
    BINADES,
    STAGES,
    WEIGHT,
    LadderPoint,
    Measurement,
    StageResult,
    TensorProfile,
)
from fp8dash.choose.request import Request
from fp8dash.errors import NotFinite
from fp8dash.measure.corpora import cut_windows, load_corpus
from fp8dash.measure.profile import CASTS, WINDOWS, Inputs, Sums, ladder, profile
from fp8dash.pipeline import STAGES as WALKED
from fp8dash.pipeline import run_stages
from fp8dash.quant.error import error_of_cast
from fp8dash.report.numbers import three
from fp8dash.ui.charts.figure_data import data_csv
from fp8dash.ui.charts.tensors import grid_of, histograms, ladder_lines, outlier_channels, spread_maps
from fp8dash.ui.words import plain
from tests.ui.drawn import opened, page_text

DATA = Path(__file__).parents[1] / "data"
LAYER, CHANNEL = "model.layers.1.mlp.down_proj", 77
OUTLIERS = [142, 590, 1935, 2094, 3090, 3891]  # columns of the published matrix, multiplied by 60
CHECKED = ("e4m3fn/tensor", "e4m3fn/1x128", "e5m2/1x32/rceil", "int8/tensor", "int8/row")
PUBLISHED = {"1x32/rceil": "mx32_rceil"}  # how the file calls what is not a plain tile
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # AppTest leaves its event loop to the collector


@pytest.fixture
def windows(loaded, corpus_file):
    return cut_windows(loaded.tokenizer, load_corpus(str(corpus_file)), 3, 96, loaded.context).ids


@pytest.fixture
def wide(loaded):
    """The tiny model, with one channel of a projection's input made a hundred times as large as the others."""
    with torch.no_grad():
        loaded.model.get_submodule(LAYER.replace("down", "up")).weight[CHANNEL] *= 300
    return loaded.model


def profiled(model, windows):
    rows = list(profile(model, windows))
    profiles = {(row.name, row.kind): row for row in rows if isinstance(row, TensorProfile)}
    points = {(row.tensor, row.kind, row.cast): row for row in rows if isinstance(row, LadderPoint)}
    return profiles, points, {row.name: row for row in rows if isinstance(row, Measurement)}


def inputs_of(model, windows):
    """Every Linear's input over all windows, [tokens, in_features], by hooks of our own."""
    inputs = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _m, x, name=name: inputs.setdefault(name, []).append(x[0][0]))
    with torch.no_grad():
        for ids in windows:
            model(input_ids=ids[None], use_cache=False)
    return {name: torch.cat(parts) for name, parts in inputs.items()}


def test_profiles_are_those_of_plain_torch(loaded, windows):
    profiles, _, medians = profiled(loaded.model, windows)
    tensors = {(name, ACTIVATION): x for name, x in inputs_of(loaded.model, windows).items()}
    tensors |= {(name, WEIGHT): loaded.model.get_submodule(name).weight.detach() for name, _ in tensors}
    assert profiles.keys() == tensors.keys() and len(profiles) == 2 * 15
    for key, x in tensors.items():
        x, row = x.double(), profiles[key]
        assert (row.rows, row.cols) == tuple(x.shape)
        assert row.amax == float(x.abs().max()) and row.zeros == int((x == 0).sum())
        assert row.rms == pytest.approx(float(x.square().mean().sqrt()), rel=1e-12)
        assert sum(row.histogram) + row.zeros == x.numel()
        columns, median = x.abs().amax(0), float(x.abs().amax(0).quantile(0.5))
        assert [columns[i] for i, *_ in row.outliers] == columns.sort(descending=True).values[:10].tolist()
        assert all(columns[i] == amax for i, amax, _ in row.outliers)
        assert row.outliers[0][2] == pytest.approx(row.amax / median, rel=1e-6)  # a float32 median
    spreads = [row.spread for (_, kind), row in profiles.items() if kind == ACTIVATION]
    assert medians["activation_amax_over_rms"].value == pytest.approx(float(np.median(spreads)))
    assert profiles[medians["activation_amax_over_rms"].note.split()[-2][:-1], ACTIVATION].spread == max(spreads)


def test_every_binade_is_counted_exactly():
    """Each float32 that begins a binade or ends one, subnormals too, against frexp."""
    edges = torch.tensor([2.0**b for b in range(-149, 128)])
    x = torch.cat([edges, -edges, edges.nextafter(torch.tensor(0.0)), torch.zeros(3)]).reshape(2, -1)
    sums = Sums(x.shape[1])
    sums.add(x)
    binades = [math.frexp(abs(v))[1] - 1 for v in x.flatten().tolist() if v]
    expected = Counter(min(max(b, BINADES[0]), BINADES[-1]) for b in binades)
    assert sums.zeros == 4  # the least subnormal's neighbour is zero
    assert sums.histogram == tuple(expected[b] for b in BINADES)


def test_a_tensor_looked_at_in_parts_is_the_same(monkeypatch):
    x = torch.randn(37, 24, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    whole, parts = Sums(24), Sums(24)
    whole.add(x)
    monkeypatch.setattr("fp8dash.measure.profile.BLOCK", 100)
    parts.add(x[:20])
    parts.add(x[20:])
    assert whole.profile("", WEIGHT) == parts.profile("", WEIGHT)


def test_a_planted_outlier_channel_is_found_and_ranked_first(wide, windows):
    profiles, points, _ = profiled(wide, windows)
    row = profiles[LAYER, ACTIVATION]
    assert row.outliers[0][0] == CHANNEL and row.outliers[0][2] > 50
    assert row.outlier_channels == sum(1 for *_, ratio in row.outliers if ratio > 6)
    whole, bulk = (getattr(points[LAYER, ACTIVATION, "int8/tensor"], f) for f in ("sqnr_db", "bulk_sqnr_db"))
    assert bulk < whole - 10  # what the outlier's scale leaves of the others


def test_the_ladder_is_the_casts_own_error_of_the_widest_of_each_projection(wide, windows):
    profiles, points, _ = profiled(wide, windows)
    x = inputs_of(wide, windows[:1])
    parts = {}
    for (name, kind), row in profiles.items():
        if kind == ACTIVATION:
            parts.setdefault(name.rsplit(".", 1)[-1], []).append((row.spread, name))
    chosen = {max(rows)[1] for rows in parts.values()}
    assert {name for name, *_ in points} == chosen and len(points) == len(CASTS) * (2 * len(chosen) - 1)
    assert ("lm_head", WEIGHT) not in {key[:2] for key in points}
    for (name, kind, text), point in points.items():
        cast, tensor = parse_cast(text), x[name] if kind == ACTIVATION else wide.get_submodule(name).weight.detach()
        error = error_of_cast(tensor, cast)
        shares = (error.sqnr_db, error.flushed_share, error.clipped_share, cast.bits_per_element(*tensor.shape))
        assert (point.sqnr_db, point.flushed, point.clipped, point.bits) == shares
        assert profiles[name, kind].outlier_channels or point.bulk_sqnr_db == point.sqnr_db


def test_the_bulks_error_is_the_published_one(monkeypatch):
    """512 x 4096 Gaussian numbers with six columns 60 times as large: tests/data/formats.json, made without torch."""
    published = json.loads((DATA / "formats.json").read_text("utf-8"))["sqnr_reference"]
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((512, 4096)).astype(np.float32))
    x[:, OUTLIERS] *= 60
    sums = Sums(4096)
    sums.add(x)
    columns = sums.outlier_columns()
    assert columns.nonzero().flatten().tolist() == OUTLIERS == published["outlier_cols"]
    monkeypatch.setattr("fp8dash.measure.profile.CASTS", [parse_cast(text) for text in CHECKED])
    for point in ladder("x", ACTIVATION, x, columns):
        fmt, _, scales = point.cast.partition("/")
        name = f"outlier/{'int8_127' if fmt == 'int8' else fmt}/{PUBLISHED.get(scales, scales)}"
        # three decimals are published; sums in another order
        assert point.sqnr_db == pytest.approx(published["sqnr_db"][name], abs=2e-3)
        assert point.bulk_sqnr_db == pytest.approx(published["sqnr_db_excluding_outlier_cols"][name], abs=2e-3)


def test_a_broken_model_is_named_where_it_breaks(loaded, windows):
    with torch.no_grad():
        loaded.model.get_submodule(LAYER).weight[0, 0] = math.inf
    with pytest.raises(NotFinite, match=f"{LAYER}.weight holds NaN or infinity"):
        list(profile(loaded.model, windows))


def test_few_windows_are_read_whatever_is_given_and_no_hook_stays(loaded, windows):
    profiles, _, _ = profiled(loaded.model, windows.repeat(3, 1))
    assert profiles[LAYER, ACTIVATION].rows == WINDOWS * windows.shape[1]
    assert not any(module._forward_pre_hooks for module in loaded.model.modules())


def test_layers_that_read_one_tensor_are_counted_once_until_it_is_written_to():
    inputs, x = Inputs(), torch.ones(2, 3)
    inputs.see("q", x)
    inputs.see("k", x.view(2, 3))
    x.mul_(4)
    inputs.see("v", x)
    profiles = {name: sums.profile("", ACTIVATION) for name, sums in inputs.by_name.items()}
    assert profiles["q"] == profiles["k"] and (profiles["k"].amax, profiles["v"].amax) == (1.0, 4.0)
    assert inputs.by_name["q"] is not inputs.by_name["k"]


def test_shares_below_a_magnitude_are_exact_at_powers_of_two_and_bounds_between():
    x = torch.tensor([[0.25, 0.3, 0.5, 0.6], [1.0, 1.5, 2.0, 0.0]])
    sums = Sums(4)
    sums.add(x)
    row = sums.profile("x", WEIGHT)
    assert row.share_below(1.0) == (4 / 7, 4 / 7)
    assert row.share_below(0.55) == (2 / 7, 4 / 7)
    assert row.share_below(2.0**-60) == (0.0, 0.0) and row.share_below(2.0**30) == (1.0, 1.0)


def test_a_maps_csv_holds_the_ratios_and_not_their_places_on_the_log_scale():
    figure = spread_maps({"Weights": {LAYER: 100.0}, "Activations": {LAYER: 3_760.0}})
    lines = data_csv(figure).splitlines()
    assert lines[1].startswith("Weights,") and lines[1].split(",")[3] == "100.0"
    assert lines[2].split(",")[3] == "3760.0"


def test_figures_show_all_elements_and_shade_the_format_s_ranges(wide, windows):
    profiles, points, _ = profiled(wide, windows)
    pair = {kind: profiles[LAYER, kind] for kind in (WEIGHT, ACTIVATION)}
    grids = {kind: grid_of(E4M3FN, row.amax / 448) for kind, row in pair.items()}
    figure = histograms(pair, grids)
    assert [sum(trace.y) for trace in figure.data[:2]] == pytest.approx([100, 100])
    shades = [shape for shape in figure.layout.shapes if shape.xref == "x"]
    assert shades[-1].x1 - 0.0 >= math.log2(pair[WEIGHT].amax) and len(shades) >= 3
    assert grid_of(INT8, 2.0).flushed == 1.0
    maps = {kind: {n: row.spread for (n, k), row in profiles.items() if k == kind} for kind in (WEIGHT, ACTIVATION)}
    heat = spread_maps(maps).data
    assert max(z for line in heat[1].z for z in line if z) == pytest.approx(math.log10(max(maps[ACTIVATION].values())))
    drawn = outlier_channels([row for (n, k), row in profiles.items() if k == ACTIVATION and n.endswith("down_proj")])
    assert (1, CHANNEL) in zip(drawn.data[0].x, drawn.data[0].y, strict=True)
    some = [point for point in points.values() if point.tensor == LAYER]
    lines = ladder_lines({kind: [p for p in some if p.kind == kind] for kind in (WEIGHT, ACTIVATION)}).data
    assert lines[0].x == ("tensor", "row", "128x128", "1x128", "1x32/rceil") and len(lines) == 2 * 3 * 2 + 2


@pytest.fixture(scope="module")
def made(tiny, corpus_file, tmp_path_factory):
    """An installation whose one run is real, a profile of the tiny model: its folder, store, run and stages."""
    folder = tmp_path_factory.mktemp("profiled")
    request = Request.of(
        model=str(tiny), recipe="FP8", corpus=str(corpus_file), measures=("profile",), windows=2, window_length=64,
        backend="emulated",
    )  # fmt: skip
    store = Store(f"sqlite:///{folder / 'fp8dash.sqlite'}")
    run_id, _ = store.add_run(request, owner="ada")
    claims = Claims(store)
    Workers(store).register("w", host="h", slot=0, pid=1)
    claim = claims.claim(run_id, "w")
    results = [item for item in run_stages(request, frozenset(), folder) if isinstance(item, StageResult)]
    assert all(claims.record_stage(claim, result) for result in results) and claims.finish(claim, "finished")
    yield folder, store, run_id, {result.stage: result for result in results}
    store.close()


@pytest.fixture
def installed(made, monkeypatch):
    """The installation, for the pages."""
    folder, store, run_id, results = made
    monkeypatch.setenv("FP8DASH_DATA_DIR", str(folder))
    monkeypatch.delenv("FP8DASH_DATABASE_URL", raising=False)
    yield store, run_id, results
    st.cache_resource.clear()  # it holds this test's store


def test_the_stage_runs_before_the_cast_and_its_rows_come_back_from_json_and_database(installed):
    store, run_id, results = installed
    assert list(results) == ["load", "baseline", "profile", "quantize"] and tuple(WALKED) == STAGES
    result = results["profile"]
    assert StageResult.from_json(json.loads(json.dumps(result.to_json()))) == result
    rows = store.tensor_profiles([run_id])[run_id] + store.ladder_points([run_id])[run_id]
    assert rows == [row for row in result.rows if not isinstance(row, Measurement)]
    assert [run.id for run in store.profiled(5)] == [run_id]
    assert not store.profiled(0) and "profile" not in Request().measures


def test_the_page_names_the_widest_activation_first(installed):
    store, run_id, results = installed
    inputs = [r for r in results["profile"].rows if isinstance(r, TensorProfile) and r.kind == ACTIVATION]
    widest = max(inputs, key=lambda row: row.spread)
    app = opened("tensors")
    assert not app.exception and not app.error
    title = app.title[0].value
    assert title.startswith(
        f"The widest activation is {plain(widest.name)}: amax is {three(widest.spread)} times its RMS"
    )
    assert "E4M3 per tensor flushes" in title
    assert app.selectbox("tensors_layer_" + run_id).value == widest.name
    assert "is below half the smallest code and becomes zero; none is beyond the largest code" in page_text(app)
    assert len(app.get("plotly_chart")) >= 3
    assert list(app.dataframe[-1].value["Scales"][:5]) == ["tensor", "row", "128x128", "1x128", "1x32/rceil"]


def test_a_link_chooses_run_layer_format_and_scale(installed):
    _, run_id, _ = installed
    app = opened("tensors", run=run_id, layer="lm_head", format="INT8", scale="1.0")
    assert not app.exception and not app.error
    assert plain("lm_head") in app.header[0].value and app.header[0].value.endswith("INT8")
    assert "100 % of the non-zero elements is below half" in page_text(app)  # weights of 0.02 under a scale of 1
    app.selectbox("tensors_layer_" + run_id).set_value(LAYER).run()
    assert app.query_params["layer"] == LAYER and plain(LAYER) in app.header[0].value


def test_a_link_to_what_is_not_there_opens_the_newest(installed):
    app = opened("tensors", run="<b>gone</b>", layer="../etc")
    assert not app.exception and not app.error
    assert app.title[0].value.startswith("The widest activation is")


def test_the_run_s_page_tells_the_medians(installed):
    _, run_id, _ = installed
    app = opened("runs", run=run_id)
    assert not app.exception and "Activations: amax over RMS" in list(app.dataframe[0].value["Measurement"])


def test_without_a_profile_the_page_says_how_to_make_one(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8DASH_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("FP8DASH_DATABASE_URL", raising=False)
    app = opened("tensors")
    st.cache_resource.clear()
    assert app.title[0].value == "No run has a profile of its tensors yet"
    assert "--measures profile" in page_text(app)
