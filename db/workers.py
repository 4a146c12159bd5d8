"""The workers' own rows: which holds which slot, which are alive, and what the dead left behind.

A worker is alive while its counter of beats rises. Whoever looks counts looks, not seconds, so that a clock that is
set, a machine that slept and a database that was out of reach make nobody look dead who is not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, CursorResult, Update, case, exists, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from db.pulse import database_now
from db.rows import QUEUED, RUNNING
from db.store import Store
from db.tables import RunTable, WorkerTable
from fp8dash.errors import QueueError

ALIVE, LEFT, DEAD = "alive", "left", "dead"
BEAT_SECONDS = 5.0  # between two beats, and between two looks at the others'
LOOKS = 12  # in a row at a counter that stands still, until its worker is dead


@dataclass(frozen=True, slots=True)
class Holder:
    """The worker whose row holds a slot."""

    worker_id: str
    pid: int
    process: str  # its identity, on its own machine
    beats: int


@dataclass(frozen=True, slots=True)
class Leftover:
    """A dead worker's child, to be ended by the next worker of its slot."""

    worker_id: str
    child_group: int


class Still:
    """Counters that stand still, as one observer sees them: how many looks in a row saw no beat."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._seen: dict[str, tuple[int, int]] = {}

    def look(self, beats: Mapping[str, int]) -> dict[str, int]:
        """Of each worker, after this look, how many in a row found its counter where it was.

        >>> still = Still()
        >>> [still.look({"a": beat})["a"] for beat in (1, 1, 1, 2)]
        [0, 1, 2, 0]
        """
        before, self._seen = self._seen, {}
        for worker_id, count in beats.items():
            last, looks = before.get(worker_id, (-1, 0))
            self._seen[worker_id] = (count, looks + 1 if count == last else 0)
        return {worker_id: looks for worker_id, (_, looks) in self._seen.items()}


class Workers:
    """What a worker may change of its own row and of the dead's: each method one transaction."""

    def __init__(self, store: Store) -> None:
        """Nothing happens before the first call."""
        self._store, self._still = store, Still()

    def holder(self, host: str, slot: int) -> Holder | None:
        """The worker that holds a slot, None where it is free."""
        with self._store.session() as session:
            row = session.scalar(select(WorkerTable).where(WorkerTable.slot_key == _slot_key(host, slot)))
            return Holder(row.id, row.pid, row.process, row.beats) if row else None

    def register(self, worker_id: str, *, host: str, slot: int, pid: int, process: str = "") -> list[Leftover]:
        """A new worker's row; comes out what dead workers of its slot left behind. `process` is its identity.

        Raises QueueError where a worker that was not found dead holds the slot.
        """
        try:
            with self._store.session() as session:
                session.add(
                    WorkerTable(
                        id=worker_id,
                        host=host,
                        slot=slot,
                        slot_key=_slot_key(host, slot),
                        pid=pid,
                        process=process,
                        state=ALIVE,
                        device_facts={},
                        beats=0,
                        started_at=database_now(session),
                        heartbeat_at=database_now(session),
                    )
                )
                session.flush()
                return _leftovers(session, host, slot)
        except IntegrityError as error:
            raise QueueError(f"Slot {slot} on {host} already has a worker: stop it, or choose another slot.") from error

    def describe(self, worker_id: str, device: str | None, facts: dict[str, Any]) -> None:
        """Say what a worker computes on."""
        values = {"device": device, "device_kind": facts.get("kind"), "device_facts": facts}
        with self._store.session() as session:
            session.execute(_worker(worker_id).values(values))

    def heartbeat(self, worker_id: str) -> bool:
        """True while the worker is alive; False once it was marked dead and must leave."""
        with self._store.session() as session:
            alive = _worker(worker_id).where(WorkerTable.state == ALIVE)
            return changed(session, alive.values(beats=WorkerTable.beats + 1, heartbeat_at=database_now(session)))

    def set_child(self, worker_id: str, group: int | None) -> None:
        """Note the process group of the worker's child, for whoever has to end it."""
        with self._store.session() as session:
            session.execute(_worker(worker_id).values(child_group=group))

    def leave(self, worker_id: str) -> None:
        """The worker goes in order: its run is queued again, and the attempt does not count against it."""
        with self._store.session() as session:
            session.execute(_worker(worker_id).values(child_group=None))
            session.execute(_worker(worker_id).where(WorkerTable.state == ALIVE).values(state=LEFT, slot_key=None))
            mine = update(RunTable).where(RunTable.worker_id == worker_id, RunTable.state == RUNNING)
            fewer = {
                "attempt": RunTable.attempt - 1,
                "starts": case((RunTable.starts > 0, RunTable.starts - 1), else_=0),
            }
            session.execute(mine.values(**fewer, **_given_back("its worker was stopped")))

    def bury(self, holder: Holder) -> None:
        """Mark a worker dead that was proved to be, unless it beat since."""
        with self._store.session() as session:
            session.execute(_dead(holder.worker_id, holder.beats))

    def sweep(self) -> list[str]:
        """Look at all counters, mark those dead that stood still too long, and queue again what the dead were running.

        The runs given back come out. Meant to be called every BEAT_SECONDS.
        """
        with self._store.session() as session:
            alive = select(WorkerTable.id, WorkerTable.beats).where(WorkerTable.state == ALIVE)
            beats = {worker_id: count for worker_id, count in session.execute(alive)}
            for worker_id, looks in self._still.look(beats).items():
                if looks >= LOOKS:
                    session.execute(_dead(worker_id, beats[worker_id]))
            orphans = update(RunTable).where(RunTable.state == RUNNING, ~is_alive(RunTable.worker_id))
            given_back = orphans.values(**_given_back("its worker died")).returning(RunTable.id)
            return list(session.scalars(given_back, execution_options={"synchronize_session": False}))

    def alive(self) -> frozenset[str]:
        """The workers that are alive."""
        with self._store.session() as session:
            return frozenset(session.scalars(select(WorkerTable.id).where(WorkerTable.state == ALIVE)))


