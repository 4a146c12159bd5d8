"""A run from its first stage to its last: loads, casts and measures one recipe on one model.

Stages that only prepare always run; what an earlier attempt recorded is not measured, or not reported, again.
Knows no database and no queue.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType

import torch

from fp8dash.bench import Bench, Passed, baseline_file_of, calibration_windows_of, check_identity, provenance
from fp8dash.choose.mixed import parse_budget
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import EMULATED, PREPARING, Layer, Progress, Row, StageResult
from fp8dash.choose.request import Request
from fp8dash.errors import ModelError
from fp8dash.measure.baseline import Baseline, baseline_of
from fp8dash.measure.calibrated import calibrated, clipped
from fp8dash.measure.corpora import adds_bos, cut_windows, load_corpus
from fp8dash.measure.decode import decode
from fp8dash.measure.experts import experts, routing
from fp8dash.measure.gemm import gemm, linear_shapes
from fp8dash.measure.gradients import gradients
from fp8dash.measure.kept import name_of
from fp8dash.measure.kv_cache import kv_baseline, kv_memory, kv_paths
from fp8dash.measure.needles.needle import Answer, answered, baseline_answers, needle
from fp8dash.measure.needles.prompts import build_prompts, chat_of, fitting, grid_of
from fp8dash.measure.perplexity import perplexity, perplexity_alone
from fp8dash.measure.profile import profile
from fp8dash.measure.provenance import peak_rss
from fp8dash.measure.sensitivity import sensitivity
from fp8dash.measure.weight_error import backend_of, weight_error
from fp8dash.model.calibration import NOTHING, Observed, observe, rewind
from fp8dash.model.exported.export import export
from fp8dash.model.exported.names import stored_names
from fp8dash.model.fit import check_fit
from fp8dash.model.head import full_head
from fp8dash.model.imported.checkpoint import read_checkpoint
from fp8dash.model.imported.load import check_same_tokens, load_checkpoint
from fp8dash.model.imported.swap import keep_stored_kv, stored_swaps
from fp8dash.model.load import check_tokens, find_device, load, locate, torch_device
from fp8dash.model.parts import active_share
from fp8dash.model.passes import Passes
from fp8dash.model.reading import WHOLE, chunk_of
from fp8dash.model.streaming.skeleton import load_skeleton
from fp8dash.model.streaming.way import return_freed_memory, way_of
from fp8dash.model.swap import cast_model, planned
from fp8dash.model.trust import own_code
from fp8dash.places import tasks_dir
from fp8dash.streamed import check_streamed, forget_pass, passed

COMPARED = {"perplexity", "kv", "sensitivity"}  # need the baseline
WINDOWED = COMPARED | {"experts", "gradients", "profile"}
TIMED = {"gemm", "decode"}  # nothing may run while timing

NOT_RUN = "; the checkpoint’s own code (auto_map) is not run, transformers’ is"
NOTHING_RECORDED: Mapping[str, str | None] = MappingProxyType({})

Item = Progress | Row | Baseline


def run_stages(
    request: Request,
    done: frozenset[str],
    cache: Path,
    tell: Callable[[Progress], None] = lambda _: None,
    recorded: Mapping[str, str | None] = NOTHING_RECORDED,
    beside: Sequence[str] = (),
) -> Iterator[Progress | StageResult]:
    """Progress, and a StageResult for each stage that is not `done`; raises Fp8dashError with what to change.

    `recorded` holds the hashes (of HASHES) of what an earlier attempt measured: changed files fail the run. `tell` is
    called during a step that takes long, when a generator cannot yield. `beside` are recipes of runs that ask for the
    same but for it: where the model passes block by block, they share the pass.
    """
    request = request.checked()
    left = [name for name in request.measures if name not in done]
    if not left and all(name in done for name in PREPARING):
        return
    recipe, where = parse_recipe(request.recipe), torch_device(request.device)
    bench = Bench(request, recipe, cache, find_device(request.device), where, Passes(tell), dict(recorded))
    bench.beside = tuple(beside)
    torch.manual_seed(request.seed)
    for name, work in STAGES.items():
        if name in PREPARING or name in left:
            if name not in PREPARING and not bench.passed:
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
    bench.facts["peak_rss_bytes"] = peak_rss()
    return StageResult(name, time.perf_counter() - start, tuple(rows), bench.facts)


def _load(bench: Bench) -> Iterator[Item]:
    request = bench.request
    yield Progress("load", 0, 3, f"looking for {request.model}")
    bench.corpus = load_corpus(request.corpus)
    if bench.recipe.stored:
        bench.checkpoint = read_checkpoint(bench.recipe.stored)
        bench.recipe = bench.checkpoint.recipe
    folder = bench.checkpoint.place if bench.checkpoint and bench.is_alone else locate(request.model, bench.cache)
    if bench.checkpoint is None:
        sizes = request.windows.count, request.windows.length
        bench.way = way_of(folder, request.loading, bench.where, sizes)
        if not bench.way.is_whole:
            yield from _load_blocks(bench, folder)
            return
    brings_code = own_code(folder)
    yield Progress("load", 1, 3, f"reading weights{NOT_RUN if brings_code else ''}")
    if bench.is_alone:
        _load_checkpoint(bench)
    else:
        bench.loaded = load(folder, bench.where)
    loaded = bench.loaded
    check_identity(bench)
    bench.reading = request.reading.resolved(adds_bos(loaded.tokenizer))
    if bench.checkpoint and not bench.is_alone:
        check_same_tokens(loaded.tokenizer, bench.checkpoint, bench.corpus.text)
    elif not bench.checkpoint:
        check_fit(loaded.model, bench.recipe, exported="export" in request.measures)
    if "export" in request.measures:
        bench.stored_names = stored_names(loaded.model, folder, bench.recipe)
    yield Progress("load", 2, 3, "cutting the corpus into windows")
    _cut_texts(bench)
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
    bench.facts = provenance(bench) | bench.calibrated_on
    bench.facts |= {"own_code": "not run"} if brings_code else {}
    bench.facts |= bench.checkpoint.facts if bench.checkpoint else {}


def _load_blocks(bench: Bench, folder: Path) -> Iterator[Item]:
    """All that is known of a model whose weights stay in their files."""
    check_streamed(bench)
    assert bench.way is not None
    yield Progress("load", 1, 3, bench.way.meaning)
    return_freed_memory()
    bench.loaded = load_skeleton(folder)
    check_identity(bench)
    bench.reading = bench.request.reading.resolved(adds_bos(bench.loaded.tokenizer))
    _cut_texts(bench)
    bench.facts = provenance(bench) | {"loading": bench.way.meaning}


def _cut_texts(bench: Bench) -> None:
    """The windows that are scored, the needles' haystacks, and the windows that scales are made from."""
    request, loaded = bench.request, bench.loaded
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
    bench.calibration, bench.calibrated_on = calibration_windows_of(bench)


