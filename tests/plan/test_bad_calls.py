"""What a program does wrong is told to it at once, by the call that is wrong, and not by tasks that fail later."""

# mypy: disable-error-code="arg-type, call-arg, list-item, type-var"

import functools
import inspect
import json
import re
from collections.abc import Awaitable
from contextlib import closing
from datetime import datetime
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from replanning import (
    Alternative,
    AlternativeGenerator,
    Budget,
    CallbackGate,
    Environment,
    Goal,
    Plan,
    PlanMonitor,
    ReplanningEngine,
    Settings,
    StoreGate,
    Task,
    ToolSpec,
    open_run,
)
from replanning.changes import AbortRun, CancelTask, ModifyTask, ReorderTasks
from replanning.errors import (
    ChangeRejected,
    NotRunning,
    PlanError,
    PluginError,
    RecordNotSerializable,
    SettingsError,
    StoreError,
    UnknownAttempt,
    UnknownTask,
)
from replanning.history import ReplanHistory
from replanning.journal import (
    AttemptFailed,
    ErrorContained,
    JsonlStore,
    MemoryStore,
    SqliteStore,
    TaskFailed,
    Usage,
    open_store,
)
from replanning.judging import JudgedWork, RuleJudge
from replanning.llm import LLMOptions, Price
from replanning.orchestrators import SequentialOrchestrator, SwarmOrchestrator
from replanning.planning import PlanningCoordinator
from replanning.testing import RecordingExporter, ScriptedLLM, VirtualClock
from replanning.tools import ToolExecutor
from tests.support.runs import chain


async def work(task, context):
    """What work should be."""
    return task.id


def blocking(task, context):
    """What it should not."""
    return task.id


async def failing(task, context):
    """Work that fails."""
    raise ValueError("no")


def promising(task, context) -> Awaitable[object]:
    """A function that says it hands on something to be awaited."""
    return work(task, context)


class Desk:
    """Work that is an object."""

    async def __call__(self, task, context):
        return task.id

    async def do(self, task, context):
        return task.id

    def block(self, task, context):
        return task.id


@functools.wraps(work)
def wrapped(*arguments):
    """A function around one that is async."""
    return work(*arguments)


class Sync:
    """Plugins whose methods are not async."""

    name = "sync"

    def propose(self, request):
        return []

    def ask(self, question):
        return None

    def remind(self, question):
        return None


class SyncExporter(RecordingExporter):
    """An exporter that nothing would wait for."""

    def export(self, run, record):
        return None


class AsyncDetector:
    """A detector that nothing would wait for."""

    name = "late"
    observes = (AttemptFailed,)

    async def detect(self, observation, view):
        return []


NO_WORK = [
    (blocking, "work is 'blocking', which is not async; write `async def`"),
    (functools.partial(blocking), "work is 'blocking', which is not async"),
    (Desk().block, "work is 'Desk.block', which is not async"),
    (
        3,
        r"work is 3; expected an async function of a task and its context|work: expected Work \| None, got 3",
    ),
    (
        lambda task: work(task, None),
        r"work takes \(task\); expected an async function of a task and its context",
    ),
]


def plan_with(work) -> PlanningCoordinator:
    """Planning mode with this work."""
    return PlanningCoordinator(Settings(), ScriptedLLM([]), (), "try it", work=work)


@pytest.mark.parametrize(("wrong", "message"), NO_WORK)
@pytest.mark.parametrize("use", [SequentialOrchestrator, SwarmOrchestrator, plan_with])
def test_work_is_async(use, wrong, message: str) -> None:
    """Orchestrators and planning mode refuse work that is not async when it is given, and say what to write."""
    with pytest.raises(TypeError, match=message):
        use(wrong)


