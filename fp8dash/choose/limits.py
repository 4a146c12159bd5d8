"""What a field of a request may hold: its type, its bounds, and the sentence that refuses anything else.

A field is declared with its limits (`windows: int = whole(8, 1, 100_000, what="number of windows")`); checks, the
command line's options and the form's address are derived from them. Knows no field by name.
"""

import dataclasses
import math
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fp8dash.errors import InvalidChoice

LIMITS = "limits"  # key of a dataclass field's metadata
LONGEST_STUDY, LONGEST_OWNER = 400, 60  # characters; a grid names its study after its formats, tiles and rules
LONGEST_LINE = 4_096  # characters of a path, a recipe or a name that nothing else bounds
SHOWN = 40  # characters of a wrong value that a refusal repeats
MOST_SHOWN = 10**15  # the largest number that it repeats


@dataclass(frozen=True, slots=True)
class Limits:
    """What one value may be; for `several`, each of a tuple's."""

    what: str  # as a refusal calls it
    kind: type[int] | type[float] | type[str]
    low: float = 0
    high: float = math.inf
    choices: tuple[str, ...] = ()  # of a text; empty where any line will do
    several: bool = False
    most: int = 1  # values of a tuple
    longest: int = LONGEST_LINE  # characters of a text
    may_be_empty: bool = False
    flat: str = ""  # its name in JSON, in an address and on the command line, where the field's own is another
    unsaid: Any = None  # what rows without it meant, where the default has changed since
    help: str = ""

    @property
    def range(self) -> str:
        """The bounds of a number, in words."""
        if self.high == math.inf:
            return f"{self.low:,} or more"
        return f"{self.low:,} to {self.high:,}"

    def checked(self, value: Any) -> Any:
        """The value, a tuple without repetitions; raises InvalidChoice with the limit that it breaks.

        >>> Limits("M", int, 1, 9, several=True, most=3).checked((1, 8, 1))
        (1, 8)
        """
        if not self.several:
            return self._one(value)
        if not isinstance(value, tuple):
            raise InvalidChoice(f"The {self.what} must be a list, not {shown(value)}.")
        if len(value) > self.most:
            raise InvalidChoice(f"{len(value):,} values of the {self.what} are too many: give at most {self.most:,}.")
        if not value and not self.may_be_empty:
            raise InvalidChoice(f"No {self.what} is given: give at least one.")
        return tuple(dict.fromkeys(self._one(each) for each in value))

    def _one(self, value: Any) -> Any:
        if self.kind is str:
            return self._text(value)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole and not (self.kind is float and isinstance(value, float)):
            number = "a whole number" if self.kind is int else "a number"
            given = f"“{shown(value)}”" if isinstance(value, str) else shown(value)
            raise InvalidChoice(f"The {self.what} must be {number}, {self.range}, not {given}.")
        if not self.low <= value <= self.high or not math.isfinite(value):
            raise InvalidChoice(f"The {self.what} of {shown(value)} is out of range: choose {self.range}.")
        return self.kind(value)

    def _text(self, value: Any) -> str:
        if self.choices and value not in self.choices:
            raise InvalidChoice(f"“{shown(value)}” is not a {self.what}: choose one of {', '.join(self.choices)}.")
        return one_line(value, self.what, self.longest)


def whole(default: int, low: int, high: int, *, what: str, flat: str = "", help: str = "") -> Any:
    """A field for a whole number from `low` to `high`."""
    return _field(default, Limits(what, int, low, high, flat=flat, help=help))


def wholes(
    default: tuple[int, ...], low: int, high: int, *, most: int, what: str, flat: str = "", help: str = ""
) -> Any:
    """A field for one to `most` whole numbers from `low` to `high`."""
    return _field(default, Limits(what, int, low, high, several=True, most=most, flat=flat, help=help))


def real(default: float, low: float, *, what: str, help: str = "") -> Any:
    """A field for a finite number that is at least `low`."""
    return _field(default, Limits(what, float, low, help=help))


def choice(
    default: str, choices: Iterable[str], *, what: str, flat: str = "", help: str = "", unsaid: str | None = None
) -> Any:
    """A field for one of some names. `unsaid` is what rows without the field meant, where the default has changed."""
    return _field(default, Limits(what, str, choices=tuple(choices), flat=flat, help=help, unsaid=unsaid))


def choices(default: tuple[str, ...], offered: Iterable[str], *, what: str, help: str = "") -> Any:
    """A field for some of some names, or none."""
    names = tuple(offered)
    limits = Limits(what, str, choices=names, several=True, most=len(names), may_be_empty=True, help=help)
    return _field(default, limits)


def line(default: str, *, what: str, flat: str = "", longest: int = LONGEST_LINE, help: str = "") -> Any:
    """A field for one line of text."""
    return _field(default, Limits(what, str, longest=longest, flat=flat, help=help))


def lines(default: tuple[str, ...], *, most: int, longest: int, what: str, flat: str = "", help: str = "") -> Any:
    """A field for up to `most` names."""
    limits = Limits(what, str, several=True, most=most, longest=longest, may_be_empty=True, flat=flat, help=help)
    return _field(default, limits)


def one_line(value: Any, what: str, longest: int) -> str:
    """The text, if it is one that can be stored and shown; raises InvalidChoice.

    Lone surrogates are what a byte that is not UTF-8 becomes in an argument: no database and no page can hold them.

    >>> one_line("a" * 9, "owner", 5)
    Traceback (most recent call last):
    fp8dash.errors.InvalidChoice: The owner has 9 characters: at most 5 are allowed.
    """
    if not isinstance(value, str):
        raise InvalidChoice(f"The {what} must be text, not {shown(value)}.")
    if len(value) > longest:
        raise InvalidChoice(f"The {what} has {len(value):,} characters: at most {longest:,} are allowed.")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidChoice(f"The {what} “{shown(value)}” is not valid Unicode: write it in UTF-8.")
    if any(char < " " or char == "\x7f" for char in value):
        raise InvalidChoice(
            f"The {what} “{shown(value)}” contains control characters: write it on one line without them."
        )
    return value


def readable_name(value: Any, what: str, longest: int, example: str) -> str:
    """The name without spaces around it, if anyone can read it; raises InvalidChoice with an example.

    >>> readable_name("\\u200b\\u2060 ", "owner", 60, "ada")
    Traceback (most recent call last):
    fp8dash.errors.InvalidChoice: The owner has no readable name: give one such as “ada”.
    """
    text = one_line(value, what, longest).strip()
    if not any(unicodedata.category(char)[0] in "LNPS" for char in text):
        raise InvalidChoice(f"The {what} has no readable name: give one such as “{example}”.")
    return text


def shown(value: Any) -> str:
    """A wrong value as a refusal quotes it: short, and printable whatever it contains.

    >>> shown("ab\\ud800"), shown(10**5000), shown(None)
    ('ab?', 'more than 10^15', 'None')
    """
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MOST_SHOWN:
        return "more than 10^15" if value > 0 else "less than -10^15"
    text = value if isinstance(value, str) else type(value).__name__ if _is_long(value) else repr(value)
    text = "".join(char if char.isprintable() else "?" for char in text[:SHOWN]) + " …" * (len(text) > SHOWN)
    return text.encode("utf-8", "replace").decode()


def _is_long(value: Any) -> bool:
    return isinstance(value, tuple | list | dict | set) and len(value) > SHOWN


def _field(default: Any, limits: Limits) -> Any:
    return dataclasses.field(default=default, metadata={LIMITS: limits})
