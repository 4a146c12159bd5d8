"""What casting cost each weight, and how much of the model was cast."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8dash.choose.records import HIGHER, LOWER, NEITHER, Layer, Measurement, Progress
from fp8dash.model.swap import KEPT, Swap
from fp8dash.quant.cast import Quantized, dequantize, spread

METHOD = "error of decoded float32 codes, sums in float64, v1"
CHUNK = 1 << 22  # weights compared at a time
ROUNDING = 1 + 2**-20  # amax / (amax / max) may exceed max by float32's rounding: that is no clipping


@dataclass(slots=True)
class Sums:
    """Sums over elements: energies, and counts of flushed, clipped and non-zero ones."""

    signal: float = 0.0
    noise: float = 0.0
    flushed: int = 0
    clipped: int = 0
    nonzero: int = 0
    elements: int = 0

    def add(self, other: "Sums") -> None:
        """Adds another's sums."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def sqnr_db(self) -> float | None:
        """Signal over noise in dB; None where there is no noise or no signal."""
        return 10 * math.log10(self.signal / self.noise) if self.signal and self.noise else None

    @property
    def relative_error(self) -> float:
        """Norm of the error over the norm of the weight; 0 for a weight of zeros."""
        return math.sqrt(self.noise / self.signal) if self.signal else 0.0


@dataclass(slots=True)
class _Coverage:
    """How many parameters, and how many of those that take part in products, were cast."""

    parameters: int = 0
    cast: int = 0
    products: int = 0
    cast_products: int = 0
    cast_bits: float = 0.0
    kept_bits: float = 0.0
    backends: set[str] = field(default_factory=set)


def weight_error(swaps: Iterable[Swap], total: int) -> Iterator[Progress | Layer | Measurement]:
    """Progress and a Layer for each of `total` swaps as it happens, then the model's measurements.

    Raises what the swaps raise.
    """
    sums, coverage = Sums(), _Coverage()
    seen: set[int] = set()
    for index, swap in enumerate(swaps):
        yield Progress("quantize", index, total, swap.name)
        own = errors_of(swap.before, swap.codes) if swap.codes else None
        if own:
            sums.add(own)
        layer = _layer(swap, own)
        tied = swap.codes is None and swap.before.data_ptr() in seen  # a tied head is stored once, as the embedding
        seen.add(swap.before.data_ptr())
        _count(coverage, swap, layer.bits_per_weight, tied)
        yield layer
    yield from _measurements(sums, coverage)


def errors_of(before: Tensor, codes: Quantized) -> Sums:
    """What the codes of a [rows, cols] tensor lost of it."""
    sums = Sums()
    rows = max(1, CHUNK // before.shape[1])
    scales = spread(codes.factors, codes.cast.tile, *before.shape).expand(before.shape)
    after = dequantize(codes)
    for start in range(0, len(before), rows):
        part = slice(start, start + rows)
        weight = before[part].float()
        sums.signal += float(weight.square().sum(dtype=torch.float64))
        sums.noise += float((weight - after[part]).square().sum(dtype=torch.float64))
        sums.flushed += int(((weight != 0) & (after[part] == 0)).sum())
        sums.clipped += int((weight.abs() > scales[part] * (codes.cast.format.max * ROUNDING)).sum())
        sums.nonzero += int((weight != 0).sum())
        sums.elements += weight.numel()
    return sums


def _layer(swap: Swap, errors: Sums | None) -> Layer:
    rows, cols = swap.before.shape
    if swap.codes is None or errors is None:
        bits = 8.0 * swap.before.element_size()
        return Layer(swap.name, rows, cols, "", swap.backend, swap.reason, bits)
    cast, flushed = swap.codes.cast, errors.flushed / max(1, errors.nonzero)
    return Layer(
        swap.name, rows, cols, cast.text, swap.backend, swap.reason, cast.bits_per_element(rows, cols),
        errors.sqnr_db, errors.relative_error, flushed, errors.clipped / errors.elements,
    )  # fmt: skip


def _count(coverage: _Coverage, swap: Swap, bits: float, tied: bool) -> None:
    size = swap.before.numel()
    product = size if swap.group in ("blocks", "lm_head") else 0
    coverage.products += product
    if swap.backend != KEPT:
        coverage.backends.add(swap.backend)
        coverage.cast_products += product
    if swap.codes is not None:
        coverage.cast += size
        coverage.cast_bits += size * bits
    elif not tied:
        coverage.kept_bits += size * bits
    coverage.parameters += 0 if tied else size


def _measurements(sums: Sums, coverage: _Coverage) -> Iterator[Measurement]:
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
    yield measured("weight_sqnr_db", sums.sqnr_db, "dB", HIGHER, missing)
    yield measured("weight_flushed", sums.flushed / max(1, sums.nonzero), "share", LOWER)
    yield measured("weight_clipped", sums.clipped / max(1, sums.elements), "share", LOWER)


def backend_of(layers: Iterable[Layer]) -> str:
    """What ran the cast layers: baseline, native, emulated or mixed."""
    backends = {layer.backend for layer in layers} - {KEPT}
    return "mixed" if len(backends) > 1 else next(iter(backends), "baseline")
