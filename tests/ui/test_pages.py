"""The pages, run without a browser: what they say, what they keep in the URL, what they queue."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, update
from streamlit.testing.v1 import AppTest

from db.records import ROW_TABLES, row_values
from db.standings import stand
from db.store import Store
from db.tables import MeasurementTable, RunTable, StandingTable, WorkerTable
from fp8dash import places
from fp8dash.choose.architecture import KNOWN
from fp8dash.choose.presets import PRESETS
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.records import Measurement, Row, TaskItem
from fp8dash.choose.windows import Reading
from fp8dash.predict.accelerators import ACCELERATORS
from fp8dash.predict.roofline import Plan
from fp8dash.report.numbers import DASH
from fp8dash.report.planned import CONTEXT
from fp8dash.ui.frame import INTERNAL
from fp8dash.ui.parts import board_table
from fp8dash.ui.words import plain
from tests.bench.board import build
from tests.seed import HOSTILE, PERCENTILES
from tests.ui.drawn import board, opened, page_text, queued, table_with, widget

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # AppTest leaves its event loop to the collector
PAGES = ("leaderboard", "new_run", "runs", "compare", "studies", "tensors", "planner", "formats", "guide")


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
    assert "make demo" in page_text(app) and widget(app, "leaderboard_new_run").label == "New run"


def test_the_leaderboard_answers_first(ids: dict[str, str]) -> None:
    app = opened("leaderboard", q="")
    assert app.title[0].value == plain("Ship INT8 on CPU (x86-64, 2 threads): KLD 0.0303 nats, 1.71× BF16 measured")
    numbers, leaders = (app.markdown[i].value.replace("\\", "") for i in (0, 1))
    assert numbers.startswith("Δ ln PPL +0.0189") and "163 MB" in numbers
    assert leaders.startswith("MXFP8 loses least: KLD 0.0172 nats; next is FP8_BLOCK, +0.00600 [+0.00")
    assert "Avoid FP8_E5M2 and INT8_TENSOR" in leaders


def test_the_answer_says_why_each_other_recipe_lost(ids: dict[str, str]) -> None:
    text = page_text(opened("leaderboard")).replace("\\", "")
    assert "| INT8_TENSOR | 1.21 | 1.83 | over budget: KLD 1.21 nats, limit 0.0500 |" in text
    assert "| FP8_TENSOR | 0.0322 | 0.42 | slower: 0.42× BF16, not 1.71× |" in text
    assert "| MXFP8 | 0.0172 | — | its speed on this target is not known |" in text


def test_the_budget_and_the_target_of_a_link_decide(ids: dict[str, str]) -> None:
    app = opened("leaderboard", limit="0.025")
    assert app.title[0].value.startswith("Ship MXFP8 on CPU") and "speed not known" in app.title[0].value
    assert "smallest within the budget" in page_text(app)
    app = opened("leaderboard", budget="Δ ln PPL", limit="0.015", target="NVIDIA H200")
    assert app.title[0].value == plain("Ship FP8_DYNAMIC on NVIDIA H200: KLD 0.0291 nats, 1.55× BF16 measured")
    assert "Speeds are those known for NVIDIA H200" in page_text(app)
    app = opened("leaderboard", limit="0.001")
    assert app.title[0].value == plain("No recipe keeps KLD of demo within 0.00100 nats")


@pytest.mark.parametrize(
    ("batch", "decides"),
    [
        (1, "fastest within the budget, as predicted"),
        (64, "smallest within the budget, since no recipe is predicted to be"),
    ],
)
def test_an_accelerator_that_nobody_measured_is_predicted_and_says_so(
    batch: int, decides: str, ids: dict[str, str]
) -> None:
    app = opened("leaderboard", target="H200 SXM, predicted", batch=str(batch))
    title, text = app.title[0].value.replace("\\", ""), page_text(app).replace("\\", "")
    name = title.split()[1]
    model, h200 = KNOWN["SmolLM2-135M-Instruct"], ACCELERATORS["H200 SXM"]
    base, cast = (Plan(model, recipe, h200).decode_s(batch, CONTEXT) for recipe in (Recipe(), PRESETS[name].recipe))
    assert title.startswith(f"Ship {name} on H200 SXM: KLD") and decides in text
    assert title.endswith(f"{base / cast:.2f}× BF16 predicted for decoding at batch {batch}")
    assert f"× BF16, predicted for decoding at batch {batch}" in text
    assert "Speeds are those known for H200 SXM" in text


def test_a_model_of_unknown_architecture_has_no_predicted_speed(store: Store, ids: dict[str, str]) -> None:
    with store.session() as session:
        session.execute(update(RunTable).values(model="org/other"))
        session.execute(update(StandingTable).values(model="org/other"))
    app = opened("leaderboard", target="H200 SXM, predicted")
    assert not app.exception and not app.error and "speed not known" in app.title[0].value


def test_the_comparison_shows_how_divergence_spreads_over_tokens_and_what_was_noted(
    store: Store, ids: dict[str, str]
) -> None:
    store.annotate(ids["INT8"], "spoils <b>rare</b> tokens", "ada")
    app = opened("compare", runs=f"{ids['FP8_BLOCK']},{ids['INT8']}", windows="KLD by token")
    figures = [json.loads(chart.proto.spec) for chart in app.get("plotly_chart")]
    lines = [trace for trace in figures[0]["data"] if trace["x"][0] == "10 %"]
    assert [trace["name"] for trace in lines] == ["FP8_BLOCK", "INT8"]
    assert lines[0]["x"] == list(PERCENTILES[2:]) and lines[0]["y"] == sorted(lines[0]["y"])
    assert f"Note by ada: {plain('spoils <b>rare</b> tokens')}" in page_text(app)


def test_one_recipe_beside_the_baseline_is_said_as_its_loss(ids: dict[str, str]) -> None:
    app = opened("compare", runs=f"{ids['BF16']},{ids['INT8']}")
    assert app.title[0].value == "INT8 loses 0.0303 nats to BF16"
    app = opened("runs", run=ids["INT8"])
    assert app.title[0].value == "INT8 loses 0.0303 nats to BF16"
    assert (
        app.markdown[0]
        .value.replace("\\", "")
        .startswith("Δ ln PPL +0.0189 [+0.0120, +0.0258] nats; needles 1.000; 163")
    )


def test_every_model_has_its_answer(store: Store, ids: dict[str, str]) -> None:
    with store.session() as session:
        for run in (ids["H200 FP8_TENSOR"], ids["H200 FP8_DYNAMIC"]):
            session.execute(update(RunTable).where(RunTable.id == run).values(model="org/other", model_hash="other"))
            session.execute(update(StandingTable).where(StandingTable.run_id == run).values(model="org/other"))
            stand(session, run)
    text = page_text(opened("leaderboard")).replace("\\", "").replace("\u2060", "")
    assert "- **org/other**: Ship FP8_DYNAMIC on NVIDIA H200: KLD 0.0291 nats, 1.55× BF16 measured." in text
    app = opened("leaderboard", model="org/other")
    assert app.title[0].value.startswith(f"Ship {plain('FP8_DYNAMIC')} on NVIDIA H200")


def test_a_first_visit_is_told_three_lines_and_a_link_is_not(ids: dict[str, str]) -> None:
    app = opened("leaderboard")
    assert app.markdown[0].value.count("\n") == 2
    app.button("leaderboard_welcomed").click().run()
    assert app.markdown[0].value.startswith("Δ ln PPL")
    assert opened("leaderboard", q="mxfp8").markdown[0].value.startswith("Δ ln PPL")


def test_a_board_of_many_runs_is_read_page_by_page(store: Store, ids: dict[str, str]) -> None:
    build(Path(places.data_dir()), 600)
    app = opened("leaderboard", model="model-00")
    first = board(app)
    assert len(first) == board_table.PAGE + 1 and list(first["Rank"])[1] == 1
    second = board(opened("leaderboard", model="model-00", page="2"))
    assert list(second["Rank"])[1] == board_table.PAGE + 1
    assert list(first["KLD (nats)"])[-1] <= list(second["KLD (nats)"])[1]


def test_the_order_the_columns_and_the_pins_live_in_the_address(store: Store, ids: dict[str, str]) -> None:
    store.pin(ids["INT8"])
    table = board(opened("leaderboard", sort="GEMM speed-up"))
    assert list(table["Recipe"])[1:3] == ["INT8_TENSOR", "★ INT8"]
    app = opened("leaderboard", pins="Pinned", columns="Recipe")
    assert list(board(app)["Recipe"]) == ["BF16", "★ INT8"]
    assert app.multiselect("columns").value == ["Recipe"]


def test_the_leaderboard_ranks_finished_casts_of_one_group_only(ids: dict[str, str]) -> None:
    table = board(opened("leaderboard"))
    assert list(table["Recipe"])[:3] == ["BF16", "MXFP8", "FP8_BLOCK"] and len(table) == 8
    assert list(table["Rank"])[1:] == [1, 2, 3, 4, 5, 6, 7]
    assert list(table["Standing"])[:2] == ["baseline", "best"]


def test_the_group_of_a_link_is_shown(ids: dict[str, str]) -> None:
    app = opened("leaderboard", device="NVIDIA H200")
    assert app.title[0].value.startswith(f"Ship {plain('FP8_DYNAMIC')} on NVIDIA H200")
    assert set(board(app)["Device"]) == {"NVIDIA H200"}


def test_the_search_of_a_link_is_applied(ids: dict[str, str]) -> None:
    assert list(board(opened("leaderboard", q="mxfp8"))["Recipe"]) == ["MXFP8"]


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


def test_how_perplexity_is_read_is_chosen_and_a_stride_only_where_windows_overlap(store: Store) -> None:
    app = opened("new_run", owner="ada")
    assert app.number_input("new_run_new_stride").disabled
    app.selectbox("new_run_new_convention").set_value("strided")
    app.selectbox("new_run_new_bos").set_value("bos")
    app.number_input("new_run_new_until").set_value(0.002).run()
    app.number_input("new_run_new_stride").set_value(128).run()
    app.button("new_run_new_submit").click().run()
    (run,) = queued(store)
    assert (run.request.reading, run.request.windows.until) == (Reading("strided", 128, "bos"), 0.002)
    again = opened("new_run", **{"from": run.id})
    assert again.number_input("new_run_new_stride").value == 128
    assert "strided by 128, BOS, until ±0.002 nats" in page_text(opened("runs", run=run.id))


def test_a_runs_page_lists_the_divergence_of_its_tokens(store: Store, ids: dict[str, str]) -> None:
    run = ids["MXFP8"]
    numbers = {"kld_low": ("", 0.001), "kld_noise_floor": ("", 0.002), "delta_p_rms": ("", 0.03)}
    rows = [Measurement(name, value, "nats", "", "m", "emulated", label) for name, (label, value) in numbers.items()]
    labels = ["minimum", "0.1 %", "25 %", "median", "75 %", "99.9 %", "maximum"]
    for name, left_out in (("kld", ("25 %", "75 %")), ("kld_reverse", ("25 %", "75 %")), ("delta_p", ())):
        kept = [label for label in labels if label not in left_out]
        rows += [Measurement(f"{name}_tokens", 0.1, "nats", "", "m", "emulated", label) for label in kept]
    with store.session() as session:
        for row in rows:
            session.execute(insert(MeasurementTable).values(row_values(run, "perplexity", row)))
    app = opened("runs", run=run)
    (table,) = (t.value for t in app.dataframe if "Δp of the true token" in t.value)
    assert list(table["Tokens"]) == labels and set(table["Δp of the true token"]) == {"+0.100"}
    assert list(table["KLD, BF16 to run (nats)"]).count(DASH) == 2  # it has no quartiles
    assert "0.00200 nats from BF16: this run is indistinguishable from BF16." in page_text(app)


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
    ("owner", "study", "sentence"),
    [(" ", "FP8", "The owner has no readable name"), ("ada", " ", "The study has no readable name")],
)
def test_an_empty_name_is_said_and_nothing_queued(owner: str, study: str, sentence: str, store: Store) -> None:
    app = opened("new_run", owner=owner)
    app.text_input("new_run_new_study").set_value(study)
    app.button("new_run_new_submit").click().run()
    assert sentence in app.error[0].value and not store.runs()


@pytest.mark.parametrize(("field", "text"), [("gemm_m", "1, many"), ("needle_lengths", ""), ("needle_depths", "150")])
def test_numbers_that_cannot_be_are_said_and_not_queued(field: str, text: str, store: Store) -> None:
    app = opened("new_run", owner="ada")
    app.text_input(f"new_run_new_{field}").set_value(text).run()
    app.button("new_run_new_submit").click().run()
    assert app.error and not app.exception and not store.runs()


def test_what_is_measured_and_how_reaches_the_request(store: Store) -> None:
    app = opened("new_run", owner="ada")
    app.number_input("new_run_new_windows").set_value(4)
    app.number_input("new_run_new_window_length").set_value(64)
    app.text_input("new_run_new_gemm_m").set_value("8 32")
    app.selectbox("new_run_new_backend").set_value("emulated")
    app.button("new_run_new_submit").click().run()
    request = queued(store)[0].request
    assert (request.windows.count, request.windows.length, request.gemm.m) == (4, 64, (8, 32))
    assert request.backend == "emulated"


def test_tasks_are_named_with_their_documents_and_prompt(store: Store) -> None:
    app = opened("new_run", owner="ada")
    app.button_group("new_run_new_measures").set_value(["perplexity", "tasks"]).run()
    app.button("new_run_new_submit").click().run()
    assert "No task is given" in app.error[0].value and not queued(store)
    app.multiselect("new_run_new_tasks").set_value(["fp8dash_pydocs", "hellaswag"])
    app.number_input("new_run_new_task_limit").set_value(40)
    app.selectbox("new_run_new_task_precision").set_value("float32")
    app.button("new_run_new_submit").click().run()
    (run,) = queued(store)
    assert run.request.tasks.names == ("fp8dash_pydocs", "hellaswag") and run.request.measures == (
        "perplexity",
        "tasks",
    )
    assert (run.request.tasks.limit, run.request.tasks.precision, run.request.tasks.prompt) == (40, "float32", "plain")


def test_tasks_are_shown_with_their_errors_and_compared_document_by_document(ids: dict[str, str], store: Store) -> None:
    hits = {"BF16": [1.0] * 40, "FP8_BLOCK": [1.0] * 39 + [0.0], "INT8_TENSOR": [1.0] * 20 + [0.0] * 20}
    with store.session() as session:
        for name, values in hits.items():
            rows: list[Row] = [TaskItem("arc_easy", "acc", i, str(i), value, 1.0, "") for i, value in enumerate(values)]
            about = ("share", "higher", "lm-eval 0.4.13, arc_easy", "emulated", "arc_easy", "40 of 2,376 documents")
            rows.append(Measurement("task_acc", sum(values) / 40, *about))
            rows.append(Measurement("task_acc_stderr", 0.0123, *about))
            for row in rows:
                session.execute(insert(ROW_TABLES[type(row)]).values(row_values(ids[name], "tasks", row)))
    (table,) = (t.value for t in opened("runs", run=ids["FP8_BLOCK"]).dataframe if "Standard error" in t.value)
    assert table.loc[0, ["Task", "Metric", "Value", "Standard error"]].tolist() == [
        "arc_easy",
        "acc",
        "0.975",
        "0.0123",
    ]
    text = page_text(opened("compare", runs=",".join(ids[name] for name in hits)))
    (line,) = (line for line in text.splitlines() if plain("arc_easy") in line and line.startswith("|"))
    tied, apart = line.split("|")[4:6]
    assert "0.975" in tied and "tied" in tied and plain("−0.0250") in tied
    assert "0.500" in apart and "tied" not in apart and plain("−0.500 [−0.") in apart


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
    assert (request.needles.kind, request.needles.haystack) == ("multikey_1", "essay")
    assert (request.needles.chat, request.needles.repeats) == ("off", 3)


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
    assert app.text_input("new_run_new_skip").value == "*.down_proj"


def test_an_unknown_run_in_a_link_is_said(ids: dict[str, str]) -> None:
    assert "There is no run nonesuch" in opened("runs", run="nonesuch").warning[0].value
    assert "There is no run nonesuch\\, other" in opened("compare", runs="nonesuch,other").warning[0].value
    assert "There is no run" in opened("new_run", **{"from": "nonesuch"}).error[0].value


def test_runs_say_state_stage_and_failure(ids: dict[str, str]) -> None:
    app = opened("runs")
    assert app.title[0].value == "15 runs: 1 queued, 1 running, 11 finished, 1 failed and 1 cancelled"
    assert "cuBLASLt refuses" in app.error[0].value
    assert ":blue-badge[**perplexity 42 %**]" in page_text(app) and ":red-badge[quantize failed]" in page_text(app)


def test_what_a_user_named_is_shown_letter_for_letter(ids: dict[str, str]) -> None:
    app = opened("runs")
    assert plain(HOSTILE) in [header.value for header in app.header]
    assert "<script>" not in page_text(app)


def test_cancel_asks_once_and_then_cancels(store: Store, ids: dict[str, str]) -> None:
    run = ids["queued"]
    app = opened("runs")
    app.button(f"runs_cancel_{run}").click().run()
    assert store.run(run).state == "queued" and "Cancel this run?" in page_text(app)
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
    assert app.query_params["log"] == [ids["failed"]] or app.query_params["log"] == ids["failed"]
    assert opened("runs", log=ids["failed"]).code[0].value == app.code[0].value


def test_the_runs_are_paged_and_searched_in_the_database(store: Store, ids: dict[str, str]) -> None:
    build(Path(places.data_dir()), 60)
    assert len([b for b in opened("runs").button if str(b.key).startswith("runs_open_")]) == 25
    assert len([b for b in opened("runs", page="3").button if str(b.key).startswith("runs_open_")]) == 25
    assert len([b for b in opened("runs", find="down_proj ada").button if str(b.key).startswith("runs_open_")]) == 2


def test_a_note_and_a_pin_are_kept_for_everyone(store: Store, ids: dict[str, str]) -> None:
    app = opened("runs", run=ids["MXFP8"])
    app.text_area("run_note_").set_value("**ships** in May")
    app.text_input("owner").set_value("ada")
    app.button("run_note_save").click().run()
    app.toggle("run_pinned").set_value(True).run()
    app = opened("runs", run=ids["MXFP8"])
    assert app.info[0].value == plain("**ships** in May") and app.toggle("run_pinned").value
    app.button("run_note_save").click().run()
    assert app.error[0].value.startswith("The author of the note has no readable name")


def test_a_run_says_what_to_type_to_serve_it(ids: dict[str, str]) -> None:
    app = opened("runs", run=ids["FP8_DYNAMIC"])
    codes = [code.value for code in app.code]
    assert "vllm serve CHECKPOINT" in codes and any('scheme="FP8_DYNAMIC"' in code for code in codes)
    assert "CHECKPOINT stands for the folder" in page_text(app)


def test_one_run_is_shown_in_full(ids: dict[str, str]) -> None:
    app = opened("runs", run=ids["MXFP8"])
    assert app.title[0].value == "MXFP8 loses 0.0172 nats to BF16"
    numbers = table_with(app, "Measurement", "Method").set_index("Measurement")
    assert numbers.loc["Δ ln PPL", "95 % interval"].startswith("[+0.00")
    assert "210 weights were cast, 1 kept. Areas show parameter counts." in page_text(app)
    assert "Weights: E4M3FN, one per 32 of a row, scales rceil. Activations: E4M3FN" in page_text(app).replace("\\", "")
    assert "over 6 cells; difference from BF16 on the same prompts: −0.02" in page_text(app)
    made = next(table.value for table in app.dataframe if "Recipe" in set(table.value.get("Fact", ())))
    assert made.set_index("Fact").loc["Version of torch", "Value"] == "2.13.0"


def test_a_comparison_says_who_leads_and_what_ties(ids: dict[str, str]) -> None:
    app = opened("compare", runs=f"{ids['BF16']},{ids['MXFP8']},{ids['FP8_BLOCK']}")
    assert app.title[0].value == "MXFP8 loses least to BF16 (KLD 0.0172 nats)"
    assert "**0.0172**" in page_text(app) and "tied: MXFP8" in page_text(app)
    assert "| Run | Cells | ln p (nats per token) | minus BF16 | minus MXFP8 |" in page_text(app)
    assert "All needle scores equal BF16’s on the same prompts." in page_text(app)
    app = opened("compare", runs=f"{ids['MXFP8']},{ids['INT8_TENSOR']}")  # no baseline among them
    assert "Share found minus BF16’s on the same prompts:" in page_text(app)


def traces(app: AppTest, key: str) -> list[dict[str, Any]]:
    """What a figure draws, as its page sent it to the browser."""
    (figure,) = (chart for chart in app.get("plotly_chart") if chart.proto.id.endswith(f"-{key}"))
    drawn: list[dict[str, Any]] = json.loads(figure.proto.spec)["data"]
    return drawn


def test_decoding_is_drawn_and_its_ratios_said_in_words(ids: dict[str, str]) -> None:
    app = opened("compare", runs=",".join(ids[f"H200 {name}"] for name in ("BF16", "FP8_TENSOR", "FP8_DYNAMIC")))
    lines = traces(app, "compare_decode")
    assert [line["name"] for line in lines] == ["BF16", "FP8_TENSOR", "FP8_DYNAMIC"]
    assert all(line["x"] == [1, 8, 64] for line in lines)
    assert lines[1]["y"] == pytest.approx([1.3 * y for y in lines[0]["y"]])
    assert len(traces(app, "compare_decode_gaps")) == 6
    rows = [
        line for line in page_text(app).replace("\\", "").splitlines() if "tied: FP8_TENSOR, FP8_DYNAMIC; 1.30×" in line
    ]
    assert [row.split("|")[1].strip() for row in rows] == ["1", "8", "64"] and "**793** | **768**" in rows[0]


def test_decoding_on_another_device_is_named_and_not_drawn_over(ids: dict[str, str]) -> None:
    app = opened("compare", runs=",".join(ids[name] for name in ("BF16", "H200 BF16", "H200 FP8_TENSOR", "MXFP8")))
    assert len(traces(app, "compare_decode")) == 2
    text = page_text(app).replace("\\", "")
    assert "is not drawn: it was measured on another device: CPU (x86-64, 2 threads), not NVIDIA H200." in text
    assert "MXFP8 has no decoding speed: layers are emulated, whose time says nothing about a kernel" in text


def test_a_run_is_drawn_beside_the_newest_baseline_of_its_device(ids: dict[str, str]) -> None:
    app = opened("runs", run=ids["H200 FP8_TENSOR"])
    fp8, bf16 = traces(app, "run_decode")
    assert fp8["y"] == pytest.approx([1.3 * y for y in bf16["y"]])
    text = page_text(app).replace("\\", "")
    assert "FP8_TENSOR: 1.30× BF16" in text and "on NVIDIA H200: 128 tokens in, 64 out; a CUDA graph" in text


def test_an_emulated_run_says_why_it_has_no_decoding_speed(ids: dict[str, str]) -> None:
    app = opened("runs", run=ids["MXFP8"])
    assert "MXFP8 has no decoding speed: layers are emulated" in page_text(app).replace("\\", "")
    assert "run_decode" not in str([chart.proto.id for chart in app.get("plotly_chart")])


def test_unlike_runs_are_warned_of(ids: dict[str, str]) -> None:
    app = opened("compare", runs=f"{ids['MXFP8']},{ids['H200 FP8_TENSOR']}")
    warned = "\n".join(warning.value for warning in app.warning)
    assert "Different devices" in warned and "Different backends" in warned


def test_recipes_differences_are_spelled_out(ids: dict[str, str]) -> None:
    app = opened("compare", runs=f"{ids['FP8_BLOCK']},{ids['MXFP8']}")
    assert plain("e4m3fn/1x32/rceil") + ", not " + plain("e4m3fn/128x128") in page_text(app)


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

    monkeypatch.setattr(Store, "groups", broken)
    app = opened("leaderboard")
    assert [error.value for error in app.error] == [INTERNAL] and not app.exception
    assert "secret" not in page_text(app)


def test_a_run_that_cannot_be_drawn_hides_no_other(store: Store, ids: dict[str, str]) -> None:
    with store.session() as session:
        session.execute(update(RunTable).where(RunTable.id == ids["MXFP8"]).values(state="hibernating"))
    app = opened("runs")
    assert not app.exception
    assert len([b for b in app.button if str(b.key).startswith("runs_open_")]) >= len(ids) - 1


def test_a_run_of_a_newer_version_is_listed_with_the_reason_and_hides_no_other(
    store: Store, ids: dict[str, str]
) -> None:
    newer = ids["MXFP8"]
    with store.session() as session:
        session.execute(update(RunTable).where(RunTable.id == newer).values(request={"phase_of_the_moon": "full"}))
    app = opened("runs")
    assert not app.exception and widget(app, f"runs_again_{newer}").disabled
    opens = {str(b.key) for b in app.button if str(b.key).startswith("runs_open_")}
    assert {f"runs_open_{newer}", f"runs_open_{ids['FP8_BLOCK']}"} <= opens
    page = opened("runs", run=newer)
    reason = plain(store.run(newer).unreadable)
    assert reason and not page.exception and page.title and reason in [warning.value for warning in page.warning]
