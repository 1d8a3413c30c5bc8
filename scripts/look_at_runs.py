"""Takes pictures of the pages of `replanning view`: of the demo, and of a run that waits for a person.

`python scripts/look_at_runs.py` writes every page at two widths, light and dark, below
`build/pictures/view`. `--docs` also renews the pictures in the documentation,
`docs/images/view-….png`. It needs Debian's `chromium` and the package `playwright`, and does nothing
if one of them is missing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from browser import chromium
from look_at_docs import PICTURES, SCHEMES, take_picture

ROOT: Final = Path(__file__).parents[1]
IMAGES: Final = ROOT / "docs" / "images"

WIDTHS: Final = (390, 1440)
DOCS_WIDTH: Final = 1120

PAGES: Final = {
    "runs": "",
    "run": "runs/{demo}",
    "before": "runs/{demo}?revision=0",
    "decision": "runs/{demo}/decisions/replan-1",
    "task": "runs/{demo}/tasks/duplicates",
    "journal": "runs/{demo}/journal",
    "question": "runs/asking",
}
"""Paths of the pages, by the names of their pictures."""

DOCS_HEIGHTS: Final = {"run": 1100, "decision": 980, "question": 920}
"""Heights in pixels of the pictures in the documentation, which show the top of a page."""

APPROVAL: Final = "replanning: {alternatives: {require_approval: true}}\n"


def main(*arguments: str) -> None:
    """Take the pictures."""
    with chromium() as browser, tempfile.TemporaryDirectory() as place:
        demo = make_runs(place)
        with served(place) as address:
            for scheme in SCHEMES:
                for width in WIDTHS:
                    window = opened(browser, address, width, scheme)
                    for name, path in PAGES.items():
                        show(window, address, path.format(demo=demo))
                        take_picture(window, PICTURES.parent / "view" / f"{width}-{scheme}", name)
                    window.close()
            if "--docs" in arguments:
                window = opened(browser, address, DOCS_WIDTH, SCHEMES[0])
                for name, height in DOCS_HEIGHTS.items():
                    show(window, address, PAGES[name].format(demo=demo))
                    window.set_viewport_size({"width": DOCS_WIDTH, "height": height})
                    window.screenshot(path=IMAGES / f"view-{name}.png", animations="disabled")


def make_runs(place: str) -> str:
    """Run the demo, then its plan again until it waits for a person; return the first run's id."""
    demo = json.loads(command(place, "demo", "--folder", ".", "--json"))
    settings = Path(place) / "asking.yaml"
    settings.write_text(APPROVAL, encoding="utf-8")
    words = ("--settings", str(settings), "--no-ask", "--quiet", "--run-id", "asking")
    command(place, "run", "plan.yaml", *words, code=4)
    return str(demo["run"])


def command(place: str, *words: str, code: int = 0) -> str:
    """Run a command in a folder, check its exit code, and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "replanning", *words],
        cwd=place,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != code:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}\n{done.stderr}")
    return done.stdout


def environment() -> dict[str, str]:
    """Return the environment of the commands, with this Python first on the PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"}


@contextmanager
def served(place: str) -> Iterator[str]:
    """Serve the pages of the runs, and yield their address with its token."""
    words = [sys.executable, "-m", "replanning", "view", "--port", "0"]
    with subprocess.Popen(
        words, cwd=place, env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address is not None
        try:
            yield address[0]
        finally:
            process.terminate()


def opened(browser: Any, address: str, width: int, scheme: str) -> Any:
    """Return a window that has opened the address with its token."""
    # Without motion, no picture shows the middle of a transition.
    window = browser.new_page(
        color_scheme=scheme,
        reduced_motion="reduce",
        viewport={"width": width, "height": 900},
    )
    window.goto(address)
    return window


def show(window: Any, address: str, path: str) -> None:
    """Open a page, and wait until it is loaded."""
    window.goto(f"{address.partition('?')[0]}{path}", wait_until="load")
    window.wait_for_selector("#reading", state="detached")


if __name__ == "__main__":
    main(*sys.argv[1:])
