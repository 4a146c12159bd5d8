"""Emulated and native products, and each activation cast once."""

import pytest
import torch

from fp8dash.choose.casts import parse_cast
from fp8dash.choose.hardware import INT_MM, SCALED_MM, Device, native_path
from fp8dash.choose.recipe import parse_recipe
from fp8dash.errors import KernelRefused
from fp8dash.quant.activations import ActivationCast
from fp8dash.quant.cast import Quantized, codes_of, dequantize, quantize
from fp8dash.quant.matmul import Operand, activation_operand, multiply, scaled_mm, swizzled

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
    product = multiply(xq, wq, native_path(recipe, n, k, CPU).kernel, torch.bfloat16)
    assert product.dtype == torch.bfloat16
    sizes = dequantize(xq).double().abs() @ dequantize(wq).double().abs().T  # float32 sums err relative to these
    assert ((product.double() - exact).abs() <= exact.abs() * 2**-8 + sizes * 2**-20).all()


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
    with pytest.raises(
        KernelRefused, match=r"scaled_mm refused M=4, K=32, N=8 .*; closest alternative: the backend emulated"
    ):
        multiply(x, w, "scaled_mm", torch.bfloat16)


AMPERE, ADA = Device("cuda", "A100", (8, 0), cuda=(12, 9)), Device("cuda", "L40S", (8, 9), cuda=(12, 9))
HOPPER = Device("cuda", "H200", (9, 0), cuda=(13, 0))
HOPPER_128, HOPPER_UNTOLD = Device("cuda", "H100", (9, 0), cuda=(12, 8)), Device("cuda", "H100", (9, 0))
BLACKWELL, BLACKWELL_126 = Device("cuda", "B200", (10, 0), cuda=(12, 9)), Device("cuda", "B200", (10, 0), cuda=(12, 6))
CONSUMER = Device("cuda", "RTX 5090", (12, 0), cuda=(13, 0))
DEVICES = (CPU, AMPERE, ADA, HOPPER, HOPPER_128, HOPPER_UNTOLD, BLACKWELL, BLACKWELL_126, CONSUMER)

ROWS = "w=e4m3fn/row a=e4m3fn/row"
BLOCK = "w=e4m3fn/128x128 a=e4m3fn/1x128"
GROUPS = "w=e4m3fn/1x128 a=e4m3fn/1x128"
MX = "w=e4m3fn/1x32/rceil a=e4m3fn/1x32/rceil"
INT8 = "w=int8/row a=int8/row"
BLOCK_POW2, HALF_POW2 = "w=e4m3fn/128x128/pow2 a=e4m3fn/1x128/pow2", "w=e4m3fn/row/pow2 a=e4m3fn/row"
BY_TENSOR = "w=e5m2/tensor a=e4m3fn/tensor"


