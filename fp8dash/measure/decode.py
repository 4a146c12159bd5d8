"""How fast the model itself decodes: prefill, first token, each later token, memory and energy. Knows no recipe.

Prompts are random token ids, decoded greedily by a plain loop over the model: no server, no batching of requests. On a
GPU a step is a CUDA graph over a static cache, so that Python's time is not in it. Layers and caches that are emulated
cast and decode before they multiply, so their time says nothing about a kernel: such a run is refused a number.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, StaticCache

from fp8dash.choose.records import BASELINE, HIGHER, LOWER, NATIVE, Better, Measurement, Progress, RanBy
from fp8dash.errors import ModelError
from fp8dash.measure.nvml import energy_joules
from fp8dash.model.probe import first_line

METHOD = "greedy loop over the model, random token ids, v1"
TIMED = (BASELINE, NATIVE)  # backends whose times mean something
PROMPT, STEPS = 128, 64  # tokens in and tokens out
PASSES, BUDGET_S, WARM_STEPS = 3, 20.0, 3  # passes for one batch: fewer where they take longer, never none
PERCENTILES = {"itl_ms": 50, "itl_ms_p90": 90, "itl_ms_p99": 99}
SHORTEST_S = 0.5  # of decoding, for NVML's energy counter to say something


@dataclass(slots=True)
class Timing:
    """The passes of one batch: seconds to the first token, seconds of each later one, joules while those were made."""

    first: list[float] = field(default_factory=list)
    gaps: list[list[float]] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)
    how: str = ""


def decode(
    model: Any, context: int, batches: Sequence[int], backend: RanBy, seed: int
) -> Iterator[Progress | Measurement]:
    """Progress, then each batch's measurements; one without a value and with the reason where any part is emulated.

    A `context` of 0 is not known. Raises ModelError for a model that has room for no prompt, or gives zeros.
    """
    if backend not in TIMED:
        why = (
            "layers or the KV cache are emulated, whose time says nothing about a kernel: leave kv= out, and measure "
            "on a device that runs the recipe natively"
        )
        yield Measurement("decode_tokens_per_s", None, "tokens/s", HIGHER, METHOD, backend, note=why)
        return
    length = min(PROMPT, context - STEPS) if context else PROMPT
    if length < 1:
        raise ModelError(f"A context of {context} tokens has no room for {STEPS} new ones: leave decode out.")
    vocabulary, resting = model.get_input_embeddings().num_embeddings, _memory(model.device)[0]
    for index, batch in enumerate(sorted(batches)):
        yield Progress("decode", index, len(batches), f"batch {batch}")
        try:
            timing = timed(model, prompts(vocabulary, batch, length, seed))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            why = f"out of memory at {batch} prompts of {length} tokens"
            of = (f"batch {batch}", why, batch, length, STEPS)
            yield Measurement("decode_tokens_per_s", None, "tokens/s", HIGHER, METHOD, backend, *of)
            continue
        yield from _measurements(timing, batch, length, backend)
    yield from _memories(resting, _memory(model.device)[1], backend)


def prompts(vocabulary: int, batch: int, length: int, seed: int) -> Tensor:
    """Random token ids [batch, length], the same for the same seed."""
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def _warmed(session: "Session", model: Any) -> str:
    """How steps are made; raises ModelError for a model that has no use for transformers' cache."""
    try:
        return session.warm()
    except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise ModelError(
            f"{type(model).__name__} cannot be decoded through a cache here ({first_line(error)}): leave out the "
            "measure decode."
        ) from error


@torch.no_grad()
def timed(model: Any, ids: Tensor) -> Timing:
    """The passes over prompts [batch, length] on the model's device, after one short pass that is not counted."""
    where: torch.device = model.device
    session = Session(model, ids.to(where))
    timing = Timing(how=_warmed(session, model))
    end = time.perf_counter() + BUDGET_S
    while not timing.first or (len(timing.first) < PASSES and time.perf_counter() < end):
        _wait(where)
        start = time.perf_counter()
        session.prefill()
        _wait(where)
        timing.first.append(time.perf_counter() - start)
        before = energy_joules(where)
        timing.gaps.append(_gaps(session, where))
        after = energy_joules(where)
        if before is not None and after is not None:
            timing.joules.append(after - before)
    return timing


