"""The pages in a browser, on a seeded database: no error, nothing fetched from outside, no barrier, links that hold."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from db.store import Store
from tests.e2e.conftest import faults, settled, watched, web
from tests.seed import HOSTILE, fill

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A seeded installation's runs; its folder is under the key `folder`."""
    folder = tmp_path_factory.mktemp("seeded")
    store = Store(f"sqlite:///{folder / 'fp8dash.sqlite'}")
    runs = fill(store)
    store.close()
    return runs | {"folder": str(folder)}


@pytest.fixture(scope="module")
def address(ids: dict[str, str]) -> Iterator[str]:
    """The dashboard on the seeded installation."""
    with web(Path(ids["folder"])) as url:
        yield url


PATHS = {
    "leaderboard": "",
    "new_run": "new_run",
    "runs": "runs",
    "run": "runs?run={INT8_TENSOR}",
    "compare": "compare?runs={MXFP8},{INT8_TENSOR},{H200 FP8_TENSOR}",
    "empty_compare": "compare",
    "again": "new_run?from={running}",
    "studies": "studies",
    "study": "studies?question=granularity&runs={MXFP8},{FP8_BLOCK},{INT8_TENSOR}",
    "tensors": "tensors?run={BF16}&layer=model.layers.3.mlp.down_proj",
    "planner": "planner",
    "roofline": "planner?figure=Roofline&model=DeepSeek-V3&gpus=8&recipes=FP8_BLOCK",
    "guide": "guide",
    "formats": "formats",
    "cast": "formats?view=Cast+a+few+numbers",
    "scale_rules": "formats?view=Scale+rules&amax=500",
    "all_formats": "formats?view=All+formats",
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PATHS)
def test_a_page_opens_without_error_outside_request_or_barrier(
    name: str, scheme: str, address: str, ids: dict[str, str], browser: Browser
) -> None:
    with watched(browser, color_scheme=scheme) as (page, watch):
        page.goto(f"{address}/{PATHS[name].format(**ids)}")
        settled(page)
        assert not faults(page)
    assert not watch.console and not watch.outside


def test_a_link_with_a_selection_restores_it_and_leads_to_the_comparison(
    address: str, ids: dict[str, str], browser: Browser
) -> None:
    runs = f"{ids['MXFP8']},{ids['FP8_BLOCK']}"
    with watched(browser) as (page, _):
        settled(page.goto(f"{address}/?runs={runs}") and page)
        page.get_by_role("button", name="Compare 2 runs").click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("MXFP8 loses least to BF16", timeout=30_000)
        page.wait_for_url(f"**/compare?runs={runs.replace(',', '%2C')}")
        address_of_screen = page.url
        title = page.get_by_role("heading", level=1).inner_text()
    with watched(browser) as (page, _):
        page.goto(address_of_screen)
        expect(page.get_by_role("heading", level=1)).to_have_text(title, timeout=30_000)


def test_filters_live_in_the_address(address: str, browser: Browser) -> None:
    with watched(browser) as (page, _):
        page.goto(address)
        settled(page)
        page.get_by_label("Search", exact=True).fill("mxfp8")
        page.get_by_label("Search", exact=True).press("Enter")
        expect(page.get_by_text("1 run, best KLD first")).to_be_visible(timeout=20_000)
        page.get_by_test_id("stButtonGroup").get_by_text("KLD against bits per weight").click()
        page.wait_for_url("**/?*x=KLD*")
        linked = page.url
    with watched(browser) as (page, _):
        page.goto(linked)
        expect(page.get_by_text("1 run, best KLD first")).to_be_visible(timeout=30_000)
        expect(page.get_by_label("Search", exact=True)).to_have_value("mxfp8", timeout=30_000)


def test_the_downloaded_csv_has_the_rows_on_the_screen(address: str, browser: Browser, tmp_path: Path) -> None:
    with watched(browser) as (page, _):
        page.goto(address)
        settled(page)
        with page.expect_download() as download:
            page.get_by_role("button", name="Download CSV").click()
        download.value.save_as(tmp_path / "got.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "got.csv").read_text("utf-8"))))
    assert len(rows) == 8
    assert {row["preset"]: float(row["kld (nats)"]) for row in rows}["MXFP8"] == 0.0172


def test_a_number_and_a_clicked_bit_live_in_the_address(address: str, browser: Browser) -> None:
    with watched(browser) as (page, _):
        page.goto(f"{address}/formats")
        settled(page)
        page.get_by_label("Number or code", exact=True).fill("448")
        page.get_by_label("Number or code", exact=True).press("Enter")
        page.wait_for_url("**/formats?*number=448*")
        expect(page.get_by_role("heading", level=1)).to_contain_text("448 becomes 448")
        settled(page)
        page.locator("[class*=st-key-formats_bit_mantissa_7] button").locator("visible=true").click()
        page.wait_for_url("**/formats?*number=0x7F*")
        linked = page.url
    with watched(browser) as (page, _):
        page.goto(linked)
        expect(page.get_by_role("heading", level=1)).to_have_text("0x7F is NaN in E4M3FN", timeout=30_000)


def test_a_name_full_of_markup_is_shown_letter_for_letter(address: str, browser: Browser) -> None:
    with watched(browser) as (page, watch):
        page.goto(f"{address}/runs")
        settled(page)
        texts = [text.replace("\u2060", "") for text in page.get_by_role("heading", level=2).all_inner_texts()]
        assert HOSTILE in texts
        assert page.locator("h2 a, h2 code, h2 strong, h2 script").count() == 0
    assert not watch.console


def test_cancel_is_asked_once_then_done(address: str, ids: dict[str, str], browser: Browser) -> None:
    with watched(browser) as (page, _):
        page.goto(f"{address}/runs?state=queued")
        settled(page)
        page.get_by_role("button", name="Cancel", exact=True).click()
        page.get_by_role("button", name="Yes, cancel").click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("2 cancelled", timeout=20_000)


def test_a_narrow_window_scrolls_no_page_sideways(address: str, ids: dict[str, str], browser: Browser) -> None:
    with watched(browser) as (page, _):
        page.set_viewport_size({"width": 1024, "height": 800})
        for path in PATHS.values():
            page.goto(f"{address}/{path.format(**ids)}")
            settled(page)
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, path
