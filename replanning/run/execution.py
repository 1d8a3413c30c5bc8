"""Execution of tasks: by workers, which pull any task, and by callers, for one lineage each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from replanning.errors import (
    CallFailed,
    CallSkipped,
    NeedsHuman,
    NoResult,
    NotRunning,
    UnexpectedOutput,
)
from replanning.journal.values import copy_containers
from replanning.live.entries import TaskEntry
from replanning.live.states import TaskState
from replanning.plan.messages import join_alternatives, join_names
from replanning.plan.tasks import WHOLE_OUTPUT, Task, is_repeatable, repetition_advice
from replanning.plan.types import AttemptId, TaskId
from replanning.run.attempt import Attempt, Work
from replanning.run.lifecycle import GIVEN_UP
from replanning.run.observations import ObservedRun
from replanning.run.running import AttemptOptions


@dataclass(repr=False, eq=False)
class Worker:
    """Pulls and executes tasks one by one, as a loop over `ready` with `attempt` would.

    Args:
        run: where tasks come from.
        work: executes one task: returns its output, raises when it fails.
        in_own_task: as `AttemptOptions` has it.
    """

    _run: ObservedRun
    _work: Work
    in_own_task: bool = field(default=False, kw_only=True)

    def __repr__(self) -> str:
        return f"<Worker of {self._run!r}>"

    async def run(self) -> None:
        """Work until the run ends."""
        # One scope for many attempts: entering one for each would take a sixth of the time of a
        # task that does nothing (benchmark `speed`, "sequential, per task").
        while await self._work_in_one_scope():
            pass

    async def _work_in_one_scope(self) -> bool:
        """Work until an attempt is cancelled with its scope; return False at the run's end."""
        life = self._run._lifecycle
        outputs = life.attempts.outputs
        options = AttemptOptions(in_own_task=self.in_own_task, in_scope_of_worker=True)
        with anyio.CancelScope() as scope:
            while (claim := await life.dispatcher.next_task()) is not None:
                attempt = Attempt(
                    self._run,
                    claim.task,
                    claimed=claim.entry,
                    options=options,
                    scope=scope,
                )
                async with attempt:
                    if not attempt.cancelled:
                        attempt.output = await self._work(claim.task, attempt.context)
                        if outputs.expectations(claim.entry):
                            await attempt.verify(self._work)
                if attempt.cancelled:
                    return True
            return False
        return True


