"""Perplexity, divergence and GEMM times on a tiny model, against plain transformers and closed forms."""

import math
from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from fp8dash.choose.hardware import Device
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import GemmPoint, Measurement, Window
from fp8dash.errors import CorpusError
from fp8dash.measure import gemm as gemms
from fp8dash.measure.baseline import Baseline, baseline_of
from fp8dash.measure.corpora import cut_windows, load_corpus
from fp8dash.measure.gemm import gemm
from fp8dash.measure.perplexity import perplexity
from fp8dash.model.swap import cast_model

CPU = Device("cpu", "CPU")


@pytest.fixture
def windows(loaded, corpus_file):
    return cut_windows(loaded.tokenizer, load_corpus(str(corpus_file)), 4, 128, loaded.context)


def measured_baseline(loaded, windows, file):
    *_, baseline = baseline_of(loaded.model, loaded.model.lm_head, windows, file)
    assert isinstance(baseline, Baseline)
    return baseline


def scored(loaded, head, windows, baseline):
    items = list(perplexity(loaded.model, head, windows, baseline, "emulated", 0))
    values = {item.name: item.value for item in items if isinstance(item, Measurement) and not item.label}
    return values, [item for item in items if isinstance(item, Window)]


@torch.no_grad()
def plain(model, windows):
    """NLL per token and log-probabilities, as transformers gives them."""
    chances = [F.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float(), -1) for ids in windows.ids]
    chances = torch.stack(chances)
    return -chances.gather(-1, windows.ids[:, 1:, None])[..., 0].double(), chances.double()


def test_the_baseline_is_plain_transformers_and_its_divergence_from_itself_is_zero(loaded, windows, tmp_path):
    baseline = measured_baseline(loaded, windows, tmp_path / "b.safetensors")
    values, rows = scored(loaded, loaded.model.lm_head, windows, baseline)
    nll, _ = plain(loaded.model, windows)
    assert values["ppl"] == pytest.approx(math.exp(nll.mean()), rel=1e-6)
    assert values["kld"] == 0.0 and values["top1"] == 1.0 and values["ln_ppl_diff"] == 0.0
    assert [row.nll for row in rows] == pytest.approx(nll.mean(-1).tolist(), rel=1e-6)
    assert values["scored_tokens"] == 4 * 127


def test_divergence_is_that_of_plain_log_probabilities(loaded, windows, tmp_path):
    head = loaded.model.lm_head
    base_nll, base = plain(loaded.model, windows)
    baseline = measured_baseline(loaded, windows, tmp_path / "b.safetensors")
    list(cast_model(loaded.model, parse_recipe("w=e5m2/row a=e5m2/row also=lm_head"), CPU, "emulated"))
    values, rows = scored(loaded, head, windows, baseline)
    nll, log_p = plain(loaded.model, windows)
    kld = (base.exp() * (base - log_p)).sum(-1)
    assert values["kld"] == pytest.approx(float(kld.mean()), rel=1e-3)
    assert [row.kld for row in rows] == pytest.approx(kld.mean(-1).tolist(), rel=1e-3)
    assert values["ln_ppl_diff"] == pytest.approx(float((nll - base_nll).mean()), rel=1e-4)
    assert values["top1"] == pytest.approx(float((base.argmax(-1) == log_p.argmax(-1)).double().mean()))
    assert values["ln_ppl_diff_low"] < values["ln_ppl_diff"] < values["ln_ppl_diff_high"]


def test_equal_logits_give_the_vocabularys_size(loaded, windows, tmp_path):
    loaded.model.lm_head.weight.zero_()
    values, _ = scored(
        loaded, loaded.model.lm_head, windows, measured_baseline(loaded, windows, tmp_path / "b.safetensors")
    )
    assert values["ppl"] == pytest.approx(272, rel=1e-6)


def test_windows_are_disjoint_cuts_of_the_corpus(loaded, corpus_file):
    corpus = load_corpus(str(corpus_file))
    ids = cut_windows(loaded.tokenizer, corpus, 3, 100, 2048).ids
    assert loaded.tokenizer.decode(ids.flatten()) == corpus.text[:300]  # one token a byte


@pytest.mark.parametrize(
    ("count", "length", "sentence"),
    [
        (1, 4096, "exceed the model's context of 2,048: choose at most 2,048"),
        (1000, 2048, "enough for .* ask for at most"),
    ],
)
def test_windows_that_do_not_fit_are_refused_with_what_would(loaded, corpus_file, count, length, sentence):
    with pytest.raises(CorpusError, match=sentence):
        cut_windows(loaded.tokenizer, load_corpus(str(corpus_file)), count, length, loaded.context)


