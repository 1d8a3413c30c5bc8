"""Actions with `for_each`: one action of the model, carried out once for each element of a list."""

from typing import Any

import pytest

from replanning.journal import MemoryStore
from replanning.planning import PlanningState
from replanning.planning.state import PlanningProgress
from replanning.testing import VirtualClock
from tests.support.invariants import replay_differences
from tests.support.planning import (
    MISSING,
    TOOLS,
    Desk,
    Model,
    action,
    actions,
    coordinator,
    escalate,
    eve,
    executed,
    go_on,
    in_order,
    kind_of,
    planned,
    replan,
    revision,
    run,
    solved,
    written,
)
from tests.support.resume import RUN, cut

FORTY = [f"note {number}" for number in range(40)]
POST = {
    "task_id": "post",
    "tool": "post",
    "for_each": "${write.output}",
    "arguments": {"text": "${item}"},
}
"""An action for each element of what `write` returns."""


def lists(*ones: Any, **more: Any) -> dict[str, Any]:
    """Return the replies that plan `write`, then `post` for each element of its output, then others."""
    post = {**POST, **more}
    return planned(action("write", "write"), post, *ones, post=["write"], shout=["post"])


def desk(elements: Any, **results: Any) -> Desk:
    """Return tools of which `write` returns a list."""
    return Desk({"write": [elements], **results})


SHOUT = {"task_id": "shout", "tool": "shout", "arguments": {"text": "${post.output}"}}


# Carrying out


@pytest.mark.parametrize(
    ("elements", "extra"),
    [("${write.output}", {}), (["a", "b"], {}), ({"x": "a", "y": "b"}, {"max_parallel": 1})],
    ids=["result", "literal", "mapping"],
)
async def test_once_for_each_element(elements, extra):
    """The tool is used once for each element, and the output of the action is the list of the outputs."""
    replies = lists(SHOUT, for_each=elements, **extra)
    planning, model, tools = await run(replies, desk(["a", "b"]))
    assert planning.result.status == "succeeded"
    assert [call[2] for call in tools.calls if call[1] == "post"] == [{"text": "a"}, {"text": "b"}]
    assert tools.calls[-1] == ("shout", "shout", {"text": ["a", "b"]})
    assert model.asked.count("action_sequence") == 1


async def test_a_list_without_elements():
    """An action whose list is empty is done at once, with an empty list as its output."""
    planning, model, tools = await run(lists(SHOUT), desk([]))
    assert planning.result.status == "succeeded"
    assert tools.used == [("write", "write"), ("shout", "shout")]
    assert planning.result.outputs["post"] == []
    (told,) = model.told("completion")
    assert '"done": 3, "of": 3' in told
    assert '"elements": "×0: no elements"' in told
    assert planning.state.task_counts() == {"tasks_completed": 3, "tasks_failed": 0}


async def test_only_an_empty_list():
    """A plan that is an empty list alone has executed its actions."""
    replies = planned({**POST, "for_each": []})
    async with VirtualClock() as clock:
        assert await coordinator(replies, clock).execute_actions(RUN)


async def test_a_wrong_list_is_replanned():
    """A result that is no list fails the action, about which the model decides as usual."""
    replies = lists() | {
        "decision:execution": replan("partial_replan"),
        "revision": revision(action("post", "post")),
    }
    planning, model, tools = await run(replies, desk("no list"))
    assert planning.result.status == "succeeded"
    assert "`for_each` needs a list or a mapping, got a string" in model.told("revision")[0]
    assert tools.used == [("write", "write"), ("v2.post", "post")]
    assert planning.state.task_counts() == {"tasks_completed": 2, "tasks_failed": 0}


async def test_a_wrong_list_with_a_fallback():
    """The fallback of an action that has no list has none either; then the model decides."""
    replies = lists(fallback_strategy="shout") | {
        "decision:execution": replan("partial_replan"),
        "revision": revision(action("post", "post")),
    }
    planning, model, tools = await run(replies, desk("no list"))
    assert planning.result.status == "succeeded"
    assert model.asked.count("decision:execution") == 1
    assert tools.used == [("write", "write"), ("v2.post", "post")]


async def test_the_ids_of_subtasks_and_elements():
    """References in a list follow normalised ids, also to a single element; what elements hold stays as it is."""
    first = {**POST, "task_id": "post all", "for_each": [{"id": "a b"}, "${write it.output}"]}
    second = {"task_id": "shout", "tool": "shout", "arguments": {"text": "${post all[0].output}"}}
    replies = planned(
        action("write it", "write"), first, second, **{"post all": ["write it"]}, shout=["post all"]
    )
    planning, _, tools = await run(replies, desk("news"))
    assert planning.result.status == "succeeded"
    assert tools.calls[1:] == [
        ("post-all[0]", "post", {"text": {"id": "a b"}}),
        ("post-all[1]", "post", {"text": "news"}),
        ("shout", "shout", {"text": {"id": "a b"}}),
    ]


