#!/usr/bin/env python3
"""Checks the density of the code: one thought a statement, and comments that say why.

Dense code is hard to step through and hard to change, and it grows denser one line at a time. So
the figures of the core, and of each other package, have limits. They are per statement, because no
formatter changes those.

Usage: check_density.py [ROOT]. It prints each exceeded limit with its places, and then exits with
code 1.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("run", "live", "decision", "engine", "plan", "history")
"""Packages that are measured together."""

# Figures and their limits: maximums, except for comments, which have a minimum. Where a goal is not
# reached yet, the limit is the present figure, so that it does not get worse.
NODES = "syntax nodes per statement"
CONDITIONALS = "conditional expressions per 1,000 statements"
COMPREHENSIONS = "comprehensions per 1,000 statements"
BOOLEANS = "and / or per 1,000 statements"
TUPLES = "tuples assigned to tuples per 1,000 statements"
COMMENTS = "comments per 1,000 lines of code"
LARGE_CLASSES = "classes of more than 20 attributes"
UNEXPLAINED_CLASSES = "classes of more than 15 attributes without a reason"
TANGLED_FUNCTIONS = "functions of more than 20 decisions"
LIMITS: dict[str, float] = {
    NODES: 10.5,
    CONDITIONALS: 25,
    COMPREHENSIONS: 32,
    BOOLEANS: 48,
    TUPLES: 3,
    COMMENTS: 35,
    LARGE_CLASSES: 0,
    UNEXPLAINED_CLASSES: 0,
    TANGLED_FUNCTIONS: 8,
}

OTHER_LIMITS: dict[str, float] = {
    NODES: 10.8,
    CONDITIONALS: 25,
    COMPREHENSIONS: 32,
    BOOLEANS: 48,
    TUPLES: 3,
    LARGE_CLASSES: 0,
    UNEXPLAINED_CLASSES: 0,
    TANGLED_FUNCTIONS: 0,
}
"""Limits of each other package."""

OTHER_PACKAGES: dict[str, dict[str, float]] = {
    "benchmarks": {},
    "exporters": {},
    "providers": {},
    "providers/_planner": {},
    "replanning/cli": {},
    "replanning/expectations": {},
    "replanning/integrations": {},
    "replanning/journal": {},
    "replanning/llm": {},
    "replanning/planning": {},
    "replanning/telemetry": {},
    "replanning/testing": {},
    "replanning/tools": {},
    "replanning/view": {},
    "triggers": {},
}
"""The other packages, with the limits that differ from `OTHER_LIMITS`."""

MAX_ATTRIBUTES = 20
MAX_UNEXPLAINED_ATTRIBUTES = 15
MAX_DECISIONS = 20
REASON = "many attributes because"
"""Words in the docstring of a class that introduce the reason for its many attributes."""

_MODELS = {"BaseModel", "BaseSettings"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Figures:
    """Counts over all files, and the places that add to them."""

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def add_place(self, name: str, place: str) -> None:
        """Count something, and remember its place."""
        self.counts[name] += 1
        self.places.setdefault(name, []).append(place)

    def value(self, name: str) -> float:
        """Return a figure in the unit of its limit: a number, or a share of statements or lines."""
        count = self.counts[name]
        if name == NODES:
            return count / max(1, self.counts["statements"])
        if name == COMMENTS:
            return 1000 * count / max(1, self.counts["lines"])
        if name.endswith("per 1,000 statements"):
            return 1000 * count / max(1, self.counts["statements"])
        return count


def main() -> int:
    """Print the exceeded limits; return the exit code."""
    root = Path(__file__).resolve().parent.parent
    if len(sys.argv) > 1:
        root = Path(sys.argv[1])
    core: list[Path] = []
    for package in PACKAGES:
        core += sorted((root / "replanning" / package).rglob("*.py"))
    report = exceeded_limits(measure(root, core, LIMITS), LIMITS)
    for name, reached in OTHER_PACKAGES.items():
        limits = {**OTHER_LIMITS, **reached}
        files = sorted((root / name).glob("*.py"))
        if files:
            lines = exceeded_limits(measure(root, files, limits), limits)
            report += [line if line.startswith(" ") else f"{name}: {line}" for line in lines]
    for line in report:
        sys.stdout.write(f"{line}\n")
    return int(len(report) > 0)


def exceeded_limits(figures: Figures, limits: Mapping[str, float]) -> list[str]:
    """Return a line for each figure beyond its limit, and a line for each place that adds to it."""
    report: list[str] = []
    for name, limit in limits.items():
        value = figures.value(name)
        exceeded = value > limit
        bound = "at most"
        if name == COMMENTS:
            exceeded = value < limit
            bound = "at least"
        if exceeded:
            report.append(f"{name}: {value:.1f}, expected {bound} {limit:g}")
            report += [f"  {place}" for place in figures.places.get(name, [])]
    return report


def measure(root: Path, files: Iterable[Path], limits: Mapping[str, float]) -> Figures:
    """Return the figures of several files of a checkout, measured together."""
    trees = {path: ast.parse(path.read_text()) for path in files}
    models = find_models(trees.values())
    figures = Figures()
    # The figure is an average; the functions furthest above it show where to begin.
    dense: list[tuple[int, str]] = []
    for path, tree in trees.items():
        where = str(path.relative_to(root))
        count_lines(path, figures)
        for node in ast.walk(tree):
            count_node(node, where, figures)
            if isinstance(node, ast.ClassDef) and node.name not in models:
                check_class(node, where, figures)
            if isinstance(node, _Function):
                decisions = count_decisions(node)
                if decisions > MAX_DECISIONS:
                    place = f"{where}:{node.lineno} {node.name}: {decisions} decisions"
                    figures.add_place(TANGLED_FUNCTIONS, place)
        for function in functions(tree):
            nodes = 0
            statements = 0
            for node in ast.walk(function):
                nodes += 1
                statements += isinstance(node, ast.stmt)
            excess = nodes - round(limits[NODES] * statements)
            share = f"{nodes / statements:.1f} nodes per statement"
            dense.append((excess, f"{where}:{function.lineno} {function.name}: {share}"))
    dense.sort(reverse=True)
    figures.places[NODES] = [place for excess, place in dense[:10] if excess > 0]
    return figures


def functions(tree: ast.Module) -> Iterator[_Function]:
    """Yield the functions and methods of a module, inner ones too."""
    for node in ast.walk(tree):
        if isinstance(node, _Function):
            yield node


def count_node(node: ast.AST, where: str, figures: Figures) -> None:
    """Count a syntax node, and whether it is a statement or one of the packed forms."""
    figures.counts[NODES] += 1
    name = ""
    match node:
        case ast.IfExp():
            name = CONDITIONALS
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            name = COMPREHENSIONS
        case ast.BoolOp():
            name = BOOLEANS
        case ast.Assign(targets=[ast.Tuple(), *_], value=ast.Tuple()):
            name = TUPLES
    if name and isinstance(node, ast.expr | ast.stmt):
        figures.add_place(name, f"{where}:{node.lineno}")
    if isinstance(node, ast.stmt):
        figures.counts["statements"] += 1


def count_lines(path: Path, figures: Figures) -> None:
    """Count the lines of code and the comments; docstrings are neither."""
    code: set[int] = set()
    comments = 0
    skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    with path.open("rb") as file:
        begins = True
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                directive = token.string.startswith(("# noqa", "# type:", "# pragma"))
                comments += not directive
            elif token.type == tokenize.STRING and begins:
                continue
            elif token.type not in (*skipped, tokenize.ENCODING):
                code.update(range(token.start[0], token.end[0] + 1))
            # A string at the beginning of a statement is a docstring.
            begins = token.type in (*skipped, tokenize.ENCODING, tokenize.COMMENT)
    figures.counts["lines"] += len(code)
    figures.counts[COMMENTS] += comments


def check_class(node: ast.ClassDef, where: str, figures: Figures) -> None:
    """Count a class with too many attributes, or with many but no reason."""
    count = len(attributes(node))
    place = f"{where}:{node.lineno} {node.name}: {count} attributes"
    if count > MAX_ATTRIBUTES:
        figures.add_place(LARGE_CLASSES, place)
    elif count > MAX_UNEXPLAINED_ATTRIBUTES:
        doc = " ".join((ast.get_docstring(node) or "").split())
        if REASON not in doc:
            figures.add_place(UNEXPLAINED_CLASSES, place)


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the declared fields of a class, and the attributes that it sets on `self`."""
    names: set[str] = set()
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.add(statement.target.id)
    for inner in ast.walk(node):
        match inner:
            case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                names.add(inner.attr)
    return names


def count_decisions(function: _Function) -> int:
    """Return the cyclomatic complexity of a function: 1, and 1 for each branch and loop."""
    count = 1
    for node in ast.walk(function):
        match node:
            case ast.If() | ast.IfExp() | ast.For() | ast.AsyncFor() | ast.While():
                count += 1
            case ast.ExceptHandler() | ast.comprehension() | ast.match_case():
                count += 1
            case ast.BoolOp():
                count += len(node.values) - 1
    return count


def find_models(trees: Iterable[ast.Module]) -> set[str]:
    """Return the names of pydantic models; their fields are those of a document."""
    bases: dict[str, set[str]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base).split("[")[0] for base in node.bases}
    models = set(_MODELS)
    found = True
    while found:
        found = False
        for name, names in bases.items():
            if name not in models and names & models:
                models.add(name)
                found = True
    return models


if __name__ == "__main__":
    sys.exit(main())