async def test_work_of_an_engine_is_async() -> None:
    """An engine refuses work that is not async before it opens a run."""
    engine = ReplanningEngine()
    with pytest.raises(TypeError, match="work is 'blocking', which is not async"):
        await engine.execute(chain("a"), blocking)
    assert list(engine.store.runs()) == []


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        (({}, ScriptedLLM([]), "try it"), TypeError, "config: expected Settings, got {}"),
        (
            (Settings(), "openai", "try it"),
            TypeError,
            "llm_client: expected LLMProvider, got 'openai'",
        ),
        (
            (Settings(), ScriptedLLM([]), None),
            TypeError,
            "task: expected str | Goal | TaskRequest, got None",
        ),
        (
            (Settings(), ScriptedLLM([]), "  "),
            ValueError,
            "the goal is empty; say what is to be achieved",
        ),
    ],
)
def test_parts_of_planning(parts, error: type[Exception], message: str) -> None:
    """Planning mode refuses parts that it cannot begin with when they are given, and says what is expected."""
    config, llm, task = parts
    with pytest.raises(error) as caught:
        PlanningCoordinator(config, llm, (), task)
    assert str(caught.value).startswith(message)


async def test_planning_without_work() -> None:
    """Where nothing executes actions, carrying a plan out is refused before a model is asked; planning alone is not."""
    model = ScriptedLLM([])
    planning = PlanningCoordinator(Settings(), model, (), "try it")
    for method in (planning.execute_with_planning, planning.execute_actions, planning.reflect):
        with pytest.raises(NotRunning, match="give PlanningCoordinator its `work`"):
            await method()
    assert model.requests == []


@pytest.mark.parametrize(
    "right",
    [
        work,
        promising,
        wrapped,
        Desk(),
        Desk().do,
        functools.partial(work),
        lambda task, context: work(context=context, task=task),
    ],
)
async def test_what_can_be_awaited_is_work(right) -> None:
    """Methods, objects, partial functions and functions that hand on what is to be awaited are work as well."""
    result = await SequentialOrchestrator(right).run(chain("a"))
    assert result.outputs == {"a": "a"}


RESOURCES = Plan(
    goal=Goal(objective="do it"),
    resources={"cpu": 4},
    tools=[ToolSpec(name="make", resources={"cpu": 1})],
    tasks=[Task(id="a", tool="make"), Task(id="b", tool="make", depends_on=["a"])],
)

