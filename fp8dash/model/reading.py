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
from fp8dash.quant.kv_cache import quantized_cache

CHUNK = 128  # tokens: engines take 512 and more; a scale by tensor then spans more of them


def empty_cache(model: Any, kv: KvCast | None) -> Cache:
    """A cache that casts what it keeps, or transformers' own."""
    return quantized_cache(model, kv) if kv else DynamicCache(config=model.config)


@torch.no_grad()
def read_chunks(model: Any, ids: Tensor, cache: Cache, chunk: int) -> Tensor:
    """Last hidden states [tokens, hidden] of token ids [tokens], read through the cache `chunk` at a time."""
    parts = torch.split(ids.to(model.device)[None], chunk, dim=1)
    states = [model.base_model(input_ids=part, use_cache=True, cache=cache).last_hidden_state[0] for part in parts]
    return torch.cat(states)


def shared_start(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts share from their start.

    >>> shared_start([1, 2, 3], [1, 2, 4, 5]), shared_start([], [1])
    (2, 0)
    """
    pairs = zip(a, b, strict=False)
    return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(a), len(b)))


class Reader:
    """Reads prompts through one cache; of each prompt only the chunks that the last one did not begin with."""

    def __init__(self, model: Any, kv: KvCast | None) -> None:
        """A reader that has read nothing. Sequences are single: no batch."""
        self._model, self._kv = model, kv
        self._prompt: list[int] = []
        self._steps: list[int] = []
        self._cache: Any = empty_cache(model, kv)

    def prompt(self, ids: Sequence[int]) -> Tensor:
        """Float32 logits [vocabulary] after a prompt."""
        if not ids:
            raise ValueError("a prompt without tokens")
        shared = min(shared_start(self._prompt, ids), len(ids) - 1) if self._croppable else 0
        self._back_to(whole := shared // CHUNK * CHUNK)
        last = (len(ids) - 1) // CHUNK * CHUNK
        if last > whole:  # without the head, which would cost a tenth of the chunk
            read_chunks(self._model, torch.tensor(ids[whole:last]), self._cache, CHUNK)
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
        return all(layer.is_croppable and not layer.is_sliding for layer in self._cache.layers)

    @torch.no_grad()
    def _read(self, ids: Sequence[int]) -> Tensor:
        given = torch.tensor([list(ids)], device=self._model.device)
        out = self._model(input_ids=given, use_cache=True, cache=self._cache, logits_to_keep=1)
        logits: Tensor = out.logits[0, -1].float()
        return logits
