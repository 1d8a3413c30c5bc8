"""A model divides a goal into subtasks, and a tool does each of them. Run it as it is; the model is a scripted one.

`max_items` bounds what the model may ask for: the second time it asks for a hundred subtasks, and none of them begins.
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
    """What the model asks for."""

    title: str
    words: int


class Division(BaseModel):
    """The answer of the model."""

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
    """Put the parts together."""
    return ", ".join(parts)


async def main():
    """Write two reports."""
    for _ in range(2):
        result = await ReplanningEngine().execute(PLAN, tools=[divide, write, join])
        print(result.status, result.outputs.get("join", result.reason))


if __name__ == "__main__":
    anyio.run(main)
