"""Speed, as ratios within one process: a table, and one JSON object as the last line.

recipe_over_forward  perplexity stage of E4M3 channel/token (baseline cached) over a bare BF16 forward, same tokens
usual_way_over_ours  lm-eval on baseline and compressed-tensors' fake-quantized model over that stage: see usual.py
needle_over_generate a needle grid, both grades, over bare `model.generate` of the same prompts one after another
probe_over_forward   one sensitivity probe (cast a part, run the windows, restore it) over a bare BF16 forward of
                     the same tokens: the mean over blocks from first to last, and .kind over the seven projections
cast.<tile>.*        cast and back of 64 Mi elements beside the libraries people use: see casts.py
page.<name>.ms_10k   median server time of a page on a board of 10,000 runs (ms_100k: 100,000); unit page.bare.ms
stream_over_loaded   one recipe's last hidden states block by block over loading the model whole and casting it
eight_recipes_over_forward  the demo study's eight recipes in one pass over one bare BF16 forward of the same tokens
cast_over_copy       throughput of an E4M3 row cast over that of `Tensor.copy_`, the same bytes read and written
"""

import json
import time
from collections.abc import Callable
from functools import partial
from statistics import mean, median

import torch

from fp8dash.choose.presets import PRESETS
from fp8dash.choose.request import Request
from fp8dash.measure.baseline import Baseline, baseline_file, baseline_of
from fp8dash.measure.corpora import cut_windows, load_corpus
from fp8dash.measure.needles.essay import haystack_of
from fp8dash.measure.needles.needle import Answer, answered, needle
from fp8dash.measure.needles.prompts import NeedleGrid, build_prompts
from fp8dash.measure.perplexity import perplexity
from fp8dash.measure.sensitivity import WINDOWS as PROBE_WINDOWS
from fp8dash.measure.sensitivity import CastGroup, Probe, groups_of
from fp8dash.model.head import full_head
from fp8dash.model.load import find_device, load, locate, torch_device
from fp8dash.model.swap import cast_model
from fp8dash.places import cache_dir
from fp8dash.quant.cast import codes_of
from tests.bench.board import pages
from tests.bench.casts import cast_ratios
from tests.bench.streamed import eight_and_forward, streamed_and_loaded
from tests.bench.usual import usual_and_ours

REPEATS = 7
SLOW_REPEATS = 3
RECIPE = PRESETS["FP8_DYNAMIC"].recipe
CAST_ROWS, CAST_COLS = 4096, 4096


def main() -> None:
    """Prints the table and the JSON line."""
    ratios: dict[str, float | str] = {"recipe_over_forward": recipe_over_forward(), "cast_over_copy": cast_over_copy()}
    ratios["usual_way_over_ours"] = _ratio(*usual_and_ours(), repeats=SLOW_REPEATS)
    ratios["needle_over_generate"] = needle_over_generate()
    ratios |= {
        "probe_over_forward": probe_over_forward("block"),
        "probe_over_forward.kind": probe_over_forward("kind"),
    }
    ratios["stream_over_loaded"] = _ratio(*streamed_and_loaded(), repeats=SLOW_REPEATS)
    ratios["eight_recipes_over_forward"] = _ratio(*eight_and_forward(), repeats=SLOW_REPEATS)
    ratios |= cast_ratios()
    ratios |= pages()
    print(f"\n{find_device().label}, {torch.get_num_threads()} threads, torch {torch.__version__}, median of {REPEATS}")
    for name, ratio in ratios.items():
        print(f"{name:<26}{ratio:>20}" if isinstance(ratio, str) else f"{name:<26}{ratio:>20.3f}")
    print(json.dumps({name: ratio if isinstance(ratio, str) else round(ratio, 4) for name, ratio in ratios.items()}))


