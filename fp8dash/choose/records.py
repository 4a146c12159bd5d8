"""All that enters and leaves a run, as frozen plain values with a JSON form. No torch, no database.

A stage yields Progress while it works and Rows as it measures; a StageResult is a finished stage's rows.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
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
STAGES = (
    "load", "baseline", "gradients", "sensitivity", "profile", "quantize", "gemm", "perplexity", "kv", "needle",
    "decode", "tasks", "export",
)  # fmt: skip
TASK_PROMPTS = {"plain": "the task's text as it is", "chat": "in the model's chat template"}
TASK_PRECISIONS = {
    "model": "log-probabilities in the model's precision, lm-eval's default: bfloat16 rounds a document's sum by 0.2 %",
    "float32": "log-probabilities in float32: small differences survive",
}
LOWER, HIGHER, NEITHER = "lower", "higher", ""  # which direction is better


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


@dataclass(frozen=True, slots=True)
class Measurement:
    """One number with its provenance. A value of None is missing, and `note` says why."""

    name: str
    value: float | None
    unit: str
    better: str  # LOWER, HIGHER or NEITHER
    method: str
    backend: str
    label: str = ""  # what it is of, where a name stands for several ("M=16")
    note: str = ""


@dataclass(frozen=True, slots=True)
class Window:
    """One window's scores: what a paired comparison needs. Means over its scored tokens, in nats."""

    index: int
    tokens: int
    nll: float
    baseline_nll: float
    kld: float
    top1: float


@dataclass(frozen=True, slots=True)
class Layer:
    """One weight: what was done to it, why, and the error that it cost."""

    name: str
    rows: int
    cols: int
    cast: str  # the weight cast's text; empty where the weight was kept
    backend: str  # "native", "emulated" or "kept"
    reason: str
    bits_per_weight: float
    sqnr_db: float | None = None  # None: no error to divide by
    relative_error: float | None = None  # ‖W - Ŵ‖ / ‖W‖
    flushed: float | None = None  # share of non-zero weights that became zero
    clipped: float | None = None  # share of weights beyond the largest code


@dataclass(frozen=True, slots=True)
class GemmPoint:
    """Times of one Linear shape at one M, in microseconds, beside the same product in the model's precision.

    Times are medians; `iqr` is the distance of the quartiles over the median. Cold: caches were overwritten before.
    """

    m: int
    n: int
    k: int
    count: int  # Linears of this shape in the model
    baseline_us: float
    cast_us: float | None  # casting the activations
    matmul_us: float | None  # multiplying the codes; None where no native kernel is legal
    kernel: str
    reason: str
    baseline_iqr: float | None = None
    cast_iqr: float | None = None
    matmul_iqr: float | None = None
    baseline_cold_us: float | None = None
    cast_cold_us: float | None = None
    matmul_cold_us: float | None = None
    matmul_bytes: float | None = None  # codes and scales read, result written

    @property
    def baseline_bytes(self) -> int:
        """What the product in 16 bits reads and writes."""
        return 2 * (self.m * self.k + self.n * self.k + self.m * self.n)

    def tflops(self, us: float | None) -> float | None:
        """10¹² multiplications and additions a second of a product that takes so long.

        >>> GemmPoint(1000, 1000, 1000, 1, 1e3, None, None, "", "").tflops(1e3)
        2.0
        """
        return 2 * self.m * self.n * self.k / us / 1e6 if us else None


@dataclass(frozen=True, slots=True)
class NeedleCell:
    """One needle at one length and depth: the share of its values that came back, and how likely they were."""

    length: int
    depth: int
    score: float
    prompt_tokens: int
    expected: str
    answer: str
    kind: str = "single_1"
    repeat: int = 0
    logprob: float | None = None  # mean over the values' tokens, nats; None where they cannot be told from the prompt's
    baseline_score: float | None = None  # the unquantized model's on the same prompt
    baseline_logprob: float | None = None
    prompt: str = ""  # hash of its tokens: cells of two runs are paired where it is the same

    @property
    def key(self) -> tuple[str, int, int, int, str, str]:
        """What makes two runs' cells the same question."""
        return self.kind, self.length, self.depth, self.repeat, self.expected, self.prompt


@dataclass(frozen=True, slots=True)
class Artefact:
    """Files that a run left on its worker."""

    kind: str  # "checkpoint"
    path: str
    format: str
    size_bytes: int
    sha256: str  # over all files' names and contents


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One document's score in one metric of a task: what a comparison of two runs, document by document, needs.

    The weighted mean of the values is the metric, or its logarithm where `unit` is nats.
    """

    task: str
    metric: str  # as measured: "acc", or "exact_match,strict-match" after one of several filters
    index: int
    digest: str  # of document, prompt and target
    value: float
    weight: float  # 1, or the words or bytes that a log-likelihood is spread over
    unit: str  # of value where it is not the metric's own: "nats"


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What casting some Linears costs: alone, and what the whole recipe costs without them. Mean KLD in nats."""

    group: str
    pattern: str  # as skip= takes it
    linears: int
    parameters: int
    bits_per_weight: float  # cast, scales included
    alone_kld: float
    all_but_kld: float
    kept: bool  # in the mixed recipe that is suggested


