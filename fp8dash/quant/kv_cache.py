"""A transformers cache that keeps 8-bit codes and scales, and hands out what they decode to.

Attention reads the decoded keys and values of the prompt too, so one forward over a window measures what a serving
engine's cache does to decoding. Knows no recipe, and of a model its config and the scales that calibration left.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from fp8dash.choose.casts import KvCast
from fp8dash.errors import ModelError
from fp8dash.quant.cast import DTYPES, Quantized, codes_by, codes_of, decode, scale_from_amax

HELD = ("keys", "values", "key_scales", "value_scales")
SCALES = "kv_scales"  # where a model keeps its calibrated scales: of keys and of values, [1] or [heads], by layer
PLAIN = (DynamicLayer, DynamicSlidingWindowLayer)  # layers whose state is keys and values and nothing else


class CodesLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer's keys and values as codes [batch, heads, tokens, head_dim] in the format's 8-bit dtype.

    Scales are float32: [batch, 1, updates, 1] by tensor, [batch, heads, updates, 1] by head and [batch, heads,
    tokens, 1] by token. A sequence's codes do not depend on its neighbours in the batch.
    """

    keys: Tensor | None
    values: Tensor | None
    key_scales: Tensor | None
    value_scales: Tensor | None
    updates: list[int]  # tokens of each

    def __init__(self, kv: KvCast, fixed: tuple[Tensor | None, Tensor | None] = (None, None)) -> None:
        """An empty layer; with `fixed` scales of keys and of values, [1] or [heads], none is made anew."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.kv = kv
        self.fixed = fixed
        self._forget()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Takes the dtype and device of [batch, heads, tokens, head_dim] states, and holds none of their tokens."""
        self.dtype, self.device = key_states.dtype, key_states.device
        for codes, scales, states in zip(HELD[:2], HELD[2:], (key_states, value_states), strict=True):
            none = states[:, :, :0]
            setattr(self, codes, none.to(DTYPES[self.kv.format.name]))
            setattr(self, scales, torch.empty(_scales_shape(none, self.kv, 0), device=states.device))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Casts and keeps new states, and returns all that is held, decoded to their dtype.

        What shares a scale with NaN or infinity decodes to NaN.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.updates.append(key_states.shape[2])
        keys, key_scales = _cast(key_states, self.kv, self.fixed[0])
        values, value_scales = _cast(value_states, self.kv, self.fixed[1])
        for name, new in zip(HELD, (keys, values, key_scales, value_scales), strict=True):
            setattr(self, name, torch.cat([getattr(self, name), new], dim=2))
        return self._decoded("keys", "key_scales"), self._decoded("values", "value_scales")

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last tokens; the number is negative, as transformers has it."""
        super().crop(tokens_to_remove)
        left = self.get_seq_length()
        while sum(self.updates) > left:
            last = self.updates.pop()
            if (rest := left - sum(self.updates)) > 0:
                self.updates.append(min(last, rest))
        rows = left if self.kv.share == "token" else len(self.updates)
        for name in HELD[2:] if self.is_initialized else ():
            setattr(self, name, getattr(self, name)[:, :, :rows])

    def reset(self) -> None:
        """Forgets everything."""
        super().reset()
        self._forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Puts the sequences in another order, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Holds each sequence `repeats` times."""
        self._on_batch(lambda held: held.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Holds these sequences alone."""
        self._on_batch(lambda held: held[indices.to(held.device)])

    @property
    def nbytes(self) -> int:
        """Bytes held: codes and scales of keys and values."""
        held = (getattr(self, name) for name in HELD)
        return sum(int(tensor.nbytes) for tensor in held if tensor is not None)

    def _forget(self) -> None:
        self.key_scales = self.value_scales = None
        self.updates = []

    def _on_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in HELD if self.get_seq_length() else ():
            setattr(self, name, change(getattr(self, name)))

    def _decoded(self, *names: str) -> Tensor:
        codes, scales = [getattr(self, name) for name in names]
        if self.kv.share != "token":
            scales = scales.repeat_interleave(torch.tensor(self.updates, device=scales.device), dim=2)
        decoded: Tensor = decode(codes, self.kv.format) * scales
        return decoded.to(self.dtype)


class AmaxLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer's keys and values as they come, and the largest magnitude of each head's, [heads] float32."""

    def __init__(self) -> None:
        """An empty layer."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.amax: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keeps and returns as usual."""
        new = _head_amax(key_states), _head_amax(value_states)
        self.amax = new if self.amax is None else _larger(self.amax, new)
        held: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return held


def quantized_cache(model: Any, kv: KvCast) -> Cache:
    """An empty cache for a model; raises ModelError where a layer keeps more than keys and values.

    A layer with a sliding window keeps all tokens, and its mask hides the old ones.
    """
    layers = cached_layers(model.config)
    scales = getattr(model, SCALES, ()) if kv.scale == "static" else ((None, None),) * layers
    if len(scales) != layers:
        raise ModelError(
            f"The KV cache's scales of {layers} layers were never calibrated: run the calibration text first."
        )
    return Cache(layers=[CodesLayer(kv, fixed) for fixed in scales])


def observing_cache(config: Any) -> Cache:
    """An empty cache that keeps what it is given, and each head's amax; raises ModelError as `quantized_cache` does."""
    return Cache(layers=[AmaxLayer() for _ in range(cached_layers(config))])


def kv_amaxes(cache: Cache, before: tuple[tuple[Tensor, Tensor], ...] = ()) -> tuple[tuple[Tensor, Tensor], ...]:
    """The amax of keys and of values, [heads] each, by layer: of an observing cache and of those before it."""
    seen = tuple(layer.amax for layer in cache.layers if isinstance(layer, AmaxLayer) and layer.amax)
    return tuple(_larger(*pair) for pair in zip(before, seen, strict=True)) if before else seen


def keep_scales(model: Any, kv: KvCast, amaxes: tuple[tuple[Tensor, Tensor], ...]) -> None:
    """Leaves static scales of every layer's keys and values with the model, for the caches made for it."""
    by_head = kv.share == "head"
    scales = [
        tuple(scale_from_amax(amax if by_head else amax.amax().view(1), kv.cast) for amax in pair) for pair in amaxes
    ]
    keep_given_scales(model, scales)


def keep_given_scales(model: Any, scales: Sequence[tuple[Tensor, ...]]) -> None:
    """As `keep_scales`, with scales [1] or [heads] of keys and of values that a checkpoint stores, by layer."""
    setattr(model, SCALES, tuple(scales))


def _head_amax(states: Tensor) -> Tensor:
    """The largest magnitude of each head, [heads] float32, of [batch, heads, tokens, head_dim]."""
    return states.abs().amax(dim=(0, 2, 3)).float()


def _larger(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.maximum(a[0], b[0]), torch.maximum(a[1], b[1])


def cached_layers(config: Any) -> int:
    """How many layers keep keys and values; raises ModelError where one keeps more than those."""
    layers = DynamicCache(config=config).layers
    if odd := sorted({type(layer).__name__ for layer in layers if type(layer) not in PLAIN}):
        raise ModelError(
            f"kv= is refused: this model's cache has layers that are not keys and values alone, {', '.join(odd)} "
            "(transformers); closest alternative: the recipe without kv=."
        )
    return len(layers)


def rows_of(states: Tensor, kv: KvCast) -> Tensor:
    """States [batch, heads, tokens, head_dim] as a matrix whose rows are what shares a scale."""
    batch, heads, _, width = states.shape
    return states.reshape({"tensor": (batch, -1), "head": (batch * heads, -1), "token": (-1, width)}[kv.share])


def _cast(states: Tensor, kv: KvCast, fixed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes [batch, heads, tokens, head_dim] of an update, and its scales: its own, or those that were fixed."""
    rows = rows_of(states, kv)
    q = codes_of(rows, kv.cast) if fixed is None else _by_fixed(rows, fixed, kv)
    return q.codes.view(states.shape), q.scales.view(_scales_shape(states, kv, 1))


def _by_fixed(rows: Tensor, fixed: Tensor, kv: KvCast) -> Quantized:
    """Codes of [batch or batch * heads, ...] rows by scales [1] or [heads]."""
    return codes_by(rows, fixed.repeat(len(rows) // len(fixed)).view(-1, 1), None, kv.cast)


def _scales_shape(states: Tensor, kv: KvCast, updates: int) -> tuple[int, int, int, int]:
    batch, heads, tokens, _ = states.shape
    return batch, 1 if kv.share == "tensor" else heads, tokens if kv.share == "token" else updates, 1
