"""When the model looks back at what was done, how large its answers may be, and what comes of that."""

from __future__ import annotations

from itertools import pairwise

import pytest

from replanning.errors import LLMUnavailable
from replanning.journal import MemoryStore, Usage
from replanning.llm import Completion
from replanning.testing import VirtualClock, returns
from tests.support.planning import (
    EACH,
    MISSING,
    USUAL,
    WHICH,
    Desk,
    Model,
    action,
    actions,
    coordinator,
    escalate,
    eve,
    go_on,
    kind_of,
    planned,
    replan,
    revision,
    run,
)
from tests.support.resume import RUN


def thought(status="success", *, revise=False):
    """Return a reflection on an action."""
    return {"reflection": {"action_id": "write", "status": status, "evaluation": "so", "plan_revision_needed": revise}}


def reflecting(**reflection):
    """Return settings of the reflection."""
    return {"planning": {"reflection": reflection}}


# Reflection


async def test_a_failure_that_the_decision_answers_is_not_asked_about_twice():
    """After an error the model decides; a decision that helps is recorded as the reflection too."""
    replies = {"decision:execution": replan("partial_replan"), "revision": revision(action("write", "shout"))}
    planning, model, _ = await run(replies, Desk({"write": [MISSING]}))

    assert planning.result.status == "succeeded"
    assert "reflection" not in model.asked
    (told,) = planning.state.reflections
    expected = {"action_id": "write", "status": "failure", "plan_revision_needed": True}
    assert told["reflection"].items() >= expected.items()


async def test_a_decision_that_does_not_help_leads_to_a_reflection():
    """A decision that does not help after an error is followed by a reflection, which may revise the plan."""
    replies = {
        "reflection": thought("failure", revise=True),
        "decision:reflection": (replan("plan_revision"), go_on()),
        "revision": revision(action("write", "shout"), action("post", "post")),
    }
    planning, model, desk = await run(replies, Desk({"write": [MISSING]}))

    assert planning.result.status == "succeeded"
    assert desk.used == [("write", "write"), ("v2.write", "shout"), ("v2.post", "post")]
    assert planning.state.counts.plan_revisions == 1
    asked = model.asked[model.asked.index("decision:execution") :]
    assert asked[:3] == ["decision:execution", "reflection", "decision:reflection"]


@pytest.mark.parametrize("reflection", [{"trigger_on_error": False}, {"enabled": False}])
async def test_reflection_on_error_can_be_switched_off(reflection):
    """Without reflection on errors, only the decision counts, and no reflection is recorded."""
    replies = {"reflection": thought("failure", revise=True)}
    planning, model, _ = await run(replies, Desk({"write": [MISSING]}), reflecting(**reflection))

    assert planning.result.status != "succeeded"
    assert "reflection" not in model.asked
    assert planning.state.reflections == []


@pytest.mark.parametrize(
    "output", [{"ok": False}, {"isError": True, "text": "x"}, '{"error": "no paper"}', {"exit_code": 2}]
)
async def test_an_output_that_states_a_failure_is_unexpected(output):
    """An output with a failure in a field leads to a reflection, and the tool may be used again."""
    replies = {"reflection": thought("failure"), "decision:execution": (replan("retry"), go_on())}
    planning, model, desk = await run(replies, Desk({"write": [output]}))

    assert (planning.result.status, desk.tools) == ("succeeded", ["write", "write", "post"])
    assert model.asked.count("reflection") == 1


@pytest.mark.parametrize(
    "output", [{"ok": False}, None, "", [], "error: no paper", {"error": None, "ok": True, "exit_code": 0}, "{"]
)
async def test_an_output_that_is_approved_or_states_no_failure_goes_on(output):
    """An unexpected output costs one call if the reflection approves it; an empty one, or the mere word error, none."""
    replies = {"reflection": thought(), "action_sequence": actions(action("write", "write"), action("post", "post"))}
    planning, model, desk = await run(replies, Desk({"write": [output]}))

    assert (planning.result.status, desk.tools) == ("succeeded", ["write", "post"])
    assert model.asked.count("reflection") == (output == {"ok": False})
    assert "decision:execution" not in model.asked


@pytest.mark.parametrize(("interval", "expected"), [(0, 0), (1, 2), (2, 1), (3, 0)])
async def test_reflection_interval(interval, expected):
    """The model reflects at the interval, never before the first action, and never with an interval of 0."""
    planning, model, _ = await run({"reflection": thought()}, settings=reflecting(trigger_interval=interval))

    assert planning.result.status == "succeeded"
    assert model.asked.count("reflection") == expected
    assert model.asked.count("decision:execution") == expected


@pytest.mark.parametrize("interval", [2, 3])
async def test_reflection_interval_counts_concurrent_actions(interval):
    """Actions that end while the model reflects on others are counted one by one."""
    script = Model({**planned(*(action(f"s{number}", "write") for number in range(6))), "reflection": thought()})
    async with VirtualClock() as clock:
        settings = reflecting(trigger_interval=interval)
        planning = coordinator(lambda prompt: returns(script(prompt), after=5), clock, Desk(takes=1), settings=settings)
        assert await planning.execute_with_planning()

    assert script.asked.count("reflection") == 6 // interval