def recipe_over_forward() -> float:
    """How many bare forwards the perplexity stage costs; lower is better."""
    where = torch_device("auto")
    plain, cast = (load(locate("demo", cache_dir()), where) for _ in range(2))
    corpus = load_corpus("pydocs")
    windows = cut_windows(plain.tokenizer, corpus, 8, 512, plain.context)
    head = full_head(plain.model)
    file = baseline_file(
        cache_dir(), model_hash=plain.content_hash, corpus_hash=corpus.content_hash, windows=windows, device="bench"
    )
    *_, baseline = baseline_of(plain.model, head, windows, file)
    assert isinstance(baseline, Baseline)
    for _swap in cast_model(cast.model, RECIPE, find_device(), "emulated"):
        pass

    @torch.no_grad()
    def forward() -> None:
        for ids in windows.ids:
            plain.model(input_ids=ids[None].to(where), use_cache=False)

    def stage() -> None:
        for _item in perplexity(cast.model, head, windows, baseline, "emulated", 0):
            pass

    return _ratio(stage, forward)


def probe_over_forward(granularity: str) -> float:
    """How many bare forwards of the same windows a probe costs; lower is better."""
    where = torch_device("auto")
    plain = load(locate("demo", cache_dir()), where)
    corpus = load_corpus("pydocs")
    windows = cut_windows(plain.tokenizer, corpus, PROBE_WINDOWS, 512, plain.context)
    head = full_head(plain.model)
    file = baseline_file(
        cache_dir(), model_hash=plain.content_hash, corpus_hash=corpus.content_hash, windows=windows, device="bench"
    )
    *_, baseline = baseline_of(plain.model, head, windows, file)
    assert isinstance(baseline, Baseline)
    probe = Probe(plain.model, head, windows, baseline, RECIPE)
    probe.keep_outputs()
    groups = groups_of(plain.model, RECIPE, granularity)
    picked = [groups[round(i * (len(groups) - 1) / (REPEATS - 1))] for i in range(REPEATS)]

    @torch.no_grad()
    def forward() -> None:
        for ids in windows.ids:
            plain.model(input_ids=ids[None].to(where), use_cache=False)

    def probed(group: CastGroup) -> None:
        probe.cast(group.names)
        probe.kld(group.first, group.part.name)
        probe.restore(group.names)

    forward()
    twice = [group for group in picked for _ in range(2)]  # as the stage does: the second time its weights are at hand
    return mean(_seconds(partial(probed, group)) / _seconds(forward) for group in twice)


@torch.no_grad()
def needle_over_generate() -> float:
    """How much more a needle grid costs than the answers alone; lower is better."""
    loaded = load(locate("demo", cache_dir()), torch_device("auto"))
    request = Request()
    grid = NeedleGrid(request.needles.lengths, request.needles.depths, haystack_of("noise", ""))
    prompts = build_prompts(loaded, grid, request.needles.chat)

    def generate() -> None:
        for prompt in prompts:
            ids = torch.tensor([prompt.ids], device=loaded.model.device)
            more = {"max_new_tokens": prompt.kind.answer_tokens, "do_sample": False, "pad_token_id": 0}
            loaded.model.generate(ids, attention_mask=torch.ones_like(ids), **more)

    def stage() -> None:
        answers = [item for item in answered(loaded, prompts, None, "needle") if isinstance(item, Answer)]
        list(needle(prompts, answers, answers, "baseline", 0, ""))

    return _ratio(stage, generate)


@torch.no_grad()
def cast_over_copy() -> float:
    """The share of copy bandwidth that a cast reaches; higher is better."""
    where = torch_device("auto")
    x = torch.randn(CAST_ROWS, CAST_COLS, dtype=torch.bfloat16).to(where)
    assert RECIPE.activations
    codes = codes_of(x, RECIPE.activations)
    moved = x.nbytes + codes.codes.nbytes + codes.scales.nbytes
    source = torch.randint(0, 255, (moved // 2,), dtype=torch.uint8).to(where)
    target = torch.empty_like(source)
    return _ratio(lambda: target.copy_(source), lambda: codes_of(x, codes.cast))


def _ratio(above: Callable[[], object], below: Callable[[], object], repeats: int = REPEATS) -> float:
    """Time of `above` over time of `below`, taken in turn: the median of the pairs."""
    for call in (above, below):
        call()
    return median(_seconds(above) / _seconds(below) for _ in range(repeats))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
