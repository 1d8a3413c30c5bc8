"""Plans of agents, whatever the framework: stand-ins, what providers add, people, resuming."""

from collections.abc import Mapping

import anyio
import pytest

from replanning import Alternative, ReplanningEngine, ReplanRequest, Task
from replanning.changes import AddTask, CancelTask, ModifyTask, RemoveTask, RetryTask, SkipTask
from replanning.errors import CallFailed, CallSkipped, NeedsHuman
from replanning.integrations.agent_plans import (
    EARLIER,
    AgentStep,
    AgentSteps,
    agent_plan,
    agent_session,
    step_ids,
)
from replanning.plan.document import Plan
from tests.support.runs import alternative, make_engine

AGENTS = {"researcher": "Finds facts.", "writer": None, "editor": None}


def chain(*agents: str, always: bool = False, **capabilities: str) -> Plan:
    """A workflow in which each agent follows another."""
    steps: list[AgentStep] = []
    before: tuple[str, ...] = ()
    for step_id, agent in zip(step_ids(agents), agents, strict=True):
        steps.append(AgentStep(step_id, agent, before))
        before = (step_id,)
    return agent_plan("Write about tea", steps, AGENTS, capabilities, always=always)


class Agents:
    """Agents that note when they are asked; those that fail raise ValueError."""

    def __init__(self, *failing: str) -> None:
        self.failing = set(failing)
        self.asked: list[str] = []

    async def __call__(self, agent: str, arguments: Mapping[str, object]) -> str:
        self.asked.append(agent)
        if agent in self.failing:
            raise ValueError(f"{agent} failed")
        return f"{agent} said this"


async def run_through(
    engine: ReplanningEngine, plan: Plan, agents: Agents, thread: str | None = None
) -> dict[str, object]:
    """Perform the steps of a plan as the plan has them."""
    outputs: dict[str, object] = {}
    async with agent_session(engine, plan, thread=thread) as session:
        steps = AgentSteps(engine, session, asks=thread is not None)
        while (step := steps.next_step(outputs)) is not None:
            try:
                outputs[step] = await steps.perform(step, agents, known=outputs)
            except CallSkipped:
                outputs[step] = None
    return outputs


def test_steps_of_one_agent_have_ids_of_their_own():
    """The second step of an agent has a number, whatever other agents are called."""
    assert step_ids(["writer", "writer-2", "writer", "writer"]) == [
        "writer",
        "writer-2",
        "writer-3",
        "writer-4",
    ]


async def test_an_agent_of_the_same_capability_stands_in_for_one_that_fails():
    """The output of the stand-in is that of the step, and the rest goes on."""
    agents = Agents("writer")
    plan = chain("researcher", "writer", "writer", writer="write", editor="write")
    outputs = await run_through(ReplanningEngine(), plan, agents)
    assert outputs == {
        "researcher": "researcher said this",
        "writer": "editor said this",
        "writer-2": "editor said this",
    }


async def test_without_a_stand_in_the_own_error_of_the_agent_is_raised():
    """Nobody can be asked, so no question is raised or left open."""
    engine = ReplanningEngine()
    with pytest.raises(ValueError, match="writer failed"):
        await run_through(engine, chain("writer"), Agents("writer"))
    assert engine.pending() == []


async def test_the_own_error_of_an_agent_keeps_its_cause():
    """Where the framework cannot put the question to a person, the exception of the agent arrives as it was."""
    engine = ReplanningEngine(settings={"alternatives": {"human_approval_threshold": 0.99}})
    cause = KeyError("tea")

    async def execute(agent: str, arguments: Mapping[str, object]) -> object:
        raise ValueError("writer failed") from cause

    async with agent_session(
        engine, chain("writer", writer="x", editor="x"), thread="a"
    ) as session:
        steps = AgentSteps(engine, session, asks=False)
        with pytest.raises(ValueError, match="writer failed") as raised:
            await steps.perform("writer", execute, known=["writer"])
    assert raised.value.__cause__ is cause
    assert engine.pending() == []


async def test_a_framework_that_goes_on_after_a_failure_can_perform_what_follows():
    """With `always`, the step after one that failed is performed all the same."""
    engine = ReplanningEngine()
    agents = Agents("writer")
    async with agent_session(engine, chain("writer", "editor", always=True)) as session:
        steps = AgentSteps(engine, session, asks=False)
        with pytest.raises(ValueError, match="writer failed"):
            await steps.perform("writer", agents, known=["writer", "editor"])
        output = await steps.perform("editor", agents, known=["writer", "editor"])
    assert output == "editor said this"
    assert session.run.result.status == "failed"


async def test_a_resumed_run_asks_only_agents_that_had_not_finished():
    """The step that had failed for good is tried again, those before it are not."""
    engine = ReplanningEngine()
    plan = chain("researcher", "writer")
    with pytest.raises(ValueError, match="writer failed"):
        await run_through(engine, plan, Agents("writer"), thread="tea")
    agents = Agents()
    assert await run_through(engine, plan, agents, thread="tea") == {
        "researcher": "researcher said this",
        "writer": "writer said this",
    }
    assert agents.asked == ["writer"]


async def test_a_person_can_be_asked_where_the_workflow_can_be_resumed():
    """The question is raised, and after the answer the run goes on with the alternative."""
    engine = ReplanningEngine(settings={"alternatives": {"human_approval_threshold": 0.99}})
    plan = chain("writer", "researcher", writer="write", editor="write")
    agents = Agents("writer")
    with pytest.raises(NeedsHuman) as raised:
        await run_through(engine, plan, agents, thread="tea")
    engine.answer(raised.value.questions[0], "approve")
    outputs = await run_through(engine, plan, agents, thread="tea")
    assert outputs["writer"] == "editor said this"
    assert agents.asked == ["writer", "editor", "researcher"]


