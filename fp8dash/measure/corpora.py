"""Texts to measure on, and their cut into windows of tokens."""

import hashlib
import os
import platform
import re
import stat
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8dash.choose.catalog import PYDOCS
from fp8dash.choose.request import Request
from fp8dash.choose.windows import DISJOINT, Reading
from fp8dash.errors import CorpusError, InvalidChoice

LARGEST = 256 << 20  # bytes of a corpus file
CHARACTERS_A_TOKEN = 16  # more than any text needs: only this much of a long corpus is tokenized at first
WORD = re.compile(r"(?<!\S)\S")  # a word's first letter; words are what white space divides, as in lm-eval


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text, what it is, and its SHA-256."""

    name: str
    text: str
    content_hash: str
    origin: str


def load_corpus(name: str) -> Corpus:
    """The text of a catalogue corpus or a UTF-8 file; raises CorpusError with what to do."""
    if name == PYDOCS:
        text, origin = _pydocs(), f"pydoc_data.topics of CPython {platform.python_version()}"
    else:
        text, origin = _file(Path(name).expanduser()), "a text file"
    return Corpus(name, text, hashlib.sha256(text.encode()).hexdigest(), origin)


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of a text's tokens as a model reads them, and which of their tokens are scored."""

    ids: Tensor  # [count, length]; the first is BOS where the reading has it there
    first: tuple[int, ...]  # of each window: the position of the first scored token; all after it are scored
    words: tuple[int, ...]  # of each window: words that begin in its scored text; empty where unknown
    text_bytes: tuple[int, ...]  # of each window's scored text, in UTF-8; empty where unknown
    method: str

    def __len__(self) -> int:
        """How many windows there are."""
        return len(self.ids)

    def rows(self, index: int) -> slice:
        """The positions of a window whose successors are scored."""
        return slice(self.first[index] - 1, self.ids.shape[1] - 1)

    def targets(self, index: int) -> Tensor:
        """The scored tokens of a window."""
        return self.ids[index, self.first[index] :]

    def few(self, count: int) -> "Windows":
        """The first of them."""
        shorter = {name: getattr(self, name)[:count] for name in ("ids", "first", "words", "text_bytes")}
        return replace(self, **shorter)

    @property
    def bounds(self) -> list[int]:
        """Where each window's scored tokens begin among all scored ones, and where the last one's end."""
        return [0, *accumulate(self.ids.shape[1] - first for first in self.first)]

    @property
    def content_hash(self) -> str:
        """SHA-256 of tokens and scores."""
        return hashlib.sha256(repr((self.ids.tolist(), self.first)).encode()).hexdigest()


