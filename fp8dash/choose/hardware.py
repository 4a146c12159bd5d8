"""Which kernel runs a layer natively on a device, and why not. Values only: no torch.

Rules read from PyTorch's `aten/src/ATen/native/cuda/ScaledBlas.cpp` and tried on the CPU build of 2.13: CPU kernels
take any shape with tensor or row scales; CUDA asks for compute capability 8.9 and K, N multiples of 16.
"""

from dataclasses import dataclass

from fp8dash.choose.formats import E5M2, FloatFormat
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.scaling import FLOAT32, ROW, TENSOR

SCALED_MM, INT_MM = "scaled_mm", "int_mm"


@dataclass(frozen=True, slots=True)
class Device:
    """Where a run is measured."""

    kind: str  # "cpu" or "cuda"
    name: str
    capability: tuple[int, int] = (0, 0)
    memory_bytes: int = 0

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
    'K=200 and N=100 must both be multiples of 16'
    """
    weights, activations = recipe.weights, recipe.activations
    if not weights or not activations:
        return Path(None, "a native kernel needs both operands cast")
    if weights.tile != activations.tile or weights.tile not in (TENSOR, ROW):
        return Path(None, f"no native kernel for {weights.tile.name} weights with {activations.tile.name} activations")
    if weights.rule != FLOAT32 or activations.rule != FLOAT32:
        return Path(None, "native tensor and row kernels take float32 scales")
    floats = [isinstance(cast.format, FloatFormat) for cast in (weights, activations)]
    if not any(floats):
        return _int_path(n, k, device)
    if not all(floats):
        return Path(None, f"no kernel multiplies {activations.format.name} by {weights.format.name}")
    if device.kind == "cuda":
        return _cuda_path(recipe, n, k, device)
    return Path(SCALED_MM, "torch scaled_mm")


def _cuda_path(recipe: Recipe, n: int, k: int, device: Device) -> Path:
    if device.capability < (8, 9):
        major, minor = device.capability
        return Path(None, f"FP8 tensor cores need compute capability 8.9, this device has {major}.{minor}")
    if k % 16 or n % 16:
        return Path(None, f"K={k} and N={n} must both be multiples of 16")
    if recipe.weights and recipe.activations and recipe.weights.format == recipe.activations.format == E5M2:
        return Path(None, "cuBLASLt refuses E5M2 × E5M2")
    return Path(SCALED_MM, "torch scaled_mm")


def _int_path(n: int, k: int, device: Device) -> Path:
    if device.kind == "cuda" and (k % 8 or n % 8):
        return Path(None, f"K={k} and N={n} must both be multiples of 8")
    return Path(INT_MM, "torch int8 matrix multiply")
