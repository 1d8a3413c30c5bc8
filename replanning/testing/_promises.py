"""What every run promises, checked from its journal alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from replanning import Settings
from replanning.changes import ModifyTask
from replanning.events import (
    AlternativesConsidered,
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    Body,
    Charged,
    ConditionEvaluated,
    Contained,
    ContextUpdated,
    Decided,
    FactsObserved,
    QuestionAnswered,
    QuestionAsked,
    Record,
    ResourceUpdated,
    Revised,
    RunEnded,
    RunOpened,
    RunResumed,
    TriggerAttached,
    TriggerDropped,
    TriggerFired,
)
from replanning.testing._model import RunModel, changed

NOTES: Final = frozenset({"name", "goal", "metadata"})
"""What may be changed in a task that is finished."""

AFTER_THE_END: Final = (RunResumed, Charged, Contained, ContextUpdated, FactsObserved, ResourceUpdated)
"""What may still be recorded of a run that has ended: that it goes on, and what is nobody's choice."""

EPSILON: Final = 1e-6


def broken_promises(records: Sequence[Record]) -> list[str]:
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
    if not records or not isinstance(records[0].body, RunOpened):
        return ["the journal does not begin with the opening of the run"]
    check = _Check(records[0].body)
    for expected, record in enumerate(records, 1):
        check.take(record, expected)
    return check.broken


