"""Tracing: what a run, its attempts and its replans look like as spans."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Literal

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import Span, SpanProcessor, TracerProvider

from replanning import (
    Alternative,
    Answer,
    Environment,
    PlanRun,
    ReplanningEngine,
    ReplanRequest,
    Retry,
    Settings,
    Task,
    TaskContext,
    open_run,
)
from replanning.changes import CancelTask, ReplaceTask
from replanning.errors import SettingsError, StoreError
from replanning.journal import AttemptStarted, ErrorContained, MemoryStore, RunOpened, RunResumed, Usage
from replanning.testing import (
    FlakyStore,
    RecordingExporter,
    ScriptedExecutor,
    ScriptedGate,
    ScriptedProvider,
    VirtualClock,
    hangs,
    raises,
    returns,
    virtual_environment,
)
from tests.support.runs import Proposer, again, alternative, bodies, chain, failing, plan
from tests.support.tracing import Node, Spans, recorded

ONCE = Settings(retry=Retry(max_attempts=1))
SECRET = "sk-abcdefghijklmnopqrstuvwxyz"


def attempt(task: str, number: int = 1, outcome: str = "succeeded", **attributes: object) -> dict[str, object]:
    """The attributes of an attempt's span."""
    known = {"task.id": task, "attempt.id": f"{task}#{number}", "attempt.number": number, "attempt.outcome": outcome}
    return known | {key.replace("_", ".", 1): value for key, value in attributes.items()}


def replan(**attributes: object) -> dict[str, object]:
    """The attributes of the span of a replan that took the only alternative."""
    return {
        "gen_ai.operation.name": "plan",
        "gen_ai.agent.name": "replanning",
        "replan.id": "r1",
        "trigger.ids": ("t1",),
        "trigger.kinds": ("task-failed",),
        "candidates": 1,
        "candidates.rejected": 0,
        "confidence": pytest.approx(0.81),
        **{key.replace("_", ".", 1): value for key, value in attributes.items()},
    }


def proposed(name: str = "scripted", count: int = 1) -> dict[str, object]:
    """The attributes of the span of a provider that was asked."""
    return {"provider.name": name, "provider.proposed": count}


async def test_span_tree() -> None:
    """A run is one tree: its attempts, and its replans with what they consist of; a replacement links back."""
    spans = Spans()
    async with VirtualClock() as clock:
        engine = ReplanningEngine(
            [ScriptedProvider(lambda request: returns(again(request), after=3), clock=clock)],
            settings=ONCE,
            environment=virtual_environment(clock=clock),
            tracer_provider=spans.provider,
        )
        script = {"a": returns(after=1), "b": raises(ValueError("broken"), after=2), "b~2": returns(after=4)}
        tasks = (Task(id="a"), Task(id="b", tool="build", depends_on=("a",)), Task(id="c", depends_on=("b",)))
        await engine.execute(plan(*tasks, name="release"), ScriptedExecutor(script, clock=clock))
    assert spans.tree() == (
        Node(
            "replanning.run",
            {
                "run.id": "run-1",
                "run.resumed": False,
                "run.status": "succeeded",
                "run.reason": "every required task is done",
                "plan.name": "release",
                "plan.tasks": 3,
                "revision": 1,
            },
            (
                Node("replanning.attempt", attempt("a"), seconds=1),
                Node(
                    "replanning.attempt",
                    {**attempt("b", 1, "failed", task_tool="build"), "error.type": "ValueError"},
                    error="broken",
                    seconds=2,
                ),
                Node(
                    "plan replanning",
                    replan(
                        confidence=pytest.approx(0.76),
                        decision="execute",
                        decision_rule="confident",
                        decision_by="policy",
                    ),
                    (
                        Node("propose scripted", proposed(), seconds=3),
                        Node("replanning.score", {}),
                        Node("replanning.apply", {"changes": ("replace",), "changes.by": "policy", "revision": 1}),
                    ),
                    links=(("b#1", "caused-by"),),
                    seconds=3,
                ),
                Node(
                    "replanning.attempt",
                    attempt("b~2", task_tool="build", task_root="b"),
                    links=(("b#1", "replaces"),),
                    seconds=4,
                ),
                Node("replanning.attempt", attempt("c")),
            ),
            seconds=10,
        ),
    )
    assert len(spans.traces) == 1


