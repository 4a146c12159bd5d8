"""The gradient lens on a tiny model: against autograd, against the casts themselves, and on the run's page."""

import gc
import math
import weakref
from statistics import median

import pytest
import streamlit as st
import torch
from torch import nn
from torch.nn import functional as F

from db.records import ROW_TABLES, row_values
from db.store import Store
from fp8dash import places
from fp8dash.choose.records import STAGES, Measurement, Progress, StageResult
from fp8dash.choose.request import MEASURES, Request
from fp8dash.cli import _parser
from fp8dash.errors import NotFinite
from fp8dash.measure.corpora import cut_windows, load_corpus
from fp8dash.measure.gradients import CASTS, WINDOWS, backward, gradients, watched
from fp8dash.pipeline import STAGES as WALKED
from fp8dash.pipeline import run_stages
from fp8dash.quant.cast import round_trip
from tests.seed import fill
from tests.ui.drawn import opened, page_text

KINDS = 3 * len(CASTS) + 2
LAYER = "model.layers.0.mlp.up_proj"
SMALL = {"windows": 4, "window_length": 64, "gemm_m": (1,), "backend": "emulated"}


@pytest.fixture
def windows(loaded, corpus_file):
    return cut_windows(loaded.tokenizer, load_corpus(str(corpus_file)), 3, 96, loaded.context).ids


def seen(model, ids):
    """Every Linear's output gradient [tokens, out] over one window."""
    by_layer = {}
    with watched(model, lambda name, gradient: by_layer.update({name: gradient[0].clone()})):
        backward(model, ids)
    return by_layer


def by_label(model, windows):
    rows = [row for row in gradients(model, windows) if isinstance(row, Measurement)]
    return {(row.name.removeprefix("gradient_"), row.label): row for row in rows}


def test_gradients_are_those_of_plain_autograd(loaded, windows):
    model, ids, outs = loaded.model, windows[0], {}
    by_layer = seen(model, ids)
    model.get_input_embeddings().weight.requires_grad_(True)
    for name in by_layer:
        model.get_submodule(name).register_forward_hook(lambda _m, _x, out, name=name: outs.update({name: out}))
    loss = F.cross_entropy(model(input_ids=ids[None], use_cache=False).logits[0, :-1].float(), ids[1:])
    for (name, out), theirs in zip(outs.items(), torch.autograd.grad(loss, list(outs.values())), strict=True):
        assert torch.equal(by_layer[name], theirs[0]), name
        assert out.shape[1:] == by_layer[name].shape and theirs.any()


def test_the_loss_is_the_mean_over_scored_tokens(loaded, windows):
    """d loss / d logits = (softmax - one-hot) / scored tokens, and the last token is not scored."""
    ids = windows[0]
    with torch.no_grad():
        logits = loaded.model(input_ids=ids[None]).logits[0].float()
    wanted = (logits[:-1].softmax(-1) - F.one_hot(ids[1:], 272)) / (len(ids) - 1)
    gradient = seen(loaded.model, ids)["lm_head"].float()
    torch.testing.assert_close(gradient[:-1], wanted, rtol=2**-7, atol=1e-9)  # one bfloat16 rounding of it
    assert not gradient[-1].any()


def test_statistics_are_those_of_the_casts_over_all_windows(loaded, windows):
    statistics = by_label(loaded.model, windows)
    parts = [seen(loaded.model, ids)[LAYER] for ids in windows]
    x = torch.cat(parts).double()
    assert [cast.text for cast in CASTS] == ["e4m3fn/tensor", "e5m2/tensor"]
    for cast in CASTS:
        y = torch.cat([round_trip(part.float(), cast) for part in parts]).double()  # a scale for each window
        fmt = cast.format.name
        sqnr = 10 * math.log10(x.square().sum() / (x - y).square().sum())
        assert statistics[f"sqnr_db_{fmt}", LAYER].value == pytest.approx(sqnr, rel=1e-6)
        assert statistics[f"flushed_{fmt}", LAYER].value == ((y == 0) & (x != 0)).sum() / (x != 0).sum()
        assert statistics[f"clipped_{fmt}", LAYER].value == 0.0  # a scale made of its own amax clips nothing
    assert statistics["amax", LAYER].value == x.abs().max()
    assert statistics["rms", LAYER].value == pytest.approx(float(x.square().mean().sqrt()), rel=1e-6)


