"""A model's parameters, each once: its name, where it belongs, and whether a recipe can cast it.

Reports about a model are made from this list, so it contains everything that a model stores: biases and convolution
kernels as well as the weights of Linears. Knows no recipe.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from fp8dash.choose.models.groups import group_of
from fp8dash.choose.records import ATTENTION, CONVOLUTION, EMBEDDING, EXPERTS, HEAD, MLP, NORM, OTHER, ROUTER
from fp8dash.model.as_linears import STACKED, ExpertLinear

LINEAR, TABLE, NEITHER = "linear", "table", ""  # matrices to multiply by, tables and scales, and the rest
WEIGHT = "weight"
ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")  # of a config: experts a token meets
MATRIX = 2  # dimensions


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One parameter; holds no tensor, so that a list of them keeps none in memory."""

    name: str  # of the module for its `weight`, else of the parameter
    module: str
    key: str  # the module's attribute
    group: str  # of LAYER_GROUPS
    shape: tuple[int, int]
    bits: int  # of an element
    kind: str  # LINEAR, TABLE or NEITHER
    fixed: str  # why no recipe casts it; empty where one may
    in_blocks: bool  # a matrix of the blocks, by which activations are multiplied: a recipe of Linears is meant for it
    tied: bool = False  # an embedding that is the head too

    @property
    def parameters(self) -> int:
        """Its elements."""
        return self.shape[0] * self.shape[1]


def parts_of(model: Any) -> list[ModelPart]:
    """The model's parameters in its order, each once; of modules that share one, the first has it."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    inside, seen, parts = inside_text(model), set(), []
    tied = head is not None and table is not None and getattr(head, WEIGHT, None) is getattr(table, WEIGHT, None)
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            group = _group(model, name, module, head, table) if inside(name) else OTHER
            kind = _kind(module, key, group) if inside(name) else NEITHER
            fixed = _fixed(module, key, parameter.dim(), group, kind, inside(name))
            is_matrix = _is_matrix(module, key, parameter.dim(), group)
            parts.append(
                ModelPart(
                    name=name if key == WEIGHT else f"{name}.{key}".lstrip("."),
                    module=name,
                    key=key,
                    group=group,
                    shape=_shape(tuple(parameter.shape)),
                    bits=8 * parameter.element_size(),
                    kind=kind,
                    fixed=fixed,
                    in_blocks=is_matrix and inside(name) and group in (ATTENTION, MLP, EXPERTS, OTHER),
                    tied=tied and module is table and key == WEIGHT,
                )
            )
    return parts


def linears_of(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """The Linears that a recipe may cast, the head among them, by name: no routers, and nothing beside the text."""
    inside, head, table = inside_text(model), model.get_output_embeddings(), model.get_input_embeddings()
    for name, module in model.named_modules():
        if is_plain(module) and inside(name) and _group(model, name, module, head, table) != ROUTER:
            yield name, module


def is_plain(module: nn.Module) -> bool:
    """True for a plain Linear: subclasses may compute more, and must not be replaced."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def is_read_directly(model: Any, name: str) -> bool:
    """True if surrounding code reads a Linear's `.weight` directly instead of calling it, as kernel wrappers do."""
    *path, attribute = name.split(".")
    owners: list[Any] = [type(model.get_submodule(".".join(path[: depth + 1]))) for depth in range(len(path))]
    return any(_takes_weight(owner, attribute) for owner in owners)


