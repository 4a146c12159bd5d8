"""The pages, run without a browser: what they say, what they keep in the URL, what they queue."""

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import streamlit as st
from sqlalchemy import update
from streamlit.testing.v1 import AppTest

from db.store import Run, Store
from db.tables import WorkerTable
from fp8dash import places, report
from fp8dash.choose.presets import PRESETS
from fp8dash.ui.frame import INTERNAL
from fp8dash.ui.words import plain
from tests.seed import HOSTILE, fill

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # AppTest leaves its event loop to the collector
PAGES = ("leaderboard", "new_run", "runs", "compare")
PATIENCE = 60  # seconds; a page takes one at most, a shared machine may stall


def draw(first: str) -> None:
    """The app, opened on a page; runs in a script of its own."""
    from app import main

    main(first)


def opened(name: str, **query: str) -> AppTest:
    """A page, drawn once."""
    app = AppTest.from_function(draw, kwargs={"first": name}, default_timeout=PATIENCE)
    for key, value in query.items():
        app.query_params[key] = value
    return app.run()


def said(app: AppTest) -> str:
    """All text on the page."""
    kinds = ("title", "header", "markdown", "caption", "info", "success", "warning", "error")
    return "\n".join(element.value for kind in kinds for element in app.get(kind))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installation of its own."""
    monkeypatch.setenv("FP8DASH_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("FP8DASH_DATABASE_URL", raising=False)
    yield tmp_path
    st.cache_resource.clear()


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    """The installation's store."""
    found = Store(places.database_url())
    yield found
    found.close()


@pytest.fixture
def ids(store: Store) -> dict[str, str]:
    """A seeded store's runs, by name."""
    return fill(store)


def queued(store: Store) -> list[Run]:
    """The runs that wait, in the order in which they were submitted."""
    return sorted(store.runs(states=["queued"]), key=lambda run: run.created_at)


@pytest.mark.parametrize("name", PAGES)
def test_every_page_opens_on_an_empty_database(name: str) -> None:
    app = opened(name)
    assert not app.exception and not app.error
    assert app.title


@pytest.mark.parametrize("name", PAGES)
def test_every_page_opens_on_a_full_one(name: str, ids: dict[str, str]) -> None:
    app = opened(name)
    failed_run = ["cuBLASLt" in error.value for error in app.error]
    assert not app.exception and all(failed_run)
    assert app.title


def test_importing_the_app_loads_no_torch() -> None:
    code = "import sys, app; sys.exit(int(bool({'torch', 'transformers'} & set(sys.modules))))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_the_empty_leaderboard_says_what_to_do_next() -> None:
    app = opened("leaderboard")
    assert app.title[0].value == "No finished run yet"
    assert "make demo" in said(app) and app.button[0].label == "New run"


def test_the_leaderboard_answers_first(ids: dict[str, str]) -> None:
    app = opened("leaderboard")
    assert app.title[0].value == "MXFP8 loses least to BF16: KLD 0.0172 nats at 8.25 bits per weight"
    assert plain("FP8_BLOCK") in app.markdown[0].value and "0.0232 nats" in app.markdown[0].value
    assert f"Avoid {plain('FP8_E5M2')} and {plain('INT8_TENSOR')}" in app.markdown[0].value


def test_the_leaderboard_ranks_finished_casts_of_one_group_only(ids: dict[str, str]) -> None:
    table = opened("leaderboard").dataframe[0].value
    assert list(table["Recipe"])[:3] == ["BF16", "MXFP8", "FP8_BLOCK"] and len(table) == 8
    assert list(table["Rank"])[1:] == [1, 2, 3, 4, 5, 6, 7]
    assert list(table["Standing"])[:2] == ["baseline", "best"]


def test_the_group_of_a_link_is_shown(ids: dict[str, str]) -> None:
    app = opened("leaderboard", group="demo · pydocs · 8 × 512 tokens · NVIDIA H200")
    assert app.title[0].value.startswith(f"{plain('FP8_DYNAMIC')} loses least")
    assert set(app.dataframe[0].value["Device"]) == {"NVIDIA H200"}


