"""Runs of what a checkpoint stores: our own exports give the numbers of the runs that they came from."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from fp8dash.choose.records import Artefact, Layer, Measurement, NeedleCell, StageResult, Window
from fp8dash.choose.request import Request
from fp8dash.errors import InvalidChoice, ModelError
from fp8dash.pipeline import run_stages
from tests.model.exported.test_export import HELD
from tests.tiny import tiny_config, write_tokenizer

SMALL = {"windows": 4, "window_length": 64, "gemm_m": (1,), "needle_lengths": (400,), "needle_depths": (50,)}
ROUND_TRIPS = tuple(text for text in HELD if "128x128" not in text)  # 160 columns are no whole blocks: refused


def measured(request, cache):
    """All rows of a run by stage."""
    return {one.stage: one for one in run_stages(request, frozenset(), cache) if isinstance(one, StageResult)}


def rows(results, kind):
    return [row for result in results.values() for row in result.rows if isinstance(row, kind)]


@pytest.mark.parametrize("text", ROUND_TRIPS)
def test_an_export_measured_as_it_is_stored_gives_the_numbers_of_its_run(tiny, corpus_file, tmp_path, text):
    base = Request.of(model=str(tiny), corpus=str(corpus_file), backend="emulated", **SMALL)
    own = measured(base.but(recipe=text, measures=("perplexity", "needle", "export")), tmp_path)
    (artefact,) = rows(own, Artefact)
    again = measured(base.but(recipe=f"stored={artefact.path}", measures=("perplexity", "needle")), tmp_path)
    if "nvfp4" in text:  # the file's global scale divides, ours multiplies: they round apart
        pairs = zip(rows(own, Window), rows(again, Window), strict=True)
        assert all(one.kld == pytest.approx(other.kld, rel=0.01) for one, other in pairs)
    else:
        assert rows(own, Window) == rows(again, Window)
        assert rows(own, NeedleCell) == rows(again, NeedleCell)
    before, after = ({layer.name: layer for layer in rows(results, Layer)} for results in (own, again))
    assert before.keys() == after.keys()
    for name, layer in before.items():
        assert bool(layer.cast) == bool(after[name].cast), name
        if layer.cast:
            assert after[name].relative_error == pytest.approx(
                layer.relative_error, rel=0.01 if "nvfp4" in text else 1e-6
            ), name
    assert again["load"].facts["recipe"].startswith(f"stored={artefact.path} w=")


@pytest.fixture(scope="module")
def stored(tiny, corpus_file, tmp_path_factory):
    """An FP8_DYNAMIC export of the tiny model."""
    request = Request.of(model=str(tiny), corpus=str(corpus_file), recipe="FP8_DYNAMIC", measures=("export",))
    (artefact,) = rows(measured(request, tmp_path_factory.mktemp("export")), Artefact)
    return artefact.path


def test_a_checkpoint_without_a_baseline_has_its_perplexity_and_needles_and_no_divergence(
    tiny, stored, corpus_file, tmp_path
):
    asked = Request.of(corpus=str(corpus_file), backend="emulated", measures=("perplexity", "needle"), **SMALL)
    beside = measured(asked.but(model=str(tiny), recipe=f"stored={stored}"), tmp_path)
    alone = measured(asked.but(model=stored, recipe=f"stored={stored}"), tmp_path)
    with_base, without = (
        {row.name: row.value for row in rows(results, Measurement) if not row.label} for results in (beside, alone)
    )
    assert without["ppl"] == with_base["ppl"] and without["needle"] == with_base["needle"]
    assert without["needle_logprob"] == with_base["needle_logprob"]
    assert without["bits_per_weight"] == with_base["bits_per_weight"]
    assert "kld" in with_base and not {"kld", "baseline_ppl", "baseline_needle"} & without.keys()
    assert without["weight_sqnr_db"] is None and not rows(alone, Window)
    assert (
        alone["load"].facts["model_hash"]
        == alone["load"].facts["checkpoint_hash"]
        != beside["load"].facts["model_hash"]
    )


def changed(stored, tmp_path, **config):
    """A copy of a checkpoint folder whose config says something else."""
    copy = shutil.copytree(stored, tmp_path / "changed")
    read = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(read | config))
    return copy


def test_a_checkpoint_of_another_model_is_refused(stored, corpus_file, tmp_path):
    torch.manual_seed(1)
    other = tmp_path / "other"
    LlamaForCausalLM(tiny_config(hidden_size=96)).to(torch.bfloat16).save_pretrained(other)
    write_tokenizer(other)
    asked = Request.of(model=str(other), corpus=str(corpus_file), recipe=f"stored={stored}", **SMALL)
    with pytest.raises(ModelError, match=r"was not made from this model: its model.embed_tokens.weight is \(272, 64\)"):
        measured(asked.but(measures=("perplexity",)), tmp_path)


def test_a_plain_model_as_stored_and_a_quantized_one_as_the_model_are_refused(tiny, stored, corpus_file, tmp_path):
    asked = Request.of(corpus=str(corpus_file), **SMALL)
    with pytest.raises(ModelError, match="is not quantized by its config"):
        measured(asked.but(model=str(tiny), recipe=f"stored={tiny}"), tmp_path)
    with pytest.raises(ModelError, match="stored="):
        measured(asked.but(model=stored, recipe="FP8_DYNAMIC"), tmp_path)


def test_a_damaged_checkpoint_is_refused_with_what_is_wrong_in_it(tiny, stored, corpus_file, tmp_path):
    copy = changed(stored, tmp_path)
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    asked = Request.of(model=str(tiny), corpus=str(corpus_file), recipe=f"stored={copy}", **SMALL)
    with pytest.raises(ModelError, match=r"codes have no scale beside them.*layers.0.mlp.up_proj"):
        measured(asked, tmp_path)


def test_another_tokenizer_is_refused(tiny, stored, corpus_file, tmp_path):
    copy = changed(stored, tmp_path)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"]["add_prefix_space"] = True
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    asked = Request.of(model=str(tiny), corpus=str(corpus_file), recipe=f"stored={copy}", **SMALL)
    with pytest.raises(ModelError, match="reads text by another tokenizer"):
        measured(asked, tmp_path)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"recipe": "stored=/x w=int8/row"}, "says more than a checkpoint"),
        ({"recipe": "stored=relative"}, "is not a checkpoint"),
        ({"recipe": "stored=/x", "backend": "native"}, "native is refused"),
        ({"recipe": "stored=/x", "measures": ("export",)}, "a checkpoint is cast already"),
        ({"recipe": "stored=/x", "model": "/x", "measures": ("kv",)}, "there is no baseline"),
    ],
)
def test_what_cannot_be_asked_of_a_checkpoint_is_refused(fields, why):
    with pytest.raises(InvalidChoice, match=why):
        Request.of(**({"model": "demo"} | fields)).checked()
