"""Tasks of lm-eval on the model under test: the only file that knows lm-eval.

lm-eval makes the requests, filters the answers and computes the numbers; its own wrapper runs our loaded and cast model
in between. Each document is scored by itself: in a batch, padding and neighbours would share the scales of a dynamic
cast. Knows no recipe, save that a cast KV cache must be read.
"""

import difflib
import hashlib
import importlib.metadata
import itertools
import json
import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api import metrics
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from fp8dash.choose.casts import KvCast
from fp8dash.choose.catalog import OWN_TASKS
from fp8dash.choose.measurements import TaskNumber
from fp8dash.choose.records import HIGHER, LOWER, NEITHER, Measurement, Progress, RanBy, TaskItem
from fp8dash.errors import CorpusError, InvalidChoice, NotFinite
from fp8dash.model.chat import frame_of
from fp8dash.model.load import LoadedModel, check_tokens
from fp8dash.quant.kv_cache import quantized_cache

METHOD = (
    "lm-eval {version}, {task} version {of_task}, {shots}-shot, {prompt} prompt, log-probabilities in {precision}, "
    "one document at a time, v1"
)
OWN_FOLDER = Path(__file__).parent / "tasks"
DIGEST = 16  # hexadecimal digits
NAMES_OFFERED = 3
BOOTSTRAPS = 1_000  # for the errors of F1 and its like; lm-eval's own 100,000 take minutes

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Scores:
    """One metric of one task: the harness's number, and what it is the mean of, document by document."""

    metric: str
    value: float
    stderr: float | None
    items: tuple[
        tuple[float, float], ...
    ]  # value and weight of each document; empty where no mean of them is the number
    unit: str  # of the items where it is not the metric's own


def find_tasks(names: Sequence[str], loaded: LoadedModel, folder: Path) -> dict[str, Any]:
    """lm-eval's tasks by the name that asked for them, with their data, from our own, `folder` and lm-eval's.

    A name may stand for a group or a tag of tasks. Raises InvalidChoice or CorpusError with what to do.
    """
    metadata = _told_to_tasks(loaded.folder)
    manager = TaskManager(include_defaults=False, include_path=_folders(folder), metadata=metadata)
    if not set(names) <= set(manager.all_tasks):  # lm-eval's own are 14,000, and take seconds to list
        manager = TaskManager(include_path=_folders(folder), metadata=metadata)
    for name in names:
        _known(name, manager.all_tasks)
    return {name: _loaded(name, manager, folder) for name in names}


@dataclass(frozen=True, slots=True)
class Asking:
    """How tasks are asked and scored."""

    limit: int = 0  # documents of each task, from its start; 0: all
    prompt: str = "plain"  # or "chat"
    precision: str = "model"  # of the log-probabilities, or "float32"


def harness(
    loaded: LoadedModel, tasks_by_name: dict[str, Any], asking: Asking, backend: RanBy, kv: KvCast | None = None
) -> Iterator[Progress | TaskItem | Measurement]:
    """Progress, then each task's items and measurements.

    With `kv` every token reads the earlier ones from a quantized cache. Raises InvalidChoice or NotFinite.
    """
    if asking.prompt == "chat":
        if not loaded.tokenizer.chat_template:
            raise InvalidChoice("The model has no chat template: choose the plain task prompt.")
        frame_of(loaded.tokenizer)  # raises ModelError for one that fails or loops
    model = _Model(loaded, asking.precision, kv)
    precision = str(loaded.model.dtype).removeprefix("torch.") if asking.precision == "model" else asking.precision
    written = set[str]()  # a task may be named, and belong to a group that is named too
    for index, (name, tasks) in enumerate(tasks_by_name.items()):
        results = yield from _evaluated(model, tasks, asking, f"{name}, {index + 1} of {len(tasks_by_name)}")
        for task in (task for task in results["results"] if task not in written):
            written.add(task)
            yield from _rows(task, results, {"prompt": asking.prompt, "precision": precision}, backend)


