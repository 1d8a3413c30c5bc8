"""Magentic orchestration of the Microsoft Agent Framework.

`async with replanned(StandardMagenticManager(agent)) as manager:`

Tested with agent-framework-orchestrations 1.4. See docs/integrations/agent_framework.md.

Limitation: the plan in a ledger is text, and the progress ledger does not say which steps are done.
All tasks for steps succeed together, when the manager says that the request is satisfied.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 # the framework runs on asyncio alone
import dataclasses
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any, Final

from replanning.changes import AddTask, RemoveTask
from replanning.engine.engine import ReplanningEngine
from replanning.engine.session import Session
from replanning.errors import NotRunning, StoreError
from replanning.integrations.kit import (
    Arguments,
    Capabilities,
    ControlFlow,
    SessionTask,
    call_tool,
    describe_tools,
    missing_framework,
    tool_fields,
)
from replanning.plan.document import Plan
from replanning.plan.messages import one_line, truncate
from replanning.plan.tasks import Goal, Task

try:
    from agent_framework_orchestrations import MagenticManagerBase, MagenticProgressLedgerItem
except ImportError as error:
    raise missing_framework(
        __name__,
        "Magentic of the Microsoft Agent Framework (tested with agent-framework-orchestrations 1.4)",
        error,
    ) from error

STATE: Final = "replanning"
"""Key of the run in the manager's checkpoints, and of the mark in the metadata of step tasks."""

_STEP: Final = re.compile(r"(\s*)(?:[-*•]|\d+[.)])\s+(.+)")

_SCHEMA: Final = {"properties": {"instruction": {"type": "string"}}, "required": ["instruction"]}

_MAX_TEXT_CHARS: Final = 500


class NoProgress(Exception):
    """The manager says that a round made no progress, or that the team is in a loop."""


@asynccontextmanager
async def replanned(
    manager: MagenticManagerBase,
    engine: ReplanningEngine | None = None,
    *,
    capabilities: Capabilities | None = None,
    approvals: bool = True,
) -> AsyncIterator[Any]:
    """Attach a manager: its plan is that of a session, its rounds are calls of participants.

    The steps of the plan are tasks; when the manager replans, they are replaced. A round without
    progress is a failure of the participant: the engine may have another participant of the same
    capability speak next. The session succeeds when the request is satisfied. It is `paused` if an
    exception leaves the block, and a workflow that is restored from a checkpoint resumes it.

    Args:
        manager: the manager, such as a `StandardMagenticManager`; it makes the plans, and decides
            what the engine does not.
        engine: the engine; by default one with its defaults.
        capabilities: by the name of a participant, its capability, or the fields that
            `replanning.tool` takes.
        approvals: whether a question to a person goes to the gate of the engine. Otherwise the
            manager decides.

    Raises:
        StoreError: the session cannot be ended.
    """
    made = _Manager(manager, engine or ReplanningEngine(), capabilities, approvals)
    try:
        yield made
    except BaseException as error:
        with suppress(Exception):  # the exception of the block is the one to raise
            await made.leave(f"the block raised {type(error).__name__}")
        raise
    await made.leave()


