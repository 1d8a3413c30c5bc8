"""Graphs of LangGraph with a `ToolNode` of their own."""

from __future__ import annotations

from typing import Any

from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from replanning.integrations.langgraph import ReplanningMiddleware
from tests.integrations.drivers.langchain import LangChain


class LangGraph(LangChain):
    """A thread of a graph with a node for the model and one for the tools."""

    has_approvals = False

    def graph(self, tools: list[Any]) -> Any:
        """Return the compiled graph."""

        async def model(state: MessagesState) -> Any:
            return {"messages": [await self._model.ainvoke(state["messages"])]}

        options: dict[str, Any] = {}
        if self.engine is not None:
            options["awrap_tool_call"] = ReplanningMiddleware().awrap_tool_call
        builder = StateGraph(MessagesState)
        builder.add_node("model", model)
        builder.add_node("tools", ToolNode(tools, **options))
        builder.add_edge(START, "model")
        builder.add_conditional_edges("model", tools_condition)
        builder.add_edge("tools", "model")
        return builder.compile(checkpointer=self.saver)


driver = LangGraph
