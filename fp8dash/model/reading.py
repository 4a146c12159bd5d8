"""Tokens read through a model's cache as a serving engine reads them: a prompt in fixed chunks, then one by one.

The cuts are the same for every prompt, so what two prompts share from their start is computed alike, to the bit, and
need be read but once. Chunking alone moves BF16 sums a little: only numbers of the same CHUNK may be compared.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from fp8dash.choose.casts import KvCast
from fp8dash.errors import ModelError
from fp8dash.model.float32 import in_float32
from fp8dash.model.head import body_of
from fp8dash.model.probe import first_line, out_of_memory
from fp8dash.quant.kv_cache import quantized_cache

CHUNK = 128  # tokens: engines take 512 and more; a scale by tensor then spans more of them
WHOLE = 0  # in place of CHUNK: prompts are read in one forward
TRIED, CUT, STEPS = 48, 16, 4  # tokens on which ways of reading are compared, of a chunk, and read one by one
APART = {True: 1e-3, False: 0.05}  # how far hidden states may lie apart, of their length: in float32, and in bfloat16


def empty_cache(model: Any, kv: KvCast | None) -> Cache:
    """A cache that casts what it keeps, or transformers' own."""
    return quantized_cache(model, kv) if kv else DynamicCache(config=model.config)


@torch.no_grad()
def read_chunks(model: Any, ids: Tensor, cache: Cache, chunk: int) -> Tensor:
    """Last hidden states [tokens, hidden] of token ids [tokens], read through the cache `chunk` at a time."""
    parts = torch.split(ids.to(model.device)[None], chunk, dim=1)
    states = [body_of(model)(input_ids=part, use_cache=True, cache=cache).last_hidden_state[0] for part in parts]
    return torch.cat(states)


@torch.no_grad()
def chunk_of(model: Any) -> int:
    """Tokens of a chunk: CHUNK, or WHOLE for a model that forgets its state between two chunks.

    Some layers resume a state only for a single token (Mamba's, Jamba's): read in chunks they compute something else.
    Raises ModelError for one that no cache continues at all.
    """
    try:
        try:
            with in_float32(model):
                chunked, stepped, exact = *_apart(model), True
        except RuntimeError as error:  # layers that insist on a dtype
            if out_of_memory(error):
                raise
            chunked, stepped, exact = *_apart(model), False
    except Exception as error:
        if out_of_memory(error):
            raise
        raise ModelError(
            f"{type(model).__name__} cannot be read through a cache here ({first_line(error)}): leave out the measures "
            "needle and kv."
        ) from error
    if not stepped <= APART[exact]:
        raise ModelError(
            f"{type(model).__name__} does not continue a text correctly from its cache: read token by token, its "
            f"hidden states are off by {100 * stepped:.2g} %. Leave out the measures needle and kv."
        )
    return CHUNK if chunked <= APART[exact] else WHOLE


def _apart(model: Any) -> tuple[float, float]:
    """How far the worst token's hidden states lie from those of one forward: read in chunks, and token by token."""
    rows = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(TRIED) * 31 + 3) % rows
    whole = read_chunks(model, ids, empty_cache(model, None), TRIED)
    chunked = read_chunks(model, ids, empty_cache(model, None), CUT)
    cache = empty_cache(model, None)
    read_chunks(model, ids[:-STEPS], cache, TRIED)
    stepped = read_chunks(model, ids[-STEPS:], cache, 1)
    return _worst(chunked, whole), _worst(stepped, whole[-STEPS:])


def _worst(states: Tensor, whole: Tensor) -> float:
    """The largest distance of a token's states from what they should be, of their length."""
    return float(((states - whole).float().norm(dim=-1) / whole.float().norm(dim=-1)).max())


def _is_croppable(layer: Any) -> bool:
    """True for plain keys and values; convolutions say that they are, and then ask for a recording of their past."""
    keeps_all = not getattr(layer, "is_sliding", False) and getattr(layer, "record_past", True)
    return keeps_all and getattr(layer, "is_croppable", False)


def shared_start(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts share from their start.

    >>> shared_start([1, 2, 3], [1, 2, 4, 5]), shared_start([], [1])
    (2, 0)
    """
    pairs = zip(a, b, strict=False)
    return next((i for i, (token, other) in enumerate(pairs) if token != other), min(len(a), len(b)))


class Reader:
    """Reads prompts through one cache; of each prompt only the chunks that the last one did not begin with."""

    def __init__(self, model: Any, kv: KvCast | None, chunk: int = CHUNK) -> None:
        """A reader that has read nothing; of `chunk` tokens at a time, or WHOLE. Sequences are single: no batch."""
        self._model, self._kv, self._chunk = model, kv, chunk
        self._prompt: list[int] = []
        self._steps: list[int] = []
        self._cache: Any = empty_cache(model, kv)

    def prompt(self, ids: Sequence[int]) -> Tensor:
        """Float32 logits [vocabulary] after a prompt."""
        if not ids:
            raise ValueError("a prompt without tokens")
        chunk = self._chunk or len(ids)
        shared = min(shared_start(self._prompt, ids), len(ids) - 1) if self._croppable else 0
        self._back_to(whole := shared // chunk * chunk)
        last = (len(ids) - 1) // chunk * chunk
        if last > whole:  # without the head, which would cost a tenth of the chunk
            read_chunks(self._model, torch.tensor(ids[whole:last]), self._cache, chunk)
        self._prompt = list(ids)
        return self._read(ids[last:])

    def step(self, token: int) -> Tensor:
        """Float32 logits [vocabulary] after one more token."""
        self._steps.append(token)
        return self._read([token])

    def back(self, steps: int) -> None:
        """Forgets all steps but the first few."""
        kept = self._steps[:steps]
        if self._croppable:
            self._back_to(len(self._prompt) + len(kept))
            self._steps = kept
        else:
            prompt = self._prompt
            self._start()
            self.prompt(prompt)
            for token in kept:
                self.step(token)

    def _start(self) -> None:
        self._cache, self._prompt, self._steps = empty_cache(self._model, self._kv), [], []

    def _back_to(self, tokens: int) -> None:
        """Keeps the first tokens of what was read."""
        if tokens:
            self._cache.crop(tokens - self._cache.get_seq_length())
            self._steps = []
        else:
            self._start()

    @property
    def _croppable(self) -> bool:
        """Whether the last tokens can be forgotten: not where a window dropped old ones, or a state holds them all."""
        layers = self._cache.layers if self._chunk else ()  # what keeps its state elsewhere is not cropped with these
        return bool(layers) and all(_is_croppable(layer) for layer in layers)

    @torch.no_grad()
    def _read(self, ids: Sequence[int]) -> Tensor:
        given = torch.tensor([list(ids)], device=self._model.device)
        out = self._model(input_ids=given, use_cache=True, cache=self._cache, logits_to_keep=1)
        logits: Tensor = out.logits[0, -1].float()
        return logits
