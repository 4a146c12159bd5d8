"""The demo's weights in other layouts and other files: what computes the same has the same numbers."""

import copy
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp8dash.choose.hardware import Device
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import Measurement, StageResult
from fp8dash.choose.request import Request
from fp8dash.choose.windows import Reading
from fp8dash.measure.corpora import cut_windows, load_corpus
from fp8dash.model.as_linears import make_linears
from fp8dash.model.load import load, locate
from fp8dash.model.swap import cast_model
from fp8dash.pipeline import run_stages
from tests.layouts import STORAGES, fused, routed_in_pairs, split_into_experts, stored_as, with_bos

pytestmark = pytest.mark.demo
GROUPS = "w=e4m3fn/1x32/rceil a=e4m3fn/1x32/rceil"
ROWS = "w=e4m3fn/row a=e4m3fn/row"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def demo(cache):
    """Its float32 form, whose rounding is far below what a recipe costs."""
    return AutoModelForCausalLM.from_pretrained(locate("demo", cache), dtype=torch.float32).requires_grad_(False).eval()


@pytest.fixture(scope="module")
def plain(demo, cache):
    """One window of 128 tokens, and the demo's ln p over it."""
    tokenizer = AutoTokenizer.from_pretrained(locate("demo", cache))
    ids = cut_windows(tokenizer, load_corpus("pydocs"), 1, 128, 2048).ids
    return ids, log_p(demo, ids)


@torch.no_grad()
def log_p(model, ids):
    return model(input_ids=ids).logits.log_softmax(-1)


def kld_of(model, plain):
    """In nats, from the ln p of the demo."""
    ids, expected = plain
    return float((expected.exp() * (expected - log_p(model, ids))).sum(-1).double().mean())


def cast(model, recipe):
    make_linears(model)
    list(cast_model(model, parse_recipe(recipe), Device("cpu", ""), "emulated"))
    return model


@pytest.mark.parametrize(("layout", "recipe"), [(split_into_experts, GROUPS), (fused, ROWS)])
def test_the_demos_weights_in_another_layout_lose_what_the_demo_loses(demo, plain, layout, recipe):
    """In tiles that both have alike: groups of 32 that no expert's edge divides, and rows that are fused whole."""
    other = layout(demo)
    assert kld_of(other, plain) == pytest.approx(0, abs=1e-6)
    loss = kld_of(cast(copy.deepcopy(demo), recipe), plain)
    assert kld_of(cast(other, recipe), plain) == pytest.approx(loss, rel=1e-3) and loss > 0.01


@torch.no_grad()
def test_what_two_of_eight_experts_lose_is_what_their_mlp_loses(demo, plain):
    """In the demo's first eight layers, and in float64: experts sum fewer tokens at a time, in another order. In
    float32 that moves some activations to the next code, and the KLD by 3 %."""
    first = copy.deepcopy(demo)
    first.config.num_hidden_layers = 8
    first.model.layers = first.model.layers[:8]
    first = first.double()
    routed, chosen = routed_in_pairs(first), []
    routed.set_experts_implementation("eager")  # the others have no float64
    for layer in routed.model.layers:
        layer.mlp.gate.register_forward_hook(lambda *given: chosen.append(given[-1][-1]))
    plain = plain[0], log_p(first, plain[0])
    assert kld_of(routed, plain) == pytest.approx(0, abs=1e-12)
    pairs = torch.stack(chosen).sort().values  # [layers, tokens, 2]
    assert torch.equal(pairs[..., 1], pairs[..., 0] + 4) and all(len(layer.unique()) > 2 for layer in pairs)
    loss = kld_of(cast(first, GROUPS), plain)
    assert kld_of(cast(routed, GROUPS), plain) == pytest.approx(loss, rel=1e-3) and loss > 0.01


def run_of(model, cache, **others):
    """Every number of a small run with the head cast too."""
    request = Request.of(
        model=str(model), recipe=f"{ROWS} also=lm_head", backend="emulated", windows=1, window_length=64,
        measures=("perplexity",), **others,
    )  # fmt: skip
    results = [item for item in run_stages(request, frozenset(), cache) if isinstance(item, StageResult)]
    rows = [row for result in results for row in result.rows]
    return {(row.name, row.label): row.value for row in rows if isinstance(row, Measurement)}


@pytest.fixture(scope="module")
def numbers(cache):
    """Those of the demo itself."""
    values = run_of("demo", cache)
    assert values["kld", ""] > 0.01
    return values


@pytest.mark.parametrize("storage", STORAGES)
def test_the_demos_weights_in_other_files_have_the_same_numbers_to_the_bit(numbers, cache, tmp_path, storage):
    values = run_of(stored_as(storage, locate("demo", cache), tmp_path / "model"), cache)
    assert values == numbers


def test_a_tokenizer_that_adds_bos_is_read_with_bos(numbers, cache, tmp_path):
    """The same text, one token later: BOS has the first place of its only window."""
    folder = with_bos(locate("demo", cache), tmp_path / "model")
    plain, begins = load(locate("demo", cache), CPU), load(folder, CPU)
    bos, corpus = begins.tokenizer.bos_token_id, load_corpus("pydocs")
    ids = [cut_windows(loaded.tokenizer, corpus, 1, 64, 2048, Reading()).ids[0].tolist() for loaded in (plain, begins)]
    assert ids[1] == [bos, *ids[0][:-1]]
    values = run_of(folder, cache)
    with torch.no_grad():
        loss = plain.model(input_ids=torch.tensor(ids[1:]), labels=torch.tensor(ids[1:])).loss
    assert values["baseline_ppl", ""] == pytest.approx(math.exp(loss), rel=1e-4)
    assert values["baseline_ppl", ""] != numbers["baseline_ppl", ""]
    assert begins.content_hash != plain.content_hash
    asked = run_of("demo", cache, bos="bos")
    assert asked == values
