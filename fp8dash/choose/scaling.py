"""Who shares a scale (Tile), how it is rounded (ScaleRule), what keeps it off zero (Guard), and When it is made.

A scale is always the factor that undoes the cast: value = code * scale. Values only: no torch.
"""

import math
import re
from dataclasses import dataclass

LARGEST_TILE = 65_536


@dataclass(frozen=True, slots=True)
class Tile:
    """The rows and columns of a 2-D operand that share one scale; 0 spans the axis.

    Operands are [out_features, in_features] weights and [tokens, in_features] activations, so `row` is one scale
    per output channel of a weight and one per token of an activation. A ragged edge is a smaller tile.
    """

    name: str
    rows: int
    cols: int

    def grid(self, rows: int, cols: int) -> tuple[int, int]:
        """Shape of the scales of a [rows, cols] operand.

        >>> BLOCK_128X128.grid(576, 1536), ROW.grid(576, 1536), TENSOR.grid(576, 1536)
        ((5, 12), (576, 1), (1, 1))
        """
        return math.ceil(rows / (self.rows or rows)), math.ceil(cols / (self.cols or cols))


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """How a tile's amax becomes its stored scale.

    A rule with `outer` is two-level: each tile's scale is relative to one float32 scale of the whole tensor.
    """

    name: str
    bits: int  # of a stored scale, 0 where none is stored
    stored: str  # "float32", "e8m0", "e4m3" or "" for none
    meaning: str
    outer: bool = False
    power_of: str = ""  # a power of two of "quotient" (amax / max) or of "amax" (its exponent less the format's)
    carry: str = ""  # what is added to its mantissa, so that it may carry into the exponent


@dataclass(frozen=True, slots=True)
class Guard:
    """What a library does to keep scales off zero, and how wide it takes an integer's range to be."""

    name: str
    meaning: str
    amax_floor: float = 0.0
    scale_floor: float = 0.0
    zero_scale: float = 1.0  # of a tile whose amax is zero
    full_integers: bool = False  # codes -max - 1 ... max over max + 0.5


@dataclass(frozen=True, slots=True)
class When:
    """When an operand's scale is made: as it comes, once from calibration text, or from earlier passes' amax.

    Static: `by` is "amax", "mse" or a percentile of magnitudes such as "p99.9". Delayed: `by` picks from the history,
    "max" or "recent"; `history` counts forward passes; `margin` doubles the scale so many times
    (Transformer Engine, `DelayedScaling`).
    """

    name: str  # "dynamic", "static" or "delayed"
    by: str = ""
    history: int = 0
    margin: int = 0

    @property
    def text(self) -> str:
        """The form that reads back; what is usual is left out.

        >>> when_of("static:amax").text, when_of("delayed:16:max:1").text, when_of("delayed:1024").text
        ('static', 'delayed:16:max:1', 'delayed')
        """
        if self in (DYNAMIC, STATIC, DELAYED):
            return self.name
        if self.name == "static":
            return f"static:{self.by}"
        words = [self.name, str(self.history), self.by, str(self.margin)]
        while words[-1] == ("0" if len(words) == 4 else "max"):
            words.pop()
        return ":".join(words)

    @property
    def meaning(self) -> str:
        """What it does, in words.

        >>> when_of("static:p99.9").meaning
        'one scale, from the 99.9th percentile of magnitudes over the calibration text'
        """
        if self.name == "dynamic":
            return "each tensor by its own amax"
        if self.name == "delayed":
            pick = "largest" if self.by == "max" else "last"
            doubled = f", times 2^{self.margin}" if self.margin else ""
            return f"the {pick} amax of the {self.history:,} passes before{doubled}"
        how = {"amax": "the amax", "mse": "the least error"}.get(
            self.by, f"the {self.by[1:]}th percentile of magnitudes"
        )
        return f"one scale, from {how} over the calibration text"


TENSOR, ROW, COLUMN = Tile("tensor", 0, 0), Tile("row", 1, 0), Tile("column", 0, 1)
GROUP_1X128, BLOCK_128X128 = Tile("1x128", 1, 128), Tile("128x128", 128, 128)
GROUP_1X32, GROUP_1X16 = Tile("1x32", 1, 32), Tile("1x16", 1, 16)

