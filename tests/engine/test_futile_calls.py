"""Calls that cannot help are not executed: those that failed for the same task, and those of unavailable tools."""

import pytest

from replanning import Plan, Task
from replanning.changes import PlanChange, ReplaceTask, RetryTask
from replanning.journal import AlternativesConsidered
from tests.support.runs import alternative, bodies, make_engine, perform, plan

TOOLS = [
    {"name": "fast"},
    {"name": "slow"},
    {"name": "gone", "available": False},
    {"name": "clean"},
]
FAST: dict[str, object] = {"tool": "fast", "arguments": {"n": 1}}


def build(**fields: object) -> Plan:
    """A plan of one task that is built with the fast tool."""
    return plan(Task.model_validate({"id": "build", **FAST, **fields}), tools=TOOLS)


def replaced(task_id: str, *tasks: dict[str, object]) -> PlanChange:
    """The replacement of a task by others, under ids that no task has had."""
    parts = [
        Task.model_validate({"id": f"{task_id}.{number}", **fields})
        for number, fields in enumerate(tasks)
    ]
    return ReplaceTask(task_id=task_id, tasks=tuple(parts))


async def fails_with_fast(task, context):
    """The fast tool is broken for good."""
    if task.tool == "fast":
        raise ValueError("broken")


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (FAST, "'build' has failed with the same tool and arguments"),
        (
            {**FAST, "name": "under another name"},
            "'build' has failed with the same tool and arguments",
        ),
        ({"tool": "gone"}, "the tool 'gone' is unavailable"),
    ],
    ids=["same call", "same call, another name", "unavailable tool"],
)
async def test_a_futile_call_is_rejected(first, reason):
    """However confident its provider is, it is rejected with the reason, and the next candidate is executed."""

    def propose(request):
        (task_id,) = request.triggers[0].tasks
        ways: list[tuple[dict[str, object], float]] = [(first, 1.0), ({"tool": "slow"}, 0.8)]
        return [
            alternative(replaced(task_id, way), confidence=confidence) for way, confidence in ways
        ]

    engine = make_engine(propose)
    result = await engine.execute(build(), fails_with_fast)
    assert (result.status, [revised.chosen for revised in result.revisions]) == ("succeeded", [0])
    (considered,) = bodies(engine.store, result.run, AlternativesConsidered)
    assert [candidate.rejected for candidate in considered.candidates] == ["", reason]


WORKER: dict[str, object] = {"name": "worker", "kind": "agent"}
SHELL: dict[str, object] = {"name": "worker", "kind": "shell", "command": "true"}
SAME_CALL = "'book' has failed with the same tool and arguments"


@pytest.mark.parametrize(
    ("tool", "goal", "reason"),
    [
        (WORKER, "book the train", ""),
        ({"name": "worker"}, "book the train", ""),
        (WORKER, "book the trip", SAME_CALL),
        (WORKER, None, SAME_CALL),
        (SHELL, "book the train", SAME_CALL),
        ({"name": "worker", "kind": "function"}, "book the train", SAME_CALL),
    ],
    ids=["agent", "own work", "same goal", "no goal", "command", "function"],
)
async def test_a_call_for_another_goal(tool, goal, reason, clock):
    """Another goal makes another call where the tool is given it, and none where it is called with arguments alone."""
    task = Task(id="book", tool="worker", goal="book the trip")
    again: dict[str, object] = {"tool": "worker", "goal": goal}
    engine = make_engine(lambda request: [alternative(replaced("book", again))], clock=clock)

    async def work(task, context):
        raise ValueError("too much")

    result = await engine.execute(plan(task, tools=[tool]), work)
    considered = bodies(engine.store, result.run, AlternativesConsidered)
    assert considered[0].candidates[0].rejected == reason


@pytest.mark.parametrize(
    ("change", "removed", "why"),
    [({}, [], ": it uses 'rm'"), ({"x": "ls"}, [], ""), ({}, ["x"], ": ${context.x}: 'x' does not exist; there is nothing yet")],
)  # fmt: skip
@pytest.mark.parametrize("retries", [True, False])
async def test_a_refused_use_is_not_repeated(change, removed, why, retries, clock):
    """A use that was refused as dangerous is not retried, nor made by a replacement, unless its arguments have other values."""
    start = {"name": "start", "kind": "shell", "command": "timeout 5 {x}"}
    task = Task(id="a", tool="start", arguments={"x": "${context.x}"})
    again = (
        RetryTask(task_id="a")
        if retries
        else replaced("a", task.model_dump(include={"tool", "arguments"}))
    )
    engine = make_engine(lambda request: [alternative(again)], clock=clock)
    async with engine.open(plan(task, Task(id="b"), tools=[start], context={"x": "rm"})) as run:
        async for offered in run.ready():
            run.change_context(change, removed=removed)
            await clock.sleep(1)
            async with run.attempt(offered):
                pass
    considered = bodies(engine.store, run.id, AlternativesConsidered)
    prefix = "the use of 'start' for 'a' would be refused again" if why else ""
    assert {one.rejected for body in considered for one in body.candidates} == {prefix + why}