def is_alive(worker_id: Any) -> ColumnElement[bool]:
    """True of a run's row where a worker, by its id, is alive."""
    return exists().where(WorkerTable.id == worker_id, WorkerTable.state == ALIVE).correlate(RunTable)


def locked(worker_id: str) -> Any:
    """Holds the worker's row as it is until the transaction's end (Postgres; SQLite has one writer anyway)."""
    return select(WorkerTable.id).where(WorkerTable.id == worker_id).with_for_update(read=True)


def changed(session: Session, change: Update) -> bool:
    """Whether an update met its one row."""
    result = session.execute(change, execution_options={"synchronize_session": False})
    return isinstance(result, CursorResult) and result.rowcount == 1


def _slot_key(host: str, slot: int) -> str:
    return f"{host}/{slot}"


def _worker(worker_id: str) -> Update:
    return update(WorkerTable).where(WorkerTable.id == worker_id)


def _dead(worker_id: str, beats: int) -> Update:
    """Dead, unless it beat since its counter was read."""
    still = _worker(worker_id).where(WorkerTable.state == ALIVE, WorkerTable.beats == beats)
    return still.values(state=DEAD, slot_key=None)


def _leftovers(session: Session, host: str, slot: int) -> list[Leftover]:
    """The children of a slot's dead workers, each told once."""
    here = (WorkerTable.host == host, WorkerTable.slot == slot, WorkerTable.state != ALIVE)
    left = (*here, WorkerTable.child_group.is_not(None))
    rows = session.execute(select(WorkerTable.id, WorkerTable.child_group).where(*left)).all()
    session.execute(update(WorkerTable).where(*left).values(child_group=None))
    return [Leftover(owner, group) for owner, group in rows if group]


def _given_back(why: str) -> dict[str, Any]:
    return {"state": QUEUED, "worker_id": None, "message": f"waiting for another worker: {why}"}
