"""A checkpoint's tensors before they are read, in the form in which transformers' loader takes them.

The loader indexes each tensor once with `...` and sends the result to its device and dtype. Knows no model.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8dash.errors import ModelError
from fp8dash.model.folder import Stored, stored_tensors, weight_files

KINDS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class InFile:
    """A tensor of a file: read, into memory of its own, each time it is indexed."""

    file: Path
    stored: Stored

    def __getitem__(self, _whole: Any) -> Tensor:
        """The whole tensor; raises ModelError where the file ends before it does, or holds another dtype."""
        values = torch.empty(self.stored.shape, dtype=_kind(self.file, self.stored))
        if values.nbytes != self.stored.end - self.stored.begin:
            raise ModelError(f"{self.file} holds a tensor whose bytes are not those of its shape: download it again.")
        room = values.view(-1).view(torch.uint8).numpy().data
        with self.file.open("rb", buffering=0) as stream:
            done = 0
            while done < len(room):
                count = os.preadv(stream.fileno(), [room[done:]], self.stored.begin + done)
                if not count:
                    raise ModelError(f"{self.file} is shorter than its header says: download it again.")
                done += count
        return values


@dataclass(frozen=True, slots=True)
class Unread:
    """Stands for a tensor that stays in its file: wherever it is sent, it has a shape and no memory."""

    stored: Stored

    def __getitem__(self, _whole: Any) -> "Unread":
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of its shape on the meta device, whatever the device asked for."""
        return torch.empty(self.stored.shape, dtype=dtype or KINDS[self.stored.dtype], device="meta")


def tensors_in(folder: Path) -> dict[str, InFile]:
    """A trusted folder's tensors by name, none of them read; raises ModelError."""
    return {
        name: InFile(file, stored) for file in weight_files(folder) for name, stored in stored_tensors(file).items()
    }


def elements(tensor: InFile) -> int:
    """How many numbers it holds."""
    return math.prod(tensor.stored.shape)


def _kind(file: Path, stored: Stored) -> torch.dtype:
    try:
        return KINDS[stored.dtype]
    except KeyError:
        raise ModelError(f"{file} holds a tensor of {stored.dtype}, which no plain model has.") from None
