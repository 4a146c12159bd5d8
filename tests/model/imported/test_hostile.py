"""Damaged checkpoints of every scheme: decoded as they are, or refused in one sentence; nothing else comes out."""

import json
import random

import pytest
import torch
from safetensors.torch import save_file

from fp8dash.errors import Fp8dashError
from fp8dash.model.imported.checkpoint import read_checkpoint
from fp8dash.model.imported.load import load_checkpoint
from tests.model.imported.stored import SCHEMES
from tests.tiny import tiny_config, write_tokenizer

TRIES = 6  # of each scheme


def damaged(tensors, config, pick):
    """A tensor dropped, cut, turned, of another type or of other values, or another word in the configuration."""
    tensors, name = dict(tensors), pick.choice(sorted(tensors))
    tensor = tensors.pop(name)
    kinds = [
        None,
        tensor[:1].clone() if tensor.dim() else tensor,
        tensor.T.contiguous() if tensor.dim() == 2 else tensor,
        tensor.view(torch.uint8) if tensor.dim() and tensor.is_contiguous() else tensor,
        torch.zeros_like(tensor.float()).to(tensor.dtype),
        torch.cat([tensor.view(torch.uint8).flatten()] * 2) if tensor.dim() else tensor,
        tensor.reshape(-1),
    ]
    made = pick.choice(kinds)
    if made is not None:
        tensors[name] = made
    text = json.dumps(config)
    words = ('"num_bits": 8', '"group_size": 32', '"bits": 4', "true", '"channel"', '"float"')
    for word in words:
        if word in text and pick.random() < 0.15:
            text = text.replace(
                word, pick.choice(['"num_bits": 4', '"group_size": 7', '"bits": 3', "false", '"tensor"']), 1
            )
            break
    return tensors, text


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_damaged_checkpoint_is_decoded_or_refused_in_a_sentence(scheme, tmp_path):
    torch.manual_seed(0)
    tensors, config, _ = SCHEMES[scheme](torch.randn(160, 64))
    pick = random.Random(scheme)
    for attempt in range(TRIES):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        write_tokenizer(folder)
        made, text = damaged(tensors, config, pick)
        save_file({name: tensor.contiguous() for name, tensor in made.items()}, folder / "model.safetensors")
        whole = tiny_config().to_dict()
        try:
            (folder / "config.json").write_text(json.dumps(whole | {"quantization_config": json.loads(text)}))
        except ValueError:
            continue
        with pytest.raises(Fp8dashError) as caught:  # even a whole one lacks the model's other weights
            load_checkpoint(read_checkpoint(str(folder)), tmp_path, torch.device("cpu"))
        assert "\n" not in str(caught.value)
