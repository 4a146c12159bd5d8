"""Codes and scales against the libraries people quantize with, element for element.

Where a library differs, the test says so in its name or comment, and asserts everything else exactly. What differs:

torch, ml_dtypes     nothing after clamping
gfloat               nothing
compressed-tensors   computes in the tensor's dtype: given float32 it is equal; NVFP4's outer scale is kept inverted;
                     an NVFP4 scale that is or rounds to zero is 0.125, ours 1 or 2^-9; an MX scale may be infinite
torchao Float8       0 / 0 in a tile of zeros unless a lower bound on amax is given
torchao training     the multiplier max / amax in float64, its inverse kept: one ulp
torchao MX           its smallest scale is stored as 2^-127 and divided by as 2^-126, or as 1 by RCEIL;
                     RCEIL takes log2 in float32: an ulp above a boundary the scale is not raised
torchao NVFP4        multiplies by the reciprocal; block scales are at least 2^-6
"""

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.quantization import QuantizationStrategy
from compressed_tensors.quantization.lifecycle.forward import quantize as ct_quantize
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp, generate_gparam
from gfloat import BlockFormatInfo, Domain, FormatInfo, compute_scale_amax, encode_block, encode_ndarray, round_ndarray
from gfloat import formats as gfloat_formats
from torch.nn.functional import pad
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
from torchao.quantization import PerBlock, PerRow, PerTensor
from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

from fp8dash.choose.casts import Cast, parse_cast
from fp8dash.choose.formats import FORMATS, FloatFormat, midpoints
from fp8dash.choose.scaling import RULES, TILES
from fp8dash.quant.cast import DTYPES, decode, encode, quantize, spread, to_grid
from fp8dash.quant.packing import pack

FLOATS = [f for f in FORMATS.values() if isinstance(f, FloatFormat)]
EIGHT_BITS_IN_TORCH = [f for f in FLOATS if f.name in DTYPES]
MX_FORMATS = [FORMATS[name] for name in ("e4m3fn", "e5m2", "e3m2", "e2m3", "e2m1")]
FULL = 448 * 6  # an amax of this gives NVFP4 an outer scale of one
ULPS = 2**-21  # how close to a tie the two orders of multiplying and dividing may disagree

