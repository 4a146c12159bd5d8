"""A decoded checkpoint made the model under test: its Linears read activations cast as its configuration says.

Every parameter is a Swap, as of a model that is cast here, with the error against the baseline's weights where there is
a baseline.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8dash.choose.casts import Cast
from fp8dash.choose.records import EMULATED, KEPT
from fp8dash.errors import ModelError
from fp8dash.model.imported.origins import Origin, Origins, StoredModel
from fp8dash.model.linears import EmulatedLinear
from fp8dash.model.parts import LINEAR, ModelPart, parts_of
from fp8dash.model.swap import Swap
from fp8dash.quant.activations import ActivationCast
from fp8dash.quant.calibrate import GivenOuter, StaticScale
from fp8dash.quant.error import CastError, error_between
from fp8dash.quant.kv_cache import cached_layers, keep_given_scales


def stored_swaps(model: Any, base: Any, place: Path, origins: Origins) -> Iterator[Swap]:
    """Gives the decoded model its casts of activations, parameter by parameter, and tells what each is.

    `base` is the unquantized model of the same architecture, or None; `place` is the checkpoint's. Raises ModelError
    where the model multiplies by a matrix whose codes are not known, or is another one than `base`.
    """
    originals = dict(base.named_parameters()) if base is not None else {}
    parameters = dict(model.named_parameters())  # a Linear that is replaced has none
    casters: dict[tuple[Cast, float | None], ActivationCast] = {}  # Linears that are read alike share one
    used: set[str] = set()
    unknown: list[str] = []
    for part in parts_of(model):
        origin = origins.of(model, part)
        used |= {origin.name} if origin else set()
        unknown += [part.module] * (origin is None and part.kind == LINEAR)
        loaded = parameters[_name(part)].detach()
        error = _error(part, _weights(part, origin, loaded), originals, place) if base is not None else None
        if origin is None or not origin.layout:
            yield Swap(part, None, None, KEPT, _kept(error))
            continue
        if part.kind == LINEAR:
            linear = model.get_submodule(part.module)
            bias = None if linear.bias is None else linear.bias.detach()
            model.set_submodule(part.module, EmulatedLinear(loaded, bias, _caster(casters, origin, loaded.device)))
        yield Swap(part, origin.cast, error, EMULATED, _reason(part, origin), origin.bits, origin.text)
    coded = [*origins.by_name.values(), *origins.by_print.values()]
    if unknown and (unused := next((one.name for one in coded if one.layout and one.name not in used), "")):
        raise ModelError(
            f"{place} stores {unused} as codes, and it is not known which matrix of the loaded model they are "
            f"({unknown[0]} is one without an origin): this architecture cannot be measured as it is stored."
        )


def keep_stored_kv(model: Any, checkpoint: StoredModel) -> int:
    """Leaves the checkpoint's KV scales with the model; returns how many layers have none, and take 1.0 as in engines.

    Nothing where its cache is not cast, or scaled as it comes.
    """
    kv = checkpoint.recipe.kv
    if kv is None or kv.scale != "static":
        return 0
    by_layer, one = checkpoint.kv_scales(), torch.ones(1)
    own = [by_layer.get(layer, {}) for layer in range(cached_layers(model.config))]
    pairs = [(scales.get("k", one).to(model.device), scales.get("v", one).to(model.device)) for scales in own]
    keep_given_scales(model, pairs)
    return sum(len(scales) < len("kv") for scales in own)


def _caster(
    made: dict[tuple[Cast, float | None], ActivationCast], origin: Origin, device: torch.device
) -> ActivationCast | None:
    """The caster of a matrix's inputs; None where the checkpoint casts weights alone."""
    cast = origin.inputs
    if cast is None:
        return None
    key = (cast, origin.scale)
    if key not in made:
        made[key] = ActivationCast(cast, _scale(cast, origin.scale, device))
    return made[key]


def _scale(cast: Cast, given: float | None, device: torch.device) -> StaticScale | None:
    if given is None:
        return None
    scale = torch.full((1, 1), given, device=device)
    return GivenOuter(scale, cast) if cast.rule.outer else StaticScale(scale, cast)


def _weights(part: ModelPart, origin: Origin | None, loaded: Tensor) -> Tensor:
    """A parameter as it was decoded, before bfloat16 rounds it; as it was loaded where it is a part of a stack."""
    decoded = origin.weights() if origin and origin.weights else loaded
    return decoded.to(loaded.device).view(loaded.shape) if tuple(decoded.shape) == part.shape else loaded


def _error(part: ModelPart, after: Tensor, originals: Mapping[str, Tensor], place: Path) -> CastError:
    before = originals.get(_name(part))
    if before is None or before.shape != after.shape:
        held = "no such parameter" if before is None else f"one of shape {tuple(before.shape)}"
        raise ModelError(
            f"{place} was not made from this model: its {_name(part)} is {tuple(after.shape)}, and the model has "
            f"{held}. Choose the checkpoint that it was made from."
        )
    return error_between(before.detach().reshape(part.shape), after.reshape(part.shape))


def _name(part: ModelPart) -> str:
    return f"{part.module}.{part.key}".lstrip(".")


def _kept(error: CastError | None) -> str:
    if error is None or not error.noise:
        return "the checkpoint stores it uncast"
    return f"the checkpoint stores it uncast, and {error.relative_error:.2%} from the baseline’s"


def _reason(part: ModelPart, origin: Origin) -> str:
    uncast = "; its inputs, which the checkpoint casts, are not cast here" if origin.inputs else ""
    return f"decoded from what the checkpoint stores: {origin.layout}{uncast if part.kind != LINEAR else ''}"
