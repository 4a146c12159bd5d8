"""What the fences hold off, on a real database."""

import math
import sqlite3
from pathlib import Path

import pytest

from db.claims import MAX_DEATHS, MAX_STARTS, Claims, Lease
from db.opened import may_pass
from db.rows import CANCELLED, FAILED, FINISHED, QUEUED, RUNNING
from db.store import Store
from db.workers import LEFT, LOOKS, Workers
from fp8dash.choose.records import LOWER, NEITHER, Layer, Measurement, Progress, StageResult
from fp8dash.choose.request import Request
from fp8dash.errors import QueueError, StoreError

ROWS = (
    Measurement("ppl", math.nan, "", LOWER, "1", "emulated"),
    Measurement("coverage", 0.79, "share", NEITHER, "1", "emulated"),
    Layer("q_proj", 64, 64, "e4m3fn/tensor", "emulated", "", 8.0),
)
RESULT = StageResult("quantize", 1.5, ROWS, {"model_hash": "abc", "device": "CPU", "peak_rss_bytes": 7})


def claimed(claims: Claims, run: str, worker: str = "one") -> Lease:
    claim = claims.claim(run, worker)
    assert claim is not None
    return claim


def swept(workers: Workers, *silent: str) -> list[str]:
    """The runs given back once some workers were not heard for long, and the others were."""
    runs = []
    for _ in range(LOOKS + 1):
        for worker in workers.alive() - set(silent):
            workers.heartbeat(worker)
        runs += workers.sweep()
    return runs


def test_a_run_is_claimed_by_one_worker(store: Store, claims: Claims, run: str) -> None:
    claim = claimed(claims, run)
    assert (claim.attempt, claim.done, Request.from_json(claim.request)) == (1, frozenset(), Request())
    assert claims.claim(run, "two") is None
    row = store.run(run)
    assert (row.state, row.worker_id, row.attempt) == (RUNNING, "one", 1)
    assert row.started_at is not None and row.started_at >= row.created_at


def test_a_stage_is_recorded_once_with_its_rows_and_facts(store: Store, claims: Claims, run: str) -> None:
    claim = claimed(claims, run)
    assert claims.record_stage(claim, RESULT)
    assert claims.record_stage(claim, RESULT)
    first, second = store.measurements([run])[run]
    assert math.isnan(first.value or 0.0) and second.value == 0.79
    assert [layer.name for layer in store.layers([run])[run]] == ["q_proj"]
    assert [stage.stage for stage in store.stages([run])[run]] == ["quantize"]
    row = store.run(run)
    assert (row.model_hash, row.device, row.facts) == ("abc", "CPU", {"peak_rss_bytes": 7})


def test_facts_of_a_later_stage_join_those_of_an_earlier_one(store: Store, claims: Claims, run: str) -> None:
    claim = claimed(claims, run)
    claims.record_stage(claim, RESULT)
    claims.record_stage(claim, StageResult("gemm", 1.0, (), {"backend": "native", "threads": 2}))
    row = store.run(run)
    assert (row.facts, row.backend, row.device) == ({"peak_rss_bytes": 7, "threads": 2}, "native", "CPU")


def test_progress_is_shown_and_gone_at_the_end(store: Store, claims: Claims, run: str) -> None:
    claim = claimed(claims, run)
    assert claims.progress(claim, Progress("gemm", 1, 4, "M=16"))
    row = store.run(run)
    assert (row.stage, row.stage_share, row.message) == ("gemm", 0.25, "M=16")
    assert claims.finish(claim, FINISHED)
    row = store.run(run)
    assert (row.state, row.stage_share, row.message) == (FINISHED, 1.0, "")
    assert row.finished_at is not None


def test_a_finished_run_lets_an_identical_request_in(store: Store, claims: Claims, run: str) -> None:
    assert store.add_run(Request(), owner="you") == (run, False)
    claims.finish(claimed(claims, run), FINISHED)
    assert store.add_run(Request(), owner="you")[1]


@pytest.mark.parametrize("how", ["given back", "cancelled", "taken again", "left and taken"])
def test_a_stale_owner_can_write_nothing(store: Store, workers: Workers, claims: Claims, run: str, how: str) -> None:
    stale = claimed(claims, run)
    if how == "cancelled":
        assert claims.cancel(run)
    elif how == "left and taken":
        workers.leave("one")
        assert claimed(claims, run, "two").attempt == stale.attempt
    else:
        assert swept(workers, "one") == [run]
    if how == "taken again":
        assert claimed(claims, run, "two").attempt == 2
    before = store.run(run)
    assert not claims.owns(stale)
    assert not claims.progress(stale, Progress("gemm", 1, 2))
    assert not claims.record_stage(stale, RESULT)
    assert not claims.finish(stale, FAILED, "late")
    assert claims.child_died(stale) is None
    assert store.run(run) == before
    assert store.measurements([run])[run] == []


def test_the_same_worker_at_a_later_attempt_is_another_owner(claims: Claims, run: str) -> None:
    first = claimed(claims, run)
    second = claimed(claims, run)
    assert (second.attempt, claims.owns(first), claims.owns(second)) == (2, False, True)


def test_a_run_of_a_dead_worker_can_be_claimed_before_any_sweep(
    store: Store, workers: Workers, claims: Claims, run: str
) -> None:
    claimed(claims, run)
    holder = workers.holder("here", 0)
    assert holder is not None
    workers.bury(holder)
    assert claimed(claims, run, "two").attempt == 2


