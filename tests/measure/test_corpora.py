"""Texts: which files are read, as which characters, and as which tokens."""

import os

import pytest
import torch

from fp8dash.choose.records import Measurement, StageResult
from fp8dash.choose.request import Request
from fp8dash.errors import CorpusError, ModelError
from fp8dash.measure.corpora import Corpus, cut_windows, load_corpus
from fp8dash.measure.needles.essay import haystack_of
from fp8dash.measure.needles.prompts import build_prompt
from fp8dash.model.load import check_tokens
from fp8dash.pipeline import run_stages
from tests.measure.test_needle import grid
from tests.measure.test_perplexity import beginning_with_bos


def test_a_byte_order_mark_is_not_text_and_line_ends_are_one_character(tmp_path):
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_bytes(b"one\ntwo\n")
    marked.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r")
    assert load_corpus(str(marked)).text == load_corpus(str(plain)).text
    assert load_corpus(str(marked)).content_hash == load_corpus(str(plain)).content_hash


def test_a_pipe_a_device_and_a_folder_are_refused_and_never_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", "/dev/zero", tmp_path, tmp_path / "none", "a\0b"):
        with pytest.raises(CorpusError, match="choose “pydocs” or a text file"):
            load_corpus(str(place))


def test_what_spells_a_special_token_inside_a_corpus_is_text(loaded):
    text = "before <end> after, and again. " * 40
    windows = cut_windows(loaded.tokenizer, Corpus("text", text, "0", ""), 4, 64, 2048)
    assert loaded.tokenizer.eos_token_id not in windows.ids
    assert windows.ids.flatten().tolist() == list(text.encode())[:256] or "<" in loaded.tokenizer.decode(windows.ids[0])


def test_what_spells_a_special_token_in_a_haystack_ends_no_prompt(tiny, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("A sentence with <end> in the middle of it. A plain sentence of the haystack. " * 40)
    request = Request.of(
        model=str(tiny), corpus=str(corpus), recipe="BF16", measures=("needle",), haystack="corpus",
        needle_lengths=(700,), needle_depths=(50,),
    )  # fmt: skip
    results = [item for item in run_stages(request, frozenset(), tmp_path) if isinstance(item, StageResult)]
    assert any(row.name == "needle" for result in results for row in result.rows if isinstance(row, Measurement))
    assert haystack_of("corpus", corpus.read_text(), ["<end>"]) == ("A plain sentence of the haystack.",) * 40
    with pytest.raises(CorpusError, match="Every sentence of the corpus spells a special token"):
        haystack_of("corpus", "A sentence with <end> in the middle of it. " * 3, ["<end>"])


def test_a_tokenizer_that_appends_eos_does_not_end_the_prompt_before_the_answer(loaded):
    plain = build_prompt(loaded.tokenizer, grid(), 700, 50, 0, "off")
    prompt = build_prompt(beginning_with_bos(loaded.tokenizer, and_eos=True), grid(), 701, 50, 0, "off")
    end = loaded.tokenizer.eos_token_id
    assert prompt.ids[0] == end and end not in prompt.ids[1:] and end not in prompt.answer
    assert len(prompt.answer) == len(plain.answer) and any(prompt.graded)


def test_a_token_that_the_model_has_no_row_for_is_a_sentence(loaded):
    check_tokens(loaded, torch.arange(272).tolist())
    with pytest.raises(ModelError, match="gives token 272, but the model has only 272: tokenizer and weights belong"):
        check_tokens(loaded, [1, 272])
