"""Program that runs a payment, or goes on with it, to be killed: FOLDER.

The payment and the look-up are commands that tell by files in the folder how far they are, and wait for others.
"""

import json
import sys
from contextlib import closing
from pathlib import Path

import anyio

from replanning import Plan
from replanning.journal import SqliteStore
from replanning.plan import RunId
from replanning.tools import ToolExecutor
from tests.support.runs import make_engine, perform

RUN = RunId("payment")

PAY = """\
touch begun; while [ ! -e pay ]; do sleep 0.02; done
printf '%s\\n' "$REPLANNING_IDEMPOTENCY_KEY" >>ledger
touch paid; while [ ! -e answer-payment ]; do sleep 0.02; done
"""

FIND = """\
touch asked; while [ ! -e answer-question ]; do sleep 0.02; done
grep -c -x -F {idempotency_key} ledger
"""


def payment() -> Plan:
    """A payment that is looked up by its key."""
    confirm = {"tool": "find", "when": 'text matches "1*"', "output": "${text}"}
    return Plan.model_validate(
        {
            "goal": {"objective": "pay once"},
            "tools": [
                {"name": "pay", "kind": "shell", "command": PAY, "confirm": confirm},
                {
                    "name": "find",
                    "kind": "shell",
                    "command": FIND,
                    "effect": "none",
                    "accepted": [1],
                },
            ],
            "tasks": [{"id": "a", "tool": "pay"}],
        }
    )


async def main(folder: Path) -> None:
    """Run the plan, or resume it, and print how it ended."""
    plan = payment()
    with closing(SqliteStore(folder / "history")) as store:
        engine = make_engine("repair", store=store)
        executor = ToolExecutor(plan, cwd=folder)
        async with engine.run_or_resume(plan, run_id=RUN) as run:
            await perform(run, executor)
        sys.stdout.write(json.dumps([run.result.status, dict(run.result.outputs)]))


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]))
