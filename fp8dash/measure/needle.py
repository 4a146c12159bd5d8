"""Needle in a haystack: a 7-digit number hidden at a depth in a text of a length, asked for at its end.

Needle, question and noise are RULER's niah_single_1 (NVIDIA/RULER scripts/data/synthetic). Greedy, few tokens, so that
an answer that dumps numbers cannot win; a cell scores 1 where the number is contained in the answer.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8dash.choose.recipe import KvCast
from fp8dash.choose.records import HIGHER, Measurement, NeedleCell, Progress
from fp8dash.errors import CorpusError
from fp8dash.model.load import LoadedModel
from fp8dash.quant.kv_cache import quantized_cache

METHOD = "RULER niah_single_1 prompt, greedy, containment in 24 tokens, v1"
ANSWER_TOKENS = 24
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic numbers for {key} is: {value}."
TASK = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n{text}\n"
    "What is the special magic number for {key} mentioned in the provided text?"
)
ANSWER = " The special magic number for {key} mentioned in the provided text is"
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
class Prompt:
    """Token ids of a prompt, and the number that must come back."""

    ids: list[int]
    expected: str


def needle(
    loaded: LoadedModel, lengths: Sequence[int], depths: Sequence[int], haystack: Sequence[str], backend: str,
    seed: int, kv: KvCast | None = None,
) -> Iterator[Progress | NeedleCell | Measurement]:  # fmt: skip
    """Progress and a cell for each length and depth (per cent), then the share found.

    `haystack` holds sentences, repeated as often as needed; with `kv` prompt and answer go through a quantized cache.
    Raises CorpusError for lengths that do not fit.
    """
    check_lengths(lengths, loaded.context)
    grid = [(length, depth) for length in sorted(lengths) for depth in sorted(depths)]
    scores = []
    for index, (length, depth) in enumerate(grid):
        yield Progress("needle", index, len(grid), f"{length:,} tokens, needle at {depth} %")
        prompt = build_prompt(loaded.tokenizer, haystack, length, depth, seed)
        answer = _answer(loaded, prompt.ids, kv)
        scores.append(float(prompt.expected in answer))
        yield NeedleCell(length, depth, scores[-1], len(prompt.ids), prompt.expected, answer.strip())
    yield Measurement(
        "needle", sum(scores) / len(scores), "share", HIGHER, METHOD, backend, note=f"{len(scores)} cells"
    )


def check_lengths(lengths: Sequence[int], context: int) -> None:
    """Raises CorpusError where a prompt and its answer exceed the model's context."""
    if context and max(lengths) + ANSWER_TOKENS > context:
        raise CorpusError(
            f"A needle length of {max(lengths):,} and {ANSWER_TOKENS} answer tokens exceed the model's context of "
            f"{context:,}: choose at most {context - ANSWER_TOKENS:,}."
        )


def sentences(text: str) -> list[str]:
    """The sentences of a text, for a haystack; raises CorpusError where there are none."""
    found = [" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+", text)]
    kept = [part for part in found if 20 <= len(part) <= 400]
    if not kept:
        raise CorpusError("The corpus holds no sentences to hide a needle in: choose the noise haystack.")
    return kept


def build_prompt(tokenizer: Any, haystack: Sequence[str], length: int, depth: int, seed: int) -> Prompt:
    """The longest prompt of at most `length` tokens with the needle whole at `depth` per cent of its sentences.

    Raises CorpusError where not even the question fits.
    """
    draw = random.Random(f"{seed}/{length}/{depth}")
    key, value = draw.choice(KEYS), str(draw.randint(1_000_000, 9_999_999))
    start = draw.randrange(len(haystack))

    def tokens(count: int) -> list[int]:
        lines = [haystack[(start + i) % len(haystack)] for i in range(count)]
        lines.insert(round(count * depth / 100), NEEDLE.format(key=key, value=value))
        return _encoded(tokenizer, " ".join(lines), key)

    low, high = 0, max(1, length // 3)  # a sentence has at least three tokens
    if (least := len(tokens(0))) > length:
        raise CorpusError(
            f"A needle length of {length} tokens cannot hold the question itself: choose at least {least}."
        )
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(tokens(middle)) <= length else (low, middle - 1)
    ids = tokens(low)
    if NEEDLE.format(key=key, value=value) not in tokenizer.decode(ids):
        raise CorpusError(
            f"The needle did not survive the tokenizer at {length} tokens: choose another model or haystack."
        )
    return Prompt(ids, value)


def _encoded(tokenizer: Any, text: str, key: str) -> list[int]:
    task, answer = TASK.format(text=text, key=key), ANSWER.format(key=key)
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": task}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + answer.lstrip()
        ids: list[int] = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        return ids
    plain: list[int] = tokenizer(task + answer, verbose=False)["input_ids"]
    return plain


@torch.no_grad()
def _answer(loaded: LoadedModel, ids: list[int], kv: KvCast | None) -> str:
    """What the model says next, greedily."""
    tokenizer, prompt = loaded.tokenizer, torch.tensor([ids], device=loaded.model.device)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    cache = {"cache": quantized_cache(loaded.model, kv)} if kv else {}
    out = loaded.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ANSWER_TOKENS, do_sample=False,
        pad_token_id=pad, **cache,
    )  # fmt: skip
    text: str = tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
    return text
