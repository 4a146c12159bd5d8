"""Who is alive and who holds a slot, on a real database: by counters, whatever the clocks say."""

from datetime import timedelta

import pytest
from sqlalchemy import update

from db import pulse as pulse_module
from db.claims import Claims
from db.pulse import SILENCE_SECONDS, Pulse
from db.store import Store
from db.tables import WorkerTable
from db.workers import ALIVE, DEAD, LEFT, LOOKS, Workers
from fp8dash.errors import QueueError


def states(store: Store) -> dict[str, str]:
    return {worker.id: worker.state for worker in store.workers()}


def set_clock(store: Store, hours: float) -> None:
    """Heartbeats as they look once the database's clock was set forward, or back, by some hours."""
    with store.session() as session:
        for worker in session.query(WorkerTable):
            worker.heartbeat_at -= timedelta(hours=hours)


@pytest.mark.parametrize("hours", [2, -2])
def test_a_clock_that_is_set_kills_nobody_who_beats(store: Store, workers: Workers, hours: float) -> None:
    for _ in range(3 * LOOKS):
        set_clock(store, hours)
        assert workers.heartbeat("one") and workers.heartbeat("two")
        set_clock(store, hours)
        workers.sweep()
    assert set(states(store).values()) == {ALIVE}


@pytest.mark.parametrize("hours", [2, 0, -2])
def test_a_clock_that_is_set_keeps_nobody_alive_who_does_not_beat(store: Store, workers: Workers, hours: float) -> None:
    set_clock(store, hours)
    for _ in range(LOOKS + 1):
        assert states(store)["one"] == ALIVE
        workers.heartbeat("two")
        workers.sweep()
    assert states(store) == {"one": DEAD, "two": ALIVE}
    assert not workers.heartbeat("one") and workers.alive() == {"two"}


def test_an_observer_that_slept_looks_as_often_as_any_other_before_it_judges(store: Store, workers: Workers) -> None:
    observer = Workers(store)
    observer.sweep()
    set_clock(store, 10)  # it slept, and so did all others
    observer.sweep()
    assert set(states(store).values()) == {ALIVE}


def test_a_beat_between_the_last_look_and_the_verdict_counts(store: Store, workers: Workers) -> None:
    holder = workers.holder("here", 0)
    assert holder is not None and (holder.worker_id, holder.pid) == ("one", 1)
    workers.heartbeat("one")
    workers.bury(holder)
    assert states(store)["one"] == ALIVE


def test_pages_tell_who_is_at_work_by_what_changes(store: Store, workers: Workers) -> None:
    assert [worker.is_alive for worker in store.workers()] == [True, True]
    for hours in (2, -4):
        set_clock(store, hours)
        assert [worker.is_alive for worker in store.workers()] == [True, True]
    other = Store(store.url)  # looks for the first time, when all it has is a clock that was set
    assert [worker.is_alive for worker in other.workers()] == [False, False]
    workers.heartbeat("one")
    assert {worker.id: worker.is_alive for worker in other.workers()} == {"one": True, "two": False}
    other.close()


def test_who_stops_beating_is_at_work_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    pulse, now = Pulse(), 100.0
    monkeypatch.setattr(pulse_module.time, "monotonic", lambda: now)
    assert pulse.is_felt("one", 1, timedelta(seconds=2))
    now += SILENCE_SECONDS - 3
    assert pulse.is_felt("one", 1, timedelta(hours=9))
    now += 2
    assert not pulse.is_felt("one", 1, timedelta(0))
    assert pulse.is_felt("one", 2, timedelta(0))


def test_a_slot_that_a_live_worker_holds_cannot_be_registered_for(
    store: Store, workers: Workers, claims: Claims, run: str
) -> None:
    lease = claims.claim(run, "one")
    assert lease is not None
    workers.set_child("one", 4711)
    with pytest.raises(QueueError, match="Slot 0 on here already has a worker"):
        workers.register("three", host="here", slot=0, pid=3)
    assert states(store)["one"] == ALIVE and claims.owns(lease)
    assert {worker.child_group for worker in store.workers()} == {4711, None}


@pytest.mark.parametrize("how", [DEAD, LEFT])
def test_the_next_worker_of_a_slot_learns_once_what_dead_ones_left(store: Store, workers: Workers, how: str) -> None:
    workers.set_child("one", 4711)
    if how == LEFT:
        workers.leave("one")
    else:
        holder = workers.holder("here", 0)
        assert holder is not None
        workers.bury(holder)
    left = workers.register("three", host="here", slot=0, pid=3)
    assert [(one.worker_id, one.child_group) for one in left] == ([("one", 4711)] if how == DEAD else [])
    workers.leave("three")
    assert workers.register("four", host="here", slot=0, pid=4) == []


def test_a_worker_of_an_earlier_version_keeps_its_child(store: Store, workers: Workers) -> None:
    workers.set_child("one", 4711)
    with store.session() as session:  # it wrote no slot key, and may well be alive
        session.execute(update(WorkerTable).values(slot_key=None))
    assert workers.register("three", host="here", slot=0, pid=3) == []
