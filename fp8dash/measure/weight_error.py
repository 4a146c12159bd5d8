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
    compared, clipping_known = True, True
    for index, swap in enumerate(swaps):
        yield Progress("quantize", index, total, swap.part.name)
        if swap.text:
            compared = compared and swap.error is not None
            clipping_known = clipping_known and swap.bits is None
            whole.add(swap.error or CastError())
        layer = _layer(swap)
        _count(coverage, swap, layer.bits_per_weight, active)
        yield layer
    uncompared = "" if compared else "no baseline to compare the weights with"
    yield from _measurements(whole if compared else None, coverage, uncompared, clipping_known=clipping_known)


def _layer(swap: Swap) -> Layer:
    part, error = swap.part, swap.error
    rows, cols = part.shape
    if not swap.text:
        return Layer(
            part.name, rows, cols, "", swap.backend, swap.reason, float(part.bits), group=part.group, tied=part.tied
        )
    is_stored = swap.bits is not None
    return Layer(
        name=part.name,
        rows=rows,
        cols=cols,
        cast=swap.text,
        backend=swap.backend,
        reason=swap.reason,
        bits_per_weight=swap.bits or (swap.cast.bits_per_element(rows, cols) if swap.cast else float(part.bits)),
        sqnr_db=error.sqnr_db if error else None,
        relative_error=error.relative_error if error else None,
        flushed=error.flushed_share if error else None,
        clipped=error.clipped_share if error and not is_stored else None,
        group=part.group,
        tied=part.tied,
    )


def _count(coverage: _Coverage, swap: Swap, bits: float, active: float) -> None:
    size, is_kept = swap.part.parameters, swap.backend == KEPT
    coverage.parameters += size
    if swap.text:
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


def _measurements(
    error: CastError | None, coverage: _Coverage, uncompared: str, *, clipping_known: bool
) -> Iterator[Measurement]:
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
    missing = uncompared or ("" if coverage.cast else "no weight was cast")
    yield measured("weight_sqnr_db", error.sqnr_db if error else None, "dB", HIGHER, missing)
    yield measured("weight_flushed", error.flushed_share if error else None, "share", LOWER, uncompared)
    clipped = error.clipped_share if error and clipping_known else None
    unclipped = "" if clipping_known else "what was clipped when the checkpoint was made is not stored"
    yield measured("weight_clipped", clipped, "share", LOWER, unclipped)


def backend_of(layers: Iterable[Layer], *others: RanBy) -> RanBy:
    """What ran the cast layers, and other cast parts by their backends: baseline, native, emulated or mixed."""
    backends = {layer.backend for layer in layers} - {KEPT} | set(others)
    return MIXED if len(backends) > 1 else next(iter(backends), BASELINE)
