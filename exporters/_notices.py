"""Notices about a run and the checklist of its plan, as Markdown.

Foreign text is shown literally: it makes no links, mentions or commands.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Final

from replanning.exporters._forge import MAX_COMMENT_CHARS, Marker
from replanning.history.wording import format_time, format_usage
from replanning.journal import (
    AttemptStarted,
    AttemptSucceeded,
    CallMade,
    NoteAdded,
    PlanRevised,
    QuestionAsked,
    Record,
    RecordBody,
    RunEnded,
    RunOpened,
    RunResumed,
)
from replanning.plan import JsonObject, RunId
from replanning.plan.json_values import as_object
from replanning.plan.messages import format_duration, pluralise, whole_words
from replanning.planning import Phase, ReplanType
from replanning.planning.decisions import LEVEL_DESCRIPTIONS, DecisionRecord, ReplanDecision
from replanning.planning.manager import Consideration, ReplanNote
from replanning.planning.notes import TaskHold, read_note
from replanning.planning.state import PlanningProgress, PlanProgress, PlanStep
from replanning.secrets import Redactor

_ZERO_WIDTH_SPACE: Final = "\u200b"
"""Invisible separator that keeps forges from creating links, emoji and mentions."""

_REFERENCES: Final = re.compile(
    r"@|(?<=:)(?=//)"  # mentions; URLs
    r"|[#!%~&$^](?=[\w\"{])"  # issues, merge requests, milestones, labels, epics, snippets, alerts
    r"|\b(?:GH-(?=\d)|www(?=\.))"
    r"|:(?=[a-z+-][\w+-]*:)",  # emoji
    re.IGNORECASE,
)

_EMPHASIS: Final = re.compile(r"(?<![^\W_])_|_(?![^\W_])")

_BLOCK_START: Final = re.compile(r"(\d{1,9}(?=[.)])|(?=[-+=#/]))")
"""Line beginnings that a forge takes for a list, a heading or a command."""

_ESCAPES: Final = str.maketrans(
    {**{mark: f"\\{mark}" for mark in "\\`*[]|~$"}, "<": "&lt;", ">": "&gt;", "&": "&amp;"}
)

_ZERO_WIDTH_JOINERS: Final = "\u200c\u200d"
"""Invisible characters that some scripts need."""

_MAX_LIST_ITEMS: Final = 20
"""Maximum number of items shown of one list."""

_TEXT_LIMITS: Final = (2_000, 400, 100, 20)
"""Text lengths in characters, tried in turn until the comment fits."""

_CLARIFICATION_INTRODUCTION: Final = (
    "The request is unclear to the model. Please answer before the work continues:"
)

_redactor: Final = Redactor()

_format_time: Final = partial(format_time, form="%Y-%m-%d %H:%M:%S UTC")


def plain_line(text: str, limit: int) -> str:
    """Return a text on one line, without secrets and invisible characters, cut to `limit`."""
    words = " ".join(_redactor.text(text[: 20 * limit]).split())
    visible = "".join(c for c in words if c.isprintable() or c in _ZERO_WIDTH_JOINERS)
    if len(visible) > limit or len(text) > 20 * limit:
        return f"{whole_words(visible[: limit - 1])}…"
    return visible


@lru_cache(1024)
def markdown_line(text: str, limit: int) -> str:
    """Return Markdown that shows a text literally on one line, without links and mentions."""
    apart = _REFERENCES.sub(lambda match: f"{match[0]}{_ZERO_WIDTH_SPACE}", plain_line(text, limit))
    marked = _EMPHASIS.sub(r"\\_", apart.translate(_ESCAPES))
    if not _BLOCK_START.match(marked):
        return marked
    return _BLOCK_START.sub(lambda match: f"{match[0]}\\", marked, count=1)


class NoticeKind(StrEnum):
    """Kind of a notice."""

    DECIDED = "decided"
    STARTED = "started"
    CLARIFICATION = "clarification"
    DONE = "done"
    FAILED = "failed"
    OVERRIDDEN = "overridden"
    DECLINED = "declined"
    QUESTION = "question"
    FINISHED = "finished"
    ENDED = "ended"


HEADINGS: Final = MappingProxyType(
    {
        NoticeKind.DECIDED: "🔄 Plan Revision Decided by AI",
        NoticeKind.STARTED: "🚀 Plan Revision Started",
        NoticeKind.CLARIFICATION: "❓ Clarification Needed (AI Decision)",
        NoticeKind.DONE: "✅ Plan Revision Done",
        NoticeKind.FAILED: "❌ Plan Revision Failed",
        NoticeKind.OVERRIDDEN: "⚠️ Plan Revision Overridden by a Limit",
        NoticeKind.DECLINED: "🚫 Plan Revision Declined by a Person",
        NoticeKind.QUESTION: "🙋 Decision Needed",
        NoticeKind.FINISHED: "🏁 Execution Finished",
        NoticeKind.ENDED: "⛔ Execution Ended without Success",
    }
)
"""Heading of each kind of notice."""


@dataclass(frozen=True, slots=True)
class Field:
    """Named value of a notice: a paragraph of the comment, which the line can show, too.

    Attributes:
        name: its name.
        text: its value, shown literally and cut to fit.
        items: the items of a list, shown in the same way, instead of a text.
        detail: our own Markdown after the text, only in the comment.
        after: our own Markdown between the name and the colon, only in the comment.
        numbered: number the items.
        line_only: leave it out of the comment.
    """

    name: str
    text: str = ""
    items: Sequence[str] | None = None
    detail: str = ""
    after: str = ""
    numbered: bool = False
    line_only: bool = False

    @property
    def value(self) -> str:
        """The value on a line."""
        return self.text if self.items is None else " ".join(self.items)

    def markdown(self, limit: int) -> str:
        """Return the paragraph, with texts cut to a number of characters."""
        head = f"**{self.name}**{self.after}:"
        if self.items is None:
            text = markdown_line(self.text, limit) + self.detail
            return f"{head} {text or '—'}"
        items = [markdown_line(item, limit) for item in self.items]
        items = [item for item in items if item]
        if not items:
            return f"{head} none"
        if len(items) > _MAX_LIST_ITEMS:
            items[_MAX_LIST_ITEMS:] = [f"… and {len(items) - _MAX_LIST_ITEMS} more"]
        lines = [head]
        for number, item in enumerate(items, 1):
            sign = f"{number}." if self.numbered else "-"
            lines.append(f"{sign} {item}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Notice:
    """Notice about a run, to be posted once; comment and line are two renderings of its fields.

    Attributes:
        kind: its kind.
        subject: id of the replan, question or final record that it is about.
        at: time of the event, in seconds since the epoch.
        summary: template of the line, in which `{Name}` stands for the value of that field.
        fields: its fields, in the order of the comment.
    """

    kind: NoticeKind
    subject: str
    at: float
    summary: str
    fields: Sequence[Field]

    def marker(self, run: str) -> Marker:
        """Return its marker."""
        return Marker(self.kind.value, run, self.subject)

    def body(self, run: str, hint: str = "") -> str:
        """Return the comment, with its marker.

        Args:
            run: id of the run.
            hint: instructions for answering, in Markdown; shown below questions.
        """
        head = [f"## {HEADINGS[self.kind]}"]
        end = [f"*{_format_time(self.at)}*", str(self.marker(run))]
        if self.kind is NoticeKind.CLARIFICATION:
            head.append(_CLARIFICATION_INTRODUCTION)
        if hint and self.kind in (NoticeKind.CLARIFICATION, NoticeKind.QUESTION):
            end.insert(0, hint)
        fields = [field for field in self.fields if not field.line_only]
        text = ""
        for limit in _TEXT_LIMITS:
            text = "\n\n".join([*head, *(field.markdown(limit) for field in fields), *end])
            if len(text) <= MAX_COMMENT_CHARS:
                break
        return text[:MAX_COMMENT_CHARS]

    def line(self) -> str:
        """Return the notice on a single line, without secrets."""
        values = {field.name: field.value for field in self.fields}
        summary = self.summary.format_map(values)
        return plain_line(f"{HEADINGS[self.kind]}: {summary}", 240)


def record_notices(record: Record, progress: PlanningProgress) -> Iterator[Notice]:
    """Return the notices about a record.

    Args:
        record: the record.
        progress: progress of the run after it.
    """
    body = record.body
    if isinstance(body, NoteAdded):
        note = read_note(body)
        if isinstance(note, ReplanNote):
            yield from _replan_notices(note, record.at, progress)
    elif isinstance(body, AttemptSucceeded):
        done = progress.finished_replan(body.task)
        # The notice of its question covers a replan that asks people.
        if done is not None and done.replan_type is not ReplanType.CLARIFICATION_REQUEST:
            considered = progress.state.begun[done.replan_id]
            yield _outcome_notice(done, considered, record.at, progress)
    elif isinstance(body, QuestionAsked):
        yield _question_notice(body, record.at, progress)
    elif isinstance(body, RunEnded) and body.status in ("succeeded", "failed", "aborted"):
        yield _closing_notice(body, record, progress)


def _closing_notice(body: RunEnded, record: Record, progress: PlanningProgress) -> Notice:
    """Return the notice about the end of a run: outcome, criteria, actions and cost."""
    state = progress.state
    fields = [
        Field("Outcome", body.status),
        Field("Reason", body.reason),
        *_completion_fields(state.completion),
    ]
    criteria = _criteria(progress)
    if criteria:
        after = f" (met: {_met_criteria(body.status, progress)})"
        fields.append(Field("Success Criteria", items=criteria, after=after))
    fields.append(Field("Actions Done", items=progress.finished_actions()))
    effects = progress.effects()
    if effects:
        fields.append(Field("Effects", effects))
    revisions = str(progress.revisions)  # of a given plan
    if state.outputs:
        revisions = f"{max(len(state.plans) - 1, 0)}, replans: {state.counts.total}"
    cost = f"{format_usage(progress.spent)}, {format_duration(record.at - progress.opened_at)}"
    fields += [Field("Plan Revisions", revisions), Field("Cost", cost)]
    kind = NoticeKind.FINISHED if body.status == "succeeded" else NoticeKind.ENDED
    return Notice(kind, f"record-{record.seq}", record.at, "{Outcome}: {Reason}", fields)


def _met_criteria(status: str, progress: PlanningProgress) -> str:
    """Return which success criteria are met, and according to whom."""
    if status != "succeeded":
        return "not all"
    state = progress.state
    verdict: object = None
    if state.latest is not None and state.latest.phase is Phase.REFLECTION:
        verdict = state.latest.decision
    result = getattr(verdict, "evaluation_result", None)
    rate = getattr(verdict, "achievement_rate", None)
    outcome = (state.completion or {}).get("status")
    if outcome == "accepted":
        met = "accepted by a person"
    elif outcome != "success":
        met = "not judged"
    elif result in (None, "success"):
        met = "all, according to the model"
    else:
        met = "in part, according to the model"
    if rate is not None:
        met += f", {rate:.0f} %"
    return met


def _criteria(progress: PlanningProgress) -> list[str]:
    """Return the success criteria, each with the model's judgement, if any."""
    endings = {True: " (met)", False: " (not met)", None: ""}
    return [f"{text}{endings[met]}" for text, met in progress.success_criteria()]