async def test_waiting_for_a_person() -> None:
    """The replan lasts until the person has answered; waiting is a span of its own, and no error."""
    spans = Spans()
    async with VirtualClock() as clock:
        engine = ReplanningEngine(
            [Proposer(again)],
            settings=Settings.model_validate(
                {"alternatives": {"require_approval": True}, "retry": {"max_attempts": 1}}
            ),
            gate=ScriptedGate([returns(Answer("approve", by="ada"), after=60)], clock=clock),
            environment=virtual_environment(clock=clock),
            tracer_provider=spans.provider,
        )
        await engine.execute(chain("a"), failing("a"))
    run = spans.tree()[0]
    assert run.children[1] == Node(
        "plan replanning",
        replan(decision="execute", decision_rule="person-approve", decision_by="person:ada"),
        (
            Node("propose scripted", proposed()),
            Node("replanning.score", {}),
            Node("replanning.ask", {"question.id": "run-1.q1", "question.verdict": "approve"}, seconds=60),
            Node("replanning.apply", {"changes": ("replace",), "changes.by": "person:ada", "revision": 1}),
        ),
        links=(("a#1", "caused-by"),),
        seconds=60,
    )


async def test_reminder_is_an_event() -> None:
    """While a person is waited for, the reminder is an event of that span; the deadline is no error either."""
    spans = Spans()
    async with VirtualClock() as clock:
        settings = {"alternatives": {"require_approval": True}, "approval": {"timeout": 100, "on_timeout": "continue"}}
        engine = ReplanningEngine(
            [Proposer(again)],
            settings=Settings.model_validate(settings),
            gate=ScriptedGate(clock=clock),
            environment=virtual_environment(clock=clock),
            tracer_provider=spans.provider,
        )
        await engine.execute(chain("a"), failing("a"))
    asked = spans.named("replanning.ask")[0]
    assert [(event.name, event.timestamp - recorded(asked).start) for event in asked.events] == [
        ("reminded", 80 * 10**9)
    ]
    assert (asked.attributes["replanning.question.verdict"], asked.status.is_ok) == ("continue", True)


async def test_resumed_run_continues_its_trace() -> None:
    """A resumed run is in the trace that it began in, below its first span, and says where it was resumed from."""
    spans, store = Spans(), MemoryStore()
    async with VirtualClock() as clock:
        engine = ReplanningEngine(
            [], store=store, environment=virtual_environment(clock=clock), tracer_provider=spans.provider
        )
        async with engine.open(chain("a", "b")) as run:
            async for task in run.ready():
                async with run.attempt(task):
                    run.pause()
        with spans.provider.get_tracer("operator").start_as_current_span("command") as command:
            async with engine.resume(run.id) as run:
                async for task in run.ready():
                    async with run.attempt(task):
                        pass
    first, second = sorted(spans.named("replanning.run"), key=lambda span: "a" in span.name, reverse=True)
    assert second.parent is not None
    assert (second.context.trace_id, second.parent.span_id) == (first.context.trace_id, first.context.span_id)
    assert [link.context.span_id for link in second.links] == [command.get_span_context().span_id]
    assert [span.attributes["replanning.run.resumed"] for span in (first, second)] == [False, True]
    parents = {span.attributes["replanning.task.id"]: span.parent.span_id for span in spans.named("replanning.attempt")}
    assert parents == {"a": first.context.span_id, "b": second.context.span_id}


