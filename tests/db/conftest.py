"""What several tests of the database share: two workers, the fences between them, and a run to take."""

import pytest

from db.claims import Claims
from db.store import Store
from db.workers import Workers
from fp8dash.choose.request import Request


@pytest.fixture
def workers(store: Store) -> Workers:
    """The workers “one” and “two”, in the two slots of the host “here”."""
    workers = Workers(store)
    workers.register("one", host="here", slot=0, pid=1)
    workers.register("two", host="here", slot=1, pid=2)
    return workers


@pytest.fixture
def claims(store: Store, workers: Workers) -> Claims:
    return Claims(store)


@pytest.fixture
def run(store: Store) -> str:
    """A queued run's id."""
    return store.add_run(Request(), owner="me")[0]