class Session:
    """Prompts, their cache and the newest token of each; on a GPU with a step that is a CUDA graph."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        """Takes token ids [batch, length] on the model's device."""
        self._model, self._ids, self._graph = model, ids, None
        length = ids.shape[1] + STEPS + 2 * WARM_STEPS
        self._static = StaticCache(config=model.config, max_cache_len=length) if ids.is_cuda else None
        self._cache: Any = self._static
        self.newest = ids[:, -1:].clone()  # [batch, 1]; a graph reads and writes it where it lies

    def warm(self) -> str:
        """A short pass, which captures the graph; says how steps are made. Raises ModelError where logits are zeros."""
        logits = self.prefill()
        if not logits.any():
            raise ModelError("The model outputs only zeros, which draw less power and run faster: nothing was timed.")
        if self._static is None:
            for _ in range(WARM_STEPS):
                self.step()
            return "eager, a cache that grows"
        if any(
            getattr(layer, "is_sliding", True) for layer in self._static.layers
        ):  # they count in Python, which a graph would freeze
            return "eager, a static cache: no CUDA graph of sliding windows"
        try:
            self._graph = self._captured()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return f"eager, a static cache: no CUDA graph ({str(error).splitlines()[0]})"
        return "a CUDA graph, a static cache"

    def prefill(self) -> Tensor:
        """Reads the prompts and chooses their first tokens; the last position's logits [batch, 1, vocabulary]."""
        if self._static is None:
            self._cache = DynamicCache(config=self._model.config)
        else:
            self._static.reset()  # type: ignore[no-untyped-call]
        return self._forward(self._ids)

    def step(self) -> None:
        """The next token of each prompt."""
        if self._graph is None:
            self._forward(self.newest)
        else:
            self._graph.replay()

    def _forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self._model(input_ids=ids, cache=self._cache, use_cache=True, logits_to_keep=1).logits
        self.newest.copy_(logits[:, -1:].argmax(-1))
        return logits

    def _captured(self) -> Any:
        """A graph of one step, after steps on a side stream as CUDA asks for; capturing runs nothing."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_STEPS):
                self._forward(self.newest)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._forward(self.newest)
        return graph


def _gaps(session: Session, where: torch.device) -> list[float]:
    """Seconds of each step. On a GPU between events, so that the host may run ahead."""
    if where.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(STEPS):
            session.step()
            times.append(time.perf_counter())
        return [after - before for before, after in zip(times, times[1:], strict=False)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        session.step()
        event.record()
    _wait(where)
    return [float(a.elapsed_time(b)) / 1e3 for a, b in zip(events, events[1:], strict=False)]


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def _measurements(timing: Timing, batch: int, length: int, backend: RanBy) -> Iterator[Measurement]:
    """One batch's numbers; the whole pass counts for throughput, each gap for the percentiles."""
    label = f"batch {batch}"
    note = f"{length} tokens in, {STEPS} out; {timing.how}; {len(timing.first)} passes"

    def measured(name: str, value: float | None, unit: str, better: Better, why: str = note) -> Measurement:
        return Measurement(name, value, unit, better, METHOD, backend, label, why, batch, length, STEPS, timing.how)

    first, whole = median(timing.first), median(map(sum, timing.gaps))
    yield measured("prefill_tokens_per_s", batch * length / first, "tokens/s", HIGHER)
    yield measured("ttft_ms", first * 1e3, "ms", LOWER)
    yield measured("decode_tokens_per_s", batch * STEPS / whole, "tokens/s", HIGHER)
    gaps = np.concatenate([np.asarray(steps) for steps in timing.gaps]) * 1e3
    for name, percent in PERCENTILES.items():
        yield measured(name, float(np.percentile(gaps, percent)), "ms", LOWER)
    joules, missing = None, "no counter of energy here: NVML tells it of whole NVIDIA GPUs"
    if timing.joules:
        missing = f"decoding took less than {SHORTEST_S} s, too short for the counter"
        joules = sum(timing.joules) / (batch * STEPS * len(timing.joules)) if gaps.sum() >= SHORTEST_S * 1e3 else None
    why = f"of the whole GPU while decoding, idle power included; {note}" if joules is not None else missing
    yield measured("decode_joules_per_token", joules, "J", LOWER, why)


def _memories(resting: float | None, peak: float | None, backend: RanBy) -> Iterator[Measurement]:
    for name, value, note in (
        ("resident_memory_bytes", resting, "before the first prompt: the process on a CPU, torch's tensors on a GPU"),
        ("peak_memory_bytes", peak, "of the run so far"),
    ):
        yield Measurement(name, value, "bytes", LOWER, METHOD, backend, note=note if value else "not reported here")


def _memory(where: torch.device) -> tuple[float | None, float | None]:
    """Bytes held now and at most: of torch's on a GPU, of the process on Linux, else not known."""
    if where.type == "cuda":
        return float(torch.cuda.memory_allocated(where)), float(torch.cuda.max_memory_allocated(where))
    try:
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    except OSError:
        return None, None
    kib = {
        name: 1024.0 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest
    }
    return kib.get("VmRSS"), kib.get("VmHWM")
