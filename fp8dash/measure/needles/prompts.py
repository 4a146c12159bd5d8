"""The prompts of needles in a haystack: needles at a depth in a text of a length, and the tokens of the right answer.

Needles, question and noise are RULER's (NVIDIA/RULER scripts/data/synthetic/niah.py).
"""

import hashlib
import math
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fp8dash.choose.needles import KINDS, Kind
from fp8dash.choose.request import NeedleOptions
from fp8dash.errors import CorpusError
from fp8dash.measure.needles.essay import NOISE, haystack_of
from fp8dash.model.chat import frame_of
from fp8dash.model.load import LoadedModel

ROUND = 16  # tokens: lengths that are recommended leave room for needles of a few more
NEEDLE = "One of the special magic {what}s for {key} is: {value}."
TASKS = {  # one value asked for, or several
    1: (
        "A special magic {what} is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the {what} afterwards.\n{text}\n"
        "What is the special magic {what} for {key} mentioned in the provided text?",
        " The special magic {what} for {key} mentioned in the provided text is",
    ),
    2: (
        "Some special magic {what}s are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the {what}s afterwards.\n{text}\n"
        "What are all the special magic {what}s for {key} mentioned in the provided text?",
        " The special magic {what}s for {key} mentioned in the provided text are",
    ),
}
KEYS = (
    "amber",
    "basalt",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "garnet",
    "harbor",
    "indigo",
    "juniper",
    "lagoon",
    "maple",
)


@dataclass(frozen=True, slots=True)
class NeedleGrid:
    """What is asked: a kind of needle at each length (tokens) and depth (per cent), in a haystack of sentences."""

    lengths: tuple[int, ...]
    depths: tuple[int, ...]
    haystack: tuple[str, ...]
    kind: Kind = KINDS["single_1"]
    repeats: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A cell's question: its token ids, the values that must come back, and the tokens that say them."""

    length: int
    depth: int
    repeat: int
    kind: Kind
    ids: tuple[int, ...]
    expected: tuple[str, ...]
    answer: tuple[int, ...] = ()  # token ids of the right answer; none where they would change the prompt's
    graded: tuple[bool, ...] = ()  # which of them are the values', and not what stands between
    task: str = ""  # haystack and question, without a chat template
    prefix: str = ""  # the answer's first words, with which the prompt ends

    @property
    def hash(self) -> str:
        """The same for the same tokens."""
        return hashlib.sha256(repr((self.ids, self.answer)).encode()).hexdigest()[:16]


def grid_of(needles: NeedleOptions, seed: int, corpus: str, tokenizer: Any) -> NeedleGrid:
    """The grid that was asked for, in its haystack; raises CorpusError where the corpus holds no sentence for it."""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    haystack = haystack_of(needles.haystack, corpus, special)
    return NeedleGrid(needles.lengths, needles.depths, haystack, KINDS[needles.kind], needles.repeats, seed)


def fitting(tokenizer: Any, grid: NeedleGrid, context: int, chat: str) -> tuple[NeedleGrid, tuple[str, ...]]:
    """The grid without the lengths that this tokenizer or the model's context rules out, and why each is left out.

    Raises CorpusError where no length is left.
    """
    framed = chat_of(tokenizer, chat)
    refusals = {length: _refusal(tokenizer, grid, length, context, framed) for length in grid.lengths}
    lengths = tuple(length for length, why in refusals.items() if not why)
    if not lengths:
        raise CorpusError(next(iter(refusals.values())))
    return replace(grid, lengths=lengths), tuple(filter(None, refusals.values()))


def _refusal(tokenizer: Any, grid: NeedleGrid, length: int, context: int, chat: str) -> str:
    """Why no prompt of a length can be made, and a length that can; empty where one can."""
    answer = grid.kind.answer_tokens
    if context and length + answer > context:
        return (
            f"A needle length of {length:,} and {answer} answer tokens exceed the model's context of {context:,}: "
            f"choose at most {context - answer:,}."
        )
    least = length
    while (needed := _question_tokens(tokenizer, grid, least, chat)) > least:  # other lengths hide other needles
        least = math.ceil(needed / ROUND) * ROUND
    if least == length:
        return ""
    return f"A needle length of {length:,} tokens cannot hold the question itself: choose at least {least:,}."


