"""Who is asked for alternatives, made of what users give: names, providers, language models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from operator import mul
from typing import Final

import anyio

from replanning.changes import Alternative
from replanning.decision.confidence import OutcomeHistory, tasks_to_run
from replanning.decision.request import AlternativeProvider
from replanning.environment import Environment
from replanning.errors import BudgetExceeded, LLMError, NoLLMProvider
from replanning.live.view import PlanView
from replanning.llm.completions import LLMOptions
from replanning.llm.guards import FallbackLLM, GuardedLLM
from replanning.llm.provider import LLMProvider
from replanning.llm.selection import AUTO, create_llm_provider, is_llm
from replanning.plan.redaction import Redactor
from replanning.plan.tasks import ToolSpec
from replanning.plugins import load_plugin
from replanning.settings import Settings

_MAX_TOOLS: Final = 100
"""How many tools are compared at most; the embedding of each is a call of its own, once."""


class ToolSimilarity:
    """Finds the tool that is most like another, by the embeddings of what is said of both.

    A tool whose own outcomes, and those of its capability, tell nothing is then expected to do as well as the one that
    is most like it. Each tool is embedded once for as long as this lives.

    Args:
        llm: whose embeddings are compared.
        at_least: how alike tools must be, as the cosine between their embeddings.
    """

    def __init__(self, llm: LLMProvider, *, min_similarity: float = 0.8) -> None:
        self._llm = llm
        self._min_similarity = min_similarity
        self._embeddings: dict[str, Sequence[float]] = {}

    def __repr__(self) -> str:
        return f"<Likeness by {self._llm!r}>"

    async def extend_outcomes(
        self,
        past: OutcomeHistory,
        alternatives: Sequence[Alternative],
        view: PlanView,
        options: LLMOptions,
        *,
        failing: AbstractSet[str | None] = frozenset(),
    ) -> tuple[OutcomeHistory, list[str]]:
        """Past outcomes that also know those of tools that are alike, and notes on what went wrong.

        Args:
            past: the outcomes that are known.
            alternatives: what is proposed; the tools that they use count.
            view: the plan, with its tools.
            options: the deadline of each call, and who accounts for it.
            failing: tools that are to be replaced, whose failures say nothing about what replaces them.
        """
        used = {task.tool for one in alternatives for task in tasks_to_run(one.changes, view) if task.tool}
        unknown = [tool for tool in map(view.tool, sorted(used)) if tool is not None and not past(tool.name)]
        others = [tool for tool in view.tools.values() if tool.name not in failing] if unknown else []
        known = [tool for tool in others if past(tool.name)][:_MAX_TOOLS]
        if not known:
            return past, []
        try:
            for tool in (*known, *unknown[:_MAX_TOOLS]):
                await self._embed_tool(tool, options)
        except (LLMError, BudgetExceeded) as error:
            return past, [f"which tools are alike is not known: {error}"[:2000]]
        nearest = {tool.name: self._nearest_tool(tool, known) for tool in unknown[:_MAX_TOOLS]}
        return _with_substitutes(past, nearest), []

    async def _embed_tool(self, tool: ToolSpec, options: LLMOptions) -> None:
        text = _tool_description(tool)
        if text not in self._embeddings:
            self._embeddings[text] = _unit_vector(await self._llm.embed(text, options))

    def _nearest_tool(self, tool: ToolSpec, known: Sequence[ToolSpec]) -> str:
        """The name of the tool that is most like this one; empty where none is enough."""
        own = self._embeddings[_tool_description(tool)]
        likeness, name = max((_cosine(own, self._embeddings[_tool_description(one)]), one.name) for one in known)
        return name if likeness >= self._min_similarity else ""


def _with_substitutes(past: OutcomeHistory, nearest: Mapping[str, str]) -> OutcomeHistory:
    return lambda name: past(nearest.get(name) or name)


def _tool_description(tool: ToolSpec) -> str:
    return f"{tool.name}: {tool.description or tool.capability or tool.name}"


def _unit_vector(vector: Sequence[float]) -> list[float]:
    length = math.hypot(*vector)
    return [value / length for value in vector] if length else list(vector)


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Of vectors of length 1; 0 where they cannot be compared."""
    return sum(map(mul, one, other)) if len(one) == len(other) else 0.0


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
