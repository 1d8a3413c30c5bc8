"""What a run is told of the world around it: facts, context, goal, resources, and wishes of people."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from replanning._errors import NotRunning
from replanning._ids import RunId, TaskId
from replanning._lifecycle import Lifecycle
from replanning._live import LivePlan
from replanning._observations import ContextUpdated, FactsObserved, GoalChanged, ReplanRequested, ResourceUpdated
from replanning._patterns import normalise_fact
from replanning._plan import Goal, JsonObject, JsonValue
from replanning._records import PlanningNoted, Record
from replanning._redaction import Redactor
from replanning._wording import brief_repr


class PlanObservations:
    """The methods of a run that report what has changed. What is unchanged is passed over."""

    id: RunId
    _lifecycle: Lifecycle
    _redactor: Redactor

    @property
    def live(self) -> LivePlan:
        """The live plan; read it, and change it only through this run."""
        return self._lifecycle.live

    def records(self, after: int = 0) -> Iterable[Record]:
        """What the journal has of the run, from behind the record of this number on.

        Raises:
            StoreError: the journal cannot be read.
        """
        return self._lifecycle.journal.store.read(self.id, after)

    def observe(self, holds: Sequence[str] = (), ceased: Sequence[str] = ()) -> None:
        """Report facts that were seen to hold, or to hold no longer.

        Raises:
            TypeError: these are no facts.
        """
        _check_texts("observe", holds=holds, ceased=ceased)
        redact, known = self._redactor.text, self.live.facts
        new = tuple(fact for fact in (normalise_fact(redact(f)) for f in holds) if fact not in known)
        gone = tuple(fact for fact in (normalise_fact(redact(f)) for f in ceased) if fact in known)
        if new or gone:
            self._lifecycle.commit_or_defer(FactsObserved(new, gone))
            self._lifecycle.after_observation()

    def change_context(self, changes: Mapping[str, JsonValue], *, removed: Sequence[str] = ()) -> None:
        """Report values of the context that have changed or are gone; unchanged ones are passed over.

        Raises:
            TypeError: this is no mapping of names to values.
        """
        if not isinstance(changes, Mapping):
            raise TypeError(f"change_context: expected a mapping of names to values, got {brief_repr(changes)}")
        _check_texts("change_context", changes=list(changes), removed=removed)
        clean = self._redactor.value(dict(changes))
        assert isinstance(clean, dict)
        old = self.live.context
        new: JsonObject = {key: value for key, value in clean.items() if key not in old or old[key] != value}
        gone = tuple(key for key in removed if key in old)
        if new or gone:
            self._lifecycle.commit_or_defer(ContextUpdated(new, gone))
            self._lifecycle.after_observation()

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
        """Say that the plan is for something else from now on; what is left out stays as it was.

        The plan is repaired where what is left of it does not reach the new goal.

        Args:
            objective: what is to be achieved, in words.
            success_criteria: how a person sees that it was, instead of those so far.
            facts: what must hold at the end, instead of the facts so far.
            stop_when_reached: whether the run ends as soon as these facts hold.
            reason: why, for the history.
            by: who wants it, for the history.

        Raises:
            NotRunning: the run has ended.
            PlanError: this is no goal; with everything that is wrong with it.
        """
        if self._lifecycle.end is not None:
            raise NotRunning(f"the run is {self._lifecycle.end.status}; its goal cannot be changed")
        given: JsonObject = {}
        for name, value in (("objective", objective), ("stop_when_reached", stop_when_reached)):
            given |= {} if value is None else {name: value}
        for name, texts in (("success_criteria", success_criteria), ("facts", facts)):
            given |= {} if texts is None else {name: texts if isinstance(texts, str) else list(texts)}
        self._change_goal(given, reason, by)

    def _change_goal(self, given: JsonObject, reason: str, by: str, message: int = 0) -> None:
        redact, old, clean = self._redactor.text, self.live.goal, self._redactor.value(given)
        assert isinstance(clean, dict)
        goal = old.with_fields(clean)
        changed = tuple(name for name in Goal.model_fields if getattr(goal, name) != getattr(old, name))
        if changed or message:
            self._lifecycle.commit_or_defer(GoalChanged(goal, changed, redact(reason), redact(by), message))
            self._lifecycle.after_observation()

    def change_resource(
        self, name: str, *, capacity: float | None = None, available: bool | None = None, reason: str = ""
    ) -> None:
        """Report that a resource has another capacity, or that a tool is (un)available, and why."""
        tool = self.live.tools.get(name)
        if capacity is None and tool is not None and tool.available == available and not reason:
            return
        self._lifecycle.commit_or_defer(ResourceUpdated(name, capacity, available, self._redactor.text(reason)))
        self._lifecycle.after_observation()

    def redact_value(self, value: JsonValue) -> JsonValue:
        """A value as the run puts it on record: without secrets."""
        return self._redactor.value(value)

    def note(self, type: str, data: Mapping[str, JsonValue]) -> None:  # noqa: A002 # the word of the record
        """Put something of planning mode on record, without secrets; the plan stays as it is.

        Raises:
            NotRunning: the run has ended.
        """
        if self._lifecycle.end is not None:
            raise NotRunning(f"the run is {self._lifecycle.end.status}; nothing more is noted")
        clean = self._redactor.value(dict(data))
        assert isinstance(clean, dict)
        self._lifecycle.commit_or_defer(PlanningNoted(type, clean))

    def request_replan(self, reason: str, *, by: str = "", tasks: Sequence[str] = ()) -> None:
        """Ask for replanning.

        Raises:
            NotRunning: the run has ended.
        """
        if self._lifecycle.end is not None:
            raise NotRunning(f"the run is {self._lifecycle.end.status}; there is nothing to replan")
        self._observe_replan_request(reason, by, tasks)

    def _observe_replan_request(self, reason: str, by: str, tasks: Sequence[str], message: int = 0) -> None:
        ids = tuple(self.live.entry(TaskId(task_id)).id for task_id in tasks)
        redact = self._redactor.text
        self._lifecycle.commit_or_defer(ReplanRequested(redact(reason), redact(by), ids, message))
        self._lifecycle.after_observation()


def _check_texts(method: str, **given: Collection[object]) -> None:
    """Refuse what is no list of texts, a single text included, whose letters would count."""
    for name, texts in given.items():
        if isinstance(texts, str) or not isinstance(texts, Collection):
            raise TypeError(f"{method}: expected a list of texts for {name!r}, got {brief_repr(texts)}")
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise TypeError(f"{method}: expected texts in {name!r}, got {', '.join(map(brief_repr, wrong))}")
