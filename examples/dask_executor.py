"""A plan on a Dask cluster: one process owns the plan, and the workers of the cluster execute the tasks.

Needs `pip install distributed`. It starts a cluster on this machine; use another one with the address of its scheduler,
`Client("tcp://…")`.
"""

import anyio
from distributed import Client, LocalCluster

from replanning import Plan, ReplanningEngine

PLAN = Plan.parse("""
goal: {objective: Count the words of two pages}
tools:
  - {name: scan, capability: read-page}
  - {name: photograph, capability: read-page}
  - {name: count}
tasks:
  - {id: first,  tool: scan, arguments: {page: 1}}
  - {id: second, tool: scan, arguments: {page: 2}}
  - {id: words,  tool: count, arguments: {texts: ["${first.output}", "${second.output}"]}, depends_on: [first, second]}
""")


def scan(page):
    """Read a page; the second one fails."""
    if page == 2:
        raise ValueError("the page is torn")
    return "to be or not to be"


def photograph(page):
    """Read any page."""
    return f"that is the question of page {page}"


def count(texts):
    """Count words."""
    return sum(len(text.split()) for text in texts)


TOOLS = {function.__name__: function for function in (scan, photograph, count)}


async def main():
    """Start a cluster, and execute the plan on it."""
    async with (
        LocalCluster(
            n_workers=2, processes=False, dashboard_address=None, asynchronous=True
        ) as cluster,
        Client(cluster, asynchronous=True) as dask,
    ):

        async def work(task, context):
            future = dask.submit(TOOLS[task.tool], **context.arguments, pure=False)
            try:
                return await future
            finally:
                # Removes a stopped task from the cluster; a finished one is not affected.
                await future.cancel()

        result = await ReplanningEngine().execute(PLAN, work, max_concurrency=100)
    print(result.status, result.outputs["words"])
    for revision in result.revisions:
        print(revision.reason)


anyio.run(main)
