"""Perplexity by every convention against hand-computed values, and the divergence table against plain float64."""

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fp8dash.choose.hardware import Device
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import Measurement, Progress, Window
from fp8dash.choose.request import Request
from fp8dash.choose.windows import BOS, CONVENTIONS, DISJOINT, Reading
from fp8dash.errors import CorpusError, InvalidChoice, NotFinite
from fp8dash.measure.baseline import baseline_of
from fp8dash.measure.corpora import Corpus, calibration_windows, cut_windows
from fp8dash.measure.divergence import Comparer, Predictions, predictions
from fp8dash.measure.perplexity import PERCENTILES, perplexity
from fp8dash.model.swap import cast_model

CPU = Device("cpu", "CPU")
READINGS = [
    Reading(name, 24 if name == "strided" else 0, bos) for name in CONVENTIONS for bos in BOS
]  # fmt: skip
TEXT = "ab cab\n  bc é" * 40  # a two-byte letter, runs of white space, words cut by windows


def corpus(text=TEXT):
    return Corpus("text", text, "hash", "a test")


def measured(loaded, windows, folder, *, head=None, cast="", **more):
    """The run's items; the recipe `cast` is applied between baseline and run."""
    head = head or loaded.model.lm_head
    *_, baseline = baseline_of(loaded.model, head, windows, folder / "b.safetensors")
    if cast:
        list(cast_model(loaded.model, parse_recipe(cast), CPU, "emulated"))
    return list(perplexity(loaded.model, head, windows, baseline, "emulated", 0, **more))


def values(items, label=""):
    return {item.name: item.value for item in items if isinstance(item, Measurement) and item.label == label}


@pytest.fixture
def bigram(loaded):
    """The tiny model made to look at the last token alone, its table of logits [272, 272] in float64, by hand.

    Blocks add nothing, embeddings are one-hot, so the head's columns are the table. Entries are eighths: exact in
    bfloat16, and so is the norm of a one-hot row, whose epsilon is set to zero.
    """
    model, generator = loaded.model, torch.Generator().manual_seed(1)
    for block in model.model.layers:
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
    model.model.norm.variance_epsilon = 0.0
    ids = [loaded.tokenizer.bos_token_id, *sorted(set(loaded.tokenizer(TEXT)["input_ids"]))]
    assert len(ids) <= 64
    model.model.embed_tokens.weight.zero_()
    for column, token in enumerate(ids):
        model.model.embed_tokens.weight[token, column] = 1.0
    scores = torch.randint(-32, 32, (272, 64), generator=generator) / 64.0  # times the norm's 8 = eighths
    model.lm_head.weight.copy_(scores)
    table = torch.zeros(272, 272, dtype=torch.float64)
    table[ids] = 8.0 * scores[:, : len(ids)].T.double()
    return table