ML_DTYPES = {
    **{name: f"float8_{name}" for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e4m3", "e3m4")},
    **{"e3m2": "float6_e3m2fn", "e2m3": "float6_e2m3fn", "e2m1": "float4_e2m1fn"},
}
GFLOAT = {
    "e4m3fn": gfloat_formats.format_info_ocp_e4m3,
    "e5m2": gfloat_formats.format_info_ocp_e5m2,
    "e3m2": gfloat_formats.format_info_ocp_e3m2,
    "e2m3": gfloat_formats.format_info_ocp_e2m3,
    "e2m1": gfloat_formats.format_info_ocp_e2m1,
    "int8": gfloat_formats.format_info_ocp_int8,
}
TORCHAO_MX = {
    **{"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2},
    **{"e3m2": "fp6_e3m2", "e2m3": "fp6_e2m3", "e2m1": torch.float4_e2m1fn_x2},
}


def gfloat_format(fmt):
    """gfloat's own where it has one; its FormatInfo with our facts where it has not."""
    if fmt.name in GFLOAT:
        return GFLOAT[fmt.name]
    return FormatInfo(
        fmt.name,
        k=fmt.bits,
        precision=fmt.mantissa_bits + 1,
        bias=fmt.bias,
        has_nz=fmt.negative_zero,
        domain=Domain.Extended if fmt.has_infinity else Domain.Finite,
        num_high_nans=max(fmt.reserved - 1, 0),
        has_subnormals=True,
        is_signed=True,
        is_twos_complement=False,
    )


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def outliers():
    x = normal(256, 256, seed=1)
    x[:, ::37] *= 60
    x[::5] *= torch.logspace(-6, 6, 52)[:, None]
    return x


def zero_tiles():
    x = normal(256, 256, seed=2)
    x[:128, 128:256] = 0
    x[200] = 0
    return x


DATA = {
    "normal": normal(256, 256),
    "outliers": outliers(),
    "zero tiles": zero_tiles(),
    "zeros": torch.zeros(130, 256),
    "ragged": normal(200, 300, seed=3),
    "bfloat16 values": normal(256, 256, seed=4).bfloat16().float(),  # ties and equal magnitudes abound
    "on the grid": torch.arange(-64.0, 64.0).repeat(16, 2) / 8,
}
every_data = pytest.mark.parametrize("x", DATA.values(), ids=DATA.keys())


def codes(tensor):
    """Codes as bytes."""
    return tensor.contiguous().view(torch.uint8)


def filled(x, rows, cols):
    """x padded with zeros to whole tiles, for libraries that refuse ragged edges; ours need no padding."""
    return pad(x, (0, -x.shape[1] % cols, 0, -x.shape[0] % rows))


def assert_equal(values, theirs):
    torch.testing.assert_close(values, theirs, rtol=0, atol=0)


def assert_equal_but_for_near_ties(q, theirs, x):
    """Codes are equal, save where x / factor is within a few ulps of a tie."""
    differ = codes(q.codes) != codes(theirs)
    scaled = (x.double() / spread(q.factors, q.cast.tile, *x.shape).double()).abs()[differ]
    ties = torch.tensor(midpoints(q.cast.format), dtype=torch.float64)
    nearest = (scaled[:, None] - ties).abs().amin(1)
    assert (nearest <= scaled * ULPS).all()
    assert differ.float().mean() < 1e-3


# --- Casts alone ---


def scaled_values(fmt):
    """All codes' values, the ties between them, the floats next to those, values beyond the range, and random ones."""
    ties = torch.tensor(midpoints(fmt), dtype=torch.float32)
    beside = [torch.nextafter(ties, torch.tensor(side)) for side in (-torch.inf, torch.inf)]
    grid = torch.tensor([fmt.decode(c) for c in range(1 << fmt.bits)], dtype=torch.float32)
    noise = normal(20_000) * torch.logspace(-6, 1, 20_000) * fmt.max / 4
    edge = torch.tensor([0.0, -0.0, fmt.max * 1.01, -fmt.max * 100, 1e-40, -1e-40, 3e38])
    values = torch.cat([ties, *beside, grid[grid.isfinite()], noise, edge])
    return values.clamp(-fmt.max, fmt.max)


@pytest.mark.parametrize("fmt", EIGHT_BITS_IN_TORCH, ids=lambda f: f.name)
def test_codes_and_grid_are_torchs_cast(fmt):
    y = scaled_values(fmt)
    expected = y.to(DTYPES[fmt.name])
    assert_equal(codes(encode(y.clone(), fmt)), codes(expected))
    assert_equal(to_grid(y.clone(), fmt), expected.float())


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
def test_codes_and_grid_are_ml_dtypes_cast(fmt):
    y = scaled_values(fmt)
    expected = y.numpy().astype(getattr(ml_dtypes, ML_DTYPES[fmt.name]))
    assert_equal(codes(encode(y.clone(), fmt)), torch.from_numpy(expected.view(np.uint8)))
    assert_equal(to_grid(y.clone(), fmt), torch.from_numpy(expected.astype(np.float32)))


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
def test_codes_and_grid_are_gfloats(fmt):
    y, info = scaled_values(fmt), gfloat_format(fmt)
    rounded = round_ndarray(info, y.double().numpy(), sat=True)
    assert_equal(codes(encode(y.clone(), fmt)), torch.from_numpy(encode_ndarray(info, rounded).astype(np.uint8)))
    assert_equal(to_grid(y.clone(), fmt), torch.from_numpy(rounded).float())


def test_int8_codes_are_gfloats_mxint8_elements():
    """MXINT8's element is the integer over 64, and gfloat's goes down to -2, which a clamp at -127 never reaches."""
    y = torch.cat([torch.arange(-127, 127) + 0.5, normal(5000) * 50]).clamp(-127, 127)
    info = GFLOAT["int8"]
    expected = encode_ndarray(info, round_ndarray(info, y.double().numpy() / 64, sat=True)).astype(np.uint8)
    assert_equal(codes(encode(y.clone(), FORMATS["int8"])), torch.from_numpy(expected))


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
def test_every_code_decodes_to_ml_dtypes_value(fmt):
    every = np.arange(1 << fmt.bits, dtype=np.uint8)
    expected = torch.from_numpy(every.view(getattr(ml_dtypes, ML_DTYPES[fmt.name])).astype(np.float32))
    decoded = decode(torch.from_numpy(every).view(DTYPES.get(fmt.name, torch.uint8)), fmt)
    torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)


# --- MX blocks ---


@pytest.mark.parametrize("name", ["normal", "zero tiles", "ragged"])
@pytest.mark.parametrize("fmt", MX_FORMATS, ids=lambda f: f.name)
def test_ocp_blocks_are_gfloats_scale_byte_and_codes(fmt, name):
    x = DATA[name][-12:, -100:]  # ragged: the last tile has four columns
    q = quantize(x, Cast(fmt, TILES["1x32"], RULES["floor"]))
    block_format = BlockFormatInfo("mx", gfloat_format(fmt), 32, gfloat_formats.format_info_ocp_e8m0)
    for tile, block in enumerate(filled(x, 1, 32).double().numpy().reshape(-1, 32)):
        row, col = divmod(tile, q.scales.shape[1])
        scale = compute_scale_amax(fmt.max_exponent, block)
        scale_code, *elements = encode_block(block_format, scale, block / scale)
        own_codes = codes(q.codes[row, 32 * col : 32 * col + 32]).tolist()
        assert q.scales[row, col].item() == 2.0 ** (int(scale_code) - 127)
        assert own_codes == [int(code) for code in elements[: len(own_codes)]]


@every_data
@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
@pytest.mark.parametrize("fmt", MX_FORMATS, ids=lambda f: f.name)
def test_mx_scales_and_codes_are_torchaos(fmt, rule, x):
    q = quantize(x, Cast(fmt, TILES["1x32"], RULES[rule]))
    mode = ScaleCalculationMode(rule)
    scales, elements = to_mx(filled(x, 1, 32), TORCHAO_MX[fmt.name], 32, mode)
    assert_equal(q.scales, scales.float())
    padded = pad(q.codes.view(torch.uint8), (0, -x.shape[1] % 32))
    assert_equal(pack(padded, fmt) if fmt.bits == 4 else padded, codes(elements))


def boundary_amaxes(fmt):
    """Where a rule may change its mind: mantissas about 1, half codes, the format's own and all ones; many binades."""
    heads = torch.tensor([1.0, 1.25, 1.5, 1.75, 1.875, 1.9375, 1.96875, fmt.max / 2**fmt.max_exponent])
    mantissas = (heads.view(torch.int32)[:, None] + torch.arange(-2, 3)).flatten().view(torch.float32)
    exponents = torch.tensor([*range(-126, -104), *range(-104, 124, 12), *range(124, 128)])
    binades = torch.ldexp(torch.ones(len(exponents)), exponents)
    amax = torch.cat([(mantissas[:, None] * binades).flatten(), torch.tensor([0.0, 1e-45, 1e-40, 1.1e-38, 3.4e38])])
    return amax[amax.isfinite()]


@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
@pytest.mark.parametrize("fmt", MX_FORMATS, ids=lambda f: f.name)
def test_mx_is_torchaos_at_every_boundary_but_for_its_log2_and_its_smallest_scale(fmt, rule):
    """torchao's RCEIL takes ceil(log2(x)) in float32, which loses the ulps above a power of two: ours is then twice.

    Under its smallest scale, stored as 2^-127, it divides by 2^-126 (RCEIL: by 1); ours divides by what is stored.
    """
    amax = boundary_amaxes(fmt)
    x = amax[:, None] * torch.linspace(-1, 1, 32)
    q = quantize(x, Cast(fmt, TILES["1x32"], RULES[rule]))
    theirs, elements = to_mx(x, TORCHAO_MX[fmt.name], 32, ScaleCalculationMode(rule))
    scales, theirs = q.scales[:, 0], theirs.float()[:, 0]
    differ = scales != theirs
    assert differ.any() == (rule == "rceil")
    assert (scales == 2 * theirs)[differ].all()
    above = amax.double() / fmt.max / theirs.double()  # how far their scale lies below the quotient
    assert ((above > 1) & (above < 1 + 2**-16))[differ].all()
    same = ~differ & (scales > 2.0**-127)
    assert_equal(codes(pack(q.codes, fmt) if fmt.bits == 4 else q.codes)[same], codes(elements)[same])


# --- compressed-tensors ---

CT_CASTS = {  # (preset, its operand): ours
    ("FP8", "weights"): "e4m3fn/tensor/ct",
    ("FP8", "input_activations"): "e4m3fn/tensor/ct",
    ("FP8_DYNAMIC", "weights"): "e4m3fn/row/ct",
    ("FP8_DYNAMIC", "input_activations"): "e4m3fn/row/ct",
    ("FP8_BLOCK", "weights"): "e4m3fn/128x128/ct",
    ("FP8_BLOCK", "input_activations"): "e4m3fn/1x128/ct",
    ("INT8", "weights"): "int8/row/ct",
    ("INT8", "input_activations"): "int8/row/ct",
    ("W4A16", "weights"): "int4/1x128/ct",
    ("MXFP8", "weights"): "e4m3fn/1x32/onebit/ct",
    ("MXFP8", "input_activations"): "e4m3fn/1x32/onebit/ct",
    ("MXFP4", "weights"): "e2m1/1x32/onebit/ct",
    ("MXFP4", "input_activations"): "e2m1/1x32/onebit/ct",
    ("MXFP6A16", "weights"): "e2m3/1x32/even/ct",  # E2M3's own mantissa bits, so `even`
}
S = QuantizationStrategy


def ct_scales(x, args):
    """The library's scales: its dynamic ones, or its qparams of the extremes that its minmax observers take."""
    if args.strategy == S.TOKEN:
        return compute_dynamic_scales_and_zp(x[None], args, None)[0][0]  # it wants [batch, tokens, features]
    if args.strategy in (S.TENSOR, S.GROUP):
        return compute_dynamic_scales_and_zp(x, args, None)[0]
    if args.strategy == S.CHANNEL:
        return calculate_qparams(x.amin(1, keepdim=True), x.amax(1, keepdim=True), args)[0]
    height, width = args.block_structure
    blocks = filled(x, height, width).unflatten(1, (-1, width)).unflatten(0, (-1, height))
    return calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)[0]


