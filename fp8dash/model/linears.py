"""What replaces a Linear in a cast model: decoded operands, a native kernel, or simulated accumulation."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8dash.choose.accumulators import Accumulator
from fp8dash.quant.accumulate import scaled_product
from fp8dash.quant.activations import ActivationCast
from fp8dash.quant.cast import Quantized, dequantize
from fp8dash.quant.matmul import multiply


class EmulatedLinear(nn.Module):
    """A Linear on decoded operands."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activations: ActivationCast | None) -> None:
        """Takes the decoded weight [out, in] in the working precision."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = bias
        self.activations = activations

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        return F.linear(self.activations.emulated(x) if self.activations else x, self.weight, self.bias)


class CodesLinear(nn.Module, ABC):
    """A Linear that multiplies codes; its subclasses say how."""

    def __init__(self, weight: Quantized, bias: Tensor | None, activations: ActivationCast) -> None:
        """Takes the weight's codes [out, in]."""
        super().__init__()
        self.codes = weight
        self.bias = bias
        self.activations = activations

    @property
    def weight(self) -> Tensor:
        """The decoded weight, for code that reads the Linear's weight."""
        return dequantize(self.codes)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        out = self.product(self.activations.native(x), x.dtype)
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], out.shape[-1])

    @abstractmethod
    def product(self, x: Quantized, dtype: torch.dtype) -> Tensor:
        """Codes of activations [tokens, in] by the weight's: [tokens, out] in `dtype`."""


class NativeLinear(CodesLinear):
    """A Linear whose codes go to a native kernel."""

    def __init__(self, weight: Quantized, bias: Tensor | None, activations: ActivationCast, kernel: str) -> None:
        """Takes the weight's codes [out, in] and the kernel's name."""
        super().__init__(weight, bias, activations)
        self.kernel = kernel

    def product(self, x: Quantized, dtype: torch.dtype) -> Tensor:
        """By the kernel."""
        return multiply(x, self.codes, self.kernel, dtype)


class SimulatedLinear(CodesLinear):
    """A Linear whose products are added as a simulated tensor core adds them. Thousands of times slower."""

    def __init__(
        self, weight: Quantized, bias: Tensor | None, activations: ActivationCast, accumulator: Accumulator
    ) -> None:
        """Takes the weight's codes [out, in] and how they are added."""
        super().__init__(weight, bias, activations)
        self.accumulator = accumulator

    def product(self, x: Quantized, dtype: torch.dtype) -> Tensor:
        """As the accumulator adds."""
        return scaled_product(x, self.codes, self.accumulator).to(dtype)


CAST_LINEARS = (EmulatedLinear, CodesLinear)
