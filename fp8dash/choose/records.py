"""All that enters and leaves a run, as frozen plain values with a JSON form. No torch, no database.

A stage yields Progress while it works and Rows as it measures; a StageResult is a finished stage's rows.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

STAGES = (
    "load", "baseline", "gradients", "sensitivity", "profile", "quantize", "gemm", "perplexity", "kv", "needle",
    "experts", "decode", "tasks", "export",
)  # fmt: skip
PREPARING = ("load", "baseline", "quantize")  # stages that measure nothing that is asked for by name: always walked
Better = Literal["lower", "higher", ""]  # which direction of a number is better, if one is
LOWER: Better = "lower"
HIGHER: Better = "higher"
NEITHER: Better = ""
RanBy = Literal["baseline", "native", "emulated", "simulated", "mixed", "kept", "arithmetic"]
BASELINE: RanBy = "baseline"  # the unquantized model
NATIVE: RanBy = "native"  # a kernel that multiplies codes
EMULATED: RanBy = "emulated"  # decoded operands in the model's precision
SIMULATED: RanBy = "simulated"  # products added as a tensor core adds them
MIXED: RanBy = "mixed"  # some of the layers by one, some by another
KEPT: RanBy = "kept"  # a layer that no cast was meant for
ARITHMETIC: RanBy = "arithmetic"  # counted; nothing was run


@dataclass(frozen=True, slots=True)
class Measurement:
    """One number with its provenance. A value of None is missing, and `note` says why."""

    name: str
    value: float | None
    unit: str
    better: Better
    method: str
    backend: RanBy
    label: str = ""  # what it is of, where a name stands for several ("M=16")
    note: str = ""
    batch: int | None = None  # of decoding, as are the next three: requests at once
    prompt_tokens: int | None = None  # of each request
    output_tokens: int | None = None
    way: str = ""  # how steps are run: eager or a CUDA graph, and on which cache


@dataclass(frozen=True, slots=True)
class Window:
    """One window's scores: what a paired comparison needs. Means over its scored tokens, in nats."""

    index: int
    tokens: int
    nll: float
    baseline_nll: float
    kld: float
    top1: float


ATTENTION, MLP, EXPERTS, ROUTER, HEAD, EMBEDDING, NORM, CONVOLUTION, OTHER = LAYER_GROUPS = (
    "attention", "mlp", "experts", "router", "head", "embedding", "norm", "convolution", "other",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layer:
    """One parameter of the model: what was done to it, why, and the error that it cost.

    A model's layers are its parameters, each once. More than two dimensions are flattened into rows; a vector has one.
    """

    name: str  # of the module for its `weight`, else of the parameter
    rows: int
    cols: int
    cast: str  # the weight cast's text; empty where the weight was kept
    backend: RanBy
    reason: str
    bits_per_weight: float
    sqnr_db: float | None = None  # None: no error to divide by
    relative_error: float | None = None  # ‖W - Ŵ‖ / ‖W‖
    flushed: float | None = None  # share of non-zero weights that became zero
    clipped: float | None = None  # share of weights beyond the largest code
    group: str = OTHER  # where in the model it stands: one of LAYER_GROUPS
    tied: bool = False  # an embedding that is the head too: stored once, read by both


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
