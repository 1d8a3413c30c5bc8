"""What planning mode is asked for: a goal, and the issue that it comes from, as the run keeps it (J1). Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from replanning._plan import Goal, JsonObject, JsonValue, Plan
from replanning._quoting import shortened, trimmed
from replanning.planning._steps import about, phase_of

KEPT: Final = "request"
"""Where the first phase of a plan says what was asked for."""

_LONGEST: Final = 100_000
"""Characters of an issue that are kept, likewise of what is known of its repository."""
_LONGEST_COMMENT: Final = 20_000
_MOST_COMMENTS: Final = 200
_MOST_EARLIER: Final = 20


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class IssueComment(_Part):
    """What somebody wrote below an issue.

    Attributes:
        author: by which name.
        text: what.
        at: when; None where that is not known.
    """

    author: str
    text: str
    at: datetime | None = None


class TaskRequest(_Part):
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

    def bounded(self) -> TaskRequest:
        """The request as it is kept: the latest comments and runs, and texts that are marked where they were cut."""
        comments = self.comments[-_MOST_COMMENTS:]
        changed: dict[str, object] = {
            "issue_id": shortened(self.issue_id, _LONGEST_COMMENT),
            "title": shortened(self.title, _LONGEST_COMMENT),
            "text": shortened(self.text, _LONGEST),
            "comments": tuple(
                one.model_copy(
                    update={"author": shortened(one.author, 200), "text": shortened(one.text, _LONGEST_COMMENT)}
                )
                for one in comments
            ),
            "repository": trimmed(self.repository, _LONGEST),
            "earlier": tuple(trimmed(one, _LONGEST_COMMENT) for one in self.earlier[-_MOST_EARLIER:]),
        }
        return self.model_copy(update=changed)

    def kept(self) -> JsonObject:
        """What a run keeps of it beside the goal, which its plan has."""
        return self.bounded().model_dump(mode="json", exclude={"goal"}, exclude_defaults=True)

    def told(self) -> JsonObject:
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
    kept = about(first).get(KEPT)
    return TaskRequest.model_validate({**(kept if isinstance(kept, dict) else {}), "goal": plan.goal})
