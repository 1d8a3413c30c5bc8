"""Phases of planning mode, one by one and in whole runs."""

from __future__ import annotations

import pytest

from replanning import Answer, Goal, Plan, Settings, Task, ToolSpec
from replanning.errors import SettingsError
from replanning.journal import MemoryStore
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.planning import Phase, PlanningCoordinator
from replanning.planning.outputs import UnclearGoal, parse_planning
from replanning.testing import ScriptedGate, VirtualClock
from tests.support.invariants import invariant_violations
from tests.support.planning import (
    GOAL,
    MISSING,
    SUBTASKS,
    TOOLS,
    Desk,
    Model,
    Replies,
    action,
    coordinator,
    done,
    go_on,
    replan,
    revision,
    run,
    use,
)

pytestmark = pytest.mark.anyio


async def test_the_phases_are_methods() -> None:
    """Each phase has a method that continues after the one before, and repeats nothing."""
    model, desk, store = Model(), Desk(), MemoryStore()
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, desk, store=store)
        goal = await planning.understand_goal("r")
        assert goal is not None
        assert goal.main_objective == GOAL["main_objective"]
        assert model.asked == ["goal_understanding", "decision:goal_understanding"]
        subtasks = await planning.decompose_task()
        assert subtasks is not None
        assert [subtask.id for subtask in subtasks.subtasks] == ["write", "post"]
        plan = await planning.plan_actions()
        assert plan is not None
        assert [one.tool for one in plan.actions] == ["write", "post"]
        assert desk.used == []
        assert await planning.execute_actions()
        assert [tool for _, tool in desk.used] == ["write", "post"]
        assert "completion" not in model.asked
        completion = await planning.reflect()

    assert (completion or {})["status"] == "success"
    assert planning.result.status == "succeeded"
    assert len(model.asked) == len(set(model.asked))
    assert invariant_violations(list(store.read(planning.result.run))) == []


async def test_a_judge_is_told_once_what_a_phase_came_to() -> None:
    """The output of a planning phase is in the prompt of its decision once, under its own name."""
    model = Model()
    async with VirtualClock() as clock:
        await coordinator(model, clock, Desk()).execute_with_planning()
    for phase, section in (
        ("goal_understanding",) * 2,
        ("task_decomposition",) * 2,
        ("action_sequence", "action_plan"),
    ):
        (prompt,) = model.told(f"decision:{phase}")
        _, _, told = prompt.partition(f"<{section}>\n")
        first = told.partition(f"\n</{section}>")[0].split("\n")[-1]
        assert first
        assert prompt.count(first) == 1
        assert "<result>" not in prompt


async def test_a_phase_takes_those_before_it_along() -> None:
    """The method of a phase runs those before it, and does not repeat a finished one."""
    model = Model({"decision:task_decomposition": (replan("task_redecomposition"), go_on())})
    async with VirtualClock() as clock:
        planning = coordinator(model, clock)
        assert await planning.plan_actions() is not None
        asked = list(model.asked)
        assert await planning.decompose_task() is not None
        assert await planning.execute_with_planning(planning.result.run)

    assert asked.count("task_decomposition") == 2
    assert model.asked[: len(asked)] == asked
    assert model.asked[len(asked) :] == ["completion", "decision:reflection"]


async def test_a_phase_that_comes_to_nothing() -> None:
    """The method of a phase that is not reached returns None, and the result of the run has the reason."""
    async with VirtualClock() as clock:
        planning = coordinator(Model({"task_decomposition": "no"}), clock)
        assert await planning.decompose_task() is None
        assert planning.result.status == "aborted"
        off = coordinator(Model(), clock, settings=Settings.model_validate({"planning": {"enabled": False}}))
        with pytest.raises(SettingsError, match=r"planning\.enabled"):
            await off.understand_goal()


async def test_the_counters_survive_a_pause() -> None:
    """Limits used before a pause count after it, in another process."""
    store = MemoryStore()
    again = replan("action_regeneration")
    async with VirtualClock() as clock:
        first = coordinator(Model({"decision:action_sequence": (again, go_on())}), clock, store=store)
        assert await first.plan_actions("r") is not None
        wants = Model({"decision:execution": (replan("retry"), go_on())})
        second = coordinator(wants, clock, Desk({"write": [MISSING]}), store=store)
        assert await second.execute_with_planning("r")

    counts = second.state.counts
    assert (counts.total, counts.regenerations) == (2, 1)


