"""What to ship: the answer's rule, told apart from how a page shows it."""

import pytest

from fp8dash.ui.parts.answer import MEASURED, PREDICTED, Budget, Speed, choose, evidence, shipping
from tests.ui.test_charts import standing

FINE = standing("FP8_BLOCK", kld=0.024, model_bytes=163e6)
FAST = standing("INT8", kld=0.031, model_bytes=163e6)
WIDE = standing("MXFP8", kld=0.020, model_bytes=180e6)
ROWS = [FINE, FAST, WIDE]


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
    answer = choose(ROWS, Budget(), {name: Speed(value, MEASURED) for name, value in times.items()})
    assert (answer.best.name, answer.by) == (ships, by)
    assert {row.name for row, _ in answer.lost} == {row.name for row in ROWS} - {ships} and all(
        why for _, why in answer.lost
    )


def test_the_answer_says_why_speed_did_not_decide():
    slow = choose(ROWS, Budget(), {"INT8": Speed(0.79, MEASURED)})
    assert "smallest within the budget, as none that was timed is faster than BF16" in evidence(slow)
    assert "speed not known" in shipping(slow, Budget(), "demo", "CPU")
    assert "as no speed is known" in evidence(choose(ROWS, Budget(), {}))
    assert "fastest within the budget" in evidence(choose(ROWS, Budget(), {"INT8": Speed(1.7, MEASURED)}))


def test_a_prediction_is_never_said_as_if_it_were_measured():
    how = PREDICTED.format(32)
    answer = choose(ROWS, Budget(), {"INT8": Speed(1.4, how), "MXFP8": Speed(1.2, how)})
    title = shipping(answer, Budget(), "demo", "H200 SXM")
    assert title == "Ship INT8 on H200 SXM: KLD 0.0310 nats, 1.40× BF16 predicted for decoding at batch 32"
    assert "fastest within the budget, as predicted" in evidence(answer)
    slow = choose(ROWS, Budget(), {"INT8": Speed(1.0, how)})
    assert "smallest within the budget, as none is predicted to be faster than BF16" in evidence(slow)