@every_data
@pytest.mark.parametrize("key", CT_CASTS, ids="/".join)
def test_presets_give_compressed_tensors_scales_and_codes(key, x):
    preset, operand = key
    args, cast = PRESET_SCHEMES[preset][operand], parse_cast(CT_CASTS[key])
    q = quantize(x, cast)
    wide = filled(x, 1, args.group_size or 1)  # groups must be whole there
    scales = ct_scales(wide, args)
    assert_equal(q.scales.view(-1), scales.view(-1))
    values = ct_quantize(wide, scales, None, args)[:, : x.shape[1]]
    assert_equal(decode(q.codes, cast.format), values)
    if cast.format.bits == 8:
        stored = ct_quantize(wide, scales, None, args, dtype=DTYPES[cast.format.name])[:, : x.shape[1]]
        assert_equal(codes(q.codes), codes(stored))


@pytest.mark.parametrize("preset", ["MXFP8", "MXFP4", "MXFP6A16"])
def test_mx_is_compressed_tensors_at_every_boundary_but_for_its_infinite_scale(preset):
    """An amax that rounds up past the last binade has an infinite scale there."""
    args, cast = PRESET_SCHEMES[preset]["weights"], parse_cast(CT_CASTS[preset, "weights"])
    amax = boundary_amaxes(cast.format)
    x = amax[:, None] * torch.linspace(-1, 1, 32)
    q, scales = quantize(x, cast), ct_scales(x, args)
    finite = scales[:, 0].isfinite()
    assert (amax[~finite] > 1.5 * 2.0**127).all()
    assert_equal(q.scales[finite], scales[finite])
    values = ct_quantize(x, scales, None, args)
    assert_equal(decode(q.codes, cast.format)[finite], values[finite])


