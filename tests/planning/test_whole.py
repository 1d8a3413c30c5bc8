"""Whole runs of planning mode with real parts: a model over HTTP, tools that are programs, a git repository."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from replanning import Answer, Plan, Settings, ToolSpec
from replanning.exporters.notices import FileNotifier
from replanning.plan import JsonObject
from replanning.planning import PlanningCoordinator, PlanningHistoryExporter, PlanningHistoryStore
from replanning.providers.openai import OpenAIProvider
from replanning.telemetry import Exporter
from replanning.testing import ScriptedGate
from replanning.tools import ToolExecutor
from tests.support.coding import (
    COARSE,
    LOCKED,
    OBJECTIVE,
    QUESTION,
    RIGHT,
    Coder,
    commits,
    repository,
    tools,
)
from tests.support.invariants import invariant_violations
from tests.support.llm_server import LLMRequest, LLMServerReply, ScriptedLLMServer

CHECKED = re.compile(r"^- \[(.)\] \*\*(\w+)\*\*", re.MULTILINE)


@asynccontextmanager
async def over_http(
    script: Callable[[LLMRequest], LLMServerReply],
    specs: Sequence[ToolSpec],
    objective: str,
    gate: ScriptedGate | None = None,
    exporters: Sequence[Exporter] = (),
) -> AsyncIterator[PlanningCoordinator]:
    """Return planning mode with a model over HTTP and real tools."""
    plan = Plan.model_validate({"goal": {"objective": objective}, "tools": specs})
    with ScriptedLLMServer(script) as server:
        model = OpenAIProvider(base_url=f"{server.url}/v1", api_key="any")
        async with model, ToolExecutor(plan) as work:
            planning = PlanningCoordinator(
                Settings(), model, specs, objective, work=work, gate=gate, exporters=exporters
            )
            yield planning
            await planning.engine.aclose()


async def test_a_coding_task(tmp_path):
    """A test is written, fails, passes and is committed, past a question, a bad decomposition, a locked index and a bug."""
    folder = repository(tmp_path / "work")
    coder, gate = Coder(folder), ScriptedGate([Answer("approve", by="eve", comment="any numbers")])
    history = PlanningHistoryExporter(PlanningHistoryStore(directory=tmp_path / "history"))
    exporters = [FileNotifier(tmp_path / "notices.md"), history]
    async with over_http(coder, tools(folder), OBJECTIVE, gate, exporters) as planning:
        assert await planning.execute_with_planning("r")

    result, state = planning.result, planning.state
    assert result.status == "succeeded"
    assert (folder / "sums.py").read_text() == RIGHT
    assert commits(folder) == ["Add sums"]
    assert [question.text.count(QUESTION) > 0 for question in gate.questions] == [True]
    assert [one.answer for one in state.clarified] == ["any numbers"]
    done = [(str(record.replan_type), record.result) for record in state.records if record.executed]
    assert done == [
        ("task_redecomposition", "success"),
        ("partial_replan", "success"),
        ("retry", "success"),
    ]
    assert [(plan.number, plan.kept) for plan in state.plans] == [
        (1, ()),
        (2, ("test", "red", "code")),
    ]
    errors = [
        record.cause.error for record in state.records if record.executed and record.cause.error
    ]
    assert [LOCKED in error for error in errors] == [False, True]
    assert (state.counts.total, state.counts.clarifications) == (3, 1)
    assert result.spent.calls == len(coder.asked)
    assert invariant_violations(list(planning.engine.store.read(result.run))) == []
    right_notices((tmp_path / "notices.md").read_text(encoding="utf-8"))
    right_history(history.history.entries("r"))


def right_notices(told: str) -> None:
    """Check that each notice was posted once, and the checklist once in its final form."""
    counts = {
        title: told.count(f"## {title}")
        for title in ("❓ Clarification Needed", "🔄 Plan Revision Decided", "📋")
    }
    assert counts == {"❓ Clarification Needed": 1, "🔄 Plan Revision Decided": 3, "📋": 1}
    assert QUESTION in told
    assert COARSE in told
    now, _, before = told[told.index("## 📋") :].partition(
        "<summary>📜 Previous Plan History</summary>"
    )
    ticked = ["test", "red", "code", "repair", "green", "commit"]
    assert CHECKED.findall(now) == [("x", name) for name in ticked]
    assert CHECKED.findall(before) == [
        ("x", "test"),
        ("x", "red"),
        ("x", "code"),
        (" ", "green"),
        (" ", "commit"),
    ]
    assert "*Progress: 6/6 (100%) complete | Revision: #1" in now
    assert "the program is wrong" in now


def right_history(lines: Sequence[JsonObject]) -> None:
    """Check the history of the run: plan, revision, actions, decisions and completion."""
    assert all({"type", "timestamp", "task_uuid", "issue_id", "seq"} <= set(line) for line in lines)
    kinds = [str(line["type"]) for line in lines]
    assert (kinds.count("plan"), kinds.count("revision"), kinds.count("completion")) == (1, 1, 1)
    attempts = [(line["event"], line["attempt"]) for line in lines if "attempt" in line]
    ok, failed = "succeeded", "failed"
    assert attempts == [
        *((ok, "test#1"), (ok, "red#1"), (ok, "code#1"), (failed, "green#1")),
        *((ok, "v2.repair#1"), (ok, "v2.green#1"), (failed, "v2.commit#1"), (ok, "v2.commit#2")),
    ]
    assert kinds[-1] == "completion"
    decided = [line for line in lines if line["type"] == "replan_decision" and line["executed"]]
    assert [line["replan_type"] for line in decided] == [
        "task_redecomposition",
        "partial_replan",
        "retry",
    ]
    (revised,) = [line for line in lines if line["type"] == "revision"]
    assert "the program is wrong" in str(revised["reason"])
    assert revised["changes"]
    assert "repair" in str(revised["updated_plan"])
