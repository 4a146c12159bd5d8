"""The model against itself in float32: how far apart two runs of the same weights may lie through rounding alone.

A KLD below it says nothing about a recipe. The weights stay as they are: each module reads its own in float32 while it
runs, large Linears slice by slice, so that no second copy of the model is ever held.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8dash.model.parts import is_plain

SLICE = 4 << 20  # weights of a Linear that are held in float32 at a time


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Within it the model computes in float32 on the same weights, exactly widened."""
    with ExitStack() as undo:
        for module in model.modules():
            if isinstance(module, nn.Linear) and is_plain(module):
                undo.enter_context(_forward(module, _sliced(module)))
            elif isinstance(module, nn.Embedding):
                undo.enter_context(_forward(module, _widened(module.forward)))
            elif any(True for _ in module.parameters(recurse=False)):
                undo.enter_context(_swapped(module))
        yield


@contextmanager
def _forward(module: Any, forward: Callable[..., Tensor]) -> Iterator[None]:
    module.forward = forward  # the instance's, before the class's
    try:
        yield
    finally:
        del module.forward


def _sliced(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    rows = max(1, SLICE // linear.in_features)

    def forward(x: Tensor) -> Tensor:
        out = torch.cat([F.linear(x, part.float()) for part in torch.split(linear.weight, rows)], dim=-1)
        return out if linear.bias is None else out.add_(linear.bias)

    return forward


def _widened(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A table's rows are exact: only what was looked up is widened."""
    return lambda *args, **kwargs: forward(*args, **kwargs).float()


@contextmanager
def _swapped(module: nn.Module) -> Iterator[None]:
    """The module's own parameters in float32 from the start of each forward to its end, however that ends."""
    kept = dict(module.named_parameters(recurse=False))

    def widen(module: nn.Module, _args: Any) -> None:
        for name, parameter in kept.items():
            module._parameters[name] = nn.Parameter(parameter.float(), requires_grad=False)

    def restore(module: nn.Module, _args: Any = None, _out: Any = None) -> None:
        module._parameters.update(kept)

    hooks = module.register_forward_pre_hook(widen), module.register_forward_hook(restore, always_call=True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        restore(module)
