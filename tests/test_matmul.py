"""Emulated and native products, and each activation cast once."""

import pytest
import torch

from fp8dash.choose.hardware import Device, native_path
from fp8dash.choose.recipe import parse_cast, parse_recipe
from fp8dash.errors import KernelRefused
from fp8dash.quant.cast import codes_of, dequantize, quantize
from fp8dash.quant.matmul import ActivationCast, multiply

CPU = Device("cpu", "CPU")
NATIVE = [f"w={f}/{t} a={f}/{t}" for f in ("e4m3fn", "e5m2", "int8") for t in ("tensor", "row")]
SHAPES = [(1, 16, 16), (5, 33, 7), (64, 576, 192), (17, 1536, 576)]  # M, K, N


@pytest.mark.parametrize("text", NATIVE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_native_product_is_that_of_the_decoded_codes_to_bf16_rounding(text, shape):
    recipe, (m, k, n) = parse_recipe(text), shape
    torch.manual_seed(0)
    x, w = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    xq, wq = codes_of(x, recipe.activations), quantize(w, recipe.weights)
    exact = dequantize(xq).double() @ dequantize(wq).double().T
    found = multiply(xq, wq, native_path(recipe, n, k, CPU).kernel, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    sizes = dequantize(xq).double().abs() @ dequantize(wq).double().abs().T  # float32 sums err relative to these
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + sizes * 2**-20).all()


def test_native_and_emulated_activations_have_the_same_codes():
    torch.manual_seed(0)
    x = torch.randn(3, 10, 64).bfloat16()
    for text in NATIVE:
        caster = ActivationCast(parse_recipe(text).activations)
        decoded = dequantize(caster.native(x)).bfloat16().view(x.shape)
        assert torch.equal(caster.emulated(x), decoded)


def test_an_activation_is_cast_once_and_anew_when_changed_in_place():
    caster, x = ActivationCast(parse_cast("e4m3fn/row")), torch.randn(4, 8)
    first = caster.emulated(x)
    assert caster.emulated(x) is first
    x.mul_(3)
    assert not torch.equal(caster.emulated(x), first)


def test_what_a_kernel_refuses_is_said_in_one_sentence():
    x = quantize(torch.randn(4, 32), parse_cast("e4m3fn/row"))
    w = quantize(torch.randn(8, 64), parse_cast("e4m3fn/row"))
    with pytest.raises(KernelRefused, match=r"scaled_mm refused M=4, K=32, N=8 .* emulated backend"):
        multiply(x, w, "scaled_mm", torch.bfloat16)


HOPPER, AMPERE = Device("cuda", "H200", (9, 0)), Device("cuda", "A100", (8, 0))


@pytest.mark.parametrize(
    ("text", "device", "n", "k", "reason"),
    [
        ("w=e4m3fn/row a=e4m3fn/row", AMPERE, 576, 576, "compute capability 8.9"),
        ("w=e4m3fn/row a=e4m3fn/row", HOPPER, 100, 208, "multiples of 16"),
        ("w=e5m2/row a=e5m2/row", HOPPER, 576, 576, "E5M2"),
        ("w=e4m3fn/128x128 a=e4m3fn/1x128", HOPPER, 576, 576, "128x128 weights"),
        ("w=e4m3fn/1x32/rceil a=e4m3fn/1x32/rceil", CPU, 576, 576, "1x32 weights"),
        ("w=e4m3fn/row", CPU, 576, 576, "both operands"),
        ("w=int8/row a=e4m3fn/row", CPU, 576, 576, "no kernel multiplies"),
        ("w=int8/row a=int8/row", HOPPER, 100, 201, "multiples of 8"),
    ],
)
def test_why_no_kernel_is_legal_is_said(text, device, n, k, reason):
    path = native_path(parse_recipe(text), n, k, device)
    assert not path.is_native and reason in path.reason


def test_m_is_free_on_hopper():
    assert native_path(parse_recipe("w=e4m3fn/row a=e4m3fn/row"), 576, 576, HOPPER).is_native
