"""MCP servers in runs: what becomes of a plan when a server dies and comes back; and servers over HTTP."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from replanning import Plan, PlanRun, ReplanningEngine
from replanning.journal import AttemptFailed, RecordBody, ResourceChanged, ResourceUpdated, TriggerFired
from replanning.tools import McpServerLost
from tests.support.mcp_plans import Pauses, Reports, command, hanging, open_executor, plan, serving, use
from tests.support.tools import Attempt, Pulse


@pytest.fixture
def pulse(tmp_path: Path) -> Iterator[Pulse]:
    """A pipe that servers hold open as long as they live."""
    with Pulse(tmp_path) as pipe:
        yield pipe


async def run_of(
    wanted: Plan, acting: Callable[[PlanRun], Coroutine[Any, Any, None]], *, watched: bool = True
) -> tuple[PlanRun, list[RecordBody]]:
    """Carry out a plan with its servers, and act on the run meanwhile; the run, ended, and its journal."""
    engine = ReplanningEngine(["repair"])
    async with (
        open_executor(wanted) as (executor, found),
        engine.open(found) as run,
        anyio.create_task_group() as group,
    ):
        if watched:
            executor.watch(run.change_resource)
        group.start_soon(acting, run)
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = await executor(task, attempt.context)
        executor.watch(None)
    await engine.aclose()
    return run, [record.body for record in engine.store.read(run.id)]


async def test_a_tool_of_equal_capability_takes_over(tmp_path: Path, pulse: Pulse):
    """A server that dies mid-plan is a resource that is gone: `repair` has the task done by another tool, and the run ends well."""
    down = tmp_path / "down"
    described = Plan.model_validate(
        {
            "goal": {"objective": "test"},
            "mcp": {"web": {"command": command("--pulse", pulse.path, "--down", down), "tools": ["hang", "say"]}},
            "tools": [
                {"name": "look", "kind": "mcp", "server": "web", "tool": "hang", "capability": "look"},
                {"name": "local", "kind": "shell", "command": "echo found", "capability": "look"},
            ],
            "tasks": [{"id": "a", "tool": "look"}, {"id": "b", "tool": "local", "depends_on": ["a"]}],
        }
    )

    async def kill(run: PlanRun) -> None:
        process = await hanging(pulse)
        down.touch()
        os.kill(process, signal.SIGKILL)

    run, journal = await run_of(described, kill, watched=False)  # then the run learns it from the task that uses it
    assert run.result.status == "succeeded"
    assert run.result.outputs["a"]["stdout"] == "found"
    changed = [body for body in journal if isinstance(body, ResourceUpdated) and body.name == "look"]
    assert (changed[0].available, changed[0].reason) == (False, "MCP server 'web': its process has ended")
    [failed] = [body for body in journal if isinstance(body, AttemptFailed)]
    assert "the MCP server 'web' went away while it was at work" in failed.failure.message
    assert not run.live.tools["look"].available


async def test_the_rest_learns_that_a_server_is_gone(tmp_path: Path, pulse: Pulse):
    """What waits for a server that has died triggers replanning, before it is tried; the trigger says why."""
    down = tmp_path / "down"
    described = Plan.model_validate(
        {
            "goal": {"objective": "test"},
            "mcp": {"web": {"command": command("--pulse", pulse.path, "--down", down)}},
            "tools": [
                {
                    "name": "say",
                    "kind": "mcp",
                    "server": "web",
                    "tool": "say",
                    "capability": "talk",
                    "dangerous": False,
                },
                {"name": "echo", "kind": "shell", "command": "echo {text}", "capability": "talk"},
            ],
            "tasks": [
                {"id": "a", "tool": "web.hang", "optional": True},
                {"id": "b", "tool": "say", "arguments": {"text": "hi"}, "depends_on": ["a"]},
            ],
        }
    )

    async def kill(run: PlanRun) -> None:
        process = await hanging(pulse)
        down.touch()
        os.kill(process, signal.SIGKILL)

    run, journal = await run_of(described, kill)
    fired = [body.trigger for body in journal if isinstance(body, TriggerFired)]
    gone = next(trigger for trigger in fired if isinstance(trigger, ResourceChanged) and trigger.name == "say")
    assert (
        gone.reason
        == "'say' is unavailable (MCP server 'web': its process has ended), and 1 waiting task needs it: 'b'"
    )
    assert run.result.outputs["b"]["stdout"] == "hi"


async def test_a_server_that_comes_back_is_used_again(tmp_path: Path, pulse: Pulse):
    """A task that may be done again is, once its server has been started again: nothing else is changed."""
    described = plan("--pulse", pulse.path, tasks=[{"id": "a", "tool": "web.hang", "idempotent": True, "retry": {}}])
    seen, held = list[int](), os.open(pulse.path, os.O_WRONLY)

    async def kill(run: PlanRun) -> None:
        for _ in range(2):
            seen.append(await hanging(pulse))
            if len(seen) == 1:
                os.kill(seen[0], signal.SIGKILL)
        run.cancel_task("a", reason="it has been seen")

    try:
        _, journal = await run_of(described, kill)
    finally:
        os.close(held)
    assert seen[0] != seen[1]
    changed = [body for body in journal if isinstance(body, ResourceUpdated) and body.name == "web.hang"]
    assert [body.available for body in changed] == [False, True]


async def test_dangerous_tools_are_gated():
    """A tool that its server does not call harmless is not put into a plan without a person's agreement."""
    described = Plan.model_validate(
        {
            "goal": {"objective": "test"},
            "mcp": {"web": {"command": command()}},
            "tools": [{"name": "bad", "kind": "shell", "command": "exit 3"}],
            "tasks": [{"id": "a", "tool": "bad", "fallbacks": [{"tool": "web.wipe", "arguments": {"path": "p"}}]}],
        }
    )

    async def nothing(run: PlanRun) -> None:
        pass

    run, _ = await run_of(described, nothing)
    assert run.result.status == "needs_human"


