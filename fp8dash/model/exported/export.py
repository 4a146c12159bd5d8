"""Writes a cast model as a compressed-tensors checkpoint: the same codes and scales that were measured.

Weights are read from the model's own files one tensor at a time and cast anew: the model in memory holds decoded
values, whose rounding to bfloat16 would shift the scales. The folder is made beside its place and renamed into it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fp8dash.choose.models.checkpoint import quantization_config
from fp8dash.choose.models.groups import is_routed_expert
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.records import ROUTER, Artefact, Progress
from fp8dash.errors import ModelError
from fp8dash.model.folder import CONFIG, WEIGHTS, config_of, copy_companions, stored_tensors, weight_files, write_index
from fp8dash.model.linears import CAST_LINEARS
from fp8dash.model.outer import Outers
from fp8dash.model.parts import parts_of
from fp8dash.model.tensors import DTYPE
from fp8dash.places import scratch
from fp8dash.quant.cast import Quantized, quantize
from fp8dash.quant.kv_cache import SCALES
from fp8dash.quant.packing import pack

ROUTED_EXPERTS = r"re:.*\.experts\..*"  # as compressed-tensors reads it
WEIGHT, KEYS = ".weight", ".k_proj"


def export(
    model: Any, folder: Path, names: Mapping[str, str], recipe: Recipe, place: Path
) -> Generator[Progress, None, Artefact]:
    """Progress tensor by tensor; returns what was written to `place`, of a model that was cast and its own files.

    `names` are those of `stored_names` before the cast. Raises InvalidChoice for a recipe that no checkpoint holds,
    ModelError where a weight is not in the files.
    """
    linears = [name for name, module in model.named_modules() if isinstance(module, CAST_LINEARS)]
    config = quantization_config(recipe, linears, [names.get(name, name) for name in _ignored(model)])
    for group in config["config_groups"].values():
        group["targets"] = [names.get(target, target) for target in group["targets"]]
    cast = {names.get(name, name): name for name in linears}
    place.parent.mkdir(parents=True, exist_ok=True)
    made = scratch(place.parent)
    try:
        yield from _write_weights(model, folder, made, recipe, cast, _made_beforehand(model, names))
        _write_rest(folder, made, config)
        shutil.rmtree(place, ignore_errors=True)
        made.rename(place)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    size, digest = _measured(place)
    return Artefact("checkpoint", str(place), config["format"], size, digest)


def _ignored(model: Any) -> list[str]:
    """What engines must not treat as cast: Linears and routers that were kept, and experts, whose names differ."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    uncast = [part for part in parts_of(model) if not isinstance(model.get_submodule(part.module), CAST_LINEARS)]
    routers = [part.module for part in uncast if part.group == ROUTER]
    experts = [ROUTED_EXPERTS] if any(part.fixed and is_routed_expert(part.name) for part in uncast) else []
    return list(dict.fromkeys((*linears, *routers, *experts)))


def stored(q: Quantized, name: str) -> dict[str, Tensor]:
    """A weight's codes and scales under the names and in the types that compressed-tensors reads."""
    fmt, rule = q.cast.format, q.cast.rule
    tensors = {f"{name}.weight": q.codes} if fmt.bits == 8 else {f"{name}.weight_packed": pack(q.codes, fmt)}
    if fmt.name == "int4":
        tensors[f"{name}.weight_shape"] = torch.tensor(q.codes.shape, dtype=torch.int64)
    scales = q.scales.view(1) if q.cast.tile.name == "tensor" else q.scales
    if rule.stored == "e8m0":
        scales = scales.to(torch.float8_e8m0fnu).view(torch.uint8)
    elif rule.stored == "e4m3":
        scales = scales.to(torch.float8_e4m3fn)
    tensors[f"{name}.weight_scale"] = scales
    if q.outer is not None:  # there it multiplies, here it divides
        tensors[f"{name}.weight_global_scale"] = (1 / q.outer).view(1)
    return {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}


