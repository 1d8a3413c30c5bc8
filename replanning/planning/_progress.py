"""What of the plans of a run is done: a fold over its journal. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

from replanning._ids import TaskId
from replanning._live import LivePlan
from replanning._plan import JsonObject, JsonValue
from replanning._records import PlanningNoted, Record, RunOpened
from replanning.planning._state import PlanningState, PlanVersion
from replanning.planning._steps import is_action_done, planning_metadata


class PlanStep(NamedTuple):
    """A task of a plan: what the plan calls it, what it is, and whether it is done."""

    name: str
    text: str
    done: bool


class PlanProgress(NamedTuple):
    """How far a plan has come, or had come when another took its place.

    Attributes:
        number: of the plan, from 1.
        at: when it was made, in seconds since the epoch.
        reason: why it replaced the one before; empty for the first.
        steps: its tasks; those that it took over from an earlier plan come first.
    """

    number: int
    at: float
    reason: str
    steps: tuple[PlanStep, ...]

    @property
    def done(self) -> int:
        """How many of its tasks are done."""
        return sum(step.done for step in self.steps)


class PlanningProgress:
    """Follows a run of planning mode, and says what of its plans is done (G8).

    A task counts as done by itself or by what replaced it; one that failed, or that was left out, does not.

    Attributes:
        state: everything else that planning mode remembers.
        run_opened: the record with which the run began; None as long as it was not seen.
    """

    def __init__(self) -> None:
        self.state = PlanningState()
        self.run_opened: RunOpened | None = None
        self._live: LivePlan | None = None
        self._created_at: dict[str, float] = {}
        self._superseded_steps: dict[str, tuple[PlanStep, ...]] = {}

    def __repr__(self) -> str:
        plans = self.plans
        latest = f"{plans[-1].done}/{len(plans[-1].steps)} of plan {plans[-1].number}" if plans else "no plan"
        return f"<PlanningProgress {latest}>"

    @classmethod
    def from_records(cls, records: Iterable[Record]) -> Self:
        """How things stand after these records, which begin with the first."""
        progress = cls()
        for record in records:
            progress.fold(record)
        return progress

    def fold(self, record: Record) -> None:
        """Take in a record; they come in order, and begin with the first."""
        body = record.body
        if isinstance(body, RunOpened):
            self.run_opened, self._live = body, LivePlan(body.plan)
        elif self._live is not None:
            self._live.fold(record)
        if isinstance(body, PlanningNoted) and body.type == "plan":
            self._supersede(body.data, record.at)
        self.state.fold(record)

    def _supersede(self, data: JsonObject, at: float) -> None:
        """Keep how far the plan had come that another takes the place of."""
        task, old = str(data.get("task")), self.state.plan
        if old is not None and old.task != task:
            self._superseded_steps[old.task] = self._steps(old)
        self._created_at[task] = at

    @property
    def plans(self) -> tuple[PlanProgress, ...]:
        """All plans, oldest first; the last is the one that holds."""
        return tuple(
            PlanProgress(
                plan.number,
                self._created_at[plan.task],
                plan.reason,
                self._superseded_steps.get(plan.task) or self._steps(plan),
            )
            for plan in self.state.plans
        )

    @property
    def assumes_on_timeout(self) -> bool:
        """Whether something is assumed in place of an answer that nobody gives in time (E4)."""
        found: JsonValue = (self.run_opened.settings or {}) if self.run_opened is not None else {}
        for name in ("planning", "replanning", "goal_understanding"):
            found = found.get(name, {}) if isinstance(found, dict) else {}
        return not (isinstance(found, dict) and found.get("auto_assume_on_no_response") is False)

    def _steps(self, plan: PlanVersion) -> tuple[PlanStep, ...]:
        described = self._descriptions()
        return tuple(self._plan_step(name, TaskId(task), described) for name, task in plan.tasks.items())

    def _plan_step(self, name: str, task_id: TaskId, described: Mapping[str, str]) -> PlanStep:
        if self._live is None or task_id not in self._live:  # the plan is made, and not yet put into place
            return PlanStep(name, described.get(name, ""), done=False)
        entry = self._live.entry(task_id)
        subtask, purpose = str(planning_metadata(entry.task).get("subtask", name)), entry.task.goal or ""
        told = described.get(subtask, "")
        return PlanStep(
            name, (told or purpose) if subtask == name else (purpose or told), is_action_done(self._live, entry)
        )

    def _descriptions(self) -> dict[str, str]:
        """What the plans say of their subtasks; the newest counts."""
        return {
            str(one.get("id")): str(one.get("description", ""))
            for plan in self.state.plans
            for one in _as_list(plan.decomposition.get("subtasks"))
            if isinstance(one, dict)
        }


def _as_list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []
