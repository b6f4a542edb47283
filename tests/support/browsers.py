"""The browser that pages are tried in; without it their tests are skipped, and say so."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@contextmanager
def launched() -> Iterator[Any]:
    """Start a browser, and end it."""
    if BROWSER is None:
        pytest.skip("no Chromium on this machine")
    library = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with library.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        yield browser
        browser.close()
