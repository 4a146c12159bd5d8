"""Whether a checkpoint folder is a plain model that can be measured: decided from its files, before any is loaded.

Only safetensors are read: pickles and code that comes with a checkpoint can do anything to whoever loads them. What was
quantized before is no baseline: loaders drop scales that they do not know, and every number would be about other
weights. No torch.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fp8dash.choose.models.quantized import QUANTIZED_FILES
from fp8dash.errors import ModelError
from fp8dash.model.folder import CONFIG, INDEX, WEIGHTS, Stored, config_of, read_json, stored_tensors, weight_files

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
QUANTIZED_FIELDS = ("quantization_config", "compression_config", "quantization", "quant_config", "quantize_config")
QUANTIZED_NAMES = re.compile(
    r"(_scale|_scales|_scale_inv|_zero_point|_zeros|_packed|_global_scale|_scale_2|_blocks|\.SCB|\.scales|\.qweight"
    r"|\.qzeros|\.qscales|\.g_idx|_g_idx|\.absmax|\.quant_map|quant_state\S*|\.weight_shape|_scaling_factor)$"
)
WIDE = ("F64", "F32", "F16", "BF16")  # dtypes of weights that were never quantized
WEIGHT = ".weight"
ADAPTER = "adapter_config.json"
CODE = "auto_map"
DEEPEST = 8  # levels of a config that are searched
LAYERS = re.compile(r"^(n|num)_(hidden_|decoder_)?layers?$")
EXPERTS = re.compile(r"^(n|num)_(local_|routed_|shared_)?experts$")


def trusted(folder: Path) -> Path:
    """The folder, where it holds a plain model in safetensors; raises ModelError, naming what does not fit."""
    _refuse_without_weights(folder)
    config = config_of(folder)
    if (folder / ADAPTER).exists():
        raise ModelError(
            f"{folder} holds an adapter ({ADAPTER}): merge it into its model and choose the merged folder."
        )
    if name := quantized_field(config):
        raise _quantized(folder, f"its config says {name}")
    if name := next((name for name in QUANTIZED_FILES if (folder / name).exists()), ""):
        raise _quantized(folder, f"it holds {name}")
    tensors = {name: tensor for file in weight_files(folder) for name, tensor in stored_tensors(file).items()}
    refuse_narrow(folder, tensors)
    _refuse_boundless(folder, config, tensors)
    return folder


def quantized_field(config: Any) -> str:
    """The field by which a config, or one nested in it, says that its weights are quantized; empty where none does."""
    return next((path for path, value in _fields(config) if path.split(".")[-1] in QUANTIZED_FIELDS and value), "")


def refuse_narrow(folder: Path, tensors: dict[str, Stored]) -> None:
    """Raises ModelError where a weight is stored in fewer than 16 bits: what loaders make of it is not the model."""
    for name, tensor in tensors.items():
        mask = len(tensor.shape) == 4 and name.endswith("bias")  # a causal mask, which old GPTs store
        narrow = tensor.dtype.startswith("F8") or (tensor.dtype in ("I8", "U8", "F4", "F6") and not mask)
        if narrow or (name.endswith(WEIGHT) and tensor.dtype not in WIDE):
            raise _quantized(folder, f"{name} is stored as {tensor.dtype}")


def refuse_unread(folder: Path, unread: Iterable[str]) -> None:
    """Raises ModelError where a loader left out tensors that belong to quantized weights."""
    if names := sorted(name for name in unread if QUANTIZED_NAMES.search(name)):
        raise _quantized(folder, f"it contains {', '.join(names[:3])}, which loaders that do not know its method drop")


def refuse_missing(folder: Path, missing: Iterable[str]) -> None:
    """Raises ModelError where the files lack weights: transformers would fill them with random numbers."""
    if names := sorted(missing):
        raise ModelError(
            f"{folder} lacks weights that its config asks for ({', '.join(names[:3])}): download it again."
        )


def own_code(folder: Path) -> bool:
    """Whether the checkpoint brings code of its own, which is never run: transformers' is, where it knows the type."""
    files = (folder / CONFIG, folder / "tokenizer_config.json")
    return any(CODE in read_json(file) for file in files if file.exists())


def _quantized(folder: Path, why: str) -> ModelError:
    return ModelError(
        f"{folder} is quantized already ({why}): choose the BF16 checkpoint that it was made from, which recipes are "
        f"measured against. To measure what it stores, give the recipe stored={folder}."
    )


def _refuse_without_weights(folder: Path) -> None:
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs and not (folder / CONFIG).exists():
        raise gguf_refused(ggufs[0])
    if not (folder / CONFIG).exists():
        raise ModelError(f"{folder} has no config.json: choose a folder in Hugging Face layout.")
    named = config_of(folder).get("transformers_weights")
    if any((folder / name).exists() for name in (WEIGHTS, INDEX)) or named is not None:
        return
    if any(file for pattern in PICKLES for file in folder.glob(pattern)):
        raise ModelError(
            f"{folder} has only pickled weights, which can run code when loaded: convert them to safetensors."
        )
    raise ModelError(
        f"{folder} has no *.safetensors weights under the names that loaders read ({WEIGHTS}, or {INDEX} and the "
        "files that it names): choose a folder that does."
    )


def gguf_refused(file: Path) -> ModelError:
    """The message for a folder of GGUF files, with a remedy."""
    return ModelError(f"{file.parent} holds GGUF files and no config.json: choose one of its files, such as {file}.")


def _refuse_boundless(folder: Path, config: dict[str, Any], tensors: dict[str, Stored]) -> None:
    """Raises ModelError for a config that asks for more layers or experts than its files can hold weights for."""
    sizes = [size for tensor in tensors.values() for size in tensor.shape]
    for path, value in _fields(config):
        name = path.split(".")[-1]
        most = len(tensors) if LAYERS.match(name) else max(len(tensors), *sizes, 0) if EXPERTS.match(name) else None
        if most is not None and isinstance(value, int | float) and value > most:
            raise ModelError(
                f"{folder}/{CONFIG} asks for {path} = {value:,}, but the weight files hold {len(tensors):,} tensors: "
                "config and weights belong to different models."
            )


def _fields(config: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every field of a config and of those nested in it, by its path."""
    if not isinstance(config, dict) or depth > DEEPEST:
        return
    for key, value in config.items():
        yield f"{path}{key}", value
        yield from _fields(value, f"{path}{key}.", depth + 1)
