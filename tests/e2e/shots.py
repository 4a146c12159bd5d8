"""Makes the README's pictures: `python -m tests.e2e.shots ADDRESS FOLDER`, with the dashboard serving at ADDRESS."""

import csv
import sys
import urllib.parse
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tests.e2e.conftest import ARGS, CHROMIUM, settled

WIDTH, TALLEST = 1440, 2000


def main(address: str, folder: Path) -> None:
    """One picture a page; the comparison is of the three best rows of the leaderboard."""
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        _shoot(page, f"{address}/", folder / "leaderboard.png")
        best = _best(page)
        _shoot(page, f"{address}/new_run", folder / "new_run.png")
        _shoot(page, f"{address}/runs", folder / "runs.png", tallest=900)
        if len(best) > 1:
            _shoot(page, f"{address}/compare?runs={urllib.parse.quote(','.join(best))}", folder / "compare.png")
            _shoot(page, f"{address}/runs?run={best[0]}", folder / "run.png")
        browser.close()


def _shoot(page: Page, url: str, file: Path, tallest: int = TALLEST) -> None:
    page.set_viewport_size({"width": WIDTH, "height": 900})
    page.goto(url)
    settled(page).wait_for_timeout(2_000)  # until the tables have their heights
    height = page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight")
    page.set_viewport_size({"width": WIDTH, "height": max(600, min(tallest, height + 10))})
    settled(page).screenshot(path=str(file))


def _best(page: Page) -> list[str]:
    """The first three rows of the leaderboard's CSV, without the baseline."""
    with page.expect_download() as download:
        page.get_by_role("button", name="Download CSV").click()
    with Path(download.value.path()).open(encoding="utf-8") as file:
        return [row["run"] for row in csv.DictReader(file) if row["preset"] != "BF16" and row["kld (nats)"]][:3]


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), Path(sys.argv[2]))