class _Model(HFLM):  # type: ignore[misc] # lm-eval has no types
    """lm-eval's wrapper around a model that is loaded and cast already."""

    def __init__(self, loaded: LoadedModel, precision: str, kv: KvCast | None) -> None:
        """Changes nothing of the model: a cast head stays untied."""
        self._loaded, self._kv = loaded, kv
        softmax = None if precision == "model" else precision
        with _left_untied(loaded.model):
            super().__init__(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=1, softmax_dtype=softmax)

    @property
    def eot_token_id(self) -> int | None:
        """What ends a text; None for a tokenizer that has nothing of the kind."""
        ends: int | None = self.tokenizer.eos_token_id
        return ends

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> Any:
        """As lm-eval's; without an end of text an answer ends where the task or its length says."""
        return None if tokens is None else super().tok_decode(tokens, skip_special_tokens)

    def _model_call(self, inps: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        check_tokens(self._loaded, inps.flatten().tolist())
        if self._kv is None:
            logits: torch.Tensor = super()._model_call(inps, *args, **kwargs)
            return logits
        with torch.no_grad():
            logits = self.model(input_ids=inps, use_cache=True, cache=quantized_cache(self.model, self._kv)).logits
        return logits

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs: Any) -> torch.Tensor:
        check_tokens(self._loaded, context.flatten().tolist())
        cache = {"cache": quantized_cache(self.model, self._kv)} if self._kv else {}
        ids: torch.Tensor = super()._model_generate(context, max_length, stop, **kwargs, **cache)
        return ids

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = True, override_bs: int | None = None) -> Any:
        """As lm-eval's, without a bar for each window."""
        return super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)


class _Asked(Exception):
    """The requests of one kind that lm-eval wants answered."""

    def __init__(self, kind: str, requests: Sequence[Any]) -> None:
        super().__init__(kind)
        self.kind, self.requests = kind, requests


class _Answers(LM):  # type: ignore[misc] # as above
    """A model that knows its answers; asked for others it raises, and is asked again once it has them."""

    def __init__(self, model: HFLM) -> None:
        super().__init__()
        self._model = model
        self.known: dict[str, tuple[list[Any], list[Any]]] = {}  # by kind: the arguments of its requests, the answers

    def loglikelihood(self, requests: Any) -> Any:
        return self._of("loglikelihood", requests)

    def loglikelihood_rolling(self, requests: Any) -> Any:
        return self._of("loglikelihood_rolling", requests)

    def generate_until(self, requests: Any) -> Any:
        return self._of("generate_until", requests)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return self._model.apply_chat_template(*args, **kwargs)

    @property
    def tokenizer_name(self) -> str:
        return str(self._model.tokenizer_name)

    def _of(self, kind: str, requests: Sequence[Any]) -> list[Any]:
        if kind not in self.known:
            raise _Asked(kind, requests)
        asked, answers = self.known[kind]
        if asked != [request.args for request in requests]:
            raise InvalidChoice(
                f"The task {requests[0].task_name} changes each time it is built: its documents are drawn at random "
                "without a seed, so no two runs could be compared."
            )
        return answers


def _evaluated(model: HFLM, tasks: Json, asking: Asking, what: str) -> Generator[Progress, None, Json]:
    """lm-eval's results; it is run again with each kind of answers that it asked for."""
    answers = _Answers(model)
    members = {task.task_name for group in tasks["groups"].values() for task in group.get_all_tasks()}
    roots = [group for group in tasks["groups"].values() if not _is_part(group, tasks["groups"].values())]
    wanted = [*roots, *(task for name, task in tasks["tasks"].items() if name not in members)]
    while True:
        try:
            with _overflowing():
                results: Json = simple_evaluate(
                    model=answers,
                    tasks=wanted,
                    limit=asking.limit or None,
                    bootstrap_iters=BOOTSTRAPS,
                    apply_chat_template=asking.prompt == "chat",
                    task_manager=TaskManager(include_defaults=False),
                )
            return results
        except _Asked as question:
            kind, requests = question.kind, question.requests
        answers.known[kind] = yield from _answered(model, kind, requests, what)


