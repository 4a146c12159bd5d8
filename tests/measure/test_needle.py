"""Needles: what RULER hides, how it is asked for, and both grades against plain transformers."""

import dataclasses
import json
import re

import pytest
import torch
from torch.nn import functional as F
from transformers import MistralConfig, MistralForCausalLM
from transformers.cache_utils import DynamicCache

from fp8dash.choose.casts import parse_kv
from fp8dash.choose.needles import KINDS
from fp8dash.choose.records import Measurement, NeedleCell, Progress
from fp8dash.choose.request import Request
from fp8dash.errors import CorpusError, InvalidChoice, NotFinite
from fp8dash.measure.kept import keep, kept
from fp8dash.measure.needles import needle as needles
from fp8dash.measure.needles.essay import NOISE, haystack_of, sentences
from fp8dash.measure.needles.needle import Answer, answered, baseline_answers, needle, share_found
from fp8dash.measure.needles.prompts import (
    NeedleGrid,
    Prompt,
    _right_answer,
    build_prompt,
    build_prompts,
    chat_of,
    fitting,
)
from fp8dash.model.reading import CHUNK, Reader
from fp8dash.quant.kv_cache import quantized_cache

KVS = (None, parse_kv("e4m3fn/tensor"), parse_kv("int8/token"))
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


def grid(kind="single_1", lengths=(1500,), depths=(50,), haystack=(NOISE,), **more):
    return NeedleGrid(lengths, depths, haystack, KINDS[kind], **more)


def answers_of(loaded, prompts, kv=None):
    return [item for item in answered(loaded, prompts, kv, "needle") if isinstance(item, Answer)]


@pytest.mark.parametrize(("kind", "haystack"), [("single_1", "noise"), *((kind, "essay") for kind in KINDS)])
@pytest.mark.parametrize("depth", [0, 50, 100])
def test_a_needle_is_whole_at_its_depth_and_the_prompt_fits(loaded, kind, haystack, depth):
    given = grid(kind, haystack=haystack_of(haystack, ""))
    prompt = build_prompt(loaded.tokenizer, given, 1500, depth, 0, "off")
    text = loaded.tokenizer.decode(prompt.ids)
    assert 1150 < len(prompt.ids) <= 1500  # a sentence of the essay has up to 300 letters, each a token here
    body, question = text[: text.rindex("\n")], text[text.rindex("\n") :]
    assert body.count("One of the special magic") == KINDS[kind].needles
    asked = question.split(" for ")[1].split(" mentioned")[0]
    mine = [line for line in body.split("One of the special magic ")[1:] if f" for {asked} is: " in line]
    assert [line.split(" is: ")[1].split(".")[0] for line in mine] == list(prompt.expected)
    assert len(prompt.expected) == KINDS[kind].values and all(body.count(value) == 1 for value in prompt.expected)
    places = [(body.index(value) - 120) / (len(body) - 120) for value in prompt.expected]
    assert min(abs(place - depth / 100) for place in places) < 0.2  # the task stands before, and sentences are whole


def test_the_same_seed_hides_the_same_needle_and_each_repeat_another(loaded):
    first, again, repeat = (build_prompt(loaded.tokenizer, grid(), 700, 50, n, "off") for n in (0, 0, 1))
    other = build_prompt(loaded.tokenizer, grid(seed=1), 700, 50, 0, "off")
    assert first == again and first.hash == again.hash
    assert len({p.expected for p in (first, repeat, other)}) == len({p.hash for p in (first, repeat, other)}) == 3


