"""Last hidden states of a model under many recipes, each weight read from the files once.

For a model that is larger than memory: a block is loaded, cast by each recipe in turn, read by all of that recipe's
windows, and dropped. What comes out is bit for bit what a model gives that is loaded whole and cast by `cast_model`.
"""

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8dash.choose.hardware import Device
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.records import Progress
from fp8dash.errors import Fp8dashError, ModelError
from fp8dash.model.as_linears import few_tokens, make_linears
from fp8dash.model.float32 import in_float32
from fp8dash.model.head import full_head, hand_on, learn_after_head, learn_body
from fp8dash.model.parts import ModelPart, active_share, parts_of
from fp8dash.model.probe import first_line, out_of_memory
from fp8dash.model.streaming.gates import ReadsFurther, Rehearsal, Replay
from fp8dash.model.streaming.layout import refuse_unstreamed, unstreamed
from fp8dash.model.streaming.partial import PartialModel, forget
from fp8dash.model.swap import Swap, cast_parts, cast_paths, planned


@dataclass(frozen=True, slots=True)
class Heads:
    """What makes each recipe's logits from its last hidden states, and the share of the experts that a token meets."""

    heads: tuple[nn.Module, ...]  # by recipe
    active: float


@dataclass(frozen=True, slots=True)
class RecipeSwap:
    """What a recipe did to one parameter; each recipe's come in the order of `cast_model`."""

    recipe: int  # its index
    swap: Swap


@dataclass(frozen=True, slots=True)
class LastStates:
    """What a recipe's head reads in one window."""

    recipe: int
    window: int
    states: Tensor  # [L, hidden]


WIDENED = -1  # the index of the uncast weights in float32
log = logging.getLogger(__name__)
Streamed = Progress | Heads | RecipeSwap | LastStates


@torch.no_grad()
def last_hidden_states(
    folder: Path,
    recipes: Sequence[Recipe],
    ids: Tensor,
    device: Device,
    where: torch.device,
    *,
    backend: str,
    scratch: Path,
    stage: str = "perplexity",
    widened: bool = False,
) -> Iterator[Streamed]:
    """The stage's Progress for each block and recipe, a RecipeSwap for each parameter and recipe, Heads before any
    states, and the LastStates of each recipe and window.

    `ids` are windows of token ids [windows, L] for a trusted folder's model; hidden states between two blocks are kept
    in the folder `scratch`. With `widened` the uncast weights pass once more after the first recipe, computed in
    float32, as the recipe WIDENED: no states come of it where the model does not run so. Raises InvalidChoice for a
    recipe that needs the whole model at once, ModelError for such a model, and what casting raises.
    """
    for recipe in recipes:
        refuse_unstreamed(recipe)
    partial = PartialModel(folder, where)
    rehearsal = Rehearsal(partial.blocks)
    count, total = len(partial.blocks), len(partial.blocks) * (len(recipes) + widened)
    ids = ids.to(where)
    with ExitStack() as ends:
        numbers = [0, *([WIDENED] if widened else []), *range(1, len(recipes))]
        kinds = {number: (_Widened, Recipe()) if number == WIDENED else (_Cast, recipes[number]) for number in numbers}
        casts = {number: kind(partial, recipe, device, backend, scratch) for number, (kind, recipe) in kinds.items()}
        for number, cast in casts.items():
            ends.callback(cast.close)
            yield from (RecipeSwap(number, swap) for swap in cast.before if number != WIDENED)
        for index in range(count):
            yield Progress(stage, index * len(casts), total, f"reading block {index + 1} of {count}")
            with partial.block(index):
                parts = _looked_at(partial, rehearsal, index)
                if index == 0:
                    heads = {number: cast.head() for number, cast in casts.items()}
                    yield Heads(tuple(heads[number] for number in range(len(recipes))), active_share(partial.model))
                for done, (number, cast) in enumerate(list(casts.items())):
                    how = "in float32" if number == WIDENED else f"recipe {number + 1} of {len(recipes)}"
                    yield Progress(stage, index * len(casts) + done, total, f"block {index + 1} of {count}, {how}")
                    if not (yield from _through(cast, number, index, parts, ids)):
                        del casts[number]
        for number, cast in casts.items():
            yield from (RecipeSwap(number, swap) for swap in cast.after if number != WIDENED)


