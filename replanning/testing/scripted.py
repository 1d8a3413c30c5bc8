"""Scripted executors, providers and gates, and the steps of their scripts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, cast

import anyio
import anyio.lowlevel
from opentelemetry.trace import TracerProvider

from replanning import Alternative, Answer, Question, ReplanRequest, Task, TaskContext
from replanning.environment import Clock
from replanning.journal import Record, RecordBody, Usage
from replanning.plan import RunId
from replanning.telemetry import Exporter


@dataclass(frozen=True, slots=True)
class ScriptStep:
    """Behaviour of a fake at one call: wait, then return a value or raise an error.

    Made by `returns`, `raises` and `hangs`.

    Attributes:
        value: the value to return.
        error: the error to raise instead.
        after: seconds on the clock before that; infinity to hang.
    """

    value: object = None
    error: BaseException | type[BaseException] | None = None
    after: float = 0.0


def returns(value: object = None, *, after: float = 0.0) -> ScriptStep:
    """Return a step that returns a value after some seconds."""
    return ScriptStep(value, after=after)


def raises(error: BaseException | type[BaseException], *, after: float = 0.0) -> ScriptStep:
    """Return a step that raises an error after some seconds."""
    return ScriptStep(error=error, after=after)


def hangs() -> ScriptStep:
    """Return a step that waits until it is cancelled."""
    return ScriptStep(after=math.inf)


async def perform_step(step: ScriptStep, clock: Clock | None) -> object:
    """Carry out a step.

    Raises:
        ValueError: it takes time, and there is no clock.
    """
    if step.after == math.inf:
        await anyio.sleep_forever()
    if step.after:
        if clock is None:
            raise ValueError(f"{step!r} takes time; give the fake a clock, such as VirtualClock()")
        await clock.sleep(step.after)
    if step.error is not None:
        raise step.error
    return step.value


_EMPTY_SCRIPT: Final[Mapping[str, ScriptStep]] = {}


@dataclass(frozen=True, slots=True)
class ExecutorCall:
    """One call of a `ScriptedExecutor`.

    Attributes:
        task: the task, with resolved arguments.
        context: the context that work receives with its task.
        number: the number of the attempt at the task, from 1.
    """

    task: Task
    context: TaskContext
    number: int

    def __repr__(self) -> str:
        return f"<Call {self.task.id}#{self.number}>"


class ScriptedExecutor:
    """Work that executes tasks from a script and records its calls.

    Pass it to an orchestrator or an engine.

    ::

        work = ScriptedExecutor(
            {
                "fetch": [raises(TransientError("busy")), returns({"path": "a.csv"}, after=3)],
                "publish": raises(RuntimeError("no such host")),
            },
            clock=clock,
        )

    Args:
        script: by the id of a task, else the name of its tool: one step for every attempt, or steps
            for its attempts in order, the last of which repeats; or a function of the call.
        clock: the clock on which steps wait.
        default: the step of tasks that the script does not name.

    Attributes:
        calls: every call, in order.
    """

    def __init__(
        self,
        script: Mapping[str, ScriptStep | Sequence[ScriptStep]]
        | Callable[[ExecutorCall], ScriptStep] = _EMPTY_SCRIPT,
        *,
        clock: Clock | None = None,
        default: ScriptStep = returns(),  # noqa: B008 - a frozen value
    ) -> None:
        self.calls: list[ExecutorCall] = []
        self._script = script
        self._clock = clock
        self._default = default

    def __repr__(self) -> str:
        return f"<ScriptedExecutor calls={len(self.calls)}>"

    async def __call__(self, task: Task, context: TaskContext) -> object:
        """Carry out the step for this attempt."""
        call = ExecutorCall(task, context, int(context.attempt_id.rpartition("#")[2]))
        self.calls.append(call)
        return await perform_step(self._step_of(call), self._clock)

    def _step_of(self, call: ExecutorCall) -> ScriptStep:
        if callable(self._script):
            return self._script(call)
        for key in (call.task.id, call.task.tool):
            if key is None or key not in self._script:
                continue
            steps = self._script[key]
            if isinstance(steps, ScriptStep):
                return steps
            return steps[min(call.number, len(steps)) - 1]
        return self._default

    def calls_of(self, task_id: str) -> list[ExecutorCall]:
        """Return the calls for one task."""
        return [call for call in self.calls if call.task.id == task_id]


Proposal = ScriptStep | Alternative | Sequence[Alternative]
"""Answer of a provider: alternatives, or a step that returns them."""


class ScriptedProvider:
    """Provider that proposes from a script and records its requests.

    ::

        provider = ScriptedProvider([way_on, raises(RuntimeError("no answer")), hangs()])

    Args:
        script: the answers in order, after which it proposes nothing; or a function of the request.
        name: name of the provider.
        clock: the clock on which steps wait.
        estimate: largest usage of one request, reserved from the budget before it.
        usage: actual usage of one request, charged before the answer.

    Attributes:
        requests: every request, in order. Their views are stale once the plan has changed.
    """

    def __init__(
        self,
        script: Sequence[Proposal] | Callable[[ReplanRequest], Proposal] = (),
        *,
        name: str = "scripted",
        clock: Clock | None = None,
        estimate: Usage | None = None,
        usage: Usage | None = None,
    ) -> None:
        self.name = name
        self.requests: list[ReplanRequest] = []
        self._script = script
        self._clock = clock
        self._estimate = estimate
        self._usage = usage

    def __repr__(self) -> str:
        return f"<ScriptedProvider {self.name!r} requests={len(self.requests)}>"

    def estimate(self, request: ReplanRequest) -> Usage:
        """Return the estimate given to the constructor."""
        return self._estimate or Usage()

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Return the next answer of the script."""
        self.requests.append(request)
        number = len(self.requests)  # before a concurrent call adds another
        await anyio.lowlevel.checkpoint()
        if self._usage is not None:
            request.charge(self._usage)
        proposal: Proposal = ()
        if callable(self._script):
            proposal = self._script(request)
        elif number <= len(self._script):
            proposal = self._script[number - 1]
        # The types of a script's values are not checked.
        if isinstance(proposal, ScriptStep):
            proposal = await perform_step(proposal, self._clock)  # type: ignore[assignment]
        if isinstance(proposal, Alternative):
            return [proposal]
        return proposal  # type: ignore[return-value]