def test_the_search_of_a_link_is_applied(ids: dict[str, str]) -> None:
    assert list(opened("leaderboard", q="mxfp8").dataframe[0].value["Recipe"]) == ["MXFP8"]


def test_a_search_without_a_hit_says_how_to_go_on(ids: dict[str, str]) -> None:
    app = opened("leaderboard", q="nothing like it")
    assert "Clear the search" in app.info[0].value and not app.dataframe


def test_preset_cards_are_queued_as_one_study(store: Store) -> None:
    app = opened("new_run", owner="ada")
    for name in ("MXFP8", "INT8"):
        app.checkbox(f"new_run_new_preset_{name}").check()
    app.run()
    assert app.title[0].value.startswith("3 recipes on SmolLM2")
    button = app.button("new_run_new_submit")
    assert button.label == "Queue 3 runs"
    button.click().run()
    runs = queued(store)
    assert {run.preset for run in runs} == {"FP8_DYNAMIC", "MXFP8", "INT8"}
    assert {(run.owner, run.study) for run in runs} == {("ada", "FP8_DYNAMIC, MXFP8 and INT8")}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_typed(name: str, store: Store) -> None:
    app = opened("new_run", owner="ada")
    app.segmented_control("new_run_new_way").set_value("Typed").run()
    app.text_area("new_run_new_typed").set_value(name.lower()).run()
    app.button("new_run_new_submit").click().run()
    assert [run.preset for run in queued(store)] == [name]


def test_the_builder_makes_the_recipe_it_shows(store: Store) -> None:
    app = opened("new_run", owner="ada")
    app.segmented_control("new_run_new_way").set_value("Custom").run()
    app.selectbox("new_run_new_Weights_format").set_value("int8")
    app.selectbox("new_run_new_Weights_tile").set_value("row")
    app.toggle("new_run_new_Activations_on").set_value(False)
    app.text_input("new_run_new_skip").set_value("*.down_proj, *.up_proj")
    app.run()
    text = "w=int8/row skip=*.down_proj,*.up_proj"
    assert app.code[0].value == text
    app.button("new_run_new_submit").click().run()
    assert [run.recipe for run in queued(store)] == [text]


def test_the_builder_casts_the_kv_cache_and_the_attention_path(store: Store) -> None:
    app = opened("new_run", owner="ada")
    app.segmented_control("new_run_new_way").set_value("Custom").run()
    app.toggle("new_run_new_Weights_on").set_value(False)
    app.toggle("new_run_new_Activations_on").set_value(False)
    app.run()
    assert len(app.error) == 1 and app.button("new_run_new_submit").disabled
    app.toggle("new_run_new_kv_on").set_value(True).run()
    assert app.code[0].value == "kv=e4m3fn/tensor   # KV_FP8"
    app.selectbox("new_run_new_kv_share").set_value("token")
    app.toggle("new_run_new_Attention_on").set_value(True).run()
    assert app.code[0].value == "kv=e4m3fn/token attn=e4m3fn/tensor"
    app.selectbox("new_run_new_kv_scale").set_value("unit").run()
    assert app.code[0].value == "kv=e4m3fn/tensor/unit attn=e4m3fn/tensor"
    app.button("new_run_new_submit").click().run()
    assert [run.recipe for run in queued(store)] == ["kv=e4m3fn/tensor/unit attn=e4m3fn/tensor"]


@pytest.mark.parametrize("typed", ["w=e9m9/row", "w=e4m3fn/seven", "hello", "w=int8/row skip=<b>"])
def test_a_recipe_that_cannot_be_is_one_sentence_and_not_queued(typed: str, store: Store) -> None:
    app = opened("new_run", owner="ada")
    app.segmented_control("new_run_new_way").set_value("Typed").run()
    app.text_area("new_run_new_typed").set_value(typed).run()
    assert len(app.error) == 1 and not app.exception
    assert app.button("new_run_new_submit").disabled


