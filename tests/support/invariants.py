"""What every run promises, checked from its journal alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from replanning import PlanRun, ReplanningError, Settings, TaskState, journal
from replanning.changes import ModifyTask
from replanning.live.plan import LivePlan
from tests.support.live import replayable_state
from tests.support.run_model import RunModel, changed_tasks

ANNOTATION_FIELDS: Final = frozenset({"name", "goal", "metadata"})
"""What may be changed in a task that is finished."""

ALLOWED_AFTER_END: Final = (
    journal.RunResumed,
    journal.UsageCharged,
    journal.ErrorContained,
    journal.ContextUpdated,
    journal.FactsObserved,
    journal.ResourceUpdated,
)
"""What may still be recorded of a run that has ended: that it goes on, and what is nobody's choice."""

TIME_TOLERANCE: Final = 1e-6


def invariant_violations(records: Sequence[journal.Record]) -> list[str]:
    """Everything in a run's journal that a run must never do; nothing, if all is well.

    It follows the journal with a model of its own and none of the code that runs plans. Among what it looks
    for: a finished task that runs again, a task that runs before its dependencies, without the resources it
    needs, or while a question holds it; running work that is disturbed; limits that are exceeded; triggers
    that nothing becomes of; an end that does not agree with what was done.

    Args:
        records: the whole journal, as `store.read(run_id)` gives it; it may stop anywhere, as after a crash.

    Returns:
        One sentence for each, beginning with the number of the record.
    """
    if not records or not isinstance(records[0].body, journal.RunOpened):
        return ["the journal does not begin with the opening of the run"]
    check = _InvariantChecker(records[0].body)
    for expected, record in enumerate(records, 1):
        check.check(record, expected)
    return check.violations


