"""A model whose blocks stay in their files: all else is loaded, and one block at a time.

Both by transformers' own loader, so that conversions, dtypes, tables and ties are those of the model that is loaded
whole.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8dash.errors import ModelError
from fp8dash.model.as_linears import make_linears
from fp8dash.model.head import head_of
from fp8dash.model.probe import check_size, out_of_memory, skeleton_of, why_not_loaded
from fp8dash.model.streaming.layout import Layout, layout_of, outside_the_blocks, unstreamed
from fp8dash.model.streaming.unread import Unread, tensors_in
from fp8dash.model.tensors import DTYPE
from fp8dash.model.trust import refuse_missing, refuse_unread


class PartialModel:
    """A model in evaluation mode whose blocks are on the meta device but for the one that has its weights."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Loads what stands outside the blocks of a trusted folder; raises ModelError."""
        self.folder, self._device = folder, device
        try:
            self.model, self.layout = _outside(folder, device)
        except ModelError:
            raise
        except Exception as error:  # a config can make transformers and torch raise anything
            if out_of_memory(error):
                raise
            raise ModelError(why_not_loaded(folder, error)) from error
        self.model.requires_grad_(False).eval()
        outside = {name for name, _ in outside_the_blocks(self.model, self.layout.place)}
        make_linears(self.model, outside.__contains__)

    @property
    def blocks(self) -> nn.ModuleList:
        """The model's list of blocks."""
        blocks: nn.ModuleList = self.model.get_submodule(self.layout.place)
        return blocks

    @contextmanager
    def block(self, index: int) -> Iterator[None]:
        """Within it a block has its weights, which are read from the files now; on leaving, they are dropped."""
        empty = self.blocks[index]
        tensors = {id(tensor): tensor for tensor in empty.buffers()}
        self.blocks[index] = block = copy.deepcopy(empty, _same_configs(self.model, self.model) | tensors)
        try:
            self._read(index)
            if any(tensor.is_meta for tensor in chain(block.parameters(), block.buffers())):
                raise unstreamed(self.folder, f"block {index} takes weights from outside its own tensors")
            block.requires_grad_(False)
            yield
        finally:
            self.blocks[index] = empty
            forget(block)

    def copied(self) -> Any:
        """The model once more: modules of its own, to be cast, but the same weights outside the blocks.

        Linears outside the blocks, which are cast where they lie, have weights of their own, but for the head's.
        """
        head = head_of(self.model)
        linears = (one for one in self.model.modules() if isinstance(one, nn.Linear) and one is not head)
        own = {id(linear.weight) for linear in linears}
        tensors = chain(self.model.parameters(), self.model.buffers())
        return copy.deepcopy(self.model, {id(tensor): tensor for tensor in tensors if id(tensor) not in own})

    def block_for(self, index: int, other: Any) -> nn.Module:
        """A copy of the block that has its weights, with the configs of a copied model."""
        block = self.blocks[index]
        buffers = {id(buffer): buffer for buffer in block.buffers()}
        return copy.deepcopy(block, _same_configs(self.model, other) | buffers)

    def _read(self, index: int) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        mapping: Any = get_model_conversion_mapping(self.model)
        config = LoadStateDictConfig(
            device_map=_placed(self._device),
            dtype=DTYPE,
            dtype_plan=self.model._get_dtype_plan(DTYPE),
            weight_mapping=mapping,
        )
        with _silent():
            report, _ = convert_and_load_state_dict_in_model(self.model, self.layout.blocks[index], config)
        if report.mismatched_keys or report.conversion_errors:
            raise unstreamed(self.folder, f"the tensors of block {index} are not those of its config")


def forget(block: nn.Module) -> None:
    """Takes a block's modules apart, which nobody runs again: experts and what indexes them hold each other."""
    for module in list(block.modules()):
        vars(module).clear()


def _outside(folder: Path, device: torch.device) -> tuple[Any, Layout]:
    """The model with its blocks on the meta device, and its layout."""
    from transformers import AutoConfig

    skeleton = skeleton_of(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    check_size(folder, skeleton)
    tensors = tensors_in(folder)
    layout = layout_of(folder, skeleton, tensors)
    inside = {name: Unread(tensor.stored) for block in layout.blocks for name, tensor in block.items()}
    model, report = type(skeleton).from_pretrained(
        None,
        config=skeleton.config,
        state_dict=layout.outside | inside,
        dtype=DTYPE,
        output_loading_info=True,
        device_map=_placed(device),
    )
    refuse_unread(folder, report["unexpected_keys"])
    refuse_missing(folder, report["missing_keys"])
    return model, layout


def _placed(device: torch.device) -> dict[str, torch.device] | None:
    """As a model that is loaded whole is placed."""
    return {"": device} if device.type == "cuda" else None


def _same_configs(model: Any, other: Any) -> dict[int, Any]:
    """What a copied module is to hold in place of a model's configs: those of another."""
    return {id(a): b for a, b in zip(_configs(model.config), _configs(other.config), strict=True)}


def _configs(config: Any) -> list[Any]:
    """A config and those that it holds."""
    nested = (value for value in vars(config).values() if hasattr(value, "model_type"))
    return [config, *chain.from_iterable(map(_configs, nested))]


@contextmanager
def _silent() -> Iterator[None]:
    """Without a progress bar for each block."""
    import transformers

    logging: Any = transformers.utils.logging
    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()
