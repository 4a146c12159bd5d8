"""What casting cost each weight, and how much of the model was cast."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fp8dash.choose.records import EMBEDDING, HEAD, HIGHER, LOWER, NEITHER, NORM, OTHER, Layer, Measurement, Progress
from fp8dash.model.swap import KEPT, Swap
from fp8dash.quant.error import CastError

METHOD = "error of decoded float32 codes, sums in float64, v1"


@dataclass(slots=True)
class _Coverage:
    """How many parameters, and how many of those that take part in products, were cast."""

    parameters: int = 0
    cast: int = 0
    products: int = 0
    cast_products: int = 0
    cast_bits: float = 0.0
    kept_bits: float = 0.0


def weight_error(swaps: Iterable[Swap], total: int) -> Iterator[Progress | Layer | Measurement]:
    """Progress and a Layer for each of `total` swaps as it happens, then the model's measurements.

    Raises what the swaps raise.
    """
    whole, coverage = CastError(), _Coverage()
    for index, swap in enumerate(swaps):
        yield Progress("quantize", index, total, swap.name)
        if swap.error:
            whole.add(swap.error)
        layer = _layer(swap)
        _count(coverage, swap, layer.bits_per_weight)
        yield layer
    yield from _measurements(whole, coverage)


def _layer(swap: Swap) -> Layer:
    rows, cols = swap.shape
    group = {"lm_head": HEAD, "embeddings": EMBEDDING, "norms": NORM}.get(swap.group, OTHER)
    if swap.cast is None or swap.error is None:
        return Layer(swap.name, rows, cols, "", swap.backend, swap.reason, float(swap.bits), group=group)
    bits, error = swap.cast.bits_per_element(rows, cols), swap.error
    return Layer(
        swap.name, rows, cols, swap.cast.text, swap.backend, swap.reason, bits,
        error.sqnr_db, error.relative_error, error.flushed_share, error.clipped_share, group,
    )  # fmt: skip


def _count(coverage: _Coverage, swap: Swap, bits: float) -> None:
    size = math.prod(swap.shape)
    product = size if swap.group in ("blocks", "lm_head") else 0
    coverage.products += product
    if swap.backend != KEPT:
        coverage.cast_products += product
    if swap.cast is not None:
        coverage.cast += size
        coverage.cast_bits += size * bits
    elif not swap.again:  # a tied head is stored once, as the embedding
        coverage.kept_bits += size * bits
    coverage.parameters += size if swap.cast is not None or not swap.again else 0


def _measurements(error: CastError, coverage: _Coverage) -> Iterator[Measurement]:
    def measured(name: str, value: float | None, unit: str, better: str, note: str = "") -> Measurement:
        return Measurement(name, value, unit, better, METHOD, "arithmetic", note=note)

    whole = coverage.cast_bits + coverage.kept_bits
    bits = coverage.cast_bits / coverage.cast if coverage.cast else coverage.kept_bits / coverage.parameters
    yield measured("bits_per_weight", bits, "bits", LOWER, "cast weights, scales included")
    yield measured("model_bits_per_weight", whole / coverage.parameters, "bits", LOWER, "all weights")
    yield measured("model_bytes", whole / 8, "bytes", LOWER)
    yield measured("coverage", coverage.cast / coverage.parameters, "share", NEITHER, "of the parameters")
    share = coverage.cast_products / coverage.products if coverage.products else 0.0
    yield measured("gemm_coverage", share, "share", NEITHER, "of the GEMM FLOPs")
    missing = "" if coverage.cast else "no weight was cast"
    yield measured("weight_sqnr_db", error.sqnr_db, "dB", HIGHER, missing)
    yield measured("weight_flushed", error.flushed_share, "share", LOWER)
    yield measured("weight_clipped", error.clipped_share, "share", LOWER)


def backend_of(layers: Iterable[Layer], *others: str) -> str:
    """What ran the cast layers, and other cast parts by their backends: baseline, native, emulated or mixed."""
    backends = {layer.backend for layer in layers} - {KEPT} | set(others)
    return "mixed" if len(backends) > 1 else next(iter(backends), "baseline")
