"""What to ship: the decision's rule, and the sentences that a page and the command line make of it."""

import pytest

from fp8dash.choose.records import Window
from fp8dash.errors import InvalidChoice
from fp8dash.report.contest import contest
from fp8dash.report.headline import headline
from fp8dash.report.ship import QualityBudget, SpeedUp, Target, decide, parse_quality_budget, shipped
from fp8dash.report.ship_words import cautions, evidence, title, why
from tests.seed import fill
from tests.ui.test_charts import standing

FINE = standing("FP8_BLOCK", kld=0.024, model_bytes=163e6)
FAST = standing("INT8", kld=0.031, model_bytes=163e6)
WIDE = standing("MXFP8", kld=0.020, model_bytes=180e6)
ROWS = [FINE, FAST, WIDE]
LIMIT = QualityBudget()
HERE = Target("H200 SXM")


def measured(times):
    return {name: SpeedUp(value, "measured") for name, value in times.items()}


@pytest.mark.parametrize(
    ("times", "ships", "by"),
    [
        ({"INT8": 1.7}, "INT8", "speed"),
        ({"INT8": 1.7, "FP8_BLOCK": 1.65}, "FP8_BLOCK", "speed"),  # as fast within 5 %
        ({"INT8": 0.79, "FP8_BLOCK": 0.11}, "FP8_BLOCK", "size"),
        ({"INT8": 1.03}, "FP8_BLOCK", "size"),  # as fast as BF16 within 5 %
        ({}, "FP8_BLOCK", "size"),
    ],
)
def test_speed_decides_only_where_something_is_faster_than_bf16(times, ships, by):
    decision = decide(ROWS, LIMIT, measured(times))
    assert (decision.best.name, decision.by) == (ships, by)
    assert {loser.row.name for loser in decision.lost} == {row.name for row in ROWS} - {ships}
    assert all(why(decision, loser) for loser in decision.lost)


def test_the_answer_says_why_speed_did_not_decide():
    slow = decide(ROWS, LIMIT, measured({"INT8": 0.79}))
    assert "smallest within the budget, since no timed recipe is faster than BF16" in evidence(slow)
    assert "speed not known" in title(slow, "demo", HERE)
    assert "since no speed is known" in evidence(decide(ROWS, LIMIT, {}))
    assert "fastest within the budget" in evidence(decide(ROWS, LIMIT, measured({"INT8": 1.7})))


def test_a_prediction_is_never_said_as_if_it_were_measured():
    decision = decide(ROWS, LIMIT, {name: SpeedUp(x, "predicted", 32) for name, x in (("INT8", 1.4), ("MXFP8", 1.2))})
    assert title(decision, "demo", HERE) == (
        "Ship INT8 on H200 SXM: KLD 0.0310 nats, 1.40× BF16 predicted for decoding at batch 32"
    )
    assert "fastest within the budget, as predicted" in evidence(decision)
    slow = decide(ROWS, LIMIT, {"INT8": SpeedUp(1.0, "predicted", 32)})
    assert "smallest within the budget, since no recipe is predicted to be faster than BF16" in evidence(slow)


def test_a_recipe_without_loss_is_shipped_before_one_with_some():
    """A mean KLD of a rounding error below zero, and of exactly zero, are losses of nothing, not missing numbers."""
    below = standing("FP8_BLOCK", kld=-1.2e-9, model_bytes=163e6)
    decision = decide([below, FAST], LIMIT, {})
    assert decision.best == below and decision.lost[0].reason == "loses more"
    judged = contest([FAST, below], {})
    assert judged.leader == below and "as much" not in headline(judged)
    assert any("indistinguishable from BF16" in sentence for sentence in cautions([below, FAST], judged))


def test_at_the_noise_floor_all_are_tied_whoever_is_lowest():
    rows = [standing(name, kld=kld, kld_noise_floor=1e-6) for name, kld in
            (("FP8_BLOCK", -1e-9), ("INT8", 9e-7), ("MXFP8", 0.03))]  # fmt: skip
    windows = {row.run: [Window(i, 511, 2.5, 2.5, row.kld + 1e-10 * (-1) ** i, 0.9) for i in range(8)] for row in rows}
    judged = contest(rows, windows)
    assert [rival.outcome for rival in judged.rivals] == ["tied", "apart"]
    assert judged.rivals[0].spread == "at the noise floor"


def test_a_recipe_that_was_applied_in_part_is_neither_shipped_nor_hidden():
    partly = standing("INT8", kld=0.001, model_bytes=1e6, uncast_share=0.8)
    decision = decide([*ROWS[:1], partly], LIMIT, {})
    assert decision.best == FINE and decision.lost[0].reason == "partly cast"
    assert "a part of the model" in why(decision, decision.lost[0])


@pytest.mark.parametrize("text", ["", "kld", "kld=", "kld=-1", "kld=nan", "kld=inf", "ppl=3", "0.05"])
def test_a_budget_that_cannot_be_is_one_sentence(text):
    with pytest.raises(InvalidChoice, match="give kld=0.05"):
        parse_quality_budget(text)


def test_a_models_decision_is_read_from_the_store(store):
    fill(store)
    board, target = shipped(store, "demo", QualityBudget(limit=0.05), "", 32)
    assert board.decision.best.name == "INT8" and target.name == board.group.device
    predicted, target = shipped(store, "demo", QualityBudget(limit=0.05), "H200 SXM", 32)
    assert predicted.decision.speed.basis == "predicted" and target.accelerator
    with pytest.raises(InvalidChoice, match="is not a target"):
        shipped(store, "demo", QualityBudget(), "H9000", 32)
    with pytest.raises(InvalidChoice, match="No finished run of “none”"):
        shipped(store, "none", QualityBudget(), "", 32)
