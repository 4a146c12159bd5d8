"""A form that is filled in quickly, reloaded, taken back a step, and left."""

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.e2e.conftest import settled, watched, web

pytestmark = pytest.mark.browser


def field(page: Page, label: str) -> Locator:
    """A field by its label."""
    return page.get_by_label(label, exact=True)


def query(page: Page) -> dict[str, list[str]]:
    """The address's parameters."""
    return parse_qs(urlsplit(page.url).query)


def test_a_filled_form_survives_a_reload_and_follows_back_and_forward(browser: Browser, tmp_path: Path) -> None:
    with web(tmp_path) as address, watched(browser) as (page, watch):
        page.goto(f"{address}/new_run")
        settled(page)
        filled = {"Windows": "9", "Seed": "5", "Study": "The night’s", "Owner": "ada"}
        for (
            label,
            text,
        ) in filled.items():  # faster than the page is drawn: each field is left while the last one is read
            field(page, label).fill(text)
        page.keyboard.press("Tab")
        settled(page)
        page.get_by_text("INT8", exact=True).click()
        expect(page.get_by_role("button", name="Queue 2 runs")).to_be_visible()
        settled(page)
        link = {
            "windows": ["9"], "seed": ["5"], "study": ["The night’s"], "owner": ["ada"],
            "recipe": ["FP8_DYNAMIC", "INT8"], "window_length": ["512"], "backend": ["auto"],
        }  # fmt: skip
        assert query(page) == link
        page.reload()
        settled(page)
        assert query(page) == link and {label: field(page, label).input_value() for label in filled} == filled
        expect(page.get_by_role("button", name="Queue 2 runs")).to_be_visible()

        page.get_by_text("MXFP8", exact=True).click()
        expect(page.get_by_role("button", name="Queue 3 runs")).to_be_visible()
        settled(page)
        page.go_back()
        expect(page.get_by_role("button", name="Queue 2 runs")).to_be_visible()
        settled(page)
        assert query(page) == link and field(page, "Windows").input_value() == "9"
        page.go_forward()
        expect(page.get_by_role("button", name="Queue 3 runs")).to_be_visible()

        page.get_by_role("link", name="Runs").first.click()
        settled(page)
        page.get_by_role("link", name="New run").first.click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("FP8_DYNAMIC on")
        settled(page)
        assert field(page, "Windows").input_value() == "8" and query(page) == {"owner": ["ada"]}
    assert not watch.console and not watch.outside
