"""The proxy of MCP servers: real server processes, a real client, within a process and over `replanning mcp-proxy`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from mcp import Client, MCPError
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.types import ToolListChangedNotification

from replanning import (
    Answer,
    Plan,
    PlanError,
    Question,
    ReplanningEngine,
    Settings,
    StoreGate,
)
from replanning.errors import StoreError, ToolError
from replanning.integrations.mcp import McpProxy, open_proxy, server_of_command
from replanning.journal import AttemptFailed, Record, SqliteStore
from replanning.plan.tasks import Expectation, Retry
from replanning.plan.types import RunId
from tests.support.cli import ENVIRONMENT, PATIENCE, SCRIPT, answer, cli
from tests.support.runs import make_engine, skipping
from tests.support.tools import Pulse
from tests.support.tracing import Spans

SUPPORT = Path(__file__).parents[1] / "support"
FAILING = [sys.executable, str(SUPPORT / "mcp_failing_server.py")]
SERVER = [sys.executable, str(SUPPORT / "mcp_server.py")]
RAW = [sys.executable, str(SUPPORT / "mcp_raw_server.py")]
SHAPELESS = [sys.executable, str(SUPPORT / "mcp_shapeless_server.py")]
NEWS = {"news": "web", "archive": "web"}
SUBSTITUTE = {"found": "x, from the archive"}


def plan(*tools: object, **servers: Any) -> Plan:
    """A plan with servers, by default the failing one, and tools of theirs."""
    described = servers or {"server": {"command": FAILING}}
    return Plan.model_validate({"goal": {"objective": ""}, "mcp": described, "tools": [*tools]})


@asynccontextmanager
async def proxied(
    servers: Plan | None = None,
    *,
    mode: str = "auto",
    engine: ReplanningEngine | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Client, McpProxy]]:
    """A client of a proxy in this process."""
    async with (
        open_proxy(engine or ReplanningEngine(["repair"]), servers or plan(), **options) as proxy,
        Client(proxy.server, mode=mode) as client,
    ):
        yield client, proxy


@asynccontextmanager
async def launched(folder: Path, *words: object) -> AsyncIterator[Any]:
    """The transport to a proxy in a process of its own."""
    arguments = ["mcp-proxy", "--store", str(folder / "runs.db"), *map(str, words)]
    parameters = StdioServerParameters(command=str(SCRIPT), args=arguments, env=ENVIRONMENT)
    with (folder / "stderr").open("w") as errors:
        async with stdio_client(parameters, errors) as streams:
            yield streams


def plain(result: Any) -> Any:
    """A result as it is sent."""
    return result.model_dump(mode="json", by_alias=True)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_same_without_failures(mode: Any) -> None:
    """Tools, schemas, results and what the server says of itself are those of the server, in both protocols."""
    direct = stdio_client(StdioServerParameters(command=FAILING[0], args=FAILING[1:]))
    seen = []
    async with Client(direct, mode=mode) as alone, proxied(mode=mode) as (through, _):
        for client in (alone, through):
            told = [client.instructions, client.server_info.name, client.server_info.version]
            listed = [plain(tool) for tool in (await client.list_tools()).tools]
            results = [
                plain(await client.call_tool(name, arguments))
                for name, arguments in (
                    ("archive", {"query": "x"}),
                    ("news", {"query": "x"}),
                    ("archive", {"wrong": 1}),
                    ("count", {"tool": "archive"}),
                )
            ]
            with pytest.raises(MCPError) as refused:
                await client.call_tool("refused", {})
            seen.append([told, listed, results, refused.value.error])
    assert seen[0] == seen[1]


async def test_substitute() -> None:
    """A tool that fails is replaced by one of its capability, and the client sees its result."""
    async with proxied(capabilities=NEWS) as (client, proxy):
        result = await client.call_tool("news", {"query": "x"})
        assert (result.is_error, result.structured_content) == (False, SUBSTITUTE)
        assert (await client.call_tool("count", {"tool": "news"})).structured_content == {
            "result": 1
        }
    assert proxy.session.run.result.ok
    [revision] = proxy.session.run.result.revisions
    assert "archive" in revision.reason


async def test_give_up() -> None:
    """Where there is no way on, the client gets the failure of the tool that it called, and the run goes on."""
    async with proxied(capabilities=NEWS) as (client, proxy):
        result = await client.call_tool("news", {"query": "nothing"})
        assert result.is_error
        assert "no news of nothing" in result.content[0].text
        assert not (await client.call_tool("steps", {})).is_error
    assert proxy.session.run.result.ok


async def test_skipped() -> None:
    """About a call that is skipped, the client is told why; it is an error if the tool has an output schema."""
    async with proxied(engine=make_engine(skipping)) as (client, _):
        result = await client.call_tool("news", {"query": "x"})
    assert (result.is_error, result.content[0].text) == (
        True,
        "task 'news-1' was skipped: nobody needs it",
    )


async def test_unknown_tool() -> None:
    """A tool that no server has is refused as the protocol says."""
    async with proxied() as (client, _):
        with pytest.raises(MCPError, match="Unknown tool: nothing"):
            await client.call_tool("nothing", {})


async def test_retry() -> None:
    """A read-only tool is tried again as often as was said; one that may have done something is not."""
    async with proxied(retry=Retry(max_attempts=3, delay=0)) as (client, _):
        assert (await client.call_tool("flaky", {})).content[0].text == "worked at time 3"
        assert (await client.call_tool("order", {})).is_error
        assert (await client.call_tool("count", {"tool": "order"})).structured_content == {
            "result": 1
        }


@pytest.mark.parametrize(
    ("end", "executed"),
    [
        ("text", {"charge": "x", "read": "x", "put": "x"}),
        ("error", {"charge": "xs", "read": "xs", "put": "xs"}),
        ("refused", {"charge": "xs", "read": "xs", "put": "xs"}),
        ("hanging", {"charge": "x", "read": "xxxs", "put": "xxx"}),
        pytest.param("gone", {"charge": "x", "read": "xxxs", "put": "xxx"}, marks=pytest.mark.deep),
        ("cancelled", {"charge": "x", "read": "x", "put": "x"}),
    ],
)
async def test_no_more_effects_than_without(
    end: str, executed: dict[str, str], tmp_path: Path
) -> None:
    """A call is executed once, like by its server alone; one that was cut off is repeated, or replaced, where that is harmless."""
    engine = ReplanningEngine(["repair"], settings=Settings.model_validate({"retry": {"delay": 0}}))
    limit = {"timeout": 0.5} if end == "hanging" else {}
    tools = [{"name": name, "kind": "mcp", "server": "server", **limit} for name in executed]
    capabilities = {name: name for name in executed}
    others = {f"{name}_elsewhere": name for name in executed}
    servers = plan(*tools, server={"command": FAILING, "safe": list(others)})
    options: Any = {"engine": engine, "capabilities": capabilities | others}
    scope = anyio.CancelScope()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        if end == "cancelled":
            scope.cancel()

    async with proxied(servers, **options) as (client, _):
        for name in executed:
            given = {"effects": str(tmp_path / name), "end": end}
            scope = anyio.CancelScope()
            with scope, suppress(MCPError):
                await client.call_tool(name, given, progress_callback=on_progress)
            # An answer shows that the server is worth starting again.
            assert not (await client.call_tool("steps", {})).is_error
    assert {name: (tmp_path / name).read_text() for name in executed} == executed


async def test_call_while_the_server_is_started_again(tmp_path: Path) -> None:
    """A call that is made while a server is started again waits for it, instead of failing."""
    async with proxied() as (client, proxy), anyio.create_task_group() as group:
        given = {"effects": str(tmp_path / "effects"), "end": "gone"}
        group.start_soon(client.call_tool, "charge", given)
        while not proxy.unavailable:
            await anyio.lowlevel.checkpoint()
        result = await client.call_tool("archive", {"query": "x"})
        assert (result.is_error, result.structured_content) == (False, SUBSTITUTE)


async def test_timeout(tmp_path: Path) -> None:
    """A call that takes too long fails in time; what may have taken effect is neither repeated nor replaced."""
    effects = tmp_path / "effects"
    async with proxied(timeout=0.2, capabilities={"charge": "c", "charge_elsewhere": "c"}) as (
        client,
        _,
    ):
        result = await client.call_tool("charge", {"effects": str(effects), "end": "hanging"})
        assert result.is_error
        assert "ran into its deadline after" in result.content[0].text
        assert "a person must answer" not in result.content[0].text
        assert (await client.call_tool("archive", {"query": "x"})).structured_content == SUBSTITUTE
    assert effects.read_text() == "x"


async def test_timeout_of_a_replaced_tool(tmp_path: Path) -> None:
    """A read-only tool that takes too long is replaced."""
    effects = str(tmp_path / "effects")
    servers = plan(server={"command": FAILING, "safe": ["read_elsewhere"]})
    options: Any = {"timeout": 0.2, "retry": Retry(max_attempts=1)}
    options["capabilities"] = {"read": "r", "read_elsewhere": "r"}
    async with proxied(servers, **options) as (client, _):
        hanging = {"effects": effects, "end": "hanging"}
        result = await client.call_tool("read", hanging)
        assert (result.is_error, result.content[0].text) == (False, "charged")


async def test_timeout_that_the_plan_states() -> None:
    """The limit that a plan states for a tool takes precedence."""
    stated = {"name": "news", "kind": "mcp", "server": "server", "timeout": 7}
    async with proxied(plan(stated), timeout=5) as (_, proxy):
        tools = proxy.session.run.live.tools
        assert (tools["news"].timeout, tools["archive"].timeout) == (7, 5)


async def test_timeout_of_a_resumed_run(tmp_path: Path) -> None:
    """A run that is resumed has the limit of this time, not the one of the process before."""
    for limit in (600.0, 0.2):
        store = SqliteStore(tmp_path / "runs.db")
        engine = ReplanningEngine(["repair"], store=store)
        async with proxied(engine=engine, run_id="r", timeout=limit) as (client, _):
            if limit < 1:
                given = {"effects": str(tmp_path / "effects"), "end": "hanging"}
                with anyio.fail_after(PATIENCE):
                    result = await client.call_tool("charge", given)
                assert "ran into its deadline after" in result.content[0].text


async def test_timeout_of_an_added_tool() -> None:
    """A tool that a server added later has the same limit."""
    server = plan(server={"command": [*SERVER, "--changing"]})
    async with proxied(server, timeout=0.2) as (client, proxy):
        await client.call_tool("exchange", {})
        with anyio.fail_after(PATIENCE):
            while "wait" not in proxy.tools:
                await anyio.lowlevel.checkpoint()
        result = await client.call_tool("wait", {})
        assert result.is_error
        assert "tool 'wait' was stopped after 0.2 s" in result.content[0].text


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "`limit` must be an integer",
            "structured content; it answered: `limit` must be an integer",
        ),
        ("", "did not return structured content"),
    ],
)
async def test_answer_without_its_shape(said: str, told: str) -> None:
    """An answer that lacks what its output schema promises is a failure, which quotes what the server said."""
    shapeless = plan(server={"command": SHAPELESS})
    async with proxied(shapeless) as (client, _):
        # As a client sees it that leaves the checks to others.
        result = await client.session.call_tool("search", {"said": said})
        assert result.is_error
        assert result.content[0].text.endswith(told)


async def test_trace() -> None:
    """The server gets the span of the attempt as that of its caller, so that its spans are below it."""
    spans = Spans()
    engine = ReplanningEngine(["repair"], tracer_provider=spans.provider)
    async with proxied(engine=engine) as (client, _):
        parent = (await client.call_tool("trace", {})).content[0].text.split("-")
    assert spans.traces == {int(parent[1], 16)}
    assert [span.name for span in spans.flat if span.id == parent[2]] == ["replanning.attempt"]


async def test_lost_server(tmp_path: Path) -> None:
    """A server that ends during a call of a read-only tool is started again, and the call made again."""
    async with proxied() as (client, _):
        result = await client.call_tool("crash", {"marker": str(tmp_path / "crashed")})
        assert (result.is_error, result.content[0].text) == (False, "survived")


async def test_error_of_the_server_with_the_code_of_a_lost_connection() -> None:
    """An error that a server answers with reaches the client unchanged, and the server keeps running."""
    async with proxied() as (client, _):
        for message in ("the disk is full, 1", "the disk is full, 2"):
            with pytest.raises(MCPError) as refused:
                await client.call_tool("full", {})
            assert (refused.value.code, refused.value.message) == (-32000, message)


async def test_server_that_prints_bytes() -> None:
    """A server whose output is not all UTF-8 still answers calls."""
    async with proxied(plan(server={"command": RAW})) as (client, _):
        for _ in range(2):
            assert (await client.call_tool("bytes", {})).content[0].text == "said"


async def test_result_that_the_protocol_does_not_allow() -> None:
    """The error of a result that does not fit the protocol names the field, on one line and without its value."""
    async with proxied(plan(server={"command": RAW})) as (client, _):
        result = await client.call_tool("odd", {})
    problem = "its answer does not fit the protocol: content.0.TextContent.text: "
    assert f"{problem}Input should be a valid string" in result.content[0].text
    assert "\n" not in result.content[0].text


async def test_result_with_half_of_an_emoji() -> None:
    """A result that was cut within an emoji reaches the client, with a question mark in its place."""
    async with proxied(plan(server={"command": RAW})) as (client, _):
        assert (await client.call_tool("half", {})).content[0].text == "? and more"


async def test_parallel_calls_and_progress() -> None:
    """Calls at the same time each have their own result and progress."""
    seen: dict[int, list[Any]] = {0: [], 1: []}
    async with proxied(capabilities=NEWS) as (client, _), anyio.create_task_group() as group:

        async def call(number: int) -> None:
            async def on_progress(
                progress: float, total: float | None, message: str | None
            ) -> None:
                seen[number].append((progress, total, message))

            assert (await client.call_tool("steps", {}, progress_callback=on_progress)).content[
                0
            ].text == "done"

        async def substitute(number: int) -> None:
            result = await client.call_tool("news", {"query": str(number)})
            assert result.structured_content == {"found": f"{number}, from the archive"}

        for number in (0, 1):
            group.start_soon(call, number)
            group.start_soon(substitute, number)
    assert seen == {key: [(1, 2, "step 1"), (2, 2, "step 2")] for key in (0, 1)}


async def test_cancellation(tmp_path: Path) -> None:
    """A call that the client cancels is cancelled at the server, and the next one is answered."""
    with Pulse(tmp_path) as pulse:
        server = {"command": [*SERVER, "--pulse", str(pulse.path)]}
        async with proxied(plan(server=server)) as (client, proxy):
            async with anyio.create_task_group() as group:
                group.start_soon(client.call_tool, "hang", {})
                assert b"hanging" in await pulse.beat()
                group.cancel_scope.cancel()
            assert b"cancelled" in await pulse.beat()
            assert (await client.call_tool("say", {"text": "x"})).content[0].text == "x"
    assert proxy.session.run.result.ok


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_list_changes(mode: Any) -> None:
    """The client hears that a server has other tools, sees them, and calls them; one that is gone is unknown."""
    heard = anyio.Event()

    async def hear(message: object) -> None:
        if isinstance(message, ToolListChangedNotification):
            heard.set()

    server = plan(server={"command": [*SERVER, "--changing"]})
    async with (
        open_proxy(ReplanningEngine(["repair"]), server) as proxy,
        Client(proxy.server, mode=mode, message_handler=hear, cache=None) as client,
        anyio.create_task_group() as group,
    ):
        ready = anyio.Event()

        async def listen() -> None:
            async with client.listen(tools_list_changed=True) as events:
                ready.set()
                async for _ in events:
                    heard.set()

        if mode == "auto":
            group.start_soon(listen)
            await ready.wait()
        assert "search" in [tool.name for tool in (await client.list_tools()).tools]
        await client.call_tool("exchange", {})
        with anyio.fail_after(PATIENCE):
            await heard.wait()
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert ("search" in names, "find" in names) == (False, True)
        found = await client.call_tool("find", {"query": "x", "limit": 1})
        assert found.structured_content == {"found": ["x 1"]}
        with pytest.raises(MCPError, match="Unknown tool: search"):
            await client.call_tool("search", {"query": "x"})
        group.cancel_scope.cancel()


async def test_several_servers() -> None:
    """Tools of several servers stand in for one another, by the names that the plan or their servers give them."""
    own = {"name": "latest", "kind": "mcp", "server": "one", "tool": "news", "capability": "web"}
    servers = {
        "one": {"command": FAILING, "tools": ["news"]},
        "two": {"command": FAILING},
        "gone": {"command": "no-such"},
    }
    async with proxied(plan(own, **servers), capabilities={"two_archive": "web"}) as (
        client,
        proxy,
    ):
        assert [tool.name for tool in (await client.list_tools()).tools][:3] == [
            "latest",
            "two_news",
            "two_archive",
        ]
        assert "no-such" in proxy.unavailable["gone"]
        assert (await client.call_tool("latest", {"query": "x"})).structured_content == SUBSTITUTE


@pytest.mark.parametrize("other", ["two_search", "two_look"])
async def test_result_of_another_shape(other: str) -> None:
    """A tool whose answer does not fit the schema of the called one does not stand in for it."""
    servers = {"one": {"command": FAILING, "tools": ["news"]}, "two": {"command": SERVER}}
    own = {"name": "two_look", "kind": "mcp", "server": "two", "tool": "say", "dangerous": False}
    own["input_schema"] = {"properties": {"query": {"type": "string"}}}
    own["parameters"] = {"query": "string"}
    capabilities = dict.fromkeys(("one_news", other), "web")
    async with proxied(plan(own, **servers), capabilities=capabilities) as (client, _):
        assert (
            "no news of x" in (await client.call_tool("one_news", {"query": "x"})).content[0].text
        )


async def test_wrong_servers() -> None:
    """No server, servers that cannot be started, and capabilities of unknown tools are errors of one sentence."""
    engine = ReplanningEngine(["repair"])
    for servers, capabilities, wanted, text in (
        (Plan(goal=plan().goal), {}, PlanError, "at least one server"),
        (
            plan(server={"command": "no-such"}),
            {},
            ToolError,
            "no MCP server could be started: 'server': the program 'no-such'",
        ),
        (plan(), {"newz": "web"}, PlanError, "did you mean 'news'"),
    ):
        with pytest.raises(wanted, match=text):
            async with open_proxy(engine, servers, capabilities=capabilities):
                pass


WRONG_ARCHIVE = {"where": ["output.found == 'y, from the archive'"]}


async def test_expectations() -> None:
    """What is expected of a tool is added to what the file of servers states; without a stand-in the client sees its answer."""
    stated = {"where": ["len(output.found) > 0"], "errors": ["no"], "means": "not-done"}
    own = {"name": "archive", "kind": "mcp", "server": "server", "expect": stated}
    further = Expectation.model_validate(
        {"schema": {"type": "object"}, **WRONG_ARCHIVE, "errors": ["nothing"], "means": "not-done"}
    )
    async with proxied(plan(own), expect={"archive": further}) as (client, proxy):
        result = await client.call_tool("archive", {"query": "x"})
        assert result.structured_content == SUBSTITUTE
        joined = proxy.session.run.live.tools["archive"].expect
    assert joined == Expectation.model_validate(
        {
            "schema": {"type": "object"},
            "where": ["len(output.found) > 0", *WRONG_ARCHIVE["where"]],
            "errors": ["no", "nothing"],
            "means": "not-done",
        }
    )
    assert unexpected(proxy.session.run.records()) == [
        "expected output.found == 'y, from the archive'; output.found is 'x, from the archive'"
    ]


def unexpected(records: Iterable[Record]) -> list[str]:
    """The messages of attempts whose outputs broke an expectation."""
    failed = [each.body for each in records if isinstance(each.body, AttemptFailed)]
    return [body.failure.message for body in failed if body.failure.kind == "unexpected"]


async def test_wrong_expectations() -> None:
    """Expectations that do not fit the tools are named together, with those of the options, before a client is served."""
    stated = {
        "schema": {"type": "object"},
        "agrees_with": "news",
        "errors": ["no"],
        "means": "not-done",
    }
    web = {"kind": "mcp", "server": "server", "capability": "web", "effect": "none"}
    own = [{**web, "name": "archive", "expect": stated}, {**web, "name": "news"}]
    expect = {
        "archive": {**stated, "means": None},
        "news": {"agrees_with": "order"},
        "newz": WRONG_ARCHIVE,
    }
    with pytest.raises(PlanError) as raised:
        async with open_proxy(
            ReplanningEngine(["repair"]),
            plan(*own),
            capabilities={"odrer": "o"},
            expect={name: Expectation.model_validate(each) for name, each in expect.items()},
        ):
            pass
    joined = "as well, and the two cannot be joined; state it in one of the files"
    assert [str(problem) for problem in raised.value.problems] == [
        "capabilities: there is no tool called 'odrer'; did you mean 'order'?",
        f"expect.archive.schema: the file of servers states `schema` {joined}",
        f"expect.archive.agrees_with: the file of servers states `agrees_with` {joined}",
        f"expect.archive.errors: the file of servers states `errors` {joined}",
        "expect.news.agrees_with: 'order' and 'news' do not have the same `capability`",
        "expect.newz: there is no tool called 'newz'; did you mean 'news'?",
    ]


class TellingGate(StoreGate):
    """A gate that tells when it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = anyio.Event()

    async def ask(self, question: Question) -> Answer:
        self.asked.set()
        return await super().ask(question)


