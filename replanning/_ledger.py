"""What a run remembers of its replanning: triggers, replans, questions, spending. A fold over its journal."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from replanning._budget import Spending
from replanning._changes import changes_hash, new_tasks, touched
from replanning._confidence import source_key
from replanning._folding import OUTCOMES
from replanning._ids import QuestionId, ReplanId, TaskId, TriggerId
from replanning._observations import Charged, GoalChanged, PersonAsked, RunQuiescent
from replanning._plan import Budget
from replanning._records import (
    AlternativesConsidered,
    Body,
    Decided,
    OutcomeKnown,
    QuestionAnswered,
    QuestionAsked,
    QuestionReminded,
    Record,
    Revised,
    RunEnded,
    RunPaused,
    RunResumed,
    TriggerAttached,
    TriggerDropped,
    TriggerFired,
)
from replanning._triggers import Trigger

RECENT = 30
"""How many records of the last replans are kept at hand."""


@dataclass(frozen=True, slots=True)
class Applied:
    """An alternative that was applied and whose outcome is not known yet."""

    replan: ReplanId
    roots: tuple[TaskId, ...]
    at: float


class Ledger:
    """The memory of a run's replanning.

    Args:
        budget: what the run may spend.
        root_of: the root of the lineage of a task, asked while folding.
    """

    def __init__(self, budget: Budget, root_of: Callable[[TaskId], TaskId]) -> None:
        self.spending = Spending(budget)
        self.triggers: dict[TriggerId, Trigger] = {}
        self.open: dict[TriggerId, Trigger] = {}
        self.acted: dict[tuple[str, str, str], float] = {}
        self.replans = 0
        self._known: dict[ReplanId, None] = {}
        self.applied = 0
        self.per_root: dict[TaskId, int] = {}
        self.tried: dict[TaskId, dict[str, None]] = {}
        self.revisions: list[tuple[float, Revised]] = []
        self.questions: dict[QuestionId, QuestionAsked] = {}
        self.closed: dict[QuestionId, QuestionAnswered] = {}
        self.answered: dict[ReplanId, tuple[QuestionAsked, QuestionAnswered]] = {}
        self.declined: dict[str, float] = {}
        self.attached: dict[QuestionId, list[TriggerId]] = {}
        self.asked_at: dict[QuestionId, float] = {}
        self.reminded: set[QuestionId] = set()
        self.asked = 0
        self._waited = 0.0
        self._waiting_since: float | None = None
        self.watching: dict[TaskId, Applied] = {}
        self._roots: dict[ReplanId, tuple[TaskId, ...]] = {}
        self._proposed: dict[ReplanId, tuple[str, ...]] = {}
        self.sources: dict[ReplanId, str] = {}
        self.earned: dict[str, deque[bool]] = {}
        self.quiescent_at: int | None = None
        self.undecided: dict[ReplanId, Revised] = {}
        self.last_request = 0
        self.recent: deque[Body] = deque(maxlen=RECENT)
        self.pausing: RunPaused | None = None
        self.ended: RunEnded | None = None
        self._root_of = root_of

    def __repr__(self) -> str:
        return f"<Ledger triggers={len(self.triggers)} replans={self.replans} questions={len(self.questions)}>"

    def fold(self, record: Record) -> None:
        """Take in a journal record."""
        handler = HANDLERS.get(type(record.body))
        if handler is not None:
            handler(self, record.body, record.at)
            if isinstance(record.body, _OF_REPLANS):
                self.recent.append(record.body)

    def waiting(self, now: float) -> float:
        """Seconds up to now for which a person was waited for, or nobody was at the run."""
        since = now if self._waiting_since is None else self._waiting_since
        return self._waited + max(0.0, now - since)

    def _fired(self, body: TriggerFired, at: float) -> None:
        self.triggers[body.trigger.id] = self.open[body.trigger.id] = body.trigger

    def _dropped(self, body: TriggerDropped, at: float) -> None:
        self.open.pop(body.trigger, None)

    def _considered(self, body: AlternativesConsidered, at: float) -> None:
        self._count(body.replan)
        self._proposed[body.replan] = tuple(candidate.alternative.source for candidate in body.candidates)

    def _count(self, replan: ReplanId) -> None:
        # What limits refuse is decided without being considered; its number must not come again either.
        self._known[replan] = None
        self.replans = len(self._known)

    def _decided(self, body: Decided, at: float) -> None:
        self._count(body.replan)
        for trigger_id in body.triggers:
            trigger = self.triggers.get(trigger_id)
            if trigger is not None:
                self.acted[trigger.fingerprint] = at
            if body.decision != "ask" or body.by == "observe":
                self.open.pop(trigger_id, None)
        if body.decision != "ask":
            if body.replan in self.answered:
                asked, _ = self.answered.pop(body.replan)
                self._reopen(trigger_id for trigger_id in asked.triggers if trigger_id not in body.triggers)
            self.undecided.pop(body.replan, None)
            self._proposed.pop(body.replan, None)

    def _revised(self, body: Revised, at: float) -> None:
        self.revisions.append((at, body))
        if body.replan is None:
            return
        self.undecided[body.replan] = body
        self.applied += 1
        proposed = self._proposed.get(body.replan, ())
        if body.chosen is not None and body.chosen < len(proposed):  # else a person wrote the changes
            self.sources[body.replan] = proposed[body.chosen]
        roots = tuple(dict.fromkeys(self._root_of(task_id) for task_id in touched(body.changes)))
        new = set(new_tasks(body.changes))
        roots = tuple(root for root in roots if root not in new)
        self._roots[body.replan] = roots
        print_ = changes_hash(body.changes)
        for root in roots:
            self.per_root[root] = self.per_root.get(root, 0) + 1
            self.tried.setdefault(root, {})[print_] = None
            self.watching[root] = Applied(body.replan, roots, at)

    def _outcome(self, body: OutcomeKnown, at: float) -> None:
        if source := self.sources.get(body.replan):
            self.earned.setdefault(source_key(source), deque(maxlen=OUTCOMES)).append(body.succeeded)
        for root in self._roots.pop(body.replan, ()):
            watched = self.watching.get(root)
            if watched is not None and watched.replan == body.replan:  # else a later replan of the lineage counts
                del self.watching[root]

    def _asked(self, body: QuestionAsked, at: float) -> None:
        self.asked += 1
        self.questions[body.question] = body
        self.attached[body.question] = list(body.triggers)
        self.asked_at[body.question] = at
        if self._waiting_since is None:
            self._waiting_since = at

    def _reopen(self, triggers: Iterable[TriggerId]) -> None:
        """Nothing was decided about these: they are considered anew, and at once."""
        for trigger_id in triggers:
            self.open[trigger_id] = self.triggers[trigger_id]
            self.acted.pop(self.triggers[trigger_id].fingerprint, None)

    def _attached(self, body: TriggerAttached, at: float) -> None:
        self.attached[body.question].append(body.trigger)

    def _reminded(self, body: QuestionReminded, at: float) -> None:
        self.reminded.add(body.question)

    def _answered(self, body: QuestionAnswered, at: float) -> None:
        asked = self.questions.pop(body.question, None)
        self.attached.pop(body.question, None)
        if asked is not None and body.verdict == "withdrawn":
            self._reopen(asked.triggers)
        elif asked is not None:
            # What was attached meanwhile is considered anew.
            for trigger_id in asked.triggers:
                self.open.pop(trigger_id, None)
            self.answered[asked.replan] = (asked, body)
            if body.verdict in ("reject", "continue"):
                self.declined.update((c.alternative.fingerprint(), at) for c in asked.candidates)
        self.closed[body.question] = body
        self.asked_at.pop(body.question, None)
        if not self.questions and self._waiting_since is not None:
            self._waited += max(0.0, at - self._waiting_since)
            self._waiting_since = None

    def _person_asked(self, body: PersonAsked, at: float) -> None:
        self.last_request = max(self.last_request, body.message)

    def _goal_changed(self, body: GoalChanged, at: float) -> None:
        self.last_request = max(self.last_request, body.message)
        self.quiescent_at = None  # that nothing could run any more was said about another goal

    def _charged(self, body: Charged, at: float) -> None:
        self.spending.charge(body.usage)

    def _quiescent(self, body: RunQuiescent, at: float) -> None:
        self.quiescent_at = body.revision

    def _paused(self, body: RunPaused, at: float) -> None:
        self.pausing = body

    def _resumed(self, body: RunResumed, at: float) -> None:
        self.pausing = None
        if self._waiting_since is None:
            self._waited += body.waited
        self.ended = None
        self.quiescent_at = None  # the process may have ended before anything followed from that

    def _on_end(self, body: RunEnded, at: float) -> None:
        self.ended = body


_OF_REPLANS = (AlternativesConsidered, Decided, Revised, OutcomeKnown, QuestionAnswered)

HANDLERS: dict[type[Body], Callable[..., None]] = {
    TriggerFired: Ledger._fired,
    TriggerDropped: Ledger._dropped,
    AlternativesConsidered: Ledger._considered,
    Decided: Ledger._decided,
    Revised: Ledger._revised,
    OutcomeKnown: Ledger._outcome,
    QuestionAsked: Ledger._asked,
    TriggerAttached: Ledger._attached,
    QuestionReminded: Ledger._reminded,
    QuestionAnswered: Ledger._answered,
    GoalChanged: Ledger._goal_changed,
    PersonAsked: Ledger._person_asked,
    Charged: Ledger._charged,
    RunQuiescent: Ledger._quiescent,
    RunPaused: Ledger._paused,
    RunResumed: Ledger._resumed,
    RunEnded: Ledger._on_end,
}
"""The kinds of record that the ledger takes in."""
