"""Records of a journal: one small frozen class per kind, and their JSON form.

A journal is a sequence of `Record`. Its bodies are observations, triggers, alternatives, decisions, revisions, questions
to people, and the start, pauses and end of the run. Live plan, ledger and history are folds over it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Final, Literal, NamedTuple

from pydantic import TypeAdapter
from pydantic_core import from_json

from replanning.changes import Alternative, PlanChange
from replanning.errors import JournalCorrupt
from replanning.journal.observations import Observation
from replanning.journal.triggers import Trigger
from replanning.plan.document import Plan
from replanning.plan.types import JsonObject, QuestionId, ReplanId, RunId, TaskId, TriggerId

JOURNAL_FORMAT: Final = 2
"""Version of the JSON form of records, written into the first record of every journal; raise it when a kind or a field
of a record is renamed or changes its meaning."""

RunStatus = Literal["succeeded", "failed", "aborted", "paused", "needs_human"]

QuestionVerdict = Literal["approve", "reject", "modify"]

DecisionKind = Literal["execute", "execute_with_warning", "ask", "keep", "escalate", "abort"]


# Replanning: triggers, alternatives, decisions and revisions
@dataclass(frozen=True, slots=True)
class TriggerFired:
    """A detector found that replanning should be considered."""

    kind: ClassVar = "trigger-fired"
    trigger: Trigger


@dataclass(frozen=True, slots=True)
class TriggerDropped:
    """A trigger was dropped without a replan."""

    kind: ClassVar = "trigger-dropped"
    trigger: TriggerId
    reason: str


@dataclass(frozen=True, slots=True)
class Score:
    """Confidence in an alternative and its parts, all in [0, 1]."""

    total: float
    self_assessment: float
    past_success: float
    availability: float
    simplicity: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """An alternative with its score, or with the reason why it was rejected."""

    alternative: Alternative
    score: Score | None = None
    rejected: str = ""


@dataclass(frozen=True, slots=True)
class AlternativesConsidered:
    """Alternatives from the providers: the candidates, best first, then the rejected ones."""

    kind: ClassVar = "alternatives-considered"
    replan: ReplanId
    triggers: tuple[TriggerId, ...]
    revision: int
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DecisionMade:
    """Decision about a replan, the rule behind it, and the index of the chosen candidate."""

    kind: ClassVar = "decided"
    replan: ReplanId
    triggers: tuple[TriggerId, ...]
    decision: DecisionKind
    rule: str
    reason: str
    chosen: int | None = None
    by: str = "policy"
    blocks: tuple[TaskId, ...] = ()
    duration: float = 0.0


@dataclass(frozen=True, slots=True)
class PlanRevised:
    """Changes were applied: the plan has a new revision."""

    kind: ClassVar = "revised"
    number: int
    parent: int
    changes: tuple[PlanChange, ...]
    reason: str
    by: str
    triggers: tuple[TriggerId, ...] = ()
    replan: ReplanId | None = None
    chosen: int | None = None
    hash: str = ""


@dataclass(frozen=True, slots=True)
class OutcomeRecorded:
    """Success or failure of an applied alternative."""

    kind: ClassVar = "outcome-known"
    replan: ReplanId
    succeeded: bool
    duration: float


# People
@dataclass(frozen=True, slots=True)
class QuestionAsked:
    """A person must decide. The tasks in `holds` are not handed out until the answer."""

    kind: ClassVar = "question-asked"
    question: QuestionId
    replan: ReplanId
    triggers: tuple[TriggerId, ...]
    text: str
    candidates: tuple[Candidate, ...]
    holds: tuple[TaskId, ...]
    footprint: str
    revision: int
    deadline: float | None = None
    remind_at: float | None = None


@dataclass(frozen=True, slots=True)
class TriggerAttached:
    """A later trigger concerns tasks that an open question holds, and waits for the same answer."""

    kind: ClassVar = "trigger-attached"
    question: QuestionId
    trigger: TriggerId


@dataclass(frozen=True, slots=True)
class QuestionReminded:
    """The person was reminded of an open question."""

    kind: ClassVar = "question-reminded"
    question: QuestionId


@dataclass(frozen=True, slots=True)
class QuestionAnswered:
    """A question was closed: by a person, or by its deadline (`by` is then `timeout`)."""

    kind: ClassVar = "question-answered"
    question: QuestionId
    verdict: QuestionVerdict | Literal["abort", "skip", "continue", "pause", "withdrawn"]
    by: str
    choice: int = 0
    changes: tuple[PlanChange, ...] = ()
    comment: str = ""


@dataclass(frozen=True, slots=True)
class AnswerRefused:
    """An answer was refused; the question stays open."""

    kind: ClassVar = "answer-refused"
    question: QuestionId
    by: str
    reason: str


# The run itself
@dataclass(frozen=True, slots=True)
class RunOpened:
    """First record of a run: the original plan and the settings."""

    kind: ClassVar = "run-opened"
    run: RunId
    plan: Plan
    mode: str = "act"
    settings: JsonObject | None = None
    trace: str | None = None
    forked_from: tuple[RunId, int] | None = None
    version: str = ""


@dataclass(frozen=True, slots=True)
class RunResumed:
    """A process resumed the run after it had been without an owner for `waited` seconds."""

    kind: ClassVar = "run-resumed"
    owner: str
    waited: float = 0.0
    trace: str | None = None
    version: str = ""


@dataclass(frozen=True, slots=True)
class RunPaused:
    """The run was asked to stop handing out work; it can be resumed."""

    kind: ClassVar = "run-paused"
    reason: str
    by: str = ""


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run ended, or stopped until it is resumed (`paused`, `needs_human`)."""

    kind: ClassVar = "run-ended"
    status: RunStatus
    reason: str
    cancelled: tuple[TaskId, ...] = ()


