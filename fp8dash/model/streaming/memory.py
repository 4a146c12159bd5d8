"""How much memory and disk a pass block by block takes, from a checkpoint's config and headers: nothing is read."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8dash.choose.recipe import Recipe
from fp8dash.model.probe import skeleton_of
from fp8dash.model.streaming.layout import Layout, layout_of
from fp8dash.model.streaming.unread import InFile, elements, tensors_in
from fp8dash.model.swap import planned, why_kept
from fp8dash.model.tensors import DTYPE

FLOAT32 = 4  # bytes
BESIDE = 192 << 20  # what casting holds beside the weights, and what glibc keeps of freed tensors of a few MB
INDEX = re.compile(r"\.\d+(?=\.)")  # of a block or an expert, in a tensor's name


@dataclass(frozen=True, slots=True)
class PassMemory:
    """Bytes that a pass takes, beside the process itself."""

    outside: int  # embeddings, head and final norm, held throughout
    copies: int  # of those, one for each recipe that casts their weights
    block: int  # the largest
    held: int  # how often it is held: as it is, and as a recipe casts it; while experts are stacked, once more
    window: int  # what a window is inside a block, and what is held beside the weights
    disk: int  # hidden states between two blocks, of all recipes and windows

    @property
    def peak(self) -> int:
        """Of memory.

        >>> PassMemory(outside=100, copies=50, block=30, held=2, window=10, disk=1000).peak
        220
        """
        return self.outside + self.copies + self.held * self.block + self.window


def memory_of_pass(folder: Path, recipes: Sequence[Recipe], windows: int, length: int) -> PassMemory:
    """What `last_hidden_states` will take for windows of `length` tokens; raises ModelError for a model that cannot be
    passed through block by block."""
    from transformers import AutoConfig

    skeleton = skeleton_of(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    layout = layout_of(folder, skeleton, tensors_in(folder))
    blocks = zip(layout.blocks, skeleton.get_submodule(layout.place), strict=True)
    stacks = any(len(tensors) > len(block.state_dict()) for tensors, block in blocks)
    states = windows * length * _width(skeleton) * DTYPE.itemsize
    return PassMemory(
        outside=_bytes(layout.outside.values()),
        copies=sum(_cast_outside(skeleton, layout, recipe) for recipe in recipes),
        block=max(_bytes(block.values()) for block in layout.blocks),
        held=3 if stacks else 2,
        window=max(_of_window(skeleton, block, recipes, length) for block in layout.blocks),
        disk=(len(recipes) + 1) * states,  # one recipe's are kept twice while it passes through a block
    )


def _bytes(tensors: Iterable[InFile]) -> int:
    """Once loaded."""
    return sum(map(elements, tensors)) * DTYPE.itemsize


def _cast_outside(skeleton: Any, layout: Layout, recipe: Recipe) -> int:
    """The bytes of tables, head and norms that a recipe needs copies of."""
    parts = [part for part in planned(skeleton, recipe) if not layout.inside(part.module)]
    return sum(p.parameters for p in parts if recipe.weights and not why_kept(recipe, p)) * DTYPE.itemsize


def _of_window(skeleton: Any, block: dict[str, InFile], recipes: Sequence[Recipe], length: int) -> int:
    """What the Linears of a block read and give, experts counted as one, and the softmax where attention is cast."""
    matrices = {INDEX.sub("", name): tensor.stored.shape[-2:] for name, tensor in block.items()}
    widths = sum(sum(shape) for shape in matrices.values() if len(shape) > 1)
    heads = getattr(skeleton.config.get_text_config(decoder=True), "num_attention_heads", 0)
    scores = heads * length**2 * FLOAT32 if any(recipe.attention for recipe in recipes) else 0
    return BESIDE + length * widths * DTYPE.itemsize + 2 * scores


def _width(skeleton: Any) -> int:
    width: int = skeleton.get_input_embeddings().weight.shape[1]
    return width