CALLS = [
    (lambda run: run.observe(holds=[3]), TypeError, "observe: expected texts in 'holds', got 3"),
    (
        lambda run: run.observe(ceased=["a", None, 2.5]),
        TypeError,
        "observe: expected texts in 'ceased', got None, 2.5",
    ),
    (
        lambda run: run.observe(holds="on(a)"),
        TypeError,
        "observe: expected a list of texts for 'holds', got 'on(a)'",
    ),
    (
        lambda run: run.observe(holds=3),
        TypeError,
        "observe: expected a list of texts for 'holds', got 3",
    ),
    (
        lambda run: run.observe([" ", "on(a"]),
        ValueError,
        "' ' is no fact: it is blank; 'on(a' is no fact: its parenth",
    ),
    (
        lambda run: run.observe(ceased=["a)(b"]),
        ValueError,
        "'a)(b' is no fact: its parentheses do not match",
    ),
    (
        lambda run: run.change_context(3),
        TypeError,
        "change_context: expected a mapping of names to values, got 3",
    ),
    (
        lambda run: run.change_context([("a", 1)]),
        TypeError,
        "change_context: expected a mapping of names to values",
    ),
    (
        lambda run: run.change_context({3: "eu"}),
        TypeError,
        "change_context: expected texts in 'changes', got 3",
    ),
    (
        lambda run: run.change_context({}, removed="a"),
        TypeError,
        "expected a list of texts for 'removed', got 'a'",
    ),
    (lambda run: run.change_context({"x": len}), RecordNotSerializable, "cannot be kept as JSON"),
    (
        lambda run: run.change_resource("cpu", capacity="3"),
        ValueError,
        "a number of at least 0 for `capacity`, got '3'",
    ),
    (
        lambda run: run.change_resource("cpu", capacity=-1),
        ValueError,
        "a number of at least 0 for `capacity`, got -1",
    ),
    (
        lambda run: run.change_resource("cpu", capacity=float("nan")),
        ValueError,
        "for `capacity`, got nan",
    ),
    (lambda run: run.change_resource("cpu", capacity=True), ValueError, "for `capacity`, got True"),
    (
        lambda run: run.change_resource("cpu"),
        ValueError,
        "expected the `capacity` of a resource, or whether a tool is",
    ),
    (
        lambda run: run.change_resource("cpus", capacity=1),
        ValueError,
        "no resource 'cpus'; did you mean 'cpu'?",
    ),
    (
        lambda run: run.change_resource("make", available="no"),
        ValueError,
        "true or false for `available`, got 'no'",
    ),
    (
        lambda run: run.change_resource("maker", available=False),
        ValueError,
        "no tool 'maker'; did you mean 'make'?",
    ),
    (
        lambda run: run.change_resource("cpu", capacity=1, reason=3),
        TypeError,
        "reason: expected a text, got 3",
    ),
    (lambda run: run.change_goal(facts=5), PlanError, "facts: expected a list, got 5"),
    (
        lambda run: run.change_goal(facts=["on("]),
        PlanError,
        "facts[0]: this is no fact: its parentheses do not match",
    ),
    (lambda run: run.change_goal(objective="x", by=5), TypeError, "by: expected a text, got 5"),
    (
        lambda run: run.request_replan("why", tasks="a"),
        TypeError,
        "expected a list of texts for 'tasks', got 'a'",
    ),
    (lambda run: run.request_replan("why", tasks=["x"]), UnknownTask, "there is no task 'x'"),
    (lambda run: run.request_replan(5), TypeError, "reason: expected a text, got 5"),
    (lambda run: run.pause(5), TypeError, "reason: expected a text, got 5"),
    (lambda run: run.apply([]), ChangeRejected, "changes: there are none"),
    (lambda run: run.apply([5]), ChangeRejected, "changes[0]: expected a change, got 5"),
    (
        lambda run: run.apply(CancelTask(task_id="b")),
        ChangeRejected,
        "changes: expected a list, got CancelTask(",
    ),
    (
        lambda run: run.apply([{"kind": "cancel", "task": "b"}]),
        ChangeRejected,
        "there is no field 'task' here",
    ),
    (lambda run: run.replace_task("a"), ChangeRejected, "ReplaceTask.tasks: must not be empty"),
    (lambda run: run.modify_task("b"), ChangeRejected, "ModifyTask.fields: must not be empty"),
    (
        lambda run: run.modify_task("b", timout=1),
        ChangeRejected,
        "there is no field 'timout' here; did you mean 'timeo",
    ),
    (lambda run: run.reorder_tasks(), ChangeRejected, "ReorderTasks.order: must not be empty"),
    (
        lambda run: run.add_task("c"),
        ChangeRejected,
        "AddTask.task: expected a mapping of fields to values, got 'c'",
    ),
    (
        lambda run: run.add_task(Task(id="c"), before="b"),
        ChangeRejected,
        "AddTask.before: expected a list, got 'b'",
    ),
    (lambda run: run.succeeded(5), UnknownAttempt, "there is no attempt 5"),
    (
        lambda run: run.failed("a#1", 5),
        TypeError,
        "failed: expected an exception, a text or a Failure, got 5",
    ),
    (lambda run: run.charge(5), TypeError, "usage: expected Usage, got 5"),
    (
        lambda run: run.change_resource(["cpu"], capacity=1),
        TypeError,
        "name: expected the name of a resource",
    ),
    (
        lambda run: run.change_goal(objective={5: 5}),
        PlanError,
        "Goal.objective: expected text, got {5: 5}",
    ),
    (lambda run: run.note("why", 5), TypeError, "data: expected Mapping[str, JsonValue], got 5"),
    (lambda run: run.records("all"), TypeError, "after: expected int, got 'all'"),
    (
        lambda run: run.charge(Usage(), provider=5),
        TypeError,
        "provider: expected str | None, got 5",
    ),
    (
        lambda run: run.history.filter(since=datetime.fromisoformat("2026-01-01")),
        ValueError,
        "since: expected a datetime with",
    ),
    (
        lambda run: run.attempt("a"),
        TypeError,
        "attempt: expected a task that ready() handed out, got 'a'",
    ),
    (
        lambda run: run.history.diff(-1, 0),
        StoreError,
        "has no revision -1; it has revisions 0 to 0",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), CALLS)
