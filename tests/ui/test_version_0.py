"""Every page opens on a database of version 0, and so does each of its runs and studies."""

from pathlib import Path

import pytest

from db.store import Store
from fp8dash import places
from tests.db.test_version_0 import ANSWERS, unpack
from tests.ui.drawn import opened

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # AppTest leaves its event loop to the collector
PAGES = ("leaderboard", "new_run", "runs", "compare", "studies", "tensors", "planner", "formats", "guide")
BY_STATE = {run["state"]: run["id"] for run in ANSWERS["runs"]}
MEASURED = [run for run, sensitivities in ANSWERS["sensitivities"].items() if sensitivities]
DECODED = [one["run"] for one in ANSWERS["decodings"] if one["speeds"]][:3]
VIEWS = (
    *((name, {}) for name in PAGES),
    *(("runs", {"run": run}) for run in (*BY_STATE.values(), *MEASURED)),
    *(("studies", {"study": study["id"]}) for study in ANSWERS["studies"] if "Grid" in study["name"]),
    *(("studies", {"study": study["id"]}) for study in ANSWERS["studies"] if "?" in study["name"]),
    ("compare", {"runs": ",".join(DECODED)}),
)


@pytest.mark.parametrize(("page", "address"), VIEWS)
def test_every_page_opens_on_what_version_0_left(page: str, address: dict[str, str], folder: Path) -> None:
    Store(f"sqlite:///{unpack(folder)}").close()
    assert (folder / "fp8dash.sqlite").as_posix() in places.database_url()
    app = opened(page, **address)
    own = {run["error"] for run in ANSWERS["runs"] if run["error"]}
    assert not app.exception and app.title
    assert all(any(error.value.replace("\\", "") in text for text in own) for error in app.error)
