"""What cannot be: unusable replies, refused and failed replans, goals that cannot be divided, a model that is not there."""

from typing import Any

import pytest

from replanning.errors import LLMUnavailable
from replanning.journal import MemoryStore
from replanning.planning import PlanningState
from tests.support.planning import (
    ACTIONS,
    AGAIN,
    EACH,
    MISSING,
    OFF,
    SUBTASKS,
    TOOLS,
    USUAL,
    WHICH,
    Desk,
    action,
    actions,
    because,
    escalate,
    eve,
    go_on,
    kind_of,
    planned,
    replan,
    revision,
    run,
    summary,
    use,
)
from tests.support.resume import RUN

FAILED = {"reflection": {"action_id": "write", "status": "failure"}}
BAD = revision(action("write", "no-such-tool"))
GOOD = revision(action("write", "shout"), action("post", "post"))
PARTIAL = {"decision:execution": (replan("partial_replan"), replan("partial_replan"), go_on())}


# Unusable replies


@pytest.mark.parametrize("phase", ["task_decomposition", "action_sequence"])
async def test_an_unusable_plan_ends_the_run(phase):
    """An invalid plan is requested again three times with its problems; then the run ends with the reason in its summary."""
    planning, model, desk = await run({phase: "I would rather not."})
    assert model.asked.count(phase) == 4
    assert (planning.result.status, desk.used) == ("aborted", [])
    completion = planning.state.completion
    assert completion["status"] == "requires_human_intervention"
    assert f"no usable {phase} in 4 tries" in str(completion["summary"])


@pytest.mark.parametrize(
    "bad",
    [["nonsense"], ["nonsense"] * 3, [actions(action("write", "rm"), action("post", "post"))]],
)
async def test_a_repaired_plan_is_taken(bad):
    """A valid plan among the four replies is executed, and of those before it nothing."""
    planning, model, desk = await run({"action_sequence": (*bad, ACTIONS)})
    assert (planning.result.status, desk.tools) == ("succeeded", ["write", "post"])
    assert model.asked.count("action_sequence") == len(bad) + 1


async def test_what_cannot_be_evaluated_is_a_problem():
    """If the goal cannot be judged, a person is asked; it does not count as achieved."""
    planning, _, _ = await run({"completion": "who knows"})
    assert planning.result.status == "needs_human"
    assert planning.state.completion["status"] == "requires_human_intervention"


# Goals that cannot be decomposed

CANNOT = {
    "error": {
        "type": "cannot_decompose",
        "message": "there is no post",
        "possible": ["writing"],
        "not_possible": ["posting"],
        "other_approach": "shout it",
    }
}
WRITING: Any = planned(action("write", "write"))
DIVIDED = WRITING["task_decomposition"]


@pytest.mark.parametrize(
    "replies", [(CANNOT, DIVIDED), ({"task_decomposition": DIVIDED, **CANNOT},)]
)
async def test_a_part_of_a_goal_is_done_with_its_limitations(replies):
    """The model divides what is possible, at once or when it is asked to more coarsely; limitations are kept and shown."""
    planning, model, desk = await run({**WRITING, "task_decomposition": replies})

    assert (planning.result.status, desk.used) == ("succeeded", [("write", "write")])
    told = model.told("task_decomposition")
    assert len(told) == len(replies)
    for text in ("decompose more coarsely", "there is no post"):
        assert all(text in prompt for prompt in told[1:])
    assert planning.state.clarified[0].assumptions == ("left out: posting",)
    assert "left out: posting" in model.prompts[-1]


@pytest.mark.parametrize(
    ("how", "status"), [("abort", "aborted"), ("wait", "needs_human"), ("assume", "succeeded")]
)
async def test_an_infeasible_goal_is_escalated_with_its_reasons(how, status):
    """If a coarser split fails too, the escalation names what is possible, what is not, and the proposal."""
    replies = {**WRITING, "task_decomposition": (CANNOT, CANNOT, DIVIDED)}
    planning, _, _ = await run(replies, settings=escalate(how))

    assert planning.result.status == status
    told = str(planning.state.completion if how != "assume" else planning.state.clarified)
    for text in ("there is no post", "not possible: posting", "shout it"):
        assert text in told


