"""A decoded checkpoint made the model under test: its Linears read activations cast as its configuration says.

Every parameter is a Swap, as of a model that is cast here, with the error against the baseline's weights where there is
a baseline.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8dash.choose.casts import Cast
from fp8dash.choose.records import EMULATED, KEPT
from fp8dash.errors import ModelError
from fp8dash.model.imported.checkpoint import Checkpoint, scale_value
from fp8dash.model.imported.decode import decoded
from fp8dash.model.imported.plain import fingerprint, name_of
from fp8dash.model.linears import EmulatedLinear
from fp8dash.model.parts import LINEAR, ModelPart, parts_of
from fp8dash.model.swap import Swap
from fp8dash.model.xray.matrices import StoredMatrix
from fp8dash.model.xray.xray import bytes_of
from fp8dash.quant.activations import ActivationCast
from fp8dash.quant.calibrate import GivenOuter, StaticScale
from fp8dash.quant.error import CastError, error_between
from fp8dash.quant.kv_cache import cached_layers, keep_given_scales

WEIGHT = "weight"
EXPERT = re.compile(r"\.experts\.\d+\.")
LAYER = re.compile(r"\.(\d+)\.")
SUFFIX = re.compile(r"\.(?:(?:k|v)_proj\.|attn\.)?(?P<of>[kv])_scale$")


def stored_swaps(model: Any, base: Any, checkpoint: Checkpoint, prints: Mapping[bytes, StoredMatrix]) -> Iterator[Swap]:
    """Gives the decoded model its casts of activations, parameter by parameter, and tells what each is.

    `base` is the unquantized model of the same architecture, or None; `prints` is what `write_plain` returned. Raises
    ModelError where the model multiplies by a matrix whose codes are not known, or is another one than `base`.
    """
    by_name = {name_of(matrix).removesuffix(".weight"): matrix for matrix in checkpoint.matrices}
    originals = dict(base.named_parameters()) if base is not None else {}
    parameters = dict(model.named_parameters())  # a Linear that is replaced has none
    casters = _Casters(checkpoint)
    used: set[str] = set()
    unknown: list[str] = []
    for part in parts_of(model):
        matrix = _origin(model, part, by_name, prints)
        used |= {matrix.module} if matrix else set()
        parameter = parameters[f"{part.module}.{part.key}".lstrip(".")]
        weights = _weights(checkpoint, part, matrix, parameter.detach())
        error = _error(part, weights, originals, checkpoint) if base is not None else None
        unknown += [part.module] * (matrix is None and part.kind == LINEAR)
        if matrix is None or not matrix.packing:
            yield Swap(part, None, None, KEPT, _kept(error))
            continue
        if part.kind == LINEAR:
            linear = model.get_submodule(part.module)
            caster = casters.of(matrix, parameter.device)
            bias = None if linear.bias is None else linear.bias.detach()
            model.set_submodule(part.module, EmulatedLinear(parameter.detach(), bias, caster))
        bits = 8 * bytes_of(checkpoint.opened, matrix) / matrix.elements
        yield Swap(part, matrix.cast, error, EMULATED, _reason(part, matrix), bits)
    _refuse_unknown(checkpoint, used, unknown)


def keep_stored_kv(model: Any, checkpoint: Checkpoint) -> int:
    """Leaves the checkpoint's KV scales with the model; returns how many layers have none, and take 1.0 as in engines.

    Nothing where its cache is not cast, or scaled as it comes.
    """
    kv = checkpoint.recipe.kv
    if kv is None or kv.scale != "static":
        return 0
    by_layer: dict[int, dict[str, Tensor]] = {}
    for name in checkpoint.opened.tensors:
        match, layer = SUFFIX.search(name), LAYER.search(name)
        if match and layer:
            values = torch.from_numpy(checkpoint.opened.values(name).reshape(-1)).float().to(model.device)
            by_layer.setdefault(int(layer[1]), {})[match["of"]] = values
    one, layers = torch.ones(1, device=model.device), range(cached_layers(model.config))
    own = [by_layer.get(layer, {}) for layer in layers]
    keep_given_scales(model, [(scales.get("k", one), scales.get("v", one)) for scales in own])
    return sum(len(scales) < len("kv") for scales in own)


@dataclass(slots=True)
class _Casters:
    """One caster for all Linears that read activations by the same cast and the same stored scale."""

    checkpoint: Checkpoint
    made: dict[tuple[Cast, float | None], ActivationCast] = field(default_factory=dict)

    def of(self, matrix: StoredMatrix, device: torch.device) -> ActivationCast | None:
        """The caster of a matrix's inputs; None where the checkpoint casts weights alone."""
        cast = matrix.claim.activations if matrix.claim else None
        if cast is None:
            return None
        given = self._given(matrix, cast)
        if (cast, given) not in self.made:
            self.made[cast, given] = ActivationCast(cast, _scale(cast, given, device))
        return self.made[cast, given]

    def _given(self, matrix: StoredMatrix, cast: Cast) -> float | None:
        opened = self.checkpoint.opened
        if cast.is_observed:
            return scale_value(opened, f"{matrix.module}.input_scale") or 1.0
        if not cast.rule.outer:
            return None
        divides = scale_value(opened, f"{matrix.module}.input_global_scale")
        return 1 / divides if divides else scale_value(opened, f"{matrix.module}.input_scale")


