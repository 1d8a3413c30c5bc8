"""The import contracts of `pyproject.toml` speak of every module that exists: import-linter checks the rest."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}
PRIVATE = {f"replanning.{path.stem}" for path in (ROOT / "replanning").glob("_*.py")} - {"replanning.__init__"}

pytestmark = pytest.mark.skipif(not PRIVATE, reason="needs the checkout: the contracts are about its files")


def layer_of(module: str) -> set[str]:
    """The modules that share a layer with this one."""
    layers = [set(line.replace("|", ":").split(" : ")) for line in CONTRACTS["layers"]["layers"]]
    (found,) = [{f"replanning.{name}" for name in layer} for layer in layers if module in layer]
    return found


def test_whole_core_is_pure() -> None:
    """Every module of the two lowest layers is held to have no I/O, no loop, no clock and no randomness."""
    core = layer_of("_plan") | layer_of("_errors")
    pure = set(CONTRACTS["sans-io"]["source_modules"])
    assert core == {module for module in pure if not module.startswith("replanning.planning.")}


def test_planning_decides_purely() -> None:
    """What planning mode decides is held to the same, module by module."""
    planning = {f"replanning.planning.{name}" for name in ("_decision", "_limits", "_phases")}
    assert planning <= set(CONTRACTS["sans-io"]["source_modules"])


def test_private_modules_are_private() -> None:
    """Families and fakes may import no private module at all, whichever it is."""
    assert set(CONTRACTS["public-names"]["forbidden_modules"]) == PRIVATE


def test_no_module_has_a_side_door() -> None:
    """No module of the package, private or public, may import a family directly."""
    public = {f"replanning.{path.parent.name}" for path in (ROOT / "replanning").glob("*/__init__.py")}
    public |= {f"replanning.{path.stem}" for path in (ROOT / "replanning").glob("[a-z]*.py")}
    families = set(CONTRACTS["one-door"]["forbidden_modules"])

    assert set(CONTRACTS["one-door"]["source_modules"]) == PRIVATE | public - families