async def test_arguments_that_are_left_open():
    """Placeholders of the element are no missing arguments; those that are missing are asked for with each element."""
    tools = (TOOLS[0], TOOLS[1].model_copy(update={"parameters": {"text": "any", "to": "string"}}))
    reply = {"function_call": {"name": "post", "arguments": {"to": "all"}}}
    replies = lists(purpose="post ${item}", key="${item}") | {"execution": reply}
    planning, model, used = await run(replies, desk(["a", "b"]), tools=tools)
    assert planning.result.status == "succeeded"
    assert [call for call in used.calls if call[1] == "post"] == [
        ("post[a]", "post", {"text": "a", "to": "all"}),
        ("post[b]", "post", {"text": "b", "to": "all"}),
    ]
    told = model.told("execution")
    assert '"id": "post[a]", "tool": "post", "purpose": "post a"' in told[0]
    assert '"element": {"key": "b", "item": "b"}' in told[1]


async def test_arguments_that_are_known():
    """An action whose arguments are placeholders of the element is not asked about."""
    _, model, _ = await run(lists(), desk(["a", "b"]))
    assert "execution" not in model.asked


# Replies that are refused


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"for_each": "the notes"}, "expected a list, a mapping, or a reference such as"),
        ({"for_each": "${nobody.output}"}, "'nobody' is not a task of the plan"),
        ({"for_each": "${later.output}"}, "does not depend on 'later'"),
        ({"key": "${name}"}, "key"),
        ({"max_items": 1001}, "less than or equal to 1000"),
        (
            {"for_each": None, "key": "${item}"},
            "needs `for_each`, which is missing",
        ),
        ({"for_each": None}, "${item} refers to an element: only a task with `for_each` has any"),
        ({"purpose": "for ${nobody.output}"}, "nobody"),
        ({"on_item_failure": "stop"}, "on_item_failure"),
    ],
)
async def test_what_is_refused(wrong, problem):
    """What a plan may not say of a list, an action may not either; the model is told the problem."""
    post = {**POST, **wrong}
    bad = planned(
        action("write", "write"), post, action("later", "shout"), post=["write"], later=["post"]
    )
    good = [action("write", "write"), POST, action("later", "shout")]
    replies = bad | {"action_sequence": (bad["action_sequence"], actions(*good))}
    planning, model, _ = await run(replies, desk(["a"]))
    assert planning.result.status == "succeeded"
    assert problem in model.told("action_sequence")[1]


async def test_a_subtask_that_is_called_as_what_an_element_has():
    """A subtask called `item` is refused beside a list, where `${item}` is the element."""
    bad = planned(action("item", "write"), {**POST, "for_each": ["a"]})
    replies = bad | {"action_sequence": (bad["action_sequence"], "never")}
    planning, model, _ = await run(replies)
    assert planning.result.status != "succeeded"
    assert "a plan with `for_each` reserves the id 'item'" in model.told("action_sequence")[1]


async def test_the_list_is_shown_to_who_approves():
    """A person who approves of a dangerous tool, or of the plan, is shown the list; a long one is cut."""
    tools = (TOOLS[0], TOOLS[1].model_copy(update={"dangerous": True}))
    gate = eve("approve")
    planning, *_ = await run(lists(), desk(["a"]), gate=gate, tools=tools)
    assert planning.result.status == "succeeded"
    (question,) = gate.questions
    assert 'post {"text": "${item}"} for each of ${write.output}, at most 1000' in question.text
    gate = eve("approve")
    await run(lists(for_each=FORTY * 3), desk(["a"]), gate=gate, tools=tools)
    assert "[… 120 in all]" in gate.questions[0].text


async def test_a_plan_that_is_only_made():
    """A plan that is made and not executed has the action as a task with `for_each`."""
    async with VirtualClock() as clock:
        made = await coordinator(lists(on_item_failure="skip"), clock).make_plan()
    assert made is not None
    task = made.tasks[1]
    assert (task.for_each, task.on_item_failure) == ("${write.output}", "skip")


# Elements that fail


