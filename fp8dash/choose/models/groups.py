"""Where in a model a weight stands, by the names that checkpoints give their tensors. Values only: no torch.

The groups are those of `Layer.group`. A loaded model knows more than names (`fp8dash.model.parts`); a checkpoint's
header has nothing else.
"""

from fp8dash.choose.records import ATTENTION, CONVOLUTION, EMBEDDING, EXPERTS, HEAD, MLP, NORM, OTHER, ROUTER

HEADS = {"lm_head", "embed_out"}
TABLES = {
    "embed_tokens", "embed_positions", "embed_in", "embeddings", "word_embeddings", "position_embeddings",
    "tok_embeddings", "wte", "wpe",
}  # fmt: skip
ROUTERS = {"router", "gate", "shared_expert_gate", "shared_experts_gate"}
FEEDS = {"mlp", "ffn", "feed_forward", "mlp_block", "block_sparse_moe", "fc1", "fc2"}
OUTSIDE = {  # towers and projectors that no text passes through
    "vision_tower", "vision_model", "visual", "audio_tower", "audio_model", "multi_modal_projector", "embed_vision",
    "embed_audio",
}  # fmt: skip
BUFFERS = {  # kept in checkpoints beside the parameters: nothing that is trained, or that a recipe could cast
    "e_score_correction_bias", "inv_freq", "slope_rate", "query_decay", "key_decay", "diagonal_decay",
}  # fmt: skip
FUSED = (  # projections of one input that engines multiply as one matrix: vLLM, packed_modules_mapping
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("in_proj_qkv", "in_proj_z"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)  # fmt: skip
IN_ORDER = (  # a norm of the attention is a norm: the first that fits holds
    (HEAD, lambda words: words[-1] in HEADS),
    (EMBEDDING, lambda words: not TABLES.isdisjoint(words)),
    (NORM, lambda words: "norm" in words[-1] or words[-1].startswith("ln_")),
    (CONVOLUTION, lambda words: words[-1].startswith("conv")),
    (ROUTER, lambda words: "router" in words or words[-1] in ROUTERS),
    (EXPERTS, lambda words: any(word.startswith(("experts", "shared_expert", "shared_mlp")) for word in words)),
    (ATTENTION, lambda words: any("attn" in word or "attention" in word for word in words)),
    (MLP, lambda words: not FEEDS.isdisjoint(words)),
)


def group_of(name: str) -> str:
    """The group of a parameter or module by its name in the model.

    >>> [group_of(f"model.layers.3.{name}") for name in ("self_attn.q_proj.bias", "self_attn.q_norm", "mlp.gate_proj")]
    ['attention', 'norm', 'mlp']
    >>> [group_of(f"layers.3.mlp.{name}") for name in ("gate.weight", "experts.down_proj", "shared_expert.up_proj")]
    ['router', 'experts', 'experts']
    """
    words = [word for word in name.split(".") if not word.isdigit() and word not in ("weight", "bias")]
    if not words or is_outside(name):
        return OTHER
    return next((group for group, fits in IN_ORDER if fits(words)), OTHER)


def is_routed_expert(name: str) -> bool:
    """True for a weight of the experts that a router chooses among; shared experts see every token.

    >>> is_routed_expert("layers.0.mlp.experts.7.up_proj"), is_routed_expert("layers.0.mlp.shared_experts.up_proj")
    (True, False)
    """
    return any(word == "experts" for word in name.split("."))


def fused_with(module: str) -> tuple[str, ...]:
    """The modules that engines multiply as one matrix with this one, itself among them; none where it is alone.

    >>> fused_with("layers.0.mlp.up_proj"), fused_with("layers.0.mlp.down_proj")
    (('layers.0.mlp.gate_proj', 'layers.0.mlp.up_proj'), ())
    """
    above, dot, last = module.rpartition(".")
    return tuple(f"{above}{dot}{part}" for names in FUSED if last in names for part in names)


def is_outside(name: str) -> bool:
    """True for what lies beside the language model, by its name."""
    return not OUTSIDE.isdisjoint(name.split("."))


def is_buffer(name: str) -> bool:
    """True for a checkpoint's tensor that is no parameter."""
    return name.rpartition(".")[2] in BUFFERS
