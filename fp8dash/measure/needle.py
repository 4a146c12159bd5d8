"""Needles in a haystack: numbers hidden at a depth in a text of a length, asked for at its end.

Needles, question and noise are RULER's (NVIDIA/RULER scripts/data/synthetic/niah.py). A prompt is read in fixed chunks
through the cache, quantized where the recipe says so, and answered greedily in few tokens, so that an answer that dumps
numbers cannot win. A cell has two grades: the share of the values contained in the answer, and the mean log-probability
of the values' own tokens, teacher-forced after the same prompt through the same cache. The second needs no luck of the
argmax: it tells recipes apart that all find every needle.
"""

import hashlib
import json
import math
import random
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fp8dash.choose.casts import KvCast
from fp8dash.choose.needles import KINDS, Kind
from fp8dash.choose.records import HIGHER, NEITHER, Better, Measurement, NeedleCell, Progress
from fp8dash.errors import CorpusError, NotFinite
from fp8dash.measure.essay import NOISE
from fp8dash.measure.kept import keep, kept, name_of
from fp8dash.model.chat import frame_of
from fp8dash.model.load import LoadedModel
from fp8dash.model.reading import CHUNK, WHOLE, Reader, shared_start
from fp8dash.stats import FEWEST_WINDOWS, paired_difference

