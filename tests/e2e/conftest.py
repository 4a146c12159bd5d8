"""A web process on a free port, headless Chromium, and what each page load is watched for."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
ARGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy a test names
SERVER = "fp8dash.ui.server"
START_SECONDS = 90  # a cold start on a busy machine
PROBES = ("/_stcore/health", "/_stcore/host-config")  # Streamlit asks for them below a page's path first: 404 is normal


@dataclass
class Watch:
    """What a page did that it must not."""

    console: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def process(command: list[str], data: Path) -> Iterator[int]:
    """The id of a process of the product on a data folder; ended with the block. Its module names the file beside it
    that holds its output."""
    with (data / f"{command[2]}.out").open("wb") as out:
        running = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"FP8DASH_DATA_DIR": str(data)}, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            yield running.pid
        finally:
            running.terminate()
            try:
                running.wait(20)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


@contextmanager
def web(data: Path) -> Iterator[str]:
    """The dashboard's address."""
    with served(data) as (address, _):
        yield address


@contextmanager
def served(data: Path) -> Iterator[tuple[str, int]]:
    """The dashboard's address, and its process."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", SERVER, "run", "app.py", "--server.port", str(port)]
    with process(command, data) as pid:
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                with DIRECT.open(f"{address}/_stcore/health", timeout=2):
                    break
            except (urllib.error.URLError, OSError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.3)
        yield address, pid


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    if not CHROMIUM:
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip  # CI installs it: there, its absence is a fault
        refuse("no Chromium on this machine: install the package chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield chromium
        chromium.close()


@contextmanager
def watched(browser: Browser, **options: object) -> Iterator[tuple[Page, Watch]]:
    """A page, and what it did that it must not."""
    context: BrowserContext = browser.new_context(viewport={"width": 1440, "height": 900}, **options)  # type: ignore[arg-type]
    page, watch = context.new_page(), Watch()
    missing: list[str] = []
    page.on("response", lambda r: missing.append(r.url) if r.status >= 400 and not r.url.endswith(PROBES) else None)
    page.on("request", lambda r: watch.outside.append(r.url) if not _inside(r.url) else None)
    page.on("pageerror", lambda error: watch.console.append(str(error)))
    page.on(
        "console",
        lambda m: watch.console.append(m.text) if m.type == "error" and "status of 404" not in m.text else None,
    )
    yield page, watch
    watch.console += missing
    context.close()


def settled(page: Page) -> Page:
    """The page once Streamlit has drawn all of it."""
    page.get_by_role("heading", level=1).first.wait_for(timeout=30_000)
    page.wait_for_function("!document.querySelector('[data-testid=stStatusWidget]')", timeout=30_000)
    page.wait_for_timeout(700)  # figures and tables are drawn after their elements exist
    return page


def faults(page: Page) -> list[str]:
    """What a settled page must not have: axe's serious and critical violations, an error that nobody put in words."""
    barriers = _barriers(page)
    if barriers:  # colours that fade in are measured on their way: what is a barrier still is one when they rest
        page.wait_for_timeout(3_000)
        barriers = _barriers(page)
    return barriers + [words for words in ("Internal error", "Traceback") if page.get_by_text(words).count()]


def _barriers(page: Page) -> list[str]:
    """Each violation with the first element that has it."""
    violations = Axe().run(page).response["violations"]
    return [f"{v['id']}: {v['nodes'][0]['html'][:200]}" for v in violations if v["impact"] in ("serious", "critical")]


def _inside(url: str) -> bool:
    return url.startswith(("data:", "blob:")) or "://127.0.0.1:" in url
