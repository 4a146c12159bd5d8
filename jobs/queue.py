"""The one door of the pages and the command line to the engine: submit, cancel, retry, log, reconcile.

The product's database says what is to run and how it ended; the engine (DBOS) says whose turn it is. Where they
disagree, the product's is right and `reconcile` repairs the engine. It never launches DBOS, only its client.
"""

import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from dbos import DBOS, DBOSClient, DBOSPortableJSONSerializer, EnqueueOptions
from dbos import _serialization as serialization
from dbos import error as dbos_error
from sqlalchemy import Connection

from db.claims import Claims
from db.opened import DRIVER_ERRORS, beside, engine_of, sqlite_file
from db.rows import ACTIVE, QUEUED
from db.store import Store
from fp8dash.choose.request import Request
from fp8dash.choose.studies import Question
from fp8dash.errors import QueueError
from fp8dash.places import log_file

APPLICATION = "fp8dash"
SCHEMA = "fp8dash_queue"  # on Postgres; on SQLite the engine has a file of its own
QUEUE = "runs"
WORKFLOW = "run"
VERSION = "1"  # raised only when the workflow's shape changes; reconcile enqueues anew what an older one left
WAITING = ("ENQUEUED", "DELAYED", "PENDING")
ENDED = ("SUCCESS", "ERROR", "CANCELLED", "MAX_RECOVERY_ATTEMPTS_EXCEEDED")
KEPT = timedelta(days=1)  # ended workflows: only of use to whoever looks into the engine
TAIL_BYTES = 256 * 1024
PURGE = 500
AT_ONCE = 250  # workflows enqueued in one transaction: others wait meanwhile

log = logging.getLogger(__name__)


class Queue:
    """Runs go in, and can be cancelled and retried; whoever opens it closes it."""

    def __init__(self, store: Store) -> None:
        """Open or create the engine's database beside the store's; raises QueueError."""
        self._store = store
        self._claims = Claims(store)
        refuse_pickles()
        with _sentences():
            prepare_engine(store.url)
            self._engine = engine_of(engine_url(store.url))
            self._client = DBOSClient(
                system_database_url=engine_url(store.url),
                dbos_system_schema=SCHEMA,
                serializer=DBOSPortableJSONSerializer(),
                application_name=APPLICATION,
                retry_connection_errors=False,
            )

    def close(self) -> None:
        """Give back all connections."""
        self._client.destroy()
        self._engine.dispose()

    def submit(
        self, requests: Sequence[Request], *, owner: str, study: str, question: Question | None = None
    ) -> list[str]:
        """The runs of a new study, in order. A request that is already queued or running is answered with its run.

        `question` is what the study asks; None for one of somebody's own.
        """
        if not requests:
            raise QueueError("No recipe is chosen: choose at least one.")
        return self._enqueue(self._store.add_runs(requests, owner=owner, study=study, question=question))

    def submit_one(self, request: Request, *, owner: str) -> str:
        """A run of its own, or the identical one that is already queued or running."""
        return self._enqueue([self._store.add_run(request, owner=owner)[0]])[0]

    def cancel(self, run_id: str) -> None:
        """Cancel a queued or running run: its row at once, its process within seconds; raises QueueError if ended."""
        if not self._claims.cancel(run_id):
            raise QueueError(f"Run {run_id} cannot be cancelled: it is already {self._store.run(run_id).state}.")
        with _sentences("The run is cancelled and its process ends within seconds, but"):
            self._client.cancel_workflow(run_id)

    def retry(self, run_id: str) -> None:
        """Queue a failed or cancelled run again: it goes on at its first unfinished stage; raises QueueError."""
        self._claims.retry(run_id)
        with _sentences("The run is queued and starts when the engine is back, but"):
            self._again(run_id)

    def log_tail(self, run_id: str, lines: int = 200) -> str:
        """The last lines that the run's processes printed; empty before the first."""
        try:
            with log_file(self._store.run(run_id).id).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def reconcile(self) -> None:
        """Repair what a crash between two databases, or a restored one, left: both directions. Safe at any time.

        The runs are read before the workflows, so that a run submitted meanwhile is not taken for a lost one. What
        two processes repair at once is claimed only once, so the worst is a workflow with nothing to do.
        """
        queued = self._claims.runs((QUEUED,))
        with _sentences():
            waiting = self._workflows(WAITING)
            for run_id in queued - waiting:
                log.warning("run %s was queued without a workflow: enqueued", run_id)
                self._again(run_id)
            if strangers := waiting - self._claims.runs(ACTIVE):
                log.warning("workflows without an active run: %s: cancelled", ", ".join(strangers))
                self._client.cancel_workflows(list(strangers))

    def purge(self) -> None:
        """Delete ended workflows from the engine, which never does; runs, rows and logs stay."""
        before = (datetime.now(UTC) - KEPT).isoformat()
        with _sentences():
            old = self._client.list_workflows(
                status=list(ENDED), completed_before=before, limit=PURGE, load_input=False, load_output=False
            )
            self._client.delete_workflows([workflow.workflow_id for workflow in old])

    def pending(self) -> dict[str, str]:
        """The runs whose workflows are being executed, with their executors: workers' ids."""
        with _sentences():
            pending: list[Any] = self._client.list_workflows(
                status="PENDING", name=WORKFLOW, app_version=VERSION, load_input=False, load_output=False
            )
        return {workflow.workflow_id: str(workflow.executor_id) for workflow in pending}

    def resume(self, run_ids: Sequence[str]) -> None:
        """Give workflows of a dead worker back to the queue, whatever the engine thinks of them."""
        with _sentences():
            self._client.resume_workflows(list(run_ids), queue_name=QUEUE)  # unnamed, it would have no limit of one

    def _enqueue(self, run_ids: list[str]) -> list[str]:
        """Every row is written by now: what is not enqueued here, reconcile enqueues."""
        with _sentences("The runs are kept and start by themselves once the engine is back, but"):
            for start in range(0, len(run_ids), AT_ONCE):
                with self._transaction() as connection:
                    for run_id in run_ids[start : start + AT_ONCE]:
                        self._client.enqueue_in_transaction(connection, _options(run_id), run_id)
        return run_ids

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """One transaction of the engine's database: a commit for many workflows, not one for each."""
        with self._engine.begin() as connection:
            if connection.dialect.name == "sqlite":
                connection.exec_driver_sql("BEGIN IMMEDIATE")  # else it begins at its first write, and may then fail
            yield connection

    def _again(self, run_id: str) -> None:
        """A new workflow under the run's id: an ended one cannot be resumed."""
        self._client.delete_workflows([run_id])
        self._client.enqueue(_options(run_id), run_id)

    def _workflows(self, states: Sequence[str]) -> set[str]:
        workflows: list[Any] = self._client.list_workflows(
            status=list(states), name=WORKFLOW, load_input=False, load_output=False
        )
        return {workflow.workflow_id for workflow in workflows if workflow.app_version in (None, VERSION)}