@pytest.mark.parametrize(
    ("text", "device", "n", "k", "reason", "whose", "nearest"),
    [
        (ROWS, AMPERE, 576, 576, "compute capability 8.9, this device has 8.0", "hardware", "w=int8/row a=int8/row"),
        (ROWS, HOPPER, 100, 208, "K=208 and N=100 must both be multiples of 16", "torch", "skip this layer"),
        (ROWS, HOPPER, 576, 200, "multiples of 16", "torch", "w=int8/row a=int8/row"),
        (
            "w=e4m3fn/row/rceil a=e4m3fn/row",
            HOPPER,
            576,
            576,
            "take float32 scales",
            "torch",
            "w=e4m3fn/row/pow2 a=e4m3fn/row",
        ),
        (
            "w=e4m3fn/row/rceil a=e4m3fn/row",
            CPU,
            576,
            576,
            "take float32 scales",
            "torch",
            "w=e4m3fn/row/pow2 a=e4m3fn/row",
        ),
        ("w=e5m2/row a=e5m2/row", HOPPER, 576, 576, "E5M2 × E5M2", "cuBLASLt", "w=e4m3fn/row a=e5m2/row"),
        ("w=e5m2/128x128 a=e5m2/1x128", HOPPER, 256, 256, "E5M2 × E5M2", "cuBLASLt", "w=e4m3fn/128x128 a=e4m3fn/1x128"),
        (
            "w=e5m2/row a=e4m3fn/row",
            ADA,
            576,
            576,
            "E5M2 weights need Hopper",
            "CUTLASS",
            "w=e5m2/tensor a=e4m3fn/tensor",
        ),
        (
            "w=e5m2/row a=e4m3fn/row",
            BLACKWELL,
            576,
            576,
            "E5M2 weights need Hopper",
            "CUTLASS",
            "w=e5m2/tensor a=e4m3fn/tensor",
        ),
        (BLOCK, CPU, 256, 256, "128x128 weights with 1x128 activations", "torch's CPU kernels", "row"),
        (BLOCK, AMPERE, 256, 256, "compute capability 8.9", "hardware", "int8/row"),
        (BLOCK, ADA, 256, 256, "compute capability 9.x only, this is 8.9", "cuBLASLt", "row"),
        (BLOCK, BLACKWELL, 256, 256, "compute capability 9.x only, this is 10.0", "cuBLASLt", "1x32"),
        (BLOCK, CONSUMER, 256, 256, "compute capability 9.x only, this is 12.0", "cuBLASLt", "1x32"),
        (BLOCK, HOPPER_128, 256, 256, "CUDA 12.9, this torch has 12.8", "cuBLASLt", "row"),
        (BLOCK, HOPPER_UNTOLD, 256, 256, "CUDA 12.9, this torch has none known", "cuBLASLt", "row"),
        (BLOCK, HOPPER, 256, 576, "K=576 must be a multiple of 128", "torch's shape rule", "row"),
        (BLOCK, HOPPER, 250, 512, "multiples of 16", "torch", "skip"),
        ("w=e5m2/128x128 a=e4m3fn/1x128", HOPPER, 256, 256, "for e4m3fn by e4m3fn", "torch", BLOCK),
        (
            "w=e4m3fn/128x128/rceil a=e4m3fn/1x128",
            HOPPER,
            256,
            256,
            "take float32 scales",
            "torch",
            "w=e4m3fn/128x128/pow2 a=e4m3fn/1x128",
        ),
        ("w=e4m3fn/1x128 a=e4m3fn/128x128", HOPPER, 256, 256, "1x128 weights with 128x128", "torch", GROUPS),
        ("w=e4m3fn/tensor a=e4m3fn/row", HOPPER, 256, 256, "tensor weights with row", "torch", ROWS),
        (MX, CPU, 576, 576, "1x32 weights with 1x32", "torch's CPU kernels", "row"),
        (MX, HOPPER, 512, 512, "compute capability 10.0, this device has 9.0", "hardware", BLOCK_POW2),
        (MX, HOPPER, 512, 576, "compute capability 10.0, this device has 9.0", "hardware", "row"),
        (MX, HOPPER_128, 512, 512, "compute capability 10.0, this device has 9.0", "hardware", "row"),
        (MX, BLACKWELL_126, 512, 512, "CUDA 12.8, this torch has 12.6", "cuBLASLt", "row"),
        ("w=e4m3fn/1x32 a=e4m3fn/1x32", BLACKWELL, 512, 512, "must be E8M0", "cuBLASLt", "rceil"),
        ("w=e4m3fn/1x32/rceil a=e5m2/1x32/rceil", BLACKWELL, 512, 512, "for e4m3fn by e4m3fn", "torch", "e4m3fn"),
        ("w=e4m3fn/row", CPU, 576, 576, "both operands", "torch", ROWS),
        (
            "w=int8/row a=e4m3fn/row",
            CPU,
            576,
            576,
            "no kernel multiplies e4m3fn by int8",
            "torch",
            "w=e4m3fn/row a=e4m3fn/row",
        ),
        ("w=int8/row a=int8/row", HOPPER, 100, 201, "multiples of 8", "torch", "skip"),
        ("w=int8/1x128 a=int8/1x128", HOPPER, 256, 256, "1x128 weights with 1x128", "torch", "row"),
    ],
)
def test_a_refusal_says_the_rule_whose_it_is_and_the_nearest_choice_that_works(
    text, device, n, k, reason, whose, nearest
):
    path = native_path(parse_recipe(text), n, k, device)
    assert not path.is_native and reason in path.reason
    rule, _, choice = path.reason.partition("; closest alternative: ")
    assert whose in rule[rule.index("(") :] and nearest in choice


