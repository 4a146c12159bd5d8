"""Texts to measure on, and their cut into windows of tokens."""

import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8dash.choose.catalog import PYDOCS
from fp8dash.errors import CorpusError

LARGEST = 256 << 20  # bytes of a corpus file
CHARACTERS_A_TOKEN = 16  # more than any text needs: only this much of a long corpus is tokenized at first


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


def cut_windows(tokenizer: Any, corpus: Corpus, count: int, length: int, context: int) -> Tensor:
    """Token ids [count, length]: disjoint windows from the start, no BOS, no special tokens; raises CorpusError.

    `context` is the most tokens that the model takes, 0 where unknown.
    """
    if context and length > context:
        raise CorpusError(
            f"Windows of {length:,} tokens exceed the model's context of {context:,}: choose at most {context:,}."
        )
    ids = _tokens(tokenizer, corpus.text[: count * length * CHARACTERS_A_TOKEN])
    if len(ids) < count * length:
        ids = _tokens(tokenizer, corpus.text)
    fit = len(ids) // length
    if fit < count:
        held = f"The corpus “{corpus.name}” holds {len(ids):,} tokens, enough for {fit} windows of {length:,}"
        hint = f"ask for at most {fit} windows, or shorter ones" if fit else "choose shorter windows or a longer text"
        raise CorpusError(f"{held}, and {count} were asked for: {hint}.")
    return torch.tensor(ids[: count * length]).view(count, length)


def calibration_windows(tokenizer: Any, corpus: Corpus, count: int, length: int, measured: int) -> Tensor:
    """Token ids [count, length] from the corpus's end, apart from its first `measured` tokens; raises CorpusError."""
    wanted = count * length
    if len(corpus.text) > (wanted + measured) * CHARACTERS_A_TOKEN:  # the end cannot reach what is measured
        ids = _tokens(tokenizer, corpus.text[-wanted * CHARACTERS_A_TOKEN :])
    else:
        ids = _tokens(tokenizer, corpus.text)[measured:]
    if len(ids) < wanted:
        raise CorpusError(
            f"The corpus “{corpus.name}” holds {len(ids):,} tokens beside those that are measured, and calibration "
            f"asks for {wanted:,}: choose fewer calibration windows, or another calibration text."
        )
    return torch.tensor(ids[-wanted:]).view(count, length)


def _tokens(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def pydocs_pages() -> list[str]:
    """CPython's own help texts, a page for each topic."""
    from pydoc_data.topics import topics

    return [topics[key] for key in sorted(topics)]


def _pydocs() -> str:
    return "\n\n".join(pydocs_pages())


def _file(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST:
            raise CorpusError(f"{path} is larger than {LARGEST >> 20} MiB: cut it, windows are taken from its start.")
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8 text (byte {error.start}): convert it, or choose “pydocs”.") from error
    except OSError as error:
        raise CorpusError(
            f"The corpus {path} cannot be read ({error.strerror}): choose “pydocs” or a text file."
        ) from error
