"""How a text is cut into windows and which of their tokens are scored: the conventions of perplexity. Values only.

Numbers of different conventions are on different scales: each has its own method and is never ranked with another.
"""

from dataclasses import dataclass, replace

from fp8dash.choose.limits import choice, whole
from fp8dash.errors import InvalidChoice


@dataclass(frozen=True, slots=True)
class Convention:
    """One way to read a text in windows, as the screen and the method call it."""

    name: str
    meaning: str
    windows: str  # in a method's text
    scored: str


CONVENTIONS = {
    convention.name: convention
    for convention in (
        Convention("disjoint", "windows side by side, all but their first token scored", "disjoint windows",
                   "first token unscored"),
        Convention("strided", "overlapping windows, each token scored once, after the longest context there is",
                   "windows {stride} tokens apart", "each token scored once"),
        Convention("half", "windows side by side, their second half scored, as llama.cpp’s perplexity tool does",
                   "disjoint windows", "second half scored as in llama.cpp"),
    )
}  # fmt: skip
BOS = {
    "auto": "as the model’s tokenizer has it: BOS where it begins every text with one",
    "none": "no BOS: a window begins where the last one ended",
    "bos": "BOS in each window’s first place, and before the text, as llama.cpp has it",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """A convention with its stride and its rule for BOS; “auto” is resolved once the tokenizer is at hand."""

    convention: str = choice("disjoint", CONVENTIONS, what="convention", help="of perplexity’s windows")
    stride: int = whole(  # from one window's start to the next's; only where windows overlap
        0, 0, 1_048_576, what="stride", help="tokens, of strided windows"
    )
    bos: str = choice("auto", BOS, what="rule for BOS", unsaid="none")

    def checked(self, length: int) -> "Reading":
        """This reading, where windows of `length` tokens can be read so; raises InvalidChoice."""
        if self.convention not in CONVENTIONS:
            raise InvalidChoice(f"“{self.convention}” is not a convention: choose one of {', '.join(CONVENTIONS)}.")
        if self.bos not in BOS:
            raise InvalidChoice(f"“{self.bos}” is not a rule for BOS: choose one of {', '.join(BOS)}.")
        if self.convention != "strided" and self.stride:
            raise InvalidChoice(f"A stride applies only to strided windows, not to {self.convention} ones: leave it 0.")
        if self.convention == "strided" and not 1 <= self.stride < length:
            raise InvalidChoice(f"A stride of {self.stride} is out of range: choose 1 to {length - 1:,} tokens.")
        return self

    def resolved(self, tokenizer_adds_bos: bool) -> "Reading":
        """This reading with or without BOS; only that has a method of its own.

        >>> Reading(bos="auto").resolved(True).bos, Reading(bos="none").resolved(True).bos
        ('bos', 'none')
        """
        return replace(self, bos="bos" if tokenizer_adds_bos else "none") if self.bos == "auto" else self

    def step(self, length: int) -> int:
        """Tokens from one window's start to the next's."""
        return self.stride if self.convention == "strided" else length

    def first(self, index: int, length: int) -> int:
        """The position in window `index` of the first token that is scored; all after it are, too.

        >>> [Reading("strided", 100).first(i, 512) for i in (0, 1)], Reading("half").first(0, 512)
        ([1, 412], 257)
        """
        if self.convention == "half":
            return length // 2 + 1
        return length - self.stride if self.convention == "strided" and index else 1

    @property
    def method(self) -> str:
        """How token perplexity is made so, in words; a number's method.

        >>> Reading("strided", 256, "bos").method
        'token perplexity over windows 256 tokens apart, BOS in the first place, each token scored once, v1'
        """
        convention = CONVENTIONS[self.convention]
        bos = {"none": "no BOS", "bos": "BOS in the first place"}.get(self.bos, "BOS as the tokenizer has it")
        return f"token perplexity over {convention.windows.format(stride=self.stride)}, {bos}, {convention.scored}, v1"

    @property
    def short(self) -> str:
        """What differs from disjoint windows with BOS left to the tokenizer or out, in a few words; else empty.

        >>> DISJOINT.short, Reading("strided", 256, "bos").short
        ('', 'strided by 256, BOS')
        """
        strided = f"strided by {self.stride}"
        words = [{"disjoint": "", "strided": strided, "half": "second half scored"}.get(self.convention, "")]
        return ", ".join(word for word in (*words, "BOS" if self.bos == "bos" else "") if word)


DISJOINT = Reading(bos="none")
