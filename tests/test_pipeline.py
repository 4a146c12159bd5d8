"""One run from its first stage to its last, and one that is taken up again."""

import pytest

from fp8dash.choose.records import Measurement, NeedleCell, Progress, StageResult, Window
from fp8dash.choose.request import Request
from fp8dash.errors import CorpusError, InvalidChoice, ModelError
from fp8dash.model import passes
from fp8dash.pipeline import run_stages

SMALL = {"windows": 4, "window_length": 64, "gemm_m": (1, 4), "needle_lengths": (700,), "needle_depths": (0, 100)}


@pytest.fixture
def request_(tiny, corpus_file):
    return Request.of(model=str(tiny), recipe="FP8_DYNAMIC", corpus=str(corpus_file), backend="emulated", **SMALL)


def results(request, done, cache):
    return {item.stage: item for item in run_stages(request, frozenset(done), cache) if isinstance(item, StageResult)}


def test_a_run_yields_each_stage_once_with_its_rows_and_facts(request_, tmp_path):
    items = list(run_stages(request_, frozenset(), tmp_path))
    stages = [item.stage for item in items if isinstance(item, StageResult)]
    assert stages == ["load", "baseline", "quantize", "gemm", "perplexity", "needle"]
    assert all(0 <= item.share <= 1 for item in items if isinstance(item, Progress))
    by_stage = {item.stage: item for item in items if isinstance(item, StageResult)}
    facts = by_stage["load"].facts
    assert len(facts["model_hash"]) == len(facts["corpus_hash"]) == 64 and facts["versions"]["torch"]
    assert by_stage["quantize"].facts["backend"] == "emulated"
    assert sum(isinstance(row, Window) for row in by_stage["perplexity"].rows) == 4
    assert sum(isinstance(row, NeedleCell) for row in by_stage["needle"].rows) == 2


def test_a_long_step_is_told_of_from_inside_the_model(request_, tmp_path, monkeypatch):
    monkeypatch.setattr(passes, "EVERY_SECONDS", 0.0)
    heard, inner_steps = list[Progress](), list[Progress]()

    def tell(progress: Progress) -> None:
        inner_steps.append(progress)
        heard.append(progress)

    for item in run_stages(request_, frozenset(), tmp_path, tell):
        heard += [item] if isinstance(item, Progress) else []
    steps = [p for p in heard if p.stage == "perplexity"][1:]  # the first says that the stage begins
    assert [p.share for p in steps] == sorted(p.share for p in steps) and steps[-1].share <= 1
    one = [(p.done, p.total) for p in steps if p.message == "window 2 of 4"]
    assert list(dict.fromkeys(one)) == [(2, 8), (6, 24), (7, 24), (8, 24)], "the step, then each of two blocks"
    assert len(one) > 1 + 2 * 7, "within a block, from each of its Linears"
    assert sum(p.message == "window 2 of 4: scores" for p in steps) == 1 + 2, "both heads, once for each 64 rows"
    assert {"baseline", "perplexity", "needle"} <= {p.stage for p in inner_steps}
    assert not {"load", "gemm"} & {p.stage for p in inner_steps}, "nothing runs beside what is timed"


def test_a_result_survives_its_json_form(request_, tmp_path):
    for result in results(request_, (), tmp_path).values():
        assert StageResult.from_json(result.to_json()) == result
    odd = StageResult(
        "x", 1.0, (Measurement("a", float("inf"), "", "", "", ""), Measurement("b", None, "", "", "", ""))
    )
    assert StageResult.from_json(odd.to_json()) == odd


def test_a_run_taken_up_again_measures_only_what_is_left(request_, tmp_path):
    whole = results(request_, (), tmp_path)
    rest = results(request_, ("load", "baseline", "quantize", "gemm", "perplexity"), tmp_path)
    assert list(rest) == ["needle"] and rest["needle"].rows == whole["needle"].rows
    assert results(request_, whole, tmp_path) == {}


def test_measures_may_be_left_out(request_, tmp_path):
    stages = results(request_.but(measures=("gemm",)), (), tmp_path)
    assert list(stages) == ["load", "baseline", "quantize", "gemm"] and not stages["baseline"].rows
    assert not (tmp_path / "baselines").exists()


def test_what_cannot_be_measured_is_said_before_anything_is_cast(request_, tmp_path):
    for change, error, message in (
        ({"needle_lengths": (4096,)}, CorpusError, "exceed the model's context"),
        ({"window_length": 4096}, CorpusError, "exceed the model's context"),
        ({"recipe": "w=fp8/row"}, InvalidChoice, "not a format"),
        ({"corpus": "/none.txt"}, CorpusError, "cannot be read"),
        ({"recipe": "W4A16", "measures": ("gemm", "export")}, InvalidChoice, "64 columns are not a multiple of 128"),
        ({"needle_lengths": (128, 256)}, CorpusError, "cannot hold the question itself: choose at least"),
    ):
        seen = []
        with pytest.raises(error, match=message):
            seen += run_stages(request_.but(**change), frozenset(), tmp_path)


def test_a_studys_usual_needles_can_be_looked_for_with_one_token_a_byte(request_, tmp_path):
    usual = request_.but(needle_lengths=(256, 1024), measures=("needle",))  # 256 bytes hold no question
    cells, numbers = [], []
    for row in results(usual, (), tmp_path)["needle"].rows:
        (cells if isinstance(row, NeedleCell) else numbers).append(row)
    assert {cell.length for cell in cells} == {1024}
    assert "A needle length of 256 tokens cannot hold the question itself" in numbers[0].note


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": " "}, "No model is given"),
        ({"corpus": ""}, "No corpus is given"),
        ({"backend": "gpu"}, "not a backend"),
        ({"haystack": "hay"}, "not a haystack"),
        ({"measures": ("speed",)}, "not a measure"),
        ({"device": "tpu"}, "not a device"),
        ({"windows": 0}, "out of range"),
        ({"gemm_m": ()}, "No GEMM M is given"),
        ({"needle_depths": (101,)}, "out of range"),
    ],
)
def test_a_request_that_cannot_be_is_refused_with_what_to_change(change, message):
    with pytest.raises(InvalidChoice, match=message):
        Request.of(**change).checked()


def test_a_request_of_a_newer_version_is_refused():
    with pytest.raises(InvalidChoice, match="newer version"):
        Request.from_json({"model": "demo", "accumulator": "fp22"})


@pytest.mark.parametrize("name", ["model_hash", "corpus_hash"])
def test_a_run_taken_up_again_on_other_files_fails_with_both_hashes(request_, tmp_path, name):
    facts = results(request_, (), tmp_path)["load"].facts
    done = frozenset({"load", "baseline"})
    recorded = {key: facts[key] for key in ("model_hash", "corpus_hash")}
    next(run_stages(request_, done, tmp_path, recorded=recorded))
    changed = recorded | {name: "0" * 64}
    with pytest.raises((ModelError, CorpusError), match=f"its hash was 0{{12}} and is now {facts[name][:12]}"):
        list(run_stages(request_, done, tmp_path, recorded=changed))
