"""Casts of operands and of the KV cache, and the text form in which they are typed, stored and read back. No torch."""

import math
from dataclasses import dataclass
from typing import TypeVar

from fp8dash.choose.formats import E4M3FN, E5M2, FORMATS, INT8, FloatFormat, Format
from fp8dash.choose.scaling import (
    COLUMN,
    DYNAMIC,
    EXACT,
    FLOAT32,
    FRACTION,
    GUARDS,
    ROW,
    RULES,
    TENSOR,
    TILES,
    UNIT,
    WHENS,
    Guard,
    ScaleRule,
    Tile,
    When,
    tile_of,
    when_of,
)
from fp8dash.errors import InvalidChoice

KV_FORMATS = {f.name: f for f in (E4M3FN, E5M2, INT8)}


KV_SHARES = {  # what shares a scale in the KV cache; each sequence, each layer, and keys and values have their own
    "tensor": "one scale per update",
    "head": "one per head and update",
    "token": "one per token and head",
}


KV_SCALES = {"dynamic": FLOAT32, "static": FLOAT32, "unit": UNIT}


KV_SCALE_MEANINGS = {
    "dynamic": "each update, a prompt or one decoded token, by its own amax; older codes are never rescaled",
    "static": (
        "per layer one scale for keys and one for values, from the calibration text's amax, as checkpoints store them"
    ),
    "unit": "scale 1.0 throughout: what vLLM does without calibrated scales",
}


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cast:
    """One operand's format, the tile that shares a scale, the rule for that scale, what keeps it off zero, and when
    it is made (activations only: a weight's is always its own)."""

    format: Format
    tile: Tile
    rule: ScaleRule = FLOAT32
    guard: Guard = EXACT
    when: When = DYNAMIC

    @property
    def text(self) -> str:
        """The form that reads back.

        >>> parse_cast("e4m3fn/token/float32").text
        'e4m3fn/row'
        """
        words = [self.format.name, self.tile.name]
        words += [choice.name for choice in (self.rule, self.guard) if choice not in (FLOAT32, EXACT)]
        return "/".join(words + [self.when.text] * (self.when != DYNAMIC))

    @property
    def is_observed(self) -> bool:
        """True where the scale is not the operand's own: activations must be seen before they are cast."""
        return self.when != DYNAMIC

    @property
    def is_full(self) -> bool:
        """True where an integer's lowest code is used too."""
        return self.guard.full_integers and not isinstance(self.format, FloatFormat)

    @property
    def divisor(self) -> float:
        """What an amax is divided by: the largest code, or half a step more where the lowest code is used too.

        >>> parse_cast("int8/row").divisor, parse_cast("int8/row/ct").divisor
        (127.0, 127.5)
        """
        return self.format.max + 0.5 * self.is_full

    @property
    def carry(self) -> int:
        """What a power-of-two rule adds to a float32's bits before its mantissa is dropped."""
        fmt = self.format
        mantissa_bits = fmt.mantissa_bits if isinstance(fmt, FloatFormat) else fmt.max_exponent
        carries = {"none": 0, "any": FRACTION, "half code": 1 << (22 - mantissa_bits), "quarter": 1 << 21}
        return carries[self.rule.carry]

    def bits_per_element(self, rows: int, cols: int) -> float:
        """Bits of one element of a [rows, cols] operand, its share of the scales included.

        >>> parse_cast("e4m3fn/1x32/rceil").bits_per_element(576, 576)
        8.25
        """
        scales = self.rule.bits * math.prod(self.tile.grid(rows, cols)) + (32 if self.rule.outer else 0)
        return self.format.bits + scales / (rows * cols)


@dataclass(frozen=True, slots=True)
class KvCast:
    """How keys and values are kept in the cache: format, who shares a scale, and where the scale comes from."""

    format: Format
    share: str  # of KV_SHARES
    scale: str = "dynamic"  # of KV_SCALES

    @property
    def text(self) -> str:
        """The form that reads back.

        >>> parse_kv("e4m3fn/tensor/dynamic").text, parse_kv("e4m3fn/tensor/unit").text
        ('e4m3fn/tensor', 'e4m3fn/tensor/unit')
        """
        return "/".join([self.format.name, self.share, *([] if self.scale == "dynamic" else [self.scale])])

    @property
    def cast(self) -> Cast:
        """The cast of an operand whose rows are what shares a scale."""
        return Cast(self.format, ROW, KV_SCALES[self.scale])

    @property
    def picture(self) -> Cast:
        """The cast of a [tokens, heads * head_dim] operand that comes nearest, to be drawn as one."""
        return Cast(self.format, {"tensor": TENSOR, "head": COLUMN, "token": ROW}[self.share])

    @property
    def provenance(self) -> str:
        """Where the scales come from, for a note beside a number.

        >>> parse_kv("int8/token").provenance, parse_kv("e4m3fn/tensor/unit").provenance
        ('dynamic scales, one per token and head', 'scale 1.0')
        """
        if self.scale == "unit":
            return "scale 1.0"
        if self.scale == "static":
            return f"static scales from calibration, one per layer{' and head' if self.share == 'head' else ''}"
        return f"dynamic scales, {KV_SHARES[self.share]}"


