"""Casting where a tensor lies: the same values, the error told, and no second copy."""

import subprocess
import sys

import pytest
import torch

from fp8dash.choose.recipe import parse_cast
from fp8dash.errors import NotFinite
from fp8dash.model.load import content_hash, load
from fp8dash.quant.cast import quantize, round_trip
from fp8dash.quant.error import CastError, cast_in_place, error_of_codes
from tests.test_swap import CPU, cast_model, parse_recipe

TEXTS = ["e4m3fn/tensor", "e4m3fn/128x128", "e5m2/1x32/floor", "int4/1x128/ct", "e2m1/1x16/nvfp4", "int8/column"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("shape", [(576, 576), (100, 200), (1, 1)], ids=str)
def test_in_place_gives_the_round_trip_and_the_error_of_the_codes(text, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    x.view(-1)[0] = 2.0**-30
    cast, expected = parse_cast(text), round_trip(x, parse_cast(text))
    told = error_of_codes(x, quantize(x, cast))
    error = (x.float() - quantize_values(x, cast)).double()
    assert told.noise == pytest.approx(float(error.square().sum()), rel=1e-6, abs=1e-30)
    assert told.signal == pytest.approx(float(x.double().square().sum()), rel=1e-6)
    assert (told.elements, told.nonzero) == (x.numel(), int((x != 0).sum()))
    assert cast_in_place(x, cast) == told
    assert torch.equal(x, expected)


def quantize_values(x, cast):
    return round_trip(x.float(), cast)


def test_clipped_and_flushed_elements_are_counted():
    x = torch.tensor([[500.0, 448.0, 1.0, 2.0**-20, 0.0]])
    found = cast_in_place(x, parse_cast("e4m3fn/tensor/unit"))
    assert (found.clipped, found.flushed, found.nonzero) == (1, 1, 4)
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
import torch
from fp8dash.choose.recipe import parse_cast
from fp8dash.quant.error import cast_in_place

def memory(what):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what)) * 1024

x = torch.empty(8192, 8192, dtype=torch.bfloat16).normal_()  # nothing larger before it: the peak so far is now
cast_in_place(x[:64].clone(), parse_cast("{text}"))  # threads and kernels are there
before = memory("VmHWM")
cast_in_place(x, parse_cast("{text}"))
print((memory("VmHWM") - before) / x.nbytes)
"""


@pytest.mark.parametrize("text", ["e4m3fn/row", "e4m3fn/128x128", "e4m3fn/1x32/rceil"])
def test_casting_in_place_holds_little_beside_the_tensor(text):
    """The promise is 1.25 times one layer; a block's float32 copies are about a tenth of this tensor."""
    done = subprocess.run([sys.executable, "-c", PEAK.format(text=text)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.5
