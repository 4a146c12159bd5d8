"""Which kernel runs a layer natively on a device, and why not. Values only: no torch.

A refusal says which rule refuses, whose rule it is in brackets, and the nearest choice that works. Rules as read in
PyTorch: `aten/src/ATen/native/cuda/ScaledBlas.cpp` (shapes, Hopper and CUDA 12.9 for blocks, E5M2),
`native/ScaledBlasUtils.cpp` (formats of block-wise and MX operands), `cuda/CUDABlas.cpp` (CUDA 12.8 for MX),
`native/cuda/RowwiseScaledMM.cu` (row scales without cuBLASLt), and 2.13's `torch/_meta_registrations.py` (shapes of
block scales). CPU kernels take any shape with tensor or row scales, tried on the CPU build of 2.13.
"""

from dataclasses import dataclass

from fp8dash.choose.formats import E4M3FN, E5M2, INT8
from fp8dash.choose.recipe import Cast, Recipe
from fp8dash.choose.scaling import BLOCK_128X128, GROUP_1X32, GROUP_1X128, ROW, TENSOR

SCALED_MM, INT_MM = "scaled_mm", "int_mm"
FP8 = (E4M3FN, E5M2)
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
class Path:
    """The kernel that runs a cast layer natively, or the reason why none does."""

    kernel: str | None
    reason: str

    @property
    def is_native(self) -> bool:
        """True where a kernel multiplies the codes themselves."""
        return self.kernel is not None


def native_path(recipe: Recipe, n: int, k: int, device: Device) -> Path:
    """The native kernel of an [n, k] weight under a recipe on a device, or why there is none.

    >>> from fp8dash.choose.recipe import parse_recipe
    >>> native_path(parse_recipe("w=e4m3fn/row a=e4m3fn/row"), 576, 576, Device("cpu", "")).kernel
    'scaled_mm'
    >>> native_path(parse_recipe("w=e4m3fn/row a=e4m3fn/row"), 100, 200, Device("cuda", "", (9, 0))).reason
    'K=200 and N=100 must both be multiples of 16 (torch); nearest: skip this layer or emulate it'
    """
    weights, activations = recipe.weights, recipe.activations
    if not weights or not activations:
        return Path(None, "a native kernel needs both operands cast (torch); nearest: row for both")
    if weights.format == activations.format == INT8:
        refusal, kernel, name = _int_refusal(weights, activations, n, k, device), INT_MM, "torch int8 matrix multiply"
    elif weights.format in FP8 and activations.format in FP8:
        refusal, kernel, name = _fp8_refusal(weights, activations, n, k, device), SCALED_MM, "torch scaled_mm"
    else:
        pair = f"{activations.format.name} by {weights.format.name}"
        return Path(None, f"no kernel multiplies {pair} (torch); nearest: e4m3fn or int8 for both")
    return Path(None, refusal) if refusal else Path(kernel, name)


def _int_refusal(weights: Cast, activations: Cast, n: int, k: int, device: Device) -> str:
    if (weights.tile, activations.tile) not in PLAIN:
        return _no_kernel(weights, activations, "torch's int8 product is scaled afterwards, by tensor or row", "row")
    if not _float32(weights, activations):
        return "int8's tensor and row kernels take float32 scales (fp8dash); nearest: the rule float32"
    if device.kind == "cuda" and (k % 8 or n % 8):
        return f"K={k} and N={n} must both be multiples of 8 (torch); nearest: skip this layer or emulate it"
    return ""


def _fp8_refusal(weights: Cast, activations: Cast, n: int, k: int, device: Device) -> str:
    """Why torch.scaled_mm cannot run an [n, k] layer of FP8 codes; empty where it can."""
    tiles = (weights.tile, activations.tile)
    if tiles not in PLAIN + BLOCKS + MX:
        return _no_kernel(weights, activations, "torch has none", "row for both, or 128x128 with 1x128")
    if device.kind != "cuda":
        if tiles not in PLAIN:
            return _no_kernel(weights, activations, "torch's CPU kernels take tensor and row scales", "row")
        return "" if _float32(weights, activations) else _float32_refusal("tensor and row")
    refusal = _cuda_refusal(weights, activations, n, k, device)
    if refusal or tiles in PLAIN:
        return refusal or _plain_refusal(weights, activations, device)
    return (_mx_refusal if tiles in MX else _block_refusal)(weights, activations, k, device)


