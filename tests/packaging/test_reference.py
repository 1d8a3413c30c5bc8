"""The pages and pictures of `docs/` that follow from the code are as the code says."""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from replanning.live.states import TRANSITIONS

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"

pytestmark = pytest.mark.skipif(
    not SCRIPTS.exists(), reason="needs the checkout: the pages are not installed"
)


@pytest.fixture(scope="module")
def build_docs() -> Iterator[dict[str, Any]]:
    """Return the names of the script that builds the site."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield runpy.run_path(str(SCRIPTS / "build_docs.py"))
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def written(build_docs) -> dict[str, str]:
    """Return what `make reference` writes: the path of each file below `docs/`, and its text."""
    return build_docs["reference"]()


def test_current(written):
    """Every generated page and picture is current."""
    stale = [
        page
        for page, text in written.items()
        if (ROOT / "docs" / page).read_text(encoding="utf-8") != text
    ]
    assert not stale, "run `make reference`"


def test_names_are_described(written):
    """The list of the Python API says a sentence about every name."""
    lines = written["reference/api/index.md"].splitlines()
    assert not [line for line in lines if line.endswith("|  |")]


def test_every_transition_is_drawn(written):
    """The picture of all changes of a state has every transition of the table."""
    titles = [
        title.text or ""
        for title in ET.fromstring(written["images/transitions.svg"]).iter()
        if title.tag.endswith("title")
    ]
    for (state, event), follows in TRANSITIONS.items():
        (title,) = [each for each in titles if each.startswith(f"{event}: ")]
        sources, _, target = title.removeprefix(f"{event}: ").partition(" → ")
        assert state in sources.split(", ")
        assert target == follows


def test_addresses_of_the_site(build_docs, monkeypatch):
    """A build that knows its addresses links to the repository and lists its pages in a sitemap."""
    monkeypatch.setenv("SOURCE_URL", "https://forge.example/replanning")
    monkeypatch.setenv("SITE_URL", "https://docs.example/replanning/")
    settings = build_docs["site_settings"]()
    assert settings["repo_url"] == "https://forge.example/replanning"
    assert settings["site_url"] == "https://docs.example/replanning/"
