"""Replans that are wanted and cannot be, and replans that come to nothing: who is told, and what is done instead."""

from __future__ import annotations

import pytest

from replanning import Answer, Settings, Task
from replanning.errors import LLMUnavailable
from replanning.journal import MemoryStore
from replanning.journal.records import QuestionVerdict
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.testing import ScriptedGate, VirtualClock
from tests.support.planning import (
    AGAIN,
    MISSING,
    SUBTASKS,
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
)

pytestmark = pytest.mark.anyio

FAILED: JsonObject = {"reflection": {"action_id": "write", "status": "failure"}}


class NotOk(Desk):
    """Tools of which `write` reports a failure in its output, and does not fail."""

    async def __call__(self, task: Task, context: object) -> JsonValue:
        """Use the tool of a task."""
        said = await super().__call__(task, context)
        return {"ok": False} if task.tool == "write" else said


# After an action that succeeded


@pytest.mark.parametrize(
    ("escalation", "status"), [("abort", "aborted"), ("wait", "needs_human"), ("assume", "succeeded")]
)
async def test_an_impossible_replan_after_an_action_is_escalated(escalation: str, status: str) -> None:
    """A replan that a limit forbids after a successful action is refused once to the model, then escalated by settings."""
    none: JsonObject = {"execution": {"max_partial_replans": 0}}
    stated: JsonObject = {"escalation": {"on_no_alternative": escalation}, "planning": {"replanning": none}}
    model = Model({"decision:execution": (replan("partial_replan"), replan("partial_replan"), go_on())})
    desk = Desk()
    async with VirtualClock() as clock:
        planning = coordinator(
            model, clock, desk, settings=Settings.model_validate({**stated, "judge_on": "every_action"})
        )
        await planning.execute_with_planning()

    assert planning.result.status == status, planning.result.reason
    assert [tool for _, tool in desk.used] == (["write", "post"] if escalation == "assume" else ["write"])
    asked = [kind for kind in model.asked if kind in ("decision:execution", "reflection")]
    assert asked == ["decision:execution"] * (3 if escalation == "assume" else 2)


async def test_a_person_may_continue_without_an_impossible_replan() -> None:
    """A person may approve to continue without an impossible replan; then the rest of the plan is executed."""
    none: JsonObject = {"planning": {"replanning": {"execution": {"max_partial_replans": 0}}}}
    model = Model({"decision:execution": (replan("partial_replan"), replan("partial_replan"), go_on())})
    gate, desk = ScriptedGate([Answer("approve", by="eve")]), Desk()
    async with VirtualClock() as clock:
        settings = Settings.model_validate({**none, "judge_on": "every_action"})
        planning = coordinator(model, clock, desk, settings=settings, gate=gate)
        assert await planning.execute_with_planning()

    assert [tool for _, tool in desk.used] == ["write", "post"]
    assert ["limit of 0 partial replans" in question.text for question in gate.questions] == [True]


async def test_a_reported_failure_is_not_skipped() -> None:
    """If the replan after a reported failure is impossible, the run does not continue as if the action had succeeded."""
    none: JsonObject = {"planning": {"replanning": {"execution": {"max_action_retries": 0}}}}
    model = Model({"reflection": FAILED, "decision:execution": replan("retry")})
    desk = NotOk()
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, desk, settings=Settings.model_validate(none))
        assert not await planning.execute_with_planning()

    assert [tool for _, tool in desk.used] == ["write"]
    assert "the limit of 0 retries of action 'write' is reached" in planning.result.reason


@pytest.mark.parametrize("verdict", ["approve", "reject"])
async def test_an_unsure_retry_after_a_stated_failure_is_asked_about(verdict: QuestionVerdict) -> None:
    """With a confidence between 0.3 and 0.5 a person is asked, also if only the output reports the failure."""
    unsure = replan("retry", confidence=0.4)
    model = Model({"reflection": FAILED, "decision:execution": (unsure, go_on())})
    gate, desk = ScriptedGate([Answer(verdict, by="eve")]), NotOk()
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, desk, gate=gate)
        assert await planning.execute_with_planning() is (verdict == "approve")

    assert ["its confidence is 0.4" in question.text for question in gate.questions] == [True]
    assert [tool for _, tool in desk.used] == (["write", "write", "post"] if verdict == "approve" else ["write"])
    (record,) = [record for record in planning.state.records if record.replan_type == "retry"]
    assert record.executed is (verdict == "approve")


