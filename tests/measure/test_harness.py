"""lm-eval's tasks on a loaded and cast model, beside lm-eval itself and closed forms; no network."""

import dataclasses
import importlib.metadata
import json
import math

import datasets
import huggingface_hub.constants
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from fp8dash.choose.catalog import OWN_TASKS
from fp8dash.choose.hardware import Device
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import STAGES, Measurement, Progress, StageResult, TaskItem
from fp8dash.choose.request import MEASURES, Request
from fp8dash.errors import CorpusError, InvalidChoice
from fp8dash.measure.harness import OWN_FOLDER, Asking, find_tasks, harness, scores_of_documents
from fp8dash.measure.needles.essay import NOISE
from fp8dash.measure.needles.prompts import NeedleGrid, build_prompt
from fp8dash.model.swap import cast_model
from fp8dash.pipeline import run_stages
from fp8dash.quant.kv_cache import quantized_cache

CPU = Device("cpu", "CPU")
KINDS = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{train: {file}, test: {file}}}, cache_dir: {cache}}}
training_split: train
test_split: test
num_fewshot: 2
metadata: {{version: 3}}
"""
ROLLING = """
output_type: loglikelihood_rolling
num_fewshot: 0
doc_to_text: ""
doc_to_target: text
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
"""
CHOICE = """
output_type: multiple_choice
doc_to_text: "{{text}} Its colour is"
doc_to_choice: [red, green, blue]
doc_to_target: colour
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
DOCUMENTS = [
    {"text": f"Boat {n} passed {n * 37 % 101} locks before noon. " * (1 + n % 3), "colour": n % 3} for n in range(8)
]


@pytest.fixture
def folder(tmp_path):
    """A team's own tasks on a file of its own."""
    made, file = tmp_path / "tasks", tmp_path / "documents.json"
    made.mkdir()
    file.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    for name, kind in (("boats_ppl", ROLLING), ("boats_colour", CHOICE)):
        head = KINDS.format(name=name, file=file, cache=tmp_path / "cache")
        (made / f"{name}.yaml").write_text(
            "".join((head + kind).split("num_fewshot: 2\n", 1 if kind is ROLLING else 0))
        )
    return made


def scored(loaded, names, folder, kv=None, **asking):
    """Values by (task, metric), and all items."""
    rows = list(harness(loaded, find_tasks(names, loaded, folder), Asking(**asking), "emulated", kv))
    assert all(0 <= row.share < 1 for row in rows if isinstance(row, Progress))
    values = {(row.label, row.name): row for row in rows if isinstance(row, Measurement)}
    return values, [row for row in rows if isinstance(row, TaskItem)]


def lm_eval_itself(model_folder, names, folder, **how):
    """What `lm_eval --model hf --include_path` gives."""
    model = HFLM(pretrained=str(model_folder), device="cpu", dtype="bfloat16", batch_size=1, **how)
    manager = TaskManager(include_defaults=False, include_path=folder, metadata={"pretrained": str(model_folder)})
    return simple_evaluate(model=model, tasks=names, task_manager=manager)


def test_rolling_perplexities_of_the_untouched_model_are_those_of_lm_eval_itself(loaded, tiny, folder):
    values, items = scored(loaded, ["boats_ppl"], folder)
    theirs = lm_eval_itself(tiny, ["boats_ppl"], folder)["results"]["boats_ppl"]
    for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert values["boats_ppl", f"task_{metric}"].value == pytest.approx(theirs[f"{metric},none"], rel=1e-6)
    words = [item for item in items if item.metric == "word_perplexity"]
    assert [item.weight for item in words] == [len(doc["text"].split(" ")) for doc in DOCUMENTS]
    mean = sum(x.value * x.weight for x in words) / sum(x.weight for x in words)
    assert values["boats_ppl", "task_word_perplexity"].value == pytest.approx(math.exp(mean), rel=1e-9)


