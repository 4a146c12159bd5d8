"""The store: migrations, what it refuses, and what it says when the database is in the way."""

import math
import sqlite3
import threading
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, insert

from db import store as store_module
from db.store import Store, row_values
from db.tables import Base, MeasurementTable
from fp8dash.choose.records import Measurement, NeedleCell, Request
from fp8dash.errors import InvalidChoice, StoreError


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
        run |= {"id": "r", "request": "{}", "facts": "{}", "attempt": 0, "stage_share": 0.0, "study_id": None}
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
    config.set_main_option("script_location", str(Path(store_module.__file__).parent / "migrations"))
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
    monkeypatch.setattr(store_module, "BUSY_SECONDS", 0.1)
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
            store.add_study("x" * 4_000, "me")
    assert store.run(run_id).state == "queued"
    store.close()


@pytest.mark.parametrize("url", ["no-such-scheme://x", "", "sqlite:////proc/nowhere/a.sqlite"])
def test_a_database_that_cannot_be_is_a_sentence(url):
    with pytest.raises(StoreError):
        Store(url)


def test_identical_active_requests_are_one_run_and_ended_ones_are_not(store):
    first, new = store.add_run(Request(recipe="fp8_dynamic"), owner="me")
    assert new and store.add_run(Request(recipe="w=e4m3fn/row a=e4m3fn/token"), owner="you") == (first, False)
    assert store.add_run(Request(recipe="FP8_BLOCK"), owner="me")[1]
    assert store.last_like(Request(recipe="FP8_DYNAMIC")).id == first


def test_empty_names_are_refused_with_what_to_do(store):
    with pytest.raises(InvalidChoice, match="The study has no name: give it one"):
        store.add_study("  ", "me")
    with pytest.raises(InvalidChoice, match="The owner has no name"):
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
    (found,) = store.measurements([run_id])[run_id]
    assert found == row or (math.isnan(found.value) and math.isnan(value))


def test_names_are_data_never_sql(store):
    evil = "'); DROP TABLE run; --"
    study = store.add_study(evil, evil)
    run_id, _ = store.add_run(Request(model=evil), owner=evil, study_id=study)
    assert (store.run(run_id).study, store.run(run_id).model) == (evil, evil)