@dataclass(frozen=True, slots=True)
class ErrorContained:
    """A provider, gate, listener, detector or exporter failed, and the error was contained."""

    kind: ClassVar = "contained"
    where: str
    error: str


@dataclass(frozen=True, slots=True)
class PlanningNoted:
    """An event of planning mode: a model's understanding, plan or decision, and its result.

    The live plan ignores it; the state of planning mode is a fold over these records.
    """

    kind: ClassVar = "planning-noted"
    type: str
    data: JsonObject


RecordBody = (
    Observation
    | TriggerFired
    | TriggerDropped
    | AlternativesConsidered
    | DecisionMade
    | PlanRevised
    | OutcomeRecorded
    | QuestionAsked
    | TriggerAttached
    | QuestionReminded
    | QuestionAnswered
    | AnswerRefused
    | RunOpened
    | RunResumed
    | RunPaused
    | RunEnded
    | ErrorContained
    | PlanningNoted
)


class Record(NamedTuple):
    """Entry of a journal: its number (from 1, without gaps), its time (seconds since the epoch) and its body."""

    seq: int
    at: float
    body: RecordBody


_new_tuple: Final = tuple.__new__


def new_record(seq: int, at: float, body: RecordBody) -> Record:
    """Return `Record(seq, at, body)` in little more than half the time."""
    return _new_tuple(Record, (seq, at, body))


BODY_TYPES: Final[dict[str, type[RecordBody]]] = {body.kind: body for body in RecordBody.__args__}
"""Body types by kind."""

_KINDS_WITH_UNIONS: Final = frozenset(
    {"trigger-fired", "alternatives-considered", "revised", "question-asked", "question-answered"}
)
"""Kinds with nested unions; their discriminator `kind` is a default value that the JSON text must keep."""


@cache
def _type_adapter(kind: str) -> TypeAdapter[RecordBody]:
    return TypeAdapter(BODY_TYPES[kind])


def dump_body(body: RecordBody) -> str:
    """Return the JSON text of a body; `load_body` reads it back."""
    kind = body.kind
    text = _type_adapter(kind).dump_json(body, exclude_defaults=kind not in _KINDS_WITH_UNIONS).decode()
    return f'{{"format":{JOURNAL_FORMAT},{text[1:]}' if kind == RunOpened.kind else text


def load_body(kind: str, data: str | bytes) -> RecordBody:
    """Return the body of this kind that `dump_body` wrote.

    Raises:
        JournalCorrupt: the journal that begins with this record has another format.
        ValueError: the kind is unknown, or the text is not such a body.
    """
    if kind not in BODY_TYPES:
        raise ValueError(f"unknown kind of record {kind!r}")
    if kind == RunOpened.kind:
        _check_format(data)
    # Through the validator and not the adapter, because this is called for every record.
    body: RecordBody = _type_adapter(kind).validator.validate_json(data)
    return body


_FORMAT_FIELD: Final = re.compile(r'\s*\{\s*"format"\s*:\s*(\d+)\s*,')


def _check_format(data: str | bytes) -> None:
    beginning = data[:80] if isinstance(data, str) else data[:80].decode(errors="replace")
    match = _FORMAT_FIELD.match(beginning)
    if match is not None and int(match[1]) == JOURNAL_FORMAT:
        return
    document = from_json(data)
    version = document.get("format", 1) if isinstance(document, dict) else JOURNAL_FORMAT
    if version != JOURNAL_FORMAT:
        raise JournalCorrupt(
            f"the journal of run {document.get('run')!r} has format {version}, and this version of replanning reads "
            f"format {JOURNAL_FORMAT}; use the version of replanning that wrote it, or start a new run"
        )
