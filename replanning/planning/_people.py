"""What a person must decide, and what is done in their place where nobody can be asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, NoReturn

from replanning._errors import ReplanningError
from replanning._ids import TaskId
from replanning._interfaces import Clock
from replanning._plan import JsonObject
from replanning._planning_settings import PlanningSettings
from replanning._run import PlanRun
from replanning._settings import Settings
from replanning.planning._manager import ReplanManager
from replanning.planning._outputs import InterventionSummary, RequiresHumanIntervention, sanitise_text
from replanning.planning._phases import Phase
from replanning.planning._replan_records import Consideration
from replanning.planning._standing import action_counts, unresolved_failures
from replanning.planning._state import HoldReason, TaskHold

_MAX_FAILURES_SHOWN: Final = 5
"""Failed actions whose errors are told."""


class PlanningFailed(ReplanningError):
    """A phase has come to nothing, and the run with it."""


class PlanningHeld(ReplanningError):
    """A task cannot go on until a person has decided; what they are asked is on record."""


class HumanInput(ABC):
    """The methods of a session that are about people."""

    run: PlanRun
    config: Settings
    settings: PlanningSettings
    clock: Clock
    interactive: bool
    manager: ReplanManager

    @abstractmethod
    def note(self, kind: str, data: JsonObject) -> None:
        """Put something on record."""

    def hold(
        self,
        task: TaskId,
        why: HoldReason,
        text: str,
        *,
        target: Phase | None,
        considered: Consideration | None,
        risk: str = "",
    ) -> NoReturn:
        """Stop a task until a person has decided.

        Raises:
            PlanningHeld: always.
        """
        decision = considered.decision if considered is not None else None
        minutes = self.settings.replanning.goal_understanding.auto_assume_timeout_minutes
        held = TaskHold(
            task=task,
            why=why,
            text=text,
            target=target,
            questions=considered.ruling.questions if considered is not None and why == "clarification" else (),
            assumptions=tuple(getattr(decision, "assumptions_to_make", ())),
            risk=risk,
            due=self.clock.now() + 60 * minutes,
            considered=considered,
        )
        self.note("held", held.model_dump(mode="json"))
        raise PlanningHeld(text)

    def escalate(
        self, task: TaskId, reason: str, *, target: Phase | None = None, recommendations: tuple[str, ...] = ()
    ) -> None:
        """Do what is to be done where a replan is wanted, cannot be, and no other way was found (E1).

        Args:
            task: the task that it is about.
            reason: why there is no way on.
            target: the phase that is done again if a person agrees; None where what there is counts then.
            recommendations: what they might do.

        Raises:
            PlanningHeld: a person decides.
            PlanningFailed: the run ends.
        """
        match self.config.escalation.on_no_alternative or ("wait" if self.interactive else "abort"):
            case "assume":
                text = f"{reason}: what there is counts" if target is None else reason
                self.record_assumptions([text])
            case "wait":
                self.record_intervention(reason, recommendations)
                self.hold(task, "no_alternative", reason, target=target, considered=None)
            case _:
                self.record_intervention(reason, recommendations)
                raise PlanningFailed(reason)

    def record_intervention(
        self, reason: str, recommendations: tuple[str, ...] = (), outcomes: tuple[str, ...] = ()
    ) -> None:
        """Put on record that a person must look after this, and where things stand (J36)."""
        done, failed = action_counts(self.run.live)
        errors, counts = "; ".join(unresolved_failures(self.run.live)[:_MAX_FAILURES_SHOWN]), self.manager.counts
        stands = f"actions done: {done}, failed: {failed}{errors and f' ({errors})'}; replans made: {counts.total}"
        summary = InterventionSummary(
            goal_achieved=False,
            tasks_completed=done,
            tasks_failed=failed,
            key_outcomes=outcomes,
            revision_attempts=counts.plan_revisions,
            reason=sanitise_text(reason),
            current_state=sanitise_text(stands),
            recommendations=recommendations,
        )
        self.note("completion", RequiresHumanIntervention(summary=summary).model_dump(mode="json"))

    def hold_for_intervention(
        self, task: TaskId, reason: str, recommendations: tuple[str, ...] = (), outcomes: tuple[str, ...] = ()
    ) -> NoReturn:
        """Have a person decide whether what there is will do.

        Raises:
            PlanningHeld: always.
        """
        self.record_intervention(reason, recommendations, outcomes)
        self.hold(task, "intervention", f"{reason}; is what there is good enough?", target=None, considered=None)

    def record_assumptions(self, assumptions: Sequence[str], questions: Sequence[str] = ()) -> None:
        """Put on record what is assumed, and which questions nobody has answered."""
        self.note("assumed", {"questions": [*questions], "assumptions": [*assumptions]})