async def test_trace_context_is_journaled() -> None:
    """The first record has the trace context in the form that other programs understand."""
    spans, store = Spans(), MemoryStore()
    engine = ReplanningEngine([], store=store, tracer_provider=spans.provider)
    result = await engine.execute(chain("a"), failing())
    context = spans.named("replanning.run")[0].context
    (opened,) = bodies(store, result.run, RunOpened)
    assert opened.trace == f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


async def test_fork_has_a_trace_of_its_own() -> None:
    """A fork begins a new trace, which it stays in however often it is resumed."""
    spans, store = Spans(), MemoryStore()
    engine = ReplanningEngine([], store=store, tracer_provider=spans.provider)
    result = await engine.execute(chain("a"), failing())
    fork = engine.fork(result.run, 0)
    for _ in range(2):
        async with engine.resume(fork) as run:
            run.pause()
    old, first, second = (span.context for span in spans.named("replanning.run"))
    assert first.trace_id == second.trace_id != old.trace_id


async def test_open_question_is_waited_for_again() -> None:
    """A run that is resumed with an open question has a replan that waits, until the answer comes."""
    spans, store = Spans(), MemoryStore()
    async with VirtualClock() as clock:
        engine = ReplanningEngine(
            [Proposer(again)],
            settings=Settings.model_validate({"alternatives": {"require_approval": True}}),
            store=store,
            environment=virtual_environment(clock=clock),
            tracer_provider=spans.provider,
        )
        result = await engine.execute(chain("a"), failing("a"))
        assert result.status == "needs_human"
        async with engine.resume(result.run) as run:
            engine.answer(result.questions[0], "approve", by="ada")
            async for task in run.ready():
                async with run.attempt(task):
                    pass
    waiting, answered = spans.named("replanning.ask")
    assert (waiting.attributes.get("replanning.question.verdict"), waiting.status.is_ok) == (None, True)
    assert answered.attributes["replanning.question.verdict"] == "approve"
    assert [span.attributes["replanning.replan.id"] for span in spans.named("plan replanning")] == ["r1", "r1"]
    assert len(spans.traces) == 1


async def test_users_spans_nest() -> None:
    """Spans that work makes are children of its attempt, those that a provider makes of its own span."""
    spans = Spans()
    tracer = spans.provider.get_tracer("mine")

    def propose(request: ReplanRequest) -> list[Alternative]:
        with tracer.start_as_current_span("chat model"):
            return again(request)

    async def work(task: Task, context: TaskContext) -> None:
        with tracer.start_as_current_span(f"work on {task.id}"):
            if task.id == "a":
                raise ValueError("broken")

    engine = ReplanningEngine([Proposer(propose)], settings=ONCE, tracer_provider=spans.provider)
    await engine.execute(chain("a"), work)
    (run,) = spans.tree()
    shape = [(node.name, [child.name for child in node.children]) for node in run.children]
    assert shape == [
        ("replanning.attempt", ["work on a"]),
        ("plan replanning", ["propose scripted", "replanning.score", "replanning.apply"]),
        ("replanning.attempt", ["work on a~2"]),
    ]
    assert [child.name for child in run.children[1].children[0].children] == ["chat model"]


async def test_context_is_the_attempts_alone() -> None:
    """Between attempts, and in the body that opened the run, the current span is the caller's."""
    spans = Spans()
    seen: list[str] = []

    def current() -> str:
        return getattr(trace.get_current_span(), "name", "none")

    engine = ReplanningEngine([], tracer_provider=spans.provider)
    with spans.provider.get_tracer("mine").start_as_current_span("request"):
        async with engine.open(chain("a", "b")) as run:
            seen.append(current())
            async for task in run.ready():
                seen.append(current())
                async with run.attempt(task):
                    seen.append(current())
        seen.append(current())
    assert seen == ["request", *["request", "replanning.attempt"] * 2, "request"]
    (request,) = spans.tree()
    assert (request.name, [child.name for child in request.children]) == ("request", ["replanning.run"])


