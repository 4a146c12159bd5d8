"""The page “New run” and its address: what is filled in comes back from it, what cannot be is said in a sentence."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from db.store import Store
from fp8dash.choose.formats import FORMATS
from fp8dash.choose.presets import PRESETS, recipe_from
from fp8dash.choose.request import Request
from fp8dash.ui.forms.address import FIELDS, Address, Form, read, written
from fp8dash.ui.frame import INTERNAL
from fp8dash.ui.words import plain
from tests.ui.drawn import opened, page_text

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # AppTest leaves its event loop to the collector
KEY = "new_run_new_"
START = Form(Request(), (PRESETS["FP8_DYNAMIC"].recipe,))
OTHER: dict[str, dict[str, Any]] = {  # a value of each field that is not the default's, with what it needs beside it
    "model": {"model": "/models/a b&c=d"},
    "corpus": {"corpus": "/data/wiki text.txt"},
    "windows": {"windows": 9},
    "window_length": {"window_length": 64},
    "measures": {"measures": ("gemm",)},
    "gemm_m": {"gemm_m": (8, 32)},
    "needle_lengths": {"needle_lengths": (512,)},
    "needle_depths": {"needle_depths": (0, 10)},
    "haystack": {"haystack": "essay"},
    "needle_kind": {"needle_kind": "multikey_1", "haystack": "essay"},
    "needle_repeats": {"needle_repeats": 3},
    "needle_chat": {"needle_chat": "off"},
    "calibration": {"calibration": "/data/calibration.txt"},
    "calibration_windows": {"calibration_windows": 5},
    "tasks": {"measures": ("tasks",), "tasks": ("hellaswag", "fp8dash_pydocs")},
    "task_limit": {"task_limit": 40},
    "task_prompt": {"task_prompt": "chat"},
    "task_precision": {"task_precision": "float32"},
    "backend": {"backend": "emulated"},
    "device": {"device": "cuda:1"},
    "loading": {"loading": "blocks"},
    "seed": {"seed": 7},
    "sensitivity": {"sensitivity": "block"},
    "sensitivity_budget": {"sensitivity_budget": "kld=25%"},
    "decode_batches": {"decode_batches": (4,)},
    "convention": {"convention": "half"},
    "stride": {"convention": "strided", "stride": 128},
    "bos": {"bos": "bos"},
    "until": {"until": 0.1 + 0.2},
}
RECIPES = [
    [preset.text for preset in PRESETS.values()],
    ["w=e4m3fn/tensor a=e4m3fn/tensor/te/static:p99.5 kv=int8/token also=lm_head,embeddings skip=model.layers.[0-3].*"],
    ["w=e4m3fn/row a=e4m3fn/row acc=hopper", "bf16"],
    ["w=e4m3fn/row w[*.down_proj]=bf16 a[*.up_proj]=e5m2/row"],
]


def again(app: AppTest) -> AppTest:
    """The page's address, opened in a session of its own."""
    return opened("new_run", **app.query_params)  # type: ignore[arg-type]


def submitted(app: AppTest) -> str:
    """The ids of the runs that the form queues; a request that waits already is answered with its run."""
    app.button(KEY + "submit").click().run()
    return str(app.query_params["queued"])


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_a_request_comes_back_from_the_address(name: str) -> None:
    form = dataclasses.replace(START, request=START.request.but(**OTHER[name]))
    address = written(form, START)
    assert set(address) == {*OTHER[name], "window_length", "backend"}
    assert read(address, START) == form and form != START


@pytest.mark.parametrize("texts", RECIPES, ids=lambda texts: texts[0])
def test_every_recipe_comes_back_from_the_address(texts: list[str]) -> None:
    form = dataclasses.replace(START, recipes=tuple(map(recipe_from, texts)))
    assert read(written(form, START), START) == form


def test_an_untouched_form_has_a_bare_address(store: Store) -> None:
    assert not opened("new_run").query_params


def typed(app: AppTest, text: str) -> None:
    app.segmented_control(KEY + "way").set_value("Typed").run()
    app.text_area(KEY + "typed").set_value(text)


def with_cards(app: AppTest) -> None:
    app.checkbox(KEY + "preset_INT8").check()
    app.multiselect(KEY + "rarer").set_value(["MOSS", "FP8_UNIT"])


def with_builder(app: AppTest) -> None:
    app.segmented_control(KEY + "way").set_value("Custom").run()
    app.selectbox(KEY + "Weights_format").set_value("int8")
    app.selectbox(KEY + "when").set_value("static:p99.9")
    app.selectbox(KEY + "Activations_tile").set_value("tensor")
    app.toggle(KEY + "kv_on").set_value(True)
    app.text_input(KEY + "skip").set_value("*.down_proj, model.layers.0.*")


