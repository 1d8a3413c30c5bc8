"""Converts the published sources to the form of the benchmarks: the content that they use, unchanged."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from pydantic import BaseModel

from replanning.plan import JsonObject, JsonValue

Files = Sequence[tuple[str, bytes]]
"""Published files: the path in their repository, and what they hold."""

_FACTS: Final = (
    (re.compile(r"the (\w+) block is clear"), "clear {0}"),
    (re.compile(r"the hand is empty"), "he"),
    (re.compile(r"the (\w+) block is on top of the (\w+) block"), "on {0} {1}"),
    (re.compile(r"the (\w+) block is on the table"), "table {0}"),
    (re.compile(r"the hand is currently holding (\w+) block"), "hold {0}"),
)
_ACTIONS: Final = (
    (re.compile(r"unstack the (\w+) block from on top of the (\w+) block"), "unstack {0} {1}"),
    (re.compile(r"put down the (\w+) block"), "put {0}"),
    (re.compile(r"pick up the (\w+) block"), "pick {0}"),
    (re.compile(r"stack the (\w+) block on top of the (\w+) block"), "stack {0} {1}"),
)
_QUESTION: Final = re.compile(
    r"As initial conditions I have that, (?P<init>.+?)\.\s*"
    r"My goal is to have that (?P<goal>.+?)\.\s*"
    r"My plan is as follows:\s*\[PLAN\]\s*(?P<plan>.*?)\s*\[PLAN END\].*?"
    r'After executing the action ".+?" at step (?P<step>\d+) in the plan, '
    r"the following facts unexpectedly became true: (?P<true>.*?)\n"
    r"The following facts became unexpectedly false: (?P<false>.*?)\n",
    re.DOTALL,
)


class _Answered(BaseModel):
    instance_id: int
    query: str
    ground_truth_plan: str
    llm_raw_response: str
    llm_correct: bool


class _Answers(BaseModel):
    instances: tuple[_Answered, ...]


class _Task(BaseModel):
    id: str
    name: str
    parents: tuple[str, ...]


class _Specified(BaseModel):
    tasks: tuple[_Task, ...]


class _Ran(BaseModel):
    id: str
    runtimeInSeconds: float  # noqa: N815 - as it is published


class _Executed(BaseModel):
    tasks: tuple[_Ran, ...]


class _Work(BaseModel):
    specification: _Specified
    execution: _Executed


class _Workflow(BaseModel):
    name: str
    workflow: _Work


def planbench(files: Files) -> bytes:
    """The instances of a file of PlanBench's task 6 with a model's answers, one JSON object a line.

    Raises:
        ValueError: an instance does not say what such an instance says.
    """
    lines: list[str] = []
    for _, text in files:
        for answered in _Answers.model_validate_json(text).instances:
            lines.append(f"{json.dumps(_instance(answered))}\n")
    return "".join(lines).encode()


def _instance(answered: _Answered) -> JsonObject:
    statement = answered.query.rpartition("[STATEMENT]")[2]
    said = _QUESTION.search(statement)
    if said is None:
        raise ValueError(
            f"instance {answered.instance_id} does not state facts, goal, plan and event as the others do"
        )
    plan: list[JsonValue] = []
    for line in said["plan"].splitlines():
        plan.append(_read(line, _ACTIONS))
    return {
        "id": answered.instance_id,
        "init": _facts(said["init"]),
        "goal": _facts(said["goal"]),
        "plan": plan,
        "event_after_step": int(said["step"]),
        "became_true": _facts(said["true"]),
        "became_false": _facts(said["false"]),
        "goal_already_met": not answered.ground_truth_plan.strip(),
        "reference_repair": [*answered.ground_truth_plan.split("\n")[:-1]],
        "gpt4_raw": answered.llm_raw_response,
        "gpt4_correct": answered.llm_correct,
        "prompt_chars": len(answered.query),
    }


def _facts(sentence: str) -> JsonValue:
    """The facts of a sentence, sorted."""
    facts: list[str] = []
    for part in re.split(r", | and ", sentence.strip()):
        if part:
            facts.append(_read(part, _FACTS))
    facts.sort()
    return [*facts]


def _read(sentence: str, forms: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for pattern, form in forms:
        match = pattern.fullmatch(sentence.strip())
        if match is not None:
            return form.format(*match.groups())
    raise ValueError(f"{sentence!r} is not said in the words of the blocks world")


def workflows(files: Files) -> bytes:
    """Workflow executions in WfFormat as gzipped JSON, their runtimes in milliseconds' precision.

    Raises:
        ValueError: a file is no workflow, or a task of it has no runtime or an unknown parent.
    """
    found = [_execution(path, _Workflow.model_validate_json(text)) for path, text in files]
    return gzip.compress(json.dumps(found, separators=(",", ":")).encode(), mtime=0)


def _execution(path: str, published: _Workflow) -> JsonObject:
    tasks = published.workflow.specification.tasks
    runs = published.workflow.execution.tasks
    numbers: dict[str, int] = {}
    for task in tasks:
        numbers[task.id] = len(numbers)
    seconds = {ran.id: round(ran.runtimeInSeconds, 3) for ran in runs}
    rows: list[JsonValue] = []
    for task in tasks:
        try:
            parents: list[JsonValue] = [numbers[parent] for parent in task.parents]
            rows.append([task.name, seconds[task.id], parents])
        except KeyError as error:
            raise ValueError(f"{path}: nothing is said of task {error}") from error
    return {"name": published.name, "file": path, "tasks": rows}


CONVERTERS: Final[Mapping[str, Callable[[Files], bytes]]] = {
    "planbench": planbench,
    "workflows": workflows,
}
