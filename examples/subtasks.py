"""A model divides a goal into subtasks, and a tool executes each. Run it as it is; the model is scripted.

`max_items` limits the number of subtasks: the second time, the model asks for a hundred, and none of them starts.
"""

import anyio
from pydantic import BaseModel

from replanning import Plan, ReplanningEngine, tool
from replanning.testing import ScriptedLLM

PLAN = Plan.parse("""
goal: {objective: Write a report about a city}
tasks:
  - {id: divide, tool: divide, arguments: {goal: A report about Kyoto}}
  - id: write
    for_each: ${divide.output}
    key: ${item.title}
    goal: Write about ${item.title}
    max_items: 5
    max_parallel: 3
    tool: write
    arguments: {title: "${item.title}", words: "${item.words}"}
    depends_on: [divide]
  - {id: join, tool: join, arguments: {parts: "${write.output}"}, depends_on: [write]}
""")

MODEL = ScriptedLLM(
    [
        {
            "subtasks": [
                {"title": "History", "words": 300},
                {"title": "Temples", "words": 500},
                {"title": "Food", "words": 200},
            ]
        },
        {"subtasks": [{"title": f"Street {number}", "words": 10} for number in range(100)]},
    ]
)


class Subtask(BaseModel):
    """Subtask that the model asks for."""

    title: str
    words: int


class Division(BaseModel):
    """Answer of the model."""

    subtasks: list[Subtask]


@tool
async def divide(goal: str) -> list[dict]:
    """Ask the model for the subtasks of a goal."""
    answer = await MODEL.complete_json(f"Divide this into subtasks: {goal}", Division)
    return [subtask.model_dump() for subtask in answer.subtasks]


@tool
def write(title: str, words: int) -> str:
    """Write a part."""
    return f"{title} ({words} words)"


@tool
def join(parts: list[str]) -> str:
    """Join the parts."""
    return ", ".join(parts)


async def main():
    """Write two reports."""
    for _ in range(2):
        result = await ReplanningEngine().execute(PLAN, tools=[divide, write, join])
        print(result.status, result.outputs.get("join", result.reason))


if __name__ == "__main__":
    anyio.run(main)
