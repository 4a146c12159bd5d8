"""Cast-and-back speed beside the libraries people quantize with: ratios within one process, so that machines compare.

Every contender starts from the same bfloat16 matrix and ends with its values after the cast, scales included. They take
turns; a ratio is the median over the turns. gfloat is a reference, not a kernel: it casts a sample, and its time is
scaled by elements. On a CPU every contender has one thread and its CPU time counts, so that busy neighbours, who make
threads wait for each other, do not. The peers are test dependencies.
"""

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp
from gfloat import round_ndarray
from gfloat.formats import format_info_ocp_e4m3
from torch import Tensor
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.quantization import PerBlock, PerRow, PerTensor
from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

from fp8dash.choose.casts import parse_cast
from fp8dash.choose.scaling import tile_of
from fp8dash.quant.cast import blocks_of_values, round_trip

ELEMENTS, COLS = 1 << 26, 4096
SAMPLE = 1 << 16  # elements that gfloat casts
REPEATS = 3
CUDA = torch.cuda.is_available()
CASTS = {
    "tensor": "e4m3fn/tensor",
    "row": "e4m3fn/row",
    "1x128": "e4m3fn/1x128",
    "128x128": "e4m3fn/128x128",
    "1x32": "e4m3fn/1x32/rceil",
}
TORCHAO = {
    "tensor": PerTensor(),
    "row": PerRow(),
    "1x128": PerBlock([1, 128]),
    "128x128": PerBlock([128, 128]),
}
PRESETS = {  # compressed-tensors' arguments by tile
    "tensor": PRESET_SCHEMES["FP8"]["weights"],
    "row": PRESET_SCHEMES["FP8_DYNAMIC"]["weights"],
    "1x128": PRESET_SCHEMES["FP8_BLOCK"]["input_activations"],
    "128x128": PRESET_SCHEMES["FP8_BLOCK"]["weights"],
    "1x32": PRESET_SCHEMES["MXFP8"]["weights"],
}

Call = Callable[[], object]


@torch.no_grad()
def cast_ratios() -> dict[str, float | str]:
    """Per tile: how many times the fastest peer's speed ours is, which that is, and our share of a copy's speed.

    over_copy is a copy's time over a cast's, both into memory in use already, as a model's weights are cast; over_clone
    is the same into new memory, whose pages cost either more than the work. Higher is better for all ratios.
    """
    where, threads = torch.device("cuda" if CUDA else "cpu"), torch.get_num_threads()
    x = torch.randn(ELEMENTS // COLS, COLS, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0)).to(where)
    ratios: dict[str, float | str] = {}
    torch.set_num_threads(1)
    try:
        for tile in CASTS:
            ratios |= _ratios_of(tile, x)
    finally:
        torch.set_num_threads(threads)
    return ratios


def _ratios_of(tile: str, x: Tensor) -> dict[str, float | str]:
    calls, target = _contenders(tile, x), torch.zeros_like(x)
    own = {"copy": lambda: target.copy_(x), "ours into place": _into(tile, x, target), "clone": x.clone}
    turns = _times(own | calls)
    peers = {name: median(times) for name, times in turns.items() if name not in (*own, "ours")}
    print(tile, {name: f"{median(times) * 1e3:.0f} ms" for name, times in turns.items()}, flush=True)
    best = min(peers, key=lambda name: peers[name])
    return {
        f"cast.{tile}.over_best_peer": _ratio(turns[best], turns["ours"]),
        f"cast.{tile}.best_peer": best,
        f"cast.{tile}.over_copy": _ratio(turns["copy"], turns["ours into place"]),
        f"cast.{tile}.over_clone": _ratio(turns["clone"], turns["ours"]),
    }


def _contenders(tile: str, x: Tensor) -> dict[str, Call]:
    """Ours and every peer that can cast this tile, tried on a few rows; the others are named with the reason."""
    makers = {"ours": _ours, "compressed-tensors": _compressed_tensors, "torchao": _torchao, "gfloat": _gfloat}
    calls: dict[str, Call] = {}
    for name, make in makers.items():
        try:
            make(tile, x[:256])()
            calls[name] = make(tile, x)
        except (NotImplementedError, ValueError, AssertionError, RuntimeError) as error:
            print(f"{name} is left out of {tile}: {error}")
    return calls


def _ours(tile: str, x: Tensor) -> Call:
    cast = parse_cast(CASTS[tile])
    return lambda: round_trip(x, cast)


def _into(tile: str, x: Tensor, target: Tensor) -> Call:
    cast = parse_cast(CASTS[tile])

    def call() -> None:
        for rows, _, values, _ in blocks_of_values(x, cast):
            target[rows] = values.flatten(1)

    return call


def _torchao(tile: str, x: Tensor) -> Call:
    if tile == "1x32":
        kind, mode = torch.float8_e4m3fn, ScaleCalculationMode.RCEIL
        return lambda: MXTensor.to_mx(x, kind, 32, scaling_mode=mode).dequantize(x.dtype)
    return lambda: Float8Tensor.from_hp(x, granularity=TORCHAO[tile]).dequantize()


def _compressed_tensors(tile: str, x: Tensor) -> Call:
    args = PRESETS[tile]

    def call() -> Tensor:
        scales, zero = _ct_scales(x, args)
        return fake_quantize(x, scales, zero, args)

    return call


def _ct_scales(x: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """The library's dynamic scales, or its qparams of the extremes that its observers take."""
    if args.strategy == QuantizationStrategy.CHANNEL:
        return calculate_qparams(x.amin(1, keepdim=True), x.amax(1, keepdim=True), args)
    if args.strategy == QuantizationStrategy.BLOCK:
        height, width = args.block_structure
        blocks = x.view(len(x) // height, height, -1, width)
        return calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
    return compute_dynamic_scales_and_zp(x, args, None)


def _gfloat(tile: str, x: Tensor) -> Call:
    """A sample's first rows; `_times` scales its time by elements."""
    sample = x[: max(1, SAMPLE // COLS)].double().cpu()
    shared = tile_of(tile)
    assert shared
    rows, cols = shared.rows or len(sample), shared.cols or COLS
    width = min(rows, len(sample)) if rows > 1 else 1

    def call() -> np.ndarray:
        amax = sample.view(-1, width, COLS // cols, cols).abs().amax((1, 3))
        scales = (amax / 448).repeat_interleave(width, 0).repeat_interleave(cols, 1).numpy()
        return round_ndarray(format_info_ocp_e4m3, sample.numpy() / scales, sat=True) * scales

    return call


def _times(calls: dict[str, Call]) -> dict[str, list[float]]:
    """Seconds of each call, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            times[name].append(_seconds(call) * (ELEMENTS / SAMPLE if name == "gfloat" else 1))
    return times


def _ratio(above: list[float], below: list[float]) -> float:
    """The median of the ratios of each turn."""
    return median(a / b for a, b in zip(above, below, strict=True))


def _seconds(call: Call) -> float:
    clock = time.perf_counter if CUDA else time.process_time
    if CUDA:
        torch.cuda.synchronize()
    start = clock()
    call()
    if CUDA:
        torch.cuda.synchronize()
    return clock() - start


if __name__ == "__main__":
    print(cast_ratios())
