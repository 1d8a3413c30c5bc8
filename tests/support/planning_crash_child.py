"""Program that runs a coding task in planning mode, to be killed at any moment: PLACE RUN FOLDER TICKS.

It tells on the pipe TICKS of each record before and after writing it, and prints how the run stands.
"""

import json
import os
import sys
from contextlib import closing
from pathlib import Path

import anyio

from replanning import Plan, RunResult, Settings
from replanning.exporters.notices import FileNotifier
from replanning.journal import RunStore
from replanning.planning import PlanningCoordinator, PlanningHistoryExporter, PlanningHistoryStore
from replanning.providers.openai import OpenAIProvider
from replanning.tools import ToolExecutor
from tests.support.coding import OBJECTIVE, tools
from tests.support.crash_child import store_at
from tests.support.invariants import replay_differences


def settings() -> Settings:
    """Return settings without waiting; questions stay open, and each kill may cost a retry."""
    replanning = {
        "goal_understanding": {"auto_assume_on_no_response": False},
        "execution": {"max_action_retries": 20},
        "global": {"max_total_replans": 40},
    }
    return Settings.model_validate(
        {"planning": {"replanning": replanning}, "budget": {"calls": 200}}
    )


async def solve(store: RunStore, run: str, folder: Path) -> tuple[RunResult, list[str]]:
    """Run or resume the task; return its result and the differences of its live plan from its journal."""
    specs = tools(folder)
    plan = Plan.model_validate({"goal": {"objective": OBJECTIVE}, "tools": specs})
    async with OpenAIProvider() as model, ToolExecutor(plan) as work:
        planning = PlanningCoordinator(
            settings(),
            model,
            specs,
            OBJECTIVE,
            work=work,
            store=store,
            exporters=[
                FileNotifier(folder.with_name("notices.md")),
                PlanningHistoryExporter(PlanningHistoryStore(folder.with_name("planning_history"))),
            ],
            wait_for_answers=False,
        )
        await planning.execute_with_planning(run)
        await planning.engine.aclose()
    assert planning.run is not None
    return planning.result, replay_differences(planning.run, store.read(planning.run.id), 0.0)


def main() -> None:
    """Run the task that the arguments name."""
    place, run, folder, ticks = sys.argv[1:]
    os.environ["LEASE"] = "inf"
    with closing(store_at("sqlite", place, int(ticks))) as store:
        result, differences = anyio.run(solve, store, run, Path(folder))
    told = {
        "status": result.status,
        "reason": result.reason,
        "calls": result.spent.calls,
        "differences": differences,
    }
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
