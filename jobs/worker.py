"""One worker process per slot: takes runs from the queue, one at a time, and owns the child that computes each.

It computes nothing and never imports torch. A slot is a GPU, or the CPU where there is none; a file lock on host and
slot keeps a second worker out. Everything it writes about a run is fenced by its claim (`db/claims.py`).
"""

import asyncio
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, ParamSpec, TypeVar

from dbos import DBOS, DBOSConfig, DBOSPortableJSONSerializer

from db.claims import MAX_ATTEMPTS, Claim, Claims
from db.opened import may_pass
from db.rows import FAILED, FINISHED
from db.store import Store
from fp8dash.choose.records import Progress, StageResult
from fp8dash.errors import Fp8dashError, QueueError, StoreError
from fp8dash.places import data_dir, database_url
from jobs.child import END, ERROR, GRACE_SECONDS, PROGRESS, STAGE, WORKER_MARK, Child, died_of, end_leftovers
from jobs.queue import APPLICATION, QUEUE, SCHEMA, VERSION, WORKFLOW, Queue, engine_url

BEAT_SECONDS = 5.0
RECONCILE_SECONDS = 60.0
POLL_SECONDS = 0.5  # of the queue; also between two writes of progress
PAUSE_SECONDS = 2.0  # before a write is tried again that the database refused
DESCRIBE_SECONDS = 300.0  # importing torch on a cold disk
ANSWER_LIMIT = 1 << 30  # bytes of one answer: a stage with all its rows
AGAIN, LOST = "again", "lost"  # lost: cancelled, taken by another worker, or this one was marked dead
VISIBLE = "CUDA_VISIBLE_DEVICES"

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger("fp8dash.worker")


