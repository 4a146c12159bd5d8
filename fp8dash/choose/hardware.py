"""Which kernel runs a layer natively on a device, and why not. Values only: no torch.

A refusal says which rule refuses, whose rule it is in brackets, and the nearest casts that run there. Rules as read in
PyTorch: `aten/src/ATen/native/cuda/ScaledBlas.cpp` (shapes, Hopper and CUDA 12.9 for blocks, E5M2),
`native/ScaledBlasUtils.cpp` (formats of block-wise and MX operands), `cuda/CUDABlas.cpp` (CUDA 12.8 for MX),
`native/cuda/RowwiseScaledMM.cu` (row scales without cuBLASLt), and 2.13's `torch/_meta_registrations.py` (shapes of
block scales). CPU kernels take any shape with tensor or row scales, tried on the CPU build of 2.13.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from fp8dash.choose.casts import Cast
from fp8dash.choose.formats import E4M3FN, E5M2, INT8
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.scaling import (
    BLOCK_128X128,
    DYNAMIC,
    FLOAT32,
    GROUP_1X32,
    GROUP_1X128,
    POW2,
    RCEIL,
    ROW,
    TENSOR,
)

SCALED_MM, INT_MM = "scaled_mm", "int_mm"
FP8 = (E4M3FN, E5M2)
COARSE = (TENSOR, ROW)
PLAIN = ((TENSOR, TENSOR), (ROW, ROW))  # tiles of the weights and of the activations
BLOCKS = ((BLOCK_128X128, GROUP_1X128), (GROUP_1X128, GROUP_1X128))
MX = ((GROUP_1X32, GROUP_1X32),)
ADA, HOPPER, BLACKWELL = (8, 9), (9, 0), (10, 0)  # compute capabilities
CUDA_BLOCKS, CUDA_MX = (12, 9), (12, 8)  # the first CUDA whose cuBLASLt has such scales


@dataclass(frozen=True, slots=True)
class Device:
    """Where a run is measured."""

    kind: str  # "cpu" or "cuda"
    name: str
    capability: tuple[int, int] = (0, 0)
    memory_bytes: int = 0
    cuda: tuple[int, int] = (0, 0)  # of the torch build; (0, 0) where there is none or nobody told

    @property
    def label(self) -> str:
        """What the leaderboard shows."""
        return self.name or self.kind


@dataclass(frozen=True, slots=True)
class KernelPath:
    """The kernel that runs a cast layer natively, or the reason why none does."""

    kernel: str | None
    reason: str

    @property
    def is_native(self) -> bool:
        """True where a kernel multiplies the codes themselves."""
        return self.kernel is not None


def native_path(recipe: Recipe, n: int, k: int, device: Device) -> KernelPath:
    """The native kernel of an [n, k] weight under a recipe on a device, or why there is none.

    >>> from fp8dash.choose.recipe import parse_recipe
    >>> native_path(parse_recipe("w=e4m3fn/row a=e4m3fn/row"), 576, 576, Device("cpu", "")).kernel
    'scaled_mm'
    >>> native_path(parse_recipe("w=e4m3fn/row a=e4m3fn/row"), 100, 200, Device("cuda", "", (9, 0))).reason
    'K=200 and N=100 must both be multiples of 16 (torch); closest alternative: skip this layer or emulate it'
    """
    weights, activations = recipe.weights, recipe.activations
    if not weights or not activations:
        refusal = "a native kernel needs both operands cast (torch)"
        given = weights or activations or Cast(E4M3FN, ROW)
        nearest = _nearest(weights or _by_row(given), activations or _by_row(given), n, k, device)
        return KernelPath(None, f"{refusal}; closest alternative: {nearest}")
    if refusal := _refusal(weights, activations, n, k, device):
        return KernelPath(None, f"{refusal}; closest alternative: {_nearest(weights, activations, n, k, device)}")
    is_int = weights.format == INT8
    return KernelPath(INT_MM, "torch int8 matrix multiply") if is_int else KernelPath(SCALED_MM, "torch scaled_mm")


def _refusal(weights: Cast, activations: Cast, n: int, k: int, device: Device) -> str:
    """Which rule refuses an [n, k] layer, and whose it is; empty where a kernel takes it."""
    if weights.format == activations.format == INT8:
        return _int_refusal(weights, activations, n, k, device)
    if weights.format in FP8 and activations.format in FP8:
        return _fp8_refusal(weights, activations, n, k, device)
    return f"no kernel multiplies {activations.format.name} by {weights.format.name} (torch)"


@lru_cache(4_096)
def _nearest(weights: Cast, activations: Cast, n: int, k: int, device: Device) -> str:
    """The text of the casts that run and differ least: in rules first, then in tiles as fine, then in formats."""
    choices = [
        (_distance((weights, activations), pair), index, pair)
        for index, pair in enumerate(_neighbours(weights, activations))
        if not _refusal(*pair, n, k, device)
    ]
    if not choices:
        return "skip this layer or emulate it"
    w, a = min(choices)[2]
    return f"w={w.text} a={a.text}"


def _neighbours(weights: Cast, activations: Cast) -> Iterator[tuple[Cast, Cast]]:
    """Casts of other formats, tiles and rules that some kernel takes."""
    formats = ((weights.format, activations.format), (E4M3FN, activations.format), (E4M3FN, E4M3FN), (INT8, INT8))
    rules = (None, POW2, FLOAT32, RCEIL)
    for w_format, a_format in formats:
        for w_tile, a_tile in ((weights.tile, activations.tile), *PLAIN[::-1], *BLOCKS, *MX):
            for w_rule, a_rule in product(rules, rules):
                when = activations.when if a_tile == TENSOR else DYNAMIC  # made beforehand, a scale is the tensor's
                yield (
                    replace(weights, format=w_format, tile=w_tile, rule=w_rule or weights.rule),
                    replace(activations, format=a_format, tile=a_tile, rule=a_rule or activations.rule, when=when),
                )


def _distance(asked: tuple[Cast, Cast], offered: tuple[Cast, Cast]) -> int:
    """How unlike two pairs of casts are. What is unlike in rules alone is nearest, in formats farthest."""
    steps = 0
    for old, new in zip(asked, offered, strict=True):
        steps += 20 * (old.format != new.format)
        if old.tile != new.tile:
            steps += 3 if (old.tile in COARSE) == (new.tile in COARSE) else 12
        if old.rule != new.rule:
            steps += 1 if bool(old.rule.power_of) == bool(new.rule.power_of) else 2
        steps += old.when != new.when
    return steps


def _by_row(cast: Cast) -> Cast:
    """The same cast for the operand that has none, one scale per row."""
    return replace(cast, tile=ROW, rule=FLOAT32, when=DYNAMIC)


def _int_refusal(weights: Cast, activations: Cast, n: int, k: int, device: Device) -> str:
    if (weights.tile, activations.tile) not in PLAIN:
        return _no_kernel(weights, activations, "torch's int8 product is scaled afterwards, by tensor or row")
    if not _float32(weights, activations):
        return "int8's tensor and row kernels take float32 scales (fp8dash)"
    if device.kind == "cuda" and (k % 8 or n % 8):
        return f"K={k} and N={n} must both be multiples of 8 (torch)"
    return ""


def _fp8_refusal(weights: Cast, activations: Cast, n: int, k: int, device: Device) -> str:
    """Why torch.scaled_mm cannot run an [n, k] layer of FP8 codes; empty where it can."""
    tiles = (weights.tile, activations.tile)
    if tiles not in PLAIN + BLOCKS + MX:
        return _no_kernel(weights, activations, "torch has none")
    if device.kind != "cuda":
        if tiles not in PLAIN:
            return _no_kernel(weights, activations, "torch's CPU kernels take tensor and row scales")
        return "" if _float32(weights, activations) else _float32_refusal("tensor and row")
    refusal = _cuda_refusal(weights, activations, n, k, device)
    if refusal or tiles in PLAIN:
        return refusal or _plain_refusal(weights, activations, device)
    if tiles in MX:
        return _mx_refusal(weights, activations, device)
    return _block_refusal(weights, activations, k, device)


def _cuda_refusal(weights: Cast, activations: Cast, n: int, k: int, device: Device) -> str:
    """What every FP8 kernel asks of a CUDA device and of a shape."""
    if device.capability < ADA:
        have = _dotted(device.capability)
        return f"FP8 tensor cores need compute capability 8.9, this device has {have} (hardware)"
    if k % 16 or n % 16:
        return f"K={k} and N={n} must both be multiples of 16 (torch)"
    if weights.format == activations.format == E5M2:
        return "E5M2 × E5M2 is not multiplied (cuBLASLt, checked by torch)"
    return ""


def _plain_refusal(weights: Cast, activations: Cast, device: Device) -> str:
    """Tensor and row scales on CUDA; cuBLASLt has row scales on Hopper from 12.9, elsewhere torch uses CUTLASS."""
    if not _float32(weights, activations):
        return _float32_refusal("tensor and row")
    cublas = device.capability[0] == HOPPER[0] and device.cuda >= CUDA_BLOCKS
    if weights.tile == ROW and weights.format == E5M2 and not cublas:
        return "row scales with E5M2 weights need Hopper and CUDA 12.9 (torch's CUTLASS)"
    return ""


def _block_refusal(weights: Cast, activations: Cast, k: int, device: Device) -> str:
    """128x128 or 1x128 weights by 1x128 activations.

    A ragged N runs: the kernel counts ceil(N / 128) blocks, and vLLM tests N = 576 on Hopper (pull request 49932). A
    ragged K is refused though the kernel's own check would pass it: traced, torch counts K // 128, and nobody tests it.
    """
    if device.capability[0] != HOPPER[0]:
        have = _dotted(device.capability)
        return f"block-wise scales run on compute capability 9.x only, this is {have} (cuBLASLt)"
    if device.cuda < CUDA_BLOCKS:
        return f"block-wise scales need CUDA 12.9, this torch has {_dotted(device.cuda)} (cuBLASLt)"
    if not _both_e4m3fn(weights, activations):
        return "block-wise scales are for e4m3fn by e4m3fn (torch)"
    if k % 128:
        return f"K={k} must be a multiple of 128 for block-wise scales (torch's shape rule)"
    return "" if _float32(weights, activations) else _float32_refusal("block-wise")


def _mx_refusal(weights: Cast, activations: Cast, device: Device) -> str:
    """1x32 tiles with E8M0 scales; torch takes K that are not multiples of 32."""
    if device.capability < BLACKWELL:
        have = _dotted(device.capability)
        return f"1x32 scales need compute capability 10.0, this device has {have} (hardware)"
    if device.cuda < CUDA_MX:
        return f"1x32 scales need CUDA 12.8, this torch has {_dotted(device.cuda)} (cuBLASLt)"
    if not _both_e4m3fn(weights, activations):
        return "1x32 scales are for e4m3fn by e4m3fn (torch)"
    if any(cast.rule.stored != "e8m0" or cast.rule.outer for cast in (weights, activations)):
        return "1x32 scales must be E8M0, one level (cuBLASLt)"
    return ""


def _both_e4m3fn(weights: Cast, activations: Cast) -> bool:
    return weights.format == activations.format == E4M3FN


def _float32(weights: Cast, activations: Cast) -> bool:
    """True where both casts keep one level of scales that are float32, or none, which is a scale of 1."""
    return all(cast.rule.stored in ("float32", "") and not cast.rule.outer for cast in (weights, activations))


def _float32_refusal(kernels: str) -> str:
    return f"native {kernels} kernels take float32 scales (torch)"


def _no_kernel(weights: Cast, activations: Cast, why: str) -> str:
    pair = f"{weights.tile.name} weights with {activations.tile.name} activations"
    return f"no native kernel for {pair} ({why})"


def _dotted(version: tuple[int, int]) -> str:
    """A version or compute capability as people write it; "none known" for (0, 0)."""
    return f"{version[0]}.{version[1]}" if any(version) else "none known"
