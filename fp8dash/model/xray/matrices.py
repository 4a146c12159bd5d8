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
from fp8dash.choose.scaling import FLOAT32, NVFP4, ONE_BIT, RCEIL, ROW, TENSOR, ScaleRule, Tile, tile_of
from fp8dash.model.xray.tensors import WIDE, Opened

SCALES = {  # the scale of each layout's codes: its name after the module's, or after the codes' for experts
    CODES: ".weight_scale", INVERSE: ".weight_scale_inv", WORDS: ".weight_scale", NIBBLES: ".weight_scale",
    MODELOPT: ".weight_scale", BLOCKS: "_scales", GPTQ: ".scales", AWQ: ".scales",
}  # fmt: skip
INVERSES = (".weight_scale_inv", ".scale", ".qscale_weight", "_scale_inv")  # names: transformers, finegrained_fp8.py
INTEGERS = {4: INT4, 8: INT8}
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
        rows, width = tensor.shape
        if tensor.dtype == "U8":
            return _cast(checkpoint, module, name, (rows, 2 * width), NIBBLES, E2M1, claimed)
        bits, cols = _words(checkpoint, module, (rows, width), claimed)
        return _cast(checkpoint, module, name, (rows, cols), WORDS, INTEGERS.get(bits), claimed)
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
            packing = INVERSE if _scale_name(checkpoint, module, INVERSE) in checkpoint.tensors else CODES
            return _cast(checkpoint, module, name, (rows, cols), packing, STORED[tensor.dtype], claimed, count)
    return None


def _words(checkpoint: Opened, module: str, shape: tuple[int, int], claimed: StoredGroup | None) -> tuple[int, int]:
    """Bits a code and columns of packed words [rows, width]: by weight_shape, else by the config."""
    name, (rows, width) = f"{module}.weight_shape", shape
    bits = _claimed_bits(claimed)
    if name in checkpoint.tensors and checkpoint.tensors[name].shape == (2,):
        values = [int(value) for value in checkpoint.values(name)]
        if len(values) == 2 and values[0] == rows and values[1] > 0:
            fitting = [own for own in (bits, *range(1, 9)) if math.ceil(values[1] * own / 32) == width]
            if fitting:  # words of few columns fit several widths
                return fitting[0], values[1]
    return bits, width * 32 // bits


def _claimed_bits(claimed: StoredGroup | None) -> int:
    return claimed.weights.format.bits if claimed and claimed.weights else 4


def _four_bit(
    checkpoint: Opened, module: str, name: str, shape: tuple[int, ...], claimed: StoredGroup | None
) -> StoredMatrix | None:
    """GPTQ packs inputs into words and AWQ outputs: the scales' width tells which, g_idx or that width the bits."""
    scale, order = checkpoint.tensors.get(f"{module}.scales"), checkpoint.tensors.get(f"{module}.g_idx")
    outputs = scale.shape[-1] if scale and scale.shape else shape[1]
    if shape[1] and outputs // shape[1] in (4, 8) and outputs % shape[1] == 0:
        bits, size, packing = 32 // (outputs // shape[1]), (outputs, shape[0]), AWQ
    else:
        inputs = order.shape[0] if order and len(order.shape) == 1 else 0
        bits = 32 * shape[0] // inputs if inputs and 32 * shape[0] % inputs == 0 else _claimed_bits(claimed)
        bits = bits if 1 <= bits <= 8 else 4
        size, packing = (shape[1], 32 * shape[0] // bits), GPTQ
    return _cast(checkpoint, module, name, size, packing, INTEGERS.get(bits), claimed)


def _scale_name(checkpoint: Opened, module: str, packing: str) -> str:
    """The scale's name: the one of several that is stored, or the usual one."""
    names = [f"{module}{end}" for end in (INVERSES if packing == INVERSE else (SCALES[packing],))]
    return next((name for name in names if name in checkpoint.tensors), names[0])


def _cast(
    checkpoint: Opened,
    module: str,
    codes: str,
    shape: tuple[int, int],
    packing: str,
    fmt: Format | None,
    claimed: StoredGroup | None,
    count: int = 1,
) -> StoredMatrix:
    scale = _scale_name(checkpoint, module, packing)
    tensor = checkpoint.tensors.get(scale)
    if tensor is None:
        return StoredMatrix(module, *shape, codes, packing, "", (0, 0), fmt, None, FLOAT32, claimed, count)
    stacked = count > 1 and tensor.shape[:1] == (count,)
    grid = _grid(tensor.shape[1:] if stacked else tensor.shape, packing)
    power = RCEIL if packing in (INVERSE, BLOCKS) else ONE_BIT  # DeepSeek rounds powers of two up
    rule = power if tensor.dtype in ("U8", "F8_E8M0") else NVFP4 if tensor.dtype == "F8_E4M3" else FLOAT32
    tile = _tile(grid, shape, claimed.weights.tile if claimed and claimed.weights else None)
    return StoredMatrix(module, *shape, codes, packing, scale, grid, fmt, tile, rule, claimed, count)


def _grid(shape: tuple[int, ...], packing: str) -> tuple[int, int]:
    if math.prod(shape) == 1:
        return 1, 1
    if len(shape) == 1:
        return shape[0], 1
    if len(shape) == 4 and shape[1] == shape[3] == 1:  # ModelOpt's blocks
        return shape[0], shape[2]
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
