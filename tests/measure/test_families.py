"""Every capability on a tiny model of every family: measured, or refused in a sentence that names the reason."""

import re

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from fp8dash.choose.casts import parse_cast
from fp8dash.choose.hardware import Device
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import Artefact, Measurement, StageResult
from fp8dash.choose.request import Request
from fp8dash.errors import ModelError
from fp8dash.measure.corpora import cut_windows, load_corpus
from fp8dash.model.as_linears import make_linears
from fp8dash.model.swap import cast_model
from fp8dash.pipeline import run_stages
from fp8dash.quant.cast import round_trip
from tests.families import FAMILIES, family_model, write_family

CPU, FP8, KV = Device("cpu", "CPU"), "w=e4m3fn/row a=e4m3fn/row", " kv=e4m3fn/tensor"
IDS, ROW = torch.arange(64)[None] * 7 % 271 + 1, parse_cast("e4m3fn/row")
SMALL = {
    "windows": 2, "window_length": 64, "needle_lengths": (700,), "needle_depths": (50,), "decode_batches": (1,),
    "backend": "emulated",
}  # fmt: skip
NUMBERS = {  # of each capability, one that a run has
    "perplexity": "kld", "profile": "weight_amax_over_rms", "sensitivity": "sensitivity_kld",
    "gradients": "gradient_rms", "kv": "kv_kld", "needle": "needle_logprob",
}  # fmt: skip
STATES = "kv= is refused: this model's cache has layers that are not keys and values alone"
STORED, TURNED = "stores it together with others or in another form", r"stores it as \(64, 192\)"
OWN_CACHE = "MiniMax uses cache of its own"
NO_ATTENTION_FIRST = "can only be called on Attention layers"
REFUSED: dict[str, dict[str, str]] = {  # what a family cannot have, and why
    "gpt2": {"export": TURNED},
    "bamba": {"kv": "does not continue a text correctly", "needle": "does not continue a text correctly"},
    "deepseek_v32": {"kv": "does not continue a text correctly", "needle": "does not continue a text correctly"},
    "falcon_mamba": {"kv": "computes something else when read in chunks through its cache"},
    "minimax": {"kv": OWN_CACHE, "needle": OWN_CACHE, "decode": OWN_CACHE},
    "recurrent_gemma": {"kv": NO_ATTENTION_FIRST, "needle": NO_ATTENTION_FIRST, "decode": NO_ATTENTION_FIRST},
    "lfm2_moe": {"kv": STATES},
    "granitemoehybrid": {"kv": STATES, "export": STORED},
    **{family: {"kv": STATES} for family in (
        "qwen3_5_text", "qwen3_next", "qwen3_5_moe_text", "falcon_h1", "mamba", "mamba2", "lfm2", "jamba",
    )},
    **{family: {"export": STORED} for family in (
        "gpt_oss", "granitemoe", "jetmoe", "llama4_text",
    )},
}  # fmt: skip
UNCAST = re.compile(r"(^|\.)(lm_head|embed_out|router|gate|shared_expert_gate|rg_lru)(\.|$)")  # heads, routers, a state
TURNED_STACKS = ("gpt_oss", "llama4_text")  # [experts, in, out]


def rows_of(request, folder):
    results = [item for item in run_stages(request, frozenset(), folder) if isinstance(item, StageResult)]
    return [row for result in results for row in result.rows]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def asked(family, tmp_path_factory, corpus_file):
    folder = write_family(family, tmp_path_factory.mktemp(family))
    return Request.of(model=str(folder), corpus=str(corpus_file), recipe=FP8, **SMALL)


def test_the_baseline_is_plain_transformers_and_does_not_differ_from_itself(family, asked, tmp_path):
    measures = ("perplexity",) if "decode" in REFUSED.get(family, {}) else ("perplexity", "decode")
    rows = rows_of(asked.but(recipe="BF16", measures=measures), tmp_path)
    values = {row.name: row.value for row in rows if isinstance(row, Measurement)}
    assert values["kld"] == 0.0 and values.get("decode_tokens_per_s", 1.0) > 0
    plain = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    windows = cut_windows(tokenizer, load_corpus(asked.corpus), 2, 64, 1024).ids
    with torch.no_grad():
        logits = [plain(ids[None], use_cache=False).logits[0, :-1].float() for ids in windows]
    losses = [float(nn.functional.cross_entropy(x, ids[1:])) for x, ids in zip(logits, windows, strict=True)]
    assert torch.log(torch.tensor(values["ppl"])) == pytest.approx(sum(losses) / 2, rel=1e-4)


def test_what_can_be_measured_is_and_what_cannot_says_why(family, asked, tmp_path):
    refused = REFUSED.get(family, {})
    able = tuple(measure for measure in NUMBERS if measure not in refused)
    rows = rows_of(asked.but(recipe=FP8 + (KV if "kv" in able else ""), measures=able), tmp_path)
    values = {row.name: row.value for row in rows if isinstance(row, Measurement) and row.value is not None}
    assert {NUMBERS[measure] for measure in able} <= set(values)
    assert 0 < values["kld"] < 0.01 and values["coverage"] > 0.2
    for measure, why in refused.items():
        recipe = {"kv": FP8 + KV, "decode": "BF16"}.get(measure, FP8)
        with pytest.raises(ModelError, match=why) as error:
            rows_of(asked.but(recipe=recipe, measures=(measure,)), tmp_path)
        assert "\n" not in str(error.value)
    if "export" not in refused:
        rows = rows_of(asked.but(measures=("export",)), tmp_path)
        assert any(isinstance(row, Artefact) for row in rows)


@torch.no_grad()
def test_what_is_cast_is_what_one_would_cast_by_hand(family):
    """Weights a scale a row, in float32: the same tensors change, and the logits are the same."""
    model, plain = family_model(family).float(), family_model(family).float()
    make_linears(model)
    swaps = list(cast_model(model, parse_recipe("w=e4m3fn/row"), CPU, "emulated"))
    assert sum(swap.part.parameters for swap in swaps) == sum(p.numel() for p in plain.parameters())
    by_hand = 0
    for name, module in plain.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            stacked = parameter.dim() == 3 and not isinstance(module, nn.modules.conv._ConvNd)
            is_matrix = key == "weight" and isinstance(module, (nn.Linear, Conv1D))
            if (stacked or is_matrix) and not UNCAST.search(name):
                turned = isinstance(module, Conv1D) or (stacked and family in TURNED_STACKS)
                matrix = parameter.transpose(-1, -2) if turned else parameter
                cast = round_trip(matrix.reshape(-1, matrix.shape[-1]), ROW).view(matrix.shape)
                parameter.copy_(cast.transpose(-1, -2) if turned else cast)
                by_hand += parameter.numel()
    assert sum(swap.part.parameters for swap in swaps if swap.cast) == by_hand
    uncast = family_model(family).float()
    logits, expected, before = (m(input_ids=IDS, use_cache=False).logits for m in (model, plain, uncast))
    assert (logits - expected).norm() < 1e-3 * (before - expected).norm()