def test_every_linear_has_its_rows_and_the_model_their_medians(loaded, windows):
    statistics = by_label(loaded.model, windows)
    linears = [name for name, module in loaded.model.named_modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 15 and len(statistics) == KINDS * (len(linears) + 1)
    assert {label for _, label in statistics} == {"", *linears}
    sqnr = {name: statistics["sqnr_db_e5m2", name].value for name in linears}
    overall = statistics["sqnr_db_e5m2", ""]
    assert overall.value == median(sqnr.values())
    assert f"median of 15 layers; worst {min(sqnr, key=sqnr.get)}: " in overall.note
    assert all(row.value is not None and row.method.endswith(", v1") for row in statistics.values())


def test_nothing_is_kept_of_the_pass_and_parameters_get_no_gradient(loaded, windows):
    model, alive = loaded.model, []
    model.lm_head.register_forward_hook(lambda _m, _x, out: alive.append(weakref.ref(out)))
    with watched(model, lambda _name, gradient: alive.append(weakref.ref(gradient))):
        gc.disable()  # what is freed is freed at once, not by the collector
        try:
            backward(model, windows[0])
            assert len(alive) == 16 and not any(ref() is not None for ref in alive)
        finally:
            gc.enable()
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    model.lm_head._forward_hooks.clear()
    assert not any(module._forward_hooks for module in model.modules())
    assert not model(input_ids=windows[:1]).logits.requires_grad


def test_hooks_are_gone_when_a_run_is_cancelled_or_fails(loaded, windows):
    model = loaded.model
    steps = gradients(model, windows)
    assert isinstance(next(steps), Progress) and isinstance(next(steps), Progress)
    steps.close()
    assert not any(module._forward_hooks for module in model.modules())
    model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NotFinite, match="loss is NaN or infinity"):
        list(gradients(model, windows))
    assert not any(module._forward_hooks for module in model.modules())


def test_a_gradient_that_overflows_is_refused_by_name(loaded, windows):
    model = loaded.model
    model.model.layers[1].register_full_backward_hook(lambda _m, _x, out: (out[0] * math.inf,))
    with pytest.raises(NotFinite, match=r"output gradient of model\.layers\.0\.mlp\.down_proj holds NaN or infinity"):
        list(gradients(model, windows))


def test_a_layer_that_no_gradient_reaches_says_so(loaded, windows):
    loaded.model.spare = nn.Linear(4, 4, dtype=torch.bfloat16)
    statistics = by_label(loaded.model, windows)
    assert statistics["sqnr_db_e4m3fn", "spare"].value is None
    assert statistics["amax", "spare"].note == "no gradient reaches it"
    assert "median of 15 layers" in statistics["sqnr_db_e4m3fn", ""].note


def test_a_few_windows_are_enough(loaded, windows):
    steps = [row for row in gradients(loaded.model, windows.repeat(3, 1)) if isinstance(row, Progress)]
    assert [(p.done, p.total) for p in steps] == [(i, WINDOWS) for i in range(WINDOWS)]


def test_gradients_are_measured_only_where_asked_for():
    assert "gradients" in MEASURES and "gradients" not in Request().measures
    assert "gradients" not in _parser().parse_args(["submit"]).measures
    asked = _parser().parse_args(["submit", "--measures", "gemm,gradients"]).measures
    assert Request.of(measures=asked).checked().measures == ("gemm", "gradients")
    assert tuple(WALKED) == STAGES


def test_the_stage_runs_before_the_cast_and_survives_its_json_form(tiny, corpus_file, tmp_path):
    """The numbers are the unquantized model's: those of a recipe's run are those of the baseline's."""
    request = Request.of(model=str(tiny), recipe="FP8_E5M2", corpus=str(corpus_file), measures=("gradients",), **SMALL)
    results = {r.stage: r for r in run_stages(request, frozenset(), tmp_path) if isinstance(r, StageResult)}
    assert list(results) == ["load", "baseline", "gradients", "quantize"]
    assert StageResult.from_json(results["gradients"].to_json()) == results["gradients"]
    plain = request.but(recipe="bf16")
    base = {r.stage: r for r in run_stages(plain, frozenset(), tmp_path) if isinstance(r, StageResult)}
    assert base["gradients"].rows == results["gradients"].rows
    again = run_stages(request.but(measures=("gradients", "gemm")), frozenset(results), tmp_path)
    assert [r.stage for r in again if isinstance(r, StageResult)] == ["gemm"]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # AppTest leaves its event loop to the collector
def test_pages_show_both_formats_and_tables_only_the_medians(loaded, windows, tmp_path, monkeypatch):
    monkeypatch.setenv("FP8DASH_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("FP8DASH_DATABASE_URL", raising=False)
    store = Store(places.database_url())
    run_id = fill(store)["MXFP8"]
    rows = [row for row in gradients(loaded.model, windows) if isinstance(row, Measurement)]
    with store.session() as session:
        session.add_all(ROW_TABLES[Measurement](**row_values(run_id, "gradients", row)) for row in rows)
    store.close()
    try:
        app = opened("runs", run=run_id)
        assert not app.exception and not app.error
        assert "Gradients" in [header.value for header in app.header]
        assert "of the median layer’s gradient to zero, E4M3" in page_text(app)
        assert "The worst layer is" in page_text(app)
        tables = [table.value for table in app.dataframe]
        assert sum(tables[0]["Measurement"].str.startswith("Gradient: ")) == KINDS
        assert [len(table) for table in tables if "Gradient: SQNR in E5M2 (dB)" in table] == [15]
        assert not opened("leaderboard").exception and not opened("compare").exception
    finally:
        st.cache_resource.clear()  # it holds this test's store
