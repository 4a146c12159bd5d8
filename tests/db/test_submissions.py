"""How runs come in: which requests are the same, what changed files mean for it, many at once, others' rows."""

import os
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import event, insert, update

from db.columns import clean
from db.records import ROW_TABLES, row_values
from db.store import Store
from db.tables import RunTable
from fp8dash.choose.records import Measurement, NeedleCell
from fp8dash.choose.request import Request
from fp8dash.cli import main
from fp8dash.report import comparison
from tests.seed import HOSTILE

HOSTILE_TEXT = "7\x00 \ud800 " + HOSTILE


def finished(store: Store, request: Request, model_hash: str, corpus_hash: str = "text", **values: object) -> str:
    run_id, _ = store.add_run(request, owner="ada")
    now = datetime.now(UTC)
    ended = {"state": "finished", "request_key": None, "started_at": now, "finished_at": now}
    with store.session() as session:
        hashes = {"model_hash": model_hash, "corpus_hash": corpus_hash}
        session.execute(update(RunTable).where(RunTable.id == run_id).values(**ended | hashes | values))
    return run_id


@pytest.mark.parametrize("what", ["model", "corpus"])
def test_a_run_of_other_content_at_the_same_path_is_not_the_same(store: Store, what: str) -> None:
    first, second = Request(recipe="INT8"), Request(recipe="FP8_BLOCK")
    old = finished(store, first, "old", "old")
    assert store.last_like(first).id == old
    finished(store, second, *(("new", "old") if what == "model" else ("old", "new")))
    assert store.last_like(first) is None
    again = finished(store, first, *(("new", "old") if what == "model" else ("old", "new")))
    assert store.last_like(first).id == again


def test_a_run_of_another_path_says_nothing_of_this_one(store: Store) -> None:
    first = Request(recipe="INT8")
    old = finished(store, first, "one")
    finished(store, replace(first, model="org/other"), "another")
    assert store.last_like(first).id == old


@pytest.mark.parametrize("changed", ["model.safetensors", "tokenizer.json", None])
def test_files_that_were_written_since_make_a_run_no_answer(store: Store, tmp_path: Path, changed: str | None) -> None:
    model, corpus = tmp_path / "model", tmp_path / "corpus.txt"
    model.mkdir()
    for file in (model / "model.safetensors", model / "tokenizer.json", corpus):
        file.write_text("as measured")
    wait_for_a_tick(tmp_path)
    request = Request(model=str(model), corpus=str(corpus))
    run_id = finished(store, request, "one")
    wait_for_a_tick(tmp_path)
    (model / "README.md").write_text("nothing that is read")
    assert store.last_like(request).id == run_id
    file = model / changed if changed else corpus
    file.write_text("written since")
    os.utime(file, (0, 0))  # as a copy that keeps its times has it
    assert store.last_like(request) is None


def wait_for_a_tick(folder: Path) -> None:
    """Until a file written now is later than now."""
    now = time.time()
    probe = folder / "probe"
    while True:
        probe.write_text("x")
        if probe.stat().st_mtime > now:
            return


def test_many_runs_come_in_by_few_statements(store: Store) -> None:
    requests = [Request.of(recipe="INT8", seed=seed) for seed in range(300)]
    statements = []
    event.listen(store._engine, "before_cursor_execute", lambda *sent: statements.append(sent[2]))
    ids = store.add_runs([*requests, requests[7]], owner="ada", study="many")
    assert len(set(ids)) == 300 and ids[300] == ids[7] and len(statements) < 20
    (study,) = store.studies()
    assert [run.request.seed for run in store.study_runs(study.id)] == list(range(300))
    assert store.add_runs(requests, owner="bob", study="again") == ids[:300]


@pytest.mark.parametrize("values", [{"from_the_future": 1}, {"windows": [[1]]}, [], "nonsense"])
def test_a_request_of_another_version_is_shown_as_such_among_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], values: object
) -> None:
    monkeypatch.setenv("FP8DASH_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("FP8DASH_DATABASE_URL", raising=False)
    store = Store(f"sqlite:///{tmp_path / 'fp8dash.sqlite'}")
    foreign, _ = store.add_run(Request(recipe="INT8"), owner="ada")
    own, _ = store.add_run(Request(recipe="FP8_BLOCK"), owner="ada")
    with store.session() as session:
        stored = Request(recipe="INT8").to_json() | values if isinstance(values, dict) else values
        session.execute(update(RunTable).where(RunTable.id == foreign).values(request=stored))
    runs = {run.id: run for run in store.runs()}
    assert (runs[own].unreadable, runs[foreign].recipe) == ("", "w=int8/row a=int8/row")
    is_read = isinstance(values, dict) and "windows" in values  # unchecked: what it means is for the child to refuse
    assert is_read or "another version of fp8dash" in runs[foreign].unreadable
    assert {row.run for row in comparison.standings(store, states=("queued",))} == {own, foreign}
    store.close()
    assert main(["runs"]) == 0
    listed = capsys.readouterr().out
    assert own in listed and foreign in listed and (is_read or "update fp8dash" in listed)


def test_any_text_is_kept_and_found_again(store: Store) -> None:
    run_id, _ = store.add_run(Request(), owner="ada")
    kept = clean(HOSTILE_TEXT)
    rows = (NeedleCell(256, 50, 1.0, 250, HOSTILE_TEXT, HOSTILE_TEXT),
            Measurement("kld", 0.1, "nats", "lower", HOSTILE_TEXT, "native", note=HOSTILE_TEXT))  # fmt: skip
    with store.session() as session:
        for row in rows:
            session.execute(insert(ROW_TABLES[type(row)]).values(row_values(run_id, "needle", row)))
        session.execute(update(RunTable).values(error=HOSTILE_TEXT, message=HOSTILE_TEXT, facts={"said": HOSTILE_TEXT}))
    store.annotate(run_id, HOSTILE_TEXT, "ada")
    assert (store.run(run_id).error, store.run(run_id).message) == (kept, kept)
    (cell,) = store.needle_cells([run_id])[run_id]
    (measurement,) = store.measurements([run_id])[run_id]
    assert (cell.answer, cell.expected, measurement.note) == (kept, kept, kept)
    assert "\0" not in kept and kept.encode()
    for lost in ("\x00", "\ud800"):
        assert store.runs(search=lost) is not None and store.measurements([lost])[lost] == []


def test_every_column_of_text_takes_any_text() -> None:
    for table in RunTable.metadata.tables.values():
        for column in table.columns:
            bind = column.type.bind_processor(event_dialect()) if column.type.python_type is str else None
            assert column.type.python_type is not str or (bind and bind("a\0b\udc80") == "a␀b\\udc80"), column


def event_dialect():
    """The dialect of a server that refuses NUL."""
    from sqlalchemy.dialects import postgresql

    return postgresql.dialect()
