"""A quantized checkpoint written out as a plain one, whose weights are what its codes stand for.

transformers then loads it as it loads any model: no library's own decoding, and no kernel, stands between.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fp8dash.choose.models.quantized import BLOCKS
from fp8dash.model.folder import CONFIG, INDEX, WEIGHTS, companion_files
from fp8dash.model.imported.checkpoint import Checkpoint
from fp8dash.model.imported.decode import decoded, tensor_of
from fp8dash.model.trust import QUANTIZED_FIELDS
from fp8dash.model.xray.matrices import StoredMatrix

MATRIX = 2  # dimensions
DROPPED = ("auto_map", "transformers_weights", *QUANTIZED_FIELDS)
OF_CACHES = ("k_scale", "v_scale", "q_scale", "prob_scale", "output_scale", "input_scale")  # read by who casts them


def write_plain(checkpoint: Checkpoint, place: Path) -> dict[bytes, StoredMatrix]:
    """Writes config, companions and decoded weights into an empty folder, one weight file at a time.

    Returns each matrix by the fingerprint of its decoded weights, by which it is known whatever a loader calls it.
    """
    opened = checkpoint.opened
    by_codes = {matrix.codes: matrix for matrix in checkpoint.matrices if matrix.packing}
    dropped = {matrix.scale for matrix in by_codes.values()}
    modules = {matrix.module for matrix in by_codes.values()}
    places: dict[str, str] = {}
    prints: dict[bytes, StoredMatrix] = {}
    files = sorted(set(opened.files.values()))
    for file in files:
        written: dict[str, Tensor] = {}
        for name in (name for name, own in opened.files.items() if own == file):
            if matrix := by_codes.get(name):
                weights = written[name_of(matrix)] = _as_loaded(decoded(opened, matrix), matrix)
                prints |= {fingerprint(one): matrix for one in (weights if weights.dim() > MATRIX else (weights,))}
            elif name not in dropped and not _belongs_to_codes(name, modules):
                written[name] = tensor_of(opened, name)
        target = file.name if len(files) > 1 else WEIGHTS
        save_file(written, place / target, metadata={"format": "pt"})
        places |= dict.fromkeys(written, target)
    if len(files) > 1:
        (place / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}), "utf-8")
    (place / CONFIG).write_text(json.dumps(_without(opened.config)), "utf-8")
    for companion in companion_files(checkpoint.folder):
        copy = place / companion.relative_to(checkpoint.folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(companion, copy)
    return prints


def fingerprint(weights: Tensor) -> bytes:
    """The same for the same weights [rows, cols] once they are loaded: of their shape, first and last row."""
    ends = weights[:: max(1, len(weights) - 1)].to(torch.bfloat16).contiguous()
    return hashlib.sha256(repr(tuple(weights.shape)).encode() + ends.view(torch.uint8).numpy().tobytes()).digest()


def _as_loaded(weights: Tensor, matrix: StoredMatrix) -> Tensor:
    """Weights in the orientation in which the loader reads them: GPT-OSS multiplies from the right."""
    return weights.transpose(1, 2).contiguous() if matrix.packing == BLOCKS else weights.contiguous()


def name_of(matrix: StoredMatrix) -> str:
    """What a matrix's weights are called where they are not cast."""
    is_stack = matrix.packing == BLOCKS or matrix.codes == matrix.module
    return matrix.module if is_stack else f"{matrix.module}.weight"


def _belongs_to_codes(name: str, modules: set[str]) -> bool:
    """Whether a tensor is a scale, a zero point or a shape of codes, or a scale of a KV cache."""
    module, _, part = name.rpartition(".")
    return part in OF_CACHES or (module in modules and part != "bias")


def _without(config: Any) -> Any:
    """A config without what says that its weights are quantized, at any depth."""
    if not isinstance(config, dict):
        return config
    return {key: _without(value) for key, value in config.items() if key not in DROPPED}
