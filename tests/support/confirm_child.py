"""Program that runs a payment, or goes on with it, to be killed: FOLDER STORE.

The payment and the look-up are commands that tell by files in the folder how far they are, and wait for others.
The look-up fails if the folder has a file "unknown".
"""

import json
import sys
from contextlib import closing
from pathlib import Path

import anyio

from replanning import Plan
from replanning.journal import open_store
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
test ! -e unknown || exit 3
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


async def main(folder: Path, place: str) -> None:
    """Run the plan, or resume it, with its history at a place, and print how it ended."""
    plan = payment()
    with closing(open_store(place)) as store:
        engine = make_engine("repair", store=store)
        executor = ToolExecutor(plan, cwd=folder)
        async with engine.run_or_resume(plan, run_id=RUN) as run:
            await perform(run, executor)
        ended = [run.result.status, dict(run.result.outputs), run.result.reason]
        sys.stdout.write(json.dumps(ended))


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), sys.argv[2])