async def test_actions_are_executed_in_order_with_what_came_before() -> None:
    """Actions run after their dependencies with their outputs, and each result is recorded and shown."""
    model = Model()

    planning, _, desk = await run(model)
    assert planning.result.status == "succeeded"

    assert [tool for _, tool in desk.used] == ["write", "post"]
    assert planning.result.outputs["post"] == "news"
    completion = model.told("completion")[0]
    assert '{"task": "post", "tool": "post", "state": "DONE", "output": "news"}' in completion


async def test_an_outcome_is_compared_with_what_was_expected() -> None:
    """The decision prompt shows the expected outcome beside the output; the model may repeat the action."""
    planned: JsonObject = {
        "actions": [action("write", "write", expected_outcome="the text mentions rain"), action("post", "post")]
    }
    model = Model({"action_sequence": planned, "decision:execution": (replan("retry"), go_on())})

    settings = Settings.model_validate({"judge_on": "every_action"})
    planning, _, desk = await run(model, settings=settings)
    assert planning.result.status == "succeeded"

    judged = model.told("decision:execution")[0]
    assert "the text mentions rain" in judged
    assert '<result>\n"news"' in judged
    assert [tool for _, tool in desk.used] == ["write", "write", "post"]


async def test_a_failed_action_is_told_as_it_was_carried_out() -> None:
    """The decision prompt for a failure shows tool, purpose and all arguments, and no action that has not begun."""
    later: JsonObject = {
        "actions": [{"task_id": "write", "tool": "write", "purpose": "to have it"}, action("post", "post")]
    }
    call: JsonObject = {"current_task": "write", "function_call": {"name": "write", "arguments": {"text": "rain"}}}
    planning, model, _ = await run(
        {"action_sequence": later, "execution": call, "decision:execution": replan("retry")}, Desk({"write": [MISSING]})
    )
    assert planning.result.status == "succeeded"

    (told,) = model.told("decision:execution")
    shown = (
        '<action>\n{"id": "write", "tool": "write", "purpose": "to have it", "arguments": {"text": "rain"}}\n</action>'
    )
    assert shown in told
    assert '<executed>\n{"task": "write", "tool": "write", "state": "FAILED"' in told
    assert '"task": "post"' not in told.partition("<executed>")[2].partition("</executed>")[0]


async def test_c_the_current_state_is_told_to_who_sums_up() -> None:
    """The prompt of a reflection shows the facts that hold."""
    tools = Plan(goal=Goal(objective=""), facts=("door(open)",), tools=TOOLS)
    model = Model()
    async with VirtualClock() as clock:
        assert await coordinator(model, clock, tools=tools).execute_with_planning()

    for kind in ("completion", "decision:reflection"):
        assert '<state>\n"door(open)"\n</state>' in model.told(kind)[0]


class Strike(Desk):
    """Tools of which `post` goes down while `write` is used."""

    planning: PlanningCoordinator

    async def __call__(self, task: Task, context: object) -> JsonValue:
        """Use the tool of a task."""
        if task.tool == "write" and self.planning.run is not None:
            self.planning.run.change_resource("post", available=False, reason="the post is on strike")
        return await super().__call__(task, context)


async def test_preconditions_are_checked() -> None:
    """An action whose tool is down does not run: the model learns the reason, and replans."""
    desk = Strike()
    model = Model({"decision:execution": replan("partial_replan"), "revision": revision(action("post", "shout"))})

    async with VirtualClock() as clock:
        planning = desk.planning = coordinator(model, clock, desk)
        assert await planning.execute_with_planning()

    assert [tool for _, tool in desk.used] == ["write", "shout"]
    (told,) = model.told("decision:execution")
    assert "post needs the tool 'post', which is not available: the post is on strike" in told.replace("\\u0027", "'")


async def test_a_tool_that_is_down_has_its_fallback() -> None:
    """An action whose tool is down is replaced by its declared fallback without asking the model."""
    planned: JsonObject = {"actions": [action("write", "write"), action("post", "post", fallback_strategy="shout")]}
    model, desk = Model({"action_sequence": planned}), Strike()
    async with VirtualClock() as clock:
        planning = desk.planning = coordinator(model, clock, desk)
        assert await planning.execute_with_planning()

    assert [tool for _, tool in desk.used] == ["write", "shout"]
    assert "decision:execution" not in model.asked