WEIGHT, ACTIVATION = "weight", "activation"  # the operands of a Linear
BINADES = range(-40, 17)  # of a histogram: the first has all smaller magnitudes too, the last all larger ones
OUTLIER = 6.0  # times the median channel's amax: beyond it a channel is called an outlier


@dataclass(frozen=True, slots=True)
class TensorProfile:
    """How wide the numbers of a Linear's weight, or of its inputs over a few windows, are before anything is cast.

    A channel is a column: one input feature.
    """

    name: str
    kind: str  # WEIGHT or ACTIVATION
    rows: int
    cols: int
    amax: float
    rms: float
    zeros: int
    outlier_channels: int  # whose amax is over OUTLIER times the median channel's
    histogram: tuple[int, ...]  # elements that are not zero, by binade of BINADES: 2^b to 2^(b + 1)
    outliers: tuple[tuple[int, float, float], ...]  # the largest channels: index, amax, amax over the median channel's

    def __post_init__(self) -> None:
        """Takes lists, as JSON has them."""
        object.__setattr__(self, "histogram", tuple(self.histogram))
        object.__setattr__(self, "outliers", tuple((int(i), a, ratio) for i, a, ratio in self.outliers))

    @property
    def spread(self) -> float | None:
        """Amax over RMS; None for zeros."""
        return self.amax / self.rms if self.rms else None

    def share_below(self, x: float) -> tuple[float, float]:
        """The least and the most that the share of the non-zero elements below a magnitude x can be.

        Both are the same where x is a power of two within BINADES.
        """
        binade = min(max(math.frexp(x)[1] - 1, BINADES[0]), BINADES[-1])
        place = BINADES.index(binade)
        surely = sum(self.histogram[:place])
        perhaps = 0 if x == 2.0**binade and place else self.histogram[place]
        total = sum(self.histogram) or 1
        return surely / total, (surely + perhaps) / total


@dataclass(frozen=True, slots=True)
class LadderPoint:
    """What one cast does to one tensor. Bulk: without the outlier channels in the sum, though they share scales."""

    tensor: str
    kind: str  # WEIGHT or ACTIVATION
    cast: str
    sqnr_db: float | None  # None: no error to divide by
    bulk_sqnr_db: float | None
    flushed: float  # share of the non-zero elements that became zero
    clipped: float  # share of the elements beyond the largest code
    bits: float  # of an element, its share of the scales included


def usual_request(devices: Sequence[Device]) -> Request:
    """The defaults where these devices are at work: long windows where one is a GPU, emulation where all are CPUs.

    >>> usual_request([Device("cuda", "NVIDIA H200")]).window_length, usual_request([Device("cpu", "CPU")]).backend
    (2048, 'emulated')
    """
    has_gpu = any(device.kind != "cpu" for device in devices)
    if has_gpu:
        return Request(window_length=GPU_WINDOW)
    return Request(backend="emulated") if devices else Request()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a stage is: done of total, and what it is doing."""

    stage: str
    done: int
    total: int
    message: str = ""

    @property
    def share(self) -> float:
        """0 to 1."""
        return min(1.0, self.done / self.total) if self.total else 0.0


Row = (
    Measurement | Window | Layer | GemmPoint | NeedleCell | TaskItem | Sensitivity | TensorProfile | LadderPoint
    | Artefact
)  # fmt: skip
ROWS: dict[str, type[Row]] = {
    kind.__name__: kind for kind in (
        Measurement, Window, Layer, GemmPoint, NeedleCell, TaskItem, Sensitivity, TensorProfile, LadderPoint, Artefact,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StageResult:
    """A finished stage: its rows, how long it took, and facts about the run that it found out."""

    stage: str
    seconds: float
    rows: tuple[Row, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)  # model_hash, device, backend, versions ...

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; NaN and infinity as strings, since JSON has neither."""
        rows = [[type(row).__name__, _pack(dataclasses.asdict(row))] for row in self.rows]
        return {"stage": self.stage, "seconds": self.seconds, "rows": rows, "facts": self.facts}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "StageResult":
        """A result from its JSON form."""
        rows = tuple(ROWS[kind](**_unpack(row)) for kind, row in values["rows"])
        return cls(values["stage"], values["seconds"], rows, values["facts"])


def _pack(row: dict[str, Any]) -> dict[str, Any]:
    return {k: {"special": repr(v)} if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _unpack(row: dict[str, Any]) -> dict[str, Any]:
    return {k: float(v["special"]) if isinstance(v, dict) else v for k, v in row.items()}


def _one_of(what: str, name: str, choices: tuple[str, ...]) -> None:
    if name not in choices:
        raise InvalidChoice(f"“{name}” is not a {what}: choose one of {', '.join(choices)}.")


def _within(what: str, values: tuple[int, ...], low: int, high: int) -> None:
    if not values:
        raise InvalidChoice(f"No {what} is given: name at least one.")
    for value in values:
        if not low <= value <= high:
            raise InvalidChoice(f"A {what} of {value} is out of range: choose {low:,} to {high:,}.")
