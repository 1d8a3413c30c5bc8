"""The examples of docs/how-to/testing.md run."""

import inspect
import re
from pathlib import Path

import anyio.to_thread
import pytest

PAGE = Path(__file__).parents[2] / "docs/how-to/testing.md"
TEXT = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.skipif(not TEXT, reason="needs the checkout: the page is not installed")


@pytest.mark.parametrize("number", range(len(BLOCKS)))
async def test_examples_of_the_page(number):
    """Each example is a test that passes as it is printed."""
    names: dict[str, object] = {"__name__": "page"}
    exec(compile(BLOCKS[number], f"{PAGE.name}, block {number + 1}", "exec"), names)
    tests = [
        value
        for name, value in names.items()
        if name.startswith("test_") and inspect.isfunction(value)
    ]
    assert len(tests) == 1
    if inspect.iscoroutinefunction(tests[0]):
        await tests[0]()
    else:
        await anyio.to_thread.run_sync(tests[0])


def test_page_has_examples():
    """The page has examples."""
    assert len(BLOCKS) == 5
