"""Sensitivity on a tiny model: against whole runs of recipes, and the mixed recipe it suggests."""

import dataclasses
import itertools
import math

import pytest
import streamlit as st
import torch
from torch import nn

from db.records import ROW_TABLES, row_values
from db.store import Store
from fp8dash import places
from fp8dash.choose.hardware import Device
from fp8dash.choose.mixed import Part, kept_parts, mean_bits, parse_budget, predicted_kld
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import Measurement, Progress, Sensitivity, StageResult
from fp8dash.choose.request import Request
from fp8dash.errors import InvalidChoice, NotFinite
from fp8dash.measure.baseline import Baseline, baseline_of, hidden_states
from fp8dash.measure.corpora import cut_windows, load_corpus
from fp8dash.measure.perplexity import perplexity
from fp8dash.measure.sensitivity import WINDOWS, Probe, groups_of, sensitivity
from fp8dash.model.calibration import NOTHING, observe
from fp8dash.model.load import load
from fp8dash.model.swap import cast_model
from fp8dash.pipeline import run_stages
from tests.seed import fill
from tests.ui.drawn import opened, page_text

RECIPE = parse_recipe("w=e2m1/tensor a=e2m1/tensor")  # coarse: the tiny model is random and hardly minds
KINDS = ["q", "k", "v", "o", "gate", "up", "down"]


@pytest.fixture
def windows(loaded, corpus_file):
    return cut_windows(loaded.tokenizer, load_corpus(str(corpus_file)), WINDOWS, 96, loaded.context)


@pytest.fixture
def baseline(loaded, windows, tmp_path):
    *_, measured = baseline_of(loaded.model, loaded.model.lm_head, windows, tmp_path / "b.safetensors")
    assert isinstance(measured, Baseline)
    return measured


def probed(loaded, windows, baseline, recipe=RECIPE, granularity="kind", budget="kld=50%", observed=NOTHING):
    """Sensitivities by group, and measurements by name."""
    model, limit = loaded.model, parse_budget(budget)
    items = list(sensitivity(model, model.lm_head, windows, baseline, recipe, granularity, limit, observed))
    groups = {item.group: item for item in items if isinstance(item, Sensitivity)}
    return groups, {item.name: item for item in items if isinstance(item, Measurement)}


def run_kld(loaded, windows, baseline, text, observed=NOTHING):
    """The KLD of a whole run of a recipe, as the perplexity stage measures it."""
    cast = load(loaded.folder, torch.device("cpu")).model
    list(cast_model(cast, parse_recipe(text), Device("cpu", "CPU"), "emulated", observed))
    rows = perplexity(cast, loaded.model.lm_head, windows, baseline, "emulated", 0)
    return next(row.value for row in rows if isinstance(row, Measurement) and row.name == "kld")


ONCE = 3e-7  # nats: the two sum exp(logits) in another order, float32 values below 8


def test_a_group_alone_and_all_but_it_diverge_as_whole_runs_of_such_recipes_do(loaded, windows, baseline):
    groups, values = probed(loaded, windows, baseline)
    assert list(groups) == KINDS
    for kind in ("down",):
        others = ",".join(group.pattern for name, group in groups.items() if name != kind)
        alone = run_kld(loaded, windows, baseline, f"{RECIPE.text} skip={others}")
        but = run_kld(loaded, windows, baseline, f"{RECIPE.text} skip={groups[kind].pattern}")
        assert groups[kind].alone_kld == pytest.approx(alone, abs=ONCE) and alone > 10 * ONCE
        assert groups[kind].all_but_kld == pytest.approx(but, abs=ONCE)
    assert values["sensitivity_kld"].value == pytest.approx(run_kld(loaded, windows, baseline, RECIPE.text), abs=ONCE)
    assert values["mixed_kld"].value == pytest.approx(
        run_kld(loaded, windows, baseline, values["mixed_kld"].note), abs=ONCE
    )


