"""Ten people at once on one server while runs are made: nobody sees an error, and everybody sees the end."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from db.claims import Claims
from db.rows import FINISHED
from db.store import Store
from db.workers import Workers
from fp8dash.choose.presets import PRESETS
from fp8dash.choose.records import Progress, StageResult
from fp8dash.choose.request import Request
from tests.e2e.conftest import SERVER, served
from tests.seed import CPU, fill, rows_of

pytestmark = pytest.mark.browser
STEPS, PAUSE = 4, 0.5  # how often a stage says how far it is, and the seconds between: a real worker waits one
PATIENCE = 120_000  # milliseconds: ten browsers on a shared machine draw in 12 s, ten times that beside other load
FACTS = {"model_hash": "5f1d3c0a9b7e", "corpus_hash": "c0ffee123456", "device": CPU, "backend": "emulated"}
MEBIBYTES = 400  # of the web process, which shows numbers and computes none
PATHS = (
    "runs", "", "runs", "compare", "runs?find=person", "new_run", "studies", "planner", "runs?state=finished", "guide",
)  # fmt: skip


def write(store: Store, worker: str, enough: threading.Event) -> int:
    """A worker's writes until it is enough: the store's own claims, progress, stages, ends. The number of runs."""
    claims = Claims(store)
    Workers(store).register(worker, host="bench-1", slot=3, pid=1)
    made = 0
    while not enough.is_set():
        made += 1
        run_id, _ = store.add_run(Request.of(recipe="FP8_DYNAMIC", seed=made), owner=f"person {made}")
        claim = claims.claim(run_id, worker)
        assert claim
        for stage, rows in rows_of("FP8_DYNAMIC", PRESETS["FP8_DYNAMIC"].recipe, CPU).items():
            for step in range(STEPS):
                assert claims.progress(claim, Progress(stage, step, STEPS, f"step {step}"))
                enough.wait(PAUSE)
            assert claims.record_stage(claim, StageResult(stage, 1.0, tuple(rows), FACTS))
        assert claims.finish(claim, FINISHED)
    return made


def test_ten_people_at_once_see_no_error_no_lock_and_no_stale_run(browser: Browser, tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'fp8dash.sqlite'}")
    fill(store)
    with store.session() as session:  # the seed's own unfinished runs would be running for ever
        session.connection().exec_driver_sql("UPDATE run SET state = 'cancelled' WHERE state IN ('running', 'queued')")
    enough, errors = threading.Event(), list[str]()
    with served(tmp_path) as (address, server), ThreadPoolExecutor(1) as pool:
        contexts = [browser.new_context(viewport={"width": 1280, "height": 800}) for _ in PATHS]
        pages = [context.new_page() for context in contexts]
        for page in pages:
            page.set_default_timeout(PATIENCE)
            page.on("pageerror", lambda error: errors.append(str(error)))
        writing = pool.submit(write, store, "w-writer", enough)
        for path, page in zip(PATHS, pages, strict=True):
            page.goto(f"{address}/{path}", wait_until="commit")
        for page in pages:
            _drawn(page)
        enough.set()
        made = writing.result(120)
        for path, page in zip(PATHS, pages, strict=True):
            if path.startswith("runs"):  # left open all the while
                title = f"{15 + made} runs: {11 + made} finished, 1 failed and 3 cancelled"
                expect(page.get_by_role("heading", level=1)).to_have_text(title, timeout=PATIENCE)
                expect(page.get_by_role("progressbar")).to_have_count(0, timeout=PATIENCE)
            _drawn(page)
        log = (tmp_path / f"{SERVER}.out").read_text("utf-8")
        resident = int(re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{server}/status").read_text())[0]) / 1024
        loaded = Path(f"/proc/{server}/maps").read_text()
        for context in contexts:
            context.close()
    store.close()
    assert not errors
    assert "Uvicorn server started" in log
    assert "locked" not in log and "fp8dash" not in log  # Streamlit itself logs a socket that a reader closed
    assert resident < MEBIBYTES and "libtorch" not in loaded


def _drawn(page: Page) -> None:
    page.get_by_role("heading", level=1).first.wait_for()
    for text in ("Internal error", "locked", "Traceback", "Connection error"):
        assert page.get_by_text(text).count() == 0, text