class _InvariantChecker:
    """Follows a journal, and looks at each record before the model takes it."""

    def __init__(self, opened: journal.RunOpened) -> None:
        self.violations: list[str] = []
        self.model = RunModel(opened.plan)
        self.settings = Settings.model_validate(opened.settings or {})
        self.trigger_states: dict[str, str] = {}
        self.open_questions: dict[str, journal.QuestionAsked] = {}
        self.triggers_by_question: dict[str, list[str]] = {}
        self.triggers_by_replan: dict[str, tuple[str, ...]] = {}
        self.replans_by_lineage: Counter[str] = Counter()
        self.applied_replan_count = 0
        self.last_decided_at: dict[tuple[str, str, str], float] = {}
        self.fingerprints: dict[str, tuple[str, str, str]] = {}
        self.considered_replans: set[str] = set()
        self._mode = opened.mode
        self._at = 0.0
        self._seq = 0

    def check(self, record: journal.Record, expected: int) -> None:
        self._seq = record.seq
        self._require(record.seq == expected, f"its number should be {expected}")
        self._require(record.at >= self._at, f"its time {record.at} is before that of the record before, {self._at}")
        self._require(
            self.model.ended is None or isinstance(record.body, ALLOWED_AFTER_END),
            f"{record.body.kind} follows the end of the run",
        )
        self._at = record.at
        look = _RECORD_CHECKS.get(type(record.body))
        try:
            if look is not None:
                look(self, record.body, record.at)
            self.model.apply(record)
        except KeyError as error:
            self._require(False, f"{record.body.kind} names {error}, which nothing before it brought into the run")
        if isinstance(record.body, journal.RunEnded):
            self._check_end(record.body)

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.violations.append(f"record {self._seq}: {otherwise}")

    # Attempts

    def _check_started(self, body: journal.AttemptStarted, at: float) -> None:
        task, model = body.task, self.model
        known = model.tasks[task]
        self._require(known.state == "waiting", f"an attempt at {task!r} starts, which is {known.state}")
        self._require(body.number == known.attempts + 1, f"attempt {body.attempt!r} follows {known.attempts} attempts")
        if unmet := model.unmet_dependencies(task):
            self._require(False, f"{task!r} starts before {unmet} are done or skipped")
        if questions := model.open_questions(task):
            self._require(False, f"{task!r} starts while {questions} hold it")
        self._require(
            at >= known.due - TIME_TOLERANCE, f"{task!r} starts {known.due - at:g} s before it was to be tried again"
        )
        self._require(not model.paused and not model.aborted, f"{task!r} starts although the run was to stop")
        if known.task.when is not None:
            self._require(
                known.condition_value is True, f"{task!r} starts without its condition {known.task.when!r} having held"
            )
        self._check_resources(task)

    def _check_resources(self, task: str) -> None:
        model = self.model
        tool = model.tasks[task].task.tool
        self._require(model.available.get(tool or "", True), f"{task!r} starts while its tool {tool!r} is unavailable")
        for name, amount in model.demand(task).items():
            used = sum(model.demand(other).get(name, 0.0) for other in model.running())
            capacity = model.capacity.get(name, 0.0)
            self._require(
                amount + used <= capacity + TIME_TOLERANCE,
                f"{task!r} takes {amount:g} of {name!r} while {used:g} of {capacity:g} are in use",
            )

    def _check_attempt_end(
        self,
        body: journal.AttemptSucceeded | journal.AttemptFailed | journal.AttemptTimedOut | journal.AttemptInterrupted,
        at: float,
    ) -> None:
        known = self.model.tasks[body.task]
        self._require(
            known.attempt == body.attempt,
            f"{body.kind} of {body.attempt!r}, but the current attempt is {known.attempt!r}",
        )
        if isinstance(body, journal.AttemptSucceeded) or body.retry_at is None:
            return
        if isinstance(body, journal.AttemptFailed):
            self._check_retry(body)
        else:
            self._require(known.task.idempotent, f"{body.task!r} is run again after {body.kind}, and is not idempotent")

    def _check_retry(self, body: journal.AttemptFailed) -> None:
        known = self.model.tasks[body.task]
        policy = known.task.retry or self.settings.retry
        if not body.exhausted:
            self._require(body.failure.transient, f"{body.task!r} is run again after an error that does not pass")
            self._require(
                known.tries_since_reset < policy.max_attempts,
                f"{body.task!r} is tried more than {policy.max_attempts} times",
            )

    def _check_condition(self, body: journal.ConditionEvaluated, at: float) -> None:
        known = self.model.tasks[body.task]
        self._require(known.state == "waiting", f"the condition of {body.task!r} is evaluated, which is {known.state}")
        self._require(
            not self.model.unmet_dependencies(body.task), f"the condition of {body.task!r} is evaluated before its turn"
        )

    # Revisions

    def _check_revision(self, body: journal.PlanRevised, at: float) -> None:
        model = self.model
        self._require(
            body.number == model.revision + 1 and body.parent == model.revision,
            f"revision {body.number} of parent {body.parent} follows revision {model.revision}",
        )
        stopped: set[str] = set()
        for task, change in changed_tasks(body.changes):
            if task not in model.tasks:
                continue  # made by an earlier change of the same revision
            state = "cancelled" if task in stopped else model.tasks[task].state
            annotates = isinstance(change, ModifyTask) and change.fields.keys() <= ANNOTATION_FIELDS
            if change.kind == "cancel":
                stopped.add(task)
            else:
                self._require(state != "running", f"a {change.kind} disturbs {task!r}, which is running")
            self._require(state != "done" or annotates, f"a {change.kind} changes {task!r}, which is done")
        if body.replan is not None:
            self._check_limits(body)

    def _check_limits(self, body: journal.PlanRevised) -> None:
        self._require(
            body.replan in self.considered_replans, f"replan {body.replan!r} is applied without having been considered"
        )
        roots = {self.model.tasks[task].root for task, _ in changed_tasks(body.changes) if task in self.model.tasks}
        self.replans_by_lineage.update(sorted(roots))
        limits = self.settings.limits
        self.applied_replan_count += 1
        self._require(self._mode == "act", f"replan {body.replan!r} is applied, and the mode is {self._mode!r}")
        if body.by != "policy":
            return  # people may do more
        most = limits.replans_per_run
        self._require(
            most is None or self.applied_replan_count <= most,
            f"replan {self.applied_replan_count} of the run; the limit is {most}",
        )
        for root in sorted(roots):
            self._require(
                self.replans_by_lineage[root] <= limits.replans_per_lineage,
                f"replan {self.replans_by_lineage[root]} of the lineage of {root!r}; the limit is {limits.replans_per_lineage}",
            )

    # Triggers and questions

    def _check_trigger_fired(self, body: journal.TriggerFired, at: float) -> None:
        trigger = body.trigger
        self._require(trigger.id not in self.trigger_states, f"trigger {trigger.id!r} fires twice")
        self.trigger_states[trigger.id] = "open"
        self.fingerprints[trigger.id] = trigger.fingerprint

    def _close_trigger(self, trigger: str, how: str, expected: tuple[str, ...]) -> None:
        state = self.trigger_states[trigger]
        self._require(state in expected, f"trigger {trigger!r} is {how} although it was {state} already")
        self.trigger_states[trigger] = how

    def _check_trigger_dropped(self, body: journal.TriggerDropped, at: float) -> None:
        self._close_trigger(body.trigger, "dropped", ("open",))

    def _check_considered(self, body: journal.AlternativesConsidered, at: float) -> None:
        self._require(body.replan not in self.considered_replans, f"replan {body.replan!r} is considered twice")
        self.considered_replans.add(body.replan)
        since = [at - self.last_decided_at.get(self.fingerprints[trigger], -math.inf) for trigger in body.triggers]
        cooldown = self.settings.cooldown
        self._require(
            any(seconds >= cooldown - TIME_TOLERANCE for seconds in since),
            f"replan {body.replan!r} comes {max(since, default=0):g} s after the last for {list(body.triggers)}, "
            f"within the cooldown of {cooldown:g} s",
        )

    def _check_decision(self, body: journal.DecisionMade, at: float) -> None:
        for trigger in body.triggers:
            asked = body.decision == "ask" and body.by != "observe"
            self._close_trigger(trigger, "asked" if asked else "decided", ("open", "asked", "answered"))
            self.last_decided_at[self.fingerprints[trigger]] = at
        if body.decision != "ask":
            left = set(self.triggers_by_replan.pop(body.replan, ())).difference(body.triggers)
            self._reopen_triggers(left)  # the answer says nothing of these
        for task in body.blocks:
            state = self.model.tasks[task].state
            self._require(state == "failed", f"{task!r} is blocked, which is {state}")

    def _check_question(self, body: journal.QuestionAsked, at: float) -> None:
        self.open_questions[body.question], self.triggers_by_question[body.question] = body, []
        for trigger in body.triggers:
            self._close_trigger(trigger, "asked", ("open",))

    def _check_trigger_attached(self, body: journal.TriggerAttached, at: float) -> None:
        self.triggers_by_question[body.question].append(body.trigger)
        self._close_trigger(body.trigger, "asked", ("open",))

    def _reopen_triggers(self, triggers: Iterable[str]) -> None:
        for trigger in triggers:
            self.trigger_states[trigger] = "open"
            self.last_decided_at.pop(self.fingerprints[trigger], None)

    def _check_answer(self, body: journal.QuestionAnswered, at: float) -> None:
        own, attached = self.open_questions.pop(body.question, None), self.triggers_by_question.pop(body.question, [])
        self._require(own is not None, f"question {body.question!r} is answered, which is not open")
        if own is not None and body.verdict == "withdrawn":
            self._reopen_triggers(own.triggers)
        elif own is not None:
            self.triggers_by_replan[own.replan] = own.triggers
            self.trigger_states.update(dict.fromkeys(own.triggers, "answered"))
        for trigger in attached:  # to be considered anew, whatever the answer was
            self.trigger_states[trigger] = "open"

    # The end

    def _check_end(self, body: journal.RunEnded) -> None:
        unsatisfied = self.model.unsatisfied()
        if body.status == "succeeded":
            early = self.model.goal.stop_when_reached  # then only the goal counts
            self._require(
                early or not unsatisfied, f"the run succeeded, and {unsatisfied} are neither done nor skipped"
            )
        elif body.status == "needs_human":
            self._require(bool(self.model.holds), "the run needs a person, and no question is open")
        if body.status in ("aborted", "paused"):
            return
        self._require(not self.model.running(), f"the run has ended, and {self.model.running()} are running")
        left = [trigger for trigger, state in self.trigger_states.items() if state == "open"]
        self._require(not left, f"the run has ended, and nothing has become of the triggers {left}")


