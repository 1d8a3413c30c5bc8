"""Selection of language models: by name, by the settings, or by the keys in the environment."""

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
"""Providers that `auto` looks for, in this order, by the variables of which one must be set; Ollama
comes last.
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
    """Create a language model by name, or the first that can be used, configured by the settings.

    `auto` takes those that the setting `provider` names; else the first of GitHub Copilot,
    Anthropic and OpenAI whose key is in the environment, else Ollama if `llm.ollama` is on. If
    these fail, the models of `llm.fallback` are asked; where that names none, `auto` asks the next
    one that it finds. Each has a circuit breaker, and `llm.max_concurrency` calls at once.

    Args:
        name: a plugin, `name:model` for one of its models, or several, in a list or with commas, to
            be asked in order.
        settings: those under `llm`, `timeout.replan` and `provider` are used.
        environ: source of keys; by default the environment of the process.
        environment: source of time and chance.
        transport: sends requests instead of the network.
        redactor: takes secrets out of prompts, beyond those that every provider knows.

    Raises:
        NoLLMProvider: none can be used; names those that were tried.
        PluginError: there is no such plugin, it does not load, or it is no language model.
        SettingsError: the settings contradict one another.
    """
    settings = settings or Settings()
    clients = create_clients(
        name, settings=settings, environ=environ, environment=environment, transport=transport
    )
    problems = [(client.name, client.unavailable_reason()) for client in clients]
    if all(problem for _, problem in problems):
        raise NoLLMProvider(
            "; ".join(f"{name} cannot be asked: {problem}" for name, problem in problems)
        )
    if redactor is not None:
        for client in clients:
            client.redactor = redactor
    guarded = [
        GuardedLLM(client, max_concurrency=settings.llm.max_concurrency) for client in clients
    ]
    found = not (_named_models(name, settings) or settings.llm.fallback)  # by `auto`
    return guarded[0] if len(guarded) == 1 else FallbackLLM(guarded, share_time=not found)


def _named_models(name: str | Sequence[str], settings: Settings) -> list[str]:
    """Return the models that are named, here or in the settings; none where `auto` looks for one."""
    given = [name] if isinstance(name, str) else name
    if not set(given) - {AUTO, ""}:
        given = [each for each in settings.provider if is_llm(each)]
    names = [part.strip() for each in given for part in each.split(",")]
    return [each for each in dict.fromkeys(names) if each not in ("", AUTO)]


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
    # Limits that are not set are left to the client: a small local model has others than a service.
    shared |= {
        key: getattr(llm, key) for key in llm.model_fields_set & {"temperature", "max_tokens"}
    }
    if llm.prices:
        shared["prices"] = PriceTable(
            {model: Price(price.input, price.output) for model, price in llm.prices.items()}
        )
    # The model and the address of the settings are those of the first client.
    first = shared | ({} if llm.model == AUTO else {"model": llm.model})
    if llm.base_url is not None:
        first["base_url"] = llm.base_url
    names = _named_models(name, settings)
    if names:
        clients = [_create_client(names[0], first)]
    elif llm.base_url is not None:
        problem = (
            "it may not receive the key of just any provider; name the provider that it belongs to"
        )
        raise SettingsError.at("llm.base_url", problem)
    else:
        clients = []
        problems = []
        for each, variables in (
            *AUTO_PROVIDERS.items(),
            *((("ollama", ()),) if llm.ollama else ()),
        ):
            problem = f"{variables[0]} is not set" if variables else ""
            if not variables or any(environ.get(variable, "").strip() for variable in variables):
                try:
                    client = _create_client(each, shared if clients else first)
                    problem = client.unavailable_reason()
                    if not problem:
                        clients.append(client)
                        if llm.fallback:
                            break
                except PluginError as error:
                    problem = str(error)
            problems.append(f"{each}: {problem}")
        if not clients:
            hint = "" if llm.ollama else "; to use Ollama, turn on the setting llm.ollama"
            raise NoLLMProvider(f"no language model can be used: {'; '.join(problems)}{hint}")
    fallbacks = [part.strip() for each in llm.fallback for part in each.split(",")]
    others = [each for each in fallbacks if each not in ("", AUTO, *names)]
    clients += [_create_client(each, shared) for each in (*names[1:], *others)]
    return list({(client.name, client.model): client for client in clients}.values())


def is_llm(name: str) -> bool:
    """Return whether a name, as `create_llm_provider` takes them, is that of a language model.

    Raises:
        PluginError: there is no such plugin, or it does not load.
    """
    if name == AUTO:
        return False
    return "," in name or hasattr(
        load_plugin("providers", name.partition(":")[0]), "complete_detailed"
    )


def _create_client(name: str, arguments: Mapping[str, object]) -> LLMProvider:
    plugin, _, model = name.partition(":")
    kind: Any = load_plugin("providers", plugin)
    if not hasattr(kind, "complete_detailed"):
        installed = []
        for each in installed_plugins("providers"):
            with suppress(PluginError):  # it does not load
                installed += [each] if is_llm(each) else []
        names = ", ".join(installed) or "none"
        raise PluginError(
            f"the plugin {plugin!r} is not a language model; installed language models: {names}"
        )
    parameters = inspect.signature(kind).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    given = {**arguments, **({"model": model} if model else {})}
    try:
        client = kind(
            **{key: value for key, value in given.items() if takes_all or key in parameters}
        )
    except Exception as error:  # constructors of plugins may raise anything
        raise PluginError(f"the language model {plugin!r} cannot be created: {error!r}") from error
    if not isinstance(client, LLMProvider):
        raise PluginError(
            f"the plugin {plugin!r} is not a language model: {kind.__name__} is not an LLMProvider"
        )
    return client
