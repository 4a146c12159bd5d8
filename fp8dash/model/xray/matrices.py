"""The matrices of a checkpoint and how each is stored, told by its tensors and held against what the config claims.

Layouts: compressed-tensors 0.20 (`compressors/`); DeepSeek-V3 `inference/fp8_cast_bf16.py` (weight_scale_inv);
transformers `integrations/mxfp4.py` (GPT-OSS, _blocks and _scales); AutoGPTQ `nn_modules/qlinear` and AutoAWQ
`modules/linear/gemm.py` (qweight, qzeros, scales); ModelOpt `export/unified_export_hf.py` (weight_scale_2).
"""

import math
from dataclasses import dataclass

from fp8dash.choose.casts import Cast
from fp8dash.choose.formats import E2M1, E4M3FN, E5M2, INT4, INT8, Format
from fp8dash.choose.models.groups import group_of
from fp8dash.choose.models.quantized import (
    AWQ,
    BLOCKS,
    CODES,
    GPTQ,
    INVERSE,
    MODELOPT,
    NIBBLES,
    WORDS,
    Quantization,
    StoredGroup,
)
from fp8dash.choose.records import EMBEDDING, HEAD, NORM
from fp8dash.choose.scaling import FLOAT32, NVFP4, ONE_BIT, ROW, TENSOR, ScaleRule, Tile, tile_of
from fp8dash.model.xray.tensors import WIDE, Opened

SCALES = {  # the scale of each layout's codes: its name after the module's, or after the codes' for experts
    CODES: ".weight_scale", INVERSE: ".weight_scale_inv", WORDS: ".weight_scale", NIBBLES: ".weight_scale",
    MODELOPT: ".weight_scale", BLOCKS: "_scales", GPTQ: ".scales", AWQ: ".scales",
}  # fmt: skip
STORED: dict[str, Format] = {"F8_E4M3": E4M3FN, "F8_E5M2": E5M2, "I8": INT8}


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """One matrix of a checkpoint, [rows, cols] as it multiplies; experts stacked in one tensor are one."""

    module: str
    rows: int
    cols: int
    codes: str  # the tensor of its codes, or of its weights
    packing: str  # empty where it is not cast
    scale: str = ""  # its scale tensor; empty where none is stored
    grid: tuple[int, int] = (0, 0)  # shape of the scales as [rows, cols], whatever way they lie
    format: Format | None = None
    tile: Tile | None = None  # None where the scale's shape fits no tile
    rule: ScaleRule = FLOAT32
    claim: StoredGroup | None = None  # what the config says of it
    count: int = 1  # experts that are stacked in one tensor, each of these rows and columns

    @property
    def elements(self) -> int:
        return self.rows * self.cols * self.count

    @property
    def cast(self) -> Cast | None:
        """How it is stored, in the words of recipes; None for plain weights and where no tile fits."""
        if self.format is None or self.tile is None:
            return None
        claimed = self.claim.weights if self.claim else None
        if claimed and (claimed.format, claimed.tile, claimed.rule.stored) == (
            self.format,
            self.tile,
            self.rule.stored,
        ):
            return claimed
        return Cast(self.format, self.tile, self.rule)


def matrices_of(checkpoint: Opened, claim: Quantization | None) -> tuple[StoredMatrix, ...]:
    """Every matrix of the blocks and the head, in the order of the files; embeddings and norms are none."""
    matrices = []
    for name in checkpoint.tensors:
        matrix = _matrix(checkpoint, name, claim)
        if matrix and matrix.elements and (matrix.packing or group_of(matrix.module) not in (EMBEDDING, NORM)):
            matrices.append(matrix)
    return tuple(matrices)


def is_head(matrix: StoredMatrix) -> bool:
    return group_of(matrix.module) == HEAD


