"""How long a run will take: by the stages of runs like it, or nothing is said."""

import dataclasses

import pytest

from fp8dash.choose.request import Request
from fp8dash.report.pace import pace_of
from tests.seed import CPU, H200

USUAL = Request.of(recipe="FP8_DYNAMIC", backend="emulated")


def test_a_run_takes_what_its_stages_took_and_reading_grows_with_the_tokens(store, ids):
    pace = pace_of(store, "demo", "emulated", [CPU])
    took = {stage.stage: stage.seconds for stage in store.stages([ids["INT8"]])[ids["INT8"]]}
    assert pace.seconds(USUAL) == pytest.approx(sum(took.values()))
    longer = USUAL.but(windows=3 * USUAL.windows.count)
    assert pace.seconds(longer) == pytest.approx(sum(took.values()) + 2 * took["perplexity"])
    assert pace.together([USUAL, longer]) == pytest.approx(pace.seconds(USUAL) + pace.seconds(longer))


@pytest.mark.parametrize(
    "other",
    [{"measures": ("perplexity", "tasks")}, {"recipe": "w=e4m3fn/row a=e4m3fn/row acc=hopper"}],
    ids=lambda other: next(iter(other)),
)
def test_what_was_never_timed_is_not_guessed(other, store, ids):
    pace = pace_of(store, "demo", "emulated", [CPU])
    asked = dataclasses.replace(USUAL, **other)
    assert pace.seconds(asked) is None and pace.together([USUAL, asked]) is None and pace.together([]) is None


def test_other_models_backends_and_devices_say_nothing(store, ids):
    for model, backend, device in (("org/demo", "emulated", CPU), ("demo", "auto", CPU), ("demo", "emulated", H200)):
        assert pace_of(store, model, backend, [device]).seconds(USUAL) is None