async def test_what_failed_in_the_lineage_is_not_repeated():
    """A call is not repeated after another call of the lineage has failed as well, nor is the same sequence of changes."""
    seen: list[str] = []

    def propose(request):
        (task_id,) = request.triggers[0].tasks
        ways: list[dict[str, object]] = [{**FAST, "arguments": {"n": 2}}, FAST]
        return [alternative(replaced(task_id, way)) for way in ways]

    async def work(task, context):
        seen.append(str(task.arguments))
        raise ValueError("broken")

    result = await make_engine(propose).execute(build(), work)
    assert (result.status, seen) == ("failed", ["{'n': 1}", "{'n': 2}"])


@pytest.mark.parametrize(
    "way",
    [[{"tool": "clean"}, {**FAST, "depends_on": ["build.0"]}], [{**FAST, "arguments": {"n": 2}}]],
    ids=["after something else", "with other arguments"],
)
async def test_a_call_may_be_made_again_when_something_differs(
    way,
):
    """A call is no repetition when something else is done before it, or when its arguments are others."""
    ran: list[str | None] = []

    async def work(task, context):
        ran.append(task.tool)
        if len(ran) == 1:
            raise ValueError("broken")

    result = await make_engine(lambda request: [alternative(replaced("build", *way))]).execute(
        build(), work
    )
    assert (result.status, ran) == ("succeeded", ["fast", *(part["tool"] for part in way)])


async def test_a_longer_timeout_makes_another_call(clock):
    """A call that ran into its deadline may be made again with another deadline, and not with the same."""
    ways: list[dict[str, object]] = [{**FAST, "timeout": 5}, {**FAST, "timeout": 60}]
    engine = make_engine(
        lambda request: [alternative(replaced("build", way)) for way in ways], clock=clock
    )

    async def work(task, context):
        await clock.sleep(10)

    result = await engine.execute(
        build(timeout=5, idempotent=True, retry={"max_attempts": 1}), work
    )
    assert (
        result.status,
        [revised.changes[0].tasks[0].timeout for revised in result.revisions],
    ) == ("succeeded", [60])


async def test_a_call_whose_needs_were_met_anew_by_others():
    """A call may be repeated as it is where what it needs has ceased and come back since it failed."""
    sent: list[str] = []
    document = Plan.model_validate(
        {**SESSION, "facts": ["session"], "tasks": [{"id": "send", "tool": "send"}]}
    )
    engine = make_engine(lambda request: [alternative(replaced("send", {"tool": "send"}))])
    async with engine.open(document) as run:

        async def work(task, context):
            sent.append(task.id)
            if len(sent) == 1:
                run.observe(ceased=["session"])
                run.failed(context.attempt_id, "session expired")
                run.observe(holds=["session"])

        await perform(run, work)
    assert (run.result.status, len(sent)) == ("succeeded", 2)


SESSION = {
    "goal": {"objective": "test", "facts": ["sent"]},
    "facts": [],
    "tools": [
        {"name": "login", "adds": ["session"]},
        {"name": "send", "requires": ["session"], "adds": ["sent"]},
    ],
    "tasks": [
        {"id": "login", "tool": "login"},
        {"id": "send", "tool": "send", "depends_on": ["login"]},
    ],
}


@pytest.mark.parametrize(("ceased", "status"), [(["session"], "succeeded"), ([], "failed")])
async def test_a_call_is_made_again_once_its_needs_are_met_anew(ceased, status):
    """A call that failed because its session had expired is repeated after another login, and otherwise not."""
    engine = make_engine("repair")
    sent: list[str] = []
    async with engine.open(Plan.model_validate(SESSION)) as run:

        async def work(task, context):
            if task.tool == "send":
                sent.append(task.id)
                if len(sent) == 1:
                    run.observe(ceased=ceased)
                    raise ValueError("session expired")

        await perform(run, work)
    assert (run.result.status, len(sent)) == (status, 2 if ceased else 1)
