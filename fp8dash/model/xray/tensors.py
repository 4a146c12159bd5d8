"""A checkpoint's tensors by their headers, and the values of the few that are asked for. No torch, and no pickle.

Values are read straight from the file's bytes, one tensor at a time: a checkpoint of any size is looked through in the
memory of its largest scale tensor.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp8dash.choose.formats import E4M3FN, E5M2
from fp8dash.choose.models.quantized import QUANTIZED_FILES
from fp8dash.errors import ModelError
from fp8dash.model.folder import CONFIG, INDEX, WEIGHTS, Stored, config_of, read_json, stored_tensors
from fp8dash.model.trust import quantized_field

BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
PLAIN = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}
FLOAT8 = {"F8_E4M3": E4M3FN, "F8_E5M2": E5M2}
WIDE = ("F32", "BF16", "F16", "F64")  # dtypes of weights that are not cast


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint's tensors, where each lies, and what keeps some of them from being read."""

    path: Path
    config: dict[str, Any]  # config.json; empty for a lone file
    tensors: dict[str, Stored]
    files: dict[str, Path]
    short: dict[str, Path]  # tensors that end behind their file's end
    misfit: tuple[str, ...]  # tensors whose bytes are not those of their shape and dtype
    absent: tuple[str, ...]  # files that the index names and that are not there
    misplaced: tuple[str, ...]  # tensors that the index places in a file that does not hold them

    def raw(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor's bytes as they lie, mapped and not read: uint8, uint16 for BF16, else its own dtype."""
        tensor = self.tensors[name]
        kind = PLAIN.get(tensor.dtype, "<u2" if tensor.dtype == "BF16" else "u1")
        if name in self.short or name in self.misfit or tensor.dtype not in BYTES or not math.prod(tensor.shape):
            return np.zeros(0, kind)
        return np.memmap(self.files[name], kind, "r", tensor.begin, tensor.shape or (1,))

    def values(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor's values: floats as float64, integers as they are; empty where the file ends too early.

        An E8M0 scale is the power of two that it stands for.
        """
        raw, dtype = self.raw(name), self.tensors[name].dtype
        if dtype == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if dtype in FLOAT8:
            return np.asarray(np.array([FLOAT8[dtype].decode(code) for code in range(256)])[raw])
        if dtype == "F8_E8M0":
            return powers(raw)
        return raw.astype(np.float64) if dtype.startswith("F") else np.asarray(raw)


def powers(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """E8M0 codes as what they stand for: OCP MX 1.0, 5.4.1.

    >>> powers(np.array([126, 127, 255], np.uint8)).tolist()
    [0.5, 1.0, nan]
    """
    values = np.ldexp(1.0, codes.astype(np.int32) - 127)
    return np.where(codes == 255, np.nan, values)


def opened(path: Path) -> Opened:
    """The tensors of a checkpoint folder or of one safetensors file; raises ModelError where there is none."""
    if path.is_file():
        return _with(path, {}, {path.name: path}, {})
    if not path.is_dir():
        raise ModelError(f"{path} is neither a folder nor a file: name a checkpoint folder or a weight file.")
    config = config_of(path)
    named = config.get("transformers_weights")
    first = str(named) if named is not None else WEIGHTS if (path / WEIGHTS).exists() else INDEX
    if "/" in first or "\\" in first or first.startswith("."):
        raise ModelError(f"{path / CONFIG} names weights that do not lie beside it: choose another checkpoint.")
    if not (path / first).exists():
        raise ModelError(f"{path} holds neither {WEIGHTS} nor {INDEX}: choose a folder with safetensors weights.")
    if not first.endswith(".index.json"):
        return _with(path, config, {first: path / first}, {})
    places = read_json(path / first).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()) or not places:
        raise ModelError(f"{path / first} has no weight_map that names the weight files: fetch the checkpoint anew.")
    if outside := next((name for name in places.values() if Path(name).name != name or name.startswith(".")), None):
        raise ModelError(f"{path / first} names the weight file “{outside[:80]}”, which does not lie beside it.")
    return _with(path, config, {name: path / name for name in sorted(set(places.values()))}, places)


def _with(path: Path, config: dict[str, Any], files: dict[str, Path], places: dict[str, str]) -> Opened:
    tensors: dict[str, Stored] = {}
    owners: dict[str, Path] = {}
    short: dict[str, Path] = {}
    for file in files.values():
        if not file.is_file():
            continue
        size, own = file.stat().st_size, stored_tensors(file)
        tensors |= own
        owners |= dict.fromkeys(own, file)
        short |= {name: file for name, tensor in own.items() if tensor.end > size}
    absent = tuple(name for name, file in files.items() if not file.is_file())
    misplaced = tuple(
        name for name, place in places.items() if place not in absent and owners.get(name) != files[place]
    )
    misfit = tuple(name for name, tensor in tensors.items() if not _fits(tensor))
    return Opened(path, config, tensors, owners, short, misfit, absent, misplaced)


def _fits(tensor: Stored) -> bool:
    """Whether a tensor's bytes are as many as its shape and dtype ask for."""
    size = BYTES.get(tensor.dtype)
    return size is None or math.prod(tensor.shape) * size == tensor.end - tensor.begin


def claim_of(checkpoint: Opened) -> Any:
    """The quantization_config of a checkpoint, or ModelOpt's or AutoGPTQ's file in its place; None where there is none.

    Raises ModelError for a file that cannot be read.
    """
    value: Any = checkpoint.config
    for field in quantized_field(checkpoint.config).split("."):
        value = value.get(field) if field else None
    if value:
        return value
    if checkpoint.path.is_dir():
        for name, method in QUANTIZED_FILES.items():
            if (file := checkpoint.path / name).exists():
                return {"quant_method": method} | read_json(file)
    return None
