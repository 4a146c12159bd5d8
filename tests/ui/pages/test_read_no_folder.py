"""The web process reads no folder that an address names: workers do, and what they found is in the database."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import update

from db.store import Store
from db.tables import LayerTable, RunTable
from fp8dash.choose.catalog import estimate, shape_of
from fp8dash.choose.presets import PRESETS
from fp8dash.report.recorded import recorded_shape
from tests.ui.drawn import opened, page_text

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # AppTest leaves its event loop to the collector
TOUCHES = ("open", "os.listdir", "os.scandir", "os.chdir")
_watched: list[tuple[str, list[str]]] = []  # a folder's path, and what was touched in it


def _hook(event: str, args: tuple[object, ...]) -> None:
    if _watched and event in TOUCHES:
        folder, touched = _watched[-1]
        if str(args[0]).startswith(folder):
            touched.append(f"{event} {args[0]}")


sys.addaudithook(_hook)  # stays for the process: it does nothing unless a folder is watched


@contextmanager
def touches(folder: Path) -> Iterator[list[str]]:
    """What is opened or listed in a folder meanwhile."""
    touched: list[str] = []
    _watched.append((str(folder), touched))
    try:
        yield touched
    finally:
        _watched.pop()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a configuration that never ends, had anyone read it."""
    path = tmp_path / "model"
    path.mkdir()
    os.mkfifo(path / "config.json")
    os.mkfifo(path / "model.safetensors")
    return path


@pytest.mark.parametrize("page", ["new_run", "leaderboard", "studies", "planner"])
def test_a_page_touches_no_folder_of_its_address(page: str, model: Path, store: Store) -> None:
    with touches(model) as touched:
        app = opened(page, model=str(model), corpus=str(model / "config.json"), ask_model=str(model))
    assert not app.exception and not touched


def test_the_form_does_not_tell_a_folder_that_exists_from_one_that_does_not(model: Path, store: Store) -> None:
    there = page_text(opened("new_run", model=str(model)))
    missing = page_text(opened("new_run", model=str(model.parent / "other" / "model")))
    assert there == missing and "known after this model’s first run that casts weights" in there


def test_what_a_run_recorded_of_a_model_is_what_the_form_reckons_with(store: Store, ids: dict[str, str]) -> None:
    assert recorded_shape(store, "/models/mine") is None
    with store.session() as session:
        session.execute(update(RunTable).where(RunTable.id == ids["FP8_BLOCK"]).values(model="/models/mine"))
        names = session.query(LayerTable.name).where(LayerTable.run_id == ids["FP8_BLOCK"]).count()
    shape = recorded_shape(store, "/models/mine")
    assert shape and len(shape.weights) == names
    recorded = estimate(PRESETS["FP8_BLOCK"].recipe, shape)
    assert 0 < recorded.coverage <= 1 and recorded.size_bytes < recorded.baseline_bytes


def test_the_catalogues_models_are_known_without_a_run(store: Store) -> None:
    assert recorded_shape(store, "demo") == shape_of("demo")
