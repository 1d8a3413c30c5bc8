"""Tasks that every library in the comparison executes: they do nothing, and every tenth fails."""

from __future__ import annotations


class Broken(ValueError):
    """Error of a failing task."""


async def do(name: str) -> str:
    """Execute a task.

    Raises:
        Broken: the name ends in a zero.
    """
    if name.endswith("0"):
        raise Broken(name)
    return name


def names(tasks: int) -> list[str]:
    """Return the names of the tasks of a plan; every tenth will fail."""
    return [f"t{number}" for number in range(1, tasks + 1)]
