"""The quantized KV cache and the cast attention path: what they hold, what they return, and what a run says of it."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, MistralConfig, MistralForCausalLM, Qwen3NextConfig
from transformers.cache_utils import DynamicCache

from fp8dash.choose.advice import advise
from fp8dash.choose.casts import KV_FORMATS, KV_SHARES, parse_cast, parse_kv
from fp8dash.choose.hardware import Device
from fp8dash.choose.presets import DEMO_STUDY, PRESETS
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import Measurement, NeedleCell, StageResult
from fp8dash.choose.request import Request
from fp8dash.errors import KernelRefused, ModelError, NotFinite
from fp8dash.measure.baseline import hidden_states
from fp8dash.measure.kv_cache import kv_baseline, kv_memory, kv_paths
from fp8dash.model.load import load
from fp8dash.model.swap import cast_model
from fp8dash.pipeline import run_stages
from fp8dash.quant import attention
from fp8dash.quant.attention import CastAttention
from fp8dash.quant.cast import DTYPES, round_trip
from fp8dash.quant.kv_cache import CodesLayer, quantized_cache, rows_of

CPU = Device("cpu", "CPU")
IDS = torch.arange(96)[None] * 7 % 250
KVS = [f"{fmt}/{share}" for fmt in KV_FORMATS for share in KV_SHARES] + ["e4m3fn/tensor/unit", "e5m2/tensor/unit"]


@pytest.fixture
def model(tiny):
    return load(tiny, torch.device("cpu")).model


def states(tokens, seed=0, batch=2, heads=3, width=16):
    """Keys or values whose heads and tokens differ in size, as real ones do."""
    x = torch.randn(batch, heads, tokens, width, generator=torch.Generator().manual_seed(seed + tokens))
    return (x * torch.linspace(0.2, 8, heads)[:, None, None] * torch.linspace(1, 3, tokens)[:, None]).bfloat16()


def expected(x, kv):
    return round_trip(rows_of(x, kv), kv.cast).view(x.shape)


def relative(cast, theirs):
    return float((cast.float() - theirs.float()).norm() / theirs.float().norm())


@pytest.mark.parametrize("text", KVS)
def test_what_the_cache_returns_is_what_went_in_cast_and_decoded_update_by_update(text):
    kv, layer = parse_kv(text), CodesLayer(parse_kv(text))
    keys, values = [], []
    for step, tokens in enumerate((7, 1, 1, 3)):
        k, v = states(tokens, step), states(tokens, step + 50)
        keys.append(expected(k, kv))
        values.append(expected(v, kv))
        held_keys, held_values = layer.update(k, v)
        assert held_keys.dtype == torch.bfloat16
        assert torch.equal(held_keys, torch.cat(keys, 2)) and torch.equal(held_values, torch.cat(values, 2))
    assert layer.get_seq_length() == 12 and layer.updates == [7, 1, 1, 3]


@pytest.mark.parametrize("text", KVS)
def test_memory_is_that_of_the_codes_and_their_scales(text):
    layer = CodesLayer(parse_kv(text))
    layer.update(states(10), states(10))
    layer.update(states(1), states(1))
    assert layer.keys.dtype == layer.values.dtype == DTYPES[layer.kv.format.name]
    codes, scales = 2 * 2 * 3 * 11 * 16, {"tensor": 2 * 2, "head": 2 * 3 * 2, "token": 2 * 3 * 11}[layer.kv.share]
    assert layer.nbytes == codes + 2 * scales * 4
    held = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    assert sum(value.nbytes for value in held) == layer.nbytes  # nothing else is kept


@pytest.mark.parametrize("text", KVS)
def test_a_sequence_is_cast_as_if_it_were_alone(text):
    both, alone = CodesLayer(parse_kv(text)), CodesLayer(parse_kv(text))
    x = states(6)
    x[1] *= 30
    assert torch.equal(both.update(x, x)[0][:1], alone.update(x[:1], x[:1])[0])


def test_by_token_the_cuts_of_a_prompt_change_nothing_and_by_tensor_they_do():
    x = states(12)
    for share, same in (("token", True), ("tensor", False), ("head", False)):
        whole, cut = CodesLayer(parse_kv(f"e4m3fn/{share}")), CodesLayer(parse_kv(f"e4m3fn/{share}"))
        cut.update(x[:, :, :5], x[:, :, :5])
        assert torch.equal(whole.update(x, x)[0], cut.update(x[:, :, 5:], x[:, :, 5:])[0]) == same


def test_zeros_stay_zeros_and_what_is_not_finite_stays_loud():
    for text in KVS:
        layer, x = CodesLayer(parse_kv(text)), torch.zeros(1, 2, 3, 16)
        assert torch.equal(layer.update(x, x)[0], x)
        x[0, 1, 2, 5] = math.inf
        assert layer.update(x, x)[0][0, 1, 5].isnan().all()  # the infinite token, after the three of zeros


def test_a_unit_scale_is_one_and_clips():
    layer = CodesLayer(parse_kv("e4m3fn/tensor/unit"))
    x = torch.full((1, 1, 1, 16), 1000.0)
    assert torch.equal(layer.update(x, x / 1000)[0], torch.full_like(x, 448.0))
    assert layer.key_scales.tolist() == layer.value_scales.tolist() == [[[[1.0]]]]


@pytest.mark.parametrize("text", KVS)
def test_sequences_and_tokens_can_be_dropped_and_put_in_another_order(text):
    kv, layer = parse_kv(text), CodesLayer(parse_kv(text))
    x = states(7)
    for part in (x[:, :, :4], x[:, :, 4:6], x[:, :, 6:]):
        held, _ = layer.update(part, part)
    layer.crop(-2)  # all of the last update and half of the one before
    assert layer.updates == [4, 1] and layer.get_seq_length() == 5
    layer.batch_repeat_interleave(2)
    layer.reorder_cache(torch.tensor([3, 0]))
    new = states(2, 9)
    keys, _ = layer.update(new, new)
    assert torch.equal(keys, torch.cat([held[[1, 0], :, :5], expected(new, kv)], 2))
    layer.reset()
    assert layer.get_seq_length() == 0 and layer.nbytes == 0
    assert torch.equal(layer.update(new, new)[0], expected(new, kv))


def test_without_a_cast_a_cache_changes_nothing_so_the_difference_is_the_casts(model):
    plain = model.base_model(input_ids=IDS, use_cache=True, cache=DynamicCache(config=model.config))
    assert torch.equal(hidden_states(model, IDS), plain.last_hidden_state[0, :-1])
    error = {text: relative(hidden_states(model, IDS, parse_kv(text)), hidden_states(model, IDS)) for text in KVS}
    assert 0 < error["int8/token"] < error["e4m3fn/token"] < error["e4m3fn/tensor"] < error["e5m2/tensor"] < 0.1


@torch.no_grad()
def test_decoding_after_a_prompt_is_one_forward_through_the_same_cache_up_to_chunking(model):
    """By token the codes do not depend on the cuts, so only BF16 sums of other shapes differ, as they do without kv."""
    body = model.base_model

    def cut(cache):
        parts = [IDS[:, :90], *IDS[:, 90:].split(1, 1)]
        return torch.cat([body(input_ids=p, use_cache=True, cache=cache).last_hidden_state for p in parts], 1)[0]

    kv = parse_kv("int8/token")
    whole = body(input_ids=IDS, use_cache=True, cache=quantized_cache(model, kv)).last_hidden_state[0]
    assert relative(cut(quantized_cache(model, kv)), whole) < 2**-7
    assert relative(cut(DynamicCache(config=model.config)), whole) < 2**-6


def test_generate_reads_and_fills_the_cache(model):
    cache = quantized_cache(model, parse_kv("e4m3fn/head"))
    model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, min_new_tokens=6, do_sample=False,
                   pad_token_id=0, cache=cache)  # fmt: skip
    assert [layer.updates for layer in cache.layers] == [[96, 1, 1, 1, 1, 1]] * 2
    assert all(layer.keys.dtype == torch.float8_e4m3fn for layer in cache.layers)


def test_layers_with_a_window_keep_all_tokens_and_their_mask_hides_the_old_ones():
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=16,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    assert 0 < relative(hidden_states(model, IDS, parse_kv("int8/token")), hidden_states(model, IDS)) < 0.02


def test_a_model_that_keeps_more_than_keys_and_values_is_refused():
    odd, plain = (
        SimpleNamespace(config=c) for c in (Qwen3NextConfig(num_hidden_layers=4), LlamaConfig(num_hidden_layers=3))
    )
    with pytest.raises(ModelError, match="LinearAttentionLayer.*closest alternative: the recipe without kv="):
        quantized_cache(odd, parse_kv("e4m3fn/tensor"))
    assert len(quantized_cache(plain, parse_kv("e4m3fn/tensor")).layers) == 3


@pytest.mark.parametrize(
    ("text", "scales"), [("tensor", 2 / 64), ("head", 4 / 64), ("token", 4), ("tensor/unit", 2 / 64)]
)
def test_bytes_a_token_are_what_a_prefill_holds(model, text, scales):
    (size,) = kv_memory(model, kv := parse_kv(f"e4m3fn/{text}"), 64)
    assert (size.name, size.unit, size.better) == ("kv_bytes_per_token", "bytes", "lower")
    assert size.value == 2 * (2 * 2 * 16 + 4 * scales)  # layers * (keys and values * heads * width + scales)
    assert ("scale 1.0" if "unit" in text else "dynamic scales") in size.note and "uncast 256 bytes" in size.note
    cache = quantized_cache(model, kv)
    model.base_model(input_ids=IDS[:, :64], use_cache=True, cache=cache)
    assert size.value * 64 == sum(layer.nbytes for layer in cache.layers)


def rows(request, cache):
    results = [item for item in run_stages(request, frozenset(), cache) if isinstance(item, StageResult)]
    measured = [row for result in results for row in result.rows]
    facts = {key: value for result in results for key, value in result.facts.items()}
    return facts, {row.name: row for row in measured if isinstance(row, Measurement)}, measured


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [("KV_FP8", "emulated"), ("attn=e4m3fn/tensor", "emulated"), ("kv=e4m3fn/tensor/unit attn=e5m2/row", "emulated"),
     ("w=e4m3fn/row a=e4m3fn/row kv=int8/token", "mixed")],
)  # fmt: skip
def test_a_run_with_a_cast_cache_or_attention_diverges_and_is_no_baseline(tiny, corpus_file, tmp_path, recipe, backend):
    request = Request.of(
        model=str(tiny), recipe=recipe, corpus=str(corpus_file), backend="auto", device="cpu", windows=2,
        window_length=64, gemm_m=(1,), needle_lengths=(700,), needle_depths=(50,),
    )  # fmt: skip
    facts, values, all_rows = rows(request, tmp_path)
    assert facts["backend"] == values["kld"].backend == values["needle"].backend == backend
    assert values["kld"].value > 0 and values["coverage"].value == (
        0.0 if backend == "emulated" else pytest.approx(0.6, abs=0.2)
    )
    assert sum(isinstance(row, NeedleCell) for row in all_rows) == 1
    kv = parse_recipe(PRESETS[recipe].text if recipe in PRESETS else recipe).kv
    assert ("kv_bytes_per_token" in values) == (kv is not None)
    if kv:
        assert kv.provenance in values["kv_bytes_per_token"].note
    if backend == "emulated":
        assert values["gemm_speedup"].value == 1.0  # its Linears are the baseline's


WAYS = ("one forward", "chunked prefill", "decode")
WINDOWS = torch.arange(3 * 266).view(3, 266) * 7 % 250  # two chunks, and nine tokens that are decoded


def returned(walk):
    while True:
        try:
            next(walk)
        except StopIteration as end:
            return end.value


def path_numbers(model, windows, kv, folder):
    base = returned(kv_baseline(model, windows, folder, "hash"))
    items = kv_paths(model, model.lm_head, windows, base, kv and parse_kv(kv), "emulated", 0)
    return {(row.name, row.label): row.value for row in items if isinstance(row, Measurement)}


@torch.no_grad()
def read_as(way, model, ids, make):
    """Log-probabilities [tokens, vocabulary] and the first token's place, by plain calls of the model."""
    cache, n = make(), len(ids)
    cuts = {"one forward": [n], "chunked prefill": [128, 128, n - 256], "decode": [128, 128] + [1] * (n - 257)}[way]
    parts = [model(input_ids=p[None], use_cache=True, cache=cache).logits[0] for p in ids[: sum(cuts)].split(cuts)]
    first = 256 if way == "decode" else 0
    return F.log_softmax(torch.cat(parts)[first : n - 1].float(), -1).double(), first


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_reading_is_scored_as_plain_calls_score_it(model, tmp_path, way):
    kv = parse_kv("e5m2/tensor")
    numbers = path_numbers(model, WINDOWS, kv.text, tmp_path)
    nll, base_nll, kld = [], [], []
    for ids in WINDOWS:
        logits, first = read_as(way, model, ids, lambda: quantized_cache(model, kv))
        theirs, _ = read_as(way, model, ids, lambda: DynamicCache(config=model.config))
        nll.append(-logits.gather(-1, ids[first + 1 :, None]).mean())
        base_nll.append(-theirs.gather(-1, ids[first + 1 :, None]).mean())
        kld.append((theirs.exp() * (theirs - logits)).sum(-1).mean())
    mean = {"kv_kld": kld, "kv_ln_ppl_diff": [a - b for a, b in zip(nll, base_nll, strict=True)]}
    for name, values in mean.items():
        assert numbers[name, way] == pytest.approx(float(sum(values) / 3), rel=1e-3, abs=1e-7)
    assert numbers["kv_ppl", way] == pytest.approx(math.exp(sum(nll) / 3), rel=1e-6)
    assert 0 < numbers["kv_top1", way] <= 1 and numbers["kv_ln_ppl_diff_low", way] is None  # three windows: no interval


