"""Building blocks for integrations: tools, runs of threads, sessions, calls, questions.

See docs/how-to/attach-a-framework.md. A framework that calls tools in threads also needs
`session_thread`.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 # some frameworks run on asyncio alone
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Any, Final
from urllib.parse import quote

import anyio

from replanning.engine.engine import ReplanningEngine
from replanning.engine.functions import FunctionTool
from replanning.engine.session import Execute, Session, recorded_calls
from replanning.errors import (
    CallFailed,
    CallSkipped,
    NeedsHuman,
    NoResult,
    NotRunning,
    StaleAnswer,
    UnknownQuestion,
)
from replanning.history.status import replay_records
from replanning.journal.records import QuestionVerdict
from replanning.journal.store import RunInfo
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.plan.messages import did_you_mean, join_parts
from replanning.plan.tasks import Retry, allows_repetition
from replanning.plan.types import JSON_TYPES, RunId, TaskId
from replanning.run.attempt import current_attempt

__all__ = [
    "METADATA",
    "ONE_ATTEMPT",
    "Arguments",
    "Capabilities",
    "ControlFlow",
    "ReportedFailure",
    "SessionTask",
    "TimedOut",
    "answer_questions",
    "call_tool",
    "describe_tools",
    "earlier_output",
    "find_run",
    "has_deadline",
    "hinted_fields",
    "is_unfinished",
    "joined_texts",
    "named_questions",
    "output_in_run",
    "shown_questions",
    "thread_run",
    "tool_fields",
    "withdraw_questions",
]

Capabilities = Mapping[str, str | Mapping[str, object]]
"""Capabilities of tools by name, or the fields that `replanning.tool` takes."""

Arguments = Mapping[str, object]
"""Arguments of a tool by name."""

METADATA: Final = "replanning"
"""Key in a framework's metadata for data of this library: a tool's fields, or open questions."""

UNFINISHED: Final = ("running", "paused", "needs_human")
"""Statuses of runs that can be resumed."""


def missing_framework(module: str, needs: str, error: Exception) -> ImportError:
    """Return the error to raise if the framework of a module is missing or incompatible.

    Args:
        module: the module, named like the extra of `replanning` that installs the framework.
        needs: the framework, and the version that was tested.
        error: the error of the failed import.
    """
    extra = module.rpartition(".")[2].replace("_", "-")
    return ImportError(f'{module} needs {needs}: pip install "replanning[{extra}]" ({error})')


def tool_fields(
    description: str | None, schema: Mapping[str, Any], *, stated: object = None, **fields: object
) -> dict[str, object]:
    """Return the fields that describe a tool to a session.

    Args:
        description: what the tool does.
        schema: the JSON schema of its arguments.
        stated: the tool's own declaration, such as in its metadata: its capability, or fields that
            override the others.
        fields: further fields, such as `dangerous`.
    """
    required = schema.get("required", ())
    parameters: dict[str, str] = {}
    optional: list[str] = []
    for name, described in schema.get("properties", {}).items():
        kind: object = None
        has_default = False
        if isinstance(described, Mapping):
            kind = described.get("type")
            has_default = "default" in described
        if not isinstance(kind, str) or kind not in JSON_TYPES:
            kind = "any"
        parameters[name] = kind
        if has_default or name not in required:
            optional.append(name)
    words = " ".join((description or "").split())
    return {
        "description": "".join(filter(str.isprintable, words)),
        "parameters": parameters,
        "optional": optional,
        **fields,
        **_stated_fields(stated),
    }


def hinted_fields(annotations: Any) -> dict[str, object]:
    """Return the fields that follow from the MCP annotations of a tool.

    Args:
        annotations: an object of the MCP SDK, or a mapping with the names of the protocol; None if
            the tool has no annotations.
    """
    if annotations is None:
        return {}
    named = annotations
    if not isinstance(annotations, Mapping):
        named = annotations.model_dump(by_alias=True)
    fields: dict[str, object] = {}
    if named.get("readOnlyHint"):
        fields["effect"] = "none"
    if named.get("idempotentHint"):
        fields["idempotent"] = True
    return fields


def _stated_fields(stated: object) -> dict[str, Any]:
    if stated is None:
        return {}
    if isinstance(stated, Mapping):
        return dict(stated)
    return {"capability": stated}


def describe_tools(
    tools: Mapping[str, Mapping[str, object]],
    capabilities: Capabilities | None,
    *,
    noun: str = "tool",
    absent: Collection[str] = (),
) -> list[FunctionTool[..., Any]]:
    """Convert the tools of an agent for a session; each call supplies the executor.

    Args:
        tools: by name, the fields of a tool, see `tool_fields`.
        capabilities: by name, the capability of a tool or further fields; they override `tools`.
        noun: the word for a tool in error messages, such as "agent".
        absent: names of tools that exist but are not described here; capabilities may name them.

    Raises:
        ValueError: capabilities name an unknown tool, or a field is not valid; lists all problems.
    """
    stated = capabilities or {}
    problems = unknown_names(stated, (*tools, *absent), noun)
    described: list[FunctionTool[..., Any]] = []
    for name, fields in tools.items():
        merged: dict[str, Any] = {"name": name, **fields, **_stated_fields(stated.get(name))}
        try:
            described.append(FunctionTool(_executed_elsewhere, **merged))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError(f"capabilities: {'; '.join(problems)}")
    return described


async def _executed_elsewhere(**_: object) -> object:
    raise LookupError("this tool is executed by its framework")


def unknown_names(names: Iterable[str], known: Collection[str], noun: str = "tool") -> list[str]:
    """Return a problem for each unknown name."""
    problems: list[str] = []
    for name in names:
        if name not in known:
            hint = did_you_mean(str(name), known)
            problems.append(join_parts(f"there is no {noun} called {name!r}", hint))
    return problems


def thread_run(
    engine: ReplanningEngine, thread: str, *, part: str = "", resumes: bool = True
) -> str:
    """Return the id of the run for a thread: its last run if that is unfinished, or a new one.

    Args:
        engine: the engine, whose store has the runs.
        thread: the id of the thread, such as a conversation.
        part: the part of the thread that has runs of its own.
        resumes: false to always begin a new run.
    """
    prefix = f"thread-{quote(thread, safe='')}"
    if part:
        prefix += f"-{part}"
    if resumes:
        newest = next(_thread_runs(engine, prefix), None)
        if newest is not None and newest.status in UNFINISHED:
            return newest.run
    return f"{prefix}.{secrets.token_hex(4)}"


def _thread_runs(engine: ReplanningEngine, prefix: str) -> Iterator[RunInfo]:
    """Yield the runs of a thread, newest first."""
    for run in engine.store.runs():
        if run.run.rpartition(".")[0] == prefix:
            yield run


def find_run(engine: ReplanningEngine, run_id: str) -> RunInfo | None:
    """Return a run in the store of an engine, or None if the store does not have it."""
    for run in engine.store.runs():
        if run.run == run_id:
            return run
    return None


def is_unfinished(engine: ReplanningEngine, run_id: str) -> bool:
    """Return whether a run can be started or resumed: it is unknown, or has not ended."""
    known = find_run(engine, run_id)
    return known is None or known.status in UNFINISHED


def named_questions(shown: object) -> list[str]:
    """Return the ids of questions in the output of `shown_questions` that a framework returns."""
    questions: list[str] = []
    if isinstance(shown, list):
        for each in shown:
            if isinstance(each, Mapping):
                questions.append(str(each.get("question")))
    return questions


def joined_texts(parts: Iterable[Any]) -> str:
    """Return the text parts of a content, such as that of an MCP result, one per line."""
    texts: list[str] = []
    for part in parts:
        if part.type == "text":
            texts.append(part.text)
    return "\n".join(texts)


def earlier_output(engine: ReplanningEngine, run_id: str, key: str) -> tuple[object] | None:
    """Return the output of a call, in a tuple, if an earlier run of the thread has finished it.

    Args:
        engine: the engine, whose store has the runs.
        run_id: the current run of the thread, see `thread_run`.
        key: the key of the call.

    Raises:
        CallFailed: as `output_in_run`.
    """
    for run in _thread_runs(engine, run_id.rpartition(".")[0]):
        if run.run != run_id:
            earlier = output_in_run(engine, run.run, key)
            if earlier is not None:
                return earlier
    return None


def output_in_run(engine: ReplanningEngine, run_id: str, key: str) -> tuple[object] | None:
    """Return the output of a call, in a tuple, if a run has finished it; None if it can be made.

    Args:
        engine: the engine, whose store has the run.
        run_id: the run.
        key: the key of the call.

    Raises:
        CallFailed: the call succeeded, but its output was not recorded; or it may have taken
            effect, and must not be repeated.
    """
    live = replay_records(engine.store.read(RunId(run_id))).live
    calls = recorded_calls(live, key)
    for call in calls:
        if not call.satisfied:
            continue
        try:
            return (live.results.output_of(call.id),)
        except NoResult as error:
            unstored = [leaf.output.unstored for leaf in live.leaves(call)]
            reason = join_parts(*unstored) or str(error)
            what = f"call {call.id!r} was done before, and its output was not kept"
            raise CallFailed(f"{what}: {reason}") from error
    doubtful = _doubtful_call(live, key)
    if doubtful is not None:
        name = doubtful.task.tool or doubtful.id
        raise CallFailed(
            f"call {doubtful.root!r} was made before, and whether {name!r} took effect is unknown;"
            " it is not executed again"
        )
    return None


def _doubtful_call(live: LivePlan, key: str) -> TaskEntry | None:
    """Return a call with this key that may have taken effect and must not be repeated, or None."""
    for call in recorded_calls(live, key):
        for leaf in live.leaves(call):
            for part in live.in_doubt(leaf):
                if not allows_repetition(part.task, live.tool_of(part.task), is_named=False):
                    return part
    return None


def has_deadline(session: Session) -> bool:
    """Return whether the current attempt has a deadline, after which it is abandoned."""
    attempt = current_attempt()
    if attempt is None:
        return False
    return session.run.live.entry(attempt.task_id).log.deadline is not None


def shown_questions(
    engine: ReplanningEngine, run_id: str, questions: Sequence[str]
) -> list[dict[str, object]]:
    """Return open questions as frameworks show them: ids, texts, and alternatives."""
    shown: list[dict[str, object]] = []
    for question in engine.pending(run_id):
        if question.id in questions:
            choices = [candidate.alternative.reason for candidate in question.candidates]
            shown.append({"question": question.id, "text": question.text, "choices": choices})
    return shown


def answer_questions(
    engine: ReplanningEngine,
    questions: Iterable[str],
    *,
    approved: bool,
    by: str = "",
    comment: str = "",
) -> None:
    """Pass on a person's answer from the framework to questions not yet answered elsewhere."""
    verdict: QuestionVerdict = "approve" if approved else "reject"
    for question in questions:
        with suppress(StaleAnswer, UnknownQuestion):
            engine.answer(question, verdict, by=by, comment=comment)


