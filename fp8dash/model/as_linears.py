"""Makes Linears of the matrices that a model multiplies by without one: experts stacked in one tensor, and Conv1D.

A Linear is what the rest of the project casts, calibrates, probes and profiles. An expert's Linears stand on its part
of the stack, and are named as checkpoints name them: `experts.3.gate_proj`. The model's own forward stays: it takes a
matrix out of the stack by its index and multiplies by it, and here that product is the Linear's. What a forward does
otherwise is not followed: such a stack stays as it is, and coverage says so.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from fp8dash.model.head import TOKENS

STACKED = 3  # dimensions
ROUNDING = 2**-7  # of bfloat16, relative
WEIGHT = "weight"  # of a module that holds nothing but a stack
GATE_UP, GATE, UP = "gate_up_proj", "gate_proj", "up_proj"  # fused when loaded, two matrices in checkpoints
PRODUCTS = {F.linear: "linear", torch.bmm: "bmm", Tensor.bmm: "bmm"} | dict.fromkeys(
    (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), "matmul"
)
WAYS = ({"linear"}, {"matmul"}, {"bmm"})  # in which a forward may use a stack: always the same one


class ExpertLinear(nn.Linear):
    """One matrix of a routed expert: a plain Linear, which sees only the tokens that the router sends it."""


def any_name(_name: str) -> bool:
    """True: all of a model is meant."""
    return True


@torch.no_grad()
def make_linears(model: Any, within: Callable[[str], bool] = any_name) -> None:
    """Replaces, in a loaded model, each Conv1D and each stack of experts that its forward was seen to index.

    Experts are then multiplied one by one, in the model's own loop: no kernel for all of them reads a Linear. Of a
    model that is not loaded as a whole, only the modules whose names lie `within` what is loaded are looked at.
    """
    if getattr(model.config, "_experts_implementation", "eager") != "eager":
        model.set_experts_implementation("eager")
    modules = [(name, module) for name, module in model.named_modules() if within(name)]
    for name, module in modules:
        if isinstance(module, Conv1D):
            model.set_submodule(name, _linear(nn.Linear, module.weight.T.contiguous(), module.bias))
        elif isinstance(module, nn.Linear) and _is_linear_by_another_name(module):
            model.set_submodule(name, _linear(nn.Linear, module.weight, module.bias))
    stacks = [
        (module, key, parameter)
        for _, module in modules
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == STACKED and not isinstance(module, nn.modules.conv._ConvNd)
    ]
    if not stacks:
        return
    ways = _ways(model, stacks)
    for (module, key, parameter), way in zip(stacks, ways, strict=True):
        if way:
            _take_apart(module, key, parameter, is_transposed=way != "linear")


def _is_linear_by_another_name(module: nn.Linear) -> bool:
    """True for a subclass of Linear, as Falcon's, that computes what a Linear does, but for bfloat16's rounding."""
    if type(module).forward is nn.Linear.forward or dict(module.named_parameters()).keys() - {WEIGHT, "bias"}:
        return False
    x = torch.randn(TOKENS, module.in_features, generator=torch.Generator().manual_seed(0))
    x = x.to(module.weight.device, module.weight.dtype)
    own, plain = module(x), F.linear(x, module.weight, module.bias)
    return isinstance(own, Tensor) and bool((own - plain).norm() <= ROUNDING * plain.norm())


def few_tokens(model: Any) -> Tensor:
    """Ids [1, TOKENS] for a first forward."""
    rows: int = model.get_input_embeddings().weight.shape[0]
    return (torch.arange(TOKENS, device=model.device) * 31 + 3)[None] % rows


def _ways(model: Any, stacks: list[tuple[nn.Module, str, Tensor]]) -> list[str]:
    """How a forward over a few tokens uses each stack; empty for one that it uses in no way, or in several."""
    watched = [_Watched(parameter) for _, _, parameter in stacks]
    for (module, key, _), stand_in in zip(stacks, watched, strict=True):
        del module._parameters[key]
        module.__dict__[key] = stand_in
    try:
        model(input_ids=few_tokens(model), use_cache=False)
    finally:
        for module, key, parameter in stacks:
            del module.__dict__[key]
            module.register_parameter(key, parameter)  # type: ignore[arg-type]
    return [next(iter(one.uses)) if one.uses in WAYS else "" for one in watched]


def _take_apart(module: nn.Module, key: str, stack: Tensor, *, is_transposed: bool) -> None:
    """A stack's matrices as Linears below `module`, by expert, and in its place what multiplies by them."""
    matrices = stack.transpose(1, 2).contiguous() if is_transposed else stack.detach()  # [experts, out, in]
    names = _names(module, key, matrices.shape[1], is_transposed)
    for index, matrix in enumerate(matrices):
        if str(index) not in module._modules:
            module.add_module(str(index), nn.Module())
        for name, rows in zip(names, matrix.chunk(len(names)), strict=True):
            module.set_submodule(_place(index, name), _linear(ExpertLinear, rows, None))
    del module._parameters[key]
    module.__dict__[key] = Stack(module, names, stack, is_transposed)


