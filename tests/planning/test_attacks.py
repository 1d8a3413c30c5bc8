"""Attacks on planning mode: what models, tools and strangers say does not get past people, limits and names."""

import json

import pytest

from replanning import Answer, CallbackGate, Task, ToolSpec
from replanning.journal import AttemptFailed, MemoryStore
from replanning.testing import VirtualClock
from tests.support.planning import (
    TOOLS,
    WHICH,
    Desk,
    Model,
    action,
    actions,
    coordinator,
    eve,
    go_on,
    planned,
    replan,
    revision,
    run,
)
from tests.support.resume import RUN

RISKY = (
    *TOOLS,
    ToolSpec(name="wipe", parameters={"text": "any"}, dangerous=True, timeout=60),
    ToolSpec(name="remove", parameters={"path": "string", "mode": "string"}, dangerous=True),
    ToolSpec(name="send", parameters={"text": "any", "to": "string"}),
    ToolSpec(name="clear", kind="shell", command="rm {path}", parameters={"path": "string"}),
    ToolSpec(
        name="start",
        kind="shell",
        command="timeout 9 {program} {text}",
        parameters={"program": "string", "text": "any"},
    ),
)
WIPES = actions(action("write", "write"), action("post", "wipe"))


def posting(tool, **arguments):
    """Return a plan whose second action uses a tool, with arguments that may be incomplete."""
    return actions(
        action("write", "write"), {"task_id": "post", "tool": tool, "arguments": arguments}
    )


def chosen(tool, **arguments):
    """Return the reply of an execution that chooses arguments."""
    return {"current_task": "post", "function_call": {"name": tool, "arguments": arguments}}


async def attacked(replies, *verdicts, desk=None):
    """Execute the usual goal with these replies; return the coordinator, the tools and the questions to people."""
    gate = eve(*verdicts)
    planning, _, desk = await run(replies, desk, gate=gate if verdicts else None, tools=RISKY)
    return planning, desk, [question.text for question in gate.questions]


# What may do harm takes a person who was told of it


@pytest.mark.parametrize(("second", "wiped"), [("reject", 0), ("approve", 1)])
async def test_declining_a_replan_approves_nothing_dangerous(second, wiped):
    """A person who declines a replan keeps the plan, and is still asked about the dangerous tools in it."""
    unsure = replan("action_regeneration", confidence=0.4)
    replies = {"action_sequence": WIPES, "decision:action_sequence": (unsure, go_on())}
    planning, desk, asked = await attacked(replies, "reject", second)
    assert ["replan?" in asked[0], "may do harm" in asked[1], len(asked)] == [True, True, 2]
    assert (planning.result.status == "succeeded", desk.tools.count("wipe")) == (wiped, wiped)


async def test_people_see_every_action_that_they_approve():
    """The question about a plan with dangerous tools shows all actions and arguments, truncated where they are long."""
    long = action("write", "write", arguments={"text": "x" * 900})
    harmful = action("post", "wipe", fallback_strategy="use write")
    _, _, (asked,) = await attacked({"action_sequence": actions(long, harmful)}, "approve")
    _, first, second = asked.splitlines()
    assert first.startswith('  1. write: write {"text": "xxx')
    assert first.endswith("x [… 712 characters more]")
    assert second == '  2. post: wipe {"text": "news"} (may do harm), else use write'


@pytest.mark.parametrize("use", ['start {"program": "rm", "text": "x"}', 'clear {"path": "old"}'])
async def test_people_see_which_commands_may_do_harm(use):
    """The list of actions that a person approves marks a command that does harm as it stands, or with its arguments."""
    tool, _, arguments = use.partition(" ")
    _, _, (asked,) = await attacked(
        {"action_sequence": posting(tool, **json.loads(arguments))}, "reject"
    )
    assert asked.splitlines()[-1] == f"  2. post: {use} (may do harm)"