class _Check:
    """Follows a journal, and looks at each record before the model takes it."""

    def __init__(self, opened: RunOpened) -> None:
        self.broken: list[str] = []
        self.model = RunModel(opened.plan)
        self.settings = Settings.model_validate(opened.settings or {})
        self.triggers: dict[str, str] = {}
        self.asking: dict[str, QuestionAsked] = {}
        self.attached: dict[str, list[str]] = {}
        self.answered: dict[str, tuple[str, ...]] = {}
        self.replans: Counter[str] = Counter()
        self.applied = 0
        self.acted: dict[tuple[str, str, str], float] = {}
        self.fingerprints: dict[str, tuple[str, str, str]] = {}
        self.considered: set[str] = set()
        self._mode = opened.mode
        self._at = 0.0
        self._seq = 0

    def take(self, record: Record, expected: int) -> None:
        """Look at a record that should have this number."""
        self._seq = record.seq
        self._want(record.seq == expected, f"its number should be {expected}")
        self._want(record.at >= self._at, f"its time {record.at} is before that of the record before, {self._at}")
        self._want(
            self.model.ended is None or isinstance(record.body, AFTER_THE_END),
            f"{record.body.kind} follows the end of the run",
        )
        self._at = record.at
        look = _LOOKS.get(type(record.body))
        try:
            if look is not None:
                look(self, record.body, record.at)
            self.model.take(record)
        except KeyError as error:
            self._want(False, f"{record.body.kind} names {error}, which nothing before it brought into the run")
        if isinstance(record.body, RunEnded):
            self._end(record.body)

    def _want(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.broken.append(f"record {self._seq}: {otherwise}")

    # Attempts

    def _started(self, body: AttemptStarted, at: float) -> None:
        task, model = body.task, self.model
        known = model.tasks[task]
        self._want(known.state == "waiting", f"an attempt at {task!r} starts, which is {known.state}")
        self._want(body.number == known.attempts + 1, f"attempt {body.attempt!r} follows {known.attempts} attempts")
        if unmet := model.unmet(task):
            self._want(False, f"{task!r} starts before {unmet} are done or skipped")
        if questions := model.held(task):
            self._want(False, f"{task!r} starts while {questions} hold it")
        self._want(at >= known.due - EPSILON, f"{task!r} starts {known.due - at:g} s before it was to be tried again")
        self._want(not model.paused and not model.aborted, f"{task!r} starts although the run was to stop")
        if known.task.when is not None:
            self._want(known.admitted is True, f"{task!r} starts without its condition {known.task.when!r} having held")
        self._resources(task)

    def _resources(self, task: str) -> None:
        model = self.model
        tool = model.tasks[task].task.tool
        self._want(model.available.get(tool or "", True), f"{task!r} starts while its tool {tool!r} is unavailable")
        for name, amount in model.demand(task).items():
            used = sum(model.demand(other).get(name, 0.0) for other in model.running())
            capacity = model.capacity.get(name, 0.0)
            self._want(
                amount + used <= capacity + EPSILON,
                f"{task!r} takes {amount:g} of {name!r} while {used:g} of {capacity:g} are in use",
            )

    def _attempt_ends(
        self, body: AttemptSucceeded | AttemptFailed | AttemptTimedOut | AttemptInterrupted, at: float
    ) -> None:
        known = self.model.tasks[body.task]
        self._want(
            known.attempt == body.attempt,
            f"{body.kind} of {body.attempt!r}, but the current attempt is {known.attempt!r}",
        )
        if isinstance(body, AttemptSucceeded) or body.retry_at is None:
            return
        if isinstance(body, AttemptFailed):
            self._retried(body)
        else:
            self._want(known.task.idempotent, f"{body.task!r} is run again after {body.kind}, and is not idempotent")

    def _retried(self, body: AttemptFailed) -> None:
        known = self.model.tasks[body.task]
        policy = known.task.retry or self.settings.retry
        if not body.exhausted:
            self._want(body.failure.transient, f"{body.task!r} is run again after an error that does not pass")
            self._want(
                known.tries < policy.max_attempts, f"{body.task!r} is tried more than {policy.max_attempts} times"
            )

    def _evaluated(self, body: ConditionEvaluated, at: float) -> None:
        known = self.model.tasks[body.task]
        self._want(known.state == "waiting", f"the condition of {body.task!r} is evaluated, which is {known.state}")
        self._want(not self.model.unmet(body.task), f"the condition of {body.task!r} is evaluated before its turn")

    # Revisions

    def _revised(self, body: Revised, at: float) -> None:
        model = self.model
        self._want(
            body.number == model.revision + 1 and body.parent == model.revision,
            f"revision {body.number} of parent {body.parent} follows revision {model.revision}",
        )
        stopped: set[str] = set()
        for task, change in changed(body.changes):
            if task not in model.tasks:
                continue  # made by an earlier change of the same revision
            state = "cancelled" if task in stopped else model.tasks[task].state
            annotates = isinstance(change, ModifyTask) and change.fields.keys() <= NOTES
            if change.kind == "cancel":
                stopped.add(task)
            else:
                self._want(state != "running", f"a {change.kind} disturbs {task!r}, which is running")
            self._want(state != "done" or annotates, f"a {change.kind} changes {task!r}, which is done")
        if body.replan is not None:
            self._count(body)

    def _count(self, body: Revised) -> None:
        self._want(body.replan in self.considered, f"replan {body.replan!r} is applied without having been considered")
        roots = {self.model.tasks[task].root for task, _ in changed(body.changes) if task in self.model.tasks}
        self.replans.update(sorted(roots))
        limits = self.settings.limits
        self.applied += 1
        self._want(self._mode == "act", f"replan {body.replan!r} is applied, and the mode is {self._mode!r}")
        if body.by != "policy":
            return  # people may do more
        most = limits.replans_per_run
        self._want(most is None or self.applied <= most, f"replan {self.applied} of the run; the limit is {most}")
        for root in sorted(roots):
            self._want(
                self.replans[root] <= limits.replans_per_lineage,
                f"replan {self.replans[root]} of the lineage of {root!r}; the limit is {limits.replans_per_lineage}",
            )

    # Triggers and questions

    def _fired(self, body: TriggerFired, at: float) -> None:
        trigger = body.trigger
        self._want(trigger.id not in self.triggers, f"trigger {trigger.id!r} fires twice")
        self.triggers[trigger.id] = "open"
        self.fingerprints[trigger.id] = trigger.fingerprint

    def _close(self, trigger: str, how: str, expected: tuple[str, ...]) -> None:
        state = self.triggers[trigger]
        self._want(state in expected, f"trigger {trigger!r} is {how} although it was {state} already")
        self.triggers[trigger] = how

    def _dropped(self, body: TriggerDropped, at: float) -> None:
        self._close(body.trigger, "dropped", ("open",))

    def _considered(self, body: AlternativesConsidered, at: float) -> None:
        self._want(body.replan not in self.considered, f"replan {body.replan!r} is considered twice")
        self.considered.add(body.replan)
        since = [at - self.acted.get(self.fingerprints[trigger], -math.inf) for trigger in body.triggers]
        cooldown = self.settings.cooldown
        self._want(
            any(seconds >= cooldown - EPSILON for seconds in since),
            f"replan {body.replan!r} comes {max(since, default=0):g} s after the last for {list(body.triggers)}, "
            f"within the cooldown of {cooldown:g} s",
        )

    def _decided(self, body: Decided, at: float) -> None:
        for trigger in body.triggers:
            asked = body.decision == "ask" and body.by != "observe"
            self._close(trigger, "asked" if asked else "decided", ("open", "asked", "answered"))
            self.acted[self.fingerprints[trigger]] = at
        if body.decision != "ask":
            left = set(self.answered.pop(body.replan, ())).difference(body.triggers)
            self._reopen(left)  # the answer says nothing of these
        for task in body.blocks:
            state = self.model.tasks[task].state
            self._want(state == "failed", f"{task!r} is blocked, which is {state}")

    def _asked(self, body: QuestionAsked, at: float) -> None:
        self.asking[body.question], self.attached[body.question] = body, []
        for trigger in body.triggers:
            self._close(trigger, "asked", ("open",))

    def _attached(self, body: TriggerAttached, at: float) -> None:
        self.attached[body.question].append(body.trigger)
        self._close(body.trigger, "asked", ("open",))

    def _reopen(self, triggers: Iterable[str]) -> None:
        """Nothing was decided about these, so that no cooldown holds."""
        for trigger in triggers:
            self.triggers[trigger] = "open"
            self.acted.pop(self.fingerprints[trigger], None)

    def _answered(self, body: QuestionAnswered, at: float) -> None:
        own, attached = self.asking.pop(body.question, None), self.attached.pop(body.question, [])
        self._want(own is not None, f"question {body.question!r} is answered, which is not open")
        if own is not None and body.verdict == "withdrawn":
            self._reopen(own.triggers)
        elif own is not None:
            self.answered[own.replan] = own.triggers
            self.triggers.update(dict.fromkeys(own.triggers, "answered"))
        for trigger in attached:  # to be considered anew, whatever the answer was
            self.triggers[trigger] = "open"

    # The end

    def _end(self, body: RunEnded) -> None:
        unsatisfied = self.model.unsatisfied()
        if body.status == "succeeded":
            early = self.model.goal.stop_when_reached  # then only the goal counts
            self._want(early or not unsatisfied, f"the run succeeded, and {unsatisfied} are neither done nor skipped")
        elif body.status == "needs_human":
            self._want(bool(self.model.holds), "the run needs a person, and no question is open")
        if body.status in ("aborted", "paused"):
            return
        self._want(not self.model.running(), f"the run has ended, and {self.model.running()} are running")
        left = [trigger for trigger, state in self.triggers.items() if state == "open"]
        self._want(not left, f"the run has ended, and nothing has become of the triggers {left}")


_Look = Callable[[_Check, Any, float], None]
_LOOKS: Final[dict[type[Body], _Look]] = {
    AttemptStarted: _Check._started,
    AttemptSucceeded: _Check._attempt_ends,
    AttemptFailed: _Check._attempt_ends,
    AttemptTimedOut: _Check._attempt_ends,
    AttemptInterrupted: _Check._attempt_ends,
    ConditionEvaluated: _Check._evaluated,
    Revised: _Check._revised,
    TriggerFired: _Check._fired,
    TriggerDropped: _Check._dropped,
    AlternativesConsidered: _Check._considered,
    Decided: _Check._decided,
    QuestionAsked: _Check._asked,
    TriggerAttached: _Check._attached,
    QuestionAnswered: _Check._answered,
}
