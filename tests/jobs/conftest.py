"""A store, a queue and workers of their own for each test of the engine, and a tiny model."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from db.store import Store
from fp8dash.choose.request import Request
from fp8dash.places import data_dir, database_url
from jobs.queue import Queue
from tests.jobs.engine import DEADLINE
from tests.tiny import write_corpus, write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def quick(model: Path, corpus: Path) -> Request:
    """Seconds, nearly all of them the import of torch."""
    return Request.of(
        model=str(model),
        recipe="w=e4m3fn/tensor",
        corpus=str(corpus),
        measures=("gemm",),
        gemm_m=(1,),
        device="cpu",
        backend="emulated",
    )


@pytest.fixture
def long(model: Path, corpus: Path) -> Request:
    """Stages before, and then one that leaves time to break something."""
    return Request.of(
        model=str(model), recipe="w=e4m3fn/row", corpus=str(corpus), windows=300, window_length=64,
        measures=("perplexity",), device="cpu", backend="emulated",
    )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("FP8DASH_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("FP8DASH_DATABASE_URL", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two threads that share a core wait for each other
    store = Store(database_url())
    yield store
    store.close()


@pytest.fixture
def queue(store: Store) -> Iterator[Queue]:
    queue = Queue(store)
    yield queue
    queue.close()


@pytest.fixture
def start(store: Store) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        with (data_dir() / "worker.log").open("ab") as log:
            started.append(subprocess.Popen([sys.executable, "-m", "jobs.worker"], stdout=log, stderr=log))
        return started[-1]

    yield start
    for worker in started:
        worker.terminate()
        worker.wait(DEADLINE)
