"""A headless Chromium for tests of the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage")


def find_browser() -> str:
    """Return the browser's path; without one, skip, but fail where tests must not be skipped."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None and os.environ.get("CI"):
        pytest.fail(f"the page needs a browser: none of {', '.join(_NAMES)} on PATH (Debian: apt-get install chromium)")
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(_NAMES)} on PATH")
    return found


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a browser that makes no requests of its own, and close it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=list(_ARGS))
        try:
            yield browser
        finally:
            browser.close()
