"""Reading a checkpoint's quantization_config: the inverse of writing one, and one sentence for what is none."""

import pytest
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from fp8dash.choose.models.checkpoint import quantization_config, scheme_of
from fp8dash.choose.models.claims import quantized_of
from fp8dash.choose.models.quantized import AWQ, BLOCKS, GPTQ, INVERSE, MODELOPT
from fp8dash.choose.presets import PRESETS
from fp8dash.choose.recipe import parse_recipe
from fp8dash.errors import InvalidChoice, ModelError

NAME = "model.layers.0.mlp.up_proj"


def can_be_written(recipe):
    try:
        return bool(quantization_config(recipe, [NAME], []))
    except InvalidChoice:
        return False


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if can_be_written(preset.recipe)])
def test_what_is_written_of_a_recipe_is_read_as_that_recipe(name):
    recipe = PRESETS[name].recipe
    read = quantized_of(quantization_config(recipe, [NAME], ["lm_head"]))
    group = read.group_of(NAME)
    assert read.ignored == ("lm_head",) and read.group_of("lm_head") is None and not group.unsaid
    for own, cast in ((recipe.weights, group.weights), (recipe.activations, group.activations)):
        assert (own is None) == (cast is None)
        if own:  # rule and guard decide what a scale is when it is made; a checkpoint holds only its type
            assert (own.format, own.tile, own.rule.stored, own.when) == (
                cast.format, cast.tile, cast.rule.stored, cast.when,
            )  # fmt: skip
    assert scheme_of(read.recipe) == scheme_of(recipe)


def test_a_mixed_recipe_is_read_module_by_module():
    recipe = parse_recipe(
        "w=e4m3fn/row a=e4m3fn/row w[*.down_proj]=int4/1x32/ct a[*.down_proj]=bf16 kv=e4m3fn/head/static"
    )
    down = NAME.replace("up", "down")
    read = quantized_of(quantization_config(recipe, [NAME, down], []))
    assert read.group_of(NAME).weights.text == "e4m3fn/row" and read.group_of(down).weights.text == "int4/1x32/ct"
    assert read.kv == recipe.kv and read.scheme == "mixed-precision"


FORMATS = {
    "W8A8": "int-quantized", "FP8": "float-quantized", "FP8_DYNAMIC": "float-quantized",
    "FP8_BLOCK": "float-quantized", "W4A16": "pack-quantized", "W4A16_ASYM": "pack-quantized",
    "NVFP4A16": "nvfp4-pack-quantized", "NVFP4": "nvfp4-pack-quantized", "MXFP4A16": "mxfp4-pack-quantized",
    "MXFP4": "mxfp4-pack-quantized", "MXFP8A16": "mxfp8-quantized", "MXFP8": "mxfp8-quantized",
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_llm_compressors_presets_are_called_by_their_names(name):
    scheme = QuantizationScheme(targets=["Linear"], format=FORMATS[name], **PRESET_SCHEMES[name])
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=FORMATS[name]).model_dump(mode="json")
    read = quantized_of(config)
    assert read.scheme == name
    assert read.groups[0].weights.format.bits == scheme.weights.num_bits


@pytest.mark.parametrize(
    ("config", "text", "packing"),
    [
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
            "w=e4m3fn/128x128/pow2 a=e4m3fn/1x128/pow2",
            INVERSE,
        ),
        ({"quant_method": "mxfp4"}, "w=e2m1/1x32/rceil", BLOCKS),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, "w=int4/1x128/ct", GPTQ),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, "w=int4/1x64/ct", AWQ),
        ({"quant_algo": "NVFP4"}, "w=e2m1/1x16/nvfp4 a=e2m1/1x16/nvfp4", MODELOPT),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
            "w=e4m3fn/tensor a=e4m3fn/tensor/static kv=e4m3fn/tensor/static",
            "codes",
        ),
    ],
)
def test_other_libraries_configurations_are_read_in_our_words(config, text, packing):
    read = quantized_of(config)
    assert read.recipe.text == text and read.groups[0].packing == packing


