"""A plan under way: pull ready tasks, report what happens, observe, edit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import anyio

from replanning._attempt import Attempt, ReadyTasks
from replanning._changes import PlanChange
from replanning._edits import PlanEdits
from replanning._errors import NotRunning
from replanning._ids import ReplanId, RunId, TaskId, TriggerId
from replanning._lifecycle import Lifecycle
from replanning._lineage import ReplanningInfo, replanning_info
from replanning._observations import Usage
from replanning._observing import PlanObservations
from replanning._plan import JsonValue, Plan, Task
from replanning._records import PlanRevised, Record, RunPaused, RunStatus
from replanning._redaction import Redactor
from replanning._reporting import Codec, PlanReports
from replanning._spans import NOOP_TRACER, RunTracer
from replanning._vetting import redact_changes
from replanning._view import PlanView
from replanning.history import ReplanHistory


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run came out.

    Attributes:
        status: `succeeded`, `failed`, `aborted`, `paused` or `needs_human`.
        reason: in one sentence, why.
        outputs: results by the ids of the original tasks.
        revisions: what changed in the plan, and why, in order.
        questions: the ids of the questions that a person must answer.
        spent: what budgets counted.
        unjournaled: whether the store failed and the run went on without it.
    """

    run: RunId
    status: RunStatus
    reason: str
    outputs: Mapping[str, JsonValue]
    revisions: tuple[PlanRevised, ...]
    questions: tuple[str, ...] = ()
    spent: Usage = field(default_factory=Usage)
    unjournaled: bool = False


class PlanRun(PlanReports, PlanObservations, PlanEdits):
    """One execution of one plan, from which workers pull and to which they report.

    Made by `ReplanningEngine.open`, and without an engine by `open_run`.
    """

    def __init__(
        self,
        run_id: RunId,
        life: Lifecycle,
        *,
        chance: Callable[[], float],
        redactor: Redactor,
        codec: Codec | None = None,
    ) -> None:
        self.id = run_id
        self._lifecycle = life
        self._chance = chance
        self._redactor = redactor
        self._codec = codec
        self._spans: RunTracer = NOOP_TRACER
        self._opening_record: Record | None = None
        self._attempts = {}
        self._max_output_bytes = life.settings.max_output
        # The scope class of the backend in use: calling it directly is twice as fast as anyio.CancelScope().
        self._scope_type: type[anyio.CancelScope] = type(anyio.CancelScope())
        self._history: ReplanHistory | None = None
        life.on_attempt_timeout = self._time_out
        life.on_argument_error = self._fail_arguments
        life.on_end = self._cancel_attempts

    def __repr__(self) -> str:
        state = self._lifecycle.end.status if self._lifecycle.end else "running"
        return f"<PlanRun {self.id!r} {state} {self.live!r}>"

    @property
    def plan(self) -> Plan:
        """The plan as it stands now, as a document."""
        return self.live.document()

    @property
    def view(self) -> PlanView:
        """A read-only look at the plan at its present revision."""
        return PlanView(self.live)

    def replanning_info(self, task_id: str) -> ReplanningInfo:
        """Where a task stands in its lineage, and why.

        Raises:
            UnknownTask: there never was such a task.
        """
        revisions = (revised for _, revised in self._lifecycle.ledger.revisions)
        limit = self._lifecycle.settings.limits.replans_per_lineage
        return replanning_info(self.view.task(TaskId(task_id)), revisions, limit)

    @property
    def ended(self) -> bool:
        """Whether it has ended, or stands still until it is resumed; `result` then says how."""
        return self._lifecycle.end is not None

    @property
    def result(self) -> RunResult:
        """How the run came out.

        Raises:
            NotRunning: it has not ended yet.
        """
        end, ledger = self._lifecycle.end, self._lifecycle.ledger
        if end is None:
            raise NotRunning(f"run {self.id!r} has not ended yet; its result is known afterwards")
        return RunResult(
            self.id,
            end.status,
            end.reason,
            self.live.results.outputs(),
            tuple(revised for _, revised in ledger.revisions),
            tuple(ledger.open_questions),
            ledger.budget_tracker.spent,
            self._lifecycle.journal.unjournaled,
        )

    @property
    def spent(self) -> Usage:
        """What budgets have counted until now: above all what language models have cost."""
        return self._lifecycle.ledger.budget_tracker.spent

    @property
    def history(self) -> ReplanHistory:
        """What was replanned so far, and why; it is derived from the journal when it is asked for.

        Raises:
            StoreError: the journal cannot be read.
        """
        if self._history is None:
            self._history = ReplanHistory.of(self._lifecycle.journal.store, self.id)
        return self._history.refresh()

    # Pulling

    def ready(self) -> ReadyTasks:
        """Tasks the moment they may run, across revisions; call it once for each worker.

        The iterator ends when the run does. It holds nothing open between its items.
        """
        return ReadyTasks(self)

    def attempt(self, task: Task) -> Attempt:
        """Execute a task: journal, deadline, cancellation; an exception of the body is a failure."""
        return Attempt(self, task)

    async def wait(self) -> RunResult:
        """Wait for the end of the run, for those who report from elsewhere."""
        self._lifecycle.check_completion()
        await self._lifecycle.ended.wait()
        return self.result

    def pause(self, reason: str = "asked to pause", *, by: str = "") -> None:
        """Hand out nothing more; the run ends as `paused` when what is running has finished."""
        if self._lifecycle.end is None and self._lifecycle.ledger.pause is None:
            self._lifecycle.commit_or_defer(RunPaused(self._redactor.text(reason), self._redactor.text(by)))
            self._lifecycle.check_completion()

    # Editing

    def apply(self, changes: Sequence[PlanChange], *, reason: str = "", expected_revision: int | None = None) -> int:
        """Apply changes by hand: all or none; one revision.

        Returns:
            The number of the revision.

        Raises:
            ChangeRefused: with every problem; nothing has changed.
            NotRunning: the run has ended.
            StoreError: the journal does not take it; nothing has changed.
        """
        clean = redact_changes(changes, self._redactor)
        return self._revise(clean, self._redactor.text(reason), "edit", expected_revision=expected_revision)

    def _revise(
        self,
        changes: tuple[PlanChange, ...],
        reason: str,
        by: str,
        *,
        expected_revision: int | None = None,
        triggers: tuple[TriggerId, ...] = (),
        replan: ReplanId | None = None,
        chosen: int | None = None,
    ) -> int:
        life, live = self._lifecycle, self.live
        if life.end is not None:
            raise NotRunning(f"the run is {life.end.status}; its plan cannot be changed")
        parent = live.revision
        stopped = [live.entry(c.task_id).attempt for c in changes if c.kind == "cancel" and c.task_id in live]

        def journal(digest: str) -> None:
            body = PlanRevised(parent + 1, parent, changes, reason, by, triggers, replan, chosen, digest)
            journaled.append(life.journal.append(body))

        journaled: list[Record] = []
        with self._spans.apply_span(changes, by, replan):
            number = live.apply(changes, expected_revision, at=life.clock.now(), before_commit=journal)
        for attempt_id in stopped:
            self._cancel_attempt(attempt_id)
        for record in journaled:
            life.publish(record)
        life.after_observation()
        life.check_completion()
        due = live.next_deadline()
        if due is not None:
            life.timer.notify_deadline(due)
        return number
