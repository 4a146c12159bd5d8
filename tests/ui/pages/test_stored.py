"""A checkpoint that is measured as it is stored, from the form to the board, beside the recipe that it was made by."""

from pathlib import Path

import pytest

from db.board import Choice
from db.claims import Claims
from db.standings import rows
from db.store import Store
from db.workers import Workers
from fp8dash.choose.records import Artefact, StageResult
from fp8dash.choose.request import Request
from fp8dash.pipeline import run_stages
from fp8dash.ui.forms.address import Form, read, written
from tests.ui.drawn import opened, page_text, table_with

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # AppTest leaves its event loop to the collector


def measured(store: Store, claims: Claims, request: Request, cache: Path) -> str:
    """A run of these measures, stored as a worker stores it."""
    run_id = store.add_run(request.checked(), owner="ada")[0]
    lease = claims.claim(run_id, "one")
    assert lease is not None
    for result in run_stages(request, frozenset(), cache):
        if isinstance(result, StageResult):
            assert claims.record_stage(lease, StageResult.from_json(result.to_json()))
    claims.finish(lease, "finished")
    return run_id


def test_a_stored_checkpoint_stands_on_the_board_beside_its_recipe(
    store: Store, tiny: Path, corpus_file: Path, tmp_path: Path
) -> None:
    Workers(store).register("one", host="here", slot=0, pid=1)
    claims, cache = Claims(store), tmp_path / "cache"
    asked = Request.of(model=str(tiny), corpus=str(corpus_file), backend="emulated", windows=8, window_length=64)
    own = measured(store, claims, asked.but(recipe="FP8_DYNAMIC", measures=("perplexity", "export")), cache)
    (artefact,) = [row for row in store.artefacts([own])[own] if isinstance(row, Artefact)]
    stored = f"stored={artefact.path}"
    beside = measured(store, claims, asked.but(recipe=stored, measures=("perplexity",)), cache)
    alone = measured(store, claims, asked.but(model=artefact.path, recipe=stored, measures=("perplexity",)), cache)

    with store.session() as session:
        board = {row.run: row for row in rows(session, Choice())}
    name = f"{Path(artefact.path).name} as stored"
    assert board[beside].name == board[alone].name == name
    assert board[beside].group == board[own].group != board[alone].group
    assert board[beside].kld == board[own].kld and board[alone].kld is None and board[alone].ppl == board[own].ppl
    assert board[beside].recipe == f"{stored} w=e4m3fn/row a=e4m3fn/row"
    assert store.run(beside).request.recipe == stored, "asked again, it is read again"

    page = page_text(opened("runs", run=beside)).replace("\\", "")
    assert name in page and f"What {artefact.path} stores." in page and "Weights: E4M3FN" in page
    assert f"vllm serve {artefact.path}" in [code.value for code in opened("runs", run=beside).code]
    table = table_with(opened("runs", run=beside), "Stored as")
    assert list(table["Cast"]) == ["—", "e4m3fn/row"] or list(table["Cast"]) == ["e4m3fn/row", "—"]
    assert "FP8_DYNAMIC, compressed-tensors: " in page
    for address in ({"run": alone}, {"run": own}):
        assert not opened("runs", **address).exception
    assert name in page_text(opened("leaderboard")).replace("\\", "")
    title = opened("runs", run=alone).title[0].value
    assert f"perplexity {board[alone].ppl:.1f}, measured against no baseline" in title
    assert "No recipe keeps KLD" not in page_text(opened("leaderboard"))
    assert not opened("compare", runs=f"{own},{beside},{alone}").exception


def test_the_form_asks_for_a_checkpoint_and_its_address_brings_it_back(store: Store) -> None:
    start = Form(Request(), ())
    address = written(Form(Request(), read({"recipe": ["stored=/models/Name-FP8"]}, start).recipes), start)
    assert address["recipe"] == ["stored=/models/Name-FP8"]
    app = opened("new_run", recipe="stored=/models/Name-FP8")
    assert not app.exception
    assert next(box.value for box in app.text_input if box.label == "Checkpoint") == "/models/Name-FP8"
    assert "Name-FP8 as stored" in page_text(app).replace("\\", "")
