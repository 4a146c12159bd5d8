"""A run whose model passes block by block has the rows of the run whose model is loaded whole."""

from collections import Counter
from dataclasses import replace

import pytest

from fp8dash.choose.presets import recipe_from
from fp8dash.choose.records import Layer, Measurement, Progress, StageResult, Window
from fp8dash.choose.request import Request
from fp8dash.errors import InvalidChoice
from fp8dash.model.streaming import way
from fp8dash.model.streaming.states import last_hidden_states
from fp8dash.pipeline import run_stages
from tests.families import write_family

RECIPES = ("BF16", "FP8_DYNAMIC", "w=int8/row also=lm_head,embeddings skip=*.o_proj", "w=e4m3fn/row attn=e4m3fn/tensor")


@pytest.fixture
def asked(tiny, corpus_file):
    request = Request.of(model=str(tiny), corpus=str(corpus_file), backend="emulated", measures=("perplexity",))
    return request.but(windows=4, window_length=64)


def rows(request, cache, beside=()):
    """All rows of a run, and the facts of its stages."""
    items = run_stages(request, frozenset(), cache, lambda _: None, {}, beside)
    stages = [item for item in items if isinstance(item, StageResult)]
    return [row for stage in stages for row in stage.rows], {k: v for stage in stages for k, v in stage.facts.items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_block_by_block_has_the_rows_of_one_that_is_loaded_whole(asked, recipe, tmp_path):
    whole, facts = rows(asked.but(recipe=recipe, loading="whole"), tmp_path / "whole")
    blocks, block_facts = rows(asked.but(recipe=recipe, loading="blocks"), tmp_path / "blocks")
    assert blocks == whole
    assert {type(row) for row in blocks} == {Layer, Window, Measurement}
    assert any(row.name == "kld_noise_floor" and row.value for row in blocks if isinstance(row, Measurement))
    same = ("model_hash", "corpus_hash", "backend", "parameters")
    assert [facts[name] for name in same] == [block_facts[name] for name in same]
    assert block_facts["loading"].startswith("block by block, in about") and "loading" not in facts


def test_a_run_finds_what_another_recipes_pass_gave_of_it(asked, tmp_path, monkeypatch):
    passes = Counter()

    def counted(folder, recipes, *args, **kwargs):
        passes[len(recipes)] += 1
        return last_hidden_states(folder, recipes, *args, **kwargs)

    monkeypatch.setattr("fp8dash.streamed.last_hidden_states", counted)
    asked = asked.but(loading="blocks")
    beside = [recipe_from(text).text for text in RECIPES] + ["kv=e4m3fn/tensor", "stored=/models/x", "from=later"]
    first, _ = rows(asked.but(recipe=RECIPES[1]), tmp_path, beside)
    assert passes == {4: 1}, "the baseline beside the recipes"
    others = {recipe: rows(asked.but(recipe=recipe), tmp_path)[0] for recipe in RECIPES[2:]}
    assert passes == {4: 1} and not list((tmp_path / "passes").iterdir())
    for recipe, stored_rows in others.items():
        assert stored_rows == rows(asked.but(recipe=recipe, loading="whole"), tmp_path / "whole")[0]
    assert rows(asked.but(recipe=RECIPES[1]), tmp_path)[0] == first and passes == {4: 1, 2: 1}


def test_a_run_that_stops_early_stops_at_the_same_window(asked, tmp_path):
    asked = asked.but(windows=16, window_length=32, until=0.5, recipe="w=int4/row a=int8/row")
    whole, _ = rows(asked.but(loading="whole"), tmp_path / "whole")
    assert rows(asked.but(loading="blocks"), tmp_path / "blocks")[0] == whole
    assert sum(isinstance(row, Window) for row in whole) < 16


@pytest.mark.parametrize("family", ["mixtral", "gemma2", "gpt2", "qwen3_next"])
def test_other_families_too(asked, family, tmp_path):
    asked = asked.but(model=str(write_family(family, tmp_path / family)), recipe="FP8_DYNAMIC", windows=2)
    whole, _ = rows(asked.but(loading="whole"), tmp_path / "whole")
    assert rows(asked.but(loading="blocks"), tmp_path / "blocks")[0] == whole


def test_a_model_goes_whole_where_it_fits_and_block_by_block_where_it_does_not(asked, tmp_path, monkeypatch):
    messages = [item.message for item in run_stages(asked, frozenset(), tmp_path) if isinstance(item, Progress)]
    assert any(message.startswith("reading weights") for message in messages)
    monkeypatch.setattr(way, "free_memory", lambda _where: 1 << 20)
    messages = [item.message for item in run_stages(asked, frozenset(), tmp_path) if isinstance(item, Progress)]
    assert any("block by block, in about" in message and "0.0 are free" in message for message in messages)
    assert any(message == "block 2 of 2, recipe 1 of 1" for message in messages)
    with pytest.raises(InvalidChoice, match="block by block, which measures perplexity alone: leave needle out"):
        rows(asked.but(measures=("perplexity", "needle"), needle_lengths=(400,)), tmp_path)
    with pytest.raises(InvalidChoice, match="scales are made from calibration text"):
        rows(asked.but(recipe="w=e4m3fn/tensor a=e4m3fn/tensor/static"), tmp_path)
    with pytest.raises(InvalidChoice, match="native is refused block by block"):
        rows(replace(asked, backend="native"), tmp_path)


def test_free_memory_is_what_limits_leave():
    import resource

    import torch

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, hard))
    try:
        assert 0 < way.free_memory(torch.device("cpu")) < 1 << 40
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
