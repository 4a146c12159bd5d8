"""Cast and Recipe, and the text form in which they are typed, stored and read back. Values only: no torch.

w=e4m3fn/128x128 a=e4m3fn/1x128          weights and activations, float32 scales
w=e4m3fn/tensor a=e4m3fn/tensor/static   activations by one scale from calibration text; /delayed by earlier passes
w=e4m3fn/1x32/rceil a=e4m3fn/1x32/rceil  MXFP8 with round-up E8M0 scales
w=int8/row also=lm_head skip=*.down_proj weights only, the head too, one projection left out
w=e4m3fn/row w[*.down_proj]=bf16         one projection in a cast of its own, or in none; so also a[pattern]=
kv=e4m3fn/tensor                         the KV cache only, scaled as it comes; /static calibrated, /unit scale 1.0
attn=e4m3fn/tensor                       the operands of attention's two products and the softmax between them
stored=/models/Name-FP8                  what a quantized checkpoint stores, cast as its own configuration says
bf16                                     nothing is cast: the baseline
"""

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from urllib.parse import quote, unquote

from fp8dash.choose.accumulators import Accumulator, parse_accumulator
from fp8dash.choose.casts import Cast, KvCast, choose_from, parse_cast, parse_kv
from fp8dash.choose.formats import E4M3FN, E5M2
from fp8dash.choose.scaling import DYNAMIC, ROW
from fp8dash.errors import InvalidChoice

BASELINE_TEXT = "bf16"
GROUPS = ("lm_head", "embeddings", "norms")  # left alone unless a recipe asks for them
EXAMPLE = "w=e4m3fn/row a=e4m3fn/row"
NOT_IN_A_WORD = re.compile(r"[\s%]")  # escaped as in addresses: a path may have blanks, a recipe's word may not
KEYS = ("stored", "w", "a", "kv", "attn", "acc", "also", "skip")


