"""Replans in whole runs: their targets, limits and confidence, and the work that they keep."""

from __future__ import annotations

from collections import Counter

import pytest

from replanning import Answer, Settings, Task, TransientError
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.planning import Phase, ReplanDecision, ReplanManager, ReplanPromptBuilder
from replanning.testing import ScriptedGate, VirtualClock
from tests.support.planning import (
    ACTIONS,
    AGAIN,
    MISSING,
    PHASES,
    SUBTASKS,
    Desk,
    Model,
    Replies,
    action,
    because,
    coordinator,
    executed,
    go_on,
    kind_of,
    limits,
    replan,
    revision,
    run,
)

pytestmark = pytest.mark.anyio

OTHER: JsonObject = {"subtasks": [{"id": "other", "description": "Do it otherwise"}]}
OTHERWISE: JsonObject = {"actions": [action("other", "shout")]}
CANNOT: JsonObject = {"error": {"type": "cannot_decompose", "message": "it is one piece", "other_approach": "shout"}}
ASKS = go_on(clarification_needed=True, clarification_questions=["Which?"])


@pytest.mark.parametrize("phase", [*PHASES, "reflection"])
async def test_a_decision_after_each_phase_restarts_from_its_target(phase: str) -> None:
    """After each phase the model decides; an allowed replan restarts from its target phase, then the run goes on."""
    replies: Replies = {
        f"decision:{phase}": (replan(AGAIN[phase]), go_on()),
        "revision": revision(action("x", "shout")),
    }
    planning, model, _ = await run(replies)

    assert planning.result.status == "succeeded"
    asked = Counter(model.asked)
    again = {"reflection": "completion"}.get(phase, phase)
    assert asked[again] == 2
    assert [asked[f"decision:{one}"] for one in PHASES] == [
        2 if one == phase or (phase == "reflection" and one == "action_sequence") else 1 for one in PHASES
    ]
    assert executed(planning.state) == [AGAIN[phase]]


async def test_a_decision_after_execution_restarts_from_its_target() -> None:
    """After an action that failed, execution goes back to the phase that the decision names."""
    for kind, back in {"action_regeneration": 2, "task_redecomposition": 1, "goal_revision": 0}.items():
        replies: Replies = {"decision:execution": (replan(kind), go_on())}
        planning, model, _ = await run(replies, Desk({"write": [MISSING]}))
        assert planning.result.status == "succeeded"
        assert [Counter(model.asked)[phase] for phase in PHASES] == [1] * back + [2] * (3 - back)


async def test_a_replan_that_a_limit_forbids_is_escalated() -> None:
    """A replan that a limit forbids is recorded with the reason, and the model is asked once for another way."""
    settings = limits(action_sequence={"max_regeneration_attempts": 1})
    replies: Replies = {
        "decision:action_sequence": replan("action_regeneration"),
        "decision:execution": replan("action_regeneration"),
    }
    planning, model, _ = await run(replies, Desk({"write": [MISSING]}), settings)

    refused = [record for record in planning.state.records if record.override_reason == "limit"]
    assert [record.phase for record in refused] == [Phase.EXECUTION] * 2
    assert all("the limit of 1 regenerations is reached" in record.reason for record in refused)
    assert refused[1].instead_of == refused[0].replan_id
    assert Counter(model.asked)["decision:execution"] == 2


@pytest.mark.parametrize("limit", [0, 1, 3])
@pytest.mark.parametrize(
    ("phase", "section", "key"),
    [
        ("task_decomposition", "task_decomposition", "max_redecomposition_attempts"),
        ("action_sequence", "action_sequence", "max_regeneration_attempts"),
        ("reflection", "reflection", "max_plan_revisions"),
    ],
)
async def test_a_limit_is_reached_and_not_passed(phase: str, section: str, key: str, limit: int) -> None:
    """A phase that is never good enough is repeated up to its limit, and not once more."""
    wanted = tuple(because(AGAIN[phase], number) for number in range(6))
    revisions = tuple(revision(action(f"more-{number}", "shout")) for number in range(6))
    planning, model, _ = await run(
        {f"decision:{phase}": wanted, "revision": revisions}, settings=limits(**{section: {key: limit}})
    )

    assert executed(planning.state) == [AGAIN[phase]] * min(limit, 3)
    asked = Counter(model.asked)
    assert asked[f"decision:{phase}"] == limit  # where nothing is left, no model is asked
    assert asked[{"reflection": "completion"}.get(phase, phase)] == limit + 1


@pytest.mark.parametrize("limit", [0, 1, 2])
async def test_clarification_requests_are_limited(limit: int) -> None:
    """A model that always asks is answered up to the limit; then it goes on without an answer."""
    asking = go_on(clarification_needed=True, clarification_questions=["Which?"])
    gate = ScriptedGate([Answer("approve", by="eve", comment="all")] * 9)
    settings = limits(goal_understanding={"max_clarification_requests": limit})
    planning, _, _ = await run({"decision:goal_understanding": asking}, settings=settings, gate=gate)

    assert planning.result.status == "succeeded"
    assert len(gate.questions) == planning.state.counts.clarifications == limit


