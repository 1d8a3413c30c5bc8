"""Request to planning mode: a goal with the issue that it comes from, as the run keeps it. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from replanning.llm.quoting import truncate_text, truncate_value
from replanning.plan.document import Plan
from replanning.plan.tasks import Goal
from replanning.plan.types import JsonObject
from replanning.planning.tasks import PlanningTask

_MAX_ISSUE_CHARS: Final = 100_000
"""Characters of an issue that are kept, and of the data about its repository."""

_MAX_COMMENT_CHARS: Final = 20_000

_MAX_COMMENTS: Final = 200

_MAX_EARLIER_RUNS: Final = 20


class _RequestModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class IssueComment(_RequestModel):
    """Comment on an issue.

    Attributes:
        author: login of the author.
        text: the text.
        at: time of writing, if known.
    """

    author: str
    text: str
    at: datetime | None = None


class TaskRequest(_RequestModel):
    """A goal with its context: the issue, its comments, its repository and earlier runs.

    The texts are data: they describe the goal to the model, but never permit it anything.

    Attributes:
        goal: the goal.
        issue_id: id of the issue, such as `owner/repo#12` or `group/project!7`; empty without an issue.
        title: title of the issue.
        text: text of the issue.
        comments: comments on the issue, oldest first.
        repository: data about the repository.
        earlier: earlier plans and executions for the same issue, oldest first.
    """

    goal: Goal
    issue_id: str = ""
    title: str = ""
    text: str = ""
    comments: tuple[IssueComment, ...] = ()
    repository: JsonObject = Field(default_factory=dict)
    earlier: tuple[JsonObject, ...] = ()

    def truncated(self) -> TaskRequest:
        """Return the request with its latest comments and runs, and with long texts cut and marked."""
        comments = (
            IssueComment(
                author=truncate_text(comment.author, 200),
                text=truncate_text(comment.text, _MAX_COMMENT_CHARS),
                at=comment.at,
            )
            for comment in self.comments[-_MAX_COMMENTS:]
        )
        changed: dict[str, object] = {
            "issue_id": truncate_text(self.issue_id, _MAX_COMMENT_CHARS),
            "title": truncate_text(self.title, _MAX_COMMENT_CHARS),
            "text": truncate_text(self.text, _MAX_ISSUE_CHARS),
            "comments": tuple(comments),
            "repository": truncate_value(self.repository, _MAX_ISSUE_CHARS),
            "earlier": tuple(truncate_value(run, _MAX_COMMENT_CHARS) for run in self.earlier[-_MAX_EARLIER_RUNS:]),
        }
        return self.model_copy(update=changed)

    def to_metadata(self) -> JsonObject:
        """Return the part that a run keeps in its metadata; the goal is in its plan."""
        return self.truncated().model_dump(mode="json", exclude={"goal"}, exclude_defaults=True)

    def prompt_data(self) -> JsonObject:
        """Return the prompt data: sections as named in prompts."""
        request: JsonObject = {"task": self.goal.objective}
        request |= {
            name: text for name, text in (("issue", self.issue_id), ("title", self.title), ("text", self.text)) if text
        }
        if self.goal.success_criteria:
            request["success_criteria"] = list(self.goal.success_criteria)
        return {
            "request": request,
            "comments": [comment.model_dump(mode="json", exclude_none=True) for comment in self.comments],
            "repository": self.repository,
            "earlier_runs": [*self.earlier],
        }


def request_of(plan: Plan) -> TaskRequest | None:
    """Return the request of a run from the plan that opened it; None if the plan is not one of planning mode."""
    first = next((notes for task in plan.tasks if (notes := PlanningTask.of(task)).phase is not None), None)
    return None if first is None else TaskRequest.model_validate({**(first.request or {}), "goal": plan.goal})
