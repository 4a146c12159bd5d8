"""The store: migrations, what it refuses, and what it says when the database is in the way."""

import math
import sqlite3
import threading
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, delete, insert, select, update

from db import opened as opened_module
from db.board import Choice
from db.records import row_values
from db.standings import stand
from db.store import Store
from db.submissions import request_key
from db.tables import Base, MeasurementTable, RunTable, StandingTable, StudyTable, WorkerTable
from fp8dash.choose.records import Measurement, NeedleCell
from fp8dash.choose.request import Request
from fp8dash.errors import InvalidChoice, StoreError
from fp8dash.stats import pareto_front
from tests.seed import fill


def test_the_migrations_lead_to_the_tables(tmp_path):
    url = f"sqlite:///{tmp_path / 'a.sqlite'}"
    Store(url).close()
    with create_engine(url).connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def test_needles_of_the_first_schema_keep_their_grades_and_have_no_new_ones(tmp_path):
    file = tmp_path / "a.sqlite"
    _at_revision(f"sqlite:///{file}", "0001")
    with sqlite3.connect(file) as connection:
        run = {c[1]: "" for c in connection.execute("PRAGMA table_info(run)")}
        run |= {
            "id": "r",
            "request": '{"windows": 8, "window_length": 512}',
            "facts": "{}",
            "attempt": 0,
            "stage_share": 0.0,
            "study_id": None,
        }
        run |= {"worker_id": None, "created_at": "2026-01-01 00:00:00", "started_at": None, "finished_at": None}
        connection.execute(f"INSERT INTO run ({','.join(run)}) VALUES ({','.join('?' * len(run))})", [*run.values()])
        columns = "run_id, stage, length, depth, score, prompt_tokens, expected, answer"
        connection.execute(f"INSERT INTO needle_cell ({columns}) VALUES ('r', 'needle', 256, 50, 1.0, 250, '7', '7')")
    store = Store(f"sqlite:///{file}")
    assert store.needle_cells(["r"])["r"] == [NeedleCell(256, 50, 1.0, 250, "7", "7")]
    store.close()
    _at_revision(f"sqlite:///{file}", "0001")  # and back


def _at_revision(url, revision):
    """The database moved to a revision of the schema, up or down."""
    config = Config()
    config.set_main_option("script_location", str(Path(opened_module.__file__).parent / "migrations"))
    with create_engine(url).connect() as connection:
        config.attributes["connection"] = connection
        current = MigrationContext.configure(connection).get_current_revision()
        (command.downgrade if current else command.upgrade)(config, revision)
        connection.commit()


def test_many_processes_may_open_a_new_database_at_once(tmp_path):
    url, errors = f"sqlite:///{tmp_path / 'a.sqlite'}", []

    def opened():
        try:
            Store(url).close()
        except StoreError as error:
            errors.append(error)

    threads = [threading.Thread(target=opened) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_database_is_private_and_in_wal_mode(store, tmp_path):
    file = tmp_path / "fp8dash.sqlite"
    assert file.stat().st_mode & 0o777 == 0o600
    with sqlite3.connect(file) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_database_of_a_newer_version_is_refused_and_untouched(tmp_path):
    file = tmp_path / "a.sqlite"
    Store(f"sqlite:///{file}").close()
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StoreError, match="newer fp8dash .revision 9999.: update fp8dash. Nothing changed"):
        Store(f"sqlite:///{file}")
    with sqlite3.connect(file) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == ("9999",)


