"""A quantized checkpoint loaded: decoded into a plain folder for as long as it takes, and read from there."""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fp8dash.errors import ModelError
from fp8dash.model.imported.checkpoint import Checkpoint
from fp8dash.model.imported.plain import write_plain
from fp8dash.model.load import LoadedModel, load
from fp8dash.model.trust import trusted
from fp8dash.model.xray.matrices import StoredMatrix
from fp8dash.places import scratch

SAMPLE = 20_000  # characters by which two tokenizers are compared
ROOM = 1 << 30  # bytes that must stay free on the disk


def load_checkpoint(
    checkpoint: Checkpoint, cache: Path, device: torch.device
) -> tuple[LoadedModel, Mapping[bytes, StoredMatrix]]:
    """The model of a quantized checkpoint with decoded weights in bfloat16, and its matrices by their fingerprints.

    Raises ModelError. The decoded files take two bytes a weight on the disk, until the model is read from them.
    """
    cache.mkdir(parents=True, exist_ok=True)
    _check_space(checkpoint, cache)
    place = scratch(cache)
    try:
        prints = write_plain(checkpoint, place)
        loaded = load(trusted(place), device)
    except ModelError as error:
        raise ModelError(str(error).replace(str(place), str(checkpoint.folder))) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
    own = dataclasses.replace(loaded, folder=checkpoint.folder, content_hash=checkpoint.content_hash)
    return own, prints


def check_same_tokens(tokenizer: Any, checkpoint: Checkpoint, text: str) -> None:
    """Raises ModelError where the checkpoint's tokenizer cuts a text into other tokens than the model's."""
    from transformers import AutoTokenizer

    try:
        own = AutoTokenizer.from_pretrained(checkpoint.folder, local_files_only=True, trust_remote_code=False)
        ids, own_ids = (one(text[:SAMPLE])["input_ids"] for one in (tokenizer, own))
    except Exception as error:  # a tokenizer's files can make transformers raise anything
        raise ModelError(f"{checkpoint.folder} has no tokenizer that can be read: download it again.") from error
    if ids != own_ids:
        raise ModelError(
            f"{checkpoint.folder} reads text by another tokenizer than the model: their KLD would compare different "
            "tokens. Choose the checkpoint that it was made from."
        )


def _check_space(checkpoint: Checkpoint, cache: Path) -> None:
    opened = checkpoint.opened
    coded = {matrix.codes: 2 * matrix.elements for matrix in checkpoint.matrices if matrix.packing}
    needed = sum(coded.get(name, stored.end - stored.begin) for name, stored in opened.tensors.items())
    free = shutil.disk_usage(cache).free
    if needed + ROOM > free:
        raise ModelError(
            f"Decoding {checkpoint.folder} takes {needed / 1e9:.1f} GB of disk for a while, and {cache} has "
            f"{free / 1e9:.1f} GB free: free some, or move the data folder (FP8DASH_DATA_DIR)."
        )