async def test_an_element_has_its_own_alternative():
    """The declared fallback takes the place of the element that failed alone; the others stay done."""
    tools = desk(["a", "b", "c"], post=["A", MISSING, "C"], shout=["B"])
    planning, model, used = await run(lists(fallback_strategy="shout: because it is loud"), tools)
    assert planning.result.status == "succeeded"
    assert used.used[1:] == [
        ("post[0]", "post"),
        ("post[1]", "post"),
        ("post[2]", "post"),
        ("post[1]~2", "shout"),
    ]
    assert used.calls[-1][2] == {"text": "b"}
    assert planning.result.outputs["post"] == ["A", "B", "C"]
    assert "decision:execution" not in model.asked
    assert planning.state.task_counts() == {"tasks_completed": 2, "tasks_failed": 0}


async def test_one_decision_for_elements_that_fail_alike():
    """Elements that fail of the same cause are tried again by one decision, which counts as one retry."""
    tools = desk(["a", "b", "c"], post=[MISSING, MISSING, MISSING])
    planning, model, used = await run(lists() | {"decision:execution": replan("retry")}, tools)
    assert planning.result.status == "succeeded"
    assert len([tool for tool in used.tools if tool == "post"]) == 6
    assert model.asked.count("decision:execution") == 1
    assert planning.state.counts.total == 1
    assert '"lineage": "post"' in model.told("decision:execution")[0]


async def test_an_element_that_is_left_out():
    """With `skip` an element that fails is left out without asking the model, which sees how many there were."""
    tools = desk(["a", "b", "c"], post=["A", MISSING, "C"])
    planning, model, used = await run(lists(SHOUT, on_item_failure="skip"), tools)
    assert planning.result.status == "succeeded"
    assert used.calls[-1][2] == {"text": ["A", None, "C"]}
    assert "decision:execution" not in model.asked
    (told,) = model.told("completion")
    assert '"elements": "×3: 2 done, 1 failed and left out"' in told
    assert "post[1]: no such file" in told
    assert planning.state.task_counts() == {"tasks_completed": 3, "tasks_failed": 0}


async def test_a_list_that_is_planned_anew():
    """A replan for an element that failed plans the rest of the list anew, and tells the model what is done."""
    tools = desk(["a", "b", "c"], post=["A", MISSING, "C"])
    replies = lists() | {
        "decision:execution": replan("partial_replan"),
        "revision": revision({**POST, "tool": "shout", "for_each": ["b"]}),
    }
    planning, model, used = await run(replies, tools)
    assert planning.result.status == "succeeded"
    assert used.calls[-1] == ("v2.post[0]", "shout", {"text": "b"})
    assert executed(planning.state) == ["partial_replan"]
    told = model.told("revision")[0]
    assert "'A', None, 'C'" in told
    assert "post[1]: no such file" in told
    assert planning.state.task_counts() == {"tasks_completed": 2, "tasks_failed": 0}


async def test_a_list_that_has_begun_is_kept():
    """A replan for another action leaves a list alone that has begun, as it does an action that runs."""
    tools = Desk({"shout": [MISSING], "post": ["A", "B", "C"]}, takes=1)
    replies = planned(
        {**POST, "for_each": ["a", "b", "c"], "max_parallel": 1}, action("shout", "shout")
    )
    replies |= {
        "decision:execution": replan("partial_replan"),
        "revision": revision(action("shout", "write")),
    }
    planning, _, used = await run(replies, tools)
    assert planning.result.status == "succeeded"
    assert [task for task, tool in used.used if tool == "post"] == ["post[0]", "post[1]", "post[2]"]
    assert ("v2.shout", "write") in used.used
    assert planning.state.plan.kept == ("post",)


async def test_no_alternative_for_an_element():
    """An action has failed with one of its elements, however many others are done."""
    tools = desk(["a", "b"], post=["A", MISSING])
    planning, *_ = await run(
        lists() | {"decision:execution": go_on(confidence=0.5)}, tools, escalate("abort")
    )
    assert planning.result.status != "succeeded"
    assert planning.state.task_counts() == {"tasks_completed": 1, "tasks_failed": 1}


# One action of the model


async def test_forty_elements_count_as_one_action(tmp_path):
    """Forty elements are one action for reflections, counts, the history and the checklist."""
    settings = {"planning": {"reflection": {"trigger_interval": 1}}}
    model = Model(lists() | {"reflection": {"reflection": {"action_id": "x", "status": "success"}}})
    planning = await solved(model, tmp_path, desk=desk(FORTY), settings=settings)
    assert planning.result.status == "succeeded"
    told = model.told("reflection")
    assert len(told) == 2
    assert '"id": "post"' in told[1]
    assert '"note 39"' in told[1]
    (end,) = model.told("completion")
    assert '"progress"' not in end
    assert '"done": 2, "of": 2' in end
    assert end.count('"task": "post"') == 1
    assert '"elements": "×40: 40 done"' in end
    lines = [line for line in in_order(written(tmp_path)) if line["type"] == "execution"]
    (posted,) = [line for line in lines if line.get("task_id", "").startswith("post")]
    assert (posted["event"], posted["elements"]) == ("succeeded", "×40: 40 done")
    assert posted["result"] == FORTY
    summary = planning.state.completion["summary"]
    assert (summary["tasks_completed"], summary["tasks_failed"]) == (2, 0)


