"""Reading in chunks is reading whole, or it is not done."""

import pytest
import torch
import transformers

from fp8dash.errors import ModelError
from fp8dash.model.load import load, locate
from fp8dash.model.reading import CHUNK, WHOLE, Reader, chunk_of
from tests.model.test_head import family, written

CPU = torch.device("cpu")


def test_a_llama_is_read_in_chunks(loaded):
    assert chunk_of(loaded.model) == CHUNK


def test_a_model_that_forgets_its_state_between_chunks_is_read_in_one_forward(loaded, monkeypatch):
    forward = type(loaded.model.model).forward

    def forgetful(self, input_ids=None, cache=None, **others):
        if cache is not None and input_ids.shape[1] > 1 and cache.get_seq_length():
            cache.crop(-cache.get_seq_length())
        return forward(self, input_ids=input_ids, cache=cache, **others)

    monkeypatch.setattr(type(loaded.model.model), "forward", forgetful)
    assert chunk_of(loaded.model) == WHOLE
    ids = [i * 31 % 256 for i in range(CHUNK + 40)]
    with torch.no_grad():
        whole = loaded.model(input_ids=torch.tensor([ids])).logits[0, -1].float()
    assert torch.equal(Reader(loaded.model, None, WHOLE).prompt(ids), whole)
    reader = Reader(loaded.model, None, WHOLE)
    reader.prompt(ids), reader.step(5), reader.step(6)
    reader.back(1)
    again = Reader(loaded.model, None, WHOLE)
    again.prompt(ids), again.step(5)
    assert torch.equal(reader.step(7), again.step(7))


def test_a_model_that_no_cache_continues_is_refused_by_name(loaded, monkeypatch):
    forward = type(loaded.model.model).forward
    monkeypatch.setattr(type(loaded.model.model), "forward", lambda self, cache=None, **others: forward(self, **others))
    with pytest.raises(ModelError, match="LlamaForCausalLM does not continue a text correctly from its cache"):
        chunk_of(loaded.model)


@pytest.mark.parametrize("name", ["Mamba", "FalconMamba", "Jamba", "Bamba", "RecurrentGemma", "Lfm2"])
def test_families_with_a_state_are_read_whole_or_refused_and_never_in_chunks_that_differ(tmp_path, name):
    torch.manual_seed(7)
    folder = written(tmp_path, family(name))
    try:
        model = load(locate(str(folder), tmp_path), CPU).model
        chunk = chunk_of(model)
    except ModelError as error:
        assert str(error) and "\n" not in str(error)
        return
    assert chunk in (CHUNK, WHOLE)
    ids = torch.arange(200) * 31 % 256
    with torch.no_grad():
        whole = model(input_ids=ids[None]).logits[0, -1].float()
    apart = (Reader(model, None, chunk).prompt(ids.tolist()) - whole).norm() / whole.norm()
    assert apart < 0.05
    assert isinstance(model, transformers.PreTrainedModel)