def _question_tokens(tokenizer: Any, grid: NeedleGrid, length: int, chat: str) -> int:
    """Tokens of the longest prompt of a length's cells without any haystack."""
    cells = ((depth, repeat) for depth in grid.depths for repeat in range(grid.repeats))
    hidden = (_hide(grid, length, depth, repeat) for depth, repeat in cells)
    return max(len(_encoded(tokenizer, _written(tokenizer, grid.kind, h.text(0), h.key, chat), chat)) for h in hidden)


def build_prompts(loaded: LoadedModel, grid: NeedleGrid, chat: str) -> list[Prompt]:
    """The prompt of every cell, by length, repeat and depth; raises CorpusError where one cannot be."""
    framed = chat_of(loaded.tokenizer, chat)
    return [
        build_prompt(loaded.tokenizer, grid, length, depth, repeat, framed)
        for length in sorted(grid.lengths)
        for repeat in range(grid.repeats)
        for depth in sorted(grid.depths, reverse=True)  # from the end: each begins with most of the one before
    ]


def chat_of(tokenizer: Any, chat: str) -> str:
    """Whether prompts are framed by the model's chat template, "on" or "off"; raises CorpusError where none is."""
    if chat == "on" and not tokenizer.chat_template:
        raise CorpusError("The model has no chat template: choose --needle-chat off, or auto.")
    return "off" if chat == "off" or not tokenizer.chat_template else "on"


def build_prompt(tokenizer: Any, grid: NeedleGrid, length: int, depth: int, repeat: int, chat: str) -> Prompt:
    """The longest prompt of at most `length` tokens with the needle whole at `depth` per cent of its sentences.

    Further needles, of other keys or more values, lie at depths drawn at random. The haystack begins alike for all
    depths of a length and repeat. Raises CorpusError where not even the question fits.
    """
    hidden = _hide(grid, length, depth, repeat)

    def written(count: int) -> str:
        return _written(tokenizer, grid.kind, hidden.text(count), hidden.key, chat)

    count = _most_that_fit(lambda count: len(_encoded(tokenizer, written(count), chat)), length)
    ids = _encoded(tokenizer, written(count), chat)
    read = tokenizer.decode(ids)
    if any(line not in read for line in hidden.lines):
        raise CorpusError(
            f"The needle did not survive the tokenizer at {length} tokens: choose another model or haystack."
        )
    expected = tuple(sorted(hidden.values, key=hidden.text(count).index))
    answer, graded = _right_answer(tokenizer, written(count), chat, ids, expected)
    task, prefix = _asked(grid.kind, hidden.text(count), hidden.key)
    return Prompt(length, depth, repeat, grid.kind, tuple(ids), expected, answer, graded, task, prefix)


@dataclass(frozen=True, slots=True)
class _Hidden:
    """Needles and where they lie, in a text that can be as long as is wanted."""

    key: str  # asked for
    values: tuple[str, ...]  # that must come back
    lines: tuple[str, ...]  # a sentence each, distracting ones among them
    places: tuple[float, ...]  # 0 to 1, of each line
    haystack: tuple[str, ...]
    joint: str

    def text(self, count: int) -> str:
        """So many sentences of the haystack, over and over, and the needles between them."""
        parts = [self.haystack[i % len(self.haystack)] for i in range(count)]
        order = sorted(zip(self.places, self.lines, strict=True), key=lambda pair: pair[0], reverse=True)
        for place, line in order:  # from the end, so that each finds its sentences where they were
            parts.insert(round(count * place), line)
        return self.joint.join(parts)