@pytest.mark.parametrize(
    ("owner", "study", "sentence"), [("", "FP8", "The owner has no name"), ("ada", " ", "The study has no name")]
)
def test_an_empty_name_is_said_and_nothing_queued(owner: str, study: str, sentence: str, store: Store) -> None:
    app = opened("new_run", owner=owner)
    app.text_input("new_run_new_study_FP8_DYNAMIC").set_value(study)
    app.button("new_run_new_submit").click().run()
    assert sentence in app.error[0].value and not store.runs()


@pytest.mark.parametrize(("field", "text"), [("gemm_m", "1, many"), ("lengths", ""), ("depths", "150")])
def test_numbers_that_cannot_be_are_said_and_not_queued(field: str, text: str, store: Store) -> None:
    app = opened("new_run", owner="ada")
    app.text_input(f"new_run_new_{field}").set_value(text).run()
    app.button("new_run_new_submit").click().run()
    assert app.error and not app.exception and not store.runs()


def test_what_is_measured_and_how_reaches_the_request(store: Store) -> None:
    app = opened("new_run", owner="ada")
    app.number_input("new_run_new_windows").set_value(4)
    app.number_input("new_run_new_length").set_value(64)
    app.text_input("new_run_new_gemm_m").set_value("8 32")
    app.selectbox("new_run_new_backend").set_value("emulated")
    app.button("new_run_new_submit").click().run()
    request = queued(store)[0].request
    assert (request.windows, request.window_length, request.gemm_m) == (4, 64, (8, 32))
    assert request.backend == "emulated"


def test_the_needles_that_are_chosen_reach_the_request_with_rulers_haystack(store: Store) -> None:
    app = opened("new_run", owner="ada")
    assert app.selectbox("new_run_new_haystack_single_1").options[0].startswith("noise")
    app.selectbox("new_run_new_needle_kind").set_value("single_2").run()
    assert not any(name.startswith("noise") for name in app.selectbox("new_run_new_haystack_single_2").options)
    app.selectbox("new_run_new_needle_kind").set_value("multikey_1").run()
    app.selectbox("new_run_new_needle_chat").set_value("off")
    app.number_input("new_run_new_needle_repeats").set_value(3)
    app.button("new_run_new_submit").click().run()
    request = queued(store)[0].request
    assert (request.needle_kind, request.haystack) == ("multikey_1", "essay")
    assert (request.needle_chat, request.needle_repeats) == ("off", 3)


def test_emulated_is_preset_where_only_cpus_work(ids: dict[str, str]) -> None:
    assert opened("new_run").selectbox("new_run_new_backend").value == "emulated"


def test_auto_is_preset_where_nobody_works_and_that_is_said() -> None:
    app = opened("new_run")
    assert app.selectbox("new_run_new_backend").value == "auto"
    assert "fp8dash worker" in app.warning[0].value


def test_a_worker_that_is_silent_is_not_alive(store: Store, ids: dict[str, str]) -> None:
    with store.session() as session:
        session.execute(update(WorkerTable).values(heartbeat_at=datetime(2020, 1, 1, tzinfo=UTC)))
    assert "No worker is alive" in opened("runs").warning[0].value


def test_a_run_again_starts_from_the_old_request(store: Store, ids: dict[str, str]) -> None:
    old = store.run(ids["running"])
    app = opened("new_run", **{"from": old.id}, owner="ada")
    assert app.code[0].value == old.recipe
    assert app.text_input(f"new_run_{old.id}_skip").value == "*.down_proj"


def test_an_unknown_run_in_a_link_is_said(ids: dict[str, str]) -> None:
    assert "There is no run" in opened("runs", run="nonesuch").error[0].value
    assert "There is no run" in opened("compare", runs="nonesuch,other").error[0].value
    assert "There is no run" in opened("new_run", **{"from": "nonesuch"}).error[0].value


def test_runs_say_state_stage_and_failure(ids: dict[str, str]) -> None:
    app = opened("runs")
    assert app.title[0].value == "15 runs: 1 queued, 1 running, 11 finished, 1 failed and 1 cancelled"
    assert "cuBLASLt refuses" in app.error[0].value
    assert ":blue-badge[**perplexity 42 %**]" in said(app) and ":red-badge[quantize failed]" in said(app)


