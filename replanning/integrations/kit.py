"""Kit for integrations of agent frameworks: tools, runs of threads, sessions, calls, questions.

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
"""Key in the metadata of a framework for what is ours: the fields of a tool, or open questions."""

UNFINISHED: Final = ("running", "paused", "needs_human")
"""Statuses of runs that can be resumed."""


def missing_framework(module: str, needs: str, error: Exception) -> ImportError:
    """Return the error of a module whose framework is missing or incompatible.

    Args:
        module: the module, named like the extra of `replanning` that installs the framework.
        needs: the framework, and the version that was tested.
        error: the error of the import.
    """
    extra = module.rpartition(".")[2].replace("_", "-")
    return ImportError(f'{module} needs {needs}: pip install "replanning[{extra}]" ({error})')


def tool_fields(
    description: str | None, schema: Mapping[str, Any], *, stated: object = None, **fields: object
) -> dict[str, object]:
    """Return the fields of the description of a tool.

    Args:
        description: what the tool does.
        schema: the JSON schema of its arguments.
        stated: the statements of the tool itself, such as in its metadata: its capability, or
            fields that override the others.
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
    """Return the fields of a tool that the annotations of its MCP server state.

    Args:
        annotations: an object of the MCP SDK, or a mapping with the names of the protocol; None for
            other tools.
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
    """Return the tools of an agent for a session, whose calls state how to execute them.

    Args:
        tools: the fields of their descriptions by name, see `tool_fields`.
        capabilities: their capabilities or further fields by name; they override those of the
            descriptions.
        noun: the noun for what capabilities may name.
        absent: names of tools that exist and are not described here; capabilities may name them.

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
    """Return a problem for each name that is not known."""
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
        resumes: false to begin a new run in any case.
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
    """Yield the runs of a thread, the newest first."""
    for run in engine.store.runs():
        if run.run.rpartition(".")[0] == prefix:
            yield run


def find_run(engine: ReplanningEngine, run_id: str) -> RunInfo | None:
    """Return a run in the store of an engine; None if the store does not have it."""
    for run in engine.store.runs():
        if run.run == run_id:
            return run
    return None


def is_unfinished(engine: ReplanningEngine, run_id: str) -> bool:
    """Return whether a run can be begun or resumed: it is not known yet, or has not ended."""
    known = find_run(engine, run_id)
    return known is None or known.status in UNFINISHED


def named_questions(shown: object) -> list[str]:
    """Return the ids of questions, from what a framework brings back of `shown_questions`."""
    questions: list[str] = []
    if isinstance(shown, list):
        for each in shown:
            if isinstance(each, Mapping):
                questions.append(str(each.get("question")))
    return questions


def joined_texts(parts: Iterable[Any]) -> str:
    """Return the texts among the parts of a content, such as of a result of MCP."""
    texts: list[str] = []
    for part in parts:
        if part.type == "text":
            texts.append(part.text)
    return "\n".join(texts)


def earlier_output(engine: ReplanningEngine, run_id: str, key: str) -> tuple[object] | None:
    """Return the output of a call that an earlier run of the thread has finished, or None.

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
    """Return the output of a call that a run has finished; None if the call can be made.

    Args:
        engine: the engine, whose store has the run.
        run_id: the run.
        key: the key of the call.

    Raises:
        CallFailed: the call was done, but its output was not recorded; or it may have taken effect,
            and must not be repeated.
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
    """Return a call of a key that may have taken effect and must not be repeated, or None."""
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
    """Answer questions as a person did in the framework, unless they were answered elsewhere."""
    verdict: QuestionVerdict = "approve" if approved else "reject"
    for question in questions:
        with suppress(StaleAnswer, UnknownQuestion):
            engine.answer(question, verdict, by=by, comment=comment)


def withdraw_questions(engine: ReplanningEngine, run_id: str) -> None:
    """Reject open questions put as requests for approval: the agent continued without them."""
    questions = [each.id for each in engine.pending(run_id)]
    answer_questions(engine, questions, approved=False, comment="the agent went on without it")


class _HandedBack(Exception):
    """Replacement of an output, raised by the function that executes a tool.

    Args:
        said: what happened, for the journal.
        result: the result for the framework; None for the exception that this one was raised from.
    """

    def __init__(self, said: str, result: object = None) -> None:
        super().__init__(said)
        self.result = result


class ReportedFailure(_HandedBack):
    """A tool failed; its framework gets its own form of a failure if no alternative is left."""


