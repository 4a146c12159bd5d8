"""What a worker may change about runs: only those that it owns.

Every change to a run is fenced: it is made only while the run still belongs to this attempt of this worker. The fence
stands in the UPDATE itself, because SQLite starts its transaction at the first write and not at the first read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, insert, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from db.records import ROW_TABLES, row_values
from db.rows import ACTIVE, CANCELLED, FAILED, FINISHED, QUEUED, RUNNING
from db.standings import stand
from db.store import Store
from db.tables import RunTable, StageTable
from db.workers import changed, is_alive, locked
from fp8dash.choose.records import Progress, Row, StageResult
from fp8dash.errors import QueueError

MAX_DEATHS = 3  # of a run's own process within one stage, its worker alive
MAX_STARTS = 20  # without a finished stage, whatever ended them: a run that takes its whole machine down ends too
MOST_WAITING = 200  # queued runs that are looked at for those that can share a pass through the model
READ_RECIPE = "recipe"  # a fact of runs of what a checkpoint stores: how it is cast, once it was read
FACT_COLUMNS = ("model_hash", "corpus_hash", "backend", "device", "device_kind")


@dataclass(frozen=True, slots=True)
class Lease:
    """One attempt of one worker at one run: the proof that every later write shows."""

    run_id: str
    worker_id: str
    attempt: int
    request: dict[str, Any]  # in its JSON form: one of a newer version fails in the child, alone
    done: frozenset[str]  # stages that earlier attempts finished
    model_hash: str | None = None  # of what those stages measured
    corpus_hash: str | None = None
    checkpoint_hash: str | None = None  # where they measured what a quantized checkpoint stores


class Claims:
    """The worker's side of the runs: each method one transaction."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def claim(self, run_id: str, worker_id: str) -> Lease | None:
        """Takes a run that is queued or whose owner is gone; None if it is not available or this worker is not alive.

        A run that was started MAX_STARTS times without finishing a stage fails here, so that it cannot take its
        machine down for ever.
        """
        with self._store.session() as session:
            session.execute(locked(worker_id))
            free = or_(
                RunTable.state == QUEUED,
                (RunTable.state == RUNNING) & or_(RunTable.worker_id == worker_id, ~is_alive(RunTable.worker_id)),
            )
            mine = update(RunTable).where(RunTable.id == run_id, free, is_alive(worker_id))
            if changed(session, mine.where(RunTable.starts >= MAX_STARTS).values(**_ended(FAILED, _WORN_OUT))):
                return None
            counted = {"attempt": RunTable.attempt + 1, "starts": RunTable.starts + 1}
            values = {"state": RUNNING, "worker_id": worker_id, "error": None, "message": "starting", **counted}
            if not changed(session, mine.values(**values, started_at=datetime.now(UTC))):
                return None
            run = session.get_one(RunTable, run_id)
            done = session.scalars(select(StageTable.stage).where(StageTable.run_id == run_id))
            hashes = run.model_hash, run.corpus_hash, run.facts.get("checkpoint_hash")
            return Lease(run_id, worker_id, run.attempt, run.request, frozenset(done), *hashes)

    def beside(self, lease: Lease) -> list[str]:
        """The recipes of queued runs that ask for the same as a run but for it, in the order of the queue."""
        others = select(RunTable.request).where(
            RunTable.state == QUEUED, RunTable.model == lease.request["model"], RunTable.id != lease.run_id
        )
        same = {name: value for name, value in lease.request.items() if name != "recipe"}
        with self._store.session() as session:
            waiting = session.scalars(others.order_by(RunTable.created_at, RunTable.id).limit(MOST_WAITING)).all()
        return [
            str(request["recipe"])
            for request in waiting
            if {name: value for name, value in request.items() if name != "recipe"} == same
        ]

    def child_died(self, lease: Lease) -> int | None:
        """Count a death of the run's own process: how many there were since its last finished stage.

        None where the run is no longer this lease's.
        """
        died = update(RunTable).where(*_fence(lease)).values(deaths=RunTable.deaths + 1)
        with self._store.session() as session:
            answer = session.scalar(died.returning(RunTable.deaths), execution_options={"synchronize_session": False})
            return None if answer is None else int(answer)

    def owns(self, lease: Lease) -> bool:
        """True while the run is still this lease's."""
        with self._store.session() as session:
            return session.scalar(select(RunTable.id).where(*_fence(lease))) is not None

    def progress(self, lease: Lease, progress: Progress) -> bool:
        """Show how far the run is; False where it is no longer this lease's."""
        values = {"stage": progress.stage, "stage_share": progress.share, "message": progress.message}
        with self._store.session() as session:
            return changed(session, update(RunTable).where(*_fence(lease)).values(**values))

    def record_stage(self, lease: Lease, result: StageResult) -> bool:
        """Write a finished stage's rows and facts, once; False where the run is no longer this lease's."""
        with self._store.session() as session:
            shown = {"stage": result.stage, "stage_share": 1.0, "message": "", "deaths": 0, "starts": 0}
            own = update(RunTable).where(*_fence(lease))
            if not changed(session, own.values(**shown)):  # from here on the run's row is locked
                return False
            if session.get(StageTable, (lease.run_id, result.stage)) is None:
                _write(session, lease.run_id, result)
        return True

    def finish(self, lease: Lease, state: str, error: str | None = None) -> bool:
        """End the run as finished or failed; False where it is no longer this lease's."""
        with self._store.session() as session:
            ended = changed(session, update(RunTable).where(*_fence(lease)).values(**_ended(state, error)))
            if ended:
                stand(session, lease.run_id)
        return ended

    def cancel(self, run_id: str) -> bool:
        """Mark a queued or running run cancelled, which takes it from its worker; False where it had already ended."""
        with self._store.session() as session:
            active = update(RunTable).where(RunTable.id == run_id, RunTable.state.in_(ACTIVE))
            return changed(session, active.values(**_ended(CANCELLED, None)))

    def runs(self, states: Sequence[str]) -> frozenset[str]:
        """The ids of all runs in some states."""
        with self._store.session() as session:
            return frozenset(session.scalars(select(RunTable.id).where(RunTable.state.in_(states))))

    def retry(self, run_id: str) -> None:
        """Queue a failed or cancelled run again, its finished stages kept; raises QueueError where that cannot be."""
        self._store.run(run_id)  # raises where there is none
        values: dict[str, Any] = {"state": QUEUED, "request_key": RunTable.request_hash, "message": ""}
        values |= dict.fromkeys(("error", "worker_id", "stage", "started_at", "finished_at"))
        values |= dict.fromkeys(("attempt", "deaths", "starts", "stage_share"), 0)
        ended = update(RunTable).where(RunTable.id == run_id, RunTable.state.in_((FAILED, CANCELLED)))
        try:
            with self._store.session() as session:
                if not changed(session, ended.values(**values)):
                    raise QueueError(f"Run {run_id} cannot be retried: only a failed or cancelled run can.")
        except IntegrityError as error:
            raise QueueError(
                f"Run {run_id} cannot be retried: an identical run is already queued or running; wait for that one."
            ) from error


