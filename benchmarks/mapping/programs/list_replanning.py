"""A list as a task with `for_each`: another tool of the same capability takes over where one fails."""

import json

import anyio

from benchmarks.mapping import client
from replanning import Plan, ReplanningEngine, tool

PLAN = Plan.parse(f"""
goal: {{objective: Convert all documents}}
tasks:
  - {{id: list, tool: list_documents}}
  - id: convert
    depends_on: [list]
    for_each: ${{list.output}}
    tool: convert
    arguments: {{n: "${{item}}"}}
    max_parallel: {client.AT_ONCE}
    on_item_failure: skip
""")


@tool(effect="none")
def list_documents() -> list[int]:
    """List the documents."""
    return list(range(client.DOCUMENTS))


@tool(capability="convert", effect="none")
def convert(n: int) -> dict[str, object]:
    """Convert a document."""
    return client.convert(n)


@tool(capability="convert", effect="none")
def convert_elsewhere(n: int) -> dict[str, object]:
    """Convert a document with the other converter."""
    return client.convert_elsewhere(n)


async def main() -> None:
    """Start the run, or continue it where it was killed."""
    engine = ReplanningEngine(store="runs.db")
    tools = [list_documents, convert, convert_elsewhere]
    result = await engine.execute(PLAN, tools=tools, run_id="documents-7")
    print(json.dumps(result.outputs["convert"]))


if __name__ == "__main__":
    anyio.run(main)