def _write_weights(
    model: Any, folder: Path, made: Path, recipe: Recipe, cast: Mapping[str, str], scales: dict[str, Tensor]
) -> Generator[Progress, None, None]:
    """Each file of the model as a file of the same name, and the index that tells where each tensor is.

    `cast` are the model's names by the files'.
    """
    read, missing, total, done = _reading(model, cast), set(cast), 0, 0
    outers = Outers(recipe, cast.values(), _weight_of(folder, cast))
    places: dict[str, str] = {}
    files = weight_files(folder)
    for file in files:
        written: dict[str, Tensor] = {}
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (not a mapping)
                name = key.removesuffix(WEIGHT)
                yield Progress("export", done := done + 1, max(done, len(cast)), key)
                own = cast.get(name, "") if key.endswith(WEIGHT) else ""
                weights = recipe.of(own).weights if own else None
                tensor = read(key, tensors.get_tensor(key))
                written |= stored(quantize(tensor, weights, outers.of(own)), name) if weights else {key: tensor}
                missing -= {name} if weights else set()
        if not places:
            written |= scales
        target = file.name if len(files) > 1 else WEIGHTS
        save_file(written, made / target, metadata={"format": "pt"})
        places |= dict.fromkeys(written, target)
        total += sum(int(tensor.nbytes) for tensor in written.values())
    if missing:
        raise ModelError(f"{folder} has no weight named {min(missing)}: this model cannot be exported.")
    write_index(places, made, total)


def _reading(model: Any, cast: Mapping[str, str]) -> Callable[[str, Tensor], Tensor]:
    """What makes of a tensor in the files what the run read: bfloat16, but for what transformers keeps in float32.

    That is told by its name, or by the last word of one that transformers changes.
    """
    held = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    wide = {name.rpartition(".")[2] for name, dtype in held.items() if dtype != DTYPE}

    def read(key: str, tensor: Tensor) -> Tensor:
        is_cast = key.removesuffix(WEIGHT) in cast
        is_rounded = is_cast or (held[key] == DTYPE if key in held else key.rpartition(".")[2] not in wide)
        return tensor.to(DTYPE) if is_rounded and tensor.is_floating_point() else tensor

    return read


def _weight_of(folder: Path, cast: Mapping[str, str]) -> Callable[[str], Tensor]:
    """Reads the weight of a cast module from the model's files, as the run read it."""
    files = {key: file for file in weight_files(folder) for key in stored_tensors(file)}
    keys = {own: f"{name}{WEIGHT}" for name, own in cast.items()}

    def read(module: str) -> Tensor:
        with safe_open(files[keys[module]], framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(keys[module])
        return tensor.to(DTYPE)

    return read


def _made_beforehand(model: Any, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Static scales of activations, keys and values, under the names that engines read; raises ModelError."""
    tensors = {}
    for name, module in model.named_modules():
        scale = module.activations.scale if isinstance(module, CAST_LINEARS) and module.activations else None
        if scale is not None:
            tensors[f"{names.get(name, name)}.input_scale"] = torch.tensor([scale.present])
    kv = getattr(model, SCALES, ())
    keys = [names.get(name, name) for name, _ in model.named_modules() if name.endswith(KEYS)] if kv else []
    attentions = [name.removesuffix(KEYS) for name in keys]
    if len(attentions) != len(kv):
        raise ModelError(
            "kv= is refused: this model's attention has no k_proj of its own, after which KV scales are named "
            "(compressed-tensors); closest alternative: the recipe without kv=."
        )
    for name, (of_keys, values) in zip(attentions, kv, strict=True):
        tensors |= {f"{name}.k_scale": of_keys.float().cpu(), f"{name}.v_scale": values.float().cpu()}
    return tensors


def _write_rest(folder: Path, made: Path, quantization: dict[str, Any]) -> None:
    """The configuration, the tokenizer and the generation settings; nothing that could run."""
    copy_companions(folder, made)
    config = {key: value for key, value in config_of(folder).items() if key not in ("auto_map", "transformers_weights")}
    config = _as_read({"dtype": None} | config if "torch_dtype" not in config else config)
    config["quantization_config"] = quantization
    (made / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    os.chmod(made, 0o755)


def _as_read(config: dict[str, Any]) -> dict[str, Any]:
    """A config that says of itself and its parts what the run read them in: engines multiply in what it says."""
    named = str(DTYPE).removeprefix("torch.")
    return {
        key: _as_read(value) if isinstance(value, dict) else named if key in ("dtype", "torch_dtype") else value
        for key, value in config.items()
    }


def _measured(place: Path) -> tuple[int, str]:
    """Bytes of all files, and the SHA-256 over their names and contents in the order of names."""
    size, digest = 0, hashlib.sha256()
    for file in sorted(file for file in place.rglob("*") if file.is_file()):
        digest.update(file.relative_to(place).as_posix().encode())
        size += file.stat().st_size
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)  # continues the digest
    return size, digest.hexdigest()
