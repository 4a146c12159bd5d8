"""What tests of the engine wait for and look at: deadlines for a machine that others share, never a fixed pause."""

import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing

import pytest

from db.rows import Run
from db.store import Store
from db.workers import ALIVE
from fp8dash.places import data_dir

DEADLINE = 300.0  # for a machine that others share; nothing here takes a tenth of it
QUICK = ["load", "baseline", "quantize", "gemm"]
LONG = ["load", "baseline", "quantize", "perplexity"]


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
