"""Tracing: what a run, its attempts and its replans look like as spans."""

import json
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import Span, SpanProcessor, TracerProvider

from replanning import (
    Answer,
    ReplanningEngine,
    Retry,
    Settings,
    Task,
    ToolSpec,
    open_run,
)
from replanning.changes import CancelTask, ReplaceTask
from replanning.journal import (
    ErrorContained,
    MemoryStore,
    Record,
    RunOpened,
    Usage,
)
from replanning.plan import Agreement, Expectation
from replanning.testing import (
    ScriptedExecutor,
    ScriptedGate,
    ScriptedProvider,
    hangs,
    raises,
    returns,
    virtual_environment,
)
from tests.support.runs import (
    again,
    alternative,
    bodies,
    chain,
    failing,
    make_engine,
    perform,
    plan,
)
from tests.support.tracing import Node, Spans, outline, output_of, recorded, tree

ONCE: dict[str, Any] = {"retry": {"max_attempts": 1}}
SECRET = "sk-abcdefghijklmnopqrstuvwxyz"
APPROVED: dict[str, Any] = {"alternatives": {"require_approval": True}}


@pytest.fixture
def spans() -> Spans:
    """Spans in memory."""
    return Spans()


def attempt(
    task: str, number: int = 1, outcome: str = "succeeded", **attributes: object
) -> dict[str, object]:
    """The attributes of an attempt's span."""
    known: dict[str, object] = {"task.id": task, "progress": 0.0}
    known |= {
        "attempt.id": f"{task}#{number}",
        "attempt.number": number,
        "attempt.outcome": outcome,
    }
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


async def test_spans_of_a_list(spans, clock):
    """A list is expanded without a replan, its elements are attempts like others, and progress does not fall."""
    each = Task(id="b", for_each=[1, 2], depends_on=("a",))
    engine = make_engine("repair", clock=clock, tracer_provider=spans.provider)
    script = {"b[0]": returns(after=1), "b[1]": returns(after=2)}
    work = ScriptedExecutor(script, clock=clock, default=returns(after=1))
    await engine.execute(plan(Task(id="a"), each, Task(id="c", depends_on=("b",))), work)
    (root,) = spans.tree()
    assert [outline(node) for node in root.children] == [
        "a#1",
        "replanning.apply",
        "b[0]#1",
        "b[1]#1",
        "c#1",
    ]
    progress = [
        node.attributes["progress"] for node in root.children if "task.id" in node.attributes
    ]
    assert progress == pytest.approx([0, 1 / 3, 1 / 3, 2 / 3])
    assert not any("task.root" in node.attributes for node in root.children)
    applied = root.children[1].attributes
    assert (applied["changes"], applied["changes.by"]) == (("expand",), "for_each")


async def test_span_tree(spans, clock):
    """A run is one tree: its attempts, and its replans with what they consist of; a replacement links back."""
    provider = ScriptedProvider(lambda request: returns(again(request), after=3), clock=clock)
    script = {
        "a": returns(after=1),
        "b": raises(ValueError("broken"), after=2),
        "b~2": returns(after=4),
    }
    tasks = (
        Task(id="a"),
        Task(id="b", tool="build", depends_on=("a",)),
        Task(id="c", depends_on=("b",)),
    )
    engine = make_engine(provider, **ONCE, clock=clock, tracer_provider=spans.provider)
    await engine.execute(plan(*tasks, name="release"), ScriptedExecutor(script, clock=clock))
    third = pytest.approx(1 / 3)
    failed = {
        **attempt("b", 1, "failed", task_tool="build", progress=third),
        "error.type": "ValueError",
    }
    replaced = attempt("b~2", task_tool="build", task_root="b", progress=third)
    decided = replan(
        confidence=pytest.approx(0.76),
        decision="execute",
        decision_rule="confident",
        decision_by="policy",
    )
    decided |= {"progress": third, "health": "stuck", "remaining_seconds": 6.0}
    steps = (
        Node("propose scripted", proposed(), seconds=3),
        Node("replanning.score", {}),
        Node("replanning.apply", {"changes": ("replace",), "changes.by": "policy", "revision": 1}),
    )
    parts = (
        Node("replanning.attempt", attempt("a"), seconds=1),
        Node("replanning.attempt", failed, error="broken", seconds=2),
        Node("plan replanning", decided, steps, links=(("b#1", "caused-by"),), seconds=3),
        Node("replanning.attempt", replaced, links=(("b#1", "replaces"),), seconds=4),
        Node("replanning.attempt", attempt("c", progress=2 / 3)),
    )
    run = {
        "progress": 1.0,
        "health": "good",
        "remaining_seconds": 0.0,
        "run.id": "run-1",
        "run.resumed": False,
        "run.status": "succeeded",
        "run.reason": "every required task is done",
        "plan.name": "release",
        "plan.tasks": 3,
        "revision": 1,
    }
    assert spans.tree() == (Node("replanning.run", run, parts, seconds=10),)
    assert len(spans.traces) == 1