async def test_calls_of_a_run(call, error: type[Exception], message: str) -> None:
    """A run refuses what it cannot do with a sentence, journals nothing, and its plan stays as it was."""
    async with open_run(RESOURCES) as run:
        with pytest.raises(error, match=re.escape(message)):
            call(run)
        assert len(list(run.records())) == 1
        assert run.plan == RESOURCES
        assert not run.live.facts


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: Task(id="a", dependson=["b"]),
            PlanError,
            "Task.dependson: there is no field 'dependson' here; did you",
        ),
        (lambda: Budget(monney=3, calls=0.5), PlanError, "(2 problems)"),
        (
            lambda: Settings(failure_treshold=3),
            SettingsError,
            "here; did you mean 'failure_threshold'?",
        ),
        (
            lambda: ModifyTask(task="a", fields={"name": "x"}),
            ChangeRejected,
            "did you mean 'task_id'?",
        ),
        (
            lambda: ReorderTasks(order="ab"),
            ChangeRejected,
            "ReorderTasks.order: expected a list, got 'ab'",
        ),
        (lambda: Plan.parse(5), TypeError, "Plan.parse: expected the text of a plan file"),
        (
            lambda: Plan(goal=Goal(objective="x"), facts=["a)"]),
            PlanError,
            "facts[0]: this is no fact",
        ),
        (
            lambda: ReplanningEngine(store=5),
            TypeError,
            "store: expected RunStore | str | PathLike[str] | None, got 5",
        ),
        (lambda: ReplanningEngine(store="sqlit:x"), StoreError, "no store 'sqlit' is installed"),
        (
            lambda: ReplanningEngine(settings={"alternatives": {"max_count": 99}}),
            SettingsError,
            "less than or equal to 20",
        ),
        (
            lambda: ReplanningEngine(settings={"judge_on": "never"}),
            SettingsError,
            "expected 'errors_and_interval' or",
        ),
        (
            lambda: ReplanningEngine(settings={"cooldown": f"sk-{'x1' * 60}"}),
            SettingsError,
            "got '[redacted]'",
        ),
        (
            lambda: ReplanningEngine(settings="x.yaml"),
            TypeError,
            "settings: expected Settings | Mapping[str",
        ),
        (
            lambda: ReplanningEngine(mode="dry"),
            TypeError,
            "mode: expected 'act' or 'observe', got 'dry'",
        ),
        (
            lambda: ReplanningEngine("repair"),
            TypeError,
            "providers: expected Sequence[ProviderSpec]",
        ),
        (lambda: ReplanningEngine([Desk]), TypeError, "expected Sequence[ProviderSpec] | Alt"),
        (
            lambda: AlternativeGenerator(["repair"]),
            TypeError,
            "expected Sequence[AlternativeProvider], got ['repair']",
        ),
        (
            lambda: AlternativeGenerator([Sync()]),
            TypeError,
            "propose is 'Sync.propose', which is not async",
        ),
        (
            lambda: ReplanningEngine(gate=Sync()),
            TypeError,
            "gate.ask is 'Sync.ask', which is not async; write",
        ),
        (
            lambda: ReplanningEngine(exporters=[SyncExporter()]),
            TypeError,
            "'SyncExporter.export', which is not async",
        ),
        (
            lambda: ReplanningEngine(tracer_provider=5),
            TypeError,
            "tracer_provider: expected an OpenTele",
        ),
        (
            lambda: ReplanningEngine(meter_provider=Desk),
            TypeError,
            "meter_provider: expected an OpenTele",
        ),
        (
            lambda: ReplanningEngine(settings={5: 5}),
            TypeError,
            "settings: expected Settings | Mapping[str",
        ),
        (lambda: ReplanningEngine(store="a\0.db"), StoreError, "'a\\x00.db' cannot be a store: "),
        (
            lambda: ReplanningEngine().attach(5),
            TypeError,
            "attach: expected an orchestrator, which has an attribute",
        ),
        (
            lambda: ReplanningEngine().attach(SwarmOrchestrator),
            TypeError,
            "attach: expected an orchestrator, which",
        ),
        (
            lambda: ReplanningEngine().pending(5),
            TypeError,
            "run_id: expected the id of a run, got 5",
        ),
        (
            lambda: Environment(clock=5),
            TypeError,
            "clock: expected an object with `now()` and async `sleep(seconds)`",
        ),
        (
            lambda: Environment(clock=VirtualClock),
            TypeError,
            "clock: expected an object with `now()` and async",
        ),
        (
            lambda: Environment(chance=0.5),
            TypeError,
            "chance: expected a function without arguments, got 0.5",
        ),
        (
            lambda: JudgedWork(blocking, RuleJudge()),
            TypeError,
            "work is 'blocking', which is not async",
        ),
        (lambda: Plan.load(5), PlanError, "5: the plan cannot be read: "),
        (
            lambda: PlanMonitor([AsyncDetector()]),
            TypeError,
            "`detect` of 'late' is async; write `def`",
        ),
        (
            lambda: CallbackGate(print, remind=5),
            TypeError,
            "remind: expected Callable[[Question], ",
        ),
        (
            lambda: ReplanHistory.of("runs.db", "r"),
            TypeError,
            "store: expected a RunStore, got 'runs.db'",
        ),
        (
            lambda: ReplanningEngine(gate=StoreGate),
            TypeError,
            "gate: expected HumanGate | None, got <class",
        ),
        (
            lambda: ReplanningEngine(exporters=[Desk()]),
            TypeError,
            "exporters: expected Sequence[Exporter | str]",
        ),
        (
            lambda: ReplanningEngine(is_transient=5),
            TypeError,
            "is_transient: expected IsTransient | None, got 5",
        ),
        (lambda: PlanMonitor([Desk()]), TypeError, "detectors: expected Sequence[Trigger"),
        (lambda: PlanMonitor("timeout"), TypeError, "detectors: expected Sequence[Trigger"),
        (
            lambda: PlanMonitor(["timeut"]),
            PluginError,
            "there is no plugin 'timeut' among the triggers",
        ),
        (
            lambda: PlanMonitor().on("timeout", print),
            TypeError,
            "expected a type of event and a function, got 'timeout'",
        ),
        (
            lambda: PlanMonitor().on(TaskFailed, 5),
            TypeError,
            "expected a type of event and a function, got <class",
        ),
        (lambda: CallbackGate(5), TypeError, "ask: expected AskCallback, got 5"),
        (
            lambda: SwarmOrchestrator(work, max_concurrency=0),
            ValueError,
            "max_concurrency is 0; at least one worker",
        ),
        (
            lambda: SwarmOrchestrator(work, max_concurrency="2"),
            TypeError,
            "max_concurrency: expected a whole number",
        ),
    ],
)
def test_parts(call, error: type[Exception], message: str) -> None:
    """What is made of the wrong parts is refused when it is made, with what was expected and what was given."""
    with pytest.raises(error, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda engine: engine.execute("plan.yaml", work),
            "expected a Plan, got 'plan.yaml'; Plan.load reads a file",
        ),
        (
            lambda engine: engine.execute(RESOURCES, work, max_concurrency=0),
            "max_concurrency is 0; at least one worker",
        ),
        (
            lambda engine: engine.open(RESOURCES, run_id=5).__aenter__(),
            "run_id: expected the id of a run, got 5",
        ),
        (lambda engine: engine.resume(5).__aenter__(), "run_id: expected the id of a run, got 5"),
    ],
)
async def test_calls_of_an_engine(call, message: str) -> None:
    """An engine refuses what is no plan, no id and no number of workers, and its store has no run of it."""
    engine = ReplanningEngine()
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        await call(engine)
    for lookup in (
        engine.history,
        lambda run: engine.fork(run, 0),
        lambda question: engine.answer(question, "approve"),
    ):
        with pytest.raises(TypeError, match=r"expected the id of a (run|question), got 5"):
            lookup(5)
    assert list(engine.store.runs()) == []