NVFP4 = PRESET_SCHEMES["NVFP4"]["weights"]


def ct_nvfp4(x):
    """The library's block scales, inverse global scale and values."""
    outer = generate_gparam(x.min(), x.max())
    scales, _zero = compute_dynamic_scales_and_zp(x, NVFP4, None, outer)
    return scales, outer, ct_quantize(x, scales, None, NVFP4, global_scale=outer)


@pytest.mark.parametrize("name", [name for name in DATA if name != "zeros"])
def test_nvfp4_is_compressed_tensors_where_its_inverse_outer_scale_is_exact(name):
    """A zero block has scale 0.125 there and 1 here; its codes are zeros in both."""
    x = filled(DATA[name], 1, 16)
    x = (x * (0.9 * FULL / x.abs().max())).clone()
    x[0, 0] = FULL * 4  # amax a power of two times 448 * 6: outer scale and inverse are exact
    q, (scales, outer, values) = quantize(x, parse_cast("e2m1/1x16/nvfp4")), ct_nvfp4(x)
    assert q.outer.item() == 1 / outer.item() == 4
    zero, lost = tile_is_zero(x, 16), q.scales < 2**-9
    assert not lost.any() and (scales[zero] == 0.125).all() and (q.scales[zero] == 1).all()
    small = ~zero & (scales == 0.125) & (q.scales == 2**-9)  # rounded to zero: theirs is then 0.125, ours the smallest
    same = ~zero & ~small
    assert_equal(q.scales[same], scales[same])
    kept = same.repeat_interleave(16, 1)
    assert_equal(decode(q.codes, q.cast.format)[kept], values[kept])
    packed = pack_fp4_to_uint8(values)
    assert_equal(pack(q.codes, q.cast.format)[kept[:, ::2]], packed[kept[:, ::2]])


