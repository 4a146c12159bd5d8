"""What casting cost each weight, and how much of the model was cast."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fp8dash.choose.models.groups import is_routed_expert
from fp8dash.choose.records import (
    ARITHMETIC,
    BASELINE,
    HEAD,
    HIGHER,
    KEPT,
    LOWER,
    MIXED,
    NEITHER,
    Better,
    Layer,
    Measurement,
    Progress,
    RanBy,
)
from fp8dash.model.swap import Swap
from fp8dash.quant.error import CastError

METHOD = "error of decoded float32 codes, sums in float64; every parameter counted once, v2"


@dataclass(slots=True)
class _Coverage:
    """How many parameters were cast, of those in the blocks' matrices, and of what a token is multiplied by."""

    parameters: int = 0
    cast: int = 0
    cast_bits: float = 0.0
    kept_bits: float = 0.0
    blocks: int = 0
    uncast_blocks: int = 0
    products: float = 0.0
    cast_products: float = 0.0


def weight_error(swaps: Iterable[Swap], total: int, active: float = 1.0) -> Iterator[Progress | Layer | Measurement]:
    """Progress and a Layer for each of `total` swaps as it happens, then the model's measurements.

    `active` is the share of the routed experts that one token meets. Raises what the swaps raise.
    """
    whole, coverage = CastError(), _Coverage()
    for index, swap in enumerate(swaps):
        yield Progress("quantize", index, total, swap.part.name)
        if swap.error:
            whole.add(swap.error)
        layer = _layer(swap)
        _count(coverage, swap, layer.bits_per_weight, active)
        yield layer
    yield from _measurements(whole, coverage)


def _layer(swap: Swap) -> Layer:
    part, error = swap.part, swap.error
    rows, cols = part.shape
    if swap.cast is None or error is None:
        return Layer(
            part.name, rows, cols, "", swap.backend, swap.reason, float(part.bits), group=part.group, tied=part.tied
        )
    return Layer(
        name=part.name,
        rows=rows,
        cols=cols,
        cast=swap.cast.text,
        backend=swap.backend,
        reason=swap.reason,
        bits_per_weight=swap.cast.bits_per_element(rows, cols),
        sqnr_db=error.sqnr_db,
        relative_error=error.relative_error,
        flushed=error.flushed_share,
        clipped=error.clipped_share,
        group=part.group,
        tied=part.tied,
    )


def _count(coverage: _Coverage, swap: Swap, bits: float, active: float) -> None:
    size, is_kept = swap.part.parameters, swap.backend == KEPT
    coverage.parameters += size
    if swap.cast is not None:
        coverage.cast += size
        coverage.cast_bits += size * bits
    else:
        coverage.kept_bits += size * bits
    if swap.part.in_blocks:
        coverage.blocks += size
        coverage.uncast_blocks += size * is_kept
    if swap.part.in_blocks or swap.part.group == HEAD or swap.part.tied:
        product = size * (active if is_routed_expert(swap.part.name) else 1.0)
        coverage.products += product
        coverage.cast_products += product * (not is_kept)


def _measurements(error: CastError, coverage: _Coverage) -> Iterator[Measurement]:
    def measured(name: str, value: float | None, unit: str, better: Better, note: str = "") -> Measurement:
        return Measurement(name, value, unit, better, METHOD, ARITHMETIC, note=note)

    whole = coverage.cast_bits + coverage.kept_bits
    bits = coverage.cast_bits / coverage.cast if coverage.cast else coverage.kept_bits / coverage.parameters
    yield measured("bits_per_weight", bits, "bits", LOWER, "cast weights, scales included")
    yield measured("model_bits_per_weight", whole / coverage.parameters, "bits", LOWER, "all weights")
    yield measured("model_bytes", whole / 8, "bytes", LOWER)
    yield measured("coverage", coverage.cast / coverage.parameters, "share", NEITHER, "of the parameters")
    share = coverage.cast_products / coverage.products if coverage.products else 0.0
    yield measured("gemm_coverage", share, "share", NEITHER, "of the GEMM FLOPs")
    if coverage.cast_products and coverage.blocks:
        uncast = coverage.uncast_blocks / coverage.blocks
        note = "of the blocks’ matrix weights: neither they nor their inputs were cast"
        yield measured("uncast_share", uncast, "share", LOWER, note)
    missing = "" if coverage.cast else "no weight was cast"
    yield measured("weight_sqnr_db", error.sqnr_db, "dB", HIGHER, missing)
    yield measured("weight_flushed", error.flushed_share, "share", LOWER)
    yield measured("weight_clipped", error.clipped_share, "share", LOWER)


def backend_of(layers: Iterable[Layer], *others: RanBy) -> RanBy:
    """What ran the cast layers, and other cast parts by their backends: baseline, native, emulated or mixed."""
    backends = {layer.backend for layer in layers} - {KEPT} | set(others)
    return MIXED if len(backends) > 1 else next(iter(backends), BASELINE)