def _is_part(group: Any, groups: Any) -> bool:
    return any(part.name == group.name for other in groups for part in other.get_all_groups())


def _answered(
    model: HFLM, kind: str, requests: Sequence[Any], what: str
) -> Generator[Progress, None, tuple[list[Any], list[Any]]]:
    """What was asked and the model's answers, document by document."""
    documents = [list(of) for _, of in itertools.groupby(requests, lambda request: (request.task_name, request.doc_id))]
    answers: list[Any] = []
    for index, of_document in enumerate(documents):
        yield Progress("tasks", index, len(documents), f"{what}: document {index + 1} of {len(documents)}")
        answers += getattr(model, kind)(of_document, disable_tqdm=True)
    return [request.args for request in requests], answers


def _rows(task: str, results: Json, how: dict[str, str], backend: RanBy) -> Iterator[TaskItem | Measurement]:
    """A task's items, then its numbers with their standard errors; a group of tasks has numbers alone."""
    samples = results["samples"].get(task, [])
    method = METHOD.format(
        version=importlib.metadata.version("lm-eval"),
        task=task,
        of_task=results["versions"].get(task),
        shots=results["n-shot"].get(task, 0),
        **how,
    )
    better = results["higher_is_better"].get(task) or {}
    note = _note(samples, results["n-samples"].get(task))
    for scores in _scores(results["results"][task], samples):
        base = scores.metric.partition(",")[0]
        direction = {True: HIGHER, False: LOWER}.get(better.get(base), NEITHER)  # type: ignore[arg-type]
        chosen = _of_filter(samples, scores.metric)
        for sample, (value, weight) in zip(chosen, scores.items, strict=False):
            yield TaskItem(task, scores.metric, sample["doc_id"], _digest([sample]), value, weight, scores.unit)
        number = TaskNumber(scores.metric)
        yield Measurement(number.name, scores.value, number.unit, direction, method, backend, task, note)
        if scores.stderr is not None:
            stderr = TaskNumber(scores.metric, is_stderr=True)
            yield Measurement(stderr.name, scores.stderr, stderr.unit, NEITHER, method, backend, task)


def _scores(numbers: Json, samples: Sequence[Json]) -> Iterator[_Scores]:
    """The metrics of a task, from lm-eval's “metric,filter” keys; raises NotFinite."""
    for key, value in numbers.items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        name = metric if chosen == "none" else key
        overflows = value == math.inf and metric.endswith("perplexity")  # e to a finite power: stored as what it is
        if not math.isfinite(value) and not overflows:
            raise NotFinite(f"The model gave NaN or infinity in {name}: it overflowed. Try smaller tiles or skip=.")
        stderr = numbers.get(f"{metric}_stderr,{chosen}")
        error = float(stderr) if isinstance(stderr, int | float) and math.isfinite(stderr) else None
        raw = [sample[metric] for sample in _of_filter(samples, name) if metric in sample]
        yield _Scores(name, float(value), error, *scores_of_documents(raw, float(value)))


def _of_filter(samples: Sequence[Json], metric: str) -> list[Json]:
    """The samples that a metric is of: lm-eval has one for each document and filter."""
    chosen = metric.partition(",")[2] or "none"
    return [sample for sample in samples if sample["filter"] == chosen]


def scores_of_documents(raw: Sequence[Any], number: float) -> tuple[tuple[tuple[float, float], ...], str]:
    """Values and weights whose weighted mean is the number, or its logarithm, and their unit; nothing where none is.

    lm-eval keeps a document's score as a number, or as a log-likelihood and the words or bytes it is spread over.
    """
    try:
        pairs = [tuple(map(float, item)) if isinstance(item, tuple | list) else (float(item), 1.0) for item in raw]
    except (TypeError, ValueError):
        return (), ""
    if not pairs or any(len(pair) != 2 or pair[1] <= 0 for pair in pairs):
        return (), ""
    scales = {"": 1.0} if not isinstance(raw[0], tuple | list) else {"nats": -1.0, "bits": -1.0 / math.log(2)}
    for unit, scale in scales.items():
        items = tuple((scale * v if scale == 1.0 else scale * v / w, w) for v, w in pairs)
        mean = sum(v * w for v, w in items) / sum(w for _, w in items)
        if math.isclose(_Math.exp(mean) if unit == "nats" else mean, number, rel_tol=1e-9, abs_tol=1e-12):
            return items, unit
    return (), ""