def test_the_words_are_rulers(loaded):
    single = loaded.tokenizer.decode(build_prompt(loaded.tokenizer, grid(), 700, 0, 0, "off").ids)
    assert single.startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards.\nOne of the special magic numbers for "
    )
    assert single.endswith(" mentioned in the provided text is") and f".\n{NOISE}\n" in single
    several = loaded.tokenizer.decode(build_prompt(loaded.tokenizer, grid("multivalue"), 900, 0, 0, "off").ids)
    assert several.startswith("Some special magic numbers are hidden") and "What are all the special" in several
    assert several.endswith(" mentioned in the provided text are")
    unique = loaded.tokenizer.decode(build_prompt(loaded.tokenizer, grid("single_3"), 900, 0, 0, "off").ids)
    assert unique.startswith("A special magic uuid is hidden") and "magic uuids for" in unique


@pytest.mark.parametrize("kind", KINDS)
def test_the_right_answer_is_its_values_and_only_their_letters_are_graded(loaded, kind):
    prompt = build_prompt(loaded.tokenizer, grid(kind), 1500, 50, 0, "off")
    assert loaded.tokenizer.decode(prompt.answer) == " " + ", ".join(prompt.expected)
    graded = [token for token, counts in zip(prompt.answer, prompt.graded, strict=True) if counts]
    assert loaded.tokenizer.decode(graded) == "".join(prompt.expected)  # one token a letter


def test_a_tokenizer_that_joins_the_answer_to_the_prompt_leaves_it_ungraded(loaded, monkeypatch):
    written, cut = "is", [1, 2]
    assert _right_answer(loaded.tokenizer, written, "off", cut, ["7"]) == ((), ())
    assert _right_answer(object_like(is_fast=False), written, "off", cut, ["7"]) == ((), ())


def object_like(**values):
    return dataclasses.make_dataclass("Tokenizer", values)(**values)


def test_a_chat_template_frames_the_prompt_where_it_is_asked_for(loaded):
    tokenizer = loaded.tokenizer
    assert chat_of(tokenizer, "auto") == chat_of(tokenizer, "off") == "off"
    with pytest.raises(CorpusError, match="no chat template: choose --needle-chat off"):
        build_prompts(loaded, grid(), "on")
    tokenizer.chat_template = TEMPLATE
    assert chat_of(tokenizer, "auto") == chat_of(tokenizer, "on") == "on" and chat_of(tokenizer, "off") == "off"
    framed, plain = (build_prompt(tokenizer, grid(), 700, 50, 0, chat) for chat in ("on", "off"))
    assert tokenizer.decode(framed.ids).startswith("<user>A special") and framed.hash != plain.hash
    assert "<assistant>The special magic number for" in tokenizer.decode(framed.ids)
    assert framed.expected == plain.expected and framed.answer == plain.answer


def test_lengths_beyond_the_context_or_below_the_question_are_refused(loaded):
    with pytest.raises(CorpusError, match="exceed the model's context of 2,048: choose at most 2,024"):
        fitting(loaded.tokenizer, grid(lengths=(2048,)), 2048, "off")
    with pytest.raises(CorpusError, match="64 answer tokens .* choose at most 1,984"):
        fitting(loaded.tokenizer, grid("multivalue", lengths=(2048,)), 2048, "off")
    with pytest.raises(CorpusError, match="cannot hold the question itself: choose at least"):
        build_prompt(loaded.tokenizer, grid(), 128, 50, 0, "off")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_the_length_that_a_refusal_names_is_accepted(loaded, kind, seed):
    asked = grid(kind, lengths=(128,), depths=(0, 30, 100), repeats=4, seed=seed)
    with pytest.raises(CorpusError, match="cannot hold the question itself") as caught:
        fitting(loaded.tokenizer, asked, 2048, "off")
    least = int(re.search(r"at least ([\d,]+)", str(caught.value))[1].replace(",", ""))
    fits = dataclasses.replace(asked, lengths=(least,))
    assert fitting(loaded.tokenizer, fits, 2048, "off") == (fits, ())
    assert len(build_prompts(loaded, fits, "off")) == 12


