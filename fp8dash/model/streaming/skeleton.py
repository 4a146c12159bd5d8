"""What is known of a model whose weights stay in their files: its modules and their shapes, and its tokenizer."""

from pathlib import Path
from typing import Any

from fp8dash.errors import ModelError
from fp8dash.model.folder import content_hash
from fp8dash.model.load import LoadedModel, context_of
from fp8dash.model.probe import skeleton_of, why_not_loaded


def load_skeleton(folder: Path) -> LoadedModel:
    """The model of a trusted folder on the meta device, without memory for weights; raises ModelError."""
    from transformers import AutoConfig, AutoTokenizer

    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **here)
        model = skeleton_of(AutoConfig.from_pretrained(folder, **here))
    except Exception as error:  # a config can make transformers raise anything
        raise ModelError(why_not_loaded(folder, error)) from error
    return LoadedModel(model, tokenizer, folder, content_hash(folder), context_of(model))
