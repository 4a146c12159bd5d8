"""From last hidden states to logits: the head, and what a model does to its logits after it (soft caps and factors).

The numbers are read from the config, how they are used from the model's own code: its forward is run on hidden states
put in place of its body's, from small to so large that every cap saturates, and must be met bit for bit.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8dash.errors import ModelError

AFTER = "after_head"  # where a loaded model keeps its AfterHead
BODY = "body_name"  # and the name of the module whose last hidden states its head reads
SCALES = re.compile(r"^(logits?_scal(e|ing)|logits?_multiplier|lm_head_multiplier|output_multiplier(_scale)?)$")
CAPS = re.compile(r"^(final_)?(output_)?logits?_soft_?cap(ping)?$")
PEAKS = (1.0, 100.0, 1e5)  # largest logits of the states that are tried
TOKENS = 8


@dataclass(frozen=True, slots=True)
class AfterHead:
    """What happens to a head's logits: multiplied, divided, then softly capped; and to the states before it."""

    factor: float = 1.0
    divisor: float = 1.0
    cap: float = 0.0  # of cap * tanh(logits / cap); 0 for none
    rounds: bool = False  # states wider than the head are rounded to its precision

    def of(self, logits: Tensor) -> Tensor:
        """The model's logits, in the order and precision of transformers' own arithmetic."""
        logits = logits * self.factor if self.factor != 1.0 else logits
        logits = logits / self.divisor if self.divisor != 1.0 else logits
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits


class FullHead(nn.Module):
    """A head and what the model does after it, in one."""

    def __init__(self, head: nn.Module, after: AfterHead) -> None:
        """Takes the head as it is: cast or not."""
        super().__init__()
        self.head, self.after = head, after

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., hidden] to logits [..., vocabulary]."""
        weight = getattr(self.head, "weight", None)
        narrows = self.after.rounds and isinstance(weight, Tensor) and weight.is_floating_point()
        return self.after.of(self.head(hidden.to(weight.dtype) if narrows and weight is not None else hidden))


def head_of(model: Any) -> nn.Module:
    """The module that makes logits; raises ModelError for a model that has none."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise ModelError(f"{type(model).__name__} has no output head: choose a causal language model.")
    return head


def full_head(model: Any) -> nn.Module:
    """What makes the logits of a loaded model from its last hidden states: its head as it is now, and what follows."""
    head, after = head_of(model), getattr(model, AFTER, AfterHead())
    return head if after == AfterHead() else FullHead(head, after)


def body_of(model: Any) -> nn.Module:
    """The module whose last hidden states the head reads; called with token ids, it gives them."""
    name = getattr(model, BODY, None)
    body: nn.Module = model.base_model if name is None else model.get_submodule(name)
    return body


@torch.no_grad()
def learn_body(model: Any, ids: Tensor) -> Tensor:
    """Finds the model's body, and leaves its name with the model; returns its last hidden states of ids [1, tokens].

    It is the outermost module that gave hidden states in a forward: OPT's calls its decoder, past what it says its
    body is, and Llama-4's names no body. Raises ModelError for a model where none did.
    """
    states: dict[str, Tensor] = {}

    def telling(name: str) -> Callable[..., None]:
        def see(_module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(last := getattr(output, "last_hidden_state", None), Tensor):
                states[name] = last

        return see

    names = [name for name, _ in model.named_modules() if name]
    hooks = [model.get_submodule(name).register_forward_hook(telling(name)) for name in names]
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    name = next((name for name in names if name in states), None)
    if name is None:
        raise ModelError(
            f"{type(model).__name__} does not expose the hidden states before its head, from which divergence is "
            "measured: choose another model."
        )
    setattr(model, BODY, name)
    return states[name]


def hand_on(model: Any, other: Any) -> None:
    """Leaves with a copy of a model what was learned of its head and body."""
    for name in (AFTER, BODY):
        if hasattr(model, name):
            setattr(other, name, getattr(model, name))


@torch.no_grad()
def learn_after_head(model: Any, states: Tensor) -> None:
    """Finds what a model does after its head, and leaves it with the model; raises ModelError, naming what was tried.

    `states` are last hidden states [1, tokens, hidden] as the body gives them, of any text.
    """
    head = head_of(model)
    weight = getattr(head, "weight", None)
    rounds = isinstance(weight, Tensor) and states.dtype != weight.dtype
    plain = AfterHead(rounds=rounds)
    tried = [scaled for peak in PEAKS if (scaled := _scaled(states, FullHead(head, plain), peak)) is not None]
    own = [_own_logits(model, scaled) for scaled in tried]
    numbers = dict(_numbers(model.config))
    for after in _candidates(numbers, plain):
        full = FullHead(head, after)
        if all(torch.equal(full(a)[0].float(), b.float()) for a, b in zip(tried, own, strict=True)):
            setattr(model, AFTER, after)
            return
    names = ", ".join(f"{name}={value:g}" for name, value in numbers.items())
    raise ModelError(
        f"{type(model).__name__} changes the logits after its head ({names or 'its config does not name it'}) in a "
        "way that is not supported: divergence would be measured on the wrong logits. Choose another model, or run "
        "only lm-eval tasks on an engine that serves it."
    )


def _candidates(numbers: dict[str, float], plain: AfterHead) -> Iterator[AfterHead]:
    """Nothing first; then every use of the config's factors and caps."""
    factors = [plain]
    for value in dict.fromkeys(value for name, value in numbers.items() if SCALES.match(name)):
        factors += [replace(plain, factor=value), replace(plain, divisor=value)]
    caps = [0.0, *dict.fromkeys(value for name, value in numbers.items() if CAPS.match(name))]
    for after, cap in itertools.product(factors, caps):
        yield replace(after, cap=cap)


def _numbers(config: Any) -> Iterator[tuple[str, float]]:
    """The factors and caps that a config names, its text's own among them."""
    values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    for name, value in values.items():
        if (SCALES.match(name) or CAPS.match(name)) and isinstance(value, int | float) and value:
            yield name, float(value)
        elif isinstance(value, dict) and name.endswith("_config"):
            yield from _numbers(value)


def _scaled(states: Tensor, head: nn.Module, peak: float) -> Tensor | None:
    """The states times a power of two that brings their largest logit near a peak; None where they cannot be."""
    largest = float(head(states).float().abs().max())
    if not 0.0 < largest < float("inf"):
        return None
    scaled = states * 2.0 ** round(float(torch.tensor(peak / largest).log2()))
    return scaled if bool(torch.isfinite(head(scaled)).all()) else None


def _own_logits(model: Any, states: Tensor) -> Tensor:
    """The model's own logits [tokens, vocabulary] of states put in place of its body's."""

    def replaced(_module: nn.Module, _args: Any, output: Any) -> Any:
        output.last_hidden_state = states
        return output

    hook = body_of(model).register_forward_hook(replaced)
    try:
        ids = torch.ones(1, states.shape[1], dtype=torch.long, device=model.device)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    finally:
        hook.remove()
    return logits