def _note(samples: Sequence[Json], counts: Json | None) -> str:
    """How many documents, and a digest of them with their prompts and targets; nothing for a group."""
    if not samples or not counts:
        return "a group of tasks"
    return f"{counts['effective']:,} of {counts['original']:,} documents, digest {_digest(samples)}"


def _digest(samples: Sequence[Json]) -> str:
    """The same for the same documents, prompts and targets."""
    hashes = "".join(sample["doc_hash"] + sample["prompt_hash"] + sample["target_hash"] for sample in samples)
    return hashlib.sha256(hashes.encode()).hexdigest()[:DIGEST]


def _folders(folder: Path) -> list[str]:
    return [str(OWN_FOLDER), *([str(folder)] if folder.is_dir() else [])]


def _told_to_tasks(folder: Path) -> Json:
    """What tasks that make their own documents are told: whose tokens to count.

    Some of lm-eval's load the tokenizer with its own code, so that one which brings code is kept from them.
    """
    files = [folder / name for name in ("config.json", "tokenizer_config.json")]
    brings_code = any("auto_map" in json.loads(file.read_text("utf-8")) for file in files if file.is_file())
    return {} if brings_code else {"tokenizer": str(folder)}


def _known(name: str, names: Sequence[str]) -> None:
    if name in names:
        return
    near = difflib.get_close_matches(name, names, NAMES_OFFERED)
    hint = (
        f"did you mean {' or '.join(near)}?" if near else f"choose {' or '.join(OWN_TASKS)}, or see `lm-eval ls tasks`."
    )
    raise InvalidChoice(f"lm-eval {importlib.metadata.version('lm-eval')} has no task “{name}”: {hint}")


def _loaded(name: str, manager: TaskManager, folder: Path) -> Json:
    """A task, or those of a group or tag, with their data."""
    try:
        members: Json = dict(manager.load([name]))
    except CorpusError:
        raise
    except Exception as error:  # whatever lm-eval, datasets, the hub's client or a task's own code raises
        cause = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        if not isinstance(error, OSError):
            raise InvalidChoice(f"The task “{name}” cannot be set up here ({cause}).") from error
        raise CorpusError(
            f"The data of the task “{name}” cannot be downloaded ({cause}). Offline, choose "
            f"{' or '.join(OWN_TASKS)}, one whose data lie in this machine's Hugging Face cache, or one of your own "
            f"on local files in {folder}."
        ) from error
    for task in members["tasks"].values():
        if getattr(task, "UNSAFE_CODE", False):
            raise InvalidChoice(f"The task “{name}” executes model-written code, which is not allowed here.")
        if getattr(task, "MULTIMODAL", False):
            raise InvalidChoice(f"The task “{name}” uses images or audio: choose a text task.")
    return members


class _Math:
    """The module math, but for an exponential too large for a float: infinity, and no error."""

    def __getattr__(self, name: str) -> Any:
        return getattr(math, name)

    @staticmethod
    def exp(x: float) -> float:
        return math.exp(x) if x < 700 else math.inf


@contextmanager
def _overflowing() -> Iterator[None]:
    """Within, a perplexity of lm-eval's that overflows is infinite; bits per byte, from the same sums, stay."""
    metrics.math = _Math()
    try:
        yield
    finally:
        metrics.math = math


@contextmanager
def _left_untied(model: Any) -> Iterator[None]:
    """lm-eval's wrapper ties head and embedding again, which would undo the cast of either."""
    model.tie_weights = lambda: None
    try:
        yield
    finally:
        del model.tie_weights