class _Manager(MagenticManagerBase):  # type: ignore[misc] # its types may not be installed
    """Manager that gives its plans and rounds to a session."""

    def __init__(
        self,
        manager: Any,
        engine: ReplanningEngine,
        capabilities: Capabilities | None,
        approvals: bool,
    ) -> None:
        super().__init__(
            max_stall_count=manager.max_stall_count,
            max_reset_count=manager.max_reset_count,
            max_round_count=manager.max_round_count,
        )
        self.task_ledger_full_prompt = manager.task_ledger_full_prompt
        self._manager = manager
        self._engine = engine
        self._capabilities = capabilities
        self._approvals = approvals
        self._task: SessionTask | None = None
        self._round: asyncio.Task[None] | None = None
        # Participants with their instructions; None at the end.
        self._requests = asyncio.Queue[tuple[str, str] | None]()
        self._replies = asyncio.Queue[str | NoProgress]()
        self._saved: dict[str, Any] = {}
        self._gives_up = False
        self._reason = ""
        self._failure: Exception | None = None
        self._ended = False

    async def plan(self, magentic_context: Any) -> Any:
        """Create a plan, whose steps are the tasks of the session."""
        message = await self._manager.plan(magentic_context)
        if self._task is None:
            goal = Goal(objective=truncate(magentic_context.task, _MAX_TEXT_CHARS))
            plan = Plan(goal=goal, tasks=self._steps(message))
            self._saved = {"plan": plan.model_dump(mode="json", exclude_unset=True), "run": None}
            await self._open(magentic_context)
        else:  # of another workflow
            await self._replace_steps(message, magentic_context, "another workflow plans")
        return message

    async def replan(self, magentic_context: Any) -> Any:
        """Create another plan, whose steps replace those that are not done."""
        await self._open(magentic_context)
        message = await self._manager.replan(magentic_context)
        await self._replace_steps(
            message, magentic_context, self._reason or "the manager replanned"
        )
        return message

    async def _replace_steps(self, message: Any, context: Any, reason: str) -> None:
        session = await self._open(context)
        await self._end_round()
        if session is not None:
            left = [RemoveTask(task_id=each.id) for each in self._open_steps(session)]
            session.run.apply(
                [*left, *(AddTask(task=each) for each in self._steps(message, session))],
                reason=reason,
            )

    async def create_progress_ledger(self, magentic_context: Any) -> Any:
        """Create a progress ledger, whose next speaker may be a replacement of the last one."""
        session = await self._open(magentic_context)
        ledger = await self._manager.create_progress_ledger(magentic_context)
        if session is None:
            return ledger
        is_stalled = ledger.is_in_loop.answer or not ledger.is_progress_being_made.answer
        self._reason = (
            ledger.is_in_loop if ledger.is_in_loop.answer else ledger.is_progress_being_made
        ).reason
        request = None
        if self._round is not None:
            text = magentic_context.chat_history[-1].text if magentic_context.chat_history else ""
            self._replies.put_nowait(
                NoProgress(self._reason or "no progress") if is_stalled else text
            )
            request = await self._next_request()
        if ledger.is_request_satisfied.answer:
            await self._end_round()
            for step in self._open_steps(session):
                session.run.succeeded(
                    session.run.started(step.id), ledger.is_request_satisfied.reason
                )
            return ledger
        next_speaker = ledger.next_speaker.answer
        if request is None and next_speaker in magentic_context.participant_descriptions:
            asked = str(ledger.instruction_or_question.answer)
            self._round = asyncio.create_task(self._speak(session, next_speaker, asked))
            request = await self._next_request()
        if request is None:
            return ledger
        speaker, instruction = request
        return dataclasses.replace(
            ledger,
            next_speaker=MagenticProgressLedgerItem(ledger.next_speaker.reason, speaker),
            instruction_or_question=MagenticProgressLedgerItem(
                ledger.instruction_or_question.reason, instruction
            ),
        )

    async def prepare_final_answer(self, magentic_context: Any) -> Any:
        """Prepare the final answer."""
        return await self._manager.prepare_final_answer(magentic_context)

    def on_checkpoint_save(self) -> dict[str, Any]:
        """Return the state of the manager, with the run of its session."""
        return {**self._manager.on_checkpoint_save(), STATE: self._saved}

    def on_checkpoint_restore(self, state: dict[str, Any]) -> None:
        """Restore the state of the manager, whose session is resumed."""
        self._saved = state.get(STATE) or {}
        self._manager.on_checkpoint_restore(state)

    async def _open(self, context: Any) -> Session | None:
        """Return the session; None after the block, or if a restored checkpoint has no run."""
        if self._failure is not None:
            raise self._failure
        if self._ended or not self._saved:
            return None
        try:
            if self._task is None:
                described = context.participant_descriptions.items()
                fields = {
                    name: tool_fields(text, _SCHEMA, kind="participant") for name, text in described
                }
                tools = describe_tools(fields, self._capabilities, noun="participant")
                plan = Plan.model_validate(self._saved["plan"])
                self._task = SessionTask(
                    self._engine.session(
                        plan, tools=tools, run_id=self._saved["run"], gate=self._approvals
                    )
                )
            session = await self._task.session()
        except Exception as error:
            self._failure = error
            raise
        self._saved["run"] = session.run.id
        return session

    async def leave(self, pause_reason: str = "") -> None:
        """End the session, or leave it paused."""
        self._ended = True
        await self._end_round()
        if self._task is not None:
            await self._task.end(pause_reason)

    async def _speak(self, session: Session, speaker: str, instruction: str) -> None:
        """Have a participant speak, or its replacement; the orchestrator sends it the request."""

        async def execute(name: str, arguments: Arguments) -> object:
            self._requests.put_nowait((name, str(arguments["instruction"])))
            try:
                reply = await self._replies.get()
            except asyncio.CancelledError:
                if self._gives_up:
                    raise ControlFlow("the manager gave up the round") from None
                raise
            if isinstance(reply, NoProgress):
                raise reply
            return reply

        try:
            await call_tool(self._engine, session, speaker, {"instruction": instruction}, execute)
        except (NotRunning, StoreError) as error:
            self._failure = error
        except Exception:  # noqa: BLE001, S110 - no alternative is left, and the manager decides
            pass
        finally:
            self._requests.put_nowait(None)

    async def _next_request(self) -> tuple[str, str] | None:
        request = await self._requests.get()
        if request is None:
            self._round = None
        if self._failure is not None:
            raise self._failure
        return request

    async def _end_round(self) -> None:
        """Abandon the current round, whose participant was not asked or has not answered."""
        if self._round is not None:
            self._gives_up = True
            self._round.cancel()
            with suppress(asyncio.CancelledError):
                await self._round
            self._gives_up = False
            self._round = None
            self._requests = asyncio.Queue()
            self._replies = asyncio.Queue()

    def _open_steps(self, session: Session) -> list[Any]:
        return [
            each
            for each in session.run.live
            if STATE in each.task.metadata and each.counts_as_unsatisfied
        ]

    def _steps(self, message: Any, session: Session | None = None) -> list[Task]:
        """Return the steps of a plan: the top-level items of its list, or else its text."""
        plan = getattr(getattr(self._manager, "task_ledger", None), "plan", message)
        items = [match.groups() for line in plan.text.splitlines() if (match := _STEP.match(line))]
        outermost = min((len(indent) for indent, _ in items), default=0)
        names = [text for indent, text in items if len(indent) == outermost]
        if not names:
            names = [plan.text]
        known = () if session is None else [each.id for each in session.run.live]
        free = (f"step-{number}" for number in count(1) if f"step-{number}" not in known)
        names = [one_line(name, _MAX_TEXT_CHARS) for name in names]
        return [
            Task(id=next(free), name=name or "plan", metadata={STATE: "step"}) for name in names
        ]
