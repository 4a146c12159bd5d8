"""The baseline on disk: read again, verified, made once by two workers, evicted; and its float32 noise floor."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from fp8dash.choose.records import Measurement, Progress
from fp8dash.choose.windows import DISJOINT, Reading
from fp8dash.errors import NotFinite
from fp8dash.measure import baseline as baselines
from fp8dash.measure.baseline import Baseline, baseline_file, baseline_of, read_baseline
from fp8dash.measure.corpora import cut_windows, load_corpus
from fp8dash.measure.perplexity import perplexity
from fp8dash.model.float32 import in_float32


@pytest.fixture
def windows(loaded, corpus_file):
    return cut_windows(loaded.tokenizer, load_corpus(str(corpus_file)), 4, 96, loaded.context, Reading("half"))


def made(loaded, windows, file):
    *_, baseline = baseline_of(loaded.model, loaded.model.lm_head, windows, file)
    assert isinstance(baseline, Baseline)
    return baseline


def contents(baseline):
    """Each window's hidden states and NLL, out of the file."""
    read = [baseline.window(i, torch.device("cpu")) for i in range(4)]
    return torch.cat([hidden for hidden, _ in read]).tolist(), torch.cat([tokens.nll for _, tokens in read]).tolist()


def test_a_kept_baseline_is_read_again_and_a_damaged_one_is_measured_anew(loaded, windows, tmp_path):
    file = tmp_path / "b.safetensors"
    first = contents(made(loaded, windows, file))
    assert contents(read_baseline(file)) == first
    assert [type(item) for item in baseline_of(None, None, windows, file)] == [Baseline]  # no model is needed
    whole = file.read_bytes()
    middle = len(whole) // 2
    for damaged in (
        whole[:middle], whole + b"x", whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :], b"", b"\xff",
        whole.replace(b'"digest": "', b'"digest": "0', 1), whole[:8] + b"{}" + b" " * (len(whole) - 10),
    ):  # fmt: skip
        file.write_bytes(damaged)
        assert read_baseline(file) is None
        assert contents(made(loaded, windows, file)) == first
    assert [f.name for f in tmp_path.iterdir()] == ["b.safetensors"]


def test_a_kept_baseline_is_a_safetensors_file_of_the_models_own_states(loaded, windows, tmp_path):
    file = tmp_path / "b.safetensors"
    baseline = made(loaded, windows, file)
    stored = load_file(file)
    with torch.no_grad():
        states = torch.cat([
            loaded.model.model(input_ids=windows.ids[i][None]).last_hidden_state[0, windows.rows(i)] for i in range(4)
        ])  # fmt: skip
    assert torch.equal(stored["hidden"], states) and stored["hidden"].dtype == torch.bfloat16
    assert torch.equal(stored["nll"], baseline.predictions.nll) and stored["floor"].shape == (4,)


def test_a_model_that_overflows_names_the_window_and_nothing_is_kept(loaded, windows, tmp_path):
    seen = iter(range(100))
    loaded.model.model.norm.register_forward_hook(
        lambda _m, _i, out: out.fill_(float("nan")) if next(seen) >= 2 else None  # window 1: states, float32
    )
    with pytest.raises(NotFinite, match="NaN or infinity in window 2"):
        made(loaded, windows, tmp_path / "b.safetensors")
    assert not list(tmp_path.glob("*.safetensors")) and not list(tmp_path.glob(".baseline-*"))


def test_what_bears_on_a_baselines_bits_is_in_its_name(loaded, corpus_file, windows, tmp_path):
    facts = {"model_hash": "m", "corpus_hash": "c", "windows": windows, "device": "CPU"}
    names = [baseline_file(tmp_path, **facts)]
    names += [baseline_file(tmp_path, **facts | {key: "other"}) for key in ("model_hash", "corpus_hash", "device")]
    for reading in (DISJOINT, Reading("strided", 48), Reading("half", bos="bos")):
        cut = cut_windows(loaded.tokenizer, load_corpus(str(corpus_file)), 4, 96, loaded.context, reading)
        names.append(baseline_file(tmp_path, **facts | {"windows": cut}))
    assert len(set(names)) == len(names)


def test_two_workers_measure_a_baseline_once(loaded, windows, tmp_path):
    """The second waits for the first, says so, and reads what it made; it never needs a model of its own."""
    file = tmp_path / "b.safetensors"
    first = baseline_of(loaded.model, loaded.model.lm_head, windows, file)
    assert isinstance(next(first), Progress)  # it has begun
    second = baseline_of(None, None, windows, file)
    assert next(second).message == "another run is measuring the same baseline"
    *_, own = first
    *_, theirs = second
    assert contents(own) == contents(theirs)


def test_a_worker_that_dies_at_its_baseline_leaves_no_lock(loaded, windows, tmp_path):
    file = tmp_path / "b.safetensors"
    first = baseline_of(loaded.model, loaded.model.lm_head, windows, file)
    next(first)
    first.close()
    assert isinstance(made(loaded, windows, file), Baseline)


