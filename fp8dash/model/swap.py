"""Casts a loaded model in place, one weight at a time, and tells of each weight what became of it.

Linears of the blocks are cast; the head, the embeddings and the norms only where the recipe asks. Ragged edges are
smaller tiles. Nothing is skipped silently: every parameter is a Swap with a reason.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fp8dash.choose.hardware import Device, Path, native_path
from fp8dash.choose.recipe import Cast, Recipe
from fp8dash.errors import KernelRefused, NotFinite
from fp8dash.quant.cast import Quantized, dequantize, quantize
from fp8dash.quant.matmul import ActivationCast, multiply

KEPT, EMULATED, NATIVE = "kept", "emulated", "native"


@dataclass(frozen=True, slots=True)
class Swap:
    """One weight [rows, cols] before, and its codes; `codes` is None where the weight itself was kept."""

    name: str
    group: str  # "blocks", "lm_head", "embeddings" or "norms"
    before: Tensor
    codes: Quantized | None
    backend: str
    reason: str


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


class NativeLinear(nn.Module):
    """A Linear whose codes go to a native kernel."""

    def __init__(self, weight: Quantized, bias: Tensor | None, activations: ActivationCast, kernel: str) -> None:
        """Takes the weight's codes [out, in]."""
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.activations = activations
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        out = multiply(self.activations.native(x), self.weight, self.kernel, x.dtype)
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], out.shape[-1])


def cast_model(model: Any, recipe: Recipe, device: Device, backend: str) -> Iterator[Swap]:
    """Casts the model as it is walked, weight by weight; raises NotFinite or KernelRefused naming the layer."""
    caster = ActivationCast(recipe.activations) if recipe.activations else None
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    for name in [name for name, _ in model.named_modules()]:  # names alone: a list of modules would keep each weight
        module = model.get_submodule(name)
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor):
            continue
        if isinstance(module, nn.Linear):
            group = "lm_head" if module is head else "blocks"
            yield _cast_linear(model, name, module, recipe, group, caster, device, backend)
        else:
            group = "embeddings" if module is embedding else "norms"
            yield _cast_table(name, module, weight, recipe, group)


def _cast_linear(
    model: Any, name: str, linear: nn.Linear, recipe: Recipe, group: str, caster: ActivationCast | None,
    device: Device, backend: str,
) -> Swap:  # fmt: skip
    before = linear.weight.detach()
    if reason := _why_kept(recipe, name, group):
        return Swap(name, group, before, None, KEPT, reason)
    path = _path(recipe, name, linear, device, backend)
    bias = None if linear.bias is None else linear.bias.detach()
    codes = _quantized(before, recipe.weights, name) if recipe.weights else None
    if path.kernel and codes and caster:
        model.set_submodule(name, NativeLinear(codes, bias, caster, path.kernel))
    else:
        decoded = dequantize(codes).to(before.dtype) if codes else before
        model.set_submodule(name, EmulatedLinear(decoded, bias, caster))
    return Swap(name, group, before, codes, NATIVE if path.is_native else EMULATED, path.reason)


def _cast_table(name: str, module: nn.Module, weight: Tensor, recipe: Recipe, group: str) -> Swap:
    """Embeddings and norms: no product, so only their weights can be cast."""
    before = weight.detach()
    table = before.view(1, -1) if before.dim() == 1 else before
    reason = _why_kept(recipe, name, group) or ("" if recipe.weights else "only activations are cast")
    if reason or not recipe.weights:
        return Swap(name, group, table, None, KEPT, reason)
    codes = _quantized(table, recipe.weights, name)
    decoded = dequantize(codes).to(before.dtype).view(before.shape)
    module.weight = nn.Parameter(decoded, requires_grad=False)  # a new one: a tied head keeps its own
    return Swap(name, group, table, codes, EMULATED, "no product: stored as codes, decoded when read")


def _why_kept(recipe: Recipe, name: str, group: str) -> str:
    if recipe.is_baseline:
        return "the baseline casts nothing"
    if pattern := recipe.skips(name):
        return f"left out by skip={pattern}"
    return "" if group == "blocks" or group in recipe.also else f"{group} stay unless also={group} asks for them"


def _path(recipe: Recipe, name: str, linear: nn.Linear, device: Device, backend: str) -> Path:
    n, k = linear.weight.shape
    path = native_path(recipe, n, k, device)
    if backend == EMULATED:
        return Path(None, "the emulated backend was asked for")
    if backend == NATIVE and not path.is_native:
        raise KernelRefused(f"{name} cannot run natively: {path.reason}. Choose the backend auto or emulated.")
    return path


def _quantized(weight: Tensor, cast: Cast, name: str) -> Quantized:
    try:
        return quantize(weight, cast)
    except NotFinite as error:
        raise NotFinite(f"{name}: {error} The checkpoint is damaged or overflowed: fetch it anew.") from error
