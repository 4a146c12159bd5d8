"""A model's memory and speed under a recipe on an accelerator, by arithmetic alone: every number here is a prediction.

A step's time is the sum over its products of the longer of two: FLOPs over the dense peak, bytes over the bandwidth
(the roofline of Williams et al., CACM 52(4), 2009, product by product). That is the least time a step can take: norms,
casts of activations, communication between devices, launches and scheduling come on top. `reach` is the share of this
bound that real engines get; the published figures that it was held against are in `tests/predict/test_roofline.py`.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from fp8dash.choose.architecture import Architecture, Linear
from fp8dash.choose.casts import Cast, KvCast
from fp8dash.choose.formats import E2M1, E2M3, E3M2, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ
from fp8dash.choose.formats import INT8 as INT8_CODES
from fp8dash.choose.hardware import BLOCKS
from fp8dash.choose.hardware import MX as MX_TILES
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.scaling import GROUP_1X16, ROW, TENSOR
from fp8dash.predict.accelerators import BF16, FNUZ, FP4, FP8, INT8, MX, Accelerator

USABLE = 0.9  # of the memory: vLLM's gpu_memory_utilization, where activations and graphs take the rest
REACH = 0.5  # of the bound: what vLLM reaches with Llama-3.1-8B in BF16 on an H100, prefill and decode alike
MOST_TOKENS = 1 << 20
WIDE = 16  # bits of what is not cast


@dataclass(frozen=True, slots=True)
class Product:
    """How a recipe's Linears are multiplied on an accelerator."""

    kind: str  # of accelerators.py
    tflops: float
    reason: str


@dataclass(frozen=True, slots=True)
class Gemm:
    """All products of one kind of Linear in one step."""

    name: str
    flops: float
    bytes: float
    compute_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        """The longer of the two."""
        return max(self.compute_s, self.memory_s)

    @property
    def intensity(self) -> float:
        """FLOP/byte."""
        return self.flops / self.bytes

    @property
    def tflops(self) -> float:
        """What the roofline allows."""
        return self.flops / self.seconds / 1e12


