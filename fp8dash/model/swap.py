"""Casts a loaded model in place, one weight at a time, and tells of each weight what became of it.

Linears of the blocks are cast; the head, the embeddings and the norms only where the recipe asks. Ragged edges are
smaller tiles. Nothing is skipped silently: every parameter is a Swap with a reason. The attention path is cast too
where the recipe asks; the KV cache is no part of a model, and belongs to whoever runs it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8dash.choose.accumulators import Accumulator
from fp8dash.choose.casts import Cast
from fp8dash.choose.hardware import Device, Path, native_path
from fp8dash.choose.recipe import Recipe
from fp8dash.errors import KernelRefused, NotFinite
from fp8dash.model.attention import cast_attention
from fp8dash.model.calibration import NOTHING, Casters, Observed
from fp8dash.quant.accumulate import scaled_product
from fp8dash.quant.activations import ActivationCast
from fp8dash.quant.cast import Quantized
from fp8dash.quant.error import CastError, cast_in_place, codes_in_place
from fp8dash.quant.kv_cache import keep_scales
from fp8dash.quant.matmul import multiply

KEPT, EMULATED, NATIVE, SIMULATED = "kept", "emulated", "native", "simulated"


@dataclass(frozen=True, slots=True)
class Swap:
    """What became of one weight: its cast and error, or None and None where it was kept."""

    name: str
    group: str  # "blocks", "lm_head", "embeddings" or "norms"
    shape: tuple[int, int]
    bits: int  # of an element where it is kept
    cast: Cast | None
    error: CastError | None
    backend: str
    reason: str
    again: bool = False  # the same tensor as an earlier one's: a tied head


class EmulatedLinear(nn.Module):
    """A Linear on decoded operands."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activations: ActivationCast | None) -> None:
        """Takes the decoded weight [out, in] in the working precision."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = bias
        self.activations = activations

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        return F.linear(self.activations.emulated(x) if self.activations else x, self.weight, self.bias)


class CodesLinear(nn.Module):
    """A Linear that multiplies codes: how is its subclasses' matter."""

    def __init__(self, weight: Quantized, bias: Tensor | None, activations: ActivationCast) -> None:
        """Takes the weight's codes [out, in]."""
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.activations = activations

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        out = self.product(self.activations.native(x), x.dtype)
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], out.shape[-1])

    def product(self, x: Quantized, dtype: torch.dtype) -> Tensor:
        """Codes of activations [tokens, in] by the weight's: [tokens, out] in `dtype`."""
        raise NotImplementedError


class NativeLinear(CodesLinear):
    """A Linear whose codes go to a native kernel."""

    def __init__(self, weight: Quantized, bias: Tensor | None, activations: ActivationCast, kernel: str) -> None:
        """Takes the weight's codes [out, in] and the kernel's name."""
        super().__init__(weight, bias, activations)
        self.kernel = kernel

    def product(self, x: Quantized, dtype: torch.dtype) -> Tensor:
        """By the kernel."""
        return multiply(x, self.weight, self.kernel, dtype)


class SimulatedLinear(CodesLinear):
    """A Linear whose products are added as a simulated tensor core adds them. Thousands of times slower."""

    def __init__(
        self, weight: Quantized, bias: Tensor | None, activations: ActivationCast, accumulator: Accumulator
    ) -> None:
        """Takes the weight's codes [out, in] and how they are added."""
        super().__init__(weight, bias, activations)
        self.accumulator = accumulator

    def product(self, x: Quantized, dtype: torch.dtype) -> Tensor:
        """As the accumulator adds."""
        return scaled_product(x, self.weight, self.accumulator).to(dtype)


def cast_model(
    model: Any, recipe: Recipe, device: Device, backend: str, observed: Observed = NOTHING
) -> Iterator[Swap]:
    """Casts the model as it is walked, weight by weight; raises NotFinite or KernelRefused naming the layer.

    A recipe that needs calibration takes its scales from what was `observed`; ValueError where nothing was.

    Weights of the blocks are cast where they lie, and lost. Others may be wanted as they were, and are copied first.
    """
    if recipe.casts_attention and backend == NATIVE:
        raise KernelRefused(
            "The backend native is refused: no kernel here reads a cast KV cache or attention (fp8dash); "
            "nearest: the backend auto."
        )
    if recipe.needs_calibration and observed is NOTHING:
        raise ValueError(f"{recipe.text} takes scales from calibration text, and none was observed")
    if recipe.attention:
        cast_attention(model, recipe.attention)
    if recipe.kv and recipe.calibrates_kv:
        keep_scales(model, recipe.kv, observed.kv)
    casters = Casters(observed)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    _untie(model, head, embedding)
    seen: set[int] = set()
    for name in [name for name, _ in model.named_modules()]:  # names alone: a list of modules would keep each weight
        module = model.get_submodule(name)
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor):
            continue
        again = weight.data_ptr() in seen
        seen.add(weight.data_ptr())
        if isinstance(module, nn.Linear):
            group = "lm_head" if module is head else "blocks"
            swap = _cast_linear(model, name, module, recipe, group, casters, device, backend)
        else:
            swap = _cast_table(name, module, weight, recipe, "embeddings" if module is embedding else "norms")
        yield replace(swap, again=again)


