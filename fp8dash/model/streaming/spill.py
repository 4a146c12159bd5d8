"""What a block gave for each pass, kept in a file until the next block has read it.

All recipes' and windows' hidden states together may exceed memory; the file has no name, and is gone with its last
reader, however the process ends.
"""

import os
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from fp8dash.errors import PlaceError


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor's bytes lie, and what to make of them."""

    begin: int
    size: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Spill:
    """Values, each a tensor or a structure of tensors, by number."""

    def __init__(self, folder: Path) -> None:
        """Makes the file in a folder."""
        self._folder = folder
        self._file, name = tempfile.mkstemp(prefix=".states-", dir=folder)
        self.close = weakref.finalize(self, os.close, self._file)  # frees the file's space
        os.unlink(name)
        self._kept: dict[int, tuple[list[Any], Any]] = {}
        self._end = 0

    def keep(self, key: int, value: Any) -> None:
        """Writes a value; raises PlaceError where the disk is full."""
        leaves, structure = _pytree.tree_flatten(value)
        self._kept[key] = [self._written(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure

    def take(self, key: int) -> Any:
        """The value, in memory of its own."""
        leaves, structure = self._kept[key]
        read = [self._read(leaf) if isinstance(leaf, _Place) else leaf for leaf in leaves]
        return _pytree.tree_unflatten(read, structure)

    def _written(self, tensor: Tensor) -> _Place:
        flat = tensor.detach().cpu().reshape(-1).contiguous()
        data = flat.view(torch.uint8).numpy().data
        place = _Place(self._end, len(data), tensor.shape, tensor.dtype, tensor.device)
        try:
            while data:
                written = os.pwrite(self._file, data, self._end)
                self._end, data = self._end + written, data[written:]
        except OSError as error:
            raise PlaceError(
                f"The hidden states between two blocks cannot be written to {self._folder}: {error.strerror}. Free "
                "space there, or measure fewer recipes or windows at once."
            ) from error
        return place

    def _read(self, place: _Place) -> Tensor:
        values = torch.empty(place.shape, dtype=place.dtype)
        data = values.view(-1).view(torch.uint8).numpy().data
        done = 0
        while done < place.size:
            done += os.preadv(self._file, [data[done:]], place.begin + done)
        return values.to(place.device)
