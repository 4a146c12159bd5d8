"""The accelerators are the reference's: peaks, memory, bandwidth, ridges, and what is multiplied natively."""

import json
from pathlib import Path

import pytest

from fp8dash.predict.accelerators import ACCELERATORS, BF16, FP4, FP8

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "hardware.json").read_text("utf-8"))["accelerators"]
CALLED = {  # their names in the reference
    "H100 SXM": "H100 SXM5 80GB", "H200 SXM": "H200 SXM 141GB", "B200": "B200 (HGX)", "GB200": "GB200 (per GPU)",
    "A100 SXM": "A100 SXM 80GB",
}  # fmt: skip
ROWS = {row["name"]: row for row in REFERENCE}


def row_of(name):
    return ROWS[CALLED.get(name, name)]


def test_every_accelerator_of_the_reference_is_here():
    assert {CALLED.get(name, name) for name in ACCELERATORS} == set(ROWS)


@pytest.mark.parametrize("name", ACCELERATORS)
def test_peaks_memory_and_bandwidth_are_the_references(name):
    accelerator, row = ACCELERATORS[name], row_of(name)
    assert (accelerator.memory_gb, accelerator.bandwidth_tbps) == (row["memory_gb"], row["hbm_tbps"])
    assert {"bf16": accelerator.bf16, "fp8": accelerator.fp8, "fp4": accelerator.fp4} == row["dense_tflops"]
    assert accelerator.capability == row["compute_capability"] and accelerator.source


@pytest.mark.parametrize("name", ACCELERATORS)
def test_ridges_are_the_references(name):
    accelerator, row = ACCELERATORS[name], row_of(name)["ridge_flop_per_byte"]
    kinds = {BF16: "bf16", FP8: "fp8", FP4: "fp4"}
    for kind, column in kinds.items():
        if accelerator.peak(kind):
            assert accelerator.ridge(kind) == pytest.approx(row[column], abs=0.05)  # the reference keeps one decimal
    assert bool(accelerator.peak("fp8") or accelerator.peak("fnuz")) == row_of(name)["fp8_native"]


def test_integers_run_at_the_rate_of_eight_bit_floats_where_both_are_known():
    for a in ACCELERATORS.values():
        if a.int8 and a.fp8:
            assert a.int8 == a.fp8