def _replan_notices(note: ReplanNote, at: float, progress: PlanningProgress) -> Iterator[Notice]:
    """Yield the notice about a step of a replan, if any.

    The cases: a limit overrode the replan before a model was asked; the replan is decided or
    begins; it is over; it was decided and not executed. A replan that asks people is covered by
    the notice of its question.
    """
    considered = note.considered
    record = note.record
    decision = None if considered is None else considered.decision
    if considered is None or decision is None:
        if record is not None and record.override_reason is not None:
            yield _unasked_notice(record, at)
    elif record is None:
        if decision.replan_type is not ReplanType.CLARIFICATION_REQUEST:
            yield from _beginning_notices(note, considered, decision, at)
    elif decision.replan_type is ReplanType.NONE:
        return
    elif record.executed:
        # Every other replan is done once its phases have made another plan.
        if record.result == "failure" or record.replan_type is ReplanType.RETRY:
            yield _outcome_notice(record, considered, at, progress)
    elif record.override_reason is not None:
        yield _refusal_notice(record, considered, decision, at, progress)


def _unasked_notice(record: DecisionRecord, at: float) -> Notice:
    """Return the notice about a replan that a limit overrode before a model was asked."""
    fields = (
        Field("Phase", record.phase),
        Field("Overridden by", str(record.override_reason)),
        Field("Rule", record.reason),
    )
    return Notice(NoticeKind.OVERRIDDEN, record.replan_id, at, "{Phase}: {Rule}", fields)