def _load_checkpoint(bench: Bench) -> None:
    """Makes the checkpoint's decoded weights the model under test."""
    assert bench.checkpoint is not None
    bench.loaded, bench.origins = load_checkpoint(bench.checkpoint, bench.cache, bench.where)


def _baseline(bench: Bench) -> Iterator[Item]:
    if bench.way and not bench.way.is_whole:
        for item in passed(bench, bench.beside):
            if isinstance(item, Passed):
                bench.passed = item
            else:
                yield item
        return
    measures, facts = bench.request.measures, (bench.loaded.content_hash, bench.device.label)
    if "needle" in measures:
        bench.prompts = build_prompts(bench.loaded, bench.grid, bench.request.needles.chat)
        check_tokens(bench.loaded, (token for prompt in bench.prompts for token in (*prompt.ids, *prompt.answer)))
    if COMPARED & set(measures) and not bench.is_alone:
        yield from _token_baseline(bench)
    if "experts" in measures:
        bench.routing = yield from routing(bench.loaded.model, bench.windows.ids, "baseline")
    if "kv" in measures:
        bench.kv_baseline = yield from kv_baseline(bench.loaded.model, bench.windows.ids, bench.cache, *facts)
    if "needle" in measures and not bench.is_alone:
        bench.needle_baseline = yield from baseline_answers(
            bench.loaded, bench.prompts, bench.cache, *facts, chunk=bench.chunk
        )