def test_replaying_the_blocks_before_the_first_cast_one_changes_no_bit(loaded, windows, baseline):
    (group,) = (g for g in groups_of(loaded.model, RECIPE, "block") if g.part.name == "block 1")
    probe = Probe(loaded.model, loaded.model.lm_head, windows, baseline, RECIPE)
    assert probe.keep_outputs() == pytest.approx(0.0, abs=ONCE)
    ran = []
    for index, block in enumerate(probe.blocks):
        block.self_attn.register_forward_pre_hook(lambda *_, index=index: ran.append(index))
    probe.cast(group.names)
    replayed, whole = probe.kld(1, "it"), probe.kld(0, "it")
    assert replayed == whole > 0
    assert ran == [1] * len(windows) + [0, 1] * len(windows)


def test_blocks_that_tell_each_other_more_than_they_return_are_all_run(loaded, windows, baseline):
    first, second = loaded.model.model.layers
    means = []
    first.register_forward_hook(lambda _m, _x, out: means.append(out.mean()) or None)
    second.register_forward_hook(lambda _m, _x, out: out + means.pop() if means else out)
    probe = Probe(loaded.model, loaded.model.lm_head, windows, baseline, RECIPE)
    probe.keep_outputs()
    assert probe.blocks == []


@pytest.mark.parametrize(
    ("granularity", "count", "linears"), [("kind", 7, [2] * 7), ("block", 2, [7, 7]), ("linear", 14, [1] * 14)]
)
def test_groups_are_disjoint_and_hold_every_linear_that_the_recipe_casts(loaded, granularity, count, linears):
    groups = groups_of(loaded.model, RECIPE, granularity)
    names = [name for group in groups for name in group.names]
    assert len(groups) == count and [len(group.names) for group in groups] == linears
    assert sorted(names) == sorted(
        n for n, m in loaded.model.named_modules() if type(m) is nn.Linear and n != "lm_head"
    )
    for group in groups:  # the pattern leaves out the group and nothing else
        skipping = dataclasses.replace(RECIPE, skip=(group.part.pattern,))
        assert {name for name in names if skipping.skips(name)} == set(group.names)


def test_what_a_recipe_leaves_out_is_no_group_and_the_head_is_one_where_asked_for(loaded, windows, baseline):
    text = "w=e2m1/tensor also=lm_head skip=*.down_proj,*.layers.1.*"
    groups, _ = probed(loaded, windows, baseline, parse_recipe(text))
    assert list(groups) == [*KINDS[:-1], "lm_head"] and groups["q"].linears == 1
    alone = run_kld(loaded, windows, baseline, "w=e2m1/tensor also=lm_head skip=model.*")
    assert groups["lm_head"].alone_kld == pytest.approx(alone, abs=ONCE)
    assert probed(loaded, windows, baseline, parse_recipe("kv=e4m3fn/tensor"))[1]["sensitivity_kld"].value is None


@pytest.mark.parametrize(
    "text",
    ["w[*.down_proj]=e2m1/tensor a[*.q_proj]=e2m1/tensor", "w=int8/row a=e2m1/tensor/delayed:2", "w=e2m1/1x16/nvfp4"],
)
def test_overrides_and_calibrated_scales_are_those_of_a_whole_run(loaded, windows, baseline, text):
    recipe = parse_recipe(text)
    steps, observed = observe(loaded.model, recipe, windows.ids), NOTHING
    while recipe.needs_calibration:
        try:
            next(steps)
        except StopIteration as end:
            observed = end.value
            break
    groups, values = probed(loaded, windows, baseline, recipe, "kind", "kld=50%", observed)
    assert values["sensitivity_kld"].value == pytest.approx(
        run_kld(loaded, windows, baseline, text, observed), abs=ONCE
    )
    others = ",".join(group.pattern for name, group in groups.items() if name != "down") or "none"
    alone = run_kld(loaded, windows, baseline, f"{text} skip={others}", observed)
    assert groups["down"].alone_kld == pytest.approx(alone, abs=ONCE) and alone > 10 * ONCE
    if recipe.overrides:
        assert list(groups) == ["q", "down"] and groups["q"].bits_per_weight == 16.0


