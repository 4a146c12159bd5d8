"""What is no BF16 baseline, or asks for more than it brings, is refused by name before anything is loaded."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8dash.errors import ModelError
from fp8dash.model.load import load, locate
from fp8dash.model.trust import own_code
from tests.model.exported.test_export import exported
from tests.model.test_folder import change_config

CPU = torch.device("cpu")
DEEP = "[" * 100_000


@pytest.fixture
def folder(tiny, tmp_path):
    """A copy of the tiny model."""
    return shutil.copytree(tiny, tmp_path / "model")


def read(folder):
    return load(locate(str(folder), folder), CPU)


def with_tensors(folder, **tensors):
    """The folder with tensors put in place of its own, or added."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", ["compression_config", "dropped"])
def test_our_own_fp8_export_is_no_baseline_whatever_its_config_says(tiny, tmp_path, name):
    exported(tiny, tmp_path / "out", "w=e4m3fn/row a=e4m3fn/row")
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    config[name] = config.pop("quantization_config") if name != "dropped" else None
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match="is quantized already .* choose the BF16 checkpoint"):
        locate(str(tmp_path / "out"), tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"compression_config": {"format": "float-quantized"}},
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
        {"llm_config": {"inner": {"quantization": {"bits": 4}}}},
    ],
)
def test_a_config_that_speaks_of_quantization_at_any_depth_is_refused(folder, changes):
    change_config(folder, **changes)
    with pytest.raises(ModelError, match="is quantized already"):
        locate(str(folder), folder)


def test_a_quantization_config_of_null_is_none(folder):
    change_config(folder, quantization_config=None)
    assert read(folder).model.config.num_hidden_layers == 2


@pytest.mark.parametrize(
    "suffix", ["weight_scale", "weight_scale_inv", "weight_zero_point", "weight_packed", "qweight", "input_scale"]
)
def test_tensors_of_a_quantized_weight_beside_a_plain_one_are_refused_by_name(folder, suffix):
    name = f"model.layers.0.mlp.up_proj.{suffix}"
    with pytest.raises(ModelError, match=f"is quantized already .*{suffix}"):
        read(with_tensors(folder, **{name: torch.ones(4)}))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32])
def test_a_weight_in_a_narrow_type_is_refused_by_name(folder, dtype):
    name = "model.layers.0.mlp.up_proj.weight"
    narrow = load_file(folder / "model.safetensors")[name].to(dtype)
    with pytest.raises(ModelError, match="is quantized already .*up_proj.weight is stored as"):
        locate(str(with_tensors(folder, **{name: narrow})), folder)


def test_other_tensors_that_no_loader_reads_are_no_reason_to_refuse(folder):
    assert read(with_tensors(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})).model


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers = 1,000,000, but the weight files hold 21 tensors"),
        ({"vocab_size": 10**12}, "asks for .* weights, but the files hold"),
        ({"intermediate_size": 10**9}, "asks for .* weights, but the files hold"),
        ({"hidden_size": 32}, "cannot be loaded|first forward fails"),
        ({"intermediate_size": 128}, "cannot be loaded"),
        ({"hidden_size": -64}, "cannot be loaded"),
        ({"hidden_size": "64"}, "cannot be loaded"),
        ({"num_attention_heads": 0}, "cannot be loaded"),
        ({"num_key_value_heads": 3}, "cannot be loaded|first forward fails"),
        ({"model_type": "no_such_type"}, "cannot be loaded"),
        ({"model_type": "clip"}, "cannot be loaded|does not load as a causal language model"),
        ({"rope_parameters": 7}, "cannot be loaded|first forward fails"),
    ],
)
def test_a_config_that_its_weights_do_not_fit_is_one_sentence_before_anything_is_measured(folder, changes, sentence):
    change_config(folder, **changes)
    with pytest.raises(ModelError, match=sentence) as caught:
        read(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["null", "[]", DEEP, "{}", '{"model": 7}'])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_file_that_holds_anything_else_is_one_sentence(folder, text, name):
    (folder / name).write_text(text)
    if name == "tokenizer_config.json" and text in ("{}", '{"model": 7}'):
        return  # a tokenizer can be made of the other file alone
    with pytest.raises(ModelError):
        read(folder)


def test_a_wrapper_a_gguf_file_and_an_adapter_are_refused_with_a_way_on(folder, tmp_path):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="cannot be read as GGUF"):
        locate(str(gguf), tmp_path)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds an adapter .*merge it"):
        locate(str(folder), tmp_path)


def test_code_that_a_checkpoint_of_a_known_type_brings_is_noticed_and_not_run(folder, tmp_path):
    assert not own_code(folder)
    proof = tmp_path / "ran"
    (folder / "code.py").write_text(f"open({str(proof)!r}, 'w')\n")
    change_config(folder, auto_map={"AutoModelForCausalLM": "code.M"})
    assert own_code(folder) and read(folder).model and not proof.exists()