async def test_over_http():
    """A server that serves over HTTP is found, asked, and missed when it dies; its tools are back when it is."""
    reports = Reports()
    with serving() as (process, url):
        async with open_executor(plan(url=url), clock=Pauses()) as (executor, found):
            assert [tool.tool for tool in found.tools if not tool.dangerous] == ["search", "variable", "hang"]
            output = await executor(use("web.search", query="x", limit=1), Attempt("1"))
            assert output["json"] == {"found": ["x 1"]}
            executor.watch(reports)
            reports.seen.clear()
            process.kill()
            process.wait()
            with pytest.raises(McpServerLost):
                await executor(use("web.search", query="x"), Attempt("2"))
            assert await reports.until("web.search", available=False)


async def test_an_address_where_nobody_is():
    """Where nothing listens the server is unavailable, and its reason says so."""
    with serving() as (process, url):
        process.kill()
        process.wait()
    async with open_executor(plan(url=url), clock=Pauses()) as (executor, found):
        assert found.tools == ()
        assert executor.unavailable_servers["web"].startswith(f"{url} cannot be reached: ConnectError")


@pytest.mark.deep
async def test_a_server_over_http_that_comes_back():
    """A server over HTTP that is there again at its address is reached again, and answers."""
    reports, go = Reports(), anyio.Event()
    with serving() as (first, url):
        async with open_executor(plan(url=url), clock=Pauses(go)) as (executor, _):
            executor.watch(reports)
            reports.seen.clear()
            first.kill()
            first.wait()
            with pytest.raises(McpServerLost):
                await executor(use("web.search", query="x"), Attempt("1"))
            with serving("--port", url.split(":")[2].split("/")[0]):
                go.set()
                await reports.until("web.search", available=True)
                output = await executor(use("web.search", query="x", limit=1), Attempt("2"))
    assert output["json"] == {"found": ["x 1"]}
    assert [seen[1] for seen in reports.seen if seen[0] == "web.search"] == [False, True]
