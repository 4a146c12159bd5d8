"""Models of the Hub, fetched into its own cache (HF_HOME): which commit, and what to do where that fails.

Errors are told apart by their types: the texts of huggingface_hub change.
"""

import errno
from pathlib import Path
from typing import Any

from fp8dash.choose.models.hub_id import COMMIT, HubId
from fp8dash.errors import ModelError

FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "tokenizer*", "*.txt")  # what the loader reads: no pickles
SECONDS = 10  # for the answer to the first question


def fetched(model: HubId) -> Path:
    """The folder of a model's snapshot, named after its commit, or the one file that is meant; downloaded where it is
    not there yet.

    Raises ModelError with what to do.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        asked: dict[str, Any] = {"revision": model.revision or None, "etag_timeout": SECONDS}
        if model.file:
            return Path(hf_hub_download(model.name, model.file, **asked))
        place = snapshot_download(model.name, allow_patterns=list(FILES), **asked)
    except Exception as error:  # the client raises its own errors, the HTTP library's and OSErrors alike
        raise ModelError(_why(model, error)) from error
    folder = Path(place)
    if not any(folder.rglob("*.safetensors")):
        raise ModelError(
            f"“{_shown(model)}” has no *.safetensors files, and nothing else is loaded: pickles can run code, and a "
            f"GGUF file is named by {model.name}:file.gguf. Choose a model of the Hub that has them."
        )
    return folder


def commit_of(folder: Path) -> str:
    """The commit whose snapshot a folder is; empty for any other folder.

    >>> commit_of(Path("/cache/models--org--name/snapshots/" + "a" * 40))[:4], commit_of(Path("/models/mine"))
    ('aaaa', '')
    """
    return folder.name if folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name) else ""


def revision_of(place: Path) -> dict[str, str]:
    """The commit that a checkpoint's folder or file is of, as a fact; none for what is not of the Hub."""
    commit = next((commit for above in (place, *place.parents) if (commit := commit_of(above))), "")
    return {"checkpoint_revision": commit} if commit else {}


def _why(model: HubId, error: Exception) -> str:
    """What went wrong, and what to do."""
    from huggingface_hub import constants, errors

    cache = constants.HF_HUB_CACHE
    if isinstance(error, errors.GatedRepoError):  # before what it is derived from
        return (
            f"“{model.name}” is gated: accept its terms on the Hub, log in on the worker (hf auth login, or HF_TOKEN), "
            "then retry."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"The Hub has no model “{model.name}”, or it is private: check the id; for a private one, log in on the "
            "worker (hf auth login, or HF_TOKEN)."
        )
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return f"“{_shown(model)}” has no file “{model.file}”: choose one that the Hub lists."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"“{model.name}” has no revision “{model.revision}”: choose a branch, a tag or a commit of it."
    if any(getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for cause in _causes(error)):
        return f"There is no space left for “{model.name}” in {cache}: free some, or set HF_HOME to another disk."
    if constants.HF_HUB_OFFLINE:
        return (
            f"“{_shown(model)}” is not in {cache}, and downloads are switched off (HF_HUB_OFFLINE): download it there "
            "first, or unset HF_HUB_OFFLINE."
        )
    return (
        f"“{_shown(model)}” could not be downloaded from the Hub ({type(error).__name__}), and is not in {cache}: "
        "check the worker's network, or choose “demo” or a local folder."
    )


def _shown(model: HubId) -> str:
    return f"{model.name}@{model.revision}" if model.revision else model.name


def _causes(error: BaseException | None) -> list[Any]:
    """An error and those that it came from."""
    causes: list[Any] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes
