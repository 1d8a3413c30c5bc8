"""Takes the picture of the demo's trace in Jaeger for the documentation, `docs/images/jaeger-trace.png`.

`python scripts/look_at_traces.py` runs `replanning demo` with `--trace`, and opens the trace in
Jaeger's web pages. If no Jaeger is running (`docker compose up`), it starts the one that
`scripts/jaeger` builds. Jaeger's Go module lacks the pages: they are built once from their
repository, with Git and Node 20.19 or newer, in about two minutes, and kept beside the program. The
script needs Debian's `chromium` and the package `playwright`, and does nothing if one of them is
missing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import tenacity
from browser import chromium
from look_at_runs import DOCS_WIDTH, IMAGES, ROOT, command

PAGES: Final = "https://github.com/jaegertracing/jaeger-ui"
TAG: Final = "v1.76.0"
"""Version of the pages for the Jaeger of `scripts/jaeger`."""

SPANS: Final = "http://localhost:4318"
JAEGER: Final = "http://localhost:16686"

FONTS: Final = "Helvetica, Arial, 'DejaVu Sans', sans-serif"

NAMES: Final = 0.42
"""Share of the width for the names of the spans; Jaeger's default cuts them off."""


def main() -> None:
    """Take the picture."""
    with chromium() as browser, tempfile.TemporaryDirectory() as place, jaeger(place):
        words = ("demo", "--folder", "demo", "--json", "--trace", f"otlp={SPANS}")
        run = json.loads(command(place, *words))["run"]
        take_picture(browser, f"{JAEGER}/trace/{trace_of(run)}")


@contextmanager
def jaeger(place: str) -> Iterator[None]:
    """Run Jaeger with its pages and in-memory storage, unless one is already running."""
    if answers():
        yield
        return
    program = printed(ROOT, ROOT / "scripts" / "jaeger").strip()
    pages = Path(program).with_name(f"jaeger-pages-{TAG}")
    if not pages.exists():
        build(pages)
    words = [program, "--set", f"extensions.jaeger_query.ui.assets_path={pages}"]
    log = Path(place) / "jaeger.log"
    with log.open("wb") as file, subprocess.Popen(words, stdout=file, stderr=file) as process:
        try:
            patiently(answers)
            yield
        except tenacity.RetryError as error:
            raise SystemExit(log.read_text(encoding="utf-8")[-2000:]) from error
        finally:
            process.terminate()


def build(pages: Path) -> None:
    """Build Jaeger's pages into a folder."""
    sys.stdout.write(f"building Jaeger's pages {TAG}; this takes minutes ...\n")
    with tempfile.TemporaryDirectory(dir=pages.parent) as place:
        source = Path(place) / "source"
        clone = ["clone", "--quiet", "--depth=1", "-c", "advice.detachedHead=false"]
        printed(pages.parent, "git", *clone, "--branch", TAG, PAGES, source)
        # The pages ask for Node 24, but their build tools do not need it.
        install = ["ci", "--ignore-scripts", "--engine-strict=false", "--loglevel=error"]
        printed(source, "npm", *install)
        worker = ["--mode=production", "--config=webpack.layout-worker.config.js"]
        printed(source / "packages" / "plexus", "npx", "webpack", *worker)
        printed(source / "packages" / "jaeger-ui", "npx", "vite", "build")
        (source / "packages" / "jaeger-ui" / "build").rename(pages)


def printed(place: Path, *words: object) -> str:
    """Run a program in a folder, and return its output."""
    done = subprocess.run(
        [str(word) for word in words], cwd=place, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{words[0]} ended with {done.returncode}\n{done.stdout[-2000:]}")
    return done.stdout


def answers() -> bool:
    """Return whether a Jaeger is running."""
    try:
        with urlopen(JAEGER):
            return True
    except URLError:
        return False


def trace_of(run: str) -> str:
    """Return the id of the trace of a run, once Jaeger has received the whole trace."""
    # The span of the run is sent last.
    tags = json.dumps({"replanning.run.id": run})
    query = urlencode({"service": "replanning", "operation": "replanning.run", "tags": tags})

    def found() -> list[Any]:
        with urlopen(f"{JAEGER}/api/traces?{query}") as answer:
            return list(json.load(answer)["data"])

    (trace,) = patiently(found)
    return str(trace["traceID"])


def patiently(attempt: Callable[[], Any]) -> Any:
    """Call a function until its result is true, for up to 30 seconds; return that result."""
    return tenacity.Retrying(
        stop=tenacity.stop_after_delay(30),
        wait=tenacity.wait_fixed(0.2),
        retry=tenacity.retry_if_result(lambda made: not made),
    )(attempt)


def take_picture(browser: Any, address: str) -> None:
    """Write the picture of a trace, from the top of the page to its last span."""
    # Jaeger draws only the spans that fit in the window.
    window = browser.new_page(
        color_scheme="light",
        reduced_motion="reduce",
        viewport={"width": DOCS_WIDTH, "height": 2000},
    )
    window.add_init_script(f"localStorage.setItem('spanNameColumnWidth', '{NAMES}')")
    window.goto(address, wait_until="networkidle")
    # Jaeger's list of fonts may end with one that has only digits and emoji.
    window.add_style_tag(content=f"* {{ font-family: {FONTS} !important; }}")
    last = window.locator(".span-row").last.bounding_box()
    size = {"x": 0, "y": 0, "width": DOCS_WIDTH, "height": last["y"] + last["height"] + 8}
    window.screenshot(path=IMAGES / "jaeger-trace.png", clip=size, animations="disabled")


if __name__ == "__main__":
    main()
