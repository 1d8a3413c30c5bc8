"""The situations that pages describe around programs which are parts of longer ones.

Each is a program in which `BLOCK` stands for the one on the page, under the words of its comment `<!-- given: WORDS -->`.
"""

from collections.abc import Mapping
from typing import Final

SITUATIONS: Final[Mapping[str, str]] = {
    "`llm` is a model, `work` executes a task": """
from replanning.testing import ScriptedExecutor, ScriptedLLM

llm = ScriptedLLM([])
work = ScriptedExecutor({})
BLOCK
""",
    "an open `run` of this plan": """
from replanning.changes import AddTask, RemoveTask
from replanning.errors import ChangeRejected

async with ReplanningEngine().open(PLAN) as run:
    try:
        BLOCK
    except ChangeRejected as error:
        print(f"ChangeRejected: {error}")
""",
    "a run that has stopped, and a `corrected` plan": """
from replanning.journal import SqliteStore

async with ReplanningEngine(store=".replanning/history.db").open(PLAN, run_id="report-47") as run:
    run.pause()
send = PLAN.task("send").model_copy(update={"arguments": {"to": "everybody"}})
corrected = PLAN.model_copy(update={"tasks": (*PLAN.tasks[:-1], send)})
BLOCK
""",
    "an `engine`, a `plan` and `work`": """
engine, plan = ReplanningEngine(), PLAN
BLOCK
""",
    "a model and an executor, as in the first example": """
from replanning import Plan, Settings
from replanning.journal import MemoryStore
from replanning.testing import ScriptedExecutor, ScriptedLLM

settings, model, store, executor = Settings(), ScriptedLLM([]), MemoryStore(), ScriptedExecutor({})
plan = Plan.parse("{goal: {objective: test}, tools: [{name: t}], tasks: [{id: t}]}")
request = "Make the failing test pass"
BLOCK
""",
    "an `engine` and a `plan` with servers": """
from replanning import ReplanningEngine
from replanning.tools import ToolExecutor

engine = ReplanningEngine()
BLOCK
""",
}