@pytest.mark.parametrize(
    ("third", "status", "asked"), [(DIVIDED, "succeeded", 3), (CANNOT, "aborted", 4)]
)
async def test_a_person_agrees_to_another_approach(third, status, asked):
    """The proposed approach is taken when a person approves it; if it fails too, the run ends."""
    replies = {**WRITING, "task_decomposition": (CANNOT, CANNOT, third)}
    planning, model, _ = await run(
        replies, settings=escalate("wait"), gate=eve("approve", "approve")
    )

    assert planning.result.status == status
    assert model.asked.count("task_decomposition") == asked


# Replans that a limit forbids


@pytest.mark.parametrize(
    ("how", "status"), [("wait", "needs_human"), ("assume", "succeeded"), ("abort", "aborted")]
)
async def test_no_alternative_to_a_phase(how, status):
    """A replan that a limit forbids is told to the model once; then a person waits, it is done without, or the run ends."""
    settings = escalate(how, replanning={"global": {"same_trigger_max_count": 1}})
    planning, model, _ = await run(
        {"decision:action_sequence": replan("action_regeneration")}, settings=settings
    )

    assert planning.result.status == status
    assert model.asked.count("decision:action_sequence") == 3
    assert planning.state.counts.total == 1


@pytest.mark.parametrize(
    ("how", "verdict", "status"),
    [
        ("abort", None, "aborted"),
        ("wait", None, "needs_human"),
        ("wait", "approve", "succeeded"),
        ("assume", None, "succeeded"),
    ],
)
async def test_no_alternative_after_an_action(how, verdict, status):
    """A replan that a limit forbids after a successful action ends the run, waits for a person, or is done without."""
    settings = {**EACH, **escalate(how, replanning={"execution": {"max_partial_replans": 0}})}
    gate = eve(verdict) if verdict else None
    planning, model, desk = await run(PARTIAL, settings=settings, gate=gate)

    goes_on = status == "succeeded"
    assert planning.result.status == status, planning.result.reason
    assert desk.tools == (["write", "post"] if goes_on else ["write"])
    asked = [kind for kind in model.asked if kind in ("decision:execution", "reflection")]
    assert asked == ["decision:execution"] * (3 if goes_on else 2)
    assert gate is None or [
        "limit of 0 partial replans" in question.text for question in gate.questions
    ] == [True]


async def test_a_reported_failure_is_not_skipped():
    """If the replan after a reported failure is impossible, the run does not continue as if the action had succeeded."""
    replies = {"reflection": FAILED, "decision:execution": replan("retry")}
    settings = {"planning": {"replanning": {"execution": {"max_action_retries": 0}}}}
    planning, _, desk = await run(replies, Desk({"write": [{"ok": False}]}), settings)

    assert planning.result.status != "succeeded"
    assert desk.tools == ["write"]
    assert "the limit of 0 retries of action 'write' is reached" in planning.result.reason


@pytest.mark.parametrize(
    ("verdict", "tools"), [("approve", ["write", "write", "post"]), ("reject", ["write"])]
)
async def test_an_unsure_retry_after_a_stated_failure_is_asked_about(verdict, tools):
    """With a confidence between 0.3 and 0.5 a person is asked, also if only the output reports the failure."""
    replies = {
        "reflection": FAILED,
        "decision:execution": (replan("retry", confidence=0.4), go_on()),
    }
    gate = eve(verdict)
    planning, _, desk = await run(replies, Desk({"write": [{"ok": False}] * 2}), gate=gate)

    assert (planning.result.status == "succeeded") is (verdict == "approve")
    assert ["its confidence is 0.4" in question.text for question in gate.questions] == [True]
    assert desk.tools == tools
    (record,) = [record for record in planning.state.records if record.replan_type == "retry"]
    assert record.executed is (verdict == "approve")


# Replans of which no plan comes


async def test_a_replan_that_fails_is_told_and_escalates():
    """A replan without a valid plan is reported to the model once; without an alternative the action is not skipped."""
    replies = {"decision:execution": (replan("partial_replan"), go_on()), "revision": BAD}
    planning, model, desk = await run(replies, Desk({"write": [MISSING]}))

    assert model.asked.count("revision") == 4
    assert model.asked.count("decision:execution") == 2
    assert "it failed: the model gave no usable revision" in model.told("decision:execution")[1]
    assert planning.result.status == "aborted"
    assert "no usable revision" in planning.result.reason
    assert desk.used == [("write", "write")]
    wanted, instead = [record for record in planning.state.records if record.phase == "execution"]
    assert (wanted.executed, wanted.result, instead.instead_of) == (
        True,
        "failure",
        wanted.replan_id,
    )