def test_a_cast_cache_differs_by_every_way_of_reading_and_an_uncast_one_by_none(model, tmp_path):
    plain, fine, coarse = (path_numbers(model, WINDOWS, kv, tmp_path) for kv in (None, "int8/token", "e5m2/tensor"))
    for way in WAYS:
        assert plain["kv_kld", way] == plain["kv_ln_ppl_diff", way] == 0.0 and plain["kv_top1", way] == 1.0
        assert 0 < fine["kv_kld", way] < coarse["kv_kld", way]
    assert coarse["kv_kld", "one forward"] != coarse["kv_kld", "chunked prefill"]  # a scale by tensor spans a chunk
    assert ("kv_scales_at_one", "") not in plain


def test_what_the_scales_were_is_stored_and_scales_of_one_are_counted(model, tmp_path):
    for kv, at_one in (("e4m3fn/tensor/unit", 1.0), ("e4m3fn/tensor", 0.0)):
        numbers = path_numbers(model, WINDOWS, kv, tmp_path)
        assert numbers["kv_scales_at_one", ""] == at_one
        for what in ("keys", "values"):
            low, high = numbers["kv_scale_lowest", what], numbers["kv_scale_highest", what]
            assert low == high == 1.0 if at_one else 0 < low < high < 1


def test_short_windows_are_cut_in_two_and_four_give_an_interval(model, tmp_path):
    numbers = path_numbers(model, WINDOWS.view(-1, 19)[:6], "e5m2/tensor", tmp_path)
    for way in WAYS:
        assert numbers["kv_ln_ppl_diff_low", way] < numbers["kv_ln_ppl_diff_high", way]
    base = returned(kv_baseline(model, WINDOWS.view(-1, 19)[:6], tmp_path, "hash"))
    assert base.forward.shape[:2] == base.chunked.shape[:2] == (4, 18) and base.decoded.shape[:2] == (4, 9)


