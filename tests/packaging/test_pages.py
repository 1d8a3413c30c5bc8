"""What the pages show works: programs run and print what the page says, plans and settings load, commands exist.

The programs of a page run in their order and share their names. A comment before a block says more: `<!-- given: WORDS -->` has it
run in one of the `SITUATIONS`, `<!-- not run: REASON -->` has only its imports run, `<!-- needs: MODULE -->` skips the page where the
module is missing, `<!-- file: NAME -->` writes it to a file, `<!-- broken: NAME -->` one that is not valid, and `<!-- shell: REASON -->` runs the commands of a console block, whose
output is the rest of the block; there `…` stands for anything. A page may wrap the lines of an output.
"""

import ast
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from inspect import CO_COROUTINE
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import anyio
import pytest
import typer
import yaml

from replanning import Plan
from replanning.cli.app import COMMANDS
from replanning.config import load_settings
from tests.packaging.situations import SITUATIONS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = list(PAGES)
for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"):
    # Beside an installed wheel, there is the README alone.
    if (ROOT / name).exists():
        LINKED.append(ROOT / name)
BLOCK = re.compile(
    r"^(?:<!-- ([a-z ]+): (.*?) -->\n)?```(\w+)\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
CODE_WIDTH = 88
MODULES = {name: module for panel in COMMANDS.values() for name, module in panel.items()}

pytestmark = pytest.mark.skipif(
    len(PAGES) == 1, reason="needs the checkout: the pages are not installed"
)


class Block(NamedTuple):
    """A code block of a page, with the comment before it and the output after it."""

    mark: str
    note: str
    language: str
    text: str
    output: str


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    """Yield the blocks of a page, all or those in some languages."""
    for found in BLOCK.findall(page.read_text(encoding="utf-8")):
        block = Block(*found)
        if block.language in languages or not languages:
            yield block


def pages(*languages: str) -> Any:
    """Parametrize a test with the pages that have blocks in one of some languages."""
    found = [page for page in PAGES if any(blocks(page, *languages))]
    return pytest.mark.parametrize("page", found, ids=lambda page: str(page.relative_to(ROOT)))


def run(block: Block, place: str, names: dict[str, object]) -> str:
    """Run a program, which may await at the top level, and return what it prints."""
    text = block.text
    if block.mark == "given":
        situation = SITUATIONS[block.note]
        (indentation,) = re.findall(r"^( *)BLOCK$", situation, re.MULTILINE)
        text = situation.replace(f"{indentation}BLOCK", indent(text, indentation))
    code = compile(text, place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with redirect_stdout(io.StringIO()) as printed:
        if code.co_flags & CO_COROUTINE:
            anyio.run(partial(eval, code, names))
        else:
            exec(code, names)
    return printed.getvalue()


@pages("python", "console")
def test_programs(page, tmp_path, monkeypatch):
    """The programs and commands of a page run in their order, and print what the page says."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for number, block in enumerate(blocks(page), 1):
        place = f"{page.name}, block {number}"
        if block.mark in {"file", "broken"}:
            (tmp_path / block.note).write_text(block.text, encoding="utf-8")
        elif block.mark == "shell":
            run_session(block.text, place)
        elif block.language != "python":
            continue
        elif block.mark == "not run":
            run_imports(block, place)
        elif block.mark == "needs" and find_spec(block.note) is None:
            pytest.skip(f"{block.note} is not installed")
        else:
            printed = run(block, place, names)
            assert not block.output or printed.split() == block.output.split(), place


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "tutorial").glob("*.md")), ids=lambda page: page.name
)
def test_programs_of_the_tutorial_run_alone(page):
    """Each program of the tutorial runs by itself, without what the page shows before it."""
    for number, block in enumerate(blocks(page, "python"), 1):
        if not block.mark:
            run(block, f"{page.name}, program {number}", {"__name__": "page"})


def run_imports(block: Block, place: str) -> None:
    """Check that a program can be read, and that what it imports is there, unless that is another project's."""
    tree = compile(block.text, place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("replanning"):
            module = importlib.import_module(str(node.module))
            assert not [each.name for each in node.names if not hasattr(module, each.name)], place


def run_session(text: str, place: str) -> None:
    """Run the commands of a console block in a shell, one after another, and compare what each prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        environment = {**os.environ, "PATH": path, "NO_COLOR": "1"}
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=120
        )
        pieces = re.split(" ?… ?", on_one_line(output))
        expected = ".*".join(re.escape(piece) for piece in pieces)
        assert re.fullmatch(expected, on_one_line(done.stdout)), (
            f"{place}: {command}\n{done.stdout}\n{done.stderr}"
        )


def on_one_line(text: str) -> str:
    """Return a text whose lines are joined."""
    return " ".join(text.split())


@pages("yaml")
def test_plans_and_settings(page, tmp_path):
    """Plan files and settings files that a page shows are valid; parts of them are YAML."""
    for block in blocks(page, "yaml"):
        content = yaml.safe_load(block.text)
        keys = content.keys() if isinstance(content, dict) else set()
        if block.mark == "file":
            (tmp_path / block.note).write_text(block.text, encoding="utf-8")
        if block.mark == "broken":
            continue
        if "tasks" in keys and block.mark == "file":
            # It may include one of the files before it.
            Plan.load(tmp_path / block.note)
        elif "tasks" in keys:
            Plan.parse(block.text)
        elif keys & {"replanning", "planning"}:
            (tmp_path / "settings.yaml").write_text(block.text, encoding="utf-8")
            load_settings(tmp_path / "settings.yaml", environ={})


def code_lines(page: Path) -> Iterator[str]:
    """Yield the lines of all code blocks of a page."""
    fence = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        mark = re.match(r" *(```|~~~)", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and fence == mark[1]:
            fence = ""
        elif fence:
            yield line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_width(page):
    """Code is at most as wide as its column on the site."""
    assert not [line for line in code_lines(page) if len(line) > CODE_WIDTH]


@pages("json", "toml")
def test_json_and_toml(page):
    """JSON and TOML that a page shows can be read."""
    for block in blocks(page, "json"):
        json.loads(block.text)
    for block in blocks(page, "toml"):
        tomllib.loads(block.text)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_installed(page):
    """Extras of the package, and targets of `make`, that a page names exist."""
    text = page.read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.findall(r"replanning\[([a-z-]+)\]", text)
    assert set(extras) <= project["optional-dependencies"].keys()

    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"(?:`|^\$ )make ([a-z][a-z-]*)", text, re.MULTILINE)
    assert not [name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)]


def commands_of(page: Path) -> Iterator[str]:
    """Yield the commands of the program that a page shows, in blocks and within sentences."""
    text = page.read_text(encoding="utf-8")
    yield from re.findall(r"`replanning ([^`]+)`", text)
    whole_lines = text.replace("\\\n", "")
    for block in re.findall(r"^```\w+\n(.*?)^```", whole_lines, re.MULTILINE | re.DOTALL):
        yield from re.findall(r"^(?:\$ )?replanning (.+)$", block, re.MULTILINE)


@pytest.mark.parametrize(
    "page",
    [page for page in LINKED if any(commands_of(page))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_commands(page):
    """Commands of the program that a page shows exist, with their options."""
    for line in commands_of(page):
        words = shlex.split(re.sub(r"…|[|>] .*", "", line), comments=True)
        if words[-1:] == ["--help"] or words[0] == "version":
            continue
        count = 2 if " ".join(words[:2]) in MODULES else 1
        name = " ".join(words[:count])
        group: Any = typer.main.get_group(
            importlib.import_module(f"replanning.cli.{MODULES[name]}").commands
        )
        command = group.commands[name]
        for word in words[count:]:
            if word not in getattr(command, "commands", ()):
                break
            command = command.commands[word]
            count += 1
        # Parsed without complaint, because examples leave values out; so options are checked apart.
        context = command.make_context(name, words[count:], resilient_parsing=True)
        known: set[str] = set()
        for parameter in command.get_params(context):
            known.update(parameter.opts, parameter.secondary_opts)
        own, _, _ = line.partition(" -- ")
        given = {word.partition("=")[0] for word in own.split() if word.startswith("--")}
        assert not given - known, line


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    """Links to files of the repository lead somewhere; pages that follow from the code say there how they are written."""
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    targets = [
        (page.parent / path).resolve() for path in re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", text)
    ]
    assert not [target for target in targets if not target.exists()]
