"""Decoding speed on a tiny model: the tokens are those of transformers' generate, and emulated runs get no number."""

from dataclasses import replace

import pytest
import torch
from transformers.cache_utils import StaticCache

from fp8dash.choose.records import Measurement, Progress, StageResult
from fp8dash.choose.request import Request
from fp8dash.errors import ModelError
from fp8dash.measure import decode as module
from fp8dash.measure.decode import PERCENTILES, Session, decode, prompts, timed
from fp8dash.pipeline import run_stages
from fp8dash.report.decoding import decoding_of

PER_BATCH = {"prefill_tokens_per_s", "ttft_ms", "decode_tokens_per_s", "decode_joules_per_token", *PERCENTILES}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Few steps: what is proved does not depend on how many."""
    monkeypatch.setattr(module, "STEPS", 6)
    monkeypatch.setattr(module, "PASSES", 2)


def measured(loaded, backend, batches=(1, 3)):
    return list(decode(loaded.model, loaded.context, batches, backend, 0))


def test_every_batch_has_its_numbers_and_the_run_its_memory(loaded):
    items = measured(loaded, "native")
    rows = {(row.name, row.label): row for row in items if isinstance(row, Measurement)}
    assert {name for name, label in rows if label == "batch 3"} == PER_BATCH
    assert {name for name, label in rows if not label} == {"resident_memory_bytes", "peak_memory_bytes"}
    assert rows["itl_ms", "batch 1"].value <= rows["itl_ms_p90", "batch 1"].value <= rows["itl_ms_p99", "batch 1"].value
    assert 0 < rows["resident_memory_bytes", ""].value <= rows["peak_memory_bytes", ""].value
    assert "128 tokens in" in rows["ttft_ms", "batch 1"].note and rows["ttft_ms", "batch 1"].backend == "native"
    joules = rows["decode_joules_per_token", "batch 1"]
    assert (joules.value is None) == ("NVML" in joules.note) and joules.note  # a CPU has no such counter
    assert [(p.done, p.total) for p in items if isinstance(p, Progress)] == [(0, 2), (1, 2)]


def test_rates_and_latencies_are_those_of_the_same_seconds(loaded):
    timing = timed(loaded.model, prompts(272, 2, 16, 0))
    assert len(timing.first) == len(timing.gaps) == 2 and all(len(gaps) == 6 for gaps in timing.gaps)
    rows = {row.name: row.value for row in module._measurements(timing, 2, 16, "native")}
    assert rows["ttft_ms"] == pytest.approx(1e3 * 2 * 16 / rows["prefill_tokens_per_s"])
    low, high = sorted(map(sum, timing.gaps))
    assert 2 * 6 / high <= rows["decode_tokens_per_s"] <= 2 * 6 / low


def test_what_is_measured_reads_back_as_speeds_with_their_tokens_and_way(loaded, store):
    run = store.run(store.add_run(Request(), owner="ada")[0])
    rows = [row for row in measured(loaded, "native") if isinstance(row, Measurement)]
    decoding = decoding_of(run, rows)
    assert [(one.batch, one.prompt, one.output) for one in decoding.speeds] == [(1, 128, 6), (3, 128, 6)]
    assert all(0 < one.gap_ms <= one.gap_p90_ms <= one.gap_p99_ms and one.first_ms > 0 for one in decoding.speeds)
    assert (decoding.way, decoding.method) == ("128 tokens in, 6 out; eager, a cache that grows", module.METHOD)
    assert decoding_of(run, [replace(row, label=f"row {i}", note="") for i, row in enumerate(rows)]) == decoding
    emulated = decoding_of(run, measured(loaded, "emulated"))
    assert not emulated.speeds and "emulated, whose time says nothing" in emulated.missing[0]


@pytest.mark.parametrize("backend", ["emulated", "mixed", "simulated"])
def test_an_emulated_run_gets_no_number_and_says_why(loaded, backend):
    (row,) = measured(loaded, backend)
    assert row.value is None and row.backend == backend and "emulated, whose time says nothing" in row.note


@pytest.mark.parametrize("static", [False, True])
def test_the_tokens_are_those_of_generate(loaded, static):
    model, ids = loaded.model, prompts(272, 3, 20, 1)
    model.generation_config.eos_token_id = None  # no prompt ends early
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0)
    session = Session(model, ids)
    if static:  # the cache of a GPU, on the CPU
        session._static = session._cache = StaticCache(config=model.config, max_cache_len=20 + 8)
    for _ in range(2):  # a second pass starts afresh
        session.prefill()
        got = [session.newest.clone()]
        for _ in range(7):
            session.step()
            got.append(session.newest.clone())
        assert torch.equal(torch.cat(got, 1), wanted[:, 20:])


def test_prompts_are_random_and_those_of_their_seed():
    ids = prompts(272, 4, 64, 5)
    assert torch.equal(ids, prompts(272, 4, 64, 5)) and not torch.equal(ids, prompts(272, 4, 64, 6))
    assert ids.unique().numel() > 100 and ids.max() < 272


def test_zeros_are_not_timed(loaded):
    loaded.model.lm_head.weight.zero_()
    with pytest.raises(ModelError, match="outputs only zeros"):
        measured(loaded, "baseline")


def test_a_context_without_room_is_a_sentence(loaded):
    with pytest.raises(ModelError, match="no room for 6 new ones"):
        list(decode(loaded.model, 6, (1,), "baseline", 0))


@pytest.mark.parametrize(
    ("recipe", "backend", "timed"),
    [("bf16", "auto", True), ("FP8_BLOCK", "emulated", False), ("kv=e4m3fn/tensor", "auto", False)],
)
def test_the_stage_comes_last_and_only_where_asked_for(tiny, corpus_file, tmp_path, recipe, backend, timed):
    request = Request.of(
        model=str(tiny), recipe=recipe, corpus=str(corpus_file), measures=("decode",), backend=backend,
        decode_batches=(2,),
    )  # fmt: skip
    results = [item for item in run_stages(request, frozenset(), tmp_path) if isinstance(item, StageResult)]
    assert [item.stage for item in results][-1] == "decode" and "decode" not in Request().measures
    rates = [row.value for row in results[-1].rows if row.name == "decode_tokens_per_s"]
    assert [rate is not None for rate in rates] == [timed]
