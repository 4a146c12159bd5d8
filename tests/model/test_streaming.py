"""A pass block by block gives, bit for bit, what the model gives that is loaded whole, in the memory of two blocks."""

import copy
import gc
import os
import re
import resource
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PretrainedConfig

from fp8dash.choose.hardware import Device
from fp8dash.choose.presets import PRESETS
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import Progress
from fp8dash.errors import InvalidChoice, ModelError, NotFinite, PlaceError
from fp8dash.measure.baseline import hidden_states
from fp8dash.model.folder import stored_tensors, weight_files
from fp8dash.model.head import full_head
from fp8dash.model.load import load
from fp8dash.model.parts import active_share
from fp8dash.model.streaming.gates import ReadsFurther, Replay
from fp8dash.model.streaming.layout import why_no_blocks, why_not_streamed
from fp8dash.model.streaming.memory import memory_of_pass
from fp8dash.model.streaming.spill import Spill
from fp8dash.model.streaming.states import Heads, LastStates, RecipeSwap, last_hidden_states
from fp8dash.model.swap import cast_model
from tests.families import FAMILIES, PLAIN, WINDOWS, write_family
from tests.test_layers import ROOT
from tests.tiny import tiny_config, write_tokenizer

CPU, HERE = Device("cpu", "CPU"), torch.device("cpu")
IDS = torch.arange(96).view(2, 48) * 7 % 270 + 1
RECIPES = (
    "bf16",
    "w=e4m3fn/row a=e4m3fn/row",
    "w=int8/1x32 also=lm_head,embeddings,norms",
    "a=e4m3fn/row also=lm_head",
)
PASSING = [preset.text for preset in PRESETS.values() if not why_not_streamed(parse_recipe(preset.text))]
EIGHT = PASSING[:8]
REPEATS = 2  # of a family's two blocks: only from the third on does a block have one that it must not read


def streamed(folder, recipes, scratch, ids=IDS):
    parsed = [parse_recipe(text) for text in recipes]
    return last_hidden_states(folder, parsed, ids, CPU, HERE, backend="emulated", scratch=scratch)


def by_recipe(items, recipe):
    """The swaps, and the states by window, of one recipe."""
    swaps = [item.swap for item in items if isinstance(item, RecipeSwap) and item.recipe == recipe]
    states = [item for item in items if isinstance(item, LastStates) and item.recipe == recipe]
    assert [item.window for item in states] == list(range(len(IDS)))
    return swaps, [item.states for item in states]


@torch.no_grad()
def assert_as_loaded_whole(folder, recipes, scratch):
    """Swaps, hidden states and logits, each window for itself, equal those of `load` and `cast_model`."""
    items = list(streamed(folder, recipes, scratch))
    heads = next(item for item in items if isinstance(item, Heads))
    whole = load(folder, HERE).model
    assert heads.active == active_share(whole)
    for index, text in enumerate(recipes):
        model = copy.deepcopy(whole)
        swaps, states = by_recipe(items, index)
        assert swaps == list(cast_model(model, parse_recipe(text), CPU, "emulated")), text
        for ids, own in zip(IDS, states, strict=True):
            expected = hidden_states(model, ids[None])
            assert torch.equal(own[:-1], expected), text
            assert torch.equal(heads.heads[index](own[:-1]), full_head(model)(expected)), text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_block_by_block_is_the_model_loaded_whole_bit_for_bit(family, tmp_path):
    write_family(family, tmp_path, REPEATS)
    assert_as_loaded_whole(tmp_path, RECIPES, tmp_path)


