"""Attention whose products multiply cast operands, emulated: Q by K, then the softmax by V. Torch only.

Fused kernels cast the exponentials before they are divided by their sum, and keep the sum in float32; here the
softmax itself is cast, so that any cast can be asked for. Products and softmax are float32.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8dash.choose.casts import Cast
from fp8dash.errors import ModelError
from fp8dash.quant.cast import round_trip

UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # what some models change in their scores, as transformers calls it


@dataclass(frozen=True, slots=True)
class CastAttention:
    """An attention function for transformers' registry.

    Operands are cast as matrices: Q, K and V [heads * tokens, head_dim], the softmax [heads * queries, keys].
    """

    cast: Cast

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **other: Any,
    ) -> tuple[Tensor, None]:
        """Q [batch, heads, queries, width] by K and V [batch, kv heads, keys, width]: [batch, queries, heads, width].

        The mask is added to the scores. Raises ModelError for scores that a model changes in other ways.
        """
        if odd := [name for name in UNSUPPORTED if other.get(name) is not None]:
            raise ModelError(
                f"attn= is refused: {type(module).__name__} uses {', '.join(odd)}, which is not cast (fp8dash); "
                "closest alternative: the recipe without attn=."
            )
        batch, heads, queries, width = query.shape
        kv_heads, keys = key.shape[1:3]
        grouped = (batch, kv_heads, heads // kv_heads, queries)
        scale = width**-0.5 if scaling is None else scaling
        q, k, v = (self._cast(x.float()) for x in (query, key, value))
        scores = q.view(*grouped, width) @ k[:, :, None].mT * scale  # [batch, kv heads, group, queries, keys]
        scores = scores.view(batch, heads, queries, keys)
        scores += _causal(queries, keys, query.device) if attention_mask is None else attention_mask[..., :keys]
        chances = self._cast(scores.softmax(-1)).view(*grouped, keys)
        out = (chances @ v[:, :, None]).view(batch, heads, queries, value.shape[-1])
        return out.transpose(1, 2).contiguous().to(query.dtype), None

    def _cast(self, x: Tensor) -> Tensor:
        """Float32 x [..., columns] cast and decoded, in its own shape."""
        return round_trip(x.reshape(-1, x.shape[-1]), self.cast).view(x.shape)


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """Minus infinity where a key comes after its query, the last of which is at the last key; else 0."""
    later = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(keys - queries + 1)
    return torch.zeros(queries, keys, device=device).masked_fill_(later, -torch.inf)
