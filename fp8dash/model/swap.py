"""Casts a loaded model in place, one weight at a time, and reports what was done to each parameter.

Linears of the blocks are cast; the head, the embeddings and the norms only where the recipe asks. Ragged edges are
smaller tiles. Nothing is skipped silently: every parameter is a Swap with a reason. The attention path is cast too
where the recipe asks; the KV cache is no part of a model, and belongs to whoever runs it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from fp8dash.choose.casts import Cast
from fp8dash.choose.catalog import ALSO
from fp8dash.choose.hardware import Device, KernelPath, native_path
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.records import EMULATED, HEAD, KEPT, NATIVE, SIMULATED, RanBy
from fp8dash.errors import KernelRefused, NotFinite
from fp8dash.model.attention import cast_attention
from fp8dash.model.calibration import NOTHING, Casters, Observed
from fp8dash.model.linears import EmulatedLinear, NativeLinear, SimulatedLinear
from fp8dash.model.outer import Outers
from fp8dash.model.parts import LINEAR, ModelPart, is_plain, is_read_directly, parts_of
from fp8dash.quant.activations import ActivationCast
from fp8dash.quant.cast import Quantized
from fp8dash.quant.error import CastError, cast_in_place, codes_in_place
from fp8dash.quant.kv_cache import keep_scales


@dataclass(frozen=True, slots=True)
class Swap:
    """What was done to one parameter: its cast and error, or None and None if it was kept.

    Of what a checkpoint stores, the error is that against the baseline's weights: None where there is no baseline.
    """

    part: ModelPart
    cast: Cast | None
    error: CastError | None
    backend: RanBy
    reason: str
    bits: float | None = None  # of an element as it is stored; None where the cast says it
    stored_as: str = ""  # the library's name of its blocks, where no cast of ours says it

    @property
    def text(self) -> str:
        """The cast's text, or what stands for it; empty where the parameter was kept."""
        return self.cast.text if self.cast else self.stored_as


def cast_model(
    model: Any, recipe: Recipe, device: Device, backend: str, observed: Observed = NOTHING
) -> Iterator[Swap]:
    """Casts the model as it is walked, parameter by parameter; raises NotFinite or KernelRefused naming the layer.

    A recipe that needs calibration takes its scales from what was `observed`; ValueError if nothing was.

    Weights of the blocks are cast where they lie, and lost. Others may be wanted as they were, and are copied first.
    """
    if recipe.needs_calibration and observed is NOTHING:
        raise ValueError(f"{recipe.text} takes its scales from calibration text, but none was observed")
    cast_paths(model, recipe, backend, observed)
    if recipe.casts_linears:
        _untie(model)
    yield from cast_parts(model, planned(model, recipe), recipe, device, backend, observed)


def cast_paths(model: Any, recipe: Recipe, backend: str, observed: Observed = NOTHING) -> None:
    """Casts what lies between the Linears, where the recipe asks: attention, and the KV cache's scales.

    Raises KernelRefused where it is to be native, or ModelError for an attention that cannot be replaced.
    """
    if recipe.casts_attention and backend == NATIVE:
        raise KernelRefused(
            "The backend native is refused: no kernel here reads a cast KV cache or attention (fp8dash); "
            "closest alternative: the backend auto."
        )
    if recipe.attention:
        cast_attention(model, recipe.attention)
    if recipe.kv and recipe.calibrates_kv:
        keep_scales(model, recipe.kv, observed.kv)


def cast_parts(
    model: Any, parts: list[ModelPart], recipe: Recipe, device: Device, backend: str, observed: Observed = NOTHING
) -> Iterator[Swap]:
    """Casts or keeps planned parameters, all of a model's or all of a block's; raises NotFinite or KernelRefused
    naming the layer."""
    casters, outers = Casters(observed), _outers(model, recipe, parts)
    for part in parts:
        head = _tied_head(model, part) if part.tied else part
        if part.tied and not why_kept(recipe, head):  # its inputs alone: casting its weight would have untied them
            swap = _cast_linear(model, head, recipe, casters, outers, device, backend)
            yield replace(swap, part=part, reason=f"the head, whose inputs are cast, reads it too: {swap.reason}")
        elif reason := why_kept(recipe, part):
            yield Swap(part, None, None, KEPT, reason)
        elif part.kind == LINEAR:
            yield _cast_linear(model, part, recipe, casters, outers, device, backend)
        else:
            yield _cast_table(model, part, recipe)


def planned(model: Any, recipe: Recipe) -> list[ModelPart]:
    """The model's parameters as the recipe leaves them: casting the weights of an embedding or its head unties them."""
    parts = parts_of(model)
    tied = next((part for part in parts if part.tied), None)
    if tied is None:
        return parts
    head = _tied_head(model, tied)
    is_untied = (recipe.weights and not why_kept(recipe, tied)) or (
        recipe.of(head.module).weights and not why_kept(recipe, head)
    )
    return [*(replace(part, tied=False) for part in parts), head] if is_untied else parts


