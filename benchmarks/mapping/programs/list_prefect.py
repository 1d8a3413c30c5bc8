"""A list as a mapped task, and another task for the documents at which that failed.

https://docs.prefect.io/v3/how-to-guides/workflows/run-work-concurrently (`.map`, futures and their
states) and https://docs.prefect.io/v3/advanced/results (results that outlive a process).
"""

import json

from prefect import flow, task
from prefect.futures import wait
from prefect.task_runners import ThreadPoolTaskRunner

from benchmarks.mapping import client


@task(persist_result=True)
def list_documents() -> list[int]:
    """List the documents."""
    return list(range(client.DOCUMENTS))


@task(persist_result=True)
def convert(n: int) -> dict[str, object]:
    """Convert a document."""
    return client.convert(n)


@task(persist_result=True)
def convert_elsewhere(n: int) -> dict[str, object]:
    """Convert a document with the other converter."""
    return client.convert_elsewhere(n)


@flow(persist_result=True, task_runner=ThreadPoolTaskRunner(max_workers=client.AT_ONCE))
def convert_all() -> str:
    """Convert all documents, each with the other converter if the usual one fails."""
    documents = list_documents()
    futures = convert.map(documents)
    wait(futures)
    for n, future in enumerate(futures):
        if future.state.is_failed():
            futures[n] = convert_elsewhere.submit(documents[n])
    wait(futures)
    results = []
    for future in futures:
        results.append(future.result() if future.state.is_completed() else None)
    return json.dumps(results)


if __name__ == "__main__":
    print(convert_all())