async def test_a_list_is_judged_once():
    """With `judge_on: every_action` a list is judged once, with the output of all elements, and not repeated."""
    model = Model(lists() | {"decision:execution": (go_on(), replan("retry"))})
    planning, model, used = await run(model, desk(["a", "b", "c"]), {"judge_on": "every_action"})
    assert planning.result.status == "succeeded"
    assert len(model.told("decision:execution")) == 2
    assert used.tools.count("post") == 3
    assert planning.state.counts.total == 0


async def test_an_output_that_reports_a_failure():
    """An element whose output reports a failure is judged alone, and can be repeated alone."""
    tools = desk(["a", "b"], post=[{"ok": False}])
    quiet = {"planning": {"reflection": {"enabled": False}}}
    planning, model, used = await run(
        lists() | {"decision:execution": replan("retry")}, tools, quiet
    )
    assert planning.result.status == "succeeded"
    assert [task for task, tool in used.used if tool == "post"] == ["post[0]", "post[1]", "post[0]"]
    assert '"action": "post[0]"' in model.told("decision:execution")[0]


async def test_a_short_plan_of_many_elements():
    """The interval of reflections follows from the number of actions, not of elements."""
    model = Model(lists(SHOUT))
    _, model, _ = await run(model, desk(FORTY))
    assert len(model.told("reflection")) == 1


async def test_the_checklist_has_one_line_for_a_list():
    """The checklist and the notice of the end have one line for a list, with the number of elements in each state."""
    store = MemoryStore()
    tools = desk(["a", "b", "c"], post=["A", MISSING, "C"])
    planning, *_ = await run(lists(on_item_failure="skip"), tools, store=store)
    progress = PlanningProgress()
    for record in store.read(planning.result.run):
        progress.fold(record)
    (plan,) = progress.plans
    counts = "×3: 2 done, 1 failed and left out"
    assert [(step.name, step.text, step.done) for step in plan.steps] == [
        ("write", "write", True),
        ("post", f"post ({counts})", True),
    ]
    assert progress.finished_actions() == ["write: write", f"post: post ({counts})"]


# Resuming


def without_memory(prompt: str) -> Any:
    """Model that plans a list of which one element is replaced, and another one left out."""
    replies = lists(SHOUT, fallback_strategy="shout", on_item_failure="skip")
    kind = kind_of(prompt)
    usual = go_on() if kind.startswith("decision") else Model()(prompt)
    return replies.get(kind, usual)


async def fail(task: Any) -> None:
    """Fail for the second element, and for the third with any tool."""
    if task.arguments["text"] == "c" or (task.arguments["text"], task.tool) == ("b", "post"):
        raise MISSING


@pytest.mark.parametrize(
    ("first", "step"),
    [(5, 9), *(pytest.param(first, 3, marks=pytest.mark.deep) for first in (1, 2, 3))],
)
async def test_cut_off_anywhere(first, step):
    """A run that is cut off in the middle of a list goes on with the elements that are not done."""
    tools = tuple(tool.model_copy(update={"idempotent": True}) for tool in TOOLS)
    whole = MemoryStore()

    def working() -> Desk:
        return Desk({"write": [["a", "b", "c", "d"]] * 2}, before=fail, takes=1)

    async with VirtualClock() as clock:
        planning = coordinator(without_memory, clock, working(), store=whole, tools=tools)
        assert await planning.execute_with_planning(RUN)
    records = list(whole.read(RUN))
    expected = PlanningState.from_records(records)
    assert expected.task_counts() == {"tasks_completed": 3, "tasks_failed": 0}
    for length in range(first, len(records), step):
        store = cut(records[:length])
        async with VirtualClock(records[length - 1].at) as clock:
            resumed = coordinator(without_memory, clock, working(), store=store, tools=tools)
            assert await resumed.execute_with_planning(RUN), length
            assert resumed.run is not None
            assert replay_differences(resumed.run, store.read(RUN), clock.now()) == []
        assert resumed.result.outputs["post"] == ["a", "b", None, "d"]
        assert resumed.state.task_counts() == expected.task_counts()
        assert len(resumed.state.plans) == 1
