"""What planning mode is asked for: a goal, and the issue that it comes from, as the run keeps it (J1). Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from replanning._plan import Goal, JsonObject, JsonValue, Plan
from replanning._quoting import truncate_text, truncate_value
from replanning.planning._steps import phase_of, planning_metadata

REQUEST_KEY: Final = "request"
"""Where the first phase of a plan says what was asked for."""

_MAX_ISSUE_CHARS: Final = 100_000
"""Characters of an issue that are kept, likewise of what is known of its repository."""
_MAX_COMMENT_CHARS: Final = 20_000
_MAX_COMMENTS: Final = 200
_MAX_EARLIER_RUNS: Final = 20


class _RequestModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class IssueComment(_RequestModel):
    """What somebody wrote below an issue.

    Attributes:
        author: by which name.
        text: what.
        at: when; None where that is not known.
    """

    author: str
    text: str
    at: datetime | None = None


class TaskRequest(_RequestModel):
    """A goal, and everything that is known of where it comes from (J1).

    The texts are data: whoever wrote them, they tell a model what is wanted and never what it may do.

    Attributes:
        goal: what is to be achieved.
        issue_id: where it is written, such as `owner/repo#12` or `group/project!7`; empty where it is nowhere.
        title: of the issue.
        text: of the issue.
        comments: what people wrote below it, oldest first.
        repository: what is known of the place where the work is done.
        earlier: plans and executions of the same issue before, oldest first.
    """

    goal: Goal
    issue_id: str = ""
    title: str = ""
    text: str = ""
    comments: tuple[IssueComment, ...] = ()
    repository: JsonObject = Field(default_factory=dict)
    earlier: tuple[JsonObject, ...] = ()

    def truncated(self) -> TaskRequest:
        """The request as it is kept: the latest comments and runs, and texts that are marked where they were cut."""
        comments = self.comments[-_MAX_COMMENTS:]
        changed: dict[str, object] = {
            "issue_id": truncate_text(self.issue_id, _MAX_COMMENT_CHARS),
            "title": truncate_text(self.title, _MAX_COMMENT_CHARS),
            "text": truncate_text(self.text, _MAX_ISSUE_CHARS),
            "comments": tuple(
                one.model_copy(
                    update={
                        "author": truncate_text(one.author, 200),
                        "text": truncate_text(one.text, _MAX_COMMENT_CHARS),
                    }
                )
                for one in comments
            ),
            "repository": truncate_value(self.repository, _MAX_ISSUE_CHARS),
            "earlier": tuple(truncate_value(one, _MAX_COMMENT_CHARS) for one in self.earlier[-_MAX_EARLIER_RUNS:]),
        }
        return self.model_copy(update=changed)

    def to_metadata(self) -> JsonObject:
        """What a run keeps of it beside the goal, which its plan has."""
        return self.truncated().model_dump(mode="json", exclude={"goal"}, exclude_defaults=True)

    def prompt_data(self) -> JsonObject:
        """What a model is told of it, as the prompts name it."""
        goal, issue = self.goal, {"issue": self.issue_id, "title": self.title, "text": self.text}
        request: JsonObject = {"task": goal.objective, **{name: text for name, text in issue.items() if text}}
        if goal.success_criteria:
            request["success_criteria"] = list(goal.success_criteria)
        comments: list[JsonValue] = [one.model_dump(mode="json", exclude_none=True) for one in self.comments]
        earlier: list[JsonValue] = [*self.earlier]
        return {
            "request": request,
            "comments": comments,
            "repository": self.repository,
            "earlier_runs": earlier,
        }


def request_of(plan: Plan) -> TaskRequest | None:
    """What a run of planning mode was asked for, from the plan with which it was opened; None for any other plan."""
    first = next((task for task in plan.tasks if phase_of(task) is not None), None)
    if first is None:
        return None
    kept = planning_metadata(first).get(REQUEST_KEY)
    return TaskRequest.model_validate({**(kept if isinstance(kept, dict) else {}), "goal": plan.goal})
