"""Makes pictures of the pages that `replanning view` shows, of the demo and of a run that waits for a person.

`python scripts/look_at_runs.py` writes every page on two widths, light and dark, below `build/pictures/view`. `--docs` also makes
those of the documentation anew: `docs/images/view-….png`. It needs Debian's `chromium` and the package `playwright`, and says so
where one of them is missing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from look_at_docs import BROWSERS, PICTURES, SCHEMES, take_picture

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
"""Pages by the names of their pictures."""

DOCS_HEIGHTS: Final = {"run": 1100, "decision": 980, "question": 920}
"""Pixels of the pages whose beginning is in the documentation."""

APPROVAL: Final = "replanning: {alternatives: {require_approval: true}}\n"


def main(*arguments: str) -> None:
    """Make the pictures."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        sys.stdout.write("skipped: no Chromium is installed (apt-get install chromium)\n")
        return
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.stdout.write("skipped: the package playwright is not installed\n")
        return
    with tempfile.TemporaryDirectory() as place:
        demo = make_runs(place)
        with served(place) as address, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
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
            browser.close()


def make_runs(place: str) -> str:
    """Carry out the demo, and its plan once more until it waits for a person; return the id of the first run."""
    demo = json.loads(command(place, "demo", "--folder", ".", "--json"))
    settings = Path(place) / "asking.yaml"
    settings.write_text(APPROVAL, encoding="utf-8")
    words = ("--settings", str(settings), "--no-ask", "--quiet", "--run-id", "asking")
    command(place, "run", "plan.yaml", *words, code=4)
    return str(demo["run"])


def command(place: str, *words: str, code: int = 0) -> str:
    """Carry out a command in a folder, which ends with this code; return what it printed."""
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
    """Return the environment of the commands, in which they find this Python."""
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
    """Return a window in which somebody has come in."""
    # Without motion nothing is in the middle of a transition when its picture is taken.
    window = browser.new_page(
        color_scheme=scheme,
        reduced_motion="reduce",
        viewport={"width": width, "height": 900},
    )
    window.goto(address)
    return window


def show(window: Any, address: str, path: str) -> None:
    """Open a page, and wait until its content is there."""
    window.goto(f"{address.partition('?')[0]}{path}", wait_until="load")
    window.wait_for_selector("#reading", state="detached")


if __name__ == "__main__":
    main(*sys.argv[1:])
