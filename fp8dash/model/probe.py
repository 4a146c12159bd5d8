"""The first forward pass of a loaded model, to report what cannot be run or supported before anything is measured."""

import math
from pathlib import Path
from typing import Any

import torch

from fp8dash.errors import Fp8dashError, ModelError
from fp8dash.model.as_linears import few_tokens, make_linears
from fp8dash.model.folder import config_of, stored_tensors, weight_files
from fp8dash.model.head import learn_after_head, learn_body
from fp8dash.model.trust import own_code

FEW = 1 << 20  # weights more than the files hold that no check minds
MOST_HELD = 1 << 30  # numbers of masks and tables that are not stored


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: not the model's fault, and reported elsewhere."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def first_line(error: BaseException) -> str:
    """An error's first line, with its type if the line says little."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.:')}" if lines else type(error).__name__


@torch.no_grad()
def check_first_forward(model: Any, folder: Path) -> None:
    """Runs a few tokens, makes Linears of all that is multiplied by, and learns how the model makes its logits.

    Raises ModelError for whatever goes wrong.
    """
    try:
        make_linears(model)
        learn_after_head(model, learn_body(model, few_tokens(model)))
    except Fp8dashError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        raise ModelError(
            f"{folder} loads as {type(model).__name__}, but its first forward pass fails ({first_line(error)}), so "
            "nothing was measured. Download the checkpoint again, or choose another model."
        ) from error


def skeleton_of(config: Any) -> Any:
    """The model of a config on the meta device: its modules and their shapes, without memory for weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        build: Any = AutoModelForCausalLM.from_config
        return build(config, trust_remote_code=False)


def check_size(folder: Path, skeleton: Any) -> None:
    """Raises ModelError where a model asks for far more, or other, weights than the files hold."""
    stored = sum(math.prod(t.shape) for file in weight_files(folder) for t in stored_tensors(file).values())
    wanted = sum(parameter.numel() for parameter in skeleton.parameters())
    if wanted > 2 * stored + FEW:  # twice: a tied head may be counted by itself
        raise ModelError(
            f"{folder}/config.json asks for {wanted:,} weights, but the files hold {stored:,}: config and weights "
            "belong to different models."
        )
    held = sum(buffer.numel() for buffer in skeleton.buffers())
    if held > MOST_HELD + stored:
        raise ModelError(
            f"{folder}/config.json asks for tables of {held:,} numbers beside the weights, such as masks for too "
            "long a context: check its max_position_embeddings or n_positions."
        )


def why_not_loaded(folder: Path, error: BaseException) -> str:
    """The message for a folder that transformers does not load, with a remedy if there is one."""
    text = str(error)
    if "Unrecognized configuration class" in text:
        kind = config_of(folder).get("model_type", "unknown")
        return (
            f"{folder} is of the type {kind}, which transformers does not load as a causal language model. If it "
            "wraps one together with vision or audio, load it with AutoModelForImageTextToText, save its language "
            "model with save_pretrained beside the tokenizer, and choose that folder."
        )
    if "tiktoken" in text or "sentencepiece" in text.lower():
        return (
            f"{folder} has no tokenizer.json, and its tokenizer cannot be converted here ({first_line(error)}): "
            "install sentencepiece and tiktoken on a machine where you can, and save "
            "AutoTokenizer.from_pretrained(folder) into it."
        )
    code = " Its own code (auto_map) is not run: choose a model that transformers supports itself."
    own = code if own_code(folder) else ""
    return f"{folder} cannot be loaded as a language model ({first_line(error)}): check its config.json.{own}"
