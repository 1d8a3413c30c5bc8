"""Notices about a run and the checklist of its plan, as Markdown that shows foreign text literally. Pure.

Foreign text makes no links, mentions or commands.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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
    RunEnded,
    RunOpened,
    RunResumed,
)
from replanning.plan import JsonObject, RunId
from replanning.plan.messages import format_duration
from replanning.planning import Phase, ReplanType
from replanning.planning.decisions import LEVEL_DESCRIPTIONS, DecisionRecord, ReplanDecision
from replanning.planning.manager import ReplanNote
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
"""Beginnings of lines that make a list, a heading or a command to the forge."""

_ESCAPES: Final = str.maketrans(
    {**{mark: f"\\{mark}" for mark in "\\`*[]|~$"}, "<": "&lt;", ">": "&gt;", "&": "&amp;"}
)

_ZERO_WIDTH_JOINERS: Final = "\u200c\u200d"
"""Invisible characters that some scripts need."""

_MAX_LIST_ITEMS: Final = 20
"""Items of one list that are shown."""

_TEXT_LIMITS: Final = (2_000, 400, 100, 20)
"""Lengths to which texts are cut, one after another, until the comment fits."""

_redactor: Final = Redactor()

_format_time: Final = partial(format_time, form="%Y-%m-%d %H:%M:%S UTC")


def plain_line(text: str, limit: int) -> str:
    """Return a text on one line, without secrets and invisible characters, cut to `limit`."""
    words = " ".join(_redactor.text(text[: 20 * limit]).split())
    visible = "".join(c for c in words if c.isprintable() or c in _ZERO_WIDTH_JOINERS)
    return (
        visible if len(visible) <= limit and len(text) <= 20 * limit else f"{visible[: limit - 1]}…"
    )


@lru_cache(1024)
def markdown_line(text: str, limit: int) -> str:
    """Return Markdown that shows a text literally on one line, without links and mentions."""
    apart = _REFERENCES.sub(lambda match: f"{match[0]}{_ZERO_WIDTH_SPACE}", plain_line(text, limit))
    marked = _EMPHASIS.sub(r"\\_", apart.translate(_ESCAPES))
    return (
        _BLOCK_START.sub(lambda match: f"{match[0]}\\", marked, count=1)
        if _BLOCK_START.match(marked)
        else marked
    )


def markdown_field(name: str, text: str, limit: int) -> str:
    """Return a name with its value, or a dash if that is empty."""
    return f"**{name}**: {markdown_line(text, limit) or '—'}"


def markdown_list(
    name: str, texts: Iterable[str], limit: int, *, after: str = "", numbered: bool = False
) -> str:
    """Return a name with a list of items, or `none`.

    Args:
        name: name of the list.
        texts: the items.
        limit: longest item in characters.
        after: Markdown between the name and the list.
        numbered: number the items.
    """
    lines = [shown for text in texts if (shown := markdown_line(text, limit))]
    if not lines:
        return f"**{name}**{after}: none"
    more = [f"… and {len(lines) - _MAX_LIST_ITEMS} more"] if len(lines) > _MAX_LIST_ITEMS else []
    items = enumerate(lines[:_MAX_LIST_ITEMS] + more, 1)
    return "\n".join(
        [f"**{name}**{after}:", *(f"{f'{n}.' if numbered else '-'} {item}" for n, item in items)]
    )


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

Paragraphs = Sequence[str]


@dataclass(frozen=True, slots=True)
class Notice:
    """Notice about a run, to be posted once.

    Attributes:
        kind: its kind.
        subject: id of the replan, question or final record that it is about.
        at: time of the event, in seconds since the epoch.
        summary: summary for a single line.
        build: returns its paragraphs, with texts cut to a number of characters.
    """

    kind: NoticeKind
    subject: str
    at: float
    summary: str
    build: Callable[[int], Paragraphs] = field(repr=False, compare=False)

    def marker(self, run: str) -> Marker:
        """Return its marker."""
        return Marker(self.kind.value, run, self.subject)

    def body(self, run: str, hint: str = "") -> str:
        """Return the comment, with its marker.

        Args:
            run: id of the run.
            hint: instructions for answering, in Markdown; shown below questions.
        """
        asks = self.kind in (NoticeKind.CLARIFICATION, NoticeKind.QUESTION)
        end = [hint] * (asks and bool(hint)) + [f"*{_format_time(self.at)}*", str(self.marker(run))]
        text = ""
        for limit in _TEXT_LIMITS:
            text = "\n\n".join([f"## {HEADINGS[self.kind]}", *self.build(limit), *end])
            if len(text) <= MAX_COMMENT_CHARS:
                break
        return text[:MAX_COMMENT_CHARS]

    def line(self) -> str:
        """Return the notice on a single line, without secrets."""
        return plain_line(f"{HEADINGS[self.kind]}: {self.summary}", 240)


def record_notices(record: Record, progress: PlanningProgress) -> Iterator[Notice]:
    """Return the notices about a record.

    Args:
        record: the record.
        progress: progress of the run after it.
    """
    body = record.body
    if isinstance(body, NoteAdded) and body.type == "replan":
        yield from _replan_notices(
            ReplanNote.model_validate(body.data, strict=False), record.at, progress
        )
    elif isinstance(body, AttemptSucceeded):
        done = progress.finished_replan(body.task)
        # The notice of its question covers a replan that asks people.
        if done is not None and done.replan_type is not ReplanType.CLARIFICATION_REQUEST:
            decision = progress.state.begun[done.replan_id].decision
            yield _outcome_notice(done, decision, record.at, progress)
    elif isinstance(body, QuestionAsked):
        yield _question_notice(body, record.at, progress)
    elif isinstance(body, RunEnded) and body.status in ("succeeded", "failed", "aborted"):
        yield _closing_notice(body, record, progress)


def _closing_notice(body: RunEnded, record: Record, progress: PlanningProgress) -> Notice:
    """Return the notice about the end of a run: outcome, criteria, actions and cost."""
    state = progress.state
    completion, criteria, actions = (
        state.completion or {},
        _criteria(progress),
        progress.finished_actions(),
    )
    verdict = (
        state.latest.decision
        if state.latest is not None and state.latest.phase is Phase.REFLECTION
        else None
    )
    result, rate = (
        getattr(verdict, name, None) for name in ("evaluation_result", "achievement_rate")
    )
    if body.status != "succeeded":
        met = "not all"
    elif completion.get("status") == "accepted":
        met = "a person has accepted the result"
    elif completion.get("status") != "success":
        met = "not judged"
    else:
        met = f"{'all' if result in (None, 'success') else 'in part'}, as the model judges"
    met += f", {rate:.0f} %" if rate is not None and body.status == "succeeded" else ""
    planned = f"{max(len(state.plans) - 1, 0)}, replans: {state.counts.total}"
    revisions = planned if state.outputs else str(progress.revisions)  # of a plan that was given
    effects = progress.effects()
    cost = f"{format_usage(progress.spent)}, {format_duration(record.at - progress.opened_at)}"

    def build(limit: int) -> Paragraphs:
        return (
            markdown_field("Outcome", body.status, limit),
            markdown_field("Reason", body.reason, limit),
            *_stop_paragraphs(completion, limit),
            *(
                [markdown_list("Success Criteria", criteria, limit, after=f" (met: {met})")]
                if criteria
                else ()
            ),
            markdown_list("Actions Done", actions, limit),
            *([markdown_field("Effects", effects, limit)] if effects else ()),
            markdown_field("Plan Revisions", revisions, limit),
            markdown_field("Cost", cost, limit),
        )

    kind = NoticeKind.FINISHED if body.status == "succeeded" else NoticeKind.ENDED
    return Notice(kind, f"record-{record.seq}", record.at, f"{body.status}: {body.reason}", build)


def _criteria(progress: PlanningProgress) -> list[str]:
    """Return the success criteria, each with the judgement of the model if it judged them one by one."""
    endings = {True: " (met)", False: " (not met)", None: ""}
    return [f"{text}{endings[met]}" for text, met in progress.success_criteria()]


def _replan_notices(note: ReplanNote, at: float, progress: PlanningProgress) -> Iterator[Notice]:
    """Yield the notice about a step of a replan, if there is one."""
    considered, record = note.considered, note.record
    decision = considered.decision if considered is not None else None
    if (
        decision is None and record is not None and record.override_reason is not None
    ):  # no model was asked
        head = (f"**Phase**: {record.phase}", f"**Overridden by**: {record.override_reason}")
        text = f"{record.phase}: {record.reason}"
        rule = partial(markdown_field, "Rule", record.reason)
        yield Notice(
            NoticeKind.OVERRIDDEN, record.replan_id, at, text, lambda limit: (*head, rule(limit))
        )
    if (
        considered is None
        or decision is None
        or (record is not None and decision.replan_type is ReplanType.NONE)
    ):
        return
    # The notice of its question covers a replan that asks people.
    asks = decision.replan_type is ReplanType.CLARIFICATION_REQUEST
    confidence = f"{100 * decision.confidence:.0f} %"
    phase = f"**Phase**: {considered.phase}"
    revision = _revision_field(decision)
    ruling = considered.ruling

    def notice(kind: NoticeKind, text: str, *fields: tuple[str, str]) -> Notice:
        """Return a notice with the reasons of the model, and these fields."""
        return Notice(
            kind,
            considered.replan_id,
            at,
            f"{decision.replan_type}{text}",
            lambda limit: (
                phase,
                f"**Confidence**: {confidence}",
                markdown_field("Reasoning", decision.reasoning, limit),
                markdown_list("Issues Found", decision.issues_found, limit),
                markdown_list("Recommended Actions", decision.recommended_actions, limit),
                revision,
                *(markdown_field(name, value, limit) for name, value in fields),
            ),
        )

    if record is None:
        text = f" after {considered.phase}, {confidence}: {decision.reasoning}"
        if note.stage == "applying" and not asks:
            started = (phase, revision, f"**Replans so far**: {note.counts.total}")
            yield replace(notice(NoticeKind.STARTED, text), build=lambda _: started)
        elif note.stage in ("generating", "awaiting_user") and not asks:
            caution = {
                "execute_with_warning": ("Warning", ruling.reason),
                "ask": ("Waiting", f"a person must agree: {ruling.reason}"),
            }.get(ruling.kind)
            yield notice(NoticeKind.DECIDED, text, *([caution] if caution else ()))
    elif record.executed:
        # Every other replan is done once its phases have made another plan.
        is_over = record.result == "failure" or record.replan_type is ReplanType.RETRY
        if is_over:
            yield _outcome_notice(record, decision, at, progress)
    elif record.override_reason is not None:
        held = [
            one
            for one in progress.state.held.values()
            if one.considered is not None
            and one.considered.replan_id == considered.replan_id
            and one.verdict == "reject"
        ]
        by = held[-1].by if held and ruling.kind == "ask" else ""
        if by and by != "timeout":
            asked = ("Asked because", record.reason)
            yield notice(NoticeKind.DECLINED, f": by {by}", ("Declined by", by), asked)
            return
        why = record.reason
        if ruling.kind == "ask":
            why += "; nobody has agreed to it"
        override = ("Overridden by", str(record.override_reason))
        yield notice(NoticeKind.OVERRIDDEN, f": {why}", override, ("Rule", why))


def _revision_field(decision: ReplanDecision) -> str:
    level = LEVEL_DESCRIPTIONS.get(decision.replan_level or 0, "")
    text = f"**Revision**: {decision.replan_type}"
    if level:
        text += f" ({level})"
    if decision.target_phase:
        text += f"; it goes on with {decision.target_phase}"
    return text


def _outcome_notice(
    record: DecisionRecord,
    decision: ReplanDecision | None,
    at: float,
    progress: PlanningProgress,
) -> Notice:
    """Return the notice that a replan is done, or has failed, with the progress of the plan."""
    failed = record.result == "failure"
    plans = progress.plans[-1:]

    def paragraphs(limit: int) -> Paragraphs:
        lines = [f"**Phase**: {record.phase}"]
        if decision is not None:
            lines.append(_revision_field(decision))
        if failed:
            lines.append(markdown_field("Error", record.error, limit))
        for plan in plans:
            lines.append(f"**Tasks**: {len(plan.steps)}, of which {plan.done} done")
        lines.append(f"**Duration**: {format_duration(record.duration)}")
        return lines

    kind = NoticeKind.FAILED if failed else NoticeKind.DONE
    text = f"{record.replan_type} {record.error}".strip()
    return Notice(kind, record.replan_id, at, text, paragraphs)


def _question_notice(body: QuestionAsked, at: float, progress: PlanningProgress) -> Notice:
    held = progress.state.held.get(progress.state.questions.get(body.question, ""))
    if held is None or held.why != "clarification":
        completion, criteria = (
            progress.state.completion if held is not None else None,
            _criteria(progress),
        )

        def question(limit: int) -> Paragraphs:
            choices = [candidate.alternative.reason for candidate in body.candidates]
            asked = (
                markdown_field("Question", body.text, limit),
                markdown_list("If you agree", choices, limit),
                *([markdown_field("Effects", body.effects, limit)] if body.effects else ()),
            )
            number = markdown_field("Question number", body.question.rpartition(".q")[2], limit)
            listed = (
                [markdown_list("Success Criteria", criteria, limit)]
                if completion and criteria
                else []
            )
            return (*asked, *_stop_paragraphs(completion, limit), *listed, number)

        return Notice(NoticeKind.QUESTION, body.question, at, body.text, question)

    decision = held.considered.decision if held.considered is not None else None
    context = decision.reasoning if decision is not None else held.text
    by = f" by {_format_time(held.due)}" if held.due is not None else ""

    def clarification(limit: int) -> Paragraphs:
        paragraphs = [
            "The model cannot tell what is meant. Before the work goes on, it needs answers from you:",
            markdown_list("Questions", held.questions, limit, numbered=True),
            markdown_field("Context", context, limit),
        ]
        if held.risk:
            paragraphs.append(
                markdown_field(
                    "Caution", f"{held.risk}: a reply alone does not agree to that", limit
                )
            )
        if decision is not None and decision.issues_found:
            paragraphs.append(markdown_list("Issues Found", decision.issues_found, limit))
        answer = "**How to answer**: in your own words, question by question."
        if not progress.assumes_on_timeout:
            waits = f"**If no response**{by}: the work waits; nothing is assumed"
            return (*paragraphs, waits, answer)
        after = f"{by}, the work goes on with these assumptions"
        assumed = markdown_list("If no response", held.effective_assumptions, limit, after=after)
        return (*paragraphs, assumed, answer)

    return Notice(
        NoticeKind.CLARIFICATION, body.question, at, " ".join(held.questions), clarification
    )


def _stop_paragraphs(completion: JsonObject | None, limit: int) -> Iterator[str]:
    """Yield the state and the recommendations of a run that needs a person; nothing for other runs."""
    summary = (completion or {}).get("summary")
    if isinstance(summary, dict) and isinstance(state := summary.get("current_state"), str):
        yield markdown_field("Where things stand", state, limit)
        if isinstance(recommended := summary.get("recommendations"), list) and recommended:
            yield markdown_list("Recommended Actions", map(str, recommended), limit)


# Checklist

CHECKLIST_KIND: Final = "checklist"
"""Kind in the marker of a checklist."""

HISTORY_HEADING: Final = "📜 Previous Plan History"

_TASK_TEXT_LIMITS: Final = (300, 80, 0)
"""Lengths to which task descriptions are cut, one after another, until all tasks fit."""

_MAX_REASON_CHARS: Final = 1_000

_MAX_NAME_CHARS: Final = 100


def render_checklist(plans: Sequence[PlanProgress], run: str, room: int = MAX_COMMENT_CHARS) -> str:
    """Return the checklist of a run with its marker: the current plan, then the earlier ones.

    If it is too long, the oldest plans are cut first, then task descriptions, then tasks; a note says what is missing.

    Args:
        plans: all plans, oldest first; at least one.
        run: id of the run.
        room: longest comment in characters.
    """
    plan, revisions = plans[-1], plans[-1].number - 1
    head, tail = "## 📋 Execution Plan", f"*{progress_line(plans)}*"
    if len(plans) > 1:
        head = "\n\n".join(
            (
                f"{head} (Revised #{revisions})",
                markdown_field("Revision Reason", plan.reason, _MAX_REASON_CHARS),
                f"**Previous Progress**: {plans[-2].done}/{len(plans[-2].steps)}",
                "### New Plan:",
            )
        )
    if revisions >= 2:
        started = f"(started at {_format_time(plan.at)})"
        tail = f"*{_progress(plan)}*\n*Plan Revisions: {revisions} times*\n*Current Plan: #{plan.number} {started}*"
    mark = str(Marker(CHECKLIST_KIND, run))
    left = room - len(head) - len(tail) - len(mark) - 6
    spare = _details_block([], len(plans))  # earlier plans are mentioned in any case
    tasks = _task_list(plan.steps, left - len(spare))
    earlier = _previous_plans(plans[:-1], left - len(tasks))
    return "\n\n".join(part for part in (f"{head}\n\n{tasks}", tail, earlier, mark) if part)


def progress_line(plans: Sequence[PlanProgress]) -> str:
    """Return the progress of the current plan on a single line."""
    plan = plans[-1]
    revision = (
        f" | Revision: #{plan.number - 1} at {_format_time(plan.at)}" if plan.number > 1 else ""
    )
    return f"{_progress(plan)}{revision}"


def _progress(plan: PlanProgress) -> str:
    """Return the progress with a percentage that is rounded down, so that 100 means complete."""
    percent = 100 * plan.done // len(plan.steps) if plan.steps else 100
    return f"Progress: {plan.done}/{len(plan.steps)} ({percent}%) complete"


def _task_list(steps: Sequence[PlanStep], room: int) -> str:
    """Return the tasks with descriptions as long as fit; tasks that do not fit are counted."""
    for limit in _TASK_TEXT_LIMITS:
        shown = "\n".join(_task_item(step, limit) for step in steps)
        if len(shown) <= room:
            return shown
    lines, left = list[str](), room - 100
    for number, step in enumerate(steps):
        item = _task_item(step, 0)
        left -= len(item) + 1
        if left < 0:
            rest = steps[number:]
            done = sum(step.done for step in rest)
            return "\n".join(
                [*lines, "", f"*… and {len(rest)} more tasks, {done} of them complete*"]
            )
        lines.append(item)
    return "\n".join(lines)


def _task_item(step: PlanStep, limit: int) -> str:
    text = markdown_line(step.text, limit) if limit else "…" * bool(step.text)
    return f"- [{'x' if step.done else ' '}] **{markdown_line(step.name, _MAX_NAME_CHARS)}**: {text}".rstrip()


def _previous_plans(plans: Sequence[PlanProgress], room: int) -> str:
    """Return the earlier plans, the newest as far as they fit; older ones are counted."""
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
    note = f"*{gone} older plan{'s' * (gone != 1)} left out: there is no room here.*"
    notes = [note] if gone else []
    return "\n\n".join(
        [f"<details>\n<summary>{HISTORY_HEADING}</summary>", *notes, *sections, "</details>"]
    )


def _plan_section(plan: PlanProgress) -> str:
    """Return an earlier plan with its reason, tasks and progress."""
    tasks = "\n".join(_task_item(step, _TASK_TEXT_LIMITS[0]) for step in plan.steps)
    parts = [
        f"### Plan {plan.number} (started at {_format_time(plan.at)})",
        markdown_field("Reason", plan.reason or "the initial plan", _MAX_REASON_CHARS),
        tasks,
        f"*{_progress(plan)}*",
    ]
    return "\n\n".join(part for part in parts if part)


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
        self._is_complete = self._is_complete and record.seq == self.seq + 1
        self.seq, body = record.seq, record.body
        self._progress.fold(record)
        self.checklist_changed |= (
            isinstance(body, AttemptSucceeded | CallMade | PlanRevised)
            or (isinstance(body, AttemptStarted) and body.call is not None)
            or (isinstance(body, NoteAdded) and body.type == "plan")
        )
        if isinstance(
            body, RunEnded | RunResumed
        ):  # other records may follow the end, such as a failure to post it
            self.end_status = body.status if isinstance(body, RunEnded) else ""
        if isinstance(body, RunOpened) and body.forked_from is not None and body.forked_from[1]:
            self._forked_revision = body.forked_from[1]
        if self._forked_revision is None:
            for notice in record_notices(record, self._progress):
                # Who reads this run has not been told that the replan began.
                is_foreign = notice.subject in self._begun_before_fork
                if not (is_foreign and notice.kind is NoticeKind.DONE):
                    self.pending.append(notice)
        elif isinstance(body, PlanRevised) and body.number == self._forked_revision:
            self._forked_revision = None  # earlier records belong to the run that was forked
            self._begun_before_fork = frozenset(self._progress.state.begun)

    @property
    def is_finished(self) -> bool:
        """True if the run is over and everything about it is posted."""
        return self.end_status in ("succeeded", "failed", "aborted") and not (
            self.pending or self.rejected or self.checklist_changed
        )

    def checklist(self) -> str | None:
        """Return the checklist as a comment; None without a plan, or if records are missing."""
        plans = self._progress.plans if self._is_complete else ()
        return render_checklist(plans, self.run) if plans else None

    def progress(self) -> str:
        """Return the progress on a single line; empty without a plan, or if records are missing."""
        plans = self._progress.plans if self._is_complete else ()
        return progress_line(plans) if plans else ""