def with_numbers(app: AppTest) -> None:
    app.button_group(KEY + "measures").set_value(["perplexity", "tasks"]).run()
    app.multiselect(KEY + "tasks").set_value(["fp8dash_pydocs", "hellaswag"])
    app.selectbox(KEY + "convention").set_value("strided")
    app.selectbox(KEY + "needle_kind").set_value("multikey_1").run()
    app.number_input(KEY + "stride").set_value(100)
    app.number_input(KEY + "until").set_value(0.002)
    app.text_input(KEY + "gemm_m").set_value("8 32")
    app.selectbox(KEY + "backend").set_value("emulated")


def with_a_folder_and_a_name(app: AppTest) -> None:
    app.segmented_control(KEY + "source").set_value("Local folder")
    app.selectbox(KEY + "corpus").set_value("A text file …").run()
    app.text_input(KEY + "Folder").set_value("/models/<b>&?=#")
    app.text_input(KEY + "file").set_value("/data/50% wiki.txt")
    app.text_input(KEY + "study").set_value("The night’s")


FILLED: list[tuple[Callable[[AppTest], object], str]] = [
    (with_cards, "Presets"),
    (with_builder, "Custom"),
    (lambda app: typed(app, "fp8_block\nw=e4m3fn/row a=e4m3fn/row acc=hopper\nmxfp8"), "Typed"),
    (lambda app: typed(app, "w=e4m3fn/row a=e4m3fn/row acc=hopper"), "Typed"),  # the builder has no widget for acc=
    (lambda app: typed(app, "mxfp8\nfp8_block"), "Typed"),  # not in the cards' order
    (lambda app: typed(app, "mxfp8"), "Presets"),
    (with_numbers, "Presets"),
    (with_a_folder_and_a_name, "Presets"),
]


@pytest.mark.parametrize(("fill", "way"), FILLED)
def test_a_link_queues_what_the_form_queues(fill: Callable[[AppTest], object], way: str, store: Store) -> None:
    app = opened("new_run", owner="ada")
    fill(app)
    app.run()
    link = again(app)
    assert link.query_params == app.query_params and not link.error
    assert link.segmented_control(KEY + "way").value == way
    assert link.title[0].value == app.title[0].value
    assert link.text_input(KEY + "study").value == app.text_input(KEY + "study").value
    assert submitted(app) == submitted(link)


def test_the_names_of_a_link_are_those_of_its_runs_and_a_study_without_one_is_named_after_its_recipes(
    store: Store,
) -> None:
    link = opened("new_run", owner="ada", study="The night’s", recipe="MXFP8")
    run = store.run(submitted(link))
    assert (run.owner, run.study, run.preset) == ("ada", "The night’s", "MXFP8")
    assert store.run(submitted(opened("new_run", owner="ada", recipe="INT8"))).study == "INT8"


def test_defaults_are_left_out_and_taken_back_out(store: Store) -> None:
    app = opened("new_run")
    app.number_input(KEY + "windows").set_value(9).run()
    assert app.query_params == {"windows": "9", "window_length": "512", "backend": "auto"}
    app.number_input(KEY + "windows").set_value(8).run()
    assert not app.query_params


def test_the_other_backend_than_the_workers_is_kept(ids: dict[str, str]) -> None:
    app = opened("new_run")
    app.selectbox(KEY + "backend").set_value("auto").run()
    assert (
        app.query_params == {"window_length": "512", "backend": "auto"}
        and again(app).selectbox(KEY + "backend").value == "auto"
    )


def test_a_link_from_a_run_says_only_what_was_changed(store: Store, ids: dict[str, str]) -> None:
    old = store.run(ids["running"])
    app = opened("new_run", **{"from": old.id}, owner="ada")
    assert app.query_params == {"from": old.id, "owner": "ada"}
    app.number_input(KEY + "seed").set_value(5).run()
    assert app.query_params == {"from": old.id, "owner": "ada", "seed": "5"}
    link = again(app)
    assert f"Filled in from run {old.id}. " in page_text(link)
    assert store.run(submitted(link)).request == old.request.but(seed=5)


def test_what_is_half_typed_stays_and_the_address_keeps_the_last_that_can_be(store: Store) -> None:
    app = opened("new_run")
    app.number_input(KEY + "windows").set_value(9)
    typed(app, "w=e4m3fn/")
    app.text_input(KEY + "needle_lengths").set_value("128, many").run()
    assert app.query_params == {"windows": "9", "window_length": "512", "backend": "auto"}
    app.number_input(KEY + "seed").set_value(1).run()
    assert app.text_area(KEY + "typed").value == "w=e4m3fn/"
    assert app.text_input(KEY + "needle_lengths").value == "128, many"
    app.text_input(KEY + "needle_lengths").set_value("128").run()
    assert app.query_params == {
        "windows": "9",
        "window_length": "512",
        "backend": "auto",
        "needle_lengths": "128",
        "seed": "1",
    }