def _beginning_notices(
    note: ReplanNote, considered: Consideration, decision: ReplanDecision, at: float
) -> Iterator[Notice]:
    """Yield the notice about a replan that is decided, or that begins."""
    summary = "{Kind of replan} after {Phase}, {Confidence}: {Reasoning}"
    ruling = considered.ruling
    replan = considered.replan_id
    if note.stage == "applying":
        # The comment about the decision has its reasons.
        fields = [
            Field("Phase", considered.phase),
            Field("Confidence", _confidence(decision), line_only=True),
            Field("Reasoning", decision.reasoning, line_only=True),
            _replan_field(considered),
            Field("Replans so far", str(note.counts.total)),
        ]
        yield Notice(NoticeKind.STARTED, replan, at, summary, fields)
    elif note.stage in ("generating", "awaiting_user"):
        fields = _decision_fields(considered, decision)
        if ruling.kind == "execute_with_warning":
            fields.append(Field("Warning", ruling.reason))
        elif ruling.kind == "ask":
            fields.append(Field("Waiting", f"a person must agree: {ruling.reason}"))
        yield Notice(NoticeKind.DECIDED, replan, at, summary, fields)


def _refusal_notice(
    record: DecisionRecord,
    considered: Consideration,
    decision: ReplanDecision,
    at: float,
    progress: PlanningProgress,
) -> Notice:
    """Return the notice about a replan that a person declined or a limit overrode."""
    replan = considered.replan_id
    fields = _decision_fields(considered, decision)
    why = record.reason
    if considered.ruling.kind == "ask":
        by = ""
        for held in progress.state.held.values():
            asked = held.considered
            if asked is not None and asked.replan_id == replan:
                by = held.by if held.verdict == "reject" else by
        if by not in ("", "timeout"):
            fields += [Field("Declined by", by), Field("Asked because", why)]
            summary = "{Kind of replan}: by {Declined by}"
            return Notice(NoticeKind.DECLINED, replan, at, summary, fields)
        why += "; nobody has agreed to it"
    fields += [Field("Overridden by", str(record.override_reason)), Field("Rule", why)]
    return Notice(NoticeKind.OVERRIDDEN, replan, at, "{Kind of replan}: {Rule}", fields)


