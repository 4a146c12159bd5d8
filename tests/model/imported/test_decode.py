"""Stored codes decode to what the library that stored them decodes them to, to the bit."""

import pytest
import torch

from fp8dash.choose.models.claims import quantized_of
from fp8dash.model.imported.decode import decoded
from fp8dash.model.xray.faults import faults_of
from fp8dash.model.xray.matrices import matrices_of
from fp8dash.model.xray.tensors import opened
from tests.model.imported.stored import SCHEMES
from tests.model.xray.made import write

SHAPES = ((64, 128), (96, 320))


def weights(shape):
    torch.manual_seed(5)
    return (torch.randn(shape) / 8).bfloat16().float()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_matrix_decodes_to_the_bit_as_its_library_decodes_it(scheme, shape, tmp_path):
    tensors, config, expected = SCHEMES[scheme](weights(shape))
    checkpoint = opened(write(tmp_path / "stored", tensors, config))
    claim = quantized_of(config)
    (matrix,) = matrices_of(checkpoint, claim)
    assert faults_of(checkpoint, (matrix,), claim) == ()
    values = decoded(checkpoint, matrix)
    assert values.dtype == expected.dtype or scheme.startswith("DeepSeek")
    assert torch.equal(values.float(), expected.float().to(values.dtype).float())
    error = (values.float() - weights(shape)).norm() / weights(shape).norm() if values.dim() == 2 else 0
    assert error < 0.4, "the codes of these weights, and of no others"