class LineageExecution:
    """Attempts at the tasks of one lineage, executed by the caller of `PlanRun.perform`.

    They are reserved for it, and so are the elements of a list and the tasks of an included plan.

    Args:
        run: the run.
        task_id: a task of the lineage.
        passes: exceptions that are control flow rather than failures.
        value_of: makes of an output what expectations are about; by default the output.

    Attributes:
        root: the first task of the lineage.
        outputs: the outputs of tasks that succeeded.
        error: the last exception of the tool of the first task, or an `UnexpectedOutput`.
        last: the exception of the last attempt, or an `UnexpectedOutput`.
        refusal: the last failure that a substitute tool reported itself.

    Raises:
        UnknownTask: no task, past ones included, has this id.
    """

    def __init__(
        self,
        run: ObservedRun,
        task_id: TaskId,
        passes: tuple[type[BaseException], ...],
        value_of: Callable[[object], object] | None = None,
    ) -> None:
        live = run.live
        self._run = run
        self._lifecycle = run._lifecycle
        self._options = AttemptOptions(passes, must_store=False, value_of=value_of)
        self._asked = task_id
        self.root = live.entry(live.entry(task_id).root)
        self.outputs: dict[TaskId, object] = {}
        self.error: Exception | None = None
        self.last: Exception | None = None
        self.refusal: Exception | None = None

    async def perform(
        self, work: Work, *, started: AttemptId | None = None, copied: bool = True
    ) -> object:
        """Execute the remaining tasks of the lineage, see `PlanRun.perform`.

        Args:
            work: executes a task.
            started: an attempt at the first task that has started already; it is executed first.
            copied: whether the work may change the objects and arrays of its task.

        Raises:
            NotRunning: another caller performs the lineage.
        """
        life = self._lifecycle
        root = self.root
        life.reserve(root)
        try:
            # A call with nothing to wait for was started when it was added, and never queued.
            if started is not None:
                await self._attempt(root, root.task, work, started)
            while not root.satisfied:
                claim = await life.dispatcher.next_task(root=root, copied=copied)
                if claim is None:
                    break
                await self._attempt(claim.entry, claim.task, work, None)
            if root.satisfied:
                return self._output()
            # Before the other reasons: a failed task may still run after the answer.
            if questions := life.questions_about(root):
                asked = join_names(questions, 5)
                text = f"a person must answer {asked} before task {self._asked!r} can continue"
                text += "; perform it again after that"
                raise NeedsHuman(text, questions, root.id) from self._own_error()
            needed = life.needed_for(root).values()
            # A lineage that was given up has failed, even if the run was stopped afterwards.
            is_given_up = any(entry.state in GIVEN_UP for entry in needed)
            end = life.end
            if (
                not is_given_up
                or life.ledger.pause is not None
                or (end is not None and end.status == "paused")
            ):
                stopping = (
                    life.stop_reason if end is None else f"the run is {end.status} ({end.reason})"
                )
                raise NotRunning(f"task {self._asked!r} cannot be performed: {stopping}") from (
                    self.error or self.last
                )
            raise self._own_error()
        finally:
            # In any case, workers must be able to get the remaining tasks of the lineage.
            life.unreserve(root)

    def _own_error(self) -> Exception:
        """Return the error of a call without alternatives: of its own tool, or else the reasons.

        If its own tool raised or answered nonsense, and another tool reports itself that it cannot
        be done, that report is the answer.

        If the call may have taken effect, the error says so, and how to declare that it may be
        repeated.
        """
        life = self._lifecycle
        needed = life.needed_for(self.root).values()
        doubt = self._doubt()
        if self.refusal is not None and not doubt and not _is_refusal(self.error):
            return self.refusal
        if self.error is not None:
            # The same exception may be raised again by a later call, and one note is enough.
            notes = getattr(self.error, "__notes__", ())
            if doubt and doubt not in notes:
                self.error.add_note(doubt)
            return self.error
        reasons = [
            f"{entry.id!r} {entry.state.lower()} "
            f"({life.failures.last_failure(entry) or entry.reason})"
            for entry in needed
            if entry.state in GIVEN_UP
        ]
        text = f"no alternative is left for task {self._asked!r}: {'; '.join(reasons)}"
        if doubt:
            text += f"; {doubt}"
        failed = CallFailed(text)
        failed.__cause__ = self.last
        return failed

    def _doubt(self) -> str:
        """Return the calls that may have taken effect, and a remedy; empty if none may.

        For a call with a confirmation, it says why there was no answer. Calls that are harmless to
        repeat are left out.
        """
        life = self._lifecycle
        doubtful: dict[TaskId, str] = {}
        advice: dict[str, None] = {}
        for leaf in life.needed_for(self.root).values():
            for entry in life.live.in_doubt(leaf):
                tool = life.live.tool_of(entry.task)
                if is_repeatable(entry.task, tool):
                    continue
                times = "once" if entry.log.count == 1 else f"{entry.log.count} times"
                name = repr(entry.task.tool or entry.id)
                text = f"whether {name} took effect is unknown (executed {times})"
                if entry.log.unconfirmed:
                    text += f", and {entry.log.unconfirmed}"
                doubtful[entry.id] = text
                advice.update(dict.fromkeys(repetition_advice(entry.task, tool)))
        if not doubtful:
            return ""
        cures = join_alternatives(list(advice))
        names = join_names(doubtful.values(), 5)
        return f"{names}; to have it repeated next time, state for its tool {cures}"

    def _output(self) -> object:
        """Return the output of a lineage as the work returned it, or else the recorded output."""
        root = self.root
        outputs = self.outputs
        # The object that the work returned: the recorded output is only its JSON.
        leaf = root
        while (
            leaf.state is TaskState.REPLACED_BY_REPLAN
            and not leaf.is_expanded
            and len(leaf.replacement.sinks) == 1
        ):
            leaf = leaf.replacement.sinks[0]
        if leaf.state is TaskState.DONE and leaf.id in outputs:
            return outputs[leaf.id]
        if leaf.state is TaskState.SKIPPED:
            raise CallSkipped(f"task {root.id!r} was skipped{leaf.reason and f': {leaf.reason}'}")
        try:
            return copy_containers(self._lifecycle.live.results.output_of(root.id))
        except NoResult as error:
            # Advice to resume would not help here: finished calls are not repeated.
            reason = leaf.output.unstored or str(error)
            raise CallFailed(
                f"task {root.id!r} was done before, and its output was not kept: {reason}"
            ) from error

    async def _attempt(
        self, entry: TaskEntry, task: Task, work: Work, started: AttemptId | None
    ) -> None:
        """Execute a claimed task, or an attempt at it that has started.

        Raises:
            BaseException: the work was interrupted, or raised one of the exceptions in `passes`.
        """
        # The parts of an expanded task are several calls: none of their errors is the task's own.
        is_part = entry.root != self.root.id
        is_own_tool = task.tool == self.root.task.tool and not is_part
        doubt = entry.log.doubt
        self.last = None
        # The exception of another tool would mislead the caller, who knows only its own tool.
        if is_own_tool:
            self.error = None
        attempt = Attempt(
            self._run,
            task,
            claimed=entry,
            started=started,
            options=self._options,
        )
        async with attempt:
            if not attempt.cancelled:
                attempt.output = await work(task, attempt.context)
                if doubt is None:
                    self.outputs[task.id] = attempt.output
                    await attempt.verify(work)
        if doubt is not None and entry.state is TaskState.DONE:
            # The call's own answer was not as expected.
            self.outputs.pop(task.id, None)
            if doubt.confirm.output == WHOLE_OUTPUT:
                self.outputs[task.id] = attempt.output
        self.last = attempt.error
        if is_own_tool:
            self.error = self.last
        elif _is_refusal(self.last) and not is_part:
            self.refusal = self.last


def _is_refusal(error: Exception | None) -> bool:
    """Return whether a tool has answered with a failure."""
    return isinstance(error, UnexpectedOutput) and error.refused