def tile_is_zero(x, width):
    return x.unflatten(1, (-1, width)).abs().amax(-1) == 0


@pytest.mark.parametrize("name", ["normal", "ragged", "bfloat16 values"])
def test_nvfp4_is_compressed_tensors_but_for_ties_of_its_inverse_outer_scale(name):
    x = filled(DATA[name], 1, 16)
    q, (scales, outer, values) = quantize(x, parse_cast("e2m1/1x16/nvfp4")), ct_nvfp4(x)
    assert q.outer.item() == pytest.approx(1 / outer.item(), rel=2**-23)
    same = (q.scales == scales).repeat_interleave(16, 1)
    assert same.float().mean() > 0.999
    theirs = torch.where(same, values, decode(q.codes, q.cast.format))
    assert_equal_but_for_near_ties(q, to_codes(theirs, q.cast.format), x)


def to_codes(values, fmt):
    """Codes of values on the grid, by ml_dtypes."""
    encoded = values.numpy().astype(getattr(ml_dtypes, ML_DTYPES[fmt.name]))
    return torch.from_numpy(encoded.view(np.uint8))


def test_compressed_tensors_rounds_scales_to_the_tensors_own_dtype_and_ours_stay_float32():
    """So it is held against float32 tensors; a bfloat16 tensor's scale there is a bfloat16."""
    x = normal(64, 128).bfloat16()
    args = PRESET_SCHEMES["FP8_DYNAMIC"]["weights"]
    theirs = ct_scales(x, args)
    assert theirs.dtype == torch.bfloat16
    assert_equal(quantize(x, parse_cast("e4m3fn/row/ct")).scales.bfloat16(), theirs)


