"""A headless Chromium for tests of pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# A test needs neither a sandbox nor the requests of Chromium itself.
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
OPTIONS += ["--disable-component-update", "--disable-sync"]


def find_chromium() -> str:
    """Return the path of an installed Chromium or Chrome, or skip the test."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium is installed")


@contextmanager
def open_browser() -> Iterator:
    """Yield a browser of playwright, or skip the test if there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="drives the browser: pip install '.[docs]'")
    path = find_chromium()
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        yield browser
        browser.close()


@contextmanager
def open_page(browser, address: str, **options) -> Iterator:
    """Yield a page. An error in its JavaScript or a request that leaves the disk fails the test."""
    page, problems = browser.new_page(**options), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: None if request.url.startswith("file:") else problems.append(request.url))
    page.goto(address)
    yield page
    page.close()
    assert not problems
