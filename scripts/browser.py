"""Debian's Chromium, for the scripts that open pages."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Chromium, and yield it as a browser of Playwright.

    Raises:
        SystemExit: Chromium or Playwright is not installed. The exit code is 0, because a script
            that cannot look has found nothing wrong.
    """
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        _skip("no Chromium is installed (apt-get install chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _skip("the package playwright is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def _skip(reason: str) -> NoReturn:
    sys.stdout.write(f"skipped: {reason}\n")
    raise SystemExit(0)