async def test_a_tool_that_stays_down_is_not_passed_over() -> None:
    """Without a decision about a tool that is down, the run ends and names the action that needs it."""
    desk, model = Strike(), Model()
    async with VirtualClock() as clock:
        planning = desk.planning = coordinator(model, clock, desk)
        assert not await planning.execute_with_planning()

    assert model.asked.count("decision:execution") == 1
    assert "post needs the tool 'post', which is not available: the post is on strike" in planning.result.reason
    assert (planning.state.completion or {})["status"] == "requires_human_intervention"


async def test_a_run_that_is_cut_short_has_a_summary() -> None:
    """A run that ends by its budget has a summary with its progress and the reason, whatever its errors contain."""
    failing = Desk({"post": [OSError("\x1b[31mno post\x1b[0m")] * 9})
    async with VirtualClock() as clock:
        settings = Settings.model_validate({"budget": {"calls": 6}})
        planning = coordinator(Model(), clock, failing, settings=settings)
        assert not await planning.execute_with_planning()

    completion = planning.state.completion or {}
    assert completion["status"] == "requires_human_intervention"
    summary = completion["summary"]
    assert isinstance(summary, dict)
    assert (summary["tasks_completed"], summary["tasks_failed"], summary["goal_achieved"]) == (1, 1, False)
    assert planning.state.actions == {"write": True, "post": False}


async def test_an_unclear_goal_is_asked_about_and_planned_as_far_as_it_is_clear() -> None:
    """An unclear goal leads to a question, and the inferred part is shown in later prompts."""
    error: JsonObject = {"type": "unclear_goal", "message": "who?", "clarification_needed": ["Which people?"]}
    unclear: JsonObject = {"phase": "planning", "goal_understanding": GOAL, "error": error}
    asks = replan("clarification_request", clarification_needed=True, clarification_questions=["Which people?"])
    model = Model({"goal_understanding": (unclear, GOAL), "decision:goal_understanding": (asks, go_on())})
    gate = ScriptedGate([Answer("approve", by="eve", comment="the neighbours")])
    planning, _, _ = await run(model, gate=gate)
    assert planning.result.status == "succeeded"

    assert planning.state.clarified[0].answer == "the neighbours"
    first = planning.state.outputs[Phase.GOAL_UNDERSTANDING]
    assert first["main_objective"] == GOAL["main_objective"]
    assert first["unclear"] == error
    parsed = parse_planning(str(unclear).replace("'", '"'), Phase.GOAL_UNDERSTANDING).error
    assert isinstance(parsed, UnclearGoal)


async def test_only_the_tools_of_the_list() -> None:
    """No unknown tool runs, whatever the model plans or chooses at execution."""
    later: JsonObject = {"actions": [{"task_id": "write", "tool": "write"}, action("post", "post")]}
    foreign: JsonObject = {
        "current_task": "write",
        "function_call": {"name": "format-disk", "arguments": {"text": "x"}},
    }
    cases: tuple[Replies, ...] = (
        {"action_sequence": {"actions": [action("write", "rm")]}},
        {"action_sequence": later, "execution": foreign},
    )
    for replies in cases:
        async with VirtualClock() as clock:
            desk = Desk()
            planning = coordinator(Model(replies), clock, desk)
            assert not await planning.execute_with_planning()
        assert {tool for _, tool in desk.used} <= {tool.name for tool in TOOLS}


SECRET = "AKIAIOSFODNN7EXAMPLE"
"""As in the documentation of AWS."""


async def test_a_subtask_is_not_called_by_what_looks_like_a_secret() -> None:
    """A subtask id that looks like a secret is rejected in a plan and in a revision, with a label for it."""
    named: JsonObject = {
        "subtasks": [{"id": "write", "description": "Write it"}, {"id": SECRET, "description": "Post it"}]
    }
    replies: Replies = {
        "task_decomposition": (named, SUBTASKS),
        "decision:execution": replan("partial_replan"),
        "revision": (revision(action(SECRET, "shout"), action("post", "post")), revision(action("write", "shout"))),
    }
    planning, model, _ = await run(replies, Desk({"write": [MISSING]}))
    assert planning.result.status == "succeeded"

    for kind, number in (("task_decomposition", 2), ("revision", 1)):
        refused, again = model.told(kind)
        assert "looks like a secret" not in refused
        assert f"what looks like a secret cannot be kept: do without it in the id of subtask {number}" in again
    assert SECRET not in "".join(model.prompts)


