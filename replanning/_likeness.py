"""Which tools are alike by what is said of them: evidence of past success for a tool that has none of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import mul
from typing import Final

from replanning._changes import Alternative
from replanning._completions import LLMOptions
from replanning._confidence import OutcomeHistory, tasks_to_run
from replanning._errors import BudgetExceeded, LLMError
from replanning._llm import LLMProvider
from replanning._plan import ToolSpec
from replanning._view import PlanView

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
