"""Resolves the names of providers and language models into providers of alternatives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import anyio

from replanning.decision.request import AlternativeProvider
from replanning.environment import Environment
from replanning.errors import NoLLMProvider, PluginError
from replanning.llm.provider import FallbackLLM, GuardedLLM, LLMProvider
from replanning.llm.selection import AUTO, create_llm_provider, is_llm
from replanning.plan.messages import brief_repr
from replanning.plan.types import JsonValue
from replanning.plugins import load_plugin
from replanning.run.retries import warn_of_error
from replanning.secrets import Redactor
from replanning.settings import Settings

if TYPE_CHECKING:
    from replanning.config import LoadedSettings

REPAIR_PLUGIN: Final = "repair"

LLM_PROVIDER_PLUGIN: Final = "llm"
"""Plugin that turns a language model into a provider of alternatives."""

DECOMPOSER_PLUGIN: Final = "decompose"
"""Plugin that lets a language model split tasks whose results a judge rejected."""

_CLOSE_SECONDS: Final = 2.0

ProviderSpec = AlternativeProvider | LLMProvider | str


def as_settings(settings: Settings | LoadedSettings | Mapping[str, JsonValue] | None) -> Settings:
    """Return settings from a settings object, the result of loading, a mapping, or None.

    Raises:
        SettingsError: they are not valid.
    """
    if settings is None:
        return Settings()
    if isinstance(settings, Settings):
        return settings
    if isinstance(settings, Mapping):
        return Settings.model_validate(dict(settings))
    return settings.settings


@dataclass(repr=False, eq=False)
class ProviderRegistry:
    """Makes providers of alternatives, and closes the language models that it made.

    Args:
        settings: of language models.
        environment: clock and randomness.
        redactor: masks secrets in prompts.
    """

    _settings: Settings
    _environment: Environment
    _redactor: Redactor
    _models: list[LLMProvider] = field(default_factory=list)
    _given_models: list[LLMProvider] = field(default_factory=list)

    def use_redactor(self, redactor: Redactor) -> None:
        """Mask secrets in prompts with another redactor, such as that of an engine's runs."""
        self._redactor = redactor
        for model in (*self._models, *self._given_models):
            _set_redactor(model, redactor)

    def resolve(self, specs: Sequence[ProviderSpec]) -> list[AlternativeProvider]:
        """Return a provider for each spec, and only one for each name.

        Raises:
            PluginError: a plugin is missing or does not load.
            NoLLMProvider: a named language model cannot be used.
            TypeError: a single provider, or something else, was passed instead of a list.
        """
        if isinstance(specs, str) or not isinstance(specs, Iterable):
            raise TypeError(_not_a_list(specs))
        expanded: list[ProviderSpec] = []
        for spec in specs:
            if spec == AUTO:
                expanded.append(REPAIR_PLUGIN)
            expanded.append(spec)
        providers: list[AlternativeProvider] = []
        named: set[str] = set()
        for spec in expanded:
            if not isinstance(spec, str):
                providers.append(self._provider(spec))
                continue
            if spec in named:
                continue
            named.add(spec)
            if spec == AUTO or is_llm(spec):
                try:
                    model = create_llm_provider(
                        spec,
                        settings=self._settings,
                        environment=self._environment,
                        redactor=self._redactor,
                    )
                except NoLLMProvider:
                    # `auto` uses a language model only if there is one.
                    if spec == AUTO:
                        continue
                    raise
                self._models.append(model)
                providers.append(load_plugin("providers", LLM_PROVIDER_PLUGIN)(model))
            elif spec in (LLM_PROVIDER_PLUGIN, DECOMPOSER_PLUGIN):
                raise PluginError(
                    f"provider {spec!r}: it needs a language model; name the model instead, such "
                    "as openai"
                )
            else:
                providers.append(load_plugin("providers", spec)())
        return providers

    def _provider(self, spec: AlternativeProvider | LLMProvider) -> AlternativeProvider:
        """Wrap a language model in a provider; return any other object as it is."""
        if not isinstance(spec, LLMProvider):
            return spec
        _set_redactor(spec, self._redactor)
        self._given_models.append(spec)
        model: LLMProvider = spec
        if not isinstance(spec, FallbackLLM | GuardedLLM):
            model = GuardedLLM(spec, max_concurrency=self._settings.llm.max_concurrency)
        provider: AlternativeProvider = load_plugin("providers", LLM_PROVIDER_PLUGIN)(model)
        return provider

    async def aclose(self) -> None:
        """Close the connections of the models made here; a later call opens them again."""
        if not self._models:
            return
        with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_SECONDS):
            for model in self._models:
                try:
                    await model.aclose()
                except Exception as error:  # noqa: BLE001 - a plugin failed to close
                    warn_of_error(f"closing model {model.name!r}", error, self._redactor)


def _set_redactor(model: LLMProvider, redactor: Redactor) -> None:
    """Make a model, and the models that it wraps, use a redactor."""
    model.redactor = redactor
    wrapped: Sequence[LLMProvider] = ()
    if isinstance(model, GuardedLLM):
        wrapped = (model.client,)
    elif isinstance(model, FallbackLLM):
        wrapped = model.members
    for inner in wrapped:
        _set_redactor(inner, redactor)


def _not_a_list(given: object) -> str:
    """Return the problem of a value that is not a list of providers, with a remedy."""
    if isinstance(given, str) or hasattr(given, "propose") or isinstance(given, LLMProvider):
        advice = "put it into a list"
    elif hasattr(given, "engine"):
        advice = "an orchestrator is attached to an engine: engine.attach(orchestrator)"
    else:
        advice = "name them, or pass objects with `name` and `propose`"
    return f"providers: expected a list of providers, got {brief_repr(given)}; {advice}"