def test_a_locked_database_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(opened_module, "BUSY_SECONDS", 0.1)
    file = tmp_path / "a.sqlite"
    store = Store(f"sqlite:///{file}")
    holder = sqlite3.connect(file, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked by another program"):
        store.add_study("name", "owner")
    holder.execute("ROLLBACK")
    holder.close()
    assert store.add_study("name", "owner")
    store.close()


def test_a_full_disk_is_a_sentence_and_nothing_is_lost(tmp_path):
    file = tmp_path / "a.sqlite"
    store = Store(f"sqlite:///{file}")
    run_id, _ = store.add_run(Request(), owner="me")
    with store.session() as session:
        session.connection().exec_driver_sql("PRAGMA max_page_count = 1")  # SQLite's own word for a full disk
    with pytest.raises(StoreError, match="is full: free some space and try again; nothing was lost"):
        for _ in range(200):
            store.add_study("x" * 400, "me")
    assert store.run(run_id).state == "queued"
    store.close()


@pytest.mark.parametrize("url", ["no-such-scheme://x", "", "sqlite:////proc/nowhere/a.sqlite"])
def test_a_database_that_cannot_be_is_a_sentence(url):
    with pytest.raises(StoreError):
        Store(url)


def test_identical_active_requests_are_one_run_and_ended_ones_are_not(store):
    first, new = store.add_run(Request.of(recipe="fp8_dynamic"), owner="me")
    assert new and store.add_run(Request.of(recipe="w=e4m3fn/row a=e4m3fn/token"), owner="you") == (first, False)
    assert store.add_run(Request.of(recipe="FP8_BLOCK"), owner="me")[1]
    assert store.last_like(Request.of(recipe="FP8_DYNAMIC")).id == first


def test_empty_names_are_refused_with_what_to_do(store):
    with pytest.raises(InvalidChoice, match="The study has no readable name: give one"):
        store.add_study("  ", "me")
    with pytest.raises(InvalidChoice, match="The owner has no readable name"):
        store.add_run(Request(), owner="")


def test_an_unknown_run_is_a_sentence(store):
    with pytest.raises(StoreError, match="There is no run nope"):
        store.run("nope")


@pytest.mark.parametrize("value", [1.5, None, math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_kept_as_what_it_is(store, value):
    run_id, _ = store.add_run(Request(), owner="me")
    row = Measurement("kld", value, "nats", "lower", "m", "emulated")
    with store.session() as session:
        session.execute(insert(MeasurementTable).values(row_values(run_id, "perplexity", row)))
    (measurement,) = store.measurements([run_id])[run_id]
    assert measurement == row or (math.isnan(measurement.value) and math.isnan(value))


def columns(store, table, *without):
    names = [column.name for column in table.__table__.columns if column.name not in without]
    with store.session() as session:
        rows = session.scalars(select(table)).all()
        return sorted([tuple(getattr(row, name) for name in names) for row in rows], key=str)


def test_the_migration_fills_the_rows_that_the_product_writes(tmp_path):
    file = tmp_path / "a.sqlite"
    store = Store(f"sqlite:///{file}")
    fill(store)
    written, keys = columns(store, StandingTable), columns(store, RunTable)
    store.close()
    _at_revision(f"sqlite:///{file}", "0006")  # as it was before
    store = Store(f"sqlite:///{file}")
    assert columns(store, StandingTable) == written and len(written) == 15
    assert columns(store, RunTable) == keys
    store.close()


def test_a_standing_written_again_is_the_same(store, ids):
    before = columns(store, StandingTable)
    with store.session() as session:
        for run_id in ids.values():
            stand(session, run_id)
    assert columns(store, StandingTable) == before


def test_a_choice_narrows_and_its_ranks_stay_those_among_all_peers(store, ids):
    names = {run: name for name, run in ids.items()}

    def chosen_names(**choice):
        return [names[row.run] for row in store.standings(Choice(states=("finished",), **choice))]

    assert chosen_names(formats=("int8",)) == ["INT8", "INT8_TENSOR"]
    assert chosen_names(tiles=("128x128",)) == ["FP8_BLOCK"]
    assert chosen_names(owners=("grace",)) == ["H200 BF16", "H200 FP8_DYNAMIC", "H200 FP8_TENSOR"]
    assert chosen_names(devices=("NVIDIA H200",), backends=("native",)) == ["H200 FP8_DYNAMIC", "H200 FP8_TENSOR"]
    assert chosen_names(search="TILES mxfp8") == ["MXFP8"] and chosen_names(search="%") == []
    assert chosen_names(backends=("emulated",), sort="gemm_speedup", order="descending", limit=2) == [
        "INT8_TENSOR",
        "INT8",
    ]
    assert chosen_names(backends=("emulated",), limit=2, offset=1) == ["FP8_BLOCK", "FP8_DYNAMIC"]
    (row,) = store.standings(Choice(ids=(ids["FP8_BLOCK"],)))
    assert row.rank == 2
    assert store.standing_count(Choice(states=("finished",), formats=("int8",), limit=1)) == 2
    with pytest.raises(InvalidChoice, match="cannot be sorted by “kld; DROP TABLE run”"):
        store.standings(Choice(sort="kld; DROP TABLE run"))


def test_the_front_in_sql_is_the_front_of_the_points(store):
    fill(store)
    choice = Choice(states=("finished",), backends=("emulated",))
    rows = store.standings(choice)
    for x, sign, better in (("gemm_speedup", 1, "higher"), ("model_bytes", -1, "lower")):
        measured = [row for row in rows if getattr(row, x) is not None]
        best = pareto_front([(row.kld, sign * getattr(row, x)) for row in measured])
        assert [row.run for row in store.front(choice, x, better)] == [measured[i].run for i in best]


def test_of_each_recipe_the_newest_finished_run_may_be_shipped(store, ids):
    with store.session() as session:
        session.execute(update(RunTable).values(worker_id=None, request_key=None))  # so that all can be queued again
        session.execute(delete(WorkerTable))
    again = fill(store, now=datetime(2030, 1, 1, tzinfo=UTC))
    groups = {group.key: group for group in store.groups()}
    assert sorted(group.count for group in store.groups()) == [2, 2, 4, 14]
    newest = {row.run for row in store.newest_by_recipe(list(groups))}
    assert newest == {run for name, run in again.items() if name not in ("failed", "cancelled", "running", "queued")}
    assert not newest & set(ids.values())


def test_a_note_bears_who_and_when_and_a_pin_is_asked_for(store):
    run_id = fill(store)["MXFP8"]
    store.annotate(run_id, " ships in May ", "ada")
    store.pin(run_id)
    (row,) = store.standings(Choice(pins=(True,)))
    assert (row.run, row.note, row.note_by, row.pinned) == (run_id, "ships in May", "ada", True)
    assert row.note_at[:4] == str(datetime.now(UTC).year)
    store.annotate(run_id, "", "")
    store.unpin(run_id)
    (row,) = store.standings(Choice(ids=(run_id,)))
    assert (row.note, row.note_by, row.note_at, row.pinned) == ("", "", "", False)
    for note, by, message in (
        ("x", " ", "author of the note has no readable name"),
        ("x" * 2001, "ada", "2,001 characters"),
    ):
        with pytest.raises(InvalidChoice, match=message):
            store.annotate(run_id, note, by)
    with pytest.raises(StoreError, match="There is no run nope"):
        store.pin("nope")


def test_a_submission_of_duplicates_alone_makes_no_study(store):
    twice = [Request.of(recipe="INT8"), Request.of(recipe="w=int8/channel a=int8/token"), Request.of(recipe="MXFP8")]
    first = store.add_runs(twice, owner="ada", study="Tiles")
    assert first[0] == first[1] != first[2]
    assert store.add_runs(twice, owner="bob", study="The same") == first
    assert [row[1] for row in columns(store, StudyTable)] == ["Tiles"]
    new = store.add_runs([*twice, Request()], owner="bob", study="And one more")
    assert new[:3] == first and store.run(new[3]).study == "And one more"


def test_a_request_is_like_one_from_before_its_newest_field():
    before = Request.from_json({})  # means what was done then, whatever the default is today
    assert request_key(before) == request_key(Request.from_json(before.to_json())) == sha256(b"{}").hexdigest()
    assert request_key(Request.of(seed=1)) != request_key(Request())


def test_names_are_data_never_sql(store):
    evil = "'); DROP TABLE run; --"
    study = store.add_study(evil, f"/models/{evil}")
    run_id, _ = store.add_run(Request(model=f"/models/{evil}"), owner=evil, study_id=study)
    assert (store.run(run_id).study, store.run(run_id).model) == (evil, f"/models/{evil}")


def test_runs_whose_decoding_was_timed_are_found_by_device_and_backend(store, ids):
    native_runs = store.decoded(["NVIDIA H200"], ["native"], limit=9)
    assert {run.id for run in native_runs} == {ids["H200 FP8_TENSOR"], ids["H200 FP8_DYNAMIC"]}
    assert [run.id for run in store.decoded(["NVIDIA H200"], ["baseline"], limit=9)] == [ids["H200 BF16"]]
    assert (
        store.decoded(["NVIDIA B200"], ["native"], limit=9) == []
        and len(store.decoded(["NVIDIA H200"], ["native"], limit=1)) == 1
    )
