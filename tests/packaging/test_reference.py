"""The pages and pictures of `docs/` that follow from the code are as the code says."""

import runpy
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from replanning.live.states import TRANSITIONS

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"

pytestmark = pytest.mark.skipif(
    not SCRIPTS.exists(), reason="needs the checkout: the pages are not installed"
)


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    """Return what `make reference` writes: the path of each file below `docs/`, and its text."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        return runpy.run_path(str(SCRIPTS / "build_docs.py"))["reference"]()
    finally:
        sys.path.remove(str(SCRIPTS))


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