# --- torchao ---

FLOAT8_GRANULARITIES = {
    "tensor": PerTensor(),
    "row": PerRow(),
    "column": PerRow(dim=0),
    "1x128": PerBlock([1, 128]),
    "128x128": PerBlock([128, 128]),
}


@every_data
@pytest.mark.parametrize("tile", FLOAT8_GRANULARITIES)
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
def test_float8_tensors_are_torchaos_with_its_bound_on_amax(name, tile, x):
    """Without the bound, a tile of zeros has scale 0 there and its codes are NaN."""
    q = quantize(x, parse_cast(f"{name}/{tile}/torchao"))
    height, width = (128, 128) if tile == "128x128" else (1, 128) if tile == "1x128" else (1, 1)
    theirs = Float8Tensor.from_hp(filled(x, height, width), DTYPES[name], FLOAT8_GRANULARITIES[tile], hp_value_lb=1e-12)
    assert_equal(q.scales.view(-1), theirs.scale.view(-1))
    assert_equal(codes(q.codes), codes(theirs.qdata[: x.shape[0], : x.shape[1]]))


@every_data
@pytest.mark.parametrize("tile", ["tensor", "row"])
@pytest.mark.parametrize("rule", ["float32", "pow2"])
def test_training_scales_are_the_inverse_of_torchaos_multiplier(rule, tile, x):
    """Its multiplier is 448 / amax in float64, rounded; a power of two there is exact and its codes are ours."""
    q = quantize(x, parse_cast(f"e4m3fn/{tile}/{rule}/torchao"))
    by = ScalingGranularity.AXISWISE if tile == "row" else ScalingGranularity.TENSORWISE
    multiplier = tensor_to_scale(
        x, torch.float8_e4m3fn, scaling_granularity=by, axiswise_dim=1, round_scales_to_power_of_2=rule == "pow2"
    )
    theirs = to_fp8_saturated(x * multiplier, torch.float8_e4m3fn)
    if rule == "pow2":
        assert_equal(q.scales.view(-1), 1 / multiplier.view(-1))
        assert_equal(codes(q.codes), codes(theirs))
    else:
        torch.testing.assert_close(q.scales.view(-1), 1 / multiplier.view(-1), rtol=2**-22, atol=0)
        assert_equal_but_for_near_ties(q, theirs, x)


@pytest.mark.parametrize("name", [name for name in DATA if name != "zeros"])
def test_nvfp4_is_torchaos_above_its_floor_but_for_ties_of_its_reciprocal(name):
    """Block scales below 2^-6 are raised to it there; ours go down to the smallest E4M3, 2^-9."""
    x = filled(DATA[name], 1, 16)
    q = quantize(x, parse_cast("e2m1/1x16/nvfp4"))
    outer = per_tensor_amax_to_scale(x.abs().max())
    scales, packed = nvfp4_quantize(x, 16, outer.view(1, 1))
    assert_equal(q.outer.view(()), outer)
    zero = tile_is_zero(x, 16)
    assert_equal(torch.where(zero, 2.0**-6, q.scales.clamp_min(2.0**-6)), scales.float())
    theirs = unpacked(packed)
    kept = (q.scales >= 2.0**-6).repeat_interleave(16, 1)
    assert (codes(theirs)[zero.repeat_interleave(16, 1)] & 7 == 0).all()
    assert_equal_but_for_near_ties(q, torch.where(kept, theirs, q.codes), x)


def unpacked(packed):
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(1)


@pytest.mark.parametrize("cast", ["e4m3fn/row", "e4m3fn/1x32/floor", "e2m1/1x16/nvfp4"])
def test_a_tile_of_zeros_in_ours_never_holds_torchaos_nan(cast):
    q = quantize(torch.zeros(4, 128), parse_cast(cast))
    assert not codes(q.codes).any() and (q.scales > 0).all()
    assert Float8Tensor.from_hp(torch.zeros(4, 128)).qdata.float().isnan().all()