class ScriptedGate:
    """Gate that answers from a script and records the questions.

    ::

        gate = ScriptedGate([returns(Answer("approve", by="ada"), after=60)], clock=clock)

    Args:
        script: answers, or steps that return one, in the order of the questions; further questions
            stay open; or a function of the question.
        clock: the clock on which steps wait.

    Attributes:
        questions: every question, in order; a question whose answer was refused is asked again.
        reminders: the question of every reminder, in order.
    """

    def __init__(
        self,
        script: Sequence[ScriptStep | Answer] | Callable[[Question], ScriptStep | Answer] = (),
        *,
        clock: Clock | None = None,
    ) -> None:
        self.questions: list[Question] = []
        self.reminders: list[Question] = []
        self._script = script
        self._clock = clock

    def __repr__(self) -> str:
        return f"<ScriptedGate questions={len(self.questions)} reminders={len(self.reminders)}>"

    async def ask(self, question: Question) -> Answer:
        """Return the next answer of the script."""
        self.questions.append(question)
        number = len(self.questions)  # before a concurrent call adds another
        await anyio.lowlevel.checkpoint()
        step: ScriptStep | Answer = hangs()
        if callable(self._script):
            step = self._script(question)
        elif number <= len(self._script):
            step = self._script[number - 1]
        if isinstance(step, Answer):
            return step
        return cast("Answer", await perform_step(step, self._clock))

    async def remind(self, question: Question) -> None:
        """Record the reminder."""
        self.reminders.append(question)


@dataclass
class RecordingExporter(Exporter):
    """Exporter that keeps records in memory.

    Attributes:
        error: raised by every export after the record was kept, to test that it is contained.
        spans: tracer provider for the spans of runs.
        records: every record with the id of its run, in order.
        closed: True after `aclose`.
    """

    name: ClassVar[str] = "recording"
    error: Exception | None = None
    spans: TracerProvider | None = None
    records: list[tuple[str, Record]] = field(default_factory=list)
    closed: bool = False

    def tracer_provider(self) -> TracerProvider | None:
        """Return the tracer provider given as `spans`."""
        return self.spans

    async def export(self, run: RunId, record: Record) -> None:
        """Keep a record."""
        self.records.append((run, record))
        if self.error is not None:
            raise self.error

    async def aclose(self) -> None:
        """Set `closed`."""
        self.closed = True

    def bodies(self, *kinds: type[RecordBody], run: str | None = None) -> list[RecordBody]:
        """Return the bodies of the records in order, filtered by kinds and by run."""
        bodies: list[RecordBody] = []
        for run_id, record in self.records:
            if run is not None and run_id != run:
                continue
            if not kinds or isinstance(record.body, kinds):
                bodies.append(record.body)
        return bodies