class TimedOut(ReportedFailure, TimeoutError):
    """A tool exceeded the time limit of its framework, so it may have taken effect."""


class ControlFlow(_HandedBack):
    """A call ended without an output or a failure, such as one that waits for a person."""


ONE_ATTEMPT: Final = Retry(max_attempts=1)
"""Retries of a tool that its framework repeats by itself: the attempts of both would multiply."""


class _Executions:
    """Executions of one call: their results, each with what the journal records of it."""

    def __init__(self, execute: Execute, encode: Callable[[Any], object] | None) -> None:
        self.is_empty = True
        self._execute = execute
        self._encode = encode
        self._results: list[tuple[object, object]] = []

    async def execute(self, name: str, arguments: Arguments) -> object:
        """Execute a tool, and return what the journal records of its result."""
        self.is_empty = False
        result = await self._execute(name, arguments)
        if self._encode is None:
            return result
        try:
            recorded = self._encode(result)
        except Exception:  # noqa: BLE001 # of an object of the user
            # The tool has done its work, which must not be done again because of its result.
            recorded = result
        self._results.append((recorded, result))
        return recorded

    def result_of(self, recorded: object, decode: Callable[[Any], object] | None = None) -> Any:
        """Return the result behind its record; that of another process is decoded."""
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
    """Make a call of an agent, and return or raise what its framework expects of it.

    The exception of a tool arrives unchanged; so does the result of a tool that was executed in
    this process.

    Args:
        engine: the engine of the session.
        session: the session.
        tool: the name of the tool.
        arguments: the arguments of the tool.
        execute: executes this tool, and any tool that replaces it. It raises what the tool raises,
            `ReportedFailure` if the tool reports a failure otherwise, and `ControlFlow` to end the
            call.
        key: identifies the call, also when a later run of the agent makes it again.
        once: as `Session.invoke` takes it.
        passes: as `Session.invoke` takes it.
        asks: whether the framework can put a question about this call to a person, or makes the
            call again later. Otherwise the call fails with its own error, and the question is
            withdrawn, because an answer would execute nothing.
        approved: whether a person has approved the call in the framework. Then the first
            alternative is chosen for a question that was open before.
        approved_questions: the questions that the approval names, in a framework whose approvals
            can. An unnamed question whether the call, or a tool that stands in for it, may be
            executed is answered as well. One about a call that may have taken effect is not,
            because the approval of the call itself may be sent twice.
        resumed: whether a call that an earlier run of the agent has given up is made anew, like an
            approved one.
        encode: returns what the journal records of a result; by default the result itself. A result
            for which it raises is not recorded, and returned like any other.
        decode: returns the result from its record.
        value: returns the output in a result, which `expect` of a tool is about; by default the
            record.

    Raises:
        CallSkipped: the call was skipped; its text is the reason.
        NeedsHuman: a person must answer, and `asks` is true. Then the same call is made again with
            the same key.
        NotRunning: the session has ended.
        StoreError: the store fails.
        Exception: of the tool; no alternative is left.
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
            # Only a call that an earlier run has given up is made anew, and only once.
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
        # Not while the other one is handled, which would become its context.
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
    """Session in an asyncio task of its own, for frameworks where any task may close a stream.

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
        """Let the session end, or pause it for the first reason; return the task that ends it."""
        if not self._pause_reason:
            self._pause_reason = pause_reason
        self._left.set()
        return self._task

    async def end(self, pause_reason: str = "") -> None:
        """End the session, or pause it for this reason; nothing if its event loop was closed.

        Raises:
            StoreError: the store fails.
        """
        if self._task.get_loop().is_closed():
            # The engine has let go of its run.
            return
        task = self.leave(pause_reason)
        with anyio.CancelScope(shield=True):
            await asyncio.wait([task])
        # Where the event loop ends, it has cancelled the task, and a stream may be closed after
        # that.
        if not task.cancelled():
            task.result()

    async def ended(self) -> None:
        """Wait until the session has ended, or was left paused."""
        await asyncio.wait([self._task])

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count a call as under way within the block."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._idle.set()

    async def until_idle(self) -> None:
        """Wait until no call is under way."""
        while self._calls:
            self._idle = anyio.Event()
            await self._idle.wait()

    def is_of_this_loop(self) -> bool:
        """Return whether the session is open in the event loop that runs here."""
        return self._task.get_loop() is asyncio.get_running_loop()