@dataclass(frozen=True, slots=True)
class Override:
    """Another cast, or none, for the weights or activations of the modules that a shell pattern names."""

    key: str  # "w" or "a"
    pattern: str
    cast: Cast | None

    @property
    def text(self) -> str:
        """The form that reads back.

        >>> parse_recipe("w=int8/row w[*.o_proj]=bf16").overrides[0].text
        'w[*.o_proj]=bf16'
        """
        return f"{self.key}[{self.pattern}]={self.cast.text if self.cast else BASELINE_TEXT}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is cast in a model. Linears of the blocks are; GROUPS only when named in `also`.

    Another recipe is made of it by `dataclasses.replace`, which keeps what is not named.

    `kv` is what the cache holds; `attention` casts Q, K and V [heads * tokens, head_dim], and the softmax. `skip`
    holds shell patterns over module names ("*.down_proj", "model.layers.0.*"), and is of Linears alone, as are
    `overrides`, the first of which that names a module holds for it.

    With `stored` nothing is chosen: weights, scales and casts are a quantized checkpoint's own, and the other fields
    only say, once it was read, what they are.
    """

    weights: Cast | None = None
    activations: Cast | None = None
    also: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    kv: KvCast | None = None
    attention: Cast | None = None
    accumulator: Accumulator | None = None  # how the Linears' products are added, where that is simulated
    overrides: tuple[Override, ...] = ()
    stored: str = ""  # a folder, a GGUF file or a Hub id

    @property
    def is_baseline(self) -> bool:
        """True where nothing is cast.

        >>> parse_recipe("kv=e4m3fn/tensor").is_baseline
        False
        """
        return not self.casts_linears and not self.casts_attention

    @property
    def casts_linears(self) -> bool:
        """True where the Linears' weights or activations are cast."""
        casts = (self.weights, self.activations, *(o.cast for o in self.overrides))
        return bool(self.stored) or any(cast is not None for cast in casts)

    @property
    def casts_weights(self) -> bool:
        """True where the weights of some Linears are cast.

        >>> parse_recipe("a=int8/row").casts_weights, parse_recipe("a=int8/row w[*.o_proj]=int8/row").casts_weights
        (False, True)
        """
        own = self.weights is not None or any(o.key == "w" and o.cast is not None for o in self.overrides)
        return bool(self.stored) or own

    @property
    def needs_calibration(self) -> bool:
        """True where activations, keys or values must be observed on some text before the model is cast.

        >>> parse_recipe("a=e4m3fn/tensor/delayed").needs_calibration, parse_recipe("a=int8/row").needs_calibration
        (True, False)
        """
        casts = (self.activations, *(o.cast for o in self.overrides))
        observed = any(cast is not None and cast.is_observed for cast in casts)
        return not self.stored and (observed or self.calibrates_kv)

    @property
    def calibrates_kv(self) -> bool:
        """True where the KV cache's scales come from calibration."""
        return self.kv is not None and self.kv.scale == "static"

    @property
    def casts_attention(self) -> bool:
        """True where the KV cache or the attention path is cast."""
        return self.kv is not None or self.attention is not None

    @property
    def text(self) -> str:
        """The form that reads back.

        >>> parse_recipe("a=e4m3fn/row  w=e4m3fn/row").text
        'w=e4m3fn/row a=e4m3fn/row'
        >>> Recipe().text, Recipe(stored="/my models/x").text
        ('bf16', 'stored=/my%20models/x')
        """
        if self.is_baseline:
            return BASELINE_TEXT
        casts = {"w": self.weights, "a": self.activations, "kv": self.kv, "attn": self.attention}
        words = [f"stored={NOT_IN_A_WORD.sub(lambda m: quote(m[0]), self.stored)}"] * bool(self.stored)
        words += [f"{key}={cast.text}" for key, cast in casts.items() if cast]
        words += [override.text for override in self.overrides]
        words += [f"acc={self.accumulator.name}"] if self.accumulator else []
        words += [f"{key}={','.join(names)}" for key, names in (("also", self.also), ("skip", self.skip)) if names]
        return " ".join(words)

    def skips(self, module: str) -> str | None:
        """The pattern that leaves this module out, or None.

        >>> parse_recipe("w=int8/row skip=*.down_proj").skips("model.layers.0.mlp.down_proj")
        '*.down_proj'
        """
        return next((pattern for pattern in self.skip if fnmatchcase(module, pattern)), None)

    def of(self, module: str) -> "Recipe":
        """The recipe as this module sees it: the overrides that name it are taken, the others dropped.

        >>> mixed = parse_recipe("w=e4m3fn/row w[*.down_proj]=int8/row")
        >>> mixed.of("model.layers.0.mlp.down_proj").text, mixed.of("lm_head").text
        ('w=int8/row', 'w=e4m3fn/row')
        """
        own = replace(self, overrides=())
        for override in reversed(self.overrides):
            if fnmatchcase(module, override.pattern) and override.key == "w":
                own = replace(own, weights=override.cast)
            elif fnmatchcase(module, override.pattern):
                own = replace(own, activations=override.cast)
        return own


def parse_recipe(text: str) -> Recipe:
    """A recipe from its text form; raises InvalidChoice with what was wrong and an example.

    >>> parse_recipe("w=e4m3fn/128x128 a=e4m3fn/1x128 skip=lm_head").weights.tile.name
    '128x128'
    """
    words = text.split()
    if words == [BASELINE_TEXT]:
        return Recipe()
    fields: dict[str, str] = {}
    for word in words:
        key, value = _field(word)
        if key in fields:
            raise InvalidChoice(f"“{key}=” is given twice in “{text}”: give it once.")
        fields[key] = value
    recipe = Recipe(
        weights=parse_cast(fields["w"]) if "w" in fields else None,
        activations=parse_cast(fields["a"]) if "a" in fields else None,
        also=_names(fields.get("also", "")),
        skip=_names(fields.get("skip", "")),
        kv=parse_kv(fields["kv"]) if "kv" in fields else None,
        attention=parse_cast(fields["attn"]) if "attn" in fields else None,
        accumulator=parse_accumulator(fields["acc"]) if "acc" in fields else None,
        overrides=tuple(_override(key, value) for key, value in fields.items() if "[" in key),
        stored=unquote(fields.get("stored", "")),
    )
    return _checked(recipe, text)