FLOAT32 = ScaleRule("float32", 32, "float32", "amax / max, kept as float32")
POW2 = ScaleRule(
    "pow2", 32, "float32", "amax / max rounded up to a power of two, kept as float32", power_of="quotient", carry="any"
)
RCEIL = ScaleRule(
    "rceil", 8, "e8m0", "amax * (1 / max) rounded up to a power of two: never clips", power_of="quotient", carry="any"
)
FLOOR = ScaleRule(
    "floor", 8, "e8m0", "amax's exponent less the format's: OCP MX 1.0; clips the top", power_of="amax", carry="none"
)
CEIL = ScaleRule(
    "ceil", 8, "e8m0", "amax's exponent rounded up, less the format's: wastes a binade", power_of="amax", carry="any"
)
EVEN = ScaleRule(
    "even", 8, "e8m0", "amax rounded to the format's mantissa, then floor", power_of="amax", carry="half code"
)
ONE_BIT = ScaleRule(
    "onebit",
    8,
    "e8m0",
    "amax rounded at one mantissa bit, then floor: compressed-tensors",
    power_of="amax",
    carry="quarter",
)
NVFP4 = ScaleRule("nvfp4", 8, "e4m3", "E4M3 per tile under one float32 per tensor, amax / (448 * max)", outer=True)
MOSS = ScaleRule("moss", 8, "e8m0", "power of two up per tile under one float32 per tensor: MOSS", outer=True)
UNIT = ScaleRule("unit", 0, "", "scale 1: unit scaling, nothing is stored")
MSE = ScaleRule("mse", 32, "float32", "float32, shrunk by up to 20 % where that lowers the error")

EXACT = Guard("exact", "a tile of zeros has scale 1; no scale is subnormal")
CT = Guard(
    "ct",
    "compressed-tensors: a zero scale becomes float32's epsilon; integers over max + 0.5",
    zero_scale=2.0**-23,
    full_integers=True,
)
VLLM = Guard(
    "vllm",
    "vLLM per token: scales of at least 1 / (448 * 512)",
    scale_floor=1 / (448 * 512),
    zero_scale=1 / (448 * 512),
)
VLLM_GROUP = Guard("vllm-group", "vLLM per token group: amax of at least 1e-10", amax_floor=1e-10)
DEEPGEMM = Guard("deepgemm", "DeepSeek-V3 and DeepGEMM: amax of at least 1e-4", amax_floor=1e-4)
TORCHAO = Guard("torchao", "torchao: amax of at least 1e-12", amax_floor=1e-12)
TE = Guard("te", "Transformer Engine: a tile of zeros has scale 1")

DYNAMIC = When("dynamic")
STATIC = When("static", "amax")
DELAYED = When("delayed", "max", 1024)  # Transformer Engine's defaults
FRACTION = 0x007FFFFF  # a float32's mantissa field, which rules of powers of two carry out of
SHRINKS, SHRINK_STEP, ERROR_POWER = 20, 0.01, 2.4  # of the searched scale: llm-compressor's MSE observer
LONGEST_HISTORY, LARGEST_MARGIN = 65_536, 16

TILES = {t.name: t for t in (TENSOR, ROW, COLUMN, GROUP_1X128, BLOCK_128X128, GROUP_1X32, GROUP_1X16)}
RULES = {r.name: r for r in (FLOAT32, POW2, RCEIL, FLOOR, CEIL, EVEN, ONE_BIT, NVFP4, MOSS, UNIT, MSE)}
GUARDS = {g.name: g for g in (EXACT, CT, VLLM, VLLM_GROUP, DEEPGEMM, TORCHAO, TE)}
WHENS = {w.name: w for w in (DYNAMIC, STATIC, DELAYED)}
ALIASES = {"channel": "row", "token": "row", "block": "128x128"}


def tile_of(name: str) -> Tile | None:
    """The tile of a name, an alias, or any rows x columns; None for what is none of these.

    >>> tile_of("channel").name, tile_of("1x64"), tile_of("64")
    ('row', Tile(name='1x64', rows=1, cols=64), None)
    """
    name = ALIASES.get(name, name)
    if name in TILES:
        return TILES[name]
    match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", name)
    if not match or max(int(match[1]), int(match[2])) > LARGEST_TILE:
        return None
    return Tile(name, int(match[1]), int(match[2]))


def when_of(text: str) -> When | None:
    """The When of its text form; None for what is none.

    >>> when_of("delayed:16:recent"), when_of("static:p101"), when_of("later")
    (When(name='delayed', by='recent', history=16, margin=0), None, None)
    """
    if text in WHENS:
        return WHENS[text]
    name, _, rest = text.partition(":")
    if name == "static":
        return When("static", rest) if rest in ("amax", "mse") or _is_percentile(rest) else None
    match = re.fullmatch(r"delayed:([1-9]\d{0,4})(?::(max|recent)(?::(\d{1,2}))?)?", text)
    if not match:
        return None
    history, margin = int(match[1]), int(match[3] or 0)
    fits = history <= LONGEST_HISTORY and margin <= LARGEST_MARGIN
    return When("delayed", match[2] or "max", history, margin) if fits else None


def _is_percentile(text: str) -> bool:
    return bool(re.fullmatch(r"p\d{2}(\.\d{1,6})?", text)) and 50 <= float(text[1:]) < 100