async def test_a_refused_alternative_makes_no_further_question():
    """Until the answer the same question is raised; then the step has failed until a later run."""
    engine = ReplanningEngine(settings={"alternatives": {"human_approval_threshold": 0.99}})
    plan = chain("writer", writer="write", editor="write")
    agents = Agents("writer")
    for _ in range(2):
        with pytest.raises(NeedsHuman):
            await run_through(engine, plan, agents, thread="tea")
    (question,) = engine.pending()
    engine.answer(question.id, "reject", by="Ada")
    with pytest.raises(CallFailed, match="writer failed"):
        await run_through(engine, plan, agents, thread="tea")
    assert agents.asked == ["writer"]
    assert await run_through(engine, plan, Agents(), thread="tea") == {"writer": "writer said this"}


async def test_a_provider_may_insert_and_skip_what_has_not_begun():
    """A task that is added before a step comes before it; a step that is skipped is left out."""
    changes = (
        SkipTask(task_id="writer"),
        AddTask(task=Task(id="check", tool="researcher", depends_on=("writer",))),
        ModifyTask(task_id="editor", fields={"depends_on": ["check"]}),
    )
    engine = make_engine(lambda _: [alternative(*changes)])
    agents = Agents("writer")
    outputs = await run_through(engine, chain("writer", "editor"), agents)
    assert agents.asked == ["writer", "researcher", "editor"]
    assert list(outputs) == ["writer", "check", "editor"]
    assert outputs["writer"] is None


async def test_a_framework_that_calls_its_steps_itself_gets_what_was_put_before_them():
    """The caller performs the added tasks first, once, and the agent gets their outputs."""
    engine = ReplanningEngine()
    earlier: list[object] = []

    async def ask(agent: str, arguments: Mapping[str, object]) -> str:
        earlier.append((agent, arguments.get(EARLIER)))
        return f"{agent} said this"

    async with agent_session(engine, chain("writer", "editor")) as session:
        session.run.apply(
            [
                AddTask(task=Task(id="facts", tool="researcher", depends_on=("writer",))),
                AddTask(task=Task(id="check", tool="researcher", depends_on=("facts",))),
                ModifyTask(task_id="editor", fields={"depends_on": ["check"]}),
            ]
        )
        steps = AgentSteps(engine, session, asks=False)
        for step in ("writer", "editor"):
            await steps.perform(step, ask, known=["writer", "editor"])
    said = [("researcher", "researcher said this")]
    assert earlier == [
        ("writer", None),
        ("researcher", None),
        ("researcher", said),
        ("editor", said),
    ]


async def test_a_framework_that_calls_its_steps_itself_need_not_wait_for_later_ones():
    """A step that was moved behind a later one of the framework is performed at once."""
    engine = ReplanningEngine()
    agents = Agents()
    plan = chain("researcher", "writer", "editor")
    known = ["researcher", "writer", "editor"]
    async with agent_session(engine, plan) as session:
        session.run.apply(
            [
                ModifyTask(task_id="editor", fields={"depends_on": ["researcher"]}),
                ModifyTask(task_id="writer", fields={"depends_on": ["editor"]}),
            ]
        )
        steps = AgentSteps(engine, session, asks=False)
        with anyio.fail_after(5):
            for step in known:
                await steps.perform(step, agents, known=known)
    assert agents.asked == known
    assert session.run.result.ok


@pytest.mark.parametrize("change", [RemoveTask, CancelTask])
async def test_a_step_that_was_taken_out_of_the_plan_is_left_out(change):
    """Its agent is not asked, whoever calls it."""
    engine = ReplanningEngine()
    agents = Agents()
    async with agent_session(engine, chain("writer", "editor")) as session:
        session.run.apply([change(task_id="editor")])
        steps = AgentSteps(engine, session, asks=False)
        await steps.perform("writer", agents, known=["writer", "editor"])
        assert steps.next_step(["writer"]) is None
        with pytest.raises(CallSkipped):
            await steps.perform("editor", agents, known=["writer", "editor"])
    assert agents.asked == ["writer"]


def test_any_text_can_be_what_a_workflow_is_asked_for():
    """Control characters are no part of an objective, and an empty one has a name."""
    assert agent_plan("a\x00b\nc", [], AGENTS, None).goal.objective == "a b\nc"
    assert agent_plan("", [], AGENTS, None).goal.objective == "Run of a workflow"


@pytest.mark.parametrize("failing", [(), ("editor",)])
async def test_what_is_put_before_a_step_that_has_failed_is_done_before_it_is_tried_again(
    failing: tuple[str, ...],
):
    """The step waits for it; where it fails for good, the step has failed as well."""
    agents = Agents("writer")

    def repair(_: ReplanRequest) -> list[Alternative]:
        agents.failing = set(failing)
        check = Task(id="check", tool="editor")
        before = AddTask(task=check, before=("writer",))
        return [alternative(before, RetryTask(task_id="writer"))]

    engine = make_engine(repair, limits={"replans_per_lineage": 1})
    async with agent_session(engine, chain("writer")) as session:
        steps = AgentSteps(engine, session, asks=False)
        if failing:
            with pytest.raises((CallFailed, ValueError)):
                await steps.perform("writer", agents, known={"writer"})
            assert set(agents.asked) == {"writer", "editor"}
        else:
            output = await steps.perform("writer", agents, known={"writer"})
            assert output == "writer said this"
            assert agents.asked == ["writer", "editor", "writer"]
