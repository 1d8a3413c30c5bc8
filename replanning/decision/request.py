"""Plugin protocols: detectors, providers and gates, and what they exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from replanning.changes import Alternative, PlanChange
from replanning.journal.records import (
    Candidate,
    Observation,
    QuestionVerdict,
    RecordBody,
    TaskFailed,
    Trigger,
    Usage,
    normalised_cause,
)
from replanning.live.view import PlanView
from replanning.llm.completions import UNMETERED, Meter
from replanning.plan.tasks import Goal
from replanning.plan.types import QuestionId, RunId, TaskId

# Detectors


@runtime_checkable
class TriggerDetector(Protocol):
    """Detects triggers in observations.

    Detectors are pure functions of an observation and the plan after it; they keep no state, so
    that replaying a journal gives the same triggers. A detector named in the settings is
    constructed without arguments, or by its class method `for_settings(settings)` if it has one. A
    method `why_not(observation, view)`, if it has one, says in a few words why it fired nothing.
    """

    name: str
    observes: tuple[type[RecordBody], ...]

    def detect(self, observation: Observation, view: PlanView) -> Iterable[Trigger]:
        """Return the triggers that follow; `id`, `at` and `revision` are filled in later."""
        ...


# Providers


@dataclass(frozen=True, slots=True, eq=False)
class ReplanRequest:
    """Request for alternatives, as a provider receives it.

    Attributes:
        triggers: the reasons for replanning; several if their footprints overlap.
        view: the current plan, pinned to a revision.
        max_alternatives: maximum number of alternatives.
        deadline: time after which the answer is ignored, in seconds since the epoch.
        tried_fingerprints: fingerprints of alternatives that were applied before for these
            lineages.
        charge: reports usage beyond the estimate given by `estimate` to the budget.
        meter: accounts for the calls of language models, for `LLMOptions.meter`.
        history: records of the last replans of this run, oldest first.
        rejection_reason: returns why the engine would reject an alternative now; empty if it would
            not.
        add_note: records a note beside the alternatives, such as an omission and its reason.
        goal: the goal of the alternatives; by default the goal of the plan.
    """

    triggers: tuple[Trigger, ...]
    view: PlanView
    max_alternatives: int
    deadline: float
    tried_fingerprints: frozenset[str] = frozenset()
    charge: Callable[[Usage], None] = field(default=lambda usage: None)
    meter: Meter = field(default=UNMETERED)
    history: tuple[RecordBody, ...] = ()
    rejection_reason: Callable[[Alternative], str] = field(default=lambda alternative: "")
    add_note: Callable[[str], None] = field(default=lambda text: None)
    goal: Goal = None  # type: ignore[assignment]  # it is set as soon as there is a view

    def __post_init__(self) -> None:
        if self.goal is None:
            object.__setattr__(self, "goal", self.view.goal)


@runtime_checkable
class AlternativeProvider(Protocol):
    """Proposes alternatives.

    A provider whose requests cost something may also have `estimate(request) -> Usage`, an upper
    bound that is reserved from the budget before each request. One that can repair proposals of
    others may have `async complete(request, alternative, reason) -> Alternative | None`: it
    receives an alternative that fits the plan but cannot be executed on the facts, with the reason,
    and returns a corrected one, which is considered as well. A provider that answers at once,
    because it needs only the plan, may have `immediate = True`. It is then asked without starting a
    task if it is the only one, and asked for a better path before the others, which are asked only
    if it has none. With `last_resort = True` providers are asked again when no task can run any
    more, although they found nothing before. With `yields_priority = True`, its proposals come
    after those of others that need no person.
    """

    name: str

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Return alternatives for a request, best first; empty if there is nothing to propose.

        An `Exception` is contained, logged as a warning, and listed in `RunResult.problems`; the
        answers of the other providers are used.
        """
        ...


# People


@dataclass(frozen=True, slots=True)
class Question:
    """Question to a person.

    Attributes:
        id: identifies the question for `engine.answer`, also from another process.
        text: why a decision is needed.
        triggers: the reasons for replanning.
        candidates: the alternatives to choose from, best first.
        diffs: for each candidate, the plan before and after as a unified diff.
        holds: the tasks held until the answer.
        asked_at: time of the question in seconds since the epoch.
        deadline: time after which it is decided without an answer, in seconds since the epoch.
        rejection_reason: why the last answer was refused, if the question is asked again.
        effects: how many effects the run has had, and how many of them can be undone; empty if the
            plan declares none, or there were none.
    """

    id: QuestionId
    run: RunId
    text: str
    triggers: tuple[Trigger, ...]
    candidates: tuple[Candidate, ...]
    diffs: tuple[str, ...] = ()
    holds: tuple[TaskId, ...] = ()
    asked_at: float = 0.0
    deadline: float | None = None
    rejection_reason: str = ""
    effects: str = ""

    @property
    def causes(self) -> frozenset[tuple[str, str]]:
        """Kind and cause of each trigger; questions that share one have a common cause."""
        return frozenset(
            (
                t.kind,
                normalised_cause(t.error_type, t.message) if isinstance(t, TaskFailed) else t.cause,
            )
            for t in self.triggers
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """A person's decision: approve a candidate, reject all, or supply other changes (`modify`).

    Attributes:
        verdict: the decision.
        by: name of the person.
        choice: index of the approved candidate.
        changes: the changes of `modify`.
        comment: the reason.
    """

    verdict: QuestionVerdict
    by: str = ""
    choice: int = 0
    changes: tuple[PlanChange, ...] = ()
    comment: str = ""


@runtime_checkable
class HumanGate(Protocol):
    """Asks a person."""

    async def ask(self, question: Question) -> Answer:
        """Ask the question and return the answer; cancelled when the question is closed.

        An `Exception` is contained and listed in `RunResult.problems`; the question stays open and
        can be answered elsewhere.
        """
        ...

    async def remind(self, question: Question) -> None:
        """Remind the person that the question is open; called once, before its deadline."""
        ...