@pytest.mark.parametrize(("length", "decoded"), [(16, 7), (257, 64), (258, 1), (512, 64)])
def test_some_tokens_of_every_window_are_decoded_after_a_prompt(model, tmp_path, monkeypatch, length, decoded):
    monkeypatch.setattr(model.base_model, "forward", lambda input_ids, **_: Named(input_ids[..., None].float()))
    base = returned(kv_baseline(model, torch.arange(length)[None] % 250, tmp_path, "hash"))
    assert torch.equal(base.forward, base.chunked) and base.forward.shape == (1, length - 1, 1)
    assert base.decoded.shape == (1, decoded, 1)


@dataclass
class Named:
    last_hidden_state: torch.Tensor


def test_how_the_baseline_reads_is_kept_and_a_damaged_file_is_measured_anew(model, tmp_path):
    first = returned(kv_baseline(model, WINDOWS, tmp_path, "hash"))
    assert list(kv_baseline(None, WINDOWS, tmp_path, "hash")) == []  # no model is needed
    (file,) = (tmp_path / "baselines").iterdir()
    file.write_bytes(file.read_bytes()[:-3] + b"abc")
    assert torch.equal(returned(kv_baseline(model, WINDOWS, tmp_path, "hash")).decoded, first.decoded)
    returned(kv_baseline(model, WINDOWS + 1, tmp_path, "hash"))
    assert len(list((tmp_path / "baselines").iterdir())) == 2


