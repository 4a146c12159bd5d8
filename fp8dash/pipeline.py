"""A run from its first stage to its last: loads, casts and measures one recipe on one model.

Stages that only prepare always run; what an earlier attempt recorded is not measured, or not reported, again.
Knows no database and no queue.
"""

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fp8dash.choose.hardware import Device
from fp8dash.choose.mixed import parse_budget
from fp8dash.choose.recipe import Recipe, parse_recipe
from fp8dash.choose.records import BASELINE, EMULATED, PREPARING, Layer, Progress, RanBy, Row, StageResult
from fp8dash.choose.request import Request
from fp8dash.choose.windows import Reading
from fp8dash.errors import CorpusError, Fp8dashError, ModelError
from fp8dash.measure.baseline import Baseline, baseline_file, baseline_of
from fp8dash.measure.calibrated import calibrated, clipped
from fp8dash.measure.corpora import Corpus, Windows, adds_bos, calibration_windows, cut_windows, load_corpus
from fp8dash.measure.decode import decode
from fp8dash.measure.experts import Routing, experts, routing
from fp8dash.measure.gemm import Shape, gemm, linear_shapes
from fp8dash.measure.gradients import gradients
from fp8dash.measure.kept import name_of
from fp8dash.measure.kv_cache import Paths, kv_baseline, kv_memory, kv_paths
from fp8dash.measure.needles.needle import Answer, answered, baseline_answers, needle
from fp8dash.measure.needles.prompts import NeedleGrid, Prompt, build_prompts, chat_of, fitting, grid_of
from fp8dash.measure.perplexity import perplexity
from fp8dash.measure.profile import profile
from fp8dash.measure.provenance import made_with
from fp8dash.measure.sensitivity import sensitivity
from fp8dash.measure.weight_error import backend_of, weight_error
from fp8dash.model.calibration import NOTHING, Observed, observe, rewind
from fp8dash.model.export import check_stored, export
from fp8dash.model.fit import check_fit
from fp8dash.model.head import full_head
from fp8dash.model.hub import commit_of
from fp8dash.model.load import LoadedModel, check_tokens, find_device, load, locate, torch_device
from fp8dash.model.parts import active_share
from fp8dash.model.passes import Passes
from fp8dash.model.reading import CHUNK, WHOLE, chunk_of
from fp8dash.model.swap import cast_model, planned
from fp8dash.model.trust import own_code
from fp8dash.places import tasks_dir

COMPARED = {"perplexity", "kv", "sensitivity"}  # need the baseline
WINDOWED = COMPARED | {"experts", "gradients", "profile"}
TIMED = {"gemm", "decode"}  # nothing may run while timing

NOT_RUN = "; the checkpoint’s own code (auto_map) is not run, transformers’ is"
HASHES: dict[str, type[Fp8dashError]] = {"model_hash": ModelError, "corpus_hash": CorpusError}
NOTHING_RECORDED: Mapping[str, str | None] = MappingProxyType({})

Item = Progress | Row | Baseline


@dataclass(slots=True)
class Bench:
    """What the stages of one run pass on to each other."""

    request: Request
    recipe: Recipe
    cache: Path
    device: Device
    where: torch.device
    passes: Passes
    recorded: dict[str, str | None] = field(default_factory=dict)  # hashes of what an earlier attempt measured
    facts: dict[str, Any] = field(default_factory=dict)  # facts about the run from the current stage
    loaded: LoadedModel = field(init=False)  # from load, as are the next five
    reading: Reading = field(init=False)  # with BOS resolved
    chunk: int = CHUNK  # of prompts; WHOLE if the model computes something else when read in chunks
    corpus: Corpus = field(init=False)
    windows: Windows = field(init=False)  # only where one of WINDOWED is measured
    calibration: Tensor | None = field(init=False)  # only where the recipe needs it
    calibrated_on: dict[str, Any] = field(init=False)
    base_head: nn.Module = field(init=False)  # the head before casting
    shapes: Counter[Shape] = field(init=False)
    untimed: float = field(init=False)  # share of the blocks' weights that have no shape there
    baseline: Baseline = field(init=False)  # from baseline, only where one of COMPARED is measured
    kv_baseline: Paths = field(init=False)  # from baseline, only where the KV cache is
    grid: NeedleGrid = field(init=False)  # from load, only where needles are measured
    left_out: tuple[str, ...] = ()  # why some requested lengths are not in it
    prompts: list[Prompt] = field(init=False)  # from baseline, only where needles are measured, as is the next
    needle_baseline: list[Answer] = field(init=False)
    routing: Routing = field(init=False)  # from baseline, only where experts are looked at
    observed: Observed | None = None  # from sensitivity or quantize, whichever is first
    backend: RanBy = BASELINE  # from quantize
    layers: list[Layer] = field(default_factory=list)  # from quantize
    tasks: Any = None  # from load, only where tasks are measured: lm-eval's own, opaque here


