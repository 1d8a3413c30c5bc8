"""Lineages: states of replaced tasks, dependencies of replacements, and the limit of replans."""

from __future__ import annotations

import pytest

from replanning import Alternative, ReplanningEngine, ReplanRequest, Settings, Task, TaskState
from replanning.changes import ReplaceTask, RetryTask, SkipTask
from replanning.errors import UnknownTask
from replanning.journal import DecisionMade, PlanRevised, TaskFailed
from replanning.live import PlanView, ReplanningInfo
from replanning.live.view import replanning_info
from replanning.testing import ScriptedExecutor, VirtualClock, raises, returns
from tests.support.live import journaled
from tests.support.runs import Proposer, again, alternative, bodies, chain, environment, failing, plan


def split(request: ReplanRequest) -> list[Alternative]:
    """Propose two parallel tasks in place of the first task of the triggers."""
    task_id = request.triggers[0].tasks[0]
    parts = tuple(Task(id=f"{task_id}.{side}") for side in ("left", "right"))
    return [alternative(ReplaceTask(task_id=task_id, tasks=parts), reason=f"{task_id} is too large")]


async def test_replanning_info() -> None:
    """Every task of a lineage has its root, its distance from it, its replacement and the reason."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine([Proposer(split)], environment=environment(clock))
        broken = failing("b", "b.left")
        async with engine.open(chain("a", "b", "c")) as run:
            async for task in run.ready():
                async with run.attempt(task) as attempt:
                    attempt.output = await broken(task, attempt.context)
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
async def test_replans_per_lineage_are_limited(limit: int) -> None:
    """After the allowed replans of a lineage, the next failure ends in BLOCKED, with the reason."""
    async with VirtualClock() as clock:
        settings = Settings.model_validate({"limits": {"replans_per_lineage": limit}})
        engine = ReplanningEngine([Proposer(again)], settings=settings, environment=environment(clock))
        async with engine.open(plan(Task(id="a"), Task(id="other"))) as run:
            work = ScriptedExecutor(
                lambda call: returns() if call.task.id == "other" else raises(ValueError(call.task.id))
            )
            async for task in run.ready():
                async with run.attempt(task) as attempt:
                    await work(task, attempt.context)
    last = f"a~{limit + 1}" if limit else "a"
    blocked = run.view.task(last)
    assert (run.result.status, len(run.result.revisions)) == ("failed", limit)
    assert (blocked.state, blocked.iteration) == (TaskState.BLOCKED, limit)
    assert f"limit of {limit} replans per lineage" in blocked.reason
    assert run.replanning_info(last).max_iterations == limit
    assert list(run.result.outputs) == ["other"]
    (decided,) = [body for body in bodies(engine.store, run.id, DecisionMade) if body.rule == "limit-lineage"]
    assert (decided.blocks, decided.decision) == ((last,), "keep")


async def test_retries_of_a_lineage_count() -> None:
    """A retry by a replan counts as a replan of the lineage."""
    async with VirtualClock() as clock:
        retry = Proposer(lambda request: [alternative(RetryTask(task_id="a"))])
        engine = ReplanningEngine([retry], environment=environment(clock))
        work = ScriptedExecutor(lambda call: raises(ValueError("abc"[call.number % 3])), clock=clock)
        result = await engine.execute(chain("a"), work)
    assert (result.status, len(work.calls)) == ("failed", 4)


async def test_parts_share_the_count() -> None:
    """The parts of a replaced task share the count of its lineage."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine([Proposer(split)], environment=environment(clock))
        work = ScriptedExecutor(lambda call: raises(ValueError(call.task.id)), clock=clock)
        result = await engine.execute(chain("a"), work)
    assert (result.status, len(result.revisions)) == ("failed", 3)


async def test_lineages_are_counted_apart() -> None:
    """Each lineage has its own count of replans."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine([Proposer(again)], environment=environment(clock))
        broken = failing("a", "a~2", "a~3", "b", "b~2", "b~3")
        result = await engine.execute(plan(Task(id="a"), Task(id="b")), broken)
    assert (result.status, len(result.revisions)) == ("succeeded", 6)
    assert result.outputs == {"a": "a~4", "b": "b~4"}


async def test_the_trigger_names_the_lineage() -> None:
    """The trigger of a failed replacement names the root, so that repetitions are recognised."""
    async with VirtualClock() as clock:
        heard: list[TaskFailed] = []
        engine = ReplanningEngine([Proposer(again)], environment=environment(clock))
        engine.monitor.on(TaskFailed, heard.append)
        await engine.execute(chain("a"), failing("a", "a~2"))
    assert [(event.tasks, event.root) for event in heard] == [(("a",), "a"), (("a~2",), "a")]


def test_reasons_of_replacements() -> None:
    """A replaced task shows why it was replaced, another why it replaced one."""
    run = journaled(Task(id="a"), Task(id="b"))
    first = (ReplaceTask(task_id="a", tasks=(Task(id="x"),)), SkipTask(task_id="b"))
    second = (ReplaceTask(task_id="x", tasks=(Task(id="y"), Task(id="z"))),)
    for changes in (first, second):
        run.apply(*changes)
    revisions = [PlanRevised(1, 0, first, "too large", "policy"), PlanRevised(2, 1, second, "still too large", "eve")]
    view = PlanView(run.live)
    found = {task.id: replanning_info(task, revisions, 3) for task in view.tasks()}
    assert found == {
        "a": ReplanningInfo(0, 3, "a", ("x",), "too large"),
        "b": ReplanningInfo(0, 3, "b", (), ""),
        "x": ReplanningInfo(1, 3, "a", ("y", "z"), "still too large"),
        "y": ReplanningInfo(2, 3, "a", (), "still too large"),
        "z": ReplanningInfo(2, 3, "a", (), "still too large"),
    }