async def test_ways_to_end() -> None:
    """A timeout is an error; an interruption, a cancellation and the end of the run are not."""
    spans = Spans()
    async with VirtualClock() as clock:
        engine = ReplanningEngine(
            [], environment=virtual_environment(clock=clock), settings=ONCE, tracer_provider=spans.provider
        )
        tasks = (Task(id="slow", timeout=5), Task(id="unwanted"), Task(id="cut"), Task(id="last", priority=1))
        async with engine.open(plan(*tasks)) as run, anyio.create_task_group() as group:

            async def work(task: Task) -> None:
                async with run.attempt(task):
                    if task.id == "cut":
                        await clock.sleep(7)
                        group.cancel_scope.cancel()
                    await anyio.sleep_forever()

            async for task in run.ready():
                group.start_soon(work, task)
                if task.id == "last":
                    break
            await clock.sleep(6)
            run.apply([CancelTask(task_id="unwanted", reason="no need")])
            await anyio.sleep_forever()
    (root,) = spans.tree()
    ends = {
        node.attributes["task.id"]: (node.attributes["attempt.outcome"], node.error, node.seconds)
        for node in root.children
        if node.name == "replanning.attempt"
    }
    assert ends == {
        "slow": ("timed-out", "not finished after 5 s", 5),
        "unwanted": ("cancelled", None, 6),
        "cut": ("interrupted", None, 7),
        "last": ("interrupted", None, 7),
    }


async def test_retries_link_back() -> None:
    """A repeated attempt links to the one before it; a replacement of a replacement to what ran last."""
    spans = Spans()
    async with VirtualClock() as clock:
        engine = ReplanningEngine(
            [Proposer(lambda request: again(request) if request.triggers[0].kind == "task-failed" else [])],
            environment=virtual_environment(clock=clock),
            tracer_provider=spans.provider,
        )
        script = {"a": raises(ConnectionError("busy")), "a~2": raises(ValueError("broken"))}
        tasks = (Task(id="a", retry=Retry(max_attempts=2)),)
        await engine.execute(plan(*tasks), ScriptedExecutor(script, clock=clock))
    (run,) = spans.tree()
    links = [(n.attributes["attempt.id"], n.links) for n in run.children if n.name == "replanning.attempt"]
    assert links == [
        ("a#1", ()),
        ("a#2", (("a#1", "retries"),)),
        ("a~2#1", (("a#2", "replaces"),)),
        ("a~3#1", (("a~2#1", "replaces"),)),
    ]


async def test_providers_that_fail() -> None:
    """Each provider asked has its span; one that raises or does not answer in time is an error there alone."""
    spans = Spans()
    async with VirtualClock() as clock:
        providers = [
            ScriptedProvider(lambda request: raises(RuntimeError("no model")), name="broken", clock=clock),
            ScriptedProvider(lambda request: hangs(), name="slow", clock=clock),
            ScriptedProvider(again, name="good", usage=Usage(1, 250, 0.5)),
        ]
        engine = ReplanningEngine(
            providers, environment=virtual_environment(clock=clock), settings=ONCE, tracer_provider=spans.provider
        )
        await engine.execute(chain("a"), failing("a"))
    found = spans.tree()[0].children[1]
    assert found.error is None
    asked = {node.name: node for node in found.children if node.name.startswith("propose")}
    usage = {"usage.calls": 1, "usage.tokens": 250, "usage.money": 0.5}
    assert asked == {
        "propose broken": Node(
            "propose broken", {"provider.name": "broken", "error.type": "RuntimeError"}, error="no model"
        ),
        "propose slow": Node(
            "propose slow",
            {**proposed("slow", 0), "error.type": "timeout"},
            error="it did not answer in time",
            seconds=30,
        ),
        "propose good": Node("propose good", {**proposed("good"), **usage}),
    }