async def test_a_retry_that_a_declared_fallback_supersedes_is_on_record() -> None:
    """If the model wants to retry an action that has a fallback, the fallback is used, and recorded."""
    planned: JsonObject = {"actions": [action("write", "write", fallback_strategy="shout"), action("post", "post")]}
    replies: Replies = {
        "action_sequence": planned,
        "reflection": FAILED,
        "decision:execution": replan("retry"),
    }
    desk = NotOk()
    planning, _, _ = await run(replies, desk)
    assert planning.result.status == "succeeded"

    assert [tool for _, tool in desk.used] == ["write", "shout", "post"]
    assert [(one.replan_type, one.executed) for one in planning.state.records if one.phase == "execution"] == [
        ("retry", False)
    ]


# An unsure replan beside a question

UNSURE: JsonObject = {"confidence": 0.4, "clarification_needed": True, "clarification_questions": ["Which?"]}
EACH = Settings.model_validate({"judge_on": "every_action"})


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize(
    ("phase", "kind", "desk", "settings"),
    [
        ("execution", "partial_replan", {"write": [FileNotFoundError("news.txt")]}, None),
        ("execution", "partial_replan", {}, EACH),
        ("reflection", "plan_revision", {}, None),
    ],
    ids=["failed", "succeeded", "reflection"],
)
async def test_an_unsure_replan_with_a_question(
    phase: str, kind: str, desk: dict[str, list[Exception]], settings: Settings | None, answered: bool
) -> None:
    """An unsure replan with a question is executed and counted when a person approves it, never for lack of an answer."""
    again = revision(action("more", "shout"))
    model = Model({f"decision:{phase}": (replan(kind, **UNSURE), go_on()), "revision": again})
    gate = ScriptedGate([Answer("approve", by="eve", comment="the first")]) if answered else None
    used = Desk(desk)
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, used, settings=settings, gate=gate)
        assert await planning.execute_with_planning()

    assert (("v2.more", "shout") in used.used) is answered
    assert planning.state.counts.total == answered
    (record,) = [record for record in planning.state.records if record.replan_type == kind]
    assert (record.executed, record.override_reason) == ((True, None) if answered else (False, "confidence"))


QUESTION: JsonObject = {"clarification_needed": True, "clarification_questions": ["Which?"]}
AT_ONCE: Replies = {
    "task_decomposition": {
        "subtasks": [
            {"id": "write", "description": "write"},
            {"id": "post", "description": "post"},
            {"id": "end", "description": "end", "dependencies": ["write", "post"]},
        ]
    },
    "action_sequence": {"actions": [action("write", "write"), action("post", "write"), action("end", "write")]},
    "revision": (revision(action("end", "shout")), revision(action("more", "shout"))),
}
"""Two actions at once, and one after them."""


def steady(clock: VirtualClock) -> Desk:
    """Tools that all take the same time."""

    class Steady(Desk):
        async def __call__(self, task: Task, context: object) -> JsonValue:
            await clock.sleep(1)
            return await super().__call__(task, context)

    return Steady()


def both(**said: JsonValue) -> tuple[JsonObject, ...]:
    """Decisions for two replans with two causes, and no more."""
    return (*(replan("partial_replan", issues_found=[issue], **said) for issue in ("a", "b")), go_on())


@pytest.mark.parametrize("question", [{}, QUESTION], ids=["approval", "question"])
async def test_approvals_respect_limits(question: JsonObject) -> None:
    """Of two approved replans, only those within the limit are executed; the model is asked about the other."""
    limits: JsonObject = {"replanning": {"execution": {"max_partial_replans": 1}}}
    settings = Settings.model_validate({"judge_on": "every_action", "planning": limits})
    model = Model({**AT_ONCE, "decision:execution": both(confidence=0.4, **question)})
    gate = ScriptedGate([Answer("approve", by="eve", comment="yes")] * 2)
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, steady(clock), settings=settings, gate=gate)
        assert await planning.execute_with_planning(), planning.result.reason

    assert len(gate.questions) == 2
    assert (len(planning.state.plans), planning.state.counts.partial_replans, model.asked.count("revision")) == (
        2,
        1,
        1,
    )
    refused = next(one for one in planning.state.records if one.override_reason == "limit")
    assert any(one.instead_of == refused.replan_id for one in planning.state.records)


