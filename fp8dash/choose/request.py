"""One run to make: which recipe on which model, and how it is measured; checked, and with a JSON form. No torch.

Each measure has a value of its own for what can be set about it. Every field is declared with its limits; LEAVES lists
them by flat names, which JSON, the page's address and the command line share.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fp8dash.choose.catalog import CORPORA, DEMO, MODELS, PYDOCS
from fp8dash.choose.hardware import Device
from fp8dash.choose.limits import LIMITS, Limits, choice, choices, line, lines, real, shown, whole, wholes
from fp8dash.choose.mixed import GRANULARITIES, HALF, parse_budget
from fp8dash.choose.models.checkpoint import refuse_no_checkpoint
from fp8dash.choose.models.fit import refuse_misfit
from fp8dash.choose.models.hub_id import hub_id
from fp8dash.choose.needles import CHATS, HAYSTACKS, KINDS, MOST_REPEATS, check_needles
from fp8dash.choose.presets import recipe_from
from fp8dash.choose.recipe import BASELINE_TEXT, Recipe
from fp8dash.choose.windows import Reading
from fp8dash.errors import InvalidChoice

Backend = Literal["auto", "emulated", "native"]
BACKENDS: dict[Backend, str] = {
    "auto": "native where a kernel is legal on the device, emulated elsewhere; each layer says which",
    "emulated": "cast, decode, multiply in the model's precision: exact codes, any device, every recipe",
    "native": "only kernels that multiply the codes; a layer without one fails the run",
}

Loading = Literal["auto", "whole", "blocks"]
LOADINGS: dict[Loading, str] = {
    "auto": "whole where it fits the memory that is free, else block by block",
    "whole": "all of it in memory",
    "blocks": "one block at a time, which measures perplexity and KLD alone: two blocks and the head in memory",
}

Measure = Literal[
    "gemm", "perplexity", "needle", "gradients", "sensitivity", "profile", "kv", "experts", "decode", "tasks", "export"
]
MEASURES: tuple[Measure, ...] = get_args(Measure)
DEFAULT_MEASURES: tuple[Measure, ...] = ("gemm", "perplexity", "needle")

OF_CASTING = frozenset({"sensitivity", "export"})  # ask what a choice of casts would do
OF_BASELINES = frozenset({"kv", "experts", "profile", "gradients"})  # read or compare with the unquantized model

GPU_WINDOW = 2048  # tokens of a window where nothing else is said and a GPU is at work
MOST_TOKENS = 100_000_000  # of all windows together
MOST_NEEDLES = 10_000  # of all lengths, depths and repeats
LONGEST_RECIPE = 65_536  # characters: a mixed recipe may name every Linear

TASK_PROMPTS = {"plain": "the task's text as it is", "chat": "in the model's chat template"}
TASK_PRECISIONS = {
    "model": "log-probabilities in the model's precision, lm-eval's default: bfloat16 rounds a document's sum by 0.2 %",
    "float32": "log-probabilities in float32: small differences survive",
}

DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?", re.ASCII)
TASK = re.compile(r"[\w.+()-]+")


@dataclass(frozen=True, slots=True)
class WindowOptions:
    """How much of the corpus is read."""

    count: int = whole(8, 1, 100_000, what="number of windows", flat="windows")
    length: int = whole(
        512,
        16,
        1_048_576,
        what="window length",
        flat="window_length",
        help=f"tokens (default: 512, or {GPU_WINDOW} where a worker with a GPU is alive)",
    )
    until: float = real(
        0.0,
        0.0,
        what="half-width in nats",
        help="stop once the 95% interval of Δ ln PPL is within ± this many nats; 0 reads all windows",
    )

    @property
    def tokens(self) -> int:
        """Of all windows."""
        return self.count * self.length


@dataclass(frozen=True, slots=True)
class GemmOptions:
    """Which products are timed."""

    m: tuple[int, ...] = wholes((1, 16, 128), 1, 65_536, most=32, what="GEMM M", flat="gemm_m", help="rows")


@dataclass(frozen=True, slots=True)
class NeedleOptions:
    """What is hidden, where, and how it is asked for."""

    lengths: tuple[int, ...] = wholes(
        (256, 1024), 128, 1_048_576, most=32, what="needle length", flat="needle_lengths", help="tokens"
    )
    depths: tuple[int, ...] = wholes(
        (0, 50, 100), 0, 100, most=101, what="needle depth", flat="needle_depths", help="per cent"
    )
    haystack: str = choice("noise", HAYSTACKS, what="haystack", help="default: RULER's for the kind of needle")
    kind: str = choice("single_1", KINDS, what="kind of needle", flat="needle_kind", help="RULER's, without niah_")
    repeats: int = whole(  # each with a key and a value of its own
        1, 1, MOST_REPEATS, what="number of repeats", flat="needle_repeats", help="of each length and depth"
    )
    chat: str = choice("auto", CHATS, what="chat setting", flat="needle_chat", help="frame by the chat template")

    @property
    def count(self) -> int:
        """How many needles are hidden."""
        return len(self.lengths) * len(self.depths) * self.repeats


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """The text that static and delayed scales are made from; without one, the corpus's end."""

    corpus: str = line(
        "",
        what="calibration text",
        flat="calibration",
        help="text from which static and delayed scales are made (default: end of the corpus, never the measured part)",
    )
    windows: int = whole(4, 1, 4_096, what="number of calibration windows", flat="calibration_windows")


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """Which of lm-eval's tasks, on how many of their documents, and how."""

    names: tuple[str, ...] = lines((), most=100, longest=200, what="task", flat="tasks", help="lm-eval's tasks")
    limit: int = whole(0, 0, 10_000_000, what="task limit", flat="task_limit", help="documents per task; 0: all")
    prompt: str = choice("plain", TASK_PROMPTS, what="task prompt", flat="task_prompt")
    precision: str = choice(
        "model", TASK_PRECISIONS, what="task precision", flat="task_precision", help="of log-probabilities"
    )


