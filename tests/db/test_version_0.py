"""A database of version 0, as that version wrote it with real and made-up runs, opens and shows every row as before.

`tests/data/version_0.sqlite.xz` holds rows in every table: finished, failed, cancelled, running and queued runs with
all measures, a question's study, a grid, notes, pins and workers. `version_0.json.xz` is what that version's store
answered. Neither is ever made again: versions to come have to read it too.
"""

import dataclasses
import json
import lzma
import math
import sqlite3
from datetime import datetime
from pathlib import Path

import pytest

from db.board import Choice
from db.store import Store
from fp8dash.choose.request import Request
from fp8dash.choose.studies import QUESTIONS, RecipeGrid
from fp8dash.report.decoding import decodings

DATA = Path(__file__).parent.parent / "data"
ANSWERS = json.loads(lzma.decompress((DATA / "version_0.json.xz").read_bytes()))
BY_RUN = (
    "stages", "measurements", "windows", "gemm_points", "needle_cells", "artefacts", "task_items", "sensitivities",
    "ladder_points",
)  # fmt: skip


def unpack(folder: Path) -> Path:
    """The database, as a file of its own."""
    file = folder / "fp8dash.sqlite"
    file.write_bytes(lzma.decompress((DATA / "version_0.sqlite.xz").read_bytes()))
    return file


@pytest.fixture
def file(tmp_path):
    return unpack(tmp_path)


@pytest.fixture
def store(file):
    opened = Store(f"sqlite:///{file}")
    yield opened
    opened.close()


def tables(file):
    """Every table's columns and rows, the rows by their key."""
    with sqlite3.connect(file) as connection:
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = {name: [row[1] for row in connection.execute(f"PRAGMA table_info({name})")] for name in names}
        return {
            name: [dict(zip(columns[name], row, strict=True)) for row in connection.execute(f"SELECT * FROM {name}")]
            for name in names
            if name != "alembic_version"
        }


def plain(value):
    """An answer as the fixture's JSON holds it."""
    if isinstance(value, Request):
        return plain(value.to_json())
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {json.dumps(list(k)) if isinstance(k, tuple) else k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def of(old, new):
    """The new answer, cut down to what the old one has."""
    if isinstance(old, dict):
        return {key: of(old[key], new[key]) if key in new else "is gone" for key in old}
    return [of(a, b) for a, b in zip(old, new, strict=True)] if isinstance(old, list) else new


def test_it_has_rows_in_every_table_of_that_version(file):
    assert all(tables(file).values())


def test_every_row_of_every_table_keeps_every_column(file, store, tmp_path_factory):
    new, untouched = tables(file), unpack(tmp_path_factory.mktemp("untouched"))
    for name, rows in tables(untouched).items():
        assert [{column: row[column] for column in old} for old, row in zip(rows, new[name], strict=True)] == rows, name


def test_the_store_answers_as_that_version_did(store):
    ids = [run["id"] for run in ANSWERS["runs"]]
    answers = {name: plain(getattr(store, name)(ids)) for name in (*BY_RUN, "linear_shapes")}
    answers |= {"runs": plain(store.runs()), "studies": plain(store.studies()), "counts": store.counts()}
    answers |= {"profiled": [run.id for run in store.profiled(9)]}
    answers |= {"study_runs": {key: [run.id for run in store.study_runs(key)] for key in ANSWERS["study_runs"]}}
    for name, answer in answers.items():
        assert of(ANSWERS[name], answer) == ANSWERS[name], name


def test_the_leaderboards_rows_have_their_numbers_and_stand_in_the_same_groups(store):
    rows = {row["run"]: row for row in plain(store.standings(Choice()))}
    changed = {"rank", "group"}  # whom a row may be ranked with is for each version to know better
    for old in ANSWERS["standings"]:
        assert {k: v for k, v in of(old, rows[old["run"]]).items() if k not in changed} == {
            k: v for k, v in old.items() if k not in changed
        }


def test_decoding_is_read_from_columns_as_it_was_from_sentences(store):
    def flat(one):
        return {key: value for key, value in one.items() if key != "model"}

    by_run = {one["run"]: flat(one) for one in plain(decodings(store, store.runs()))}
    assert by_run == {one["run"]: flat(one) for one in ANSWERS["decodings"]}
    assert any(one["speeds"] for one in by_run.values())


def test_devices_have_their_kind(store):
    kinds = {(run.device, run.device_kind) for run in store.runs()}
    cpu, made_up = ("CPU AMD EPYC", "cpu"), ("CPU (x86-64, 2 threads)", "cpu")
    assert kinds == {cpu, made_up, ("NVIDIA H200", "cuda"), (None, None)}
    assert {(worker.device, worker.device_kind) for worker in store.workers()} == kinds - {cpu}
    assert {(row.device, row.device_kind) for row in store.standings(Choice())} == kinds


def test_a_study_asks_what_its_name_was_read_for(store):
    asked = {study.name: study.question for study in store.studies() if study.question}
    grid = RecipeGrid(("e4m3fn", "int8"), ("row",), ("float32",))
    assert asked == {grid.title: grid.question, "E4M3 or E5M2?": QUESTIONS["e4m3-e5m2"]}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_every_question_of_that_version_is_found_by_the_name_its_studies_had(question, file):
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE study SET name = ? WHERE id = 'bfcda492a5d4'", (question.question,))
    opened = Store(f"sqlite:///{file}")
    assert opened.studies(ids=["bfcda492a5d4"])[0].question == question
    opened.close()
