"""Alternatives from a language model: what becomes of what it answers, and what it may not do."""

from __future__ import annotations

import re

import pytest

from replanning.errors import LLMUnavailable
from replanning.journal import AlternativesConsidered, DecisionMade, QuestionAsked
from replanning.providers.llm import MAX_CANDIDATES, MAX_CHANGES, LLMAlternatives
from replanning.testing import ScriptedLLM, hangs
from tests.support.models import PLAN, candidate, change, played, replaced, reply


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ([change("retry", task_id="build")], ["build"]),
        ([change("modify", task_id="build", tool="cmake"), change("retry", task_id="build")], ["build"]),
        ([change("add", task={"id": "new", "tool": "cmake", "arguments": {"out": "x"}, "goal": None}, before=["build"]),
          change("retry", task_id="build")], ["new", "build"]),
        ([change("reorder", order=["tidy", "ship"]), change("retry", task_id="build")], ["build"]),
        ([change("skip", task_id="tidy", reason="later"), change("retry", task_id="build")], ["build"]),
        ([change("cancel", task_id="tidy"), change("retry", task_id="build")], ["build"]),
        ([change("remove", task_id="tidy"), change("retry", task_id="build")], ["build"]),
    ],
)  # fmt: skip
async def test_every_kind_of_change_can_be_proposed(changes, left):
    """Each kind of change in a reply becomes the change of the plan of the same kind; null stands for what is left out."""
    found = await played([reply(candidate(*changes))], broken={"build": 1})
    assert found.result.status == "succeeded"
    (revised,) = found.result.revisions
    assert [made.kind for made in revised.changes] == [made["kind"] for made in changes]
    assert [task for task in found.executed if task in ("new", "build")] == ["build", *left]


async def test_a_replacement_inherits_what_a_model_has_no_say_in():
    """A new task has the priority, time, retries, conditions and resources of the one it replaces, and its unused fallbacks."""
    plan = PLAN.replace(
        "arguments: {out: dist},",
        "arguments: {out: dist}, timeout: 9, priority: 3, retry: {max_attempts: 1}, idempotent: true, "
        "fallbacks: [{tool: cmake, arguments: {out: new}}, {tool: cmake, arguments: {out: other}}],",
    )
    found = await played([reply(candidate(replaced("build", "cmake"), reason="cmake is there"))], plan=plan)
    (revised,) = found.result.revisions
    (new,) = revised.changes[0].tasks
    assert (found.result.status, revised.reason) == ("succeeded", "cmake is there")
    assert (new.timeout, new.priority, new.retry.max_attempts, new.idempotent) == (9, 3, 1, False)
    assert [fallback.arguments for fallback in new.fallbacks] == [{"out": "other"}]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ([replaced("build", "rm")], "there is no tool 'rm'"),
        ([replaced("build", "cmake", arguments={})], "tool 'cmake' needs the argument 'out'"),
        ([replaced("build", "cmake", arguments={"out": 5})], "expected string, not a number"),
        ([replaced("build", "cmake", arguments={"out": "x", "as": "root"})], "has no parameter 'as'"),
        ([replaced("build", "cmake", id="build")], "ids are never used again"),
        ([replaced("build", "cmake", depends_on=["ghost"])], "ghost"),
        ([replaced("build", "cmake", depends_on=["ship"])], "would wait for one another"),
        ([change("retry", task_id="ghost")], "there is no task 'ghost'"),
        ([change("remove", task_id="fetch")], "cannot be removed"),
        ([], "it changes nothing"),
    ],
)  # fmt: skip
async def test_what_the_plan_cannot_hold_is_rejected_and_said_to_the_model(changes, why):
    """A candidate that does not fit stands in the history with the reason, and the model is told that reason once."""
    found = await played([reply(candidate(*changes)), reply(candidate(replaced("build", "cmake")))])
    considered = found.bodies(AlternativesConsidered)[0]
    assert [bool(one.rejected) for one in considered.candidates] == [False, True]
    assert why in considered.candidates[1].rejected
    assert found.result.status == "succeeded"
    assert "<rejected>" not in found.prompts[0]
    assert why in found.prompts[1].partition("<rejected>")[2]


async def test_the_same_as_before_is_not_tried_again():
    """A failed call that is proposed again under another id is dropped, and the model is told so."""
    way = reply(candidate(replaced("build", "cmake")))
    again = reply(candidate(replaced("new", "cmake", id="newer")))
    found = await played([way, again, reply()], broken={"build": 9, "new": 9}, cooldown=0)
    assert found.result.status == "failed"
    assert "the same was tried before as 'new' and failed" in found.bodies(AlternativesConsidered)[1].notes[0]
    assert '"why_not": "the same was tried before' in found.prompts[2]
    assert found.executed == ["fetch", "build", "new"]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ({"reason": "x"}, "changes: Field required"),
        ({"reason": "x", "changes": [{"kind": "explode"}], "confidence": 1.0}, "changes.0: Input tag 'explode'"),
        ({"reason": "x", "changes": [], "confidence": 2.0}, "confidence: Input should be less than or equal to 1"),
        ({"reason": "x", "changes": [change("answer", question_id="q1")], "confidence": 1.0}, "Input tag 'answer'"),
        (candidate({**change("retry", task_id="build"), "by": "person"}), "by: Extra inputs are not permitted"),
        (candidate(replaced("build", "cmake", idempotent=True)), "idempotent: Extra inputs are not permitted"),
        (candidate(replaced("build", None)), "'new' names no tool of the library"),
        (candidate(replaced("build", "cmake", id="a\nb")), "String should match pattern"),
        (candidate(change("replace", task_id="build", tasks=[])), "has no replacement tasks"),
        (candidate(change("modify", task_id="build")), "changes no field"),
        (candidate(*[change("retry", task_id="build")] * (MAX_CHANGES + 1)), f"more than {MAX_CHANGES} changes"),
    ],
)  # fmt: skip
async def test_what_is_no_candidate_is_dropped_with_the_reason(raw, why):
    """A candidate that cannot be read is dropped without the others, and a note in the history says why."""
    found = await played([reply(raw, candidate(replaced("build", "cmake")))])
    considered = found.bodies(AlternativesConsidered)[0]
    assert why in considered.notes[0]
    assert len(found.prompts) == 1
    assert found.result.status == "succeeded"


