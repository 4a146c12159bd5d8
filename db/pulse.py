"""Who is at work, as one process sees it: by counters that rise, never by comparing two machines' clocks."""

import time
from datetime import UTC, datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session

SILENCE_SECONDS = 20.0  # without a beat, of which there is one every five: too long to be called at work


class Pulse:
    """Who is at work, as one process sees it: on its own monotonic clock, from the first change that it saw on."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._seen: dict[str, tuple[int, float]] = {}  # beats, and when they were first seen

    def is_felt(self, worker_id: str, beats: int, silence: timedelta) -> bool:
        """Whether a worker beat lately. `silence`, by the database's clock, counts at the first look alone."""
        now, seconds = time.monotonic(), silence.total_seconds()
        last, since = self._seen.get(worker_id, (None, 0.0))
        if last is None:  # a heartbeat of the future was written before the clock was set
            since = now - (max(seconds, 0.0) if abs(seconds) < SILENCE_SECONDS else SILENCE_SECONDS)
        elif last != beats:
            since = now
        self._seen[worker_id] = (beats, since)
        return now - since < SILENCE_SECONDS


def database_now(session: Session) -> datetime:
    """The database's clock: the one clock that all machines share."""
    now: datetime = session.execute(select(func.now())).scalar_one()
    return now if now.tzinfo else now.replace(tzinfo=UTC)
