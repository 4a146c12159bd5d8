"""Decoding speeds of runs: how many times faster one decodes than another, and which runs may be compared.

Stored measurements in, plain values out. Only runs of one model, device, method and way of decoding are compared.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from db.rows import Run
from db.store import Store
from fp8dash.choose.records import Measurement
from fp8dash.stats import SPEED_TIE

RATE = "decode_tokens_per_s"
NAMES = (RATE, "ttft_ms", "itl_ms", "itl_ms_p90", "itl_ms_p99")
UNLIKE = {  # what two runs must share, the field that shows it, and the words where it differs
    "weights": ("model", "on another model"),
    "device": ("device", "on another device"),
    "method": ("method", "by another method"),
    "way": ("way", "decoded another way"),
}


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast one batch was decoded; a time of None was not measured."""

    batch: int
    tokens_per_s: float  # of all its requests together
    prompt: int | None  # tokens of each request, in and out
    output: int | None
    first_ms: float | None
    gap_ms: float | None  # between two tokens of a request, median
    gap_p90_ms: float | None
    gap_p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Decoding:
    """One run's decoding: what it may be compared with, its speeds by batch, and why others are missing."""

    run: str
    recipe: str
    backend: str
    model: str  # with the start of its weights' hash
    weights: str
    device: str
    method: str
    way: str  # tokens in and out, graph and cache
    speeds: tuple[Speed, ...]
    missing: tuple[str, ...]

    @property
    def kind(self) -> tuple[str, ...]:
        """The same where runs may be compared."""
        return tuple(getattr(self, name) for name in UNLIKE)


@dataclass(frozen=True, slots=True)
class BatchSpeeds:
    """One batch over several runs, by run; the fastest first among the best, more than one: tied."""

    batch: int
    speeds: dict[str, float]
    best: tuple[str, ...]

    def times(self, run: str) -> float:
        """The fastest's speed over a run's."""
        return self.speeds[self.best[0]] / self.speeds[run]


def decodings(store: Store, runs: Sequence[Run]) -> list[Decoding]:
    """The decoding of each run that was asked for it, in order."""
    measured = store.measurements([run.id for run in runs], NAMES)
    return [decoding_of(run, measured[run.id]) for run in runs if measured[run.id]]


def decoding_of(run: Run, rows: Sequence[Measurement]) -> Decoding:
    """A run's decoding from its measurements."""
    rates = [row for row in rows if row.name == RATE]
    timed = [row for row in rates if row.value and row.batch]
    values = {(row.name, row.batch): row.value for row in rows}
    speeds = [_speed(row, values) for row in timed]
    return Decoding(
        run=run.id,
        recipe=run.recipe,
        backend=run.backend or "",
        model=f"{run.model} ({run.model_hash[:8]})" if run.model_hash else run.model,
        weights=run.model_hash or run.model,
        device=run.device or "",
        method=_joined(row.method for row in timed),
        way=_joined(f"{row.prompt_tokens} tokens in, {row.output_tokens} out; {row.way}" for row in timed),
        speeds=tuple(sorted(speeds, key=lambda speed: speed.batch)),
        missing=tuple(dict.fromkeys(row.note for row in rates if not row.value)),
    )


def alike(runs: Sequence[Decoding]) -> tuple[list[Decoding], list[tuple[Decoding, str]]]:
    """The largest number of timed runs that may be compared, and the other timed ones with what differs."""
    timed = [one for one in runs if one.speeds]
    if not timed:
        return [], []
    kind = Counter(one.kind for one in timed).most_common(1)[0][0]  # of as many, the first
    drawn = [one for one in timed if one.kind == kind]
    return drawn, [(one, _difference(drawn[0], one)) for one in timed if one.kind != kind]


def contests(runs: Iterable[Decoding]) -> list[BatchSpeeds]:
    """Every batch that two or more of some comparable runs decoded, the smallest first."""
    by_batch: dict[int, dict[str, float]] = {}
    for one in runs:
        for speed in one.speeds:
            by_batch.setdefault(speed.batch, {})[one.run] = speed.tokens_per_s
    return [_contest(batch, speeds) for batch, speeds in sorted(by_batch.items()) if len(speeds) > 1]


def _contest(batch: int, speeds: dict[str, float]) -> BatchSpeeds:
    ranked = sorted(speeds, key=lambda run: -speeds[run])
    top = speeds[ranked[0]]
    return BatchSpeeds(batch, speeds, tuple(run for run in ranked if top - speeds[run] <= SPEED_TIE * top))


def _speed(row: Measurement, values: dict[tuple[str, int | None], float | None]) -> Speed:
    times = (values.get((name, row.batch)) for name in NAMES[1:])
    return Speed(row.batch or 0, row.value or 0.0, row.prompt_tokens, row.output_tokens, *times)


def _joined(texts: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(texts))


def _difference(drawn: Decoding, other: Decoding) -> str:
    """The first difference that forbids a comparison."""
    field, what = next(UNLIKE[name] for name in UNLIKE if getattr(drawn, name) != getattr(other, name))
    return f"{what}: {getattr(other, field)}, not {getattr(drawn, field)}"
