"""What a worker may change: runs that it owns, its own row, and what the dead left behind.

Every change to a run is fenced: it is made only while the run still belongs to this attempt of this worker. The fence
stands in the UPDATE itself, because SQLite starts its transaction at the first write and not at the first read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, CursorResult, Update, exists, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from db.records import ROW_TABLES, row_values
from db.rows import ACTIVE, CANCELLED, FAILED, FINISHED, QUEUED, RUNNING
from db.standings import stand
from db.store import Store, request_key
from db.tables import RunTable, StageTable, WorkerTable
from fp8dash.choose.records import Progress, Row, StageResult
from fp8dash.errors import QueueError

ALIVE, LEFT, DEAD = "alive", "left", "dead"
DEAD_AFTER = timedelta(seconds=60)  # without a heartbeat
MAX_ATTEMPTS = 3  # starts of a run whose process or worker keeps dying
FACT_COLUMNS = ("model_hash", "corpus_hash", "backend", "device", "device_kind")


@dataclass(frozen=True, slots=True)
class Claim:
    """One attempt of one worker at one run: the proof that every later write shows."""

    run_id: str
    worker_id: str
    attempt: int
    request: dict[str, Any]  # in its JSON form: one of a newer version fails in the child, alone
    done: frozenset[str]  # stages that earlier attempts finished


@dataclass(frozen=True, slots=True)
class Leftover:
    """A dead worker's child, to be ended by the next worker of its slot."""

    worker_id: str
    child_group: int


class Claims:
    """The worker's side of the store: each method one transaction."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def register(self, worker_id: str, *, host: str, slot: int, pid: int) -> list[Leftover]:
        """A new worker's row. The caller holds the slot's lock, so earlier workers of the slot are dead: the children
        that they left behind come out."""
        with self._store.session() as session:
            now = _database_now(session)
            here = (WorkerTable.host == host, WorkerTable.slot == slot, WorkerTable.child_group.is_not(None))
            left = session.execute(select(WorkerTable.id, WorkerTable.child_group).where(*here)).all()
            session.execute(update(WorkerTable).where(*here).values(child_group=None))
            alive = (WorkerTable.host == host, WorkerTable.slot == slot, WorkerTable.state == ALIVE)
            session.execute(update(WorkerTable).where(*alive).values(state=DEAD))
            session.add(
                WorkerTable(
                    id=worker_id, host=host, slot=slot, pid=pid, state=ALIVE, device_facts={}, started_at=now,
                    heartbeat_at=now,
                )
            )  # fmt: skip
        return [Leftover(owner, group) for owner, group in left if group]

    def describe(self, worker_id: str, device: str | None, facts: dict[str, Any]) -> None:
        """Say what a worker computes on."""
        with self._store.session() as session:
            values = {"device": device, "device_kind": facts.get("kind"), "device_facts": facts}
            session.execute(_worker(worker_id).values(values))

    def heartbeat(self, worker_id: str) -> bool:
        """True while the worker is alive by the database's clock; False once it was marked dead and must leave."""
        with self._store.session() as session:
            alive = _worker(worker_id).where(WorkerTable.state == ALIVE)
            return _changed(session, alive.values(heartbeat_at=_database_now(session)))

    def leave(self, worker_id: str) -> None:
        """The worker goes in order: its run is queued again, and the attempt does not count against it."""
        with self._store.session() as session:
            session.execute(_worker(worker_id).values(child_group=None))
            session.execute(_worker(worker_id).where(WorkerTable.state == ALIVE).values(state=LEFT))
            mine = update(RunTable).where(RunTable.worker_id == worker_id, RunTable.state == RUNNING)
            session.execute(mine.values(attempt=RunTable.attempt - 1, **_given_back("its worker was stopped")))

    def sweep(self) -> list[str]:
        """Mark workers without a heartbeat dead and queue again what the dead were running: the runs given back."""
        with self._store.session() as session:
            silent = WorkerTable.heartbeat_at < _database_now(session) - DEAD_AFTER
            session.execute(update(WorkerTable).where(WorkerTable.state == ALIVE, silent).values(state=DEAD))
            orphans = update(RunTable).where(RunTable.state == RUNNING, ~_alive(RunTable.worker_id))
            given_back = orphans.values(**_given_back("its worker died")).returning(RunTable.id)
            return list(session.scalars(given_back, execution_options={"synchronize_session": False}))

    def alive(self) -> frozenset[str]:
        """The workers that are alive."""
        with self._store.session() as session:
            return frozenset(session.scalars(select(WorkerTable.id).where(WorkerTable.state == ALIVE)))

    def claim(self, run_id: str, worker_id: str) -> Claim | None:
        """A run that is queued or whose owner is gone, taken; None where it cannot be had or this worker is not alive.

        A run that was started MAX_ATTEMPTS times and never ended fails here, so that it cannot kill workers for ever.
        """
        with self._store.session() as session:
            session.execute(_locked(worker_id))
            free = or_(
                RunTable.state == QUEUED,
                (RunTable.state == RUNNING) & or_(RunTable.worker_id == worker_id, ~_alive(RunTable.worker_id)),
            )
            mine = update(RunTable).where(RunTable.id == run_id, free, _alive(worker_id))
            if _changed(session, mine.where(RunTable.attempt >= MAX_ATTEMPTS).values(**_ended(FAILED, _WORN_OUT))):
                return None
            values = {"state": RUNNING, "attempt": RunTable.attempt + 1, "worker_id": worker_id, "error": None}
            if not _changed(session, mine.values(**values, started_at=datetime.now(UTC), message="starting")):
                return None
            run = session.get_one(RunTable, run_id)
            done = session.scalars(select(StageTable.stage).where(StageTable.run_id == run_id))
            return Claim(run_id, worker_id, run.attempt, run.request, frozenset(done))

    def set_child(self, worker_id: str, group: int | None) -> None:
        """Note the process group of the worker's child, for whoever has to end it."""
        with self._store.session() as session:
            session.execute(_worker(worker_id).values(child_group=group))

    def owns(self, claim: Claim) -> bool:
        """True while the run is still this claim's."""
        with self._store.session() as session:
            return session.scalar(select(RunTable.id).where(*_fence(claim))) is not None

    def progress(self, claim: Claim, progress: Progress) -> bool:
        """Show how far the run is; False where it is no longer this claim's."""
        values = {"stage": progress.stage, "stage_share": progress.share, "message": progress.message}
        with self._store.session() as session:
            return _changed(session, update(RunTable).where(*_fence(claim)).values(**values))

    def record_stage(self, claim: Claim, result: StageResult) -> bool:
        """Write a finished stage's rows and facts, once; False where the run is no longer this claim's."""
        with self._store.session() as session:
            shown = update(RunTable).where(*_fence(claim)).values(stage=result.stage, stage_share=1.0, message="")
            if not _changed(session, shown):  # from here on the run's row is locked
                return False
            if session.get(StageTable, (claim.run_id, result.stage)) is None:
                _write(session, claim.run_id, result)
        return True

    def finish(self, claim: Claim, state: str, error: str | None = None) -> bool:
        """End the run as finished or failed; False where it is no longer this claim's."""
        with self._store.session() as session:
            ended = _changed(session, update(RunTable).where(*_fence(claim)).values(**_ended(state, error)))
            if ended:
                stand(session, claim.run_id)
        return ended

    def cancel(self, run_id: str) -> bool:
        """Mark a queued or running run cancelled, which takes it from its worker; False where it had already ended."""
        with self._store.session() as session:
            active = update(RunTable).where(RunTable.id == run_id, RunTable.state.in_(ACTIVE))
            return _changed(session, active.values(**_ended(CANCELLED, None)))

    def runs(self, states: Sequence[str]) -> frozenset[str]:
        """The ids of all runs in some states."""
        with self._store.session() as session:
            return frozenset(session.scalars(select(RunTable.id).where(RunTable.state.in_(states))))

    def retry(self, run_id: str) -> None:
        """Queue a failed or cancelled run again, its finished stages kept; raises QueueError where that cannot be."""
        request = self._store.run(run_id).request
        values = {"state": QUEUED, "attempt": 0, "error": None, "worker_id": None, "started_at": None}
        values |= {"request_key": request_key(request), "message": "", "stage": None, "stage_share": 0.0}
        ended = update(RunTable).where(RunTable.id == run_id, RunTable.state.in_((FAILED, CANCELLED)))
        try:
            with self._store.session() as session:
                if not _changed(session, ended.values(**values, finished_at=None)):
                    raise QueueError(f"Run {run_id} cannot be retried: only a failed or cancelled run can.")
        except IntegrityError as error:
            raise QueueError(
                f"Run {run_id} cannot be retried: an identical run is queued or running already; wait for that one."
            ) from error


