"""Selection of language models by name, by settings, or by the keys in the environment."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from replanning.environment import Environment
from replanning.errors import NoLLMProvider, PluginError, SettingsError
from replanning.llm.completions import Price, PriceTable
from replanning.llm.provider import FallbackLLM, GuardedLLM, LLMProvider
from replanning.plugins import installed_plugins, load_plugin
from replanning.secrets import Redactor
from replanning.settings import Settings

if TYPE_CHECKING:
    import httpx

AUTO: Final = "auto"

AUTO_PROVIDERS: Final = {
    "github-copilot": ("GITHUB_COPILOT_TOKEN",),
    "anthropic": ("ANTHROPIC_API_KEY",),
    "openai": ("OPENAI_API_KEY", "OPENAI_BASE_URL"),  # a compatible server may need no key
}
"""Providers that `auto` looks for, in this order, each with variables, one of which must be set.

Ollama comes last and needs none.
"""


def create_llm_provider(
    name: str | Sequence[str] = AUTO,
    *,
    settings: Settings | None = None,
    environ: Mapping[str, str] | None = None,
    environment: Environment | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
    redactor: Redactor | None = None,
) -> LLMProvider:
    """Create a language model by name, or the first usable one, configured by the settings.

    `auto` takes the models that the setting `provider` names; else the first of GitHub Copilot,
    Anthropic and OpenAI whose key is in the environment; else Ollama, if `llm.ollama` is on. If
    these fail, the models of `llm.fallback` are asked; if that names none, `auto` asks the next
    one that it finds. Each has a circuit breaker and at most `llm.max_concurrency` calls at once.

    Args:
        name: a plugin, `name:model` for one of its models, or several, in a list or with commas,
            which are asked in order.
        settings: the settings; `llm`, `timeout.replan` and `provider` are used.
        environ: source of keys; by default the environment of the process.
        environment: source of time and randomness.
        transport: replaces the network.
        redactor: redacts further secrets in prompts, beyond those that every provider knows.

    Raises:
        NoLLMProvider: none can be used; the message names those that were tried.
        PluginError: the plugin does not exist, does not load, or is not a language model.
        SettingsError: the settings contradict one another.
    """
    settings = settings or Settings()
    clients = create_clients(
        name, settings=settings, environ=environ, environment=environment, transport=transport
    )
    problems: list[str] = []
    for client in clients:
        problem = client.unavailable_reason()
        if problem:
            problems.append(f"{client.name} cannot be asked: {problem}")
    if len(problems) == len(clients):
        raise NoLLMProvider("; ".join(problems))
    guarded: list[LLMProvider] = []
    for client in clients:
        if redactor is not None:
            client.redactor = redactor
        guarded.append(GuardedLLM(client, max_concurrency=settings.llm.max_concurrency))
    if len(guarded) == 1:
        return guarded[0]
    is_named = bool(_named_models(name, settings) or settings.llm.fallback)
    return FallbackLLM(guarded, share_time=is_named)


def _named_models(name: str | Sequence[str], settings: Settings) -> list[str]:
    """Return the models named here or in the settings; empty if `auto` looks for one."""
    named = _split_names([name] if isinstance(name, str) else name)
    if named:
        return named
    return _split_names([each for each in settings.provider if is_llm(each)])


def _split_names(texts: Sequence[str]) -> list[str]:
    """Return the comma-separated names in texts, each once, without `auto`."""
    names: dict[str, None] = {}
    for text in texts:
        for part in text.split(","):
            names[part.strip()] = None
    return [name for name in names if name not in ("", AUTO)]


def create_clients(
    name: str | Sequence[str] = AUTO,
    *,
    settings: Settings,
    environ: Mapping[str, str] | None = None,
    environment: Environment | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> list[LLMProvider]:
    """Create the clients behind `create_llm_provider`, in order, available or not.

    Raises:
        NoLLMProvider, PluginError, SettingsError: as `create_llm_provider`.
    """
    llm = settings.llm
    environ = os.environ if environ is None else environ
    shared: dict[str, object] = {
        "timeout": settings.timeout.replan,
        "environ": environ,
        "environment": environment,
        "transport": transport,
    }
    # Limits that are not set are left to the client: a small local model differs from a service.
    for limit in ("temperature", "max_tokens"):
        if limit in llm.model_fields_set:
            shared[limit] = getattr(llm, limit)
    if llm.prices:
        prices: dict[str, Price] = {}
        for model, price in llm.prices.items():
            prices[model] = Price(price.input, price.output)
        shared["prices"] = PriceTable(prices)
    # The model and the address in the settings apply to the first client.
    first = dict(shared)
    if llm.model != AUTO:
        first["model"] = llm.model
    if llm.base_url is not None:
        first["base_url"] = llm.base_url
    names = _named_models(name, settings)
    if names:
        clients = [_create_client(names[0], first)]
    elif llm.base_url is not None:
        problem = "it must not receive the key of just any provider"
        advice = "name the provider that it belongs to"
        raise SettingsError.at("llm.base_url", f"{problem}; {advice}")
    else:
        clients = _find_clients(settings, environ, first, shared)
    fallbacks = [each for each in _split_names(llm.fallback) if each not in names]
    for each in (*names[1:], *fallbacks):
        clients.append(_create_client(each, shared))
    distinct: dict[tuple[str, str], LLMProvider] = {}
    for client in clients:
        distinct[client.name, client.model] = client
    return list(distinct.values())


def _find_clients(
    settings: Settings,
    environ: Mapping[str, str],
    first: Mapping[str, object],
    others: Mapping[str, object],
) -> list[LLMProvider]:
    """Create the clients that `auto` finds: those with a key, and Ollama if the settings allow it.

    If the settings name fallbacks, only the first is created, and the fallbacks follow it.

    Args:
        settings: the settings.
        environ: source of keys.
        first: arguments of the first client.
        others: arguments of the others.

    Raises:
        NoLLMProvider: none can be used.
    """
    candidates: dict[str, tuple[str, ...]] = dict(AUTO_PROVIDERS)
    if settings.llm.ollama:
        candidates["ollama"] = ()
    clients: list[LLMProvider] = []
    problems: list[str] = []
    for name, variables in candidates.items():
        keys = [variable for variable in variables if environ.get(variable, "").strip()]
        if variables and not keys:
            problems.append(f"{name}: {variables[0]} is not set")
            continue
        try:
            client = _create_client(name, others if clients else first)
        except PluginError as error:
            problems.append(f"{name}: {error}")
            continue
        problem = client.unavailable_reason()
        if problem:
            problems.append(f"{name}: {problem}")
            continue
        clients.append(client)
        if settings.llm.fallback:
            break
    if not clients:
        hint = "" if settings.llm.ollama else "; to use Ollama, turn on the setting llm.ollama"
        raise NoLLMProvider(f"no language model can be used: {'; '.join(problems)}{hint}")
    return clients


def is_llm(name: str) -> bool:
    """Return whether a name for `create_llm_provider` is that of a language model.

    Raises:
        PluginError: the plugin does not exist or does not load.
    """
    if name == AUTO:
        return False
    if "," in name:
        return True
    return hasattr(load_plugin("providers", name.partition(":")[0]), "complete_detailed")


def _create_client(name: str, arguments: Mapping[str, object]) -> LLMProvider:
    """Create a client with the arguments that it accepts.

    Raises:
        PluginError: the client does not exist or cannot be created.
    """
    plugin, _, model = name.partition(":")
    kind: Any = load_plugin("providers", plugin)
    if not hasattr(kind, "complete_detailed"):
        installed: list[str] = []
        for each in installed_plugins("providers"):
            with suppress(PluginError):  # it does not load
                if is_llm(each):
                    installed.append(each)
        names = ", ".join(installed) or "none"
        problem = f"the plugin {plugin!r} is not a language model"
        raise PluginError(f"{problem}; installed language models: {names}")
    parameters = inspect.signature(kind).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    given = dict(arguments)
    if model:
        given["model"] = model
    if not takes_all:
        given = {key: value for key, value in given.items() if key in parameters}
    try:
        client = kind(**given)
    except Exception as error:  # constructors of plugins may raise anything
        raise PluginError(f"the language model {plugin!r} cannot be created: {error!r}") from error
    if not isinstance(client, LLMProvider):
        problem = f"the plugin {plugin!r} is not a language model"
        raise PluginError(f"{problem}: {kind.__name__} is not an LLMProvider")
    return client