async def test_waiting_for_a_person(spans, clock):
    """The replan lasts until the person has answered; waiting is a span of its own, and no error."""
    gate = ScriptedGate([returns(Answer("approve", by="ada"), after=60)], clock=clock)
    engine = make_engine(
        again, gate=gate, clock=clock, tracer_provider=spans.provider, **ONCE, **APPROVED
    )
    await engine.execute(chain("a"), failing("a"))
    steps = (
        Node("propose scripted", proposed()),
        Node("replanning.score", {}),
        Node(
            "replanning.ask", {"question.id": "run-1.q1", "question.verdict": "approve"}, seconds=60
        ),
        Node(
            "replanning.apply", {"changes": ("replace",), "changes.by": "person:ada", "revision": 1}
        ),
    )
    decided = replan(decision="execute", decision_rule="person-approve", decision_by="person:ada")
    decided |= {"progress": 0.0, "health": "stuck"}
    replanned = Node("plan replanning", decided, steps, links=(("a#1", "caused-by"),), seconds=60)
    assert spans.tree()[0].children[1] == replanned


async def test_reminder_is_an_event(spans, clock):
    """While a person is waited for, the reminder is an event of that span; the deadline is no error either."""
    approval = {"timeout": 100, "on_timeout": "continue"}
    gate = ScriptedGate()
    engine = make_engine(
        again, gate=gate, clock=clock, tracer_provider=spans.provider, approval=approval, **APPROVED
    )
    await engine.execute(chain("a"), failing("a"))
    asked = spans.named("replanning.ask")[0]
    events = [(event.name, event.timestamp - recorded(asked).start) for event in asked.events]
    assert events == [("reminded", 80 * 10**9)]
    assert (asked.attributes["replanning.question.verdict"], asked.status.is_ok) == (
        "continue",
        True,
    )


async def test_resumed_run_continues_its_trace(spans, clock):
    """The span of a resumed run says that it is one, and links to where it was resumed from."""
    engine = make_engine(clock=clock, tracer_provider=spans.provider)
    async with engine.open(chain("a", "b")) as run:
        async for task in run.ready():
            async with run.attempt(task):
                run.pause()
    with spans.provider.get_tracer("operator").start_as_current_span("command") as command:
        async with engine.resume(run.id) as run:
            await perform(run)
    first, second = spans.named("replanning.run")
    assert [link.context.span_id for link in second.links] == [command.get_span_context().span_id]
    assert [span.attributes["replanning.run.resumed"] for span in (first, second)] == [False, True]


REPLANNED: Any = (
    "plan replanning",
    [("propose scripted", ["chat"]), "replanning.score", "replanning.apply"],
)


