"""A LangGraph graph whose steps come from a live plan. Needs `pip install langgraph`; run it as it is."""

from typing import TypedDict

import anyio
from langgraph.graph import END, START, StateGraph
from own_orchestrator import PLAN, work

from replanning import ReplanningEngine, Task


class State(TypedDict):
    task: Task | None


async def main() -> None:
    """Two nodes, next and execute, go round until the plan is at its end; repairs happen in between."""
    async with ReplanningEngine().open(PLAN) as run:
        ready = run.ready()

        async def take(state: State) -> State:
            return {"task": await anext(ready, None)}

        async def execute(state: State) -> State:
            async with run.attempt(state["task"]) as attempt:
                attempt.output = await work(state["task"], attempt.context)
            return state

        graph = StateGraph(State).add_node("next", take).add_node("execute", execute)
        graph.add_edge(START, "next")
        graph.add_conditional_edges("next", lambda state: "execute" if state["task"] else END)
        graph.add_edge("execute", "next")
        await graph.compile().ainvoke({"task": None})
    print(run.result.status, run.result.outputs, [revision.reason for revision in run.result.revisions])


if __name__ == "__main__":
    anyio.run(main)