@pytest.mark.parametrize(
    ("text", "device", "n", "k"),
    [
        (ROWS, ADA, 576, 576),
        (ROWS, HOPPER, 576, 576),
        (ROWS, HOPPER_UNTOLD, 576, 576),
        (ROWS, BLACKWELL, 576, 576),
        ("w=e5m2/row a=e4m3fn/row", HOPPER, 576, 576),
        ("w=e4m3fn/row a=e5m2/row", ADA, 576, 576),
        ("w=e4m3fn/tensor a=e5m2/tensor", ADA, 576, 576),
        ("w=int8/row a=int8/row", AMPERE, 576, 576),
        (BLOCK, HOPPER, 2112, 7168),  # a ragged N is torch's ceil(N / 128) blocks
        (GROUPS, HOPPER, 256, 256),
        ("w=e4m3fn/128x128/pow2 a=e4m3fn/1x128/pow2", HOPPER, 256, 256),
        (MX, BLACKWELL, 576, 576),
        (MX, CONSUMER, 576, 240),  # torch's own tests have a K of 240
    ],
)
def test_what_is_native_on_cuda(text, device, n, k):
    assert native_path(parse_recipe(text), n, k, device).kernel in (SCALED_MM, INT_MM)


def unfilled(rows, cols, cast):
    """Codes and scales on the meta device, where torch checks shapes, strides and types as for CUDA."""
    codes = torch.empty(rows, cols, dtype=torch.float8_e4m3fn, device="meta")
    return Quantized(codes, torch.empty(cast.tile.grid(rows, cols), device="meta"), cast)


@pytest.mark.parametrize("text", ["w=e4m3fn/tensor a=e4m3fn/tensor", ROWS, BLOCK, GROUPS, MX])
@pytest.mark.parametrize("shape", [(1, 256, 512), (5, 128, 128), (128, 384, 640), (3, 2048, 4096)], ids=str)
def test_torch_accepts_the_layout_of_the_scales(text, shape):
    recipe, (m, n, k) = parse_recipe(text), shape
    x, w = unfilled(m, k, recipe.activations), unfilled(n, k, recipe.weights)
    assert multiply(x, w, SCALED_MM, torch.bfloat16).shape == (m, n)


def test_torch_refuses_block_scales_that_are_not_laid_out():
    """So that the test above means something."""
    recipe = parse_recipe(BLOCK)
    x, w = unfilled(128, 640, recipe.activations), unfilled(384, 640, recipe.weights)
    operand = activation_operand(x)
    wrong = Operand(w.codes.t(), w.scales.t(), torch.nn.functional.ScalingType.BlockWise128x128)
    with pytest.raises(RuntimeError, match="1x128 x 128x128"):
        scaled_mm(operand, wrong, torch.bfloat16)


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 5), (300, 18)], ids=str)
def test_the_swizzle_puts_each_scale_where_cublas_reads_it(shape):
    rows, groups = shape
    scales = 2.0 ** torch.arange(rows * groups).remainder(200).sub(100).view(shape)
    codes = swizzled(scales).view(torch.uint8)
    tiles = -(-groups // 4)
    assert len(codes) == -(-rows // 128) * tiles * 512
    r, g = torch.meshgrid(torch.arange(rows), torch.arange(groups), indexing="ij")
    offset = 512 * (r // 128 * tiles + g // 4) + r % 32 * 16 + r % 128 // 32 * 4 + g % 4
    assert torch.equal(codes[offset], scales.log2().add(127).to(torch.uint8))
    assert codes.count_nonzero() == rows * groups - (scales == 2.0**-127).sum()  # the rest is filled with zeros


def test_m_is_free_block_wise_for_rows_are_filled_up_to_four():
    recipe = parse_recipe(BLOCK)
    torch.manual_seed(0)
    x = quantize(torch.randn(5, 256), recipe.activations)
    operand = activation_operand(x)
    assert operand.codes.shape == (8, 256) and operand.scales.shape == (8, 2) and operand.scales.stride() == (1, 8)
    assert torch.equal(operand.codes[:5].float(), x.codes.float()) and not operand.codes[5:].float().any()
    assert torch.equal(operand.scales[:5], x.scales)
