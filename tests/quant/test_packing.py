"""Packing: an exact inverse at every width, and the bytes of the libraries that read them."""

import pytest
import torch
from compressed_tensors.compressors.mxfp6.helpers import pack_fp6_to_uint8
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from torchao.prototype.mx_formats.kernels import pack_uint4, unpack_uint4

from fp8dash.choose.formats import E2M1, E2M3, FORMATS, INT4, FloatFormat
from fp8dash.quant.cast import DTYPES, decode
from fp8dash.quant.packing import pack, unpack

EVERY_WIDTH = [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 100, 576]
ROWS = 64


def codes_of(fmt, cols):
    """Random codes with every code of the format among them where there is room."""
    count = ROWS * cols
    bits = torch.randint(0, 1 << fmt.bits, (count,), generator=torch.Generator().manual_seed(cols))
    every = torch.arange(1 << fmt.bits)[:count]
    bits[: len(every)] = every
    bits = bits.view(ROWS, cols)
    if isinstance(fmt, FloatFormat):
        return bits.to(torch.uint8).view(DTYPES.get(fmt.name, torch.uint8))
    return (bits - (1 << (fmt.bits - 1))).to(torch.int8)


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("cols", EVERY_WIDTH)
def test_unpacking_gives_the_packed_codes_back(fmt, cols):
    codes = codes_of(fmt, cols)
    assert same(unpack(pack(codes, fmt), fmt, cols), codes)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_nothing_but_the_codes_is_stored(fmt):
    assert pack(codes_of(fmt, 576), fmt).nbytes == ROWS * 576 * fmt.bits // 8


@pytest.mark.parametrize("cols", [c for c in EVERY_WIDTH if c % 2 == 0])
def test_fp4_bytes_are_torchaos_and_compressed_tensors(cols):
    codes = codes_of(E2M1, cols)
    packed = pack(codes, E2M1)
    values = decode(codes, E2M1)
    assert same(packed, pack_uint4(codes)) and same(packed, pack_fp4_to_uint8(values))
    assert torch.equal(unpack_uint4(packed), codes)
    assert torch.equal(unpack_fp4_from_uint8(packed, ROWS, cols, torch.float32), values)


@pytest.mark.parametrize("cols", [c for c in EVERY_WIDTH if c % 4 == 0])
def test_fp6_bytes_are_compressed_tensors(cols):
    codes = codes_of(E2M3, cols)
    assert same(pack(codes, E2M3), pack_fp6_to_uint8(decode(codes, E2M3)))


@pytest.mark.parametrize("cols", EVERY_WIDTH)
def test_int4_words_are_compressed_tensors_ragged_ends_included(cols):
    codes = codes_of(INT4, cols)
    packed = pack(codes, INT4)
    assert same(packed, pack_to_int32(codes, 4))
    assert torch.equal(unpack_from_int32(packed, 4, codes.shape), codes)
