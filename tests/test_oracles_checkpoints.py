"""The oracles of imported checkpoints decode to about what went in, within half a step of their scale."""

import pytest
import torch

from tests import oracles_checkpoints as oracles

ORDER = torch.randperm(128, generator=torch.Generator().manual_seed(1))
CASES = {
    "gptq": lambda w: oracles.gptq(w, 32),
    "gptq of 8 bits": lambda w: oracles.gptq(w, 32, bits=8),
    "gptq, asymmetric": lambda w: oracles.gptq(w, 32, sym=False),
    "gptq_v2, asymmetric": lambda w: oracles.gptq(w, 32, sym=False, version=2),
    "gptq, desc_act": lambda w: oracles.gptq(w, 32, order=ORDER),
    "awq": lambda w: oracles.awq(w, 32),
    "deepseek": lambda w: oracles.deepseek_fp8(w, (64, 64)),
    "deepseek, ue8m0": lambda w: oracles.deepseek_fp8(w, (64, 64), ue8m0=True, scale_dtype=oracles.E8M0),
    "gpt-oss": lambda w: tuple(part if i == 0 else part[0] for i, part in enumerate(oracles.gpt_oss_mxfp4(w[None]))),
    "modelopt fp8": oracles.modelopt_fp8,
    "modelopt nvfp4": oracles.modelopt_nvfp4,
    "actorder": lambda w: oracles.compressed_by_activations(w, 32, ORDER),
    "actorder, asymmetric": lambda w: oracles.compressed_by_activations(w, 32, ORDER, sym=False),
} | {name: lambda w, name=name: oracles.compressed(w, name) for name in oracles.COMPRESSED}


@pytest.mark.parametrize("name", CASES)
def test_what_a_library_decodes_is_near_what_it_was_given(name):
    torch.manual_seed(0)
    weights = (torch.randn(96, 128) / 8).bfloat16()
    _, decoded = CASES[name](weights)
    error = (decoded - weights.float()).norm() / weights.float().norm()
    four_bits = any(word in name.lower() for word in ("gptq", "awq", "fp4", "gpt-oss", "w4", "actorder"))
    assert decoded.shape == weights.shape and decoded.dtype == torch.float32
    assert error < (0.16 if four_bits and "8 bits" not in name else 0.04)
