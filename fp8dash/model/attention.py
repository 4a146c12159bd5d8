"""Puts a cast attention path into a loaded model through transformers' registries. Knows no recipe."""

from typing import Any

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from fp8dash.choose.casts import Cast
from fp8dash.errors import ModelError
from fp8dash.quant.attention import CastAttention


def cast_attention(model: Any, cast: Cast) -> None:
    """Casts the attention of every layer from now on; raises ModelError for a model with an attention of its own."""
    name = f"fp8dash-{cast.text.replace('/', '-')}"  # with a slash it would be a kernel's name on the Hub
    AttentionInterface.register(name, CastAttention(cast))
    AttentionMaskInterface.register(name, eager_mask)  # whole and additive, whatever the kernel could infer
    model.set_attn_implementation(name)
    if model.config.get_text_config(decoder=True)._attn_implementation != name:
        raise ModelError(
            f"attn= is refused: {type(model).__name__} does not let its attention be replaced (transformers); "
            "closest alternative: the recipe without attn=."
        )