@pytest.mark.parametrize("verdict", ["approve", "reject"])
async def test_approval(tmp_path: Path, verdict: Any) -> None:
    """A tool that may do harm stands in when a person agrees from elsewhere; the call waits until then."""
    own = {
        "name": "archive",
        "kind": "mcp",
        "server": "server",
        "capability": "web",
        "dangerous": True,
    }
    gate = TellingGate()
    engine = ReplanningEngine(["repair"], store=SqliteStore(tmp_path / "runs.db"), gate=gate)
    async with proxied(plan(own), engine=engine, capabilities={"news": "web"}) as (client, proxy):
        async with anyio.create_task_group() as group:

            async def decide() -> None:
                await gate.asked.wait()
                (question,) = engine.pending(proxy.session.run.id)
                engine.answer(question.id, verdict, by="ada")

            group.start_soon(decide)
            result = await client.call_tool("news", {"query": "x"})
        if verdict == "approve":
            assert result.structured_content == SUBSTITUTE
        else:
            assert "no news of x" in result.content[0].text


async def test_resume(tmp_path: Path) -> None:
    """A run with an id is paused when the client leaves, and goes on with the next one; a run that has ended does not."""
    place = tmp_path / "runs.db"
    for _ in range(2):
        async with proxied(
            engine=ReplanningEngine(["repair"], store=SqliteStore(place)), run_id="r"
        ) as (client, _):
            assert (
                await client.call_tool("archive", {"query": "x"})
            ).structured_content == SUBSTITUTE
    history = ReplanningEngine(store=SqliteStore(place)).history("r")
    assert (history.status, history.reason) == (
        "paused",
        "the client has left; the next one continues the run",
    )
    engine = ReplanningEngine(["repair"], store=SqliteStore(place))
    async with open_proxy(engine, plan(), run_id="r") as proxy:
        assert len(proxy.session.run.live) == 2
        proxy.session.end()
    with pytest.raises(StoreError, match="run 'r' has ended"):
        async with open_proxy(engine, plan(), run_id="r"):
            pass


