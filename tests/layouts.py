"""A Llama's own weights in other layouts that compute the same: experts in place of an MLP, fused projections."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

EXPERTS = 8  # all chosen for every token
SHARED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
    "max_position_embeddings", "rope_parameters", "tie_word_embeddings", "hidden_act", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip


@torch.no_grad()
def split_into_experts(llama: Any) -> Any:
    """A Mixtral whose experts hold an eighth of the MLP each and weigh an eighth: powers of two round nothing."""
    inner = llama.config.intermediate_size // EXPERTS
    model = _like(
        llama, "mixtral", intermediate_size=inner, num_local_experts=EXPERTS, num_experts_per_tok=EXPERTS,
        sliding_window=None,
    )  # fmt: skip
    for given, layer in zip(llama.model.layers, model.model.layers, strict=True):
        halves = [part.weight.unflatten(0, (EXPERTS, inner)) for part in (given.mlp.gate_proj, given.mlp.up_proj)]
        layer.mlp.gate.weight.zero_()
        layer.mlp.experts.gate_up_proj.copy_(torch.cat(halves, dim=1))
        layer.mlp.experts.down_proj.copy_(
            EXPERTS * given.mlp.down_proj.weight.unflatten(1, (EXPERTS, inner)).transpose(0, 1)
        )
    return model


@torch.no_grad()
def fused(llama: Any) -> Any:
    """A Phi-3: q, k and v in one matrix, gate and up in another."""
    model = _like(llama, "phi3", intermediate_size=llama.config.intermediate_size)
    for given, layer in zip(llama.model.layers, model.model.layers, strict=True):
        qkv = (given.self_attn.q_proj, given.self_attn.k_proj, given.self_attn.v_proj)
        layer.self_attn.qkv_proj.weight.copy_(torch.cat([part.weight for part in qkv]))
        layer.mlp.gate_up_proj.weight.copy_(torch.cat([given.mlp.gate_proj.weight, given.mlp.up_proj.weight]))
    return model


def _like(llama: Any, family: str, **values: Any) -> Any:
    """A model of a family with all that it shares with the Llama by name."""
    given = llama.config
    shared = {key: getattr(given, key) for key in SHARED} | {"head_dim": given.head_dim}
    config = AutoConfig.for_model(family, **shared | values)
    model = AutoModelForCausalLM.from_config(config, dtype=llama.dtype).requires_grad_(False).eval()
    weights = llama.state_dict()
    for key, own in model.state_dict().items():
        if key in weights:
            own.copy_(weights[key])
    return model
