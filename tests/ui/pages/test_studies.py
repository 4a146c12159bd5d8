"""The studies page without a browser: one click queues what is missing, and a study opens with its answer."""

import pytest

from fp8dash.choose.studies import QUESTIONS, RecipeGrid
from fp8dash.ui.words import plain
from tests.ui.drawn import opened, page_text, queued, table_with

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


def test_every_question_is_a_card_that_says_what_it_queues():
    app = opened("studies", owner="ada")
    for question in QUESTIONS.values():
        assert plain(question.question) in page_text(app)
        assert app.button(f"studies_ask_{question.name}").label == f"Queue {len(question.recipes)} runs"


@pytest.mark.parametrize("name", ["e4m3-e5m2", "kv-cache"])
def test_one_click_queues_exactly_the_questions_runs_and_opens_the_study(name, store):
    app = opened("studies", owner="ada")
    app.button(f"studies_ask_{name}").click().run()
    runs, question = queued(store), QUESTIONS[name]
    assert [run.request for run in runs] == question.requests(runs[0].request)
    assert {(run.study, run.owner) for run in runs} == {(question.question, "ada")}
    assert app.query_params["study"] in ([runs[0].study_id], runs[0].study_id)
    assert app.title[0].value == plain(f"No answer yet: 0 of {len(runs)} runs have finished")


def test_what_is_measured_already_is_not_queued_again_and_is_in_the_answer(ids, store):
    before = {run.id for run in queued(store)}
    app = opened("studies", owner="ada")
    assert "7 runs, 5 already measured." in page_text(app)
    app.button("studies_ask_granularity").click().run()
    new = [run for run in queued(store) if run.id not in before]
    assert [run.recipe for run in new] == ["w=e4m3fn/1x128 a=e4m3fn/1x128", "w=e4m3fn/1x32 a=e4m3fn/1x32"]
    assert app.title[0].value.startswith(plain("So far, MXFP8 loses least: KLD 0.0172 nats; next is FP8_BLOCK"))
    assert "5 runs reused from other studies" in page_text(app)
    again = opened("studies", owner="ada")
    assert "5 already measured and 2 already queued" in page_text(again)
    again.button("studies_ask_granularity").click().run()
    assert len(queued(store)) == len(before) + 2 and again.title[0].value.startswith("So far")


def test_without_a_name_nothing_is_queued(store):
    app = opened("studies")
    app.button("studies_ask_deploy").click().run()
    assert "The owner has no readable name" in app.error[0].value and queued(store) == []


def test_a_grid_is_queued_without_what_says_nothing(store):
    app = opened("studies", owner="ada")
    app.multiselect("grid_rules").set_value(["float32", "nvfp4"]).run()
    assert plain("e4m3fn/tensor/nvfp4: nvfp4 has one scale per tile") in page_text(app)
    app.button("studies_ask_grid").click().run()
    assert [run.recipe for run in queued(store)] == [
        "bf16", "w=e4m3fn/tensor a=e4m3fn/tensor", "w=e4m3fn/row a=e4m3fn/row", "w=e4m3fn/row/nvfp4 a=e4m3fn/row/nvfp4",
    ]  # fmt: skip
    assert queued(store)[0].study == RecipeGrid(("e4m3fn",), ("tensor", "row"), ("float32", "nvfp4")).title


def test_a_grid_that_is_measured_already_opens_by_its_parts_in_the_address(ids, store):
    app = opened("studies", owner="ada", grid_formats="e4m3fn", grid_tiles=["128x128"])
    before = len(queued(store))
    app.button("studies_ask_grid").click().run()
    assert len(queued(store)) == before and app.query_params["question"] in ("grid", ["grid"])
    assert plain("FP8_BLOCK costs KLD") in app.title[0].value
    strange = opened("studies", question="grid", formats="bogus", tiles="row", rules="float32", runs="x")
    assert "“bogus” is not a format" in page_text(strange)


def test_what_is_asked_of_which_model_is_in_the_address(store):
    link = {"owner": "ada", "ask_backend": "emulated", "grid_formats": "int8", "grid_tiles": ["row", "tensor"]}
    assert opened("studies", **link, ask_model="/models/x").session_state["ask_model"] == "/models/x"
    app = opened("studies", **link)  # AppTest cannot click beside an option that was typed
    app.button("studies_ask_grid").click().run()
    runs = queued(store)
    assert {(run.model, run.request.backend, run.owner) for run in runs} == {("demo", "emulated", "ada")}
    assert [run.recipe for run in runs] == ["bf16", "w=int8/row a=int8/row", "w=int8/tensor a=int8/tensor"]


def test_a_study_in_the_address_opens_with_answer_figure_table_and_downloads(ids, store):
    app = opened("studies", study=store.run(ids["MXFP8"]).study_id)
    assert app.title[0].value.startswith(plain("MXFP8 loses least: KLD 0.0172 nats"))
    assert len(app.get("plotly_chart")) == 1
    assert list(table_with(app, "Recipe")["Recipe"])[:3] == ["BF16", "MXFP8", "FP8_BLOCK"]
    assert {button.label for button in app.get("download_button")} >= {"Markdown", "HTML", "CSV"}
    assert not app.exception and not app.error


def test_runs_and_a_question_in_the_address_are_an_answer_and_a_false_one_a_sentence(ids):
    app = opened("studies", question="e4m3-e5m2", runs=f"{ids['FP8_DYNAMIC']},{ids['FP8_E5M2']}")
    assert app.title[0].value.startswith(plain("FP8_DYNAMIC loses least"))
    assert "question=nope, which is not a question" in page_text(opened("studies", question="nope", runs="x"))
    assert "There is no study nope" in page_text(opened("studies", study="nope"))
