"""Tensors of safetensors files, read one at a time into memory of their own."""

import os
from pathlib import Path

import torch
from torch import Tensor

from fp8dash.errors import ModelError
from fp8dash.model.folder import Stored

DTYPE = torch.bfloat16  # of every baseline
DTYPES = {  # as safetensors calls them
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


def read_tensor(file: Path, stored: Stored) -> Tensor:
    """A whole tensor; raises ModelError where the file ends before it does, or holds another dtype or shape."""
    if stored.dtype not in DTYPES:
        raise ModelError(f"{file} holds a tensor of {stored.dtype}, which no model here has.")
    values = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    if values.nbytes != stored.end - stored.begin:
        raise ModelError(f"{file} holds a tensor whose bytes are not those of its shape: download it again.")
    room = values.view(-1).view(torch.uint8).numpy().data
    with file.open("rb", buffering=0) as stream:
        done = 0
        while done < len(room):
            count = os.preadv(stream.fileno(), [room[done:]], stored.begin + done)
            if not count:
                raise ModelError(f"{file} is shorter than its header says: download it again.")
            done += count
    return values
