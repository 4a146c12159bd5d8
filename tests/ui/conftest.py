"""An installation of its own for each test of a page."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import streamlit as st

from db.store import Store
from fp8dash import places


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
    opened = Store(places.database_url())
    yield opened
    opened.close()