def _decision_fields(considered: Consideration, decision: ReplanDecision) -> list[Field]:
    """Return the fields of a decision with its reasons."""
    return [
        Field("Phase", considered.phase),
        Field("Confidence", _confidence(decision)),
        Field("Reasoning", decision.reasoning),
        Field("Issues Found", items=decision.issues_found),
        Field("Recommended Actions", items=decision.recommended_actions),
        _replan_field(considered),
    ]


def _confidence(decision: ReplanDecision) -> str:
    return f"{100 * decision.confidence:.0f} %"


def _replan_field(considered: Consideration) -> Field:
    """Return the type of a replan, with its level and the phase that it continues with."""
    detail = ""
    decision = considered.decision
    if decision is not None:
        level = LEVEL_DESCRIPTIONS.get(decision.replan_level or 0, "")
        if level:
            detail += f" ({level})"
        if decision.target_phase:
            detail += f"; continues with {decision.target_phase}"
    return Field("Kind of replan", considered.replan_type, detail=detail)


def _outcome_notice(
    record: DecisionRecord, considered: Consideration, at: float, progress: PlanningProgress
) -> Notice:
    """Return the notice that a replan is done, or has failed, with the progress of the plan."""
    kind = NoticeKind.DONE
    summary = "{Kind of replan}"
    fields = [Field("Phase", record.phase), _replan_field(considered)]
    if record.result == "failure":
        kind = NoticeKind.FAILED
        summary += " {Error}"
        fields.append(Field("Error", record.error))
    for plan in progress.plans[-1:]:
        fields.append(Field("Tasks", f"{len(plan.steps)}, {plan.done} done"))
    fields.append(Field("Duration", detail=format_duration(record.duration)))
    return Notice(kind, record.replan_id, at, summary, fields)