def active_share(model: Any) -> float:
    """The share of the routed experts that one token meets; 1 where the config does not say."""
    config = model.config.get_text_config(decoder=True) if hasattr(model, "config") else None
    active = next((n for key in ACTIVE if isinstance(n := getattr(config, key, None), int) and n > 0), 0)
    counts = (getattr(config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    count = next((n for n in counts if isinstance(n, int) and n > 0), 0)
    return active / count if active and count else 1.0


@lru_cache(512)
def _takes_weight(kind: Any, attribute: str) -> bool:
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # made at run time
        return False
    return re.search(rf"\.{re.escape(attribute)}\.weight\b(?!\.(dtype|device|shape|data))", source) is not None


def inside_text(model: Any) -> Callable[[str], bool]:
    """Whether a module of some name belongs to the language model: true of all where there is nothing else."""
    config = getattr(model, "config", None)
    if config is None or config.get_text_config(decoder=True) is config:
        return lambda _name: True
    kept = (model.get_decoder(), model.get_output_embeddings(), model.get_input_embeddings())
    names = [name for name, module in model.named_modules() if any(module is one for one in kept)]
    return lambda name: any(name == one or name.startswith(f"{one}.") or not one for one in names)


def _group(model: Any, name: str, module: nn.Module, head: Any, table: Any) -> str:
    """By the module's type, or by its name if the type says nothing."""
    kind = type(module).__name__
    if module is head:
        return HEAD
    if isinstance(module, ExpertLinear):
        return EXPERTS
    if module is table or isinstance(module, nn.Embedding):
        return EMBEDDING
    if isinstance(module, _ConvNd):
        return CONVOLUTION
    if "norm" in kind.lower():
        return NORM
    if "Router" in kind or _is_router(model, name, module):
        return ROUTER
    by_name = group_of(name)
    if by_name in (HEAD, EMBEDDING, NORM, CONVOLUTION, ROUTER):  # not a head, whatever its name
        by_name = group_of(name.rpartition(".")[0])
    return by_name if by_name not in (HEAD, EMBEDDING, NORM, CONVOLUTION) else OTHER


def _is_router(model: Any, name: str, module: nn.Module) -> bool:
    """True beside experts for what is as high as they are many, or one row: a router, or a shared expert's gate.

    A router may hold its matrix in a module of its own: Hunyuan's is `gate.wg`.
    """
    words, weight = name.split("."), getattr(module, WEIGHT, None)
    if "router" in words:
        return True
    if list(module.children()) or weight is None or weight.dim() != MATRIX or not name:
        return False
    for depth in (len(words) - 1, len(words) - 2):  # the place of what stands beside the experts
        experts = getattr(model.get_submodule(".".join(words[:depth])), "experts", None) if depth >= 0 else None
        if isinstance(experts, nn.Module):
            return words[depth] == "gate" or weight.shape[0] in (1, _experts(experts))
    return False


def _experts(experts: nn.Module) -> int:
    stacked = next((len(p) for p in experts.parameters(recurse=False) if p.dim() == STACKED), 0)
    return stacked or sum(name.isdigit() for name, _ in experts.named_children())


def _kind(module: nn.Module, key: str, group: str) -> str:
    if key != WEIGHT:
        return NEITHER
    if is_plain(module):
        return LINEAR
    return TABLE if group in (EMBEDDING, NORM) else NEITHER


def _fixed(module: nn.Module, key: str, dims: int, group: str, kind: str, is_inside: bool) -> str:
    """Why no recipe casts a parameter."""
    if not is_inside:
        return "outside the language model: no text passes through it"
    if group == ROUTER:
        return "routers, which choose the experts, are not cast"
    if _is_bias(key):
        return "biases, which are added after the product, are not cast"
    if kind:
        return ""
    if group == EXPERTS or (dims >= STACKED and group != CONVOLUTION):
        return f"{type(module).__name__} keeps its matrices in one tensor and does not use them one by one"
    if group == CONVOLUTION:
        return "convolutions are not cast"
    if isinstance(module, nn.Linear):
        return f"{type(module).__name__} computes more than a matrix product"
    return f"a parameter of {type(module).__name__} that no Linear uses"


def _is_matrix(module: nn.Module, key: str, dims: int, group: str) -> bool:
    """True for matrices that multiply activations; a state-space model's A and D do not."""
    if _is_bias(key) or dims < MATRIX:
        return False
    return dims >= STACKED or group == EXPERTS or isinstance(module, nn.Linear)


def _is_bias(key: str) -> bool:
    return key == "bias" or key.endswith("_bias")


def _shape(dims: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns: all dimensions but the last are flattened into rows, and a vector is one row.

    >>> _shape((64,)), _shape((4, 96, 64)), _shape(())
    ((1, 64), (384, 64), (1, 1))
    """
    if len(dims) < MATRIX:
        return 1, dims[0] if dims else 1
    rows = 1
    for dim in dims[:-1]:
        rows *= dim
    return rows, dims[-1]