def write_odd(kind, folder, **others):
    """A model folder of a model type that is not in FAMILIES, or of one that is in another shape."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **PLAIN | {"num_hidden_layers": 4} | others)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


LOOPED, FURTHER = "does not call its blocks one after the other, each once", "reads more than what the one before"
KV = "its last blocks read keys and values of earlier ones"
SHAPES = {
    "gemma4_text": {
        "head_dim": 16, "global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 272, "hidden_size_per_layer_input": 16,
    },
    "gemma3": {
        "text_config": PLAIN | WINDOWS | {"num_hidden_layers": 4, "model_type": "gemma3_text"},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 32, "patch_size": 8,
        },
    },
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 32},
}  # fmt: skip


@pytest.mark.parametrize("kind, why", [("dory", LOOPED), ("hrm_text", LOOPED), ("xlm", FURTHER), ("gemma4_text", KV)])
def test_a_model_that_goes_through_its_blocks_in_another_way_must_be_loaded_whole(kind, why, tmp_path):
    write_odd(kind, tmp_path, **SHAPES.get(kind, {}))
    assert load(tmp_path, HERE).model is not None
    with pytest.raises(ModelError, match=rf"cannot be measured block by block: .*{why}.* Load it whole"):
        list(streamed(tmp_path, RECIPES[:2], tmp_path))


@pytest.mark.parametrize("kind", ["opt", "cpmant", "gemma3"])
def test_linears_before_the_blocks_tables_behind_them_and_images_beside_them_are_as_loaded_whole(kind, tmp_path):
    assert_as_loaded_whole(write_odd(kind, tmp_path, **SHAPES.get(kind, {})), RECIPES, tmp_path)


@pytest.mark.parametrize("text", ["attn=e4m3fn/tensor", *PASSING])
def test_every_recipe_that_needs_no_calibration_is_the_same_block_by_block(text, tiny, tmp_path):
    assert_as_loaded_whole(tiny, (text,), tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_each_weight_is_read_from_the_files_once_for_eight_recipes(family, tmp_path, monkeypatch):
    folder, reads, preadv = write_family(family, tmp_path / "model", REPEATS), Counter(), os.preadv

    def counted(descriptor, buffers, offset):
        count = preadv(descriptor, buffers, offset)
        reads[os.readlink(f"/proc/self/fd/{descriptor}"), offset] += count
        return count

    monkeypatch.setattr(os, "preadv", counted)
    for _ in streamed(folder, EIGHT, tmp_path):
        pass
    from_files = {place: count for place, count in reads.items() if place[0].startswith(str(folder))}
    stored = {
        (str(file), t.begin): t.end - t.begin for file in weight_files(folder) for t in stored_tensors(file).values()
    }
    assert len(EIGHT) == 8 and from_files == stored


def held_weights():
    """Bytes of all parameters that anything still refers to, whatever the garbage collector has yet to free."""
    weights = [one for one in gc.get_objects() if type(one) is nn.Parameter and not one.is_meta]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in weights}.values())


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_no_more_than_two_blocks_are_held_besides_what_stands_outside(family, tmp_path):
    write_family(family, tmp_path, REPEATS)
    recipes = ("bf16", "w=e4m3fn/row a=e4m3fn/row", "w=e4m3fn/row")
    memory = memory_of_pass(tmp_path, [parse_recipe(text) for text in recipes], *IDS.shape)
    gc.collect()
    gc.disable()
    try:
        before = held_weights()
        held = [held_weights() - before for item in streamed(tmp_path, recipes, tmp_path) if isinstance(item, Progress)]
    finally:
        gc.enable()
    assert max(held) <= memory.outside + memory.block + 64  # a recipe's copy is gone before the next one's is made
    assert held[0] <= memory.outside


def test_memory_is_told_beforehand_from_headers_alone(tmp_path):
    write_family("gemma2", tmp_path, REPEATS)
    model = load(tmp_path, HERE).model
    blocks = [sum(p.nbytes for p in block.parameters()) for block in model.model.layers]
    outside = sum(p.nbytes for p in model.parameters()) - sum(blocks)
    table = model.get_input_embeddings().weight.nbytes
    recipes = [parse_recipe(text) for text in ("bf16", "w=int8/row also=lm_head,embeddings", "w=int8/row")]
    with weight_files(tmp_path)[0].open("r+b") as stream:
        stream.truncate(max(t.begin for t in stored_tensors(weight_files(tmp_path)[0]).values()))
    memory = memory_of_pass(tmp_path, recipes, 16, 512)
    assert (memory.outside, memory.block, memory.copies) == (outside, max(blocks), 2 * table)
    assert memory.disk == (3 + 1) * 16 * 512 * 64 * 2
    assert memory.held == 2 and memory.peak > outside + 2 * max(blocks) + 2 * table


def test_experts_that_are_stacked_when_they_are_read_are_held_once_more(tmp_path):
    assert memory_of_pass(write_family("mixtral", tmp_path), [parse_recipe("bf16")], 1, 8).held == 3


MEASURED = """
import sys
from pathlib import Path
from tests.model.test_streaming import RECIPES, streamed

def status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10

warm, folder, scratch = map(Path, sys.argv[1:])
list(streamed(warm, RECIPES[1:2], scratch))  # imports, and what libraries keep for themselves
before = status("VmRSS")
for item in streamed(folder, RECIPES[1:2], scratch):
    pass