def _question_notice(body: QuestionAsked, at: float, progress: PlanningProgress) -> Notice:
    held = progress.state.held.get(progress.state.questions.get(body.question, ""))
    if held is not None and held.why == "clarification":
        return _clarification_notice(body, held, at, progress)
    choices = [candidate.alternative.reason for candidate in body.candidates]
    fields = [Field("Question", body.text), Field("If you agree", items=choices)]
    if body.effects:
        fields.append(Field("Effects", body.effects))
    if held is not None:
        completion = progress.state.completion
        fields += _completion_fields(completion)
        criteria = _criteria(progress)
        if completion and criteria:
            fields.append(Field("Success Criteria", items=criteria))
    fields.append(Field("Question number", body.question.rpartition(".q")[2]))
    return Notice(NoticeKind.QUESTION, body.question, at, "{Question}", fields)


def _clarification_notice(
    body: QuestionAsked, held: TaskHold, at: float, progress: PlanningProgress
) -> Notice:
    """Return the notice that asks people to clarify the request."""
    decision = None if held.considered is None else held.considered.decision
    context = held.text if decision is None else decision.reasoning
    fields = [
        Field("Questions", items=held.questions, numbered=True),
        Field("Context", context),
    ]
    if held.risk:
        fields.append(Field("Caution", f"{held.risk}: a reply alone does not approve it"))
    if decision is not None and decision.issues_found:
        fields.append(Field("Issues Found", items=decision.issues_found))
    name = "If no response"
    by = "" if held.due is None else f" by {_format_time(held.due)}"
    if progress.assumes_on_timeout:
        after = f"{by}, the work continues with these assumptions"
        fields.append(Field(name, items=held.effective_assumptions, after=after))
    else:
        fields.append(Field(name, detail="the work waits; nothing is assumed", after=by))
    advice = "in your own words, question by question."
    fields.append(Field("How to answer", detail=advice))
    return Notice(NoticeKind.CLARIFICATION, body.question, at, "{Questions}", fields)


def _completion_fields(completion: JsonObject | None) -> Iterator[Field]:
    """Yield the state and the recommendations of a run that needs a person."""
    summary = as_object((completion or {}).get("summary"))
    state = summary.get("current_state")
    if not isinstance(state, str):
        return
    yield Field("Where things stand", state)
    recommended = summary.get("recommendations")
    if recommended and isinstance(recommended, list):
        yield Field("Recommended Actions", items=list(map(str, recommended)))


# Checklist

CHECKLIST_KIND: Final = "checklist"
"""Kind in the marker of a checklist."""

HISTORY_HEADING: Final = "📜 Previous Plan History"

_TASK_TEXT_LIMITS: Final = (300, 80, 0)
"""Lengths of task descriptions in characters, tried in turn until all tasks fit."""

