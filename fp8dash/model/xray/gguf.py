"""The tensors of a GGUF file by its header: llama.cpp's format, version 2 and 3 (ggml `docs/gguf.md`). No torch.

Metadata is skipped but for its lengths; no weight is read.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fp8dash.errors import ModelError

MAGIC = b"GGUF"
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes by type of metadata
STRING, ARRAY = 8, 9
MOST = 1 << 24  # tensors, fields or items of one file
ALIGNMENT = 32  # of tensors, unless the metadata says otherwise
GGML: dict[int, tuple[str, int, int]] = {  # type: name, weights a block, bytes a block
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a GGUF file; rows are the outputs, as in a safetensors file."""

    name: str
    shape: tuple[int, ...]
    type: str  # as ggml calls it: Q4_0, F16
    begin: int  # byte after the header, aligned
    size: int  # bytes

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def gguf_tensors(file: Path) -> tuple[tuple[GgufTensor, ...], bool]:
    """The tensors of a GGUF file, and whether the file ends before they do; raises ModelError."""
    try:
        with file.open("rb") as stream:
            if stream.read(4) != MAGIC or _number(stream, "<I") not in (2, 3):
                raise ValueError("it does not begin as GGUF of version 2 or 3")
            tensors, fields = _number(stream, "<Q"), _number(stream, "<Q")
            if max(tensors, fields) > MOST:
                raise ValueError("its header counts more tensors than there can be")
            alignment = _skip_fields(stream, fields) or ALIGNMENT
            infos = tuple(_tensor(stream) for _ in range(tensors))
            start = -(-stream.tell() // alignment) * alignment
            end = max((start + info.begin + info.size for info in infos), default=0)
            return infos, end > file.stat().st_size
    except (OSError, ValueError, KeyError, struct.error, OverflowError, MemoryError) as error:
        raise ModelError(f"{file} cannot be read as GGUF ({error}): download it again.") from error


def _number(stream: BinaryIO, code: str) -> int:
    return int(struct.unpack(code, stream.read(struct.calcsize(code)))[0])


def _text(stream: BinaryIO) -> str:
    length = _number(stream, "<Q")
    if length > MOST:
        raise ValueError("a name in its header is longer than there can be")
    return stream.read(length).decode("utf-8", "replace")


def _skip_fields(stream: BinaryIO, count: int) -> int:
    """Reads past the metadata; the alignment that it says, or 0."""
    alignment = 0
    for _ in range(count):
        name, kind = _text(stream), _number(stream, "<I")
        if name == "general.alignment" and kind == 4:
            alignment = _number(stream, "<I")
        else:
            _skip(stream, kind)
    return alignment


def _skip(stream: BinaryIO, kind: int) -> None:
    if kind == STRING:
        _text(stream)
    elif kind == ARRAY:
        of, count = _number(stream, "<I"), _number(stream, "<Q")
        if count > MOST or of == ARRAY:
            raise ValueError("a list in its header is longer or deeper than there can be")
        for _ in range(count if of == STRING else 0):
            _text(stream)
        stream.seek(0 if of == STRING else count * SCALARS[of], 1)
    else:
        stream.seek(SCALARS[kind], 1)


def _tensor(stream: BinaryIO) -> GgufTensor:
    name, axes = _text(stream), _number(stream, "<I")
    if axes > 8:
        raise ValueError("a tensor has more axes than there can be")
    shape = tuple(_number(stream, "<Q") for _ in range(axes))[::-1]
    kind, begin = _number(stream, "<I"), _number(stream, "<Q")
    label, block, size = GGML[kind]
    return GgufTensor(name, shape, label, begin, math.prod(shape) // block * size)
