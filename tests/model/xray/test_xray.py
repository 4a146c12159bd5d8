"""The X-ray of checkpoints: clean ones are told what they are and found free of faults, planted faults are named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8dash.choose.recipe import parse_recipe
from fp8dash.cli import main
from fp8dash.errors import ModelError
from fp8dash.model.xray.faults import FAULTS
from fp8dash.model.xray.xray import xray
from tests.model.exported.test_export import exported
from tests.model.xray import made

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def written(tiny, tmp_path_factory):
    """Each exported recipe's folder, written once."""
    folders = {}

    def of(text):
        if text not in folders:
            folders[text] = tmp_path_factory.mktemp("exported") / "out"
            exported(tiny, folders[text], text)
        return folders[text]

    return of


def kinds(folder, original=None):
    return [fault.kind for fault in xray(folder, original).faults]


def stored_as(cast):
    """What a file can tell of a cast: not its scale rule, but the type in which scales are kept."""
    return cast and (cast.format, cast.tile, cast.rule.stored, cast.when)


@pytest.mark.parametrize("text", made.EXPORTED)
def test_our_own_exports_are_free_of_faults_and_read_as_their_recipe(text, written, tiny):
    result = xray(written(text), tiny)
    read, recipe = parse_recipe(result.recipe), parse_recipe(text)
    assert result.faults == ()
    assert (stored_as(read.weights), stored_as(read.activations)) == (
        stored_as(recipe.weights), stored_as(recipe.activations),
    )  # fmt: skip
    assert (read.kv, read.also, read.skip) == (recipe.kv, recipe.also, recipe.skip)
    for module in (Q, DOWN):
        assert stored_as(read.of(module).weights) == stored_as(recipe.of(module).weights)


@pytest.mark.parametrize("name", made.MADE)
def test_other_libraries_checkpoints_are_free_of_faults(name, tmp_path):
    result = xray(made.MADE[name](tmp_path / "out"), made.plain(tmp_path / "plain"))
    assert result.faults == ()
    words = {
        "plain": "bf16",
        "deepseek": "w=e4m3fn/128x128 a=e4m3fn/1x128",
        "ue8m0": "w=e4m3fn/128x128/pow2 a=e4m3fn/1x128/pow2",
        "gpt_oss": "w=e2m1/1x32/rceil skip=*.k_proj,*.o_proj,*.q_proj,*.v_proj",
        "gptq": "w=int4/1x32/ct",
        "awq": "w=int4/1x32/ct",
        "modelopt": "w=e4m3fn/tensor a=e4m3fn/tensor/static kv=e4m3fn/tensor/static",
    }
    assert result.recipe == words[name]


def test_coverage_and_bits_are_those_of_the_files(written):
    result = xray(written("w=e4m3fn/row a=e4m3fn/row"))
    head, cast = 272 * 64, sum(rows * cols for rows, cols in made.MODULES.values())
    rows = sum(rows for rows, _ in made.MODULES.values())
    assert result.coverage == pytest.approx(cast / (cast + head))
    assert result.bits_per_weight == pytest.approx((8 * cast + 32 * rows + 16 * head) / (cast + head))


def test_plain_rounding_is_told_from_gptq(written, tiny, tmp_path):
    original = made.plain(tmp_path / "plain")
    assert xray(written("w=int4/1x32/ct"), tiny).rounding.is_plain
    assert xray(made.awq(tmp_path / "awq"), original).rounding.is_plain
    chosen = xray(made.gptq(tmp_path / "gptq"), original).rounding
    assert not chosen.is_plain and chosen.matrices == 14 and 0.6 < chosen.share < 0.8


# Planted faults: a recipe or a layout, what is done to its tensors and config, and the fault that is named.
def one(name, make):
    """A change of one tensor."""
    return lambda tensors, config: tensors.update({name: make(tensors[name])})


def without(*names):
    return lambda tensors, config: [tensors.pop(name) for name in names]


def claimed(**fields):
    return lambda tensors, config: config["quantization_config"].update(fields)


def unquantized(*names):
    """Modules stored as they were before they were cast, and the config told so."""

    def change(tensors, config):
        for name in names:
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.bfloat16)
            tensors.pop(f"{name}.weight_scale")
            config["quantization_config"]["ignore"].append(name)

    return change


def all_ones(tensors, config):
    tensors.update({name: torch.ones_like(t) for name, t in tensors.items() if name.endswith("weight_scale")})


def uncast(tensors, config):
    tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"].to(torch.bfloat16)
    tensors.pop(f"{DOWN}.weight_scale")


def other_group(tensors, config):
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64


def tied(tensors, config):
    config["tie_word_embeddings"] = True


