"""A coding task in a git repository: its tools, and a model whose replies follow from the prompt alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Final

from replanning import TaskContext, ToolSpec
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from tests.support.llm_server import LLMRequest, LLMServerReply
from tests.support.planning import actions, go_on, kind_of, planned, replan, revision, summary

OBJECTIVE: Final = "Write sums.add, test first"
TEST: Final = """
import unittest, sums
class T(unittest.TestCase):
    def test(self):
        self.assertEqual(sums.add(2, 3), 5)
"""
WRONG: Final = "def add(a, b):\n    return a - b\n"
RIGHT: Final = "def add(a, b):\n    return a + b\n"
QUESTION: Final = "Integers only?"
COARSE: Final = "the work is one lump"
LOCKED: Final = "the index is locked"
_USUAL: Final[JsonObject] = {
    "completion": summary(),
    "reflection": {"reflection": {"action_id": "x", "status": "success"}},
}


def write(context: TaskContext, folder: str, name: str, content: str) -> str:
    """Write a file, and note which attempt did."""
    note(folder, context.attempt_id)
    (Path(folder) / name).write_text(content, encoding="utf-8")
    return f"{name} was written"


def note(folder: str, attempt: str) -> None:
    """Append a line to the account of effects, whole or not at all."""
    file = os.open(Path(folder) / ".effects", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{attempt}\n".encode())
    finally:
        os.close(file)


def repository(folder: Path) -> Path:
    """Return an empty git repository."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    (folder / ".git/info/exclude").write_text(".effects\n.tried\n__pycache__\n")
    return folder


def commits(folder: Path) -> list[str]:
    """Return the subjects of the commits."""
    log = subprocess.run(["git", "log", "--format=%s"], cwd=folder, capture_output=True, text=True, check=True)
    return log.stdout.splitlines()


def tools(folder: Path) -> tuple[ToolSpec, ...]:
    """Return a function that writes files, and commands: tests that must fail or pass, and a commit that fails once."""
    shell: JsonObject = {"kind": "shell", "cwd": str(folder)}
    noted = "echo $REPLANNING_IDEMPOTENCY_KEY >>.effects"
    check = f"{sys.executable} -B -m unittest -q test_sums"
    locked = f"[ -e .tried ] || {{ touch .tried; echo '{LOCKED}' >&2; exit 3; }}"
    author = "-c user.name=a -c user.email=a@b"
    add = "rm -f .git/index.lock; git add test_sums.py sums.py"  # one that was killed may have left its lock
    made: list[JsonObject] = [
        {
            "name": "write-file",
            "kind": "python",
            "callable": "tests.support.coding:write",
            "parameters": {"folder": "string", "name": "string", "content": "string"},
        },
        {**shell, "name": "run-tests", "command": check},
        {**shell, "name": "see-it-fail", "command": f"! {check}"},
        {
            **shell,
            "name": "commit",
            "dangerous": False,  # it removes its own lock alone
            "parameters": {"message": "string"},
            "command": f"{locked}; {noted}; {add} && (git diff --cached --quiet || git {author} commit -q -m {{message}})",
        },
    ]
    return tuple(ToolSpec.model_validate(tool) for tool in made)


def section(prompt: str, name: str) -> str:
    """Return a section of a prompt."""
    return prompt.partition(f"<{name}>")[2].partition(f"</{name}>")[0]


def use(name: str, tool: str, /, **arguments: JsonValue) -> JsonObject:
    """Return an action."""
    return {"task_id": name, "tool": tool, "arguments": dict(arguments)}


class Coder:
    """Model that does the task: asks first, decomposes too coarsely, and writes a wrong program."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self.asked: list[str] = []

    def __call__(self, request: LLMRequest) -> LLMServerReply:
        """Return the reply to a request, as text."""
        self.asked.append(kind_of(request.prompt))
        return json.dumps(self.reply(request.prompt))

    def reply(self, prompt: str) -> JsonValue:
        """Return the reply to a prompt."""
        match kind_of(prompt):
            case "goal_understanding":
                return {"main_objective": "sums.add adds", "success_criteria": ["the test passes"]}
            case "decision:goal_understanding":
                asks = {"clarification_needed": True, "clarification_questions": [QUESTION]}
                answered = QUESTION in section(prompt, "answers")
                return go_on() if answered else go_on(**asks, assumptions_to_make=["any numbers"])
            case "task_decomposition":
                finer = COARSE in section(prompt, "why")
                names = ["test", "red", "code", "green", "commit"] if finer else ["everything"]
                needs = {name: [before] for before, name in pairwise(names)}
                return planned(*({"task_id": name} for name in names), **needs)["task_decomposition"]
            case "decision:task_decomposition":
                coarse = "everything" in section(prompt, "task_decomposition")
                return replan("task_redecomposition", issues_found=[COARSE]) if coarse else go_on()
            case "decision:execution":
                error = section(prompt, "errors")
                if "AssertionError" in error:
                    return replan("partial_replan", issues_found=["the program is wrong"])
                return replan("retry") if error else go_on()
            case "action_sequence":
                unfinished = self._file("sums.py", "")
                del unfinished["content"]  # is asked for when it is to be written
                return actions(
                    use("test", "write-file", **self._file("test_sums.py", TEST)),
                    use("red", "see-it-fail"),
                    use("code", "write-file", **unfinished),
                    use("green", "run-tests"),
                    use("commit", "commit", message="Add sums"),
                )
            case "execution":
                call: JsonObject = {"name": "write-file", "arguments": self._file("sums.py", WRONG)}
                return {"current_task": "code", "function_call": call}
            case "revision":
                repair = use("repair", "write-file", **self._file("sums.py", RIGHT))
                return revision(repair, use("green", "run-tests"), use("commit", "commit", message="Add sums"))
            case kind:
                return _USUAL.get(kind, go_on())

    def _file(self, name: str, content: str) -> JsonObject:
        return {"folder": self._folder, "name": name, "content": content}
