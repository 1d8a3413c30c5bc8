"""What a release consists of beside the package: the script that prepares it, the citation, and the recording."""

import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "release"
RECORDING = ROOT / "docs" / "images" / "demo.svg"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="needs the checkout")


def test_files_of_a_release():
    """The version and the date are set where they are stated, and the changelog keeps what was unreleased under the version."""
    names = runpy.run_path(str(SCRIPT))
    changed = names["released"]("7.8.9", "2030-01-02")
    unreleased = names["section"]((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), "Unreleased")

    assert tomllib.loads(changed["pyproject.toml"])["project"]["version"] == "7.8.9"
    citation = yaml.safe_load(changed["CITATION.cff"])
    assert (citation["version"], str(citation["date-released"]), citation["license"]) == (
        "7.8.9",
        "2030-01-02",
        "MIT",
    )
    assert names["section"](changed["CHANGELOG.md"], "7.8.9") == unreleased
    assert names["section"](changed["CHANGELOG.md"], "Unreleased") == ""


def test_what_is_no_release():
    """A version of another form stops a release, before anything is built."""
    done = subprocess.run([sys.executable, SCRIPT, "next"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "release: 'next' is no version such as 0.2.0" in done.stderr


def test_recording():
    """The recording of the demo is small, shows all three repairs, and neither runs nor loads anything."""
    text = RECORDING.read_text(encoding="utf-8")
    assert len(text.encode()) <= 150 * 1024
    elements = list(ET.fromstring(text).iter())
    assert {element.tag.rpartition("}")[2] for element in elements} <= {
        "svg",
        "title",
        "style",
        "rect",
        "circle",
        "text",
        "tspan",
        "g",
    }
    assert not [
        name
        for element in elements
        for name in element.attrib
        if name.startswith("on") or name.endswith("href")
    ]
    shown = " ".join(ET.fromstring(text).itertext())
    assert all(each in shown for each in ("revision 1:", "revision 2:", "revision 3:", "succeeded"))