def after_kill(records: Sequence[Record], kind: str) -> MemoryStore:
    """The journal of a process that was killed after the first record of a kind."""
    killed = next(n for n, record in enumerate(records, 1) if record.body.kind == kind)
    store = MemoryStore()
    lease = store.create(records[0].body.run, "killed", 0, 1)
    for record in records[:killed]:
        store.append(lease, record)
    return store


@pytest.mark.parametrize(
    ("last", "exported", "ran"),
    [
        ("attempt-started", {"inner"}, ["a#2", "b#1"]),
        ("attempt-failed", {"inner", "a#1"}, [REPLANNED, "a~2#1", "b#1"]),
        ("attempt-timed-out", {"inner", "a#1"}, [REPLANNED, "a~2#1", "b#1"]),
        (
            "trigger-fired",
            {"inner", "a#1", "propose scripted", "chat"},
            [(REPLANNED[0], [REPLANNED[1][0], *REPLANNED[1]]), "a~2#1", "b#1"],
        ),
    ],
)
async def test_resumed_after_kills(clock, last, exported, ran):
    """After kills one tree has the spans that were exported, those that were open and lost, and those of the resumed run."""
    killed = Spans()

    def engine_of(spans: Spans, **options: Any) -> ReplanningEngine:
        tracer = spans.provider.get_tracer("mine")

        def propose(request):
            with tracer.start_as_current_span("chat"):
                return again(request)

        return make_engine(propose, **ONCE, clock=clock, tracer_provider=spans.provider, **options)

    async def work(task, context):
        if context.attempt_id == "a#1":
            with killed.provider.get_tracer("mine").start_as_current_span("inner"):
                await clock.sleep(9 if last == "attempt-timed-out" else 1)
            raise ValueError("broken")

    engine = engine_of(killed)
    async with engine.open(
        plan(Task(id="a", timeout=5, idempotent=True), Task(id="b", depends_on=("a",)))
    ) as run:
        await perform(run, work)
    once, twice = Spans(), Spans()
    engine = engine_of(once, store=after_kill(list(engine.store.read(run.id)), last))
    async with engine.resume(run.id):
        pass
    engine = engine_of(twice, store=after_kill(list(engine.store.read(run.id)), "run-resumed"))
    async with engine.resume(run.id) as resumed:
        await perform(resumed, work)

    spans = [
        span
        for span in killed.flat
        if {span.name, span.attributes.get("replanning.attempt.id")} & exported
    ] + twice.flat
    spans += [
        span for span in once.flat if span.error
    ]  # what the second process restored of the first
    assert len({span.id for span in spans}) == len(spans)
    (root,) = tree(spans)
    second = "replanning.run"  # it was killed at once
    assert outline(root) == (
        "replanning.run",
        [("a#1", ["inner"]), second, ("replanning.run", ran)],
    )
    links = {link for node in root.children[2].children for link in node.links}
    assert (
        links == {("a#1", "retries")}
        if last == "attempt-started"
        else {("a#1", "caused-by"), ("a#1", "replaces")}
    )


async def test_trace_context_is_journaled(spans):
    """The first record has the trace context in the usual form; a fork has a trace of its own, and stays in it."""
    engine = make_engine(tracer_provider=spans.provider)
    result = await engine.execute(chain("a"), failing())
    fork = engine.fork(result.run, 0)
    for _ in range(2):
        async with engine.resume(fork):
            pass
    old, first, second = (span.context for span in spans.named("replanning.run"))
    (opened,) = bodies(engine.store, result.run, RunOpened)
    assert opened.trace == f"00-{old.trace_id:032x}-{old.span_id:016x}-{old.trace_flags:02x}"
    assert first.trace_id == second.trace_id != old.trace_id


