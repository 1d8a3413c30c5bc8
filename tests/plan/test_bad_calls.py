"""What a program does wrong is told to it at once, by the call that is wrong, and not by tasks that fail later."""

# mypy: disable-error-code="arg-type, call-arg, list-item"

import functools
import re
from collections.abc import Awaitable
from contextlib import closing
from pathlib import Path

import pytest

from replanning import (
    AlternativeGenerator,
    Budget,
    CallbackGate,
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
from replanning.changes import CancelTask, ModifyTask, ReorderTasks
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
from replanning.journal import JsonlStore, MemoryStore, SqliteStore, TaskFailed, open_store
from replanning.orchestrators import SequentialOrchestrator, SwarmOrchestrator
from replanning.planning import PlanningCoordinator
from replanning.testing import ScriptedLLM
from tests.support.runs import chain


async def work(task, context):
    """What work should be."""
    return task.id


def blocking(task, context):
    """What it should not."""
    return task.id


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


NO_WORK = [
    (blocking, "work is 'blocking', which is not async; write `async def`"),
    (functools.partial(blocking), "work is 'blocking', which is not async"),
    (Desk().block, "work is 'Desk.block', which is not async"),
    (3, "work is 3; expected an async function of a task and its context"),
    (lambda task: work(task, None), r"work takes \(task\); expected an async function of a task and its context"),
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
        (({}, ScriptedLLM([]), "try it"), TypeError, "config is {}; expected Settings, such as load_settings"),
        ((Settings(), "openai", "try it"), TypeError, "llm_client is 'openai'; expected a language model, such as"),
        ((Settings(), ScriptedLLM([]), None), TypeError, "task is None; expected a goal in words, a Goal or a Task"),
        ((Settings(), ScriptedLLM([]), "  "), ValueError, "the goal is empty; say what is to be achieved"),
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
    (lambda run: run.observe(ceased=["a", None, 2.5]), TypeError, "observe: expected texts in 'ceased', got None, 2.5"),
    (lambda run: run.observe(holds="on(a)"), TypeError, "observe: expected a list of texts for 'holds', got 'on(a)'"),
    (lambda run: run.observe(holds=3), TypeError, "observe: expected a list of texts for 'holds', got 3"),
    (lambda run: run.observe([" ", "on(a"]), ValueError, "' ' is no fact: it is blank; 'on(a' is no fact: its parenth"),
    (lambda run: run.observe(ceased=["a)(b"]), ValueError, "'a)(b' is no fact: its parentheses do not match"),
    (lambda run: run.change_context(3), TypeError, "change_context: expected a mapping of names to values, got 3"),
    (lambda run: run.change_context([("a", 1)]), TypeError, "change_context: expected a mapping of names to values"),
    (lambda run: run.change_context({3: "eu"}), TypeError, "change_context: expected texts in 'changes', got 3"),
    (lambda run: run.change_context({}, removed="a"), TypeError, "expected a list of texts for 'removed', got 'a'"),
    (lambda run: run.change_context({"x": len}), RecordNotSerializable, "cannot be kept as JSON"),
    (
        lambda run: run.change_resource("cpu", capacity="3"),
        ValueError,
        "a number of at least 0 for `capacity`, got '3'",
    ),
    (lambda run: run.change_resource("cpu", capacity=-1), ValueError, "a number of at least 0 for `capacity`, got -1"),
    (lambda run: run.change_resource("cpu", capacity=float("nan")), ValueError, "for `capacity`, got nan"),
    (lambda run: run.change_resource("cpu", capacity=True), ValueError, "for `capacity`, got True"),
    (lambda run: run.change_resource("cpu"), ValueError, "expected the `capacity` of a resource, or whether a tool is"),
    (lambda run: run.change_resource("cpus", capacity=1), ValueError, "no resource 'cpus'; did you mean 'cpu'?"),
    (lambda run: run.change_resource("make", available="no"), ValueError, "true or false for `available`, got 'no'"),
    (lambda run: run.change_resource("maker", available=False), ValueError, "no tool 'maker'; did you mean 'make'?"),
    (lambda run: run.change_resource("cpu", capacity=1, reason=3), TypeError, "reason: expected a text, got 3"),
    (lambda run: run.change_goal(facts=5), PlanError, "facts: expected a list, got 5"),
    (lambda run: run.change_goal(facts=["on("]), PlanError, "facts[0]: this is no fact: its parentheses do not match"),
    (lambda run: run.change_goal(objective="x", by=5), TypeError, "by: expected a text, got 5"),
    (lambda run: run.request_replan("why", tasks="a"), TypeError, "expected a list of texts for 'tasks', got 'a'"),
    (lambda run: run.request_replan("why", tasks=["x"]), UnknownTask, "there is no task 'x'"),
    (lambda run: run.request_replan(5), TypeError, "reason: expected a text, got 5"),
    (lambda run: run.pause(5), TypeError, "reason: expected a text, got 5"),
    (lambda run: run.apply([]), ChangeRejected, "changes: there are none"),
    (lambda run: run.apply([5]), ChangeRejected, "changes[0]: expected a change, got 5"),
    (lambda run: run.apply(CancelTask(task_id="b")), ChangeRejected, "changes: expected a list, got CancelTask("),
    (lambda run: run.apply([{"kind": "cancel", "task": "b"}]), ChangeRejected, "there is no field 'task' here"),
    (lambda run: run.replace_task("a"), ChangeRejected, "ReplaceTask.tasks: must not be empty"),
    (lambda run: run.modify_task("b"), ChangeRejected, "ModifyTask.fields: must not be empty"),
    (
        lambda run: run.modify_task("b", timout=1),
        ChangeRejected,
        "there is no field 'timout' here; did you mean 'timeo",
    ),
    (lambda run: run.reorder_tasks(), ChangeRejected, "ReorderTasks.order: must not be empty"),
    (lambda run: run.add_task("c"), ChangeRejected, "AddTask.task: expected a mapping of fields to values, got 'c'"),
    (lambda run: run.add_task(Task(id="c"), before="b"), ChangeRejected, "AddTask.before: expected a list, got 'b'"),
    (lambda run: run.succeeded(5), UnknownAttempt, "there is no attempt 5"),
    (lambda run: run.failed("a#1", 5), TypeError, "failed: expected an exception, a text or a Failure, got 5"),
    (lambda run: run.charge(5), TypeError, "charge: expected a Usage, got 5"),
    (lambda run: run.attempt("a"), TypeError, "attempt: expected a task that ready() handed out, got 'a'"),
    (lambda run: run.history.diff(-1, 0), StoreError, "has no revision -1; it has revisions 0 to 0"),
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
        (lambda: Settings(failure_treshold=3), SettingsError, "here; did you mean 'failure_threshold'?"),
        (lambda: ModifyTask(task="a", fields={"name": "x"}), ChangeRejected, "did you mean 'task_id'?"),
        (lambda: ReorderTasks(order="ab"), ChangeRejected, "ReorderTasks.order: expected a list, got 'ab'"),
        (lambda: Plan.parse(5), TypeError, "Plan.parse: expected the text of a plan file"),
        (lambda: Plan(goal=Goal(objective="x"), facts=["a)"]), PlanError, "facts[0]: this is no fact"),
        (
            lambda: ReplanningEngine(store=5),
            TypeError,
            "store: expected a RunStore or a place such as 'runs.db', got 5",
        ),
        (lambda: ReplanningEngine(store="sqlit:x"), StoreError, "no store 'sqlit' is installed"),
        (
            lambda: ReplanningEngine(settings={"alternatives": {"max_count": 99}}),
            SettingsError,
            "less than or equal to 20",
        ),
        (lambda: ReplanningEngine(settings={"judge_on": "never"}), SettingsError, "expected 'errors_and_interval' or"),
        (lambda: ReplanningEngine(settings={"cooldown": f"sk-{'x1' * 60}"}), SettingsError, "got '[redacted]'"),
        (lambda: ReplanningEngine(settings="x.yaml"), TypeError, "settings: expected Settings or a mapping"),
        (lambda: ReplanningEngine(mode="dry"), ValueError, "mode: expected one of act, observe, got 'dry'"),
        (lambda: ReplanningEngine("repair"), TypeError, "providers: expected a list, got 'repair'"),
        (lambda: ReplanningEngine([Desk]), TypeError, "is not a provider: it needs a `name`"),
        (lambda: AlternativeGenerator(["repair"]), TypeError, "'repair' is not a provider"),
        (lambda: ReplanningEngine(gate=StoreGate), TypeError, "gate: expected an object with async `ask(question)`"),
        (
            lambda: ReplanningEngine(exporters=[Desk()]),
            TypeError,
            "exporters: expected names of plugins, and Exporters",
        ),
        (lambda: ReplanningEngine(is_transient=5), TypeError, "is_transient: expected a function, got 5"),
        (lambda: PlanMonitor([Desk()]), TypeError, "detectors: expected names of plugins, and objects with `name`"),
        (lambda: PlanMonitor("timeout"), TypeError, "detectors: expected a list, got 'timeout'"),
        (lambda: PlanMonitor(["timeut"]), PluginError, "there is no plugin 'timeut' among the triggers"),
        (
            lambda: PlanMonitor().on("timeout", print),
            TypeError,
            "expected a type of event and a function, got 'timeout'",
        ),
        (lambda: PlanMonitor().on(TaskFailed, 5), TypeError, "expected a type of event and a function, got <class"),
        (lambda: CallbackGate(5), TypeError, "ask: expected a function that returns an Answer, got 5"),
        (lambda: SwarmOrchestrator(work, max_concurrency=0), ValueError, "max_concurrency is 0; at least one worker"),
        (lambda: SwarmOrchestrator(work, max_concurrency="2"), TypeError, "max_concurrency: expected a whole number"),
    ],
)
def test_parts(call, error: type[Exception], message: str) -> None:
    """What is made of the wrong parts is refused when it is made, with what was expected and what was given."""
    with pytest.raises(error, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.execute("plan.yaml", work), "expected a Plan, got 'plan.yaml'; Plan.load reads a file"),
        (
            lambda engine: engine.execute(RESOURCES, work, max_concurrency=0),
            "max_concurrency is 0; at least one worker",
        ),
        (lambda engine: engine.open(RESOURCES, run_id=5).__aenter__(), "run_id: expected the id of a run, got 5"),
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


async def test_places_and_mappings(tmp_path: Path) -> None:
    """An engine, and a run without one, take a place for their store and a mapping for their settings."""
    engine = ReplanningEngine(store=tmp_path / "runs.db", settings={"limits": {"replans_per_run": 1}})
    assert isinstance(engine.store, SqliteStore)
    assert engine.settings == Settings(limits={"replans_per_run": 1})
    result = await engine.execute(chain("a"), work)
    await engine.aclose()
    folder = f"{tmp_path}/runs.jsonl"
    async with open_run(chain("a"), store=folder, settings={"failure_threshold": 2}, run_id="mine") as run:
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
        assert run.apply([{"kind": "cancel", "task_id": "b"}, ModifyTask(task_id="a", fields={"name": "A"})]) == 1
        assert run.plan.task("a").name == "A"
