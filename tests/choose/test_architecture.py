"""Shapes from a config.json alone, held against transformers' own models and against published counts."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fp8dash.choose.architecture import CONFIGS, KNOWN, architecture, read_config
from fp8dash.errors import InvalidChoice
from tests.predict.test_roofline import PUBLISHED

COUNTS = {  # of the safetensors files on the Hub
    "Llama-3.1-8B": 8_030_261_248, "Llama-3.1-70B": 70_553_706_496, "Llama-3.1-405B": 405_853_388_800,
    "Qwen3-4B": 4_022_468_096, "Qwen3-8B": 8_190_735_360, "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624, "Mistral-7B-v0.3": 7_248_023_552, "Mixtral-8x7B": 46_702_792_704,
    "SmolLM2-135M-Instruct": 134_515_008,
}  # fmt: skip
BYTES = {
    "Llama-3.1-8B": "llama31_8b_bf16", "Llama-3.1-70B": "llama31_70b_bf16", "DeepSeek-V3": "dsv3_mla_bf16",
    "SmolLM2-135M-Instruct": "smollm2_135m_bf16",
}  # fmt: skip
LLAMA = CONFIGS["Llama-3.1-8B"][0]


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_those_of_the_published_files(name):
    assert KNOWN[name].parameters == COUNTS[name]


def test_deepseek_v3_has_671_billion_parameters_of_which_37_are_used():
    assert KNOWN["DeepSeek-V3"].parameters / 1e9 == pytest.approx(671, abs=0.5)
    assert KNOWN["DeepSeek-V3"].active_parameters / 1e9 == pytest.approx(37, abs=0.5)


def parameters_of_transformers(config):
    """The parameters of transformers' own model of a config, on no device, the bias of DeepSeek's router included."""
    kind = AutoConfig.for_model(config["model_type"])
    for key, value in config.items():
        if key not in ("model_type", "tie_word_embeddings"):
            setattr(kind, key, value)
    kind.head_dim = (
        config.get("qk_rope_head_dim") or config.get("head_dim") or kind.hidden_size // kind.num_attention_heads
    )
    kind.tie_word_embeddings = bool(config.get("tie_word_embeddings"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(kind)
    biases = sum(b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    return sum(p.numel() for p in model.parameters()) + biases


@pytest.mark.parametrize("name", CONFIGS)
def test_a_few_layers_have_the_parameters_of_transformers_own_model(name):
    config = CONFIGS[name][0] | {"num_hidden_layers": 4}
    assert architecture(config, name).parameters == parameters_of_transformers(config)


def test_layers_without_experts_are_those_that_transformers_leaves_dense():
    config = CONFIGS["Qwen3-30B-A3B"][0] | {"num_hidden_layers": 6, "decoder_sparse_step": 3, "mlp_only_layers": [5]}
    sparse = architecture(config, "sparse")
    assert sparse.parameters == parameters_of_transformers(config)
    assert {linear.layers for linear in sparse.linears if ".experts." in linear.name} == {(2,)}


def test_decoding_multiplies_by_the_latent_and_prefill_by_whole_heads():
    deepseek, llama = KNOWN["DeepSeek-V3"], KNOWN["Llama-3.1-8B"]
    assert (deepseek.decode_width, deepseek.prefill_width) == (576 + 512, 192 + 128)
    assert (llama.decode_width, llama.prefill_width) == (256, 256)


@pytest.mark.parametrize("name", BYTES)
def test_a_tokens_share_of_the_cache_is_the_references(name):
    assert 2 * KNOWN[name].kv_elements() == PUBLISHED["kv_bytes_per_token"][BYTES[name]]


def test_a_pasted_config_is_read_also_inside_a_multimodal_one():
    assert read_config(json.dumps(LLAMA)).parameters == COUNTS["Llama-3.1-8B"]
    assert read_config(json.dumps({"model_type": "mllama", "text_config": LLAMA})).parameters == COUNTS["Llama-3.1-8B"]


@pytest.mark.parametrize(
    "text",
    [
        "", "[1]", "nonsense", "{}", json.dumps(LLAMA | {"model_type": "mamba"}),
        json.dumps(LLAMA | {"hidden_size": "x"}),
        json.dumps(LLAMA | {"hidden_size": None}), json.dumps(LLAMA | {"num_hidden_layers": 10**9}),
        json.dumps(LLAMA | {"hidden_size": True}), json.dumps(LLAMA | {"num_attention_heads": 0}),
        json.dumps(LLAMA | {"hidden_size": 8, "num_attention_heads": 9}), json.dumps(LLAMA | {"vocab_size": -1}),
        json.dumps(LLAMA | {"layer_types": ["sliding_attention"]}), json.dumps(LLAMA | {"layer_types": 7}),
        json.dumps(LLAMA | {"model_type": {"a": 1}}), "[" * 5000, json.dumps(LLAMA | {"num_hidden_layers": 1e3}),
        json.dumps(CONFIGS["Qwen3-30B-A3B"][0] | {"mlp_only_layers": [[1]]}), json.dumps(LLAMA | {"head_dim": 0}),
        json.dumps(CONFIGS["Qwen3-30B-A3B"][0] | {"decoder_sparse_step": 0}),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_planned_is_one_sentence(text):
    with pytest.raises(InvalidChoice):
        read_config(text)