async def test_refused_replan() -> None:
    """A replan that a limit forbids is a span as well, with the rule, and without anybody asked."""
    spans = Spans()
    settings = Settings.model_validate({"limits": {"replans_per_run": 0}, "retry": {"max_attempts": 1}})
    engine = ReplanningEngine([Proposer(again)], settings=settings, tracer_provider=spans.provider)
    await engine.execute(chain("a"), failing("a"))
    first, *_ = spans.named("plan replanning")
    assert (first.attributes["replanning.decision"], first.attributes["replanning.decision.rule"]) == (
        "keep",
        "limit-run",
    )
    assert spans.named("propose scripted") == []


async def test_failed_run_is_an_error() -> None:
    """The span of a run that failed says so, and why; one that was paused is no error."""
    spans = Spans()
    engine = ReplanningEngine([], settings=ONCE, tracer_provider=spans.provider)
    await engine.execute(chain("a"), failing("a"))
    async with engine.open(chain("a")):
        pass
    failed, paused = spans.tree()
    assert (failed.error, failed.attributes["run.status"]) == ("'a' failed (a is broken)", "failed")
    assert (paused.error, paused.attributes["run.status"]) == (None, "paused")


async def test_orchestrator_that_raises() -> None:
    """An exception of the body that opened the run is an error of the run's span."""
    spans = Spans()
    engine = ReplanningEngine([], tracer_provider=spans.provider)
    with pytest.raises(LookupError):
        async with engine.open(chain("a")):
            raise LookupError(f"no such worker, token={SECRET}")
    (run,) = spans.tree()
    assert (run.error, run.attributes["error.type"]) == ("no such worker, token=[redacted]", "LookupError")


async def test_run_that_cannot_be_opened() -> None:
    """A run that the store does not take ends its span as an error."""
    spans, store = Spans(), MemoryStore()
    engine = ReplanningEngine([], store=store, tracer_provider=spans.provider)
    async with engine.open(chain("a"), run_id="taken"):
        with pytest.raises(StoreError):
            async with engine.open(chain("a"), run_id="taken"):
                pass
    refused, _ = spans.named("replanning.run")
    assert (refused.status.is_ok, refused.attributes["error.type"]) == (False, "StoreError")


async def test_failing_store_ends_spans() -> None:
    """A run that its store stops has all its spans ended."""
    spans = Spans()
    async with VirtualClock() as clock:
        store = FlakyStore(MemoryStore(), fails=lambda operation, number: operation == "append" and number > 3)
        engine = ReplanningEngine(
            [], store=store, environment=virtual_environment(clock=clock), tracer_provider=spans.provider
        )
        result = await engine.execute(chain("a", "b"), failing())
    assert result.status == "paused"
    (run,) = spans.tree()
    assert run.attributes["run.status"] == "paused"


async def test_usage_of_attempts_and_run() -> None:
    """What was spent is on the attempt that charged it, summed up on the run."""
    spans = Spans()

    async def work(task: Task, context: TaskContext) -> None:
        context.charge(calls=1, tokens=10)
        context.charge(tokens=5, money=0.25)

    engine = ReplanningEngine([], tracer_provider=spans.provider)
    await engine.execute(chain("a", "b"), work)
    (run,) = spans.tree()

    def usage(node: Node) -> dict[str, object]:
        return {key: value for key, value in node.attributes.items() if key.startswith("usage.")}

    assert usage(run.children[0]) == {"usage.calls": 1, "usage.tokens": 15, "usage.money": 0.25}
    assert usage(run) == {"usage.calls": 2, "usage.tokens": 30, "usage.money": 0.5}


