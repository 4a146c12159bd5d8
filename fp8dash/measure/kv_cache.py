"""What one token costs in the KV cache."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from fp8dash.choose.recipe import KvCast
from fp8dash.choose.records import LOWER, Measurement
from fp8dash.quant.kv_cache import quantized_cache

METHOD = "bytes held by the cache after one prefill over its tokens, v1"


@torch.no_grad()
def kv_memory(model: Any, kv: KvCast, tokens: int) -> Iterator[Measurement]:
    """Bytes a token of all layers' keys, values and scales, after one prefill of `tokens` tokens.

    Raises ModelError for a model whose cache cannot be cast.
    """
    one = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    cache, plain = quantized_cache(model, kv), DynamicCache(config=model.config)
    for held in (cache, plain):
        model.base_model(input_ids=one, use_cache=True, cache=held)
    codes, whole = _bytes(cache, "keys", "values"), _bytes(plain, "keys", "values")
    scales = _bytes(cache, "key_scales", "value_scales")
    each = codes + (scales if kv.share == "token" else scales / tokens)  # otherwise an update has one set of them
    note = f"{kv.provenance}; one prefill of {tokens:,} tokens; uncast {whole:,} bytes"
    yield Measurement("kv_bytes_per_token", each, "bytes", LOWER, METHOD, "arithmetic", note=note)


def _bytes(cache: Any, *names: str) -> int:
    """Bytes of these tensors of all layers."""
    return sum(int(getattr(layer, name).nbytes) for layer in cache.layers for name in names)