def _matrix(checkpoint: Opened, name: str, claim: Quantization | None) -> StoredMatrix | None:
    tensor, claimed = checkpoint.tensors[name], None
    if name.endswith("_blocks") and len(tensor.shape) == 4:
        module = name.removesuffix("_blocks")
        claimed = claim.group_of(module) if claim else None
        experts, rows, groups, size = tensor.shape
        return _cast(checkpoint, module, name, (rows, groups * size * 2), BLOCKS, E2M1, claimed, experts)
    module, _, part = name.rpartition(".")
    claimed = claim.group_of(module) if claim else None
    if part == "qweight" and len(tensor.shape) == 2:
        return _four_bit(checkpoint, module, name, tensor.shape, claimed)
    if part == "weight_packed" and len(tensor.shape) == 2:
        wide = claimed is not None and claimed.weights is not None and claimed.weights.format == INT8
        words = (INT8, WORDS, 4) if wide else (INT4, WORDS, 8)
        fmt, packing, each = (E2M1, NIBBLES, 2) if tensor.dtype == "U8" else words
        rows, cols = tensor.shape[0], _declared_cols(checkpoint, module, tensor.shape[1] * each)
        return _cast(checkpoint, module, name, (rows, cols), packing, fmt, claimed)
    stacked = len(tensor.shape) == 3 and "experts" in name and "scale" not in part and not part.endswith("bias")
    if stacked or (part == "weight" and len(tensor.shape) >= 2):
        module = module if part == "weight" else name
        if len(tensor.shape) > 3:
            return None
        rows, cols = tensor.shape[-2:]
        count = tensor.shape[0] if len(tensor.shape) == 3 else 1
        if tensor.dtype in WIDE:
            return StoredMatrix(module, rows, cols, name, "", claim=claimed, count=count)
        if tensor.dtype == "U8":
            return _cast(checkpoint, module, name, (rows, 2 * cols), MODELOPT, E2M1, claimed, count)
        if tensor.dtype in STORED:
            inverse = f"{module}.weight_scale_inv" in checkpoint.tensors
            packing = INVERSE if inverse else CODES
            return _cast(checkpoint, module, name, (rows, cols), packing, STORED[tensor.dtype], claimed, count)
    return None


def _declared_cols(checkpoint: Opened, module: str, most: int) -> int:
    """A packed matrix's columns by its weight_shape; those that its words hold where it says nothing that can be."""
    name = f"{module}.weight_shape"
    if name in checkpoint.tensors and checkpoint.tensors[name].shape == (2,):
        values = checkpoint.values(name)
        if len(values) == 2 and most - 8 < int(values[1]) <= most:
            return int(values[1])
    return most


def _four_bit(
    checkpoint: Opened, module: str, name: str, shape: tuple[int, ...], claimed: StoredGroup | None
) -> StoredMatrix | None:
    """GPTQ packs eight inputs a word, AWQ eight outputs: the scales' width tells which."""
    scale = checkpoint.tensors.get(f"{module}.scales")
    outputs = scale.shape[-1] if scale and scale.shape else shape[1]
    bits = claimed.weights.format.bits if claimed and claimed.weights else 4
    each = 32 // bits
    packing = AWQ if outputs == shape[1] * each else GPTQ
    size = (shape[1] * each, shape[0]) if packing == AWQ else (shape[1], shape[0] * each)
    return _cast(checkpoint, module, name, size, packing, INT8 if bits == 8 else INT4, claimed)


def _cast(
    checkpoint: Opened,
    module: str,
    codes: str,
    shape: tuple[int, int],
    packing: str,
    fmt: Format,
    claimed: StoredGroup | None,
    count: int = 1,
) -> StoredMatrix:
    scale = f"{module}{SCALES[packing]}"
    tensor = checkpoint.tensors.get(scale)
    if tensor is None:
        return StoredMatrix(module, *shape, codes, packing, "", (0, 0), fmt, None, FLOAT32, claimed, count)
    stacked = count > 1 and tensor.shape[:1] == (count,)
    grid = _grid(tensor.shape[1:] if stacked else tensor.shape, packing)
    rule = ONE_BIT if tensor.dtype in ("U8", "F8_E8M0") else NVFP4 if tensor.dtype == "F8_E4M3" else FLOAT32
    tile = _tile(grid, shape, claimed.weights.tile if claimed and claimed.weights else None)
    return StoredMatrix(module, *shape, codes, packing, scale, grid, fmt, tile, rule, claimed, count)


def _grid(shape: tuple[int, ...], packing: str) -> tuple[int, int]:
    if math.prod(shape) == 1:
        return 1, 1
    if len(shape) == 1:
        return shape[0], 1
    grid = math.prod(shape[:-1]), shape[-1]
    return (grid[1], grid[0]) if packing in (GPTQ, AWQ) else grid


def _tile(grid: tuple[int, int], shape: tuple[int, int], claimed: Tile | None) -> Tile | None:
    """The tile whose scales have this shape: the claimed one where it fits, since ragged edges leave several."""
    if 0 in grid or 0 in shape:
        return None
    if claimed and claimed.grid(*shape) == grid:
        return claimed
    if grid == (1, 1):
        return TENSOR
    if grid == (shape[0], 1):
        return ROW
    if grid[0] == shape[0] and shape[1] % grid[1] == 0:
        return tile_of(f"1x{shape[1] // grid[1]}")
    if shape[0] % grid[0] == 0 and shape[1] % grid[1] == 0:
        return tile_of(f"{shape[0] // grid[0]}x{shape[1] // grid[1]}")
    return None