def by_hand(tokens, table, reading, count, length, bos):
    """Token NLLs of each window, spelled out position by position from the conventions' own words."""
    stream = [bos, *tokens] if reading.bos == "bos" else tokens
    chances = table.log_softmax(-1)
    scores = []
    for index in range(count):
        start = index * (reading.stride or length)
        window = stream[start : start + length]
        if reading.bos == "bos":
            window = [bos, *window[1:]]
        if reading.convention == "half":
            scored = range(length // 2 + 1, length)
        elif reading.convention == "strided" and index:
            scored = range(length - reading.stride, length)
        else:
            scored = range(1, length)
        scores.append([-float(chances[window[at - 1], window[at]]) for at in scored])
    return scores


@pytest.mark.parametrize("reading", READINGS, ids=lambda r: f"{r.convention}-{r.bos}")
def test_a_bigram_model_has_its_hand_computed_perplexity_under_each_convention(loaded, bigram, tmp_path, reading):
    windows = cut_windows(loaded.tokenizer, corpus(), 5, 64, loaded.context, reading)
    items = measured(loaded, windows, tmp_path)
    tokens = loaded.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    expected = by_hand(tokens, bigram, reading, 5, 64, loaded.tokenizer.bos_token_id)
    flat = [nll for window in expected for nll in window]
    numbers = values(items)
    assert numbers["ppl"] == pytest.approx(math.exp(sum(flat) / len(flat)), rel=1e-6)
    assert numbers["scored_tokens"] == len(flat)
    rows = [item for item in items if isinstance(item, Window)]
    assert [row.nll for row in rows] == pytest.approx([sum(w) / len(w) for w in expected], rel=1e-6)
    assert [row.tokens for row in rows] == [len(w) for w in expected]


def test_conventions_score_as_many_tokens_as_their_tools(loaded):
    """llama.cpp at context 512 scores 255 of each window (tools/perplexity/perplexity.cpp: n_ctx - 1 - n_ctx / 2)."""
    text = corpus("x" * 4_000)
    cut = {r: cut_windows(loaded.tokenizer, text, 3, 512, 2048, r) for r in (Reading("half"), Reading("strided", 100))}
    assert [len(cut[Reading("half")].targets(i)) for i in range(3)] == [255] * 3
    assert [len(cut[Reading("strided", 100)].targets(i)) for i in range(3)] == [511, 100, 100]


def test_each_convention_and_rule_for_bos_has_a_method_of_its_own():
    methods = [reading.method for reading in READINGS] + [Reading("strided", 32).method]
    assert len(set(methods)) == len(methods)
    assert DISJOINT.method == "token perplexity over disjoint windows, no BOS, first token unscored, v1"


def test_strided_windows_from_bos_score_every_token_once(loaded):
    windows = cut_windows(loaded.tokenizer, corpus(), 6, 64, 2048, Reading("strided", 24, "bos"))
    scored = torch.cat([windows.targets(i) for i in range(6)]).tolist()
    assert scored == loaded.tokenizer(TEXT, add_special_tokens=False)["input_ids"][: len(scored)]
    text = loaded.tokenizer.decode(scored)
    assert sum(windows.text_bytes) == len(text.encode())
    assert sum(windows.words) == len(re.split(r"\s+", text.strip()))  # lm-eval, tasks/wikitext/preprocess_wikitext.py


def test_words_and_bytes_are_those_of_the_scored_text(loaded, tmp_path):
    """As lm-eval defines them: the sum of token NLLs over the text's white-space words and over its UTF-8 bytes."""
    text = TEXT.replace("é", "e")  # a token is a byte, and so a letter
    windows = cut_windows(loaded.tokenizer, corpus(text), 5, 64, loaded.context)
    items = measured(loaded, windows, tmp_path)
    nll = sum(row.nll * row.tokens for row in items if isinstance(row, Window))
    scored = [at for at in range(5 * 64) if at % 64]
    words = sum(not text[at].isspace() and text[at - 1].isspace() for at in scored)
    numbers = values(items)
    assert numbers["word_ppl"] == pytest.approx(math.exp(nll / words), rel=1e-9)
    assert numbers["byte_ppl"] == pytest.approx(math.exp(nll / len(scored)), rel=1e-9)
    assert numbers["bits_per_byte"] == pytest.approx(nll / len(scored) / math.log(2), rel=1e-9)


def test_a_tokenizer_that_does_not_tell_its_text_leaves_words_and_bytes_out(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(type(loaded.tokenizer), "is_fast", False)
    windows = cut_windows(loaded.tokenizer, corpus(), 4, 64, loaded.context)
    items = measured(loaded, windows, tmp_path)
    assert values(items)["word_ppl"] is values(items)["bits_per_byte"] is None
    assert next(m.note for m in items if isinstance(m, Measurement) and m.name == "word_ppl").startswith(
        "the tokenizer"
    )


def test_equal_logits_give_the_vocabularys_size_under_each_convention(loaded, tmp_path):
    loaded.model.lm_head.weight.zero_()
    for at, reading in enumerate(READINGS):
        (tmp_path / str(at)).mkdir()
        windows = cut_windows(loaded.tokenizer, corpus(), 4, 64, loaded.context, reading)
        numbers = values(measured(loaded, windows, tmp_path / str(at)))
        assert numbers["ppl"] == pytest.approx(272, rel=1e-6) and numbers["kld"] == 0.0


def test_the_divergence_table_is_that_of_plain_float64(loaded, tmp_path):
    """Every number of llama.cpp's --kl-divergence, and the reverse divergence, from log-probabilities in float64."""
    windows = cut_windows(loaded.tokenizer, corpus(), 5, 64, loaded.context)

    def plain():
        with torch.no_grad():
            return torch.cat([loaded.model(input_ids=ids[None]).logits[0, :-1].double() for ids in windows.ids])

    head, before = loaded.model.lm_head, plain()
    items = measured(loaded, windows, tmp_path, head=head, cast="w=e5m2/row a=e5m2/row also=lm_head")
    base, cast = before.log_softmax(-1), plain().log_softmax(-1)
    true = windows.ids[:, 1:].reshape(-1, 1)
    kld = (base.exp() * (base - cast)).sum(-1)
    reverse = (cast.exp() * (cast - base)).sum(-1)
    moved = (cast.gather(-1, true).exp() - base.gather(-1, true).exp())[:, 0]
    numbers = values(items)
    near = {"rel": 1e-4, "abs": 1e-6}  # float32 sums over 272 tokens
    assert numbers["kld"] == pytest.approx(float(kld.mean()), **near)
    assert numbers["kld_reverse"] == pytest.approx(float(reverse.mean()), **near)
    assert numbers["delta_p"] == pytest.approx(float(moved.mean()), rel=1e-3, abs=1e-8)
    assert numbers["delta_p_rms"] == pytest.approx(float(moved.square().mean().sqrt()), **near)
    fifth = cast.topk(5).values[:, -1:]
    overlap = (cast.gather(-1, base.topk(5).indices) >= fifth).double().mean()
    assert numbers["top5"] == pytest.approx(float(overlap), abs=2 / len(true))  # ties at the baseline's fifth place
    correlation = np.corrcoef(base.gather(-1, true)[:, 0], cast.gather(-1, true)[:, 0])[0, 1]
    assert numbers["ln_ppl_correlation"] == pytest.approx(correlation, rel=1e-5)
    assert numbers["ppl_ratio"] == pytest.approx(numbers["ppl"] / numbers["baseline_ppl"], rel=1e-9)
    assert numbers["ppl_diff"] == pytest.approx(numbers["ppl"] - numbers["baseline_ppl"], rel=1e-9)
    for name, tokens in (("kld", kld), ("kld_reverse", reverse), ("delta_p", moved)):
        for label, share in PERCENTILES[name].items():
            assert values(items, label)[f"{name}_tokens"] == pytest.approx(
                float(np.percentile(tokens, share)), rel=1e-3, abs=1e-6
            )


def test_a_model_does_not_differ_from_itself_and_no_divergence_is_negative(loaded, tmp_path):
    windows = cut_windows(loaded.tokenizer, corpus(), 4, 64, loaded.context)
    items = measured(loaded, windows, tmp_path)
    for label in PERCENTILES["kld"]:
        assert values(items, label)["kld_tokens"] == values(items, label)["kld_reverse_tokens"] == 0.0
    assert values(items)["top5"] == 1.0 and values(items)["delta_p_rms"] == 0.0
    again = measured(loaded, windows, tmp_path, cast="w=e4m3fn/1x32")
    assert values(again, "minimum")["kld_tokens"] > -1e-6 and values(again, "minimum")["kld_reverse_tokens"] > -1e-6


@pytest.mark.parametrize("width", [7, 272, 320, 333, 1_000])
def test_no_floor_lies_under_a_divergence(width):
    """Logits that differ by a hair, far from zero: float64 sees 5e-7 nats, and so do we to float32's few 1e-7."""
    generator = torch.Generator().manual_seed(2)
    theirs = 30 + 4 * torch.randn(40, width, generator=generator)
    moved = theirs + 1e-3 * torch.randn(40, width, generator=generator)
    targets = torch.randint(width, (40,), generator=generator)
    scores = Comparer(lambda _: moved, lambda _: theirs).compare(
        moved, theirs, predictions(theirs.clone(), targets), targets
    )
    base, mine = theirs.double().log_softmax(-1), moved.double().log_softmax(-1)
    exact = (base.exp() * (base - mine)).sum(-1)
    assert float((scores.kld - exact).abs().max()) < 1e-6 and float(exact.mean()) < 1e-6
    assert torch.equal(scores.top1.bool(), base.argmax(-1) == mine.argmax(-1))


def test_ties_go_to_the_lower_token_and_five_of_many_equals_still_agree():
    logits = torch.zeros(3, 1_000)
    logits[1, [70, 640, 999]] = 2.0
    logits[2, 999] = 3.0
    base = predictions(logits.clone(), torch.zeros(3, dtype=torch.long))
    assert base.likeliest.tolist() == [0, 70, 999]
    same = Comparer(lambda _: logits, lambda _: logits).compare(logits, logits, base, torch.zeros(3, dtype=torch.long))
    assert same.top5.tolist() == [1.0] * 3 and same.top1.tolist() == [1.0] * 3


def test_a_masked_vocabulary_gives_no_nan_and_what_only_the_run_masks_is_infinite():
    theirs, targets = torch.randn(4, 500, generator=torch.Generator().manual_seed(3)), torch.arange(4)
    theirs[:, 400:] = -math.inf
    moved = theirs + 0.1 * torch.randn(4, 500, generator=torch.Generator().manual_seed(4))
    moved[3, 7] = -math.inf
    moved[2, 450] = 0.0  # the run gives a chance to what the baseline masks
    scores = Comparer(lambda _: moved, lambda _: theirs).compare(
        moved, theirs, predictions(theirs.clone(), targets), targets
    )
    for values_ in (getattr(scores, field.name) for field in dataclasses.fields(scores)):
        assert not values_.isnan().any()
    keep = slice(0, 400)
    base, mine = theirs[:2, keep].double().log_softmax(-1), moved[:2, keep].double().log_softmax(-1)
    assert scores.kld[:2].tolist() == pytest.approx((base.exp() * (base - mine)).sum(-1).tolist(), abs=1e-6)
    assert scores.kld.isinf().tolist() == [False, False, False, True]
    assert scores.kld_reverse.isinf().tolist() == [False, False, True, False]


def test_a_model_with_a_masked_vocabulary_is_measured(loaded, tmp_path):
    model = loaded.model
    mask = torch.zeros(272, dtype=torch.bfloat16)
    mask[258:] = -math.inf
    model.lm_head.bias = nn.Parameter(mask, requires_grad=False)
    windows = cut_windows(loaded.tokenizer, corpus(), 4, 64, loaded.context)
    items = measured(loaded, windows, tmp_path, cast="w=e4m3fn/row a=e4m3fn/row")
    numbers = values(items)
    assert 0 < numbers["kld"] < 1 and math.isfinite(numbers["ppl"]) and numbers["kld_noise_floor"] > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_run_that_overflows_names_its_window(loaded, tmp_path, bad):
    windows = cut_windows(loaded.tokenizer, corpus(), 4, 64, loaded.context)
    *_, baseline = baseline_of(loaded.model, loaded.model.lm_head, windows, tmp_path / "b.safetensors")
    seen = iter(range(4))
    loaded.model.model.norm.register_forward_hook(lambda _m, _i, out: out.fill_(bad) if next(seen) == 2 else None)
    with pytest.raises(NotFinite, match="Window 3 gave NaN or infinity"):
        list(perplexity(loaded.model, loaded.model.lm_head, windows, baseline, "emulated", 0))


def test_a_text_that_is_empty_and_a_tokenizer_without_bos_are_a_sentence_each(loaded):
    with pytest.raises(CorpusError, match="The corpus “text” is empty: choose “pydocs” or a text file"):
        cut_windows(loaded.tokenizer, corpus(" \n"), 1, 64, 2048)
    loaded.tokenizer.bos_token = None
    with pytest.raises(InvalidChoice, match="this model's tokenizer has none: choose “none” for BOS"):
        cut_windows(loaded.tokenizer, corpus(), 1, 64, 2048, Reading(bos="bos"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"convention": "rolling"}, "not a convention: choose one of disjoint, strided, half"),
        ({"bos": "eos"}, "not a rule for BOS"),
        ({"stride": 32}, "leave it 0"),
        ({"convention": "strided"}, "choose 1 to 511 tokens"),
        ({"convention": "strided", "stride": 512}, "choose 1 to 511 tokens"),
        ({"until": -0.1}, "out of range"),
        ({"until": math.nan}, "out of range"),
    ],
)
def test_a_reading_that_cannot_be_is_refused_with_what_to_change(change, sentence):
    with pytest.raises(InvalidChoice, match=sentence):
        Request.of(**change).checked()