_MAX_REASON_CHARS: Final = 1_000

_MAX_NAME_CHARS: Final = 100


def render_checklist(plans: Sequence[PlanProgress], run: str, room: int = MAX_COMMENT_CHARS) -> str:
    """Return the checklist of a run with its marker: the current plan, then the earlier ones.

    If it is too long, the oldest plans are cut first, then task descriptions, then tasks; a note
    says what is missing.

    Args:
        plans: all plans, oldest first; at least one.
        run: id of the run.
        room: longest comment in characters.
    """
    plan = plans[-1]
    revisions = plan.number - 1
    head = "## 📋 Execution Plan"
    tail = f"*{progress_line(plans)}*"
    if len(plans) > 1:
        parts = (
            f"{head} (Revised #{revisions})",
            Field("Revision Reason", plan.reason).markdown(_MAX_REASON_CHARS),
            f"**Previous Progress**: {plans[-2].done}/{len(plans[-2].steps)}",
            "### New Plan:",
        )
        head = "\n\n".join(parts)
    if revisions >= 2:
        current = f"#{plan.number} (started at {_format_time(plan.at)})"
        tail = f"*{_progress(plan)}*\n*Plan Revisions: {revisions} times*"
        tail = f"{tail}\n*Current Plan: {current}*"
    mark = str(Marker(CHECKLIST_KIND, run))
    left = room - len(head) - len(tail) - len(mark) - 6
    spare = _details_block([], len(plans))  # earlier plans are mentioned in any case
    tasks = _task_list(plan.steps, left - len(spare))
    earlier = _previous_plans(plans[:-1], left - len(tasks))
    parts = (f"{head}\n\n{tasks}", tail, earlier, mark)
    return "\n\n".join(filter(None, parts))


def progress_line(plans: Sequence[PlanProgress]) -> str:
    """Return the progress of the current plan on a single line."""
    plan = plans[-1]
    if plan.number == 1:
        return _progress(plan)
    return f"{_progress(plan)} | Revision: #{plan.number - 1} at {_format_time(plan.at)}"


def _progress(plan: PlanProgress) -> str:
    """Return the progress with a percentage that is rounded down, so that 100 means complete."""
    total = len(plan.steps)
    percent = 100
    if total:
        percent = 100 * plan.done // total
    return f"Progress: {plan.done}/{total} ({percent}%) complete"


def _task_list(steps: Sequence[PlanStep], room: int) -> str:
    """Return the tasks with the longest descriptions that fit; tasks that do not are counted."""
    for limit in _TASK_TEXT_LIMITS:
        shown = "\n".join(_task_item(step, limit) for step in steps)
        if len(shown) <= room:
            return shown
    lines: list[str] = []
    left = room - 100
    for number, step in enumerate(steps):
        item = _task_item(step, 0)
        left -= len(item) + 1
        if left < 0:
            rest = steps[number:]
            done = len([step for step in rest if step.done])
            lines += ["", f"*… and {pluralise(len(rest), 'more task')}, {done} of them complete*"]
            break
        lines.append(item)
    return "\n".join(lines)


def _task_item(step: PlanStep, limit: int) -> str:
    sign = "x" if step.done else " "
    name = markdown_line(step.name, _MAX_NAME_CHARS)
    text = step.text
    if limit:
        text = markdown_line(text, limit)
    elif text:
        text = "…"
    return f"- [{sign}] **{name}**: {text}".rstrip()


def _previous_plans(plans: Sequence[PlanProgress], room: int) -> str:
    """Return the newest earlier plans that fit; older ones are counted."""
    shown: list[str] = []
    left = room - len(_details_block([], len(plans)))
    for plan in reversed(plans):
        section = _plan_section(plan)
        left -= len(section) + 2
        if left < 0:
            break
        shown.insert(0, section)
    return _details_block(shown, len(plans) - len(shown)) if plans else ""


