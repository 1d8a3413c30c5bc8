"""What the pages show works: programs run and print what the page says, plans and settings load, commands exist.

The programs of a page run in their order and share their names. `<!-- not run: REASON -->` before a block excepts it, and
`<!-- needs: MODULE -->` skips it where the module is missing. A block without an import is a fragment, and only has to compile.
"""

import ast
import importlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from inspect import CO_COROUTINE
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
import typer
import yaml

from replanning import Plan
from replanning.cli.app import COMMANDS
from replanning.config import load_settings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- ([a-z ]+): (.*?) -->\n)?```(\w+)\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)
MODULES = {name: module for panel in COMMANDS.values() for name, module in panel.items()}

pytestmark = pytest.mark.skipif(len(PAGES) == 1, reason="needs the checkout: the pages are not installed")


class Block(NamedTuple):
    """A code block of a page, with the comment before it and the output after it."""

    mark: str
    note: str
    language: str
    text: str
    output: str


def blocks(page: Path, language: str) -> Iterator[Block]:
    """Yield the blocks of a page in a language."""
    for found in BLOCK.findall(page.read_text(encoding="utf-8")):
        block = Block(*found)
        if block.language == language:
            yield block


def pages(language: str) -> Any:
    """Parametrize a test with the pages that have blocks in a language."""
    found = [page for page in PAGES if any(blocks(page, language))]
    return pytest.mark.parametrize("page", found, ids=lambda page: str(page.relative_to(ROOT)))


def run(block: Block, place: str, names: dict[str, object]) -> str:
    """Run a program, which may await at the top level, and return what it prints."""
    code = compile(block.text, place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with redirect_stdout(io.StringIO()) as printed:
        if code.co_flags & CO_COROUTINE:
            anyio.run(partial(eval, code, names))
        else:
            exec(code, names)
    return printed.getvalue()


@pages("python")
def test_programs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs of a page run in their order, and print what the page says."""
    monkeypatch.chdir(tmp_path)
    for plan in blocks(page, "yaml"):
        (tmp_path / "plan.yaml").write_text(plan.text, encoding="utf-8")
        break
    names: dict[str, object] = {"__name__": "page"}
    for number, block in enumerate(blocks(page, "python"), 1):
        place = f"{page.name}, program {number}"
        imports = re.search(r"^(from|import) ", block.text, re.MULTILINE)
        if block.mark == "not run" or not imports:
            compile(block.text, place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif block.mark == "needs" and find_spec(block.note) is None:
            pytest.skip(f"{block.note} is not installed")
        else:
            printed = run(block, place, names)
            assert not block.output or printed == block.output, place


@pages("yaml")
def test_plans_and_settings(page: Path, tmp_path: Path) -> None:
    """Plan files and settings files that a page shows are valid; parts of them are YAML."""
    for block in blocks(page, "yaml"):
        content = yaml.safe_load(block.text)
        keys = content.keys() if isinstance(content, dict) else set()
        if "tasks" in keys:
            Plan.parse(block.text)
        elif keys & {"replanning", "planning"}:
            (tmp_path / "settings.yaml").write_text(block.text, encoding="utf-8")
            load_settings(tmp_path / "settings.yaml", environ={})


@pages("json")
def test_json(page: Path) -> None:
    """JSON that a page shows is JSON."""
    for block in blocks(page, "json"):
        json.loads(block.text)


@pages("console")
def test_commands(page: Path) -> None:
    """Commands of the program that a page shows exist, with their options."""
    for block in blocks(page, "console"):
        for line in re.findall(r"^\$ replanning (.+)$", block.text, re.MULTILINE):
            words = shlex.split(re.sub(r"…|[|>] .*", "", line), comments=True)
            if words == ["--help"]:
                continue
            count = 2 if " ".join(words[:2]) in MODULES else 1
            name = " ".join(words[:count])
            group: Any = typer.main.get_group(importlib.import_module(f"replanning.cli.{MODULES[name]}").commands)
            group.commands[name].make_context(name, words[count:], resilient_parsing=True)
