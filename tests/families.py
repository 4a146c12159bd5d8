"""Tiny random models of many families, built from configs alone: what a checkpoint of each kind looks like inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny import write_tokenizer

VOCABULARY, HIDDEN, INNER, HEADS, LAYERS = 272, 64, 96, 4, 2  # as many words as the tokenizer of tests.tiny

PLAIN: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": HEADS,
}  # fmt: skip
QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
}  # fmt: skip
WINDOWS = {"sliding_window": 32, "head_dim": 16}
FOUR_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8}
DELTA: dict[str, Any] = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
GPT2: dict[str, Any] = {"n_embd": HIDDEN, "n_head": HEADS, "n_layer": LAYERS, "n_positions": 1024}

FAMILIES: dict[str, dict[str, Any]] = {  # model types, and what each config has beside PLAIN
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": WINDOWS,
    "olmo2": {},
    "olmo3": {"sliding_window": 32},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    "bloom": {"n_head": HEADS, "n_layer": LAYERS},
    "cohere2": WINDOWS,
    "glm4": {"head_dim": 16},
    "exaone4": WINDOWS,
    "nemotron": {},
    "seed_oss": {"head_dim": 16},
    "phi": {},
    "apertus": {},
    "gptj": {**GPT2, "rotary_dim": 8},
    "gpt2": {**GPT2, "tie_word_embeddings": True},
    "gpt_neox": {},
    "opt": {"ffn_dim": INNER, "word_embed_proj_dim": HIDDEN},
    "phi3": {},
    "gemma2": {**WINDOWS, "tie_word_embeddings": True},
    "gemma3_text": {**WINDOWS, "tie_word_embeddings": True},
    "granite": {},
    "cohere": {"tie_word_embeddings": True},
    "mixtral": FOUR_EXPERTS,
    "qwen2_moe": QWEN_EXPERTS,
    "qwen3_moe": {**QWEN_EXPERTS, "head_dim": 16},
    "qwen3_next": {**QWEN_EXPERTS, **DELTA},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**QWEN_EXPERTS, **DELTA},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": {**LATENT, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 8},
    "glm4_moe": {**LATENT, "head_dim": 16, "num_key_value_heads": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": FOUR_EXPERTS,
    "phimoe": {**FOUR_EXPERTS, "head_dim": 16},
    "minimax_m2": {**FOUR_EXPERTS, "head_dim": 16},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 16},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "jetmoe": {**FOUR_EXPERTS, "kv_channels": 16},
    "lfm2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
    },
    "granitemoehybrid": {
        **FOUR_EXPERTS, **MAMBA, "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"],
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128, "head_dim": 16},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "dbrx": {
        "d_model": HIDDEN, "n_heads": HEADS, "n_layers": LAYERS, "max_seq_len": 1024,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}, "ffn_config": {
            "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": HIDDEN,
        },
    },
    "llama4_text": {
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": INNER,
        "interleave_moe_layer_step": 1,
    },
    "minimax": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "block_size": 32},
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "expand": 2},
    "falcon_mamba": {"state_size": 8},
    "jamba": {
        "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "recurrent_gemma": {"lru_width": HIDDEN, "attention_window_size": 32, "head_dim": 16},
}  # fmt: skip


MIXTURES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "glm4_moe", "olmoe", "gpt_oss", "granitemoe", "phimoe", "minimax_m2", "ernie4_5_moe", "hunyuan_v1_moe", "flex_olmo",
    "jetmoe", "lfm2_moe", "granitemoehybrid", "llama4_text", "minimax", "jamba",
)  # fmt: skip
KEPT_MIXTURE = "dbrx"  # its experts are views of a matrix


def family_config(family: str, repeats: int) -> dict[str, Any]:
    """A family's config, its blocks repeated."""
    config = PLAIN | FAMILIES[family]
    config |= {key: config[key] * repeats for key in ("num_hidden_layers", "n_layer", "n_layers") if key in config}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"] * repeats
    return config


def family_model(family: str, repeats: int = 1, **others: Any) -> Any:
    """A frozen random model of a family in bfloat16, in evaluation mode; `others` go into its config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **family_config(family, repeats) | others)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.requires_grad_(False).eval()


def write_family(family: str, folder: Path, repeats: int = 1, **others: Any) -> Path:
    """A model folder of a family, with the byte-level tokenizer of the tiny model."""
    family_model(family, repeats, **others).save_pretrained(folder)
    write_tokenizer(folder)
    return folder
