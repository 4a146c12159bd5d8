"""The lens on a mixture of experts, beside the router's own logits as transformers gives them."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from db.claims import Claims
from db.workers import Workers
from fp8dash.choose.hardware import Device
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import Layer, Measurement, StageResult
from fp8dash.choose.request import Request
from fp8dash.measure.experts import experts, routed_sqnr, routing
from fp8dash.measure.weight_error import weight_error
from fp8dash.model.as_linears import make_linears
from fp8dash.model.swap import cast_model
from fp8dash.pipeline import run_stages
from fp8dash.ui.charts.experts import expert_map
from tests.families import PLAIN, family_model, write_family
from tests.ui.drawn import opened, page_text

CPU, IDS = Device("cpu", "CPU"), (torch.arange(128) * 7 % 271 + 1).view(2, 64)  # no padding: its state is zero
COARSE = "w=e2m1/row a=e4m3fn/row"


def finished(walk):
    """What a generator returns."""
    while True:
        try:
            next(walk)
        except StopIteration as end:
            return end.value


@torch.no_grad()
def by_logits(model, top_k):
    """Chosen experts by layer, [layers, tokens, experts], from the logits that the model gives out."""
    logits = [model(input_ids=ids[None], output_router_logits=True).router_logits for ids in IDS]
    layers = [torch.cat(of_layer) for of_layer in zip(*logits, strict=True)]
    return [torch.zeros_like(x).scatter_(1, x.topk(top_k).indices, 1).bool() for x in layers]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_flips_of_the_routing_are_those_of_the_routers_logits(family):
    model = family_model(family)
    make_linears(model)
    before, uncast = finished(routing(model, IDS, "baseline")), by_logits(model, 2)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), uncast, strict=True))
    swaps = weight_error(cast_model(model, parse_recipe(COARSE), CPU, "emulated"), 1)
    layers = [item for item in swaps if isinstance(item, Layer)]
    cast = by_logits(model, 2)
    rows = [row for row in experts(model, IDS, before, layers, "emulated") if isinstance(row, Measurement)]
    changed = [row.value for row in rows if row.name == "routing_changed" and row.label]
    expected = [float((a != b).any(-1).float().mean()) for a, b in zip(uncast, cast, strict=True)]
    assert changed == pytest.approx(expected) and max(changed) > 0
    whole = next(row.value for row in rows if row.name == "routing_changed" and not row.label)
    assert whole == pytest.approx(sum(expected) / len(expected))
    shares = [row.value for row in rows if row.name == "expert_tokens"]
    assert shares == pytest.approx([share for mask in cast for share in mask.float().mean(0).tolist()])
    assert sum(shares) == pytest.approx(2 * len(cast)), "two experts a token in each layer"


@torch.no_grad()
def test_an_expert_that_no_token_reaches_is_named():
    config = AutoConfig.for_model("mixtral", **PLAIN, num_local_experts=6, num_experts_per_tok=2)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False).eval()
    for layer in model.model.layers:  # two of the first four are above zero for every token, the last two never
        gate = layer.mlp.gate.weight
        gate[1], gate[3], gate[4], gate[5] = -gate[0], -gate[2], 0 * gate[0], 0 * gate[0]
    make_linears(model)
    before = finished(routing(model, IDS, "baseline"))
    rows = {row.name: row for row in experts(model, IDS, before, [], "baseline") if isinstance(row, Measurement)}
    unreached = rows["experts_unreached"]
    assert unreached.value == 4 and unreached.note.startswith("model.layers.0.mlp.experts.4, model.layers.0.mlp")
    assert rows["routing_changed"].value == 0.0


def test_the_error_of_experts_counts_by_the_tokens_that_meet_them():
    def layer(name, error):
        return Layer(name, 4, 8, "e4m3fn/row", "emulated", "", 8.0, relative_error=error)

    layers = [layer("m.experts.0.up", 0.1), layer("m.experts.1.up", 0.2), layer("m.attn.q", 9.0)]
    assert routed_sqnr(layers, {"m.experts": [1.0, 0.0]}) == pytest.approx(20.0)
    assert routed_sqnr(layers, {"m.experts": [0.0, 0.5]}) == pytest.approx(13.979, abs=1e-3)
    assert routed_sqnr(layers, {"m.experts": [0.0, 0.0]}) is None


@pytest.mark.parametrize("family", ["llama4_text", "gpt_oss", "granitemoe"])
def test_a_token_meets_as_many_experts_as_the_config_says(family):
    model = family_model(family)
    make_linears(model)
    for mask in finished(routing(model, IDS, "baseline")).values():
        assert mask.shape == (128, 4) and set(mask.sum(-1).tolist()) == {model.config.num_experts_per_tok}


@pytest.mark.parametrize(("family", "has_experts"), [("qwen2_moe", True), ("llama", False)])
def test_a_run_looks_at_experts_where_there_are_any(family, has_experts, tmp_path, corpus_file):
    request = Request.of(
        model=str(write_family(family, tmp_path / family)), corpus=str(corpus_file), recipe="FP8_DYNAMIC",
        measures=("experts",), windows=2, window_length=64, backend="emulated",
    )  # fmt: skip
    results = [item for item in run_stages(request, frozenset(), tmp_path) if isinstance(item, StageResult)]
    rows = {row.name: row for result in results if result.stage == "experts" for row in result.rows}
    assert ("expert_tokens" in rows) == has_experts
    assert (rows["routing_changed"].value is None) != has_experts
    assert has_experts or "no experts" in rows["routing_changed"].note


def test_the_runs_page_shows_whom_the_router_chose(store, monkeypatch, tmp_path):
    run_id, _ = store.add_run(Request.of(recipe="FP8_DYNAMIC", measures=("experts",)), owner="me")
    claims = Claims(store)
    Workers(store).register("one", host="here", slot=0, pid=1)
    label = "model.layers.1.mlp.experts"
    rows = [
        Measurement("routing_changed", 0.25, "share", "lower", "m", "emulated"),
        Measurement("routing_changed", 0.25, "share", "lower", "m", "emulated", label),
        Measurement("experts_unreached", 1.0, "experts", "", "m", "emulated", note=f"{label}.1"),
        *(
            Measurement("expert_tokens", share, "share", "", "m", "emulated", f"{label}.{i}")
            for i, share in ((0, 1.0), (1, 0.0))
        ),
    ]
    assert claims.record_stage(claims.claim(run_id, "one"), StageResult("experts", 1.0, tuple(rows)))
    monkeypatch.setenv("FP8DASH_DATA_DIR", str(tmp_path))
    app = opened("runs", run=run_id)
    assert not app.exception and "Experts" in [header.value for header in app.header]
    text = page_text(app)
    assert "for 25.0 % of the tokens, most often in" in text and "1 expert reached by no token" in text
    (map_,) = expert_map({f"{label}.0": 1.0}).data
    assert (list(map_.x), list(map_.y)) == ([0], ["1"])