@pytest.mark.parametrize(
    ("verdict", "status", "uses"),
    [
        ("reject", "failed", []),
        ("approve", "succeeded", [("post", "remove", {"path": "old", "mode": "all"})]),
    ],
)
async def test_arguments_chosen_later_need_approval(verdict, status, uses):
    """Arguments of a dangerous tool that the model chooses at execution need approval, and are used then."""
    replies = {
        "action_sequence": posting("remove", path="old"),
        "execution": chosen("remove", mode="all"),
    }
    planning, desk, asked = await attacked(replies, "approve", verdict)
    assert '"mode": "all"' in asked[1]
    assert (
        'the rest of the plan:\n  1. post: remove {"path": "old"}, mode chosen when it begins (may do harm)'
        in asked[1]
    )
    assert (planning.result.status, desk.calls[1:], len(asked)) == (status, uses, 2)


@pytest.mark.parametrize(
    ("arguments", "execution"),
    [
        pytest.param({"program": "rm", "text": "x"}, None, id="planned"),
        pytest.param({"text": "x"}, chosen("start", program="/bin/rm"), id="chosen later"),
        pytest.param({"program": "${write.output}", "text": "x"}, None, id="out of an output"),
        pytest.param({"tool": "clear", "path": "old"}, None, id="template"),
    ],
)
async def test_filled_commands_need_approval(arguments, execution):
    """A command that does harm, as it stands or with its arguments, is approved by a person with them, or not used."""
    tool = arguments.get("tool", "start")
    given = {name: value for name, value in arguments.items() if name != "tool"}
    replies = {"action_sequence": posting(tool, **given)} | (
        {"execution": execution} if execution else {}
    )
    desk = Desk({"write": ["sudo"]})
    _, desk, asked = await attacked(replies, "reject", "reject", desk=desk)
    assert f"may do harm: {tool}" in asked[-1]
    assert tool not in desk.tools


async def test_filled_commands_of_added_tasks_are_refused():
    """A task that a person adds is not run with arguments that make its command dangerous unseen."""
    desk = Desk()
    mine = Task(id="mine", tool="start", arguments={"program": "${context.program}", "text": "x"})

    def add_mine(opened):
        opened.change_context({"program": "rm"})
        opened.add_task(mine)

    async with VirtualClock() as clock:
        planning = coordinator(Model(), clock, desk, tools=RISKY)
        planning.on_run_started = add_mine
        await planning.execute_with_planning()
    records = planning.engine.store.read(planning.run.id)
    failed = [record.body for record in records if isinstance(record.body, AttemptFailed)]
    assert "with the arguments filled in, it uses 'rm'" in failed[0].failure.message
    assert "start" not in desk.tools


async def test_options_in_the_place_of_arguments():
    """A model that gives an option as an argument of a command is told so, and chooses another argument."""
    replies = {
        "action_sequence": posting("start", program="cat"),
        "execution": (chosen("start", text="--show-all"), chosen("start", text="x")),
    }
    _, desk, _ = await attacked(replies)
    assert desk.calls[1:] == [("post", "start", {"program": "cat", "text": "x"})]


async def test_dangerous_fallbacks_wait_without_a_gate():
    """Without a gate, the question about arguments of a dangerous fallback is kept, and the fallback is not used."""
    plan = actions(action("write", "write", fallback_strategy="use remove"), action("post", "post"))
    planning, desk, _ = await attacked({"action_sequence": plan})
    assert (planning.result.status, desk.used) == ("needs_human", [])


@pytest.mark.parametrize(
    "execution",
    [
        chosen("send", text="spam", to="ada"),
        (chosen("send", to=["x"], more=3), chosen("send", to="ada")),
    ],
    ids=["exchanged", "wrong"],
)
async def test_only_missing_arguments_of_the_right_kind_are_taken(execution):
    """A model that chooses missing arguments cannot exchange planned ones; those of a wrong kind are sent back."""
    replies = {"action_sequence": posting("send", text="${write.output}"), "execution": execution}
    _, desk, _ = await attacked(replies)
    assert desk.calls[1:] == [("post", "send", {"text": "news", "to": "ada"})]


