"""What planning mode is asked for: a goal, and the issue that it comes from, as the run keeps it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import Final
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field

from replanning.errors import UnknownRun
from replanning.journal.records import Record
from replanning.journal.store import RunStore
from replanning.llm.quoting import truncate_text, truncate_value
from replanning.plan.document import Plan
from replanning.plan.tasks import Goal
from replanning.plan.types import JsonObject, JsonValue, RunId
from replanning.planning.steps import phase_of, planning_metadata

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
    """A goal, and everything that is known of where it comes from.

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


class RunJournals:
    """The stores of the engines that an exporter is attached to; none but the last is kept alive by that.

    An exporter is told of what happens from now on. What was before, because the run was resumed, or because a record
    was dropped, stands in a journal.

    Args:
        stores: further stores to look in.
    """

    def __init__(self, *stores: RunStore) -> None:
        self._extra_stores = stores
        self._latest_store: RunStore | None = None
        self._attached = WeakKeyDictionary[RunStore, None]()

    def __repr__(self) -> str:
        return f"<Journals in {len(self._attached) + len(self._extra_stores)} stores>"

    def add_store(self, store: RunStore) -> None:
        """Look in another store, too, and before all others."""
        self._attached.pop(store, None)
        self._attached[store], self._latest_store = None, store

    def records_after(self, run: RunId, seq: int = 0) -> list[Record]:
        """What is on record of a run after the record of that number.

        Raises:
            UnknownRun: no store has it.
            StoreError: it cannot be read.
        """
        for store in [*self._extra_stores, *self._attached][::-1]:  # the latest is the likeliest
            with suppress(UnknownRun):
                return list(store.read(run, seq))
        raise UnknownRun(run, "no store that is known here has its journal")

    def records_until(self, run: RunId, seq: int, record: Record) -> Iterator[Record]:
        """What is on record of a run after the record of that number, up to another, and that one; nothing after it.

        Raises:
            UnknownRun: no store has what is missing in between.
            StoreError: it cannot be read.
        """
        if record.seq > seq + 1:
            yield from (one for one in self.records_after(run, seq) if one.seq < record.seq)
        if record.seq > seq:
            yield record