def _field(word: str) -> tuple[str, str]:
    """Key and value of a recipe's word; a key may have a pattern in brackets, which may contain brackets itself."""
    parts = re.fullmatch(r"([wa]\[.+?\](?==)|[a-z]+)=(.+)", word)
    if not parts or not (parts[1] in KEYS or "[" in parts[1]):
        raise InvalidChoice(
            f"“{word}” is not part of a recipe: use w=, a=, w[pattern]=, a[pattern]=, kv=, attn=, acc=, also=, "
            f"skip= and stored=, as in “{EXAMPLE}”, or “bf16” alone."
        )
    return parts[1], parts[2]


def _override(key: str, value: str) -> Override:
    return Override(key[0], key[2:-1], None if value == BASELINE_TEXT else parse_cast(value))


def _checked(recipe: Recipe, text: str) -> Recipe:
    if recipe.is_baseline:
        raise InvalidChoice(
            f"“{text}” casts nothing: give w=, a=, kv= or attn=, as in “{EXAMPLE}”, or write “bf16” for the baseline."
        )
    if recipe.accumulator and not _is_fp8_product(recipe):
        raise InvalidChoice(
            f"“acc={recipe.accumulator.name}” is refused: it adds products of e4m3fn and e5m2 alone (fp8dash); "
            f"closest alternative: {_fp8_product(recipe)}."
        )
    if recipe.accumulator and recipe.overrides:
        raise InvalidChoice(
            "“acc=” is refused beside w[pattern]= and a[pattern]=: it is one for all Linears (fp8dash); "
            f"closest alternative: {replace(recipe, overrides=()).text}."
        )
    for cast, where in _never_observed(recipe):
        if cast.is_observed:
            raise InvalidChoice(
                f"“{where}={cast.text}” is refused: {cast.when.name} scales are for activations (compressed-tensors: a "
                f"weight's scale is always its own); closest alternative: {replace(cast, when=DYNAMIC).text}."
            )
    for group in recipe.also:
        choose_from("group after also=", group, {name: name for name in GROUPS})
    for pattern in (*recipe.skip, *(override.pattern for override in recipe.overrides)):
        if not re.fullmatch(r"[\w.*?\[\]!-]+", pattern):
            raise InvalidChoice(
                f"“{pattern}” is not a module pattern: use letters, digits, dots and * as in *.down_proj."
            )
    return recipe


def _never_observed(recipe: Recipe) -> list[tuple[Cast, str]]:
    """Casts whose scale must be their own, and where they stand in the text."""
    casts = [(recipe.weights, "w"), (recipe.attention, "attn")]
    casts += [(override.cast, f"w[{override.pattern}]") for override in recipe.overrides if override.key == "w"]
    return [(cast, where) for cast, where in casts if cast]


def _fp8_product(recipe: Recipe) -> str:
    """The text of a recipe with both operands of its products in E4M3, the other's cast where one is missing."""
    casts = (recipe.weights, recipe.activations)
    weights, activations = (cast or next(filter(None, casts), Cast(E4M3FN, ROW)) for cast in casts)
    weights = replace(weights, format=E4M3FN, when=DYNAMIC)
    return replace(recipe, weights=weights, activations=replace(activations, format=E4M3FN), overrides=()).text


def _is_fp8_product(recipe: Recipe) -> bool:
    operands = (recipe.weights, recipe.activations)
    return all(cast is not None and cast.format in (E4M3FN, E5M2) for cast in operands)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in text.split(",") if name))