@pytest.mark.parametrize("absent", [False, True])
async def test_a_failed_reflection_is_recorded(absent):
    """An invalid reflection, or none, is recorded with the reason, and the run continues."""

    def model(prompt):
        if kind_of(prompt) == "reflection":
            if absent:
                raise LLMUnavailable("overloaded")
            return "I would rather not."
        return USUAL.get(kind_of(prompt), go_on())

    planning, _, _ = await run(model, settings=reflecting(trigger_interval=1))
    assert planning.result.status == "succeeded"
    assert [set(one) >= {"action", "error"} for one in planning.state.reflections] == [True, True]


async def test_after_an_interruption_no_reflection_is_asked_for_twice():
    """A run that was cut off after a reflection uses it again."""
    store, model = MemoryStore(), Model({"reflection": thought("failure")})
    for desk in (Desk({"write": [MISSING]}), Desk()):
        planning, _, _ = await run(model, desk, escalate("wait"), store=store, run_id=RUN)
        assert planning.result.status == "needs_human"

    assert model.asked.count("reflection") == 1


# Asking a person in the midst of the execution


@pytest.mark.parametrize("answered", [True, False])
async def test_a_question_after_an_action_is_asked(answered):
    """A question during the execution is asked before the run continues, or its answer assumed."""
    gate = eve("approve", comment="the yellow one") if answered else None
    planning, model, desk = await run({"decision:execution": (go_on(**WHICH), go_on())}, settings=EACH, gate=gate)

    assert (planning.result.status, desk.tools) == ("succeeded", ["write", "post"])
    assert desk.clock.elapsed == (0 if answered else pytest.approx(1800))
    assert ("the yellow one" if answered else "there is no answer: Which?") in model.prompts[-1]


async def test_an_unsure_retry_of_what_succeeded_is_not_done():
    """A successful action is not repeated for an unsure retry; that is recorded, and the run continues."""
    replies = {"decision:execution": (replan("retry", confidence=0.4), go_on())}
    planning, _, desk = await run(replies, settings=EACH)

    assert (planning.result.status, desk.tools) == ("succeeded", ["write", "post"])
    assert [record.executed for record in planning.state.records if record.replan_type == "retry"] == [False]


# How large answers may be


@pytest.mark.parametrize(("most", "plan", "reflection"), [(2000, 2000, 500), (300, 300, 300)])
async def test_the_service_is_told_how_long_an_answer_may_be(most, plan, reflection):
    """A plan may have 2000 tokens and a reflection 500; fewer if settings say so."""
    model = Model({"reflection": thought()})
    _, _, desk = await run(model, settings=reflecting(trigger_interval=1), max_tokens=most)

    asked = [(kind_of(one.prompt), one.options.max_tokens) for one in desk.llm.requests]
    assert {kind for kind, _ in asked} == {*model.asked} > {"reflection", "completion"}
    assert asked == [(kind, reflection if kind in ("reflection", "completion") else plan) for kind, _ in asked]


async def test_an_answer_that_was_cut_off_is_to_be_shorter():
    """The repair prompt for a truncated reply says so, and not only that its JSON is broken."""
    cut = Completion('{"goal_understanding": {"main_obj', "x", "x-1", 10, 2000, Usage(calls=1), finish="length")
    planning, model, _ = await run({"goal_understanding": (cut, USUAL["goal_understanding"])})

    assert planning.result.status == "succeeded"
    assert "cut off after 2000 tokens, so it must be shorter" in model.prompts[1]


async def test_a_large_plan_is_made_in_batches():
    """The actions of many subtasks are planned in batches, each with the earlier ones in its prompt, as one plan."""
    names = [f"s{number}" for number in range(40)]
    chain = {name: [before] for before, name in pairwise(names)}
    script = Model(planned(*(action(name, "write") for name in names), **chain))
    parts = []

    def model(prompt):
        if kind_of(prompt) != "action_sequence":
            return script(prompt)
        inner = prompt.split("<part>\n")[1].split("</part>", maxsplit=1)[0]
        parts.append([line.strip('"') for line in inner.splitlines() if line])
        assert len(parts) == 1 or "<action_plan>" in prompt
        return actions(*(action(name, "nothing" if len(parts) == 2 else "write") for name in parts[-1]))

    planning, _, desk = await run(model, settings=reflecting(trigger_interval=0))
    assert planning.result.status == "succeeded"
    assert [len(part) for part in parts] == [15, 15, 15, 10]
    assert parts[0] + parts[2] + parts[3] == names
    assert [task for task, _ in desk.used] == names


async def test_actions_refer_to_earlier_batches():
    """Actions may refer to those of earlier batches that they depend on, and to no others."""
    writes = [action(f"s{number}", "write") for number in range(20)]
    script, refused = Model(planned(*writes, s19=["s0"])), []

    def model(prompt):
        if kind_of(prompt) != "action_sequence":
            return script(prompt)
        if '"s0"' in prompt.partition("<part>")[2]:
            return actions(action("s0", "write"), *writes[:15])
        refused.append(prompt.partition("<rejected>")[2])
        read = "${s1.output}" if len(refused) == 1 else "${s0-1.output}, ${s0.output}"
        return actions(*writes[15:19], action("s19", "write", arguments={"text": read}))

    planning, _, _ = await run(model)
    assert planning.result.status == "succeeded"
    assert "task 's19' refers to ${s1.output} and does not depend on 's1'" in refused[1]
    assert planning.result.outputs["s19"] == "news, news"
