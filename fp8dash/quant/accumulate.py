"""FP8 products added as a tensor core adds them, simulated to the bit on any device. Torch only; operands are 2-D.

One step adds `group` products to the running sum. All of them, the sum included, are aligned to the largest exponent,
cut off toward zero at `fraction_bits`, added exactly, and the result is cut off at `result` bits. A product's exponent
is that of its operands added, not its own: 1.75 * 1.75 has exponent 0, and a subnormal operand has its format's
smallest; a zero has none. Source: MMA-Sim, arXiv 2511.10909; arXiv 2505.09343 section 3.1.1.

Floating point is exact throughout. A product of two codes has at most 8 significant bits and the running sum at most
24, so float32 holds each, and multiplying by a power of two or cutting off loses nothing else. Aligned terms are
integers below 2^(fraction_bits + 2); their sum is held in float32 where it fits in 24 bits and in float64 elsewhere,
so the order of adding does not matter. Everything is a multiple of 2^-32 (the square of E5M2's smallest code), far
from float32's subnormals.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8dash.choose.accumulators import Accumulator
from fp8dash.choose.formats import E4M3FN, FloatFormat
from fp8dash.quant.cast import EXPONENT, Quantized, decode, spread, to_grid

WIDTH, HEIGHT = 256, {"cpu": 256, "cuda": 1024}  # of the result at a time: with 32 products each, 8 or 32 MB
LOWEST = 2.0**-64  # below any exponent that occurs: what a group of zeros is aligned to


def accumulate(
    x: Tensor, w: Tensor, accumulator: Accumulator, *, x_format: FloatFormat = E4M3FN, w_format: FloatFormat = E4M3FN
) -> Tensor:
    """x [M, K] times w [N, K] transposed as the simulated tensor core gives it: float32 [M, N].

    Operands hold decoded codes, unscaled: multiply the result by the scales. Their formats tell where subnormals
    begin, which the values alone do not: 2^-7 has exponent -6 in E4M3 and -7 in E5M2. K is padded with zeros to whole
    groups. NaN gives NaN. Raises ValueError where the shapes do not fit or a value is not of its format.

    >>> from fp8dash.choose.accumulators import BLACKWELL, HOPPER
    >>> x = torch.tensor([[1.0, 2**-7]])
    >>> [accumulate(x, x, accumulator).item() for accumulator in (HOPPER, BLACKWELL)]
    [1.0, 1.00006103515625]
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x [M, K] and w [N, K] were expected, not {list(x.shape)} and {list(w.shape)}")
    out = torch.empty(len(x), len(w), device=x.device)
    height = HEIGHT.get(x.device.type, HEIGHT["cuda"])
    for column in range(0, len(w), WIDTH):
        right = _checked(w[column : column + WIDTH], w_format)
        for row in range(0, len(x), height):
            left = _checked(x[row : row + height], x_format)
            block = _product(left, right, accumulator, x_format, w_format)
            out[row : row + height, column : column + WIDTH] = block
    return out


def _checked(values: Tensor, fmt: FloatFormat) -> Tensor:
    """The values as float32; raises ValueError where one is neither a value of the format nor NaN."""
    values = values.float()
    if ((to_grid(values.clone(), fmt) != values) & ~values.isnan() | (values.abs() > fmt.max)).any():
        raise ValueError(f"a value is not one of {fmt.name}: pass decoded codes without their scales")
    return values


def scaled_product(x: Quantized, w: Quantized, accumulator: Accumulator) -> Tensor:
    """x [M, K] times w [N, K] transposed, codes added as the accumulator does and scaled tile by tile: float32 [M, N].

    A tensor core never sees a scale: where tiles divide K, each stretch of K that shares scales is one product of its
    own, scaled and added in float32, as DeepGEMM does.
    """
    x_format, w_format, k = x.cast.format, w.cast.format, x.codes.shape[1]
    if not isinstance(x_format, FloatFormat) or not isinstance(w_format, FloatFormat):
        raise ValueError(f"{x.cast.text} by {w.cast.text} is no product of float codes")
    stretch = math.gcd(x.cast.tile.cols, w.cast.tile.cols) or k
    xs, ws = (decode(q.codes, q.cast.format) for q in (x, w))
    scales = [spread(q.factors, q.cast.tile, *q.codes.shape).expand(-1, k) for q in (x, w)]
    total = torch.zeros(len(xs), len(ws), device=xs.device)
    for start in range(0, k, stretch):
        part = slice(start, start + stretch)
        own = accumulate(xs[:, part], ws[:, part], accumulator, x_format=x_format, w_format=w_format)
        total += own * scales[0][:, start, None] * scales[1][:, start]
    return total


def _product(x: Tensor, w: Tensor, accumulator: Accumulator, x_format: FloatFormat, w_format: FloatFormat) -> Tensor:
    """The [m, n] sums of a block: exact and rounded once, or added group by group and promoted."""
    if not accumulator.group:
        return (x.double() @ w.double().T).float()  # E4M3: exact in float64 up to K = 2^17
    register = running = torch.zeros(len(x), len(w), device=x.device)
    left, right = _groups(x, accumulator.group), _groups(w, accumulator.group)
    powers = _powers(left, x_format), _powers(right, w_format)
    for step, (a, b, a_powers, b_powers) in enumerate(zip(left, right, *powers, strict=True), 1):
        largest = _outer(a_powers, b_powers).amax(0)
        running = _add(running, _outer(a, b), largest, accumulator)
        if accumulator.promote and step * accumulator.group % accumulator.promote == 0:
            register, running = register + running, torch.zeros_like(running)
    return register + running


def _groups(x: Tensor, group: int) -> Tensor:
    """x [rows, K] as [steps, group, rows], padded with zeros."""
    return pad(x, (0, -x.shape[1] % group)).T.reshape(-1, group, len(x)).contiguous()


def _powers(values: Tensor, fmt: FloatFormat) -> Tensor:
    """2^exponent of each value as its format stores it, 0 for a zero: a zero aligns nothing."""
    return _power(values).clamp_min_(2.0**fmt.min_exponent).masked_fill_(values == 0, 0)


def _power(x: Tensor) -> Tensor:
    """2^floor(log2 |x|) of each float32, 0 for a zero."""
    return x.view(torch.int32).bitwise_and(EXPONENT).view(torch.float32)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """a [group, m] by b [group, n]: [group, m, n]."""
    return a[:, :, None] * b[:, None, :]


def _add(running: Tensor, products: Tensor, largest: Tensor, accumulator: Accumulator) -> Tensor:
    """The running sum [m, n] after products [group, m, n], whose largest exponents are 2^e [m, n]; works in place."""
    largest = torch.maximum(largest, _power(running)).clamp_min_(LOWEST)
    scale = 2.0**accumulator.fraction_bits / largest  # makes the last bit kept a one
    bits = accumulator.fraction_bits + 2 + (accumulator.group + 1).bit_length()
    terms = products.mul_(scale).trunc_().sum(0, dtype=torch.float32 if bits <= 24 else torch.float64)
    return _cut((terms + (running * scale).trunc_()) / scale, accumulator.result)


def _cut(x: Tensor, fraction_bits: int) -> Tensor:
    """Each float32 or float64 cut off toward zero at this many fraction bits, as float32."""
    stored, dtype = (23, torch.int32) if x.dtype == torch.float32 else (52, torch.int64)
    return x.view(dtype).bitwise_and(-1 << (stored - fraction_bits)).view(x.dtype).float()
