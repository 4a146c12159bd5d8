"""A Llama's own weights in other layouts and other files that compute the same.

Experts in place of an MLP and fused projections are models; what differs in nothing but storage is a folder.
"""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, processors
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

EXPERTS = 8
PAIRS = EXPERTS // 2
SHARED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
    "max_position_embeddings", "rope_parameters", "tie_word_embeddings", "hidden_act", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip


@torch.no_grad()
def split_into_experts(llama: Any) -> Any:
    """A Mixtral whose experts hold an eighth of the MLP each and weigh an eighth: powers of two round nothing.

    All are chosen for every token.
    """
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
def routed_in_pairs(llama: Any) -> Any:
    """A Mixtral that chooses two of eight experts: one of four copies of the MLP's first half, and its second half.

    The router has the same row for both, so each of them weighs a half; which pair a token meets is up to the token.
    """
    inner = llama.config.intermediate_size // 2
    model = _like(
        llama, "mixtral", intermediate_size=inner, num_local_experts=EXPERTS, num_experts_per_tok=2,
        sliding_window=None,
    )  # fmt: skip
    drawn = torch.Generator().manual_seed(0)
    for given, layer in zip(llama.model.layers, model.model.layers, strict=True):
        rows = torch.randn(PAIRS, llama.config.hidden_size, generator=drawn)
        layer.mlp.gate.weight.copy_(rows.repeat(2, 1))  # halves of a pair: expert i and expert i + 4
        gate, up = (part.weight.unflatten(0, (2, inner)) for part in (given.mlp.gate_proj, given.mlp.up_proj))
        down = 2 * given.mlp.down_proj.weight.unflatten(1, (2, inner)).transpose(0, 1)
        layer.mlp.experts.gate_up_proj.copy_(torch.cat([gate, up], dim=1).repeat_interleave(PAIRS, 0))
        layer.mlp.experts.down_proj.copy_(down.repeat_interleave(PAIRS, 0))
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


def _untied(llama: Any, folder: Path) -> None:
    """The head's weight under a name of its own."""
    model = copy.deepcopy(llama)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)
    model.save_pretrained(folder)


def _in_float16(llama: Any, folder: Path) -> None:
    """float16 holds three bits more and a narrower range; a weight that it cannot hold would be another function."""
    narrow = copy.deepcopy(llama).half()
    pairs = zip(narrow.parameters(), llama.parameters(), strict=True)
    assert all(torch.equal(half.to(llama.dtype), given) for half, given in pairs)
    narrow.save_pretrained(folder)


def _in_float32(llama: Any, folder: Path) -> None:
    copy.deepcopy(llama).float().save_pretrained(folder)


def _in_shards(llama: Any, folder: Path) -> None:
    """An index and more than 40 files."""
    llama.save_pretrained(folder, max_shard_size="6MB")
    assert len(list(folder.glob("model-*.safetensors"))) > 40


STORAGES: dict[str, Callable[[Any, Path], None]] = {
    "an untied head": _untied,
    "float16": _in_float16,
    "float32": _in_float32,
    "many shards": _in_shards,
}


def stored_as(storage: str, folder: Path, other: Path) -> Path:
    """The model of a folder in another folder, in bfloat16 its weights to the bit, with its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    STORAGES[storage](model, other)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / file, other / file)
    return other


def with_bos(folder: Path, other: Path) -> Path:
    """The model of a folder in another folder, its tokenizer one that begins every text with BOS."""
    shutil.copytree(folder, other)
    tokenizer = Tokenizer.from_file(str(other / "tokenizer.json"))
    bos = json.loads((other / "tokenizer_config.json").read_text("utf-8"))["bos_token"]
    begins = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A $B", [(bos, tokenizer.token_to_id(bos))])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begins])
    tokenizer.save(str(other / "tokenizer.json"))
    return other