def parse_cast(text: str) -> Cast:
    """A cast from format/tile, then a scale rule, a guard and when the scale is made, each if need be.

    Raises InvalidChoice.

    >>> parse_cast("int4/1x128/ct").guard.name, parse_cast("e4m3fn/tensor/pow2/te/delayed:16").when.history
    ('ct', 16)
    """
    parts = [part.strip().lower() for part in text.split("/")]
    when = _when(parts.pop(), text) if parts[-1].partition(":")[0] in WHENS else DYNAMIC
    if not 2 <= len(parts) <= 4:
        raise InvalidChoice(f"“{text}” is not a cast: write format/tile or format/tile/rule, as in e4m3fn/128x128.")
    fmt, tile = choose_from("format", parts[0], FORMATS), tile_of(parts[1])
    if tile is None:
        raise InvalidChoice(f"“{parts[1]}” is not a tile: choose one of {', '.join(TILES)}, or any rows x columns.")
    guard = choose_from("guard", parts.pop(), GUARDS) if parts[-1] in GUARDS and len(parts) > 2 else EXACT
    if len(parts) > 3:
        raise InvalidChoice(f"“{parts[3]}” is not a guard: choose one of {', '.join(GUARDS)}.")
    rule = choose_from("scale rule", parts[2], RULES) if len(parts) == 3 else FLOAT32
    return _checked_when(Cast(fmt, tile, rule, guard, when))


def _when(part: str, text: str) -> When:
    when = when_of(part)
    if when is None:
        raise InvalidChoice(
            f"“{part}” in “{text}” does not say when a scale is made: write static, static:p99.9, static:mse, delayed, "
            "or delayed:history:max:margin as in delayed:16:recent:1."
        )
    return when


def _checked_when(cast: Cast) -> Cast:
    """The cast, unless its scale cannot be made before the operand is seen."""
    asked = f"{cast.format.name}/{cast.tile.name}/{cast.rule.name} with {cast.when.text} scales"
    if cast.is_observed and cast.tile != TENSOR:
        raise InvalidChoice(
            f"{asked} is refused: a scale made beforehand is one per tensor (compressed-tensors, Transformer Engine); "
            f"closest alternative: {cast.format.name}/tensor/{cast.when.text}."
        )
    if cast.is_observed and (cast.rule.outer or cast.rule.name in ("mse", "unit")):
        how = "static:mse" if cast.rule.name == "mse" else cast.when.text
        raise InvalidChoice(
            f"{asked} is refused: a scale made beforehand is one float32 or power of two (fp8dash); "
            f"closest alternative: {cast.format.name}/tensor/{how}."
        )
    return cast


def parse_kv(text: str) -> KvCast:
    """A KV cache cast from format/share, then where scales come from; raises InvalidChoice.

    >>> parse_kv("int8/token").share
    'token'
    """
    parts = [part.strip().lower() for part in text.split("/")]
    if not 2 <= len(parts) <= 3:
        raise InvalidChoice(
            f"“{text}” is not a KV cache cast: write format/share or format/share/scale, as in e4m3fn/tensor/unit."
        )
    choose_from("KV cache format", parts[0], KV_FORMATS)
    choose_from("share of the KV cache", parts[1], KV_SHARES)
    scale = parts[2] if len(parts) == 3 else "dynamic"
    choose_from("KV cache scale", scale, KV_SCALES)
    if scale == "unit" and parts[1] != "tensor":
        raise InvalidChoice(
            f"“{text}” is refused: a scale of 1.0 is global (fp8dash); closest alternative: {parts[0]}/tensor/unit."
        )
    if scale == "static" and parts[1] == "token":
        raise InvalidChoice(
            f"“{text}” is refused: a token's scale cannot be known beforehand (compressed-tensors: tensor or "
            f"attn_head); closest alternative: {parts[0]}/head/static."
        )
    return KvCast(KV_FORMATS[parts[0]], parts[1], scale)


def choose_from(what: str, name: str, table: dict[str, T]) -> T:
    if name not in table:
        raise InvalidChoice(f"“{name}” is not a {what}: choose one of {', '.join(table)}.")
    return table[name]