def nan(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[0] = float("nan")
    return tensor


ROWS, GROUPS, STATIC = "w=e4m3fn/row a=e4m3fn/row", "w=int4/1x32/ct", "w=e4m3fn/tensor a=e4m3fn/tensor/static"
KV = "w=e4m3fn/row a=e4m3fn/row kv=e4m3fn/head/static skip=*.down_proj"
PLANTED = [
    (ROWS, all_ones, "scale of 1.0"),
    (ROWS, one(f"{DOWN}.weight_scale", torch.ones_like), "scale of 1.0"),
    (KV, one("model.layers.0.self_attn.k_scale", torch.ones_like), "scale of 1.0"),
    (ROWS, unquantized(Q), "split fused group"),
    (KV, without("model.layers.1.self_attn.v_scale"), "missing kv scale"),
    (GROUPS, other_group, "group size"),
    (ROWS, one(f"{Q}.weight_scale", lambda t: t.T), "swapped scale axes"),
    (GROUPS, one(f"{DOWN}.weight_scale", lambda t: t.T), "swapped scale axes"),
    (ROWS, one(f"{Q}.weight_scale", torch.Tensor.half), "scale dtype"),
    ("w=e2m1/1x16/nvfp4", one(f"{Q}.weight_scale", torch.Tensor.float), "scale dtype"),
    (ROWS, without(f"{DOWN}.weight_scale"), "missing scale"),
    ("w=e2m1/1x16/nvfp4", without(f"{DOWN}.weight_global_scale"), "missing global scale"),
    (ROWS, one(f"{Q}.weight_scale", nan), "scale not finite"),
    (ROWS, one(f"{Q}.weight_scale", torch.zeros_like), "scale not finite"),
    (STATIC, without(f"{DOWN}.input_scale"), "missing input scale"),
    (ROWS, uncast, "claimed, not cast"),
    (ROWS, claimed(ignore=["lm_head", DOWN]), "cast, not claimed"),
    (ROWS, lambda tensors, config: config.pop("quantization_config"), "cast, not claimed"),
    (ROWS, one(f"{DOWN}.weight", lambda t: t.view(torch.int8)), "other format"),
    (GROUPS, one(f"{DOWN}.weight_shape", lambda t: t.flip(0)), "packed shape"),
    ("w=e4m3fn/row a=e4m3fn/row also=lm_head", tied, "tied head"),
    (ROWS, one("lm_head.weight", torch.Tensor.float), "dtype"),
]


def planted(source, place, change):
    """A copy of a checkpoint with a change of its tensors and config."""
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    change(tensors, config)
    place.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps(config))
    return place


@pytest.mark.parametrize(
    ("text", "change", "kind"), PLANTED, ids=[f"{kind}, {n}" for n, (*_, kind) in enumerate(PLANTED)]
)
def test_a_planted_fault_is_named_and_no_other(text, change, kind, written, tmp_path):
    folder = planted(written(text), tmp_path / "planted", change)
    (fault,) = xray(folder).faults
    assert fault.kind == kind and fault.where


def test_scales_that_are_no_powers_of_two_are_named(tmp_path):
    name = f"{Q}.weight_scale_inv"
    folder = planted(made.ue8m0(tmp_path / "made"), tmp_path / "planted", one(name, lambda t: t * 1.5))
    assert kinds(folder) == ["not powers of two"]


def test_missing_zero_points_are_named(tmp_path):
    folder = planted(made.awq(tmp_path / "made"), tmp_path / "planted", without(f"{Q}.qzeros"))
    assert kinds(folder) == ["zero points"]


def test_rounding_that_poses_as_gptq_is_named(tmp_path):
    original = made.plain(tmp_path / "plain")
    assert kinds(made.gptq(tmp_path / "gptq", share=0.0), original) == ["rounding, not GPTQ"]


def test_a_truncated_shard_is_named(written, tmp_path):
    folder = planted(written(ROWS), tmp_path / "planted", lambda tensors, config: None)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    (fault,) = xray(folder).faults
    assert fault.kind == "truncated" and fault.where == ("model.safetensors",)


def test_files_and_tensors_that_an_index_names_in_vain_are_named(written, tmp_path):
    folder = planted(written(ROWS), tmp_path / "planted", lambda tensors, config: None)
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"weight_map": dict.fromkeys(names, "a.safetensors") | {"gone": "b.safetensors", "lost": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    faults = {fault.kind: fault.where for fault in xray(folder).faults}
    assert faults == {"missing file": ("b.safetensors",), "misplaced tensor": ("lost",)}


def test_a_matrix_of_zeros_may_have_a_scale_of_one(written, tmp_path):
    def zeroed(tensors, config):
        tensors[f"{Q}.weight"] = torch.zeros_like(tensors[f"{Q}.weight"])
        tensors[f"{Q}.weight_scale"] = torch.ones_like(tensors[f"{Q}.weight_scale"])

    assert kinds(planted(written(ROWS), tmp_path / "planted", zeroed)) == []


def test_every_kind_of_fault_is_planted_once():
    elsewhere = {
        "group index",
        "global scales",
        "not powers of two",
        "zero points",
        "rounding, not GPTQ",
        "truncated",
        "byte count",
        "missing file",
        "misplaced tensor",
    }
    assert {kind for *_, kind in PLANTED} | elsewhere == set(FAULTS)


def test_a_hostile_folder_gets_one_sentence(tmp_path):
    folder = made.plain(tmp_path / "made")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    for place in ("../a.safetensors", "/etc/passwd", 3, ["x"]):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": place}}))
        with pytest.raises(ModelError) as caught:
            xray(folder)
        assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="is neither a folder nor a file"):
        xray(tmp_path / "none")


def test_the_command_prints_faults_and_ends_with_one_where_there_are_any(written, tmp_path, capsys):
    clean, bare = written(ROWS), planted(written(ROWS), tmp_path / "planted", all_ones)
    assert main(["inspect", str(clean)]) == 0
    printed = capsys.readouterr().out
    assert "recipe      w=e4m3fn/row a=e4m3fn/row\n" in printed and "faults      none" in printed
    assert main(["inspect", str(bare), "--json"]) == 1
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert fault["kind"] == "scale of 1.0" and len(fault["where"]) == len(made.MODULES)
    assert main(["inspect", str(clean / "model.safetensors")]) == 0, "a lone file has no config to differ from"
    assert "e4m3fn/row as codes" in capsys.readouterr().out
    assert main(["inspect", str(clean / "config.json")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