@pytest.mark.parametrize(
    ("wanted", "other", "more"),
    [
        ("partial_replan", "partial_replan", {"revision": (*[BAD] * 4, GOOD)}),
        ("partial_replan", "action_regeneration", {"revision": BAD}),
        (
            "task_redecomposition",
            "partial_replan",
            {"task_decomposition": (SUBTASKS, "no"), "revision": GOOD},
        ),
        (
            "task_redecomposition",
            "goal_revision",
            {"task_decomposition": (SUBTASKS, *["no"] * 4, SUBTASKS)},
        ),
    ],
)
async def test_another_replan_replaces_one_without_a_plan(wanted, other, more):
    """After a replan without a valid plan, the model may decide on another one, from an earlier phase or a later one."""
    replies = {"decision:execution": (because(wanted, 0), because(other, 1), go_on()), **more}
    planning, _, desk = await run(replies, Desk({"write": [MISSING]}))

    assert planning.result.status == "succeeded", planning.result.reason
    assert [task for task, _ in desk.used] == ["write", "v2.write", "v2.post"]
    made = [record for record in planning.state.records if record.executed]
    assert [(one.replan_type, one.result) for one in made] == [
        (wanted, "failure"),
        (other, "success"),
    ]
    assert planning.state.counts.total == 2
    assert planning.state.counts.lineages == {"write": 2}


@pytest.mark.parametrize(
    ("wanted", "kind", "replies"),
    [
        ("partial_replan", "revision", (BAD,)),
        ("goal_revision", "goal_understanding", (USUAL["goal_understanding"], "no")),
    ],
)
@pytest.mark.parametrize(
    ("how", "verdict"), [("assume", None), ("wait", "approve"), ("wait", "reject")]
)
async def test_without_another_way_it_is_escalated(how, verdict, wanted, kind, replies):
    """If a replan yields no valid plan and the model has no alternative, a person decides, or the rest continues."""
    gate = None if verdict is None else eve(verdict)
    decided = {"decision:execution": (replan(wanted), go_on()), kind: replies}
    planning, model, desk = await run(decided, Desk({"write": [MISSING]}), escalate(how), gate)

    assert (planning.result.status == "succeeded") is (verdict != "reject")
    assert desk.tools == (["write"] if verdict == "reject" else ["write", "post"])
    assert model.asked.count("decision:execution") == 2
    assert model.asked.count(kind) == 4 + len(replies) - 1


@pytest.mark.parametrize("phase", AGAIN)
async def test_the_model_may_keep_the_previous_output(phase):
    """A repeated phase that fails does not end the run: its previous output is used if the model decides so."""
    replies = {f"decision:{phase}": (replan(AGAIN[phase]), go_on())}
    replies |= {"revision": "no"} if phase == "reflection" else {phase: (USUAL[phase], "no")}
    planning, _, desk = await run(replies)

    assert planning.result.status == "succeeded", planning.result.reason
    assert desk.used == [("write", "write"), ("post", "post")]
    wanted = next(record for record in planning.state.records if record.replan_type == AGAIN[phase])
    assert (wanted.executed, wanted.result) == (True, "failure")
    assert planning.state.counts.total == 1


# Failures without a replan


async def test_a_failed_action_is_not_skipped():
    """If the model is not sure to do without a failed action and no person can be asked, the run ends with the reason."""
    planning, _, _ = await run(
        {"decision:execution": go_on(confidence=0.7)}, Desk({"write": [MISSING]})
    )
    assert planning.result.status == "aborted"
    assert "write failed, and no decision helps" in planning.result.reason


async def test_of_two_failures_none_is_passed_over():
    """If two actions fail at once and the question about the first stays open, the second is decided all the same."""
    replies = {
        **planned(action("write", "write"), action("post", "post")),
        "decision:execution": (go_on(**WHICH), replan("retry"), go_on()),
    }
    planning, _, desk = await run(
        replies, Desk({"write": [MISSING], "post": [MISSING]}, takes=1), gate=eve("reject")
    )

    assert planning.result.status == "succeeded", planning.result.reason
    assert sorted(desk.tools) == ["post", "post", "write", "write"]


@pytest.mark.parametrize("kind", ["none", "retry", "partial_replan"])
async def test_an_unanswered_question_about_an_action_is_assumed(kind):
    """An unanswered question about a failed action is replaced by an assumption, recorded, and the action repeated."""
    asks = go_on(replan_needed=kind != "none", replan_type=kind, **WHICH)
    planning, _, desk = await run(
        {"decision:execution": (asks, go_on()), "revision": GOOD}, Desk({"write": [MISSING]})
    )

    assert planning.result.status == "succeeded"
    assert len(desk.used) == 3
    (assumed,) = planning.state.clarified
    assert (assumed.questions, assumed.answer) == (("Which?",), "")
    assert "unanswered: Which?" in assumed.assumptions


