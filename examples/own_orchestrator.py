"""Your own orchestrator: it pulls ready tasks and reports their results. Run it as it is."""

import anyio

from replanning import Goal, Plan, ReplanningEngine, Task, ToolSpec

TOOLS = [
    ToolSpec(name="scanner", capability="read-page"),
    ToolSpec(name="camera", capability="read-page"),
]
PLAN = Plan(
    goal=Goal(objective="Read a page and count its words"),
    tools=tuple(TOOLS),
    tasks=(Task(id="read", tool="scanner"), Task(id="count", depends_on=("read",))),
)


async def work(task, context):
    """Execute a task; the scanner is broken, so its task fails and the engine replaces it with the camera."""
    if task.tool == "scanner":
        raise OSError("the scanner does not answer")
    return "to be or not to be" if task.tool == "camera" else len(context.results["read"].split())


async def main():
    """Run the loop of an orchestrator."""
    engine = ReplanningEngine()
    async with engine.open(PLAN) as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = await work(task, attempt.context)
    print(run.result.status, run.result.outputs)
    for revision in run.result.revisions:
        print(f"revision {revision.number}: {revision.reason}")


if __name__ == "__main__":
    anyio.run(main)
