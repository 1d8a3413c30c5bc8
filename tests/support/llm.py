"""Support for tests of language models: a shape, a provider that asks one, prices, and plugins."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pydantic import BaseModel

from replanning import Alternative, ReplanRequest
from replanning.llm import LLMOptions, LLMProvider, Price, PriceTable
from replanning.plugins import installed_plugins
from tests.support.runs import again

PRICES = PriceTable({"scripted-1": Price(1, 10)})
"""A dollar for a million tokens in, ten for a million out."""


class Total(BaseModel):
    """A shape of answers."""

    sum: int


class Asker:
    """A provider that asks a model, and proposes the same thing again whatever it answers."""

    name = "asker"

    def __init__(self, model: LLMProvider, *prompts: str, system: str | None = None) -> None:
        self.model, self.prompts, self.system = model, prompts or ("what now?",), system

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        for prompt in self.prompts:
            options = LLMOptions(system=self.system, meter=request.meter, deadline=request.deadline)
            await self.model.complete(prompt, options)
        return again(request)


PLUGINS = """
from replanning.llm import LLMProvider

class Plain(LLMProvider):
    name = "plain"
    default_model = "plain-1"
    async def request(self, prompt, options):
        await self.environment.clock.sleep(1)
        return self.completion(prompt, "yes", options)

class Keyed(LLMProvider):
    name = "keyed"
    def __init__(self, api_key=None, *, environ, base_url="https://keyed.example", **others):
        others.pop("transport")
        super().__init__(**others)
        self.base_url, self.key = base_url, environ.get("KEYED_KEY")
    def unavailable_reason(self):
        return "" if self.key else "KEYED_KEY is not set"
    async def request(self, prompt, options):
        return self.completion(prompt, "keyed", options)

class Broken(LLMProvider):
    def __init__(self):
        raise RuntimeError("no luck")
    async def request(self, prompt, options): ...

class Loner:
    async def complete_detailed(self, prompt, options): ...
"""


@pytest.fixture(name="plugins")
def somebodys_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Language models that somebody has installed."""
    (tmp_path / "somebodys.py").write_text(PLUGINS)
    info = tmp_path / "somebodys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    points = "\n".join(
        f"{name.lower()} = somebodys:{name}"
        for name in ("Plain", "Keyed", "Broken", "Loner", "Gone")
    )
    (info / "entry_points.txt").write_text(f"[replanning.providers]\n{points}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    installed_plugins.cache_clear()
    yield
    installed_plugins.cache_clear()
