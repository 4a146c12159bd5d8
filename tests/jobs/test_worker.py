"""Workers as they run in earnest: killed, stopped, cancelled, and refused; real processes and a tiny model."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable

from dbos import DBOS
from sqlalchemy import update

from db.claims import MAX_DEATHS
from db.rows import CANCELLED, FAILED, FINISHED, QUEUED, RUNNING
from db.store import Store
from db.tables import WorkerTable
from db.workers import ALIVE, DEAD, LEFT
from fp8dash.choose.request import Request
from fp8dash.places import data_dir
from jobs.processes import SLOT_TAKEN, WORKER_MARK, end_marked
from jobs.queue import Queue
from tests.jobs.engine import (
    DEADLINE,
    LONG,
    QUICK,
    child_group,
    ended,
    is_gone,
    no_row_is_doubled,
    stages,
    until,
    workflows,
)


def test_what_a_dead_worker_left_behind_is_ended_and_nothing_else() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    left = subprocess.Popen(command, env=os.environ | {WORKER_MARK: "dead"}, start_new_session=True)
    try:
        end_marked("somebody else")
        assert left.poll() is None
        end_marked("dead")
        assert left.wait(DEADLINE) == -signal.SIGKILL
    finally:
        left.kill()
        left.wait()


def test_a_running_run_is_cancelled_with_its_processes_and_the_worker_goes_on(
    store: Store, queue: Queue, long: Request, quick: Request, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    start()
    first, second = queue.submit([long, quick], owner="me", study="two")
    until(lambda: "quantize" in stages(store, first))
    group = child_group(store)
    queue.cancel(first)
    until(lambda: is_gone(group))
    assert (ended(store, second).state, stages(store, second)) == (FINISHED, QUICK)
    assert (store.run(first).state, store.run(first).error) == (CANCELLED, None)
    assert "perplexity" not in stages(store, first)


def test_a_killed_worker_loses_nothing(
    store: Store, queue: Queue, long: Request, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    worker = start()
    run_id = queue.submit_one(long, owner="me")
    until(lambda: "quantize" in stages(store, run_id))
    group, before = child_group(store), store.stages([run_id])[run_id]
    os.kill(group, signal.SIGSTOP)  # now it cannot notice by itself that its pipe is broken
    worker.kill()
    worker.wait()
    until(lambda: is_gone(group))
    assert store.run(run_id).state == RUNNING  # nobody is there to say otherwise
    start()
    run = ended(store, run_id)
    assert (run.state, run.attempt, run.error) == (FINISHED, 2, None)
    assert stages(store, run_id) == LONG
    assert store.stages([run_id])[run_id][: len(before)] == before
    assert no_row_is_doubled(store, run_id)
    assert [w.state for w in store.workers()] == [ALIVE, DEAD]
    until(lambda: workflows()[run_id] == "SUCCESS")


def test_a_killed_child_is_started_again(
    store: Store, queue: Queue, long: Request, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    start()
    run_id = queue.submit_one(long, owner="me")
    until(lambda: "quantize" in stages(store, run_id))
    os.kill(child_group(store), signal.SIGKILL)
    run = ended(store, run_id)
    assert (run.state, run.attempt, run.error) == (FINISHED, 2, None)
    assert stages(store, run_id) == LONG
    assert no_row_is_doubled(store, run_id)
    assert "done before: baseline, load, quantize" in queue.log_tail(run_id, lines=1_000)


def test_a_child_that_is_killed_each_time_fails_with_a_reason(
    store: Store, queue: Queue, quick: Request, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    start()
    run_id = queue.submit_one(quick, owner="me")
    killed: set[int] = set()
    while len(killed) < MAX_DEATHS:
        until(lambda: child_group(store) not in killed)
        killed.add(group := child_group(store))
        os.kill(group, signal.SIGKILL)
    run = ended(store, run_id)
    assert (run.state, run.attempt) == (FAILED, MAX_DEATHS)
    assert run.error is not None and "SIGKILL 3 times" in run.error and "memory" in run.error


def test_a_stopped_worker_puts_its_run_back_into_the_queue(
    store: Store, queue: Queue, long: Request, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    worker = start()
    run_id = queue.submit_one(long, owner="me")
    until(lambda: "quantize" in stages(store, run_id))
    group = child_group(store)
    worker.terminate()
    assert worker.wait(DEADLINE) == 0
    assert is_gone(group)
    assert (store.run(run_id).state, store.run(run_id).error, store.workers()[0].state) == (QUEUED, None, LEFT)
    start()
    run = ended(store, run_id)
    assert (run.state, run.attempt, stages(store, run_id)) == (FINISHED, 1, LONG)


def test_a_worker_that_was_marked_dead_ends_its_child_and_leaves(
    store: Store, queue: Queue, long: Request, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    worker = start()
    run_id = queue.submit_one(long, owner="me")
    group = child_group(store)
    with store.session() as session:
        session.execute(update(WorkerTable).values(state=DEAD))
    assert worker.wait(DEADLINE) == 1
    assert is_gone(group)
    assert "was marked dead" in (data_dir() / "worker.log").read_text()
    assert (store.run(run_id).state, store.workers()[0].state) == (QUEUED, DEAD)


def test_a_second_worker_on_a_slot_refuses(store: Store, start: Callable[[], subprocess.Popen[bytes]]) -> None:
    first = start()
    until(lambda: store.workers())
    second = subprocess.run(
        [sys.executable, "-m", "jobs.worker"], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert second.returncode == SLOT_TAKEN
    assert "has a worker already" in second.stderr and str(first.pid) in second.stderr
    assert "Traceback" not in second.stderr
    assert [worker.state for worker in store.workers()] == [ALIVE]


def test_the_engine_can_still_recover_the_work_of_a_dead_executor() -> None:
    assert callable(DBOS._recover_pending_workflows), "not public: Worker._tend falls back on resuming"
