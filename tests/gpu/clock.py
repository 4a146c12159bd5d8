"""Medians of calls that are sampled in turn, so that a slow moment hits them alike.

On a GPU: CUDA events around one call, the L2 cache overwritten before each, and a round of samples queued before the
host waits, so that the GPU does not wait for Python.
"""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch
from torch import Tensor

FEWEST, MOST = 5, 60  # samples of one figure
QUEUED, WARMUP = 5, 3  # rounds queued before the host waits; calls that are not measured
FLUSH_BYTES = 256 << 20  # at least, and twice the L2

Calls = Mapping[str, Callable[[], object]]
Round = list[tuple[str, float]]  # microseconds of calls, by name


def sampled(calls: Calls, where: torch.device, budget_s: float) -> dict[str, tuple[float, int]]:
    """Median microseconds of each call and how many samples it rests on: FEWEST, or MOST if the budget lasts."""
    for call in calls.values():
        for _ in range(WARMUP):
            call()
    buffer = _l2_buffer(where) if where.type == "cuda" else None
    taken: dict[str, list[float]] = {name: [] for name in calls}
    end, count = time.perf_counter() + budget_s, 0
    while count < FEWEST or (count < MOST and time.perf_counter() < end):
        for name, us in _cpu_round(calls) if buffer is None else _cuda_rounds(calls, buffer):
            taken[name].append(us)
        count = min(map(len, taken.values()))
    return {name: (median(samples), len(samples)) for name, samples in taken.items()}


def _cuda_rounds(calls: Calls, buffer: Tensor) -> Round:
    events = []
    for name, call in list(calls.items()) * QUEUED:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        buffer.zero_()
        start.record()
        call()
        end.record()
        events.append((name, start, end))
    torch.cuda.synchronize()
    return [(name, start.elapsed_time(end) * 1e3) for name, start, end in events]


def _cpu_round(calls: Calls) -> Round:
    taken = []
    for name, call in calls.items():
        start = time.perf_counter_ns()
        call()
        taken.append((name, (time.perf_counter_ns() - start) / 1e3))
    return taken


def _l2_buffer(where: torch.device) -> Tensor:
    """Bytes whose writing leaves nothing else in the L2 cache."""
    size = max(FLUSH_BYTES, 2 * torch.cuda.get_device_properties(where).L2_cache_size)
    return torch.empty(size, dtype=torch.uint8, device=where)
