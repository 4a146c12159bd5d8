"""Times of a model's own Linear shapes: the product in the model's precision beside the cast and the native product.

Operands are random (zeros draw less power and can run faster). The kinds are timed in turn, sample by sample, so that
a slow moment hits them alike; each figure is a median with its spread. Warm: caches hold what the calls before left
there; cold: they were overwritten, as a layer's weights find them. A layer without a native kernel has no cast time:
emulation says nothing about speed.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8dash.choose.casts import Cast
from fp8dash.choose.hardware import Device, KernelPath, native_path
from fp8dash.choose.models.groups import is_routed_expert
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.records import BASELINE, EMULATED, HIGHER, LOWER, NATIVE, GemmPoint, Measurement, Progress, RanBy
from fp8dash.model.parts import LINEAR, parts_of
from fp8dash.model.tensors import DTYPE
from fp8dash.quant.cast import codes_by, codes_of, quantize, scales_of
from fp8dash.quant.matmul import multiply

METHOD = "median over interleaved samples, random operands, warm caches, no waiting for the host, v2"
METHOD_COLD = "median over interleaved samples, random operands, caches overwritten before each, v1"
METHOD_PEAK = "best sample of one large operation, random operands, v1"
SAMPLES, WARMUP = 25, 3
BUDGET_S = 0.4  # for one shape at one M: slow shapes take fewer samples, never under FEWEST
FEWEST, COLD_SAMPLES = 5, 3
SQUARE = {"cpu": 512, "cuda": 8192}  # side of the product whose rate is called the peak
COPIED = {"cpu": 1 << 26, "cuda": 1 << 30}  # bytes
MOST_UNTIMED = 0.1  # of the blocks' weights, for the speed-up of the others to stand for the model's
CACHE_BYTES = 1 << 25  # of the last cache, where the system does not tell
MOST_FLUSHED = 1 << 28  # bytes overwritten
SLEEP_CYCLES = 500_000  # about 0.3 ms, in which the host queues what is timed

Shape = tuple[int, int]  # N, K
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Caches:
    """What caches hold before a sample: the speed-up's name, its method, a point's fields of BF16, cast and product."""

    speedup: str
    method: str
    fields: tuple[str, str, str]


COLD = Caches("gemm_speedup_cold", METHOD_COLD, ("baseline_cold_us", "cast_cold_us", "matmul_cold_us"))
WARM = Caches("gemm_speedup", METHOD, ("baseline_us", "cast_us", "matmul_us"))


@dataclass(frozen=True, slots=True)
class Sampled:
    """Microseconds of a call: median, best, and the distance of the quartiles over the median."""

    us: float
    best: float
    iqr: float


def gemm(
    shapes: Counter[Shape],
    recipe: Recipe,
    ms: Sequence[int],
    device: Device,
    where: torch.device,
    seed: int,
    untimed: float = 0.0,
) -> Iterator[Progress | GemmPoint | Measurement]:
    """Progress and a point for each shape and M, then the speed-up of the model's Linears at each M, warm and cold, the
    M from which casting pays, and what the device reaches at most.

    `untimed` is the share of the blocks' weights that have no shape here: where it is large, the others' speed-up is
    not the model's, and none is given.
    """
    points: list[GemmPoint] = []
    clock = _Stopwatch(where)
    work = [(m, shape) for m in sorted(ms) for shape in shapes]
    for index, (m, (n, k)) in enumerate(work):
        yield Progress("gemm", index, len(work), f"M={m} N={n} K={k}")
        points.append(_point(m, n, k, shapes[n, k], recipe, native_path(recipe, n, k, device), clock, seed))
        yield points[-1]
    yield from _peaks(recipe, device, clock, seed)
    if recipe.casts_linears:
        yield _crossover(points, untimed)
    for caches in (COLD, WARM):
        for m in sorted(ms):
            yield _speedup([p for p in points if p.m == m], recipe, caches, f"M={m}", untimed)
        yield _speedup([p for p in points if p.m == max(ms)], recipe, caches, "", untimed)


@torch.no_grad()
def _point(
    m: int, n: int, k: int, count: int, recipe: Recipe, path: KernelPath, clock: "_Stopwatch", seed: int
) -> GemmPoint:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator).to(clock.where, DTYPE)
    w = torch.randn(n, k, generator=generator).to(clock.where, DTYPE)
    if path.kernel and recipe.weights and recipe.activations:
        return _native_point(x, w, count, (recipe.activations, recipe.weights), path, clock)
    (warm,), (cold,) = clock.warm_and_cold([lambda: F.linear(x, w)])
    return GemmPoint(
        m=m,
        n=n,
        k=k,
        count=count,
        baseline_us=warm.us,
        cast_us=None,
        matmul_us=None,
        kernel="" if recipe.casts_linears else "bf16",
        reason=path.reason if recipe.casts_linears else "",
        baseline_iqr=warm.iqr,
        baseline_cold_us=cold.us,
    )


def _native_point(
    x: Tensor, w: Tensor, count: int, casts: tuple[Cast, Cast], path: KernelPath, clock: "_Stopwatch"
) -> GemmPoint:
    """The times of x [M, K] by w [N, K], cast by `casts` of activations and of weights, through a native kernel."""
    activations, kernel = casts[0], path.kernel or ""
    weight, codes = quantize(w, casts[1]), quantize(x, activations)
    made = scales_of(x, activations) if activations.is_observed else None  # beforehand: not part of the cast
    calls: list[Call] = [
        lambda: F.linear(x, w),
        lambda: codes_of(x, activations) if made is None else codes_by(x, *made, activations),
        lambda: multiply(codes, weight, kernel, DTYPE),
    ]
    (baseline, cast, product), cold = clock.warm_and_cold(calls)
    (m, k), n = x.shape, len(w)
    return GemmPoint(
        m=m,
        n=n,
        k=k,
        count=count,
        baseline_us=baseline.us,
        cast_us=cast.us,
        matmul_us=product.us,
        kernel=kernel,
        reason=path.reason,
        baseline_iqr=baseline.iqr,
        cast_iqr=cast.iqr,
        matmul_iqr=product.iqr,
        baseline_cold_us=cold[0].us,
        cast_cold_us=cold[1].us,
        matmul_cold_us=cold[2].us,
        matmul_bytes=float(sum(t.nbytes for q in (codes, weight) for t in (q.codes, q.scales)) + 2 * m * n),
    )


def _speedup(points: list[GemmPoint], recipe: Recipe, caches: Caches, label: str, untimed: float) -> Measurement:
    """BF16 time over cast + product time, each Linear counted as often as the model has it."""
    note = f"M={points[0].m}" if points else ""

    def measured(value: float | None, backend: RanBy, why: str) -> Measurement:
        return Measurement(caches.speedup, value, "× BF16", HIGHER, caches.method, backend, label, why)

    if not recipe.casts_linears:
        return measured(1.0, BASELINE, f"{note}, by definition" if note else "by definition")
    if missing := _missing(points, untimed):
        return measured(None, EMULATED, missing)
    base, cast = _times(points, caches)
    return measured(base / cast, NATIVE, note)


def _missing(points: Sequence[GemmPoint], untimed: float) -> str:
    """Why there is no time of all the model's products, or nothing."""
    if untimed > MOST_UNTIMED or not points:
        share = 1.0 if not points else untimed
        return f"{share:.0%} of the blocks’ weights are not timed: a router decides what experts multiply"
    return next((point.reason for point in points if point.matmul_us is None), "")


