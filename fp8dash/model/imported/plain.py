"""A quantized checkpoint written out as a plain one, whose weights are what its codes stand for.

transformers then loads it as it loads any model: no library's own decoding, and no kernel, stands between.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from fp8dash.choose.models.quantized import BLOCKS
from fp8dash.model.folder import CONFIG, WEIGHTS, copy_companions, write_index
from fp8dash.model.imported.decode import decoded, tensor_of
from fp8dash.model.imported.origins import fingerprint
from fp8dash.model.parts import MATRIX
from fp8dash.model.trust import QUANTIZED_FIELDS
from fp8dash.model.xray.matrices import StoredMatrix
from fp8dash.model.xray.tensors import Opened

DROPPED = ("auto_map", "transformers_weights", *QUANTIZED_FIELDS)
OF_CACHES = ("k_scale", "v_scale", "q_scale", "prob_scale", "output_scale", "input_scale")  # read by who casts them


def write_plain(opened: Opened, matrices: Iterable[StoredMatrix], place: Path) -> dict[bytes, str]:
    """Writes config, companions and decoded weights into an empty folder, one weight file at a time.

    Returns each matrix's module by the fingerprint of its decoded weights, by which it is known whatever a loader
    calls it.
    """
    by_codes = {matrix.codes: matrix for matrix in matrices if matrix.packing}
    dropped = {matrix.scale for matrix in by_codes.values()}
    modules = {matrix.module for matrix in by_codes.values()}
    places: dict[str, str] = {}
    prints: dict[bytes, str] = {}
    size = 0
    files = sorted(set(opened.files.values()))
    for file in files:
        written: dict[str, Tensor] = {}
        for name in (name for name, own in opened.files.items() if own == file):
            if matrix := by_codes.get(name):
                weights = written[name_of(matrix)] = _as_loaded(decoded(opened, matrix), matrix)
                prints |= {
                    fingerprint(one): matrix.module for one in (weights if weights.dim() > MATRIX else (weights,))
                }
            elif name not in dropped and not _belongs_to_codes(name, modules):
                written[name] = tensor_of(opened, name)
        target = file.name if len(files) > 1 else WEIGHTS
        save_file(written, place / target, metadata={"format": "pt"})
        places |= dict.fromkeys(written, target)
        size += sum(int(tensor.nbytes) for tensor in written.values())
    write_index(places, place, size)
    (place / CONFIG).write_text(json.dumps(_without(opened.config)), "utf-8")
    copy_companions(opened.path, place)
    return prints


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
