"""A decoder's shape from its config.json alone: its Linears, what a token takes in the KV cache, and its parameters.

Dense and mixture-of-experts models of Llama's kind, with grouped-query attention or DeepSeek's MLA. Values only: no
torch, nothing is downloaded.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8dash.errors import InvalidChoice

FAMILIES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3",
)  # fmt: skip
LARGEST, MOST_LAYERS = 100_000_000, 10_000  # of any one number in a config: far beyond every model
SOURCE = "config.json of {} on the Hugging Face Hub"


@dataclass(frozen=True, slots=True)
class Linear:
    """Weights [n, k], alike in some layers; experts come `copies` to a layer, of which a token uses `active`."""

    name: str  # below the layer, as in "mlp.down_proj"
    n: int
    k: int
    layers: tuple[int, ...]
    copies: int = 1
    active: int = 1
    router: bool = False  # decides on experts: kept in BF16 by every library

    @property
    def parameters(self) -> int:
        """Of all of them."""
        return self.n * self.k * self.copies * len(self.layers)


@dataclass(frozen=True, slots=True)
class Architecture:
    """What planning needs to know about a model."""

    name: str
    layers: int
    hidden: int
    vocabulary: int
    context: int
    tied: bool
    linears: tuple[Linear, ...]
    vectors: int  # parameters of norms and biases
    heads: int
    kv_heads: int  # 1 where a token keeps one latent for all heads (MLA)
    kv_width: int  # elements a token keeps in each layer, keys and values together
    decode_width: int  # of a head: products by cached elements, scores and values together
    prefill_width: int
    attention: str  # "GQA" or "MLA"

    @property
    def parameters(self) -> int:
        """Stored parameters; a tied head is stored once.

        >>> KNOWN["Llama-3.1-8B"].parameters, KNOWN["Mixtral-8x7B"].parameters
        (8030261248, 46702792704)
        """
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return sum(linear.parameters for linear in self.linears) + tables + self.vectors

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied by, the head included and the embedding not.

        >>> [round(KNOWN[name].active_parameters / 1e9, 1) for name in ("DeepSeek-V3", "Mixtral-8x7B", "Llama-3.1-8B")]
        [36.6, 12.7, 7.5]
        """
        used = sum(linear.parameters * linear.active // linear.copies for linear in self.linears)
        return used + self.vocabulary * self.hidden

    def shapes(self) -> dict[tuple[int, int], int]:
        """How many Linears have each shape [n, k], the head among them.

        >>> KNOWN["Llama-3.1-8B"].shapes()[14336, 4096], KNOWN["Llama-3.1-8B"].shapes()[128256, 4096]
        (64, 1)
        """
        counts = Counter({(self.vocabulary, self.hidden): 1})
        for linear in self.linears:
            counts[linear.n, linear.k] += linear.copies * len(linear.layers)
        return dict(counts)

    def kv_elements(self) -> int:
        """Elements one token keeps in the cache of all layers.

        >>> 2 * KNOWN["Llama-3.1-8B"].kv_elements(), 2 * KNOWN["DeepSeek-V3"].kv_elements()
        (131072, 70272)
        """
        return self.kv_width * self.layers


def read_config(text: str, name: str = "your model") -> Architecture:
    """The architecture of a pasted config.json; raises InvalidChoice."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidChoice(f"This is not JSON ({str(error)[:80]}): paste the whole config.json of a model.") from None
    if not isinstance(config, dict):
        raise InvalidChoice("This is not a config.json: paste the whole file, from { to }.")
    return architecture(config, name)


def architecture(config: Mapping[str, Any], name: str) -> Architecture:
    """The architecture of a config; raises InvalidChoice for families and layers that are not counted here."""
    if isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    family = config.get("model_type")
    if family not in FAMILIES:
        raise InvalidChoice(
            f"The planner does not support the model type {str(family)[:40]!r}: use one of {', '.join(FAMILIES)}."
        )
    if others := set(_list(config, "layer_types", str)) - {"full_attention"}:
        raise InvalidChoice(f"Layers of {', '.join(sorted(others))[:80]} are not supported: full attention only.")
    layers = _number(config, "num_hidden_layers", most=MOST_LAYERS)
    hidden = _number(config, "hidden_size")
    heads = _number(config, "num_attention_heads", most=hidden)
    attention = _mla(config, hidden, heads, layers) if "kv_lora_rank" in config else _gqa(config, hidden, heads, layers)
    feed = _feed_forward(config, hidden, layers)
    return Architecture(
        name,
        layers,
        hidden,
        _number(config, "vocab_size"),
        _number(config, "max_position_embeddings", 0, least=0),
        bool(config.get("tie_word_embeddings")),
        linears=(*attention.linears, *feed),
        vectors=hidden * (2 * layers + 1) + attention.vectors * layers + _corrections(config, feed),
        heads=heads,
        kv_heads=attention.kv_heads,
        kv_width=attention.kv_width,
        decode_width=attention.decode_width,
        prefill_width=attention.prefill_width,
        attention=attention.kind,
    )


@dataclass(frozen=True, slots=True)
class _Attention:
    kind: str
    linears: tuple[Linear, ...]
    vectors: int  # of one layer
    kv_heads: int
    kv_width: int
    decode_width: int
    prefill_width: int


def _gqa(config: Mapping[str, Any], hidden: int, heads: int, layers: int) -> _Attention:
    """Grouped-query attention: keys and values of `num_key_value_heads` heads are kept."""
    kv_heads = _number(config, "num_key_value_heads", heads)
    head = _number(config, "head_dim", hidden // heads)
    every = tuple(range(layers))
    q, kv = heads * head, kv_heads * head
    shapes = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    linears = tuple(Linear(f"self_attn.{name}", n, k, every) for name, (n, k) in shapes.items())
    family = str(config["model_type"])
    biased = config.get("attention_bias", family in ("qwen2", "qwen2_moe"))
    vectors = (2 * head if family.startswith("qwen3") else 0) + (q + 2 * kv if biased else 0)
    return _Attention("GQA", linears, vectors, kv_heads, 2 * kv, 2 * head, 2 * head)


def _mla(config: Mapping[str, Any], hidden: int, heads: int, layers: int) -> _Attention:
    """Multi-head latent attention: one latent and one rotary key are kept; decoding multiplies by the latent itself.

    Source: DeepSeek-V2, arXiv 2405.04434 section 2.1; DeepSeek-V3's inference/model.py, the absorbed path.
    """
    latent, rope, nope, value = (
        _number(config, key) for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    narrow = _number(config, "q_lora_rank", 0, least=0)
    shapes = {
        "kv_a_proj_with_mqa": (latent + rope, hidden),
        "kv_b_proj": (heads * (nope + value), latent),
        "o_proj": (hidden, heads * value),
    }
    if narrow:
        shapes |= {"q_a_proj": (narrow, hidden), "q_b_proj": (heads * (nope + rope), narrow)}
    else:
        shapes |= {"q_proj": (heads * (nope + rope), hidden)}
    every = tuple(range(layers))
    linears = tuple(Linear(f"self_attn.{name}", n, k, every) for name, (n, k) in shapes.items())
    widths = (2 * latent + rope, nope + rope + value)
    return _Attention("MLA", linears, latent + narrow, 1, latent + rope, *widths)


def _feed_forward(config: Mapping[str, Any], hidden: int, layers: int) -> tuple[Linear, ...]:
    """Gated MLPs: dense, or routed and shared experts after some dense layers."""
    dense = _dense_layers(config, layers)
    linears = list(_gated("mlp", hidden, _number(config, "intermediate_size"), dense)) if dense else []
    routed = tuple(layer for layer in range(layers) if layer not in set(dense))
    if not routed:
        return tuple(linears)
    experts, active = _experts(config), _number(config, "num_experts_per_tok")
    inner = _number(config, "moe_intermediate_size", 0, least=0) or _number(config, "intermediate_size")
    linears += _gated("mlp.experts.0", hidden, inner, routed, experts, min(active, experts))
    linears.append(Linear("mlp.gate", experts, hidden, routed, router=True))
    shared = _number(config, "n_shared_experts", 0, least=0) * inner or _number(
        config, "shared_expert_intermediate_size", 0, least=0
    )
    linears += _gated("mlp.shared_experts", hidden, shared, routed) if shared else ()
    return tuple(linears)


def _dense_layers(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The layers without experts."""
    if not _experts(config):
        return tuple(range(layers))
    first, step = _number(config, "first_k_dense_replace", 0, least=0), _number(config, "decoder_sparse_step", 1)
    named = set(_list(config, "mlp_only_layers", int))
    return tuple(i for i in range(layers) if i < first or i in named or (i + 1) % step)


def _experts(config: Mapping[str, Any]) -> int:
    return next(
        (_number(config, key) for key in ("n_routed_experts", "num_experts", "num_local_experts") if config.get(key)), 0
    )


def _gated(
    where: str, hidden: int, inner: int, layers: tuple[int, ...], copies: int = 1, active: int = 1
) -> tuple[Linear, ...]:
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return tuple(Linear(f"{where}.{name}", n, k, layers, copies, active) for name, (n, k) in shapes.items())


def _corrections(config: Mapping[str, Any], feed: tuple[Linear, ...]) -> int:
    """DeepSeek-V3 keeps a bias an expert, which balances load without a loss."""
    if config["model_type"] != "deepseek_v3":
        return 0
    return sum(linear.n * len(linear.layers) for linear in feed if linear.router)


def _number(
    config: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1, most: int = LARGEST
) -> int:
    """A whole number of a config, or its default where it is left out; raises InvalidChoice."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        given = str(value)[:40]
        raise InvalidChoice(f"The config’s {key} is {given}: it must be a whole number from {least} to {most:,}.")
    return value


def _list(config: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    """A list of one kind of value, which may be left out; raises InvalidChoice."""
    value = config.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise InvalidChoice(f"The config’s {key} is {str(value)[:40]}: it must be a list or absent.")
    return value


def _llama(**values: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        **values,
    }


def _qwen3(**values: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "num_attention_heads": 32,
        "max_position_embeddings": 40960,
        **values,
    }


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {  # what planning reads of each config.json, and whose it is
    "Llama-3.1-8B": (_llama(num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32),
                     "meta-llama/Llama-3.1-8B"),
    "Llama-3.1-70B": (_llama(num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64),
                      "meta-llama/Llama-3.1-70B"),
    "Llama-3.1-405B": (_llama(num_hidden_layers=126, hidden_size=16384, intermediate_size=53248,
                              num_attention_heads=128), "meta-llama/Llama-3.1-405B"),
    "Qwen3-4B": (_qwen3(num_hidden_layers=36, hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True),
                 "Qwen/Qwen3-4B"),
    "Qwen3-8B": (_qwen3(num_hidden_layers=36, hidden_size=4096, intermediate_size=12288), "Qwen/Qwen3-8B"),
    "Qwen3-32B": (_qwen3(num_hidden_layers=64, hidden_size=5120, intermediate_size=25600, num_attention_heads=64),
                  "Qwen/Qwen3-32B"),
    "Qwen3-30B-A3B": (_qwen3(model_type="qwen3_moe", num_hidden_layers=48, hidden_size=2048, intermediate_size=6144,
                             moe_intermediate_size=768, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8),
                      "Qwen/Qwen3-30B-A3B"),
    "Mistral-7B-v0.3": ({"model_type": "mistral", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 32768,
                         "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
                         "max_position_embeddings": 32768}, "mistralai/Mistral-7B-v0.3"),
    "Mixtral-8x7B": ({"model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 32000,
                      "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
                      "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768},
                     "mistralai/Mixtral-8x7B-v0.1"),
    "DeepSeek-V3": ({"model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 129280,
                     "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 128,
                     "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                     "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
                     "first_k_dense_replace": 3, "max_position_embeddings": 163840}, "deepseek-ai/DeepSeek-V3"),
    "SmolLM2-135M-Instruct": (_llama(num_hidden_layers=30, hidden_size=576, intermediate_size=1536, vocab_size=49152,
                                     num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
                                     tie_word_embeddings=1), "HuggingFaceTB/SmolLM2-135M-Instruct"),
}  # fmt: skip
KNOWN = {name: architecture(config, name) for name, (config, _) in CONFIGS.items()}
