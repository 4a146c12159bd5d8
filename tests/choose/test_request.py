"""Requests: every limit is checked in one place and named by its refusal; JSON and hashes are those of old rows."""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8dash.choose.limits import readable_name
from fp8dash.choose.presets import PRESETS
from fp8dash.choose.request import LEAVES, Request
from fp8dash.errors import InvalidChoice

STORED = json.loads((Path(__file__).parent.parent / "data" / "requests.json").read_text("utf-8"))  # by the flat Request


def key(request):
    """As the store hashes it."""
    return hashlib.sha256(json.dumps(request.unusual(), sort_keys=True).encode()).hexdigest()


def values_of(limits):
    """Values that a field's limits allow."""
    one = {
        int: st.integers(int(limits.low), int(min(limits.high, 10**9))),
        float: st.floats(limits.low, 1e6),
        str: st.sampled_from(limits.choices) if limits.choices else st.text("abcdefghij/", min_size=1, max_size=9),
    }[limits.kind]
    return st.lists(one, min_size=1, max_size=3, unique=True).map(tuple) if limits.several else one


anything = st.fixed_dictionaries({}, optional={name: values_of(leaf.limits) for name, leaf in LEAVES.items()})


@pytest.mark.parametrize("row", STORED, ids=lambda row: row["key"][:8])
def test_a_stored_request_reads_back_with_the_same_json_and_hash(row):
    request = Request.from_json(row["json"])
    now = json.loads(json.dumps(request.to_json()))
    assert {name: now[name] for name in row["json"]} == row["json"]
    assert all(now[name] == LEAVES[name].left_out for name in now.keys() - row["json"].keys())  # younger fields
    assert request == Request.from_json(row["asked"])  # a field that is not named means what it meant then
    assert (key(request), key(request.checked())) == (row["key"], row["checked_key"])


@given(anything)
def test_a_request_comes_back_from_its_json(flat):
    request = Request.of(**flat)
    assert Request.from_json(json.loads(json.dumps(request.to_json()))) == request
    assert request.flat == Request().flat | flat


@given(anything, anything)
def test_changing_some_fields_of_a_request_keeps_all_others(flat, changes):
    assert Request.of(**flat).but(**changes).flat == Request.of(**flat).flat | changes


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize(
    "wrong", [None, True, b"8", [8], {"a": 1}, Ellipsis, "\ud800", (None,), float("nan")], ids=repr
)
def test_no_field_takes_a_value_of_another_type(name, wrong):
    with pytest.raises(InvalidChoice) as caught:
        Request.of(**{name: wrong}).checked()
    str(caught.value).encode()  # can be shown


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        ({"window_length": 10**9}, "16 to 1,048,576"),
        ({"windows": 100_000, "window_length": 100_000}, "at most 100,000,000"),
        ({"windows": True}, "whole number, 1 to 100,000, not True"),
        ({"windows": 4.5}, "whole number, 1 to 100,000, not 4.5"),
        ({"windows": None}, "whole number, 1 to 100,000, not None"),
        ({"windows": "8"}, "whole number, 1 to 100,000, not “8”"),
        ({"gemm_m": tuple(range(1, 50_001))}, "50,000 values of the GEMM M are too many: give at most 32"),
        ({"needle_depths": (50,) * 100_000}, "at most 101"),
        ({"decode_batches": tuple(range(1, 10_001))}, "at most 32"),
        (
            {"needle_lengths": tuple(range(128, 160)), "needle_depths": tuple(range(101)), "needle_repeats": 100},
            "10,000",
        ),
        ({"measures": ()}, "choose at least one of gemm"),
        ({"measures": ("export",), "recipe": "BF16"}, "choose at least one of gemm"),
        ({"device": "cudaxyz"}, "choose auto, cpu, cuda or cuda:1"),
        ({"device": "cuda:-1"}, "choose auto, cpu, cuda or cuda:1"),
        ({"device": "cuda;rm"}, "choose auto, cpu, cuda or cuda:1"),
        ({"device": "cuda:٣"}, "choose auto, cpu, cuda or cuda:1"),
        ({"model": "m" * 10_000_000}, "at most 4,096"),
        ({"recipe": "w=" + "e" * 10_000_000}, "at most 65,536"),
        ({"corpus": "/" + "c" * 10_000_000}, "at most 4,096"),
        ({"tasks": ("t" * 10_000_000,)}, "at most 200"),
        ({"tasks": tuple(f"task{n}" for n in range(10_000))}, "at most 100"),
        ({"model": "org/na..me"}, "Hub id like org/name"),
        ({"model": "../name"}, "whole path of a folder"),
        ({"model": "./tiny"}, "whole path of a folder"),
        ({"corpus": "wiki.txt"}, "whole path of a UTF-8 text file"),
        ({"calibration": "wiki.txt"}, "whole path of a UTF-8 text file"),
        ({"until": float("nan")}, "0.0 or more"),
        ({"until": float("inf")}, "0.0 or more"),
        ({"recipe": "w=e4m3fn/row skip=down_proj"}, "closest alternative: skip=*.down_proj"),
        ({"recipe": "W4A16", "measures": ("export",)}, "not a multiple of 128"),
        ({"seed": 10**5000}, "0 to 2,147,483,647"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_refusal_names_the_bound(change, bound):
    with pytest.raises(InvalidChoice) as caught:
        Request.of(**change).checked()
    assert bound in str(caught.value) and len(str(caught.value)) < 300


def test_repetitions_are_measured_once():
    request = Request.of(gemm_m=(8, 8, 1), needle_depths=(50, 50), measures=("gemm", "gemm")).checked()
    assert (request.gemm.m, request.needles.depths, request.measures) == ((8, 1), (50,), ("gemm",))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_checked_request_is_checked_already(preset):
    request = Request(recipe=preset, measures=("perplexity",)).checked()
    assert request.checked() == request


@pytest.mark.parametrize(
    "name", ["", " ", "\u200b\u200d\u2060", "\ufeff", "\u00a0\u3000", "a\nb", "a\0", "\ud800", None, "a" * 61]
)
def test_a_name_must_be_readable_on_one_line(name):
    with pytest.raises(InvalidChoice):
        readable_name(name, "owner", 60, "ada")


def test_every_field_of_a_request_has_limits_and_a_default_that_they_allow():
    for name, leaf in LEAVES.items():
        assert leaf.limits.checked(leaf.default) == leaf.default, name
    assert {leaf.group or leaf.field for leaf in LEAVES.values()} == {f.name for f in dataclasses.fields(Request)}
