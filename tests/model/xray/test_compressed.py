"""Checkpoints that compressed-tensors itself writes are read as its presets and are free of faults."""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from fp8dash.model.xray.xray import xray
from tests.model.xray import made

CASES = {  # preset: format, group size, largest code
    "FP8_DYNAMIC": ("float-quantized", 64, 448),
    "W8A8": ("int-quantized", 64, 127),
    "W4A16": ("pack-quantized", 32, 7),
    "W4A16_ASYM": ("pack-quantized", 32, 7),
}


def compressed(folder, preset):
    layout, group, largest = CASES[preset]
    scheme = QuantizationScheme(targets=["Linear"], format=layout, **PRESET_SCHEMES[preset]).model_copy(deep=True)
    if scheme.weights.group_size:
        scheme.weights.group_size = group
    compressor, tensors = BaseCompressor.get_value_from_registry(layout), {}
    for name, weight in made.weights().items():
        if name in made.REST:
            tensors[f"{name}.weight"] = weight
            continue
        size = group if scheme.weights.group_size else weight.shape[1]
        scale = weight.view(weight.shape[0], -1, size).abs().amax(-1) / largest
        zero = torch.zeros(scale.shape, dtype=torch.int8)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        written = compressor.compress(state, scheme)
        tensors |= {f"{name}.{part}": tensor for part, tensor in written.items() if tensor is not None}
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=layout, ignore=["lm_head"])
    return made.write(folder, tensors, config.model_dump(mode="json"))


@pytest.mark.parametrize("preset", CASES)
def test_what_compressed_tensors_writes_is_free_of_faults(preset, tmp_path):
    result = xray(compressed(tmp_path / "out", preset), made.plain(tmp_path / "plain"))
    assert (result.faults, result.scheme) == ((), preset)
    assert result.recipe.split()[0] == {
        "FP8_DYNAMIC": "w=e4m3fn/row", "W8A8": "w=int8/row/ct", "W4A16": "w=int4/1x32/ct",
        "W4A16_ASYM": "w=int4/1x32/ct",
    }[preset]  # fmt: skip
    assert (result.rounding and result.rounding.is_plain) == (True if preset.startswith("W4A16") else None)
