"""What passing block by block costs: beside the same model loaded whole, and beside bare forwards of each recipe."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fp8dash.choose.presets import DEMO_STUDY, PRESETS
from fp8dash.choose.recipe import Recipe
from fp8dash.measure.corpora import cut_windows, load_corpus
from fp8dash.model.load import find_device, load, locate, torch_device
from fp8dash.model.streaming.states import last_hidden_states
from fp8dash.model.swap import cast_model
from fp8dash.places import cache_dir

WINDOWS, LENGTH = 8, 512
ONE = PRESETS["FP8_DYNAMIC"].recipe


def streamed_and_loaded() -> tuple[Callable[[], object], Callable[[], object]]:
    """One recipe's last hidden states block by block, and by the model loaded whole and cast."""
    folder, ids = _demo()

    @torch.no_grad()
    def whole() -> None:
        model = load(folder, torch_device("auto")).model
        for _swap in cast_model(model, ONE, find_device(), "emulated"):
            pass
        for one in ids:
            model.model(input_ids=one[None].to(model.device), use_cache=False)

    return _pass(folder, [ONE], ids), whole


def eight_and_forward() -> tuple[Callable[[], object], Callable[[], object]]:
    """The demo study's eight recipes in one pass, and one bare forward of the same tokens."""
    folder, ids = _demo()
    model = load(folder, torch_device("auto")).model

    @torch.no_grad()
    def forward() -> None:
        for one in ids:
            model(input_ids=one[None].to(model.device), use_cache=False)

    return _pass(folder, [PRESETS[name].recipe for name in DEMO_STUDY], ids), forward


def _demo() -> tuple[Path, torch.Tensor]:
    folder = locate("demo", cache_dir())
    loaded = load(folder, torch.device("cpu"))
    return folder, cut_windows(loaded.tokenizer, load_corpus("pydocs"), WINDOWS, LENGTH, loaded.context).ids


def _pass(folder: Path, recipes: Sequence[Recipe], ids: torch.Tensor) -> Callable[[], object]:
    def through() -> None:
        with tempfile.TemporaryDirectory() as scratch:
            device, where = find_device(), torch_device("auto")
            kept = {"backend": "emulated", "scratch": Path(scratch)}
            for _item in last_hidden_states(folder, recipes, ids, device, where, **kept):
                pass

    return through
