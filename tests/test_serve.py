"""Web and worker as `fp8dash up` and `fp8dash demo` keep them."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from fp8dash import serve as module
from fp8dash.errors import QueueError
from fp8dash.serve import _Kept, refuse_taken
from jobs.processes import SLOT_TAKEN, family, runs
from tests.jobs.engine import DEADLINE, until


def ended(status: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({status})"])
    process.wait(DEADLINE)
    return process


@pytest.fixture
def started(monkeypatch):
    """The workers that were started again: each of them ends at once."""
    made = []

    def start() -> subprocess.Popen[bytes]:
        made.append(ended(1))
        return made[-1]

    monkeypatch.setattr(module, "start_worker", start)
    return made


def test_a_worker_that_was_refused_is_not_started_again(started, capsys) -> None:
    kept = _Kept(ended(SLOT_TAKEN))
    for _ in range(50):
        kept.tend()
    assert started == [] and capsys.readouterr().out.count("no second one is started") == 1


def test_a_worker_that_keeps_ending_is_started_again_more_and_more_seldom(started, monkeypatch) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    kept, at = _Kept(ended(1)), []
    while len(started) < 8:
        count = len(started)
        kept.tend()
        at += [now] * (len(started) - count)
        now += 1
    pauses = [later - earlier for earlier, later in zip(at, at[1:], strict=False)]
    assert pauses == sorted(pauses) and module.LONGEST_RESTART_SECONDS <= pauses[-1] <= 62


def test_a_port_in_use_is_said_as_such() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(QueueError, match=f"Port {taken.getsockname()[1]} is already in use: choose another"):
            refuse_taken("127.0.0.1", taken.getsockname()[1])


def test_a_demo_that_is_stopped_before_it_serves_ends_all_that_it_started(tmp_path) -> None:
    environment = os.environ | {"FP8DASH_DATA_DIR": str(tmp_path)}
    environment.pop("FP8DASH_DATABASE_URL", None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "fp8dash.cli", "demo", "--port", str(port)]
    demo = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        until(lambda: len(family(demo.pid)) >= 2)  # web and worker
        others = family(demo.pid)
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(DEADLINE) == 130
        until(lambda: not any(runs(one) for one in others))
    finally:
        demo.kill()
        demo.wait()