def _untie(model: Any, *tables: Any) -> None:
    """Gives each Linear of the blocks memory of its own: casting a weight where it lies changes whoever shares it."""
    seen = {table.weight.data_ptr() for table in tables if table is not None}
    for linear in (module for module in model.modules() if isinstance(module, nn.Linear) and module not in tables):
        if linear.weight.data_ptr() in seen:
            linear.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
        seen.add(linear.weight.data_ptr())


def _cast_linear(
    model: Any, name: str, linear: nn.Linear, recipe: Recipe, group: str, casters: Casters,
    device: Device, backend: str,
) -> Swap:  # fmt: skip
    weight = linear.weight.detach()
    if reason := _why_kept(recipe, name, group):
        return _kept(name, group, weight, reason)
    recipe = recipe.of(name)
    path, error = _path(recipe, name, linear, device, backend), None
    caster = casters.of(name, recipe.activations, weight.device)
    bias = None if linear.bias is None else linear.bias.detach()
    with _named(name):
        if recipe.weights and caster and (path.kernel or recipe.accumulator):
            codes, error = codes_in_place(weight if group == "blocks" else weight.clone(), recipe.weights)
            model.set_submodule(name, _of_codes(codes, bias, caster, path, recipe))
        else:
            if recipe.weights:
                weight = weight if group == "blocks" else weight.clone()
                error = cast_in_place(weight, recipe.weights)
            model.set_submodule(name, EmulatedLinear(weight, bias, caster))
    where = SIMULATED if recipe.accumulator else NATIVE if path.is_native else EMULATED
    return Swap(name, group, _shape(weight), _bits(weight), recipe.weights, error, where, path.reason)


def _of_codes(codes: Quantized, bias: Tensor | None, caster: ActivationCast, path: Path, recipe: Recipe) -> nn.Module:
    """The Linear that multiplies codes: by a kernel, or as a simulated tensor core."""
    if recipe.accumulator:
        return SimulatedLinear(codes, bias, caster, recipe.accumulator)
    return NativeLinear(codes, bias, caster, path.kernel or "")


def _cast_table(name: str, module: nn.Module, weight: Tensor, recipe: Recipe, group: str) -> Swap:
    """Embeddings and norms: no product, so only their weights can be cast."""
    reason = _why_kept(recipe, name, group) or ("" if recipe.weights else "its weights are not cast")
    if reason or not recipe.weights:
        return _kept(name, group, weight, reason)
    copy = weight.detach().clone()
    with _named(name):
        error = cast_in_place(copy.view(_shape(weight)), recipe.weights)
    module.weight = nn.Parameter(copy, requires_grad=False)  # a new one: a tied head keeps its own
    reason = "no product: stored as codes, decoded when read"
    return Swap(name, group, _shape(weight), _bits(weight), recipe.weights, error, EMULATED, reason)


def _kept(name: str, group: str, weight: Tensor, reason: str) -> Swap:
    return Swap(name, group, _shape(weight), _bits(weight), None, None, KEPT, reason)


def _shape(weight: Tensor) -> tuple[int, int]:
    return (1, len(weight)) if weight.dim() == 1 else (weight.shape[0], weight.shape[1])


def _bits(weight: Tensor) -> int:
    return 8 * weight.element_size()


def _why_kept(recipe: Recipe, name: str, group: str) -> str:
    if recipe.is_baseline:
        return "the baseline casts nothing"
    if pattern := recipe.skips(name):
        return f"left out by skip={pattern}"
    if not recipe.casts_linears:
        return "only the KV cache or the attention path is cast"
    if group != "blocks" and group not in recipe.also:
        return f"{group} stay unless also={group} asks for them"
    named = [override.text for override in recipe.overrides if fnmatchcase(name, override.pattern)]
    return "" if recipe.of(name).casts_linears else f"kept by {named[0]}" if named else "no cast is meant for it"


def _path(recipe: Recipe, name: str, linear: nn.Linear, device: Device, backend: str) -> Path:
    n, k = linear.weight.shape
    path = native_path(recipe, n, k, device)
    if recipe.accumulator:
        if backend == NATIVE:
            raise KernelRefused(
                f"The backend native is refused: acc={recipe.accumulator.name} is simulated (fp8dash); "
                "nearest: the backend auto."
            )
        return Path(None, recipe.accumulator.meaning)
    if backend == EMULATED:
        return Path(None, "the emulated backend was asked for")
    if backend == NATIVE and not path.is_native:
        raise KernelRefused(f"{name} cannot run natively: {path.reason}, or the backend auto.")
    return path


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Says which weight was not finite."""
    try:
        yield
    except NotFinite as error:
        raise NotFinite(f"{name}: {error} The checkpoint is damaged or overflowed: fetch it anew.") from error