def test_a_cache_that_overflows_is_refused(model, tmp_path):
    base = returned(kv_baseline(model, WINDOWS[:1], tmp_path, "hash"))
    model.model.layers[0].self_attn.v_proj.weight.fill_(math.inf)
    with pytest.raises(NotFinite, match="keys or values left the format's range"):
        list(kv_paths(model, model.lm_head, WINDOWS[:1], base, parse_kv("e4m3fn/tensor"), "emulated", 0))


def test_perplexity_of_a_cast_cache_brings_the_ways_that_read_it(tiny, corpus_file, tmp_path):
    """The one-forward number is the perplexity stage's, of the first windows."""
    common = {"model": str(tiny), "corpus": str(corpus_file), "device": "cpu", "windows": 2, "window_length": 64}
    assert Request.of(recipe="KV_FP8", **common).checked().measures[-1] == "kv"
    assert "kv" not in Request.of(recipe="BF16", **common).checked().measures
    assert "kv" not in Request.of(recipe="KV_FP8", measures=("gemm",), **common).checked().measures
    _, values, all_rows = rows(Request.of(recipe="KV_FP8", measures=("perplexity",), **common), tmp_path)
    by_way = {row.label: row.value for row in all_rows if isinstance(row, Measurement) and row.name == "kv_kld"}
    assert list(by_way) == list(WAYS)
    assert by_way["one forward"] == pytest.approx(values["kld"].value, rel=0.01)  # of 4e-6: float32's rounding shows
    assert "dynamic scales" in values["kv_kld"].note
    _, values, _ = rows(Request.of(recipe="BF16", measures=("kv",), **common), tmp_path)
    assert values["kv_kld"].value == 0.0 and "ppl" not in values