class Worker:
    """One worker, from its start to its leaving."""

    def __init__(self, store: Store, slot: int) -> None:
        """Nothing happens before `work`."""
        self.id = uuid.uuid4().hex[:16]  # new at each boot: a second process of one id would steal running work
        self.slot = slot
        self._store = store
        self._claims = Claims(store)
        self._stop = threading.Event()
        self._latest: Progress | None = None  # of the running child, not yet written

    def stop(self, number: int = 0, _frame: FrameType | None = None) -> None:
        """Leave in order; also a signal handler."""
        log.info("stopping%s", f" on {signal.Signals(number).name}" if number else "")
        self._stop.set()

    def work(self) -> None:
        """Run what is queued until `stop`; raises QueueError where the slot is taken or this worker was marked dead."""
        host = socket.gethostname()
        with _slot_lock(host, self.slot):
            for left in self._claims.register(self.id, host=host, slot=self.slot, pid=os.getpid()):
                end_leftovers(left.child_group, left.worker_id)
            queue = Queue(self._store)
            try:
                threading.Thread(target=self._describe, name="describe", daemon=True).start()
                self._launch()
                log.info("worker %s on %s, slot %d: ready", self.id, host, self.slot)
                self._beat_until_stopped(queue)
            finally:
                DBOS.destroy()  # ends the running step, and with it the child
                self._claims.leave(self.id)
                queue.close()

    def _launch(self) -> None:
        config: DBOSConfig = {
            "name": APPLICATION,
            "system_database_url": engine_url(self._store.url),
            "dbos_system_schema": SCHEMA,
            "executor_id": self.id,
            "application_version": VERSION,
            "serializer": DBOSPortableJSONSerializer(),
            "log_level": "CRITICAL",  # its errors are tracebacks of cancelled runs; ours are logged here
            "scheduler_polling_interval_sec": 3600.0,  # not used
        }
        DBOS(config=config)

        @DBOS.step(name="child", preemptible=True)
        async def child(run_id: str) -> str:
            return await self._run(run_id)

        @DBOS.workflow(name=WORKFLOW)
        async def run(run_id: str) -> str:
            return await child(run_id)

        DBOS.listen_queues([QUEUE])
        DBOS.launch()
        DBOS.register_queue(QUEUE, worker_concurrency=1, polling_interval_sec=POLL_SECONDS, on_conflict="always_update")

    def _beat_until_stopped(self, queue: Queue) -> None:
        reconcile_at = 0.0
        while not self._stop.is_set():
            try:
                if not self._claims.heartbeat(self.id):
                    break
                self._tend(queue)
                if time.monotonic() >= reconcile_at:
                    queue.reconcile()
                    queue.purge()
                    reconcile_at = time.monotonic() + RECONCILE_SECONDS
            except Fp8dashError as error:  # an outage: the next beat tries again
                log.warning("%s", error)
            except Exception:  # nothing may stop the heart
                log.exception("beat")
            self._stop.wait(BEAT_SECONDS)
        else:
            return
        raise QueueError(f"Worker {self.id} was marked dead, for it gave no sign of life for a minute: start another.")

    def _tend(self, queue: Queue) -> None:
        """Queue again what workers that are gone were running: the runs, and their workflows in the engine, which its
        open core leaves to a paid service."""
        if given_back := self._claims.sweep():
            log.warning("given back from dead workers: %s", ", ".join(given_back))
        alive = self._claims.alive()
        gone = {run_id: owner for run_id, owner in queue.pending().items() if owner not in alive}
        if not gone:
            return
        log.warning("workflows of workers that are gone: %s: queued again", ", ".join(gone))
        if recover := getattr(DBOS, "_recover_pending_workflows", None):  # conditional and idempotent, but not public
            recover(sorted(set(gone.values())))
        else:
            queue.resume(list(gone))

    def _describe(self) -> None:
        command = [sys.executable, "-m", "jobs.child", "--describe"]
        environment = os.environ | _pinned(self.slot)
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=DESCRIBE_SECONDS, env=environment)
            facts = json.loads(said.stdout.splitlines()[-1])
        except (subprocess.SubprocessError, OSError, ValueError, LookupError) as error:
            log.warning("the device could not be described: %r", error)
            return
        while not self._stop.is_set():
            try:
                return self._claims.describe(self.id, facts["name"], facts)
            except StoreError:
                self._stop.wait(PAUSE_SECONDS)

    async def _run(self, run_id: str) -> str:
        """The run's end in one word. A child that a signal ended is started again, by a claim like any other."""
        while claim := await _persist(self._claims.claim, run_id, self.id):
            log.info("run %s: attempt %d", run_id, claim.attempt)
            try:
                state, error = await self._attempt(claim)
            except Exception as unexpected:
                log.exception("run %s", run_id)
                said = f"{type(unexpected).__name__}: {unexpected}"
                state, error = FAILED, f"Internal error: {said}. The worker's log has it."
            if state != AGAIN:
                if state != LOST:
                    await _persist(self._claims.finish, claim, state, error)
                log.info("run %s: %s%s", run_id, state, f": {error}" if error else "")
                return state
        return LOST

    async def _attempt(self, claim: Claim) -> tuple[str, str | None]:
        """The run's state and error after one child; or AGAIN or LOST."""
        done = sorted(claim.done)
        header = f"attempt {claim.attempt}, worker {claim.worker_id}, done before: {', '.join(done) or 'nothing'}"
        pinned = {} if ":" in str(claim.request.get("device")) else _pinned(self.slot)  # "cuda:1" names a GPU itself
        child = Child(claim.run_id, header, {"request": claim.request, "done": done}, pinned | {WORKER_MARK: self.id})
        self._latest = None
        listening = asyncio.create_task(self._listen(child, claim))
        lost = asyncio.create_task(self._until_lost(child, claim))
        try:
            await _persist(self._claims.set_child, self.id, child.group)
            await asyncio.wait({listening, lost}, return_when=asyncio.FIRST_COMPLETED)
            last = listening.result() if listening.done() else lost.result()
            if last is None or END in last:
                return (LOST, None) if last is None else (FINISHED, None)
            return _failure(last, child.end(patience=GRACE_SECONDS), claim.attempt)
        finally:
            listening.cancel()
            lost.cancel()
            child.end()  # blocks this loop for seconds at most, so that no second cancel can interrupt it
            await asyncio.gather(listening, lost, return_exceptions=True)

    async def _listen(self, child: Child, claim: Claim) -> dict[str, Any] | None:
        """The child's last answer, its stages recorded on the way; None where the run was lost."""
        reader, last = asyncio.StreamReader(limit=ANSWER_LIMIT), dict[str, Any]()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), child.answers
        )
        try:
            async for line in reader:
                last = json.loads(line) if line.endswith(b"\n") else {}  # cut short by a signal
                if PROGRESS in last:
                    self._latest = Progress(**last[PROGRESS])
                elif STAGE in last:
                    self._latest = None  # what the stage said before it ended
                    if not await _persist(self._claims.record_stage, claim, StageResult.from_json(last[STAGE])):
                        return None
            return last
        finally:
            transport.close()

    async def _until_lost(self, child: Child, claim: Claim) -> None:
        """Write progress, at most twice a second, until the run is no longer ours. A write that fails is dropped."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            child.sweep()
            progress, self._latest = self._latest, None
            try:
                if progress is None:
                    ours = await asyncio.to_thread(self._claims.owns, claim)
                else:
                    ours = await asyncio.to_thread(self._claims.progress, claim, progress)
            except StoreError:
                continue
            if not ours:
                return


def main(slot: int = 0) -> None:
    """Work on a slot until SIGTERM or SIGINT; raises QueueError where the slot has a worker already."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for talkative in ("alembic", "dbos"):
        logging.getLogger(talkative).setLevel(logging.WARNING)
    store = Store(database_url())
    worker = Worker(store, slot)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, worker.stop)
    try:
        worker.work()
    finally:
        store.close()