async def test_open_question_is_waited_for_again(spans, clock):
    """A run that is resumed with an open question has a replan that waits, until the answer comes."""
    engine = make_engine(again, clock=clock, tracer_provider=spans.provider, **APPROVED)
    result = await engine.execute(chain("a"), failing("a"))
    async with engine.resume(result.run) as run:
        engine.answer(result.questions[0], "approve", by="ada")
        await perform(run)
    waiting, answered = spans.named("replanning.ask")
    assert (waiting.attributes.get("replanning.question.verdict"), waiting.status.is_ok) == (
        None,
        True,
    )
    assert answered.attributes["replanning.question.verdict"] == "approve"
    assert [span.attributes["replanning.replan.id"] for span in spans.named("plan replanning")] == [
        "r1",
        "r1",
    ]
    assert len(spans.traces) == 1


async def test_users_spans_nest(spans):
    """Spans that work makes are children of its attempt, those that a provider makes of its own span."""
    tracer = spans.provider.get_tracer("mine")

    def propose(request):
        with tracer.start_as_current_span("chat model"):
            return again(request)

    async def work(task, context):
        with tracer.start_as_current_span(f"work on {task.id}"):
            if task.id == "a":
                raise ValueError("broken")

    await make_engine(propose, **ONCE, tracer_provider=spans.provider).execute(chain("a"), work)
    (run,) = spans.tree()
    assert [(node.name, [child.name for child in node.children]) for node in run.children] == [
        ("replanning.attempt", ["work on a"]),
        ("plan replanning", ["propose scripted", "replanning.score", "replanning.apply"]),
        ("replanning.attempt", ["work on a~2"]),
    ]
    assert [child.name for child in run.children[1].children[0].children] == ["chat model"]


async def test_ways_to_end(spans, clock):
    """A timeout is an error; an interruption, a cancellation and the end of the run are not."""
    engine = make_engine(clock=clock, **ONCE, tracer_provider=spans.provider)
    tasks = (Task(id="slow", timeout=5), Task(id="unwanted"), Task(id="cut"), Task(id="last"))
    async with engine.open(plan(*tasks)) as run, anyio.create_task_group() as group:
        for _ in tasks:
            group.start_soon(perform, run, ScriptedExecutor(default=hangs()))
        await clock.sleep(6)
        run.apply([CancelTask(task_id="unwanted", reason="no need")])
        await clock.sleep(1)
        group.cancel_scope.cancel()
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


async def test_retries_link_back(spans, clock):
    """A repeated attempt links to the one before it; a replacement of a replacement to what ran last."""
    engine = make_engine(
        lambda request: again(request) if request.triggers[0].kind == "task-failed" else [],
        clock=clock,
        tracer_provider=spans.provider,
    )
    script = {"a": raises(ConnectionError("busy")), "a~2": raises(ValueError("broken"))}
    await engine.execute(
        plan(Task(id="a", retry=Retry(max_attempts=2))), ScriptedExecutor(script, clock=clock)
    )
    (run,) = spans.tree()
    links = [
        (n.attributes["attempt.id"], n.links)
        for n in run.children
        if n.name == "replanning.attempt"
    ]
    assert links == [
        ("a#1", ()),
        ("a#2", (("a#1", "retries"),)),
        ("a~2#1", (("a#2", "replaces"),)),
        ("a~2#2", (("a~2#1", "retries"),)),
        ("a~3#1", (("a~2#2", "replaces"),)),
    ]


async def test_providers_that_fail(spans, clock):
    """Each provider asked has its span; one that raises or does not answer in time is an error there alone."""
    providers = [
        ScriptedProvider([raises(RuntimeError("no model"))], name="broken"),
        ScriptedProvider([hangs()], name="slow"),
        ScriptedProvider(again, name="good", usage=Usage(1, 250, 0.5)),
    ]
    engine = make_engine(*providers, clock=clock, **ONCE, tracer_provider=spans.provider)
    await engine.execute(chain("a"), failing("a"))
    found = spans.tree()[0].children[1]
    broken: dict[str, object] = {"provider.name": "broken", "error.type": "RuntimeError"}
    slow = {**proposed("slow", 0), "error.type": "timeout"}
    usage = {"usage.calls": 1, "usage.tokens": 250, "usage.money": 0.5}
    assert found.error is None
    assert {node.name: node for node in found.children if node.name.startswith("propose")} == {
        "propose broken": Node("propose broken", broken, error="no model"),
        "propose slow": Node("propose slow", slow, error="it did not answer in time", seconds=30),
        "propose good": Node("propose good", {**proposed("good"), **usage}),
    }


