"""Escalation in whole runs: invalid replies, failed replans, unanswered questions, exhausted limits."""

from __future__ import annotations

import pytest

from replanning import Answer, Settings, Task
from replanning.errors import LLMUnavailable
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.testing import ScriptedGate, VirtualClock
from tests.support.planning import (
    ACTIONS,
    MISSING,
    TOOLS,
    USUAL,
    Desk,
    Model,
    Replies,
    action,
    because,
    coordinator,
    go_on,
    kind_of,
    replan,
    revision,
    run,
    summary,
)

pytestmark = pytest.mark.anyio


async def test_an_initial_plan_has_three_repair_prompts() -> None:
    """An invalid plan is requested again three times with its problems; then the run ends with the reason."""
    planning, model, desk = await run({"task_decomposition": "I would rather not."})
    assert model.asked.count("task_decomposition") == 4
    assert (planning.result.status, desk.used) == ("aborted", [])
    assert "in 4 tries" in planning.result.reason


@pytest.mark.parametrize("bad", [1, 2, 3])
async def test_a_repaired_plan_is_taken(bad: int) -> None:
    """A valid plan among the four replies is executed."""
    planning, model, _ = await run({"action_sequence": (*["nonsense"] * bad, ACTIONS)})
    assert planning.result.status == "succeeded"
    assert model.asked.count("action_sequence") == bad + 1


async def test_a_decision_that_cannot_be_read_is_none() -> None:
    """An invalid decision is requested once more; then nothing is replanned, and that is recorded."""
    planning, model, _ = await run({"decision:action_sequence": "hm"})
    assert planning.result.status == "succeeded"
    assert model.asked.count("decision:action_sequence") == 2
    record = planning.state.records[2]
    assert (record.executed, record.llm_decision, bool(record.error)) == (False, None, True)


async def test_what_cannot_be_evaluated_is_a_problem() -> None:
    """If the goal cannot be judged, a person is asked; it does not count as achieved."""
    planning, _, _ = await run({"completion": "who knows"})
    assert planning.result.status == "needs_human"
    assert planning.state.completion is not None
    assert planning.state.completion["status"] == "requires_human_intervention"


async def test_a_replan_that_fails_is_told_and_escalates() -> None:
    """A replan without a valid plan is reported to the model once; without an alternative the action is not skipped."""
    refused = revision(action("write", "no-such-tool"))
    replies: Replies = {"decision:execution": (replan("partial_replan"), go_on()), "revision": refused}
    planning, model, desk = await run(replies, Desk({"write": [MISSING]}))

    assert model.asked.count("revision") == 4
    assert model.asked.count("decision:execution") == 2
    assert "it failed: the model gave no usable revision" in model.told("decision:execution")[1]
    assert planning.result.status == "aborted"
    assert "no usable revision" in planning.result.reason
    assert desk.used == [("write", "write")]
    wanted, instead = [record for record in planning.state.records if record.phase == "execution"]
    assert (wanted.executed, wanted.result, instead.instead_of) == (True, "failure", wanted.replan_id)


@pytest.mark.parametrize("kind", ["none", "retry", "partial_replan"])
async def test_an_unanswered_question_about_an_action_is_assumed(kind: str) -> None:
    """An unanswered question about a failed action is replaced by an assumption, recorded, and the action repeated."""
    asks = go_on(
        replan_needed=kind != "none",
        replan_type=kind,
        clarification_needed=True,
        clarification_questions=["Which?"],
    )
    again = revision(action("write", "shout"), action("post", "post"))
    planning, _, desk = await run(
        {"decision:execution": (asks, go_on()), "revision": again}, Desk({"write": [MISSING]})
    )

    assert planning.result.status == "succeeded"
    assert len(desk.used) == 3
    (assumed,) = planning.state.clarified
    assert (assumed.questions, assumed.answer) == (("Which?",), "")
    assert "there is no answer: Which?" in assumed.assumptions


@pytest.mark.parametrize("answered", [True, False])
async def test_an_answer_counts_also_where_the_replan_beside_the_question_cannot_be(answered: bool) -> None:
    """A clarification, or its assumption, is shown when the phase is repeated, also after a replan that loops."""
    looping = because("task_redecomposition", 0)
    decision = looping["replan_decision"]
    assert isinstance(decision, dict)
    asks: JsonObject = {
        "replan_decision": {**decision, "clarification_needed": True, "clarification_questions": ["Which?"]}
    }
    model = Model({"decision:task_decomposition": (looping, looping, asks, "hm", go_on())})
    gate = ScriptedGate([Answer("approve", by="eve", comment="the first")]) if answered else None
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, gate=gate)
        assert await planning.execute_with_planning(), planning.result.reason

    assert ["Which?" in prompt for prompt in model.told("task_decomposition")] == [False, False, False, True]
    assert ("the first" in model.told("task_decomposition")[-1]) is answered
    assert planning.state.counts.redecompositions == 2


