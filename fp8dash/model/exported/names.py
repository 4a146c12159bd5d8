"""Under which name a checkpoint's files store each matrix of the loaded model, found by what it holds.

transformers renames weights as it loads them, and stacks experts: `block_sparse_moe.experts.0.w1` of Mixtral's files is
the Linear `mlp.experts.0.gate_proj` here. Engines read the files' names, so an exported checkpoint keeps them.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from fp8dash.choose.recipe import Recipe
from fp8dash.choose.records import ROUTER
from fp8dash.errors import ModelError
from fp8dash.model.folder import stored_tensors, weight_files
from fp8dash.model.parts import LINEAR, MATRIX, ModelPart, parts_of
from fp8dash.model.swap import planned, why_kept

WEIGHT = ".weight"
Numbers = tuple[str, ...]


def stored_names(model: Any, folder: Path, recipe: Recipe) -> dict[str, str]:
    """The files' name of each Linear and router of a model that is not cast yet, without `.weight`, by the model's.

    What the recipe keeps has the model's name where the files have none for it, as a tied head. Raises ModelError where
    a matrix that the recipe casts is not stored by itself, as [out, in].
    """
    parts = [part for part in parts_of(model) if f".{part.key}" == WEIGHT]
    linears = [part for part in parts if isinstance(model.get_submodule(part.module), nn.Linear)]
    wanted = {part.module: _weight(model, part) for part in (*linears, *(p for p in parts if p.group == ROUTER))}
    names = dict(_matched(folder, wanted))
    for part in planned(model, recipe):
        if part.kind == LINEAR and not why_kept(recipe, part) and part.module not in names:
            raise _refused(folder, part.module, part.shape)
    return {name: name for name in wanted} | names


def _weight(model: Any, part: ModelPart) -> Tensor:
    weight: Tensor = model.get_submodule(part.module).weight
    return weight.detach()


def _matched(folder: Path, wanted: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs of the model's name and the files', pattern by pattern: one pattern of the files fits all of a pattern's.

    An expert whose gate and up hold the same, as a dead one's zeros do, is then told by its neighbours.
    """
    with ExitStack() as opened:
        stored = _Stored.of(folder, opened)
        free = by_pattern(stored.files)
        for pattern, places in by_pattern(wanted).items():
            own_first = sorted(free, key=lambda other: (other != pattern, other))
            for other in own_first:
                pairs = [(name, free[other].get(numbers)) for numbers, name in places.items()]
                if all(key is not None and stored.holds(key, wanted[name]) for name, key in pairs):
                    del free[other]
                    yield from ((name, key) for name, key in pairs if key is not None)
                    break


def by_pattern(names: Iterable[str]) -> dict[str, dict[Numbers, str]]:
    """Names by what they are without their numbers, then by those.

    >>> by_pattern(["layers.0.experts.3.w1", "layers.1.experts.3.w1"])
    {'layers.*.experts.*.w1': {('0', '3'): 'layers.0.experts.3.w1', ('1', '3'): 'layers.1.experts.3.w1'}}
    """
    patterns: dict[str, dict[Numbers, str]] = {}
    for name in names:
        words = name.split(".")
        numbers = tuple(word for word in words if word.isdigit())
        pattern = ".".join("*" if word.isdigit() else word for word in words)
        patterns.setdefault(pattern, {})[numbers] = name
    return patterns


@dataclass(frozen=True, slots=True)
class _Stored:
    """The weights of a folder: the file of each, and its shape, by its name without `.weight`."""

    opened: ExitStack
    files: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]
    handles: dict[Path, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, opened: ExitStack) -> "_Stored":
        headers = {file: stored_tensors(file) for file in weight_files(folder)}
        weights = [
            (key.removesuffix(WEIGHT), file, tensor.shape)
            for file, tensors in headers.items()
            for key, tensor in tensors.items()
            if key.endswith(WEIGHT) and len(tensor.shape) == MATRIX
        ]
        files, shapes = {name: file for name, file, _ in weights}, {name: shape for name, _, shape in weights}
        return cls(opened, files, shapes)

    def holds(self, name: str, weight: Tensor) -> bool:
        """Whether a tensor of the files is this weight to the bit, in the weight's own precision."""
        if self.shapes[name] != tuple(weight.shape):
            return False
        file = self.files[name]
        if file not in self.handles:
            self.handles[file] = self.opened.enter_context(safe_open(file, framework="pt"))
        tensor: Tensor = self.handles[file].get_tensor(f"{name}{WEIGHT}")
        read = tensor.to(weight.device, weight.dtype)
        return torch.equal(read.view(torch.uint8), weight.contiguous().view(torch.uint8))  # NaN is NaN


def _refused(folder: Path, name: str, shape: tuple[int, int]) -> ModelError:
    shapes = {key: tensor.shape for file in weight_files(folder) for key, tensor in stored_tensors(file).items()}
    held = shapes.get(f"{name}{WEIGHT}")
    otherwise = "other values under that name" if held == shape else f"it as {held}"
    how = "it together with others or in another form" if held is None else otherwise
    return ModelError(
        f"{name} is cast as a matrix of {shape}, and {folder} stores {how}: this model cannot be exported. Leave the "
        "measure export out."
    )