def test_lengths_that_cannot_be_are_left_out_with_a_reason_where_others_remain(loaded):
    grid_, why = fitting(loaded.tokenizer, grid(lengths=(128, 700, 4096)), 2048, "off")
    assert grid_.lengths == (700,) and ["128 tokens cannot" in why[0], "length of 4,096" in why[1]] == [True, True]
    prompts = build_prompts(loaded, grid_, "off")
    answers = [Answer("", None)] * len(prompts)
    (first, *_) = [
        row for row in needle(prompts, answers, answers, "emulated", 0, "", why) if not hasattr(row, "depth")
    ]
    assert first.note.endswith(" ".join(why))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"needle_kind": "single_9"}, "not a kind of needle"),
        ({"needle_kind": "single_2"}, "single_1 in prose: choose the haystack essay or corpus"),
        ({"needle_chat": "yes"}, "not a chat setting"),
        ({"needle_repeats": 0}, "repeats of 0 is out of range"),
    ],
)
def test_needles_that_cannot_be_are_refused_with_what_to_change(change, sentence):
    with pytest.raises(InvalidChoice, match=sentence):
        Request.of(**change).checked()


def test_sentences_of_a_text_are_cut_and_a_text_without_any_is_refused():
    assert sentences("One sentence that is long enough. Too short. Another that is long enough, too!") == (
        "One sentence that is long enough.",
        "Another that is long enough, too!",
    )
    with pytest.raises(CorpusError, match="no sentences"):
        haystack_of("corpus", "a b c")
    essay = haystack_of("essay", "")
    assert len(essay) > 70 and len(set(essay)) == len(essay) and not any(c.isdigit() for c in " ".join(essay))


@torch.no_grad()
def plain_answer(model, prompt, kv, limit):
    """Greedy tokens and the answer's log-probabilities, each by plain calls of the model through a cache of its own."""

    def reading():
        cache = quantized_cache(model, kv) if kv else DynamicCache(config=model.config)
        return lambda part: model(input_ids=torch.tensor([part]), use_cache=True, cache=cache).logits[0, -1].float()

    def after_prompt():
        read, ids = reading(), list(prompt.ids)
        *_, logits = (read(ids[i : i + CHUNK]) for i in range(0, len(ids), CHUNK))
        return read, logits

    read, logits = after_prompt()
    tokens, chances = [int(logits.argmax())], []
    while len(tokens) < limit:
        tokens.append(int(read([tokens[-1]]).argmax()))
    read, logits = after_prompt()
    for token in prompt.answer:
        chances.append(float(F.log_softmax(logits, -1)[token]))
        logits = read([token])
    return tokens, chances


@pytest.mark.parametrize("kv", KVS, ids=str)
def test_both_grades_are_those_of_a_pass_of_its_own_to_the_bit(loaded, kv):
    """What prompts share is read once, and steps are taken back: neither may be seen in the numbers."""
    loaded.model.generation_config.eos_token_id = None
    short = dataclasses.replace(KINDS["single_1"], answer_tokens=6)
    given = dataclasses.replace(grid(lengths=(520,), depths=(0, 60, 100)), kind=short)
    prompts = build_prompts(loaded, given, "off")
    for prompt, answer in zip(prompts, answers_of(loaded, prompts, kv), strict=True):
        tokens, chances = plain_answer(loaded.model, prompt, kv, 6)
        graded = [c for c, counts in zip(chances, prompt.graded, strict=True) if counts]
        assert len(graded) == 7 and answer.logprob == sum(graded) / 7
        assert answer.text == loaded.tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("agreed", [0, 1, 3, 4, 6])
