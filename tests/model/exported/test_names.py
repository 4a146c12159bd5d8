"""What is exported under the names of a model's own files is, loaded by plain transformers, what was measured."""

import json
import shutil

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import Artefact, Measurement, StageResult
from fp8dash.choose.request import Request
from fp8dash.errors import ModelError
from fp8dash.model.calibration import NOTHING
from fp8dash.model.exported.export import export
from fp8dash.model.exported.names import stored_names
from fp8dash.model.load import load, locate
from fp8dash.model.swap import cast_model
from fp8dash.pipeline import run_stages
from tests.families import HIDDEN, MIXTURES, PLAIN, write_family
from tests.model.test_swap import CPU, observed_on
from tests.tiny import write_tokenizer

MIXED = "w=e4m3fn/row a=e4m3fn/row w[*.up_proj]=int8/row a[*.up_proj]=int8/row skip=*.o_proj"
WHOLE = ("gpt_oss", "granitemoe", "granitemoehybrid", "jetmoe", "llama4_text")  # families whose files stack experts
RENAMED = ("mixtral", "phimoe", "minimax_m2", "minimax", "lfm2_moe")
RECIPE = parse_recipe(MIXED)


@pytest.fixture(scope="module", params=[family for family in (*MIXTURES, "llama") if family not in WHOLE])
def stored(request, tmp_path_factory):
    return write_family(request.param, tmp_path_factory.mktemp(request.param) / "model")


def exported(folder, place, recipe=RECIPE):
    """The model of a folder, cast, after its export."""
    model = load(locate(str(folder), place.parent), torch.device("cpu")).model
    names, observed = stored_names(model, folder, recipe), NOTHING
    if recipe.needs_calibration:
        observed = observed_on(model, recipe)
    list(cast_model(model, recipe, CPU, "emulated", observed))
    list(export(model, folder, names, recipe, place))
    return model


def decompressed(place, plain):
    """The same model without codes, as compressed-tensors decodes them by the schemes of their names; what they are."""
    tensors, config = load_file(place / "model.safetensors"), json.loads((place / "config.json").read_text())
    theirs = QuantizationConfig.model_validate(config.pop("quantization_config"))
    schemes = {target: scheme for scheme in theirs.config_groups.values() for target in scheme.targets}
    for name in {key.removesuffix(".weight_scale") for key in tensors if key.endswith(".weight_scale")}:
        parts = [key for key in tensors if key.startswith(f"{name}.weight")]
        state = {key.removeprefix(f"{name}."): tensors.pop(key) for key in parts}
        scheme = schemes.pop(name)
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        tensors[f"{name}.weight"] = compressor.decompress(state, scheme)["weight"].to(torch.bfloat16)
    assert not schemes
    tied = config["tie_word_embeddings"]
    assert all(f"{name}.weight" in tensors or (name == "lm_head" and tied) for name in theirs.ignore)
    plain.mkdir()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    (plain / "config.json").write_text(json.dumps(config))
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)


def of_run(model, name, like):
    """A parameter or buffer of a run's model under transformers' name: of a stack of experts, one after the other."""
    owner, _, key = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(getattr(module, key), torch.Tensor):
        return getattr(module, key)
    parts = ("gate_proj", "up_proj") if key == "gate_up_proj" else (key,)
    experts = [[model.get_submodule(f"{owner}.{i}.{part}").weight for part in parts] for i in range(len(like))]
    return torch.stack([torch.cat(weights) for weights in experts])


def test_plain_transformers_reads_the_weights_that_were_measured(stored, tmp_path):
    model = exported(stored, tmp_path / "out")
    plain = decompressed(tmp_path / "out", tmp_path / "plain")
    for name, weight in plain.state_dict().items():
        assert torch.equal(of_run(model, name, weight), weight), name


def test_a_language_model_beside_an_eye_is_exported_under_its_files_names(tmp_path):
    """`language_model.model` in Gemma-3's files is `model.language_model` in transformers."""
    text = PLAIN | {"head_dim": 16, "sliding_window": 32, "tie_word_embeddings": True}
    eye = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    pictures = {"mm_tokens_per_image": 4, "image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7}
    torch.manual_seed(7)
    vision = eye | {"image_size": 28, "patch_size": 14}
    both = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, **pictures))
    both.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    model = exported(tmp_path / "model", tmp_path / "out")
    kept = load_file(tmp_path / "out" / "model.safetensors")
    assert "language_model.model.layers.1.mlp.gate_proj.weight_scale" in kept
    plain = decompressed(tmp_path / "out", tmp_path / "plain")
    for name, weight in plain.state_dict().items():
        assert torch.equal(of_run(model, name, weight), weight), name
    assert not any(tensor.dtype == torch.float32 for key, tensor in kept.items() if not key.endswith("_scale"))