def _cuda_refusal(weights: Cast, activations: Cast, n: int, k: int, device: Device) -> str:
    """What every FP8 kernel asks of a CUDA device and of a shape."""
    if device.capability < ADA:
        have = _dotted(device.capability)
        return f"FP8 tensor cores need compute capability 8.9, this device has {have} (hardware); nearest: int8/row"
    if k % 16 or n % 16:
        return f"K={k} and N={n} must both be multiples of 16 (torch); nearest: skip this layer or emulate it"
    if weights.format == activations.format == E5M2:
        return "E5M2 × E5M2 is not multiplied (cuBLASLt, checked by torch); nearest: e4m3fn weights"
    return ""


def _plain_refusal(weights: Cast, activations: Cast, device: Device) -> str:
    """Tensor and row scales on CUDA; cuBLASLt has row scales on Hopper from 12.9, elsewhere torch uses CUTLASS."""
    if not _float32(weights, activations):
        return _float32_refusal("tensor and row")
    cublas = device.capability[0] == HOPPER[0] and device.cuda >= CUDA_BLOCKS
    if weights.tile == ROW and weights.format == E5M2 and not cublas:
        return "row scales with E5M2 weights need Hopper and CUDA 12.9 (torch's CUTLASS); nearest: e4m3fn weights"
    return ""


def _block_refusal(weights: Cast, activations: Cast, k: int, device: Device) -> str:
    """128x128 or 1x128 weights by 1x128 activations.

    A ragged N runs: the kernel counts ceil(N / 128) blocks, and vLLM tests N = 576 on Hopper (pull request 49932). A
    ragged K is refused though the kernel's own check would pass it: traced, torch counts K // 128, and nobody tests it.
    """
    has_mx = device.capability >= BLACKWELL and device.cuda >= CUDA_MX
    nearest = "1x32 with the rule rceil" if has_mx else "row"
    if device.capability[0] != HOPPER[0]:
        have = _dotted(device.capability)
        return f"block-wise scales run on compute capability 9.x only, this is {have} (cuBLASLt); nearest: {nearest}"
    if device.cuda < CUDA_BLOCKS:
        return f"block-wise scales need CUDA 12.9, this torch has {_dotted(device.cuda)} (cuBLASLt); nearest: row"
    if not _both_e4m3fn(weights, activations):
        return "block-wise scales are for e4m3fn by e4m3fn (torch); nearest: e4m3fn for both"
    if k % 128:
        return f"K={k} must be a multiple of 128 for block-wise scales (torch's shape rule); nearest: row"
    return "" if _float32(weights, activations) else _float32_refusal("block-wise")


def _mx_refusal(weights: Cast, activations: Cast, k: int, device: Device) -> str:
    """1x32 tiles with E8M0 scales; torch takes K that are not multiples of 32."""
    if device.capability < BLACKWELL:
        nearest = "128x128 weights with 1x128 activations" if _has_blocks(k, device) else "row"
        have = _dotted(device.capability)
        return f"1x32 scales need compute capability 10.0, this device has {have} (hardware); nearest: {nearest}"
    if device.cuda < CUDA_MX:
        return f"1x32 scales need CUDA 12.8, this torch has {_dotted(device.cuda)} (cuBLASLt); nearest: row"
    if not _both_e4m3fn(weights, activations):
        return "1x32 scales are for e4m3fn by e4m3fn (torch); nearest: e4m3fn for both"
    if any(cast.rule.stored != "e8m0" or cast.rule.outer for cast in (weights, activations)):
        return "1x32 scales must be E8M0, one level (cuBLASLt); nearest: the rule rceil"
    return ""


def _has_blocks(k: int, device: Device) -> bool:
    return device.capability[0] == HOPPER[0] and device.cuda >= CUDA_BLOCKS and not k % 128


def _both_e4m3fn(weights: Cast, activations: Cast) -> bool:
    return weights.format == activations.format == E4M3FN


def _float32(weights: Cast, activations: Cast) -> bool:
    """True where both casts keep one level of scales that are float32, or none, which is a scale of 1."""
    return all(cast.rule.stored in ("float32", "") and not cast.rule.outer for cast in (weights, activations))


def _float32_refusal(kernels: str) -> str:
    return f"native {kernels} kernels take float32 scales (torch); nearest: the rule float32, or pow2 for powers of two"


def _no_kernel(weights: Cast, activations: Cast, why: str, nearest: str) -> str:
    pair = f"{weights.tile.name} weights with {activations.tile.name} activations"
    return f"no native kernel for {pair} ({why}); nearest: {nearest}"


def _dotted(version: tuple[int, int]) -> str:
    """A version or compute capability as people write it; "none known" for (0, 0)."""
    return f"{version[0]}.{version[1]}" if any(version) else "none known"
