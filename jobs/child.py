"""A run's own process: memory is freed with it, a crash is an exit status, and cancel is a signal.

The child reads its task as JSON from stdin and answers with JSON lines on an inherited pipe; what it prints goes to the
run's log. `Child` is the worker's handle on it. Nothing here imports torch before the child is on its own.
"""

import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, BinaryIO

from fp8dash.choose.records import Progress, StageResult
from fp8dash.choose.request import Request
from fp8dash.errors import Fp8dashError
from fp8dash.places import cache_dir, data_dir, log_file
from jobs.processes import WORKER_MARK, end_all, end_group, end_marked, family

FIRST = "load"  # the stage that reads the model
PROGRESS, STAGE, ERROR, END = "progress", "stage", "error", "end"
KEPT = (  # of the worker's environment, by the start of a name: no address of a database, no other service's token
    "HF_", "HUGGING_FACE_", "TRANSFORMERS_", "TOKENIZERS_", "SAFETENSORS_", "TORCH", "PYTORCH_", "TRITON_", "INDUCTOR_",
    "CUDA", "CUBLAS", "CUDNN_", "NVIDIA_", "NCCL_", "HIP_", "ROCR_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "LD_",
    "DYLD_", "PYTHON", "VIRTUAL_ENV", "CONDA_", "LC_", "LANG", "XDG_", "SSL_", "LM_EVAL_", "SLURM_",
)  # fmt: skip
KEPT_NAMES = {
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TZ", "TMPDIR", "TEMP", "TMP", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
    "ALL_PROXY", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SYSTEMROOT",
}  # fmt: skip
COMMAND = (sys.executable, "-m", "jobs.child")
GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Child:
    """A running child: its answers, its exit status, and the end of its whole process group."""

    def __init__(
        self,
        run_id: str,
        header: str,
        task: dict[str, Any],
        environment: dict[str, str],
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Start it, its command given the pipe and our process id.

        The thread that does so must outlive it: Linux ends a child with the thread that made it.
        """
        answers, theirs = os.pipe()
        log = open_log(run_id, header)
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(theirs,),
                start_new_session=True,
                env=inherited() | {"PYTHONUNBUFFERED": "1"} | environment,
            )
        finally:
            os.close(theirs)
            os.close(log)
        self._mark = environment.get(WORKER_MARK, "")
        self.answers: BinaryIO = os.fdopen(answers, "rb")  # whoever reads it closes it
        stdin: Any = self._process.stdin
        with suppress(BrokenPipeError):  # it died already, which its status will say
            stdin.write(json.dumps(task).encode())
            stdin.close()

    @property
    def group(self) -> int:
        """Its process group, which is also its process id."""
        return self._process.pid

    def sweep(self) -> None:
        """Kill what a child that is over left in its group, and what would hold its end of the pipe open."""
        if self._process.poll() is not None:
            end_group(self.group, signal.SIGKILL)

    def end(self, patience: float = 0.0) -> int:
        """Its exit status, negative where a signal ended it, once all that it started is gone, in whatever session:
        what does not end by itself within the patience gets SIGTERM, some grace and SIGKILL. Blocks meanwhile."""
        descendants = family(self.group) if self._process.poll() is None else []
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        if self._process.returncode is None:
            descendants += family(self.group)
            end_group(self.group, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
        end_group(self.group, signal.SIGKILL)  # grandchildren, or a child that catches SIGTERM
        end_all(descendants)  # those that left the group and hid the mark
        if self._mark:
            end_marked(self._mark)
        return self._process.wait()


def inherited() -> dict[str, str]:
    """What a process that computes gets of this one's environment: what it needs, and no secret but the Hub's."""
    kept = {k: v for k, v in os.environ.items() if k.startswith(KEPT) or k.upper() in KEPT_NAMES}
    return kept | {"FP8DASH_DATA_DIR": str(data_dir())}


def open_log(run_id: str, header: str) -> int:
    """A descriptor that appends to the run's log, readable by its owner alone, after one header line."""
    log = os.open(log_file(run_id), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(log, f"--- {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, {header}\n".encode())
    return log


def sentence(error: BaseException, stage: str = "", model: str = "") -> str:
    """The message for an error: what happened, in which stage, whose fault it is, and what can be done.

    >>> sentence(MemoryError(), "perplexity", "demo")
    'The machine ran out of memory in the stage perplexity. Choose a smaller model or shorter windows, then retry: \
finished stages are kept.'
    >>> sentence(MemoryError(), "load", "./big")
    'The machine ran out of memory while reading “./big”: its config or weights need more than there is. \
Choose a smaller model, or a machine with more memory, then retry: finished stages are kept.'
    >>> sentence(KeyError("lm_head"))
    "Internal error: KeyError: 'lm_head'. The log has the details."
    """
    kept = "then retry: finished stages are kept."
    for cause in _causes(error):
        text = str(cause)
        if isinstance(cause, OSError) and cause.errno == errno.ENOSPC or "No space left on device" in text:
            return f"The disk is full. Free some space or set FP8DASH_DATA_DIR elsewhere, {kept}"
        if type(cause).__name__ == "OutOfMemoryError" or "CUDA out of memory" in text:
            return f"The GPU {_exhausted(stage, model, 'End other processes on it, or choose a smaller model')}, {kept}"
        if isinstance(cause, MemoryError) or "can't allocate memory" in text or "Cannot allocate memory" in text:
            return f"The machine {_exhausted(stage, model, 'Choose a smaller model or shorter windows')}, {kept}"
    if isinstance(error, Fp8dashError):
        return str(error)
    return f"Internal error: {type(error).__name__}: {error}. The log has the details."


def _exhausted(stage: str, model: str, remedy: str) -> str:
    if stage == FIRST and model:
        asked = "its config or weights need more than there is"
        more = "Choose a smaller model, or a machine with more memory"
        return f"ran out of memory while reading “{model}”: {asked}. {more}"
    return f"ran out of memory{f' in the stage {stage}' if stage else ''}. {remedy}"


def died_of(status: int, deaths: int, stage: str = "") -> str:
    """The message for a child that was ended by signals again and again.

    >>> died_of(-9, 3, "perplexity")
    'Its process was killed by SIGKILL 3 times in the stage perplexity. The kernel may have run out of memory: choose \
a smaller model or shorter windows, or retry; finished stages are kept.'
    """
    name, where = signal.Signals(-status).name, f" in the stage {stage}" if stage else ""
    return (
        f"Its process was killed by {name} {deaths} times{where}. The kernel may have run out of memory: choose a "
        "smaller model or shorter windows, or retry; finished stages are kept."
    )


def answer(task: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> bool:
    """Send the answers to a task: progress and stages as they come, then the end or one error. True at the end."""

    stage = ""

    def tell(progress: Progress) -> None:
        nonlocal stage
        stage = progress.stage
        send({PROGRESS: _progress(progress)})

    try:
        from fp8dash.pipeline import run_stages

        for item in run_stages(
            Request.from_json(task["request"]),
            frozenset(task["done"]),
            cache_dir(),
            tell,
            task.get("recorded", {}),
            task.get("beside", ()),
        ):
            if isinstance(item, StageResult):
                send({STAGE: item.to_json()})
            else:
                tell(item)
    except Exception as error:
        traceback.print_exc()
        send({ERROR: sentence(error, stage, str(task["request"].get("model", "")))})
        return False
    send({END: True})
    return True


def describe(device: str = "auto") -> dict[str, Any]:
    """What this machine computes on."""
    from fp8dash.model.load import find_device

    own = find_device(device)
    return {
        "kind": own.kind,
        "name": own.label,
        "capability": list(own.capability),
        "cuda": list(own.cuda),
        "memory_bytes": own.memory_bytes,
    }


def main(arguments: list[str]) -> int:
    """Answer the task on stdin over the pipe of the first argument; the second is the worker's process id."""
    if arguments == ["--describe"]:
        print(json.dumps(describe()))
        return 0
    channel, worker = int(arguments[0]), int(arguments[1])
    os.set_inheritable(channel, False)  # else a grandchild would hold the pipe open
    _die_with(worker)
    with os.fdopen(channel, "w", encoding="utf-8") as pipe:
        ended = answer(json.load(sys.stdin), lambda message: print(json.dumps(message), file=pipe, flush=True))
    return 0 if ended else 1


def _progress(progress: Progress) -> dict[str, Any]:
    return {"stage": progress.stage, "done": progress.done, "total": progress.total, "message": progress.message}


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _die_with(worker: int) -> None:
    """Let the kernel kill this process when its worker dies, however that happens; Linux alone can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != worker:  # it died before the line above
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