def test_overlapping_windows_that_do_not_fit_are_refused_with_how_many_do(loaded):
    text = corpus("x" * 1_000)
    reading = Reading("strided", 100)
    with pytest.raises(CorpusError, match="enough for 8 windows of 256, but 9 were requested"):
        cut_windows(loaded.tokenizer, text, 9, 256, 2048, reading)
    assert len(cut_windows(loaded.tokenizer, text, 8, 256, 2048, reading)) == 8


def test_a_run_stops_at_the_first_look_that_is_narrow_enough_and_says_so(loaded, tmp_path):
    windows = cut_windows(loaded.tokenizer, corpus(TEXT * 4), 20, 32, loaded.context)
    items = measured(loaded, windows, tmp_path, cast="w=e4m3fn/row a=e4m3fn/row", until=10.0)
    assert sum(isinstance(item, Window) for item in items) == 8  # the first look
    note = next(item.note for item in items if isinstance(item, Measurement) and item.name == "ln_ppl_diff")
    assert note.startswith("read 8 of 20 windows, until ±10 nats; looks at 8, 16, 20; each look at 98.33 %")
    (tmp_path / "b").mkdir()
    whole = measured(loaded, windows, tmp_path, until=1e-9, cast="")
    assert sum(isinstance(item, Window) for item in whole) == 20