CHECKED = {
    "": "ConfidenceScorer ReplanPolicy",
    ".history": "calibrate compute_metrics export_history import_history markdown_report open_questions run_status"
    " text_report why_report ReplanHistory",
    ".journal": "JsonlStore SqliteStore",
    ".judging": "LLMJudge RuleJudge",
    ".llm": "FallbackLLM LLMOptions Price PriceTable create_llm_provider",
    ".planning": "PlanningHistoryExporter PlanningHistoryStore ReplanLimits ReplanManager ReplanPromptBuilder request_of",
    ".testing": "FaultSchedule FlakyStore ScriptStep ScriptedExecutor ScriptedGate ScriptedLLM ScriptedProvider"
    " VirtualClock simulate",
    ".tools": "Secrets ToolExecutor check_machine check_tools",
}


@pytest.mark.parametrize(
    ("package", "name"), [(package, n) for package, names in CHECKED.items() for n in names.split()]
)
def test_every_wrong_argument_is_named(package: str, name: str) -> None:
    """What is called with things that it cannot use names all of them, with what it expects, before it does anything."""
    public = getattr(import_module(f"replanning{package}"), name)
    beyond = {
        "value",
        "transport",
    }  # any value is right there, or only a type checker knows the kind
    names = [name for name in inspect.signature(public).parameters if name not in beyond]
    with pytest.raises(TypeError) as caught:
        public(**dict.fromkeys(names, type("Wrong", (), {})()))
    assert [part.partition(": expected ")[0] for part in str(caught.value).split("; ")] == names


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Price([1], "2"),
            "input: expected float, got [1]; output: expected float, got '2'",
        ),
        (lambda: Price(True, 1), "input: expected float, got True"),
        (lambda: Price(1, float("nan")), "output: expected a price of at least 0, got nan"),
        (lambda: ToolExecutor([], grace=-1), "grace: expected seconds of at least 0, got -1"),
        (lambda: ToolExecutor("x"), "tools: expected Plan | Iterable[ToolSpec], got 'x'"),
        (
            lambda: ToolExecutor([ToolSpec]),
            "tools: expected Plan | Iterable[ToolSpec], got [<class",
        ),
        (
            lambda: ToolExecutor([], kinds={"shell": 5}),
            "kinds: expected Mapping[str, ToolRunner] | None, got {'shell'",
        ),
        (lambda: ToolExecutor([], clock=VirtualClock), "clock: expected Clock | None, got <class"),
        (
            lambda: LLMOptions(schema=int),
            "schema: expected type[BaseModel] | None, got <class 'int'>",
        ),
        (
            lambda: SqliteStore("x.db", synchronous="of"),
            "synchronous: expected 'normal' or 'full' or 'off', got 'of'",
        ),
        (lambda: Price(1, 2, per="day"), "unexpected keyword argument 'per'"),
    ],
)
def test_kinds_of_arguments(call, message: str) -> None:
    """Numbers are no texts, booleans or nan, items are looked at, a class is no object, and Python's messages stay."""
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        call()


