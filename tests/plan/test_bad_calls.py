"""Values that would do harm later are refused by the call that is wrong, and not by tasks that fail."""

# mypy: disable-error-code="arg-type, call-arg, list-item, type-var"

import functools
import json
import re
from collections.abc import Awaitable
from contextlib import closing
from datetime import datetime

import pytest

from replanning import (
    Budget,
    Goal,
    Plan,
    PlanMonitor,
    ReplanningEngine,
    Settings,
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
from replanning.journal import (
    MemoryStore,
    SqliteStore,
    open_store,
)
from replanning.judging import JudgedWork, LLMJudge
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
]


def plan_with(work) -> PlanningCoordinator:
    """Planning mode with this work."""
    return PlanningCoordinator(Settings(), ScriptedLLM([]), (), "try it", work=work)


@pytest.mark.parametrize(("wrong", "message"), NO_WORK)
@pytest.mark.parametrize("use", [SequentialOrchestrator, SwarmOrchestrator, plan_with])
def test_work_is_async(use, wrong, message):
    """Orchestrators and planning mode refuse work that is not async when it is given, and say what to write."""
    with pytest.raises(TypeError, match=message):
        use(wrong)


async def test_work_of_an_engine_is_async():
    """An engine refuses work that is not async before it opens a run."""
    engine = ReplanningEngine()
    with pytest.raises(TypeError, match="work is 'blocking', which is not async"):
        await engine.execute(chain("a"), blocking)
    assert list(engine.store.runs()) == []


async def test_planning_without_work():
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
async def test_what_can_be_awaited_is_work(right):
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
    (
        lambda run: run.observe("on(a)"),
        ValueError,
        "observe: expected a list of texts for 'holds', got 'on(a)'",
    ),
    (
        lambda run: run.change_context({}, removed="a"),
        ValueError,
        "expected a list of texts for 'removed', got 'a'",
    ),
    (
        lambda run: run.request_replan("why", tasks="a"),
        ValueError,
        "expected a list of texts for 'tasks', got 'a'",
    ),
    (
        lambda run: run.observe([" ", "on(a"]),
        ValueError,
        "' ' is not a fact: it is blank; 'on(a' is not a fact: its parenth",
    ),
    (
        lambda run: run.observe(ceased=["a)(b"]),
        ValueError,
        "'a)(b' is not a fact: its parentheses do not match",
    ),
    (lambda run: run.change_context({"x": len}), RecordNotSerializable, "cannot be kept as JSON"),
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
        lambda run: run.change_resource("maker", available=False),
        ValueError,
        "no tool 'maker'; did you mean 'make'?",
    ),
    (lambda run: run.change_goal(facts=5), PlanError, "facts: expected a list, got 5"),
    (
        lambda run: run.change_goal(facts=["on("]),
        PlanError,
        "facts[0]: this is not a fact: its parentheses do not match",
    ),
    (lambda run: run.request_replan("why", tasks=["x"]), UnknownTask, "there is no task 'x'"),
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
        lambda run: run.change_goal(objective={5: 5}),
        PlanError,
        "Goal.objective: expected text, got {5: 5}",
    ),
    (
        lambda run: run.history.filter(since=datetime.fromisoformat("2026-01-01")),
        ValueError,
        "since: expected a datetime with",
    ),
    (
        lambda run: run.history.diff(-1, 0),
        StoreError,
        "has no revision -1; it has revisions 0 to 0",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), CALLS)
async def test_calls_of_a_run(call, error, message):
    """A run refuses what it cannot do with a sentence, journals nothing, and its plan stays as it was."""
    async with open_run(RESOURCES) as run:
        with pytest.raises(error, match=re.escape(message)):
            call(run)
        assert len(list(run.records())) == 1
        assert run.plan == RESOURCES
        assert not run.live.world.facts


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
        (
            lambda: Plan(goal=Goal(objective="x"), facts=["a)"]),
            PlanError,
            "facts[0]: this is not a fact",
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
        (lambda: ReplanningEngine(store="a\0.db"), StoreError, "'a\\x00.db' cannot be a store: "),
        (
            lambda: JudgedWork(blocking, LLMJudge(ScriptedLLM([]))),
            TypeError,
            "work is 'blocking', which is not async",
        ),
        (lambda: Plan.load(5), PlanError, "5: the plan cannot be read: "),
        (
            lambda: PlanMonitor(["timeut"]),
            PluginError,
            "there is no plugin 'timeut' among the triggers",
        ),
        (
            lambda: SwarmOrchestrator(work, max_concurrency=0),
            ValueError,
            "max_concurrency is 0; at least one worker",
        ),
    ],
)
def test_parts(call, error, message):
    """What is made of the wrong parts is refused when it is made, with what was expected and what was given."""
    with pytest.raises(error, match=re.escape(message)):
        call()


async def test_a_run_that_was_left_records_nothing():
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
            NotRunning, match="was left, so nothing more is recorded; resume it to continue"
        ):
            report()
    async with engine.open(RESOURCES) as over:
        over.apply([AbortRun(reason="enough")])
    with pytest.raises(NotRunning, match=r"has ended as aborted, so nothing more is recorded$"):
        over.observe(["a"])
    with pytest.raises(StoreError, match="it is empty"):
        await engine.run_or_resume(RESOURCES, run_id="").__aenter__()


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
def test_settings_from_anything(make):
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


async def test_places_and_mappings(tmp_path):
    """An engine, and a run without one, take a place for their store and a mapping for their settings."""
    engine = ReplanningEngine(
        store=tmp_path / "runs.db", settings={"limits": {"replans_per_run": 1}}
    )
    assert isinstance(engine.store, SqliteStore)
    assert engine.settings == Settings(limits={"replans_per_run": 1})
    result = await engine.execute(chain("a"), work)
    await engine.aclose()
    other = f"{tmp_path}/other.db"
    async with open_run(
        chain("a"), store=other, settings={"failure_threshold": 2}, run_id="mine"
    ) as run:
        run.pause()
    assert run.result.status == "paused"
    with closing(open_store(tmp_path / "runs.db")) as kept, closing(open_store(other)) as mine:
        assert [info.run for info in kept.runs()] == [result.run]
        assert [info.run for info in mine.runs()] == ["mine"]
    assert isinstance(open_store("memory"), MemoryStore)


async def test_changes_as_json():
    """Edits may be JSON, as a person or another program writes them."""
    async with open_run(chain("a", "b")) as run:
        assert (
            run.apply(
                [{"kind": "cancel", "task_id": "b"}, ModifyTask(task_id="a", fields={"name": "A"})]
            )
            == 1
        )
        assert run.plan.task("a").name == "A"