async def test_only_so_many_candidates_are_looked_at():
    """Of a flood of candidates the first are looked at, and a note says how many are left out."""
    flood = [candidate(change("retry", task_id="ghost")) for _ in range(MAX_CANDIDATES + 3)]
    found = await played([reply(*flood), reply()])
    considered = found.bodies(AlternativesConsidered)[0]
    assert len(considered.candidates) == MAX_CANDIDATES
    assert "3 candidates beyond the first" in considered.notes[0]


NONSENSE = reply(candidate(replaced("build", "rm")))


@pytest.mark.parametrize(
    ("script", "budget", "prompts", "notes"),
    [
        ([reply()], {}, 1, []),
        ([NONSENSE, reply(candidate(replaced("build", "dd")))], {}, 2, []),
        ([NONSENSE, LLMUnavailable("overloaded")], {}, 2, ["overloaded"]),
        ([NONSENSE], {"calls": 1}, 1, ["2 of 1 calls"]),
    ],
    ids=["sees no way", "no better", "fails", "too dear"],
)
async def test_a_model_is_told_only_once(script, budget, prompts, notes):
    """A model is asked a second time only if nothing it proposed can be used; its first answer stands in the history."""
    found = await played(script, budget=budget)
    considered = found.bodies(AlternativesConsidered)[0]
    assert len(found.prompts) == prompts
    assert all("there is no tool" in one.rejected for one in considered.candidates)
    assert [note in told for note, told in zip(notes, considered.notes, strict=True)] == [True] * len(notes)
    assert found.bodies(DecisionMade)[0].rule == "no-alternative"


async def test_a_tool_of_no_library_must_be_one_that_the_plan_uses():
    """In a plan without tool descriptions a model can use the tools of its tasks, and no other."""
    plan = "goal: {objective: test}\ntasks:\n- {id: build, tool: make}\n- {id: ship, tool: post, depends_on: [build]}"
    bad, good = (candidate(replaced("build", tool, arguments={})) for tool in ("rm", "post"))
    found = await played([reply(bad, good)], plan=plan)
    considered = found.bodies(AlternativesConsidered)[0]
    assert "there is no tool 'rm'; the tools of the plan are: 'make', 'post'" in considered.notes[0]
    assert found.executed == ["build", "new", "ship"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ([change("abort", reason="hopeless")], "to end the run"),
        ([change("skip", task_id="build")], "to do without 'build', which the plan requires"),
        ([change("cancel", task_id="ship"), change("skip", task_id="build")], "to do without 'ship'"),
        ([replaced("build", "cmake", timeout=1000.0)], "to give 'new' 1000 s instead of 60 s"),
        ([change("modify", task_id="ship", depends_on=[]), replaced("build", "cmake")], "to let 'ship' run without waiting for 'build'"),
        ([replaced("build", "wipe")], "the tool 'wipe' needs a person's agreement"),
        ([change("modify", task_id="build", tool="wipe"), change("retry", task_id="build")], "the tool 'wipe' needs"),
        ([change("add", task={"id": "new", "tool": "wipe", "arguments": {"out": "/"}}), change("retry", task_id="build")], "the tool 'wipe' needs"),
    ],
)  # fmt: skip
async def test_some_things_need_a_person_however_sure_a_model_is(changes, why):
    """A person is asked before changes that are dangerous, end the run, give up required tasks or take longer."""
    found = await played([reply(candidate(*changes, confidence=1.0))])
    (question,) = found.bodies(QuestionAsked)
    assert why in question.text
    assert found.result.status == "needs_human"
    assert found.result.revisions == ()
    assert found.executed == ["fetch", "build"]


@pytest.mark.parametrize(("tool", "status"), [("make", "needs_human"), ("cmake", "needs_human"), ("wait", "succeeded")])
async def test_what_may_have_taken_effect_is_not_done_again_under_another_name(tool, status):
    """Work that was cut off is a repetition also where it is left out and added anew, with its tool or an equal one."""
    plan = re.sub("name: (c?make),", r"name: \1, capability: b,", PLAN)
    plan = plan.replace("tasks:", "  - {name: wait, kind: shell, command: wait, parameters: {out: string}}\ntasks:")
    plan = plan.replace("arguments: {out: dist},", "arguments: {out: dist}, timeout: 5, optional: true,")
    way = candidate(
        change("skip", task_id="build"), change("add", task={"id": "new", "tool": tool, "arguments": {"out": "x"}})
    )
    found = await played([reply(way)], plan, broken={}, outputs={"build": hangs()}, triggers=["timeout"])
    assert found.result.status == status
    assert found.bodies(DecisionMade)[0].rule == ("not-idempotent" if status == "needs_human" else "confident")


def test_name_and_size():
    """It is called as its language model's provider unless another name is given; too small a prompt is refused."""
    assert LLMAlternatives(ScriptedLLM(name="acme")).name == "acme"
    assert LLMAlternatives(ScriptedLLM(), name="llm").name == "llm"
    with pytest.raises(ValueError, match="give at least 6000"):
        LLMAlternatives(ScriptedLLM(), size=100)