@pytest.mark.parametrize(
    ("said", "answered"),
    [
        ({"confidence": 0.4}, True),  # agreement is waited for, and never assumed
        ({**QUESTION, "confidence": 0.4}, True),
        ({**QUESTION, "confidence": 0.4}, False),
        (QUESTION, True),
        (QUESTION, False),
    ],
)
async def test_two_questions_at_once_are_both_asked(said: JsonObject, answered: bool) -> None:
    """Questions about two actions at once are both asked; the run continues when both are declined, or assumed."""
    gate = ScriptedGate([Answer("reject", by="eve")] * 2) if answered else None
    model = Model({**AT_ONCE, "decision:execution": both(**said)})
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, steady(clock), settings=EACH, gate=gate)
        assert await planning.execute_with_planning(), planning.result.reason

    wanted = [one for one in planning.state.records if one.replan_type == "partial_replan"]
    assert [one.executed for one in wanted] == ["confidence" not in said] * 2
    if gate is not None:
        assert len(gate.questions) == 2


async def test_a_revision_that_limits_forbid_by_now_leaves_the_end_to_be_judged() -> None:
    """If limits were lowered before an approval arrives, the plan stays, and the goal is judged all the same."""
    lowered = Settings.model_validate({"planning": {"replanning": {"reflection": {"max_plan_revisions": 0}}}})
    model = Model({"decision:reflection": (replan("plan_revision", confidence=0.4), go_on())})
    store, desk = MemoryStore(), Desk()
    async with VirtualClock() as clock:
        first = coordinator(model, clock, desk, store=store)
        assert not await first.execute_with_planning("r")
        (question,) = first.engine.pending("r")
        first.engine.answer(question.id, "approve", by="eve")
        second = coordinator(model, clock, desk, settings=lowered, store=store)
        assert await second.execute_with_planning("r")

    assert [tool for _, tool in desk.used] == ["write", "post"]
    assert model.asked.count("decision:reflection") == 2
    assert (second.state.completion or {})["status"] == "success"


# Replans of which no plan comes
BAD = revision(action("write", "no-such-tool"))
GOOD = revision(action("write", "shout"), action("post", "post"))


@pytest.mark.parametrize(
    ("wanted", "other", "more"),
    [
        ("partial_replan", "partial_replan", {"revision": (*[BAD] * 4, GOOD)}),
        ("partial_replan", "action_regeneration", {"revision": BAD}),
        ("task_redecomposition", "partial_replan", {"task_decomposition": (SUBTASKS, "no"), "revision": GOOD}),
        ("task_redecomposition", "goal_revision", {"task_decomposition": (SUBTASKS, *["no"] * 4, SUBTASKS)}),
    ],
)
async def test_another_replan_replaces_one_without_a_plan(wanted: str, other: str, more: Replies) -> None:
    """After a replan without a valid plan, the model may decide on another one, from an earlier phase or a later one."""
    model = Model({"decision:execution": (because(wanted, 0), because(other, 1), go_on()), **more})
    desk = Desk({"write": [MISSING]})
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, desk)
        assert await planning.execute_with_planning(), planning.result.reason

    assert [task for task, _ in desk.used] == ["write", "v2.write", "v2.post"]
    made = [record for record in planning.state.records if record.executed]
    assert [(one.replan_type, one.result) for one in made] == [(wanted, "failure"), (other, "success")]
    assert planning.state.counts.total == 2
    assert planning.state.counts.lineages == {"write": 2}


@pytest.mark.parametrize(
    ("wanted", "kind", "replies"),
    [
        ("partial_replan", "revision", (BAD,)),
        ("goal_revision", "goal_understanding", (USUAL["goal_understanding"], "no")),
    ],
)
@pytest.mark.parametrize(("escalation", "verdict"), [("assume", None), ("wait", "approve"), ("wait", "reject")])
async def test_without_another_way_it_is_escalated(
    escalation: str, verdict: QuestionVerdict | None, wanted: str, kind: str, replies: tuple[JsonValue, ...]
) -> None:
    """If a replan yields no valid plan and the model has no alternative, a person decides, or the rest continues."""
    model = Model({"decision:execution": (replan(wanted), go_on()), kind: replies})
    desk = Desk({"write": [MISSING]})
    settings = Settings.model_validate({"escalation": {"on_no_alternative": escalation}})
    gate = None if verdict is None else ScriptedGate([Answer(verdict, by="eve")])
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, desk, settings=settings, gate=gate)
        assert await planning.execute_with_planning() is (verdict != "reject")

    assert [task for task, _ in desk.used] == (["write"] if verdict == "reject" else ["write", "post"])
    assert model.asked.count("decision:execution") == 2
    assert model.asked.count(kind) == 4 + len(replies) - 1


