"""What a cast KV cache costs: bytes per token, and quality on the paths that read it.

One forward over a window is not how a cache is read. The same windows are read three ways, each token scored on what
the cache holds by then: in one forward, in chunks, as engines prefill, and from the last chunk on token by token, as
they decode. The unquantized model is read by the same cuts, since they alone move BF16 sums a little; a model does not
differ from itself by a bit.
"""

import copy
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from fp8dash.choose.casts import KvCast
from fp8dash.choose.records import ARITHMETIC, BASELINE, HIGHER, LOWER, NEITHER, Better, Measurement, Progress, RanBy
from fp8dash.errors import NotFinite
from fp8dash.measure.divergence import Comparer, predictions_by
from fp8dash.measure.kept import keep, kept, name_of
from fp8dash.model.head import body_of, full_head
from fp8dash.model.reading import CHUNK, empty_cache, read_chunks
from fp8dash.quant.kv_cache import quantized_cache
from fp8dash.stats import paired_difference

METHOD = "bytes held by the cache after one prefill over its tokens, v1"
PATH_METHOD = f"first windows through the cache: in one forward, in chunks of {CHUNK}, token by token from the last, v1"
WINDOWS = 4  # the fewest that give an interval
DECODED = 64  # tokens of a window that are read one by one, at most


LABELS = {"forward": "one forward", "chunked": "chunked prefill", "decoded": "decode"}  # of the fields of Paths


@dataclass(frozen=True, slots=True)
class Paths:
    """Last hidden states [windows, tokens, hidden] by each way of reading, of the tokens that have a next one."""

    forward: Tensor
    chunked: Tensor
    decoded: Tensor


@dataclass(frozen=True, slots=True)
class Means:
    """A window's means over the tokens of one way of reading, nats and a share."""

    nll: float
    baseline_nll: float
    kld: float
    top1: float


@torch.no_grad()
def kv_memory(model: Any, kv: KvCast, tokens: int) -> Iterator[Measurement]:
    """Bytes per token of all layers' keys, values and scales, after one prefill of `tokens` tokens.

    Raises ModelError for a model whose cache cannot be cast.
    """
    one = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    cache, plain = quantized_cache(model, kv), DynamicCache(config=model.config)
    for held in (cache, plain):
        body_of(model)(input_ids=one, use_cache=True, cache=held)
    codes, whole = _bytes(cache, "keys", "values"), _bytes(plain, "keys", "values")
    scales = _bytes(cache, "key_scales", "value_scales")
    each = codes + (scales if kv.share == "token" else scales / tokens)  # otherwise an update has one set of them
    note = f"{kv.provenance}; one prefill of {tokens:,} tokens; uncast {whole:,} bytes"
    yield Measurement("kv_bytes_per_token", each, "bytes", LOWER, METHOD, ARITHMETIC, note=note)


def kv_baseline(model: Any, windows: Tensor, folder: Path, *facts: object) -> Generator[Progress, None, Paths]:
    """Progress; returns how the unquantized model reads the first windows, measured once and kept in `folder`.

    `facts` are what else affects its bits: the model's hash and the device.
    """
    few = windows[:WINDOWS]
    where = (PATH_METHOD, *facts, tuple(few.shape), few.tolist(), torch.__version__, torch.get_num_threads())
    file = folder / "baselines" / f"kv-{name_of(*where)}.safetensors"
    if stored := _read(file):
        return stored
    made = yield from _paths(model, few, None, BASELINE, [])
    keep(save({field.name: getattr(made, field.name).contiguous() for field in fields(made)}), file)
    return made


def kv_paths(
    model: Any, base_head: nn.Module, windows: Tensor, baseline: Paths, kv: KvCast | None, backend: RanBy, seed: int
) -> Iterator[Progress | Measurement]:
    """Progress, then perplexity and divergence of the first windows by each way of reading, and the scales held.

    Raises NotFinite.
    """
    few, caches = windows[:WINDOWS], list[Cache]()
    paths = yield from _paths(model, few, kv, "kv", caches)
    comparer = Comparer(full_head(model), base_head)
    for name, label in LABELS.items():
        mine, theirs = getattr(paths, name), getattr(baseline, name)
        first = _decode_start(few.shape[1]) if name == "decoded" else 0
        means = [
            _means(comparer, base_head, a, b, ids[first + 1 : first + 1 + len(a)].to(a.device))
            for a, b, ids in zip(mine.to(model.device), theirs.to(model.device), few, strict=True)
        ]
        note = f"{len(means)} windows, {mine.shape[1]} tokens each; {kv.provenance if kv else 'nothing cast'}"
        yield from _measurements(means, label, backend, note, seed)
    if kv:
        yield from _scales(caches, kv, backend)


