"""A quantized checkpoint that is to be measured: found, read by its headers and scales, and refused where it lies."""

import math
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8dash.choose.casts import Cast
from fp8dash.choose.models.claims import quantized_of
from fp8dash.choose.models.hub_id import hub_id
from fp8dash.choose.models.quantized import NIBBLES, Quantization
from fp8dash.choose.recipe import Recipe, parse_recipe
from fp8dash.errors import ModelError
from fp8dash.model.folder import content_hash
from fp8dash.model.hub import fetched, revision_of
from fp8dash.model.imported.decode import decoded
from fp8dash.model.imported.gguf_file import GgufCheckpoint
from fp8dash.model.imported.origins import Origin, Origins, StoredModel
from fp8dash.model.imported.plain import name_of, write_plain
from fp8dash.model.xray.faults import FAULTS, Fault, faults_of
from fp8dash.model.xray.matrices import StoredMatrix, matrices_of
from fp8dash.model.xray.scales import input_scale_of, kv_scale_of
from fp8dash.model.xray.tensors import WIDE, Opened, claim_of, opened
from fp8dash.model.xray.xray import bytes_of, castings_of, recipe_of

BEARABLE = {  # faults that change what engines make of a checkpoint, and not what its codes stand for
    "scale of 1.0", "not powers of two", "split fused group", "global scales", "missing kv scale", "tied head", "dtype",
    "rounding, not GPTQ",
}  # fmt: skip
LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder of safetensors whose codes can be decoded."""

    place: Path
    opened: Opened
    quantization: Quantization
    matrices: tuple[StoredMatrix, ...]
    recipe: Recipe  # as it is stored, in our words as far as they go
    content_hash: str
    faults: tuple[Fault, ...]  # of BEARABLE

    @property
    def facts(self) -> dict[str, Any]:
        """What is stored about it with a run."""
        claim = self.quantization
        facts: dict[str, Any] = {"recipe": self.recipe.text, "checkpoint_hash": self.content_hash}
        facts |= {"checkpoint_scheme": f"{claim.scheme}, {claim.method}"} | revision_of(self.place)
        facts |= {"castings": [casting.fact for casting in castings_of(self.matrices)]}
        unsaid = list(dict.fromkeys(text for group in claim.groups for text in group.unsaid))
        faults = [f"{fault.kind}: {FAULTS[fault.kind]}" for fault in self.faults]
        return facts | {key: texts for key, texts in {"unsaid": unsaid, "faults": faults}.items() if texts}

    @property
    def elements(self) -> int:
        """Weights that it stands for."""
        coded = {matrix.codes: matrix.elements for matrix in self.matrices}
        return sum(coded.get(name, math.prod(stored.shape)) for name, stored in self.opened.tensors.items())

    def write_plain(self, folder: Path) -> Origins:
        """Writes a plain model with decoded weights into an empty folder."""
        by_module = {matrix.module: _origin(self.opened, matrix) for matrix in self.matrices}
        prints = write_plain(self.opened, self.matrices, folder)
        by_name = {name_of(matrix).removesuffix(".weight"): by_module[matrix.module] for matrix in self.matrices}
        return Origins(by_name, {print_: by_module[module] for print_, module in prints.items()})

    def kv_scales(self) -> dict[int, dict[str, Tensor]]:
        """By layer, the stored scales of keys, "k", and of values, "v"."""
        by_layer: dict[int, dict[str, Tensor]] = {}
        for name in self.opened.tensors:
            scaled, layer = kv_scale_of(name), LAYER.search(name)
            if scaled and layer:
                values = torch.from_numpy(self.opened.values(name).reshape(-1)).float()
                by_layer.setdefault(int(layer[1]), {})[scaled[1]] = values
        return by_layer


def _origin(opened: Opened, matrix: StoredMatrix) -> Origin:
    if not matrix.packing:
        return Origin(matrix.module, "")
    zeros = ", with zero points" if matrix.claim and matrix.claim.zero_points else ""
    inputs = matrix.claim.activations if matrix.claim else None
    return Origin(
        name=matrix.module,
        layout=f"{matrix.packing}{zeros}",
        text=matrix.cast.text if matrix.cast else "",
        cast=matrix.cast,
        bits=8 * bytes_of(opened, matrix) / matrix.elements,
        inputs=inputs,
        scale=_input_scale(opened, matrix, inputs) if inputs else None,
        weights=partial(decoded, opened, matrix) if matrix.count == 1 else None,
    )


def _input_scale(opened: Opened, matrix: StoredMatrix, cast: Cast) -> float | None:
    """The stored scale of a matrix's inputs; compressed-tensors' global scale divides. Raises ModelError."""
    if not (cast.is_observed or cast.rule.outer):
        return None
    name, _ = input_scale_of(opened, matrix)
    value = _value(opened, name)
    if value is None and cast.is_observed:
        raise ModelError(
            f"{opened.path} scales activations by {name}, which is no single number that a product can use."
        )
    return 1 / value if value and matrix.packing == NIBBLES else value


def located(name: str) -> Path:
    """The folder or GGUF file of a quantized checkpoint, from a path or a Hub id; raises ModelError."""
    folder = Path(name).expanduser()
    if folder.is_dir() or (folder.is_file() and folder.suffix == ".gguf"):
        return folder
    if (named := hub_id(name)) is None:
        raise ModelError(
            f"There is no checkpoint “{name}”: give the full path of its folder or GGUF file, or a Hub id."
        )
    return fetched(named)


def read_checkpoint(name: str) -> StoredModel:
    """The checkpoint of a folder, a GGUF file or a Hub id; raises ModelError for what is not quantized, or cannot be
    decoded."""
    folder = located(name)
    if folder.is_file():
        return _read_gguf(folder, name)
    files = opened(folder)
    config = claim_of(files)
    if not config:
        raise ModelError(f"{folder} is not quantized by its config: choose it as the model, and a recipe for it.")
    claim = quantized_of(config)
    matrices = matrices_of(files, claim)
    faults = faults_of(files, matrices, claim)
    _refuse_undecodable(folder, claim, matrices, faults)
    text = recipe_of(matrices, claim)
    recipe = replace(parse_recipe(text), stored=name) if text else Recipe(stored=name, kv=claim.kv)
    return Checkpoint(folder, files, claim, matrices, recipe, content_hash(folder), faults)


def _read_gguf(file: Path, name: str) -> GgufCheckpoint:
    checkpoint = GgufCheckpoint(file, name)
    if checkpoint.is_plain:
        raise ModelError(f"{file} holds no quantized tensor: choose it as the model, and a recipe for it.")
    return checkpoint


def _refuse_undecodable(
    folder: Path, claim: Quantization, matrices: tuple[StoredMatrix, ...], faults: tuple[Fault, ...]
) -> None:
    if fault := next((fault for fault in faults if fault.kind not in BEARABLE), None):
        detail = f" ({fault.detail})" if fault.detail else ""
        raise ModelError(
            f"{folder} cannot be measured: {FAULTS[fault.kind]}, as in {fault.where[0]}{detail}. `fp8dash inspect` "
            "lists all that is wrong; download it again, or choose another checkpoint."
        )
    if not any(matrix.packing for matrix in matrices):
        raise ModelError(f"{folder} has a quantization_config and no codes: choose a checkpoint that stores them.")
    if odd := next((matrix.module for matrix in matrices if matrix.packing and matrix.format is None), None):
        raise ModelError(
            f"{folder} stores {odd} in integers of another width than 4 or 8 bits, which are not decoded here: choose "
            "a checkpoint of 4 or 8 bits."
        )
    if odd := next((text for group in claim.groups for text in group.unsaid if text.startswith("activations")), None):
        raise ModelError(
            f"{folder} asks for {odd}, a cast of activations that cannot be emulated here: choose a checkpoint with "
            "symmetric activations, or of weights alone."
        )


def _value(checkpoint: Opened, name: str) -> float | None:
    """A scale of one number; None where none is stored, or one that no product can use."""
    if name not in checkpoint.tensors or checkpoint.tensors[name].dtype not in WIDE:
        return None
    values = checkpoint.values(name).reshape(-1)
    value = float(values[0]) if values.size == 1 else math.nan
    return value if math.isfinite(value) and value > 0 else None