def test_of_float32_files_only_what_transformers_keeps_in_float32_stays(tmp_path):
    folder = write_family("deepseek_v3", tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(folder)
    model = exported(folder, tmp_path / "out")
    held = {key: tensor.dtype for key, tensor in model.state_dict().items()}
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    uncast = {key for key in tensors if key in held and f"{key}_scale" not in tensors}
    assert {key: tensors[key].dtype for key in uncast} == {key: held[key] for key in uncast}
    assert {held[key] for key in uncast} == {torch.float32, torch.bfloat16}


def test_an_experts_input_scale_stands_beside_its_weight(tmp_path):
    folder, recipe = write_family("mixtral", tmp_path / "mixtral"), "w=e4m3fn/tensor a=e4m3fn/tensor/static"
    model = exported(folder, tmp_path / "out", parse_recipe(recipe))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    scales = {key for key in tensors if key.endswith(".input_scale")}
    assert {key.replace("input_scale", "weight") for key in scales} < set(tensors)
    for word, own in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        stored = tensors[f"model.layers.1.block_sparse_moe.experts.2.{word}.input_scale"]
        linear = model.get_submodule(f"model.layers.1.mlp.experts.2.{own}")
        assert stored.item() == pytest.approx(linear.activations.scale.present)


@pytest.mark.parametrize("family", WHOLE)
def test_a_model_whose_files_stack_experts_is_refused(family, tmp_path):
    folder = write_family(family, tmp_path / family)
    model = load(locate(str(folder), tmp_path), torch.device("cpu")).model
    with pytest.raises(ModelError, match="stores it together with others or in another form: this model cannot be exp"):
        stored_names(model, folder, RECIPE)


@pytest.mark.parametrize("family", RENAMED)
def test_experts_keep_the_names_of_their_files_also_where_one_holds_nothing_but_zeros(family, tmp_path):
    """Nor is one taken for another: there all hold the same, and in each expert all have one shape."""
    folder = write_family(family, tmp_path / family, intermediate_size=HIDDEN, moe_intermediate_size=HIDDEN)
    tensors = load_file(folder / "model.safetensors")
    dead = [key for key in tensors if ".experts.1.w" in key]
    save_file(
        tensors | {key: torch.zeros_like(tensors[key]) for key in dead},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    model = load(locate(str(folder), tmp_path), torch.device("cpu")).model
    names = {key: name for key, name in stored_names(model, folder, RECIPE).items() if ".experts." in key}
    words = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    assert dead and len(set(names.values())) == len(names)
    for key, name in names.items():
        assert key.split(".")[2] == name.split(".")[2] and key.split(".")[-2] == name.split(".")[-2]
        assert name.split(".")[-1] == words[key.split(".")[-1]]


def test_values_that_are_not_the_models_are_not_exported(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "model")
    model, name = load(folder, torch.device("cpu")).model, "model.layers.1.mlp.up_proj"
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{name}.weight"][5, 5] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="layers.0.mlp.up_proj is cast as .* stores other values under that name"):
        stored_names(model, folder, RECIPE)


def test_an_exported_mixtral_measured_as_it_is_stored_loses_what_the_run_lost(tmp_path, corpus_file):
    folder = write_family("mixtral", tmp_path / "mixtral")
    asked = Request.of(
        model=str(folder), corpus=str(corpus_file), recipe="FP8_DYNAMIC", windows=2, window_length=64,
        backend="emulated", measures=("perplexity", "export"),
    )  # fmt: skip

    def rows_of(request):
        results = [item for item in run_stages(request, frozenset(), tmp_path) if isinstance(item, StageResult)]
        return [row for result in results for row in result.rows]

    def kld_of(rows):
        return next(row.value for row in rows if isinstance(row, Measurement) and row.name == "kld")

    rows = rows_of(asked)
    (artefact,) = [row for row in rows if isinstance(row, Artefact)]
    again = rows_of(asked.but(recipe=f"stored={artefact.path}", measures=("perplexity",)))
    assert kld_of(again) == kld_of(rows) > 0
