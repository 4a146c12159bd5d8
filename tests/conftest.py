"""What several tests share: the tiny model and corpus, made once, and a store of their own."""

import pytest

from db.store import Store
from tests.seed import fill
from tests.tiny import write_corpus, write_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The folder of the tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory):
    """A text long enough for the tiny model's windows."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def loaded(tiny):
    """The tiny model, loaded anew for each test: casting changes it."""
    import torch

    from fp8dash.model.load import load

    return load(tiny, torch.device("cpu"))


@pytest.fixture
def store(tmp_path):
    """An empty store in a file."""
    opened = Store(f"sqlite:///{tmp_path / 'fp8dash.sqlite'}")
    yield opened
    opened.close()


@pytest.fixture
def ids(store):
    """A seeded store's runs, by name."""
    return fill(store)
