"""GGUF files: what gguf, llama.cpp's own package, writes is read from the header alone."""

import random

import gguf
import numpy as np
import pytest

from fp8dash.errors import ModelError
from fp8dash.model.xray.xray import xray

QUANTS = ["Q4_0", "Q8_0", "Q5_1", "F16"]


def written(file, kind):
    """A model of one matrix of 64 by 96, an embedding and a norm, and metadata of every kind."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_string("general.name", "tiny")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_float32("factor", 0.5)
    weight = np.random.default_rng(0).standard_normal((64, 96), np.float32)
    quant = gguf.GGMLQuantizationType[kind]
    writer.add_tensor("blk.0.attn_q.weight", gguf.quantize(weight, quant), raw_dtype=quant)
    writer.add_tensor("token_embd.weight", weight)
    writer.add_tensor("output_norm.weight", weight[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("kind", QUANTS)
def test_a_gguf_file_is_read_as_its_own_package_reads_it(kind, tmp_path):
    file = written(tmp_path / "a.gguf", kind)
    result, tensors = xray(file), gguf.GGUFReader(file).tensors
    assert result.size_bytes == sum(int(tensor.n_bytes) for tensor in tensors)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert result.bits_per_weight == 8 * size / block
    assert (result.scheme, result.coverage) == (kind, float(kind != "F16"))
    assert result.faults == () and dict(result.dtypes) == {kind: 1, "F32": 2}


def test_a_truncated_gguf_file_is_named_and_any_other_end_is_a_sentence(tmp_path):
    file = written(tmp_path / "a.gguf", "Q4_0")
    data, short = file.read_bytes(), tmp_path / "b.gguf"
    short.write_bytes(data[:-100])
    assert [fault.kind for fault in xray(short).faults] == ["truncated"]
    pick = random.Random(0)
    for _ in range(200):
        torn = bytearray(data[: pick.randrange(1, 400)])
        torn[pick.randrange(len(torn))] = 0xFF
        short.write_bytes(torn)
        with pytest.raises(ModelError) as caught:
            xray(short)
        assert "\n" not in str(caught.value)
