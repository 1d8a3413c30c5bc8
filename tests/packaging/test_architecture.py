"""The page about the architecture, and CONTRIBUTING, name what is there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("replanning", "providers", "triggers", "exporters", "tests")
PAGES = [ROOT / "docs" / "project" / "architecture.md", ROOT / "CONTRIBUTING.md"]

pytestmark = pytest.mark.skipif(
    not PAGES[0].exists(), reason="needs the checkout: the pages are not installed"
)


@cache
def defined_names() -> set[str]:
    """Return the names of all functions, classes and types, also `Class.method`."""
    names: set[str] = set()
    for family in SOURCES:
        for file in (ROOT / family).rglob("*.py"):
            collect(ast.parse(file.read_text(encoding="utf-8")), "", names)
    return names


def collect(node: ast.AST, place: str, names: set[str]) -> None:
    """Add the names that a module or class defines."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.update((child.name, f"{place}{child.name}"))
            collect(child, f"{child.name}.", names)
        elif isinstance(child, ast.Assign):
            names.update(target.id for target in child.targets if isinstance(target, ast.Name))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page):
    """Every path to a file or folder leads somewhere, from the root or from the package."""
    paths = re.findall(r"`([\w./-]+/[\w./-]*)`", page.read_text(encoding="utf-8"))
    roots = (ROOT, ROOT / "replanning")
    left_out = re.compile(r"build/|.*NAME")  # made by a command, or named by the reader
    missing = []
    for path in paths:
        if not left_out.match(path) and not any((root / path).exists() for root in roots):
            missing.append(path)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_exist(page):
    """Every class, method and private function is defined somewhere."""
    text = page.read_text(encoding="utf-8")
    methods = re.findall(r"`([A-Z]\w+\.\w+)`", text)
    others = re.findall(r"`([A-Z]\w*[a-z]\w*|_\w+)`", text)
    names = defined_names() | {path.name for path in ROOT.iterdir()}
    assert not {*methods, *others} - names
