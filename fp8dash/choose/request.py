"""One run to make: which recipe on which model, and how it is measured; checked, and with a JSON form. No torch."""

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fp8dash.choose.catalog import DEMO, PYDOCS
from fp8dash.choose.checkpoint import refuse_no_checkpoint
from fp8dash.choose.hardware import Device
from fp8dash.choose.mixed import GRANULARITIES, HALF, parse_budget
from fp8dash.choose.needles import check_needles
from fp8dash.choose.presets import recipe_from
from fp8dash.choose.recipe import BASELINE_TEXT, Recipe
from fp8dash.choose.windows import Reading
from fp8dash.errors import InvalidChoice

BACKENDS = {
    "auto": "native where a kernel is legal on the device, emulated elsewhere; each layer says which",
    "emulated": "cast, decode, multiply in the model's precision: exact codes, any device, every recipe",
    "native": "only kernels that multiply the codes; a layer without one fails the run",
}


DEFAULT_MEASURES = ("gemm", "perplexity", "needle")  # what may be left out of a run


MEASURES = (  # and what may be added
    *DEFAULT_MEASURES, "gradients", "sensitivity", "profile", "kv", "decode", "tasks", "export",
)  # fmt: skip


GPU_WINDOW = 2048  # tokens of a window where nothing else is said and a GPU is at work


TASK_PROMPTS = {"plain": "the task's text as it is", "chat": "in the model's chat template"}


TASK_PRECISIONS = {
    "model": "log-probabilities in the model's precision, lm-eval's default: bfloat16 rounds a document's sum by 0.2 %",
    "float32": "log-probabilities in float32: small differences survive",
}


