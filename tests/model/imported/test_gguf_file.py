"""GGUF files as checkpoints and as models, written by gguf, llama.cpp's own package."""

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from fp8dash.choose.records import Layer, Measurement, StageResult, Window
from fp8dash.choose.request import Request
from fp8dash.errors import ModelError
from fp8dash.model.load import locate
from fp8dash.pipeline import run_stages
from tests.tiny import tiny_config, write_tokenizer

SMALL = {"backend": "emulated", "measures": ("perplexity",), "windows": 2, "window_length": 64}
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def permuted(weights, heads):
    """llama.cpp's order of a head's rows (`convert_hf_to_gguf.py`, LlamaModel.permute)."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, weights.shape[1])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def k_quant(rows, kind, seed):
    """Random blocks of a K-quant, which gguf does not write: any bits decode where the block's scales are finite."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    pick = np.random.default_rng(seed)
    blocks = pick.integers(0, 256, (rows.shape[0], rows.shape[1] // block, size), np.uint8)
    scales = pick.uniform(1e-4, 2e-4, blocks.shape[:2]).astype(np.float16)[..., None].view(np.uint8)
    at = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q3_K": (108,), "Q2_K": (80, 82)}[kind.name]
    for place in at:
        blocks[..., place : place + 2] = scales
    return blocks.reshape(rows.shape[0], -1)


def write_gguf(model, file, kinds):
    """The model as llama.cpp stores it, its matrices in turn as these types, with the byte-level tokenizer."""
    config, writer = model.config, gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>", "qz"]
    letters += [f"<pad{index}>" for index in range(config.vocab_size - len(letters))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(letters)
    writer.add_token_types([1] * 256 + [3, 1] + [5] * (len(letters) - 258))
    writer.add_token_merges(["q z"])  # transformers asks for one; the corpus has none
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(256)
    matrices = 0
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        layer, _, rest = module.removeprefix("model.layers.").partition(".")
        own = OUTSIDE.get(module) or f"blk.{layer}.{NAMES[rest]}"
        weights = tensor.float().numpy()
        if rest in ("self_attn.q_proj", "self_attn.k_proj"):
            weights = permuted(weights, config.num_attention_heads if "q_" in rest else config.num_key_value_heads)
        if weights.ndim == 1 or module in OUTSIDE:
            writer.add_tensor(f"{own}.weight", np.ascontiguousarray(weights))
            continue
        kind = gguf.GGMLQuantizationType[kinds[matrices % len(kinds)]]
        coded = k_quant(weights, kind, matrices) if kind.name.endswith("K") else gguf.quantize(weights, kind)
        writer.add_tensor(f"{own}.weight", coded, raw_dtype=kind)
        matrices += 1
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A Llama of two layers whose widths K-quants divide."""
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(2)
    LlamaForCausalLM(tiny_config(hidden_size=256, intermediate_size=512)).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def rows(request, cache, kind):
    stages = [one for one in run_stages(request, frozenset(), cache) if isinstance(one, StageResult)]
    return [row for one in stages for row in one.rows if isinstance(row, kind)]


def test_a_gguf_file_of_every_kind_of_block_is_measured_beside_its_original(plain, corpus_file, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    kinds = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K", "Q5_K", "Q3_K", "Q2_K", "F16", "BF16"]
    file = write_gguf(model, tmp_path / "tiny.gguf", kinds)
    asked = Request.of(model=str(plain), corpus=str(corpus_file), recipe=f"stored={file}", **SMALL)
    layers = {layer.name: layer for layer in rows(asked, tmp_path, Layer)}
    turn = iter(kinds * 2)
    for name, parameter in model.state_dict().items():
        module = name.removesuffix(".weight")
        kind = next(turn) if parameter.dim() == 2 and module not in OUTSIDE else "F32"
        is_cast = kind not in ("F32", "F16", "BF16")
        assert layers[module].cast == (kind.lower() if is_cast else ""), module
        if is_cast:
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
            assert layers[module].bits_per_weight == 8 * size / block
        if is_cast and not kind.endswith("K"):
            reader = gguf.GGUFReader(file)
            layer, _, rest = module.removeprefix("model.layers.").partition(".")
            stored = next(t for t in reader.tensors if t.name == f"blk.{layer}.{NAMES[rest]}.weight")
            decoded = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).copy()).bfloat16().float()
            original = parameter.float()
            if rest in ("self_attn.q_proj", "self_attn.k_proj"):
                original = torch.from_numpy(permuted(original.numpy(), 4 if "q_" in rest else 2).copy())
            error = float((decoded - original).norm() / original.norm())
            assert layers[module].relative_error == pytest.approx(error, rel=1e-4), module


def test_a_plain_gguf_file_is_a_model_and_gives_its_originals_numbers(plain, corpus_file, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    file = write_gguf(model, tmp_path / "tiny.gguf", ["BF16", "F32"])
    asked = Request.of(model=str(plain), corpus=str(corpus_file), recipe="FP8_DYNAMIC", **SMALL)
    assert rows(asked.but(model=str(file)), tmp_path, Window) == rows(asked, tmp_path, Window)
    with pytest.raises(ModelError, match="holds no quantized tensor"):
        rows(asked.but(recipe=f"stored={file}"), tmp_path, Window)


def test_a_quantized_gguf_file_alone_has_a_perplexity_and_is_no_baseline(plain, corpus_file, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    file = write_gguf(model, tmp_path / "tiny.gguf", ["Q8_0"])
    asked = Request.of(model=str(plain), corpus=str(corpus_file), recipe=f"stored={file}", **SMALL)
    ppl, alone = (
        next(row.value for row in rows(request, tmp_path, Measurement) if row.name == "ppl")
        for request in (asked, asked.but(model=str(file)))
    )
    assert ppl == alone
    with pytest.raises(ModelError, match="is quantized already.*stored="):
        locate(str(file), tmp_path)


def test_a_damaged_gguf_file_and_one_of_an_unknown_architecture_are_refused(plain, corpus_file, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    file = write_gguf(model, tmp_path / "tiny.gguf", ["Q8_0"])
    asked = Request.of(model=str(plain), corpus=str(corpus_file), **SMALL)
    whole = file.read_bytes()
    (tmp_path / "short.gguf").write_bytes(whole[:-1000])
    (tmp_path / "odd.gguf").write_bytes(whole.replace(b"llama", b"lxama"))
    short, odd = (str(tmp_path / name) for name in ("short.gguf", "odd.gguf"))
    cases = (
        ({"recipe": f"stored={short}"}, "ends before its tensors do"),
        ({"recipe": f"stored={odd}"}, "tokenizer of .*odd.gguf cannot be read .*lxama is not supported"),
        ({"recipe": f"stored={odd}", "model": odd}, "odd.gguf cannot be read as a model .*lxama is not supported"),
    )
    for fields, why in cases:
        with pytest.raises(ModelError, match=why) as caught:
            rows(asked.but(**fields), tmp_path, Window)
        assert "\n" not in str(caught.value)
