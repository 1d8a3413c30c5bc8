"""When the model looks back at what was done, how large its answers may be, and what comes of that."""

from __future__ import annotations

import pytest

from replanning import Answer, Settings, Task
from replanning.errors import LLMUnavailable
from replanning.journal import MemoryStore, Usage
from replanning.journal.records import QuestionVerdict
from replanning.llm import Completion
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.planning import PlanningCoordinator
from replanning.testing import LLMReply, ScriptedGate, ScriptedLLM, VirtualClock, returns, virtual_environment
from tests.support.planning import (
    MISSING,
    TOOLS,
    Desk,
    Model,
    Replies,
    action,
    coordinator,
    go_on,
    kind_of,
    replan,
    revision,
    run,
)

pytestmark = pytest.mark.anyio


def thought(status: str = "success", *, revise: bool = False) -> JsonObject:
    """Return a reflection on an action."""
    said: JsonObject = {"action_id": "write", "status": status, "evaluation": "so", "plan_revision_needed": revise}
    return {"reflection": said}


class Says(Desk):
    """Tools of which `write` returns a given output."""

    def __init__(self, *outputs: JsonValue) -> None:
        super().__init__()
        self._outputs = list(outputs)

    async def __call__(self, task: Task, context: object) -> JsonValue:
        said = await super().__call__(task, context)
        return self._outputs.pop(0) if task.tool == "write" and self._outputs else said


# Reflection


async def test_a_failure_that_the_decision_answers_is_not_asked_about_twice() -> None:
    """After an error the model decides; a decision that helps is recorded as the reflection too."""
    planning, model, _ = await run(
        {"decision:execution": replan("partial_replan"), "revision": revision(action("write", "shout"))},
        Desk({"write": [MISSING]}),
    )
    assert planning.result.status == "succeeded"

    assert "reflection" not in model.asked
    (told,) = planning.state.reflections
    reflection = told["reflection"]
    assert isinstance(reflection, dict)
    assert (reflection["action_id"], reflection["status"], reflection["plan_revision_needed"]) == (
        "write",
        "failure",
        True,
    )


