"""How wide a model's numbers are: every Linear's weight and input, and what finer scales would gain.

Taken of the model before it is cast: a histogram over binades, amax and RMS, the largest magnitude of each input
channel, and for a few Linears an error by format and tile, with and without the outlier channels in the sum.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from fp8dash.choose.casts import Cast
from fp8dash.choose.formats import E4M3FN, E5M2, INT8
from fp8dash.choose.records import (
    ACTIVATION,
    BASELINE,
    BINADES,
    NEITHER,
    OUTLIER,
    WEIGHT,
    LadderPoint,
    Measurement,
    Progress,
    TensorProfile,
)
from fp8dash.choose.scaling import BLOCK_128X128, FLOAT32, GROUP_1X32, GROUP_1X128, RCEIL, ROW, TENSOR
from fp8dash.errors import NotFinite
from fp8dash.model.parts import linears_of
from fp8dash.quant.cast import dequantize, quantize
from fp8dash.quant.error import energy, error_of_cast

METHOD = (
    "weights, and Linears' inputs over the first four windows at most, of the unquantized model; binades counted "
    "exactly, squares summed in float64; an outlier channel's amax is over 6 times the median channel's; ladder: one "
    "Linear a projection, its input over the first window, v1"
)
WINDOWS = 4  # at most: each costs a forward pass; one more is taken for the ladder
RANKED = 10  # channels kept of each tensor
CASTS = tuple(
    Cast(fmt, tile, rule)
    for fmt in (E4M3FN, E5M2, INT8)
    for tile, rule in (
        (TENSOR, FLOAT32),
        (ROW, FLOAT32),
        (BLOCK_128X128, FLOAT32),
        (GROUP_1X128, FLOAT32),
        (GROUP_1X32, RCEIL),
    )
)
BLOCK = 1 << 19  # elements looked at at a time: their float32 copies are all that is held beside a tensor
FRACTION_BITS, EXPONENT_BIAS, NOT_FINITE = 23, 127, 255  # of a float32


@dataclass(slots=True)
class Sums:
    """What is counted of one tensor, or of one Linear's input over several passes."""

    cols: int
    rows: int = 0
    zeros: int = 0
    square: float = 0.0
    exponents: Tensor = field(init=False)  # counts by float32's exponent field, [256]
    amaxes: Tensor = field(init=False)  # of each column, float32

    def __post_init__(self) -> None:
        """Starts from nothing."""
        self.exponents, self.amaxes = torch.zeros(256, dtype=torch.int64), torch.zeros(self.cols)

    def add(self, x: Tensor) -> None:
        """Adds a [rows, cols] tensor of at least one row; raises NotFinite."""
        for block in torch.split(x, max(1, BLOCK // self.cols)):
            size = block.detach().to(torch.float32, copy=True).abs_()
            fields = (size.view(torch.int32) >> FRACTION_BITS).flatten()
            counts = torch.bincount(fields, minlength=256).cpu()
            if counts[NOT_FINITE]:
                raise NotFinite("holds NaN or infinity")
            zeros = size.numel() - int(torch.count_nonzero(size))
            counts[0] -= zeros  # the field of zero is that of float32's subnormals
            self.exponents += counts
            self.zeros += zeros
            self.rows += len(block)
            self.square += energy(size)
            self.amaxes = torch.maximum(self.amaxes, size.amax(0).cpu())

    def merge(self, other: "Sums") -> None:
        """Adds another's sums of as many columns."""
        self.rows += other.rows
        self.zeros += other.zeros
        self.square += other.square
        self.exponents += other.exponents
        self.amaxes = torch.maximum(self.amaxes, other.amaxes)

    @property
    def histogram(self) -> tuple[int, ...]:
        """Counts by binade of BINADES; the first has all below it too, the last all above."""
        counts = self.exponents.tolist()
        low, high = BINADES[0] + EXPONENT_BIAS, BINADES[-1] + EXPONENT_BIAS
        return (sum(counts[: low + 1]), *counts[low + 1 : high], sum(counts[high:]))

    def outlier_columns(self) -> Tensor:
        """True for the columns [cols] whose amax is over OUTLIER times the median column's."""
        return self.amaxes > OUTLIER * self.amaxes.quantile(0.5)

    def profile(self, name: str, kind: str) -> TensorProfile:
        """All of it as a record."""
        order = self.amaxes.argsort(descending=True, stable=True)[:RANKED].tolist()
        middle = float(self.amaxes.quantile(0.5))
        ranked = [(c, float(self.amaxes[c]), float(self.amaxes[c]) / middle) for c in order] if middle else []
        rms = math.sqrt(self.square / max(1, self.rows * self.cols))
        outliers = int(self.outlier_columns().sum())
        amax = float(self.amaxes.amax())
        return TensorProfile(
            name, kind, self.rows, self.cols, amax, rms, self.zeros, outliers, self.histogram, tuple(ranked)
        )


class Inputs:
    """What is counted of Linears' inputs; of those that read one tensor, as q, k and v do, it is counted once."""

    def __init__(self) -> None:
        """Starts from nothing."""
        self.by_name: dict[str, Sums] = {}
        self._last: tuple[Tensor, int, Sums] | None = None  # held, so that its memory is nobody else's meanwhile

    def see(self, name: str, x: Tensor) -> None:
        """Adds a pass's [rows, cols] input of one Linear; raises NotFinite."""
        if not self._last or not _is_same(self._last[0], x) or self._last[1] != x._version:
            self._last = x, x._version, counted(f"the input of {name}", x)
        self.by_name.setdefault(name, Sums(x.shape[1])).merge(self._last[2])


def profile(model: Any, windows: Tensor) -> Iterator[Progress | TensorProfile | LadderPoint | Measurement]:
    """Progress, a TensorProfile of every Linear's weight and input, LadderPoints of a few, and the medians.

    Takes a frozen model in evaluation mode and [count, L] token ids, of which the first few windows are used. Raises
    NotFinite, naming the layer.
    """
    few, names = windows[:WINDOWS], [name for name, _ in linears_of(model)]
    steps, weights, inputs = len(few) + 2, dict[str, Sums](), Inputs()
    for name, module in linears_of(model):
        yield Progress("profile", 0, steps, f"weight {len(weights) + 1} of {len(names)}")
        weights[name] = counted(f"{name}.weight", module.weight)
    for index, ids in enumerate(few):
        yield Progress("profile", index + 1, steps, f"window {index + 1} of {len(few)}")
        forward(model, ids, inputs.see)
    seen = {name: inputs.by_name[name] for name in names if name in inputs.by_name}  # no text may reach an expert
    profiles = [sums.profile(name, WEIGHT) for name, sums in weights.items()]
    profiles += [sums.profile(name, ACTIVATION) for name, sums in seen.items()]
    yield from profiles
    yield Progress("profile", steps - 1, steps, "formats and tiles, one Linear a projection")
    yield from _ladders(model, few[0], {name: (weights[name], seen[name]) for name in widest(profiles)})
    yield from _medians(profiles)


def _ladders(model: Any, ids: Tensor, chosen: Mapping[str, tuple[Sums, Sums]]) -> Iterator[LadderPoint]:
    """The ladders of the chosen Linears, whose weight and input were counted; inputs over ids [L]."""
    read: dict[str, Tensor] = {}
    forward(model, ids, lambda name, x: read.update({name: x.clone()}) if name in chosen else None)
    for name, (weight, inputs) in chosen.items():
        module = model.get_submodule(name)
        if module is not model.get_output_embeddings():  # large, and kept by nearly every recipe
            yield from ladder(name, WEIGHT, module.weight, weight.outlier_columns())
        if name in read:  # a few tokens may reach an expert that these do not
            yield from ladder(name, ACTIVATION, read[name], inputs.outlier_columns())


@torch.no_grad()
def forward(model: Any, ids: Tensor, tell: Callable[[str, Tensor], None]) -> None:
    """One forward pass over ids [L]; `tell` is given each Linear's name and input [L, in_features]."""
    with _told(model, tell):
        model(input_ids=ids[None].to(model.device), use_cache=False)


def widest(profiles: list[TensorProfile]) -> list[str]:
    """Of each projection the Linear whose input has the largest amax over RMS, in the model's order."""
    best: dict[str, TensorProfile] = {}
    for tensor in profiles:
        part = tensor.name.rsplit(".", 1)[-1]
        if tensor.kind == ACTIVATION and (part not in best or (tensor.spread or 0) > (best[part].spread or 0)):
            best[part] = tensor
    return [tensor.name for tensor in best.values()]


@torch.no_grad()
def ladder(name: str, kind: str, x: Tensor, outliers: Tensor) -> Iterator[LadderPoint]:
    """What each of CASTS does to a [rows, cols] tensor; bulk: outlier columns [cols] share scales, but are not
    summed."""
    bulk = ~outliers.to(x.device)
    for cast in CASTS:
        error = error_of_cast(x, cast)
        whole = not outliers.any()
        bulk_db = error.sqnr_db if whole else sqnr_db(x[:, bulk], dequantize(quantize(x, cast))[:, bulk])
        bits = cast.bits_per_element(*x.shape)
        yield LadderPoint(name, kind, cast.text, error.sqnr_db, bulk_db, error.flushed_share, error.clipped_share, bits)


def sqnr_db(x: Tensor, y: Tensor) -> float | None:
    """Energy of x over that of x - y in dB, sums in float64; None where one of them is nothing."""
    signal, noise = energy(x.float()), energy(x.float() - y)
    return 10 * math.log10(signal / noise) if signal and noise else None


@contextmanager
def _told(model: Any, tell: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within, each Linear's input is told."""
    hooks = [module.register_forward_pre_hook(_telling(name, tell)) for name, module in linears_of(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _telling(name: str, tell: Callable[[str, Tensor], None]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    """A hook before a Linear; an input without a token, as an expert's may be, is not told."""
    return lambda _module, args: tell(name, args[0].reshape(-1, args[0].shape[-1])) if args[0].numel() else None


def counted(what: str, x: Tensor) -> Sums:
    """What is counted of a [rows, cols] tensor; raises NotFinite, naming it."""
    sums = Sums(x.shape[1])
    try:
        sums.add(x)
    except NotFinite as error:
        raise NotFinite(f"{what} {error}: the model overflows in bfloat16, or is damaged.") from error
    return sums


def _is_same(a: Tensor, b: Tensor) -> bool:
    """True where both are the same memory, seen alike."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _medians(profiles: list[TensorProfile]) -> Iterator[Measurement]:
    """The median amax over RMS of weights and of activations, the widest in the note."""
    for kind in (WEIGHT, ACTIVATION):
        spreads: Mapping[str, float] = {p.name: p.spread for p in profiles if p.kind == kind and p.spread is not None}
        name = f"{kind}_amax_over_rms"
        if not spreads:
            yield Measurement(name, None, "× RMS", NEITHER, METHOD, BASELINE, note="all are zeros")
            continue
        most = max(spreads, key=lambda layer: spreads[layer])
        note = f"median of {len(spreads)} layers; widest {most}: {spreads[most]:.3g}"
        yield Measurement(name, median(spreads.values()), "× RMS", NEITHER, METHOD, BASELINE, note=note)
