"""The examples in docstrings, of which the reference of the Python API consists, run in situations that they are about."""

import ast
import re
import shutil
from collections.abc import Iterator
from functools import partial
from inspect import CO_COROUTINE, iscoroutinefunction
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import anyio
import pytest

import replanning

SOURCES = Path(replanning.__file__).parent
RELEASE = Path(__file__).parents[2] / "examples" / "release.yaml"
EXAMPLE = re.compile(r"::\n\n((?:    [^\n]*\n|\n)+)|```python\n(.*?)```", re.DOTALL)

SITUATION = """
from replanning import *
from replanning.errors import *
from replanning.journal import MemoryStore
from replanning.llm import *
from replanning.orchestrators import SwarmOrchestrator
from replanning.planning import *
from replanning.testing import *
from replanning.tools import ToolExecutor

plan = Plan.parse("{goal: {objective: test}, tools: [{name: t, kind: shell, command: 'true'}], tasks: [{id: t, tool: t}]}")
engine, settings, clock = ReplanningEngine(), Settings(), VirtualClock()
tools, task = plan.tools, "Make the failing test pass"
model = ScriptedLLM(lambda prompt: "I do not know.")
work = executor = ScriptedExecutor({})
way_on = [Alternative(changes=(), reason="a way on")]
"""
"""What the examples take for granted."""

NOT_RUN = {
    "ReplanManager": "it decides about a phase of planning mode that is under way",
    "replanning.testing.stores": "it is a test of a store of one's own",
}


class Example(NamedTuple):
    """An example, and what it is an example of."""

    of: str
    text: str


def examples() -> Iterator[Example]:
    """Yield the examples in all docstrings of the library."""
    for path in sorted(SOURCES.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        module = ".".join(path.relative_to(SOURCES.parent).with_suffix("").parts)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for indented, fenced in EXAMPLE.findall(f"{ast.get_docstring(node)}\n"):
                    yield Example(getattr(node, "name", module), dedent(indented) or fenced)


EXAMPLES = list(examples())


def test_there_are_examples():
    """The examples are found, and those that are not run are among them."""
    assert len(EXAMPLES) > 10
    assert NOT_RUN.keys() <= {example.of for example in EXAMPLES}


@pytest.mark.skipif(not RELEASE.exists(), reason="needs the checkout: examples are not installed")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.of)
def test_examples(example, tmp_path, monkeypatch):
    """An example does what it shows; a test in it passes."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(RELEASE, tmp_path)
    code = compile(example.text, example.of, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if example.of in NOT_RUN:
        return
    names: dict[str, Any] = {"__name__": "example"}
    exec(SITUATION, names)
    if code.co_flags & CO_COROUTINE:
        anyio.run(partial(eval, code, names))
    else:
        exec(code, names)
    for name, value in list(names.items()):
        if name.startswith("test_"):
            if iscoroutinefunction(value):
                anyio.run(value)
            else:
                value()


def listed(docstring: str, title: str) -> list[str]:
    """Return the names that a section of a docstring explains."""
    section = re.search(rf"^{title}:\n((?:    [^\n]*\n?|\n)+)", docstring, re.MULTILINE)
    if section is None:
        return []
    items = re.findall(r"^    (\S[^\n]*?):(?: |$)", section[1], re.MULTILINE)
    return [name.strip("`*") for item in items for name in item.split(", ")]


def test_arguments_are_explained():
    """A docstring with `Args` explains every argument in an item of its own, and no other."""
    wrong: list[str] = []
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            explained = listed(ast.get_docstring(node) or "", "Args")
            every = node.args
            taken = [*every.posonlyargs, *every.args, every.vararg, *every.kwonlyargs, every.kwarg]
            names = {each.arg for each in taken if each is not None} - {"self", "cls"}
            if explained and names.symmetric_difference(explained):
                wrong.append(f"{path.relative_to(SOURCES)}:{node.lineno} {node.name}")
    assert not wrong


def test_items_are_apart():
    """No item of a docstring is hidden in the text of the one before."""
    hidden = re.compile(r"^ {4,}\S[^\n]*[.;)] [a-zA-Z_]+: [a-z]", re.MULTILINE)
    wrong: list[str] = []
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node) or ""
                sections = re.findall(
                    r"^(?:Args|Attributes|Raises):\n((?:    [^\n]*\n?|\n)+)",
                    docstring,
                    re.MULTILINE,
                )
                joined = [re.sub(r"\n {8,}", " ", section) for section in sections]
                if any(map(hidden.search, joined)):
                    wrong.append(f"{path.relative_to(SOURCES)}:{node.lineno} {node.name}")
    assert not wrong