def _place(index: int, name: str) -> str:
    """Where an expert's Linear stands below the module of the stack: that module holds one where it has no name."""
    return f"{index}.{name}" if name else str(index)


def _names(module: nn.Module, key: str, rows: int, is_transposed: bool) -> tuple[str, ...]:
    """What the Linears of one expert's matrix are called; two where gate and up lie in it one below the other."""
    parted = key == GATE_UP and getattr(module, "is_concatenated", True) and not is_transposed and rows % 2 == 0
    return (GATE, UP) if parted else ("" if key == WEIGHT else key,)


def _linear(kind: type[nn.Linear], weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A Linear on this memory [out, in]."""
    linear = kind(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


def mixtures_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """The name, the module and the number of experts of each layer whose experts were taken apart."""
    for name, module in model.named_modules():
        stacks = [one for one in vars(module).values() if isinstance(one, Stack)]
        if stacks:
            yield name, module, stacks[0].shape[0]


class Stack:
    """Stands where the stacked parameter stood: indexed by an expert, or multiplied as a batch of matrices."""

    def __init__(self, module: nn.Module, names: tuple[str, ...], stack: Tensor, is_transposed: bool) -> None:
        """Takes the module that has an expert's Linears below its index, and their names."""
        self._module, self._names = module, names
        self.shape, self.dtype, self.device = stack.shape, stack.dtype, stack.device
        self.is_transposed = is_transposed

    def __getitem__(self, index: Any) -> "Matrix":
        return Matrix(self, int(index))

    def product(self, index: int, x: Tensor) -> Tensor:
        """x [..., in] by an expert's matrix: [..., out]."""
        parts = [self._module.get_submodule(_place(index, name))(x) for name in self._names]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if PRODUCTS.get(function) != "bmm" or kwargs or len(args) != 2 or not isinstance(args[1], Stack):
            return NotImplemented
        x, stack = args  # [experts, tokens, in]
        return torch.stack([stack.product(index, rows) for index, rows in enumerate(x)])


@dataclass(frozen=True, slots=True)
class Matrix:
    """One expert's matrix of a stack, by which its forward multiplies."""

    stack: Stack
    index: int

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        way, given = PRODUCTS.get(function), {"input": None} | (kwargs or {})
        x, matrix = (*args, given.get(WEIGHT))[:2]
        if not isinstance(matrix, Matrix) or way != ("matmul" if matrix.stack.is_transposed else "linear"):
            return NotImplemented
        out = matrix.stack.product(matrix.index, x)
        bias = args[2] if len(args) > 2 else given.get("bias")
        return out if bias is None else out + bias


@dataclass(slots=True)
class _Watched:
    """A stack, or a matrix taken out of it, that behaves as the tensor does and writes down what is done with it."""

    tensor: Tensor
    uses: set[str] = field(default_factory=set)

    def __getitem__(self, index: Any) -> Any:
        is_one = isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0)
        if self.tensor.dim() == STACKED and is_one:
            return _Watched(self.tensor[index], self.uses)
        self.uses.add("other indices")
        return self.tensor[index]

    def __len__(self) -> int:
        return len(self.tensor)

    def __getattr__(self, name: str) -> Any:
        if name not in ("shape", "dtype", "device"):
            self.uses.add(name)
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, value in [*enumerate(args), *kwargs.items()]:
            if isinstance(value, _Watched):
                is_stack = value.tensor.dim() == STACKED
                way = PRODUCTS.get(function, "")
                is_followed = place in (1, WEIGHT) and is_stack == (way == "bmm")
                value.uses.add(way if way and is_followed else f"{getattr(function, '__name__', function)}")
        plain = [_plain(value) for value in args]
        return function(*plain, **{key: _plain(value) for key, value in kwargs.items()})


def _plain(value: Any) -> Any:
    return value.tensor if isinstance(value, _Watched) else value