async def _persist(write: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The write's answer, however long the database is out of reach: an outage must not fail a run."""
    while True:
        try:
            return await asyncio.to_thread(write, *args, **kwargs)
        except StoreError as error:
            if not may_pass(error):
                raise
            log.warning("%s Trying again in %g s.", error, PAUSE_SECONDS)
            await asyncio.sleep(PAUSE_SECONDS)


def _failure(last: dict[str, Any], status: int, attempt: int) -> tuple[str, str | None]:
    if ERROR in last:
        return FAILED, str(last[ERROR])
    if status >= 0:
        return (
            FAILED,
            f"Internal error: its process ended early with status {status}. The log has the details.",
        )
    if attempt >= MAX_ATTEMPTS:
        return FAILED, died_of(status, attempt)
    log.warning("its process was ended by signal %d: starting it again", -status)
    return AGAIN, None


@contextmanager
def _slot_lock(host: str, slot: int) -> Iterator[None]:
    """Held by one process of this host and slot; the kernel lets go of it however that process ends."""
    file = os.open(data_dir() / f"worker-{host}-{slot}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(file, 32).decode() or "unknown"
            raise QueueError(
                f"Slot {slot} on {host} has a worker already (process {holder}): stop that one, or choose another slot."
            ) from error
        os.ftruncate(file, 0)
        os.write(file, str(os.getpid()).encode())
        yield
    finally:
        os.close(file)


def _pinned(slot: int) -> dict[str, str]:
    """The environment in which a slot's GPU is the only one: slot 0 has the first of those that may be seen."""
    allowed = os.environ.get(VISIBLE)
    if allowed is None:
        return {VISIBLE: str(slot)}
    devices = allowed.split(",")
    return {VISIBLE: devices[slot]} if slot < len(devices) else {VISIBLE: ""}


def process(slot: int = 0) -> NoReturn:
    """`main` as the whole of a process: status 0 when stopped, else 1 and a sentence on stderr."""
    status = 0
    try:
        main(slot)
    except Fp8dashError as refused:
        print(refused, file=sys.stderr)
        status = 1
    except Exception:
        log.exception("the worker ended")
        status = 1
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)  # a thread of the engine that waits for its database would keep the process for as long


if __name__ == "__main__":
    process(*(int(argument) for argument in sys.argv[1:]))
