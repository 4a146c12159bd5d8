"""NVFP4's one float32 scale of weights that engines multiply as one matrix: the largest of its parts'.

vLLM takes one global scale for q, k and v, and one for gate and up, and leaves all other scales as they are
(`schemes/compressed_tensors_w4a4_nvfp4.py`, `quantization/modelopt.py`): parts with scales of their own would be
multiplied by another's. llm-compressor shares it likewise (`modifiers/utils/helpers.py`).
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fp8dash.choose.models.groups import fused_with
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.scaling import NVFP4, TENSOR
from fp8dash.quant.cast import outer_of, tile_amax


class Outers:
    """The outer scale of each weight that does not have its own, made once for each fused matrix."""

    def __init__(self, recipe: Recipe, modules: Iterable[str], weight_of: Callable[[str], Tensor]) -> None:
        """Of the modules whose weights the recipe casts; `weight_of` gives a module's weight [rows, cols], uncast."""
        self._recipe, self._modules, self._weight_of = recipe, frozenset(modules), weight_of
        self._made: dict[str, Tensor | None] = {}

    def of(self, module: str) -> Tensor | None:
        """The outer scale [1, 1] that this module's weight is cast under; None where it is cast under its own.

        Asked first of any part of a matrix, before one of them is cast in place.
        """
        cast = self._recipe.of(module).weights
        if cast is None or cast.rule != NVFP4:
            return None
        if module not in self._made:
            parts = [name for name in fused_with(module) if name in self._modules]
            parts = [name for name in parts if self._recipe.of(name).weights == cast]
            amaxes = [tile_amax(self._weight_of(name), TENSOR) for name in parts if len(parts) > 1]
            largest = torch.stack(amaxes).amax(0) if amaxes else None
            shared = None if largest is None or not torch.isfinite(largest).all() else outer_of(largest, cast)
            self._made |= dict.fromkeys((module, *parts), shared)  # a part that is not finite says so itself
        return self._made[module]
