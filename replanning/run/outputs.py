"""Outputs of attempts: their form in the plan, and their form in the journal."""

from __future__ import annotations

import asyncio  # noqa: TID251 - to recognise its futures
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import NoneType
from typing import Any, Final, NamedTuple, get_type_hints

from pydantic import TypeAdapter

from replanning.errors import ExpressionError, OutputError, UnexpectedOutput, UnverifiedOutput
from replanning.journal.records import AttemptSucceeded
from replanning.journal.values import (
    MAX_INTEGER,
    MIN_INTEGER,
    AnnotatedJson,
    NotStorable,
    StoredOutput,
    copy_containers,
    encode,
    encode_annotated,
    measure,
)
from replanning.live.entries import TaskEntry, TaskOutput
from replanning.live.plan import LivePlan
from replanning.plan.conditions import OUTPUT_ROOTS, Condition
from replanning.plan.expectations import broken_expectation, disagreement, readable_output
from replanning.plan.references import IDEMPOTENCY_KEY, resolve_root_references
from replanning.plan.tasks import (
    DONE_UNLESS_NULL,
    WHOLE_OUTPUT,
    Agreement,
    Confirmation,
    Expectation,
    ToolSpec,
)
from replanning.plan.types import AttemptId, JsonValue, TaskId
from replanning.run.event_loop import describe_error
from replanning.secrets import MASK, Redactor

Codec = Callable[[object], JsonValue]
"""Turns an output that is not JSON into JSON."""

_SIMPLE_TYPES: Final = frozenset({NoneType, bool, int})
"""Types of outputs that are JSON and contain no secrets."""

_JSON_TYPES: Final = frozenset({*_SIMPLE_TYPES, float, str, list, dict})


_VAGUE_HINTS: Final = (
    Any,
    object,
    None,
    NoneType,
    str,
    int,
    float,
    bool,
    dict,
    list,
)
"""Return annotations that do not name a class of outputs."""


class WithheldOutput(NamedTuple):
    """Output of an attempt in another process that must not come into this one.

    Attributes:
        reason: why not.
    """

    reason: str


class Confirmed(NamedTuple):
    """Answer to the question whether a call was made.

    Attributes:
        done: whether it was.
        output: the output of the task, if it was.
    """

    done: bool
    output: object = None


