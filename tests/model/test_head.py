"""What a model does to its logits after its head is followed bit for bit, or refused by name."""

import pytest
import torch
import transformers

from fp8dash.errors import ModelError
from fp8dash.model.head import FullHead, full_head
from fp8dash.model.load import load, locate
from tests.tiny import write_tokenizer

CPU = torch.device("cpu")
IDS = torch.arange(3, 67)[None] * 3 % 256
SHAPE = {
    "vocab_size": 272, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "bos_token_id": 256,
    "eos_token_id": 256, "pad_token_id": 256,
}  # fmt: skip
FAMILIES = {
    "Gemma2": {"final_logit_softcapping": 30.0},
    "Gemma3Text": {"final_logit_softcapping": 5.0},
    "Granite": {"logits_scaling": 8.0},
    "Cohere": {"logit_scale": 0.0625},
    "Cohere2": {"logit_scale": 0.25},
}


def written(folder, config):
    """A folder with a random model of this config, and the tiny tokenizer."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def family(name, **others):
    """A tiny config of a family."""
    return getattr(transformers, f"{name}Config")(**SHAPE | others)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("times", [1.0, 64.0])
def test_soft_caps_and_factors_after_the_head_are_followed_bit_for_bit(tmp_path, name, times):
    model = load(locate(str(written(tmp_path, family(name, **FAMILIES[name]))), tmp_path), CPU).model
    assert isinstance(full_head(model), FullHead)
    with torch.no_grad():
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight * times, requires_grad=False)
        states = model.base_model(input_ids=IDS, use_cache=False).last_hidden_state
        assert torch.equal(full_head(model)(states), model(input_ids=IDS, use_cache=False).logits)


def test_a_model_that_does_nothing_after_its_head_keeps_its_head(loaded):
    assert full_head(loaded.model) is loaded.model.lm_head


def test_a_change_after_the_head_that_no_config_names_is_refused(tiny, monkeypatch):
    forward = transformers.LlamaForCausalLM.forward

    def bent(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        out.logits = out.logits.clamp(max=900.0)  # unseen in logits of any usual size
        return out

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", bent)
    with pytest.raises(
        ModelError, match="LlamaForCausalLM changes the logits after its head .* divergence would be measured"
    ):
        load(tiny, CPU)


def test_a_first_forward_that_fails_is_one_sentence_at_load(tiny, monkeypatch):
    def broken(self, *args, **kwargs):
        raise TypeError("unsupported operand\nand more")

    monkeypatch.setattr(transformers.LlamaModel, "forward", broken)
    with pytest.raises(ModelError, match=r"its first forward pass fails \(TypeError: unsupported operand\)"):
        load(tiny, CPU)
