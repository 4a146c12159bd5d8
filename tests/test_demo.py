"""The demo study on the real model: what a newcomer sees must be true."""

import json
import math
import subprocess
import sys

import pytest
import torch

from fp8dash.choose.hardware import Device
from fp8dash.choose.presets import DEMO_STUDY, PRESETS
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import Layer, Measurement, StageResult
from fp8dash.choose.request import Request
from fp8dash.measure.baseline import hidden_states
from fp8dash.measure.corpora import cut_windows, load_corpus
from fp8dash.model.load import demo_file, load, locate
from fp8dash.model.streaming.states import LastStates, RecipeSwap, last_hidden_states
from fp8dash.model.swap import cast_model
from fp8dash.model.xray.xray import xray
from fp8dash.pipeline import run_stages

pytestmark = pytest.mark.demo
FINE = "w=e4m3fn/1x32 a=e4m3fn/1x32"  # float32 scales: the ladder's last step, which powers of two give away


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def study(cache):
    """Values by recipe: perplexity for all eight and the fine one, the needle for the baseline."""
    values = {}
    for recipe in (*DEMO_STUDY, FINE):
        measures = ("perplexity", "needle") if recipe == "BF16" else ("perplexity",)
        request = Request.of(recipe=recipe, backend="emulated", measures=measures)
        rows = [
            row
            for item in run_stages(request, frozenset(), cache)
            if isinstance(item, StageResult)
            for row in item.rows
        ]
        values[recipe] = {row.name: row.value for row in rows if isinstance(row, Measurement)}
    return values


def test_the_baselines_perplexity_is_plain_transformers(study, cache):
    loaded = load(locate("demo", cache), torch.device("cpu"))
    windows = cut_windows(loaded.tokenizer, load_corpus("pydocs"), 8, 512, loaded.context).ids
    with torch.no_grad():
        losses = [float(loaded.model(input_ids=ids[None], labels=ids[None]).loss) for ids in windows]
    assert study["BF16"]["ppl"] == pytest.approx(math.exp(sum(losses) / 8), rel=1e-4)


def test_the_baseline_does_not_differ_from_itself_and_finds_the_needle(study):
    assert study["BF16"]["kld"] == 0.0 and study["BF16"]["top1"] == 1.0
    assert study["BF16"]["needle"] >= 0.9


def test_the_file_that_the_demo_was_made_of_loses_nothing_against_it(cache):
    request = Request.of(recipe=f"stored={demo_file()}", measures=("perplexity",), windows=1, window_length=128)
    stages = [item for item in run_stages(request, frozenset(), cache) if isinstance(item, StageResult)]
    values = {row.name: row.value for one in stages for row in one.rows if isinstance(row, Measurement)}
    assert values["kld"] == 0.0 and values["weight_sqnr_db"] is None and values["uncast_share"] == 0.0
    casts = {layer.cast for one in stages for layer in one.rows if isinstance(layer, Layer)}
    assert casts == {"", "q4_1", "q8_0"}
    assert values["model_bytes"] == pytest.approx(xray(demo_file()).size_bytes, rel=0.01), "norms are 32 bits there"


def test_divergence_falls_as_float32_scaled_tiles_get_finer(study):
    kld = {name: values["kld"] for name, values in study.items()}
    assert max(kld["FP8_TENSOR"], kld["FP8_DYNAMIC"]) < 0.05
    assert min(kld["FP8_TENSOR"], kld["FP8_DYNAMIC"]) > kld["FP8_BLOCK"] > kld[FINE] > 0.005


def test_power_of_two_scales_give_the_gain_of_fine_tiles_away(study):
    """E4M3's relative step does not depend on the scale; only amax landing on the top code does, which MX gives up."""
    assert study["MXFP8"]["kld"] > 1.5 * study[FINE]["kld"]


def test_e5m2_is_coarser_and_int8_per_tensor_collapses(study):
    kld = {name: values["kld"] for name, values in study.items()}
    assert kld["FP8_E5M2"] > 2.5 * kld["FP8_DYNAMIC"]
    assert kld["INT8_TENSOR"] > 10 * kld["FP8_TENSOR"]


@torch.no_grad()
def test_block_by_block_the_real_model_is_the_one_loaded_whole(cache):
    folder, here, cpu = locate("demo", cache), torch.device("cpu"), Device("cpu", "CPU")
    loaded, recipe = load(folder, here), parse_recipe(PRESETS["FP8_DYNAMIC"].text)
    ids = cut_windows(loaded.tokenizer, load_corpus("pydocs"), 1, 64, loaded.context).ids
    items = list(last_hidden_states(folder, [recipe], ids, cpu, here, backend="emulated", scratch=cache))
    swaps = [item.swap for item in items if isinstance(item, RecipeSwap)]
    assert swaps == list(cast_model(loaded.model, recipe, cpu, "emulated"))
    (states,) = (item.states for item in items if isinstance(item, LastStates))
    assert torch.equal(states[:-1], hidden_states(loaded.model, ids))


UNDER_A_LIMIT = """
import json, resource, sys
from pathlib import Path
import torch, transformers
from fp8dash.choose.records import StageResult
from fp8dash.choose.request import Request
from fp8dash.pipeline import run_stages

resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[3]), resource.RLIM_INFINITY))
request = Request.from_json(json.loads(sys.argv[1]))
for item in run_stages(request, frozenset(), Path(sys.argv[2])):
    if isinstance(item, StageResult):
        print(json.dumps(item.to_json()))
"""


def test_the_demo_passes_block_by_block_in_less_memory_than_its_weights_take_with_the_same_numbers(cache):
    request = Request.of(recipe="FP8_DYNAMIC", backend="emulated", measures=("perplexity",), windows=2)
    request = request.but(window_length=256)
    folder = locate("demo", cache)
    weights = 2 * load(folder, torch.device("cpu")).model.num_parameters()
    whole = [item for item in run_stages(request, frozenset(), cache) if isinstance(item, StageResult)]
    limit = int(0.4 * weights) + (600 << 20)
    for file in (cache / "baselines").glob("*.safetensors"):
        file.unlink()  # else the pass would not make its own
    given = [json.dumps(request.to_json()), str(cache), str(limit)]
    made = subprocess.run([sys.executable, "-c", UNDER_A_LIMIT, *given], capture_output=True, text=True, check=True)
    stages = [StageResult.from_json(json.loads(line)) for line in made.stdout.splitlines()]
    assert stages[0].facts["loading"].startswith("block by block")
    assert [stage.rows for stage in stages] == [stage.rows for stage in whole]