async def test_only_what_is_unclear_is_assumed() -> None:
    """Repeating a dangerous action waits for a person, also after a clarification question without an answer."""
    asks = go_on(clarification_needed=True, clarification_questions=["Which?"])
    tools = (TOOLS[0].model_copy(update={"timeout": 5.0}), *TOOLS[1:])
    async with VirtualClock() as clock:

        class Stuck(Desk):
            async def __call__(self, task: Task, context: object) -> JsonValue:
                await clock.sleep(1_000)
                return await super().__call__(task, context)

        planning = coordinator(Model({"decision:execution": (asks, go_on())}), clock, Stuck(), tools=tools)
        await planning.execute_with_planning()
        pending = planning.engine.pending(planning.result.run)

    assert planning.result.status == "needs_human"
    assert ["may do harm" in question.text for question in pending] == [True]
    assert len(planning.state.clarified) == 1


async def test_of_two_failures_none_is_passed_over() -> None:
    """If two actions fail at once and the question about the first stays open, the second is decided all the same."""
    asks = go_on(clarification_needed=True, clarification_questions=["Which?"])
    apart = {"subtasks": [{"id": "write", "description": "Write it"}, {"id": "post", "description": "Post it"}]}
    both: JsonObject = {"actions": [action("write", "write"), action("post", "post")]}
    replies: Replies = {
        "task_decomposition": apart,
        "action_sequence": both,
        "decision:execution": (asks, replan("retry"), go_on()),
    }
    async with VirtualClock() as clock:

        class Slow(Desk):
            async def __call__(self, task: Task, context: object) -> JsonValue:
                await clock.sleep(1)
                return await super().__call__(task, context)

        desk = Slow({"write": [MISSING], "post": [MISSING]})
        planning = coordinator(Model(replies), clock, desk, gate=ScriptedGate([Answer("reject", by="eve")]))
        await planning.execute_with_planning()

    assert planning.result.status == "succeeded", planning.result.reason
    assert sorted(tool for _, tool in desk.used) == ["post", "post", "write", "write"]


async def test_an_action_error_is_decided_about_before_the_reflection() -> None:
    """An action that fails leads to a decision of the execution phase; the reflection comes when the plan is done."""
    planning, model, _ = await run({"decision:execution": replan("retry")}, Desk({"post": [MISSING]}))
    assert planning.result.status == "succeeded"
    assert model.asked.index("decision:execution") < model.asked.index("completion")


async def test_an_error_of_a_reflection_is_passed_over() -> None:
    """A failed reflection on an action is recorded, and the run continues."""

    def model(prompt: str) -> JsonValue:
        kind = kind_of(prompt)
        if kind == "reflection":
            raise LLMUnavailable("overloaded")
        return USUAL.get(kind, go_on())

    settings = Settings.model_validate({"planning": {"reflection": {"trigger_interval": 1}}})
    planning, _, _ = await run(model, settings=settings)
    assert planning.result.status == "succeeded"
    assert [set(one) >= {"action", "error"} for one in planning.state.reflections] == [True, True]


async def test_revisions_used_up() -> None:
    """Exhausted revisions without success ask a person, and the summary requires intervention."""
    more = tuple(revision(action(f"more-{number}", "shout")) for number in range(2))
    wanted = tuple(because("plan_revision", number) for number in range(3))
    replies: Replies = {
        "decision:reflection": wanted,
        "revision": more,
        "completion": summary(achieved=False),
    }
    planning, _, _ = await run(replies)
    completion = planning.state.completion
    assert completion is not None
    assert (planning.result.status, completion["status"]) == ("needs_human", "requires_human_intervention")
    told = completion["summary"]
    assert isinstance(told, dict)
    assert told["revision_attempts"] == 2
    assert told["reason"]


async def test_a_run_that_is_cut_short_is_summed_up() -> None:
    """A run that ends by its time budget has a summary of the work that requires intervention."""
    async with VirtualClock() as clock:

        class Slow(Desk):
            async def __call__(self, task: Task, context: object) -> JsonValue:
                await clock.sleep(40)
                return await super().__call__(task, context)

        settings = Settings.model_validate({"budget": {"wall_clock": 60}})
        planning = coordinator(Model(), clock, Slow(), settings=settings)
        assert not await planning.execute_with_planning()

    completion = planning.state.completion
    assert completion is not None
    told = completion["summary"]
    assert isinstance(told, dict)
    assert (planning.result.status, completion["status"]) == ("aborted", "requires_human_intervention")
    assert (told["goal_achieved"], told["tasks_completed"]) == (False, 1)
    assert "60 s of its budget" in str(told["reason"])