def withdraw_questions(engine: ReplanningEngine, run_id: str) -> None:
    """Reject the open questions of a run, because the agent continued without an answer."""
    questions = [each.id for each in engine.pending(run_id)]
    comment = "the agent continued without an answer"
    answer_questions(engine, questions, approved=False, comment=comment)


class _HandedBack(Exception):
    """Raised in place of an output by the function that executes a tool.

    Args:
        text: what happened, for the journal.
        result: the result for the framework; None to raise the cause of this exception instead.
    """

    def __init__(self, text: str, result: object = None) -> None:
        super().__init__(text)
        self.result = result


class ReportedFailure(_HandedBack):
    """A tool reported a failure; the framework gets its own form of it if no alternative is left."""


class TimedOut(ReportedFailure, TimeoutError):
    """A tool exceeded the time limit of its framework, so it may have taken effect."""


class ControlFlow(_HandedBack):
    """A call ended without an output or a failure, such as one that waits for a person."""


ONE_ATTEMPT: Final = Retry(max_attempts=1)
"""Retry policy for tools that the framework retries itself; otherwise attempts would multiply."""


class _Executions:
    """Executions of one call: their results, and the recorded form of each."""

    def __init__(self, execute: Execute, encode: Callable[[Any], object] | None) -> None:
        self.is_empty = True
        self._execute = execute
        self._encode = encode
        self._results: list[tuple[object, object]] = []

    async def execute(self, name: str, arguments: Arguments) -> object:
        """Execute a tool, and return the recorded form of its result."""
        self.is_empty = False
        result = await self._execute(name, arguments)
        if self._encode is None:
            return result
        try:
            recorded = self._encode(result)
        except Exception:  # noqa: BLE001 # of an object of the user
            # The tool has done its work; a result that cannot be encoded must not repeat it.
            recorded = result
        self._results.append((recorded, result))
        return recorded

    def result_of(self, recorded: object, decode: Callable[[Any], object] | None = None) -> Any:
        """Return the result for its recorded form; decode one that another process recorded."""
        for known, result in reversed(self._results):
            if known is recorded:
                return result
        if decode is None:
            return recorded
        return decode(recorded)


