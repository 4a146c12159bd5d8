"""A quantized checkpoint loaded: decoded into a plain folder for as long as it takes, and read from there."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch

from fp8dash.errors import ModelError
from fp8dash.model.imported.origins import Origins, StoredModel
from fp8dash.model.load import LoadedModel, load
from fp8dash.model.probe import first_line, out_of_memory
from fp8dash.model.trust import trusted
from fp8dash.places import scratch

SAMPLE = 20_000  # characters by which two tokenizers are compared
ROOM = 1 << 30  # bytes that must stay free on the disk


def load_checkpoint(checkpoint: StoredModel, cache: Path, device: torch.device) -> tuple[LoadedModel, Origins]:
    """The model of a quantized checkpoint with decoded weights in bfloat16, and where each comes from.

    Raises ModelError. The decoded files take two bytes a weight on the disk, until the model is read from them.
    """
    cache.mkdir(parents=True, exist_ok=True)
    _check_space(checkpoint, cache)
    place = scratch(cache)
    try:
        origins = checkpoint.write_plain(place)
        loaded = load(trusted(place), device, checkpoint.content_hash)
    except ModelError as error:
        raise ModelError(str(error).replace(str(place), str(checkpoint.place))) from error
    except (ValueError, IndexError, KeyError, TypeError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        raise ModelError(
            f"The codes of {checkpoint.place} cannot be decoded ({first_line(error)}): its tensors do not fit "
            "together. `fp8dash inspect` lists what is wrong; download it again."
        ) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return dataclasses.replace(loaded, folder=checkpoint.place), origins


def check_same_tokens(tokenizer: Any, checkpoint: StoredModel, text: str) -> None:
    """Raises ModelError where the checkpoint's tokenizer cuts a text into other tokens than the model's."""
    from transformers import AutoTokenizer

    try:
        place = checkpoint.place
        named = {"gguf_file": place.name} if place.is_file() else {}
        folder = place.parent if place.is_file() else place
        own = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **named)
        ids, own_ids = (one(text[:SAMPLE], add_special_tokens=False)["input_ids"] for one in (tokenizer, own))
    except Exception as error:  # a tokenizer's files can make transformers raise anything
        why = " ".join(str(error).split())[:160].rstrip(".")
        raise ModelError(
            f"The tokenizer of {checkpoint.place} cannot be read ({why}): download it again, or choose another."
        ) from error
    if ids != own_ids:
        raise ModelError(
            f"{checkpoint.place} reads text by another tokenizer than the model: their KLD would compare different "
            "tokens. Choose the checkpoint that it was made from."
        )


def _check_space(checkpoint: StoredModel, cache: Path) -> None:
    needed, free = 2 * checkpoint.elements, shutil.disk_usage(cache).free
    if needed + ROOM > free:
        raise ModelError(
            f"Decoding {checkpoint.place} takes {needed / 1e9:.1f} GB of disk for a while, and {cache} has "
            f"{free / 1e9:.1f} GB free: free some, or move the data folder (FP8DASH_DATA_DIR)."
        )