def test_ways_to_choose_a_recipe_carry_it_along(store: Store) -> None:
    app = opened("new_run")
    app.checkbox(KEY + "preset_MXFP8").check()
    app.checkbox(KEY + "preset_FP8_DYNAMIC").uncheck().run()
    way = app.segmented_control(KEY + "way")
    way.set_value("Custom").run()
    assert app.selectbox(KEY + "Weights_rule").value == "rceil"
    app.segmented_control(KEY + "way").set_value("Typed").run()
    assert app.text_area(KEY + "typed").value == PRESETS["MXFP8"].text
    app.segmented_control(KEY + "way").set_value("Presets").run()
    assert app.checkbox(KEY + "preset_MXFP8").value and app.query_params["recipe"] == "MXFP8"


def test_the_builder_changes_one_part_of_a_recipe_and_keeps_all_others(store: Store) -> None:
    text = (
        "w=e4m3fn/row/te a=e4m3fn/tensor/te/static:p99.5 kv=int8/head attn=e4m3fn/tensor w[*.down_proj]=bf16 "
        "a[*.up_proj]=e5m2/row also=lm_head,embeddings skip=model.layers.[0-3].*"
    )
    app = opened("new_run", recipe=text, owner="ada")
    assert app.segmented_control(KEY + "way").value == "Custom"
    app.selectbox(KEY + "Weights_format").set_value("int8").run()
    changed = dataclasses.replace(recipe_from(text).weights, format=FORMATS["int8"])
    expected = dataclasses.replace(recipe_from(text), weights=changed)
    assert store.run(submitted(app)).recipe == expected.text


def test_nothing_to_measure_is_said_at_once_and_refused(store: Store) -> None:
    app = opened("new_run", owner="ada")
    app.button_group(KEY + "measures").set_value([]).run()
    assert [warning.value for warning in app.warning][0].startswith("No measure is chosen")
    app.button(KEY + "submit").click().run()
    assert "choose at least one of gemm" in app.error[0].value and not store.runs()


def test_a_run_without_an_owner_is_anonymous(store: Store) -> None:
    assert store.run(submitted(opened("new_run"))).owner == "anonymous"


def test_widgets_are_keyed_by_the_fields_that_they_set(store: Store) -> None:
    app = opened("new_run", measures="tasks", tasks="fp8dash_pydocs", convention="strided", stride="100")
    keyed = {element.key for element in app.main if getattr(element, "key", None)}
    missing = {name for name in FIELDS if KEY + name not in keyed} - {"device", "haystack", "model"}
    assert not missing and KEY + "haystack_single_1" in keyed


HOSTILE: list[Address] = [
    {"windows": ["many"]}, {"windows": ["0"]}, {"windows": [""]}, {"windows": ["9" * 5000]},
    {"until": ["nan"]}, {"until": ["inf"]}, {"seed": ["-1"]}, {"gemm_m": ["1", "x"]}, {"gemm_m": [""]},
    {"measures": ["<script>alert(1)</script>"]}, {"backend": ["__import__('os')"]}, {"model": [" "]},
    {"needle_kind": ["single_2"], "haystack": ["noise"]}, {"convention": ["strided"], "stride": ["512"]},
    {"tasks": ["../../etc/passwd"]}, {"recipe": ["FP8_BLOCK", "w=<b>/row"]}, {"recipe": [""]},
    {"from": ["nonesuch"], "windows": ["4"]}, {"sensitivity_budget": ["all"]}, {"device": ["tpu"]},
    {"owner": ["a" * 61]}, {"study": ["=" * 5000]},
]  # fmt: skip


@pytest.mark.parametrize("address", HOSTILE, ids=lambda address: str(address)[:40])
def test_a_wrong_address_is_one_sentence_and_the_form_as_it_first_opens(address: Address, store: Store) -> None:
    app = opened("new_run", **address)
    assert len(app.error) == 1 and not app.exception
    assert app.title[0].value.startswith(plain("FP8_DYNAMIC on SmolLM2"))
    assert app.number_input(KEY + "windows").value == 8
    assert not app.query_params
    app.run()
    assert len(app.error) == 1, "it is still to be read after a rerun"
    app.number_input(KEY + "windows").set_value(9).run()
    assert not app.error


@pytest.mark.parametrize("model", ["/" + "x" * 5000, "~nonesuch/x", "a\0b", "../../etc/passwd"], ids=lambda m: m[:8])
def test_a_model_that_no_folder_can_be_is_never_a_traceback(model: str, store: Store) -> None:
    app = opened("new_run", model=model, windows="9")
    errors = [error.value for error in app.error]
    assert not app.exception and INTERNAL not in errors

    assert app.number_input(KEY + "windows").value == (8 if errors else 9)


def test_the_button_and_the_questions_say_it(ids):
    (button,) = opened("new_run", owner="ada").button
    assert button.label == "Queue 1 run, about 1 min 38 s"
    assert "7 runs, 5 already measured. About 3 min 16 s of one worker’s time." in page_text(opened("studies"))
