"""Checks the layout of the built documentation in a browser, and takes pictures of its pages.

`python scripts/look_at_docs.py` opens each page of `build/site` at three widths. It fails if code is
wider than its box (except terminal output on a phone), if a name in a table is broken, if a page
scrolls sideways, or if the search does not find the page that explains a word first. `--pictures`
also writes each page, light and dark, below `build/pictures/site`; `--only PART` selects the pages
with PART in their address. It needs Debian's `chromium` and the package `playwright`, and skips the
checks if one of them is missing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from browser import chromium

ROOT: Final = Path(__file__).parents[1]
SITE: Final = ROOT / "build" / "site"
PICTURES: Final = ROOT / "build" / "pictures" / "site"

WIDTHS: Final = (390, 1024, 1440)
SCHEMES: Final = ("light", "dark")
TALLEST: Final = 8000
"""Maximum height of a picture, in pixels."""

SEARCHES: Final = {
    "condition": "reference/conditions/",
    "retry": "how-to/retries/",
}
"""Words, each with the page that the search must find first."""

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
    """File server without a log."""

    def log_message(self, *_: object) -> None:
        """Write nothing."""


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
    """Check every page.

    Raises:
        SystemExit: something is cut off, broken or not found, or the browser is missing.
    """
    only = arguments[arguments.index("--only") + 1] if "--only" in arguments else ""
    pages = sorted(str(path.parent.relative_to(SITE)) for path in SITE.rglob("index.html"))
    pages = [page for page in pages if only in page]

    with chromium() as browser, served() as address:
        faults = []
        for scheme in SCHEMES if "--pictures" in arguments else SCHEMES[:1]:
            # Without motion, no picture shows the middle of a transition.
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

    for fault in faults:
        sys.stdout.write(f"{fault}\n")
    sys.stdout.write(f"{len(pages)} pages, {len(faults)} faults\n")
    if faults:
        raise SystemExit(1)


def faults_of(window: Any, page: str, width: int) -> list[str]:
    """Return the faults of the page in a window."""
    faults = window.evaluate(FAULTS)
    # Whole files, such as the examples, have wider lines, which wrap.
    if width > WIDTHS[0] and not page.startswith(("examples", "project/notice")):
        faults += window.evaluate(WRAPPED)
    return [f"{page} at {width}: {fault}" for fault in faults]


def take_picture(window: Any, folder: Path, page: str) -> None:
    """Write a picture of the page in a window, up to the maximum height."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "index" if page == "." else page.replace("/", "-")
    size = dict(window.viewport_size)
    height = min(TALLEST, window.evaluate("document.scrollingElement.scrollHeight"))
    window.set_viewport_size({"width": size["width"], "height": height})
    window.screenshot(path=folder / f"{name}.png", animations="disabled")
    window.set_viewport_size(size)


def wrong_searches(browser: Any, address: str) -> list[str]:
    """Return the searches that do not find the expected page first."""
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
