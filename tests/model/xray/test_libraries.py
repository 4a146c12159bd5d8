"""Checkpoints as other libraries write them (`tests.oracles_checkpoints`) are read as what they are, free of faults."""

import json

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from fp8dash.errors import ModelError
from fp8dash.model.imported.checkpoint import read_checkpoint
from fp8dash.model.xray.xray import xray
from tests import oracles_checkpoints as oracles
from tests.model.xray import made
from tests.model.xray.test_xray import one, planted, without

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
UE8M0 = FP8 | {"scale_fmt": "ue8m0"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
ACTORDER = {sym: oracles.compressed_config("W4A16" if sym else "W4A16_ASYM", 32) for sym in (True, False)}
for config in ACTORDER.values():
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"


def modelopt(algorithm, **fields):
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]} | fields


def order(weights):
    return torch.randperm(weights.shape[1], generator=torch.Generator().manual_seed(1))


def ue8m0_bytes(weights):
    """UE8M0 scales kept as bytes (transformers, quantizers/quantizer_finegrained_fp8.py)."""
    tensors, decoded = oracles.deepseek_fp8(weights, ue8m0=True, scale_dtype=oracles.E8M0)
    return tensors | {"weight_scale_inv": tensors["weight_scale_inv"].view(torch.uint8)}, decoded


def modelopt_blocks(weights):
    """FP8_PB_WO: scales [out / 128, 1, in / 128, 1] (vLLM, quantization/modelopt.py, ModelOptFp8PbWoLinearMethod)."""
    tensors, decoded = oracles.deepseek_fp8(weights)
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"][:, None, :, None]}, decoded


def modelopt_rows(weights):
    """FP8_PER_CHANNEL_PER_TOKEN: a scale a row, without a second axis."""
    tensors, decoded = oracles.compressed(weights.float(), "FP8_DYNAMIC")
    return tensors | {"weight_scale": tensors["weight_scale"][:, 0]}, decoded


def static_fp8(weights):
    """One static scale each (transformers, integrations/finegrained_fp8.py, FP8Linear without blocks)."""
    tensors, decoded = oracles.modelopt_fp8(weights)
    tensors = {"weight": tensors["weight"], "weight_scale_inv": tensors["weight_scale"]}
    return tensors | {"activation_scale": torch.tensor(0.02)}, decoded


def shared(weights):
    """NVFP4 of ModelOpt, whose fused projections have one second scale."""
    return oracles.modelopt_nvfp4(weights, amax=torch.tensor(1.0))