_RecordCheck = Callable[[_InvariantChecker, Any, float], None]

_RECORD_CHECKS: Final[dict[type[journal.RecordBody], _RecordCheck]] = {
    journal.AttemptStarted: _InvariantChecker._check_started,
    journal.AttemptSucceeded: _InvariantChecker._check_attempt_end,
    journal.AttemptFailed: _InvariantChecker._check_attempt_end,
    journal.AttemptTimedOut: _InvariantChecker._check_attempt_end,
    journal.AttemptInterrupted: _InvariantChecker._check_attempt_end,
    journal.ConditionEvaluated: _InvariantChecker._check_condition,
    journal.PlanRevised: _InvariantChecker._check_revision,
    journal.TriggerFired: _InvariantChecker._check_trigger_fired,
    journal.TriggerDropped: _InvariantChecker._check_trigger_dropped,
    journal.AlternativesConsidered: _InvariantChecker._check_considered,
    journal.DecisionMade: _InvariantChecker._check_decision,
    journal.QuestionAsked: _InvariantChecker._check_question,
    journal.TriggerAttached: _InvariantChecker._check_trigger_attached,
    journal.QuestionAnswered: _InvariantChecker._check_answer,
}

Snapshot = dict[str, Any]

_UNRECORDED_FIELDS: Final = frozenset({"hold_count", "fields"})
"""Fields of tasks that no journal holds, or that only repeat others."""