def _paths(
    model: Any, windows: Tensor, kv: KvCast | None, stage: str, caches: list[Cache]
) -> Generator[Progress, None, Paths]:
    """Progress; returns the hidden states, and leaves each window's cache as chunked prefill filled it in `caches`."""
    parts: list[tuple[Tensor, ...]] = []
    for index, ids in enumerate(windows):
        yield Progress(stage, index, len(windows), f"window {index + 1} of {len(windows)} through the cache")
        start, cache = _decode_start(len(ids)), empty_cache(model, kv)
        chunk, ways = _chunk(len(ids)), [read_chunks(model, ids, empty_cache(model, kv), len(ids))[:-1]]
        head = read_chunks(model, ids[:start], cache, chunk)
        steps = ids[start : min(start + DECODED, len(ids) - 1)]
        decoded = read_chunks(model, steps, copy.deepcopy(cache), 1)
        ways += [torch.cat([head, read_chunks(model, ids[start:], cache, chunk)])[:-1], decoded]
        parts.append(tuple(way.cpu() for way in ways))
        caches.append(cache)
    return Paths(*(torch.stack(column) for column in zip(*parts, strict=True)))


def _chunk(length: int) -> int:
    """Tokens of a chunk; a short window is cut in two, so that decoding has a prompt."""
    return min(CHUNK, max(1, length // 2))


def _decode_start(length: int) -> int:
    """Where the chunk of a window's last scored token begins."""
    return (length - 2) // _chunk(length) * _chunk(length)


def _means(comparer: Comparer, base_head: nn.Module, hidden: Tensor, base: Tensor, targets: Tensor) -> Means:
    """One window's means; hidden states [tokens, hidden] and the tokens that came next [tokens], on one device."""
    base_predictions = predictions_by(base_head, base, targets)
    scores = comparer.compare(hidden, base, base_predictions, targets)
    means = [float(values.mean()) for values in (scores.nll, base_predictions.nll, scores.kld, scores.top1)]
    if not all(map(math.isfinite, means)):
        raise NotFinite(
            "The cast KV cache gave NaN or infinity: keys or values left the format's range. Try kv=e5m2/tensor, or "
            "dynamic scales where they are 1.0."
        )
    return Means(*means)


def _measurements(means: Sequence[Means], label: str, backend: RanBy, note: str, seed: int) -> Iterator[Measurement]:
    """Means over windows of equal length, so means over tokens too."""
    nll, base = [w.nll for w in means], [w.baseline_nll for w in means]
    difference, count = paired_difference(nll, base, seed=seed), len(means)

    def measured(name: str, value: float | None, unit: str, better: Better) -> Measurement:
        return Measurement(name, value, unit, better, PATH_METHOD, backend, label, note)

    yield measured("kv_ppl", math.exp(sum(nll) / count), "", LOWER)
    yield measured("kv_baseline_ppl", math.exp(sum(base) / count), "", LOWER)
    yield measured("kv_ln_ppl_diff", difference.mean, "nats", LOWER)
    yield measured("kv_ln_ppl_diff_low", difference.low, "nats", NEITHER)
    yield measured("kv_ln_ppl_diff_high", difference.high, "nats", NEITHER)
    yield measured("kv_kld", sum(w.kld for w in means) / count, "nats", LOWER)
    yield measured("kv_top1", sum(w.top1 for w in means) / count, "share", HIGHER)


def _scales(caches: Sequence[Cache], kv: KvCast, backend: RanBy) -> Iterator[Measurement]:
    """The range of the scales that the caches hold, and how many are 1.0: all, where nothing was calibrated."""
    held = {
        what: torch.cat([getattr(layer, f"{name}_scales").flatten() for cache in caches for layer in cache.layers])
        for what, name in (("keys", "key"), ("values", "value"))
    }

    def measured(name: str, value: float, unit: str, label: str = "") -> Measurement:
        return Measurement(name, value, unit, NEITHER, PATH_METHOD, backend, label, kv.provenance)

    for what, scales in held.items():
        yield measured("kv_scale_lowest", float(scales.min()), "", what)
        yield measured("kv_scale_highest", float(scales.max()), "", what)
    yield measured("kv_scales_at_one", float((torch.cat(list(held.values())) == 1).double().mean()), "share")


def _read(file: Path) -> Paths | None:
    payload = kept(file)
    try:
        return Paths(**load(payload)) if payload else None
    except (SafetensorError, TypeError):  # of another version
        return None


def _bytes(cache: Any, *names: str) -> int:
    """Bytes of these tensors of all layers."""
    return sum(int(getattr(layer, name).nbytes) for layer in cache.layers for name in names)
