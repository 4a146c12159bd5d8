"""A quantized checkpoint that is to be measured: found, read by its headers and scales, and refused where it lies."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8dash.choose.models.claims import quantized_of
from fp8dash.choose.models.hub_id import hub_id
from fp8dash.choose.models.quantized import Quantization
from fp8dash.choose.recipe import Recipe, parse_recipe
from fp8dash.errors import ModelError
from fp8dash.model.folder import content_hash
from fp8dash.model.hub import fetched
from fp8dash.model.xray.faults import FAULTS, Fault, faults_of
from fp8dash.model.xray.matrices import StoredMatrix, matrices_of
from fp8dash.model.xray.tensors import WIDE, Opened, claim_of, opened
from fp8dash.model.xray.xray import recipe_of

BEARABLE = {  # faults that change what engines make of a checkpoint, and not what its codes stand for
    "scale of 1.0", "not powers of two", "split fused group", "missing kv scale", "tied head", "dtype",
    "rounding, not GPTQ",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A quantized checkpoint whose codes can be decoded."""

    folder: Path
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
        facts = {"recipe": self.recipe.text, "checkpoint_hash": self.content_hash}
        facts |= {"checkpoint_scheme": f"{claim.scheme}, {claim.method}"}
        unsaid = list(dict.fromkeys(text for group in claim.groups for text in group.unsaid))
        faults = [f"{fault.kind}: {FAULTS[fault.kind]}" for fault in self.faults]
        return facts | {key: texts for key, texts in {"unsaid": unsaid, "faults": faults}.items() if texts}


def located(name: str) -> Path:
    """The folder of a quantized checkpoint, from a path or a Hub id; raises ModelError."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if (named := hub_id(name)) is None:
        raise ModelError(
            f"There is no checkpoint “{name}”: give the full path of its folder, or a Hub id like org/name."
        )
    return fetched(named)


def read_checkpoint(name: str) -> Checkpoint:
    """The checkpoint of a folder or a Hub id; raises ModelError for what is not quantized, or cannot be decoded."""
    folder = located(name)
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


def scale_value(checkpoint: Opened, name: str) -> float | None:
    """A scale of one number; None where none is stored, or one that no product can use."""
    if name not in checkpoint.tensors or checkpoint.tensors[name].dtype not in WIDE:
        return None
    values = checkpoint.values(name).reshape(-1)
    value = float(values[0]) if values.size == 1 else math.nan
    return value if math.isfinite(value) and value > 0 else None
