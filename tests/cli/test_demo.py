"""`replanning demo`: what a newcomer sees first."""

from __future__ import annotations

import shlex
import shutil
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

from replanning import Plan
from tests.support.cli import Started, answer, cli, process

pytestmark = pytest.mark.deep

REPAIRS = (
    ["context-changed", "timeout"]
    if shutil.which("zpaq")
    else ["task-failed", "context-changed", "timeout"]
)


def test_demo_does_a_real_job(tmp_path):
    """The demo succeeds after several repairs, and leaves a report and an archive of real files, plan and history."""
    result = answer(tmp_path, "demo", "--folder", "here")
    here = tmp_path / "here"

    assert result["status"] == "succeeded"
    assert sorted(
        trigger["kind"] for r in result["revisions"] for trigger in r["triggers"]
    ) == sorted(REPAIRS)
    assert len(result["revisions"]) == len(REPAIRS)
    assert (
        result["tasks"]["duplicates~2"]
        == result["tasks"]["characters"]
        == result["tasks"]["report"]
        == "DONE"
    )
    report = (here / "report.md").read_text(encoding="utf-8")
    assert "Longest files" in report
    assert "Non-ASCII characters" in report
    if not shutil.which("zpaq"):
        assert (
            "input/replanning/__init__.py"
            in zipfile.ZipFile(here / "dist" / "sources.zip").namelist()
        )
    assert Plan.load(here / "plan.yaml").name == "survey"
    assert (here / ".replanning" / "history.db").exists()


def test_demo_is_told_to_people(tmp_path):
    """A person is told what will happen, sees it happen, then what changed and why, and what to try next; also again."""
    cli(tmp_path, "demo", "--quiet")
    done = cli(tmp_path, "demo")

    for text in (
        "A real plan, on real files",
        "duplicates did not finish within 3 s",
        "revision 2:",
    ):
        assert text in done.stderr
    for text in (
        "✓ succeeded",
        "The plan before and after",
        "What changed in the plan, and why",
        "changed  context.ascii_only changed",
        "applied    duplicates → duplicates~2: tool compare-every-pair → compare-fingerprints",
        "Where to look",
        "replanning-demo/report.md",
        "replanning why",
    ):
        assert text in done.stdout


def test_demo_in_the_browser(tmp_path):
    """The command with which the demo proposes to see its run in a browser works where the demo was started."""
    pytest.importorskip("uvicorn", reason="the extra `view` is not installed")
    (line,) = (
        line for line in cli(tmp_path, "demo", "--quiet").stdout.splitlines() if "--open" in line
    )
    _, *words = shlex.split(line)
    words.remove("--open")
    with Started(tmp_path, *words, "--port", 0, PYTHONUNBUFFERED="1") as command:
        address = str(command.process.stdout.readline()).split()[-1]
        with httpx.Client(follow_redirects=True, timeout=30) as browser:
            assert "duplicates~2" in browser.get(address).text


def test_demo_without_pages(tmp_path, monkeypatch):
    """Where the packages of the pages are missing, the demo says how to get them."""
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    told = cli(tmp_path, "demo", "--quiet").stdout
    assert 'demo --open, after pip install "replanning[view]"' in told
    assert "replanning view" not in told


def test_demo_where_nothing_can_be_written(tmp_path):
    """The demo uses a temporary folder if the current one is not writable; one named by --folder must be, and its own."""
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear reader")

    assert (
        "the demo cannot write to 'file/below'"
        in cli(tmp_path, "demo", "--folder", "file/below", code=2).stderr
    )
    assert (
        "'mine' already exists and is not a demo"
        in cli(tmp_path, "demo", "--folder", "mine", code=2).stderr
    )
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]
    if not Path("/proc/self").exists():
        pytest.skip("needs a folder in which nobody may write: /proc")
    done = process(Path("/proc"), "demo", "--quiet", TMPDIR=str(tmp_path))
    (place,) = tmp_path.glob("replanning-demo-*")
    assert f"{place}/report.md" in done.stdout


def test_release_example(tmp_path):
    """The example that builds a release is valid, and survives the loss of its first build tool."""
    if not (example := Path(__file__).parents[2] / "examples" / "release.yaml").exists():
        pytest.skip("needs the examples of the checkout")
    assert answer(tmp_path, "validate", example)["valid"] is True
    report = answer(
        tmp_path, "simulate", example, "--fail", "build", "--flaky", "announce=0.5", "--runs", 20
    )
    assert report["success_rate"] == 1.0