def engine_url(store_url: str) -> str:
    """The engine's database: a file of its own beside SQLite's, the same database on Postgres.

    >>> engine_url("sqlite:////data/fp8dash.sqlite")
    'sqlite:////data/fp8dash-queue.sqlite'
    """
    file = sqlite_file(store_url)
    if file is None:
        return store_url
    if file.name == ":memory:":
        raise QueueError("An in-memory database cannot be shared with a worker: set FP8DASH_DATABASE_URL to a file.")
    return beside(store_url, "-queue")


def prepare_engine(store_url: str) -> None:
    """Create or migrate the engine's database: readable by its owner alone, and in WAL mode, where it is a file."""
    url = engine_url(store_url)
    if file := sqlite_file(url):
        os.close(os.open(file, os.O_CREAT, 0o600))
        with closing(sqlite3.connect(file, timeout=30)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
    DBOS.migrate(url, schema=SCHEMA)


def refuse_pickles() -> None:
    """Make the engine refuse pickled values: it unpickles rows marked so whatever serializer is configured, and
    whoever can write to its database could then run code in the worker and in the web process."""
    setattr(serialization.DefaultSerializer, "deserialize", _refused)  # noqa: B010 (mypy: a method is not assigned to)


def _refused(_self: Any, _serialized: str) -> Any:
    raise QueueError("A pickled value in the engine's database was refused: fp8dash writes JSON only.")


def _options(run_id: str) -> EnqueueOptions:
    return {"workflow_name": WORKFLOW, "queue_name": QUEUE, "workflow_id": run_id}


@contextmanager
def _sentences(so_far: str = "") -> Iterator[None]:
    try:
        yield
    except (dbos_error.DBOSException, sqlite3.Error, *DRIVER_ERRORS) as error:
        reason = f"the queue's engine could not be reached: {str(error).splitlines()[0]}"
        raise QueueError(f"{so_far} {reason}" if so_far else reason[0].upper() + reason[1:]) from error