async def test_a_run_that_was_left_records_nothing() -> None:
    """An observation of a run that was left is refused, and an engine is closed after its last run."""
    engine = ReplanningEngine()
    async with engine.open(RESOURCES) as run:
        with pytest.raises(
            StoreError, match=f"closed after its last run; {run.id} must end before"
        ):
            await engine.aclose()
        run.pause()
    for report in (lambda: run.observe(["a"]), lambda: run.change_context({"a": 1})):
        with pytest.raises(
            NotRunning, match="was left, so nothing more is recorded; resume it to go on"
        ):
            report()
    async with engine.open(RESOURCES) as over:
        over.apply([AbortRun(reason="enough")])
    with pytest.raises(NotRunning, match=r"has ended as aborted, so nothing more is recorded$"):
        over.observe(["a"])
    with pytest.raises(TypeError, match="revision: expected the number of a revision, got '0'"):
        engine.fork(run.id, "0")
    with pytest.raises(StoreError, match="it is empty"):
        await engine.run_or_resume(RESOURCES, run_id="").__aenter__()


async def given(value):
    """What a provider gives."""
    return value


@pytest.mark.parametrize(
    ("propose", "told"),
    [
        (
            lambda request: [],
            "wrong failed: TypeError('`propose` is not async; write `async def propose(self, request)`')",
        ),
        (
            lambda request: given(None),
            "wrong failed: TypeError('expected an Alternative, got NoneType')",
        ),
        (lambda request: given(Alternative(changes=[], reason="one")), "it changes nothing"),
    ],
)
async def test_what_a_provider_gives(propose, told: str) -> None:
    """What is wrong with the answer of a provider stands in the history; one alternative is as good as a list."""
    engine = ReplanningEngine([SimpleNamespace(name="wrong", propose=propose)])
    result = await engine.execute(chain("a"), failing)
    event = engine.history(result.run).events[0]
    assert told in [*event.notes, *(candidate.rejected for candidate in event.all_candidates)]