def cut_windows(
    tokenizer: Any, corpus: Corpus, count: int, length: int, context: int, reading: Reading = DISJOINT
) -> Windows:
    """`count` windows of `length` tokens from the start of a corpus; raises CorpusError or InvalidChoice.

    `context` is the most tokens that the model takes, 0 where unknown. BOS takes the place of a window's first token,
    so that no window grows; the text then begins with one, too (llama.cpp, tools/perplexity/perplexity.cpp). What
    spells a special token inside the text is read as text, as there; a tokenizer's own EOS at the end is left out.
    """
    if context and length > context:
        raise CorpusError(
            f"Windows of {length:,} tokens exceed the model's context of {context:,}: choose at most {context:,}."
        )
    reading = reading.resolved(adds_bos(tokenizer))
    step, bos = reading.step(length), _bos(tokenizer, reading)
    need = (count - 1) * step + length - len(bos)
    tokens = _tokens(tokenizer, corpus.text[: need * CHARACTERS_A_TOKEN])
    if len(tokens.ids) < need:
        tokens = _tokens(tokenizer, corpus.text)
    stream = bos + tokens.ids
    fit = max(0, (len(stream) - length) // step + 1)
    if fit < count:
        raise CorpusError(_too_short(corpus, len(tokens.ids), count, length, fit))
    ids = torch.tensor(stream[: (count - 1) * step + length]).unfold(0, length, step).clone()
    ids[:, : len(bos)] = torch.tensor(bos, dtype=ids.dtype)
    first = tuple(reading.first(i, length) for i in range(count))
    starts = [i * step - len(bos) for i in range(count)]  # of the windows, in the text's own tokens
    spans = [tokens.span(start + at, start + length) for start, at in zip(starts, first, strict=True)]
    words, sizes = zip(*(_counts(corpus.text, span) for span in spans if span), strict=True) if spans[0] else ((), ())
    return Windows(ids, first, words, sizes, reading.method)


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer begins every text with BOS: then the model was trained so, and is lost without."""
    return tokenizer.bos_token_id is not None and _ids(tokenizer, "a")[:1] == [tokenizer.bos_token_id]


def calibration_windows(
    tokenizer: Any, corpus: Corpus, count: int, length: int, measured: int, reading: Reading = DISJOINT
) -> Tensor:
    """Token ids [count, length] from the corpus's end, apart from its first `measured` tokens; raises CorpusError.

    BOS takes the place of each window's first token where the reading has it.
    """
    wanted = count * length
    if len(corpus.text) > (wanted + measured) * CHARACTERS_A_TOKEN:  # the end cannot reach what is measured
        ids = _tokens(tokenizer, corpus.text[-wanted * CHARACTERS_A_TOKEN :]).ids
    else:
        ids = _tokens(tokenizer, corpus.text).ids[measured:]
    if len(ids) < wanted:
        raise CorpusError(
            f"The corpus “{corpus.name}” has {len(ids):,} tokens besides the measured ones, but calibration needs "
            f"{wanted:,}: choose fewer calibration windows, or another calibration text."
        )
    windows, bos = torch.tensor(ids[-wanted:]).view(count, length), _bos(tokenizer, reading)
    windows[:, : len(bos)] = torch.tensor(bos, dtype=windows.dtype)
    return windows


def calibration_of(request: Request, tokenizer: Any, corpus: Corpus, reading: Reading) -> tuple[Tensor, dict[str, Any]]:
    """The windows [count, L] of a request's calibration text, or of its corpus's end, and facts about them."""
    text = load_corpus(request.calibration.corpus) if request.calibration.corpus else corpus
    measured = request.windows.tokens if text.content_hash == corpus.content_hash else 0
    count, length = request.calibration.windows, request.windows.length
    facts: dict[str, Any] = {"corpus": text.name, "hash": text.content_hash, "windows": count, "window_length": length}
    facts |= {"bos": True} if reading.bos == "bos" else {}
    return calibration_windows(tokenizer, text, count, length, measured, reading), facts


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A text's tokens, and where in it each ends; without ends where the tokenizer does not tell."""

    ids: list[int]
    ends: list[int]

    def span(self, begin: int, end: int) -> tuple[int, int] | None:
        """The characters of some tokens, with what white space before them the tokenizer left to none."""
        return (self.ends[begin - 1] if begin > 0 else 0, self.ends[end - 1]) if self.ends else None


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    return ids


def _bos(tokenizer: Any, reading: Reading) -> list[int]:
    if reading.resolved(adds_bos(tokenizer)).bos == "none":
        return []
    if tokenizer.bos_token_id is None:
        raise InvalidChoice("BOS was requested, but this model's tokenizer has none: choose “none” for BOS.")
    return [int(tokenizer.bos_token_id)]


def _too_short(corpus: Corpus, tokens: int, count: int, length: int, fit: int) -> str:
    if not corpus.text.strip():
        return f"The corpus “{corpus.name}” is empty: choose “pydocs” or a text file."
    held = f"The corpus “{corpus.name}” holds {tokens:,} tokens, enough for {fit} windows of {length:,}"
    hint = f"ask for at most {fit} windows, or shorter ones" if fit else "choose shorter windows or a longer text"
    return f"{held}, but {count} were requested: {hint}."


def _counts(text: str, span: tuple[int, int]) -> tuple[int, int]:
    """Words that begin in a span of the text, and its UTF-8 bytes."""
    return sum(1 for _ in WORD.finditer(text, *span)), len(text[slice(*span)].encode())


def _tokens(tokenizer: Any, text: str) -> _Tokens:
    """A text's own tokens. What spells a special token is text here, as in llama.cpp's perplexity tool."""
    offsets = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(
        text, add_special_tokens=False, split_special_tokens=True, verbose=False, return_offsets_mapping=offsets
    )
    return _Tokens(encoded["input_ids"], [end for _, end in encoded["offset_mapping"]] if offsets else [])


def pydocs_pages() -> list[str]:
    """CPython's own help texts, a page for each topic."""
    from pydoc_data.topics import topics

    return [topics[key] for key in sorted(topics)]


def _pydocs() -> str:
    return "\n\n".join(pydocs_pages())


def _file(path: Path) -> str:
    """The text of a regular UTF-8 file, without a byte order mark, its lines ended by \\n alone."""
    try:
        data = _bytes(path)
        if len(data) > LARGEST:
            raise CorpusError(
                f"{path} is larger than {LARGEST >> 20} MiB: shorten it; windows are taken from its start."
            )
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8 text (byte {error.start}): convert it, or choose “pydocs”.") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CorpusError(f"The corpus {path} cannot be read ({reason}): choose “pydocs” or a text file.") from error


def _bytes(path: Path) -> bytes:
    """At most one byte more than LARGEST; a pipe or device, which may never end, is refused before it is read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CorpusError(f"The corpus {path} is not a regular file: choose “pydocs” or a text file.")
        return stream.read(LARGEST + 1)