@pytest.mark.parametrize("content", [False, True])
async def test_no_secrets_in_spans(content: bool) -> None:
    """A secret in arguments, outputs, errors, proposals, answers and reasons is on no span, with content or without."""
    spans = Spans()
    said = f"token={SECRET}"

    def propose(request: ReplanRequest) -> list[Alternative]:
        task = Task(id=request.view.unused_id("a"), tool="call", goal=said)
        return [alternative(ReplaceTask(task_id="a", tasks=(task,)), reason=said)]

    async def work(task: Task, context: TaskContext) -> object:
        if task.id == "a":
            raise ValueError(said)
        return {"reply": said, "api_key": "hunter2hunter2"}

    settings = {"alternatives": {"require_approval": True}, "capture_content": content, "retry": {"max_attempts": 1}}
    engine = ReplanningEngine(
        [Proposer(propose), ScriptedProvider([raises(RuntimeError(said))])],
        settings=Settings.model_validate(settings),
        gate=ScriptedGate([Answer("approve", by=said, comment=said)]),
        tracer_provider=spans.provider,
    )
    tasks = (Task(id="a", tool="call", arguments={"password": "hunter2hunter2", "header": said}),)
    result = await engine.execute(plan(*tasks, goal={"objective": said}, name=said, context={"key": said}), work)
    assert result.status == "succeeded"
    text = spans.text()
    assert SECRET not in text
    assert "hunter2" not in text


async def test_content_only_when_asked_for() -> None:
    """Arguments, outputs, objective, proposals, reasons and questions are on spans only with `capture_content`."""
    words = ("an-objective", "an-argument", "an-output", "a-reason")
    texts = []
    for content in (False, True):
        spans = Spans()

        def propose(request: ReplanRequest) -> list[Alternative]:
            copy = Task(id=request.view.unused_id("a"), arguments={"x": "an-argument"})
            return [alternative(ReplaceTask(task_id="a", tasks=(copy,)), reason="a-reason")]

        async def work(task: Task, context: TaskContext) -> object:
            if task.id == "a":
                raise ValueError("broken")
            return "an-output"

        settings = Settings(capture_content=content, retry=Retry(max_attempts=1))
        engine = ReplanningEngine([Proposer(propose)], settings=settings, tracer_provider=spans.provider)
        await engine.execute(plan(Task(id="a"), goal={"objective": "an-objective"}), work)
        texts.append(spans.text())
    without, with_content = texts
    assert [word for word in words if word in without] == []
    assert [word for word in words if word not in with_content] == []


@pytest.mark.parametrize(("size", "kept"), [(9_000, 9_002), (50_000, 10_001), (500_000, len("[500002 characters]"))])
async def test_long_content_is_cut(size: int, kept: int) -> None:
    """However large an output is, what goes onto the span is bounded."""
    spans = Spans()

    async def work(task: Task, context: TaskContext) -> str:
        return "x" * size

    engine = ReplanningEngine([], settings=Settings(capture_content=True), tracer_provider=spans.provider)
    await engine.execute(chain("a"), work)
    assert len(str(spans.named("replanning.attempt")[0].attributes["replanning.task.output"])) == kept


@given(before=st.integers(800, 1_200), after=st.integers(0, 2_500))
def test_no_half_secrets(before: int, after: int) -> None:
    """Wherever a long description is cut, no part of a secret is left."""
    spans = Spans()

    async def work(task: Task, context: TaskContext) -> None:
        raise ValueError(" " + "x" * before + " " + SECRET + " " + "y" * after)

    async def main() -> None:
        await ReplanningEngine([], settings=ONCE, tracer_provider=spans.provider).execute(chain("a"), work)

    anyio.run(main)
    assert SECRET[:6] not in spans.text()


NOTHING_LOADED = """
import sys, anyio
from replanning import Goal, Plan, ReplanningEngine, Task
from replanning.journal import RunOpened

async def work(task, context):
    pass

async def main():
    engine = ReplanningEngine([])
    result = await engine.execute(Plan(goal=Goal(objective="x"), tasks=(Task(id="a"),)), work)
    assert next(iter(engine.store.read(result.run))).body.trace is None
    print(result.status, sorted(name for name in sys.modules if name.startswith(("opentelemetry.sdk", "replanning.telemetry.spans"))))

anyio.run(main)
"""

