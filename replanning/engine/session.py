"""Session: an open-ended run of an agent, in which each call of a tool becomes a task."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Literal, NamedTuple, ParamSpec, TypeVar, overload

import anyio
from pydantic_core import from_json, to_json, to_jsonable_python

from replanning.engine.functions import FunctionTools, ToolFunction
from replanning.errors import (
    ChangeRejected,
    NoResult,
    RecordNotSerializable,
    StoreError,
    UnexpectedOutput,
)
from replanning.journal.records import RunStatus
from replanning.journal.store import to_plain_json
from replanning.journal.values import NotStorable, copy_containers, encode
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import WAITING, TaskState
from replanning.plan.json_values import as_object, is_redacted, map_strings
from replanning.plan.messages import brief_repr, join_names, pluralise
from replanning.plan.references import has_references
from replanning.plan.tasks import Task
from replanning.plan.types import MAX_NAME_CHARS, AttemptId, JsonObject, JsonValue, TaskId
from replanning.run.attempt import TaskContext
from replanning.run.execution import LineageExecution
from replanning.run.run import PlanRun

Parameters = ParamSpec("Parameters")

ReturnedT = TypeVar("ReturnedT")

ItemT = TypeVar("ItemT")

Execute = Callable[[str, Mapping[str, object]], Awaitable[object]]
"""Executes a tool by its name, with arguments."""

CALL_KEY: Final = "call"
"""Key in the metadata of a call's task; its value is a digest of the call's key."""

_OBJECT_KEY: Final = "$object"
"""Key that marks the placeholder in the journal for a value that is not JSON."""

_NUMBER_CHARS: Final = 12

MAX_KEPT_CALLS: Final = 10_000
"""Number of calls without a key that a session keeps in memory.