async def test_refused_replan(spans):
    """A replan that a limit forbids is a span as well, with the rule, and without anybody asked."""
    engine = make_engine(
        again, limits={"replans_per_run": 0}, **ONCE, tracer_provider=spans.provider
    )
    await engine.execute(chain("a"), failing("a"))
    decided = spans.named("plan replanning")[0].attributes
    assert (decided["replanning.decision"], decided["replanning.decision.rule"]) == (
        "keep",
        "limit-run",
    )
    assert spans.named("propose scripted") == []


async def test_failed_run_is_an_error(spans):
    """The span of a run that failed says so, and why; one that was paused is no error."""
    engine = make_engine(**ONCE, tracer_provider=spans.provider)
    await engine.execute(chain("a"), failing("a"))
    async with engine.open(chain("a")):
        pass
    failed, paused = spans.tree()
    assert (failed.error, failed.attributes["run.status"]) == ("'a' failed (a is broken)", "failed")
    assert (paused.error, paused.attributes["run.status"]) == (None, "paused")


async def test_usage_of_attempts_and_run(spans):
    """What was spent is on the attempt that charged it, summed up on the run."""

    async def work(task, context):
        context.charge(calls=1, tokens=10)
        context.charge(tokens=5, money=0.25)

    await make_engine(tracer_provider=spans.provider).execute(chain("a", "b"), work)
    (run,) = spans.tree()
    spent = [
        {k: v for k, v in node.attributes.items() if k.startswith("usage.")}
        for node in (run.children[0], run)
    ]
    assert spent == [
        {"usage.calls": 1, "usage.tokens": 15, "usage.money": 0.25},
        {"usage.calls": 2, "usage.tokens": 30, "usage.money": 0.5},
    ]


@pytest.mark.parametrize("content", [False, True])
async def test_content_only_when_asked_for(content, spans):
    """Arguments, outputs, objective, proposals, reasons and questions are on spans only with `capture_content`."""
    words = ("an-objective", "an-argument", "an-output", "a-reason")
    copy = Task(id="a~2", arguments={"x": "an-argument"})
    instead = alternative(ReplaceTask(task_id="a", tasks=(copy,)), reason="a-reason")
    engine = make_engine(
        lambda request: [instead], capture_content=content, **ONCE, tracer_provider=spans.provider
    )
    work = ScriptedExecutor({"a": raises(ValueError("broken"))}, default=returns("an-output"))
    await engine.execute(plan(Task(id="a"), goal={"objective": "an-objective"}), work)
    assert [word for word in words if word in spans.text()] == (list(words) if content else [])


@pytest.mark.parametrize(
    ("size", "kept"), [(9_000, 9_002), (50_000, 10_001), (500_000, len("[500002 characters]"))]
)
async def test_long_content_is_cut(size, kept, spans):
    """However large an output is, what goes onto the span is bounded."""
    engine = make_engine(capture_content=True, tracer_provider=spans.provider)
    await engine.execute(chain("a"), ScriptedExecutor(default=returns("x" * size)))
    assert (
        len(str(spans.named("replanning.attempt")[0].attributes["replanning.task.output"])) == kept
    )


NOTHING_LOADED = """
import sys, anyio
from replanning import ReplanningEngine
from tests.support.runs import chain, failing

engine = ReplanningEngine([])
result = anyio.run(engine.execute, chain("a"), failing())
assert next(iter(engine.store.read(result.run))).body.trace is None
heavy = ("opentelemetry.sdk", "replanning.telemetry.spans")
print(result.status, sorted(name for name in sys.modules if name.startswith(heavy)))
"""