_WORN_OUT = (
    f"It was started {MAX_STARTS} times without finishing a stage: each time its worker died or was stopped. It may "
    "use up the machine's memory: choose a smaller model or shorter windows, or retry; the finished stages are kept."
)


def _fence(lease: Lease) -> tuple[ColumnElement[bool], ...]:
    return (
        RunTable.id == lease.run_id,
        RunTable.state == RUNNING,
        RunTable.worker_id == lease.worker_id,
        RunTable.attempt == lease.attempt,
    )


def _ended(state: str, error: str | None) -> dict[str, Any]:
    values = {"state": state, "error": error, "request_key": None, "message": "", "finished_at": datetime.now(UTC)}
    return values | ({"stage_share": 1.0} if state == FINISHED else {})


def _write(session: Session, run_id: str, result: StageResult) -> None:
    session.add(StageTable(run_id=run_id, stage=result.stage, seconds=result.seconds, finished_at=datetime.now(UTC)))
    for kind, table in ROW_TABLES.items():
        rows: Sequence[Row] = [row for row in result.rows if type(row) is kind]
        if rows:
            session.execute(insert(table), [row_values(run_id, result.stage, row) for row in rows])
    run = session.get_one(RunTable, run_id)
    for column in FACT_COLUMNS:
        if column in result.facts:
            setattr(run, column, result.facts[column])
    run.facts = run.facts | {key: fact for key, fact in result.facts.items() if key not in FACT_COLUMNS}
    if recipe := result.facts.get(READ_RECIPE):
        run.recipe = recipe
    stand(session, run_id)
