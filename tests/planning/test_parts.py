"""The classes of planning mode work by themselves, built from the names that `replanning.planning` exports."""

import inspect
import json
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest

from replanning import planning
from replanning.errors import LLMUnavailable, NotRunning
from replanning.planning import (
    ActionsDecision,
    DecisionRequest,
    DecompositionDecision,
    ExecutionDecision,
    GoalDecision,
    Phase,
    PlanningHistoryExporter,
    PlanningHistoryStore,
    ReflectionDecision,
    ReplanCause,
    ReplanDecision,
    ReplanLimits,
    ReplanManager,
    ReplanPromptBuilder,
    ReplanType,
)
from replanning.testing import ScriptedLLM, VirtualClock
from tests.support.planning import (
    MISSING,
    Desk,
    action,
    coordinator,
    go_on,
    replan,
    revision,
    run,
)

CAUSE = ReplanCause("no such file: news.txt", action="write", lineage="write")
PLAN: dict[str, Any] = {"goal": "test", "subtasks": []}
REVISED: dict[str, Any] = {
    "execution": (replan("partial_replan"), go_on()),
    "revision": revision(action("shout", "shout")),
}


def classes_in(annotation: object) -> Iterator[type]:
    """Yield the classes that an annotation names."""
    if inspect.isclass(annotation):
        yield annotation
    for part in get_args(annotation):
        parts = part if isinstance(part, list) else [part]
        for each in parts:
            yield from classes_in(each)


@pytest.mark.parametrize("name", planning.__all__)
def test_every_argument_can_be_made(name):
    """What a class or function of planning mode takes can be imported from where it is itself."""
    public = getattr(planning, name)
    functions = dict(inspect.getmembers(public, inspect.isfunction))
    if inspect.isfunction(public):
        functions[name] = public

    for called, function in functions.items():
        is_ours = function.__module__.startswith("replanning.planning")
        if not is_ours or (called.startswith("_") and called != "__init__"):
            continue
        for argument, annotation in get_type_hints(function).items():
            for each in classes_in(annotation):
                if argument != "return" and each.__module__.startswith("replanning.planning"):
                    assert each.__name__ in planning.__all__, called


# The manager


async def test_a_manager_by_itself():
    """A manager asks, reads, rules, executes, records and counts with a model alone."""
    manager = ReplanManager(ScriptedLLM([replan("partial_replan"), "no JSON", replan("retry")]))
    applied: list[ReplanType] = []

    async def apply(decision: ReplanDecision) -> None:
        applied.append(decision.replan_type)

    assert manager.can_replan(Phase.EXECUTION, CAUSE)
    response = await manager.request_llm_decision(Phase.EXECUTION, {"errors": CAUSE.error}, CAUSE)
    assert response.decision is not None
    assert manager.should_override(response.decision, CAUSE) is None
    assert (manager.counts.considered, manager.records) == (0, ())

    considered = manager.decide(response.decision, CAUSE)
    record = await manager.execute_replan(considered, apply)
    assert (applied, record.result, record.cause) == (["partial_replan"], "success", CAUSE)

    declined = await manager.consider(Phase.EXECUTION, {}, CAUSE)
    assert declined.decision is not None
    manager.record_decision(declined, executed=False)
    statistics = manager.get_replan_statistics()
    assert (statistics.wanted, statistics.executed, statistics.success_rate) == (2, 1, 1.0)

    limits = ReplanLimits(total=1)
    resumed = ReplanManager(
        ScriptedLLM([]), limits=limits, counts=manager.counts, records=manager.records
    )
    assert not resumed.can_replan(Phase.EXECUTION, CAUSE)
    assert resumed.get_replan_statistics() == statistics


async def test_a_model_that_cannot_be_asked_gives_no_decision():
    """A response without a decision says why, and whether asking later may help."""
    response = await ReplanManager(ScriptedLLM([LLMUnavailable("busy")])).request_llm_decision(
        Phase.REFLECTION, {}
    )
    assert (response.decision, response.problem, response.model_unavailable) == (None, "busy", True)


async def test_a_manager_that_reads_another_form():
    """A subclass reads replies in its own form, also of the decisions that a coordinator's manager asks for."""

    class Terse(ReplanManager):
        def parse_decision_response(self, text: str, phase: Phase) -> ReplanDecision:
            if text == "GO ON":
                text = json.dumps(go_on())
            return super().parse_decision_response(text, phase)

    considered = await Terse(ScriptedLLM(["GO ON"])).consider(Phase.GOAL_UNDERSTANDING, {})
    assert considered.ruling.kind == "continue"
    assert considered.problem == ""


# Decisions


