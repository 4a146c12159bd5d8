"""The needles that can be hidden and the haystacks that hide them: values only, never torch.

Kinds are RULER's (NVIDIA/RULER, scripts/synthetic.yaml and scripts/data/synthetic/niah.py): how many keys, how many
values each, numbers or UUIDs, and the haystack that RULER hides them in.
"""

from dataclasses import dataclass

from fp8dash.errors import InvalidChoice

HAYSTACKS = {
    "noise": "RULER's noise lines",
    "essay": "sentences of an essay of our own; RULER has Paul Graham's",
    "corpus": "sentences of the corpus",
}
CHATS = {
    "auto": "the model's chat template where it has one",
    "on": "the model's chat template; a model without one is refused",
    "off": "plain text, as for a base model",
}
MOST_REPEATS = 100
REFUSED = {  # kind and haystack, and what to do instead
    ("single_2", "noise"): "The needle single_2 is single_1 in prose: choose the haystack essay or corpus.",
}


@dataclass(frozen=True, slots=True)
class Kind:
    """What is hidden and asked for, and how many tokens the answer may take."""

    name: str  # RULER's, without niah_
    what: str  # "number" or "uuid"
    haystack: str  # RULER's own
    meaning: str
    keys: int = 1  # needles of other keys distract
    values: int = 1  # all are asked for
    answer_tokens: int = 24  # few, so that an answer that dumps numbers cannot win

    @property
    def needles(self) -> int:
        """How many sentences are hidden.

        >>> KINDS["multikey_1"].needles
        4
        """
        return self.keys * self.values


KINDS = {
    kind.name: kind
    for kind in (
        Kind("single_1", "number", "noise", "one 7-digit number in noise"),
        Kind("single_2", "number", "essay", "one 7-digit number in prose"),
        Kind("single_3", "uuid", "essay", "one UUID in prose", answer_tokens=56),
        Kind("multikey_1", "number", "essay", "one 7-digit number beside three with other keys", keys=4),
        Kind("multivalue", "number", "essay", "four 7-digit numbers under one key, all asked for", values=4,
             answer_tokens=64),
    )
}  # fmt: skip


def check_needles(kind: str, haystack: str) -> None:
    """Raises InvalidChoice for a kind of needle that this haystack cannot hide, with what to change.

    >>> check_needles("single_2", "noise")
    Traceback (most recent call last):
    fp8dash.errors.InvalidChoice: The needle single_2 is single_1 in prose: choose the haystack essay or corpus.
    """
    if why := REFUSED.get((kind, haystack)):
        raise InvalidChoice(why)
