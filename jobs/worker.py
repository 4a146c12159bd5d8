"""One worker process per slot: takes runs from the queue, one at a time, and owns the child that computes each.

It computes nothing and never imports torch. A slot is a GPU, or the CPU where there is none; the database keeps a
second worker out of it. Everything it writes about a run is fenced by its lease (`db/claims.py`).
"""

import asyncio
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
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn, ParamSpec, TypeVar

from dbos import DBOS, DBOSConfig, DBOSPortableJSONSerializer

from db.claims import MAX_DEATHS, Claims, Lease
from db.opened import may_pass
from db.rows import FAILED, FINISHED
from db.store import Store
from db.workers import BEAT_SECONDS, LOOKS, Holder, Leftover, Workers
from fp8dash.choose.records import Progress, StageResult
from fp8dash.errors import Fp8dashError, QueueError, StoreError
from fp8dash.places import clear_abandoned, clear_scratch, database_url
from jobs.child import END, ERROR, GRACE_SECONDS, PROGRESS, STAGE, Child, died_of, inherited
from jobs.processes import SLOT_TAKEN, WORKER_MARK, end_marked, identity, runs
from jobs.queue import APPLICATION, QUEUE, SCHEMA, VERSION, WORKFLOW, Queue, engine_url

RECONCILE_SECONDS = 60.0
POLL_SECONDS = 0.5  # of the queue; also between two writes of progress
PAUSE_SECONDS = 2.0  # before a write is tried again that the database refused
DESCRIBE_SECONDS = 300.0  # importing torch on a cold disk
ANSWER_LIMIT = 1 << 30  # bytes of one answer: a stage with all its rows
AGAIN, LOST = "again", "lost"  # lost: cancelled, taken by another worker, or this one was marked dead
VISIBLE = "CUDA_VISIBLE_DEVICES"
ASKED_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger("fp8dash.worker")


class SlotTaken(QueueError):
    """A slot whose worker is alive: another start would be refused again."""