def test_the_prediction_shares_the_whole_among_its_parts(loaded, windows, baseline):
    groups, values = probed(loaded, windows, baseline)
    total = sum(row.alone_kld for row in groups.values())
    assert values["sensitivity_kld_sum"].value == pytest.approx(total)
    left = sum(row.alone_kld for row in groups.values() if not row.kept) / total
    assert values["mixed_kld_predicted"].value == pytest.approx(left * values["sensitivity_kld"].value)
    assert left <= 0.5  # the budget


@pytest.mark.parametrize("text", ["w=e5m2/row a=e5m2/row also=lm_head", "a=int8/tensor"])
def test_the_model_is_as_it_was_afterwards(loaded, windows, baseline, text):
    model = loaded.model
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    hidden = hidden_states(model, windows.ids[:1])
    windows = windows.few(1)
    steps = sensitivity(model, model.lm_head, windows, baseline, parse_recipe(text), "block", parse_budget("kld=50%"))
    while not next(steps).message.startswith("all but block 0"):
        pass
    steps.close()  # a run cancelled with everything cast but one
    list(sensitivity(model, model.lm_head, windows, baseline, parse_recipe(text), "kind", parse_budget("kld=50%")))
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter, before[name][1])
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert torch.equal(hidden_states(model, windows.ids[:1]), hidden)


def test_a_tied_embedding_stays_as_it_is_while_the_head_is_cast(loaded, windows, tmp_path):
    model = loaded.model
    model.lm_head.weight = model.model.embed_tokens.weight
    *_, baseline = baseline_of(model, model.lm_head, windows, tmp_path / "tied.safetensors")
    probe = Probe(model, model.lm_head, windows, baseline, parse_recipe("w=e5m2/row also=lm_head"))
    embedding = model.model.embed_tokens.weight.clone()
    probe.cast(["lm_head"])
    assert torch.equal(model.model.embed_tokens.weight, embedding) and not torch.equal(model.lm_head.weight, embedding)
    probe.restore(["lm_head"])
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_overflow_names_the_group(loaded, windows, baseline):
    loaded.model.model.layers[1].mlp.down_proj.register_forward_hook(
        lambda module, _x, out: out * math.inf if module._forward_pre_hooks else out
    )
    with pytest.raises(NotFinite, match="With down cast the model gave NaN"):
        probed(loaded, windows, baseline)


PARTS = [
    Part("a", "a", 100, 8.0, 16.0, 0.010),
    Part("b", "b", 10, 8.0, 16.0, 0.004),
    Part("c", "c", 50, 8.0, 16.0, 0.001),
    Part("d", "d", 400, 8.0, 16.0, 0.020),
]


@pytest.mark.parametrize("budget", ["kld=0.03", "kld=0.012", "kld=0", "bits=8", "bits=9", "bits=12", "bits=16"])
def test_the_choice_keeps_to_its_budget_and_nothing_in_it_is_needless(budget):
    limit, whole = parse_budget(budget), predicted_kld(PARTS, ())
    kept = kept_parts(PARTS, limit, whole)
    if limit.of == "kld":
        assert predicted_kld(PARTS, kept) <= limit.most + 1e-12
        for part in kept:
            assert predicted_kld(PARTS, [p for p in kept if p is not part]) > limit.most
    else:
        assert mean_bits(PARTS, kept) <= limit.most
        for part in set(PARTS) - set(kept):
            assert mean_bits(PARTS, [*kept, part]) > limit.most