def _tied_head(model: Any, table: ModelPart) -> ModelPart:
    """The head that reads an embedding's weight, as a part of its own."""
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    kind, fixed = (LINEAR, "") if is_plain(head) else ("", f"{type(head).__name__} computes more than a matrix product")
    return replace(table, name=name, module=name, group=HEAD, tied=False, kind=kind, fixed=fixed)


def why_kept(recipe: Recipe, part: ModelPart) -> str:
    """Why a recipe leaves a parameter as it is; empty where it casts it."""
    if recipe.is_baseline:
        return "the baseline casts nothing"
    if part.fixed:
        return part.fixed
    if pattern := recipe.skips(part.module):
        return f"left out by skip={pattern}"
    if not recipe.casts_linears:
        return "only the KV cache or the attention path is cast"
    if part.group in ALSO and ALSO[part.group] not in recipe.also:
        return f"cast only with also={ALSO[part.group]}"
    if part.kind != LINEAR:
        return "" if recipe.weights else "its weights are not cast"
    named = [override.text for override in recipe.overrides if fnmatchcase(part.module, override.pattern)]
    own = recipe.of(part.module)
    return "" if own.casts_linears else f"kept by {named[0]}" if named else "the recipe has no cast for it"


def _untie(model: Any) -> None:
    """Gives each Linear of the blocks memory of its own: casting a weight in place changes all that share it."""
    tables = [table for table in (model.get_output_embeddings(), model.get_input_embeddings()) if table is not None]
    seen = {table.weight.data_ptr() for table in tables}
    for linear in (module for module in model.modules() if isinstance(module, nn.Linear) and module not in tables):
        if linear.weight.data_ptr() in seen:
            linear.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
        seen.add(linear.weight.data_ptr())


def _outers(model: Any, recipe: Recipe, parts: list[ModelPart]) -> Outers:
    modules = [part.module for part in parts if part.kind == LINEAR and not why_kept(recipe, part)]
    return Outers(recipe, modules, lambda name: model.get_submodule(name).weight.detach())


def _cast_linear(
    model: Any, part: ModelPart, recipe: Recipe, casters: Casters, outers: Outers, device: Device, backend: str
) -> Swap:
    outer = outers.of(part.module)
    name, linear, recipe = part.module, model.get_submodule(part.module), recipe.of(part.module)
    weight: Tensor = linear.weight.detach()
    path, error = _path(model, recipe, name, linear, device, backend), None
    caster = casters.of(name, recipe.activations, weight.device)
    bias = None if linear.bias is None else linear.bias.detach()
    if recipe.weights and part.group == HEAD:
        weight = weight.clone()
    with _named(name):
        if recipe.weights and caster and (path.kernel or recipe.accumulator):
            codes, error = codes_in_place(weight, recipe.weights, outer)
            model.set_submodule(name, _of_codes(codes, bias, caster, path, recipe))
        else:
            if recipe.weights:
                error = cast_in_place(weight, recipe.weights, outer)
            model.set_submodule(name, EmulatedLinear(weight, bias, caster))
    where = SIMULATED if recipe.accumulator else NATIVE if path.is_native else EMULATED
    return Swap(part, recipe.weights, error, where, path.reason + casters.caveat(name, recipe.activations))


def _of_codes(
    codes: Quantized, bias: Tensor | None, caster: ActivationCast, path: KernelPath, recipe: Recipe
) -> nn.Module:
    """The Linear that multiplies codes: by a kernel, or as a simulated tensor core."""
    if recipe.accumulator:
        return SimulatedLinear(codes, bias, caster, recipe.accumulator)
    return NativeLinear(codes, bias, caster, path.kernel or "")


def _cast_table(model: Any, part: ModelPart, recipe: Recipe) -> Swap:
    """Embeddings and norms: no product, so only their weights can be cast."""
    module: Any = model.get_submodule(part.module)
    copy, error = module.weight.detach().clone(), None
    if recipe.weights:
        with _named(part.name):
            error = cast_in_place(copy.view(part.shape), recipe.weights)
    module.weight = nn.Parameter(copy, requires_grad=False)  # a new one: a tied head keeps its own
    return Swap(part, recipe.weights, error, EMULATED, "no product: stored as codes, decoded when read")


def _path(model: Any, recipe: Recipe, name: str, linear: nn.Linear, device: Device, backend: str) -> KernelPath:
    n, k = linear.weight.shape
    path = native_path(recipe, n, k, device)
    if recipe.accumulator:
        if backend == NATIVE:
            raise KernelRefused(
                f"The backend native is refused: acc={recipe.accumulator.name} is simulated (fp8dash); "
                "closest alternative: the backend auto."
            )
        return KernelPath(None, recipe.accumulator.meaning)
    if backend == EMULATED:
        return KernelPath(None, "the emulated backend was requested")
    if path.is_native and is_read_directly(model, name):
        path = KernelPath(
            None,
            ("the model's own code reads its weight, so it is decoded (transformers); closest alternative: emulate it"),
        )
    if backend == NATIVE and not path.is_native:
        raise KernelRefused(f"{name} cannot run natively: {path.reason}, or the backend auto.")
    return path


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Adds which weight was not finite."""
    try:
        yield
    except NotFinite as error:
        raise NotFinite(f"{name}: {error} The checkpoint is damaged or overflowed: download it again.") from error
