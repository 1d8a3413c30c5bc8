"""Which language model is asked: by name or by what is there, in which order, and which is left alone for a while."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from replanning.environment import Environment
from replanning.errors import NoLLMProvider, PluginError, Problem, SettingsError
from replanning.llm.guards import FallbackLLM, GuardedLLM
from replanning.llm.prices import PRICES, Price
from replanning.llm.provider import LLMProvider
from replanning.plan.redaction import Redactor
from replanning.plugins import installed_plugins, load_plugin
from replanning.settings import LLMSettings, Settings

if TYPE_CHECKING:
    import httpx


AUTO: Final = "auto"

AUTO_PROVIDERS: Final = ("github-copilot", "anthropic", "openai")
"""What `auto` looks for, in this order; Ollama comes last, where it is enabled."""


def create_llm_provider(
    name: str | Sequence[str] = AUTO,
    *,
    settings: Settings | None = None,
    environ: Mapping[str, str] | None = None,
    environment: Environment | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
    redactor: Redactor | None = None,
) -> LLMProvider:
    """A language model by name, or the first that can be used, with what the settings say of it.

    `auto` takes those that the setting `provider` names; else the first of GitHub Copilot, Anthropic and OpenAI whose
    key is in the environment, else Ollama where `llm.ollama` is on. What `llm.fallback` names is asked where these
    fail. Each has a circuit breaker, and `llm.max_concurrency` calls at once.

    Args:
        name: a plugin, `name:model` for one of its models, or several, in a list or with commas, to be asked in order.
        settings: of which those under `llm`, `timeout.replan` and `provider` matter here.
        environ: where keys are looked for; by default the environment of the program.
        environment: time and chance.
        transport: what sends requests instead of the network.
        redactor: takes secrets out of what is sent, beyond those that every provider knows.

    Raises:
        NoLLMProvider: none can be used; says what was looked for.
        PluginError: there is no such plugin, it does not load, or it is no language model.
        SettingsError: the settings contradict one another.
    """
    settings = settings or Settings()
    clients = create_clients(name, settings=settings, environ=environ, environment=environment, transport=transport)
    problems = [(client.name, client.unavailable_reason()) for client in clients]
    if all(problem for _, problem in problems):
        raise NoLLMProvider("; ".join(f"{who} cannot be asked: {problem}" for who, problem in problems))
    if redactor is not None:
        for client in clients:
            client.redactor = redactor
    guarded = [GuardedLLM(client, max_concurrency=settings.llm.max_concurrency) for client in clients]
    return guarded[0] if len(guarded) == 1 else FallbackLLM(guarded)


def create_clients(
    name: str | Sequence[str] = AUTO,
    *,
    settings: Settings,
    environ: Mapping[str, str] | None = None,
    environment: Environment | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> list[LLMProvider]:
    """Whom `create_llm_provider` would ask, in order, whether or not they can be asked; errors likewise."""
    make = _ClientFactory(settings, os.environ if environ is None else environ, environment, transport)
    wanted = _split_names(name) or _split_names([one for one in settings.provider if is_llm(one)])
    first = make.create_all(wanted) if wanted else [make.first_available()]
    more = make.create_all(
        [one for one in _split_names(settings.llm.fallback) if one not in wanted], ignore_model_settings=True
    )
    return list({(client.name, client.model): client for client in (*first, *more)}.values())


def is_llm(name: str) -> bool:
    """Whether a name, as `create_llm_provider` takes them, is that of a language model, not of another provider.

    Raises:
        PluginError: there is no such plugin, or it does not load.
    """
    if name == AUTO:
        return False
    return "," in name or hasattr(load_plugin("providers", name.partition(":")[0]), "complete_detailed")


class _ClientFactory(NamedTuple):
    """Makes clients."""

    settings: Settings
    environ: Mapping[str, str]
    environment: Environment | None
    transport: httpx.AsyncBaseTransport | None

    def create_all(self, names: Sequence[str], *, ignore_model_settings: bool = False) -> list[LLMProvider]:
        """The clients of these names; model and place of the settings are those of the first, and of none if plain."""
        return [
            self.create(name, ignore_model_settings=ignore_model_settings or number > 0)
            for number, name in enumerate(names)
        ]

    def create(self, name: str, *, ignore_model_settings: bool = False) -> LLMProvider:
        """The client of a name."""
        plugin, _, model = name.partition(":")
        made = _provider_class(plugin)
        given = {
            **self._shared_arguments(),
            **({} if ignore_model_settings else self._model_arguments(self.settings.llm)),
        }
        if model:
            given["model"] = model
        known = inspect.signature(made).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        try:
            client = made(**{key: value for key, value in given.items() if takes_all or key in known})
        except Exception as error:  # somebody's constructor may raise anything
            raise PluginError(f"the language model {plugin!r} cannot be made: {error!r}") from error
        if not isinstance(client, LLMProvider):
            raise PluginError(f"the plugin {plugin!r} is no language model: {made.__name__} is no LLMProvider")
        return client

    def first_available(self) -> LLMProvider:
        """The first that can be asked."""
        llm = self.settings.llm
        if llm.base_url is not None:
            problem = "it does not say whose place that is, which may not get the key of another; name the provider"
            raise SettingsError([Problem("llm.base_url", problem)])
        problems = []
        for name in (*AUTO_PROVIDERS, *(("ollama",) if llm.ollama else ())):
            try:
                client = self.create(name)
                problem = client.unavailable_reason()
                if not problem:
                    return client
            except PluginError as error:
                problem = str(error)
            problems.append(f"{name}: {problem}")
        hint = "" if llm.ollama else "; Ollama is looked for with the setting llm.ollama"
        raise NoLLMProvider(f"no language model can be used: {'; '.join(problems)}{hint}")

    def _shared_arguments(self) -> dict[str, object]:
        llm = self.settings.llm
        # What is not set is left to the client: a small model of one's own has other limits than a service.
        given: dict[str, object] = {key: getattr(llm, key) for key in llm.model_fields_set & _FORWARDED_SETTINGS}
        if llm.prices:
            given["prices"] = PRICES | {model: Price(price.input, price.output) for model, price in llm.prices.items()}
        given["timeout"] = self.settings.timeout.replan
        given["environ"] = self.environ
        given["environment"] = self.environment
        given["transport"] = self.transport
        return given

    def _model_arguments(self, llm: LLMSettings) -> dict[str, object]:
        given: dict[str, object] = {} if llm.model == AUTO else {"model": llm.model}
        return given if llm.base_url is None else {**given, "base_url": llm.base_url}


_FORWARDED_SETTINGS: Final = {"temperature", "max_tokens"}


def _split_names(name: str | Sequence[str]) -> list[str]:
    """The single names; none for `auto`."""
    names = [name] if isinstance(name, str) else name
    single = [part.strip() for one in names for part in one.split(",")]
    return [one for one in dict.fromkeys(single) if one and one != AUTO]


def _provider_class(plugin: str) -> type:
    found = load_plugin("providers", plugin)
    if not hasattr(found, "complete_detailed"):
        known = ", ".join(name for name in installed_plugins("providers") if _is_loadable_llm(name)) or "none"
        raise PluginError(f"the plugin {plugin!r} is no language model; those that are installed: {known}")
    return found


def _is_loadable_llm(name: str) -> bool:
    try:
        return is_llm(name)
    except PluginError:
        return False