GLOBAL_PROVIDER = """
import anyio
from opentelemetry import trace
from replanning import ReplanningEngine
from tests.support.runs import chain, failing
from tests.support.tracing import Spans

engine, spans = ReplanningEngine([]), Spans()
trace.set_tracer_provider(spans.provider)
anyio.run(engine.execute, chain("a"), failing())
print([span.name for span in spans.finished])
"""


def test_disabled_costs_nothing():
    """Where nobody asked for spans, none are made, no trace is journaled, and nothing for it is even loaded."""
    assert output_of(NOTHING_LOADED) == "succeeded []\n"


def test_global_provider():
    """Without a provider of its own the engine uses the global one, also if it was set after the engine was made."""
    assert output_of(GLOBAL_PROVIDER) == "['replanning.attempt', 'replanning.run']\n"


async def test_without_an_engine():
    """A run without an engine has no trace unless there is a global provider."""
    store = MemoryStore()
    async with open_run(chain("a"), store=store) as run:
        assert not trace.get_current_span().get_span_context().is_valid
    (opened,) = bodies(store, run.id, RunOpened)
    assert opened.trace is None


class Breaking(SpanProcessor):
    """Raises whenever a span begins or ends."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Raise."""
        raise RuntimeError(f"no disk, token={SECRET}")

    def on_end(self, span: object) -> None:
        """Raise."""
        raise RuntimeError("no disk")


async def test_failing_tracing_harms_nobody():
    """A span processor that raises is contained and recorded once; the run repairs itself as ever."""
    provider = TracerProvider()
    provider.add_span_processor(Breaking())
    engine = make_engine(again, **ONCE, tracer_provider=provider)
    result = await engine.execute(chain("a", "b"), failing("a"))
    assert (result.status, len(result.revisions)) == ("succeeded", 1)
    (contained,) = bodies(engine.store, result.run, ErrorContained)
    assert (contained.where, "token=[redacted]" in contained.error) == ("tracing", True)


async def test_metrics(clock):
    """Replans, decisions, latency, confidence and attempts are measured, without one series per person or task."""
    reader = InMemoryMetricReader()
    engine = ReplanningEngine(
        [ScriptedProvider(lambda request: returns(again(request), after=3), clock=clock)],
        settings=Settings.model_validate(ONCE),
        environment=virtual_environment(clock=clock),
        meter_provider=MeterProvider([reader]),
    )
    await engine.execute(chain("a", "b"), failing("a"))
    await engine.execute(chain("a"), failing())
    metrics = json.loads(reader.get_metrics_data().to_json())["resource_metrics"][0][
        "scope_metrics"
    ][0]["metrics"]
    counts = {
        metric["name"]: {
            tuple(point["attributes"].values()): point.get("value", point.get("sum"))
            for point in metric["data"]["data_points"]
        }
        for metric in metrics
    }
    assert counts == {
        "replanning.attempts": {("succeeded",): 3, ("failed",): 1},
        "replanning.replans": {("task-failed",): 1},
        "replanning.decisions": {("execute", "policy"): 1},
        "replanning.replan.duration": {(): 3},
        "replanning.confidence": {("scripted",): pytest.approx(0.81)},
    }


async def test_second_tool(clock, spans):
    """The span of an attempt says which second tool was called, and what it calls is within that span."""
    expect = Expectation(agrees_with=Agreement(tool="u"))
    tools = (
        ToolSpec(name="t", capability="c", effect="none", expect=expect),
        ToolSpec(name="u", capability="c", effect="none"),
    )
    engine = make_engine(clock=clock, tracer_provider=spans.provider)
    result = await engine.execute(plan(Task(id="a", tool="t"), tools=tools), ScriptedExecutor())
    assert result.ok
    (attempt,) = [span for span in spans.finished if span.name == "replanning.attempt"]
    (asked,) = attempt.events
    assert (asked.name, dict(asked.attributes or {})) == (
        "replanning.asked",
        {"replanning.task.tool": "u"},
    )