def test_a_corpus_shorter_than_a_window_is_a_sentence(loaded, tmp_path):
    (tmp_path / "short.txt").write_text("Too short.")
    with pytest.raises(
        CorpusError, match="holds 10 tokens, enough for 0 windows .* choose shorter windows or a longer"
    ):
        cut_windows(loaded.tokenizer, load_corpus(str(tmp_path / "short.txt")), 1, 128, loaded.context)


def test_a_corpus_that_is_missing_or_not_utf8_is_a_sentence(tmp_path):
    with pytest.raises(CorpusError, match="cannot be read"):
        load_corpus(str(tmp_path / "none.txt"))
    (tmp_path / "latin.txt").write_bytes("Größe".encode("latin-1"))
    with pytest.raises(CorpusError, match="not UTF-8 text"):
        load_corpus(str(tmp_path / "latin.txt"))


def test_pydocs_is_english_with_a_hash():
    corpus = load_corpus("pydocs")
    assert len(corpus.text) > 400_000 and 'The "if" statement' in corpus.text
    assert len(corpus.content_hash) == 64 and "CPython" in corpus.origin


def test_gemm_times_every_shape_and_m_and_says_why_nothing_was_timed():
    shapes = Counter({(64, 64): 4, (160, 64): 2})
    for text, native in (("w=int8/row a=int8/row", True), ("w=e4m3fn/128x128 a=e4m3fn/1x128", False), ("bf16", False)):
        items = list(gemm(shapes, parse_recipe(text), (16, 1), CPU, torch.device("cpu"), 0))
        points = [item for item in items if isinstance(item, GemmPoint)]
        assert {(p.m, p.n, p.k, p.count) for p in points} == {(m, *s, c) for m in (1, 16) for s, c in shapes.items()}
        assert all(p.baseline_us > 0 and (p.matmul_us is not None) == native for p in points)
        overall = items[-1]
        assert (overall.name, overall.label) == ("gemm_speedup", "")
        assert all(p.baseline_cold_us > 0 and p.baseline_iqr >= 0 for p in points)
        assert all((p.matmul_cold_us is not None) == (p.cast_iqr is not None) == native for p in points)
        if native:
            cast_us = sum(p.count * (p.cast_us + p.matmul_us) for p in points if p.m == 16)
            assert overall.value == pytest.approx(sum(p.count * p.baseline_us for p in points if p.m == 16) / cast_us)
        else:
            assert overall.value == (1.0 if text == "bf16" else None) and overall.note


def point(m, baseline, cast=None, matmul=None, reason=""):
    return GemmPoint(m, 64, 32, 1, baseline, cast, matmul, "scaled_mm" if matmul else "", reason)


@pytest.mark.parametrize(
    ("points", "value", "note"),
    [
        ([point(1, 9.0, 5.0, 5.0), point(16, 9.0, 4.0, 4.0), point(64, 9.0, 1.0, 1.0)], 16.0, "of M=1, 16, 64"),
        ([point(1, 9.0, 1.0, 1.0), point(16, 9.0, 9.0, 1.0)], 1.0, "of M=1, 16; slower again at M=[16]"),
        ([point(1, 9.0, 9.0, 1.0), point(1, 9.0, 1.0, 1.0)], 1.0, "of M=1"),  # two shapes: 12 µs for 18
        ([point(1, 9.0, 9.0, 1.0)], None, "none of M=1: the cast and the product take longer than BF16"),
        ([point(1, 9.0, 1.0, 1.0), point(1, 9.0, reason="no kernel")], None, "no kernel"),
    ],
)
def test_the_crossover_is_the_first_m_whose_cast_and_product_beat_bf16(points, value, note):
    crossover = gemms._crossover(points, untimed=0.0)
    assert (crossover.value, crossover.note, crossover.unit) == (value, note, "tokens")


def test_a_rate_is_work_over_time_and_bytes_are_what_the_operands_hold():
    """By hand: 2 * 4 * 64 * 32 operations; int8 codes, float32 scales a row, bfloat16 result."""
    items = list(gemm(Counter({(64, 32): 1}), parse_recipe("w=int8/row a=int8/row"), (4,), CPU, torch.device("cpu"), 0))
    (gemm_point,) = (item for item in items if isinstance(item, GemmPoint))
    assert gemm_point.tflops(16.384) == pytest.approx(1e-3) and gemm_point.tflops(None) is None
    assert gemm_point.baseline_bytes == 2 * (4 * 32 + 64 * 32 + 4 * 64)
    assert gemm_point.matmul_bytes == (4 * 32 + 4 * 4) + (64 * 32 + 64 * 4) + 2 * 4 * 64
    peaks = {item.label: item for item in items if isinstance(item, Measurement) and item.name.startswith("peak")}
    assert set(peaks) == {"BF16", "int_mm", "copy"} and all(peak.value > 0 for peak in peaks.values())
    assert [peaks[name].backend for name in peaks] == ["baseline", "native", "baseline"]