def run_stages(
    request: Request,
    done: frozenset[str],
    cache: Path,
    tell: Callable[[Progress], None] = lambda _: None,
    recorded: Mapping[str, str | None] = NOTHING_RECORDED,
) -> Iterator[Progress | StageResult]:
    """Progress, and a StageResult for each stage that is not `done`; raises Fp8dashError with what to change.

    `recorded` holds the hashes (of HASHES) of what an earlier attempt measured: changed files fail the run. `tell` is
    called during a step that takes long, when a generator cannot yield.
    """
    request = request.checked()
    left = [name for name in request.measures if name not in done]
    if not left and all(name in done for name in PREPARING):
        return
    recipe, where = parse_recipe(request.recipe), torch_device(request.device)
    bench = Bench(request, recipe, cache, find_device(request.device), where, Passes(tell), dict(recorded))
    torch.manual_seed(request.seed)
    for name, work in STAGES.items():
        if name in PREPARING or name in left:
            if name not in PREPARING:
                rewind(bench.loaded.model)
            result = yield from _walk(name, work, bench)
            if name not in done:
                yield result


def _walk(name: str, work: Callable[[Bench], Iterator[Item]], bench: Bench) -> Generator[Progress, None, StageResult]:
    """Passes on Progress; returns the stage's result."""
    start, bench.facts = time.perf_counter(), {}
    rows: list[Row] = []
    yield Progress(name, 0, 1)
    with nullcontext() if name in TIMED else bench.passes.telling():
        for item in work(bench):
            if isinstance(item, Progress):
                bench.passes.hear(item)
                yield item
            elif not isinstance(item, Baseline):
                rows.append(item)
    bench.facts["peak_rss_bytes"] = _peak_rss()
    return StageResult(name, time.perf_counter() - start, tuple(rows), bench.facts)


def _load(bench: Bench) -> Iterator[Item]:
    request = bench.request
    yield Progress("load", 0, 3, f"looking for {request.model}")
    bench.corpus = load_corpus(request.corpus)
    folder = locate(request.model, bench.cache)
    brings_code = own_code(folder)
    yield Progress("load", 1, 3, f"reading weights{NOT_RUN if brings_code else ''}")
    loaded = bench.loaded = load(folder, bench.where)
    _check_identity(bench)
    bench.reading = request.reading.resolved(adds_bos(loaded.tokenizer))
    check_fit(loaded.model, bench.recipe, exported="export" in request.measures)
    if "export" in request.measures:
        check_stored(loaded.model, folder, bench.recipe)
    yield Progress("load", 2, 3, "cutting the corpus into windows")
    if WINDOWED & set(request.measures):
        bench.windows = cut_windows(
            loaded.tokenizer,
            bench.corpus,
            request.windows.count,
            request.windows.length,
            loaded.context,
            bench.reading,
        )
        check_tokens(loaded, bench.windows.ids.flatten().tolist())
    if "needle" in request.measures:
        grid = grid_of(request.needles, request.seed, bench.corpus.text, loaded.tokenizer)
        bench.grid, bench.left_out = fitting(loaded.tokenizer, grid, loaded.context, request.needles.chat)
    bench.calibration, bench.calibrated_on = _calibration(bench, loaded)
    if "tasks" in request.measures:
        from fp8dash.measure.harness import find_tasks  # lm-eval takes seconds to import

        yield Progress("load", 2, 3, "downloading the tasks’ data")
        bench.tasks = find_tasks(request.tasks.names, loaded, tasks_dir())
    if {"needle", "kv"} & set(request.measures):
        bench.chunk = chunk_of(loaded.model)
        if bench.chunk == WHOLE and "kv" in request.measures:
            raise ModelError(
                f"{type(loaded.model).__name__} computes something else when read in chunks through its cache: leave "
                "out the measure kv, and kv= in the recipe."
            )
    bench.base_head = full_head(loaded.model)
    bench.passes.watch(loaded.model, bench.base_head)
    bench.shapes, bench.untimed = linear_shapes(loaded.model)
    bench.facts = _provenance(bench, loaded, bench.corpus) | bench.calibrated_on
    bench.facts |= {"own_code": "not run"} if brings_code else {}


