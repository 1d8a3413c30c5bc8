"""The engine: opens plans as runs that repair themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import anyio.abc

from replanning._attempt import TaskContext
from replanning._clock import Environment
from replanning._errors import ReplanningError, UnknownQuestion, UnknownRun
from replanning._evaluation import PlanEvaluator
from replanning._generator import AlternativeGenerator
from replanning._ids import QuestionId, RunId
from replanning._interfaces import AlternativeProvider, Answer, Exporter, HumanGate, Message, Question, RunStore
from replanning._monitor import PlanMonitor
from replanning._opening import Opener, opened
from replanning._plan import JsonObject, Plan, Task
from replanning._plugins import load
from replanning._policy import ReplanPolicy
from replanning._questions import Questions
from replanning._records import Contained, QuestionAnswered, QuestionAsked, RunOpened, Verdict
from replanning._redaction import Redactor
from replanning._replan import PastOutcomes, Replanner
from replanning._run import Codec, PlanRun, RunResult
from replanning._settings import Settings
from replanning.history import MemoryStore

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

Mode = Literal["act", "observe"]
Work = Callable[[Task, TaskContext], Awaitable[object]]
"""Executes one task: returns its output, raises when it fails."""


class _Attachable(Protocol):
    engine: ReplanningEngine | None


OrchestratorT = TypeVar("OrchestratorT", bound=_Attachable)


class ReplanningEngine:
    """Keeps plans alive while they run.

    Args:
        providers: who proposes alternatives: plugin names, or objects with `name` and `propose`.
        settings: thresholds, limits, which triggers are enabled.
        mode: `act`, or `observe` to record what would be done and do nothing.
        gate: asks a person; without one, questions are stored and the run ends as `needs_human`.
        store: keeps journals; in memory when left out.
        monitor: watches runs; has handlers of its own registered through `monitor.on`.
        evaluator: measures progress and health.
        generator: obtains alternatives, instead of one made of `providers`.
        policy: decides, instead of one made of `settings`.
        exporters: are told of everything that happens, after it is on record.
        environment: time, chance and ids.
        tracer_provider: where spans go; the globally configured one when left out.
        redactor: takes secrets out of what enters.
        codec: turns outputs that are not JSON into JSON.
    """

    def __init__(
        self,
        providers: Sequence[AlternativeProvider | str] = ("repair",),
        *,
        settings: Settings | None = None,
        mode: Mode = "act",
        gate: HumanGate | None = None,
        store: RunStore | None = None,
        monitor: PlanMonitor | None = None,
        evaluator: PlanEvaluator | None = None,
        generator: AlternativeGenerator | None = None,
        policy: ReplanPolicy | None = None,
        exporters: Sequence[Exporter] = (),
        environment: Environment | None = None,
        tracer_provider: TracerProvider | None = None,
        redactor: Redactor | None = None,
        codec: Codec | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self.mode: Mode = mode
        self.gate = gate
        self.store = store or MemoryStore()
        self.monitor = monitor or PlanMonitor()
        self.evaluator = evaluator or PlanEvaluator()
        self.generator = generator or AlternativeGenerator([_provider(p) for p in providers])
        self.policy = policy or ReplanPolicy(self.settings)
        self.exporters = tuple(exporters)
        self._opener = Opener(self.store, self.settings, environment or Environment(), redactor or Redactor(), codec)
        self._tracer_provider = tracer_provider
        self._open: dict[RunId, tuple[PlanRun, Questions]] = {}

    def __repr__(self) -> str:
        return f"<ReplanningEngine {self.mode} {self.generator!r} store={type(self.store).__name__}>"

    def attach(self, orchestrator: OrchestratorT) -> OrchestratorT:
        """Let an orchestrator open its runs through this engine; returns the orchestrator."""
        orchestrator.engine = self
        return orchestrator

    def open(self, plan: Plan, *, run_id: str | None = None) -> AbstractAsyncContextManager[PlanRun]:
        """A run of a plan: `async with engine.open(plan) as run:`, then pull and report.

        An exception of the body is raised again, unwrapped. A body that ends before the run has leaves it
        `paused`.

        Raises:
            StoreError: the store does not take the run.
        """
        return self._running(lambda: self._opener.create(plan, run_id, mode=self.mode))

    def resume(self, run_id: str) -> AbstractAsyncContextManager[PlanRun]:
        """The same for a run that was paused, was left, or whose process died.

        Raises:
            UnknownRun: the store has no such run.
            RunOwned: another process is at it.
        """
        return self._running(lambda: self._opener.resume(run_id))

    def fork(self, run_id: str, revision: int, *, new_id: str | None = None) -> RunId:
        """Start a new run from a checkpoint of an old one: the moment a revision had been applied.

        Returns:
            The id of the new run, to be resumed.

        Raises:
            UnknownRun: the store has no such run.
            StoreError: it has no such revision.
        """
        return self._opener.fork(run_id, revision, new_id)

    async def execute(self, plan: Plan, work: Work, *, max_concurrency: int = 8, replanning: bool = True) -> RunResult:
        """Run a plan to its end with one call, on up to `max_concurrency` workers."""
        source = self.open(plan) if replanning else open_run(plan, store=self.store, opener=self._opener)
        async with source as run:
            await drive(run, work, max_concurrency)
        return run.result

    def pending(self, run_id: str | None = None) -> list[Question]:
        """The questions that wait for a person, of one run or of all, also of runs of other processes."""
        found = [q for run, qs in self._open.values() for q in map(qs.question, run._life.ledger.questions.values())]
        known = set(self._open)
        for info in self.store.runs():
            if info.run not in known and (run_id is None or info.run == run_id):
                found += self._stored_questions(info.run)
        return [question for question in found if run_id is None or question.run == run_id]

    def answer(
        self,
        question_id: str,
        verdict: Verdict,
        *,
        by: str = "",
        choice: int = 0,
        changes: Sequence[JsonObject] = (),
        comment: str = "",
    ) -> None:
        """Answer a question, of a run in this process or elsewhere.

        For a run in this process the answer is carried out before this returns; otherwise it is left for the
        run's owner, or for whoever resumes it.

        Raises:
            UnknownQuestion: no such question is open.
            StaleAnswer: what it is about has changed since.
            ChangeRefused: the changes of `modify` do not fit the plan.
        """
        payload: JsonObject = {
            "question": question_id,
            "verdict": verdict,
            "choice": choice,
            "changes": list(changes),
            "comment": comment,
        }
        answer = parse_answer(payload, by)
        run_id = RunId(question_id.rpartition(".q")[0])
        if run_id in self._open:
            self._open[run_id][1].answer(QuestionId(question_id), answer)
            return
        try:
            known = {question.id for question in self._stored_questions(run_id)}
        except UnknownRun:
            raise UnknownQuestion(question_id, f"the store has no run {run_id!r}") from None
        if question_id not in known:
            raise UnknownQuestion(question_id, "it was answered already, or never asked")
        now = self._opener.environment.clock.now()
        self.store.post(run_id, Message("answer", now, by, payload))

    @asynccontextmanager
    async def _running(self, start: Callable[[], PlanRun]) -> AsyncIterator[PlanRun]:
        run = start()
        life = run._life
        questions = Questions(run, self.gate, durable=self.store.durable)
        past = PastOutcomes(run, self._earlier)
        replanner = Replanner(
            run, self.generator, self.policy, questions, observe_only=self.mode == "observe", past=past
        )

        async def replan(group: anyio.abc.TaskGroup) -> None:
            questions.rearm(group)
            replanner.requeue()
            await replanner.run()

        async def deliver(group: anyio.abc.TaskGroup) -> None:
            await self.monitor.deliver(run)
            delivered.set()

        async def close() -> None:
            self.monitor.unwatch(run)
            await delivered.wait()

        def on_message(message: Message) -> None:
            try:
                answer = parse_answer(message.payload, message.by)
                questions.answer(QuestionId(str(message.payload.get("question"))), answer)
            except ReplanningError as error:
                life.observe(Contained("answer", run._redactor.text(str(error))[:2000]))

        delivered = anyio.Event()
        self._open[run.id] = (run, questions)
        if self.settings.enabled:
            life.busy = lambda: replanner.busy
        self.monitor.watch(run, self.settings.triggers if self.settings.enabled else ())
        try:
            async with opened(run, [replan, deliver], on_message=on_message, before_close=close):
                yield run
        finally:
            del self._open[run.id]

    def _earlier(self, *, tool: str | None, capability: str | None) -> Sequence[bool]:
        found = self.store.outcomes(tool=tool, capability=capability)
        return [outcome.succeeded for outcome in reversed(found)]

    def _stored_questions(self, run_id: RunId) -> list[Question]:
        """The open questions of a run that is not open here, read from its journal."""
        asked: dict[QuestionId, tuple[float, QuestionAsked]] = {}
        name = run_id
        for record in self.store.read(run_id):
            body = record.body
            if isinstance(body, QuestionAsked):
                asked[body.question] = (record.at, body)
            elif isinstance(body, QuestionAnswered):
                asked.pop(body.question, None)
            elif isinstance(body, RunOpened):
                name = body.run
        return [
            Question(q.question, name, q.text, (), q.candidates, (), q.holds, at, q.deadline) for at, q in asked.values()
        ]


def parse_answer(payload: Mapping[str, object], by: str) -> Answer:
    """The answer in a message.

    Raises:
        PlanError: a change in it is not valid.
    """
    from replanning._changes import parse_changes

    verdict = payload.get("verdict")
    if verdict not in ("approve", "reject", "modify"):
        raise ReplanningError(f"{verdict!r} is no verdict; expected approve, reject or modify")
    choice = payload.get("choice", 0)
    if not isinstance(choice, int):
        raise ReplanningError(f"choice: expected the number of a candidate, got {choice!r}")
    changes = parse_changes(payload.get("changes") or [])
    return Answer(verdict, by, choice, changes, str(payload.get("comment") or ""))


@asynccontextmanager
async def open_run(
    plan: Plan,
    *,
    store: RunStore | None = None,
    settings: Settings | None = None,
    run_id: str | None = None,
    opener: Opener | None = None,
) -> AsyncIterator[PlanRun]:
    """A run of a plan without an engine: the same retries, deadlines and journal, and no replanning."""
    base = opener or Opener(store or MemoryStore(), settings or Settings())
    quiet = base.settings.model_copy(update={"enabled": False})
    run = Opener(base.store, quiet, base.environment, base.redactor, base.codec).create(plan, run_id, mode="off")
    async with opened(run):
        yield run


async def drive(run: PlanRun, work: Work, workers: int) -> None:
    """Pull and execute tasks on a number of workers until the run ends."""

    async def worker() -> None:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = await work(task, attempt.context)

    if workers == 1:
        await worker()
        return
    async with anyio.create_task_group() as group:
        for _ in range(workers):
            group.start_soon(worker)


def _provider(provider: AlternativeProvider | str) -> AlternativeProvider:
    made: AlternativeProvider = load("providers", provider)() if isinstance(provider, str) else provider
    if not isinstance(made, AlternativeProvider):
        raise TypeError(f"{made!r} is no provider: it needs a `name` and an async `propose(request)`")
    return made
