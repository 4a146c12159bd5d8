"""The processes of this machine: web and worker, started, watched and ended together."""

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

ROOT = Path(__file__).resolve().parent.parent  # where app.py lies
EVERYWHERE = ("", "0.0.0.0", "::")  # listening on all of the machine's addresses
POLL_SECONDS, RESTART_SECONDS, PATIENCE_SECONDS = 0.5, 2, 20

Process = subprocess.Popen[bytes]


def start_web(host: str, port: int) -> Process:
    """The dashboard; raises QueueError where the port is taken."""
    refuse_taken(host, port)
    command = [sys.executable, "-m", "fp8dash.ui.server", "run", str(ROOT / "app.py")]
    command += ["--server.port", str(port), "--server.address", host]
    for name in answered_names(host):
        command += ["--server.allowedHosts", name]
    return _started(command)


def answered_names(host: str) -> list[str]:
    """By which names and addresses a browser may reach a dashboard that listens on `host`.

    A page on any other name is refused, whatever it resolves to: else a site that a user visits could point its own
    name at this machine and read the dashboard (DNS rebinding). FP8DASH_HOSTS adds names, divided by commas.
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
    """Waits until Ctrl-C, SIGTERM or the web process's end, then ends all; a worker that ends is started again."""
    alive = list(workers)
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell starts background jobs with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    print(f"fp8dash serves at {address} until Ctrl-C.", flush=True)
    try:
        while web.poll() is None:
            for index, worker in enumerate(alive):
                if worker.poll() is not None:
                    print("The worker ended: starting it again.", flush=True)
                    time.sleep(RESTART_SECONDS)
                    alive[index] = start_worker()
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        print("\nStopping.", flush=True)
    finally:
        end([web, *alive])


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
            why = "already in use" if getattr(error, "errno", 0) == errno.EADDRINUSE else f"not available ({error})"
            raise QueueError(f"Port {port} on {host} is {why}: choose another with --port.") from None


def _started(command: list[str]) -> Process:
    """A process in a session of its own, so that Ctrl-C reaches it once, from us."""
    places = {"FP8DASH_DATA_DIR": str(data_dir()), "FP8DASH_DATABASE_URL": database_url()}
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | places, start_new_session=True)
