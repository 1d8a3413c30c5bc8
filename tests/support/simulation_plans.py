"""Random plans for the simulation: every shape and field that a plan file can have, and shapes of real workflows."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from random import Random

from replanning import Plan

REAL_SHAPES = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "wfinstances_open.json.gz"
CONDITIONS = ("context.flag", "not context.flag", "context.level > 2", "context.level > 2 or context.flag")
FACT = "made(it)"

Edges = list[list[int]]
"""For each task, the earlier tasks that it depends on."""


def random_plan(rng: Random, *, real: bool = False) -> Plan:
    """A plan, small as a rule."""
    edges = real_edges(rng) if real else random_edges(rng)
    resources: dict[str, float] = {"cpu": rng.choice([1, 2, 4]), "disk": 10} if rng.random() < 0.4 else {}
    tools = _tools(rng, resources) if rng.random() < 0.7 else []
    tasks = [_task(rng, number, needed, tools, resources) for number, needed in enumerate(edges)]
    document: dict[str, object] = {
        "goal": {"objective": "simulate"},
        "context": {"flag": rng.random() < 0.7, "level": rng.randrange(6)},
        "resources": resources,
        "tools": tools,
        "tasks": tasks,
    }
    if tools and rng.random() < 0.1:
        document["facts"] = []
        document["goal"] = {"objective": "simulate", "facts": [FACT], "stop_when_reached": rng.random() < 0.5}
    if rng.random() < 0.15:
        document["budget"] = rng.choice([{"calls": 3}, {"tokens": 250}, {"wall_clock": 60.0}, {"money": 1.0}])
    if rng.random() < 0.1 and not any(task["depends_on"] for task in tasks):
        document["sequential"] = True
    return Plan.model_validate(document)


def random_edges(rng: Random) -> Edges:
    """A chain, a fan, a diamond, layers, loose tasks, or anything without a cycle."""
    size = (
        rng.choice([1, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8, 10, 12, 12, 20]) if rng.random() < 0.97 else rng.randint(30, 120)
    )
    shape = rng.choice(["chain", "fan", "diamond", "layers", "loose", "any", "any"])
    if shape == "chain":
        return [[i - 1] if i else [] for i in range(size)]
    if shape == "fan":
        return [[], *([[0]] * (size - 1))]
    if shape == "diamond":
        return [[], *([[0]] * size), list(range(1, size + 1))]
    if shape == "layers":
        width = rng.randint(2, 4)
        return [list(range((i // width - 1) * width, i // width * width)) if i >= width else [] for i in range(size)]
    if shape == "loose":
        return [[] for _ in range(size)]
    return [sorted(rng.sample(range(i), min(i, rng.choice([0, 1, 1, 2, 3])))) for i in range(size)]


@cache
def _real() -> list[Edges]:
    with gzip.open(REAL_SHAPES, "rt") as file:
        return [_ordered([parents for _, _, parents in workflow["tasks"]]) for workflow in json.load(file)]


def _ordered(edges: Edges) -> Edges:
    """The same tasks, each after those that it depends on."""
    place: dict[int, int] = {}
    while len(place) < len(edges):
        free = [i for i, needed in enumerate(edges) if i not in place and all(dep in place for dep in needed)]
        place |= {task: len(place) + i for i, task in enumerate(free)}
    return [sorted(place[dep] for dep in edges[task]) for task in place]


def real_edges(rng: Random) -> Edges:
    """The shape of a real workflow: some whole, of most the first tasks."""
    edges = rng.choice(_real())
    return edges if rng.random() < 0.05 else edges[: rng.choice([8, 15, 30, 60])]


def _tools(rng: Random, resources: dict[str, float]) -> list[dict[str, object]]:
    """Some tools, in pairs of equal capability."""
    tools: list[dict[str, object]] = []
    for number in range(rng.choice([2, 4, 6])):
        tool: dict[str, object] = {"name": f"tool-{number}", "capability": f"skill-{number // 2}", "cost": 1.0 + number}
        if resources and rng.random() < 0.3:
            tool["resources"] = {"disk": 3}
        if rng.random() < 0.05:
            tool["dangerous"] = True
        if rng.random() < 0.05:
            tool["available"] = False
        if rng.random() < 0.2:
            tool["timeout"] = 25.0
        if rng.random() < 0.5:
            tool["adds"] = [FACT]
        elif rng.random() < 0.1:
            tool["removes"] = [FACT]
        tools.append(tool)
    return tools


def _task(
    rng: Random, number: int, needed: list[int], tools: list[dict[str, object]], resources: dict[str, float]
) -> dict[str, object]:
    task = random_body(rng, [f"t{i}" for i in needed], tools, resources)
    task |= {"id": f"t{number}", "depends_on": [f"t{i}" for i in needed]}
    if rng.random() < 0.2:
        task["fallbacks"] = [random_body(rng, [], tools, resources) for _ in range(rng.choice([1, 2]))]
    return task


def random_body(
    rng: Random, needed: list[str], tools: list[dict[str, object]], resources: dict[str, float]
) -> dict[str, object]:
    """Everything about a task but its id and what it depends on."""
    body: dict[str, object] = {}
    if tools:
        body["tool"] = rng.choice(tools)["name"]
    if resources and rng.random() < 0.5:
        body["resources"] = {"cpu": rng.choice([0.5, 1, 1, resources["cpu"]])}
    arguments = {f"from-{dep}": "${" + dep + ".output.mark}" for dep in needed if rng.random() < 0.4}
    if rng.random() < 0.15:
        arguments["level"] = "level ${context.level}"
    choices = {
        "arguments": (bool(arguments), arguments),
        "priority": (rng.random() < 0.3, rng.randint(-2, 3)),
        "timeout": (rng.random() < 0.3, rng.choice([3.0, 8.0, 20.0])),
        "retry": (rng.random() < 0.3, _retry(rng)),
        "optional": (rng.random() < 0.15, True),
        "idempotent": (rng.random() < 0.3, True),
        "when": (rng.random() < 0.15, _condition(rng, needed)),
    }
    return body | {name: value for name, (wanted, value) in choices.items() if wanted}


def _retry(rng: Random) -> dict[str, object]:
    return {
        "max_attempts": rng.randint(1, 4),
        "delay": rng.choice([0.0, 0.5, 5.0]),
        "exponential": rng.random() < 0.5,
        "jitter": rng.random() < 0.5,
    }


def _condition(rng: Random, needed: list[str]) -> str:
    if needed and rng.random() < 0.4:
        return f"results.{rng.choice(needed)}.number > {rng.randrange(10)}"
    return "context.missing" if rng.random() < 0.05 else rng.choice(CONDITIONS)