def test_a_worker_that_leaves_gives_its_run_back_without_an_attempt(
    store: Store, workers: Workers, claims: Claims, run: str
) -> None:
    claimed(claims, run)
    workers.leave("one")
    row = store.run(run)
    assert (row.state, row.attempt, row.worker_id) == (QUEUED, 0, None)
    assert {worker.id: worker.state for worker in store.workers()}["one"] == LEFT


def test_deaths_of_workers_and_reboots_of_hosts_do_not_fail_a_run(
    store: Store, workers: Workers, claims: Claims, run: str
) -> None:
    for number in range(3 * MAX_DEATHS):
        worker = f"boot {number}"
        workers.register(worker, host="there", slot=0, pid=1)
        claimed(claims, run, worker)
        assert swept(workers, worker) == [run]
    assert store.run(run).state == QUEUED


def test_deaths_of_the_runs_own_process_count_until_a_stage_is_finished(claims: Claims, run: str) -> None:
    assert [claims.child_died(claimed(claims, run)) for _ in range(MAX_DEATHS - 1)] == [1, 2]
    claim = claimed(claims, run)
    assert claims.record_stage(claim, RESULT)
    assert claims.child_died(claim) == 1


def test_a_run_that_takes_its_machine_down_each_time_fails_in_the_end_and_says_so(
    store: Store, claims: Claims, run: str
) -> None:
    for _ in range(MAX_STARTS):
        claimed(claims, run)
    assert claims.claim(run, "one") is None
    row = store.run(run)
    assert row.state == FAILED
    assert row.error is not None and f"started {MAX_STARTS} times without finishing a stage" in row.error


def test_a_run_that_makes_progress_may_be_started_any_number_of_times(store: Store, claims: Claims, run: str) -> None:
    for number in range(2 * MAX_STARTS):
        stage = StageResult(f"stage {number}", 1.0, ())
        assert claims.record_stage(claimed(claims, run), stage)
    assert store.run(run).state == RUNNING


def test_a_lease_bears_what_earlier_attempts_measured(workers: Workers, claims: Claims, run: str) -> None:
    first = claimed(claims, run)
    assert (first.model_hash, first.corpus_hash) == (None, None)
    claims.record_stage(first, StageResult("load", 1.0, (), {"model_hash": "abc", "corpus_hash": "def"}))
    workers.leave("one")
    again = claimed(claims, run, "two")
    assert (again.model_hash, again.corpus_hash, again.done) == ("abc", "def", {"load"})


def test_a_retry_starts_counting_again_and_keeps_the_finished_stages(store: Store, claims: Claims, run: str) -> None:
    claim = claimed(claims, run)
    claims.record_stage(claim, RESULT)
    claims.finish(claim, FAILED, "no luck")
    claims.retry(run)
    row = store.run(run)
    assert (row.state, row.attempt, row.error, row.finished_at) == (QUEUED, 0, None, None)
    claim = claimed(claims, run)
    assert (claim.attempt, claim.done) == (1, {"quantize"})


def test_only_what_ended_badly_can_be_retried(store: Store, claims: Claims, run: str) -> None:
    with pytest.raises(QueueError, match="only a failed or cancelled"):
        claims.retry(run)
    claims.cancel(run)
    twin, _ = store.add_run(Request(), owner="me")
    with pytest.raises(QueueError, match="identical run"):
        claims.retry(run)
    claims.finish(claimed(claims, twin), FINISHED)
    claims.retry(run)
    with pytest.raises(QueueError, match="only a failed or cancelled"):
        claims.retry(twin)


def test_an_outage_is_told_from_a_refusal(store: Store, claims: Claims, run: str) -> None:
    claim = claimed(claims, run)
    refused = StageResult("quantize", 1.0, (Layer(object(), 64, 64, "", "kept", "", 8.0),))  # type: ignore[arg-type]
    with pytest.raises(StoreError) as refusal:
        claims.record_stage(claim, refused)
    assert not may_pass(refusal.value)
    assert store.stages([run])[run] == []
    with sqlite3.connect(Path(store.url.removeprefix("sqlite:///")), isolation_level=None) as other:
        other.execute("ALTER TABLE stage RENAME TO gone")
    other.close()
    with pytest.raises(StoreError) as outage:
        claims.record_stage(claim, RESULT)
    assert may_pass(outage.value)


def test_what_has_ended_cannot_be_cancelled(store: Store, claims: Claims, run: str) -> None:
    assert claims.cancel(run)
    assert store.run(run).state == CANCELLED
    assert not claims.cancel(run)
    assert claims.claim(run, "one") is None


def test_runs_that_ask_for_the_same_but_for_the_recipe_are_known_to_the_one_that_starts(
    store: Store, claims: Claims
) -> None:
    asked = Request.of(model="/models/a", measures=("perplexity",))
    recipes = ["w=e4m3fn/row a=e4m3fn/row", "w=int8/row a=int8/row", "bf16"]
    first, second, third = (store.add_run(asked.but(recipe=recipe), owner="me")[0] for recipe in recipes)
    store.add_run(asked.but(recipe="w=int4/row", windows=4), owner="me")
    store.add_run(asked.but(recipe="w=int4/row", model="/models/b"), owner="me")
    assert claims.beside(claimed(claims, first)) == recipes[1:]
    claimed(claims, second, "two")
    assert claims.beside(Lease(third, "one", 1, asked.but(recipe="bf16").checked().to_json(), frozenset())) == []
