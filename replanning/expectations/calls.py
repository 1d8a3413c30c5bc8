"""Recorded tool calls: their arguments and outputs, from the journal of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import NamedTuple

from replanning.decision.ledger import Ledger
from replanning.errors import ExpressionError, JournalCorrupt, UnexpectedOutput
from replanning.history.status import apply_record
from replanning.journal.records import (
    AttemptFailed,
    AttemptStarted,
    AttemptSucceeded,
    Record,
    RunOpened,
)
from replanning.journal.values import decode
from replanning.live.plan import LivePlan
from replanning.plan.expectations import broken_expectation
from replanning.plan.json_form import json_form
from replanning.plan.references import resolve_references
from replanning.plan.tasks import Budget, Expectation, Task, ToolSpec
from replanning.plan.types import AttemptId, JsonObject, TaskId


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """Call of a tool, read from a journal or recorded by your own program.

    Attributes:
        tool: the name of the tool.
        arguments: the arguments.
        output: the output: JSON, or a value with a JSON form. A text that contains a JSON object or
            array counts as that value.
        run: the run that made the call; empty outside of a run.
        task: the task of the call.
        failure: the error message of a failed call, otherwise empty. A failed call has an output
            only if it violated an expectation.
        kept: whether the output is known; a journal lacks outputs without a stored form.
    """

    tool: str
    arguments: Mapping[str, object]
    output: object = None
    run: str = ""
    task: str = ""
    failure: str = ""
    kept: bool = True


class CheckedCall(NamedTuple):
    """Call whose output was checked against expectations.

    Attributes:
        call: the call.
        broken: the violated expectation; None if all are satisfied, or if the output is unknown.
    """

    call: ObservedCall
    broken: UnexpectedOutput | None


def recorded_calls(records: Iterable[Record]) -> Iterator[ObservedCall]:
    """Yield the tool calls of a run, in the order of their ends.

    Calls that were interrupted or timed out are left out: they have no output.

    Args:
        records: the journal of the run.

    Raises:
        JournalCorrupt: the first record does not open a run, or records contradict one another.
    """
    for ended in _ended_calls(records):
        yield ended.call


def checked_calls(
    records: Iterable[Record],
    tools: Mapping[str, ToolSpec],
    tasks: Mapping[TaskId, Task],
    value_of: Callable[[object], object] | None = None,
) -> Iterator[CheckedCall]:
    """Yield the calls of a run, each checked against the expectations of its tool and task.

    Calls without expectations are left out, as are calls that failed without an output. Commands
    are not run, and second tools are not called. Conditions see the context and results at the time
    of the call.

    Args:
        records: the journal of the run.
        tools: the tools with expectations, by name.
        tasks: the tasks with expectations, by id.
        value_of: converts a recorded output to the value to check; by default the output itself. It
            raises ValueError for an output that cannot be checked.

    Raises:
        JournalCorrupt: as `recorded_calls`.
    """
    for ended in _ended_calls(records):
        call = ended.call
        expectations: list[Expectation] = []
        for owner in (tools.get(call.tool), tasks.get(ended.task.id)):
            expect = None if owner is None else owner.expect
            if expect is not None and _is_about_output(expect):
                expectations.append(expect)
        if not expectations:
            continue
        if call.failure and call.output is None:
            continue
        if not call.kept:
            yield CheckedCall(call, None)
            continue
        output = call.output
        if value_of is not None:
            try:
                output = value_of(output)
            except ValueError:
                yield CheckedCall(replace(call, kept=False), None)
                continue
        roots = {
            "arguments": call.arguments,
            "context": ended.live.context,
            "results": ended.live.inputs_of(ended.task),
            "run": {"started": datetime.fromtimestamp(ended.started, UTC).isoformat()},
        }
        yield CheckedCall(call, broken_expectation(expectations, output, roots))


def _is_about_output(expect: Expectation) -> bool:
    """Return whether an expectation can be checked against past outputs."""
    if expect.json_schema is not None:
        return True
    return bool(expect.where or expect.errors)


class _EndedCall(NamedTuple):
    """Call with its task, and the plan at the end of the call."""

    call: ObservedCall
    task: Task
    live: LivePlan
    started: float


def _ended_calls(records: Iterable[Record]) -> Iterator[_EndedCall]:
    """Replay a journal and yield each call at its end; its plan changes with the next one."""
    remaining = iter(records)
    first = next(remaining, None)
    if first is None or not isinstance(first.body, RunOpened):
        raise JournalCorrupt("the journal does not begin with the opening of a run")
    opened = first.body
    live = LivePlan(opened.plan)
    ledger = Ledger(Budget(), lambda: 0)
    running: dict[AttemptId, JsonObject] = {}
    for record in remaining:
        apply_record(record, live, ledger, opened.run)
        body = record.body
        if isinstance(body, AttemptStarted):
            # A confirmation asks another tool, whose output is not that of the task's tool.
            if body.confirms is None:
                running[body.attempt] = _arguments(live, live.entry(body.task).task)
            continue
        if not isinstance(body, AttemptSucceeded | AttemptFailed):
            continue
        task = live.entry(body.task).task
        tool = task.tool
        # In a session, a task without a described tool has the tool's name.
        if tool is None and opened.open_ended:
            tool = task.name
        arguments = running.pop(body.attempt, None)
        if not tool:
            continue
        if arguments is None:
            continue
        failure = ""
        kept = True
        if isinstance(body, AttemptFailed):
            failure = body.failure.message
        else:
            kept = body.recoverable and not body.unstored
        output = decode(body.output)
        call = ObservedCall(
            tool,
            arguments,
            output,
            opened.run,
            task.id,
            failure,
            kept,
        )
        yield _EndedCall(call, task, live, first.at)


def _arguments(live: LivePlan, task: Task) -> JsonObject:
    """Return the resolved arguments at the start of a task, as far as they are still known."""
    arguments: JsonObject = {}
    for name, value in task.arguments.items():
        # One by one: an output that was not stored affects only the arguments that refer to it.
        with suppress(ExpressionError, ValueError):
            resolved = resolve_references(
                {name: value},
                context=live.context,
                result_of=live.inputs_of(task).output_of,
                parameters=live.parameters,
            )
            arguments[name] = json_form(resolved[name])
    return arguments
