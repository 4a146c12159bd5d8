"""A checkpoint folder as files: which of them are read when the model is loaded, and what their JSON says. No torch.

Anything else in the folder (an older copy of the weights, a shard that no index names, a file of another tool) is
not part of the model: it is neither trusted, hashed, sized nor exported.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8dash.errors import ModelError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER = (  # what tokenizers of transformers read, and the prompts' frames
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "tekken.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
GENERATION = "generation_config.json"
PROCESSORS = "*processor_config.json"  # of images and sound: engines ask for them
WRITERS = ("transformers_version", "_name_or_path", "name_or_path", "is_local", "local_files_only")
LARGEST_HEADER = 100_000_000  # bytes, as safetensors itself has it
LARGEST_JSON = 64 << 20  # bytes; an index of a hundred thousand tensors takes ten million


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a safetensors file, by its header."""

    dtype: str  # as safetensors calls it: BF16, F8_E4M3, U8
    shape: tuple[int, ...]
    begin: int  # the first byte of its values in the file, and the first after them
    end: int


def config_of(folder: Path) -> dict[str, Any]:
    """The model's config.json; raises ModelError."""
    return read_json(folder / CONFIG)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The weight files that transformers reads from a folder, in the order of their names; raises ModelError.

    `model.safetensors` where there is one, else the files that `model.safetensors.index.json` names; a config may name
    another file or index with `transformers_weights` (transformers 5.24, `_get_resolved_checkpoint_files`).
    """
    named = config_of(folder).get("transformers_weights")
    if named is not None:
        first = _inside(folder, named, CONFIG)
    else:
        first = folder / (WEIGHTS if (folder / WEIGHTS).exists() else INDEX)
        if not first.exists():
            raise ModelError(f"{folder} has neither {WEIGHTS} nor {INDEX}: choose a folder with safetensors weights.")
    if not first.name.endswith(".index.json"):
        return (_regular(first),)
    places = read_json(first).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelError(f"{first} has no weight_map that names the weight files: download the checkpoint again.")
    names = {name if isinstance(name, str) else "" for name in places.values()}
    return tuple(_regular(_inside(folder, name, first.name)) for name in sorted(names))


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """The files from which transformers makes the tokenizer and its chat templates, in the order of their names."""
    return _matching(folder, TOKENIZER)


def companion_files(folder: Path) -> tuple[Path, ...]:
    """What belongs to a checkpoint beside its weights, index and config: what engines read of it too."""
    return _matching(folder, (*TOKENIZER, GENERATION, PROCESSORS))


def copy_companions(folder: Path, place: Path) -> None:
    """Copies a checkpoint's companion files to another folder."""
    for file in companion_files(folder):
        copy = place / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def write_index(places: dict[str, str], place: Path, size: int) -> None:
    """Writes which file of a folder holds each tensor, where they are in several; `size` is their bytes."""
    if len(set(places.values())) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (place / INDEX).write_text(json.dumps(index, indent=2), "utf-8")


def content_hash(folder: Path) -> str:
    """SHA-256 over a model's weight files, its config and its tokenizer, whatever the folder is called.

    The same weights read by another tokenizer are another model: its windows hold other tokens.
    """
    digest = hashlib.sha256()
    digest.update(_canonical(config_of(folder)))
    for file in (*weight_files(folder), *tokenizer_files(folder)):
        if file.suffix == ".json":
            digest.update(_canonical(read_json(file)))
        else:
            with file.open("rb") as stream:
                hashlib.file_digest(stream, lambda: digest)  # goes on with what was digested before
    return digest.hexdigest()


def stored_tensors(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, read from its header alone; raises ModelError."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(LARGEST_HEADER, file.stat().st_size):
                raise ValueError("its header is longer than the file")
            entries = json.loads(stream.read(length))
        entries.pop("__metadata__", None)
        return {name: _entry(entry, 8 + length) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{file} cannot be loaded: it is not a safetensors file ({error}). Download it again."
        ) from error


def _entry(entry: dict[str, Any], start: int) -> Stored:
    begin, end = (int(offset) + start for offset in entry["data_offsets"])
    shape = tuple(map(int, entry["shape"]))
    if not start <= begin <= end or min(shape, default=0) < 0:
        raise ValueError("a tensor ends before it begins")
    return Stored(str(entry["dtype"]), shape, begin, end)


def read_json(file: Path) -> dict[str, Any]:
    """The object of a JSON file; raises ModelError for one that cannot be read, is too large or holds anything else."""
    try:
        size = _regular(file).stat().st_size
        if size > LARGEST_JSON:
            raise ModelError(
                f"{file} is larger than {LARGEST_JSON >> 20} MiB, too large for a {file.name}: replace it."
            )
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}. Download the checkpoint again.") from error
    except RecursionError as error:
        raise ModelError(f"{file} is nested too deeply to be read: download the checkpoint again.") from error
    if not isinstance(content, dict):
        kind = "null" if content is None else type(content).__name__
        raise ModelError(f"{file} contains a JSON {kind} where an object is expected: download the checkpoint again.")
    return content


def _canonical(content: dict[str, Any]) -> bytes:
    """A JSON object without what only tells who wrote it."""
    kept = {key: value for key, value in content.items() if key not in WRITERS}
    return json.dumps(kept, sort_keys=True).encode()


def _matching(folder: Path, patterns: tuple[str, ...]) -> tuple[Path, ...]:
    return tuple(sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}))


def _inside(folder: Path, name: Any, source: str) -> Path:
    """The file of this plain name in the folder; raises ModelError for a path that leads elsewhere."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ModelError(
            f"{folder / source} names the weight file “{name}”, which is not in the same folder: choose a checkpoint "
            "whose files are in one folder."
        )
    return folder / name


def _regular(file: Path) -> Path:
    """The file, which must be a regular one: a pipe or device would be read without end. Raises ModelError."""
    if not file.exists():
        raise ModelError(f"{file} is missing: download the checkpoint again.")
    if not file.is_file():
        raise ModelError(f"{file} is not a regular file: choose a folder in Hugging Face layout.")
    return file