def _check_identity(bench: Bench) -> None:
    """Raises ModelError or CorpusError if files changed since an earlier attempt: one run must not mix two."""
    now = {"model_hash": bench.loaded.content_hash, "corpus_hash": bench.corpus.content_hash}
    names = {"model_hash": f"The model “{bench.request.model}”", "corpus_hash": f"The corpus “{bench.corpus.name}”"}
    for name, error in HASHES.items():
        before = bench.recorded.get(name)
        if before and before != now[name]:
            raise error(
                f"{names[name]} has changed since this run began: its hash was {before[:12]} and is now "
                f"{now[name][:12]}. Restore the earlier files and retry, or submit the run again to measure the "
                "current ones."
            )


def _baseline(bench: Bench) -> Iterator[Item]:
    measures, facts = bench.request.measures, (bench.loaded.content_hash, bench.device.label)
    if "needle" in measures:
        bench.prompts = build_prompts(bench.loaded, bench.grid, bench.request.needles.chat)
        check_tokens(bench.loaded, (token for prompt in bench.prompts for token in (*prompt.ids, *prompt.answer)))
    if COMPARED & set(measures):
        yield from _token_baseline(bench)
    if "experts" in measures:
        bench.routing = yield from routing(bench.loaded.model, bench.windows.ids, "baseline")
    if "kv" in measures:
        bench.kv_baseline = yield from kv_baseline(bench.loaded.model, bench.windows.ids, bench.cache, *facts)
    if "needle" in measures:
        bench.needle_baseline = yield from baseline_answers(
            bench.loaded, bench.prompts, bench.cache, *facts, chunk=bench.chunk
        )


def _token_baseline(bench: Bench) -> Iterator[Item]:
    file = baseline_file(
        bench.cache,
        model_hash=bench.loaded.content_hash,
        corpus_hash=bench.corpus.content_hash,
        windows=bench.windows,
        device=bench.device.label,
    )
    for item in baseline_of(bench.loaded.model, bench.base_head, bench.windows, file):
        if isinstance(item, Baseline):
            bench.baseline = item
        yield item


def _gradients(bench: Bench) -> Iterator[Item]:
    yield from gradients(bench.loaded.model, bench.windows.ids)


def _sensitivity(bench: Bench) -> Iterator[Item]:
    request, budget = bench.request, parse_budget(bench.request.sensitivity.budget)
    observed = yield from _observed(bench, "sensitivity")
    probed = (bench.loaded.model, bench.base_head, bench.windows, bench.baseline)
    yield from sensitivity(*probed, bench.recipe, request.sensitivity.granularity, budget, observed)


def _observed(bench: Bench, stage: str) -> Generator[Progress, None, Observed]:
    """What calibration text shows about the unquantized model, computed once."""
    if bench.calibration is None:
        return NOTHING
    if bench.observed is None:
        bench.observed = yield from observe(bench.loaded.model, bench.recipe, bench.calibration, stage)
    return bench.observed


def _profile(bench: Bench) -> Iterator[Item]:
    yield from profile(bench.loaded.model, bench.windows.ids)


def _quantize(bench: Bench) -> Iterator[Item]:
    model = bench.loaded.model
    observed = yield from _observed(bench, "quantize")
    total, active = len(planned(model, bench.recipe)), active_share(model)
    with torch.no_grad():
        swaps = cast_model(model, bench.recipe, bench.device, bench.request.backend, observed)
        for item in weight_error(swaps, total, active):
            if isinstance(item, Layer):
                bench.layers.append(item)
            yield item
    yield from calibrated(model, bench.recipe)
    if bench.recipe.kv:
        yield from kv_memory(model, bench.recipe.kv, bench.request.windows.length)
    others = (EMULATED,) if bench.recipe.casts_attention else ()
    bench.backend = bench.facts["backend"] = backend_of(bench.layers, *others)


def _gemm(bench: Bench) -> Iterator[Item]:
    request, where = bench.request, (bench.device, bench.where)
    yield from gemm(bench.shapes, bench.recipe, request.gemm.m, *where, request.seed, bench.untimed)


