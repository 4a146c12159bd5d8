"""Needles in a haystack: numbers hidden at a depth in a text of a length, asked for at its end.

A prompt is read in fixed chunks through the cache, quantized where the recipe says so, and answered greedily in few
tokens, so that an answer that dumps numbers cannot win. A cell has two grades: the share of the values contained in the
answer, and the mean log-probability of the values' own tokens, teacher-forced after the same prompt through the same
cache. The second needs no luck of the argmax: it separates recipes that all find every needle.
"""

import json
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fp8dash.choose.casts import KvCast
from fp8dash.choose.records import BASELINE, HIGHER, NEITHER, Better, Measurement, NeedleCell, Progress, RanBy
from fp8dash.errors import NotFinite
from fp8dash.measure.kept import keep, kept, name_of
from fp8dash.measure.needles.prompts import Prompt
from fp8dash.model.load import LoadedModel
from fp8dash.model.reading import CHUNK, WHOLE, Reader, shared_start
from fp8dash.stats import FEWEST_WINDOWS, paired_difference

METHOD = f"RULER needles, greedy, containment; ln p of the values teacher-forced; read in chunks of {CHUNK}, v2"
METHODS = {CHUNK: METHOD, WHOLE: METHOD.replace(f"in chunks of {CHUNK}", "in one forward")}

JOINED = "the tokenizer joins the answer to the prompt"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said, and the mean log-probability of the values' tokens, nats; None where they are unknown."""

    text: str
    logprob: float | None


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

    `facts` are what else affects an answer's bits: the model's hash and the device.
    """
    where = (METHODS[chunk], chunk, *facts, torch.__version__, torch.get_num_threads())
    files = {
        p: folder / "baselines" / "needles" / f"{name_of(*where, p.hash, p.kind.answer_tokens)}.json" for p in prompts
    }
    answers = {prompt: answer for prompt, file in files.items() if (answer := _read(file))}
    missing = [prompt for prompt in prompts if prompt not in answers]
    left = iter(missing)
    for item in answered(loaded, missing, None, BASELINE, chunk):
        if isinstance(item, Progress):
            yield item
        else:
            prompt = next(left)
            answers[prompt] = item
            keep(json.dumps(asdict(item)).encode(), files[prompt])
    return [answers[prompt] for prompt in prompts]


def needle(
    prompts: Sequence[Prompt],
    answers: Sequence[Answer],
    baseline: Sequence[Answer] | None,
    backend: RanBy,
    seed: int,
    frame: str,
    left_out: Sequence[str] = (),
    chunk: int = CHUNK,
) -> Iterator[NeedleCell | Measurement]:
    """A cell for each prompt, then both grades, the baseline's, and their difference with its paired interval.

    Without a baseline its grades and the difference are left out.
    `frame` says what the prompts were framed by and hidden in, for the method; `left_out` why some have no cell.
    """
    paired: Sequence[Answer | None] = baseline if baseline is not None else [None] * len(prompts)
    cells = sorted(
        (_cell(*each) for each in zip(prompts, answers, paired, strict=True)),
        key=lambda cell: (cell.length, cell.depth, cell.repeat),
    )
    yield from cells
    method = f"{METHODS[chunk]}; niah_{prompts[0].kind.name} {frame}, {prompts[0].kind.answer_tokens} answer tokens"
    note = " ".join([f"{len(cells)} cells.", *left_out]) if left_out else f"{len(cells)} cells"

    def measured(name: str, value: float | None, unit: str, better: Better, why: str = "") -> Measurement:
        return Measurement(name, value, unit, better, method, backend, note=why or note)

    yield measured("needle", _mean([c.score for c in cells]), "share", HIGHER)
    if baseline is None:
        grades = [c.logprob for c in cells if c.logprob is not None]
        why = "" if grades else JOINED
        yield measured("needle_logprob", _mean(grades) if grades else None, "nats a token", HIGHER, why)
        return
    yield measured("baseline_needle", _mean([c.baseline_score for c in cells]), "share", HIGHER)
    graded = [c for c in cells if c.logprob is not None and c.baseline_logprob is not None]
    if not graded:
        yield measured("needle_logprob", None, "nats a token", HIGHER, JOINED)
        return
    grades, baseline_grades = [c.logprob or 0.0 for c in graded], [c.baseline_logprob or 0.0 for c in graded]
    difference = paired_difference(grades, baseline_grades, seed=seed, neighbours=0)
    few = "" if difference.low is not None else f"fewer than {FEWEST_WINDOWS} cells: no interval"
    yield measured("needle_logprob", _mean(grades), "nats a token", HIGHER)
    yield measured("baseline_needle_logprob", _mean(baseline_grades), "nats a token", HIGHER)
    yield measured("needle_logprob_diff", difference.mean, "nats a token", HIGHER)
    yield measured("needle_logprob_diff_low", difference.low, "nats a token", NEITHER, few)
    yield measured("needle_logprob_diff_high", difference.high, "nats a token", NEITHER, few)


def share_found(expected: Sequence[str], text: str) -> float:
    """The share of the values that an answer contains, letters of either case: RULER's string_match_all.

    >>> share_found(("1234567", "7654321"), " 1234567 and 0.")
    0.5
    """
    return sum(value.lower() in text.lower() for value in expected) / len(expected)


def _cell(prompt: Prompt, answer: Answer, baseline: Answer | None) -> NeedleCell:
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
        baseline_score=share_found(prompt.expected, baseline.text) if baseline else None,
        baseline_logprob=baseline.logprob if baseline else None,
        prompt=prompt.hash,
    )


def _answer(tokenizer: Any, reader: Reader, prompt: Prompt, stops: frozenset[int]) -> Answer:
    """Greedy tokens, and the chances of the right ones; what the two have in common is read once."""
    logits = reader.prompt(prompt.ids)
    tokens: list[int] = []
    chances: list[float] = []
    while True:
        if len(chances) == len(tokens) < len(prompt.answer) and tuple(tokens) == prompt.answer[: len(tokens)]:
            chances.append(_chance(logits, prompt.answer[len(tokens)]))
        tokens.append(int(logits.argmax()))
        if tokens[-1] in stops or len(tokens) == prompt.kind.answer_tokens:
            break
        logits = reader.step(tokens[-1])
    if len(chances) < len(prompt.answer):
        reader.back(shared_start(tokens, prompt.answer))
        for token in prompt.answer[len(chances) - 1 : -1]:
            chances.append(_chance(reader.step(token), prompt.answer[len(chances)]))
    graded = [chance for chance, counts in zip(chances, prompt.graded, strict=True) if counts]
    return Answer(tokenizer.decode(tokens, skip_special_tokens=True), _mean(graded) if graded else None)


def _chance(logits: torch.Tensor, token: int) -> float:
    """Log-probability of a token, nats; raises NotFinite."""
    logprob = float(torch.log_softmax(logits, -1)[token])
    if not math.isfinite(logprob):
        raise NotFinite(
            "A needle's prompt gave NaN or infinity: an activation left the format's range or the model overflowed. "
            "Try smaller tiles, or leave the layer out with skip=."
        )
    return logprob


def _stops(model: Any) -> frozenset[int]:
    """Tokens that end an answer, as `generate` has them."""
    ends = model.generation_config.eos_token_id
    return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])


def _read(file: Path) -> Answer | None:
    payload = kept(file)
    return Answer(**json.loads(payload)) if payload else None


def _mean(values: Sequence[float | None]) -> float:
    return sum(value or 0.0 for value in values) / len(values)
