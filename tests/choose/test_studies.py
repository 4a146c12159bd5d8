"""Questions and grids: every one can be queued as it stands, and what is stored of it reads back."""

import json

import pytest

from fp8dash.choose.catalog import estimate, shape_of
from fp8dash.choose.metrics import METRICS
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.request import Request
from fp8dash.choose.studies import MOST_RUNS, QUESTIONS, RecipeGrid, question_of
from fp8dash.errors import InvalidChoice
from fp8dash.stats import FEWEST_WINDOWS


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_a_questions_requests_are_accepted_start_with_the_baseline_and_differ(question):
    requests = question.requests(Request.of(backend="emulated", seed=3))
    assert requests[0].recipe == "bf16"
    assert len(set(requests)) == len(requests) == len(question.recipes) > 2
    for request in requests:
        assert request == request.checked() and (request.backend, request.seed) == ("emulated", 3)
        assert parse_recipe(request.recipe).text == request.recipe
        assert request.windows.count >= FEWEST_WINDOWS  # else no difference has an interval


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_a_question_asks_for_the_numbers_that_answer_it(question):
    needs = {"kld": "perplexity", "sensitivity": "sensitivity"}[question.metric]
    assert all(needs in request.measures for request in question.requests(Request()))
    assert set(question.beside) <= set(METRICS)
    measured = question.requests(Request())[-1].measures
    for metric, measure in (("needle", "needle"), ("gemm_speedup", "gemm")):
        assert metric not in question.beside or question.metric == "sensitivity" or measure in measured


def test_every_cache_is_read_by_the_same_paths_the_baselines_too():
    requests = QUESTIONS["kv-cache"].requests(Request())
    assert len({request.measures for request in requests}) == 1 and "kv" in requests[0].measures
    assert all(parse_recipe(request.recipe).kv for request in requests[1:])


def test_simulated_accumulators_read_few_short_windows():
    requests = QUESTIONS["accumulator"].requests(Request())
    assert all(r.windows.tokens <= 256 and r.measures == ("perplexity",) for r in requests)
    assert all(parse_recipe(request.recipe).accumulator for request in requests[1:])


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_a_question_is_found_by_its_name_and_no_two_have_the_same_words(question):
    assert question_of(question.name, None) is question and question_of(question.question, None) is None
    assert sum(other.question == question.question for other in QUESTIONS.values()) == 1


def test_a_grid_is_every_combination_and_what_is_stored_of_it_reads_back():
    grid = RecipeGrid(("e4m3fn", "int8"), ("tensor", "row", "128x128"), ("float32", "pow2"))
    cells = grid.cells()
    assert len(cells.recipes) == 12 and not cells.left_out
    asked = question_of(None, json.loads(json.dumps(grid.to_json())))
    assert asked == grid.question and asked.grid == grid
    assert asked.recipes == ("BF16", *(recipe.text for recipe in cells.recipes))
    for recipe in cells.recipes:
        assert parse_recipe(recipe.text) == recipe and estimate(recipe, shape_of("demo")).coverage > 0.7
        assert recipe.activations.tile.name != "128x128"  # tokens are not blocked


def test_what_says_nothing_of_its_own_is_left_out_with_a_sentence():
    cells = RecipeGrid(("e2m1",), ("tensor", "1x16"), ("unit", "nvfp4")).cells()
    assert [recipe.text for recipe in cells.recipes] == [
        "w=e2m1/tensor/unit a=e2m1/tensor/unit", "w=e2m1/1x16/nvfp4 a=e2m1/1x16/nvfp4",
    ]  # fmt: skip
    assert [sentence.partition(":")[0] for sentence in cells.left_out] == ["e2m1/tensor/nvfp4", "e2m1/1x16/unit"]


def test_an_empty_grid_or_one_too_large_is_refused():
    with pytest.raises(InvalidChoice, match="at least one format"):
        _ = RecipeGrid((), ("row",), ("float32",)).question
    tiles = ("tensor", "row", "column", "1x128", "128x128", "1x32", "1x16")
    grid = RecipeGrid(("e4m3fn", "e5m2", "int8"), tiles, ("float32", "pow2", "floor"))
    with pytest.raises(InvalidChoice, match=f"63 recipes: at most {MOST_RUNS}"):
        _ = grid.question


def test_a_grid_of_what_there_is_not_is_refused():
    for part, names in (("format", ("bogus",)), ("tile", ("3x3",)), ("scale rule", ("luck",))):
        grid = dict(zip(("format", "tile", "scale rule"), (("int8",), ("row",), ("float32",)), strict=True))
        with pytest.raises(InvalidChoice, match=f"“{names[0]}” is not a {part}"):
            _ = RecipeGrid(*(grid | {part: names}).values()).question


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        (None, None),
        ("", None),
        ("of-2031", None),
        (None, {}),
        (None, {"formats": ["bogus"], "tiles": ["row"], "rules": ["float32"]}),
        (None, {"formats": [], "tiles": [], "rules": []}),
    ],
)
def test_a_study_of_somebodys_own_or_of_another_version_asks_no_question(name, grid):
    assert question_of(name, grid) is None
