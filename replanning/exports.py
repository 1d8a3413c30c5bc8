"""Public module of a class: the package that exports it, not the file that defines it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable


def report_module(package: str, names: Iterable[str]) -> None:
    """Let the exported classes of a package report the package as their module.

    A class that declares fields keeps its own module: pydantic, dataclasses and `typing.get_type_hints` look up the
    names in its annotations there.

    Args:
        package: full name of the package; it is being imported.
        names: names that it exports. Those not imported yet are left out.
    """
    namespace = vars(sys.modules[package])
    top_level = sys.modules["replanning"].__all__
    for name in names:
        exported = namespace.get(name)
        if not isinstance(exported, type) or not exported.__module__.startswith("replanning."):
            continue  # a function, a constant, or an alias of a built-in type
        if not inspect.get_annotations(exported):
            exported.__module__ = "replanning" if name in top_level else package