# The command


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_command(tmp_path: Path, mode: Any) -> None:
    """Over the command, a client gets the result of the substitute, progress, and cancellation; the store has the run."""
    words = (
        "--run-id",
        "mine",
        "--capability",
        "web=news,archive",
        "--retries",
        "2",
        "--",
        *FAILING,
    )
    seen: list[Any] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, total, message))

    async with Client(launched(tmp_path, *words), mode=mode) as client:
        assert "order" in [tool.name for tool in (await client.list_tools()).tools]
        assert (await client.call_tool("news", {"query": "x"})).structured_content == SUBSTITUTE
        assert (await client.call_tool("order", {})).is_error
        await client.call_tool("steps", {}, progress_callback=on_progress)
        place = ("mine", "--store", tmp_path / "runs.db")
        status = await anyio.to_thread.run_sync(lambda: answer(tmp_path, "status", *place))
        assert status["status"] == "running"
    assert seen == [(1, 2, "step 1"), (2, 2, "step 2")]
    assert answer(tmp_path, "status", *place)["status"] == "paused"
    told = cli(tmp_path, "history", *place).stdout
    assert "archive" in told, told
    assert "run mine keeps the calls of 16 tools alive" in (tmp_path / "stderr").read_text()


async def test_command_with_expectations(tmp_path: Path) -> None:
    """A file says what is expected of the tools by the names that the client sees."""
    file = tmp_path / "expect.json"
    file.write_text(json.dumps({"archive": WRONG_ARCHIVE}))
    words = ["--run-id", "mine", "--expect", str(file), "--", *FAILING]
    async with Client(launched(tmp_path, *words)) as client:
        result = await client.call_tool("archive", {"query": "x"})
        assert result.structured_content == SUBSTITUTE
    with closing(SqliteStore(tmp_path / "runs.db")) as store:
        assert len(unexpected(store.read(RunId("mine")))) == 1


