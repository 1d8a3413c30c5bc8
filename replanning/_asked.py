"""Who is asked for alternatives, made of what users give: names, providers, language models."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import anyio

from replanning._clock import Environment
from replanning._errors import NoLLMProvider
from replanning._interfaces import AlternativeProvider
from replanning._likeness import ToolSimilarity
from replanning._llm import LLMProvider
from replanning._llm_guards import FallbackLLM, GuardedLLM
from replanning._llms import AUTO, create_llm_provider, is_llm
from replanning._plugins import load_plugin
from replanning._redaction import Redactor
from replanning._settings import Settings

REPAIR_PLUGIN = "repair"
LLM_PROVIDER_PLUGIN = "llm"
"""The plugin that makes a provider of alternatives of a language model."""

_CLOSE_TIMEOUT_SECONDS = 2.0
"""Seconds that closing connections may take."""

ProviderSpec = AlternativeProvider | LLMProvider | str


class ProviderRegistry:
    """Makes providers of alternatives, and remembers what must be closed.

    Args:
        settings: of language models.
        environment: time and chance.
        redactor: takes secrets out of what is sent.

    Attributes:
        models: the language models that were made here.
    """

    def __init__(self, settings: Settings, environment: Environment, redactor: Redactor) -> None:
        self.models: list[LLMProvider] = []
        self._settings = settings
        self._environment = environment
        self._redactor = redactor

    def resolve(self, wanted: Sequence[ProviderSpec]) -> list[AlternativeProvider]:
        """A provider for each that is wanted; none twice.

        Raises:
            PluginError: a plugin is missing or does not load.
            NoLLMProvider: a language model that is named cannot be asked.
            TypeError: something is no provider.
        """
        names = [name for one in wanted for name in ((REPAIR_PLUGIN, AUTO) if one == AUTO else (one,))]
        once = [one for number, one in enumerate(names) if not isinstance(one, str) or one not in names[:number]]
        made = [self._auto() if one == AUTO else self._resolve_one(one) for one in once]
        return [provider for provider in made if provider is not None]

    def tool_similarity(self) -> ToolSimilarity | None:
        """What finds tools that are alike, where a language model is named for that.

        Raises:
            PluginError: there is no such plugin, or it does not load.
            NoLLMProvider: it cannot be asked.
        """
        wanted = self._settings.alternatives
        if wanted.embeddings is None:
            return None
        model = self._create_model(wanted.embeddings)
        return ToolSimilarity(model, min_similarity=wanted.min_similarity)

    async def aclose(self) -> None:
        """Close the connections of the language models that were made here; they are made anew when they are asked."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_TIMEOUT_SECONDS):
            for model in self.models:
                with suppress(Exception):  # law 7: a plugin that cannot be closed harms nobody
                    await model.aclose()

    def _auto(self) -> AlternativeProvider | None:
        """The language model that can be used, where there is one."""
        with suppress(NoLLMProvider):
            return self._llm_alternatives(AUTO)
        return None

    def _resolve_one(self, wanted: ProviderSpec) -> AlternativeProvider:
        if isinstance(wanted, LLMProvider):
            _set_redactor(wanted, self._redactor)  # what is a secret in a run is one to whoever is asked for it
            guarded = isinstance(wanted, FallbackLLM | GuardedLLM)
            most = self._settings.llm.max_concurrency
            return _as_alternative_provider(wanted if guarded else GuardedLLM(wanted, max_concurrency=most))
        if isinstance(wanted, str) and is_llm(wanted):
            return self._llm_alternatives(wanted)
        made: AlternativeProvider = load_plugin("providers", wanted)() if isinstance(wanted, str) else wanted
        if not isinstance(made, AlternativeProvider):
            raise TypeError(
                f"{made!r} is no provider: it needs a `name` and an async `propose(request)`, or to be an LLMProvider"
            )
        return made

    def _llm_alternatives(self, name: str) -> AlternativeProvider:
        return _as_alternative_provider(self._create_model(name))

    def _create_model(self, name: str) -> LLMProvider:
        model = create_llm_provider(
            name, settings=self._settings, environment=self._environment, redactor=self._redactor
        )
        self.models.append(model)
        return model


def _as_alternative_provider(model: LLMProvider) -> AlternativeProvider:
    made: AlternativeProvider = load_plugin("providers", LLM_PROVIDER_PLUGIN)(model)
    return made


def _set_redactor(model: LLMProvider, redactor: Redactor) -> None:
    """Let a model, and those behind it, take out what a redactor knows."""
    model.redactor = redactor
    behind = model.members if isinstance(model, FallbackLLM) else ()
    for one in (model.client,) if isinstance(model, GuardedLLM) else behind:
        _set_redactor(one, redactor)