@pytest.mark.parametrize("limit", [0, 1, 3])
async def test_retries_of_an_action_are_limited(limit: int) -> None:
    """The model may retry an action up to its limit, and each retry counts in the total."""
    settings = limits(execution={"max_action_retries": limit})
    planning, _, desk = await run({"decision:execution": replan("retry")}, Desk({"write": [MISSING] * 9}), settings)

    assert [tool for _, tool in desk.used].count("write") == limit + 1
    assert planning.state.counts.total == limit


@pytest.mark.parametrize("limit", [0, 1, 2])
async def test_partial_replans_are_limited(limit: int) -> None:
    """The rest of a plan is replaced after failures up to the limit, and not once more."""
    wanted = tuple(because("partial_replan", number) for number in range(6))
    again = revision(action("write", "write"), action("post", "post"))
    settings = limits(execution={"max_partial_replans": limit})
    planning, model, _ = await run(
        {"decision:execution": wanted, "revision": again}, Desk({"write": [MISSING] * 9}), settings
    )

    assert executed(planning.state) == ["partial_replan"] * limit
    assert Counter(model.asked)["revision"] == limit


@pytest.mark.parametrize("limit", [0, 1, 4])
async def test_replans_of_all_phases_share_a_total(limit: int) -> None:
    """All replans of all phases together, retries included, are no more than the total; then no model is asked to decide."""
    replies: Replies = {
        "decision:goal_understanding": (because("goal_revision", 0), go_on()),
        "decision:task_decomposition": (because("task_redecomposition", 1), go_on()),
        "decision:action_sequence": (because("action_regeneration", 2), go_on()),
        "decision:execution": replan("retry"),
    }
    settings = limits(**{"global": {"max_total_replans": limit}, "execution": {"max_action_retries": 9}})
    planning, model, _ = await run(replies, Desk({"write": [MISSING] * 9}), settings)

    order = ["goal_revision", "task_redecomposition", "action_regeneration", "retry"]
    assert executed(planning.state) == order[:limit]
    assert sum(kind.startswith("decision") for kind in model.asked) == {0: 0, 1: 1, 4: 7}[limit]


async def test_a_tasks_own_retries_do_not_count() -> None:
    """A task's own retries cost no replan: only decisions of the model do."""
    planning, model, desk = await run({}, Desk({"write": [TransientError("busy")] * 2}))
    assert planning.result.status == "succeeded"
    assert [tool for _, tool in desk.used] == ["write"] * 3 + ["post"]
    assert planning.state.counts.total == 0
    assert "decision:execution" not in model.asked


@pytest.mark.parametrize(
    ("confidence", "override", "done"),
    [
        (0.8, None, 1),
        (0.79, None, 1),
        (0.5, None, 1),
        (0.49, "confidence", 0),
        (0.3, "confidence", 0),
        (0.29, "confidence", 0),
    ],
)
async def test_unsure_replans_are_overridden(confidence: float, override: str | None, done: int) -> None:
    """A replan below the required confidence is not executed, and recorded so; the thresholds are inclusive."""
    replies: Replies = {"decision:action_sequence": (replan("action_regeneration", confidence=confidence), go_on())}
    sure: JsonObject = {"require_user_confirmation_on_low_confidence": False}
    planning, _, _ = await run(replies, settings=limits(llm_decision=sure))

    record = planning.state.records[2]
    assert (record.executed, record.override_reason, record.confidence) == (bool(done), override, confidence)
    assert len(planning.state.plans) == 1
    assert planning.state.counts.total == done


async def test_the_third_time_is_a_loop() -> None:
    """The same replan for the same cause runs twice; the third is skipped, and the model is asked once for another way."""
    seen: list[str] = []
    script = Model({"decision:action_sequence": replan("action_regeneration", issues_found=["line 12 is wrong"])})

    def model(prompt: str) -> JsonValue:
        if kind_of(prompt) == "decision:action_sequence":
            seen.append(prompt)
        return script(prompt)

    async with VirtualClock() as clock:
        planning = coordinator(model, clock, settings=limits())
        await planning.execute_with_planning()

    records = [record for record in planning.state.records if record.phase is Phase.ACTION_SEQUENCE]
    assert [record.executed for record in records] == [True, True, False, False]
    assert [record.override_reason for record in records[2:]] == ["loop", "loop"]
    assert "the same action_regeneration has run 2 times for the same cause" in seen[3]
    assert len(seen) == 4


async def test_replacements_inherit_the_limit_of_their_lineage() -> None:
    """After three replans of a task and its replacements, the fourth failure blocks it without asking the model."""
    kinds = ("partial_replan", "action_regeneration", "partial_replan", "action_regeneration")
    wanted = tuple(because(kind, number) for number, kind in enumerate(kinds))
    again = revision(action("write", "write"), action("post", "post"))
    planning, model, _ = await run({"decision:execution": wanted, "revision": again}, Desk({"write": [MISSING] * 9}))

    assert executed(planning.state) == list(kinds[:3])
    assert Counter(model.asked)["decision:execution"] == 3
    assert "blocked" in planning.result.reason