def test_the_native_backend_refuses_what_is_only_emulated(model):
    for text in ("kv=e4m3fn/tensor", "attn=e4m3fn/tensor"):
        with pytest.raises(KernelRefused, match="closest alternative: the backend auto"):
            next(cast_model(model, parse_recipe(text), CPU, "native"))


def operands(queries, keys):
    generator = torch.Generator().manual_seed(queries)
    q, k, v = (torch.randn(2, heads, n, 16, generator=generator) for heads, n in ((6, queries), (2, keys), (2, keys)))
    return q, k, v


@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (1, 9), (3, 9)])
def test_attention_without_rounding_is_torchs_for_prompts_and_for_decoding(monkeypatch, queries, keys):
    q, k, v = operands(queries, keys)
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    theirs = F.scaled_dot_product_attention(q, k, v, seen, scale=0.3, enable_gqa=True).transpose(1, 2)
    exact, fine, coarse = (CastAttention(parse_cast(text)) for text in ("int8/row", "int8/row", "e5m2/tensor"))
    added = torch.zeros(1, 1, queries, keys).masked_fill(~seen, torch.finfo(torch.float32).min)
    for mask in (None, added):
        assert 0 < relative(fine(None, q, k, v, mask, scaling=0.3)[0], theirs) < 0.02
        assert relative(coarse(None, q, k, v, mask, scaling=0.3)[0], theirs) > 0.02
    monkeypatch.setattr(attention, "round_trip", lambda x, cast: x)
    for mask in (None, added):
        assert torch.allclose(exact(None, q, k, v, mask, scaling=0.3)[0], theirs, atol=1e-6)  # float32 sums