def test_many_threads_that_want_one_baseline_all_get_it(loaded, windows, tmp_path):
    file, kept = tmp_path / "b.safetensors", []
    threads = [threading.Thread(target=lambda: kept.append(made(loaded, windows, file))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contents(kept[0]) == contents(kept[1]) == contents(kept[2])


def test_the_least_recently_used_baselines_go_first_and_an_open_one_can_still_be_read(
    loaded, windows, tmp_path, monkeypatch
):
    files = [tmp_path / f"{i}.safetensors" for i in range(3)]
    held = [made(loaded, windows, file) for file in files]
    for age, file in zip((30, 10, 20), files, strict=True):
        os.utime(file, (time.time() - age, time.time() - age))
    read_baseline(files[0])  # used now
    monkeypatch.setattr(baselines, "LIMIT", 3 * files[0].stat().st_size)
    last = made(loaded, windows, tmp_path / "3.safetensors")
    assert sorted(f.stem for f in tmp_path.iterdir()) == ["0", "1", "3"]  # 2 was the oldest
    assert contents(held[2]) == contents(last)
    monkeypatch.setattr(baselines, "LIMIT", 1)
    made(loaded, windows, tmp_path / "4.safetensors")
    assert [f.stem for f in tmp_path.iterdir()] == ["4"]  # the one in hand stays


def test_what_a_dead_writer_left_behind_goes(loaded, windows, tmp_path):
    (tmp_path / ".baseline-dead").write_bytes(b"x")
    os.utime(tmp_path / ".baseline-dead", (0, 0))
    (tmp_path / ".baseline-alive").write_bytes(b"x")
    made(loaded, windows, tmp_path / "b.safetensors")
    assert sorted(f.name for f in tmp_path.iterdir()) == [".baseline-alive", "b.safetensors"]


@torch.no_grad()
def test_the_noise_floor_is_the_divergence_of_a_float32_copy(loaded, tiny, windows, tmp_path):
    """Against transformers' own load of the same weights in float32."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    for model in (whole, loaded.model):
        model.lm_head.weight *= 64  # its logits, and so its divergences, well above what float32 resolves
    expected = []
    for index, ids in enumerate(windows.ids):
        base, widened = (
            F.log_softmax(m(input_ids=ids[None]).logits[0, windows.rows(index)].double(), -1)
            for m in (loaded.model, whole)
        )
        expected.append(float((base.exp() * (base - widened)).sum(-1).mean()))
    baseline = made(loaded, windows, tmp_path / "b.safetensors")
    assert baseline.floor.tolist() == pytest.approx(expected, rel=1e-3)
    items = perplexity(loaded.model, loaded.model.lm_head, windows, baseline, "emulated", 0)
    floor = next(m for m in items if isinstance(m, Measurement) and m.name == "kld_noise_floor")
    assert floor.value == pytest.approx(sum(expected) / 4, rel=1e-3) and floor.backend == "baseline"


@torch.no_grad()
def test_a_model_is_in_float32_only_within_and_its_weights_stay(loaded):
    model, ids = loaded.model, torch.arange(64)[None]
    model.model.layers[0].mlp.up_proj.bias = nn.Parameter(torch.ones(160, dtype=torch.bfloat16))
    before = model(input_ids=ids).logits
    with in_float32(model):
        inside = model(input_ids=ids).logits
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        with pytest.raises(RuntimeError):
            model.model.norm(torch.zeros(1, 1, 63))  # a module that fails has its weights back
    assert inside.dtype == torch.float32 and not torch.equal(inside.bfloat16(), before)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert model.model.norm.weight.dtype == torch.bfloat16 and "forward" not in vars(model.lm_head)


def test_a_model_that_insists_on_its_dtype_has_no_floor_and_the_run_goes_on(loaded, windows, tmp_path):
    def insists(_module, args):
        if args[0].dtype != torch.bfloat16:
            raise RuntimeError("expected BFloat16")

    loaded.model.model.layers[1].mlp.register_forward_pre_hook(insists)
    baseline = made(loaded, windows, tmp_path / "b.safetensors")
    assert bool(baseline.floor.isnan().all())
    items = perplexity(loaded.model, loaded.model.lm_head, windows, baseline, "emulated", 0)
    floor = next(m for m in items if isinstance(m, Measurement) and m.name == "kld_noise_floor")
    assert floor.value is None and "does not run in float32" in floor.note


PEAK = """
import json, resource, sys
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from fp8dash.measure.baseline import baseline_of
from fp8dash.measure.corpora import Windows
from fp8dash.model.float32 import in_float32
from fp8dash.measure.perplexity import perplexity

def model(vocabulary, width, layers):
    config = LlamaConfig(vocab_size=vocabulary, hidden_size=width, intermediate_size=4 * width,
                         num_hidden_layers=layers, num_attention_heads=4, max_position_embeddings=4096)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        made = LlamaForCausalLM(config).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    made.to_empty(device="cpu")
    made.model.rotary_emb.inv_freq.fill_(0.1)  # not a parameter
    for parameter in made.parameters():
        parameter.copy_(torch.arange(parameter.shape[-1]) % 7 / 64 - 0.03)
    return made

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

wide = model(131072, 64, 1)
wide(input_ids=torch.zeros(1, 8, dtype=torch.long))  # kernels and their buffers
start = peak()
windows = Windows(torch.arange(2048)[None] * 61, (1793,), (), (), "m")  # an eighth is scored: seconds
*_, baseline = baseline_of(wide, wide.lm_head, windows, Path(sys.argv[1]))
for _ in perplexity(wide, wide.lm_head, windows, baseline, "baseline", 0):
    pass
vocabulary = peak() - start
deep = model(272, 1024, 8)
size, start = sum(p.nbytes for p in deep.model.layers.parameters()), peak()
with in_float32(deep), torch.no_grad():
    deep.model(input_ids=torch.arange(16)[None], use_cache=False)
print(json.dumps({"vocabulary": vocabulary, "size": size, "floor": peak() - start}))
"""


def test_a_large_vocabulary_and_the_float32_floor_hold_no_second_model(tmp_path):
    """2,048 tokens of a 128k vocabulary, whose logits alone would take 1 GiB."""
    arguments = [sys.executable, "-W", "ignore", "-c", PEAK, str(tmp_path / "b.safetensors")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    held = json.loads(done.stdout.splitlines()[-1])
    assert held["vocabulary"] < 256 << 20
    assert held["floor"] < held["size"] / 2  # a float32 copy is twice the size; the largest Linear is a sixteenth of it
