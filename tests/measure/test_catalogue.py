"""The catalogue of measurements beside what the stages of real runs yield."""

import pytest

from fp8dash.choose.measurements import INTERVALS, MEASUREMENTS, TaskNumber, end_name
from fp8dash.choose.records import HIGHER, LOWER, NEITHER, STAGES, Measurement, StageResult
from fp8dash.choose.request import MEASURES, Request
from fp8dash.pipeline import run_stages
from tests.docs.tables import METHODS
from tests.families import write_family

SMALL = {
    "windows": 2,
    "window_length": 64,
    "gemm_m": (1, 4),
    "needle_lengths": (700,),
    "needle_depths": (0, 100),
    "decode_batches": (1,),
    "tasks": ("fp8dash_needle",),
    "task_limit": 1,
}
EVERYTHING = tuple(measure for measure in MEASURES if measure != "export")  # which measures nothing
STATIC = "w=e4m3fn/tensor a=e4m3fn/tensor/static kv=e4m3fn/tensor/static"
CHOSEN = {"perplexity", "kv", "needle", "tasks"}  # a request bears on their method


@pytest.fixture(scope="module")
def rows(tiny, corpus_file, tmp_path_factory):
    """The stage and measurement of a cast run with all measures, and of a baseline whose decoding is timed."""
    request = Request.of(model=str(tiny), corpus=str(corpus_file), backend="emulated", measures=EVERYTHING, **SMALL)
    cache = tmp_path_factory.mktemp("cache")
    mixture = write_family("qwen2_moe", tmp_path_factory.mktemp("mixture"))
    requests = (
        request.but(recipe=STATIC), request.but(recipe="BF16", measures=("decode",)),
        request.but(model=str(mixture), measures=("experts",)),
    )  # fmt: skip
    results = [item for asked in requests for item in run_stages(asked, frozenset(), cache)]
    stages = [item for item in results if isinstance(item, StageResult)]
    return [(item.stage, row) for item in stages for row in item.rows if isinstance(row, Measurement)]


def test_every_number_that_a_run_yields_is_listed_with_its_unit_direction_and_stage(rows):
    for stage, row in rows:
        if number := TaskNumber.read(row.name):
            assert (stage, row.unit, number.name) == ("tasks", number.unit, row.name)
            continue
        metric = MEASUREMENTS[row.name]
        listed = (metric.stage, metric.stored_unit, metric.better)
        assert listed == (stage, row.unit, row.better), row.name


def test_every_listed_number_is_one_that_a_run_yields(rows):
    assert set(MEASUREMENTS) == {row.name for _, row in rows if not TaskNumber.read(row.name)}


def test_every_number_has_the_method_that_it_is_listed_under(rows):
    for _, row in rows:
        metric = MEASUREMENTS.get(row.name)
        assert metric is None or metric.made_by in CHOSEN or row.method == METHODS[metric.made_by], row.name


@pytest.mark.parametrize("metric", MEASUREMENTS.values(), ids=lambda metric: metric.name)
def test_what_is_listed_can_be_shown(metric):
    assert metric.title and metric.help.endswith(".") and metric.stage in STAGES
    assert metric.better in (LOWER, HIGHER, NEITHER) and metric.made_by in METHODS
    assert bool(metric.stored) == (metric.per != 1), "another unit on the screen is another number"
    assert not metric.end_of or (metric.end_of in INTERVALS and metric.better == NEITHER)


def test_titles_are_not_mistaken_for_one_another():
    titles = [metric.title for metric in MEASUREMENTS.values()]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("name", INTERVALS)
def test_an_intervals_ends_have_its_unit(name):
    for end in ("low", "high"):
        metric = MEASUREMENTS[end_name(name, end)]
        assert (metric.end_of, metric.stored_unit) == (name, MEASUREMENTS[name].stored_unit)


@pytest.mark.parametrize("metric", ["acc", "exact_match,strict-match", "word_perplexity"])
@pytest.mark.parametrize("is_stderr", [False, True])
def test_a_task_numbers_name_reads_back(metric, is_stderr):
    number = TaskNumber(metric, is_stderr)
    assert TaskNumber.read(number.name) == number
