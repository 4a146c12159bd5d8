"""Where a loaded weight comes from: what a quantized checkpoint stores of each matrix, and how its inputs are cast."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fp8dash.choose.casts import Cast
from fp8dash.choose.recipe import Recipe
from fp8dash.model.parts import LINEAR, WEIGHT, ModelPart
from fp8dash.model.tensors import DTYPE

EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class Origin:
    """One stored matrix, or a stack of them."""

    name: str  # in the file
    layout: str  # of its codes, in words; empty where it is not cast
    text: str = ""  # its cast's, or the library's own name of its blocks
    cast: Cast | None = None  # None where our casts cannot say it
    bits: float = 16.0  # of an element, all that is stored with it included
    inputs: Cast | None = None  # how activations are cast that it multiplies
    scale: float | None = None  # of them, where one is stored
    weights: Callable[[], Tensor] | None = None  # decoded anew, before bfloat16 rounds them; None for parts of stacks


@dataclass(frozen=True, slots=True)
class Origins:
    """All of a checkpoint's, by the modules that they are weights of, and by what they hold."""

    by_name: Mapping[str, Origin]
    by_print: Mapping[bytes, Origin]

    def of(self, model: Any, part: ModelPart) -> Origin | None:
        """The origin of a parameter: by its name, its stack's name, or what it holds."""
        if part.key != WEIGHT:
            return self.by_name.get(part.name)
        named = self.by_name.get(part.module) or self.by_name.get(_stack(part.module))
        if named is not None:
            return named
        module: nn.Module = model.get_submodule(part.module)
        weight: Any = module.weight
        if part.kind != LINEAR and weight.dim() != len(part.shape):
            return None
        held = weight.detach().cpu()
        return self.by_print.get(fingerprint(held)) or self.by_print.get(fingerprint(held.T))


class StoredModel(Protocol):
    """A quantized checkpoint that is to be measured."""

    @property
    def place(self) -> Path:
        """Its folder or file."""

    @property
    def recipe(self) -> Recipe:
        """As it is stored, in our words as far as they go."""

    @property
    def content_hash(self) -> str:
        """SHA-256 of what is measured of it."""

    @property
    def facts(self) -> dict[str, Any]:
        """What is stored about it with a run."""

    @property
    def elements(self) -> int:
        """Weights that it stands for."""

    def write_plain(self, folder: Path) -> Origins:
        """Writes a plain model with decoded weights into an empty folder."""

    def kv_scales(self) -> dict[int, dict[str, Tensor]]:
        """By layer, the stored scales of keys, "k", and of values, "v"."""


def fingerprint(weights: Tensor, shape: tuple[int, ...] = ()) -> bytes:
    """The same for the same weights [rows, cols] once they are loaded: their shape, first and last row.

    Of weights of a `shape` their ends alone may be given.
    """
    ends = weights[:: max(1, len(weights) - 1)].to(DTYPE).contiguous()
    shape = shape or tuple(weights.shape)
    return hashlib.sha256(repr(shape).encode() + ends.view(torch.uint8).numpy().tobytes()).digest()


def _stack(module: str) -> str:
    """The stack that an expert's matrix stands in.

    >>> _stack("model.layers.0.mlp.experts.3.gate_up_proj")
    'model.layers.0.mlp.experts.gate_up_proj'
    """
    return EXPERT.sub(".experts.", module)