@dataclass(frozen=True, slots=True)
class SensitivityOptions:
    """What is cast alone, and what the mixed recipe that is suggested may cost."""

    granularity: str = choice(
        "kind", GRANULARITIES, what="granularity of the sensitivity", flat="sensitivity", help="what is cast at once"
    )
    budget: str = line(
        HALF,
        what="budget of the mixed recipe",
        flat="sensitivity_budget",
        longest=40,
        help="of the suggested mixed recipe: kld=0.01 (nats), kld=50% (of the whole recipe's), or bits=9.5",
    )


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """How many prompts are decoded at once."""

    batches: tuple[int, ...] = wholes(
        (1, 8), 1, 1_024, most=32, what="decode batch", flat="decode_batches", help="concurrent prompts"
    )


@dataclass(frozen=True, slots=True)
class Request:
    """One run to make: one recipe on one model, and how it is measured."""

    model: str = line(DEMO, what="model", help="“demo”, a local folder or a Hub id")
    recipe: str = line(BASELINE_TEXT, what="recipe", longest=LONGEST_RECIPE)
    corpus: str = line(PYDOCS, what="corpus", help="“pydocs” or a UTF-8 text file")
    measures: tuple[Measure, ...] = choices(DEFAULT_MEASURES, MEASURES, what="measure", help=", ".join(MEASURES))
    backend: Backend = choice("auto", BACKENDS, what="backend")
    device: str = line("auto", what="device", longest=20, help="auto, cpu, cuda or cuda:1")
    loading: Loading = choice("auto", LOADINGS, what="way of loading", help="the model")
    seed: int = whole(0, 0, 2**31 - 1, what="seed")
    windows: WindowOptions = WindowOptions()
    reading: Reading = Reading()
    gemm: GemmOptions = GemmOptions()
    needles: NeedleOptions = NeedleOptions()
    calibration: CalibrationOptions = CalibrationOptions()
    tasks: TaskOptions = TaskOptions()
    sensitivity: SensitivityOptions = SensitivityOptions()
    decode: DecodeOptions = DecodeOptions()

    def __post_init__(self) -> None:
        """Raises InvalidChoice where a plain value is given for a measure's options."""
        for own in dataclasses.fields(self):
            if dataclasses.is_dataclass(own.default) and type(getattr(self, own.name)) is not type(own.default):
                raise InvalidChoice(f"{own.name} is a {type(own.default).__name__}: name plain values to Request.of.")

    @classmethod
    def of(cls, **flat: Any) -> "Request":
        """The usual request but for some fields, by their flat names; raises InvalidChoice for one that there is not.

        >>> Request.of(windows=4, needle_kind="multivalue").needles.kind
        'multivalue'
        """
        return cls().but(**flat)

    def but(self, **flat: Any) -> "Request":
        """This request with some fields changed, by their flat names; all others stay. Raises InvalidChoice."""
        if unknown := sorted(set(flat) - set(LEAVES)):
            raise InvalidChoice(f"A request has no field {', '.join(unknown)}: it may come from a newer version.")
        changes: dict[str, Any] = {}
        for name, value in flat.items():
            leaf = LEAVES[name]
            if leaf.group:
                group = changes.get(leaf.group, getattr(self, leaf.group))
                changes[leaf.group] = dataclasses.replace(group, **{leaf.field: value})
            else:
                changes[leaf.field] = value
        return dataclasses.replace(self, **changes)

    @property
    def flat(self) -> dict[str, Any]:
        """Every field's value by its flat name."""
        return {name: leaf.of(self) for name, leaf in LEAVES.items()}

    def checked(self) -> "Request":
        """This request with its recipe in canonical form; raises InvalidChoice with what to change.

        Where the recipe casts the KV cache, perplexity brings the measure kv with it.
        """
        if isinstance(self.tasks.names, tuple):
            names = (name.strip() if isinstance(name, str) else name for name in self.tasks.names)
            self = self.but(tasks=tuple(name for name in names if name != ""))
        request = self.but(**{name: leaf.limits.checked(leaf.of(self)) for name, leaf in LEAVES.items()})
        request._check_places()
        request._check_amounts()
        recipe = recipe_from(request.recipe)
        request._check_recipe(recipe)
        return dataclasses.replace(request, recipe=recipe.text, measures=request._measures(recipe))

    def _check_places(self) -> None:
        """Where model, texts and device are: nothing that depends on the folder that somebody happens to be in."""
        if not self.model.strip():
            raise InvalidChoice("No model is given: choose “demo”, a local folder or a Hub id.")
        if not (self.model in MODELS or is_whole_path(self.model) or hub_id(self.model)):
            raise InvalidChoice(
                f"“{shown(self.model)}” is not a model: choose “demo”, the whole path of a folder or a GGUF file, "
                "from /, or a Hub id like org/name, org/name@revision or org/name:file.gguf."
            )
        if not self.corpus.strip():
            raise InvalidChoice("No corpus is given: choose “pydocs” or the path of a UTF-8 text file.")
        for what, text in (("corpus", self.corpus), ("calibration text", self.calibration.corpus)):
            if text and not (text in CORPORA or is_whole_path(text)):
                raise InvalidChoice(
                    f"“{shown(text)}” is not a {what}: choose “pydocs” or the whole path of a UTF-8 text file, from /."
                )
        if not DEVICE.fullmatch(self.device):
            raise InvalidChoice(f"“{shown(self.device)}” is not a device: choose auto, cpu, cuda or cuda:1.")

    def _check_amounts(self) -> None:
        """What only several fields together say."""
        if self.windows.tokens > MOST_TOKENS:
            raise InvalidChoice(
                f"{self.windows.count:,} windows of {self.windows.length:,} tokens are {self.windows.tokens:,} "
                f"tokens: at most {MOST_TOKENS:,} are allowed."
            )
        self.reading.checked(self.windows.length)
        check_needles(self.needles.kind, self.needles.haystack)
        if self.needles.count > MOST_NEEDLES:
            raise InvalidChoice(
                f"{self.needles.count:,} needles are too many: choose lengths, depths and repeats whose product is at "
                f"most {MOST_NEEDLES:,}."
            )

    def _check_recipe(self, recipe: Recipe) -> None:
        """What the recipe and its measures ask of each other."""
        if "tasks" in self.measures and not self.tasks.names:
            raise InvalidChoice("No task is given: give one of lm-eval's, such as fp8dash_pydocs, or leave tasks out.")
        for name in self.tasks.names:
            if not TASK.fullmatch(name):
                raise InvalidChoice(
                    f"“{name}” is not a task name: put your own tasks into the tasks folder and give their names."
                )
        budget = parse_budget(self.sensitivity.budget)
        if budget.of == "bits" and recipe.casts_linears and not recipe.casts_weights:
            raise InvalidChoice(
                f"“{recipe.text}” casts no weights, so no recipe has fewer bits: give the budget as kld=."
            )
        exported = "export" in self.measures
        if recipe.stored:
            self._check_stored(recipe)
        elif exported and recipe.casts_linears:
            refuse_no_checkpoint(recipe)
        refuse_misfit(recipe, self.model, exported=exported)

    def _check_stored(self, recipe: Recipe) -> None:
        """What can be asked of a checkpoint that is measured as it is stored, and of one without a baseline."""
        if recipe != Recipe(stored=recipe.stored):
            raise InvalidChoice(
                f"“{recipe.text}” says more than a checkpoint: its own configuration says how it is cast. Give "
                f"“{Recipe(stored=recipe.stored).text}” alone."
            )
        if not (is_whole_path(recipe.stored) or hub_id(recipe.stored)):
            raise InvalidChoice(
                f"“{shown(recipe.stored)}” is not a checkpoint: give stored= the whole path of its folder or GGUF "
                "file, from /, or a Hub id like org/name, org/name@revision or org/name:file.gguf."
            )
        if self.loading == "blocks":
            raise InvalidChoice("A stored checkpoint is decoded as a whole: choose the way of loading auto.")
        if self.backend == "native":
            raise InvalidChoice("The backend native is refused: stored codes are decoded (fp8dash); choose auto.")
        refused = OF_CASTING | (OF_BASELINES if recipe.stored == self.model else frozenset())
        if odd := [name for name in self.measures if name in refused]:
            why = "a checkpoint is cast already" if odd[0] in OF_CASTING else "there is no baseline to measure against"
            raise InvalidChoice(f"The measure {odd[0]} is refused with stored=: {why}. Leave {', '.join(odd)} out.")

    def _measures(self, recipe: Recipe) -> tuple[Measure, ...]:
        """What is measured, with what the recipe and the tasks bring along, and without what they leave nothing of."""
        brought: list[Measure] = []
        if recipe.kv is not None and "perplexity" in self.measures:
            brought.append("kv")  # else no number would read the cache
        if self.tasks.names:
            brought.append("tasks")
        nothing = () if recipe.casts_linears else ("export",)  # the model's own files serve it already
        measures = tuple(name for name in dict.fromkeys((*self.measures, *brought)) if name not in nothing)
        if not measures:
            raise InvalidChoice(f"No measure is chosen: choose at least one of {', '.join(MEASURES)}.")
        return measures

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values by flat names."""
        return self.flat

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Request":
        """A request from its JSON form, unchecked; unknown keys raise InvalidChoice.

        A row from before a field existed meant what was done then, whatever the default is today.
        """
        unsaid = {name: leaf.limits.unsaid for name, leaf in LEAVES.items() if leaf.limits.unsaid is not None}
        plain = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return cls.of(**(unsaid | plain))

    def unusual(self) -> dict[str, Any]:
        """What identifies the request: all that differs from what rows without a field mean. Stable for old rows."""
        return {name: value for name, value in self.flat.items() if value != LEAVES[name].left_out}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One plain value of a request: where it is, its default and its limits."""

    group: str  # the request's field that holds it; empty for its own
    field: str
    default: Any
    limits: Limits

    @property
    def left_out(self) -> Any:
        """What a row that does not name the field means."""
        return self.default if self.limits.unsaid is None else self.limits.unsaid

    def of(self, request: Request) -> Any:
        """Its value in a request."""
        return getattr(getattr(request, self.group) if self.group else request, self.field)


def _leaves() -> dict[str, Leaf]:
    leaves = {}
    for own in dataclasses.fields(Request):
        inner = dataclasses.fields(own.default) if dataclasses.is_dataclass(own.default) else ()
        for group, field in ((own.name, each) for each in inner) if inner else (("", own),):
            limits = field.metadata[LIMITS]
            leaves[limits.flat or field.name] = Leaf(group, field.name, field.default, limits)
    return leaves


LEAVES = _leaves()


def is_whole_path(text: str) -> bool:
    """True for a path that means the same whatever folder one is in.

    >>> is_whole_path("/models/tiny"), is_whole_path("~/tiny"), is_whole_path("./tiny")
    (True, True, False)
    """
    return text.startswith(("/", "~"))


def usual_request(devices: Sequence[Device]) -> Request:
    """The defaults where these devices are at work: long windows where one is a GPU, emulation where all are CPUs.

    >>> usual_request([Device("cuda", "NVIDIA H200")]).windows.length, usual_request([Device("cpu", "CPU")]).backend
    (2048, 'emulated')
    """
    if any(device.kind != "cpu" for device in devices):
        return Request.of(window_length=GPU_WINDOW)
    return Request(backend="emulated") if devices else Request()