def _scale(cast: Cast, given: float | None, device: torch.device) -> StaticScale | None:
    if given is None:
        return None
    scale = torch.full((1, 1), given, device=device)
    return GivenOuter(scale, cast) if cast.rule.outer else StaticScale(scale, cast)


def _origin(
    model: Any, part: ModelPart, by_name: Mapping[str, StoredMatrix], prints: Mapping[bytes, StoredMatrix]
) -> StoredMatrix | None:
    """The stored matrix that a parameter comes from: by its name, its stack's name, or what it holds."""
    if part.key != WEIGHT:
        return by_name.get(part.name)
    module: nn.Module = model.get_submodule(part.module)
    named = by_name.get(part.module) or by_name.get(EXPERT.sub(".experts.", part.module))
    if named is not None or part.kind != LINEAR:
        return named
    weight: Any = module.weight
    return prints.get(fingerprint(weight.detach().cpu())) or prints.get(fingerprint(weight.detach().T.cpu()))


def _weights(checkpoint: Checkpoint, part: ModelPart, matrix: StoredMatrix | None, loaded: Tensor) -> Tensor:
    """A parameter as it was decoded, before bfloat16 rounds it; as it was loaded where it is a part of a stack."""
    if matrix is None or not matrix.packing or (matrix.rows, matrix.cols) != part.shape or matrix.count > 1:
        return loaded
    return decoded(checkpoint.opened, matrix).to(loaded.device).view(loaded.shape)


def _error(part: ModelPart, after: Tensor, originals: Mapping[str, Tensor], checkpoint: Checkpoint) -> CastError:
    name = f"{part.module}.{part.key}".lstrip(".")
    before = originals.get(name)
    if before is None or before.shape != after.shape:
        held = "no such parameter" if before is None else f"one of shape {tuple(before.shape)}"
        raise ModelError(
            f"{checkpoint.folder} was not made from this model: its {name} is {tuple(after.shape)}, and the model has "
            f"{held}. Choose the checkpoint that it was made from."
        )
    rows = part.shape
    return error_between(before.detach().reshape(rows), after.reshape(rows))


def _kept(error: CastError | None) -> str:
    if error is None or not error.noise:
        return "the checkpoint stores it uncast"
    return f"the checkpoint stores it uncast, and {error.relative_error:.2%} from the baseline’s"


def _reason(part: ModelPart, matrix: StoredMatrix) -> str:
    zeros = ", with zero points" if matrix.claim and matrix.claim.zero_points else ""
    inputs = matrix.claim is not None and matrix.claim.activations is not None and part.kind != LINEAR
    uncast = "; its inputs, which the checkpoint casts, are not cast here" if inputs else ""
    return f"decoded from what the checkpoint stores: {matrix.packing}{zeros}{uncast}"


def _refuse_unknown(checkpoint: Checkpoint, used: set[str], unknown: list[str]) -> None:
    """Raises ModelError where codes may have become a Linear that was taken for uncast, inputs and all."""
    unused = [matrix.module for matrix in checkpoint.matrices if matrix.packing and matrix.module not in used]
    if unused and unknown:
        raise ModelError(
            f"{checkpoint.folder} stores {unused[0]} as codes, and it is not known which matrix of the loaded model "
            f"they are ({unknown[0]} is one without an origin): this architecture cannot be measured as it is stored."
        )