ASKED_AGAIN = [
    # what the model wants each time, its limit, and the uses of the tool and the replans that are left
    ("retry", {"execution": {"max_action_retries": 1}}, 2, ["retry"]),
    ("none", {"execution": {"max_action_retries": 1}}, 2, ["retry"]),
    (
        "partial_replan",
        {"execution": {"max_partial_replans": 1, "max_action_retries": 0}},
        2,
        ["partial_replan"],
    ),
    ("retry", {"global": {"max_total_replans": 1}}, 2, ["retry"]),
]


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize(("kind", "limits", "uses", "replans"), ASKED_AGAIN)
async def test_a_replan_beside_a_question_counts(kind, limits, uses, replans, answered):
    """A replan after a failure passes the limits and is on record also if its answer, or its assumption, comes first."""
    asks = go_on(replan_needed=kind != "none", replan_type=kind, **WHICH)
    settings = {
        "planning": {
            "replanning": {"goal_understanding": {"max_clarification_requests": 9}, **limits}
        }
    }
    gate = eve(*["approve"] * 9, comment="this one") if answered else None
    replies = {
        "decision:execution": asks,
        "revision": revision(action("write", "write"), action("post", "post")),
    }
    planning, _, desk = await run(replies, Desk({"write": [MISSING] * 9}), settings, gate)

    assert desk.tools == ["write"] * uses + (["post"] if answered else [])
    records = [one for one in planning.state.records if one.executed]
    assert [str(one.replan_type) for one in records] == replans
    assert planning.state.counts.total == 1


async def test_only_what_is_unclear_is_assumed():
    """Repeating a dangerous action waits for a person, also after a clarification question without an answer."""
    tools = (TOOLS[0].model_copy(update={"timeout": 5.0}), *TOOLS[1:])
    replies = {"decision:execution": (go_on(**WHICH), go_on())}
    planning, _, _ = await run(replies, Desk(takes=1_000), tools=tools)

    assert planning.result.status == "needs_human"
    pending = planning.engine.pending(planning.result.run)
    assert ["took effect: look first" in question.text for question in pending] == [True]
    assert len(planning.state.clarified) == 1


# A model that cannot be asked


def absent(prompt):
    """Model that is unavailable when an action has failed."""
    if kind_of(prompt) == "decision:execution":
        raise LLMUnavailable("overloaded")
    return USUAL.get(kind_of(prompt), go_on())


async def test_a_failed_action_waits_for_the_model():
    """If the model is unavailable after a failure, the work is kept until a person wants another try."""
    store, desk = MemoryStore(), Desk({"post": [MISSING]})
    first, _, _ = await run(absent, desk, store=store, run_id=RUN)
    (question,) = first.engine.pending(RUN)
    assert "overloaded; try 'post' again once the model is available?" in question.text
    assert first.result.status == "needs_human"
    first.engine.answer(question.id, "approve", by="eve")
    second, _, _ = await run({}, desk, store=store, run_id=RUN)

    assert (second.result.status, desk.tools) == ("succeeded", ["write", "post", "post"])


@pytest.mark.parametrize(
    ("settings", "gate", "status"),
    [
        (escalate("assume"), None, "succeeded"),
        (escalate("abort"), None, "aborted"),
        ({}, "reject", "failed"),
    ],
)
async def test_settings_or_a_person_end_the_wait_for_the_model(settings, gate, status):
    """If the model is unavailable, the run goes on or ends where settings say so, or a person declines another try."""
    planning, _, _ = await run(
        absent, Desk({"post": [MISSING]}), settings, eve(gate) if gate else None
    )
    assert planning.result.status == status
    assert (
        status == "succeeded"
        or planning.state.completion["status"] == "requires_human_intervention"
    )


@pytest.mark.parametrize(
    ("achieved", "gate", "settings"),
    [(True, None, None), (False, "approve", None), (True, None, OFF)],
    ids=["plan", "accepted", "tool loop"],
)
async def test_counts_are_those_of_the_journal(achieved, gate, settings):
    """Whatever the model states of tasks that it completed, the summary has the numbers of those that were executed."""
    claims = {"summary": {"goal_achieved": achieved, "tasks_completed": 77, "tasks_failed": 5}}
    replies = {
        "completion": claims,
        "step": (use("write", text="a"), use("post", text="b"), {**claims, "done": True}),
    }
    planning, *_ = await run(replies, None, settings, eve(gate) if gate else None)
    told = planning.state.completion["summary"]
    assert (told["tasks_completed"], told["tasks_failed"], told["goal_achieved"]) == (
        2,
        0,
        achieved,
    )


