"""A pydantic-ai agent whose one tool works on a live plan. Needs `pip install pydantic-ai-slim`; run it as it is."""

import anyio
from own_orchestrator import PLAN, work
from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel

from replanning import ReplanningEngine


def model(messages, info):
    """A scripted stand-in for a model: it takes steps until the plan is at its end, then says so."""
    said = str(messages[-1].parts[-1].content)
    finished = said.startswith("the plan")
    return ModelResponse(parts=[TextPart(said) if finished else ToolCallPart("next_step", {})])


async def main():
    """Each call of the tool is an attempt; when one fails, the next call finds the plan repaired."""
    async with ReplanningEngine().open(PLAN) as run:
        agent, ready = Agent(FunctionModel(model)), run.ready()

        @agent.tool_plain
        async def next_step() -> str:
            """Work on the next task of the plan."""
            task = await anext(ready, None)
            if task is None:
                return f"the plan {run.result.status}: {run.result.outputs}"
            async with run.attempt(task) as attempt:
                attempt.output = await work(task, attempt.context)
            return f"{task.id} with {task.tool}: {attempt.output}"

        print((await agent.run("Work on the plan.")).output)


if __name__ == "__main__":
    anyio.run(main)
