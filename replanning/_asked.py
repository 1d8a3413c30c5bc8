"""Who is asked for alternatives, made of what users give: names, providers, language models."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import anyio

from replanning._clock import Environment
from replanning._errors import NoLLMProvider
from replanning._interfaces import AlternativeProvider
from replanning._likeness import Likeness
from replanning._llm import LLMProvider
from replanning._llm_guards import FallbackLLM, GuardedLLM
from replanning._llms import AUTO, create_llm_provider, is_llm
from replanning._plugins import load
from replanning._redaction import Redactor
from replanning._settings import Settings

REPAIR = "repair"
ALTERNATIVES = "llm"
"""The plugin that makes a provider of alternatives of a language model."""

_PATIENCE = 2.0
"""Seconds that closing connections may take."""

Wanted = AlternativeProvider | LLMProvider | str


class Asked:
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

    def each(self, wanted: Sequence[Wanted]) -> list[AlternativeProvider]:
        """A provider for each that is wanted; none twice.

        Raises:
            PluginError: a plugin is missing or does not load.
            NoLLMProvider: a language model that is named cannot be asked.
            TypeError: something is no provider.
        """
        names = [name for one in wanted for name in ((REPAIR, AUTO) if one == AUTO else (one,))]
        once = [one for number, one in enumerate(names) if not isinstance(one, str) or one not in names[:number]]
        made = [self._auto() if one == AUTO else self._one(one) for one in once]
        return [provider for provider in made if provider is not None]

    def likeness(self) -> Likeness | None:
        """What finds tools that are alike, where a language model is named for that.

        Raises:
            PluginError: there is no such plugin, or it does not load.
            NoLLMProvider: it cannot be asked.
        """
        wanted = self._settings.alternatives
        if wanted.embeddings is None:
            return None
        model = self._made(wanted.embeddings)
        return Likeness(model, at_least=wanted.min_similarity)

    async def aclose(self) -> None:
        """Close the connections of the language models that were made here; they are made anew when they are asked."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(_PATIENCE):
            for model in self.models:
                with suppress(Exception):  # law 7: a plugin that cannot be closed harms nobody
                    await model.aclose()

    def _auto(self) -> AlternativeProvider | None:
        """The language model that can be used, where there is one."""
        with suppress(NoLLMProvider):
            return self._named(AUTO)
        return None

    def _one(self, wanted: Wanted) -> AlternativeProvider:
        if isinstance(wanted, LLMProvider):
            _hide(wanted, self._redactor)  # what is a secret in a run is one to whoever is asked for it
            guarded = isinstance(wanted, FallbackLLM | GuardedLLM)
            most = self._settings.llm.max_concurrency
            return _proposing(wanted if guarded else GuardedLLM(wanted, max_concurrency=most))
        if isinstance(wanted, str) and is_llm(wanted):
            return self._named(wanted)
        made: AlternativeProvider = load("providers", wanted)() if isinstance(wanted, str) else wanted
        if not isinstance(made, AlternativeProvider):
            raise TypeError(
                f"{made!r} is no provider: it needs a `name` and an async `propose(request)`, or to be an LLMProvider"
            )
        return made

    def _named(self, name: str) -> AlternativeProvider:
        return _proposing(self._made(name))

    def _made(self, name: str) -> LLMProvider:
        model = create_llm_provider(
            name, settings=self._settings, environment=self._environment, redactor=self._redactor
        )
        self.models.append(model)
        return model


def _proposing(model: LLMProvider) -> AlternativeProvider:
    made: AlternativeProvider = load("providers", ALTERNATIVES)(model)
    return made


def _hide(model: LLMProvider, redactor: Redactor) -> None:
    """Let a model, and those behind it, take out what a redactor knows."""
    model.redactor = redactor
    behind = model.members if isinstance(model, FallbackLLM) else ()
    for one in (model.client,) if isinstance(model, GuardedLLM) else behind:
        _hide(one, redactor)
