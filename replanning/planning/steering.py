"""Steering of a run by comments on its issue: answers, approvals, feedback and replans."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

from replanning.decision.request import Question
from replanning.errors import RecordNotSerializable, ReplanningError, StoreError
from replanning.journal.records import (
    AnswerRefused,
    NoteAdded,
    QuestionAnswered,
    QuestionVerdict,
    RecordBody,
    ReplanRequested,
    RunOpened,
)
from replanning.llm.quoting import truncate_text
from replanning.plan.messages import spoken_id
from replanning.plan.types import QuestionId, RunId
from replanning.planning.coordinator import PlanningCoordinator
from replanning.planning.notes import HandledComments, read_note
from replanning.planning.state import TaskRequest, request_of
from replanning.run.event_loop import describe_error, isolate
from replanning.run.run import PlanRun

POLL_SECONDS: Final = 10.0
"""Seconds between polls for new comments."""

_COMMAND: Final = re.compile(
    r"\s*(?P<sign>[/!])(?P<word>[a-z][\w-]*)(?P<rest>(?:\s.*)?)", re.IGNORECASE | re.DOTALL
)

_QUESTION_NAME: Final = re.compile(r"(?:(?P<run>.+)\.q|q?)(?P<number>\d{1,6})", re.DOTALL)

_LEADING_QUOTE: Final = re.compile(r"(?:[ \t]*(?:>[^\n]*)?(?:\n|\Z))*")

_COMMENT_AUTHOR: Final = re.compile(r".* \(comment (?P<id>[\w-]+)\)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SteeringComment:
    """Comment on an issue.

    Attributes:
        id: identifier within its issue.
        author: login of the author.
        body: text in Markdown.
        at: time of creation, in UTC.
        notice: true if this tool wrote it, and not a person with the same account.
    """

    id: str
    author: str
    body: str
    at: datetime
    notice: bool = False

    @property
    def question(self) -> str:
        """Id of the question that a notice asks; empty for other comments."""
        return ""


class CommentSource(Protocol):
    """Source of comments, such as a `GitHubIssue`."""

    async def comments(self) -> Sequence[SteeringComment]:
        """Return all comments, oldest first; cheap when nothing has changed."""
        ...

    async def may_steer(self, comment: Any) -> bool:  # an instance of the source's own class
        """Return whether the author of a comment may steer the run."""
        ...


@runtime_checkable
class Issue(CommentSource, Protocol):
    """Issue that states a goal and takes comments.

    Attributes:
        command: the character that commands begin with.
    """

    command: ClassVar[str]

    async def issue(self) -> TaskRequest:
        """Return the request that the issue states."""
        ...

    def write_error(self) -> str:
        """Return why comments cannot be written, empty if they can; no request is made."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


