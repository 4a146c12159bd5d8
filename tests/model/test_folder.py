"""Which files of a checkpoint folder are the model, and which folders are refused."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8dash.errors import ModelError
from fp8dash.model.folder import INDEX, config_of, content_hash, weight_files
from fp8dash.model.load import load, locate

CPU = torch.device("cpu")


@pytest.fixture
def folder(tiny, tmp_path):
    """A copy of the tiny model."""
    return shutil.copytree(tiny, tmp_path / "model")


def sharded(folder, **others):
    """The folder with its weights in two files and an index, which names `others` too."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(sorted(tensors))}
    for name in set(places.values()):
        save_file({k: t for k, t in tensors.items() if places[k] == name}, folder / name, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places | others}))
    return folder


def test_a_stray_weight_file_is_not_part_of_the_model(folder, tiny):
    shutil.copyfile(folder / "model.safetensors", folder / "model-old.safetensors")
    assert [file.name for file in weight_files(folder)] == ["model.safetensors"]
    assert content_hash(folder) == content_hash(tiny)


def test_a_stray_shard_that_no_index_names_is_not_part_of_the_model(folder):
    before = content_hash(sharded(folder))
    save_file({"x": torch.ones(2)}, folder / "model-00003-of-00003.safetensors")
    assert len(weight_files(folder)) == 2 and content_hash(folder) == before
    assert load(locate(str(folder), folder), CPU).content_hash == before


def test_an_index_beside_a_whole_file_is_not_read(folder):
    (folder / INDEX).write_text("not even JSON")
    assert [file.name for file in weight_files(folder)] == ["model.safetensors"]


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/tmp/other.safetensors", "sub/other.safetensors", "..", "", 7]
)
def test_an_index_that_names_a_file_elsewhere_is_refused(folder, name):
    with pytest.raises(ModelError, match="is not in the same folder"):
        locate(str(sharded(folder, extra=name)), folder)


def test_a_config_that_names_weights_elsewhere_is_refused(folder):
    change_config(folder, transformers_weights="../other.safetensors")
    with pytest.raises(ModelError, match="is not in the same folder"):
        locate(str(folder), folder)


def test_an_index_that_names_a_missing_file_is_a_sentence(folder):
    with pytest.raises(ModelError, match="model-9.safetensors is missing"):
        locate(str(sharded(folder, extra="model-9.safetensors")), folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_pipe_in_a_model_folder_is_refused_and_never_read(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ModelError):
        locate(str(folder), folder)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "contains a JSON list"),
        ("null", "contains a JSON null"),
        ("7", "contains a JSON int"),
        ('"x"', "contains a JSON str"),
        ("{", "cannot be read"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_a_config_that_is_no_object_is_a_sentence(folder, text, sentence):
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=sentence):
        locate(str(folder), folder)


def change_config(folder, **changes):
    """Writes fields into the folder's config."""
    (folder / "config.json").write_text(json.dumps(config_of(folder) | changes))
