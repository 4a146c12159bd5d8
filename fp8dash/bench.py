"""What the stages of one run pass on to each other, and what is said of it beside its numbers."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8dash.choose.hardware import Device
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.records import BASELINE, Layer, RanBy, Row
from fp8dash.choose.request import Request
from fp8dash.choose.windows import Reading
from fp8dash.errors import CorpusError, Fp8dashError, ModelError
from fp8dash.measure.baseline import Baseline, baseline_file
from fp8dash.measure.corpora import Corpus, Windows, calibration_of
from fp8dash.measure.experts import Routing
from fp8dash.measure.gemm import Shape
from fp8dash.measure.kv_cache import Paths
from fp8dash.measure.needles.needle import Answer
from fp8dash.measure.needles.prompts import NeedleGrid, Prompt
from fp8dash.measure.provenance import made_with
from fp8dash.model.calibration import Observed
from fp8dash.model.hub import commit_of
from fp8dash.model.imported.origins import Origins, StoredModel
from fp8dash.model.load import LoadedModel, check_tokens
from fp8dash.model.passes import Passes
from fp8dash.model.reading import CHUNK
from fp8dash.model.streaming.way import Way

HASHES: dict[str, type[Fp8dashError]] = {
    "model_hash": ModelError,
    "corpus_hash": CorpusError,
    "checkpoint_hash": ModelError,
}


@dataclass(frozen=True, slots=True)
class Passed:
    """What a pass block by block gave of one recipe: the rows of its stages."""

    quantize: tuple[Row, ...]
    perplexity: tuple[Row, ...]
    backend: RanBy


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
    beside: tuple[str, ...] = ()  # recipes that wait for the same pass
    way: Way | None = None  # from load: how the model is loaded
    passed: Passed | None = None  # from baseline, where it passes block by block
    checkpoint: StoredModel | None = None  # from load, where the recipe is what one stores
    loaded: LoadedModel = field(init=False)  # from load, as are the next five
    reading: Reading = field(init=False)  # with BOS resolved
    chunk: int = CHUNK  # of prompts; WHOLE if the model computes something else when read in chunks
    corpus: Corpus = field(init=False)
    windows: Windows = field(init=False)  # only where one of WINDOWED is measured
    calibration: Tensor | None = field(init=False)  # only where the recipe needs it
    calibrated_on: dict[str, Any] = field(init=False)
    origins: Origins = field(init=False)  # with a checkpoint's model
    stored_names: dict[str, str] = field(init=False)  # the files' names of the model's matrices, only for an export
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

    @property
    def is_alone(self) -> bool:
        """True for a checkpoint without a baseline."""
        return self.recipe.stored == self.request.model


def check_identity(bench: Bench) -> None:
    """Raises ModelError or CorpusError if files changed since an earlier attempt: one run must not mix two."""
    now = {"model_hash": bench.loaded.content_hash, "corpus_hash": bench.corpus.content_hash}
    names = {"model_hash": f"The model “{bench.request.model}”", "corpus_hash": f"The corpus “{bench.corpus.name}”"}
    if bench.checkpoint:
        now["checkpoint_hash"] = bench.checkpoint.content_hash
        names["checkpoint_hash"] = f"The checkpoint “{bench.recipe.stored}”"
    for name, error in HASHES.items():
        before = bench.recorded.get(name)
        if before and before != now.get(name, before):
            raise error(
                f"{names[name]} has changed since this run began: its hash was {before[:12]} and is now "
                f"{now[name][:12]}. Restore the earlier files and retry, or submit the run again to measure the "
                "current ones."
            )


def baseline_file_of(bench: Bench) -> Path:
    """Where the baseline of a run's model, corpus and windows is kept."""
    return baseline_file(
        bench.cache,
        model_hash=bench.loaded.content_hash,
        corpus_hash=bench.corpus.content_hash,
        windows=bench.windows,
        device=bench.device.label,
    )


def calibration_windows_of(bench: Bench) -> tuple[Tensor | None, dict[str, Any]]:
    """The windows [count, L] that scales are made from, and facts about them; None and no facts if no scale is."""
    if not bench.recipe.needs_calibration:
        return None, {}
    windows, facts = calibration_of(bench.request, bench.loaded.tokenizer, bench.corpus, bench.reading)
    check_tokens(bench.loaded, windows.flatten().tolist())
    return windows, {"calibration": facts}


def provenance(bench: Bench) -> dict[str, Any]:
    """Facts stored with a run's numbers."""
    loaded, corpus = bench.loaded, bench.corpus
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
