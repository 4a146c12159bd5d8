"""Which of a checkpoint's tensors belong to which block of its model, from its config and headers alone.

Which parameter a tensor ends up in is transformers' to say: its table of renamings and conversions is followed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from fp8dash.choose.recipe import Recipe
from fp8dash.errors import InvalidChoice, ModelError
from fp8dash.model.as_linears import STACKED
from fp8dash.model.parts import inside_text
from fp8dash.model.streaming.unread import InFile

SHARED = "num_kv_shared_layers"  # of a config


@dataclass(frozen=True, slots=True)
class Layout:
    """A model's list of blocks, and where each tensor of its files belongs."""

    place: str  # of the list in the model
    blocks: tuple[dict[str, InFile], ...]  # each block's tensors by their names in the files
    outside: dict[str, InFile]

    def names(self) -> list[str]:
        """The blocks' names."""
        return [f"{self.place}.{index}" for index in range(len(self.blocks))]

    def inside(self, name: str) -> bool:
        """Whether a module of this name is a block, or stands in one."""
        return name.startswith(f"{self.place}.")


def layout_of(folder: Path, skeleton: Any, tensors: dict[str, InFile]) -> Layout:
    """The layout of a checkpoint whose model is given without weights; raises ModelError where it has no blocks."""
    if why := why_no_blocks(skeleton):
        raise unstreamed(folder, why)
    place = _list_of_blocks(skeleton)
    blocks: list[dict[str, InFile]] = [{} for _ in skeleton.get_submodule(place)]
    outside: dict[str, InFile] = {}
    for name, target in _targets(skeleton, tensors):
        words = target.removeprefix(f"{place}.").split(".")
        is_inside = target.startswith(f"{place}.") and words[0].isdigit() and int(words[0]) < len(blocks)
        (blocks[int(words[0])] if is_inside else outside)[name] = tensors[name]
    return Layout(place, tuple(blocks), outside)


def why_not_streamed(recipe: Recipe) -> str:
    """Why a recipe needs the whole model at once; empty where it does not."""
    if recipe.needs_calibration:
        return "its scales are made from calibration text, which passes through the whole model before anything is cast"
    if recipe.stored:
        return "a checkpoint is decoded as a whole"
    if recipe.kv:
        return "a KV cache keeps something of every block"
    return ""


def why_no_blocks(skeleton: Any) -> str:
    """Why a model cannot be loaded block by block; empty where it can."""
    place = _list_of_blocks(skeleton)
    if not place:
        return "it has no list of blocks"
    owners: dict[int, str] = {}
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        first = owners.setdefault(id(parameter), name)
        if first != name and any(one.startswith(f"{place}.") for one in (first, name)):
            return f"{first} and {name} are one tensor"
    if getattr(skeleton.config.get_text_config(decoder=True), SHARED, 0):
        return f"its last blocks read keys and values of earlier ones ({SHARED})"
    for name, module in outside_the_blocks(skeleton, place):
        stacked = any(one.dim() == STACKED for one in module.parameters(recurse=False))
        if stacked and not isinstance(module, _ConvNd):
            return f"{name} stacks matrices outside the blocks"
    return ""


def outside_the_blocks(model: Any, place: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules of the language model that stand outside its list of blocks, by name."""
    inside = inside_text(model)
    for name, module in model.named_modules():
        if inside(name) and not name.startswith(f"{place}."):
            yield name, module


def refuse_unstreamed(recipe: Recipe) -> None:
    """Raises InvalidChoice for a recipe that needs the whole model at once."""
    if why := why_not_streamed(recipe):
        raise InvalidChoice(f"“{recipe.text}” cannot be measured block by block: {why}. Load the model whole.")


def unstreamed(folder: Path, why: str) -> ModelError:
    """The message for a model that must be loaded whole."""
    return ModelError(f"{folder} cannot be measured block by block: {why}. Load it whole.")


def _list_of_blocks(skeleton: Any) -> str:
    """The name of the list of modules that holds the most weights, lists within lists not counted; or empty."""
    lists = {name: module for name, module in skeleton.named_modules() if isinstance(module, nn.ModuleList)}
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    sizes = {name: sum(parameter.numel() for parameter in lists[name].parameters()) for name in outer}
    return max(sizes, key=lambda name: sizes[name], default="")


def _targets(skeleton: Any, names: dict[str, InFile]) -> Iterator[tuple[str, str]]:
    """Each tensor's name in the files, and the parameter that it ends up in, or the first of several.

    As `convert_and_load_state_dict_in_model` of transformers 5.24 has it, in its order: a renaming may depend on those
    before it.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(skeleton)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state, prefix = skeleton.state_dict(), skeleton.base_model_prefix
    for name in sorted(names, key=dot_natural_key):
        target, _ = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, _ = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=state)
        yield name, target