def test_progress_comes_twice_a_window(loaded, tmp_path):
    windows = cut_windows(loaded.tokenizer, corpus(), 4, 64, loaded.context)
    shares = [item.share for item in measured(loaded, windows, tmp_path) if isinstance(item, Progress)]
    assert shares == [i / 8 for i in range(8)]


def test_told_is_what_plain_log_softmax_says():
    logits = torch.randn(30, 700, generator=torch.Generator().manual_seed(5)) * 5
    targets = torch.randint(700, (30,), generator=torch.Generator().manual_seed(6))
    base = predictions(logits.clone(), targets)
    assert isinstance(base, Predictions)
    assert base.nll.tolist() == pytest.approx(F.cross_entropy(logits.double(), targets, reduction="none").tolist())
    assert torch.equal(base.likeliest, logits.argmax(-1))
    assert torch.equal(base.top.sort(-1).values, logits.topk(5).indices.sort(-1).values)


def beginning_with_bos(tokenizer, *, and_eos=False):
    """The tokenizer, which now begins (and ends) every text with its special token, as Llama's and Gemma's do."""
    from tokenizers.processors import TemplateProcessing

    end = f" {tokenizer.eos_token}" if and_eos else ""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.bos_token} $A{end}", special_tokens=[(tokenizer.bos_token, tokenizer.bos_token_id)]
    )
    return tokenizer