def _perplexity(bench: Bench) -> Iterator[Item]:
    request, model = bench.request, bench.loaded.model
    yield from perplexity(
        model,
        bench.base_head,
        bench.windows,
        bench.baseline,
        bench.backend,
        request.seed,
        bench.recipe.kv,
        request.windows.until,
    )
    yield from clipped(model, bench.backend)


def _kv(bench: Bench) -> Iterator[Item]:
    model, kv = bench.loaded.model, bench.recipe.kv
    given = (bench.base_head, bench.windows.ids, bench.kv_baseline, kv, bench.backend, bench.request.seed)
    yield from kv_paths(model, *given)


def _needle(bench: Bench) -> Iterator[Item]:
    request, answers = bench.request, bench.needle_baseline
    if not bench.recipe.is_baseline:  # otherwise they are the run's own: nothing was cast
        answers = []
        for item in answered(bench.loaded, bench.prompts, bench.recipe.kv, "needle", bench.chunk):
            if isinstance(item, Answer):
                answers.append(item)
            else:
                yield item
    chat = chat_of(bench.loaded.tokenizer, request.needles.chat)
    given = (bench.backend, request.seed, f"in {request.needles.haystack}, chat template {chat}", bench.left_out)
    yield from needle(bench.prompts, answers, bench.needle_baseline, *given, bench.chunk)


def _export(bench: Bench) -> Iterator[Item]:
    loaded, recipe = bench.loaded, bench.recipe
    name = f"{loaded.folder.name}-{name_of(loaded.content_hash, recipe.text, bench.calibrated_on)[:12]}"
    yield (yield from export(loaded.model, loaded.folder, recipe, bench.cache / "checkpoints" / name))


def _tasks(bench: Bench) -> Iterator[Item]:
    from fp8dash.measure.harness import Asking, harness

    request = bench.request
    asking = Asking(request.tasks.limit, request.tasks.prompt, request.tasks.precision)
    yield from harness(bench.loaded, bench.tasks, asking, bench.backend, bench.recipe.kv)


def _experts(bench: Bench) -> Iterator[Item]:
    yield from experts(bench.loaded.model, bench.windows.ids, bench.routing, bench.layers, bench.backend)


def _decode(bench: Bench) -> Iterator[Item]:
    request, loaded = bench.request, bench.loaded
    backend = EMULATED if bench.recipe.kv else bench.backend  # no kernel here reads a cast cache
    yield from decode(loaded.model, loaded.context, request.decode.batches, backend, request.seed)


STAGES: dict[str, Callable[[Bench], Iterator[Item]]] = {
    "load": _load,
    "baseline": _baseline,
    "gradients": _gradients,
    "sensitivity": _sensitivity,
    "profile": _profile,
    "quantize": _quantize,
    "gemm": _gemm,
    "perplexity": _perplexity,
    "kv": _kv,
    "needle": _needle,
    "experts": _experts,
    "decode": _decode,
    "tasks": _tasks,
    "export": _export,
}


def _calibration(bench: Bench, loaded: LoadedModel) -> tuple[Tensor | None, dict[str, Any]]:
    """The windows [count, L] that scales are made from, and facts about them; None and no facts if no scale is."""
    request = bench.request
    if not bench.recipe.needs_calibration:
        return None, {}
    corpus = load_corpus(request.calibration.corpus) if request.calibration.corpus else bench.corpus
    measured = request.windows.tokens if corpus.content_hash == bench.corpus.content_hash else 0
    count, length = request.calibration.windows, request.windows.length
    windows = calibration_windows(loaded.tokenizer, corpus, count, length, measured, bench.reading)
    check_tokens(loaded, windows.flatten().tolist())
    facts: dict[str, Any] = {"corpus": corpus.name, "hash": corpus.content_hash}
    facts |= {"windows": count, "window_length": length} | ({"bos": True} if bench.reading.bos == "bos" else {})
    return windows, {"calibration": facts}


def _provenance(bench: Bench, loaded: LoadedModel, corpus: Corpus) -> dict[str, Any]:
    """Facts stored with a run's numbers."""
    return {
        "model_hash": loaded.content_hash,
        **({"revision": commit} if (commit := commit_of(loaded.folder)) else {}),
        "corpus_hash": corpus.content_hash,
        "corpus_origin": corpus.origin,
        "device": bench.device.label,
        "device_kind": bench.device.kind,
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "seed": bench.request.seed,
        **made_with(bench.where, bench.request.measures, perplexity=bench.reading.method),
    }


def _peak_rss() -> int:
    """The process's largest resident memory so far, bytes (Linux counts in KiB, macOS in bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
