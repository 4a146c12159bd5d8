"""GGUF files: read by transformers and gguf, llama.cpp's own package, and made plain folders of bfloat16 weights.

Blocks decode as `gguf.dequantize` decodes them. llama.cpp's kernels also round activations to eight bits in blocks of
32; that is not in the file, and is not emulated.
"""

import contextlib
import hashlib
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8dash.choose.recipe import Recipe
from fp8dash.errors import ModelError
from fp8dash.model.hub import revision_of
from fp8dash.model.imported.origins import Origin, Origins, fingerprint
from fp8dash.model.tensors import DTYPE
from fp8dash.model.xray.gguf import GgufTensor, gguf_tensors
from fp8dash.model.xray.tensors import WIDE
from fp8dash.model.xray.xray import xray
from fp8dash.places import scratch

LAYOUT = "blocks of a GGUF file"


@dataclass(frozen=True)
class GgufCheckpoint:
    """A GGUF file whose blocks can be decoded."""

    place: Path
    name: str  # as the recipe names it

    @cached_property
    def tensors(self) -> tuple[GgufTensor, ...]:
        """Its tensors by its header; raises ModelError for a file that is damaged or no GGUF."""
        tensors, is_short = gguf_tensors(self.place)
        if is_short:
            raise ModelError(f"{self.place} cannot be measured: it ends before its tensors do. Download it again.")
        return tensors

    @property
    def recipe(self) -> Recipe:
        """Its blocks are no recipe's."""
        return Recipe(stored=self.name)

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of the file."""
        with self.place.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    @property
    def facts(self) -> dict[str, Any]:
        """What is stored about it with a run."""
        kinds = Counter(tensor.type for tensor in self.tensors if tensor.type not in WIDE)
        scheme = ", ".join(f"{count} of {kind}" for kind, count in kinds.most_common())
        facts = {"checkpoint_hash": self.content_hash, "checkpoint_scheme": f"{scheme}, GGUF"}
        return facts | {"castings": [one.fact for one in xray(self.place).castings]} | revision_of(self.place)

    @property
    def elements(self) -> int:
        """Weights that it stands for."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def is_plain(self) -> bool:
        """True where no tensor is quantized."""
        return {tensor.type for tensor in self.tensors} <= set(WIDE)

    def write_plain(self, folder: Path) -> Origins:
        """Writes a plain model with decoded weights into an empty folder; raises ModelError."""
        convert(self.place, folder)
        return Origins({}, _prints(self.place))

    def kv_scales(self) -> dict[int, dict[str, Tensor]]:
        """None: a GGUF file says nothing of its cache."""
        return {}


def convert(file: Path, folder: Path) -> None:
    """A GGUF file as a folder of safetensors in bfloat16 with its tokenizer; raises ModelError."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        gguf = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, quantization_config=gguf, dtype=DTYPE
        )
        model.config.name_or_path = ""
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    except Exception as error:  # metadata can make transformers and gguf raise anything
        why = " ".join(str(error).split())[:200].rstrip(".")
        raise ModelError(
            f"{file} cannot be read as a model ({type(error).__name__}: {why}): choose a GGUF file of an architecture "
            "that transformers reads, such as Llama, Qwen, Mistral, Gemma or Phi, or the checkpoint it was made from."
        ) from error


def plain_folder(file: Path, cache: Path) -> Path:
    """The folder of a GGUF file that is not quantized, made the first time; raises ModelError for one that is.

    Made beside its place and renamed into it, so that two workers cannot tear it: the later one's is dropped.
    """
    checkpoint = GgufCheckpoint(file, str(file))
    if not checkpoint.is_plain:
        raise ModelError(
            f"{file} is quantized already: choose the BF16 checkpoint that it was made from, which recipes are "
            f"measured against. To measure what it stores, give the recipe stored={file}."
        )
    return made_once(cache / "gguf" / f"{file.stem}-{checkpoint.content_hash[:12]}", lambda: file)


def made_once(folder: Path, source: Callable[[], Path]) -> Path:
    """The folder, converted from a GGUF file where it is not there yet; raises ModelError."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = scratch(folder.parent)
        try:
            convert(source(), made)
            with contextlib.suppress(OSError):  # it exists: another worker was first
                made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def _prints(file: Path) -> dict[bytes, Origin]:
    """Each matrix by the ends of its decoded weights, which no reordering of heads moves; experts one by one."""
    from gguf import GGUFReader

    prints: dict[bytes, Origin] = {}
    for tensor in GGUFReader(file).tensors:
        kind, rows = tensor.tensor_type.name, tensor.data.reshape(-1, *tensor.data.shape[-2:])
        if len(tensor.shape) < 2:
            continue
        bits = 8 * int(tensor.n_bytes) / int(tensor.n_elements)
        is_cast = kind not in WIDE
        origin = Origin(tensor.name, LAYOUT if is_cast else "", kind.lower() if is_cast else "", bits=bits)
        height, width = int(tensor.shape[1]), int(tensor.shape[0])
        for matrix in rows:
            prints[fingerprint(_ends(matrix, tensor.tensor_type), (height, width))] = origin
    return prints


def _ends(matrix: np.ndarray[Any, Any], kind: Any) -> Tensor:
    """The first and the last row of a matrix of blocks, decoded."""
    from gguf import dequantize

    ends = matrix[:: max(1, len(matrix) - 1)]
    return torch.from_numpy(np.ascontiguousarray(dequantize(ends, kind), np.float32)).to(DTYPE)