def test_what_a_user_named_is_shown_letter_for_letter(ids: dict[str, str]) -> None:
    app = opened("runs")
    assert plain(HOSTILE) in [header.value for header in app.header]
    assert "<script>" not in said(app)


def test_cancel_asks_once_and_then_cancels(store: Store, ids: dict[str, str]) -> None:
    run = ids["queued"]
    app = opened("runs")
    app.button(f"runs_cancel_{run}").click().run()
    assert store.run(run).state == "queued" and "Cancel it?" in said(app)
    app.button(f"runs_yes_{run}").click().run()
    assert store.run(run).state == "cancelled"


def test_retry_queues_a_failed_run_again(store: Store, ids: dict[str, str]) -> None:
    opened("runs").button(f"runs_retry_{ids['failed']}").click().run()
    assert store.run(ids["failed"]).state == "queued"


def test_a_log_opens_in_place(ids: dict[str, str]) -> None:
    places.log_file(ids["failed"]).write_text("first\nlast <b>line</b>\n", "utf-8")
    app = opened("runs")
    app.toggle(f"runs_log_{ids['failed']}").set_value(True).run()
    assert app.code[0].value == "first\nlast <b>line</b>"


def test_one_run_is_shown_in_full(ids: dict[str, str]) -> None:
    app = opened("runs", run=ids["MXFP8"])
    assert app.title[0].value == "MXFP8 loses 0.0172 nats to BF16"
    numbers = app.dataframe[0].value.set_index("What")
    assert numbers.loc["Δ ln PPL", "95 % interval"].startswith("[+0.00")
    assert "210 weights were cast, 1 kept." in said(app)
    assert "over 6 cells; minus BF16’s on the same prompts −0.02" in said(app)


def test_a_comparison_says_who_leads_and_what_ties(ids: dict[str, str]) -> None:
    app = opened("compare", runs=f"{ids['BF16']},{ids['MXFP8']},{ids['FP8_BLOCK']}")
    assert app.title[0].value == "MXFP8 loses least to BF16 (KLD 0.0172 nats)"
    assert "**0.0172**" in said(app) and "tied: MXFP8" in said(app)
    assert "| Run | Cells | ln p (nats a token) | minus BF16 | minus MXFP8 |" in said(app)
    assert "No needle differs from BF16’s on the same prompts." in said(app)
    app = opened("compare", runs=f"{ids['MXFP8']},{ids['INT8_TENSOR']}")  # no baseline among them
    assert "Share found minus BF16’s on the same prompts:" in said(app)


def test_unlike_runs_are_warned_of(ids: dict[str, str]) -> None:
    app = opened("compare", runs=f"{ids['MXFP8']},{ids['H200 FP8_TENSOR']}")
    warned = "\n".join(warning.value for warning in app.warning)
    assert "Different devices" in warned and "Different backends" in warned


def test_recipes_differences_are_spelled_out(ids: dict[str, str]) -> None:
    app = opened("compare", runs=f"{ids['FP8_BLOCK']},{ids['MXFP8']}")
    assert plain("e4m3fn/1x32/rceil") + ", not " + plain("e4m3fn/128x128") in said(app)


def test_a_run_without_numbers_can_be_compared(ids: dict[str, str]) -> None:
    app = opened("compare", runs=f"{ids['MXFP8']},{ids['failed']}")
    assert not app.exception and not app.error


def test_a_database_of_a_newer_version_is_said_in_a_sentence(store: Store) -> None:
    with store.session() as session:
        session.connection().exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    app = opened("leaderboard")
    assert "newer fp8dash" in app.error[0].value and not app.exception


def test_a_defect_is_an_internal_error_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a secret of the machine")

    monkeypatch.setattr(report, "standings", broken)
    app = opened("leaderboard")
    assert [error.value for error in app.error] == [INTERNAL] and not app.exception
    assert "secret" not in said(app)
