"""The page about testing says nothing that does not work."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/testing.md"
TEXT = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.skipif(not TEXT, reason="needs the checkout: the page is not installed")


@pytest.mark.parametrize("number", range(len(BLOCKS)))
async def test_examples_of_the_page(number: int) -> None:
    """Every program on the page is a test that passes as it stands."""
    names: dict[str, object] = {"__name__": "page"}
    exec(compile(BLOCKS[number], f"{PAGE.name}, block {number + 1}", "exec"), names)
    tests = [value for name, value in names.items() if name.startswith("test_") and inspect.isfunction(value)]
    assert len(tests) == 1
    done = tests[0]()
    if inspect.isawaitable(done):
        await done


def test_page_has_examples() -> None:
    """There are programs on the page."""
    assert len(BLOCKS) == 3