def test_float32_log_probabilities_are_lm_evals_own_option_and_recorded(loaded, tiny, folder):
    values, _ = scored(loaded, ["boats_ppl"], folder, precision="float32")
    plain, _ = scored(loaded, ["boats_ppl"], folder)
    theirs = lm_eval_itself(tiny, ["boats_ppl"], folder, softmax_dtype="float32")["results"]["boats_ppl"]
    bits_per_byte, rounded = values["boats_ppl", "task_bits_per_byte"], plain["boats_ppl", "task_bits_per_byte"]
    assert bits_per_byte.value == pytest.approx(theirs["bits_per_byte,none"], rel=1e-6)
    assert bits_per_byte.value == pytest.approx(rounded.value, rel=2**-8) and bits_per_byte.value != rounded.value
    assert "log-probabilities in float32" in bits_per_byte.method and "log-probabilities in bfloat16" in rounded.method


def test_choices_come_with_shots_standard_errors_and_a_score_for_each_document(loaded, tiny, folder):
    values, items = scored(loaded, ["boats_colour"], folder)
    theirs = lm_eval_itself(tiny, ["boats_colour"], folder)
    accuracy, error = values["boats_colour", "task_acc"], values["boats_colour", "task_acc_stderr"]
    assert accuracy.value == pytest.approx(theirs["results"]["boats_colour"]["acc,none"], rel=1e-6)
    assert error.value == pytest.approx(theirs["results"]["boats_colour"]["acc_stderr,none"], rel=1e-6)
    assert [x.value for x in items] == [sample["acc"] for sample in theirs["samples"]["boats_colour"]]
    assert {x.metric for x in items} == {"acc"} and len({x.digest for x in items}) == len(DOCUMENTS)
    assert accuracy.better == "higher" and "8 of 8 documents" in accuracy.note
    version = importlib.metadata.version("lm-eval")
    assert accuracy.method.startswith(f"lm-eval {version}, boats_colour version 3, 2-shot, plain prompt")


def test_a_group_has_its_own_number_and_each_task_is_told_once(loaded, tiny, folder):
    mean = "aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]\n"
    (folder / "boats.yaml").write_text("group: boats\ntask: [boats_colour, boats_shade]\n" + mean)
    definition = (folder / "boats_colour.yaml").read_text()
    (folder / "boats_shade.yaml").write_text(
        definition.replace("boats_colour", "boats_shade").replace("colour is", "shade is")
    )
    values, items = scored(loaded, ["boats_colour", "boats"], folder)
    theirs = lm_eval_itself(tiny, ["boats"], folder)["results"]["boats"]
    assert {task for task, _ in values} == {"boats", "boats_colour", "boats_shade"}
    assert values["boats", "task_acc"].value == pytest.approx(theirs["acc,none"], rel=1e-6)
    assert values["boats", "task_acc"].note == "a group of tasks" and values["boats", "task_acc"].better == "higher"
    assert len(items) == 2 * len(DOCUMENTS) and {x.task for x in items} == {"boats_colour", "boats_shade"}


def test_a_limit_takes_a_tasks_first_documents(loaded, folder):
    whole, few = (scored(loaded, ["boats_colour"], folder, limit=limit) for limit in (0, 3))
    assert [x.digest for x in few[1]] == [x.digest for x in whole[1]][:3]
    assert "3 of 8 documents" in few[0]["boats_colour", "task_acc"].note


def test_our_own_tasks_run_under_lm_eval_itself(tiny):
    named = {"lengths": [700], "depths": [0, 100], "samples": 1}
    model = HFLM(pretrained=str(tiny), device="cpu", dtype="bfloat16", batch_size=1)
    arguments = {"pretrained": str(tiny)} | named
    manager = TaskManager(include_defaults=False, include_path=OWN_FOLDER, metadata=arguments)
    assert set(manager.all_tasks) == set(OWN_TASKS)
    results = simple_evaluate(model=model, tasks=list(OWN_TASKS), task_manager=manager, limit=2)
    assert results["results"]["fp8dash_pydocs"]["byte_perplexity,none"] > 1
    assert results["n-samples"]["fp8dash_needle"] == {"original": 2, "effective": 2}


