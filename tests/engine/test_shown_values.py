"""Values that plugins are shown, and change: the run takes no notice."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from replanning import (
    Alternative,
    CallbackGate,
    Plan,
    PlanEvaluation,
    PlanEvaluator,
    PlanMonitor,
    PlanRun,
    ReplanningEngine,
    Task,
)
from replanning.changes import ReplaceTask
from replanning.decision import Answer
from replanning.errors import ExpressionError, NoResult
from replanning.journal import MemoryStore, RecordBody, RunStore, SqliteStore, TriggerEvent
from replanning.journal.records import BODY_TYPES
from replanning.journal.store import encode_body
from replanning.live import PlanView
from replanning.plan import Fallback
from replanning.telemetry import Exporter
from replanning.testing import VirtualClock
from tests.support.runs import environment, plan

KEY = "changed"
_NONE: Mapping[str, float] = {}


def spoil(value: Any, seen: set[int]) -> int:
    """Change every object and array that is reachable, and return how many there were."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    parts: list[Any] = []
    if isinstance(value, BaseModel):
        parts = [*value.__dict__.values(), *(value.__pydantic_extra__ or {}).values()]
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value)
    count = sum(spoil(part, seen) for part in parts)
    if isinstance(value, dict):
        value[KEY] = 1
    elif isinstance(value, list):
        value.append(KEY)
    return count + isinstance(value, dict | list)


class Spoiler(PlanEvaluator, Exporter):
    """Every plugin in one: each changes all values that it is shown, and what it has returned before."""

    name = "spoiler"
    observes: tuple[type[RecordBody], ...] = tuple(BODY_TYPES.values())

    def __init__(self) -> None:
        self.spoilt: dict[str, int] = {}
        self._returned: list[Any] = []

    def spoil(self, by: str, *shown: Any) -> None:
        """Change what was shown, and what was returned."""
        self.spoilt[by] = self.spoilt.get(by, 0) + sum(
            spoil(value, set()) for value in (*shown, *self._returned)
        )

    def look(self, by: str, view: PlanView) -> None:
        """Change what a view shows."""
        self.spoil(
            by,
            view.context,
            view.tools,
            view.tool("t"),
            list(view.tasks()),
            list(view.task_states()),
        )
        for task in view.tasks():
            with suppress(ExpressionError, NoResult):  # there may be none yet
                self.spoil(by, view.lineage(task.id), view.arguments(task.id))
                self.spoil(by, view.result(task.id))

    def detect(self, observation: Any, view: PlanView) -> list[TriggerEvent]:
        self.spoil("detector", observation)
        self.look("detector", view)
        own = (
            [TriggerEvent(kind="own", tasks=("b",), data={"x": [1]})]  # type: ignore[call-arg]
            if observation.kind == "attempt-failed"
            else []
        )
        self._returned += own
        return own

    async def propose(self, request: Any) -> list[Alternative]:
        self.spoil("provider", request.triggers, request.history)
        if not any(trigger.kind == "task-failed" for trigger in request.triggers):
            return []
        new = Task(
            id="b~2",
            tool="t",
            depends_on=("a",),
            arguments={"from": "${a.output}", "x": [{}]},
            metadata={"m": []},
        )
        proposed = Alternative(
            changes=(ReplaceTask(task_id="b", tasks=(new,)),), reason="again", confidence=0.9
        )
        self.look("provider", request.view)
        self._returned.append(proposed)
        return [proposed]

    def evaluate(self, view: PlanView, past: Mapping[str, float] = _NONE) -> PlanEvaluation:
        self.look("evaluator", view)
        return super().evaluate(view, past)

    async def export(self, run: str, record: Any) -> None:
        self.spoil("exporter", record)

    def ask(self, question: Any) -> Answer:
        self.spoil("gate", question)
        return Answer("approve")


PLAN = plan(
    Task(
        id="a",
        tool="t",
        arguments={"list": [1], "none": {}},
        metadata={"m": {}},
        resources={"gpu": 1},
    ),
    Task(
        id="b",
        tool="t",
        depends_on=("a",),
        arguments={"from": "${a.output}", "env": "${context.env}"},
        metadata={"m": [1]},
    ),
    Task(
        id="c",
        depends_on=("b",),
        arguments={"from": "${b.output}"},
        fallbacks=(Fallback(arguments={"f": []}),),
    ),
    tools=[{"name": "t", "env": {"A": "b"}, "body": {"x": []}}],
    resources={"gpu": 2},
    context={"env": {"deep": [{}]}, "list": []},
)


async def observed(store: RunStore, spoiler: Any) -> tuple[Plan, Any, list[str]]:
    """Execute the plan with a plugin of each kind; return the plan, the outputs and the journal at the end, as text."""
    monitor = PlanMonitor(["task-failed", spoiler])
    for kind in (*BODY_TYPES.values(), TriggerEvent, PlanEvaluation):
        monitor.on(kind, lambda event: spoiler.spoil("handler", event))
    engine = ReplanningEngine(
        [spoiler], store=store, monitor=monitor, evaluator=spoiler, exporters=[spoiler], environment=environment(VirtualClock()),
        gate=CallbackGate(spoiler.ask), settings={"alternatives": {"require_approval": True}},
    )  # fmt: skip

    async def work(run: PlanRun) -> None:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                values = {
                    "id": task.id,
                    "arguments": dict(task.arguments),
                    "context": dict(attempt.context.context),
                }
                attempt.output = {"seen": [str(values)]}
                spoiler.spoil(
                    "work", task, dict(attempt.context.context), dict(attempt.context.results)
                )
                if task.id == "a":
                    run.change_context({"list": [{"new": []}]})
                if task.id == "b":
                    raise ValueError("no")

    async with engine.open(PLAN, run_id="run") as run:
        await work(run)
        spoiler.spoil("run", run.plan, run.result, list(run.records()))
        return run.plan, run.result.outputs, [encode_body(record) for record in store.read(run.id)]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_spoilt_values(kind: str, tmp_path: Path) -> None:
    """Plugins and work that change every value that they see, or returned, change neither results, nor plan, nor journal."""

    class Blind(Spoiler):
        def spoil(self, by: str, *shown: Any) -> None:
            """Change nothing."""

    def store(name: str) -> RunStore:
        return MemoryStore() if kind == "memory" else SqliteStore(tmp_path / f"{name}.db")

    spoiler, spoilt = Spoiler(), store("spoilt")
    document, outputs, journal = await observed(spoilt, spoiler)
    assert (document, outputs, journal) == await observed(store("expected"), Blind())
    assert set(spoiler.spoilt) == {
        "detector",
        "provider",
        "evaluator",
        "exporter",
        "gate",
        "handler",
        "work",
        "run",
    }
    assert all(spoiler.spoilt.values())
    assert KEY not in document.model_dump_json() + str(journal)
    async with ReplanningEngine([], store=spoilt).resume("run") as resumed:
        assert (resumed.result.outputs, resumed.plan) == (outputs, document)