@dataclass(frozen=True, slots=True)
class Request:
    """One run to make: one recipe on one model, and how it is measured."""

    model: str = DEMO
    recipe: str = BASELINE_TEXT
    corpus: str = PYDOCS
    windows: int = 8
    window_length: int = 512
    measures: tuple[str, ...] = DEFAULT_MEASURES
    gemm_m: tuple[int, ...] = (1, 16, 128)
    needle_lengths: tuple[int, ...] = (256, 1024)
    needle_depths: tuple[int, ...] = (0, 50, 100)  # per cent
    haystack: str = "noise"
    needle_kind: str = "single_1"
    needle_repeats: int = 1  # of each length and depth, each with a number and a key of its own
    needle_chat: str = "auto"
    calibration: str = ""  # the text that static and delayed scales are made from; empty: the corpus's end
    calibration_windows: int = 4
    tasks: tuple[str, ...] = ()  # lm-eval's names
    task_limit: int = 0  # documents of each task, from its start; 0: all
    task_prompt: str = "plain"
    task_precision: str = "model"
    backend: str = "auto"
    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:1"
    seed: int = 0
    sensitivity: str = "kind"  # what is cast at once: of GRANULARITIES
    sensitivity_budget: str = HALF  # of the mixed recipe that is suggested
    decode_batches: tuple[int, ...] = (1, 8)
    convention: str = "disjoint"  # of perplexity's windows
    stride: int = 0  # tokens; only of strided windows
    bos: str = "none"
    until: float = 0.0  # nats: stop once Δ ln PPL's 95 % interval is no wider than this either way; 0 reads all windows

    @property
    def reading(self) -> Reading:
        """How the corpus is cut into windows."""
        return Reading(self.convention, self.stride, self.bos)

    def checked(self) -> "Request":
        """This request with its recipe in canonical form; raises InvalidChoice with what to change.

        Where the recipe casts the KV cache, perplexity brings the measure kv with it.
        """
        if not self.model.strip():
            raise InvalidChoice("No model is named: choose “demo”, a local folder or a Hub id.")
        if not self.corpus.strip():
            raise InvalidChoice("No corpus is named: choose “pydocs” or the path of a UTF-8 text file.")
        if self.device not in ("auto", "cpu") and not self.device.startswith("cuda"):
            raise InvalidChoice(f"“{self.device}” is not a device: choose auto, cpu, cuda or cuda:1.")
        self._check_choices()
        self._check_ranges()
        tasks, recipe = self._checked_tasks(), recipe_from(self.recipe)
        if parse_budget(self.sensitivity_budget).of == "bits" and recipe.casts_linears and not recipe.casts_weights:
            raise InvalidChoice(f"“{recipe.text}” casts no weights, so none costs fewer bits: give the budget as kld=.")
        if "export" in self.measures and recipe.casts_linears:
            refuse_no_checkpoint(recipe)
        return dataclasses.replace(self, recipe=recipe.text, tasks=tasks, measures=self._implied(recipe, tasks))

    def _check_choices(self) -> None:
        _one_of("backend", self.backend, tuple(BACKENDS))
        check_needles(self.needle_kind, self.haystack, self.needle_chat, self.needle_repeats)
        _one_of("task prompt", self.task_prompt, tuple(TASK_PROMPTS))
        _one_of("task precision", self.task_precision, tuple(TASK_PRECISIONS))
        for measure in self.measures:
            _one_of("measure", measure, MEASURES)
        _one_of("granularity of the sensitivity", self.sensitivity, tuple(GRANULARITIES))

    def _check_ranges(self) -> None:
        _within("windows", (self.windows,), 1, 100_000)
        _within("window length", (self.window_length,), 16, 1_048_576)
        _within("calibration windows", (self.calibration_windows,), 1, 4_096)
        self.reading.checked(self.window_length)
        if not 0.0 <= self.until < math.inf:
            raise InvalidChoice(f"A half-width of {self.until} nats is out of range: choose 0 or more, such as 0.002.")
        _within("GEMM M", self.gemm_m, 1, 65_536)
        _within("needle length", self.needle_lengths, 128, 1_048_576)
        _within("needle depth", self.needle_depths, 0, 100)
        _within("decode batch", self.decode_batches, 1, 1024)
        _within("seed", (self.seed,), 0, 2**31 - 1)
        _within("task limit", (self.task_limit,), 0, 10_000_000)

    def _checked_tasks(self) -> tuple[str, ...]:
        """The tasks' names, each once."""
        tasks = tuple(dict.fromkeys(name.strip() for name in self.tasks if name.strip()))
        if "tasks" in self.measures and not tasks:
            raise InvalidChoice("No task is named: name one of lm-eval's, such as fp8dash_pydocs, or leave tasks out.")
        for name in tasks:
            if not re.fullmatch(r"[\w.+()-]+", name):
                raise InvalidChoice(
                    f"“{name}” is not the name of a task: your own belong into the tasks folder, by name."
                )
        return tasks

    def _implied(self, recipe: Recipe, tasks: tuple[str, ...]) -> tuple[str, ...]:
        """What is measured, with what the recipe and the tasks bring along, and without what they leave nothing of."""
        brought = []
        if recipe.kv is not None and "perplexity" in self.measures:
            brought.append("kv")  # else no number would read the cache
        if tasks:
            brought.append("tasks")
        nothing = () if recipe.casts_linears else ("export",)  # the model's own files serve it already
        return tuple(name for name in dict.fromkeys((*self.measures, *brought)) if name not in nothing)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Request":
        """A request from its JSON form; unknown keys raise InvalidChoice."""
        names = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - names):
            raise InvalidChoice(f"A request has no field {', '.join(unknown)}: it may come from a newer version.")
        plain: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return cls(**plain)


def usual_request(devices: Sequence[Device]) -> Request:
    """The defaults where these devices are at work: long windows where one is a GPU, emulation where all are CPUs.

    >>> usual_request([Device("cuda", "NVIDIA H200")]).window_length, usual_request([Device("cpu", "CPU")]).backend
    (2048, 'emulated')
    """
    has_gpu = any(device.kind != "cpu" for device in devices)
    if has_gpu:
        return Request(window_length=GPU_WINDOW)
    return Request(backend="emulated") if devices else Request()


def _one_of(what: str, name: str, choices: tuple[str, ...]) -> None:
    if name not in choices:
        raise InvalidChoice(f"“{name}” is not a {what}: choose one of {', '.join(choices)}.")


def _within(what: str, values: tuple[int, ...], low: int, high: int) -> None:
    if not values:
        raise InvalidChoice(f"No {what} is given: name at least one.")
    for value in values:
        if not low <= value <= high:
            raise InvalidChoice(f"A {what} of {value} is out of range: choose {low:,} to {high:,}.")