async def call_tool(
    engine: ReplanningEngine,
    session: Session,
    tool: str,
    arguments: Arguments,
    execute: Execute,
    *,
    key: str = "",
    once: bool = True,
    passes: tuple[type[BaseException], ...] = (),
    asks: bool = False,
    approved: bool = False,
    approved_questions: Collection[str] = (),
    resumed: bool = False,
    encode: Callable[[Any], object] | None = None,
    decode: Callable[[Any], object] | None = None,
    value: Callable[[Any], object] | None = None,
) -> Any:
    """Make a tool call of an agent; return or raise what the agent's framework expects.

    Exceptions of tools, and results from this process, are passed on unchanged.

    Args:
        engine: the engine of the session.
        session: the session.
        tool: the name of the tool.
        arguments: the arguments of the tool.
        execute: executes this tool and its replacements. It raises what the tool raises,
            `ReportedFailure` if the tool reports a failure in another way, and `ControlFlow` to end
            the call.
        key: identifies the call, also when a later run of the agent repeats it.
        once: as `Session.invoke` takes it.
        passes: as `Session.invoke` takes it.
        asks: whether the framework can put a question about this call to a person, or repeats the
            call later. Otherwise the call fails with its own error, and the question is withdrawn,
            because an answer would execute nothing.
        approved: whether a person has approved the call in the framework. A question that was
            already open is then answered with its first alternative.
        approved_questions: the questions that the approval names, if the framework's approvals can
            name any. An unnamed question is answered as well if it only asks whether to execute the
            call or its stand-in. One about a call that may have taken effect is not, because the
            approval of the call itself may be sent twice.
        resumed: whether to repeat a call that an earlier run of the agent gave up, like an approved
            one.
        encode: returns the recorded form of a result; by default the result itself. If it raises,
            the result is treated as without `encode`.
        decode: restores a result from its recorded form.
        value: extracts the output that `expect` of a tool checks from a result; by default the
            recorded form.

    Raises:
        CallSkipped: the call was skipped; its text is the reason.
        NeedsHuman: a person must answer, and `asks` is true. Make the same call with the same key
            after the answer.
        NotRunning: the session has ended.
        StoreError: the store fails.
        Exception: the tool's own; no alternative is left.
    """
    executions = _Executions(execute, encode)
    value_of = None
    if value is not None:
        to_value = value

        def value_of(recorded: object) -> object:
            return to_value(executions.result_of(recorded))

    seen: set[str] = set()
    if approved:
        seen.update(question.id for question in engine.pending(session.run.id))
    passes = (ControlFlow, *passes)
    while True:
        try:
            output = await session.invoke(
                tool,
                arguments,
                execute=executions.execute,
                key=key,
                once=once,
                passes=passes,
                value_of=value_of,
            )
        except NeedsHuman as error:
            if approved and _answers(engine, session, error, seen, approved_questions):
                seen.difference_update(error.questions)
                by = "the approval of the call"
                answer_questions(engine, error.questions, approved=True, by=by)
                continue
            if asks:
                raise
            # An answer would execute nothing: the agent continues with the error.
            answer_questions(engine, error.questions, approved=False, comment="nobody can be asked")
            own: BaseException = error.own_error
        except _HandedBack as error:
            own = error
        except CallFailed as error:
            # Only a call that an earlier run gave up is repeated, and only once.
            if not executions.is_empty or not once or not (approved or resumed):
                raise
            if isinstance(error, CallSkipped) or isinstance(error.__cause__, NoResult):
                raise
            if _doubtful_call(session.run.live, key) is not None:
                raise
            once = False
            continue
        else:
            return executions.result_of(output, decode)
        # Outside the `except` clauses, so that what they caught does not become its context.
        return hand_back(own)