def test_wrong_file_of_expectations(tmp_path: Path) -> None:
    """A file that is wrong, or does not fit the tools, is refused with line and column of every offender."""
    file = tmp_path / "e.yaml"
    for text, capability, problems in (
        ("", "web=news", ["e.yaml: expected names of tools, each with its expectations"]),
        ("news: {", "web=news", ["e.yaml:2:1: this is not YAML"]),
        (
            "news: 3\narchive:\n  where: ['output.found ==']\n  erors: [a]\n",
            "web=news",
            [
                "e.yaml:1:1 news: expected a mapping of fields to values, got 3",
                "e.yaml:3:11 archive.where[0]: condition 'output.found ==', column 16: cannot be read",
                "e.yaml:4:3 archive.erors: there is no field 'erors' here; did you mean 'errors'?",
            ],
        ),
        (
            "newz: {errors: [no]}\nnews: {agrees_with: order}\n",
            "web=news,archiv",
            [
                "e.yaml:1:1 newz: there is no tool called 'newz'; did you mean 'news'?",
                "e.yaml:2:8 news.agrees_with: 'order' and 'news' do not have the same `capability`",
                "capabilities: there is no tool called 'archiv'; did you mean 'archive'?",
            ],
        ),
        ("news: {errors: [no]}\n", "web=archiv", ["capabilities: there is no tool called"]),
    ):
        file.write_text(text)
        options = ["--capability", capability, "--expect", "e.yaml"]
        done = cli(tmp_path, "mcp-proxy", *options, "--", *FAILING, code=2)
        told = " ".join(done.stderr.split())
        assert [problem for problem in problems if problem not in told] == [], told
        assert "Traceback" not in told


