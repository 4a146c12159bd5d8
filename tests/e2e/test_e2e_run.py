"""The whole product: runs queued in the browser, made by a real worker, found on every page, compared, downloaded."""

import csv
import io
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from db.store import Store
from tests.e2e.conftest import faults, process, settled, watched, web
from tests.tiny import write_corpus, write_tiny_model

pytestmark = pytest.mark.browser
TRIES = 5
PATHS = (
    "", "new_run?from={INT8}", "runs", "runs?run={FP8_DYNAMIC}", "compare?runs={FP8_DYNAMIC},{INT8}", "studies",
    "studies?question=granularity&runs={FP8_DYNAMIC},{INT8}", "tensors?run={INT8}", "planner", "formats", "guide",
)  # fmt: skip
RUN_SECONDS = 240  # two runs of the tiny model take about 40 s where nothing else runs


def type_in(page: Page, label: str, text: str) -> None:
    """Fill a field and leave it, as a person does."""
    page.get_by_label(label, exact=True).fill(text)
    page.get_by_label(label, exact=True).press("Enter")
    settled(page)


def choose(page: Page, label: str, option: str) -> None:
    """Pick an option of a select box."""
    for _ in range(TRIES):
        settled(page)
        page.get_by_role("combobox", name=label).press("ArrowDown")  # a click on its text does not open it
        try:
            page.get_by_role("option", name=option).click(timeout=3_000)
        except PlaywrightTimeout:  # a redraw of the page closed the list again
            continue
        settled(page)
        return
    raise AssertionError(f"{label} did not open")


def submit(page: Page, model: Path, corpus: Path) -> None:
    """Queue FP8_DYNAMIC and INT8 on the tiny model, with as little to measure as there is."""
    page.get_by_test_id("stButtonGroup").get_by_text("Local folder").click()
    type_in(page, "Folder", str(model))
    page.get_by_text("INT8", exact=True).click()
    choose(page, "Corpus", "A text file")
    type_in(page, "Path on the worker", str(corpus))
    type_in(page, "Windows", "4")
    type_in(page, "Tokens per window", "64")
    page.get_by_test_id("stButtonGroup").get_by_text("Tensor profile").click()
    settled(page)
    page.get_by_text("GEMM sizes and needles").click()
    type_in(page, "GEMM M (tokens)", "8")
    type_in(page, "Needle lengths (tokens)", "512")
    type_in(page, "Needle depths (%)", "0, 100")
    type_in(page, "Owner", "ada")
    page.get_by_role("button", name="Queue 2 runs").click()


def test_a_run_from_the_form_to_the_spreadsheet(browser: Browser, tmp_path: Path) -> None:
    model, corpus = write_tiny_model(tmp_path / "model"), write_corpus(tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    with web(data) as address, process([sys.executable, "-m", "jobs.worker"], data), watched(browser) as (page, watch):
        page.goto(f"{address}/new_run")
        settled(page)
        submit(page, model, corpus)
        title = page.get_by_role("heading", level=1)
        expect(title).to_contain_text("2 runs", timeout=30_000)
        expect(title).to_have_text("2 runs: 2 finished", timeout=RUN_SECONDS * 1000)

        page.get_by_role("link", name="Leaderboard").click()
        expect(title).to_contain_text("Ship ", timeout=30_000)
        with page.expect_download() as download:
            page.get_by_role("button", name="Download CSV").click()
        download.value.save_as(tmp_path / "got.csv")
        rows = {row["preset"]: row for row in csv.DictReader(io.StringIO((tmp_path / "got.csv").read_text("utf-8")))}

        page.goto(f"{address}/compare?runs={rows['FP8_DYNAMIC']['run']},{rows['INT8']['run']}")
        expect(title).to_contain_text("KLD", timeout=30_000)
        expect(page.get_by_role("heading", name="Every metric")).to_be_visible()
        ids = {preset: row["run"] for preset, row in rows.items()}
        for path in PATHS:  # every page, on what these runs wrote
            page.goto(f"{address}/{path.format(**ids)}")
            assert not faults(settled(page)), path
    assert not watch.console and not watch.outside

    store = Store(f"sqlite:///{data / 'fp8dash.sqlite'}")
    try:
        for row in rows.values():
            kept = {m.name: m.value for m in store.measurements([row["run"]])[row["run"]] if not m.label}
            assert float(row["kld (nats)"]) == pytest.approx(kept["kld"]) and row["owner"] == "ada"
            assert float(row["bits_per_weight (bits)"]) == pytest.approx(kept["bits_per_weight"])
    finally:
        store.close()
