"""Public names are there for users: each has a docstring, and none is used by tests alone."""

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from pydantic import BaseModel

from tests.packaging.test_pages import PAGES, ROOT
from tests.packaging.test_public_types import modules

FOLDERS = ("replanning", "providers", "triggers", "exporters")
"""Folders with the package; the last three are linked into the first."""

UNDESCRIBED = {"JsonValue", "__version__"}
"""Names of pydantic and of Python, which describe them."""

EXPORTING = [name for name in modules() if getattr(import_module(name), "__all__", ())]

pytestmark = pytest.mark.skipif(
    len(PAGES) == 1, reason="needs the checkout: the pages are not installed"
)


def sources() -> Iterator[ast.Module]:
    """Yield the modules of the package, parsed."""
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            yield ast.parse(path.read_text(encoding="utf-8"))


def exported(module: str) -> Iterator[tuple[str, Any]]:
    """Yield what a module exports, by name."""
    found = import_module(module)
    for name in found.__all__:
        yield name, getattr(found, name)


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that a class of the package defines itself."""
    for name, value in vars(cls).items():
        function = value
        if isinstance(value, property):
            function = value.fget
        elif isinstance(value, classmethod | staticmethod):
            function = value.__func__
        if name.startswith("_") or hasattr(BaseModel, name) or not inspect.isfunction(function):
            continue
        if function.__module__.startswith("replanning"):
            yield name, value


@pytest.fixture(scope="module")
def used_names() -> set[str]:
    """Names that the package, an example or the code on a page uses; imports and definitions are no use."""
    names: set[str] = set()
    for tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*.py")]
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        texts += re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        prose = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        texts += re.findall(r"`([^`]+)`", prose)
    for text in texts:
        names.update(re.findall(r"\w+", text))
    return names


@pytest.fixture(scope="module")
def described_values() -> set[str]:
    """Names of the aliases and constants of the package that have a text below them."""
    names: set[str] = set()
    for tree in sources():
        for node, after in zip(tree.body, tree.body[1:], strict=False):
            if not isinstance(after, ast.Expr) or not isinstance(after.value, ast.Constant):
                continue
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign):
                targets = [node.target]
            else:
                continue
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


@pytest.mark.parametrize("module", EXPORTING)
def test_public_names_are_used(module, used_names):
    """What is exported, and what its classes can do, is used by the package, an example or a page."""
    unused = []
    for name, value in exported(module):
        if name not in used_names:
            unused.append(name)
        if inspect.isclass(value):
            unused += [f"{name}.{each}" for each, _ in members(value) if each not in used_names]
    assert not unused


@pytest.mark.parametrize("module", EXPORTING)
def test_public_names_are_described(module, described_values):
    """What is exported, and what its classes can do, says what it is for."""
    silent = []
    for name, value in exported(module):
        if inspect.isclass(value):
            # A dataclass without a docstring has its signature there.
            if not value.__doc__ or value.__doc__.startswith(f"{name}("):
                silent.append(name)
            for each, _ in members(value):
                if not inspect.getdoc(getattr(value, each)):
                    silent.append(f"{name}.{each}")
        elif inspect.isfunction(inspect.unwrap(value)):
            if not value.__doc__:
                silent.append(name)
        elif name not in described_values and name not in UNDESCRIBED:
            silent.append(name)
    assert not silent