@pytest.mark.parametrize(
    ("model", "phase"),
    [
        (GoalDecision, Phase.GOAL_UNDERSTANDING),
        (DecompositionDecision, Phase.TASK_DECOMPOSITION),
        (ActionsDecision, Phase.ACTION_SEQUENCE),
        (ExecutionDecision, Phase.EXECUTION),
        (ReflectionDecision, Phase.REFLECTION),
    ],
)
def test_a_decision_of_ones_own(model, phase):
    """A program makes a decision after each phase, and the manager rules on it."""
    decision = model(
        replan_needed=False, confidence=1, reasoning="fine", replan_type=ReplanType.NONE
    )
    considered = ReplanManager(ScriptedLLM([])).decide(decision, ReplanCause())
    assert (considered.phase, considered.decision) == (phase, decision)
    assert considered.ruling.kind == "continue"


def test_a_decision_has_a_phase():
    """The base of the decisions cannot be created; the error names the classes that can."""
    with pytest.raises(TypeError, match="create one of GoalDecision, DecompositionDecision"):
        ReplanDecision(
            replan_needed=False, confidence=1, reasoning="fine", replan_type=ReplanType.NONE
        )


# Prompts


def test_the_prompts_of_the_phases():
    """Each method that is named after a phase asks for the decision after it, and needs nothing but data."""
    prompts = ReplanPromptBuilder()
    data: dict[str, Any] = {"result": "what came of it"}
    built = (
        prompts.build_goal_understanding_prompt(data),
        prompts.build_task_decomposition_prompt(data),
        prompts.build_action_sequence_prompt(data),
        prompts.build_execution_prompt(data),
        prompts.build_reflection_prompt(data),
    )
    assert built == tuple(prompts.decision(DecisionRequest(phase, data)) for phase in Phase)
    assert all('{"replan_decision": ' in prompt for prompt in built)
    assert len(set(built)) == 5
    caused = prompts.build_execution_prompt(data, CAUSE)
    assert '"action": "write"' in caused
    assert '"retry", level 1' in caused
    assert '"retry", level 1' not in built[3]


def test_what_a_request_leaves_open():
    """A request tells the replans that the phase and its limits allow."""
    request = DecisionRequest(Phase.TASK_DECOMPOSITION, {})
    assert request.replan_types == (ReplanType.TASK_REDECOMPOSITION,)
    closed = DecisionRequest(Phase.TASK_DECOMPOSITION, {}, limits=ReplanLimits(redecompositions=0))
    assert closed.replan_types == ()


# The history


def test_a_history_by_the_id_of_its_task(tmp_path, monkeypatch):
    """A store that is given the id of a task keeps its plan in the folder `planning_history`."""
    monkeypatch.chdir(tmp_path)
    store = PlanningHistoryStore("test-uuid")
    assert not store.has_plan()
    store.save_plan(PLAN)
    loaded = store.get_latest_plan()
    assert loaded is not None
    assert loaded["plan"] == PLAN
    assert (tmp_path / "planning_history" / "test-uuid.jsonl").exists()


# The coordinator


async def test_a_coordinator_hands_out_its_parts():
    """After a run, the coordinator has its manager and its statistics; before, it says what to do."""
    mode = coordinator({}, VirtualClock())
    for name in ("manager", "statistics", "history_store"):
        with pytest.raises(NotRunning, match="call execute_with_planning"):
            getattr(mode, name)

    desk = Desk({"write": [MISSING]})
    mode, _, _ = await run({"decision:execution": REVISED["execution"], **REVISED}, desk)
    assert list(mode.manager.records) == mode.state.records
    assert mode.statistics == mode.manager.get_replan_statistics()
    assert mode.statistics.by_type == {ReplanType.PARTIAL_REPLAN: 1}


async def test_a_coordinator_writes_the_history_that_settings_name(tmp_path):
    """If the settings name a folder, the coordinator writes the history of the run there, and hands it out."""
    settings = {"planning": {"history": {"directory": str(tmp_path / "named")}}}
    mode, _, _ = await run(settings=settings, run_id="r")
    await mode.engine.aclose()
    types = [line["type"] for line in mode.history_store.entries()]
    assert (types[0], types[-1]) == ("replan_decision", "completion")
    assert mode.history_store.has_plan()
    assert [path.name for path in (tmp_path / "named").glob("[!.]*")] == ["r.jsonl"]


async def test_a_coordinator_without_a_folder_writes_no_history(tmp_path, monkeypatch):
    """Without a folder in the settings, nothing is written, and the history is empty."""
    monkeypatch.chdir(tmp_path)
    mode, _, _ = await run()
    await mode.engine.aclose()
    assert not mode.history_store.has_plan()
    assert list(tmp_path.iterdir()) == []


async def test_an_exporter_of_the_history_takes_precedence(tmp_path):
    """A history that an exporter writes is the one that is handed out; it is written once."""
    exporter = PlanningHistoryExporter(PlanningHistoryStore(directory=tmp_path / "own"))
    settings = {"planning": {"history": {"directory": str(tmp_path / "named")}}}
    mode, _, _ = await run(settings=settings, exporters=[exporter])
    await mode.engine.aclose()
    assert mode.history_store.has_plan()
    assert [path.name for path in tmp_path.iterdir()] == ["own"]