METHOD = f"RULER needles, greedy, containment; ln p of the values teacher-forced; read in chunks of {CHUNK}, v2"
METHODS = {CHUNK: METHOD, WHOLE: METHOD.replace(f"in chunks of {CHUNK}", "in one forward")}
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
class Grid:
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

    @property
    def hash(self) -> str:
        """The same for the same tokens."""
        return hashlib.sha256(repr((self.ids, self.answer)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said, and the mean log-probability of the values' tokens, nats; None where they are unknown."""

    text: str
    logprob: float | None


def fitting(tokenizer: Any, grid: Grid, context: int, chat: str) -> tuple[Grid, tuple[str, ...]]:
    """The grid without the lengths that this tokenizer or the model's context rules out, and why each is left out.

    Raises CorpusError where no length is left.
    """
    framed = chat_of(tokenizer, chat)
    refusals = {length: _refusal(tokenizer, grid, length, context, framed) for length in grid.lengths}
    lengths = tuple(length for length, why in refusals.items() if not why)
    if not lengths:
        raise CorpusError(next(iter(refusals.values())))
    return replace(grid, lengths=lengths), tuple(filter(None, refusals.values()))


def _refusal(tokenizer: Any, grid: Grid, length: int, context: int, chat: str) -> str:
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


def _question_tokens(tokenizer: Any, grid: Grid, length: int, chat: str) -> int:
    """Tokens of the longest prompt of a length's cells without any haystack."""
    cells = ((depth, repeat) for depth in grid.depths for repeat in range(grid.repeats))
    hidden = (_hide(grid, length, depth, repeat) for depth, repeat in cells)
    return max(len(_encoded(tokenizer, _written(tokenizer, grid.kind, h.text(0), h.key, chat), chat)) for h in hidden)


def build_prompts(loaded: LoadedModel, grid: Grid, chat: str) -> list[Prompt]:
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
        raise CorpusError("The model brings no chat template: choose --needle-chat off, or auto.")
    return "off" if chat == "off" or not tokenizer.chat_template else "on"


def build_prompt(tokenizer: Any, grid: Grid, length: int, depth: int, repeat: int, chat: str) -> Prompt:
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
    return Prompt(length, depth, repeat, grid.kind, tuple(ids), expected, answer, graded)


def answered(
    loaded: LoadedModel, prompts: Sequence[Prompt], kv: KvCast | None, stage: str, chunk: int = CHUNK
) -> Iterator[Progress | Answer]:
    """Progress and an answer for each prompt; raises NotFinite."""
    reader, stops = Reader(loaded.model, kv, chunk), _stops(loaded.model)
    for index, prompt in enumerate(prompts):
        yield Progress(stage, index, len(prompts), f"{prompt.length:,} tokens, needle at {prompt.depth} %")
        yield _answer(loaded.tokenizer, reader, prompt, stops)


def baseline_answers(
    loaded: LoadedModel, prompts: Sequence[Prompt], folder: Path, *facts: object, chunk: int = CHUNK
) -> Generator[Progress, None, list[Answer]]:
    """Progress; returns the unquantized model's answers, each measured once and kept in `folder`.

    `facts` are what else bears on an answer's bits: the model's hash and the device.
    """
    where = (METHODS[chunk], chunk, *facts, torch.__version__, torch.get_num_threads())
    files = {
        p: folder / "baselines" / "needles" / f"{name_of(*where, p.hash, p.kind.answer_tokens)}.json" for p in prompts
    }
    found = {prompt: answer for prompt, file in files.items() if (answer := _read(file))}
    missing = [prompt for prompt in prompts if prompt not in found]
    left = iter(missing)
    for item in answered(loaded, missing, None, "baseline", chunk):
        if isinstance(item, Progress):
            yield item
        else:
            prompt = next(left)
            found[prompt] = item
            keep(json.dumps(asdict(item)).encode(), files[prompt])
    return [found[prompt] for prompt in prompts]


def needle(
    prompts: Sequence[Prompt],
    answers: Sequence[Answer],
    baseline: Sequence[Answer],
    backend: str,
    seed: int,
    frame: str,
    left_out: Sequence[str] = (),
    chunk: int = CHUNK,
) -> Iterator[NeedleCell | Measurement]:
    """A cell for each prompt, then both grades, the baseline's, and their difference with its paired interval.

    `frame` says what the prompts were framed by and hidden in, for the method; `left_out` why some have no cell.
    """
    cells = sorted(
        (_cell(*each) for each in zip(prompts, answers, baseline, strict=True)),
        key=lambda cell: (cell.length, cell.depth, cell.repeat),
    )
    yield from cells
    method = f"{METHODS[chunk]}; niah_{prompts[0].kind.name} {frame}, {prompts[0].kind.answer_tokens} answer tokens"
    note = " ".join([f"{len(cells)} cells.", *left_out]) if left_out else f"{len(cells)} cells"

    def measured(name: str, value: float | None, unit: str, better: Better, why: str = "") -> Measurement:
        return Measurement(name, value, unit, better, method, backend, note=why or note)

    yield measured("needle", _mean([c.score for c in cells]), "share", HIGHER)
    yield measured("baseline_needle", _mean([c.baseline_score for c in cells]), "share", HIGHER)
    graded = [c for c in cells if c.logprob is not None and c.baseline_logprob is not None]
    if not graded:
        why = "the tokenizer joins the answer to the prompt"
        yield measured("needle_logprob", None, "nats a token", HIGHER, why)
        return
    ours, theirs = [c.logprob or 0.0 for c in graded], [c.baseline_logprob or 0.0 for c in graded]
    difference = paired_difference(ours, theirs, seed=seed, neighbours=0)
    few = "" if difference.low is not None else f"fewer than {FEWEST_WINDOWS} cells: no interval"
    yield measured("needle_logprob", _mean(ours), "nats a token", HIGHER)
    yield measured("baseline_needle_logprob", _mean(theirs), "nats a token", HIGHER)
    yield measured("needle_logprob_diff", difference.mean, "nats a token", HIGHER)
    yield measured("needle_logprob_diff_low", difference.low, "nats a token", NEITHER, few)
    yield measured("needle_logprob_diff_high", difference.high, "nats a token", NEITHER, few)


def share_found(expected: Sequence[str], text: str) -> float:
    """The share of the values that an answer contains, letters of either case: RULER's string_match_all.

    >>> share_found(("1234567", "7654321"), " 1234567 and 0.")
    0.5
    """
    return sum(value.lower() in text.lower() for value in expected) / len(expected)


def _cell(prompt: Prompt, answer: Answer, baseline: Answer) -> NeedleCell:
    return NeedleCell(
        length=prompt.length,
        depth=prompt.depth,
        score=share_found(prompt.expected, answer.text),
        prompt_tokens=len(prompt.ids),
        expected=", ".join(prompt.expected),
        answer=answer.text.strip(),
        kind=prompt.kind.name,
        repeat=prompt.repeat,
        logprob=answer.logprob,
        baseline_score=share_found(prompt.expected, baseline.text),
        baseline_logprob=baseline.logprob,
        prompt=prompt.hash,
    )


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


def _hide(grid: Grid, length: int, depth: int, repeat: int) -> _Hidden:
    """The needles of one cell, drawn from the grid's seed; the first lies at the cell's depth."""
    kind, seed = grid.kind, f"{grid.seed}/{grid.kind.name}/{length}/{repeat}"
    draw, start = random.Random(f"{seed}/{depth}"), random.Random(seed).randrange(len(grid.haystack))
    keys = draw.sample(KEYS, kind.keys)
    values = [_values(draw, kind) for _ in keys]
    lines = [
        NEEDLE.format(what=kind.what, key=k, value=v) for k, found in zip(keys, values, strict=True) for v in found
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


def _written(tokenizer: Any, kind: Kind, text: str, key: str, chat: str) -> str:
    """A prompt as one text: the task, framed or not, and the answer's first words."""
    task, prefix = (part.format(what=kind.what, text=text, key=key) for part in TASKS[min(kind.values, 2)])
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
    """Token ids of the right answer, and which hold part of a value; values stand as in the text, divided by commas.

    Nothing where the answer's tokens cannot be told from the prompt's.
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


def _answer(tokenizer: Any, reader: Reader, prompt: Prompt, stops: frozenset[int]) -> Answer:
    """Greedy tokens, and the chances of the right ones; what the two have in common is read once."""
    logits = reader.prompt(prompt.ids)
    said: list[int] = []
    chances: list[float] = []
    while True:
        if len(chances) == len(said) < len(prompt.answer) and tuple(said) == prompt.answer[: len(said)]:
            chances.append(_chance(logits, prompt.answer[len(said)]))
        said.append(int(logits.argmax()))
        if said[-1] in stops or len(said) == prompt.kind.answer_tokens:
            break
        logits = reader.step(said[-1])
    if len(chances) < len(prompt.answer):
        reader.back(shared_start(said, prompt.answer))
        for token in prompt.answer[len(chances) - 1 : -1]:
            chances.append(_chance(reader.step(token), prompt.answer[len(chances)]))
    graded = [chance for chance, counts in zip(chances, prompt.graded, strict=True) if counts]
    return Answer(tokenizer.decode(said, skip_special_tokens=True), _mean(graded) if graded else None)


def _chance(logits: torch.Tensor, token: int) -> float:
    """Log-probability of a token, nats; raises NotFinite."""
    found = float(torch.log_softmax(logits, -1)[token])
    if not math.isfinite(found):
        raise NotFinite(
            "A needle's prompt gave NaN or infinity: an activation left the format's range or the model overflowed. "
            "Try smaller tiles, or leave the layer out with skip=."
        )
    return found


def _stops(model: Any) -> frozenset[int]:
    """Tokens that end an answer, as `generate` has them."""
    ends = model.generation_config.eos_token_id
    return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])


def _read(file: Path) -> Answer | None:
    payload = kept(file)
    return Answer(**json.loads(payload)) if payload else None


def _mean(values: Sequence[float | None]) -> float:
    return sum(value or 0.0 for value in values) / len(values)
