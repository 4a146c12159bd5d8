"""The weights that a quantized checkpoint's codes stand for, to the bit as the library that wrote it decodes them.

Products are made in float32, where a code times a 16-bit scale is exact, and rounded once to the scales' dtype as the
libraries do. Sources: compressed-tensors 0.20 `compressors/` and `quantization/lifecycle/forward.py`; DeepSeek-V3
`inference/fp8_cast_bf16.py`; transformers 5.24 `integrations/mxfp4.py`; AutoGPTQ, AutoAWQ and ModelOpt as named in
`fp8dash.model.xray`.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fp8dash.choose.formats import E2M1
from fp8dash.choose.models.quantized import AWQ, BLOCKS, CODES, GPTQ, INVERSE, MODELOPT, NIBBLES, WORDS
from fp8dash.model.tensors import DTYPE, DTYPES, read_tensor
from fp8dash.model.xray.codes import integers_of
from fp8dash.model.xray.matrices import StoredMatrix
from fp8dash.model.xray.tensors import Opened, powers
from fp8dash.quant.cast import decode, spread
from fp8dash.quant.packing import unpack

POWERS = ("U8", "F8_E8M0")  # dtypes of scales that are exponents


def tensor_of(checkpoint: Opened, name: str) -> Tensor:
    """A tensor as it is stored, in memory of its own; raises ModelError."""
    return read_tensor(checkpoint.files[name], checkpoint.tensors[name])


def decoded(checkpoint: Opened, matrix: StoredMatrix) -> Tensor:
    """The weights of a matrix [rows, cols], or of stacked experts [count, rows, cols], as their library decodes them.

    The matrix has a tile and all its tensors.
    """
    if matrix.packing in (WORDS, GPTQ, AWQ):
        return _integers(checkpoint, matrix)
    return FLOATS[matrix.packing](checkpoint, matrix)


def _integers(checkpoint: Opened, matrix: StoredMatrix) -> Tensor:
    stored = integers_of(checkpoint, matrix)
    steps = (stored.codes - stored.zeros[:, stored.groups]).astype(np.float32)
    steps *= stored.scales[:, stored.groups]
    return torch.from_numpy(steps).to(DTYPES[checkpoint.tensors[matrix.scale].dtype])


def _bytes(checkpoint: Opened, matrix: StoredMatrix) -> Tensor:
    """Eight-bit codes; integers may have zero points."""
    codes, scales, dtype = tensor_of(checkpoint, matrix.codes).float(), *_scales(checkpoint, matrix)
    zeros = f"{matrix.module}.weight_zero_point"
    if zeros in checkpoint.tensors:
        codes -= _whole(tensor_of(checkpoint, zeros).float().view(matrix.grid), matrix)
    if matrix.count == 1:
        return (codes * _whole(scales.view(matrix.grid), matrix)).to(dtype)
    each = scales.view(matrix.count, *matrix.grid)
    return torch.stack([(one * _whole(own, matrix)).to(dtype) for one, own in zip(codes, each, strict=True)])


def _nibbles(checkpoint: Opened, matrix: StoredMatrix) -> Tensor:
    """Two E2M1 codes a byte, with a global scale that divides."""
    scales, _ = _scales(checkpoint, matrix)
    name = f"{matrix.module}.weight_global_scale"
    if name in checkpoint.tensors:
        scales = scales / tensor_of(checkpoint, name).float().view(())
    return _e2m1(checkpoint, matrix, scales)


def _modelopt(checkpoint: Opened, matrix: StoredMatrix) -> Tensor:
    """As `_nibbles`, with a second scale that multiplies."""
    scales, _ = _scales(checkpoint, matrix)
    return _e2m1(checkpoint, matrix, scales * tensor_of(checkpoint, f"{matrix.module}.weight_scale_2").float().view(()))


def _e2m1(checkpoint: Opened, matrix: StoredMatrix, scales: Tensor) -> Tensor:
    codes = unpack(tensor_of(checkpoint, matrix.codes).view(matrix.rows, -1), E2M1, matrix.cols)
    return (decode(codes, E2M1) * _whole(scales.view(matrix.grid), matrix)).to(DTYPE)


def _blocks(checkpoint: Opened, matrix: StoredMatrix) -> Tensor:
    """GPT-OSS: [experts, rows, groups, 16] bytes of two codes each, and a power of two a group."""
    packed, scales = tensor_of(checkpoint, matrix.codes), tensor_of(checkpoint, matrix.scale)
    values = torch.empty(matrix.count, matrix.rows, matrix.cols, dtype=DTYPE)
    for into, codes, own in zip(values, packed, scales, strict=True):
        steps = decode(unpack(codes.flatten(1), E2M1, matrix.cols), E2M1).view(matrix.rows, own.shape[-1], -1)
        into.copy_(torch.ldexp(steps, own.int()[..., None] - 127).flatten(1))
    return values


def _scales(checkpoint: Opened, matrix: StoredMatrix) -> tuple[Tensor, torch.dtype]:
    """A matrix's scales in float32, and the dtype in which its weights are decoded."""
    stored, dtype = tensor_of(checkpoint, matrix.scale), checkpoint.tensors[matrix.scale].dtype
    if dtype in POWERS:
        values = checkpoint.values(matrix.scale)
        return torch.from_numpy(powers(values) if dtype == "U8" else values).float(), DTYPE
    return stored.float(), DTYPE if dtype.startswith("F8") else DTYPES[dtype]


def _whole(scales: Tensor, matrix: StoredMatrix) -> Tensor:
    """Scales [grid] in a shape that multiplies the matrix; raises ValueError where it has no tile."""
    if matrix.tile is None:
        raise ValueError(f"{matrix.module} has scales of a shape that fits no tile")
    return spread(scales, matrix.tile, matrix.rows, matrix.cols)


FLOATS: dict[str, Callable[[Opened, StoredMatrix], Tensor]] = {
    CODES: _bytes,
    INVERSE: _bytes,
    NIBBLES: _nibbles,
    MODELOPT: _modelopt,
    BLOCKS: _blocks,
}