Earlier ones that were done at once are only in the journal.
"""


def recorded_calls(live: LivePlan, key: str) -> list[TaskEntry]:
    """Return the calls with a key, in order."""
    digest = _digest(key)
    return [
        entry
        for entry in live
        if entry.parent is None and entry.task.metadata.get(CALL_KEY) == digest
    ]


class Session:
    """Open-ended run of an agent: each call of a tool is a task, retried and replaced like one.

    Made by `ReplanningEngine.session`.

    Attributes:
        run: the run, for example to add tasks, facts, and changes of the context.
    """

    def __init__(
        self, run: PlanRun, tools: FunctionTools, passes: tuple[type[BaseException], ...]
    ) -> None:
        self.run = run
        self._tools = tools
        self._passes = passes
        self._models: dict[tuple[str, bool], Task] = {}
        self._by_key: dict[str, TaskId] = {}
        self._without_key = deque[TaskId]()
        for entry in tuple(run.live):
            digest = entry.task.metadata.get(CALL_KEY)
            if entry.parent is None and digest is not None:
                self._keep(entry.id, str(digest))

    def __repr__(self) -> str:
        return f"<Session {self.run!r}>"

    @overload
    async def call(
        self,
        tool: Callable[Parameters, Awaitable[ReturnedT]],
        /,
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> ReturnedT: ...
    @overload
    async def call(
        self,
        tool: Callable[Parameters, ReturnedT],
        /,
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> ReturnedT: ...
    async def call(self, tool: ToolFunction, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function as a tool; return its result, or the result of its replacement.

        Args:
            tool: the function, one of the tools of the session or any other.
            args: of the function.
            kwargs: of the function.

        Raises:
            Exception: as `PlanRun.perform`.
            TypeError: the function does not take these arguments.
        """
        function = self._tools.of(tool)
        return await self.invoke(function.spec.name, function.bind(args, kwargs))

    @overload
    async def map(
        self,
        tool: Callable[[ItemT], Awaitable[ReturnedT]],
        items: Iterable[ItemT],
        *,
        max_parallel: int | None = None,
        on_item_failure: Literal["fail"] = "fail",
        key: str = "",
    ) -> list[ReturnedT]: ...
    @overload
    async def map(
        self,
        tool: Callable[[ItemT], Awaitable[ReturnedT]],
        items: Iterable[ItemT],
        *,
        max_parallel: int | None = None,
        on_item_failure: Literal["skip"],
        key: str = "",
    ) -> list[ReturnedT | None]: ...
    @overload
    async def map(
        self,
        tool: Callable[[ItemT], ReturnedT],
        items: Iterable[ItemT],
        *,
        max_parallel: int | None = None,
        on_item_failure: Literal["fail"] = "fail",
        key: str = "",
    ) -> list[ReturnedT]: ...
    @overload
    async def map(
        self,
        tool: Callable[[ItemT], ReturnedT],
        items: Iterable[ItemT],
        *,
        max_parallel: int | None = None,
        on_item_failure: Literal["skip"],
        key: str = "",
    ) -> list[ReturnedT | None]: ...
    async def map(
        self,
        tool: ToolFunction,
        items: Iterable[Any],
        *,
        max_parallel: int | None = None,
        on_item_failure: Literal["fail", "skip"] = "fail",
        key: str = "",
    ) -> list[Any]:
        """Call a function for each item at the same time; return the results in order.

        Each call is repaired separately, as in `call`. All calls end before this method does.

        Args:
            tool: the function, which gets an item.
            items: the items.
            max_parallel: the maximum number of calls at the same time; by default all.
            on_item_failure: `skip` to return None in place of a call that failed for good.
            key: identifies these calls, as in `invoke`: after a resume, finished ones are not
                repeated.

        Raises:
            ExceptionGroup: calls failed for good; it has their errors in the order of the items.
        """
        function = self._tools.of(tool)
        values = list(items)
        results: list[Any] = [None] * len(values)
        errors: dict[int, Exception] = {}
        limiter = anyio.CapacityLimiter(max_parallel or max(1, len(values)))

        async def call(index: int) -> None:
            arguments = function.bind((values[index],), {})
            own_key = f"{key}[{index}]" if key else ""
            async with limiter:
                try:
                    results[index] = await self.invoke(function.spec.name, arguments, key=own_key)
                except Exception as error:  # noqa: BLE001 - raised once all have ended
                    errors[index] = error

        async with anyio.create_task_group() as group:
            for index in range(len(values)):
                group.start_soon(call, index)
        if errors and on_item_failure == "fail":
            calls = pluralise(len(values), "call")
            text = f"{len(errors)} of {calls} of {function.spec.name!r} failed"
            raise ExceptionGroup(text, [errors[index] for index in sorted(errors)])
        return results

    async def invoke(
        self,
        tool: str,
        arguments: Mapping[str, object],
        *,
        execute: Execute | None = None,
        key: str = "",
        once: bool = True,
        passes: tuple[type[BaseException], ...] = (),
        value_of: Callable[[object], object] | None = None,
    ) -> object:
        """Call a tool by its name; return its result, or the result of its replacement.

        Args:
            tool: the name of the tool.
            arguments: of the tool; a value that is not JSON stays in this process, and the journal
                has a placeholder. The first attempt gets the values as they are, a retry gets
                copies of arrays and objects as they were then.
            execute: executes this tool, and its replacements; by default the functions of the
                session.
            key: identifies this call: a finished call with the same key returns its recorded
                output, and an interrupted one continues with its original arguments.
            once: false to make a new call if the last one with this key is done or given up, for an
                agent whose framework stores outputs itself; a call that was interrupted, or that
                waits for a person, continues.
            passes: exceptions that are control flow rather than failures, in addition to those of
                the session.
            value_of: extracts the value that `expect` of a tool checks from the result of
                `execute`; by default the result itself.

        Raises:
            Exception: as `PlanRun.perform`.
            ValueError: the key belongs to a call of another tool, or to a finished call with other
                arguments; names both.
        """
        life = self.run._lifecycle
        given = self._given(arguments)
        digest = key and _digest(key)
        started: AttemptId | None = None
        while (task_id := self._by_key.get(digest)) is None or not (
            once or life.can_go_on(task_id)
        ):
            try:
                task_id, started = self._add(tool, given.journaled, digest)
            except RecordNotSerializable:
                raise
            except StoreError:
                await life.wait_for_store()
            else:
                break
        else:
            self._require_same_call(task_id, key, tool, given.journaled)

        # The answer of a confirming function is not a result of a tool, so no value is extracted.
        answers: list[object] = []
        if value_of is not None and self._tools.confirmations:
            value_of = partial(_value_unless_answer, answers, value_of)

        # A tool may change its arguments, and its next attempt must not get that.
        unchanged = {each: copy_containers(value) for each, value in given.values.items()}
        is_first = True

        async def work(task: Task, context: TaskContext) -> object:
            nonlocal is_first
            is_own = context.arguments == given.journaled
            values = given.values
            if not is_own:
                values = _restore(context.arguments, given.objects)
            elif not is_first:
                values = {each: copy_containers(value) for each, value in unchanged.items()}
            is_first = False
            name = task.tool or tool
            function = self._tools.functions.get(name)
            if execute is not None and name not in self._tools.confirmations:
                output = await execute(name, values)
            elif function is not None:
                output = await function.execute(values, context, convert=not is_own)
            else:
                raise LookupError(f"no function was given for the tool {name!r}")
            if name in self._tools.confirmations:
                answers.append(output)
            if function is not None:
                await function.verify(output, value_of)
            return output

        lineage = LineageExecution(self.run, task_id, (*self._passes, *passes), value_of)
        # The work does not change its task, so no copy is needed.
        try:
            return await lineage.perform(work, started=started, copied=False)
        except UnexpectedOutput as error:
            # No alternative is left: the agent sees the answer of its tool.
            return error.output

    def last_call(self, key: str) -> TaskEntry | None:
        """Return the task of the last call with this key; None if there is none."""
        task_id = self._by_key.get(_digest(key))
        return None if task_id is None else self.run.live.entry(task_id)

    def is_recorded(self, key: str) -> bool:
        """Return whether a call with this key is done and the journal has its output."""
        call = self.last_call(key)
        if call is None or not call.satisfied:
            return False
        try:
            self.run.live.results.output_of(call.id)
        except NoResult:
            return False
        return True

    def _add(
        self, name: str, arguments: JsonObject, digest: str
    ) -> tuple[TaskId, AttemptId | None]:
        """Add the task of a call; return it, and its attempt unless it must wait."""
        live = self.run.live
        function = self._tools.functions.get(name)
        number = live.statistics.added_tasks + 1
        stem = name[: MAX_NAME_CHARS - _NUMBER_CHARS]
        while live.is_taken(task_id := TaskId(f"{stem}-{number}")):
            number += 1
        arguments = _escaped(arguments)
        model = self._models.get((name, function is None))
        if model is None:
            stated: dict[str, Any] = {}
            if function is not None:
                # The plan may lack the tool, or have an earlier version of it.
                described = live.tools.get(name)
                for field in ("confirm", "effect", "expect", "idempotent", "retry", "timeout"):
                    value = getattr(function.spec, field)
                    if described is None or getattr(described, field) != value:
                        stated[field] = value
            model = Task(id=task_id, tool=name, arguments={}, metadata={}, **stated)
            if name in live.tools:
                self._models[name, function is None] = model
        task = model.model_copy(
            update={"id": task_id, "arguments": arguments, "metadata": {CALL_KEY: digest}}
        )
        try:
            started = self.run._lifecycle.add_call(task)
        except ChangeRejected:  # unknown, or it does not take these arguments: executing it says so
            task = task.model_copy(update={"tool": None, "name": name})
            started = self.run._lifecycle.add_call(task)
        self._keep(task_id, digest)
        return task_id, started

    def _keep(self, task_id: TaskId, digest: str) -> None:
        """Keep a call so that it is found by its key; without a key, keep only the last calls.

        A call without a key is never looked up again, and an agent may make them for days.
        """
        if digest:
            self._by_key[digest] = task_id
            return
        self._without_key.append(task_id)
        if len(self._without_key) > MAX_KEPT_CALLS:
            self.run.live.forget(self._without_key.popleft())

    def _require_same_call(
        self, task_id: TaskId, key: str, tool: str, arguments: JsonObject
    ) -> None:
        """Refuse a key that is used for two calls; masked arguments are not compared.

        Raises:
            ValueError: the key belongs to another call.
        """
        life = self.run._lifecycle
        task = self.run.live.entry(task_id).task
        given = _escaped(arguments)
        name = task.tool or task.name
        recorded = task.arguments
        other = given.keys() != recorded.keys() or any(
            value != recorded[each] and not is_redacted(value) and not is_redacted(recorded[each])
            for each, value in given.items()
        )
        if tool == name and (not other or life.can_go_on(task_id)):
            if life.redactor.value(given) == recorded:
                # The journal has masks instead; the caller has the true values.
                life.live.entry(task_id).task = task.model_copy(update={"arguments": given})
                life.live.masked.tasks.discard(task_id)
            return
        revisions = (revised.changes for _, revised in life.ledger.revisions)
        if not any(
            change.kind == "modify" and change.task_id == task_id
            for changes in revisions
            for change in changes
        ):
            raise ValueError(
                f"key {brief_repr(key)} is that of call {task_id!r}, of {name!r} with "
                f"{brief_repr(recorded)}; it cannot be that of a"
                f" call of {tool!r} with {brief_repr(given)}: use another key"
            )

    def _given(self, arguments: Mapping[str, object]) -> _Arguments:
        objects: list[object] = []
        journaled: JsonObject = {}
        if arguments:
            journaled = self._journaled(arguments, objects)
        return _Arguments(arguments, journaled, objects)

    def _journaled(self, arguments: Mapping[str, object], objects: list[object]) -> JsonObject:
        """Return the journal's form of arguments; values that are not JSON go to `objects`."""

        def reference(value: object) -> JsonObject:
            objects.append(value)
            return {_OBJECT_KEY: len(objects) - 1, "type": type(value).__name__}

        named = {str(name): value for name, value in arguments.items()}
        life = self.run._lifecycle
        most = life.settings.max_output
        with suppress(NotStorable):
            plain = encode(named, None)
            if plain.is_plain and plain.size <= most:
                return as_object(plain.value)
        try:  # all at once, unless a null represents a number that is not finite
            text = to_json(named, fallback=reference, inf_nan_mode="constants")
            journaled: JsonObject = from_json(text, allow_inf_nan=False)
        except (ValueError, RecursionError):
            text = b"null"
            journaled = {}
        if len(text) > most or b"null" in text:
            objects.clear()
            for name, value in named.items():
                try:
                    kept, size = to_plain_json(
                        to_jsonable_python(value, fallback=reference, inf_nan_mode="strings")
                    )
                except (RecordNotSerializable, ValueError, RecursionError):
                    kept = None
                    size = most + 1
                journaled[name] = kept if size <= most else reference(value)
        return journaled

    def end(self) -> None:
        """End the run unless it has ended or pauses; it succeeds if nothing is open."""
        life = self.run._lifecycle
        live = self.run.live
        if life.ledger.pause is not None:
            return
        left = [
            entry.id
            for entry in live
            if entry.counts_as_unsatisfied and CALL_KEY not in entry.task.metadata
        ]
        if questions := life.ledger.questions.open:
            life.finish("needs_human", f"a person must answer {join_names(questions, 5)} first")
            return
        status: RunStatus = "failed" if left or live.missing_facts else "succeeded"
        reason = "the session ended"
        if left:
            reason += f" before {join_names(left, 5)}, which must be done"
        if live.missing_facts:
            reason += f"; these facts of the goal do not hold: {', '.join(live.missing_facts)}"
        life.finish(
            status,
            reason,
            tuple(e.id for e in live if e.state in WAITING or e.state is TaskState.RUNNING),
        )


