"""Parts of a resumed plan that its journal lacks, because it has a mask in their place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from replanning.live.entries import TaskEntry
from replanning.live.facts import context_keys
from replanning.plan.json_values import is_redacted
from replanning.plan.messages import join_names
from replanning.plan.tasks import COMMAND_PREFIX, Task, TaskBody
from replanning.plan.types import TaskId
from replanning.secrets import MASK

MASK_CURE: Final = (
    "give the plan again: `replanning resume RUN --plan FILE`, or `run_or_resume` in Python"
)
"""What helps where a journal has a mask in the place of a secret."""

CHANGE_CURE: Final = "the plan that was given does not have it: modify the task, or set the value of the context again"
"""What helps where the secret came with a change, so that the plan does not have it."""


def has_masked_check(task: TaskBody) -> bool:
    """Return whether a command among the checks of a task has a mask; other checks are not executed."""
    return any(text.startswith(COMMAND_PREFIX) and MASK in text for text in task.acceptance)


class MaskedParts:
    """Parts of a resumed plan that have a mask in the place of a secret; none in a new run.

    A mask must never reach a tool: a task that would use one fails before its work.

    Attributes:
        tasks: the tasks with masked arguments or checks, also in a fallback or an undo.
        tools: the tools with masked templates.
        context: the keys of the context with masked values.
        cure: what helps.
    """

    def __init__(self) -> None:
        self.tasks: set[TaskId] = set()
        self.tools: set[str] = set()
        self.context: set[str] = set()
        self.cure = MASK_CURE

    def __repr__(self) -> str:
        return f"<MaskedParts tasks={self.tasks} tools={self.tools} context={self.context}>"

    def __bool__(self) -> bool:
        return bool(self.tasks or self.tools or self.context)

    def problem_of(self, task: Task, lineage: Iterable[TaskEntry]) -> str:
        """Return why a task cannot run: it would use a masked part; empty if it would not.

        Args:
            task: the task.
            lineage: the tasks that its arguments come from, itself included.
        """
        places = []
        is_masked = any(ancestor.id in self.tasks for ancestor in lineage)
        if is_masked and is_redacted(task.arguments):
            places.append("its arguments")
        if is_masked and has_masked_check(task):
            places.append("its checks")
        if task.tool in self.tools:
            places.append(f"its tool {task.tool!r}")
        if self.context:
            for key in context_keys(task):
                if key in self.context:
                    places.append(f"the context {key!r}")
        if not places:
            return ""
        where = join_names(places, 5)
        return f"the journal has {MASK} for a secret in {where}; {self.cure}"