GLOBAL_PROVIDER = """
import anyio
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from replanning import Goal, Plan, ReplanningEngine, Task

async def work(task, context):
    pass

async def main():
    engine = ReplanningEngine([])
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    await engine.execute(Plan(goal=Goal(objective="x"), tasks=(Task(id="a"),)), work)
    print([span.name for span in memory.get_finished_spans()])

anyio.run(main)
"""


def said(program: str) -> str:
    """What a program prints."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_disabled_costs_nothing() -> None:
    """Where nobody asked for spans, none are made, no trace is journaled, and nothing for it is even loaded."""
    assert said(NOTHING_LOADED) == "succeeded []"


def test_global_provider() -> None:
    """Without a provider of its own the engine uses the global one, also if it was set after the engine was made."""
    assert said(GLOBAL_PROVIDER) == "['replanning.attempt', 'replanning.run']"


async def test_without_an_engine() -> None:
    """A run without an engine has no trace unless there is a global provider."""
    store = MemoryStore()
    async with open_run(chain("a"), store=store) as run:
        assert not trace.get_current_span().get_span_context().is_valid
    (opened,) = bodies(store, run.id, RunOpened)
    assert opened.trace is None


async def test_disabled_engine_traces_the_same() -> None:
    """With replanning switched off, the spans of a plan without trouble are the same."""
    trees = []
    for replanning in (True, False):
        spans = Spans()
        async with VirtualClock() as clock:
            environment = virtual_environment(clock=clock)
            engine = ReplanningEngine([], environment=environment, tracer_provider=spans.provider)
            await engine.execute(chain("a", "b"), failing(), replanning=replanning)
        trees.append(spans.tree())
    assert trees[0] == trees[1]


class Breaking(SpanProcessor):
    """Raises whenever a span begins or ends."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Raise."""
        raise RuntimeError(f"no disk, token={SECRET}")

    def on_end(self, span: object) -> None:
        """Raise."""
        raise RuntimeError("no disk")


async def test_failing_tracing_harms_nobody() -> None:
    """A span processor that raises is contained and recorded once; the run repairs itself as ever."""
    provider = TracerProvider()
    provider.add_span_processor(Breaking())
    store = MemoryStore()
    engine = ReplanningEngine([Proposer(again)], settings=ONCE, store=store, tracer_provider=provider)
    result = await engine.execute(chain("a", "b"), failing("a"))
    assert (result.status, len(result.revisions)) == ("succeeded", 1)
    contained = bodies(store, result.run, ErrorContained)
    assert [(body.where, "token=[redacted]" in body.error) for body in contained] == [("tracing", True)]


def test_one_place_for_spans() -> None:
    """Two places for spans are refused, and both are named; the same one twice is one place."""
    provider = TracerProvider()
    exporter = RecordingExporter(spans=provider)
    ReplanningEngine([], exporters=[exporter], tracer_provider=provider)
    with pytest.raises(SettingsError) as caught:
        ReplanningEngine([], exporters=[exporter], tracer_provider=TracerProvider())
    assert "the argument tracer_provider and the exporter 'recording'" in str(caught.value)
    assert "add a span processor" in str(caught.value)


async def test_exporter_with_a_provider() -> None:
    """Spans go where an exporter wants them."""
    spans = Spans()
    engine = ReplanningEngine([], exporters=[RecordingExporter(spans=spans.provider)])
    await engine.execute(chain("a"), failing())
    assert [span.name for span in spans.finished] == ["replanning.attempt", "replanning.run"]


