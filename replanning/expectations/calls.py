"""Calls of tools as a journal has them: the arguments, and what each tool answered."""

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
    """Call of a tool, as a journal has it or as you have observed it yourself.

    Attributes:
        tool: the name of the tool.
        arguments: what the tool was given.
        output: what it answered: JSON, or a value that has a JSON form. A text that is a JSON
            object or array counts as that value.
        run: the run that made the call; empty outside of one.
        task: the task of the call.
        failure: the message with which the call failed; empty if it succeeded. The output of a
            call that failed is one that was not as expected, or None.
        kept: whether the output is known; a journal lacks those that have no stored form.
    """

    tool: str
    arguments: Mapping[str, object]
    output: object = None
    run: str = ""
    task: str = ""
    failure: str = ""
    kept: bool = True


class CheckedCall(NamedTuple):
    """Call whose output was held against expectations.

    Attributes:
        call: the call.
        broken: why the output is not as expected; None if it is, or is not kept.
    """

    call: ObservedCall
    broken: UnexpectedOutput | None


def recorded_calls(records: Iterable[Record]) -> Iterator[ObservedCall]:
    """Yield the calls of tools that a run has made, in the order in which they ended.

    Calls that were interrupted or ran into their deadline are left out: they have no answer.

    Args:
        records: the journal of the run.

    Raises:
        JournalCorrupt: it does not begin with the opening of a run, or its records contradict one
            another.
    """
    for ended in _ended_calls(records):
        yield ended.call


def checked_calls(
    records: Iterable[Record],
    tools: Mapping[str, ToolSpec],
    tasks: Mapping[TaskId, Task],
    value_of: Callable[[object], object] | None = None,
) -> Iterator[CheckedCall]:
    """Yield the calls of a run, each held against what its tool and its task expect.

    Calls without expectations are left out, and so are those that failed without an output. The
    past cannot be asked again: commands are not run, and no other tool has to agree. Conditions
    see the context and the results of that time.

    Args:
        records: the journal of the run.
        tools: the tools that expect something, by name.
        tasks: the tasks that expect something, by id.
        value_of: makes of a recorded output what expectations are about; by default the output. It
            raises ValueError for one that cannot be checked.

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
    """Return whether an expectation says something that past outputs can be held against."""
    if expect.json_schema is not None:
        return True
    return bool(expect.where or expect.errors)


class _EndedCall(NamedTuple):
    """Call, with its task and with the plan as it was when the call ended."""

    call: ObservedCall
    task: Task
    live: LivePlan
    started: float


def _ended_calls(records: Iterable[Record]) -> Iterator[_EndedCall]:
    """Replay a journal, and yield its calls as they end; the plan changes with the next one."""
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
            # What another tool says that was asked about a call is no output of its own tool.
            if body.confirms is None:
                running[body.attempt] = _arguments(live, live.entry(body.task).task)
            continue
        if not isinstance(body, AttemptSucceeded | AttemptFailed):
            continue
        task = live.entry(body.task).task
        tool = task.tool
        # A session names the task after a tool that its plan does not describe.
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
        call = ObservedCall(tool, arguments, output, opened.run, task.id, failure, kept)
        yield _EndedCall(call, task, live, first.at)


def _arguments(live: LivePlan, task: Task) -> JsonObject:
    """Return the arguments that a task begins with, as far as they can still be known."""
    arguments: JsonObject = {}
    for name, value in task.arguments.items():
        # One by one: an output that was not stored is missing only where it is referred to.
        with suppress(ExpressionError, ValueError):
            resolved = resolve_references(
                {name: value},
                context=live.context,
                result_of=live.inputs_of(task).output_of,
                parameters=live.parameters,
            )
            arguments[name] = json_form(resolved[name])
    return arguments