class _Arguments(NamedTuple):
    """Arguments for a tool: as passed, in the journal's form, and the values that are not JSON."""

    values: Mapping[str, object]
    journaled: JsonObject
    objects: Sequence[object]


def _value_unless_answer(
    answers: Sequence[object], value_of: Callable[[object], object], output: object
) -> object:
    """Return the value of an output; an answer of this library is a value itself."""
    for answer in answers:
        if answer is output:
            return output
    return value_of(output)


def _digest(key: str) -> str:
    """Return the recorded digest of a key, which may contain secrets."""
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def _escaped(arguments: JsonObject) -> JsonObject:
    """Return arguments with `${` escaped, so that it means these characters."""
    if not has_references(arguments):
        return arguments
    return as_object(map_strings(arguments, lambda text: text.replace("${", "$${")))


def _restore(arguments: Mapping[str, JsonValue], objects: Sequence[object]) -> dict[str, object]:
    """Return arguments with their placeholders replaced by the objects.

    Raises:
        LookupError: an object belonged to a process that has ended.
    """

    def restored(value: JsonValue) -> object:
        if isinstance(value, list):
            return list(map(restored, value))
        if not isinstance(value, dict):
            return value
        if value.keys() == {_OBJECT_KEY, "type"}:
            index = value[_OBJECT_KEY]
            if isinstance(index, int) and 0 <= index < len(objects):
                return objects[index]
            raise LookupError(
                f"an argument is not JSON ({value['type']}) and is gone with the process that made "
                "it"
            )
        return {name: restored(item) for name, item in value.items()}

    return {name: restored(value) for name, value in arguments.items()}