def _answers(
    engine: ReplanningEngine,
    session: Session,
    error: NeedsHuman,
    seen: Collection[str],
    named: Collection[str],
) -> bool:
    """Return whether the approval of a call answers the questions about it.

    Args:
        engine: the engine of the session.
        session: the session of the call.
        error: the error that names the questions.
        seen: the questions that were open when the call was approved.
        named: as `call_tool` takes `approved_questions`.
    """
    questions = set(error.questions)
    if not questions.issubset(seen):
        return False
    if questions.issubset(named):
        return True
    live = session.run.live
    concerned = live.leaves(live.entry(TaskId(error.task)))
    for question in engine.pending(session.run.id):
        # It may be about other calls as well.
        if question.id in questions:
            concerned += [live.entry(task_id) for task_id in question.holds]
    return not any(live.in_doubt(entry) for entry in concerned)


def hand_back(error: BaseException) -> Any:
    """Return the result that a framework gets in place of an exception, or raise the exception."""
    if not isinstance(error, _HandedBack):
        raise error
    if error.result is None and error.__cause__ is not None:
        raise error.__cause__
    return error.result


class SessionTask:
    """Session held open by its own asyncio task, because any task may close a framework's stream.

    Args:
        opened: the session that `ReplanningEngine.session` returns.
    """

    def __init__(self, opened: AbstractAsyncContextManager[Session]) -> None:
        self._session: Session | None = None
        self._pause_reason = ""
        self._opened = anyio.Event()
        self._left = anyio.Event()
        self._calls = 0
        self._idle = anyio.Event()
        self._task = asyncio.create_task(self._keep_open(opened))

    async def _keep_open(self, opened: AbstractAsyncContextManager[Session]) -> None:
        try:
            async with opened as session:
                self._session = session
                self._opened.set()
                await self._left.wait()
                if self._pause_reason:
                    session.run.pause(self._pause_reason)
        finally:
            self._session = None
            self._opened.set()

    async def session(self) -> Session:
        """Return the session once it is open.

        Raises:
            NotRunning: it has ended.
            RunOwned: another process owns its run.
            StoreError: the store fails.
        """
        if self._session is None:
            await self._opened.wait()
        if self._session is None:
            await self._task
            raise NotRunning("the session has ended")
        return self._session

    def leave(self, pause_reason: str = "") -> asyncio.Task[None]:
        """Tell the session to end, or to pause for the first reason; return the task to wait for."""
        if not self._pause_reason:
            self._pause_reason = pause_reason
        self._left.set()
        return self._task

    async def end(self, pause_reason: str = "") -> None:
        """End the session, or pause it for this reason, unless its event loop was closed.

        Raises:
            StoreError: the store fails.
        """
        if self._task.get_loop().is_closed():
            # The engine has already released the run.
            return
        task = self.leave(pause_reason)
        with anyio.CancelScope(shield=True):
            await asyncio.wait([task])
        # An event loop that shuts down cancels the task first, and may close a stream afterwards.
        if not task.cancelled():
            task.result()

    async def ended(self) -> None:
        """Wait until the session has ended, or was left paused."""
        await asyncio.wait([self._task])

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count a call as active within the block."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._idle.set()

    async def until_idle(self) -> None:
        """Wait until no call is active."""
        while self._calls:
            self._idle = anyio.Event()
            await self._idle.wait()

    def is_of_this_loop(self) -> bool:
        """Return whether the session belongs to the running event loop."""
        return self._task.get_loop() is asyncio.get_running_loop()
