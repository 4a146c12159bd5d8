"""The X-ray of files that no tool writes: a result or one sentence, whatever their headers say."""

import json
import random

import pytest

from fp8dash.errors import ModelError
from fp8dash.model.xray.xray import xray
from fp8dash.report.xray import to_json, to_text
from tests.model.xray import made

SHAPES = ([], [0], [0, 4], [4, 0], [1], [64], [2, 2, 2], [1, 2, 3, 4], [10**12, 10**12])
SIZES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8}
SUFFIXES = (".weight_scale", ".qweight", "_blocks", ".weight_packed", ".g_idx", ".weight_shape", ".k_scale")


def split(file):
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), data[start:]


def joined(file, header, body):
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)


def reshaped(entry, header, pick):
    entry["shape"] = pick.choice((*SHAPES, entry["shape"][::-1], [1, *entry["shape"]]))


def retyped(entry, header, pick):
    entry["dtype"] = pick.choice((*SIZES, "XX"))


def recounted(entry, header, pick):
    """Another dtype and shape of the very same bytes."""
    entry["dtype"] = pick.choice(list(SIZES))
    count = (entry["data_offsets"][1] - entry["data_offsets"][0]) // SIZES[entry["dtype"]]
    entry["shape"] = pick.choice(([count], [1, count], [count, 1], [count // 2 or 1, 2]))


def renamed(entry, header, pick):
    header[pick.choice(list(header)) + pick.choice(SUFFIXES)] = dict(entry)


def exchanged(entry, header, pick):
    one, other = pick.choice(list(header)), pick.choice(list(header))
    header[one], header[other] = header[other], header[one]


@pytest.mark.parametrize("name", made.MADE)
def test_a_header_that_was_tampered_with_gives_a_result_or_one_sentence(name, tmp_path):
    pick = random.Random(name)
    original, folder = made.plain(tmp_path / "plain"), made.MADE[name](tmp_path / "made")
    header, body = split(folder / "model.safetensors")
    header.pop("__metadata__", None)
    for _ in range(40):
        tampered = json.loads(json.dumps(header))
        for _ in range(pick.choice((1, 1, 2, 5))):
            change = pick.choice((reshaped, retyped, recounted, renamed, exchanged))
            change(tampered[pick.choice(list(tampered))], tampered, pick)
        joined(folder / "model.safetensors", tampered, body)
        result = xray(folder, original)
        assert to_text(result) and to_json(result)


def test_a_tensor_of_other_bytes_than_its_shape_asks_for_is_named(tmp_path):
    folder = made.plain(tmp_path / "made")
    header, body = split(folder / "model.safetensors")
    header["lm_head.weight"]["shape"] = [272, 63]
    joined(folder / "model.safetensors", header, body)
    (fault,) = xray(folder).faults
    assert (fault.kind, fault.where) == ("byte count", ("lm_head.weight",))


@pytest.mark.parametrize("offsets", [[-8, 0], [8, 0], ["a", 0], None])
def test_offsets_that_lead_elsewhere_are_refused(offsets, tmp_path):
    folder = made.plain(tmp_path / "made")
    header, body = split(folder / "model.safetensors")
    header["lm_head.weight"]["data_offsets"] = offsets
    joined(folder / "model.safetensors", header, body)
    with pytest.raises(ModelError, match="not a safetensors file") as caught:
        xray(folder)
    assert "\n" not in str(caught.value)
