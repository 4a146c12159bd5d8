"""The whole engine as it runs in earnest: real store, queue, worker process, child process, and a tiny model."""

import base64
import os
import pickle
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from dbos import DBOS, DBOSClient, DBOSPortableJSONSerializer
from sqlalchemy import update

from db.claims import ALIVE, DEAD, LEFT, MAX_ATTEMPTS
from db.rows import CANCELLED, FAILED, FINISHED, QUEUED, RUNNING, Run
from db.store import Store
from db.tables import WorkerTable
from fp8dash.choose.request import Request
from fp8dash.errors import QueueError
from fp8dash.places import data_dir, database_url, log_file
from jobs.child import WORKER_MARK, end_leftovers
from jobs.queue import APPLICATION, QUEUE, SCHEMA, WORKFLOW, Queue, engine_url
from tests.tiny import write_corpus, write_tiny_model

DEADLINE = 120.0  # for a machine that others share; nothing here takes a tenth of it
QUICK = ["load", "baseline", "quantize", "gemm"]
LONG = ["load", "baseline", "quantize", "perplexity"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def quick(model: Path, corpus: Path) -> Request:
    """Seconds, nearly all of them the import of torch."""
    return Request.of(
        model=str(model),
        recipe="w=e4m3fn/tensor",
        corpus=str(corpus),
        measures=("gemm",),
        gemm_m=(1,),
        device="cpu",
        backend="emulated",
    )


@pytest.fixture
def long(model: Path, corpus: Path) -> Request:
    """Stages before, and then one that leaves time to break something."""
    return Request.of(
        model=str(model), recipe="w=e4m3fn/row", corpus=str(corpus), windows=1_000, window_length=64,
        measures=("perplexity",), device="cpu", backend="emulated",
    )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("FP8DASH_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("FP8DASH_DATABASE_URL", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two threads that share a core wait for each other
    store = Store(database_url())
    yield store
    store.close()


@pytest.fixture
def queue(store: Store) -> Iterator[Queue]:
    queue = Queue(store)
    yield queue
    queue.close()


@pytest.fixture
def start(store: Store) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        with (data_dir() / "worker.log").open("ab") as log:
            started.append(subprocess.Popen([sys.executable, "-m", "jobs.worker"], stdout=log, stderr=log))
        return started[-1]

    yield start
    for worker in started:
        worker.terminate()
        worker.wait(DEADLINE)


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not true():
        if time.monotonic() > deadline:
            log = data_dir() / "worker.log"
            pytest.fail(f"waited in vain; the worker's log:\n{log.read_text() if log.exists() else ''}")
        time.sleep(0.05)


def ended(store: Store, run_id: str) -> Run:
    until(lambda: not store.run(run_id).is_active)
    return store.run(run_id)


def stages(store: Store, run_id: str) -> list[str]:
    return [stage.stage for stage in store.stages([run_id])[run_id]]


def no_row_is_doubled(store: Store, run_id: str) -> bool:
    names = [(row.name, row.label) for row in store.measurements([run_id])[run_id]]
    layers = [layer.name for layer in store.layers([run_id])[run_id]]
    return len(names) == len(set(names)) > 0 and len(layers) == len(set(layers)) > 0


def child_group(store: Store) -> int:
    until(lambda: any(worker.child_group for worker in store.workers() if worker.state == ALIVE))
    return next(w.child_group for w in store.workers() if w.state == ALIVE and w.child_group) or 0


def is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def workflows() -> dict[str, str]:
    with closing(sqlite3.connect(data_dir() / "fp8dash-queue.sqlite")) as engine:
        return dict(engine.execute("SELECT workflow_uuid, status FROM workflow_status").fetchall())


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


def test_what_a_dead_worker_left_behind_is_ended_and_nothing_else() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    left = subprocess.Popen(command, env=os.environ | {WORKER_MARK: "dead"}, start_new_session=True)
    try:
        end_leftovers(left.pid, "somebody else")
        assert left.poll() is None
        end_leftovers(left.pid, "dead")
        assert left.wait(DEADLINE) == -signal.SIGKILL
    finally:
        left.kill()
        left.wait()


def test_a_queued_run_is_cancelled_at_once_and_only_once(store: Store, queue: Queue, quick: Request) -> None:
    run_id = queue.submit_one(quick, owner="me")
    queue.cancel(run_id)
    assert store.run(run_id).state == CANCELLED
    with pytest.raises(QueueError, match="cancelled already"):
        queue.cancel(run_id)


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
    while len(killed) < MAX_ATTEMPTS:
        until(lambda: child_group(store) not in killed)
        killed.add(group := child_group(store))
        os.kill(group, signal.SIGKILL)
    run = ended(store, run_id)
    assert (run.state, run.attempt) == (FAILED, MAX_ATTEMPTS)
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


def test_a_failed_run_keeps_its_finished_stages_and_says_why_and_a_retry_goes_on_from_there(
    store: Store, queue: Queue, model: Path, tmp_path: Path, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    start()
    common = {"model": str(model), "device": "cpu", "backend": "emulated", "gemm_m": (1,)}
    without_text = Request.of(**common, corpus=str(tmp_path / "corpus.txt"), measures=("gemm",))
    too_short = Request.of(**common, measures=("gemm", "needle"), needle_lengths=(128,), needle_depths=(50,))
    first, second = queue.submit([without_text, too_short], owner="me", study="failing")
    run = ended(store, first)
    assert run.state == FAILED
    assert run.error is not None and "corpus.txt" in run.error and "Internal" not in run.error
    write_corpus(tmp_path)
    queue.retry(first)

    run = ended(store, second)
    assert run.state == FAILED
    assert run.error is not None and "needle length of 128" in run.error
    assert stages(store, second) == ["load"]  # said before anything is cast
    kept = store.stages([second])[second]
    until(lambda: not store.run(first).is_active)
    assert (store.run(first).state, stages(store, first)) == (FINISHED, QUICK)

    queue.retry(second)
    run = ended(store, second)
    assert (run.state, run.attempt) == (FAILED, 1)
    assert store.stages([second])[second] == kept
    assert "done before: load" in queue.log_tail(second)
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
    known = queue.submit_one(quick, owner="me")
    queue.reconcile()
    assert workflows() == {"stranger": "CANCELLED", known: "ENQUEUED"}


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
    assert second.returncode == 1
    assert "has a worker already" in second.stderr and str(first.pid) in second.stderr
    assert "Traceback" not in second.stderr
    assert [worker.state for worker in store.workers()] == [ALIVE]


def test_the_engine_can_still_recover_the_work_of_a_dead_executor() -> None:
    assert callable(DBOS._recover_pending_workflows), "not public: Worker._tend falls back on resuming"


def test_a_database_in_memory_is_refused() -> None:
    with pytest.raises(QueueError, match="in memory"):
        engine_url("sqlite://")