def _through(
    cast: "_Cast", number: int, index: int, parts: list[ModelPart], ids: Tensor
) -> Generator[RecipeSwap | LastStates, None, bool]:
    """What a recipe's windows give behind a block; returns whether it goes on: in float32 a model may not run."""
    try:
        for item in cast.through(number, index, parts, ids):
            if number != WIDENED or isinstance(item, LastStates):
                yield item
    except (RuntimeError, ModelError) as error:
        if number != WIDENED or out_of_memory(error):
            raise
        log.warning("no noise floor: %s", first_line(error))
        return False
    return True


def _looked_at(partial: PartialModel, rehearsal: Rehearsal, index: int) -> list[ModelPart]:
    """The parameters of a loaded block, Linears made of all it multiplies by; with the first block, the model's body
    and what follows its head are learned. Raises ModelError."""
    model, inside = partial.model, f"{partial.layout.place}.{index}."
    rehearsal.loaded = index, partial.blocks[index]
    try:
        make_linears(model, lambda name: name.startswith(inside))
        if index == 0:
            rehearsal.order.clear()
            states = learn_body(model, few_tokens(model))
            if rehearsal.order != list(range(len(partial.blocks))):
                raise unstreamed(partial.folder, "its forward does not call its blocks one after the other, each once")
            learn_after_head(model, states)
    except Fp8dashError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        raise unstreamed(
            partial.folder, f"a forward through block {index} alone fails ({first_line(error)})"
        ) from error
    finally:
        rehearsal.loaded = None
    return [part for part in parts_of(model) if part.name.startswith(inside)]


class _Cast:
    """One recipe's model: what stands outside the blocks cast, and the blocks passed through one by one."""

    def __init__(self, partial: PartialModel, recipe: Recipe, device: Device, backend: str, scratch: Path) -> None:
        """Copies the model and casts what stands outside its blocks."""
        self._partial, self._recipe, self._on = partial, recipe, (device, backend)
        self.model: Any = partial.copied()
        cast_paths(self.model, recipe, backend)
        self._blocks: Any = self.model.get_submodule(partial.layout.place)
        self._replay = Replay(self.model, self._blocks, scratch)
        self.close = self._replay.close
        parts = planned(self.model, recipe)
        first = next(number for number, part in enumerate(parts) if partial.layout.inside(part.module))
        behind = [part for part in parts[first:] if not partial.layout.inside(part.module)]
        self.before = list(cast_parts(self.model, parts[:first], recipe, *self._on))
        self.after = list(cast_parts(self.model, behind, recipe, *self._on))

    def head(self) -> nn.Module:
        """What makes the logits, once the uncast model's body and what follows its head are learned."""
        hand_on(self._partial.model, self.model)
        return full_head(self.model)

    def through(
        self, number: int, index: int, parts: list[ModelPart], ids: Tensor
    ) -> Iterator[RecipeSwap | LastStates]:
        """Casts a copy of the loaded block and has all windows read by it."""
        empty = self._blocks[index]
        self._blocks[index] = block = self._partial.block_for(index, self.model)
        try:
            for swap in cast_parts(self.model, parts, self._recipe, *self._on):
                yield RecipeSwap(number, swap)
            self._blocks[index] = empty
            with self._replay.at(block):
                for window, one in enumerate(ids):
                    states = self._read(index, window, one[None], block)
                    if states is not None:
                        yield LastStates(number, window, states)
        finally:
            forget(block)

    def _read(self, index: int, window: int, ids: Tensor, block: nn.Module) -> Tensor | None:
        try:
            return self._states(window, ids, block)
        except ReadsFurther:
            why = f"block {index} reads more than what the one before it gives"
            raise unstreamed(self._partial.folder, why) from None
        except Fp8dashError:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            why = f"block {index} does not run by itself ({first_line(error)})"
            raise unstreamed(self._partial.folder, why) from error

    def _states(self, window: int, ids: Tensor, _block: nn.Module) -> Tensor | None:
        return self._replay.read(window, ids)


class _Widened(_Cast):
    """The uncast model, computed in float32."""

    def _states(self, window: int, ids: Tensor, block: nn.Module) -> Tensor | None:
        with in_float32(self.model), in_float32(block):
            return self._replay.read(window, ids)