def _times(points: Sequence[GemmPoint], caches: Caches) -> tuple[float, float]:
    """Microseconds of all the model's Linears: in BF16, and cast + product."""
    base, cast, product = (
        sum(point.count * (getattr(point, field) or 0.0) for point in points) for field in caches.fields
    )
    return base, cast + product


def _crossover(points: Sequence[GemmPoint], untimed: float) -> Measurement:
    """The smallest M of the sweep at which cast + product of all Linears takes less time than BF16, warm."""
    sizes = sorted({point.m for point in points})
    swept = f"of M={', '.join(map(str, sizes))}"

    def measured(value: float | None, backend: RanBy, note: str) -> Measurement:
        return Measurement("gemm_crossover_m", value, "tokens", LOWER, METHOD, backend, note=note)

    if missing := _missing(points, untimed):
        return measured(None, EMULATED, missing)
    faster = []
    for m in sizes:
        base, cast = _times([point for point in points if point.m == m], WARM)
        faster += [m] if cast < base else []
    if not faster:
        return measured(None, NATIVE, f"none {swept}: the cast and the product take longer than BF16")
    slower = [m for m in sizes if m > faster[0] and m not in faster]
    return measured(float(faster[0]), NATIVE, swept + (f"; slower again at M={slower}" if slower else ""))


