"""Magentic workflows of the Microsoft Agent Framework with scripted models: with an engine and without one."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("agent_framework", reason="agent-framework-core is not installed")
pytest.importorskip(
    "agent_framework_orchestrations", reason="agent-framework-orchestrations is not installed"
)

from agent_framework import Agent, InMemoryCheckpointStorage
from agent_framework_orchestrations import MagenticBuilder, StandardMagenticManager

from replanning import Answer, ReplanningEngine
from replanning.changes import AbortRun
from replanning.errors import NotRunning
from replanning.integrations.magentic import replanned
from replanning.journal import SqliteStore
from replanning.testing import ScriptedGate
from tests.integrations.test_agent_framework import Model, repairing, statuses
from tests.support.asyncio_only import anyio_backend  # noqa: F401 - a fixture
from tests.support.runs import alternative, make_engine

RESEARCH = {"researcher": "research", "librarian": "research"}
PLAN = "To do:\n- Find the figures\n  - in the web\n- Write the report"


def ledger(
    speaker: str, *, satisfied: bool = False, progress: bool = True, loop: bool = False
) -> str:
    """A progress ledger as a model writes it."""
    answers = {
        "is_request_satisfied": satisfied,
        "is_in_loop": loop,
        "is_progress_being_made": progress,
        "next_speaker": speaker,
        "instruction_or_question": f"speak, {speaker}",
    }
    return json.dumps(
        {name: {"reason": f"because {name}", "answer": answer} for name, answer in answers.items()}
    )


def manager_of(*steps: Any, **options: Any) -> Any:
    """A manager whose model answers so."""
    return StandardMagenticManager(Agent(Model(*steps), name="manager"), **options)


def workflow_of(manager: Any, said: list[str], **options: Any) -> Any:
    """A workflow of a researcher, a librarian and a writer, who note that they have spoken."""

    class Speaker(Model):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def _inner_get_response(self, **options: Any) -> Any:
            said.append(self.name)
            self.steps = [f"{self.name} spoke"]
            return super()._inner_get_response(**options)

    names = ["researcher", "librarian", "writer"]
    agents = [Agent(Speaker(name), name=name, description=f"A {name}.") for name in names]
    return MagenticBuilder(participants=agents, manager=manager, **options).build()


def tasks(engine: ReplanningEngine) -> Mapping[str, tuple[str, str]]:
    """Names and states of the tasks of the newest run."""
    live = engine.history(engine.store.runs()[0].run).replay()
    return {
        entry.id: (entry.task.name or entry.task.tool or "", str(entry.state)) for entry in live
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_plan(stream, clock):
    """The steps of the plan and the rounds are tasks; the workflow says and does what it does without an engine."""
    script = [
        "facts",
        PLAN,
        ledger("researcher"),
        ledger("writer"),
        ledger("writer", satisfied=True),
        "the answer",
    ]
    engine, seen = repairing(clock), []

    async def play(manager: Any) -> None:
        said: list[str] = []
        workflow = workflow_of(manager, said)
        if stream:
            events = [event async for event in workflow.run("Report!", stream=True)]
            seen.append([said, [event.type for event in events]])
        else:
            seen.append(
                [said, [str(each) for each in (await workflow.run("Report!")).get_outputs()]]
            )

    await play(manager_of(*script))
    async with replanned(manager_of(*script), engine) as manager:
        await play(manager)
    assert seen[0] == seen[1]
    assert seen[0][0] == ["researcher", "writer"]
    assert tasks(engine) == {
        "step-1": ("Find the figures", "DONE"),
        "step-2": ("Write the report", "DONE"),
        "researcher-3": ("researcher", "DONE"),
        "writer-4": ("writer", "DONE"),
    }
    assert statuses(engine) == ["succeeded"]


@pytest.mark.parametrize("wrong", [{"progress": False}, {"loop": True}])
async def test_substitute(wrong, clock):
    """After a round without progress, a participant of the same capability is given the same instruction."""
    script = [
        "facts",
        PLAN,
        ledger("researcher"),
        ledger("researcher", **wrong),
        ledger("writer", satisfied=True),
    ]
    engine, said = repairing(clock), list[str]()
    async with replanned(
        manager_of(*script, "the answer"), engine, capabilities=RESEARCH
    ) as manager:
        result = await workflow_of(manager, said).run("Report!")
    assert said == ["researcher", "librarian"]
    [updated] = [each.data.content for each in result if each.type == "magentic_orchestrator"][2:3]
    assert updated.next_speaker.answer == "librarian"
    assert updated.instruction_or_question.answer == "speak, researcher"
    assert tasks(engine)["researcher-3~2"] == ("librarian", "DONE")
    assert statuses(engine) == ["succeeded"]


async def test_nobody_is_asked_without_approvals(clock):
    """With `approvals=False` the manager decides what a person would be asked, although there is a gate."""
    said = list[str]()
    gate = ScriptedGate([Answer("approve")])
    script = [
        "facts",
        PLAN,
        ledger("researcher"),
        ledger("writer", progress=False),
        ledger("writer", satisfied=True),
        "the answer",
    ]
    stated: dict[str, Any] = {
        **RESEARCH,
        "librarian": {"capability": "research", "dangerous": True},
    }
    async with replanned(
        manager_of(*script),
        repairing(clock, gate=gate),
        capabilities=stated,
        approvals=False,
    ) as manager:
        await workflow_of(manager, said).run("Report!")
    assert said == ["researcher", "writer"]
    assert gate.questions == []


async def test_new_plan(clock):
    """The steps of a new plan replace those that are not done, for the reason that the manager gives."""
    stalled = ledger("writer", progress=False)
    script = [
        "facts",
        PLAN,
        ledger("writer"),
        stalled,
        "new facts",
        "Ask the writer.",
        ledger("writer", satisfied=True),
    ]
    engine, said = repairing(clock), list[str]()
    async with replanned(manager_of(*script, "the answer", max_stall_count=0), engine) as manager:
        await workflow_of(manager, said).run("Report!")
    assert said == ["writer"]
    assert tasks(engine) == {
        "step-1": ("Find the figures", "CANCELLED"),
        "step-2": ("Write the report", "CANCELLED"),
        "writer-3": ("writer", "FAILED"),
        "writer-4": (
            "writer",
            "CANCELLED",
        ),  # the manager has it speak again, then thinks better of it
        "step-3": ("Ask the writer.", "DONE"),
    }
    reasons = [entry.reason for entry in engine.history(engine.store.runs()[0].run).entries]
    assert "because is_progress_being_made" in reasons
    assert statuses(engine) == ["succeeded"]


async def test_plans_of_people(clock):
    """A plan that a person has revised is that of the session, and so is that of a second workflow in the same block."""
    done = [ledger("writer"), ledger("writer", satisfied=True), "the answer"]
    engine, said = repairing(clock), list[str]()
    script = ["facts", PLAN, "facts", "1. Ask\n2) Write", *done, "facts", "- Write again", *done]
    async with replanned(manager_of(*script), engine) as manager:
        workflow = workflow_of(manager, said, enable_plan_review=True)
        [request] = (await workflow.run("Report!")).get_request_info_events()
        revised = await workflow.run(responses={request.request_id: request.data.revise("shorter")})
        [request] = revised.get_request_info_events()
        await workflow.run(responses={request.request_id: request.data.approve()})
        await workflow_of(manager, said).run("Report again!")
    assert [name for name, state in tasks(engine).values() if state == "DONE"] == [
        "Ask",
        "Write",
        "writer",
        "Write again",
        "writer",
    ]
    assert statuses(engine) == ["succeeded"]


async def test_plan_that_is_made_twice(clock):
    """A manager whose ledger cannot be read plans anew as before; a workflow that ends without success fails."""
    script = ["facts", PLAN, "no ledger", "facts", PLAN, ledger("nobody"), "the answer"]
    engine, said = repairing(clock), list[str]()
    async with replanned(
        manager_of(*script, progress_ledger_retry_count=1, max_round_count=3), engine
    ) as manager:
        outputs = (await workflow_of(manager, said).run("Report!")).get_outputs()
    assert (said, [str(each) for each in outputs]) == ([], ["the answer"])
    assert [state for _, state in tasks(engine).values()] == ["CANCELLED"] * 4
    assert statuses(engine) == ["failed"]


async def test_session_that_cannot_go_on(clock):
    """A session that was aborted, or whose participants do not exist, ends the workflow."""
    engine = make_engine(lambda request: [alternative(AbortRun(reason="enough"))], clock=clock)
    script = ["facts", PLAN, ledger("writer"), ledger("writer", progress=False)]
    with pytest.raises(NotRunning):
        async with replanned(manager_of(*script), engine) as manager:
            await workflow_of(manager, []).run("Report!")
    assert statuses(engine) == ["aborted"]
    with pytest.raises(ValueError, match="no participant called 'write'"):
        async with replanned(manager_of(*script), capabilities={"write": "x"}) as manager:
            await workflow_of(manager, []).run("Report!")


async def test_resume(tmp_path):
    """A workflow that failed leaves its session paused, and resumes it from its checkpoint."""

    def engine() -> ReplanningEngine:
        return ReplanningEngine(["repair"], store=SqliteStore(tmp_path / "runs.db"))

    said: list[str] = []
    storage = InMemoryCheckpointStorage()
    script = [
        "facts",
        PLAN,
        ledger("researcher"),
        ConnectionError("no model"),
        ConnectionError("no model"),
    ]
    with pytest.raises(ConnectionError):
        async with replanned(manager_of(*script), engine()) as manager:
            await workflow_of(manager, said, checkpoint_storage=storage).run("Report!")
    assert statuses(engine()) == ["paused"]
    script = [ledger("writer"), ledger("writer", satisfied=True), "the answer"]
    async with replanned(manager_of(*script), engine()) as manager:
        workflow = workflow_of(manager, said, checkpoint_storage=storage)
        last = (await storage.list_checkpoints(workflow_name=workflow.name))[-1]
        await workflow.run(checkpoint_id=last.checkpoint_id)
    assert said == ["researcher", "writer"]
    assert statuses(engine()) == ["succeeded"]
