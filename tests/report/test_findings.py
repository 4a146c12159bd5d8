"""Standings to sentences: within one group and backend only, with the numbers of the rows, the newest first."""

import dataclasses

import pytest

from fp8dash.choose.presets import PRESETS, recipe_from
from fp8dash.choose.recipe import parse_recipe
from fp8dash.explain.claims import CLAIMS, FAILS, HOLDS, VERDICTS
from fp8dash.report.comparison import Standing
from fp8dash.report.findings import GRADIENTS, KV_BYTES, LOOKS, _without_head, findings

ATTENTION, HEAD = "attn=e4m3fn/tensor", "w=e4m3fn/row a=e4m3fn/row also=lm_head"


def row(name: str, kld: float | None = 0.03, **values: object) -> Standing:
    """A finished run of a preset, or of a recipe's text."""
    recipe = recipe_from(name)
    backend = "baseline" if recipe.is_baseline else "emulated"
    standing = Standing(
        name, "demo", recipe.text, name if name in PRESETS else None, "finished", "ada", backend, "CPU", kld=kld,
        group="one", created="2026-05-01",
    )  # fmt: skip
    return dataclasses.replace(standing, **values)  # type: ignore[arg-type]


def text(rows, claim, extras=None):
    finding = findings(rows, extras or {}).get(claim)
    return finding.text if finding else None


CASES = {
    6: ([row("FP8_E5M2", 0.1), row("FP8_DYNAMIC", 0.04)], "0.100 nats (KLD), 2.50× FP8_DYNAMIC’s 0.0400"),
    8: ([row("MXFP8", bits_per_weight=8.25)], "8.250 bits per cast weight: scales add 3.12 %"),
    9: ([row("FP8_DYNAMIC", bits_per_weight=8.0078125)], "scales add 0.0977 %"),
    10: ([row("FP8_BLOCK", bits_per_weight=8.001953125)], "scales add 0.0244 %"),
    11: ([row("INT8_TENSOR", 1.2), row("INT8", 0.03), row("FP8_TENSOR", 0.033), row("FP8_DYNAMIC", 0.03)],
         "instead of per row: 40.00× the KLD for INT8, 1.10× for E4M3"),
    13: ([row(HEAD, 0.05), row("FP8_DYNAMIC", 0.03)], "KLD 0.0500 instead of 0.0300"),
    15: ([row(ATTENTION, 0.01)], "attn=e4m3fn/tensor: KLD 0.0100"),
    19: ([row("FP8_DYNAMIC", backend="native", device="H200", device_kind="cuda", gemm_speedup=1.55)],
         "FP8_DYNAMIC: 1.55× BF16"),
    21: ([row("FP8_BLOCK", ln_ppl_diff=0.01), row("FP8_TENSOR", ln_ppl_diff=0.02)],
         "between +1.01 % (FP8_BLOCK) and +2.02 % (FP8_TENSOR)"),
    22: ([row("KV_FP8"), row("FP8_BLOCK")], "11,520 bytes with KV_FP8, 23,040 without: 0.50×"),
    23: ([row("KV_FP8", needle=0.5), row("BF16", 0.0, needle=1.0)], "KV_FP8 finds 0.50 of the needles, BF16 1.00"),
    27: ([row("MXFP8_FLOOR", 0.03), row("MXFP8", 0.02)], "1.50× MXFP8’s"),
    28: ([row("BF16", 0.0)], "E4M3 30.5 dB, E5M2 24.4 dB"),
    30: ([row("MOSS", 0.01), row("MXFP8", 0.02)], "0.50× MXFP8’s"),
    31: ([row("INT8", weight_sqnr_db=40.0), row("FP8_DYNAMIC", weight_sqnr_db=31.5)],
         "INT8 40.0 dB SQNR, E4M3 31.5 dB"),
    32: ([row("MXFP8", 0.034), row("FP8_TENSOR", 0.032)], "1.06× FP8_TENSOR’s"),
    33: ([row("FP8_BLOCK_UE8M0", 0.03), row("FP8_BLOCK", 0.03)], "1.00× FP8_BLOCK’s"),
}  # fmt: skip
EXTRAS = {
    "KV_FP8": {KV_BYTES: 11520.0}, "FP8_BLOCK": {KV_BYTES: 23040.0},
    "BF16": dict(zip(GRADIENTS, (30.5, 24.4), strict=True)),
}  # fmt: skip


@pytest.mark.parametrize("claim", LOOKS)
def test_a_finding_says_the_numbers_of_its_rows(claim):
    rows, expected = CASES[claim]
    assert expected in text(rows, claim, EXTRAS)
    assert set(findings(rows, EXTRAS)[claim].runs) <= {r.run for r in rows}


@pytest.mark.parametrize("claim", LOOKS)
def test_nothing_is_said_without_a_row_that_it_needs(claim):
    rows, _ = CASES[claim]
    for missing in rows:
        rest = [r for r in rows if r is not missing]
        assert text(rest, claim, EXTRAS) is None or claim == 21  # a span of one is still a number
    assert text([dataclasses.replace(r, state="failed") for r in rows], claim, EXTRAS) is None


PAIRS = [claim for claim, (rows, _) in CASES.items() if len(rows) > 1 and claim != 21]


@pytest.mark.parametrize(
    ("claim", "field"),
    [(claim, field) for claim in PAIRS for field in ({"group": "another"}, {"backend": "native"})
     if (claim, *field) != (23, "backend")],  # a baseline belongs to both backends
)  # fmt: skip
def test_runs_of_unlike_groups_or_backends_are_never_set_side_by_side(claim, field):
    rows, _ = CASES[claim]
    apart = [dataclasses.replace(rows[0], **field), *rows[1:]]
    assert text(apart, claim, EXTRAS) is None


def test_the_newest_group_speaks():
    old, new = ([dataclasses.replace(r, group=g, created=c, device=g) for r in CASES[6][0]]
                for g, c in (("one", "2026-05-01"), ("two", "2026-05-02")))  # fmt: skip
    assert findings([*new, *old], {})[6].where == "demo on two"


def test_a_cpus_speed_says_nothing_about_the_claim_and_emulated_speed_is_none():
    for field in ({"device": "CPU (x86-64)", "device_kind": "cpu"}, {"backend": "emulated"}):
        assert (
            text(
                [
                    row(
                        "FP8_DYNAMIC",
                        **({"backend": "native", "device": "H200", "device_kind": "cuda", "gemm_speedup": 1.5} | field),
                    )
                ],
                19,
            )
            is None
        )


def test_claims_are_numbered_judged_and_sourced():
    assert list(CLAIMS) == list(range(1, len(CLAIMS) + 1)) and set(LOOKS) <= set(CLAIMS)
    assert {claim.verdict for claim in CLAIMS.values()} == set(VERDICTS)
    assert all(claim.source and claim.evidence for claim in CLAIMS.values())
    assert CLAIMS[1].verdict == HOLDS and CLAIMS[7].verdict == FAILS


def test_a_recipe_without_its_head_keeps_everything_else():
    """Changing one field keeps all the others."""
    text = "w=e4m3fn/row a=e4m3fn/row w[*.o_proj]=bf16 also=lm_head,embeddings skip=*.down_proj"
    assert _without_head(parse_recipe(text)).text == text.replace("lm_head,", "")
    added = "w=e4m3fn/row a=e4m3fn/row acc=hopper also=lm_head"
    assert _without_head(parse_recipe(added)).text == added.removesuffix(" also=lm_head")
