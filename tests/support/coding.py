"""Coding tasks in a git repository: their tools, and models whose replies follow from the prompt alone."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

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
    log = subprocess.run(
        ["git", "log", "--format=%s"], cwd=folder, capture_output=True, text=True, check=True
    )
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
                return planned(*({"task_id": name} for name in names), **needs)[
                    "task_decomposition"
                ]
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
                return revision(
                    repair, use("green", "run-tests"), use("commit", "commit", message="Add sums")
                )
            case kind:
                return _USUAL.get(kind, go_on())

    def _file(self, name: str, content: str) -> JsonObject:
        return {"folder": self._folder, "name": name, "content": content}


# A test that fails for bugs that nobody knows beforehand

_NAMES: Final = re.findall(
    r"\w+", "bonus fees grades level orders points rank rates score share stock total"
)
_BUGS: Final = (
    ("a * b {} c", ("+", "-")),
    ("a {} b - c", ("*", "+")),
    ("{}(a, b) * c", ("max", "min")),
    ("a if b {} c else c", ("<", ">=")),
    ("sum(range(a + b + {})) - c", ("1", "0")),
)
_EXCHANGES: Final = (("+", "-", "*"), ("max", "min"), ("<", "<=", ">", ">="), tuple("0123456789"))
_FAILURE: Final = re.compile(
    r"assert (?P<actual>-?\d+) == (?P<expected>-?\d+)\n.*? where (?P=actual) = <function .*?>(?P<arguments>\(.*?\))\n"
    r".*? where <function .*?> = (?P<module>\w+)\.(?P<function>\w+)\n\s*(?P<place>\w+\.py:\d+): AssertionError",
    re.DOTALL,
)


class Failure(NamedTuple):
    """Failed assertion, as the output of pytest tells it."""

    actual: str
    expected: str
    arguments: str
    module: str
    function: str
    place: str

    def __str__(self) -> str:
        call = f"{self.module}.{self.function}{self.arguments}"
        return f"{self.place} expects {self.expected} from {call}, which returns {self.actual}"


def draw_failing_test(folder: Path, seed: int, bugs: int, more: str = "") -> list[Failure]:
    """Write a test, and for each assertion a module with a bug between more text; return how they will fail."""
    random = Random(seed)
    drawn = random.sample(_NAMES, 2 * bugs + 1)
    title, modules, functions = drawn[0], drawn[1 : bugs + 1], drawn[bugs + 1 :]
    failures, asserts = list[Failure](), ""
    for module, function, (body, fillings) in zip(
        modules, functions, random.sample(_BUGS, bugs), strict=True
    ):
        right, wrong = (body.format(filling) for filling in random.sample(fillings, 2))
        while True:
            values = [random.randint(2, 9) for _ in "abc"]
            expected, actual = (
                eval(text, dict(zip("abc", values, strict=True))) for text in (right, wrong)
            )
            if expected != actual:
                break
        (folder / f"{module}.py").write_text(
            f"{more}def {function}(a, b, c):\n    return {wrong}\n{more}"
        )
        asserts += f"    assert {module}.{function}{tuple(values)} == {expected}\n"
        place = f"test_{title}.py:{len(failures) + 5}"
        failures.append(
            Failure(str(actual), str(expected), str(tuple(values)), module, function, place)
        )
    (folder / f"test_{title}.py").write_text(
        f"import {', '.join(modules)}\n\n\ndef test_{title}():\n{asserts}"
    )
    return failures


def mended(source: str, failure: Failure) -> str:
    """Return a program with one word or operator exchanged, so that the function returns what the test expects."""
    for found in re.finditer(r"\w+|[<>]=?|[-+*]", source):
        for other in next((group for group in _EXCHANGES if found[0] in group), ()):
            text, names = (
                f"{source[: found.start()]}{other}{source[found.end() :]}",
                dict[str, Any](),
            )
            exec(text, names)
            if (
                str(names[failure.function](*ast.literal_eval(failure.arguments)))
                == failure.expected
            ):
                return text
    raise LookupError(f"no exchange of one word makes it right: {source}")


_REASONS: Final = {
    "decision:goal_understanding": "the tests say whether it is reached",
    "decision:task_decomposition": "each part is one use of one tool",
    "decision:action_sequence": "what to change is known once the tests and the file are read",
    "decision:reflection": "the last run of the tests passed",
}


def mender(prompt: str) -> JsonValue:
    """Reply as a model that knows of a repository only what tools print: the failing assertion, and the text of the file."""
    match kind := kind_of(prompt):
        case "goal_understanding":
            return {
                "main_objective": "Every test passes",
                "success_criteria": ["run-tests succeeds"],
            }
        case "task_decomposition":
            names = ["see", "find", "look", "mend", "check"]
            needs = {name: [before] for before, name in pairwise(names)}
            return planned(*({"task_id": name} for name in names), **needs)["task_decomposition"]
        case "action_sequence":
            seen = {
                **use("see", "run-tests"),
                "expected_outcome": "a test fails, and names the function",
            }
            return actions({**seen, "may_fail": True}, *_steps("find", "look", "mend", "check"))
        case "execution":
            failure, action = next(failures(prompt)), json.loads(section(prompt, "action"))
            arguments: JsonObject = {"path": f"{failure.module}.py"}
            comment, printed = str(failure), next(filter(None, outputs(prompt)))
            match action["tool"]:
                case "find-text":
                    arguments = {"text": f"def {failure.function}("}
                case "read-lines":
                    line = int(ast.literal_eval(printed)["stdout"].split(":")[1])
                    arguments |= {"first": line, "last": line + 1}
                case _:
                    text = ast.literal_eval(printed)["stdout"]
                    arguments |= {"old": text, "new": mended(text, failure)}
                    comment = f"{failure.function}{failure.arguments} returns {failure.expected} with this text"
            call: JsonObject = {"name": action["tool"], "arguments": arguments}
            return {"comment": comment, "current_task": action["id"], "function_call": call}
        case "decision:execution":
            return go_on(
                replan_needed=True,
                replan_type="partial_replan",
                reasoning=str(next(failures(prompt))),
            )
        case "revision":
            failure = next(failures(prompt))
            steps = _steps("find-2", "look-2", "mend-2", "check-2", path=f"{failure.module}.py")
            return revision(
                {**steps[0], "arguments": {"text": f"def {failure.function}("}}, *steps[1:]
            )
        case "completion":
            passed = re.search(r"\d+ passed", next(outputs(prompt)))
            return {
                **summary(achieved=bool(passed)),
                "comment": f"the tests say: {passed and passed[0]}",
            }
        case _:
            return _USUAL.get(kind) or go_on(reasoning=_REASONS[kind])


def _steps(find: str, look: str, mend: str, check: str, **path: str) -> list[JsonObject]:
    return [
        {**use(find, "find-text"), "expected_outcome": "the line where the function begins"},
        {**use(look, "read-lines", **path), "expected_outcome": "the text of the function"},
        {
            **use(mend, "replace-text", **path),
            "expected_outcome": "the function returns what the test expects",
        },
        {**use(check, "run-tests"), "expected_outcome": "every test passes"},
    ]


def outputs(prompt: str) -> Iterator[str]:
    """Yield the outputs and errors of tools in a prompt, the latest first."""
    for line in section(prompt, "executed").strip().splitlines():
        yield json.loads(line).get("error") or json.loads(line).get("output", "")


def failures(prompt: str) -> Iterator[Failure]:
    """Yield the failed assertions of the outputs in a prompt, the latest first."""
    found = (_FAILURE.search(text.replace("\\n", "\n")) for text in outputs(prompt))
    yield from (Failure(**one.groupdict()) for one in found if one is not None)
