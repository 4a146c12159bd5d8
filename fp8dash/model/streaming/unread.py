"""A checkpoint's tensors before they are read, in the form in which transformers' loader takes them.

The loader indexes each tensor once with `...` and sends the result to its device and dtype. Knows no model.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8dash.model.folder import Stored, stored_tensors, weight_files
from fp8dash.model.tensors import DTYPES, read_tensor


@dataclass(frozen=True, slots=True)
class InFile:
    """A tensor of a file: read, into memory of its own, each time it is indexed."""

    file: Path
    stored: Stored

    def __getitem__(self, _whole: Any) -> Tensor:
        """The whole tensor; raises ModelError."""
        return read_tensor(self.file, self.stored)


@dataclass(frozen=True, slots=True)
class Unread:
    """Stands for a tensor that stays in its file: wherever it is sent, it has a shape and no memory."""

    stored: Stored

    def __getitem__(self, _whole: Any) -> "Unread":
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of its shape on the meta device, whatever the device asked for."""
        return torch.empty(self.stored.shape, dtype=dtype or DTYPES[self.stored.dtype], device="meta")


def tensors_in(folder: Path) -> dict[str, InFile]:
    """A trusted folder's tensors by name, none of them read; raises ModelError."""
    return {
        name: InFile(file, stored) for file in weight_files(folder) for name, stored in stored_tensors(file).items()
    }


def elements(tensor: InFile) -> int:
    """How many numbers it holds."""
    return math.prod(tensor.stored.shape)
