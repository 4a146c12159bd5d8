"""Processes of this machine: whether one still runs, and how all that a run started is ended.

A worker's mark stands in the environment of its child and of all that the child starts, in whatever session or group
they are. Linux alone tells of other processes; elsewhere a process group is ended and its escaped members are not.
"""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

WORKER_MARK = "FP8DASH_WORKER"  # in the environment of a child and of all that it starts: whose they are
SLOT_TAKEN = 3  # exit status of a worker whose slot has one: to start it again would be in vain
PROC = Path("/proc")
STARTED = 19  # field of /proc/PID/stat after the name: ticks since boot (proc_pid_stat(5), field 22)
ENDED = ("Z", "X")  # states of what is over and waits for its parent


def identity(pid: int) -> str:
    """What tells a process from every other, also from one that is given its number later; empty where it is gone.

    Boot and namespace of process ids, number, and moment of its start.
    """
    started = _started(pid)
    return "" if started is None else f"{_place()}:{pid}:{started}"


def runs(process: str) -> bool | None:
    """Whether the process of an identity still runs; None where it cannot be seen from here.

    >>> runs(identity(os.getpid())), runs("another machine:1:2"), runs("")
    (True, None, None)
    """
    place, _, rest = process.rpartition(":")[0].rpartition(":")
    if not place or place != _place() or not rest.isdigit():
        return None
    return identity(int(rest)) == process


def end_group(group: int, number: int) -> None:
    """Send a signal to a process group that may be gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def end_marked(worker_id: str) -> None:
    """Kill whatever carries a worker's mark, until nothing does: what is killed may have forked before."""
    for _ in range(100):
        living = list(marked(worker_id))
        if not living:
            return
        for pid in living:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def marked(worker_id: str) -> Iterator[int]:
    """The processes that carry a worker's mark and still run."""
    mark = f"{WORKER_MARK}={worker_id}".encode()
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0") and _started(int(folder.name)) is not None:
                yield int(folder.name)


def family(pid: int) -> list[str]:
    """The identities of all that descends from a process, as far as its members' parents still live."""
    parents: dict[int, int] = {}
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    members, grew = {pid}, True
    while grew:
        more = {child for child, parent in parents.items() if parent in members} - members
        members, grew = members | more, bool(more)
    return [identity(member) for member in members - {pid}]


def end_all(identities: list[str]) -> None:
    """Kill processes, those alone that still are what they were."""
    for process in identities:
        if runs(process):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(process.split(":")[-2]), signal.SIGKILL)


def _started(pid: int) -> str | None:
    """When a process began, in ticks since boot; empty where that is not told, None where it is over."""
    if not PROC.exists():
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            return ""
        return None
    try:
        state, *fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in ENDED else fields[STARTED - 1]


def _place() -> str:
    """The machine, from its boot on, and the namespace in which its process ids are counted."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.readlink(PROC / 'self/ns/pid')}"
    except OSError:
        return socket.gethostname()
