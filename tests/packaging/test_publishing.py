"""What a release consists of beside the package: the script that builds it, the workflows, the citation, and the recording."""

import runpy
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "release"
RECORDING = ROOT / "docs" / "images" / "demo.svg"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="needs the checkout")


def test_version_is_stated_everywhere():
    """The version to be published has a section in the changelog, and the citation states the same one."""
    names = runpy.run_path(str(SCRIPT))
    version = names["project"]()["version"]

    assert names["section"](version)
    assert names["section"]("77.0.0") == ""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (version, "MIT")


def test_what_is_not_ready():
    """A version of another form, without a changelog, and a tag of another version are not ready to be published."""
    problems_of = runpy.run_path(str(SCRIPT))["problems_of"]
    problems = problems_of("next", "v1.2.3")

    assert "'next' is not a version such as 1.2.0 or 1.2.0rc1" in problems
    assert "the tag is v1.2.3, but pyproject.toml has the version next" in problems
    assert "the changelog has no section [next]" in problems


def test_workflows():
    """Publishing waits for the checks and the build, needs no stored token, and the checks are those of `.ci/run`."""
    folder = ROOT / ".github" / "workflows"
    checks = yaml.safe_load((folder / "ci.yml").read_text(encoding="utf-8"))
    release = yaml.safe_load((folder / "release.yml").read_text(encoding="utf-8"))["jobs"]

    assert {"run": "bash .ci/run"} in checks["jobs"]["checks"]["steps"]
    assert (release["build"]["needs"], release["publish"]["needs"]) == ("checks", "build")
    assert release["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in (folder / "release.yml").read_text(encoding="utf-8")


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


def test_first_frame_of_the_recording():
    """Where nothing is animated, the recording shows the plan, what went wrong, and the plan after."""
    groups = {
        group.get("class"): " ".join(group.itertext())
        for group in ET.fromstring(RECORDING.read_text(encoding="utf-8")).iter()
        if group.tag.endswith("}g")
    }
    assert all(each in groups["first"] for each in ("zpaq", "not installed", "zip", "succeeded"))
    assert not [name for name in groups if name not in {"first", "up"} and not name.endswith(" h")]