class Steering:
    """Reads the comments on an issue and steers a run by them.

    While a clarification is pending, a comment after its notice is the answer. Any other comment is
    feedback, which the model judges in a reflection. `/replan` requests a new plan. An approval,
    such as of a dangerous action, needs `/approve` or `/reject` at the beginning of a comment, with
    the number of the question if several are pending; no other words count. On forges that
    interpret a slash themselves, such as GitLab, commands begin with an exclamation mark:
    `!approve`.

    Each comment counts once, even after a resume: the journal names the comment behind each record.
    Comments written before the run are part of its request and do not count again.

    Args:
        planning: coordinator of the run.
        forge: the issue.
        handled: ids of comments that the request includes; by default those of the run's request,
            or, if that does not come from an issue, all comments present when the run begins.
        on_message: receives a sentence on how each comment was handled.
    """

    def __init__(
        self,
        planning: PlanningCoordinator,
        forge: CommentSource,
        *,
        handled: Iterable[str] | None = None,
        on_message: Callable[[str], None] | None = None,
    ) -> None:
        self._planning = planning
        self._forge = forge
        self._initially_handled = None if handled is None else tuple(handled)
        self._on_message = on_message or (lambda message: None)
        self._run: RunId | None = None
        self._handled: set[str] = set()
        self._comments: Sequence[SteeringComment] = ()
        self._notice_times: dict[str, datetime] = {}
        self._unrecorded: list[HandledComments] = []
        self._last_problem = ""

    def __repr__(self) -> str:
        return f"<Steering of {self._run or 'no run'} by {self._forge!r} used={len(self._handled)}>"

    async def listen(self) -> None:
        """Poll until cancelled; failures are reported and do not harm the run."""
        clock = self._planning.environment.clock
        failures = 0
        while True:
            wait = POLL_SECONDS if self._planning.run is not None else 1.0
            try:
                await isolate(self.poll)
            except Exception as error:  # noqa: BLE001 - the issue is not part of the run
                failures += 1
                problem = f"comments cannot be read: {describe_error(error)}"
                if problem != self._last_problem:
                    self._last_problem = problem
                    self._on_message(problem)
                    self._record_failure(error)
                if getattr(error, "final", False):
                    return
                retry_after = getattr(error, "retry_after", None) or 0.0
                wait = max(retry_after, min(POLL_SECONDS * 2.0 ** (failures - 1), 300.0))
            else:
                failures = 0
                self._last_problem = ""
            await clock.sleep(wait)

    def _record_failure(self, error: Exception) -> None:
        """Record that comments cannot be read, and log a warning with the traceback."""
        run = self._planning.run
        if run is None or run.ended:
            return
        if isinstance(error, StoreError):  # the run handles that itself
            return
        run._lifecycle.record_error("comments", error)

    async def poll(self) -> None:
        """Handle the comments written since the last poll.

        Raises:
            ReplanningError: the comments cannot be read.
            StoreError: the journal cannot be read.
        """
        run = self._planning.run
        if run is None:
            return
        self._comments = comments = await self._forge.comments()
        if self._run != run.id:
            self._load_handled(run, comments)
        for comment in comments:
            if comment.question:  # remembered in case the notice is deleted later
                self._notice_times.setdefault(comment.question, comment.at)
        for comment in comments:
            if comment.notice or comment.id in self._handled:
                continue
            is_handled = await self._handle_comment(run, comment)
            if not is_handled:
                break  # this comment and those after it wait until the run continues
        # An ended run takes no notes; they are recorded once it is resumed.
        while self._unrecorded and not run.ended:
            note = self._unrecorded[0]
            run.note(note.note_type, note.to_json())
            self._unrecorded.pop(0)

    def _load_handled(self, run: PlanRun, comments: Sequence[SteeringComment]) -> None:
        """Load the ids of handled comments from the run's journal, inbox and request."""
        store = self._planning.engine.store
        is_new = True
        records = list(store.read(run.id))
        handled = {_comment_id(message.by) for message in store.inbox(run.id)}
        for record in records:
            body = record.body
            if isinstance(body, ReplanRequested | QuestionAnswered | AnswerRefused):
                handled.add(_comment_id(body.by))
            elif isinstance(body, NoteAdded):
                note = read_note(body)
                if isinstance(note, HandledComments):
                    is_new = False
                    handled.update(note.comments)
        self._run = run.id
        self._handled = handled - {""}
        if not is_new:
            return
        earlier = self._initially_handled
        if earlier is None:
            earlier = _comments_before(records[0].body, comments)
        self._handled |= set(earlier)
        self._unrecorded.append(
            HandledComments(comments=earlier, why="they were written before the run")
        )

    async def _handle_comment(self, run: PlanRun, comment: SteeringComment) -> bool:
        """Handle a comment; return False if it must wait until the run continues."""
        if not await self._forge.may_steer(comment):
            return self._ignore(comment, "its author may not steer this project")
        # A command is read at the beginning, or after leading quotes.
        text = truncate_text(_LEADING_QUOTE.sub("", comment.body, count=1).strip(), 10_000)
        command = ""
        parsed = _COMMAND.fullmatch(text)
        if parsed is not None:
            word = parsed["word"].lower()
            if word in ("approve", "reject", "replan"):
                command = word
                text = parsed["rest"].strip()
            elif parsed["sign"] == "/":
                return self._ignore(comment, "its command is for another program")
        by = f"{comment.author} (comment {comment.id})"
        match command:
            case "approve":
                return self._decide(run, comment, "approve", text, by)
            case "reject":
                return self._decide(run, comment, "reject", text, by)
            case "":
                if not text:
                    return self._ignore(comment, "it is empty")
                question = self._clarification_for(run, comment)
                if question is not None:
                    return self._answer(comment, question, "approve", text, by)
        if run.ended:
            return False
        run.request_replan(text or "a new plan is requested", by=by)
        return self._mark_handled(comment, f"{comment.author} has given feedback")

    def _clarification_for(self, run: PlanRun, comment: SteeringComment) -> Question | None:
        """Return the first pending clarification that a comment may answer in free text."""
        pending = self._planning.engine.pending(run.id)
        if not pending:
            return None
        state = self._planning.state
        for question in pending:
            if state.accepts_free_text(question.id) and self._is_reply(comment, question):
                return question
        return None

    def _decide(
        self, run: PlanRun, comment: SteeringComment, verdict: QuestionVerdict, text: str, by: str
    ) -> bool:
        """Answer the pending question that an approval or rejection refers to."""
        first_word, rest = [*text.split(maxsplit=1), "", ""][:2]
        named = first_word.strip("`.,:;")  # perhaps the number or the id of a question
        pending = self._planning.engine.pending(run.id)
        state = self._planning.state
        clarifications = {
            question.id for question in pending if state.accepts_free_text(question.id)
        }
        match = _QUESTION_NAME.fullmatch(named)
        if match is not None:
            text = rest
            called = QuestionId(f"{match['run'] or run.id}.q{match['number']}")
            of_name = [question for question in pending if question.id == called]
            chosen = [question for question in of_name if self._is_reply(comment, question)]
        else:
            noticed = [q for q in pending if self._is_reply(comment, q, require_notice=True)]
            chosen = [question for question in noticed if question.id not in clarifications]
            if not chosen and verdict == "reject":
                chosen = noticed
        if len(chosen) == 1:
            return self._answer(comment, chosen[0], verdict, text, by)
        if chosen:
            sign = getattr(self._forge, "command", "/")
            number = chosen[0].id.rpartition(".q")[2]
            why = f"{len(chosen)} questions are pending: name one, as in {sign}{verdict} {number}"
        elif match:
            why = f"question {match['number']} was not pending when it was written"
        elif clarifications and len(clarifications) == len(pending):
            why = "the pending question needs an answer in words"
        else:
            why = "no question was pending when it was written"
        return self._ignore(comment, why)

    def _answer(
        self,
        comment: SteeringComment,
        question: Question,
        verdict: QuestionVerdict,
        text: str,
        by: str,
    ) -> bool:
        try:
            self._planning.engine.answer(question.id, verdict, by=by, comment=text)
        except ReplanningError as error:
            if _is_of_store(error):
                raise  # the comment is handled once the store works again
            return self._ignore(comment, describe_error(error))
        return self._mark_handled(
            comment, f"{comment.author} has answered {spoken_id(question.id)}"
        )

    def _is_reply(
        self, comment: SteeringComment, question: Question, *, require_notice: bool = False
    ) -> bool:
        """Return whether a comment was written after its author could see a question.

        If the question has no notice, the time of asking decides; with `require_notice`, no comment
        counts.
        """
        notice = next((other for other in self._comments if other.question == question.id), None)
        if notice is not None:
            return self._comments.index(comment) > self._comments.index(notice)
        if question.id in self._notice_times:
            return comment.at > self._notice_times[question.id]
        if require_notice:
            return False
        return comment.at.timestamp() >= int(question.asked_at)

    def _mark_handled(self, comment: SteeringComment, message: str) -> bool:
        self._handled.add(comment.id)
        self._on_message(message)
        return True

    def _ignore(self, comment: SteeringComment, why: str) -> bool:
        self._handled.add(comment.id)
        note = HandledComments(comments=(comment.id,), why=f"{comment.author}: {why}")
        self._unrecorded.append(note)
        self._on_message(f"comment {comment.id} by {comment.author} is ignored: {why}")
        return True


def _is_of_store(error: ReplanningError) -> bool:
    """Return whether the store itself failed, rather than a record that cannot be stored."""
    return isinstance(error, StoreError) and not isinstance(error, RecordNotSerializable)


def _comments_before(opened: RecordBody, comments: Sequence[SteeringComment]) -> tuple[str, ...]:
    """Return the ids of comments in a run's request; of all comments if no issue states it."""
    request: TaskRequest | None = None
    if isinstance(opened, RunOpened):
        request = request_of(opened.plan)
    if request is None or "forge" not in request.repository:
        return tuple(comment.id for comment in comments)
    times = [comment.at for comment in request.comments if comment.at is not None]
    if not times:
        return ()
    latest = max(times)
    return tuple(comment.id for comment in comments if comment.at <= latest)


def _comment_id(by: str) -> str:
    """Return the comment's id in an author's text, as `ann (comment 12)`; empty if none."""
    match = _COMMENT_AUTHOR.fullmatch(by)
    if match is None:
        return ""
    return match["id"]
