"""What the journal of a run of planning mode comes to, in lines for people and programs (F4, F5). Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from replanning._changes import AddTask, PlanChange, ReplaceTask
from replanning._folding import failure_of
from replanning._ids import QuestionId
from replanning._live import LivePlan
from replanning._observations import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
)
from replanning._plan import JsonObject, JsonValue
from replanning._quoting import truncate_value
from replanning._records import (
    PlanningNoted,
    PlanRevised,
    QuestionAnswered,
    QuestionAsked,
    Record,
    RunEnded,
    RunOpened,
    RunResumed,
)
from replanning.history._words import format_iso_time
from replanning.planning._phases import Phase
from replanning.planning._replan_records import DecisionRecord, ReplanNote
from replanning.planning._request import request_of
from replanning.planning._state import PlanningState, PlanVersion
from replanning.planning._steps import is_action, phase_of, planning_metadata

LineType = Literal["plan", "revision", "reflection", "execution", "replan_decision", "completion"]

FINAL_STATUSES: Final = ("succeeded", "failed", "aborted")
"""How a run ends for good; any other end is one from which it is resumed."""

_MAX_OUTPUT_CHARS: Final = 20_000
"""Characters of an output that a line holds; the journal has all of it."""

_LineContent = tuple[LineType, JsonObject]
"""What a line tells beside what every line has."""

_AttemptEnd = AttemptSucceeded | AttemptFailed | AttemptTimedOut | AttemptInterrupted


@dataclass(frozen=True, slots=True)
class _PendingDecision:
    """A decision whose replan has not changed the plan yet."""

    seq: int
    record: DecisionRecord
    plan_before: JsonObject


class HistoryLineBuilder:
    """Turns the records of one run into lines.

    Lines follow from the records alone, and the same records give the same lines: what was not written can be made
    again. Two lines of a run never have type, timestamp and number in common.

    Attributes:
        seq: the number of the last record that was taken in.
    """

    def __init__(self) -> None:
        self.seq = 0
        self._live: LivePlan | None = None
        self._common_fields: JsonObject = {}
        self._state = PlanningState()
        self._goal: JsonValue = {}
        self._started_at: dict[str, float] = {}
        self._snapshots_before: dict[str, JsonObject] = {}
        self._pending: _PendingDecision | None = None

    def __repr__(self) -> str:
        return f"<HistoryLines of {self._common_fields.get('task_uuid', 'no run of planning mode')} after record {self.seq}>"

    def lines_from(self, record: Record) -> list[JsonObject]:
        """The lines that can be written from this record on; none where the run is none of planning mode."""
        self.seq = record.seq
        if isinstance(record.body, RunOpened):
            self._on_opened(record.body)
        live = self._live
        if live is None:
            return []
        live.fold(record)
        self._state.fold(record)
        lines = [*self._flush_pending(record.body, live), *self._decision_lines(record, live)]
        if said := self._content(record, live):
            lines.append(self._line(said[0], record.seq, format_iso_time(record.at), said[1]))
        return lines

    def _on_opened(self, opened: RunOpened) -> None:
        request = request_of(opened.plan)
        if request is not None:
            self._live = LivePlan(opened.plan)
            self._common_fields = {"task_uuid": opened.run, "issue_id": request.issue_id}

    def _line(self, kind: LineType, seq: int, timestamp: str, said: JsonObject) -> JsonObject:
        return {"type": kind, "timestamp": timestamp, **self._common_fields, "seq": seq, **said}

    def _content(self, record: Record, live: LivePlan) -> _LineContent | None:
        """What a record tells by itself."""
        match record.body:
            case PlanningNoted() as body:
                return self._note_content(body)
            case AttemptStarted() as body:
                self._started_at[body.attempt] = record.at
            case AttemptSucceeded() | AttemptFailed() | AttemptTimedOut() | AttemptInterrupted() as body:
                if is_action(live.entry(body.task).task):
                    return "execution", self._execution_fields(body, record.at, live)
            case PlanRevised() as body:
                return _change_content(body)
            case QuestionAsked(question=question, text=text):
                return "execution", {
                    "event": "asked",
                    "question": question,
                    "text": text,
                    **self._clarification_fields(question),
                }
            case QuestionAnswered() as body:
                return "execution", _answer_fields(body)
            case RunResumed():
                return "execution", {"event": "resumed"}
            case RunEnded() as body:
                return self._end_content(body)
        return None

    def _note_content(self, body: PlanningNoted) -> _LineContent | None:
        match body.type:
            case "plan":
                return self._plan_content(self._state.plans)
            case "reflection":
                return "reflection", {"evaluation": body.data}
            case "output" if body.data.get("phase") == Phase.GOAL_UNDERSTANDING:
                self._goal = body.data["value"]
            case "assumed":
                return "execution", {"event": "assumed", **body.data}
            case "completion" if body.data.get("status") == "requires_human_intervention":
                return "completion", {**body.data, "done": False}
        return None

    def _clarification_fields(self, question: QuestionId) -> JsonObject:
        """What is to be clarified, and what is assumed where nobody answers; nothing where agreement is asked for."""
        if not self._state.is_clarification(question):
            return {}
        held = self._state.held[self._state.questions[question]]
        return {"questions": [*held.questions], "assumptions": [*held.effective_assumptions]}

    # Plans

    def _plan_content(self, plans: list[PlanVersion]) -> _LineContent:
        """The newest plan; from the second on with what it changes."""
        new = plans[-1]
        plan: JsonObject = {
            "number": new.number,
            "goal_understanding": self._goal,
            "task_decomposition": new.decomposition,
            "action_plan": new.action_plan,
            "tasks": dict(new.tasks),
            "kept": list(new.kept),
        }
        if len(plans) == 1:
            return "plan", {"plan": plan}
        return "revision", {"reason": new.reason, "changes": list(_diff_plans(plans[-2], new)), "updated_plan": plan}

    # Decisions

    def _decision_lines(self, record: Record, live: LivePlan) -> Iterator[JsonObject]:
        """What became of a decision, where it is known already what it made of the plan."""
        if not isinstance(record.body, PlanningNoted) or record.body.type != "replan":
            return
        note = ReplanNote.model_validate(record.body.data, strict=False)
        if note.considered is not None and note.considered.replan_id not in self._snapshots_before:
            self._snapshots_before[note.considered.replan_id] = _plan_snapshot(live)
        if note.record is None:
            return
        before = self._snapshots_before.pop(note.record.replan_id, None) or _plan_snapshot(live)
        decided = _PendingDecision(record.seq, note.record, before)
        if note.record.result == "success" and before["revision"] == live.revision:
            self._pending = decided  # the engine changes the plan after that
        else:
            yield self._decision_line(decided, live)

    def _flush_pending(self, body: object, live: LivePlan) -> Iterator[JsonObject]:
        """The decision that waited for its change of the plan, if that has come, or comes no more."""
        pending = self._pending
        if pending is None or not _settles_decision(body, pending.record.replan_id):
            return
        self._pending = None
        yield self._decision_line(pending, live)

    def _decision_line(self, decided: _PendingDecision, live: LivePlan) -> JsonObject:
        said: JsonObject = decided.record.model_dump(mode="json")
        said |= {"plan_before": decided.plan_before, "plan_after": _plan_snapshot(live)}
        return self._line("replan_decision", decided.seq, decided.record.timestamp, said)

    # Execution

    def _execution_fields(self, body: _AttemptEnd, at: float, live: LivePlan) -> JsonObject:
        """How an attempt at an action ended."""
        task = live.entry(body.task).task
        arguments = self._state.calls.get(body.attempt, dict(task.arguments))
        said: JsonObject = {
            "event": "succeeded" if isinstance(body, AttemptSucceeded) else "failed",
            "task_id": self._state.name_of(live.entry(body.task).root),
            "attempt": body.attempt,
            "tool": task.tool or planning_metadata(task).get("tool"),
            "arguments": truncate_value(arguments, _MAX_OUTPUT_CHARS),
            "seconds": at - self._started_at.pop(body.attempt, at),
        }
        if isinstance(body, AttemptSucceeded):
            return {**said, "result": truncate_value(body.output, _MAX_OUTPUT_CHARS)}
        failure = failure_of(body)
        error: JsonObject = {"type": failure.type, "message": failure.message, "kind": failure.kind}
        return {**said, "error": error, "tried_again": body.retry_at is not None}

    def _end_content(self, body: RunEnded) -> _LineContent:
        if body.status not in FINAL_STATUSES:
            return "execution", {"event": body.status, "reason": body.reason}
        noted = self._state.completion or {"phase": "completion", "status": body.status}
        return "completion", {**noted, "result": body.status, "reason": body.reason, "done": True}


def _change_content(body: PlanRevised) -> _LineContent | None:
    """What was done to the plan beside what other lines tell: fallbacks, retries, what was left out, and by hand."""
    if any(map(_is_planning_change, body.changes)):
        return None
    told: list[JsonValue] = [
        {"kind": change.kind, **change.model_dump(mode="json", exclude_defaults=True)} for change in body.changes
    ]
    return "execution", {"event": "changed", "reason": body.reason, "by": body.by, "changes": told}


def _answer_fields(body: QuestionAnswered) -> JsonObject:
    """What was decided about a question, and by whom, in which words."""
    said: JsonObject = {"event": "answered", "question": body.question, "verdict": body.verdict, "by": body.by}
    return {**said, "comment": body.comment} if body.comment else said


def _settles_decision(body: object, replan: str) -> bool:
    """Whether a replan has changed the plan by now, or will not any more."""
    if isinstance(body, PlanningNoted) and body.type == "replan":
        considered = body.data.get("considered")
        return isinstance(considered, dict) and considered.get("replan_id") != replan
    return isinstance(body, PlanRevised | RunEnded)


def _is_planning_change(change: PlanChange) -> bool:
    """Whether a change puts phases or planned actions into place, which other lines tell of."""
    match change:
        case AddTask(task=task):
            return phase_of(task) is not None or "by" in planning_metadata(task)
        case ReplaceTask(tasks=tasks):
            return all(phase_of(task) is not None for task in tasks)
    return False


def _plan_snapshot(live: LivePlan) -> JsonObject:
    """The plan as it stands, phases included."""
    tasks: list[JsonValue] = []
    for task in live.document().tasks:
        one: JsonObject = {"id": task.id, "state": live.entry(task.id).state.value, "depends_on": list(task.depends_on)}
        one |= {
            name: value
            for name, value in (("goal", task.goal), ("tool", task.tool or planning_metadata(task).get("tool")))
            if value
        }
        tasks.append(one)
    return {"revision": live.revision, "tasks": tasks}


def _diff_plans(old: PlanVersion, new: PlanVersion) -> Iterator[JsonValue]:
    """What a plan adds to the one before it, takes out of it, and does otherwise."""
    before, after = _actions_by_id(old), _actions_by_id(new)
    for name in new.tasks:
        if name not in old.tasks:
            yield {"change": "added", "task_id": name}
        elif name in before and name in after and before[name] != after[name]:
            fields = [field for field in after[name] if before[name].get(field) != after[name][field]]
            yield {"change": "modified", "task_id": name, "fields": [*fields]}
    for name in old.tasks:
        if name not in new.tasks:
            yield {"change": "removed", "task_id": name}


def _actions_by_id(plan: PlanVersion) -> dict[str, JsonObject]:
    actions = plan.action_plan.get("actions")
    return {str(one["task_id"]): one for one in actions if isinstance(one, dict)} if isinstance(actions, list) else {}
