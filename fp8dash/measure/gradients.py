"""What E4M3 and E5M2 would cost the gradients: each Linear's output gradient, cast as FP8 training casts it.

arXiv 2209.05433 section 3 gives gradients E5M2 for its range; arXiv 2412.19437 section 3.3.2 gives them E4M3 under
fine scales. This measures which of the two a model's own gradients want. Taken of the model before it is cast, one
window at a time: a gradient is measured as the backward pass makes it, and let go.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fp8dash.choose.casts import Cast
from fp8dash.choose.formats import E4M3FN, E5M2
from fp8dash.choose.records import BASELINE, HIGHER, LOWER, NEITHER, Better, Measurement, Progress
from fp8dash.choose.scaling import TENSOR
from fp8dash.errors import NotFinite
from fp8dash.model.parts import linears_of
from fp8dash.quant.error import CastError, error_of_cast

METHOD = (
    "output gradients of a window's mean next-token loss, backward in the model's precision, one float32 scale "
    "per tensor and window, sums over windows in float64, v1"
)
WINDOWS = 4  # at most: each costs a forward and a backward pass, and holds all activations meanwhile
CASTS = tuple(Cast(fmt, TENSOR) for fmt in (E4M3FN, E5M2))


@dataclass(slots=True)
class LayerGradient:
    """One Linear's output gradient over all windows; its errors by format name."""

    amax: float = 0.0
    errors: dict[str, CastError] = field(default_factory=lambda: {cast.format.name: CastError() for cast in CASTS})

    @property
    def whole(self) -> CastError:
        """The sums that do not depend on a format: signal, and counts of elements."""
        return next(iter(self.errors.values()))

    @property
    def rms(self) -> float:
        """Root of the mean square; 0 where no gradient came."""
        return math.sqrt(self.whole.signal / max(1, self.whole.elements))

    @property
    def missing(self) -> str:
        """Why it has no errors, or nothing."""
        if not self.whole.elements:
            return "no gradient reaches it"
        return "" if self.whole.signal else "its gradient is zero"


def gradients(model: Any, windows: Tensor) -> Iterator[Progress | Measurement]:
    """Progress, then measurements of every Linear by its name and, unlabelled, the median over them.

    Takes a frozen model in evaluation mode and [count, L] token ids, of which the first few windows are used. Raises
    NotFinite, naming the layer.
    """
    layers = {name: LayerGradient() for name, _ in linears_of(model)}
    few = windows[:WINDOWS]
    for index, ids in enumerate(few):
        yield Progress("gradients", index, len(few), f"window {index + 1} of {len(few)}")
        with watched(model, lambda name, gradient: _add(layers[name], name, gradient)):
            backward(model, ids)
    rows = [row for name, layer in layers.items() for row in _rows(name, layer)]
    yield from _medians(rows)
    yield from rows


@torch.enable_grad()
def backward(model: Any, ids: Tensor) -> None:
    """The backward pass of a window's mean loss, nats per token, from ids [L]; raises NotFinite. Keeps nothing."""
    ids = ids.to(model.device)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]  # [L - 1, vocabulary]
    loss = cross_entropy(logits.float(), ids[1:])
    if not torch.isfinite(loss):
        raise NotFinite("The unquantized model's loss is NaN or infinity: it overflows in bfloat16, or is damaged.")
    loss.backward()  # type: ignore[no-untyped-call]


@contextmanager
def watched(model: Any, tell: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within, `tell` is given each Linear's name and output gradient, as the backward pass makes it.

    The embeddings' output is made to require a gradient, so that a frozen model has a graph to walk.
    """
    hooks = [model.get_input_embeddings().register_forward_hook(lambda _m, _x, out: out.requires_grad_(True))]
    hooks += [module.register_forward_hook(_telling(name, tell)) for name, module in linears_of(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _telling(name: str, tell: Callable[[str, Tensor], None]) -> Callable[[nn.Module, Any, Tensor], None]:
    """A forward hook that has the output's gradient told; on a tensor, a later in-place change does no harm."""

    def hook(_module: nn.Module, _inputs: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: tell(name, gradient))  # type: ignore[no-untyped-call]

    return hook


def _add(layer: LayerGradient, name: str, gradient: Tensor) -> None:
    """Adds one gradient [..., out] to its layer's sums; raises NotFinite."""
    gradient = gradient.reshape(-1, gradient.shape[-1])  # [tokens, out]
    amax = float(gradient.abs().amax())
    if not math.isfinite(amax):
        raise NotFinite(f"The output gradient of {name} holds NaN or infinity: it overflows in bfloat16.")
    layer.amax = max(layer.amax, amax)
    for cast in CASTS:
        layer.errors[cast.format.name].add(error_of_cast(gradient, cast))


def _rows(name: str, layer: LayerGradient) -> Iterator[Measurement]:
    """All measurements of one layer; None with a note where there is no gradient."""

    def measured(what: str, value: float | None, unit: str, better: Better) -> Measurement:
        value, note = (None, layer.missing) if layer.missing else (value, "")
        note = "no error to divide by" if value is None and not note else note
        return Measurement(f"gradient_{what}", value, unit, better, METHOD, BASELINE, name, note)

    for fmt, sums in layer.errors.items():
        yield measured(f"sqnr_db_{fmt}", sums.sqnr_db, "dB", HIGHER)
        yield measured(f"flushed_{fmt}", sums.flushed_share, "share", LOWER)
        yield measured(f"clipped_{fmt}", sums.clipped_share, "share", LOWER)
    yield measured("amax", layer.amax, "nats", NEITHER)
    yield measured("rms", layer.rms, "nats", NEITHER)


def _medians(rows: list[Measurement]) -> Iterator[Measurement]:
    """One unlabelled measurement for each name: the median over layers, the worst layer in its note."""
    by_name: dict[str, list[Measurement]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    for name, of_name in by_name.items():
        values = {row.label: row.value for row in of_name if row.value is not None}
        first = of_name[0]
        value, note = (median(values.values()), _spread(values, first)) if values else (None, "no layer has a gradient")
        yield Measurement(name, value, first.unit, first.better, METHOD, first.backend, note=note)


def _spread(values: Mapping[str, float], of: Measurement) -> str:
    """How many layers the median is over, and which is worst, or largest where no direction is better."""
    if len(set(values.values())) == 1:
        return f"the same in all {len(values)} layers"
    pick, word = (min, "worst") if of.better == HIGHER else (max, "worst" if of.better == LOWER else "largest")
    end = pick(values, key=lambda name: values[name])
    return f"median of {len(values)} layers; {word} {end}: {values[end]:.3g} {of.unit}"
