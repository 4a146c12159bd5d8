"""Runs a model's own forward through one of its blocks at a time, whatever the model passes between them.

A gate stands in the place of each block's forward. All that a model computes outside its blocks (embeddings, masks,
tables of positions) is computed anew for each block: little, next to a block. What the block before gave is put where
that block stood, and the forward is broken off as soon as the block has run. Blocks still before that give NaN: a
model in which a block reads more than what the one before it gave is found out, and never measured wrongly.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from fp8dash.model.head import body_of
from fp8dash.model.streaming.spill import Spill

Run = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]


class ReadsFurther(Exception):
    """A block read what another than the one before it gave, or was called out of turn."""


class _BlockPassed(BaseException):
    """Breaks off a forward: nothing between a block and the caller may catch it."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class Rehearsal:
    """Lets a forward pass with only one block loaded: each other gives what the last that ran gave.

    The numbers mean nothing, but modules are called as ever, and what they give has its shape and kind.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        """Puts gates in the places of a model's blocks."""
        self.order: list[int] = []  # in which a forward called the blocks
        self.loaded: tuple[int, nn.Module] | None = None
        self._given: Any = None
        _put_gates(blocks, self._run)

    def _run(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.order.append(index)
        if self.loaded and index == self.loaded[0]:
            self._given = _own_forward(self.loaded[1], args, kwargs)
        return self._given


class Replay:
    """A model's forward over several windows, block by block."""

    def __init__(self, model: Any, blocks: Iterable[nn.Module], scratch: Path) -> None:
        """Puts gates in the places of a model's blocks; what blocks give is kept in a folder."""
        self._model, self._scratch = model, scratch
        self._last = _put_gates(blocks, self._run) - 1
        self._at = -1
        self._block: nn.Module | None = None
        self._next = 0  # block that the forward will call
        self._where = torch.device("cpu")  # the model's own is its first weight's, which may be a block's
        self._given: Any = None  # by the block before, for the window that is being read
        self._before: Spill | None = None
        self._after: Spill | None = None
        self._structures: list[Any] = []  # of what each block gives: its tensors on the meta device
        self._nan: dict[tuple[Any, ...], Tensor] = {}

    @contextmanager
    def at(self, block: nn.Module) -> Iterator[None]:
        """Within it, windows are read by the next block, whose weights are given."""
        self._at, self._block = self._at + 1, block
        self._after = Spill(self._scratch) if self._at < self._last else None
        try:
            yield
        finally:
            self._block, self._before, self._after = None, self._after, None

    def read(self, window: int, ids: Tensor) -> Tensor | None:
        """Runs ids [1, L] through the block; returns the last hidden states [L, hidden] behind the last block.

        Raises ReadsFurther.
        """
        self._given, self._next = self._before.take(window) if self._before else None, 0
        self._where = ids.device
        try:
            states: Tensor = body_of(self._model)(input_ids=ids, use_cache=False).last_hidden_state
            return states[0]
        except _BlockPassed as passed:
            if self._after is None:
                raise
            self._after.keep(window, passed.output)
            if len(self._structures) == self._at:
                self._structures.append(_pytree.tree_map_only(Tensor, lambda one: one.to("meta"), passed.output))
            return None
        finally:
            self._given = None

    def close(self) -> None:
        """Frees what the block before gave."""
        if self._before:
            self._before.close()
        self._before = None

    def _run(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if index != self._next:
            raise ReadsFurther
        self._next += 1
        if index < self._at - 1:
            return _pytree.tree_map_only(Tensor, self._nothing, self._structures[index])
        if index == self._at - 1:
            return self._given
        if index > 1 and _has_nan((args, kwargs)) and not _has_nan(self._given):
            raise ReadsFurther
        output = _own_forward(self._block, args, kwargs)
        if index == self._last:
            return output
        raise _BlockPassed(output)

    def _nothing(self, shape: Tensor) -> Tensor:
        """NaN of a tensor's shape, or zeros where its dtype has none."""
        key = tuple(shape.shape), shape.dtype
        if key not in self._nan:
            value = float("nan") if shape.is_floating_point() else 0
            self._nan[key] = torch.full(shape.shape, value, dtype=shape.dtype, device=self._where)
        return self._nan[key]


def _put_gates(blocks: Iterable[nn.Module], run: Run) -> int:
    """Has each block's forward done by `run`; returns how many there are."""
    count = 0
    for index, block in enumerate(blocks):
        block.__dict__["forward"] = _gate(index, run)  # the instance's, before the class's
        count = index + 1
    return count


def _gate(index: int, run: Run) -> Callable[..., Any]:
    return lambda *args, **kwargs: run(index, args, kwargs)


def _own_forward(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A block's output by its class's forward, past the gate that its copies carry."""
    return type(block).forward(block, *args, **kwargs)


def _has_nan(value: Any) -> bool:
    tensors = (leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return any(bool(tensor.isnan().any()) for tensor in tensors)