@pytest.mark.parametrize("phase", ["goal_understanding", "task_decomposition", "action_sequence", "reflection"])
async def test_the_model_may_keep_the_previous_output(phase: str) -> None:
    """A repeated phase that fails does not end the run: its previous output is used if the model decides so."""
    usual = {"reflection": "revision"}.get(phase, phase)
    first: tuple[JsonValue, ...] = () if phase == "reflection" else (USUAL[phase],)
    model = Model({f"decision:{phase}": (replan(AGAIN[phase]), go_on()), usual: (*first, "no")})
    desk = Desk()
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, desk)
        assert await planning.execute_with_planning(), planning.result.reason

    assert [task for task, _ in desk.used] == ["write", "post"]
    wanted = next(record for record in planning.state.records if record.replan_type == AGAIN[phase])
    assert (wanted.executed, wanted.result) == (True, "failure")
    assert planning.state.counts.total == 1


async def test_a_replan_without_a_plan_is_recorded_as_failed() -> None:
    """A replan that was executed and yielded no plan counts as failed, also in another process."""
    store = MemoryStore()
    settings = Settings.model_validate({"escalation": {"on_no_alternative": "wait"}})
    replies: Replies = {"decision:execution": (replan("partial_replan"), go_on()), "revision": BAD}
    model = Model(replies)
    async with VirtualClock() as clock:
        first = coordinator(model, clock, Desk({"write": [MISSING]}), settings=settings, store=store)
        assert not await first.execute_with_planning("r")
        second = coordinator(model, clock, settings=settings, store=store)
        await second.execute_with_planning("r")

    assert second.result.status == "needs_human"
    assert model.asked.count("decision:execution") == 2
    assert [record.result for record in second.state.records if record.executed] == ["failure"]


# A model that cannot be asked


def absent(prompt: str) -> JsonValue:
    """A model that is unavailable when an action has failed."""
    kind = kind_of(prompt)
    if kind == "decision:execution":
        raise LLMUnavailable("overloaded")
    return USUAL.get(kind, go_on())


async def test_a_failed_action_waits_for_the_model() -> None:
    """If the model is unavailable after a failure, the work is kept until a person wants another try."""
    store, desk = MemoryStore(), Desk({"post": [MISSING]})
    async with VirtualClock() as clock:
        first = coordinator(absent, clock, desk, store=store)
        assert not await first.execute_with_planning("r")
        (question,) = first.engine.pending("r")
        assert "overloaded; once the model can be asked: try 'post' again?" in question.text
        assert first.result.status == "needs_human"
        first.engine.answer(question.id, "approve", by="eve")
        second = coordinator(Model(), clock, desk, store=store)
        assert await second.execute_with_planning("r")

    assert [tool for _, tool in desk.used] == ["write", "post", "post"]


@pytest.mark.parametrize(("escalation", "done"), [("assume", True), ("abort", False)])
async def test_settings_decide_if_the_model_is_unavailable(escalation: str, done: bool) -> None:
    """If settings name a way without an alternative, the run does not wait for a person when the model is unavailable."""
    settings = Settings.model_validate({"escalation": {"on_no_alternative": escalation}})
    async with VirtualClock() as clock:
        planning = coordinator(absent, clock, Desk({"post": [MISSING]}), settings=settings)
        assert await planning.execute_with_planning() is done
    assert planning.result.status == ("succeeded" if done else "aborted")


async def test_declining_another_try_ends_the_run() -> None:
    """Declining another try ends the run with that reason."""
    gate = ScriptedGate([Answer("reject", by="eve")])
    async with VirtualClock() as clock:
        planning = coordinator(absent, clock, Desk({"post": [MISSING]}), gate=gate)
        assert not await planning.execute_with_planning()
    assert planning.result.status == "failed"
    assert (planning.state.completion or {})["status"] == "requires_human_intervention"
