"""What the store hands out: frozen plain values."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, get_args

from fp8dash.choose.hardware import Device
from fp8dash.choose.request import Request
from fp8dash.choose.studies import Question

State = Literal["queued", "running", "finished", "failed", "cancelled"]
QUEUED: State = "queued"
RUNNING: State = "running"
FINISHED: State = "finished"
FAILED: State = "failed"
CANCELLED: State = "cancelled"
STATES: tuple[State, ...] = get_args(State)
ACTIVE = (QUEUED, RUNNING)


@dataclass(frozen=True, slots=True)
class Run:
    """A run's row, with its study's name."""

    id: str
    study_id: str | None
    study: str
    owner: str
    model: str
    recipe: str
    preset: str | None
    corpus: str
    request: Request
    state: State
    attempt: int
    stage: str | None
    stage_share: float
    message: str
    error: str | None
    worker_id: str | None
    model_hash: str | None
    corpus_hash: str | None
    backend: str | None
    device: str | None
    device_kind: str | None  # "cpu" or "cuda"
    facts: dict[str, Any]
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    unreadable: str = ""  # why `request` is not what was asked: the row comes from another version

    @property
    def is_active(self) -> bool:
        """True while the run may still change."""
        return self.state in ACTIVE


@dataclass(frozen=True, slots=True)
class Study:
    """Runs submitted together: whose, and how many are in each state."""

    id: str
    name: str
    owner: str
    created_at: datetime
    states: dict[str, int]
    question: Question | None  # what it asks; None for a study of somebody's own

    @property
    def count(self) -> int:
        """How many runs it has."""
        return sum(self.states.values())


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker's row."""

    id: str
    host: str
    slot: int
    pid: int
    state: State
    device: str | None
    device_kind: str | None
    device_facts: dict[str, Any]
    child_group: int | None
    started_at: datetime
    heartbeat_at: datetime
    is_alive: bool  # it beat lately, as this process saw

    @property
    def hardware(self) -> Device:
        """What it computes on, as far as it told."""
        facts = self.device_facts
        capability, cuda = (_pair(facts.get(name)) for name in ("capability", "cuda"))
        return Device(
            self.device_kind or "cpu", self.device or "", capability, int(facts.get("memory_bytes") or 0), cuda
        )


def _pair(pair: Any) -> tuple[int, int]:
    """Two whole numbers; zeros for what a worker did not tell, or told as another version does."""
    if isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(number, int) for number in pair):
        return pair[0], pair[1]
    return 0, 0


def at_work(workers: Iterable[Worker]) -> list[Device]:
    """What the workers that are alive compute on."""
    return [worker.hardware for worker in workers if worker.is_alive]


@dataclass(frozen=True, slots=True)
class Stage:
    """A finished stage."""

    stage: str
    seconds: float
    finished_at: datetime