async def test_what_a_detector_gives() -> None:
    """What a detector gives in place of triggers is recorded, and the run goes on."""
    detector = SimpleNamespace(
        name="wrong", observes=(AttemptFailed,), detect=lambda observation, view: None
    )
    engine = ReplanningEngine(monitor=PlanMonitor([detector]))
    result = await engine.execute(chain("a"), failing)
    errors = [
        record.body.error
        for record in engine.store.read(result.run)
        if isinstance(record.body, ErrorContained)
    ]
    assert errors == ["TypeError('detect: expected triggers, got None')"]


@pytest.mark.parametrize(
    "make",
    [
        lambda wrong: Settings(**wrong),
        Settings.model_validate,
        lambda wrong: Settings.model_validate_json(json.dumps(wrong)),
        Settings.model_validate_strings,
        lambda wrong: ReplanningEngine(settings=wrong),
    ],
)
def test_settings_from_anything(make) -> None:
    """Settings name all that is wrong with them, however they are made: its place, what was expected and what was given."""
    with pytest.raises(SettingsError) as caught:
        make({"limits": {"replans_per_run": "many"}, "judge_on": "never", "cooldwn": "1"})
    assert [problem.place for problem in caught.value.problems] == [
        "Settings.judge_on",
        "Settings.limits.replans_per_run",
        "Settings.cooldwn",
    ]
    for told in (
        "or 'every_action', got 'never'",
        "integer, unable to parse string as an integer, got 'many'",
        "'cooldown'?",
    ):
        assert told in str(caught.value)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: Task.model_validate({"id": "a", "dependson": ["b"]}),
            PlanError,
            "Task.dependson: there is no field",
        ),
        (
            lambda: ReorderTasks.model_validate({"order": "ab"}),
            ChangeRejected,
            "ReorderTasks.order: expected a list",
        ),
        (lambda: Plan.model_validate_json('{"goal": '), PlanError, "Plan: Invalid JSON: EOF"),
        (
            lambda: Goal(objective="x").with_fields({"facts": 5}),
            PlanError,
            "Goal.facts: expected a list, got 5",
        ),
        (
            lambda: Settings.model_validate(5),
            SettingsError,
            "Settings: expected a mapping of fields to values, got 5",
        ),
    ],
)
def test_documents(call, error: type[Exception], message: str) -> None:
    """A part of a plan, a change and settings refuse a document in the words of their constructors."""
    with pytest.raises(error, match=re.escape(message)):
        call()


async def test_places_and_mappings(tmp_path: Path) -> None:
    """An engine, and a run without one, take a place for their store and a mapping for their settings."""
    engine = ReplanningEngine(
        store=tmp_path / "runs.db", settings={"limits": {"replans_per_run": 1}}
    )
    assert isinstance(engine.store, SqliteStore)
    assert engine.settings == Settings(limits={"replans_per_run": 1})
    result = await engine.execute(chain("a"), work)
    await engine.aclose()
    folder = f"{tmp_path}/runs.jsonl"
    async with open_run(
        chain("a"), store=folder, settings={"failure_threshold": 2}, run_id="mine"
    ) as run:
        run.pause()
    assert run.result.status == "paused"
    with closing(open_store(tmp_path / "runs.db")) as kept, closing(open_store(folder)) as text:
        assert [info.run for info in kept.runs()] == [result.run]
        assert isinstance(text, JsonlStore)
        assert [info.run for info in text.runs()] == ["mine"]
    assert isinstance(open_store("memory"), MemoryStore)


async def test_changes_as_json() -> None:
    """Edits may be JSON, as a person or another program writes them."""
    async with open_run(chain("a", "b")) as run:
        assert (
            run.apply(
                [{"kind": "cancel", "task_id": "b"}, ModifyTask(task_id="a", fields={"name": "A"})]
            )
            == 1
        )
        assert run.plan.task("a").name == "A"


def test_numbers_that_python_does_not_write() -> None:
    """A number of more digits than Python writes is named by its type."""
    with pytest.raises(TypeError, match="got <int>"):
        ReplanningEngine(store=10**5000)