def _details_block(sections: Sequence[str], gone: int) -> str:
    """Return a collapsible block of plans, with the number of omitted ones."""
    parts = [f"<details>\n<summary>{HISTORY_HEADING}</summary>"]
    if gone:
        parts.append(f"*{pluralise(gone, 'older plan')} omitted for lack of space.*")
    return "\n\n".join([*parts, *sections, "</details>"])


def _plan_section(plan: PlanProgress) -> str:
    """Return an earlier plan with its reason, tasks and progress."""
    longest = _TASK_TEXT_LIMITS[0]
    tasks = "\n".join(_task_item(step, longest) for step in plan.steps)
    parts = [
        f"### Plan {plan.number} (started at {_format_time(plan.at)})",
        Field("Reason", plan.reason or "the initial plan").markdown(_MAX_REASON_CHARS),
        tasks,
        f"*{_progress(plan)}*",
    ]
    return "\n\n".join(filter(None, parts))


class RunNotices:
    """Notices and checklist of one run, folded from its records.

    Args:
        run: id of the run.

    Attributes:
        seq: number of the last record.
        pending: notices that are not posted yet, oldest first.
        rejected: notices whose text was rejected.
        checklist_changed: true if the checklist may have changed since this was set to false.
        end_status: status with which the run ended; empty while it is running.
    """

    def __init__(self, run: RunId) -> None:
        self.run = run
        self.seq = 0
        self.pending: deque[Notice] = deque()
        self.rejected: list[Notice] = []
        self.checklist_changed = False
        self.end_status = ""
        self._progress = PlanningProgress()
        self._is_complete = True
        self._forked_revision: int | None = None
        self._begun_before_fork: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"<RunNotices of {self.run!r} seq={self.seq} pending={len(self.pending)}>"

    def fold(self, record: Record) -> None:
        """Fold a record; earlier ones are ignored."""
        if record.seq <= self.seq:
            return
        if record.seq != self.seq + 1:
            self._is_complete = False
        self.seq = record.seq
        body = record.body
        self._progress.fold(record)
        if _may_change_checklist(body):
            self.checklist_changed = True
        # Other records may follow the end, such as a failure to post it.
        if isinstance(body, RunEnded):
            self.end_status = body.status
        elif isinstance(body, RunResumed):
            self.end_status = ""
        elif isinstance(body, RunOpened) and body.forked_from is not None:
            self._forked_revision = body.forked_from[1] or None
        if self._forked_revision is None:
            for notice in record_notices(record, self._progress):
                # Readers of this run were never told that the replan began.
                is_foreign = notice.subject in self._begun_before_fork
                if not (is_foreign and notice.kind is NoticeKind.DONE):
                    self.pending.append(notice)
        elif isinstance(body, PlanRevised) and body.number == self._forked_revision:
            # Earlier records belong to the run that was forked.
            self._forked_revision = None
            self._begun_before_fork = frozenset(self._progress.state.begun)

    @property
    def is_finished(self) -> bool:
        """True if the run is over and everything about it is posted."""
        if self.has_unsent or self.rejected:
            return False
        return self.end_status in ("succeeded", "failed", "aborted")

    @property
    def has_unsent(self) -> bool:
        """True if a notice is to be posted, or the checklist to be edited."""
        return bool(self.pending) or self.checklist_changed

    def checklist(self) -> str | None:
        """Return the checklist as a comment; None without a plan, or if records are missing."""
        plans = self._complete_plans()
        return render_checklist(plans, self.run) if plans else None

    def progress(self) -> str:
        """Return the progress on a single line; empty without a plan, or if records are missing."""
        plans = self._complete_plans()
        return progress_line(plans) if plans else ""

    def _complete_plans(self) -> Sequence[PlanProgress]:
        return self._progress.plans if self._is_complete else ()


def _may_change_checklist(body: RecordBody) -> bool:
    match body:
        case AttemptSucceeded() | CallMade() | PlanRevised():
            return True
        case AttemptStarted():
            return body.call is not None
        case NoteAdded():
            return body.type == "plan"
    return False