def test_the_harness_asks_for_the_same_needles_as_our_own_measure(loaded):
    (task,) = find_tasks(["fp8dash_needle"], loaded, OWN_FOLDER)["fp8dash_needle"]["tasks"].values()
    docs = list(task.eval_docs)
    task.build_all_requests(limit=3)
    for doc, request in zip(docs, task.instances, strict=False):
        grid = NeedleGrid((doc["length"],), (doc["depth"],), (NOISE,), seed=task.instances.index(request) % 2)
        prompt = build_prompt(loaded.tokenizer, grid, doc["length"], doc["depth"], 0, "off")
        assert request.args[0] == loaded.tokenizer.decode(prompt.ids)
        assert (doc["expected"],) == prompt.expected and doc["expected"] in request.args[0]
    assert task.process_results(docs[0], [f"It is {docs[0]['expected']}."]) == {"needle": 1.0}
    assert task.process_results(docs[0], ["It is 1234567."]) == {"needle": 0.0}


def test_a_cast_head_is_not_tied_to_the_embedding_again(loaded, folder):
    loaded.model.config.tie_word_embeddings = True
    loaded.model.tie_weights()
    list(cast_model(loaded.model, parse_recipe("w=e5m2/tensor also=lm_head"), CPU, "emulated"))
    cast = loaded.model.lm_head.weight
    scored(loaded, ["boats_ppl"], folder, limit=1)
    assert loaded.model.lm_head.weight is cast and not torch.equal(cast, loaded.model.model.embed_tokens.weight)
    HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer)  # which is why
    assert loaded.model.lm_head.weight is not cast


def test_a_cast_cache_is_read_when_text_is_scored(loaded, folder):
    kv = parse_recipe("kv=e5m2/tensor").kv
    (_, plain), (_, items) = (
        scored(loaded, ["boats_ppl"], folder, kv=cast, limit=2, precision="float32") for cast in (None, kv)
    )
    tokens = torch.tensor([[256, *loaded.tokenizer(DOCUMENTS[0]["text"])["input_ids"]]])
    with torch.no_grad():
        cache = quantized_cache(loaded.model, kv)
        chances = loaded.model(tokens[:, :-1], use_cache=True, cache=cache).logits[0].float().log_softmax(-1)
    expected = -float(chances.gather(-1, tokens[0, 1:, None]).sum())
    assert items[0].value * items[0].weight == pytest.approx(expected, rel=1e-6)
    assert items[0].value != plain[0].value


def test_a_cast_cache_is_read_when_text_is_generated(loaded, monkeypatch):
    seen = []
    generate = loaded.model.generate

    def watched(*args, **kwargs):
        seen.append(type(kwargs["cache"]))
        return generate(*args, **kwargs)

    loaded.model.generate = watched
    kv = parse_recipe("kv=e4m3fn/tensor").kv
    scored(loaded, ["fp8dash_needle"], OWN_FOLDER, limit=1, kv=kv)
    assert seen == [type(quantized_cache(loaded.model, kv))]


def test_a_tokenizer_without_an_end_of_text_answers_until_the_task_says_so(loaded):
    loaded.tokenizer.eos_token = None
    values, _ = scored(loaded, ["fp8dash_needle"], OWN_FOLDER, limit=1)
    assert values["fp8dash_needle", "task_needle"].value == 0.0, "a random model finds none"


def test_a_perplexity_that_overflows_keeps_its_bits_per_byte(loaded, folder):
    loaded.model.lm_head.weight.mul_(3000)  # sure of the wrong tokens: a word of thousands of nats
    values, _ = scored(loaded, ["boats_ppl"], folder)
    assert values["boats_ppl", "task_word_perplexity"].value == math.inf
    assert 100 < values["boats_ppl", "task_bits_per_byte"].value < math.inf


def test_an_unknown_task_is_refused_with_its_nearest_names(loaded, tmp_path):
    with pytest.raises(InvalidChoice, match="has no task “hella_swag”: did you mean .*hellaswag"):
        find_tasks(["fp8dash_pydocs", "hella_swag"], loaded, tmp_path)


@pytest.mark.parametrize("name", ["/tmp/evil.yaml", "../evil.yaml", "a b"])
def test_a_path_is_not_a_task(name):
    with pytest.raises(InvalidChoice, match="is not a task name"):
        Request.of(tasks=(name,)).checked()