_WORN_OUT = (
    f"It was started {MAX_ATTEMPTS} times, and each time its process or its worker died. The machine may have run out "
    "of memory: choose a smaller model or shorter windows, or retry; the finished stages are kept."
)


def _worker(worker_id: str) -> Update:
    return update(WorkerTable).where(WorkerTable.id == worker_id)


def _alive(worker_id: Any) -> ColumnElement[bool]:
    return exists().where(WorkerTable.id == worker_id, WorkerTable.state == ALIVE).correlate(RunTable)


def _locked(worker_id: str) -> Any:
    """Holds the worker's row as it is until the transaction's end (Postgres; SQLite has one writer anyway)."""
    return select(WorkerTable.id).where(WorkerTable.id == worker_id).with_for_update(read=True)


def _fence(claim: Claim) -> tuple[ColumnElement[bool], ...]:
    return (
        RunTable.id == claim.run_id,
        RunTable.state == RUNNING,
        RunTable.worker_id == claim.worker_id,
        RunTable.attempt == claim.attempt,
    )


def _given_back(why: str) -> dict[str, Any]:
    return {"state": QUEUED, "worker_id": None, "message": f"waiting for another worker: {why}"}


def _ended(state: str, error: str | None) -> dict[str, Any]:
    values = {"state": state, "error": error, "request_key": None, "message": "", "finished_at": datetime.now(UTC)}
    return values | ({"stage_share": 1.0} if state == FINISHED else {})


def _changed(session: Session, change: Update) -> bool:
    result = session.execute(change, execution_options={"synchronize_session": False})
    return isinstance(result, CursorResult) and result.rowcount == 1


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
    stand(session, run_id)


def _database_now(session: Session) -> datetime:
    """The database's clock: the one clock that all machines share."""
    now: datetime = session.execute(select(func.now())).scalar_one()
    return now if now.tzinfo else now.replace(tzinfo=UTC)