def _token_baseline(bench: Bench) -> Iterator[Item]:
    for item in baseline_of(bench.loaded.model, bench.base_head, bench.windows, baseline_file_of(bench)):
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
    if bench.passed:
        yield from bench.passed.quantize
        bench.backend = bench.facts["backend"] = bench.passed.backend
        return
    observed = yield from _observed(bench, "quantize")
    base, checkpoint = bench.loaded.model, bench.checkpoint
    if checkpoint and not bench.is_alone:
        yield Progress("quantize", 0, 1, f"decoding {checkpoint.place.name}")
        _load_checkpoint(bench)
        bench.passes.watch(bench.loaded.model, bench.base_head)
    model = bench.loaded.model
    total, active = len(planned(model, bench.recipe)), active_share(model)
    with torch.no_grad():
        if checkpoint:
            swaps = stored_swaps(model, None if bench.is_alone else base, checkpoint.place, bench.origins)
        else:
            swaps = cast_model(model, bench.recipe, bench.device, bench.request.backend, observed)
        for item in weight_error(swaps, total, active):
            if isinstance(item, Layer):
                bench.layers.append(item)
            yield item
    yield from calibrated(model, bench.recipe)
    if checkpoint and (missing := keep_stored_kv(model, checkpoint)):
        bench.facts["kv_scales_missing"] = missing
    if bench.recipe.kv:
        yield from kv_memory(model, bench.recipe.kv, bench.request.windows.length)
    others = (EMULATED,) if bench.recipe.casts_attention else ()
    bench.backend = bench.facts["backend"] = backend_of(bench.layers, *others)


def _gemm(bench: Bench) -> Iterator[Item]:
    request, where = bench.request, (bench.device, bench.where)
    yield from gemm(bench.shapes, bench.recipe, request.gemm.m, *where, request.seed, bench.untimed)


def _perplexity(bench: Bench) -> Iterator[Item]:
    if bench.passed:
        yield from bench.passed.perplexity
        forget_pass(bench)
        return
    request, model = bench.request, bench.loaded.model
    if bench.is_alone:
        yield from perplexity_alone(model, bench.windows, bench.backend, bench.recipe.kv)
        return
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
    request, answers = bench.request, [] if bench.is_alone else bench.needle_baseline
    if not bench.recipe.is_baseline:  # otherwise they are the run's own: nothing was cast
        answers = []
        for item in answered(bench.loaded, bench.prompts, bench.recipe.kv, "needle", bench.chunk):
            if isinstance(item, Answer):
                answers.append(item)
            else:
                yield item
    chat = chat_of(bench.loaded.tokenizer, request.needles.chat)
    given = (bench.backend, request.seed, f"in {request.needles.haystack}, chat template {chat}", bench.left_out)
    baseline = None if bench.is_alone else bench.needle_baseline
    yield from needle(bench.prompts, answers, baseline, *given, bench.chunk)


def _export(bench: Bench) -> Iterator[Item]:
    loaded, recipe = bench.loaded, bench.recipe
    name = f"{loaded.folder.name}-{name_of(loaded.content_hash, recipe.text, bench.calibrated_on)[:12]}"
    place = bench.cache / "checkpoints" / name
    yield (yield from export(loaded.model, loaded.folder, bench.stored_names, recipe, place))


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
