"""Every situation holds for every integration, or its driver says why the framework cannot."""

import pytest

from tests.integrations.drivers import INTEGRATIONS, OWN_WARNINGS, Integration
from tests.integrations.situations import PAGE, SITUATIONS, Situation, written
from tests.support.asyncio_only import anyio_backend  # noqa: F401 - a fixture

pytestmark = OWN_WARNINGS

CELLS = [
    pytest.param(integration, situation, id=f"{integration.name}-{situation.__name__}")
    for integration in INTEGRATIONS
    for situation in SITUATIONS
    if situation.__name__ not in integration.cannot
]


@pytest.mark.parametrize(("integration", "situation"), CELLS)
async def test_situation(integration: Integration, situation: Situation) -> None:
    """What a row of the table says holds for what a column names."""
    await situation(integration.driver())


def test_reasons_are_about_situations() -> None:
    """What an integration cannot do is a situation of the table."""
    names = {each.__name__ for each in SITUATIONS}
    assert {name for each in INTEGRATIONS for name in each.cannot} <= names


def test_the_page_has_the_table() -> None:
    """The table in the documentation is that of the tests."""
    text = PAGE.read_text(encoding="utf-8")
    assert written(text) == text, "run `python -m tests.integrations.situations`"
