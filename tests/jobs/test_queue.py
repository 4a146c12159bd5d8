"""The queue as it runs in earnest: real store, queue, worker process, child process, and a tiny model."""

import base64
import os
import pickle
import sqlite3
import stat
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from dbos import DBOSClient, DBOSPortableJSONSerializer

from db.rows import CANCELLED, FAILED, FINISHED, QUEUED, RUNNING
from db.store import Store
from fp8dash.choose.request import Request
from fp8dash.errors import QueueError
from fp8dash.places import data_dir, log_file
from jobs.queue import APPLICATION, QUEUE, SCHEMA, WORKFLOW, Queue, engine_url
from tests.jobs.engine import LONG, QUICK, ended, no_row_is_doubled, stages, until, workflows
from tests.tiny import write_corpus


def test_a_run_goes_from_queued_over_running_to_finished(
    store: Store, queue: Queue, quick: Request, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    (run_id,) = queue.submit([quick], owner="me", study="tiny")
    assert (store.run(run_id).state, store.run(run_id).study) == (QUEUED, "tiny")
    assert queue.log_tail(run_id) == ""
    worker = start()
    until(lambda: store.run(run_id).state == RUNNING)
    run = ended(store, run_id)
    assert (run.state, run.error, run.attempt, run.backend) == (FINISHED, None, 1, "emulated")
    assert stages(store, run_id) == QUICK
    assert no_row_is_doubled(store, run_id)
    assert run.device and run.model_hash and "torch" in run.facts["versions"]
    assert "attempt 1" in queue.log_tail(run_id).splitlines()[0]
    assert stat.S_IMODE(log_file(run_id).stat().st_mode) == 0o600
    assert stat.S_IMODE((data_dir() / "fp8dash-queue.sqlite").stat().st_mode) == 0o600
    assert "torch" not in Path(f"/proc/{worker.pid}/maps").read_text()
    until(lambda: store.workers()[0].device == run.device)
    until(lambda: workflows()[run_id] == "SUCCESS")


def test_identical_requests_are_one_run_while_it_is_active(store: Store, queue: Queue, quick: Request) -> None:
    first = queue.submit_one(quick, owner="me")
    assert queue.submit([quick, quick], owner="you", study="again") == [first, first]
    queue.cancel(first)
    assert queue.submit_one(quick, owner="me") != first
    assert workflows()[first] == "CANCELLED"


def test_a_run_that_is_retried_while_its_cancelled_process_still_ends_runs_to_its_end(
    store: Store, queue: Queue, long: Request, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    start()
    run_id = queue.submit_one(long, owner="me")
    until(lambda: "quantize" in stages(store, run_id))
    queue.cancel(run_id)
    queue.retry(run_id)
    run = ended(store, run_id)
    assert (run.state, run.attempt, stages(store, run_id)) == (FINISHED, 1, LONG)
    assert no_row_is_doubled(store, run_id)
    until(lambda: workflows()[run_id] == "SUCCESS")


def test_a_queued_run_is_cancelled_at_once_and_only_once(store: Store, queue: Queue, quick: Request) -> None:
    run_id = queue.submit_one(quick, owner="me")
    queue.cancel(run_id)
    assert store.run(run_id).state == CANCELLED
    with pytest.raises(QueueError, match="already cancelled"):
        queue.cancel(run_id)


def test_a_failed_run_keeps_its_finished_stages_and_says_why_and_a_retry_goes_on_from_there(
    store: Store, queue: Queue, model: Path, tmp_path: Path, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    start()
    common = {"model": str(model), "device": "cpu", "backend": "emulated", "gemm_m": (1,)}
    without_text = Request.of(**common, corpus=str(tmp_path / "corpus.txt"), measures=("gemm",))
    no_kernel = Request.of(**common | {"backend": "native"}, recipe="MXFP8", measures=("gemm",))
    first, second = queue.submit([without_text, no_kernel], owner="me", study="failing")
    run = ended(store, first)
    assert run.state == FAILED
    assert run.error is not None and "corpus.txt" in run.error and "Internal" not in run.error
    write_corpus(tmp_path)
    queue.retry(first)

    run = ended(store, second)
    assert run.state == FAILED
    assert run.error is not None and "native" in run.error and "Internal" not in run.error
    assert stages(store, second) == ["load", "baseline"]
    kept = store.stages([second])[second]
    until(lambda: not store.run(first).is_active)
    assert (store.run(first).state, stages(store, first)) == (FINISHED, QUICK)

    queue.retry(second)
    run = ended(store, second)
    assert (run.state, run.attempt) == (FAILED, 1)
    assert store.stages([second])[second] == kept
    assert "done before: baseline, load" in queue.log_tail(second)
    with pytest.raises(QueueError, match="only a failed or cancelled"):
        queue.retry(first)


def test_reconcile_enqueues_a_run_whose_web_process_died_before_it_could(
    store: Store, queue: Queue, quick: Request
) -> None:
    run_id, _ = store.add_run(quick, owner="me")
    assert workflows() == {}
    queue.reconcile()
    queue.reconcile()
    assert workflows() == {run_id: "ENQUEUED"}


def test_reconcile_cancels_a_workflow_without_an_active_run(store: Store, queue: Queue, quick: Request) -> None:
    client = DBOSClient(
        system_database_url=engine_url(store.url),
        dbos_system_schema=SCHEMA,
        serializer=DBOSPortableJSONSerializer(),
        application_name=APPLICATION,
    )
    client.enqueue({"workflow_name": WORKFLOW, "queue_name": QUEUE, "workflow_id": "stranger"}, "stranger")
    client.destroy()
    run_id = queue.submit_one(quick, owner="me")
    queue.reconcile()
    assert workflows() == {"stranger": "CANCELLED", run_id: "ENQUEUED"}


class Trap:
    """Leaves a file where it is unpickled."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (self.file,)


def test_a_pickled_row_in_the_engine_is_refused_and_never_unpickled(
    store: Store, queue: Queue, quick: Request, tmp_path: Path, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    run_id = queue.submit_one(quick, owner="me")
    sprung = tmp_path / "sprung"
    trap = base64.b64encode(pickle.dumps(Trap(str(sprung)))).decode()
    with closing(sqlite3.connect(data_dir() / "fp8dash-queue.sqlite")) as engine, engine:
        assert engine.execute("UPDATE workflow_status SET serialization = 'py_pickle'").rowcount == 1
        assert engine.execute("UPDATE workflow_input SET inputs = ?", (trap,)).rowcount == 1
    client = queue._client
    client.list_workflows(load_input=True)
    start()
    until(lambda: workflows()[run_id] == "ERROR")
    with pytest.raises(QueueError, match="pickled value"):
        client.retrieve_workflow(run_id).get_result()
    assert not sprung.exists()
    queue.reconcile()  # writes the arguments anew
    assert ended(store, run_id).state == FINISHED
    pickle.loads(base64.b64decode(trap))
    assert sprung.exists(), "the trap itself works"


def test_a_database_in_memory_is_refused() -> None:
    with pytest.raises(QueueError, match="in-memory"):
        engine_url("sqlite://")
