"""What a quantized checkpoint's configuration says, in the words of recipes: the reading side of `checkpoint`.

`claims` reads it, from the `quantization_config` of config.json or ModelOpt's hf_quant_config.json. It is only a
claim: `fp8dash.model.xray` holds it against the tensors. Values only: no torch, and no file is opened here.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from fp8dash.choose.casts import Cast, KvCast
from fp8dash.choose.recipe import Recipe
from fp8dash.errors import ModelError

# How a matrix [out, in] lies in the file. The names are ours; each is one layout of tensors.
CODES = "codes"  # .weight: one byte a code, [out, in]; .weight_scale
INVERSE = "codes, weight_scale_inv"  # .weight as above; .weight_scale_inv, which multiplies in spite of its name
WORDS = "int32 words"  # .weight_packed [out, in * bits / 32]: codes less the least one, the lowest bits first
NIBBLES = "nibbles"  # .weight_packed [out, in / 2]: two E2M1 codes a byte, low nibble first
MODELOPT = "nibbles in weight"  # .weight [out, in / 2] uint8, as NIBBLES; .weight_scale, .weight_scale_2
BLOCKS = "blocks"  # _blocks [experts, out, in / 32, 16] uint8 and _scales: GPT-OSS
GPTQ = "gptq"  # .qweight [in / 8, out] int32, .qzeros [groups, out / 8], .scales [groups, out], .g_idx [in]
AWQ = "awq"  # .qweight [in, out / 8] int32 in the order 0 2 4 6 1 3 5 7, .qzeros, .scales [groups, out]

QUANTIZED_FILES = {  # files beside config.json that say what a quantization_config says, and their quant_method
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """One kind of Linear in a quantized checkpoint.

    `weights` and `activations` are None where the operand is not cast or our casts cannot say it; `unsaid` then
    tells, in words, what differs.
    """

    targets: tuple[str, ...]  # class names, module names, shell patterns, or "re:" and a regular expression
    weights: Cast | None
    activations: Cast | None
    packing: str
    zero_points: bool = False  # stored codes are unsigned, each less its group's zero point
    zeros_less_one: bool = False  # stored zero points are one too small: GPTQ's first version
    ordered: bool = False  # each column's group is stored, since columns were sorted by activation
    unsaid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a configuration claims of its checkpoint."""

    method: str  # quant_method: compressed-tensors, fp8, mxfp4, gptq, awq, modelopt
    scheme: str  # the scheme's name in that library, or the format's where it has none
    format: str  # how the library calls the layout of the files
    groups: tuple[StoredGroup, ...]
    ignored: tuple[str, ...] = ()  # patterns as targets are
    kv: KvCast | None = None

    def group_of(self, module: str) -> StoredGroup | None:
        """The group that casts this Linear; None where it is ignored or no target names it.

        >>> from fp8dash.choose.models.claims import quantized_of
        >>> fp8 = quantized_of({"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]})
        >>> fp8.group_of("model.layers.0.mlp.up_proj").packing, fp8.group_of("lm_head")
        ('codes', None)
        """
        if any(names(pattern, module) for pattern in self.ignored):
            return None
        named = next((group for group in self.groups if module in group.targets), None)
        fitting = named or next((group for group in self.groups if any(names(t, module) for t in group.targets)), None)
        return fitting or next((group for group in self.groups if LINEAR in group.targets), None)

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the first group and the cache; None where our casts cannot say the weights."""
        first = self.groups[0] if self.groups else None
        if first is None or first.weights is None:
            return None
        return Recipe(weights=first.weights, activations=first.activations, kv=self.kv)


LINEAR = "Linear"


def names(pattern: str, module: str) -> bool:
    """Whether a target or ignored pattern names a module; raises ModelError for no regular expression.

    vLLM takes a plain name for the module, for its last word and for a module above it.

    >>> names("re:.*down_proj", "model.layers.0.mlp.down_proj"), names("lm_head", "model.lm_head")
    (True, True)
    >>> names("model.layers.0", "model.layers.0.mlp.up_proj"), names("model.layers.1", "model.layers.10.mlp.up_proj")
    (True, False)
    """
    if pattern.startswith("re:"):
        return _expression(pattern[3:]).match(module) is not None
    if module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}"):
        return True
    return "*" in pattern and (fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*"))


def texts(value: Any) -> tuple[str, ...]:
    """A list of patterns; raises ModelError for what is none."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise unreadable(f"{shown(value)} is no list of module names")
    for text in value:
        if text.startswith("re:"):
            _expression(text[3:])
    return tuple(value)


def _expression(text: str) -> re.Pattern[str]:
    """A pattern that can be matched in bounded time; raises ModelError.

    Repeats within repeats take exponential time on a name that they almost fit, so a checkpoint of them is refused.
    """
    if len(text) > LONGEST_PATTERN or REPEATED_REPEAT.search(text):
        raise unreadable(f"the pattern {shown(text)} could be matched without end")
    try:
        return re.compile(text)
    except re.error as error:
        raise unreadable(f"{shown(text)} is no regular expression ({error})") from error


LONGEST_PATTERN = 1_000  # characters
REPEATED_REPEAT = re.compile(r"[*+}]\??\)+[*+{]")
LONGEST_SHOWN = 80  # characters of a foreign value in a sentence


def shown(value: Any) -> str:
    text = " ".join(str(value).split())
    return f"“{text[:LONGEST_SHOWN]}{'…' * (len(text) > LONGEST_SHOWN)}”"


def unreadable(why: str) -> ModelError:
    return ModelError(f"The checkpoint's quantization_config cannot be read: {shown(why)}. Fetch the checkpoint anew.")