@pytest.mark.parametrize(
    ("raw", "number", "items", "unit"),
    [
        ([1.0, 0.0, True, 0.0], 0.5, ((1.0, 1.0), (0.0, 1.0), (1.0, 1.0), (0.0, 1.0)), ""),
        ([(-2.0, 1), (-6.0, 3)], math.exp(2.0), ((2.0, 1.0), (2.0, 3.0)), "nats"),
        ([(-2.0, 4), (-6.0, 4)], 1.0 / math.log(2), ((0.5 / math.log(2), 4.0), (1.5 / math.log(2), 4.0)), "bits"),
        ([1.0, 0.0, 5.0], 1.0, (), ""),  # a median
        ([(1, 1), (0, 1)], 0.5, (), ""),  # truth and prediction, as F1 has them
        (["a", "b"], 1.0, (), ""),
        ([], 1.0, (), ""),
    ],
)
def test_documents_have_a_score_only_where_the_number_is_its_mean(raw, number, items, unit):
    scores, of = scores_of_documents(raw, number)
    assert of == unit and [x for pair in scores for x in pair] == pytest.approx([x for pair in items for x in pair])


def test_data_out_of_reach_are_a_sentence_with_what_works_without_a_network(loaded, folder, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (folder / "far.yaml").write_text("task: far\ndataset_path: nobody/nothing\ntest_split: test\n" + ROLLING)
    with pytest.raises(
        CorpusError, match="“far” cannot be downloaded .*fp8dash_pydocs or fp8dash_needle.* local files"
    ):
        find_tasks(["far"], loaded, folder)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("unsafe_code: true\n", "executes model-written code"),
        ("doc_to_image: text\n", "images or audio"),
        ("doc_to_text: !function nowhere.at_all\n", "cannot be set up here"),
    ],
)
def test_tasks_that_cannot_be_run_here_are_refused_with_the_reason(loaded, folder, more, sentence):
    (folder / "odd.yaml").write_text(
        (folder / "boats_ppl.yaml").read_text().replace("task: boats_ppl", "task: odd") + more
    )
    with pytest.raises(InvalidChoice, match=f"“odd” .*{sentence}"):
        find_tasks(["odd"], loaded, folder)


def test_a_tokenizer_that_brings_code_is_kept_from_tasks(loaded, tmp_path):
    for file in loaded.folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {
        "auto_map": {"AutoTokenizer": ["x.X", None]}
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CorpusError, match="no tokenizer is named"):
        find_tasks(["fp8dash_needle"], dataclasses.replace(loaded, folder=tmp_path), tmp_path / "none")


def test_the_chat_template_is_off_unless_asked_for_and_recorded(loaded, folder):
    with pytest.raises(InvalidChoice, match="no chat template"):
        scored(loaded, ["boats_colour"], folder, prompt="chat")
    plain, items = scored(loaded, ["boats_colour"], folder, limit=1)
    loaded.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    chat, chatted = scored(loaded, ["boats_colour"], folder, limit=1, prompt="chat")
    assert "plain prompt" in plain["boats_colour", "task_acc"].method
    assert "chat prompt" in chat["boats_colour", "task_acc"].method and items[0].digest != chatted[0].digest


def test_a_run_measures_its_tasks_after_the_rest(tiny, corpus_file, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("FP8DASH_DATA_DIR", str(folder.parent))
    assert MEASURES[-2:] == STAGES[-2:] == ("tasks", "export")
    request = Request.of(
        model=str(tiny), recipe="FP8_DYNAMIC", corpus=str(corpus_file), backend="emulated", measures=(),
        tasks=("boats_colour",), task_limit=2,
    )  # fmt: skip
    items = [item for item in run_stages(request, frozenset(), tmp_path) if isinstance(item, StageResult)]
    assert [item.stage for item in items] == ["load", "baseline", "quantize", "tasks"]
    assert sum(isinstance(row, TaskItem) for row in items[-1].rows) == 2
    assert StageResult.from_json(json.loads(json.dumps(items[-1].to_json()))) == items[-1]
    assert items[0].facts["versions"]["lm-eval"] == importlib.metadata.version("lm-eval")


def test_naming_a_task_measures_it_and_measuring_none_is_refused():
    assert Request.of(tasks=(" wikitext ", "wikitext")).checked().tasks.names == ("wikitext",)
    assert "tasks" in Request.of(tasks=("wikitext",)).checked().measures
    with pytest.raises(InvalidChoice, match="No task is given"):
        Request.of(measures=("tasks",)).checked()
    with pytest.raises(InvalidChoice, match="task limit of -1"):
        Request.of(tasks=("wikitext",), task_limit=-1).checked()
