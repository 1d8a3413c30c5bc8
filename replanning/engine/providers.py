"""Registry of providers, made from names, provider objects and language models."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import anyio

from replanning.decision.request import AlternativeProvider
from replanning.environment import Environment
from replanning.errors import NoLLMProvider
from replanning.llm.guards import FallbackLLM, GuardedLLM
from replanning.llm.provider import LLMProvider
from replanning.llm.selection import AUTO, create_llm_provider, is_llm
from replanning.plan.redaction import Redactor
from replanning.plugins import load_plugin
from replanning.settings import Settings

REPAIR_PLUGIN: Final = "repair"

LLM_PROVIDER_PLUGIN: Final = "llm"
"""The plugin that turns a language model into a provider of alternatives."""

_CLOSE_SECONDS: Final = 2.0

ProviderSpec = AlternativeProvider | LLMProvider | str


class ProviderRegistry:
    """Makes providers of alternatives, and closes the language models that it has made.

    Args:
        settings: of language models.
        environment: time and chance.
        redactor: takes secrets out of prompts.
    """

    def __init__(self, settings: Settings, environment: Environment, redactor: Redactor) -> None:
        self._settings = settings
        self._environment = environment
        self._redactor = redactor
        self._models: list[LLMProvider] = []

    def resolve(self, specs: Sequence[ProviderSpec]) -> list[AlternativeProvider]:
        """Return a provider for each spec, but none twice for the same name.

        Raises:
            PluginError: a plugin is missing or does not load.
            NoLLMProvider: a language model that is named cannot be used.
            TypeError: an object is not a provider.
        """
        expanded = [item for spec in specs for item in ((REPAIR_PLUGIN, AUTO) if spec == AUTO else (spec,))]
        providers = []
        for index, spec in enumerate(expanded):
            if not isinstance(spec, str) or spec not in expanded[:index]:
                try:
                    providers.append(self._resolve_one(spec))
                except NoLLMProvider:
                    if spec != AUTO:  # which uses a language model only if there is one
                        raise
        return providers

    async def aclose(self) -> None:
        """Close the connections of the language models that were made here; a later call opens them again."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_SECONDS):
            for model in self._models:
                with suppress(Exception):  # a plugin that fails to close does no harm
                    await model.aclose()

    def _resolve_one(self, spec: ProviderSpec) -> AlternativeProvider:
        if isinstance(spec, str) and (spec == AUTO or is_llm(spec)):
            model = create_llm_provider(
                spec, settings=self._settings, environment=self._environment, redactor=self._redactor
            )
            self._models.append(model)
            spec = model
        elif isinstance(spec, LLMProvider):
            _set_redactor(spec, self._redactor)  # a secret of the run is one in prompts as well
            if not isinstance(spec, FallbackLLM | GuardedLLM):
                spec = GuardedLLM(spec, max_concurrency=self._settings.llm.max_concurrency)
        provider: object
        if isinstance(spec, LLMProvider):
            provider = load_plugin("providers", LLM_PROVIDER_PLUGIN)(spec)
        else:
            provider = load_plugin("providers", spec)() if isinstance(spec, str) else spec
        if not isinstance(provider, AlternativeProvider):
            raise TypeError(
                f"{provider!r} is not a provider: it needs a `name` and an async `propose(request)`, or to be an LLMProvider"
            )
        return provider


def _set_redactor(model: LLMProvider, redactor: Redactor) -> None:
    """Let a model, and the models that it wraps, use a redactor."""
    model.redactor = redactor
    wrapped = model.members if isinstance(model, FallbackLLM) else ()
    for inner in (model.client,) if isinstance(model, GuardedLLM) else wrapped:
        _set_redactor(inner, redactor)
