"""Scales made before an operand is seen: static ones from calibration text, delayed ones from earlier passes. Torch
only.

An observer records what a scale may be made from: the amax of each pass and, for percentiles and least error, the exact
count of every magnitude; bfloat16 has 32,640 of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8dash.choose.casts import Cast
from fp8dash.choose.formats import E4M3FN
from fp8dash.choose.scaling import ERROR_POWER, SHRINK_STEP, SHRINKS, TENSOR
from fp8dash.errors import NotFinite
from fp8dash.quant.cast import factors_under, rounded, scale_from_amax, tile_amax

MAGNITUDES = 1 << 15  # bfloat16 bit patterns without their sign


class Observer:
    """Records the activations at one place in a model: the amax of each pass, and how often each magnitude occurred.

    Magnitudes are counted in bfloat16, which rounds wider operands.
    """

    def __init__(self, *, counts_magnitudes: bool = False) -> None:
        """Starts empty. Counting costs a pass over the operand and 256 KiB."""
        self.amaxes: list[Tensor] = []  # [1, 1] each, float32
        self.counts: Tensor | None = None  # [MAGNITUDES]
        self._counts_magnitudes = counts_magnitudes

    def see(self, x: Tensor) -> None:
        """Records one operand [rows, cols]; raises NotFinite."""
        amax = tile_amax(x, TENSOR)
        if not torch.isfinite(amax).all():
            raise NotFinite(
                "The calibration text produces an activation with NaN or infinity: no scale can be made from it."
            )
        self.amaxes.append(amax)
        if self._counts_magnitudes:
            bits = x.to(torch.bfloat16).view(torch.int16).flatten().bitwise_and(MAGNITUDES - 1)
            counts = torch.bincount(bits, minlength=MAGNITUDES)
            self.counts = counts if self.counts is None else self.counts.add_(counts)

    @property
    def amax(self) -> Tensor:
        """The largest magnitude of all passes, [1, 1]; 0 if there were none."""
        return torch.stack(self.amaxes).amax(0) if self.amaxes else torch.zeros(1, 1)

    def static_scale(self, cast: Cast) -> Tensor:
        """The scale [1, 1] of a static cast."""
        if cast.when.by == "amax" or self.counts is None:
            return scale_from_amax(self.amax, cast)
        if cast.when.by == "mse":
            return _least_error(self.amax, self.counts, cast)
        return scale_from_amax(_percentile(self.counts, float(cast.when.by[1:])), cast)


class StaticScale:
    """One scale for all passes, and the share of elements beyond its largest code."""

    def __init__(self, scale: Tensor, cast: Cast) -> None:
        """Takes the scale [1, 1]."""
        self.cast = cast
        self._scale = scale
        self._beyond: Tensor | None = None
        self._seen = 0

    def of(self, x: Tensor) -> Tensor:
        """The scale [1, 1] of an operand [rows, cols], whose elements are counted."""
        self._count(x, self._scale)
        return self._scale

    def rewind(self) -> None:
        """Resets the counts."""
        self._beyond, self._seen = None, 0

    @property
    def present(self) -> float:
        """The scale of the next operand."""
        return float(self._scale)

    @property
    def clipped(self) -> float | None:
        """The share of counted elements beyond the largest code; None if there were none."""
        return float(self._beyond) / self._seen if self._beyond is not None else None

    @property
    def elements(self) -> int:
        """How many elements were counted."""
        return self._seen

    def _count(self, x: Tensor, scale: Tensor) -> None:
        beyond = torch.count_nonzero(x.abs() > scale * self.cast.format.max)  # stays on the device: no waiting
        self._beyond = beyond if self._beyond is None else self._beyond + beyond
        self._seen += x.numel()


class GivenOuter(StaticScale):
    """Tiles' scales as they come, under an outer scale that was made beforehand: NVFP4's activations in checkpoints."""

    def of(self, x: Tensor) -> Tensor:
        """The whole factors [rows, grid cols] of an operand [rows, cols], whose elements are counted."""
        self._count(x, self._scale * E4M3FN.max)  # what the largest tile scale could still hold
        return factors_under(x, self._scale, self.cast)


class DelayedScale(StaticScale):
    """A scale from the amax of earlier passes: Transformer Engine's delayed scaling.

    Each pass is cast by the present scale; its amax then joins the history, from which the next scale is made. An
    amax of zero, or one that is not finite, leaves the scale as it was; the first is 1.
    """

    def __init__(self, warmed_by: Sequence[Tensor], cast: Cast, device: torch.device) -> None:
        """Takes the amaxes [1, 1] of the passes before the first, oldest first."""
        self._warmed_by, self._device = warmed_by, device
        super().__init__(torch.ones(1, 1, device=device), cast)
        self.rewind()

    def of(self, x: Tensor) -> Tensor:
        """The scale [1, 1] of an operand [rows, cols]; its amax counts from the next one on."""
        scale = self._scale
        self._count(x, scale)
        self._join(tile_amax(x, TENSOR))
        return scale

    def rewind(self) -> None:
        """Resets to the state after calibration."""
        super().rewind()
        self._scale = torch.ones(1, 1, device=self._device)
        self._history = torch.zeros(self.cast.when.history, device=self._device)  # a ring
        self._joined = 0
        for amax in self._warmed_by:
            self._join(amax)

    def _join(self, amax: Tensor) -> None:
        when = self.cast.when
        self._history[self._joined % when.history] = amax[0, 0]
        self._joined += 1
        picked = (amax if when.by == "recent" else self._history.amax().view(1, 1)) * 2.0**when.margin
        usable = torch.isfinite(picked) & (picked > 0)
        self._scale = torch.where(usable, scale_from_amax(picked, self.cast), self._scale)


def _percentile(counts: Tensor, percent: float) -> Tensor:
    """The least magnitude [1, 1] that `percent` of all elements do not exceed (nearest rank), float32."""
    ranks = counts.cumsum(0)
    wanted = torch.ceil(ranks[-1].double() * (percent / 100)).clamp_min(1)
    index = torch.searchsorted(ranks.double(), wanted.view(1))
    return _magnitudes(counts.device)[index].view(1, 1)


def _least_error(amax: Tensor, counts: Tensor, cast: Cast) -> Tensor:
    """The scale [1, 1], shrunk by up to 20 %, of least sum |error|^2.4 over all elements; the largest of equals."""
    there = counts > 0
    x, weights = _magnitudes(counts.device)[there][None], counts[there].double()
    best, least = scale_from_amax(amax, cast), torch.inf
    unit = best.clone()  # errors are taken in it, so that no power of them underflows
    for step in range(SHRINKS):
        scale = scale_from_amax(amax * (1 - step * SHRINK_STEP), cast)
        errors = ((rounded(x, scale, cast) - x) / unit).abs_().double().pow_(ERROR_POWER)
        error = float((errors[0] * weights).sum())
        if error < least:
            best, least = scale, error
    return best


def _magnitudes(device: torch.device) -> Tensor:
    """The value of each bfloat16 bit pattern without its sign, float32 [MAGNITUDES]; the last are inf and NaN."""
    return torch.arange(MAGNITUDES, dtype=torch.int16, device=device).view(torch.bfloat16).float()
