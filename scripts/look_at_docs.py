"""Looks at the built documentation in a browser: what is cut off or broken, and a picture of every page.

`python scripts/look_at_docs.py` opens each page of `build/site` on three widths and fails if code is wider than its box (output of a terminal
may be, on a phone), if a name
in a table is broken, if a page scrolls sideways, or if the search does not lead to the page that explains a word. `--pictures` also
writes each page, light and dark, below `build/pictures/site`; `--only PART` takes the pages whose address has PART in it.
It needs Debian's `chromium` and the package `playwright`, and says so where one of them is missing.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
SITE: Final = ROOT / "build" / "site"
PICTURES: Final = ROOT / "build" / "pictures" / "site"

WIDTHS: Final = (390, 1024, 1440)
SCHEMES: Final = ("light", "dark")
TALLEST: Final = 8000
"""Pixels of a page that its picture shows."""

BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")

SEARCHES: Final = {
    "condition": "reference/conditions/",
    "retry": "how-to/retries/",
}
"""Words, each with the page that has to be found first."""

FAULTS: Final = """() => {
  const faults = [];
  const root = document.scrollingElement;
  if (root.scrollWidth > root.clientWidth) faults.push("the page scrolls sideways");
  for (const code of document.querySelectorAll("pre > code"))
    if (code.scrollWidth > code.clientWidth + 1 &&
        !(innerWidth < 600 && code.closest(".language-text")))
      faults.push("code is wider than its box: " + code.textContent.slice(0, 60));
  for (const code of document.querySelectorAll("td code, th code"))
    if (!/\\s/.test(code.textContent) && code.getClientRects().length > 1)
      faults.push("a name is broken: " + code.textContent);
  for (const image of document.images)
    if (!image.complete || !image.naturalWidth) faults.push("no picture: " + image.src);
  return faults;
}"""

WRAPPED: Final = """() => [...document.querySelectorAll("pre > code > span[id^=__span]")]
  .filter(line => line.getClientRects()[0]?.height > 1.9 * parseFloat(getComputedStyle(line).lineHeight))
  .map(line => "a line of code is wrapped: " + line.textContent.trim().slice(0, 100))"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files, and says nothing about it."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def served() -> Iterator[str]:
    """Serve the site on this machine, and yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def main(*arguments: str) -> None:
    """Look at every page.

    Raises:
        SystemExit: something is cut off, broken or not found.
    """
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        sys.stdout.write("skipped: no Chromium is installed (apt-get install chromium)\n")
        return
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.stdout.write("skipped: the package playwright is not installed\n")
        return
    only = arguments[arguments.index("--only") + 1] if "--only" in arguments else ""
    pages = sorted(str(path.parent.relative_to(SITE)) for path in SITE.rglob("index.html"))
    pages = [page for page in pages if only in page]

    with served() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        faults = []
        for scheme in SCHEMES if "--pictures" in arguments else SCHEMES[:1]:
            # Without motion nothing is in the middle of a transition when its picture is taken.
            window = browser.new_page(color_scheme=scheme, reduced_motion="reduce")
            for page in pages:
                window.goto(f"{address}/{page}/", wait_until="load")
                for width in WIDTHS:
                    window.set_viewport_size({"width": width, "height": 900})
                    if scheme == SCHEMES[0]:
                        faults += faults_of(window, page, width)
                    if "--pictures" in arguments:
                        take_picture(window, PICTURES / f"{width}-{scheme}", page)
            window.close()
        if not only:
            faults += wrong_searches(browser, address)
        browser.close()

    for fault in faults:
        sys.stdout.write(f"{fault}\n")
    sys.stdout.write(f"{len(pages)} pages, {len(faults)} faults\n")
    if faults:
        raise SystemExit(1)


def faults_of(window: Any, page: str, width: int) -> list[str]:
    """Return what is wrong with the page that a window shows."""
    faults = window.evaluate(FAULTS)
    # Whole files, such as the examples, have wider lines, which go on in the next one.
    if width > WIDTHS[0] and not page.startswith(("examples", "project/notice")):
        faults += window.evaluate(WRAPPED)
    return [f"{page} at {width}: {fault}" for fault in faults]


def take_picture(window: Any, folder: Path, page: str) -> None:
    """Write a picture of the page that a window shows, the whole of it up to a limit."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "index" if page == "." else page.replace("/", "-")
    size = dict(window.viewport_size)
    height = min(TALLEST, window.evaluate("document.scrollingElement.scrollHeight"))
    window.set_viewport_size({"width": size["width"], "height": height})
    window.screenshot(path=folder / f"{name}.png", animations="disabled")
    window.set_viewport_size(size)


def wrong_searches(browser: Any, address: str) -> list[str]:
    """Return what the search does not find first."""
    window = browser.new_page(viewport={"width": 1440, "height": 900})
    faults = []
    for word, page in SEARCHES.items():
        window.goto(address)
        window.wait_for_selector(".md-search__button")
        window.keyboard.press("Control+k")
        window.locator("input:visible").first.fill(word)
        first = window.get_by_role("option").first
        first.wait_for(state="attached")
        found = str(first.get_attribute("href"))
        if page not in found:
            faults.append(f"the search for {word!r} finds {found} first, not {page}")
    window.close()
    return faults


if __name__ == "__main__":
    main(*sys.argv[1:])