async def test_a_decision_that_does_not_help_leads_to_a_reflection() -> None:
    """A decision that does not help after an error is followed by a reflection, which may revise the plan."""
    replies: Replies = {
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
async def test_reflection_on_error_can_be_switched_off(reflection: JsonObject) -> None:
    """Without reflection on errors, only the decision counts, and no reflection is recorded."""
    settings = Settings.model_validate({"planning": {"reflection": reflection}})
    planning, model, _ = await run(
        {"reflection": thought("failure", revise=True)}, Desk({"write": [MISSING]}), settings=settings
    )
    assert planning.result.status != "succeeded"

    assert "reflection" not in model.asked
    assert planning.state.reflections == []


@pytest.mark.parametrize(
    "output", [{"ok": False}, {"isError": True, "text": "x"}, '{"error": "no paper"}', {"exit_code": 2}]
)
async def test_an_output_that_states_a_failure_is_unexpected(output: JsonValue) -> None:
    """An output with a failure in a field leads to a reflection, and the tool may be used again."""
    replies: Replies = {"reflection": thought("failure"), "decision:execution": (replan("retry"), go_on())}
    model, desk = Model(replies), Says(output)
    planning, _, _ = await run(model, desk)
    assert planning.result.status == "succeeded"

    assert [tool for _, tool in desk.used] == ["write", "write", "post"]
    assert model.asked.count("reflection") == 1


@pytest.mark.parametrize("output", [None, "", [], "error: no paper", {"error": None, "ok": True, "exit_code": 0}, "{"])
async def test_an_output_is_not_judged_by_its_words(output: JsonValue) -> None:
    """An empty output, or one with the word error, is not a failure: no model is asked."""
    model = Model()
    async with VirtualClock() as clock:
        assert await coordinator(model, clock, Says(output)).execute_with_planning()

    assert not {"reflection", "decision:execution"} & set(model.asked)


async def test_an_approved_output_costs_one_call() -> None:
    """If the reflection approves an unexpected output, the model is not asked to decide as well."""
    planned: JsonObject = {"actions": [action("write", "write"), action("post", "post")]}
    model = Model({"reflection": thought(), "action_sequence": planned})
    async with VirtualClock() as clock:
        assert await coordinator(model, clock, Says({"ok": False})).execute_with_planning()

    assert model.asked.count("reflection") == 1
    assert "decision:execution" not in model.asked


@pytest.mark.parametrize(("interval", "expected"), [(0, 0), (1, 2), (2, 1), (3, 0)])
async def test_reflection_interval(interval: int, expected: int) -> None:
    """The model reflects at the interval, never before the first action, and never with an interval of 0."""
    settings = Settings.model_validate({"planning": {"reflection": {"trigger_interval": interval}}})
    model = Model({"reflection": thought()})
    async with VirtualClock() as clock:
        assert await coordinator(model, clock, settings=settings).execute_with_planning()

    assert model.asked.count("reflection") == expected
    assert model.asked.count("decision:execution") == expected


@pytest.mark.parametrize("interval", [2, 3])
async def test_reflection_interval_counts_concurrent_actions(interval: int) -> None:
    """Actions that end while the model reflects on others are counted one by one."""
    names = [f"s{number}" for number in range(6)]
    subtasks: list[JsonValue] = [{"id": name, "description": name} for name in names]
    planned: list[JsonValue] = [action(name, "write") for name in names]
    replies: Replies = {
        "task_decomposition": {"subtasks": subtasks},
        "action_sequence": {"actions": planned},
        "reflection": thought(),
    }
    settings = Settings.model_validate({"planning": {"reflection": {"trigger_interval": interval}}})
    script = Model(replies)

    async with VirtualClock() as clock:
        environment = virtual_environment(clock=clock)

        def slow(prompt: str) -> LLMReply:
            return returns(script(prompt), after=5)

        class Steady(Desk):
            async def __call__(self, task: Task, context: object) -> JsonValue:
                await clock.sleep(1)
                return await super().__call__(task, context)

        planning = PlanningCoordinator(
            settings, ScriptedLLM(slow, environment=environment), TOOLS, "Tell", work=Steady(), environment=environment
        )
        assert await planning.execute_with_planning()

    assert script.asked.count("reflection") == 6 // interval


async def test_an_invalid_reflection_is_recorded() -> None:
    """An invalid reflection is recorded with the reason, and the run continues."""
    settings = Settings.model_validate({"planning": {"reflection": {"trigger_interval": 1}}})
    planning, _, _ = await run({"reflection": "I would rather not."}, settings=settings)
    assert planning.result.status == "succeeded"

    assert ["error" in one for one in planning.state.reflections] == [True, True]


async def test_after_an_interruption_no_reflection_is_asked_for_twice() -> None:
    """A run that was cut off after a reflection uses it again."""
    settings = Settings.model_validate({"escalation": {"on_no_alternative": "wait"}})
    store, model = MemoryStore(), Model({"reflection": thought("failure")})
    async with VirtualClock() as clock:
        first = coordinator(model, clock, Desk({"write": [MISSING]}), settings=settings, store=store)
        assert not await first.execute_with_planning("r")
        assert first.result.status == "needs_human"
        second = coordinator(model, clock, settings=settings, store=store)
        await second.execute_with_planning("r")

    assert model.asked.count("reflection") == 1


# Asking a person in the midst of the execution

EACH = Settings.model_validate({"judge_on": "every_action"})


@pytest.mark.parametrize(("verdict", "used"), [("approve", ["write", "shout"]), ("reject", ["write", "post"])])
async def test_an_unsure_replan_after_an_action_needs_a_person(verdict: QuestionVerdict, used: list[str]) -> None:
    """A person approves an unsure replan after a successful action, while the rest waits."""
    unsure = replan("partial_replan", confidence=0.4)
    replies: Replies = {"decision:execution": (unsure, go_on()), "revision": revision(action("post", "shout"))}
    desk, gate = Desk(), ScriptedGate([Answer(verdict, by="eve")])
    async with VirtualClock() as clock:
        planning = coordinator(Model(replies), clock, desk, settings=EACH, gate=gate)
        assert await planning.execute_with_planning()

    assert [tool for _, tool in desk.used] == used
    assert planning.state.counts.total == (verdict == "approve")
    (record,) = [record for record in planning.state.records if record.replan_type == "partial_replan"]
    assert record.executed is (verdict == "approve")


@pytest.mark.parametrize("answered", [True, False])
async def test_a_question_after_an_action_is_asked(answered: bool) -> None:
    """A question during the execution is asked before the run continues, or its answer assumed."""
    asks = go_on(clarification_needed=True, clarification_questions=["Which paper?"])
    model = Model({"decision:execution": (asks, go_on())})

    gate = ScriptedGate([Answer("approve", by="eve", comment="the yellow one")]) if answered else None
    async with VirtualClock() as clock:
        desk = Desk()
        planning = coordinator(model, clock, desk, settings=EACH, gate=gate)
        assert await planning.execute_with_planning()
        assert clock.elapsed == (0 if answered else pytest.approx(1800))

    assert [tool for _, tool in desk.used] == ["write", "post"]
    assert ("the yellow one" if answered else "there is no answer: Which paper?") in model.prompts[-1]


async def test_an_unsure_retry_of_what_succeeded_is_not_done() -> None:
    """A successful action is not repeated for an unsure retry; that is recorded, and the run continues."""
    model = Model({"decision:execution": (replan("retry", confidence=0.4), go_on())})
    async with VirtualClock() as clock:
        desk = Desk()
        planning = coordinator(model, clock, desk, settings=EACH)
        assert await planning.execute_with_planning()

    assert [tool for _, tool in desk.used] == ["write", "post"]
    assert [record.executed for record in planning.state.records if record.replan_type == "retry"] == [False]


# How large answers may be


async def limits(model: Model, settings: Settings | None = None, max_tokens: int = 2000) -> dict[str, set[int | None]]:
    """Return the maximum tokens of each kind of reply."""
    async with VirtualClock() as clock:
        environment = virtual_environment(clock=clock)
        llm = ScriptedLLM(model, environment=environment, max_tokens=max_tokens)
        planning = PlanningCoordinator(
            settings or Settings(), llm, TOOLS, "Tell people", work=Desk(), environment=environment
        )
        assert await planning.execute_with_planning()
    found: dict[str, set[int | None]] = {}
    for one in llm.requests:
        found.setdefault(kind_of(one.prompt), set()).add(one.options.max_tokens)
    return found


async def test_the_service_is_told_how_long_an_answer_may_be() -> None:
    """A plan may have 2000 tokens and a reflection 500; fewer if settings say so."""
    settings = Settings.model_validate({"planning": {"reflection": {"trigger_interval": 1}}})
    found = await limits(Model({"reflection": thought()}), settings)
    short = {"reflection": {500}, "completion": {500}}
    assert found == {kind: short.get(kind, {2000}) for kind in found}
    assert set(short) < set(found)

    found = await limits(Model({"reflection": thought()}), settings, max_tokens=300)
    assert set().union(*found.values()) == {300}


async def test_an_answer_that_was_cut_off_is_to_be_shorter() -> None:
    """The repair prompt for a truncated reply says so, and not only that its JSON is broken."""
    script, seen = Model(), list[str]()

    def model(prompt: str) -> LLMReply:
        seen.append(prompt)
        cut = Completion('{"goal_understanding": {"main_obj', "x", "x-1", 10, 2000, Usage(calls=1), finish="length")
        return cut if len(seen) == 1 else script(prompt)

    async with VirtualClock() as clock:
        environment = virtual_environment(clock=clock)
        llm = ScriptedLLM(model, environment=environment)
        planning = PlanningCoordinator(Settings(), llm, TOOLS, "Tell people", work=Desk(), environment=environment)
        assert await planning.execute_with_planning()

    assert "cut off after 2000 tokens, so it must be shorter" in seen[1]


async def test_a_large_plan_is_made_in_batches() -> None:
    """The actions of many subtasks are planned in batches, each with the earlier ones in its prompt, as one plan."""
    names = [f"s{number}" for number in range(40)]
    subtasks: JsonValue = [
        {"id": name, "description": name, "dependencies": names[:i][-1:]} for i, name in enumerate(names)
    ]
    parts: list[list[str]] = []
    script = Model({"task_decomposition": {"subtasks": subtasks}})

    def model(prompt: str) -> JsonValue:
        if kind_of(prompt) != "action_sequence":
            return script(prompt)
        inner = prompt.split("<part>\n")[1].split("</part>", maxsplit=1)[0]
        parts.append([line.strip('"') for line in inner.splitlines() if line])
        assert len(parts) == 1 or "<action_plan>" in prompt
        wrong = len(parts) == 2
        return {"actions": [action(name, "nothing" if wrong else "write") for name in parts[-1]]}

    settings = Settings.model_validate({"planning": {"reflection": {"trigger_interval": 0}}})
    planning, _, desk = await run(model, settings=settings)
    assert planning.result.status == "succeeded"

    assert [len(part) for part in parts] == [15, 15, 15, 10]
    assert parts[0] + parts[2] + parts[3] == names
    assert [task for task, _ in desk.used] == names


async def test_actions_refer_to_earlier_batches() -> None:
    """Actions may refer to those of earlier batches that they depend on, and to no others."""
    names = [f"s{number}" for number in range(20)]
    subtasks: JsonValue = [
        {"id": name, "description": name, "dependencies": ["s0"] * (name == "s19")} for name in names
    ]
    script, refused = Model({"task_decomposition": {"subtasks": subtasks}}), list[str]()

    def model(prompt: str) -> JsonValue:
        if kind_of(prompt) != "action_sequence":
            return script(prompt)
        if '"s0"' in prompt.partition("<part>")[2]:
            return {"actions": [action("s0", "write"), *(action(name, "write") for name in names[:15])]}
        refused.append(prompt.partition("<rejected>")[2])
        read = "${s1.output}" if len(refused) == 1 else "${s0-1.output}, ${s0.output}"
        last = action("s19", "write", arguments={"text": read})
        return {"actions": [*(action(name, "write") for name in names[15:19]), last]}

    planning, _, _ = await run(model)
    assert planning.result.status == "succeeded"

    assert "task 's19' refers to ${s1.output} and does not depend on 's1'" in refused[1]
    assert planning.result.outputs["s19"] == "news, news"


async def test_a_model_that_cannot_be_asked_ends_a_large_plan() -> None:
    """A batch that cannot be planned ends the phase with the reason, and nothing is executed."""
    subtasks: JsonValue = [{"id": f"s{number}", "description": ""} for number in range(16)]
    script, desk = Model({"task_decomposition": {"subtasks": subtasks}}), Desk()

    def model(prompt: str) -> JsonValue:
        if kind_of(prompt) == "action_sequence":
            raise LLMUnavailable("busy")
        return script(prompt)

    planning, _, _ = await run(model, desk)
    assert planning.result.status != "succeeded"

    assert desk.used == []
    assert planning.result.reason