class SlotWorker:
    """One worker, from its start to its leaving."""

    def __init__(self, store: Store, slot: int) -> None:
        """Nothing happens before `work`."""
        self.id = uuid.uuid4().hex[:16]  # new at each boot: a second process of one id would steal running work
        self.slot = slot
        self._store = store
        self._claims, self._workers = Claims(store), Workers(store)
        self._stop = threading.Event()
        self._latest: Progress | None = None  # of the running child, not yet written
        self._stage = ""  # in which the running child is

    def stop(self, number: int = 0, _frame: FrameType | None = None) -> None:
        """Leave in order; also a signal handler."""
        log.info("stopping%s", f" on {signal.Signals(number).name}" if number else "")
        self._stop.set()

    def work(self) -> None:
        """Run what is queued until `stop`; raises QueueError where the slot is taken or this worker was marked dead."""
        host = socket.gethostname()
        leftovers = self._take_slot(host)
        if leftovers is None:
            return
        try:
            for left in leftovers:
                end_marked(left.worker_id)
                clear_scratch(left.child_group)
            clear_abandoned()
            self._serve(host)
        finally:
            self._workers.leave(self.id)

    def _take_slot(self, host: str) -> list[Leftover] | None:
        """What dead workers of the slot left behind, once this one holds it; None where it was stopped meanwhile.

        A row that holds the slot may be a live worker's. Its process tells, where it can be seen from here; else its
        counter has to stand still for LOOKS looks. Raises SlotTaken where it beats.
        """
        own, looks, watched = identity(os.getpid()), 0, None
        while not self._stop.is_set():
            holder = self._workers.holder(host, self.slot)
            if holder is None:
                with suppress(QueueError):  # another was faster
                    return self._workers.register(self.id, host=host, slot=self.slot, pid=os.getpid(), process=own)
                continue
            running = runs(holder.process)
            same = watched is not None and watched.worker_id == holder.worker_id
            if running or (same and watched != holder):
                raise _taken(host, self.slot, holder)
            looks = looks + 1 if same else 0
            if running is False or looks >= LOOKS:
                self._workers.bury(holder)
                continue
            if not same:
                log.info("slot %d on %s: checking whether its worker %s is alive", self.slot, host, holder.worker_id)
            watched = holder
            self._stop.wait(BEAT_SECONDS)
        return None

    def _serve(self, host: str) -> None:
        queue = Queue(self._store)
        try:
            threading.Thread(target=self._describe, name="describe", daemon=True).start()
            self._launch()
            log.info("worker %s on %s, slot %d: ready", self.id, host, self.slot)
            self._beat_until_stopped(queue)
        finally:
            DBOS.destroy()  # ends the running step, and with it the child
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
                if not self._workers.heartbeat(self.id):
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
        raise QueueError(f"Worker {self.id} was marked dead after a minute without a heartbeat: start another.")

    def _tend(self, queue: Queue) -> None:
        """Queue again what workers that are gone were running: the runs, and their workflows in the engine, which its
        open core leaves to a paid service."""
        if given_back := self._workers.sweep():
            log.warning("given back from dead workers: %s", ", ".join(given_back))
        alive = self._workers.alive()
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
        environment = inherited() | _pinned(self.slot)
        try:
            printed = subprocess.run(command, capture_output=True, text=True, timeout=DESCRIBE_SECONDS, env=environment)
            facts = json.loads(printed.stdout.splitlines()[-1])
        except (subprocess.SubprocessError, OSError, ValueError, LookupError) as error:
            log.warning("the device could not be described: %r", error)
            return
        while not self._stop.is_set():
            try:
                return self._workers.describe(self.id, facts["name"], facts)
            except StoreError:
                self._stop.wait(PAUSE_SECONDS)

    async def _run(self, run_id: str) -> str:
        """The run's end in one word. A child that a signal ended is started again, by a claim like any other."""
        while lease := await _persist(self._claims.claim, run_id, self.id):
            log.info("run %s: attempt %d", run_id, lease.attempt)
            try:
                state, error = await self._attempt(lease)
            except Exception as unexpected:
                log.exception("run %s", run_id)
                what = f"{type(unexpected).__name__}: {unexpected}"
                state, error = FAILED, f"Internal error: {what}. The worker's log has the traceback."
            if state != AGAIN:
                if state != LOST:
                    await _persist(self._claims.finish, lease, state, error)
                log.info("run %s: %s%s", run_id, state, f": {error}" if error else "")
                return state
            if self._stop.is_set():
                await asyncio.Event().wait()  # until this step is ended, with the whole worker
        return LOST

    async def _attempt(self, lease: Lease) -> tuple[str, str | None]:
        """The run's state and error after one child; or AGAIN or LOST."""
        done = sorted(lease.done)
        header = f"attempt {lease.attempt}, worker {lease.worker_id}, done before: {', '.join(done) or 'nothing'}"
        pinned = {} if ":" in str(lease.request.get("device")) else _pinned(self.slot)  # "cuda:1" names a GPU itself
        hashes = ("model_hash", "corpus_hash", "checkpoint_hash")
        recorded = {name: getattr(lease, name) for name in hashes}
        task = {"request": lease.request, "done": done, "recorded": recorded}
        task["beside"] = await _persist(self._claims.beside, lease)
        child = Child(lease.run_id, header, task, pinned | {WORKER_MARK: self.id})
        self._latest, self._stage = None, ""
        listening = asyncio.create_task(self._listen(child, lease))
        lost = asyncio.create_task(self._until_lost(child, lease))
        try:
            await _persist(self._workers.set_child, self.id, child.group)
            await asyncio.wait({listening, lost}, return_when=asyncio.FIRST_COMPLETED)
            last = listening.result() if listening.done() else lost.result()
            if last is None or END in last:
                return (LOST, None) if last is None else (FINISHED, None)
            return await self._failure(lease, last, child.end(patience=GRACE_SECONDS))
        finally:
            listening.cancel()
            lost.cancel()
            child.end()  # blocks this loop for seconds at most, so that no second cancel can interrupt it
            clear_scratch(child.group)
            await asyncio.gather(listening, lost, return_exceptions=True)

    async def _failure(self, lease: Lease, last: dict[str, Any], status: int) -> tuple[str, str | None]:
        """The outcome of a run whose child did not reach its end: failed with a reason, or AGAIN or LOST."""
        if ERROR in last:
            return FAILED, str(last[ERROR])
        if status >= 0:
            return FAILED, f"Internal error: its process exited early with status {status}. The log has the details."
        log.warning("run %s: its process was ended by signal %d", lease.run_id, -status)
        if -status in ASKED_TO_END or self._stop.is_set():  # by somebody else: no fault of the run
            return AGAIN, None
        deaths = await _persist(self._claims.child_died, lease)
        if deaths is None:
            return LOST, None
        return (FAILED, died_of(status, deaths, self._stage)) if deaths >= MAX_DEATHS else (AGAIN, None)

    async def _listen(self, child: Child, lease: Lease) -> dict[str, Any] | None:
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
                    self._stage = self._latest.stage
                elif STAGE in last:
                    self._latest = None  # what the stage said before it ended
                    if not await _persist(self._claims.record_stage, lease, StageResult.from_json(last[STAGE])):
                        return None
            return last
        finally:
            transport.close()

    async def _until_lost(self, child: Child, lease: Lease) -> None:
        """Write progress, at most twice a second, until the run is no longer ours. A write that fails is dropped."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            child.sweep()
            progress, self._latest = self._latest, None
            try:
                if progress is None:
                    owned = await asyncio.to_thread(self._claims.owns, lease)
                else:
                    owned = await asyncio.to_thread(self._claims.progress, lease, progress)
            except StoreError:
                continue
            if not owned:
                return


def main(slot: int = 0) -> None:
    """Work on a slot until SIGTERM or SIGINT; raises QueueError where the slot has a worker already."""
    logging.basicConfig(level=logging.INFO, force=True, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for talkative in ("alembic", "dbos"):
        logging.getLogger(talkative).setLevel(logging.WARNING)
    store = Store(database_url())
    worker = SlotWorker(store, slot)
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


def _taken(host: str, slot: int, holder: Holder) -> SlotTaken:
    return SlotTaken(
        f"Slot {slot} on {host} already has a worker (process {holder.pid}): stop that one, or choose another slot."
    )


def _pinned(slot: int) -> dict[str, str]:
    """The environment in which a slot's GPU is the only one: slot 0 has the first of those that may be seen."""
    allowed = os.environ.get(VISIBLE)
    if allowed is None:
        return {VISIBLE: str(slot)}
    devices = allowed.split(",")
    return {VISIBLE: devices[slot]} if slot < len(devices) else {VISIBLE: ""}


def process(slot: int = 0) -> NoReturn:
    """`main` as the whole of a process: status 0 when stopped, else 1 or SLOT_TAKEN and a sentence on stderr."""
    status = 0
    try:
        main(slot)
    except Fp8dashError as refusal:
        print(refusal, file=sys.stderr)
        status = SLOT_TAKEN if isinstance(refusal, SlotTaken) else 1
    except Exception:
        log.exception("the worker ended")
        status = 1
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)  # a thread of the engine that waits for its database would keep the process for as long


if __name__ == "__main__":
    process(*(int(argument) for argument in sys.argv[1:]))
