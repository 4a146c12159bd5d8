"""Workers as they run in earnest: killed, stopped, cancelled, and refused; real processes and a tiny model."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dbos import DBOS
from sqlalchemy import update

from db.claims import MAX_DEATHS, Claims
from db.rows import CANCELLED, FAILED, FINISHED, QUEUED, RUNNING
from db.store import Store
from db.tables import WorkerTable
from db.workers import ALIVE, DEAD, LEFT, Workers
from fp8dash.choose.request import Request
from fp8dash.places import data_dir
from jobs import worker as module
from jobs.processes import SLOT_TAKEN, WORKER_MARK, end_marked, identity
from jobs.queue import Queue
from jobs.worker import AGAIN, SlotTaken, SlotWorker
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
    assert "already has a worker" in second.stderr and str(first.pid) in second.stderr
    assert "Traceback" not in second.stderr
    assert [worker.state for worker in store.workers()] == [ALIVE]


def test_the_engine_can_still_recover_the_work_of_a_dead_executor() -> None:
    assert callable(DBOS._recover_pending_workflows), "not public: Worker._tend falls back on resuming"


def test_a_worker_of_another_data_folder_on_one_database_is_refused_and_the_first_keeps_its_child(
    store: Store, queue: Queue, long: Request, start: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    first = start()
    run_id = queue.submit_one(long, owner="me")
    group = child_group(store)
    elsewhere = os.environ | {"FP8DASH_DATA_DIR": str(tmp_path / "other"), "FP8DASH_DATABASE_URL": store.url}
    command = [sys.executable, "-m", "jobs.worker"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False, env=elsewhere)
    assert second.returncode == SLOT_TAKEN and str(first.pid) in second.stderr
    assert not is_gone(group) and first.poll() is None
    assert (store.run(run_id).state, store.run(run_id).attempt) == (RUNNING, 1)


@pytest.fixture
def worker(store: Store, monkeypatch: pytest.MonkeyPatch) -> SlotWorker:
    """A worker of this process, which looks often; it is not at work."""
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.01)
    return SlotWorker(store, 0)


def test_a_slot_held_from_where_nobody_can_see_is_taken_once_its_counter_stood_still(
    store: Store, worker: SlotWorker
) -> None:
    others = Workers(store)
    others.register("unseen", host="here", slot=0, pid=1, process="another machine:pid:[1]:1:1")
    assert worker._take_slot("here") == []
    assert {one.id: one.state for one in store.workers()} == {"unseen": DEAD, worker.id: ALIVE}


def test_a_slot_whose_unseen_holder_beats_is_refused(store: Store, worker: SlotWorker) -> None:
    others = Workers(store)
    others.register("unseen", host="here", slot=0, pid=1, process="another machine:pid:[1]:1:1")
    beating = threading.Event()

    def beat() -> None:
        while not beating.wait(0.002):
            others.heartbeat("unseen")

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        with pytest.raises(SlotTaken, match="already has a worker"):
            worker._take_slot("here")
    finally:
        beating.set()
        heart.join()
    assert {one.id: one.state for one in store.workers()} == {"unseen": ALIVE}


def test_a_holder_that_is_seen_to_be_over_leaves_its_slot_at_once(store: Store, worker: SlotWorker) -> None:
    over = subprocess.Popen([sys.executable, "-c", ""])
    own = identity(over.pid)
    over.wait()
    Workers(store).register("over", host="here", slot=0, pid=over.pid, process=own)
    assert worker._take_slot("here") == []
    assert {one.id: one.state for one in store.workers()}["over"] == DEAD


def test_a_process_that_was_asked_to_end_is_no_death_of_its_run(store: Store, worker: SlotWorker) -> None:
    run_id, _ = store.add_run(Request(), owner="me")
    Workers(store).register(worker.id, host="here", slot=0, pid=1)
    lease = Claims(store).claim(run_id, worker.id)
    assert lease is not None

    def after(number: int) -> tuple[str, str | None]:
        with ThreadPoolExecutor(1) as thread:  # a browser of another test may keep a loop running in this one
            return thread.submit(asyncio.run, worker._failure(lease, {}, -number)).result()

    assert {after(signal.SIGTERM) for _ in range(3 * MAX_DEATHS)} == {(AGAIN, None)}
    assert [after(signal.SIGKILL)[0] for _ in range(MAX_DEATHS)] == [AGAIN] * (MAX_DEATHS - 1) + [FAILED]


def test_the_worker_command_logs_what_it_does(store: Store) -> None:
    command = [sys.executable, "-m", "fp8dash.cli", "worker"]
    worker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert worker.stderr is not None
    try:
        assert any("INFO" in line and "ready" in line for line in worker.stderr)
    finally:
        worker.terminate()
        worker.communicate(timeout=DEADLINE)