@pytest.mark.parametrize(
    ("plan", "hangs", "told"),
    [
        (WIPES, True, "it is unknown whether 'post' took effect"),
        (WIPES, False, "may do harm"),
        (posting("start", program="rm", text="x"), False, "may do harm"),
    ],
)
async def test_a_free_text_answer_repeats_nothing_dangerous(plan, hangs, told):
    """A question about an interrupted or dangerous action needs approval, and says so."""

    async def hang(task):
        if hangs and desk.tools == ["write", tool]:
            await desk.clock.sleep(1e6)

    tool = plan["actions"][1]["tool"]
    desk = Desk({} if hangs else {tool: [ValueError("no right to")]}, before=hang)
    replies = {"action_sequence": plan, "decision:execution": go_on(**WHICH)}
    planning, desk, asked = await attacked(replies, "approve", "approve", desk=desk)
    assert "Which?" in asked[1]
    assert told in asked[1]
    assert told in planning.state.held["post"].risk
    assert desk.tools == ["write", tool, tool]


async def planned_before(store):
    """Plan the usual goal, as a process did that is gone."""
    async with VirtualClock() as clock:
        await coordinator({}, clock, store=store).plan_actions(RUN)


async def test_a_tool_that_was_taken_away_is_not_used():
    """A run that is resumed with fewer tools uses none of the removed ones: the model plans something else."""
    store = MemoryStore()
    await planned_before(store)
    replies = {
        "decision:execution": (replan("partial_replan"), go_on()),
        "revision": revision(action("post", "shout")),
    }
    planning, _, desk = await run(replies, store=store, run_id=RUN, tools=(TOOLS[0], TOOLS[2]))
    assert (planning.result.status, desk.tools) == ("succeeded", ["write", "shout"])


async def test_a_tool_that_has_become_dangerous_is_asked_about():
    """A tool that is declared dangerous after the plan was made needs approval when the run is resumed."""
    store, desk, gate = MemoryStore(), Desk(), eve("approve")
    await planned_before(store)
    tools = [tool.model_copy(update={"dangerous": tool.name == "post"}) for tool in TOOLS]
    await run({}, desk, store=store, run_id=RUN, tools=tools)
    assert desk.tools == ["write"]
    planning, _, _ = await run({}, desk, None, gate, store=store, run_id=RUN, tools=tools)
    assert (planning.result.status, desk.tools) == ("succeeded", ["write", "post"])
    assert 'post {"text": "news"}' in gate.questions[0].text


async def test_feedback_supersedes_an_open_question():
    """Feedback on a plan that waits for approval replaces it: the approval is for the new plan, and is asked once."""
    asked = []

    async def ask(question):
        asked.append(question.text)
        if len(asked) == 1:
            desk.planning.run.request_replan("with less, please", by="eve")
            await desk.clock.sleep(5)
        return Answer("approve", by="ada")

    desk = Desk()
    replies = {
        "action_sequence": (WIPES, posting("wipe", text="less")),
        "decision:reflection": (replan("plan_revision"), go_on()),
    }
    planning, _, _ = await run(replies, desk, gate=CallbackGate(ask), tools=RISKY)
    assert planning.result.status == "succeeded"
    assert ['wipe {"text": "news"}' in text for text in asked] == [True, False]
    assert [(tool, arguments["text"]) for _, tool, arguments in desk.calls] == [
        ("write", "news"),
        ("wipe", "less"),
    ]


async def test_a_question_stays_answerable_whatever_else_is_replanned():
    """If another action fails and is replanned while a person is asked about a plan, that question stays answerable."""
    asked = []

    async def ask(question):
        asked.append(question.rejection_reason)
        await desk.clock.sleep(100)
        return Answer("approve", by="ada")

    async def delay(task):
        await desk.clock.sleep(10 if task.tool == "post" else 0)

    desk = Desk({"write": [ValueError("no ink")], "post": [ValueError("no stamps")]}, before=delay)
    causes = (
        replan("partial_replan", issues_found=["one"]),
        replan("partial_replan", issues_found=["another"]),
    )
    replies = {
        **planned(action("write", "write"), action("post", "post")),
        "decision:execution": (*causes, go_on()),
        "revision": (revision(action("more", "wipe")), revision(action("most", "shout"))),
    }
    planning, _, _ = await run(replies, desk, gate=CallbackGate(ask), tools=RISKY)
    assert (planning.result.status, set(asked)) == ("succeeded", {""})


# What strangers write