async def test_what_a_person_is_told_to_do():
    """A run that needs a person counts its revisions and the failures that nothing replaced, and says what to do."""
    causes = tuple(
        because("partial_replan", number, recommended_actions=["ask eve"]) for number in range(3)
    )
    plans = tuple(
        revision(action(name, "shout"), action("post", "post")) for name in ("write", "w2", "w3")
    )
    replies = {"decision:execution": causes, "revision": plans}
    planning, *_ = await run(
        replies, Desk({"write": [MISSING], "shout": [MISSING] * 9}), escalate("abort")
    )
    told: Any = planning.state.completion["summary"]
    assert planning.result.status == "aborted"
    assert (told["revision_attempts"], told["tasks_completed"], told["tasks_failed"]) == (2, 0, 1)
    assert "failed: 1 (w2: no such file: news.txt)" in told["current_state"]
    cause = "fix the failure of w2: no such file: news.txt"
    assert told["recommendations"] == ["ask eve", cause]


async def test_advice_without_any_of_the_model():
    """A tool that is down is among the recommendations; there is one even if nothing is known to be wrong."""
    planning, *_ = await run({"completion": summary(achieved=False)})
    assert planning.state.completion["summary"]["recommendations"]
    state = PlanningState(unavailable_tools={"post": "it is down", "write": ""})
    told: Any = state.intervention("no way")["summary"]
    assert told["recommendations"] == [
        "make the tool 'post' available again: it is down",
        "make the tool 'write' available again",
    ]


async def test_report_after_a_replan_without_a_plan():
    """The report for a person counts an action that failed and the replan that was tried for it, and has a comment."""
    replies = {"decision:execution": (replan("partial_replan"), go_on()), "revision": "no plan"}
    planning, _, _ = await run(replies, Desk({"post": [MISSING] * 9}), escalate("abort"))
    completion: Any = planning.state.completion
    told = completion["summary"]
    counts = (told["tasks_completed"], told["tasks_failed"], told["revision_attempts"])
    assert (completion["status"], counts) == ("requires_human_intervention", (1, 1, 1))
    assert "failed: 1 (post: no such file: news.txt)" in told["current_state"]
    assert "the replan cannot be done" in completion["comment"]


@pytest.mark.parametrize("stated", ["", "it is told"])
async def test_the_end_has_a_comment(stated):
    """A completion has a comment: that of the model, or else the outcome with the counts."""
    planning, _, _ = await run({"completion": {**summary(), "comment": stated}})
    comment = (planning.state.completion or {})["comment"]
    assert comment == (stated or "The goal was achieved; actions done: 2, failed: 0.")


@pytest.mark.parametrize(
    ("replies", "told"),
    [
        (
            {"decision:action_sequence": replan("action_regeneration", confidence=0.6)},
            "is executed",
        ),
        ({"decision:action_sequence": replan("action_regeneration", confidence=0.1)}, "overridden"),
        ({"decision:action_sequence": "perhaps"}, "an unusable decision after action_sequence"),
        ({"action_sequence": ("no plan", ACTIONS)}, "an unusable reply for action_sequence"),
        ({"action_sequence": "no plan"}, "a person must decide"),
    ],
    ids=["warning", "overridden", "decision", "reply", "end"],
)
async def test_the_log(caplog, replies, told):
    """What goes wrong in planning is logged for programs that watch the logger `replanning`."""
    await run(replies, settings=escalate("abort"))
    logged = [one for one in caplog.records if one.name == "replanning.planning"]
    assert any(told in one.getMessage() for one in logged)


async def test_nothing_is_logged_of_what_goes_well(caplog):
    """A plan that is carried out as it was made leaves nothing in the log."""
    await run()
    assert not [one for one in caplog.records if one.name.startswith("replanning")]


async def test_reflection_without_a_reply_is_logged(caplog):
    """A reflection that the model does not give is logged, and the run goes on."""
    settings = {"planning": {"reflection": {"trigger_interval": 1}}}
    planning, _, _ = await run({"reflection": "good"}, settings=settings)
    assert planning.result.status == "succeeded"
    assert any("no reflection on" in one.getMessage() for one in caplog.records)