async def test_resumed_without_tracing_before() -> None:
    """A run that was not traced when it began begins its trace when it is resumed with tracing, and stays in it."""
    spans, store = Spans(), MemoryStore()
    async with ReplanningEngine([], store=store).open(chain("a")) as run:
        run.pause()
    engine = ReplanningEngine([], store=store, tracer_provider=spans.provider)
    for _ in range(2):
        async with engine.resume(run.id) as run:
            run.pause()
    assert len(spans.traces) == 1
    resumed = bodies(store, run.id, RunResumed)
    assert all(body.trace for body in resumed)


async def test_metrics() -> None:
    """Replans, decisions, latency, confidence and attempts are measured, without one series per person or task."""
    reader = InMemoryMetricReader()
    async with VirtualClock() as clock:
        engine = ReplanningEngine(
            [ScriptedProvider(lambda request: returns(again(request), after=3), clock=clock)],
            settings=ONCE,
            environment=virtual_environment(clock=clock),
            meter_provider=MeterProvider([reader]),
        )
        await engine.execute(chain("a", "b"), failing("a"))
        await engine.execute(chain("a"), failing())
    metrics = json.loads(reader.get_metrics_data().to_json())["resource_metrics"][0]["scope_metrics"][0]["metrics"]
    points = {metric["name"]: metric["data"]["data_points"] for metric in metrics}
    counts = {
        name: {tuple(point["attributes"].values()): point.get("value", point.get("sum")) for point in found}
        for name, found in points.items()
    }
    assert counts == {
        "replanning.attempts": {("succeeded",): 3, ("failed",): 1},
        "replanning.replans": {("task-failed",): 1},
        "replanning.decisions": {("execute", "policy"): 1},
        "replanning.replan.duration": {(): 3},
        "replanning.confidence": {("scripted",): pytest.approx(0.81)},
    }


async def finish(run: PlanRun, outcomes: dict[str, str], clock: VirtualClock) -> None:
    """Work on a run: each task does what its outcome says."""

    async def worker() -> None:
        async for task in run.ready():
            async with run.attempt(task):
                kind = outcomes.get(task.id.partition("~")[0], "fine") if "~" not in task.id else "fine"
                if kind == "broken":
                    raise ValueError("broken")
                await clock.sleep(100 if kind == "late" else 1)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(worker)


@given(
    kinds=st.lists(st.sampled_from(["fine", "broken", "late"]), min_size=1, max_size=8),
    edges=st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=12),
    mode=st.sampled_from(["act", "observe"]),
)
def test_every_attempt_has_its_span(
    kinds: list[str], edges: set[tuple[int, int]], mode: Literal["act", "observe"]
) -> None:
    """Whatever happens in a run: one trace, one span for each attempt, and each within its parent's time."""
    spans, store = Spans(), MemoryStore()
    outcomes = {f"t{n}": kind for n, kind in enumerate(kinds)}
    tasks = [
        Task(id=f"t{n}", timeout=10, depends_on=tuple(f"t{a}" for a, b in sorted(edges) if b == n and a < n))
        for n in range(len(kinds))
    ]

    async def main() -> None:
        async with VirtualClock() as clock:
            engine = ReplanningEngine(
                [Proposer(again)],
                store=store,
                mode=mode,
                environment=Environment(clock=clock, new_id=lambda: "run"),
                tracer_provider=spans.provider,
            )
            async with engine.open(plan(*tasks)) as run:
                await finish(run, outcomes, clock)

    anyio.run(main)
    assert len(spans.traces) == 1
    started = sorted(str(body.attempt) for body in bodies(store, "run", AttemptStarted))
    assert (
        sorted(str(span.attributes["replanning.attempt.id"]) for span in spans.named("replanning.attempt")) == started
    )
    by_id = {span.id: span for span in spans.flat}
    (root,) = (span for span in spans.flat if span.parent is None)
    assert root.name == "replanning.run"
    for span in spans.flat:
        if span.parent is not None:
            parent = by_id[span.parent]
            assert parent.start <= span.start <= span.end <= parent.end