print(status("VmHWM") - before)
"""


def test_a_model_passes_through_in_less_than_half_of_its_memory(tiny, tmp_path):
    torch.manual_seed(0)
    shape = {"hidden_size": 640, "intermediate_size": 2560, "num_hidden_layers": 24, "num_key_value_heads": 4}
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny_config(**shape)).to(torch.bfloat16)
    model = model.to_empty(device=HERE)
    for parameter in model.parameters():
        parameter.data.uniform_(-0.02, 0.02)
    model.save_pretrained(tmp_path)
    weights = sum(file.stat().st_size for file in weight_files(tmp_path))
    code = [sys.executable, "-W", "ignore", "-c", MEASURED, tiny, tmp_path, tmp_path]
    done = subprocess.run(code, check=True, cwd=ROOT, capture_output=True, text=True)
    assert weights > 280 << 20
    grown, foretold = int(done.stdout.split()[-1]), memory_of_pass(tmp_path, [parse_recipe(RECIPES[1])], *IDS.shape)
    assert grown < 0.4 * weights and grown < foretold.peak < weights


def test_scales_of_calibration_text_and_kv_caches_need_the_whole_model(tiny, tmp_path):
    for text in ("w=e4m3fn/tensor a=e4m3fn/tensor/static", "kv=e4m3fn/tensor", "kv=e4m3fn/tensor/static"):
        with pytest.raises(InvalidChoice, match=r"cannot be measured block by block: .* Load the model whole"):
            next(streamed(tiny, ("bf16", text), tmp_path))


class Skipping(nn.Module):
    """Three blocks of which the last reads what the first gave."""

    device, config = HERE, PretrainedConfig()

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    @property
    def base_model(self):
        return self

    def forward(self, input_ids, use_cache):
        first = self.blocks[0](nn.functional.one_hot(input_ids, 4).float())
        return SimpleNamespace(last_hidden_state=self.blocks[2](self.blocks[1](first) + first))


@torch.no_grad()
def test_a_block_that_reads_more_than_the_one_before_it_gave_is_noticed(tmp_path):
    model, ids = Skipping(), torch.tensor([[0, 1, 2, 3]])
    weights = copy.deepcopy(model.blocks)
    replay = Replay(model, model.blocks, tmp_path)
    for block in weights[:2]:
        with replay.at(block):
            assert replay.read(0, ids) is None
    with replay.at(weights[2]), pytest.raises(ReadsFurther):
        replay.read(0, ids)


def test_a_model_whose_blocks_share_weights_or_are_no_list_says_so():
    model = Skipping()
    assert why_no_blocks(model) == ""
    model.mix = nn.Bilinear(2, 2, 2)
    assert why_no_blocks(model) == "mix stacks matrices outside the blocks"
    model.blocks[2].weight = model.blocks[0].weight
    assert why_no_blocks(model) == "blocks.0.weight and blocks.2.weight are one tensor"
    del model.blocks
    assert why_no_blocks(model) == "it has no list of blocks"


def test_a_pass_that_is_given_up_leaves_neither_files_nor_weights(tmp_path):
    folder = write_family("mixtral", tmp_path / "model", REPEATS)
    gc.collect()
    before = held_weights()
    items = streamed(folder, RECIPES, tmp_path)
    for item in items:
        if isinstance(item, Progress) and item.message.startswith("block 3 of 4, recipe 2"):
            break
    assert [file for file in tmp_path.iterdir() if file != folder] == []
    items.close()
    places = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    open_files = [os.readlink(place) for place in places if os.path.islink(place)]
    assert [file for file in open_files if ".states-" in file] == []
    del items, item
    gc.collect()
    assert held_weights() <= before


def test_a_damaged_checkpoint_is_refused_by_its_block_or_weight(tmp_path):
    write_family("llama", tmp_path, REPEATS)
    file = weight_files(tmp_path)[0]
    stored = stored_tensors(file)["model.layers.2.mlp.up_proj.weight"]
    data = bytearray(file.read_bytes())
    data[stored.begin : stored.begin + 2] = b"\x80\x7f"  # infinity in bfloat16
    file.write_bytes(data)
    with pytest.raises(NotFinite, match=r"^model\.layers\.2\.mlp\.up_proj: "):
        list(streamed(tmp_path, RECIPES[:2], tmp_path))
    file.write_bytes(data[: stored.begin + 10])
    with pytest.raises(ModelError, match="shorter than its header says"):
        list(streamed(tmp_path, RECIPES[:2], tmp_path))


def test_spilled_values_come_back_as_they_were_and_a_full_disk_says_so(tmp_path):
    spill = Spill(tmp_path)
    value = (
        torch.randn(2, 3).bfloat16().T,
        None,
        {"n": 5, "mask": torch.tensor([True, False]), "none": torch.zeros(0, 4)},
    )
    spill.keep(7, value)
    spill.keep(3, torch.tensor(2.5))
    assert spill.take(3) == 2.5
    back = spill.take(7)
    assert torch.equal(back[0], value[0]) and back[1] is None and back[2]["n"] == 5
    assert torch.equal(back[2]["mask"], value[2]["mask"]) and back[2]["none"].shape == (0, 4)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(PlaceError, match=rf"cannot be written to {re.escape(str(tmp_path))}.*fewer recipes"):
            spill.keep(1, torch.zeros(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