async def test_replacements_inherit_by_whatever_name() -> None:
    """Another name for the replacement of a failed task gives the model no more replans for it."""
    wanted = tuple(because("task_redecomposition", number) for number in range(2))
    wanted += tuple(because("goal_revision", number) for number in range(2, 6))
    names = [f"w{number}" for number in range(8)]
    replies: Replies = {
        "decision:execution": wanted,
        "task_decomposition": tuple({"subtasks": [{"id": name, "description": name}]} for name in names),
        "action_sequence": tuple({"actions": [action(name, "write")]} for name in names),
    }
    planning, model, desk = await run(replies, Desk({"write": [MISSING] * 9}))

    assert len(executed(planning.state)) == 3
    assert [task for task, _ in desk.used] == ["w0", "v2.w1", "v3.w2", "v4.w3"]
    assert Counter(model.asked)["decision:execution"] == 3
    assert planning.state.counts.lineages == {"w0": 3}
    assert "blocked" in planning.result.reason


def test_the_manager_and_the_prompt_builder_have_their_methods() -> None:
    """The manager decides, executes and counts; the builder writes a prompt for each phase; a decision is a model."""
    methods = (
        "request_llm_decision",
        "parse_decision_response",
        "execute_replan",
        "can_replan",
        "should_override",
        "record_decision",
        "get_replan_statistics",
    )
    assert all(callable(getattr(ReplanManager, name)) for name in methods)
    assert all(callable(getattr(ReplanPromptBuilder, str(phase))) for phase in Phase)
    assert {"replan_needed", "confidence", "reasoning", "replan_type"} <= set(ReplanDecision.model_fields)


@pytest.mark.parametrize("decided", [replan("action_regeneration"), ASKS], ids=["sure", "question"])
async def test_actions_planned_again_are_those_of_the_new_subtasks(decided: JsonObject) -> None:
    """After a failure led to new subtasks, actions that are planned twice are planned for the new ones."""
    replies: Replies = {
        "decision:execution": (replan("task_redecomposition"), go_on()),
        "task_decomposition": (SUBTASKS, OTHER),
        "decision:action_sequence": (go_on(), decided, go_on()),
        "action_sequence": (ACTIONS, OTHERWISE),
    }
    gate = ScriptedGate([Answer("approve", by="eve", comment="that one")])
    planning, model, desk = await run(replies, Desk({"post": [MISSING]}), gate=gate)

    assert planning.result.status == "succeeded", planning.result.reason
    assert desk.used == [("write", "write"), ("post", "post"), ("v2.other", "shout")]
    assert model.asked.count("action_sequence") == 3


async def test_a_person_decides_if_the_goal_cannot_be_decomposed_again() -> None:
    """If the goal cannot be decomposed again after a failure, a person decides on the other approach."""
    settings = Settings.model_validate({"escalation": {"on_no_alternative": "wait"}})
    replies: Replies = {
        "decision:execution": (replan("task_redecomposition"), go_on()),
        "task_decomposition": (SUBTASKS, CANNOT, CANNOT, OTHER),
        "action_sequence": (ACTIONS, OTHERWISE),
    }
    gate = ScriptedGate([Answer("approve", by="eve")])
    planning, _, desk = await run(replies, Desk({"post": [MISSING]}), settings, gate)

    assert planning.result.status == "succeeded", planning.result.reason
    assert desk.used[-1] == ("v2.other", "shout")
    assert ["proposed instead: shout" in question.text for question in gate.questions] == [True]


@pytest.mark.parametrize("confidence", [0.9, 0.4], ids=["sure", "asked"])
async def test_replacements_of_a_reported_failure_inherit_its_limit(confidence: float) -> None:
    """Replacements of actions whose outputs report failures share their three replans, whatever their names."""

    class NotOk(Desk):
        async def __call__(self, task: Task, context: object) -> JsonValue:
            said = await super().__call__(task, context)
            return {"ok": False} if task.tool == "write" else said

    most: JsonObject = {"execution": {"max_partial_replans": 9}, "global": {"infinite_loop_detection": False}}
    settings = Settings.model_validate({"escalation": {"on_no_alternative": "abort"}, "planning": {"replanning": most}})
    wanted = tuple(replan("partial_replan", confidence=confidence, issues_found=[name]) for name in "abcde")
    replies: Replies = {
        "reflection": {"reflection": {"action_id": "write", "status": "failure"}},
        "decision:execution": wanted,
        "revision": tuple(revision(action(name, "write"), action("post", "post")) for name in "abcde"),
    }
    gate = ScriptedGate([Answer("approve", by="eve")] * 9)
    planning, _, desk = await run(replies, NotOk(), settings, gate)

    assert [task for task, _ in desk.used if "post" not in task] == ["write", "v2.a", "v3.b", "v4.c"]
    assert planning.state.counts.lineages == {"write": 3}