def snapshot(live: LivePlan, at: float) -> Snapshot:
    """A live plan as plain values; equal plans give equal ones.

    Left out is what no journal holds: what was handed out and not started, what is held while something is decided,
    and outputs that are not JSON.

    Args:
        live: the plan, such as `run.live`.
        at: when, in seconds since the epoch: a task that has waited until then for its next attempt is ready.
    """
    found: Snapshot = replayable_state(live, at)
    for task_id, fields in found.pop("tasks").items():
        if fields["state"] is not TaskState.DONE or not fields["recoverable"]:
            fields["output"] = None
        found |= {f"task {task_id!r} {name}": v for name, v in fields.items() if name not in _UNRECORDED_FIELDS}
    return found


def replayed(records: Iterable[journal.Record]) -> LivePlan:
    """A live plan made anew from a whole journal."""
    first, *rest = records
    assert isinstance(first.body, journal.RunOpened)
    again = LivePlan(first.body.plan)
    for record in rest:
        again.fold(record)
    return again


def replay_differences(run: PlanRun, records: Iterable[journal.Record], at: float) -> list[str]:
    """Where the live plan of a run and one made anew from its journal differ, one line each."""
    one = snapshot(run.live, at)
    try:
        other = snapshot(replayed(records), at)
    except ReplanningError as error:
        return [f"the journal cannot be replayed: {error}"]
    return [
        f"live plan and journal differ: {key} is {one.get(key)!r}, by the journal {other.get(key)!r}"
        for key in dict.fromkeys([*one, *other])
        if one.get(key) != other.get(key)
    ]