def test_the_right_answers_chances_do_not_depend_on_what_was_said(loaded, agreed):
    """Where the model says the first tokens of the answer itself, they are not read again."""
    loaded.model.generation_config.eos_token_id = None
    short = dataclasses.replace(KINDS["single_1"], answer_tokens=4)
    prompt = build_prompt(loaded.tokenizer, dataclasses.replace(grid(), kind=short), 400, 50, 0, "off")
    tokens, _ = plain_answer(loaded.model, prompt, None, 6)
    answer = (*tokens[:agreed], *((t + 1) % 256 for t in tokens[agreed:]))
    changed = dataclasses.replace(prompt, answer=answer, graded=(True,) * 6)
    _, chances = plain_answer(loaded.model, changed, None, 0)
    (graded,) = answers_of(loaded, [changed])
    assert graded.logprob == sum(chances) / 6


def test_what_prompts_share_is_read_once_and_only_in_whole_chunks(loaded, monkeypatch):
    read = []
    body = loaded.model.model.forward
    monkeypatch.setattr(
        loaded.model.model, "forward", lambda *a, **given: read.append(given["input_ids"].shape[1]) or body(*a, **given)
    )
    reader, ids = Reader(loaded.model, None), list(range(200)) * 2
    for prompt in (ids, [*ids[:300], *ids], [7]):
        reader.prompt(prompt)
    assert read == [128, 128, 128, 16, *[128] * 3, 60, 1]
    with pytest.raises(ValueError, match="without tokens"):
        reader.prompt([])


def test_a_cache_that_drops_old_tokens_is_filled_anew():
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=16,
    )  # fmt: skip
    model, ids = MistralForCausalLM(config).eval(), [i * 7 % 250 for i in range(200)]
    reader, fresh = Reader(model, None), Reader(model, None)
    reader.prompt(ids)
    first = reader.step(3)
    reader.step(4)
    reader.back(1)
    again = reader.step(5)
    reader.prompt(ids[:150])
    fresh.prompt(ids)
    assert torch.equal(fresh.step(3), first) and torch.equal(fresh.step(5), again)
    assert torch.equal(reader.prompt(ids), Reader(model, None).prompt(ids))


@torch.no_grad()
def test_an_answer_is_what_generate_says(loaded):
    """`generate` prefills whole, so its sums differ by BF16 rounding: in float32 the tokens are the same."""
    loaded.model.float()
    prompt = build_prompt(loaded.tokenizer, grid(), 400, 50, 0, "off")
    ids = torch.tensor([prompt.ids])
    out = loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
    )
    (answer,) = answers_of(loaded, [prompt])
    assert answer.text == loaded.tokenizer.decode(out[0, len(prompt.ids) :], skip_special_tokens=True)


def test_answers_end_where_generate_ends(loaded):
    prompt = build_prompt(loaded.tokenizer, grid(), 400, 50, 0, "off")
    tokens, _ = plain_answer(loaded.model, prompt, None, 3)
    loaded.model.generation_config.eos_token_id = [tokens[2], 9999]
    (answer,) = answers_of(loaded, [prompt])
    assert answer.text == loaded.tokenizer.decode(tokens) or tokens[2] in tokens[:2]


def test_needles_are_looked_for_through_the_quantized_cache(loaded):
    prompts = build_prompts(loaded, grid(lengths=(400,), depths=(0, 100)), "off")
    plain, cast = (answers_of(loaded, prompts, kv) for kv in (None, parse_kv("e5m2/tensor")))
    assert all(a.logprob != b.logprob for a, b in zip(plain, cast, strict=True))


def baseline_of(loaded, prompts, folder):
    walk, seen = baseline_answers(loaded, prompts, folder, "hash", "CPU"), []
    while True:
        try:
            seen.append(next(walk))
        except StopIteration as end:
            return end.value, seen