@dataclass(repr=False, eq=False)
class OutputKeeper:
    """Stores the outputs of attempts, and restores the types of those of a resumed run.

    Its state is the known return annotations (`return_types`); sessions and work add to them.

    Args:
        live: the plan with the tasks of the outputs.
        redactor: masks secrets.
        codec: turns outputs that are not JSON into JSON.
        max_bytes: the size limit of an output as JSON.
        started_at: when the run began, in seconds since the epoch.
    """

    _live: LivePlan
    _redactor: Redactor
    _codec: Codec | None
    _max_bytes: int
    _started_at: float
    return_types: dict[str, TypeAdapter[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        started = datetime.fromtimestamp(self._started_at, UTC).isoformat()
        self._run_root = {"started": started}

    def __repr__(self) -> str:
        return f"<OutputKeeper of {self._live!r}>"

    def take(
        self, attempt: AttemptId, entry: TaskEntry, output: Any, *, must_store: bool
    ) -> tuple[AttemptSucceeded, AttemptSucceeded]:
        """Return the record of an output for the live plan, and the one for the journal.

        Args:
            attempt: the attempt that returned it.
            entry: its task.
            output: the output.
            must_store: whether an output that is too large for the journal is a failure, instead
                of being left out of it.

        Raises:
            OutputError: it still has to be awaited, the codec failed, or it is too large.
        """
        reads = entry.reads.keys or None
        kind = type(output)
        # They contain no secrets and are immutable, so they need no copy.
        is_small = kind is not int or MIN_INTEGER < output < MAX_INTEGER
        if kind in _SIMPLE_TYPES and is_small:
            body = AttemptSucceeded(attempt, entry.id, output, True, reads)
            return body, body
        # JSON does not have to be awaited.
        if kind not in _JSON_TYPES:
            if isinstance(output, WithheldOutput):
                body = AttemptSucceeded(
                    attempt,
                    entry.id,
                    None,
                    False,
                    reads,
                    output.reason,
                )
                return body, body
            problem = await_problem(output, entry.id)
            if problem:
                raise OutputError(problem)
        value = self._encoded_by_codec(output)
        document: JsonValue = None
        try:
            encoded = self._encoded(entry, value)
        except NotStorable as error:
            unstored = str(error)
        else:
            unstored = self._size_problem(encoded)
            if unstored and must_store:
                # The work is done and may have taken effect; another tool would repeat it.
                raise OutputError(unstored, in_doubt=True)
            if not unstored:
                document = encoded.value
                if encoded.is_plain:
                    body = AttemptSucceeded(attempt, entry.id, document, True, reads)
                    return body, body
                if encoded.is_masked:
                    unstored = f"a part of it looks like a secret, so the journal has {MASK}"
        copied: Any = copy_containers(value)
        body = AttemptSucceeded(
            attempt,
            entry.id,
            copied,
            True,
            reads,
            unstored,
        )
        return body, replace(body, output=document, recoverable=not unstored)

    def agreements(self, entry: TaskEntry, output: object) -> list[Agreement]:
        """Return the other tools that must agree with the answer of a task's tool."""
        agreements: list[Agreement] = []
        expectations = self.expectations(entry)
        if not expectations or isinstance(output, WithheldOutput):
            return agreements  # there is nothing to compare
        for expectation in expectations:
            agreement = expectation.agrees_with
            # If the other tool is now the substitute of the first, it has the last word.
            if agreement is not None and agreement.tool != entry.task.tool:
                agreements.append(agreement)
        return agreements

    def expectations(self, entry: TaskEntry) -> list[Expectation]:
        """Return what the output of a task must satisfy; usually nothing."""
        task = entry.task
        expectations = []
        if task.tool is not None:
            tool = self._live.tools.get(task.tool)
            if tool is not None and tool.expect is not None:
                expectations.append(tool.expect)
        if task.expect is not None:
            expectations.append(task.expect)
        return expectations

    def confirmed(
        self,
        entry: TaskEntry,
        confirm: Confirmation,
        key: str,
        output: object,
        value_of: Callable[[object], object] | None,
    ) -> Confirmed:
        """Return what the output of a confirmation says about its task.

        Args:
            entry: the task.
            confirm: the confirmation.
            key: the idempotency key of its attempt.
            output: the output of the confirming tool.
            value_of: extracts the value that the condition checks; by default the output itself.

        Raises:
            UnexpectedOutput: the output violates the expectations of that tool.
            ExpressionError: the condition cannot be evaluated, the output of the task cannot be
                computed, or a function returned a boolean, which is ambiguous.
        """
        live = self._live
        roots = self._roots_of(entry)
        if isinstance(output, WithheldOutput):
            raise ExpressionError(f"its answer cannot be read here: {output.reason}")
        value = output
        if value_of is not None:
            value = value_of(output)
        tool = live.tools.get(confirm.tool)
        if tool is not None and tool.expect is not None:
            asked = live.asking_task(entry, confirm, key)
            broken = broken_expectation(
                [tool.expect], value, {**roots, "arguments": asked.arguments}
            )
            if broken is not None:
                raise broken
        # It could mean that the call was made, or it could be the output of the call.
        if isinstance(value, bool) and confirm.when == DONE_UNLESS_NULL:
            raise ExpressionError(
                f"{value} does not say whether it was done; return the output of the call, None if"
                " it was not done, and raise if that cannot be told"
            )
        try:
            roots["output"], roots["text"] = readable_output(value)
        except ValueError as error:
            raise ExpressionError(f"expected an output that is JSON: {error}") from None
        if not Condition.parse(confirm.when, OUTPUT_ROOTS).holds(roots):
            return Confirmed(done=False)
        # The object itself, as with the output of the task's own tool.
        if confirm.output == WHOLE_OUTPUT:
            return Confirmed(done=True, output=output)
        roots[IDEMPOTENCY_KEY] = key
        return Confirmed(done=True, output=resolve_root_references(confirm.output, roots))

    def unexpected(
        self,
        entry: TaskEntry,
        output: object,
        value_of: Callable[[object], object] | None = None,
        *,
        verified: bool,
        checked: bool,
    ) -> UnexpectedOutput | None:
        """Return why an output violates the expectations of its tool or task; None if it does not.

        Args:
            entry: the task.
            output: its output.
            value_of: extracts the value to check; by default the output itself.
            verified: whether the other tools that must agree were asked, or will be asked later.
            checked: whether the commands that must succeed after the work have succeeded.
        """
        expectations = self.expectations(entry)
        for expectation in expectations:
            if expectation.commands and not checked:
                return UnverifiedOutput(
                    f"{expectation.commands[0]!r} must succeed, but was not run: a `ToolExecutor`"
                    " runs commands; in Python, give `expect` a function",
                    output,
                )
        if not expectations or isinstance(output, WithheldOutput):
            return None
        broken = self._broken(entry, expectations, output, value_of)
        if broken is not None or verified:
            return broken
        agreements = self.agreements(entry, output)
        if not agreements:
            return None
        return UnverifiedOutput(
            f"{agreements[0].tool!r} must agree, but was not asked, because the output was only reported; execute"
            " the task with `run.perform` to have it verified",
            output,
        )

    def require_expected(self, entry: TaskEntry, output: object, *, checked: bool) -> None:
        """Refuse an unexpected output before a judge or a model sees it.

        Other tools that must agree are asked after that.

        Args:
            entry: the task.
            output: its output.
            checked: as `unexpected` takes it.

        Raises:
            UnexpectedOutput: it is not.
        """
        broken = self.unexpected(entry, output, verified=True, checked=checked)
        if broken is not None:
            raise broken

    def disagreement(
        self,
        entry: TaskEntry,
        agreement: Agreement,
        output: object,
        other: object,
        value_of: Callable[[object], object] | None,
    ) -> UnexpectedOutput | None:
        """Return why a second tool does not verify an output; None if it does.

        Args:
            entry: the task.
            agreement: the second tool, and the values to compare.
            output: the output of the task.
            other: the output of the second tool; the expectations of that tool apply to it.
            value_of: extracts the value to compare; by default the output itself.
        """
        name = agreement.tool
        if isinstance(other, WithheldOutput):
            return UnverifiedOutput(f"{name!r} gave nothing to compare: {other.reason}", output)
        expectations = []
        expected = self._live.tools[name].expect
        if expected is not None:
            expectations.append(expected)
        broken = self._broken(entry, expectations, other, value_of)
        if broken is not None:
            return UnverifiedOutput(f"{name!r} gave nothing to compare: {broken}", output)
        value = output
        other_value = other
        if value_of is not None:
            value = value_of(output)
            other_value = value_of(other)
        differs = disagreement(agreement, value, other_value)
        if differs is not None:
            differs.output = output
        return differs

    def _broken(
        self,
        entry: TaskEntry,
        expectations: Sequence[Expectation],
        output: object,
        value_of: Callable[[object], object] | None,
    ) -> UnexpectedOutput | None:
        """Return which expectation an output does not satisfy."""
        value = output
        if value_of is not None:
            value = value_of(output)
        broken = broken_expectation(expectations, value, self._roots_of(entry))
        if broken is not None:
            broken.output = output
        return broken

    def _roots_of(self, entry: TaskEntry) -> dict[str, object]:
        """Return the values that conditions about an output can see beside it."""
        return {
            "arguments": self._live.sent_arguments(entry),
            "context": self._live.context,
            "parameters": self._live.parameters,
            "results": self._live.inputs_of(entry.task),
            "run": self._run_root,
            **(entry.task.scope or {}),
        }

    def recorded_form(self, output: object) -> JsonValue:
        """Return the journal's form of an unexpected output; None if there is none."""
        try:
            encoded = encode(output, self._redactor)
        except NotStorable:
            return None
        if self._size_problem(encoded):
            return None
        return encoded.value

    def _encoded(self, entry: TaskEntry, value: object) -> StoredOutput:
        """Return the stored form of an output, using the return annotation if necessary.

        Raises:
            NotStorable: it has none.
            OutputError: a part of it still has to be awaited.
        """
        try:
            encoded = encode(value, self._redactor)
        except NotStorable as error:
            # For example where the results of several calls should have been gathered.
            part = error.part
            if inspect.iscoroutine(part) or inspect.isasyncgen(part) or asyncio.isfuture(part):
                problem = await_problem(part, entry.id, "returned a value that holds")
                raise OutputError(problem) from None
            annotated = self._encode_annotated(entry, value)
            if annotated is None:
                raise
            return annotated
        if encoded.enums:
            # Without an annotation, only a text or a number remains of them.
            return self._encode_annotated(entry, value, encoded.enums) or encoded
        return encoded

    def _encoded_by_codec(self, output: object) -> object:
        if self._codec is None:
            return output
        try:
            return self._codec(output)
        except Exception as error:
            # Every error of a codec is a failure of the attempt, reported with the type of its
            # output.
            name = type(output).__name__
            raise OutputError(f"the codec failed for {name}: {describe_error(error)}") from error

    def _size_problem(self, encoded: StoredOutput) -> str:
        if encoded.size <= self._max_bytes:
            return ""
        # The first size is a quick estimate; it is never too small.
        size = measure(encoded.value)
        if size <= self._max_bytes:
            return ""
        return (
            f"the output is too large: it has {size} bytes as JSON, and max_output allows "
            f"{self._max_bytes}; store it elsewhere and return a reference to it, or raise the "
            "setting"
        )

    def _encode_annotated(
        self, entry: TaskEntry, output: object, enums: int = 0
    ) -> StoredOutput | None:
        """Return the stored form of an output that its function's return annotation describes.

        None if the annotation does not restore it exactly, as with members of an Enum that equal
        their texts or numbers.
        """
        adapter = self.return_types.get(_function_name(entry))
        if adapter is None:
            return None
        try:
            document = adapter.dump_python(output, mode="json", warnings="error")
            # A value that is not restored exactly would change on a resume, unnoticed.
            restored = adapter.validate_python(document)
            if restored != output:
                return None
            if enums and encode(restored, None).enums != enums:
                return None
            return encode_annotated(document, self._redactor)
        except Exception:  # noqa: BLE001 - users' classes may raise anything
            return None

    def untyped_tools(self) -> list[ToolSpec]:
        """Return the tools of a resumed run whose outputs need their return annotations."""
        tools: dict[str, ToolSpec] = {}
        for entry in self._live:
            if not isinstance(entry.output.value, AnnotatedJson):
                continue
            tool = self._live.tool_of(entry.task)
            if tool is not None:
                tools[tool.name] = tool
        return list(tools.values())

    def restore(self, return_types: Mapping[str, TypeAdapter[Any]]) -> None:
        """Convert the outputs of a resumed run to the types of return annotations.

        Args:
            return_types: the annotations, by the names of the tools.
        """
        self.return_types.update(return_types)
        self._live.results.changed = None
        for entry in self._live:
            output = entry.output.value
            adapter = return_types.get(_function_name(entry))
            if adapter is None or not isinstance(output, AnnotatedJson):
                continue
            try:
                entry.output = entry.output._replace(value=adapter.validate_python(output.value))
            except Exception as error:  # noqa: BLE001 - validators of users may raise anything
                reason = describe_error(error)
                unstored = f"it does not fit the return annotation any more: {reason}"
                entry.output = TaskOutput(None, recoverable=False, unstored=unstored)


def _function_name(entry: TaskEntry) -> str:
    return entry.task.tool or entry.task.name or ""


def await_problem(output: object, task_id: TaskId, verb: str = "returned") -> str:
    """Return the problem of an output that must be awaited or iterated; empty if there is none."""
    is_iterator = inspect.isasyncgen(output) or isinstance(output, AsyncIterator)
    is_awaitable = inspect.isawaitable(output)
    if hasattr(output, "__aenter__") and not isinstance(output, Coroutine):
        # Connections and pools can be awaited to open them, but they are valid outputs.
        is_awaitable = False
    if not is_iterator and not is_awaitable:
        return ""
    name = getattr(output, "__qualname__", "")
    named = f" of {name!r}" if name else ""
    kind = f"an object of type {type(output).__name__}"
    if is_iterator:
        kind = "an async iterator"
    if inspect.isasyncgen(output):
        kind = "an async generator"
    if inspect.iscoroutine(output):
        kind = "a coroutine"
        output.close()  # otherwise Python warns that nobody awaited it
    return (
        f"task {task_id!r} {verb} {kind}{named}, which nobody has awaited; "
        "was `await` forgotten, or `async for`?"
    )


def return_type_of(function: Callable[..., object]) -> TypeAdapter[Any] | None:
    """Return the adapter of a function's return annotation; None without a useful one."""
    try:
        hint = get_type_hints(function, include_extras=True).get("return", Any)
        if hint in _VAGUE_HINTS:
            return None
        return TypeAdapter(hint)
    except Exception:  # noqa: BLE001 - it may be anything, or name what only type checkers import
        return None
