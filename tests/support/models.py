"""Support for tests of models that replan: a plan that breaks, replies, and results of runs."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from replanning import Plan, ReplanningEngine, RunResult, Settings
from replanning.decision import HumanGate
from replanning.journal import Record, RecordBody
from replanning.plan import JsonObject
from replanning.providers.llm import LLMAlternatives
from replanning.testing import (
    ExecutorCall,
    ScriptedExecutor,
    ScriptedLLM,
    ScriptStep,
    VirtualClock,
    raises,
    returns,
    virtual_environment,
)

PLAN = """
goal: {objective: Ship the release}
tools:
  - {name: get, kind: shell, command: get}
  - {name: make, kind: shell, command: "make {out}", parameters: {out: string}}
  - {name: cmake, kind: shell, command: "cmake {out}", parameters: {out: string}, timeout: 60}
  - {name: wipe, kind: shell, command: "wipe {out}", parameters: {out: string}, dangerous: true}
tasks:
  - {id: fetch, tool: get}
  - {id: build, tool: make, arguments: {out: dist}, depends_on: [fetch]}
  - {id: ship, tool: get, depends_on: [build]}
  - {id: tidy, tool: get, depends_on: [ship], optional: true}
"""
"""A plan in which `build` breaks; `cmake` could do it, `wipe` is dangerous."""


Kind = TypeVar("Kind", bound=RecordBody)
BROKEN = raises(RuntimeError("it is broken"))


class Played(NamedTuple):
    """Result of a run with a model."""

    result: RunResult
    records: list[Record]
    prompts: list[str]
    executed: list[str]
    used: list[tuple[str | None, JsonObject]]
    clock: VirtualClock
    began: float

    def bodies(self, kind: type[Kind]) -> list[Kind]:
        """The bodies of its records, of one kind."""
        return [record.body for record in self.records if isinstance(record.body, kind)]


def change(kind: str, **fields: object) -> JsonObject:
    """A change as a model writes it."""
    return {"kind": kind, **fields}


def replaced(task_id: str, tool: str | None, **fields: object) -> JsonObject:
    """The change that puts one task of another tool in the place of a task."""
    new = {"id": "new", "tool": tool, "arguments": {"out": "new"}, **fields}
    return change("replace", task_id=task_id, tasks=[new])


def candidate(
    *changes: JsonObject, reason: str = "scripted", confidence: float = 0.9
) -> JsonObject:
    """A candidate as a model writes it."""
    return {"reason": reason, "changes": list(changes), "confidence": confidence}


def reply(*candidates: JsonObject) -> JsonObject:
    """A reply as a model writes it."""
    return {"candidates": list(candidates)}


Script = Sequence[object] | Callable[[str], object]


async def played(
    script: Script,
    plan: str | Plan = PLAN,
    *,
    broken: Mapping[str, int] | None = None,
    outputs: Mapping[str, object] | None = None,
    gate: HumanGate | None = None,
    behind: Sequence[str] = (),
    size: int = 24_000,
    **settings: object,
) -> Played:
    """Run a plan with a model, and providers `behind` it; `broken` counts failures before `outputs`."""
    failures = {"build": 1_000} if broken is None else broken

    def step(call: ExecutorCall) -> ScriptStep:
        ended = (outputs or {}).get(call.task.id)
        done = ended if isinstance(ended, ScriptStep) else returns(ended)
        return BROKEN if call.number <= failures.get(call.task.id, 0) else done

    async with VirtualClock() as clock:
        environment = virtual_environment(clock=clock)
        began = clock.now()
        model = ScriptedLLM(script, environment=environment)  # type: ignore[arg-type]  # it says so if it cannot
        work = ScriptedExecutor(step, clock=clock)
        engine = ReplanningEngine(
            [LLMAlternatives(model, size=size), *behind],
            gate=gate,
            settings=Settings.model_validate({"triggers": ["task-failed"], **settings}),
            environment=environment,
        )
        result = await engine.execute(Plan.parse(plan) if isinstance(plan, str) else plan, work)
    records = list(engine.store.read(result.run))
    used = [(call.task.tool, call.task.arguments) for call in work.calls]
    return Played(
        result, records, model.prompts, [call.task.id for call in work.calls], used, clock, began
    )
