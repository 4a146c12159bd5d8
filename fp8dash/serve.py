"""The processes of this machine: web and worker, started, watched and ended together.

`python -m fp8dash.serve PARENT command ...` becomes the command, and the kernel ends it when its parent dies, however
that happens (Linux alone can; elsewhere a killed parent leaves it).
"""

import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fp8dash.errors import QueueError
from fp8dash.places import allowed_hosts, data_dir, database_url
from jobs.processes import SLOT_TAKEN

ROOT = Path(__file__).resolve().parent.parent  # where app.py lies
EVERYWHERE = ("", "0.0.0.0", "::")  # listening on all of the machine's addresses
POLL_SECONDS, PATIENCE_SECONDS = 0.5, 20
RESTART_SECONDS, LONGEST_RESTART_SECONDS = 2.0, 60.0  # before a worker is started again: twice as long each time
STEADY_SECONDS = 60.0  # of a worker's life, after which the next pause is short again
NEVER = float("inf")
PR_SET_PDEATHSIG = 1  # linux/prctl.h

Process = subprocess.Popen[bytes]


def start_web(host: str, port: int) -> Process:
    """The dashboard; raises QueueError where the port cannot be used."""
    refuse_taken(host, port)
    command = [sys.executable, "-m", "fp8dash.ui.server", "run", str(ROOT / "app.py")]
    command += ["--server.port", str(port), "--server.address", host]
    for name in answered_names(host):
        command += ["--server.allowedHosts", name]
    return _started(command)


def answered_names(host: str) -> list[str]:
    """By which names and addresses a browser may reach a dashboard that listens on `host`.

    A page on any other name is refused, whatever it resolves to: else a site that a user visits could point its own
    name at this machine and read the dashboard (DNS rebinding). FP8DASH_HOSTS adds names, separated by commas.
    """
    names = ["localhost", "127.0.0.1", "::1", *allowed_hosts()]
    names += [socket.gethostname(), _own_address()] if host in EVERYWHERE else [host]
    return list(dict.fromkeys(name.strip().lower() for name in names if name.strip()))


def _own_address() -> str:
    """This machine's address in its network; nothing is sent to find out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 of RFC 5737: a route is chosen, no packet leaves
        except OSError:  # no network
            return ""
        return str(probe.getsockname()[0])


def start_worker(slot: int = 0) -> Process:
    """A worker on a slot."""
    return _started([sys.executable, "-m", "jobs.worker", str(slot)])


def serve(web: Process, workers: Sequence[Process], address: str) -> None:
    """Waits until Ctrl-C, SIGTERM or the web process's end, then ends all; a worker that ends is started again.

    One whose slot has a worker already is not: that one takes the runs.
    """
    kept = [_Kept(worker) for worker in workers]
    print(f"fp8dash is serving at {address}; stop it with Ctrl-C.", flush=True)
    try:
        while web.poll() is None:
            for worker in kept:
                worker.tend()
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        print("\nStopping.", flush=True)
    finally:
        end([web, *(worker.process for worker in kept)])


class _Kept:
    """A worker that is started again when it ends, after a pause that grows while it does not stay."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._since, self._pause, self._due = time.monotonic(), RESTART_SECONDS, 0.0

    def tend(self) -> None:
        """Start it again where that is due."""
        now, status = time.monotonic(), self.process.poll()
        if status is None or self._due == NEVER:
            return
        if status == SLOT_TAKEN:
            print("A worker is already running and takes the runs: no second one is started.", flush=True)
            self._due = NEVER
        elif not self._due:
            self._pause = RESTART_SECONDS if now - self._since > STEADY_SECONDS else self._pause
            print(f"The worker exited with status {status}: restarting it in {self._pause:g} s.", flush=True)
            self._due, self._pause = now + self._pause, min(2 * self._pause, LONGEST_RESTART_SECONDS)
        elif now >= self._due:
            self.process, self._since, self._due = start_worker(), now, 0.0


def end(processes: Sequence[Process]) -> None:
    """Asks processes to end, and kills those that do not."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def refuse_taken(host: str, port: int) -> None:
    """Raises QueueError where a port cannot be listened on."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            why = f"Port {port} is already in use" if taken else f"Port {port} on {host} cannot be used ({error})"
            raise QueueError(f"{why}: choose another with --port.") from None


def _started(command: list[str]) -> Process:
    """A process in a session of its own, so that Ctrl-C reaches it once, from us; it ends with us.

    From the first one on, SIGTERM and SIGINT end this process as Ctrl-C does: through whatever ends the others.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell starts background jobs with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    places = {"FP8DASH_DATA_DIR": str(data_dir()), "FP8DASH_DATABASE_URL": database_url()}
    tied = [sys.executable, "-m", "fp8dash.serve", str(os.getpid()), *command]
    return subprocess.Popen(tied, cwd=ROOT, env=os.environ | places, start_new_session=True)


def become(parent: int, command: Sequence[str]) -> None:
    """This process becomes a command that ends with its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)
    os.execv(command[0], list(command))


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
