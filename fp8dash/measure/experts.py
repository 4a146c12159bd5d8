"""What a recipe does to a mixture of experts: which experts the router chooses, and how often it now chooses others.

Read where the experts are called, from the indices that the router hands them. Llama-4's forward hands them none: it
gives each expert all tokens, those that it was not chosen for as zeros.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp8dash.choose.records import HIGHER, LOWER, NEITHER, Better, Layer, Measurement, Progress, RanBy
from fp8dash.model.as_linears import mixtures_of

METHOD = "experts chosen in the first windows, by the cast model beside the unquantized one, v1"
WINDOWS = 4  # at most
NAMED = 5  # experts that no token reached, in the note
NO_MIXTURE = "the model has no experts that a router chooses among"

Routing = dict[str, Tensor]  # by the name of a layer's experts: who was chosen, bool [tokens, experts]


@torch.no_grad()
def routing(model: Any, windows: Tensor, stage: str) -> Generator[Progress, None, Routing]:
    """Progress; returns who is chosen over the first of [count, L] token ids. Empty for a model without experts."""
    few, chosen = windows[:WINDOWS], dict[str, list[Tensor]]()
    if not list(mixtures_of(model)):
        return {}
    with _watched(model, lambda name, mask: chosen.setdefault(name, []).append(mask.cpu())):
        for index, ids in enumerate(few):
            yield Progress(stage, index, len(few), f"experts, window {index + 1} of {len(few)}")
            model(input_ids=ids[None].to(model.device), use_cache=False)
    return {name: torch.cat(masks) for name, masks in chosen.items()}


def experts(
    model: Any, windows: Tensor, baseline: Routing, layers: Sequence[Layer], backend: RanBy
) -> Iterator[Progress | Measurement]:
    """How the routing of a cast model differs from the unquantized one's, layer by layer; tokens by expert; and the
    error of the experts' weights, weighted by the tokens that met them."""

    def measured(
        name: str, value: float | None, unit: str, better: Better, label: str = "", note: str = ""
    ) -> Measurement:
        return Measurement(name, value, unit, better, METHOD, backend, label, note)

    now = yield from routing(model, windows, "experts")
    if not now:
        yield measured("routing_changed", None, "share", LOWER, note=NO_MIXTURE)
        return
    changed = {name: float((mask != baseline[name]).any(-1).double().mean()) for name, mask in now.items()}
    shares = {name: mask.double().mean(0).tolist() for name, mask in now.items()}
    unreached = [f"{name}.{i}" for name, of_layer in shares.items() for i, share in enumerate(of_layer) if not share]
    yield measured("routing_changed", sum(changed.values()) / len(changed), "share", LOWER, note="mean over layers")
    for name, share in changed.items():
        yield measured("routing_changed", share, "share", LOWER, name)
    yield measured("experts_unreached", float(len(unreached)), "experts", NEITHER, note=_listed(unreached))
    yield measured("routed_sqnr_db", routed_sqnr(layers, shares), "dB", HIGHER)
    for name, of_layer in shares.items():
        for index, share in enumerate(of_layer):
            yield measured("expert_tokens", share, "share", NEITHER, f"{name}.{index}")


def routed_sqnr(layers: Sequence[Layer], shares: Mapping[str, Sequence[float]]) -> float | None:
    """Signal over error in dB of the experts' weights, each counted by its share of tokens; None without error."""
    weights = {f"{name}.{index}.": share for name, of_layer in shares.items() for index, share in enumerate(of_layer)}
    total = error = 0.0
    for layer in layers:
        share = next((weights[start] for start in _starts(layer.name) if start in weights), 0.0)
        total += share * layer.rows * layer.cols
        error += share * layer.rows * layer.cols * (layer.relative_error or 0.0) ** 2
    return 10 * math.log10(total / error) if total and error else None


def _starts(name: str) -> Iterator[str]:
    """The paths above a layer, with the dot that ends them.

    >>> list(_starts("experts.3.up"))
    ['experts.', 'experts.3.']
    """
    return (name[: at + 1] for at, letter in enumerate(name) if letter == ".")


def _listed(names: Sequence[str]) -> str:
    if not names:
        return ""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


@contextmanager
def _watched(model: Any, tell: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within, `tell` is given the name of each layer's experts and who was chosen, bool [tokens, experts]."""

    def telling(name: str, count: int) -> Callable[..., None]:
        def see(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tell(name, _chosen([*args, *kwargs.values()], count))

        return see

    hooks = [
        module.register_forward_pre_hook(telling(name, count), with_kwargs=True)
        for name, module, count in mixtures_of(model)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _chosen(inputs: Sequence[Any], count: int) -> Tensor:
    """Who is chosen, bool [tokens, count], from what experts are called with."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    indices = next((value for value in tensors if not value.is_floating_point()), None)
    if indices is None:  # the states of all tokens for each expert, zeros where it was not chosen
        return tensors[0].view(count, -1, tensors[0].shape[-1]).any(-1).T
    mask = torch.zeros(len(indices), count + 1, dtype=torch.bool, device=indices.device)  # one more: “nobody”
    return mask.scatter_(1, indices, True)[:, :count]