def test_what_our_casts_cannot_say_is_said_in_words():
    read = quantized_of({"quant_method": "gptq", "bits": 3, "group_size": 128, "desc_act": True, "sym": False})
    assert read.recipe is None and read.groups[0].zero_points
    assert [text.split(":")[0] for text in read.groups[0].unsaid] == [
        "activation order", "weights have zero points", "weights have 3 bits",
    ]  # fmt: skip


def test_gptqmodels_own_fields_of_modules_are_read():
    """vLLM, quantization/utils/gptq_utils.py, get_dynamic_override: patterns that match from the start of a name."""
    dynamic = {
        r"-:.*\.down_proj": {},
        r"+:.*layers\.1\..*": {"bits": 8, "group_size": 64},
        r".*layers\.2\.": {"bits": 8},
    }
    read = quantized_of({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "dynamic": dynamic})
    texts = [group and group.weights.text for group in map(read.group_of, (
        "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj",
        "model.layers.2.mlp.up_proj",
    ))]  # fmt: skip
    assert texts == ["int4/1x128/ct", None, "int8/1x64/ct", "int8/1x128/ct"]
    assert read.scheme == "W4A16" and all(group.zeros_less_one for group in read.groups)


def test_optimum_names_the_modules_that_are_cast():
    inside = [["self_attn.k_proj", "self_attn.v_proj"], ["mlp.up_proj"]]
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "modules_in_block_to_quantize": inside}
    read = quantized_of(config)
    assert read.group_of(NAME) and read.group_of("model.layers.0.self_attn.k_proj")
    assert read.group_of("model.layers.0.mlp.down_proj") is None and read.group_of("lm_head") is None


def test_modelopts_mixed_precision_is_read_layer_by_layer():
    layers = {NAME: {"quant_algo": "NVFP4", "group_size": 16}, NAME.replace("up", "down"): {"quant_algo": "fp8"}}
    read = quantized_of(
        {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}} | {"quant_method": "modelopt"}
    )
    assert [read.group_of(name) and read.group_of(name).packing for name in (*layers, "lm_head")] == [
        MODELOPT, "codes", None,
    ]  # fmt: skip
    assert read.scheme == "MIXED_PRECISION"


@pytest.mark.parametrize("version", ["gemv", "GEMV_fast", "llm-awq", "marlin"])
def test_awq_words_that_lie_otherwise_are_refused(version):
    """AutoAWQ, modules/linear/gemv.py: words of inputs, [out, in / 8]; gemm.py alone is read."""
    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": version}
    with pytest.raises(ModelError, match="which is not read|are not read"):
        quantized_of(config)
    assert quantized_of(config | {"version": "GEMM"}).groups[0].packing == AWQ


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}


@pytest.mark.parametrize(
    "config",
    [
        [],
        {},
        {"quant_method": "bitsandbytes"},
        {"quant_method": ["fp8"]},
        {"quant_method": "compressed-tensors", "config_groups": [1]},
        {"quant_method": "compressed-tensors", "config_groups": {"a": 3}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": GROUP}, "format": "x" * 10_000},
        {"quant_method": "compressed-tensors", "config_groups": {"a": GROUP | {"targets": ["re:(a+)+$"]}}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": GROUP | {"targets": ["re:("]}}},
        {"quant_method": "compressed-tensors", "ignore": "lm_head"},
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "float", "strategy": ["x"]}},
        {"quant_method": "fp8", "weight_block_size": 128},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"},
        {"quant_method": "fp8", "weight_block_size": [0, -1]},
        {"quant_method": "gptq", "bits": "four"},
        {"quant_method": "awq", "bits": 4, "group_size": 10**9},
        {"quant_method": "modelopt", "quant_algo": {"a": 1}},
        {"quant_method": "modelopt", "quantization": 3},
    ],
)
def test_a_hostile_configuration_is_refused_in_one_sentence(config):
    with pytest.raises(ModelError) as caught:
        quantized_of(config)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400 and str(caught.value).endswith(".")
