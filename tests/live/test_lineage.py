"""Lineages: states of replaced tasks, dependencies of replacements, and the limit of replans."""

import pytest

from replanning import Alternative, ReplanRequest, TaskState
from replanning.errors import UnknownTask
from replanning.journal import DecisionMade, TaskFailed
from replanning.live import ReplanningInfo
from replanning.plan.messages import pluralise
from replanning.testing import ScriptedExecutor, VirtualClock, raises
from tests.support.live import modify, replace, retry, task
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


def split(request: ReplanRequest) -> list[Alternative]:
    """Propose two parallel tasks in place of the first task of the triggers."""
    task_id = request.triggers[0].tasks[0]
    parts = tuple(task(f"{task_id}.{side}") for side in ("left", "right"))
    return [alternative(replace(task_id, *parts), reason=f"{task_id} is too large")]


def split_and_note(request: ReplanRequest) -> list[Alternative]:
    """Propose the same with a change of another task."""
    (proposed,) = split(request)
    return [proposed.model_copy(update={"changes": (*proposed.changes, modify("c", name="later"))})]


async def test_replanning_info():
    """Every task of a lineage has its root, its distance from it, its replacement and the reason."""
    async with VirtualClock() as clock:
        engine = make_engine(split_and_note, clock=clock)
        async with engine.open(chain("a", "b", "c")) as run:
            await perform(run, failing("b", "b.left"))
        found = {task.id: run.replanning_info(task.id) for task in run.view.tasks()}
    inner = ("b.left.left", "b.left.right")
    assert found == {
        "a": ReplanningInfo(0, 3, "a", (), ""),
        "b": ReplanningInfo(0, 3, "b", ("b.left", "b.right"), "b is too large"),
        "c": ReplanningInfo(0, 3, "c", (), ""),
        "b.left": ReplanningInfo(1, 3, "b", inner, "b.left is too large"),
        "b.right": ReplanningInfo(1, 3, "b", (), "b is too large"),
        **dict.fromkeys(inner, ReplanningInfo(2, 3, "b", (), "b.left is too large")),
    }
    with pytest.raises(UnknownTask, match="'z'"):
        run.replanning_info("z")


@pytest.mark.parametrize("limit", [0, 1, 3])
async def test_replans_per_lineage_are_limited(limit):
    """After the allowed replans of a lineage, the next failure ends in BLOCKED, with the reason."""
    async with VirtualClock() as clock:
        engine = make_engine(again, clock=clock, limits={"replans_per_lineage": limit})
        async with engine.open(plan(task("a"), task("other"))) as run:
            await perform(run, failing("a", *(f"a~{n}" for n in range(2, limit + 2))))
    last = f"a~{limit + 1}" if limit else "a"
    blocked = run.view.task(last)
    assert (run.result.status, len(run.result.revisions)) == ("failed", limit)
    assert (blocked.state, blocked.iteration) == (TaskState.BLOCKED, limit)
    assert f"limit of {pluralise(limit, 'replan')} per lineage" in blocked.reason
    assert run.replanning_info(last).max_iterations == limit
    assert list(run.result.outputs) == ["other"]
    (decided,) = [
        body for body in bodies(engine.store, run.id, DecisionMade) if body.rule == "limit-lineage"
    ]
    assert (decided.blocks, decided.decision) == ((last,), "keep")


def retried(request):
    """Propose to retry the task."""
    return [alternative(retry("a"))]


@pytest.mark.parametrize(
    ("propose", "document", "calls"),
    [(retried, chain("a"), 4), (split, chain("a"), 7), (again, plan(task("a"), task("b")), 8)],
    ids=["retries count", "parts share the count", "lineages are counted apart"],
)
async def test_replans_of_a_lineage(propose, document, calls):
    """All replans of a lineage count towards its limit of three, and no others."""
    async with VirtualClock() as clock:
        engine = make_engine(propose, clock=clock)
        work = ScriptedExecutor(
            lambda call: raises(ValueError(f"{call.task.id} {call.number}")), clock=clock
        )
        result = await engine.execute(document, work)
    assert (result.status, len(work.calls), len(result.revisions)) == (
        "failed",
        calls,
        3 * len(document.tasks),
    )


async def test_the_trigger_names_the_lineage():
    """The trigger of a failed replacement names the root, so that repetitions are recognised."""
    async with VirtualClock() as clock:
        heard: list[TaskFailed] = []
        engine = make_engine(again, clock=clock)
        engine.monitor.on(TaskFailed, heard.append)
        await engine.execute(chain("a"), failing("a", "a~2"))
    assert [(event.tasks, event.root) for event in heard] == [(("a",), "a"), (("a~2",), "a")]