@dataclass(frozen=True, slots=True)
class Plan:
    """A model cast by a recipe, on some accelerators that share all work evenly."""

    model: Architecture
    recipe: Recipe
    accelerator: Accelerator
    devices: int = 1
    reach: float = REACH

    @property
    def weight_bytes(self) -> float:
        """Of the stored model."""
        linears = sum(_weight_bits(linear, self.recipe) * linear.copies for linear in self.model.linears)
        tables = self.model.vocabulary * self.model.hidden * (1 if self.model.tied else 2) * WIDE
        return (linears + tables - self._head_saving + self.model.vectors * WIDE) / 8

    @property
    def _head_saving(self) -> float:
        """Bits that casting the head saves: negative if it is tied, since it is then stored a second time."""
        weights = self.recipe.of("lm_head").weights
        if weights is None or "lm_head" not in self.recipe.also:
            return 0.0
        size = self.model.vocabulary * self.model.hidden
        bits = weights.bits_per_element(self.model.vocabulary, self.model.hidden)
        return size * (-bits if self.model.tied else WIDE - bits)

    @property
    def kv_bytes(self) -> float:
        """One token's share of the cache."""
        return kv_bits(self.model, self.recipe.kv) / 8

    @property
    def free_bytes(self) -> float:
        """What is left for the cache; below zero where the model does not fit."""
        return USABLE * self.accelerator.memory_gb * 1e9 * self.devices - self.weight_bytes

    def largest_batch(self, context: int) -> int:
        """Requests of so many tokens whose caches fit beside the model; 0 where the model does not."""
        return max(0, math.floor(self.free_bytes / (self.kv_bytes * context)))

    def decode_s(self, batch: int, context: float) -> float:
        """Seconds of one token for each of `batch` requests, which hold `context` tokens each on average."""
        gemms = sum(gemm.seconds for gemm in self.gemms(batch))
        flops = 2 * self.model.heads * self.model.decode_width * self.model.layers * batch * context
        return (gemms + self._attention_s(flops, self.kv_bytes * batch * context)) / self.reach

    def prefill_s(self, tokens: int, requests: int = 1) -> float:
        """Seconds until the first token of `requests` prompts of so many tokens, each token seeing those before it."""
        gemms = sum(gemm.seconds for gemm in self.gemms(tokens * requests, heads=requests))
        flops = self.model.heads * self.model.prefill_width * self.model.layers * float(tokens) ** 2 * requests
        return (gemms + self._attention_s(flops, self.kv_bytes * tokens * requests)) / self.reach

    def gemms(self, tokens: int, heads: int | None = None) -> tuple[Gemm, ...]:
        """The Linears' products over so many tokens, of which `heads` (all, unless told) go through the head."""
        products = [
            self._gemm(linear, own, layers, tokens)
            for linear in self.model.linears
            for own, layers in _casts(linear, self.recipe).items()
        ]
        return (*products, self._head(tokens if heads is None else heads))

    def turning_point(self) -> int | None:
        """The fewest tokens whose products are bound by multiplying rather than by memory; None where none is."""
        low, high = 0, MOST_TOKENS
        if not self._bound_by_compute(high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._bound_by_compute(middle) else (middle, high)
        return high

    @property
    def product(self) -> Product:
        """How the Linears are multiplied here, except those with a cast of their own."""
        return product(self.recipe, self.accelerator)

    def _bound_by_compute(self, tokens: int) -> bool:
        gemms = self.gemms(tokens)
        return sum(gemm.compute_s for gemm in gemms) >= sum(gemm.memory_s for gemm in gemms)

    def _gemm(self, linear: Linear, recipe: Recipe, layers: int, tokens: int) -> Gemm:
        """One kind of Linear over the layers where it is cast alike. Routed experts: those that any token is expected
        to choose."""
        share = 1 - (1 - linear.active / linear.copies) ** tokens
        uses = tokens * linear.active * layers
        size = linear.n * linear.k
        weights = size * _bits(recipe.weights, linear.n, linear.k) * layers * linear.copies * share / 8
        operands = uses * (linear.k * _bits(recipe.activations, tokens, linear.k) + linear.n * WIDE) / 8
        tflops = product(recipe, self.accelerator).tflops
        return self._timed(linear.name, 2.0 * uses * size, weights + operands, tflops)

    def _head(self, tokens: int) -> Gemm:
        n, k = self.model.vocabulary, self.model.hidden
        own = self.recipe.of("lm_head") if "lm_head" in self.recipe.also else Recipe()
        operands = k * _bits(own.activations, tokens, k) + n * WIDE
        size = (n * k * _bits(own.weights, n, k) + tokens * operands) / 8
        return self._timed("lm_head", 2.0 * tokens * n * k, size, product(own, self.accelerator).tflops)

    def _timed(self, name: str, flops: float, size: float, tflops: float) -> Gemm:
        compute = flops / (tflops * 1e12 * self.devices)
        return Gemm(name, flops, size, compute, size / (self.accelerator.bandwidth_tbps * 1e12 * self.devices))

    def _attention_s(self, flops: float, size: float) -> float:
        """Attention's products are in BF16, whatever the cache holds."""
        gemm = self._timed("attention", flops, size, self.accelerator.bf16)
        return gemm.seconds


def product(recipe: Recipe, accelerator: Accelerator) -> Product:
    """How a recipe's Linears are multiplied on an accelerator: by its codes, or in BF16 and why."""
    kind, why = _kind(recipe)
    peak = accelerator.peak(FNUZ if kind == FP8 and FNUZ in accelerator.multiplies else kind)
    if kind == BF16 or peak is None:
        missing = why if kind == BF16 else f"{accelerator.name} does not multiply {why}"
        if kind in accelerator.multiplies and kind != BF16:
            missing = f"no source here gives {accelerator.name}’s peak for {why}"
        return Product(BF16, accelerator.bf16, f"in BF16: {missing}")
    if kind == FP8 and FNUZ in accelerator.multiplies:
        why += ", as FNUZ with E4M3 up to 240"
    return Product(kind, peak, why)


def kv_bits(model: Architecture, kv: KvCast | None) -> float:
    """Bits one token keeps in the cache of all layers, scales that are kept by token included."""
    if kv is None:
        return float(model.kv_elements() * WIDE)
    scales = 32 * 2 * model.kv_heads * model.layers if kv.share == "token" else 0
    return float(model.kv_elements() * kv.format.bits + scales)


def per_million(price_an_hour: float, devices: int, tokens_per_second: float) -> float:
    """What a million tokens cost at a price per device and hour.

    >>> per_million(3.6, 1, 1000.0)
    1.0
    """
    return price_an_hour * devices / 3600 / tokens_per_second * 1e6


def _kind(recipe: Recipe) -> tuple[str, str]:
    """The kind of product that a recipe asks for, and its name in words; BF16 with the reason otherwise."""
    weights, activations = recipe.weights, recipe.activations
    if not weights or not activations:
        one = "weights" if weights else "activations"
        return BF16, f"only {one} are cast" if recipe.casts_linears else "no Linear is cast"
    tiles, formats = (weights.tile, activations.tile), {weights.format, activations.format}
    stored, whole = {weights.rule.stored, activations.rule.stored}, set(tiles) <= {TENSOR, ROW}
    if formats == {INT8_CODES} and whole:
        return INT8, "INT8"
    if formats <= {E4M3FN, E5M2} and formats != {E5M2} and whole:
        return FP8, "FP8"
    if formats == {E4M3FN} and tiles in BLOCKS:
        return FP8, "FP8, blocks accumulated in FP32"
    if formats <= {E4M3FNUZ, E5M2FNUZ} and whole:
        return FNUZ, "FNUZ"
    if formats <= {E4M3FN, E5M2, E3M2, E2M3} and tiles in MX_TILES and stored == {"e8m0"}:
        return MX, "MX tiles"
    if formats == {E2M1} and (set(tiles), stored) in (({GROUP_1X16}, {"e4m3"}), (set(MX_TILES[0]), {"e8m0"})):
        return FP4, "FP4"
    return BF16, f"no known kernel multiplies {activations.text} by {weights.text}"


@lru_cache(maxsize=1024)
def _casts(linear: Linear, recipe: Recipe) -> dict[Recipe, int]:
    """How many layers of a Linear are cast by which recipe: the recipe's own for that layer, or none if skipped."""
    if linear.router:
        return {Recipe(): len(linear.layers)}
    if not recipe.skip and not recipe.overrides:
        return {recipe: len(linear.layers)}
    names = (f"model.layers.{layer}.{linear.name}" for layer in linear.layers)
    return dict(Counter(Recipe() if recipe.skips(name) else recipe.of(name) for name in names))


def _weight_bits(linear: Linear, recipe: Recipe) -> float:
    """Bits of one copy in every layer."""
    each = (layers * _bits(own.weights, linear.n, linear.k) for own, layers in _casts(linear, recipe).items())
    return linear.n * linear.k * sum(each)


def _bits(cast: Cast | None, rows: int, cols: int) -> float:
    return cast.bits_per_element(max(rows, 1), cols) if cast else float(WIDE)


def curve(plan: Plan, context: int, most: int) -> Iterator[tuple[int, float]]:
    """Batch sizes up to `most`, and output tokens per second at each: powers of two and the last."""
    sizes = sorted({*(1 << power for power in range(most.bit_length())), most})
    return ((batch, batch / plan.decode_s(batch, context)) for batch in sizes)
