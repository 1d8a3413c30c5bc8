"""The demo: a real plan on real files, repaired three times while it runs."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from replanning import Plan, Settings
from replanning.cli._options import fail
from replanning.cli._output import print_message
from replanning.cli._render import RunSummary
from replanning.cli._run import RunOptions, run_plan

DEFAULT_FOLDER: Final = "replanning-demo"
_DEMO_FILES: Final = Path(__file__).with_name("demo")
_INTRODUCTION: Final = """\
A real plan, on real files: Python sources are packed, checked and reported on, several commands at once.
Three things go wrong on the way:
  · {first}
  · the step 'duplicates' asks a question that takes hours, and has 3 seconds
  · the plan assumes that all files are plain ASCII; the step 'scan' finds out that they are not
The plan is repaired each time, while everything else goes on. The plan can be changed and run again:
  {again}
"""
_ZPAQ_MISSING: Final = "the step 'pack' wants the program zpaq, which is not on this machine"
_ZPAQ_INSTALLED: Final = "(the step 'pack' wants the program zpaq; you have it, so that this time it works)"


def run_demo(folder: str | None, *, trace: str | None, json: bool, quiet: bool) -> RunSummary:
    """Set the demo up in a folder and run it.

    Args:
        folder: where; by default `replanning-demo` below the present one, or a temporary one where that cannot
            be written.
        trace: where spans go.
        json: whether the result is for a program.
        quiet: whether to say nothing meanwhile.
    """
    place = _prepare_folder(folder)
    plan = place / "plan.yaml"
    if not quiet:
        first = _ZPAQ_INSTALLED if shutil.which("zpaq") else _ZPAQ_MISSING
        again = (
            f"cd {shlex.quote(str(place))} && replanning run {plan.name}"  # its commands look for files where it runs
        )
        print_message(_INTRODUCTION.format(first=first, again=again))
    store = str(place / ".replanning" / "history.db")
    options = RunOptions(store=store, providers=["repair"], trace=trace, json=json, quiet=quiet)
    # Its python3 is the one that runs this, so that the demo needs nothing else on the PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    summary = run_plan(Plan.load(plan), options, settings=Settings(), cwd=place, environ={**os.environ, "PATH": path})
    return replace(summary, notes=(f"report   {place / 'report.md'}", f"files    {place}{os.sep}"))


def _prepare_folder(folder: str | None) -> Path:
    """The folder of the demo, with the plan, its steps and the files that it works on."""
    place = Path(folder or DEFAULT_FOLDER)
    if place.exists() and not _is_demo_folder(place):
        fail(f"{str(place)!r} is there already and is no demo; name another folder with --folder")
    try:
        place.mkdir(parents=True, exist_ok=True)
        for old in ("build", "dist", "input"):
            shutil.rmtree(place / old, ignore_errors=True)
        (place / "build").mkdir()
    except OSError as error:
        if folder is not None:
            fail(f"the demo cannot write to {str(place)!r}: {error.strerror or error}")
        place = Path(tempfile.mkdtemp(prefix=f"{DEFAULT_FOLDER}-"))
        (place / "build").mkdir()
    for file in _DEMO_FILES.iterdir():
        if file.is_file():
            shutil.copyfile(file, place / file.name)
    _copy_sources(place / "input")
    return place


def _is_demo_folder(place: Path) -> bool:
    """Whether a folder is empty, or holds an earlier demo."""
    return place.is_dir() and (not any(place.iterdir()) or (place / "steps.py").is_file())


def _copy_sources(place: Path) -> None:
    """Copy what the demo works on: modules of Python's standard library, and all of this package."""
    library, package = Path(sysconfig.get_path("stdlib")), Path(__file__).parents[1]
    for name, folder, files in (
        ("python", library, library.glob("*.py")),
        ("replanning", package, package.rglob("*.py")),
    ):
        for file in files:
            copy = place / name / file.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