def _peaks(recipe: Recipe, device: Device, clock: "_Stopwatch", seed: int) -> Iterator[Measurement]:
    """The rate of a large square product in BF16 and, where it is legal, by the recipe's kernel, and that of a copy."""
    size, generator = SQUARE[clock.where.type], torch.Generator().manual_seed(seed)
    x, w = (torch.randn(size, size, generator=generator).to(clock.where, DTYPE) for _ in range(2))
    calls: dict[str, Call] = {"BF16": lambda: F.linear(x, w)}
    path = native_path(recipe, size, size, device)
    if path.kernel and recipe.weights and recipe.activations:
        kernel, weight, codes = path.kernel, quantize(w, recipe.weights), quantize(x, recipe.activations)
        calls[kernel] = lambda: multiply(codes, weight, kernel, DTYPE)
    for (label, call), backend in zip(calls.items(), (BASELINE, NATIVE), strict=False):
        (sampled,) = clock.sampled([call], FEWEST, FEWEST)
        rate, note = 2 * size**3 / sampled.best / 1e6, f"M = N = K = {size:,}"
        yield Measurement("peak_tflops", rate, "TFLOPS", HIGHER, METHOD_PEAK, backend, label, note)
    source = x.flatten().repeat(COPIED[clock.where.type] // x.nbytes)
    target = torch.empty_like(source)
    (copied,) = clock.sampled([lambda: target.copy_(source)], FEWEST, FEWEST)
    rate, note = 2 * source.nbytes / copied.best / 1e3, f"{source.nbytes >> 20} MiB read and written"
    yield Measurement("peak_gb_per_s", rate, "GB/s", HIGHER, METHOD_PEAK, BASELINE, "copy", note)


class _Stopwatch:
    """Times calls on a device: in turn, from warm caches or from cold ones."""

    def __init__(self, where: torch.device) -> None:
        """Takes the device; keeps a buffer whose writing leaves nothing else in its caches."""
        self.where = where
        self._timer = _cuda_us if where.type == "cuda" else _cpu_us
        self._buffer = torch.zeros(min(MOST_FLUSHED, 2 * _cache_bytes(where)), dtype=torch.uint8, device=where)

    def warm_and_cold(self, calls: Sequence[Call]) -> tuple[list[Sampled], list[Sampled]]:
        """Each call's times, first warm, then cold."""
        return self.sampled(calls, FEWEST, SAMPLES), self.sampled(calls, COLD_SAMPLES, COLD_SAMPLES, self._flush)

    @torch.no_grad()
    def sampled(self, calls: Sequence[Call], fewest: int, most: int, before: Call | None = None) -> list[Sampled]:
        """Each call's times, sampled in turn: `fewest`, or as many as the budget allows and no more than `most`."""
        for call in calls:
            for _ in range(WARMUP):
                call()
        samples: list[list[float]] = [[] for _ in calls]
        end = time.perf_counter() + BUDGET_S
        while len(samples[0]) < fewest or (len(samples[0]) < most and time.perf_counter() < end):
            for call, taken in zip(calls, samples, strict=True):
                taken.append(self._timer(call, before))
        return [_summary(taken) for taken in samples]

    def _flush(self) -> None:
        self._buffer.add_(1)


def _summary(taken: Sequence[float]) -> Sampled:
    """
    >>> _summary([4.0, 1.0, 2.0, 3.0, 5.0])
    Sampled(us=3.0, best=1.0, iqr=0.6666666666666666)
    """
    low, middle, high = quantiles(taken, n=4, method="inclusive")
    return Sampled(middle, min(taken), (high - low) / middle)


def _cpu_us(call: Call, before: Call | None) -> float:
    if before:
        before()
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def _cuda_us(call: Call, before: Call | None) -> float:
    """Between two events; the GPU sleeps first, so that the host has queued both and all between them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    if before:
        before()
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _cache_bytes(where: torch.device) -> int:
    """The last cache's size: a GPU's L2, or the largest that Linux tells of."""
    if where.type == "cuda":
        facts: Any = torch.cuda.get_device_properties(where)
        return int(facts.L2_cache_size)
    sizes = [file.read_text("utf-8").strip() for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) << 10 for size in sizes if size.endswith("K")), default=CACHE_BYTES)


def linear_shapes(model: Any) -> tuple[Counter[Shape], float]:
    """How often the blocks of a model have each Linear shape [N, K], and which share of their weights is left out.

    Routed experts are: how many rows each one multiplies is up to the router.
    """
    shapes: Counter[Shape] = Counter()
    parts = [part for part in parts_of(model) if part.in_blocks]
    missing = 0
    for part in parts:
        rows, cols = part.shape
        if part.kind == LINEAR and not is_routed_expert(part.name):
            shapes[rows, cols] += 1
        else:
            missing += part.parameters
    return shapes, missing / max(1, sum(part.parameters for part in parts))