def _hide(grid: NeedleGrid, length: int, depth: int, repeat: int) -> _Hidden:
    """The needles of one cell, drawn from the grid's seed; the first lies at the cell's depth."""
    kind, seed = grid.kind, f"{grid.seed}/{grid.kind.name}/{length}/{repeat}"
    draw, start = random.Random(f"{seed}/{depth}"), random.Random(seed).randrange(len(grid.haystack))
    keys = draw.sample(KEYS, kind.keys)
    values = [_values(draw, kind) for _ in keys]
    lines = [
        NEEDLE.format(what=kind.what, key=k, value=v) for k, of_key in zip(keys, values, strict=True) for v in of_key
    ]
    places = (depth / 100, *(draw.random() for _ in lines[1:]))
    joint = "\n" if grid.haystack == (NOISE,) else " "  # as RULER has it
    turned = (*grid.haystack[start:], *grid.haystack[:start])
    return _Hidden(keys[0], tuple(values[0]), tuple(lines), places, turned, joint)


def _values(draw: random.Random, kind: Kind) -> list[str]:
    if kind.what == "uuid":
        return [str(uuid.UUID(int=draw.getrandbits(128), version=4)) for _ in range(kind.values)]
    return [str(number) for number in draw.sample(range(1_000_000, 10_000_000), kind.values)]


def _most_that_fit(tokens: Callable[[int], int], length: int) -> int:
    """The largest count of sentences whose prompt takes at most `length` tokens."""
    low, high = 0, max(1, length // 3)  # a sentence has at least three tokens
    if (least := tokens(0)) > length:
        raise CorpusError(
            f"A needle length of {length} tokens cannot hold the question itself: choose at least {least}."
        )
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if tokens(middle) <= length else (low, middle - 1)
    return low


def _asked(kind: Kind, text: str, key: str) -> tuple[str, str]:
    """The task and the answer's first words."""
    task, prefix = (part.format(what=kind.what, text=text, key=key) for part in TASKS[min(kind.values, 2)])
    return task, prefix


def _written(tokenizer: Any, kind: Kind, text: str, key: str, chat: str) -> str:
    """A prompt as one text: the task, framed or not, and the answer's first words."""
    task, prefix = _asked(kind, text, key)
    if chat == "off":
        return task + prefix
    return frame_of(tokenizer).around(task) + prefix.lstrip()


def _encoded(tokenizer: Any, text: str, chat: str) -> list[int]:
    """Token ids; a chat template brings its special tokens itself.

    What a tokenizer appends to every text, EOS or SEP, is left out: it would end the prompt before the answer.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=chat == "off", verbose=False)["input_ids"]
    return ids[: len(ids) - _appended(tokenizer)] if chat == "off" else ids


def _appended(tokenizer: Any) -> int:
    """How many tokens the tokenizer puts after every text."""
    whole, bare = (tokenizer("a", add_special_tokens=adds, verbose=False)["input_ids"] for adds in (True, False))
    start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return len(whole) - start - len(bare)


def _right_answer(
    tokenizer: Any, written: str, chat: str, ids: Sequence[int], expected: Sequence[str]
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Token ids of the right answer, and which hold part of a value; values stand as in the text, separated by commas.

    Both are empty where the tokenizer merges the answer's tokens with the prompt's.
    """
    if not tokenizer.is_fast:  # only those say which letters a token stands for
        return (), ()
    whole, spans = f"{written} {', '.join(expected)}", []
    for value in reversed(expected):
        at = whole.rindex(value)
        spans.append(range(at, at + len(value)))
    given = tokenizer(whole, add_special_tokens=chat == "off", verbose=False, return_offsets_mapping=True)
    end = len(given["input_ids"]) - (_appended(tokenizer) if chat == "off" else 0)
    if given["input_ids"][: len(ids)] != list(ids):
        return (), ()
    letters = [range(*pair) for pair in given["offset_mapping"][len(ids) : end]]
    graded = tuple(any(max(a.start, b.start) < min(a.stop, b.stop) for b in spans) for a in letters)
    return tuple(given["input_ids"][len(ids) : end]), graded
