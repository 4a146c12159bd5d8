"""Which way a model goes: whole into memory, or block by block; decided from headers and what memory is free."""

import contextlib
import ctypes
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from fp8dash.choose.advice import BESIDE_WEIGHTS
from fp8dash.choose.recipe import Recipe
from fp8dash.model.streaming.memory import memory_of_pass
from fp8dash.model.streaming.unread import elements, tensors_in

WEIGHT = 2  # bytes of a weight in bfloat16
WIDE = 3  # times as much while a float32 file is read
M_MMAP_THRESHOLD, LARGE = -3, 1 << 20  # of malloc.h; bytes
MEMINFO, STATUS, CGROUP = Path("/proc/meminfo"), Path("/proc/self/status"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Way:
    """How a model is loaded, and why: bytes."""

    is_whole: bool
    needed: int  # whole
    by_blocks: int
    free: int

    @property
    def meaning(self) -> str:
        """In a sentence.

        >>> Way(False, 30 << 30, 3 << 30, 16 << 30).meaning
        'block by block, in about 3.0 GiB: whole it takes 30.0, and 16.0 are free'
        """
        gib = [amount / 2**30 for amount in (self.needed, self.by_blocks, self.free)]
        if self.is_whole:
            return f"whole, in about {gib[0]:.1f} GiB; {gib[2]:.1f} are free"
        return f"block by block, in about {gib[1]:.1f} GiB: whole it takes {gib[0]:.1f}, and {gib[2]:.1f} are free"


def way_of(folder: Path, loading: str, where: torch.device, windows: tuple[int, int]) -> Way:
    """How a trusted folder's model is loaded for windows (count, length); raises ModelError where blocks were asked
    for and the model has none."""
    needed, free = needed_whole(folder), free_memory(where)
    if loading == "whole" or (loading == "auto" and needed <= free):
        return Way(True, needed, needed, free)
    return Way(False, needed, memory_of_pass(folder, [Recipe()], *windows).peak + BESIDE_WEIGHTS, free)


def return_freed_memory() -> None:
    """Has the C library give large tensors back to the kernel as soon as they are freed, for the life of this process.

    glibc otherwise raises the size from which it does so to 32 MiB, and what is freed below stays with the process.
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE)


def needed_whole(folder: Path) -> int:
    """Bytes that a model takes when it is loaded whole and cast."""
    tensors = list(tensors_in(folder).values())
    size = WEIGHT * sum(map(elements, tensors))
    is_wide = any(tensor.stored.dtype in ("F32", "F64") for tensor in tensors)
    return (WIDE if is_wide else 1) * size + BESIDE_WEIGHTS


def free_memory(where: torch.device) -> int:
    """Bytes that are free on a device: on a CPU, what the kernel says, and what limits leave this process."""
    if where.type == "cuda":
        return int(torch.cuda.mem_get_info(where)[0])
    limits = [_available(), _of_cgroup()]
    for kind, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(max(1, soft - _kibibytes(STATUS, used)))
    return min((limit for limit in limits if limit), default=1 << 62)


def _available() -> int:
    """The kernel's MemAvailable; 0 where it does not say."""
    return _kibibytes(MEMINFO, "MemAvailable")


def _kibibytes(file: Path, name: str) -> int:
    """A field of a file of the kernel's, in bytes; 0 where there is none."""
    try:
        lines = file.read_text("ascii").splitlines()
    except OSError:  # not Linux
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), 0)


def _of_cgroup() -> int:
    """What the control group, a container's, leaves; 0 where it sets no limit."""
    try:
        most, used = ((CGROUP / name).read_text("ascii").strip() for name in ("memory.max", "memory.current"))
        return max(1, int(most) - int(used)) if most != "max" else 0
    except (OSError, ValueError):
        return 0