@pytest.mark.parametrize("end", ["stdin", "SIGINT", "SIGTERM"])
def test_end(tmp_path: Path, end: str) -> None:
    """A closed input and a signal end the proxy and its servers, and the run has succeeded; output has the protocol alone."""
    os.mkfifo(tmp_path / "pulse")
    reading = os.open(tmp_path / "pulse", os.O_RDONLY | os.O_NONBLOCK)
    words = [str(SCRIPT), "mcp-proxy", "--", *SERVER, "--pulse", str(tmp_path / "pulse")]
    process = subprocess.Popen(
        words,
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "keeps the calls of 5 tools alive" in process.stderr.readline()
    if end != "stdin":
        process.send_signal(getattr(signal, end))
        assert process.wait(PATIENCE) == 0
    said, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, said) == (0, "")
    assert "Traceback" not in errors
    assert os.read(reading, 1) == b""  # nobody holds the pipe
    os.close(reading)
    assert answer(tmp_path, "status", "latest")["status"] == "succeeded"


def test_argument_with_half_of_an_emoji(tmp_path: Path) -> None:
    """A call with an argument that was cut within an emoji is answered."""
    initial = {"protocolVersion": "2025-06-18", "capabilities": {}}
    initial["clientInfo"] = {"name": "test", "version": "1"}
    call = {"name": "say", "arguments": {"text": "\ud83d and more"}}
    messages: list[Any] = [
        {"id": 1, "method": "initialize", "params": initial},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": call},
    ]
    with subprocess.Popen(
        [str(SCRIPT), "mcp-proxy", "--quiet", "--", *SERVER],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for message in messages:
            process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            process.stdin.flush()
        process.stdout.readline()
        told = json.loads(process.stdout.readline())
        process.stdin.close()
    assert told["result"]["content"][0]["text"] == "? and more"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "expected either the command line of a server after --"),
        ("--tools t.yaml -- x", "expected either the command line of a server after --"),
        ("--tools t.yaml --safe a", "--safe is for SERVER"),
        ("--tools t.yaml", "t.yaml: expected a section `mcp` with at least one server"),
        ("--timeout -1 -- x", "--timeout: expected a number of seconds"),
        ("--timeout nan -- x", "--timeout: expected a number of seconds"),
        ("--ask console -- x", "standard input belongs to the client"),
        ("--expect none.yaml -- x", "--expect: none.yaml: the file cannot be read"),
        ("--capability web -- x", "--capability: expected NAME=TOOL,TOOL, got 'web'"),
        (
            "--capability a=x --capability b=x -- x",
            "a tool can have one capability, but x would have several",
        ),
        (
            "-- no-such-program",
            "no MCP server could be started: 'server': the program 'no-such-program' is not found",
        ),
    ],
)
def test_wrong_usage(tmp_path: Path, words: str, message: str) -> None:
    """A user's mistake is named on standard error alone, with code 2."""
    (tmp_path / "t.yaml").write_text("tools: [{name: a, kind: shell, command: ls}]\n")
    done = cli(tmp_path, "mcp-proxy", *words.split(), code=2)
    assert message in " ".join(done.stderr.split())
    assert not done.stdout


def test_environment_of_a_command_line() -> None:
    """A server that a command line starts gets the variables that the proxy was given, by reference."""
    server = server_of_command(
        ["a", "b"],
        environ={"PATH": "/bin", "PWD": "/home/me", "KEY": "x", "odd%%": "y"},
        safe=("c",),
    )
    assert (server.command, dict(server.env), server.safe) == (
        ("a", "b"),
        {"KEY": "{env:KEY}"},
        ("c",),
    )
