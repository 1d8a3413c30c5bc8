"""A provider in ten lines: a failed task is retried once, in a minute."""

from replanning import Alternative
from replanning.changes import RetryTask


class Patience:
    name = "patience"

    async def propose(self, request):
        tasks = [task for task in request.view.stuck() if task.failures == 1]
        retries = tuple(RetryTask(task_id=task.id, delay=60) for task in tasks)
        if not retries:
            return []
        return [Alternative(changes=retries, reason="it may work in a minute", confidence=0.8)]
