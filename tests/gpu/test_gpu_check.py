"""The check of an accelerator ends everywhere, and on one it finds what the code claims."""

import json
import subprocess
import sys
from collections import Counter

import pytest
import torch

from tests.gpu.check import CASTS, NATIVES, PEAKS, PROBES, RECIPES, agreement, bench_of, legality

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none here")


@pytest.fixture(scope="module")
def report():
    """The JSON of the small check, run as a user runs it."""
    command = [sys.executable, "-m", "tests.gpu.check", "--small"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout.splitlines()[-1])


def test_the_small_check_tells_where_it_ran_and_that_nothing_broke(report):
    assert report["kind"] == "cpu" and report["small"] and report["failed"] == {}
    assert {"device", "capability", "cuda", "torch", "peaks", "seconds", "verdicts"} <= report.keys()


def test_torch_agrees_with_every_verdict_on_the_cpu(report):
    assert len(report["legality"]) == len(PROBES)
    assert report["verdicts"] == {"agree": len(PROBES), "stricter": 0, "wrong": 0}
    assert all(row["reason"] and (row["torch"] or row["torch_says"]) for row in report["legality"])


def test_products_and_casts_agree_with_emulation_or_say_why_they_were_not_run(report):
    whats = Counter(row["what"] for row in report["agreement"])
    assert whats == {"product": 2 * len(NATIVES), "cast": len(CASTS), "accumulator": 2}
    agree(report["agreement"])


def test_the_table_has_every_kind_at_every_m_with_its_figures_or_a_reason(report):
    kinds = Counter(row["kind"] for row in report["gemm"])
    assert kinds.keys() == {"bf16", *RECIPES} and len(set(kinds.values())) == 1
    keys = {"us", "samples", "tflops", "share_of_peak", "x_bf16", "cast_us", "layout_us", "x_bf16_with_cast"}
    for row in report["gemm"]:
        assert row.get("skipped") or keys <= row.keys()
        assert ("skipped" in row) == (row["kind"] == "block")  # the CPU has no block-wise kernel


def test_casts_and_decoding_have_their_figures(report):
    assert [row["cast"] for row in report["casts"]] == ["copy", *CASTS]
    assert all({"gb_per_s", "share_of_copy", "share_of_peak"} <= row.keys() for row in report["casts"])
    assert [(row["kind"], row["batch"]) for row in report["decode"]] == [
        ("bf16", 1), ("bf16", 4), ("row", 1), ("row", 4)
    ]  # fmt: skip
    assert all(row["tokens_per_s"] > 0 for row in report["decode"])
    assert report["decode"][-1]["native_linears"] == 14  # seven in each of two layers


def test_a_peak_in_fp8_is_about_twice_that_in_bf16():
    for bf16, fp8, _ in PEAKS.values():
        assert fp8 is None or fp8 / bf16 == pytest.approx(2, rel=0.02)


@pytest.mark.gpu
@needs_cuda
def test_torch_runs_what_is_called_native_on_this_gpu():
    wrong = [row for row in legality(bench_of(small=False)) if row["verdict"] == "wrong"]
    assert not wrong


@pytest.mark.gpu
@needs_cuda
def test_this_gpu_agrees_with_emulation():
    agree(agreement(bench_of(small=False)))


def agree(rows):
    """Casts agree in every bit. Products: Hopper's 13 fraction bits, promoted every 128 of K, are predicted to err by
    1.3e-4 of the product's size (MMA-Sim's model), BF16 rounds by at most 2^-8 more, and sums of int8 are exact."""
    for row in rows:
        if row["what"] == "cast":
            assert row["codes_equal"] == row["scales_equal"] == 1, row
        elif row["what"] == "product" and "skipped" not in row:
            assert row["rms_error"] < 1e-3 and row["bf16_rms_error"] < 2**-8 + row["rms_error"], row
            assert row.get("bits_equal", 1) == 1, row
