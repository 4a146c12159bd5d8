"""Times of a model's own Linear shapes: the product in the model's precision beside the cast and the native product.

Operands are random (zeros draw less power and can run faster). The kinds are timed in turn, sample by sample, so that
a slow moment hits them alike; each figure is a median. A layer without a native kernel has no cast time: emulation
says nothing about speed.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8dash.choose.hardware import Device, native_path
from fp8dash.choose.hardware import Path as KernelPath
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.records import HIGHER, GemmPoint, Measurement, Progress
from fp8dash.model.load import DTYPE
from fp8dash.quant.cast import codes_by, codes_of, quantize, scales_of
from fp8dash.quant.matmul import multiply

METHOD = "median over interleaved samples, random operands, v1"
SAMPLES, WARMUP = 25, 3
BUDGET_S = 0.4  # for one shape at one M: slow shapes take fewer samples, never under FEWEST
FEWEST = 5

Shape = tuple[int, int]  # N, K


def gemm(
    shapes: Counter[Shape], recipe: Recipe, ms: Sequence[int], device: Device, where: torch.device, seed: int
) -> Iterator[Progress | GemmPoint | Measurement]:
    """Progress and a point for each shape and M, then the speed-up of the model's Linears at each M."""
    points: list[GemmPoint] = []
    work = [(m, shape) for m in sorted(ms) for shape in shapes]
    for index, (m, (n, k)) in enumerate(work):
        yield Progress("gemm", index, len(work), f"M={m} N={n} K={k}")
        points.append(_point(m, n, k, shapes[n, k], recipe, native_path(recipe, n, k, device), where, seed))
        yield points[-1]
    for m in sorted(ms):
        yield _speedup([p for p in points if p.m == m], recipe, f"M={m}")
    yield _speedup([p for p in points if p.m == max(ms)], recipe, "")


def _point(
    m: int, n: int, k: int, count: int, recipe: Recipe, path: KernelPath, where: torch.device, seed: int
) -> GemmPoint:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator).to(where, DTYPE)
    w = torch.randn(n, k, generator=generator).to(where, DTYPE)
    if not path.kernel or not recipe.weights or not recipe.activations:
        reason = path.reason if recipe.casts_linears else ""
        (baseline,) = _medians([lambda: F.linear(x, w)], where)
        return GemmPoint(m, n, k, count, baseline, None, None, "" if recipe.casts_linears else "bf16", reason)
    activations, kernel = recipe.activations, path.kernel
    weight, codes = quantize(w, recipe.weights), quantize(x, activations)
    made = scales_of(x, activations) if activations.is_observed else None  # beforehand: not part of the cast
    calls: list[Callable[[], object]] = [
        lambda: F.linear(x, w),
        lambda: codes_of(x, activations) if made is None else codes_by(x, *made, activations),
        lambda: multiply(codes, weight, kernel, DTYPE),
    ]
    baseline, cast, product = _medians(calls, where)
    return GemmPoint(m, n, k, count, baseline, cast, product, kernel, path.reason)


def _speedup(points: list[GemmPoint], recipe: Recipe, label: str) -> Measurement:
    """BF16 time over cast + product time, each Linear counted as often as the model has it."""
    note = f"M={points[0].m}"
    if not recipe.casts_linears:
        return Measurement("gemm_speedup", 1.0, "x BF16", HIGHER, METHOD, "baseline", label, f"{note}, by definition")
    if any(point.matmul_us is None for point in points):
        missing = next(point.reason for point in points if point.matmul_us is None)
        return Measurement("gemm_speedup", None, "x BF16", HIGHER, METHOD, "emulated", label, missing)
    ours = sum(p.count * ((p.cast_us or 0.0) + (p.matmul_us or 0.0)) for p in points)
    theirs = sum(p.count * p.baseline_us for p in points)
    return Measurement("gemm_speedup", theirs / ours, "x BF16", HIGHER, METHOD, "native", label, note)


@torch.no_grad()
def _medians(calls: list[Callable[[], object]], where: torch.device) -> list[float]:
    """Median microseconds of each call, sampled in turn."""
    timer = _cuda_us if where.type == "cuda" else _cpu_us
    for call in calls:
        for _ in range(WARMUP):
            call()
    samples: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + BUDGET_S
    while len(samples[0]) < FEWEST or (len(samples[0]) < SAMPLES and time.perf_counter() < end):
        for call, taken in zip(calls, samples, strict=True):
            taken.append(timer(call))
    return [median(taken) for taken in samples]


def _cpu_us(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def _cuda_us(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def linear_shapes(weights: Sequence[Tensor]) -> Counter[Shape]:
    """How often a model has each Linear shape [N, K]."""
    return Counter((int(w.shape[0]), int(w.shape[1])) for w in weights)
