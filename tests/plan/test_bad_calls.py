"""What a program does wrong is told to it at once, by the call that is wrong, and not by tasks that fail later."""

from __future__ import annotations

import functools
from collections.abc import Awaitable

import pytest

from replanning import ReplanningEngine, Settings, open_run
from replanning.errors import NotRunning
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run.observe(holds=[3]), "observe: expected texts in 'holds', got 3"),
        (lambda run: run.observe(ceased=["a", None, 2.5]), "observe: expected texts in 'ceased', got None, 2.5"),
        (lambda run: run.observe(holds="on(a)"), r"observe: expected a list of texts for 'holds', got 'on\(a\)'"),
        (lambda run: run.observe(holds=3), "observe: expected a list of texts for 'holds', got 3"),
        (lambda run: run.change_context(3), "change_context: expected a mapping of names to values, got 3"),
        (lambda run: run.change_context([("a", 1)]), "change_context: expected a mapping of names to values"),
        (lambda run: run.change_context({3: "eu"}), "change_context: expected texts in 'changes', got 3"),
        (lambda run: run.change_context({}, removed="a"), "expected a list of texts for 'removed', got 'a'"),
    ],
)
async def test_facts_and_context(call, message: str) -> None:
    """What is no list of facts or mapping of values is refused with what it is, as if nothing had been said."""
    async with open_run(chain("a")) as run:
        with pytest.raises(TypeError, match=message):
            call(run)
        assert not run.live.facts
        assert not run.live.context
