"""What ends with what: escaped grandchildren with their run, web and worker with the command that started them."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fp8dash.places import cache_dir, clear_abandoned, clear_scratch, data_dir, scratch
from jobs.child import Child, inherited, sentence
from jobs.processes import WORKER_MARK, end_marked, identity, runs
from tests.jobs.engine import until

SECRETS = {
    "FP8DASH_DATABASE_URL": "postgresql+psycopg://u:secret@h/db", "AWS_SECRET_ACCESS_KEY": "secret", "PGPASSWORD": "s",
    "GITHUB_TOKEN": "secret", "OPENAI_API_KEY": "secret", "WANDB_API_KEY": "secret", "SSH_AUTH_SOCK": "/s",
}  # fmt: skip
NEEDED = {
    "HF_TOKEN": "t", "HF_HOME": "/h", "CUDA_VISIBLE_DEVICES": "1", "LD_LIBRARY_PATH": "/l", "OMP_NUM_THREADS": "1",
    "https_proxy": "p", "HTTPS_PROXY": "p", "PATH": os.environ["PATH"], "TMPDIR": "/tmp", "LC_ALL": "C.UTF-8",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FP8DASH_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("FP8DASH_DATABASE_URL", raising=False)
    return tmp_path


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def script(*lines: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent("\n".join(lines))]


def test_an_identity_is_of_one_process_and_not_of_its_number(sleeper: subprocess.Popen[bytes]) -> None:
    own = identity(sleeper.pid)
    assert runs(own)
    assert runs(own.rpartition(":")[0] + ":1") is False  # another that had the number before
    assert runs("elsewhere:pid:[1]:1:1") is None and runs("") is None
    sleeper.kill()
    until(lambda: runs(own) is False)  # though nobody has waited for it yet


@pytest.mark.parametrize("hides", [False, True])
def test_ending_a_child_ends_what_left_its_session_too(folder: Path, hides: bool) -> None:
    grandchild = "import time; time.sleep(600)"
    environment = "env={}, " if hides else ""
    code = (
        f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', '{grandchild}'], {environment}"
        f"start_new_session=True); open({str(folder / 'pid')!r}, 'w').write(str(p.pid)); time.sleep(600)"
    )
    child = Child("run", "attempt 1", {}, {WORKER_MARK: "worker"}, [sys.executable, "-c", code])
    until(lambda: (folder / "pid").exists() and (folder / "pid").read_text())
    own = identity(int((folder / "pid").read_text()))
    assert runs(own)
    assert child.end() == -signal.SIGTERM
    child.answers.close()
    until(lambda: not runs(own))


def test_what_bears_another_workers_mark_is_left_alone() -> None:
    others = subprocess.Popen(["sleep", "600"], env=os.environ | {WORKER_MARK: "another"})
    try:
        end_marked("worker")
        assert others.poll() is None
    finally:
        others.kill()
        others.wait()


def test_a_process_that_computes_gets_what_it_needs_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (SECRETS | NEEDED).items():
        monkeypatch.setenv(name, value)
    given = inherited()
    assert not set(SECRETS) & set(given) and "secret" not in "".join(given.values())
    assert NEEDED.items() <= given.items() and given["FP8DASH_DATA_DIR"] == str(data_dir())


def test_memory_that_runs_out_is_told_with_its_stage_and_whose_fault_it_is() -> None:
    assert "in the stage needle" in sentence(MemoryError(), "needle", "/models/a")
    loading = sentence(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "load", "/models/a")
    assert "while reading “/models/a”: its config or weights need more than there is" in loading


def test_what_a_killed_process_left_incomplete_is_removed_and_nothing_else() -> None:
    code = ["import os; from fp8dash.places import cache_dir, scratch", "print(scratch(cache_dir()), flush=True)"]
    gone = subprocess.Popen(script(*code, "os.kill(os.getpid(), 9)"), stdout=subprocess.PIPE, text=True)
    left = Path(str(gone.communicate()[0]).strip())
    (cache_dir() / "checkpoints").mkdir()
    own, complete = scratch(cache_dir() / "checkpoints"), cache_dir() / "demo"
    complete.mkdir()
    assert left.is_dir()
    clear_scratch(gone.pid + 10**6)
    assert left.is_dir() and own.is_dir()
    clear_scratch(gone.pid)
    assert not left.exists() and own.is_dir()
    left.mkdir()
    (cache_dir() / ".demo-abc").mkdir()
    clear_abandoned()
    assert sorted(folder.name for folder in cache_dir().iterdir()) == ["checkpoints", "demo"] and own.is_dir()


def test_web_and_worker_end_with_the_command_that_was_killed(folder: Path) -> None:
    code = [
        "import sys, time; from fp8dash.serve import _started",
        "print(_started([sys.executable, '-c', 'import time; time.sleep(600)']).pid, flush=True); time.sleep(600)",
    ]
    parent = subprocess.Popen(script(*code), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    own = identity(pid)
    until(lambda: "600" in Path(f"/proc/{pid}/cmdline").read_text() and "fp8dash.serve" not in command_of(pid))
    assert runs(own)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not runs(own))


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""