def first_and_then(kind: str, first: JsonObject, then: JsonObject) -> Replies:
    """Return replies with these arguments of the tool `write` first and those later."""
    both = (first, then)
    if kind == "action_sequence":
        return {kind: tuple({"actions": [action("write", "write", arguments=one)]} for one in both)}
    if kind == "execution":
        found = tuple({"current_task": "write", **use("write", **one)} for one in both)
        return {"action_sequence": {"actions": [{"task_id": "write", "tool": "write"}]}, kind: found}
    return {kind: (*(use("write", **one) for one in both), done())}


@pytest.mark.parametrize("kind", ["action_sequence", "execution", "step"])
async def test_no_tool_is_used_with_a_mark_in_place_of_a_secret(kind: str) -> None:
    """An argument that looks like a secret is rejected when planned, chosen at execution, or used without a plan."""
    one: JsonObject = {"subtasks": [{"id": "write", "description": "Write it"}]}
    model = Model({"task_decomposition": one, **first_and_then(kind, {"text": SECRET}, {"text": "news"})})
    settings = Settings.model_validate({"planning": {"enabled": kind != "step"}})
    planning, _, _ = await run(model, settings=settings)
    assert planning.result.status == "succeeded"

    assert "what looks like a secret cannot be kept: do without it in the arguments" in model.told(kind)[1]
    assert SECRET not in "".join(model.prompts)
    assert "news" in planning.result.outputs.values()


@pytest.mark.parametrize("kind", ["action_sequence", "execution", "step"])
@pytest.mark.parametrize(
    ("copied", "why"),
    [
        ("password=[redacted]", "[redacted] stands for a secret that you are not shown"),
        (
            "all of… [cut: 9000 characters in all]",
            "[cut: …] stands for the rest of a text or a list that you are not shown",
        ),
    ],
    ids=("secret", "end"),
)
async def test_a_model_does_not_write_the_mark_that_it_was_shown(kind: str, copied: str, why: str) -> None:
    """A truncation mark that the model copies into an argument is rejected, because a file would lose the rest."""
    one: JsonObject = {"subtasks": [{"id": "write", "description": "Write it"}]}
    replies = first_and_then(kind, {"text": copied}, {"text": "news"})
    model, desk = Model({"task_decomposition": one, **replies}), Desk()
    settings = Settings.model_validate({"planning": {"enabled": kind != "step"}})
    async with VirtualClock() as clock:
        assert await coordinator(model, clock, desk=desk, settings=settings).execute_with_planning()

    assert f"{why}: do without it in the arguments" in model.told(kind)[1]
    assert [tool for _, tool in desk.used] == ["write"]


@pytest.mark.parametrize("kind", ["action_sequence", "execution", "step"])
@pytest.mark.parametrize(
    "use_of",
    [
        {"kind": "shell", "command": "echo {text}", "produces": ["note"]},
        {"kind": "http", "url": "http://h/x", "method": "POST", "body": {"all": [{"t": "<{text}>"}]}},
    ],
    ids=("shell", "http"),
)
async def test_no_argument_of_a_model_is_passed_over(kind: str, use_of: JsonObject) -> None:
    """An argument that a command or a request does not take is rejected with the parameters, and not ignored."""
    one: JsonObject = {"subtasks": [{"id": "write", "description": "Write it"}]}
    replies = first_and_then(kind, {"text": "news", "append": True}, {"text": "news"})
    model, desk = Model({"task_decomposition": one, **replies}), Desk()
    settings = Settings.model_validate({"planning": {"enabled": kind != "step"}})
    tool = ToolSpec.model_validate({"name": "write", **use_of})
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, desk=desk, tools=(tool,), settings=settings)
        assert await planning.execute_with_planning()

    assert "tool 'write' has no parameter 'append'; it has ['text'" in model.told(kind)[1]
    assert len(desk.used) == 1
