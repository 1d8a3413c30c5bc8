"""Reports to a run: observations of the world, another goal, requests, usage and secrets."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, TypeVar

from replanning.errors import NotRunning
from replanning.journal.records import (
    ContextUpdated,
    FactsObserved,
    GoalChanged,
    ProcessStarted,
    ReplanRequested,
    ResourceUpdated,
    Usage,
)
from replanning.journal.store import FINISHED_STATUSES, to_plain_json
from replanning.live.plan import LivePlan
from replanning.plan.messages import NameSuggester, brief_repr
from replanning.plan.references import fact_problem, normalise_fact
from replanning.plan.tasks import Goal
from replanning.plan.types import AttemptId, JsonObject, JsonValue, RunId, TaskId
from replanning.run.event_loop import Parameters, ResultT
from replanning.run.lifecycle import Lifecycle
from replanning.run.processes import host_id, process_start_time

RunT = TypeVar("RunT", bound="ObservedRun")


def in_loop_thread(
    method: Callable[Concatenate[RunT, Parameters], ResultT],
) -> Callable[Concatenate[RunT, Parameters], ResultT]:
    """Run a method on the loop's thread, whichever thread calls it."""

    @wraps(method)
    def call(run: RunT, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> ResultT:
        return run._lifecycle.loop.call(method, run, *args, **kwargs)

    return call


@dataclass(repr=False, eq=False)
class ObservedRun:
    """A run as its work sees it: to read the live plan, and to report observations.

    `PlanRun` adds the rest: pulling tasks, editing the plan and reading the result.

    Attributes:
        id: the id of the run.
        live: the live plan; read it, and change it only through the run.
    """

    id: RunId
    live: LivePlan
    _lifecycle: Lifecycle

    @in_loop_thread
    def observe(self, holds: Sequence[str] = (), ceased: Sequence[str] = ()) -> None:
        """Report facts that hold, and facts that no longer hold.

        Raises:
            ValueError: some texts are not facts, or a text was passed instead of a list; names each
                of them.
        """
        refuse_single_text("observe", holds=holds, ceased=ceased)
        facts = self.live.world.facts
        wrong: list[str] = []
        for fact in (*holds, *ceased):
            problem = fact_problem(fact)
            if problem:
                wrong.append(f"{brief_repr(fact)} is not a fact: {problem}")
        if wrong:
            raise ValueError(f"observe: {'; '.join(wrong)}")
        new = tuple(fact for fact in map(normalise_fact, holds) if fact not in facts)
        gone = tuple(fact for fact in map(normalise_fact, ceased) if fact in facts)
        # Known facts are not news: a record would only wake providers in vain.
        if new or gone:
            self._record_observation(FactsObserved(new, gone))

    def change_context(
        self, changes: Mapping[str, JsonValue], *, removed: Sequence[str] = ()
    ) -> None:
        """Report changed or removed values of the context; unchanged ones are ignored.

        Raises:
            RecordNotSerializable: a value is not JSON; a tuple becomes a list.
            ValueError: a text was passed instead of the list of removed names.
        """
        self._change_context(changes, removed)

    @in_loop_thread
    def _change_context(
        self,
        changes: Mapping[str, JsonValue],
        removed: Sequence[str],
        attempt_id: AttemptId | None = None,
    ) -> None:
        refuse_single_text("change_context", removed=removed)
        old = self.live.context
        new: JsonObject = {}
        for key, value in plain_object(changes).items():
            if key not in old or old[key] != value:
                new[key] = value
        gone = tuple(key for key in removed if key in old)
        if not new and not gone:
            return
        # The new values are not masked, so tasks may use these keys again.
        self.live.masked.context.difference_update(new)
        attempt = None
        if attempt_id in self._lifecycle.attempts.running:
            attempt = attempt_id
        self._record_observation(ContextUpdated(new, gone, attempt))

    @in_loop_thread
    def change_resource(
        self,
        name: str,
        *,
        capacity: float | None = None,
        available: bool | None = None,
        reason: str = "",
    ) -> None:
        """Report the new capacity of a resource, or whether a tool is available, and why.

        Raises:
            ValueError: the plan has no such resource or tool, or a value is wrong for it; names
                everything wrong.
        """
        live = self.live
        hint = NameSuggester()
        wrong: list[str] = []
        if capacity is None and available is None:
            wrong.append("expected the `capacity` of a resource, or whether a tool is `available`")
        if capacity is not None:
            if not 0 <= capacity < math.inf:
                wrong.append(
                    f"expected a number of at least 0 for `capacity`, got {brief_repr(capacity)}"
                )
            capacities = live.scheduler.pool.capacity
            if name not in capacities:
                wrong.append(f"the plan has no resource {name!r}{hint(name, capacities)}")
        # Tasks may name tools that the plan does not describe, such as functions of programs.
        is_tool = name in live.tools or any(entry.task.tool == name for entry in live)
        if available is not None and not is_tool:
            wrong.append(f"the plan has no tool {name!r}{hint(name, live.tools)}")
        if wrong:
            raise ValueError(f"change_resource: {'; '.join(wrong)}")
        tool = live.tools.get(name)
        if capacity is None and tool is not None and tool.available == available and not reason:
            return
        self._record_observation(ResourceUpdated(name, capacity, available, reason))

    @in_loop_thread
    def change_goal(
        self,
        *,
        objective: str | None = None,
        success_criteria: Sequence[str] | None = None,
        facts: Sequence[str] | None = None,
        stop_when_reached: bool | None = None,
        reason: str = "",
        by: str = "",
    ) -> None:
        """Change the goal of the plan; omitted fields stay as they are.

        The plan is repaired if its remaining tasks do not reach the new goal.

        Args:
            objective: the aim, in words.
            success_criteria: new success criteria, replacing the current ones.
            facts: facts that must hold at the end, replacing the current ones.
            stop_when_reached: whether the run ends as soon as these facts hold.
            reason: the reason, for the history.
            by: the author, for the history.

        Raises:
            NotRunning: the run has ended.
            PlanError: the goal is invalid; names every problem.
        """
        self._require_running("its goal cannot be changed")
        fields: JsonObject = {}
        if objective is not None:
            fields["objective"] = objective
        if stop_when_reached is not None:
            fields["stop_when_reached"] = stop_when_reached
        given: dict[str, Any] = {"success_criteria": success_criteria, "facts": facts}
        for name, texts in given.items():
            if isinstance(texts, Iterable) and not isinstance(texts, str):
                fields[name] = list(texts)
            elif texts is not None:
                # Not a list; the validation of the goal reports it.
                fields[name] = texts
        self._change_goal(fields, reason, by)

    def _change_goal(self, fields: JsonObject, reason: str, by: str, message: int = 0) -> None:
        old = self.live.goal
        goal = old.with_fields(fields)
        changed = tuple(
            name for name in Goal.model_fields if getattr(goal, name) != getattr(old, name)
        )
        # A message is always recorded: its number shows that it was handled.
        if changed or message:
            self._record_observation(GoalChanged(goal, changed, reason, by, message))

    @in_loop_thread
    def request_replan(self, reason: str, *, by: str = "", tasks: Sequence[str] = ()) -> None:
        """Ask for replanning of these tasks, or of the whole plan.

        Raises:
            NotRunning: the run has ended.
            UnknownTask: no task, past ones included, has this id.
            ValueError: a text was passed instead of the list of tasks.
        """
        self._require_running("there is nothing to replan")
        refuse_single_text("request_replan", tasks=tasks)
        self._request_replan(reason, by, tasks)

    def _request_replan(self, reason: str, by: str, tasks: Sequence[str], message: int = 0) -> None:
        ids = tuple(self.live.entry(TaskId(task_id)).id for task_id in tasks)
        self._record_observation(ReplanRequested(reason, by, ids, message))

    @in_loop_thread
    def charge(
        self, usage: Usage, *, attempt_id: AttemptId | None = None, provider: str | None = None
    ) -> None:
        """Count the usage of work or of a provider against the budget."""
        self._lifecycle.charge(usage, attempt_id=attempt_id, provider=provider)

    def add_secret(self, value: str) -> None:
        """Mask a value from now on in everything that leaves the run.

        Values of fewer than four characters are ignored.
        """
        self._lifecycle.redactor.add(value)

    @in_loop_thread
    def _record_process(self, attempt_id: AttemptId, group: int) -> None:
        # After the end of its attempt, the process would not be looked for in the journal.
        if attempt_id in self._lifecycle.attempts.running:
            self._lifecycle.journal.append(
                ProcessStarted(attempt_id, host_id(), group, process_start_time(group))
            )

    def _record_observation(
        self, body: FactsObserved | ContextUpdated | ResourceUpdated | GoalChanged | ReplanRequested
    ) -> None:
        life = self._lifecycle
        if life.loop.closed:
            if life.end is not None and life.end.status in FINISHED_STATUSES:
                raise NotRunning(
                    f"run {self.id!r} has ended as {life.end.status}, so nothing more is recorded"
                )
            raise NotRunning(
                f"run {self.id!r} was left, so nothing more is recorded; resume it to continue"
            )
        life.journal.append_soon(body)
        # Stale results matter at once only if their tasks may run again.
        if isinstance(body, ContextUpdated) and self.live.staleness.redoes and life.end is None:
            life.record_stale_results()
        # Without `must_check`: the next observation may bring back what this one has taken.
        life.follow_up()

    def _require_running(self, consequence: str) -> None:
        if self._lifecycle.end is not None:
            raise NotRunning(f"the run is {self._lifecycle.end.status}; {consequence}")


def plain_object(value: Mapping[str, JsonValue]) -> JsonObject:
    """Return an object as JSON; tuples become lists."""
    plain = to_plain_json(dict(value))[0]
    assert isinstance(plain, dict)
    return plain


def refuse_single_text(method: str, **arguments: Collection[str]) -> None:
    """Refuse a text instead of a list; it would count as a list of characters."""
    for name, texts in arguments.items():
        if isinstance(texts, str):
            raise ValueError(f"{method}: expected a list of texts for {name!r}, got {texts!r}")
