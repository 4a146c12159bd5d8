"""Codes of fewer than eight bits to the bytes that checkpoints store, and back. Torch only; codes are [rows, cols].

4-bit floats  two codes a byte, low nibble first (torchao, compressed-tensors, OCP MX): [rows, cols / 2]
6-bit floats  four codes in three bytes, low bits first (compressed-tensors): [rows, cols / 4 * 3]
4-bit ints    eight codes in an int32, low nibble first, each plus 8 (compressed-tensors): [rows, cols / 8]

A ragged end is filled up with zero bits, as compressed-tensors does. Eight-bit codes are stored as they are.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8dash.choose.formats import FloatFormat, Format

INT4_OFFSET = 8  # of the stored nibble over the code


def pack(codes: Tensor, fmt: Format) -> Tensor:
    """The stored form of codes [rows, cols]: uint8 for floats, int32 for INT4, as they are at eight bits.

    >>> from fp8dash.choose.formats import E2M1, INT4
    >>> pack(torch.tensor([[1, 2, 3]], dtype=torch.uint8), E2M1).tolist()
    [[33, 3]]
    >>> [f"{word:#x}" for word in pack(torch.tensor([[-8, -7, 0, 7]], dtype=torch.int8), INT4)[0].tolist()]
    ['0xf810']
    """
    if fmt.bits == 8:
        return codes
    if not isinstance(fmt, FloatFormat):
        return _pack_int4(codes)
    return _pack_nibbles(codes) if fmt.bits == 4 else _pack_sixes(codes)


def unpack(packed: Tensor, fmt: Format, cols: int) -> Tensor:
    """The inverse of `pack` for codes [rows, cols]: uint8 for floats, int8 for INT4."""
    if fmt.bits == 8:
        return packed
    if not isinstance(fmt, FloatFormat):
        return _unpack_int4(packed)[:, :cols]
    return (_unpack_nibbles(packed) if fmt.bits == 4 else _unpack_sixes(packed))[:, :cols]


def _groups(codes: Tensor, size: int) -> Tensor:
    """Stored codes [rows, cols] as [rows, groups, size]; the last group is padded with zeros."""
    return pad(codes, (0, -codes.shape[1] % size)).view(len(codes), -1, size)


def _pack_nibbles(codes: Tensor) -> Tensor:
    low, high = _groups(codes, 2).unbind(-1)
    return low | high << 4


def _unpack_nibbles(packed: Tensor) -> Tensor:
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(1)


def _pack_sixes(codes: Tensor) -> Tensor:
    a, b, c, d = _groups(codes, 4).unbind(-1)  # dddddd cccccc bbbbbb aaaaaa, 24 bits, low byte first
    return torch.stack((a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2), -1).flatten(1)


def _unpack_sixes(packed: Tensor) -> Tensor:
    x, y, z = packed.view(len(packed), -1, 3).unbind(-1)
    return torch.stack((x, x >> 6 | y << 2, y >> 4 | z << 4, z >> 2), -1).bitwise_and_(0x3F).flatten(1)


def _pack_int4(codes: Tensor) -> Tensor:
    nibbles = _groups(codes.to(torch.int32) + INT4_OFFSET, 8)  # [rows, words, 8]
    return (nibbles << _shifts(codes)).sum(-1, dtype=torch.int32)  # disjoint bits: the sum is their union


def _unpack_int4(packed: Tensor) -> Tensor:
    return (packed[..., None] >> _shifts(packed) & 0xF).sub_(INT4_OFFSET).to(torch.int8).flatten(1)


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(0, 32, 4, dtype=torch.int32, device=like.device)
