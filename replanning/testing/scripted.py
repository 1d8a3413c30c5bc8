"""What a fake does when it is called: the small language in which executors, providers and gates are scripted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

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
    """What a fake does at one call: wait, then return a value or raise an error.

    Made by `returns`, `raises` and `hangs`.

    Attributes:
        value: what is returned.
        error: what is raised instead.
        after: seconds on the clock before that; infinity for never.
    """

    value: object = None
    error: BaseException | type[BaseException] | None = None
    after: float = 0.0

    def __post_init__(self) -> None:
        if not self.after >= 0:
            raise ValueError(f"after is a number of seconds, 0 or more; got {self.after!r}")


def returns(value: object = None, *, after: float = 0.0) -> ScriptStep:
    """Return a value, after so many seconds."""
    return ScriptStep(value, after=after)


def raises(error: BaseException | type[BaseException], *, after: float = 0.0) -> ScriptStep:
    """Raise an error, after so many seconds."""
    return ScriptStep(error=error, after=after)


def hangs() -> ScriptStep:
    """Never come back, until cancelled."""
    return ScriptStep(after=math.inf)


async def perform_step(step: ScriptStep, clock: Clock | None) -> object:
    """Do what a step says.

    Raises:
        ValueError: it waits, and there is no clock to wait on.
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
        task: what is to be done, its arguments resolved.
        context: what work gets beside its task.
        number: which attempt at the task this is, from 1.
    """

    task: Task
    context: TaskContext
    number: int

    def __repr__(self) -> str:
        return f"<Call {self.task.id}#{self.number}>"


class ScriptedExecutor:
    """Executes tasks as a script says, and remembers its calls; give it to an orchestrator as its work.

    ::

        work = ScriptedExecutor(
            {
                "fetch": [raises(TransientError("busy")), returns({"path": "a.csv"}, after=3)],
                "publish": raises(RuntimeError("no such host")),
            },
            clock=clock,
        )

    Args:
        script: for a task's id, or else for the name of its tool, the step of every attempt or those of its
            attempts in order, of which the last one repeats; or a function of the call.
        clock: on which steps wait.
        default: what tasks do that the script does not name.

    Attributes:
        calls: every call, in order.
    """

    def __init__(
        self,
        script: Mapping[str, ScriptStep | Sequence[ScriptStep]] | Callable[[ExecutorCall], ScriptStep] = _EMPTY_SCRIPT,
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
        """Do what the script says for this attempt."""
        call = ExecutorCall(task, context, int(context.attempt_id.rpartition("#")[2]))
        self.calls.append(call)
        return await perform_step(self._step(call), self._clock)

    def calls_of(self, task_id: str) -> list[ExecutorCall]:
        """The calls for one task."""
        return [call for call in self.calls if call.task.id == task_id]

    def _step(self, call: ExecutorCall) -> ScriptStep:
        if callable(self._script):
            return self._script(call)
        for key in (call.task.id, call.task.tool):
            if key is not None and key in self._script:
                steps = self._script[key]
                return steps if isinstance(steps, ScriptStep) else steps[min(call.number, len(steps)) - 1]
        return self._default


Proposal = ScriptStep | Alternative | Sequence[Alternative]
"""What a provider answers: alternatives, or a step that returns them."""


class ScriptedProvider:
    """Proposes what a script says, and remembers what it was asked.

    ::

        provider = ScriptedProvider([way_on, raises(RuntimeError("no answer")), hangs()])

    Args:
        script: the answers in order, after which it proposes nothing; or a function of the request.
        name: how it is called.
        clock: on which steps wait.
        estimate: what one request uses at most, reserved from the budget before it is asked.
        usage: what one request really uses, charged before it answers.

    Attributes:
        requests: every request, in order. Their views are stale once the plan has moved on.
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
        """What a request uses at most."""
        return self._estimate or Usage()

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Answer as the script says."""
        self.requests.append(request)
        number = len(self.requests)  # before anything else is asked meanwhile
        await anyio.lowlevel.checkpoint()
        if self._usage is not None:
            request.charge(self._usage)
        proposal = self._proposal(request, number)
        if isinstance(proposal, ScriptStep):
            proposal = await perform_step(proposal, self._clock)  # type: ignore[assignment]  # what a script returns is its own business
        return [proposal] if isinstance(proposal, Alternative) else proposal  # type: ignore[return-value]  # likewise

    def _proposal(self, request: ReplanRequest, number: int) -> Proposal:
        if callable(self._script):
            return self._script(request)
        return self._script[number - 1] if number <= len(self._script) else ()


class ScriptedGate:
    """Answers questions as a script says, and remembers them.

    ::

        gate = ScriptedGate([returns(Answer("approve", by="ada"), after=60)], clock=clock)

    Args:
        script: answers, or steps that return one, in the order of the questions, after which nobody answers;
            or a function of the question.
        clock: on which steps wait.

    Attributes:
        questions: what was asked, in order; a question whose answer was refused is asked again.
        reminders: the questions it was reminded of.
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
        """Answer as the script says."""
        self.questions.append(question)
        number = len(self.questions)  # before anything else is asked meanwhile
        await anyio.lowlevel.checkpoint()
        step = self._step(question, number)
        answer = step if isinstance(step, Answer) else await perform_step(step, self._clock)
        if not isinstance(answer, Answer):
            raise TypeError(f"the script of the gate gave {answer!r}; it takes an Answer, or a step that returns one")
        return answer

    async def remind(self, question: Question) -> None:
        """Remember the reminder."""
        self.reminders.append(question)

    def _step(self, question: Question, number: int) -> ScriptStep | Answer:
        if callable(self._script):
            return self._script(question)
        return self._script[number - 1] if number <= len(self._script) else hangs()


@dataclass
class RecordingExporter(Exporter):
    """Keeps in memory what it is told to export.

    Attributes:
        error: raised at every export after the record was kept, to see that it is contained.
        spans: where spans go, if anywhere.
        records: every record with the id of its run, in order.
        closed: whether it was closed.
    """

    name: ClassVar[str] = "recording"
    error: Exception | None = None
    spans: TracerProvider | None = None
    records: list[tuple[str, Record]] = field(default_factory=list)
    closed: bool = False

    def tracer_provider(self) -> TracerProvider | None:
        """Where spans go."""
        return self.spans

    async def export(self, run: RunId, record: Record) -> None:
        """Keep a record."""
        self.records.append((run, record))
        if self.error is not None:
            raise self.error

    async def aclose(self) -> None:
        """Remember that it was closed."""
        self.closed = True

    def bodies(self, *kinds: type[RecordBody], run: str | None = None) -> list[RecordBody]:
        """The bodies of the records, in order: of these kinds, of one run, where that is said."""
        return [
            record.body
            for run_id, record in self.records
            if (run is None or run_id == run) and (not kinds or isinstance(record.body, kinds))
        ]