def test_a_baseline_is_measured_once_for_each_prompt_and_a_damaged_one_again(loaded, tmp_path):
    prompts = build_prompts(loaded, grid(lengths=(400,), depths=(0, 100)), "off")
    answers, seen = baseline_of(loaded, prompts, tmp_path)
    assert answers == answers_of(loaded, prompts) and len(seen) == 2 and seen[0].stage == "baseline"
    more = build_prompts(loaded, grid(lengths=(400,), depths=(0, 50, 100)), "off")
    again, seen = baseline_of(loaded, more, tmp_path)
    assert [again[0], again[2]] == answers and [p.message for p in seen] == ["400 tokens, needle at 50 %"]
    files = list((tmp_path / "baselines" / "needles").iterdir())
    assert len(files) == 3
    files[0].write_bytes(files[0].read_bytes()[:-2] + b"!}")
    third, seen = baseline_of(loaded, more, tmp_path)
    assert third == again and len(seen) == 1


def test_what_is_kept_is_read_whole_or_not_at_all(tmp_path):
    file = tmp_path / "a" / "b"
    assert kept(file) is None
    for payload in (b"", b"x" * 1000):
        keep(payload, file)
        assert kept(file) == payload
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", whole[:-1] + b"y"):
        file.write_bytes(damaged)
        assert kept(file) is None
    assert [f.name for f in file.parent.iterdir()] == ["b"]


def rows_of(scores, base):
    prompts = [
        Prompt(700, depth, 0, KINDS["multivalue"], (depth,), ("1111111", "2222222"), (1,), (True,)) for depth in (0, 50)
    ]
    return list(needle(prompts, scores, base, "emulated", 0, "in noise, chat template off"))


def test_a_run_is_graded_beside_its_baseline():
    rows = rows_of(
        [Answer(" 1111111, 2222222.", -0.5), Answer("2222222", -1.5)],
        [Answer("1111111 and 2222222", -0.25), Answer("none", -1.0)],
    )
    cells = [row for row in rows if isinstance(row, NeedleCell)]
    values = {row.name: row.value for row in rows if isinstance(row, Measurement)}
    assert [(c.score, c.baseline_score, c.logprob, c.baseline_logprob) for c in cells] == [
        (1.0, 1.0, -0.5, -0.25),
        (0.5, 0.0, -1.5, -1.0),
    ]
    assert cells[0].key != cells[1].key and cells[0].expected == "1111111, 2222222"
    assert values == {
        "needle": 0.75, "baseline_needle": 0.5, "needle_logprob": -1.0, "baseline_needle_logprob": -0.625,
        "needle_logprob_diff": -0.375, "needle_logprob_diff_low": None, "needle_logprob_diff_high": None,
    }  # fmt: skip
    (score,) = [row for row in rows if isinstance(row, Measurement) and row.name == "needle"]
    assert "niah_multivalue in noise, chat template off, 64 answer tokens" in score.method and score.note == "2 cells"


def test_a_grade_that_is_not_known_is_missing_and_says_why():
    rows = rows_of([Answer("1111111", None)] * 2, [Answer("1111111", None)] * 2)
    by_name = {row.name: row for row in rows if isinstance(row, Measurement)}
    assert by_name["needle"].value == 0.5 and by_name["needle_logprob"].value is None
    assert "joins the answer to the prompt" in by_name["needle_logprob"].note


def test_a_model_that_overflows_is_refused(loaded):
    loaded.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NotFinite, match="NaN or infinity"):
        answers_of(loaded, build_prompts(loaded, grid(lengths=(400,)), "off"))


def test_an_answer_holds_a_value_whatever_the_case_of_its_letters():
    assert share_found(("ab-12", "cd-34"), "AB-12") == 0.5 and share_found(("7",), "") == 0.0


def test_a_kept_answer_is_json(tmp_path):
    keep(json.dumps(dataclasses.asdict(Answer("ü", None))).encode(), tmp_path / "a")
    assert needles._read(tmp_path / "a") == Answer("ü", None)


def test_progress_says_what_is_asked(loaded):
    (first, *_) = answered(loaded, build_prompts(loaded, grid(lengths=(400,)), "off"), None, "needle")
    assert first == Progress("needle", 0, 1, "400 tokens, needle at 50 %")
    assert isinstance(Reader(loaded.model, None)._cache, DynamicCache)
