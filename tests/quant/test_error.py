"""Casting where a tensor lies: the same values, the error told, and no second copy."""

import math
import subprocess
import sys

import pytest
import torch
from transformers import LlamaForCausalLM

from fp8dash.choose.casts import parse_cast
from fp8dash.errors import NotFinite
from fp8dash.measure.profile import counted, sqnr_db
from fp8dash.model.folder import content_hash
from fp8dash.model.load import load
from fp8dash.quant.cast import quantize, round_trip
from fp8dash.quant.error import CastError, cast_in_place, codes_in_place, error_of_cast
from tests.model.test_swap import CPU, cast_model, parse_recipe
from tests.tiny import tiny_config, write_tokenizer

TEXTS = ["e4m3fn/tensor", "e4m3fn/128x128", "e5m2/1x32/floor", "int4/1x128/ct", "e2m1/1x16/nvfp4", "int8/column"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("shape", [(576, 576), (100, 200), (1, 1)], ids=str)
def test_in_place_gives_the_round_trip_and_the_error_of_the_codes(text, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    x.view(-1)[0] = 2.0**-30
    cast, expected = parse_cast(text), round_trip(x, parse_cast(text))
    cast_error, q = error_of_cast(x, cast), quantize(x, cast)
    error = (x.float() - quantize_values(x, cast)).double()
    assert cast_error.noise == pytest.approx(float(error.square().sum()), rel=1e-6, abs=1e-30)
    assert cast_error.signal == pytest.approx(float(x.double().square().sum()), rel=1e-6)
    assert (cast_error.elements, cast_error.nonzero) == (x.numel(), int((x != 0).sum()))
    spent = x.clone()
    assert cast_in_place(x, cast) == cast_error
    assert torch.equal(x, expected)
    codes, error = codes_in_place(spent, cast)
    assert error == cast_error
    assert torch.equal(codes.codes.view(torch.uint8), q.codes.view(torch.uint8))
    assert torch.equal(codes.factors, q.factors)
    assert codes.codes.data_ptr() == spent.data_ptr()


def quantize_values(x, cast):
    return round_trip(x.float(), cast)


def test_clipped_and_flushed_elements_are_counted():
    x = torch.tensor([[500.0, 448.0, 1.0, 2.0**-20, 0.0]])
    error = cast_in_place(x, parse_cast("e4m3fn/tensor/unit"))
    assert (error.clipped, error.flushed, error.nonzero) == (1, 1, 4)
    assert CastError().sqnr_db is None and CastError().relative_error == 0.0


def test_what_is_not_finite_is_left_as_it_was():
    x = torch.tensor([[1.1, float("nan")]])
    with pytest.raises(NotFinite):
        cast_in_place(x, parse_cast("e4m3fn/row"))
    assert x[0, 0] == 1.1


def test_casting_a_model_never_touches_its_file(tiny):
    before = content_hash(tiny)
    model = load(tiny, torch.device("cpu")).model
    for _swap in cast_model(model, parse_recipe("w=e4m3fn/row also=lm_head,embeddings,norms"), CPU, "emulated"):
        pass
    assert content_hash(tiny) == before


PEAK = """
import sys
from pathlib import Path
import torch
from fp8dash.choose.hardware import Device
from fp8dash.choose.recipe import parse_recipe
from fp8dash.model.load import load
from fp8dash.model.swap import cast_model

def most_resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

def cast(folder):
    model = load(Path(folder), torch.device("cpu")).model
    for swap in cast_model(model, parse_recipe(sys.argv[1]), Device("cpu", "CPU"), sys.argv[2]):
        pass
    return model

cast(sys.argv[3])  # threads, kernels and modules are there
before = most_resident()
model = cast(sys.argv[4])
print(most_resident() - before)
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose block holds nearly all, in layers of up to 48 MiB: 165 MiB. Its values do not matter here."""
    with torch.device("meta"):
        config = tiny_config(hidden_size=2048, intermediate_size=12_288, num_hidden_layers=1, num_key_value_heads=4)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    folder = tmp_path_factory.mktemp("wide")
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder, [parameter.nbytes for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("w=e4m3fn/128x128 a=e4m3fn/1x128", "emulated"),
        ("w=e4m3fn/row a=e4m3fn/row", "native"),
        ("w=int8/row a=int8/row", "native"),
    ],
)
def test_loading_and_casting_a_model_holds_no_second_copy_of_it(tiny, wide, text, backend):
    """Nor codes beside the pages of the mapped checkpoint, which stay: they would be half a copy."""
    folder, sizes = wide
    command = [sys.executable, "-W", "ignore", "-c", PEAK, text, backend, str(tiny), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sum(sizes) / 2 < int(done.stdout) <= sum(sizes) + 1.5 * max(sizes)


@pytest.mark.parametrize("exponent", [-140, -90, -73, -40, 0, 40, 63, 90, 120])
@pytest.mark.parametrize("text", ["e4m3fn/row", "int8/tensor", "e4m3fn/128x128"])
def test_the_error_of_a_weight_is_the_same_at_every_magnitude(exponent, text):
    """Squares of 1e-22 or 1e19 are none in float32. Below 2^-120 the scales are subnormal, and lose bits themselves."""
    cast = parse_cast(text)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    plain, scaled = error_of_cast(x, cast), error_of_cast(torch.ldexp(x, torch.tensor(exponent)), cast)
    if exponent > -110:
        assert scaled.sqnr_db == plain.sqnr_db and scaled.relative_error == plain.relative_error
    else:
        assert scaled.signal > 0 and scaled.noise > 0


def test_the_profile_of_a_tensor_has_its_rms_at_every_magnitude():
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    plain = counted("x", x).profile("x", "weight")
    for exponent in (-90, 63, 100):
        scaled = torch.ldexp(x, torch.tensor(exponent))
        assert counted("x", scaled).profile("x", "weight").rms == pytest.approx(math.ldexp(plain.rms, exponent))
        assert sqnr_db(scaled, scaled * 0.75) == pytest.approx(sqnr_db(x, x * 0.75))