CASES = {  # each: how a matrix is stored, its quantization_config, and the recipe that is read
    "DeepSeek": (oracles.deepseek_fp8, FP8, "w=e4m3fn/128x128 a=e4m3fn/1x128"),
    "DeepSeek, UE8M0 in float32": (
        lambda w: oracles.deepseek_fp8(w, ue8m0=True), UE8M0, "w=e4m3fn/128x128/pow2 a=e4m3fn/1x128/pow2"),
    "DeepSeek, UE8M0": (
        lambda w: oracles.deepseek_fp8(w, ue8m0=True, scale_dtype=oracles.E8M0), UE8M0,
        "w=e4m3fn/128x128/rceil a=e4m3fn/1x128/pow2"),
    "DeepSeek, UE8M0 as bytes": (ue8m0_bytes, UE8M0, "w=e4m3fn/128x128/rceil a=e4m3fn/1x128/pow2"),
    "FP8 of one static scale": (
        static_fp8, {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
        "w=e4m3fn/tensor a=e4m3fn/tensor/static"),
    "GPTQ": (lambda w: oracles.gptq(w, 32), GPTQ, "w=int4/1x32/ct"),
    "GPTQ of 8 bits": (lambda w: oracles.gptq(w, 32, bits=8), GPTQ | {"bits": 8}, "w=int8/1x32/ct"),
    "GPTQ, asymmetric": (lambda w: oracles.gptq(w, 32, sym=False), GPTQ | {"sym": False}, "w=int4/1x32/ct"),
    "GPTQ v2": (
        lambda w: oracles.gptq(w, 32, sym=False, version=2),
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, "w=int4/1x32/ct"),
    "GPTQ, ordered": (lambda w: oracles.gptq(w, 32, order=order(w)), GPTQ | {"desc_act": True}, "w=int4/1x32/ct"),
    "AWQ": (lambda w: oracles.awq(w, 32), AWQ, "w=int4/1x32/ct"),
    "ModelOpt FP8": (oracles.modelopt_fp8, modelopt("FP8"), "w=e4m3fn/tensor a=e4m3fn/tensor/static"),
    "ModelOpt FP8 blocks": (modelopt_blocks, modelopt("fp8_pb_wo"), "w=e4m3fn/128x128"),
    "ModelOpt FP8 rows": (
        modelopt_rows, modelopt("FP8_PER_CHANNEL_PER_TOKEN"), "w=e4m3fn/row a=e4m3fn/row"),
    "ModelOpt NVFP4": (shared, modelopt("NVFP4", group_size=16), "w=e2m1/1x16/nvfp4 a=e2m1/1x16/nvfp4"),
    "ModelOpt NVFP4, weights": (
        lambda w: oracles.modelopt_nvfp4(w, amax=torch.tensor(1.0), input_scale=None),
        modelopt("W4A16_NVFP4", group_size=16), "w=e2m1/1x16/nvfp4"),
    "ordered words": (
        lambda w: oracles.compressed_by_activations(w, 32, order(w)), ACTORDER[True], "w=int4/1x32/ct"),
    "ordered words, asymmetric": (
        lambda w: oracles.compressed_by_activations(w, 32, order(w), sym=False), ACTORDER[False], "w=int4/1x32/ct"),
}  # fmt: skip
RECIPES = {
    "FP8": "w=e4m3fn/tensor a=e4m3fn/tensor/static",
    "FP8_DYNAMIC": "w=e4m3fn/row a=e4m3fn/row",
    "FP8_BLOCK": "w=e4m3fn/128x128 a=e4m3fn/1x128",
    "W8A8": "w=int8/row/ct a=int8/row",
    "W8A16": "w=int8/1x32/ct",
    "W4A16": "w=int4/1x32/ct",
    "W4A16_ASYM": "w=int4/1x32/ct",
    "NVFP4": "w=e2m1/1x16/nvfp4 a=e2m1/1x16/nvfp4",
    "NVFP4A16": "w=e2m1/1x16/nvfp4",
    "MXFP4": "w=e2m1/1x32/onebit a=e2m1/1x32/onebit",
    "MXFP4A16": "w=e2m1/1x32/onebit",
    "MXFP8": "w=e4m3fn/1x32/onebit a=e4m3fn/1x32/onebit",
    "MXFP8A16": "w=e4m3fn/1x32/onebit",
}
GROUPED = ("W8A16", "W4A16", "W4A16_ASYM")
CASES |= {
    name: (
        lambda w, name=name: oracles.compressed(w, name, group=32 if name in GROUPED else None, amax=1.0),
        oracles.compressed_config(name, 32 if name in GROUPED else None), recipe,
    )
    for name, recipe in RECIPES.items()
}  # fmt: skip


def stored(folder, name):
    """A whole checkpoint, and the bytes of its matrices."""
    make, config, _ = CASES[name]
    tensors = made.each(lambda weight: make(weight)[0])
    of_weights = {
        key: t for key, t in tensors.items() if not key.rpartition(".")[2].startswith(("input", "activation"))
    }
    of_weights.pop("model.embed_tokens.weight")
    return made.write(folder, tensors, config), sum(tensor.nbytes for tensor in of_weights.values())


@pytest.mark.parametrize("name", CASES)
def test_what_a_library_stores_is_free_of_faults_and_read_as_what_it_is(name, tmp_path):
    folder, size = stored(tmp_path / "out", name)
    result = xray(folder)
    assert [(fault.kind, fault.detail) for fault in result.faults] == []
    assert result.recipe == CASES[name][2]
    head, cast = 272 * 64, sum(rows * cols for rows, cols in made.MODULES.values())
    assert result.coverage == cast / (cast + head)
    assert result.bits_per_weight == pytest.approx(8 * size / (cast + head), rel=1e-12)
    assert name not in RECIPES or result.scheme == name


@pytest.mark.parametrize("name", CASES)
def test_the_same_without_its_config_is_read_by_its_tensors(name, tmp_path):
    folder, _ = stored(tmp_path / "out", name)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    result = xray(folder)
    assert {fault.kind for fault in result.faults} == {"cast, not claimed"}
    cast = [casting for casting in result.castings if casting.packing]
    assert sum(casting.elements for casting in cast) == sum(rows * cols for rows, cols in made.MODULES.values())
    assert all(casting.cast and "no tile" not in casting.cast for casting in cast)


INTEGERS = ("GPTQ", "GPTQ, asymmetric", "GPTQ v2", "GPTQ, ordered", "AWQ", "W4A16", "W4A16_ASYM")
ORDERED = ("ordered words", "ordered words, asymmetric")


@pytest.mark.parametrize("name", INTEGERS + ORDERED)
def test_codes_that_are_plain_rounding_are_told_whatever_their_zero_points_and_order(name, tmp_path):
    folder, _ = stored(tmp_path / "out", name)
    rounding = xray(folder, made.plain(tmp_path / "plain")).rounding
    assert rounding.matrices == len(made.MODULES) and rounding.least > 0.995


def zeros_of(middle):
    """Zero points of another version than the config's: all `middle`."""
    word = sum(middle << place for place in range(0, 32, 4))
    return lambda tensors, config: tensors.update(
        {name: torch.full_like(t, word - (word >> 31 << 32)) for name, t in tensors.items() if name.endswith("qzeros")}
    )


def sorted_by(fields):
    return lambda tensors, config: config["quantization_config"].update(fields)


def unordered(tensors, config):
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = None


Q = f"{next(iter(made.MODULES))}"
UP = "model.layers.1.mlp.up_proj"
PLANTED = [  # a case, what is done to it, and the fault that is named
    ("GPTQ, ordered", without(f"{Q}.g_idx"), "group index"),
    ("GPTQ, ordered", one(f"{Q}.g_idx", lambda t: t + 1), "group index"),
    ("GPTQ, ordered", one(f"{Q}.g_idx", lambda t: t[:-1]), "group index"),
    ("GPTQ, ordered", sorted_by({"desc_act": False}), "group index"),
    ("GPTQ", zeros_of(8), "zero points"),
    ("GPTQ", sorted_by({"checkpoint_format": "gptq_v2"}), "zero points"),
    ("GPTQ, asymmetric", sorted_by({"sym": True}), "zero points"),
    ("ordered words", without(f"{Q}.weight_g_idx"), "group index"),
    ("ordered words", one(f"{Q}.weight_g_idx", lambda t: t - 1), "group index"),
    ("ordered words, asymmetric", unordered, "group index"),
    ("W4A16_ASYM", without(f"{Q}.weight_zero_point"), "zero points"),
    ("W8A16", one(f"{Q}.weight_shape", lambda t: t.flip(0) // 2), "packed shape"),
    ("NVFP4", without(f"{Q}.input_global_scale"), "missing input scale"),
    ("ModelOpt NVFP4", without(f"{Q}.input_scale"), "missing input scale"),
    ("FP8 of one static scale", without(f"{Q}.activation_scale"), "missing input scale"),
    ("NVFP4", one(f"{Q}.weight_global_scale", lambda t: 2 * t), "global scales"),
    ("NVFP4", one(f"{UP}.input_global_scale", lambda t: t / 2), "global scales"),
    ("NVFP4A16", one(f"{UP}.weight_global_scale", lambda t: 2 * t), "global scales"),
    ("ModelOpt NVFP4", one(f"{Q}.weight_scale_2", lambda t: t / 2), "global scales"),
    ("ModelOpt NVFP4", one(f"{UP}.input_scale", lambda t: 2 * t), "global scales"),
    ("ModelOpt FP8", one(f"{Q}.input_scale", lambda t: 2 * t), "global scales"),
    ("DeepSeek", one(f"{Q}.weight_scale_inv", lambda t: t.to(oracles.E8M0).view(torch.uint8)), "scale dtype"),
]


@pytest.mark.parametrize(
    ("name", "change", "kind"), PLANTED, ids=[f"{n}, {kind}" for n, (*_, kind) in enumerate(PLANTED)]
)
def test_a_fault_in_a_librarys_checkpoint_is_named_and_no_other(name, change, kind, tmp_path):
    folder = planted(stored(tmp_path / "out", name)[0], tmp_path / "planted", change)
    (fault,) = xray(folder).faults
    assert fault.kind == kind and fault.where and fault.detail


@pytest.mark.parametrize("name", ["scale", "qscale_weight"])
def test_inverse_scales_are_found_under_their_other_names(name, tmp_path):
    """DeepSeek-V4 and Mistral Large 4 (transformers, quantizers/quantizer_finegrained_fp8.py)."""
    tensors = made.each(lambda weight: oracles.deepseek_fp8(weight)[0])
    tensors = {key.replace("weight_scale_inv", name): tensor for key, tensor in tensors.items()}
    result = xray(made.write(tmp_path / "out", tensors, FP8))
    assert result.faults == () and result.recipe == CASES["DeepSeek"][2]


def test_stacked_experts_have_their_scales_beside_them(tmp_path):
    """transformers, integrations/finegrained_fp8.py, Fp8Quantize: experts.gate_up_proj and its _scale_inv."""
    tensors = made.each(lambda weight: oracles.deepseek_fp8(weight)[0])
    stack = [oracles.deepseek_fp8(torch.randn(192, 256) / 8)[0] for _ in range(4)]
    for end, part in (("", "weight"), ("_scale_inv", "weight_scale_inv")):
        tensors[f"model.layers.0.mlp.experts.gate_up_proj{end}"] = torch.stack([one[part] for one in stack])
    result = xray(made.write(tmp_path / "out", tensors, FP8))
    assert result.faults == () and result.recipe == CASES["DeepSeek"][2]
    assert sum(c.elements for c in result.castings if c.packing) == 4 * 192 * 256 + sum(
        rows * cols for rows, cols in made.MODULES.values()
    )


def test_scales_of_one_tensor_may_differ_within_a_fused_group(tmp_path):
    """vLLM casts FP8 codes anew by the largest (quantization/modelopt.py, requantize_with_max_scale)."""
    change = one(f"{Q}.weight_scale", lambda t: 2 * t)
    for name in ("ModelOpt FP8", "FP8"):
        assert xray(planted(stored(tmp_path / name, name)[0], tmp_path / f"{name}, planted", change)).faults == ()


def test_an_index_of_nothing_but_minus_one_is_none(tmp_path):
    """compressed-tensors' own mark of columns in order (quantization/lifecycle/forward.py, `-1 in g_idx`)."""
    unset = {
        f"{name}.weight_g_idx": torch.full((cols,), -1, dtype=torch.int32) for name, (_, cols) in made.MODULES.items()
    }
    folder = planted(stored(tmp_path / "out", "W4A16")[0], tmp_path / "planted", lambda t, _config: t.update(unset))
    assert xray(folder).faults == ()


def kv(algorithm, **scales):
    def change(tensors, config):
        config["quantization_config"]["kv_cache_scheme"] = algorithm
        for name in made.MODULES:
            if name.endswith(("k_proj", "v_proj")):
                tensors.update(
                    {f"{name}.{part.format(name[-6])}": torch.tensor(value) for part, value in scales.items()}
                )

    return change


FP8_KV = {"type": "float", "num_bits": 8, "dynamic": False, "strategy": "tensor", "symmetric": True}


@pytest.mark.parametrize("scheme", ["FP8", FP8_KV], ids=str)
def test_modelopts_kv_scales_of_one_are_its_own_floor(scheme, tmp_path):
    """modelopt/torch/export/quant_utils.py, get_kv_cache_scaling_factor: smaller scales are written as 1."""
    source = stored(tmp_path / "out", "ModelOpt FP8")[0]
    result = xray(planted(source, tmp_path / "planted", kv(scheme, **{"{}_scale": 1.0})))
    assert result.faults == () and result.recipe.endswith("kv=e4m3fn/tensor/static")


def test_kv_scales_under_their_older_name_are_found(tmp_path):
    """vLLM, compressed_tensors.py, get_cache_scale: k_proj.output_scale is k_scale."""
    source = stored(tmp_path / "out", "FP8_DYNAMIC")[0]
    assert xray(planted(source, tmp_path / "planted", kv(FP8_KV, output_scale=0.05))).faults == ()
    (fault,) = xray(planted(source, tmp_path / "bare", kv(FP8_KV))).faults
    assert fault.kind == "missing kv scale"


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7])
def test_words_of_another_width_are_counted_and_called_so(bits, tmp_path):
    """compressed-tensors packs 1 to 8 bits without gaps, and weight_shape tells which (pack_quantized/helpers.py)."""
    tensors, modules = {}, 0
    for name, weight in made.weights().items():
        if name in made.REST:
            tensors[f"{name}.weight"] = weight
            continue
        codes = torch.zeros(weight.shape, dtype=torch.int8)
        tensors[f"{name}.weight_packed"] = pack_to_int32(codes, bits)
        tensors[f"{name}.weight_shape"] = torch.tensor(weight.shape)
        tensors[f"{name}.weight_scale"] = weight[:, ::32].abs() + 1e-3
        modules += 1
    config = oracles.compressed_config("W4A16", 32)
    config["config_groups"]["group_0"]["weights"]["num_bits"] = bits
    folder = made.write(tmp_path / "out", tensors, config)
    result = xray(folder)
    assert result.faults == () and result.recipe == ""
    with pytest.raises(ModelError, match="in integers of another width than 4 or 8 bits"):
        read_checkpoint(str(folder))
    (casting, _) = result.castings
    assert (casting.cast, casting.matrices) == ("codes of another width", modules)
    assert casting.elements == sum(rows * cols for rows, cols in made.MODULES.values())