def test_a_greedy_choice_is_the_best_of_all_where_parts_are_alike():
    """With bits alike, the fewest and worst parts are the optimum: compared with all subsets."""
    parts = [Part(str(i), str(i), 10, 8.0, 16.0, kld) for i, kld in enumerate((0.4, 0.1, 0.25, 0.05, 0.2))]
    kept = kept_parts(parts, parse_budget("kld=30%"), 1.0)
    subsets = (set(s) for n in range(6) for s in itertools.combinations(parts, n))
    fewest = min(len(s) for s in subsets if predicted_kld(parts, list(s)) <= 0.3)
    assert len(kept) == fewest and {p.name for p in kept} == {"0", "2", "4"}


@pytest.mark.parametrize("text", ["", "kld", "kld=-1", "bits=50%", "ppl=3", "kld=1e-3", "kld=0.1 "[:3] + "=x"])
def test_a_budget_that_cannot_be_is_one_sentence(text):
    with pytest.raises(InvalidChoice, match="is not a budget: write"):
        Request.of(sensitivity_budget=text).checked()


def test_a_budget_of_bits_wants_weights_that_are_cast():
    with pytest.raises(InvalidChoice, match="casts no weights, so no recipe has fewer bits"):
        Request.of(recipe="a=int8/row", sensitivity_budget="bits=9").checked()
    with pytest.raises(InvalidChoice, match="not a granularity"):
        Request.of(sensitivity="head").checked()


def test_the_stage_is_run_where_asked_for_and_its_rows_survive_their_json_form(tiny, corpus_file, tmp_path):
    request = Request.of(
        model=str(tiny), recipe="FP8_E5M2", corpus=str(corpus_file), measures=("sensitivity",), windows=4,
        window_length=64, backend="emulated", sensitivity="block", sensitivity_budget="kld=0.001",
    )  # fmt: skip
    items = list(run_stages(request, frozenset(), tmp_path))
    results = {item.stage: item for item in items if isinstance(item, StageResult)}
    assert list(results) == ["load", "baseline", "sensitivity", "quantize"]
    rows = results["sensitivity"].rows
    assert [row.group for row in rows if isinstance(row, Sensitivity)] == ["block 0", "block 1"]
    assert StageResult.from_json(results["sensitivity"].to_json()) == results["sensitivity"]
    steps = [item for item in items if isinstance(item, Progress) and item.stage == "sensitivity"][1:]
    assert [step.done for step in steps] == list(range(6)) and "s per probe" in steps[-1].message
    assert all(row.backend in ("emulated", "arithmetic") for row in rows if isinstance(row, Measurement))


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # AppTest leaves its event loop to the collector
def test_a_runs_page_ranks_the_groups_and_hands_the_mixed_recipe_on(loaded, windows, baseline, tmp_path, monkeypatch):
    monkeypatch.setenv("FP8DASH_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("FP8DASH_DATABASE_URL", raising=False)
    groups, values = probed(loaded, windows, baseline)
    store = Store(places.database_url())
    run_id = fill(store)["MXFP8"]
    with store.session() as session:
        for row in (*groups.values(), *values.values()):
            session.add(ROW_TABLES[type(row)](**row_values(run_id, "sensitivity", row)))
    assert store.sensitivities([run_id])[run_id] == list(groups.values())
    store.close()
    try:
        app = opened("runs", run=run_id)
        assert not app.exception and not app.error
        worst = max(groups.values(), key=lambda row: row.alone_kld)
        assert f"**{worst.group}** costs most" in page_text(app) and any(row.kept for row in groups.values())
        text = values["mixed_kld"].note
        assert text in [code.value for code in app.code] and app.button("run_mixed")
        form = opened("new_run", **{"from": run_id, "recipe": text})
        assert "with a different recipe" in page_text(form)
        assert form.text_input("new_run_new_skip").value == text.split("skip=")[1].replace(",", ", ")
        broken = opened("new_run", **{"from": run_id, "recipe": "w=<b>"})
        assert len(broken.error) == 1 and not broken.exception
    finally:
        st.cache_resource.clear()  # it holds this test's store