def test_attention_casts_each_operand_and_the_softmax(monkeypatch):
    seen = []
    monkeypatch.setattr(attention, "round_trip", lambda x, cast: seen.append(tuple(x.shape)) or round_trip(x, cast))
    CastAttention(parse_cast("e4m3fn/row"))(None, *operands(5, 9), None)
    assert seen == [(2 * 6 * 5, 16), (2 * 2 * 9, 16), (2 * 2 * 9, 16), (2 * 6 * 5, 9)]


@torch.no_grad()
def test_a_model_whose_attention_is_cast_follows_it_and_keeps_its_masks(model, monkeypatch):
    """Left padding is the mask that a function of its own would be the first to lose."""
    mask = torch.ones(2, 32, dtype=torch.long)
    mask[0, :9] = 0
    batch = {"input_ids": IDS[:, :64].view(2, 32), "attention_mask": mask, "use_cache": False}

    def states():
        return model.base_model(**batch).last_hidden_state[mask.bool()]

    plain, errors = states(), {}
    for text in ("int8/row", "e4m3fn/tensor"):
        list(cast_model(model, parse_recipe(f"attn={text}"), CPU, "emulated"))
        errors[text] = relative(states(), plain)
    assert 0 < errors["int8/row"] < errors["e4m3fn/tensor"] < 0.05
    monkeypatch.setattr(attention, "round_trip", lambda x, cast: x)
    assert relative(states(), plain) < 2**-7  # BF16's own rounding


def test_scores_that_a_model_changes_in_other_ways_are_refused():
    with pytest.raises(ModelError, match="softcap.*closest alternative: the recipe without attn="):
        CastAttention(parse_cast("e4m3fn/row"))(torch.nn.Identity(), *operands(2, 2), None, softcap=30.0)


def test_advice_says_where_scales_come_from_and_warns_of_cast_attention():
    advice = {text: advise(parse_recipe(text), None, CPU) for text in
            ("kv=e4m3fn/tensor", "kv=e4m3fn/tensor/unit", "kv=int8/tensor/unit", "attn=e4m3fn/tensor")}  # fmt: skip
    texts = {text: " ".join(remark.text for remark in remarks) for text, remarks in advice.items()}
    assert "dynamic" in texts["kv=e4m3fn/tensor"] and "whole numbers" in texts["kv=int8/tensor/unit"]
    assert "Every KV scale is 1.0" in texts["kv=e4m3fn/tensor/unit"] and "448" in texts["kv=e4m3fn/tensor/unit"]
    assert [remark.level for remark in advice["attn=e4m3fn/tensor"]].count("warning") == 1
    assert "native kernel" not in "".join(texts.values())


def test_the_demo_study_is_the_eight_recipes_of_weights_and_activations():
    assert len(DEMO_STUDY) == 8 and set(DEMO_STUDY) <= {name for name, p in PRESETS.items() if p.everyday}
