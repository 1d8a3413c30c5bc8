"""What people write below an issue while work on it goes on, as answers and feedback."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol, runtime_checkable

from replanning.decision.request import Question
from replanning.errors import RecordNotSerializable, ReplanningError, StoreError
from replanning.journal.observations import ReplanRequested
from replanning.journal.records import (
    AnswerRefused,
    PlanningNoted,
    QuestionAnswered,
    QuestionVerdict,
    Record,
    RunOpened,
)
from replanning.llm.quoting import truncate_text
from replanning.plan.types import RunId
from replanning.planning.coordinator import PlanningCoordinator
from replanning.planning.request import TaskRequest, request_of
from replanning.planning.state import PlanningState
from replanning.run.isolation import error_message, isolate
from replanning.run.run import PlanRun

HANDLED_NOTE: Final = "heard"
"""The note that says which comments need not be looked at any more."""

POLL_SECONDS: Final = 10.0
"""Seconds between looks at whether somebody has written something."""

_STARTUP_POLL_SECONDS: Final = 1.0
"""The same before there is a run."""

_MAX_BACKOFF_SECONDS: Final = 300.0

_MAX_COMMENT_CHARS: Final = 10_000
"""Characters of a comment that are taken in."""

_COMMAND: Final = re.compile(r"\s*(?P<sign>[/!])(?P<word>[a-z][\w-]*)(?P<rest>(?:\s.*)?)", re.IGNORECASE | re.DOTALL)

_LEADING_QUOTE: Final = re.compile(r"(?:[ \t]*(?:>[^\n]*)?(?:\n|\Z))*")

_COMMENT_AUTHOR: Final = re.compile(r".* \(comment (?P<id>[\w-]+)\)", re.DOTALL)


class SteeringComment(Protocol):
    """A comment below an issue: who wrote what when; whether it is a notice of ours, and which question that puts."""

    @property
    def id(self) -> str:
        """Identifier within its issue."""
        ...

    @property
    def author(self) -> str:
        """Login of its author."""
        ...

    @property
    def body(self) -> str:
        """Markdown text."""
        ...

    @property
    def at(self) -> datetime:
        """Time of its creation."""
        ...

    @property
    def notice(self) -> bool:
        """Whether this tool wrote it."""
        ...

    @property
    def question(self) -> str:
        """Id of the question that it puts; empty for others."""
        ...


class CommentSource(Protocol):
    """Where people write, such as a `GitHubIssue`."""

    async def comments(self) -> Sequence[SteeringComment]:
        """All comments, oldest first; cheap when nothing has changed."""
        ...

    async def may_steer(self, comment: Any) -> bool:  # one of its own
        """Whether whoever wrote a comment may say how work goes on."""
        ...


@runtime_checkable
class Issue(CommentSource, Protocol):
    """An issue that says what is wanted, and below which people are told and heard.

    Attributes:
        command: how commands begin that people give there.
    """

    command: ClassVar[str]

    async def issue(self) -> TaskRequest:
        """What is wanted."""
        ...

    def write_error(self) -> str:
        """Why nothing can be written there, found without asking; empty where it may be."""
        ...

    async def aclose(self) -> None:
        """Let go of connections."""
        ...


class CommentCommand(NamedTuple):
    """What a comment says.

    Attributes:
        kind: a command, or `text` where it is none; `other` where it is a command for somebody else.
        text: what is said, without the command.
    """

    kind: Literal["approve", "reject", "replan", "text", "other"]
    text: str


class Steering:
    """Reads what people write below an issue, and lets them steer the run with it.

    While something is to be clarified, a reply to the notice is the answer. Any other comment is feedback, which the
    model judges as a reflection. `/replan` asks for a new plan in so many words. What may do harm, and whatever else a
    person must agree to, takes `/approve` or `/reject` at the beginning of a comment, with the id of the question where
    there are several; no other words do. Where a forge keeps lines with a slash for itself, as GitLab does, an
    exclamation mark stands in its place: `!approve`.

    Each comment counts once, also after a resume: who wrote which comment stands in the records that follow from it.
    Comments that were there before the run are part of the request, and do not count again.

    Args:
        planning: whose run is steered.
        forge: where people write.
        known: the comments that the request has already; by default those that the run was asked with, or all that
            are there when it begins where it was not asked by an issue.
        every: seconds between looks.
        tell: is given what became of comments, in sentences.
    """

    def __init__(
        self,
        planning: PlanningCoordinator,
        forge: CommentSource,
        *,
        handled: Iterable[str] | None = None,
        poll_seconds: float = POLL_SECONDS,
        on_message: Callable[[str], None] | None = None,
    ) -> None:
        self._planning, self._forge = planning, forge
        self._initially_handled = None if handled is None else tuple(handled)
        self._poll_seconds = poll_seconds
        self._on_message = on_message or _discard_message
        self._run: RunId | None = None
        self._handled: set[str] = set()
        self._notice_times: dict[str, datetime] = {}
        self._unrecorded: list[tuple[Sequence[str], str]] = []
        self._last_problem = ""

    def __repr__(self) -> str:
        return f"<Steering of {self._run or 'no run'} by {self._forge!r} used={len(self._handled)}>"

    async def listen(self) -> None:
        """Look again and again, until it is cancelled; what fails is told, and does not harm the run."""
        clock, failures = self._planning.environment.clock, 0
        while True:
            wait = self._poll_seconds if self._planning.run is not None else _STARTUP_POLL_SECONDS
            try:
                await isolate(self.poll())
            except Exception as error:  # noqa: BLE001 - law 7: where people write is no part of the run
                failures += 1
                self._report_once(f"what people write cannot be read: {error_message(error)}")
                if getattr(error, "final", False):
                    return
                later = getattr(error, "retry_after", None) or 0.0
                wait = max(later, min(self._poll_seconds * 2.0 ** (failures - 1), _MAX_BACKOFF_SECONDS))
            else:
                failures, self._last_problem = 0, ""
            await clock.sleep(wait)

    async def poll(self) -> None:
        """Take in what was written since the last look.

        Raises:
            ReplanningError: the comments cannot be read.
            StoreError: the journal cannot.
        """
        run = self._planning.run
        if run is None:
            return
        comments = await self._forge.comments()
        if self._run != run.id:
            self._load_handled(run, comments)
        for comment in comments:
            if comment.question:  # also where somebody deletes it later
                self._notice_times.setdefault(comment.question, comment.at)
        for comment in comments:
            if (
                comment.id not in self._handled
                and not comment.notice
                and not await self._handle_comment(run, comment, comments)
            ):
                break  # it is left for later, and so is what came after it
        self._record_handled(run)

    # What is on record

    def _load_handled(self, run: PlanRun, comments: Sequence[SteeringComment]) -> None:
        """Find out which comments of a run have been used."""
        store = self._planning.engine.store
        records = list(store.read(run.id))
        used = {comment for record in records for comment in _handled_comments(record)}
        used |= {found for message in store.inbox(run.id) if (found := _comment_id(message.by))}
        self._run, self._handled = run.id, used
        if not any(isinstance(one.body, PlanningNoted) and one.body.type == HANDLED_NOTE for one in records):
            there = (
                self._initially_handled
                if self._initially_handled is not None
                else _comments_in_request(records, comments)
            )
            self._handled |= set(there)
            self._unrecorded.append((there, "they were there before the run"))

    def _record_handled(self, run: PlanRun) -> None:
        """Put on record what was passed over; where the run stands still, when it goes on."""
        while self._unrecorded and not run.ended:
            comments, why = self._unrecorded[0]
            run.note(HANDLED_NOTE, {"comments": [*comments], "why": why})
            self._unrecorded.pop(0)

    # What is said

    async def _handle_comment(
        self, run: PlanRun, comment: SteeringComment, comments: Sequence[SteeringComment]
    ) -> bool:
        """Take in a comment; false where that must wait until the run goes on."""
        if not await self._forge.may_steer(comment):
            return self._ignore(comment, "its author has no say in this project")
        said = _parse_comment(comment.body)
        if said.kind == "other" or (not said.text and said.kind == "text"):
            return self._ignore(comment, "it is not for us" if said.kind == "other" else "it says nothing")
        by = f"{comment.author} (comment {comment.id})"
        if said.kind in ("approve", "reject"):
            return self._decide(run, comment, comments, said, by)
        unclear = self._clarification_for(run, comment, comments) if said.kind == "text" else None
        if unclear is not None:
            return self._answer(comment, unclear, CommentCommand("approve", said.text), by)
        if run.ended:
            return False
        run.request_replan(said.text or "a new plan is wanted", by=by)
        return self._mark_handled(comment, f"{comment.author} has given feedback")

    def _decide(
        self, run: PlanRun, comment: SteeringComment, comments: Sequence[SteeringComment], said: CommentCommand, by: str
    ) -> bool:
        """Take a decision of a person about what waits for it."""
        named, rest = _split_first_word(said.text)
        waiting = self._planning.engine.pending(run.id)
        state = self._planning.state
        unclear = {q.id for q in waiting if state.accepts_free_text(q.id)}
        chosen = [q for q in waiting if named and named in (q.id, q.id.rpartition(".")[2])]
        if chosen:
            said = CommentCommand(said.kind, rest)
            chosen = [q for q in chosen if self._is_reply(comment, q, comments, require_notice=False)]
        else:
            chosen = [q for q in waiting if self._is_reply(comment, q, comments, require_notice=True)]
            chosen = [q for q in chosen if q.id not in unclear] or (chosen if said.kind == "reject" else [])
        if len(chosen) == 1:
            return self._answer(comment, chosen[0], said, by)
        if chosen:
            sign = getattr(self._forge, "command", "/")
            why = f"{len(chosen)} questions wait: say which, as in {sign}{said.kind} {chosen[0].id}"
        elif unclear and len(unclear) == len(waiting):
            why = "what is asked takes an answer in words"
        else:
            why = "no question waited for that when it was written"
        return self._ignore(comment, why)

    def _answer(self, comment: SteeringComment, question: Question, said: CommentCommand, by: str) -> bool:
        verdict: QuestionVerdict = "reject" if said.kind == "reject" else "approve"
        try:
            self._planning.engine.answer(question.id, verdict, by=by, comment=said.text)
        except ReplanningError as error:
            if isinstance(error, StoreError) and not isinstance(error, RecordNotSerializable):
                raise  # it is taken as soon as the store works
            return self._ignore(comment, error_message(error))
        return self._mark_handled(comment, f"{comment.author} has answered question {question.id}")

    def _clarification_for(
        self, run: PlanRun, comment: SteeringComment, comments: Sequence[SteeringComment]
    ) -> Question | None:
        """The clarification that a comment answers; None where it answers none."""
        waiting = self._planning.engine.pending(run.id)
        state = self._planning.state if waiting else PlanningState()
        fits = (
            q
            for q in waiting
            if state.accepts_free_text(q.id) and self._is_reply(comment, q, comments, require_notice=False)
        )
        return next(fits, None)

    def _is_reply(
        self, comment: SteeringComment, question: Question, comments: Sequence[SteeringComment], *, require_notice: bool
    ) -> bool:
        """Whether a comment was written when its author could know of a question.

        Args:
            comment: which.
            question: about what.
            comments: all of them.
            sure: whether only the notice counts; else, where there is none yet, the time does.
        """
        told = next((one for one in comments if one.question == question.id), None)
        if told is not None:
            ids = [one.id for one in comments]
            return ids.index(comment.id) > ids.index(told.id)
        if question.id in self._notice_times:
            return comment.at > self._notice_times[question.id]
        return not require_notice and comment.at.timestamp() >= int(question.asked_at)

    def _mark_handled(self, comment: SteeringComment, told: str) -> bool:
        self._handled.add(comment.id)
        self._on_message(told)
        return True

    def _ignore(self, comment: SteeringComment, why: str) -> bool:
        self._handled.add(comment.id)
        self._unrecorded.append(([comment.id], f"{comment.author}: {why}"))
        self._on_message(f"the comment {comment.id} of {comment.author} is passed over: {why}")
        return True

    def _report_once(self, problem: str) -> None:
        if problem != self._last_problem:
            self._last_problem = problem
            self._on_message(problem)


def _discard_message(_: str) -> None:
    """Nobody is told."""


def _parse_comment(body: str) -> CommentCommand:
    """What a comment says; a command stands at its beginning, or after what it quotes there."""
    text = truncate_text(_LEADING_QUOTE.sub("", body, count=1).strip(), _MAX_COMMENT_CHARS)
    found = _COMMAND.fullmatch(text)
    if found is None:
        return CommentCommand("text", text)
    rest = found["rest"].strip()
    match found["word"].lower():
        case "approve":
            return CommentCommand("approve", rest)
        case "reject":
            return CommentCommand("reject", rest)
        case "replan":
            return CommentCommand("replan", rest)
    return CommentCommand("other" if found["sign"] == "/" else "text", text)


def _split_first_word(text: str) -> tuple[str, str]:
    """The first word of a text, as the id of a question may be given in it, and the rest."""
    word, rest = [*text.split(maxsplit=1), "", ""][:2]
    return word.strip("`.,:;"), rest


def _comments_in_request(records: Sequence[Record], comments: Sequence[SteeringComment]) -> Sequence[str]:
    """The comments that the request of a run has."""
    opened = records[0].body
    request = request_of(opened.plan) if isinstance(opened, RunOpened) else None
    if request is None or "forge" not in request.repository:
        return [comment.id for comment in comments]
    latest = max((one.at for one in request.comments if one.at is not None), default=None)
    return [comment.id for comment in comments if latest is not None and comment.at <= latest]


def _handled_comments(record: Record) -> Iterable[str]:
    """The comments that a record follows from, or says need not be looked at."""
    body = record.body
    if isinstance(body, ReplanRequested | QuestionAnswered | AnswerRefused):
        found = _comment_id(body.by)
        return (found,) if found else ()
    listed = body.data.get("comments") if isinstance(body, PlanningNoted) and body.type == HANDLED_NOTE else ()
    return map(str, listed) if isinstance(listed, list) else ()


def _comment_id(by: str) -> str:
    """The comment in which somebody said something; empty where it was said elsewhere."""
    found = _COMMENT_AUTHOR.fullmatch(by)
    return found["id"] if found else ""