def test_bos_follows_what_the_tokenizer_itself_adds(loaded):
    auto = Reading(bos="auto")
    without = cut_windows(loaded.tokenizer, corpus(), 4, 64, 2048, auto)
    assert torch.equal(without.ids, cut_windows(loaded.tokenizer, corpus(), 4, 64, 2048).ids)
    assert without.method == DISJOINT.method
    beginning_with_bos(loaded.tokenizer)
    with_bos = cut_windows(loaded.tokenizer, corpus(), 4, 64, 2048, auto)
    assert (with_bos.ids[:, 0] == loaded.tokenizer.bos_token_id).all() and with_bos.method == Reading(bos="bos").method
    calibrated = calibration_windows(loaded.tokenizer, corpus(), 2, 64, 0, auto)
    assert (calibrated[:, 0] == loaded.tokenizer.bos_token_id).all()


def test_the_default_leaves_bos_to_the_tokenizer_and_stored_requests_stay_as_they_were():
    assert Request().reading == Reading() == Reading(bos="auto")
    stored = Request().to_json()
    del stored["bos"]  # a row of before there was a choice
    assert Request.from_json(stored).reading.bos == "none"
    assert Request.from_json(Request.of(bos="none").to_json()).reading.bos == "none"


def test_a_text_without_spaces_keeps_its_byte_perplexity_and_bits_per_byte(loaded, tmp_path):
    text = "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3002" * 200  # no white space: only its start begins a word
    windows = dataclasses.replace(cut_windows(loaded.tokenizer, corpus(text), 4, 64, 2048), words=(0, 0, 0, 0))
    by_name = {item.name: item for item in measured(loaded, windows, tmp_path) if isinstance(item, Measurement)}
    assert by_name["word_ppl"].value is None and "white space" in by_name["word_ppl"].note
    assert by_name["byte_ppl"].value > 1 and by_name["bits_per_byte"].value > 0
    assert not by_name["byte_ppl"].note
