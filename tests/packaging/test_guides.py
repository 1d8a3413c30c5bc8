"""The guides about asking people and about plugins work, in the situations that they describe."""

import hashlib
import hmac
import json
import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode

import anyio
import pytest

from replanning import Plan, ReplanningEngine, Settings
from replanning.tools import ToolExecutor
from tests.packaging.test_pages import ROOT, blocks, run
from tests.support.http_server import HttpServer

GUIDES = ROOT / "docs" / "how-to"
PLAN = Plan.parse("""
goal: {objective: Read a page}
tools: [{name: scanner, capability: read}, {name: camera, capability: read}]
tasks: [{id: read, tool: scanner}]
""")

pytestmark = pytest.mark.skipif(
    not GUIDES.exists(), reason="needs the checkout: the pages are not installed"
)


def program(page: str) -> dict[str, Any]:
    """Run the programs of a guide; return the names that they define."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(GUIDES / page, "python"):
        run(block, page, names)
    return names


ORDER = {"order_id": "W1", "updated": "2999-01-01", "items": ["a cup"]}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ORDER, ""),
        (ORDER | {"order_id": "W2"}, "output.json.order_id is 'W2', arguments.order_id is 'W1'"),
        (ORDER | {"updated": "2001-01-01"}, "output.json.updated is '2001-01-01'"),
        (ORDER | {"items": []}, "output.json.items is []"),
        ("the shop is temporarily unavailable", "says that it failed"),
    ],
)
async def test_lies(answer, reason, tmp_path, monkeypatch, caplog):
    """The plan of the guide takes a right answer, and asks the mirror after a wrong one."""
    monkeypatch.chdir(tmp_path)
    block, _ = blocks(GUIDES / "when-a-tool-lies.md", "yaml")

    def respond(request):
        told = answer if request.path.startswith("/shop") else ORDER
        if isinstance(told, str):
            return 200, {"content-type": "text/plain"}, told.encode()
        return 200, {"content-type": "application/json"}, json.dumps(told).encode()

    with HttpServer(respond) as server:
        result = await executed(block, server)
    assert result.status == "succeeded"
    assert len(result.revisions) == bool(reason)
    assert reason in caplog.text


async def executed(block: Any, server: HttpServer) -> Any:
    """The result of a plan of the guide, whose shop and mirror this server is."""
    text = block.text.replace("https://shop.example", f"{server.url}/shop")
    plan = Plan.parse(text.replace("https://mirror.example", server.url))
    async with ToolExecutor(plan) as work:
        return await ReplanningEngine(["repair"]).execute(plan, work)


@pytest.mark.parametrize(("total", "paid"), [(11.99, 11.99), (10, 12)])
async def test_second_tool(total, paid, tmp_path, monkeypatch, caplog):
    """The plan of the guide believes an amount that the mirror confirms, and otherwise that of the mirror."""
    monkeypatch.chdir(tmp_path)
    _, block = blocks(GUIDES / "when-a-tool-lies.md", "yaml")

    def respond(request):
        told = total if request.path.startswith("/shop") else 12
        body = json.dumps({"total": told, "items": [{"id": "I1"}], "by": request.path})
        return 200, {"content-type": "application/json"}, body.encode()

    with HttpServer(respond) as server:
        result = await executed(block, server)
    assert result.outputs["price"]["json"]["total"] == paid
    message = (GUIDES / "when-a-tool-lies.md").read_text(encoding="utf-8")
    if total != paid:
        told = "expected the same output from 'mirror'; output.json.total is 10, and 12 by 'mirror'"
        assert told in message
        assert told in caplog.text


async def test_lost_answer(tmp_path, monkeypatch):
    """What the guide asks after a lost answer has the form that the answer itself would have had."""
    monkeypatch.chdir(tmp_path)
    block = next(each for each in blocks(GUIDES / "retries.md", "yaml") if "confirm:" in each.text)
    paid: dict[str, Any] = {}

    def respond(request):
        if request.method == "POST":
            paid[request.headers["idempotency-key"]] = json.loads(request.body)
            return None
        _, _, key = request.path.partition("key=")
        answer = json.dumps(paid[unquote(key)]).encode()
        return 200, {"content-type": "application/json"}, answer

    with HttpServer(respond) as server:
        result = await executed(block, server)
    assert result.status == "succeeded"
    assert list(paid.values()) == [{"amount": 40}]
    output = result.outputs["pay"]
    assert (output["status"], output["json"]) == (200, {"amount": 40})


async def test_request_with_a_body(tmp_path, monkeypatch):
    """The plan of the guide sends what the guide says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOP_TOKEN", "token-of-the-shop")
    page = GUIDES / "plan-files.md"
    block = next(each for each in blocks(page, "yaml") if "body:" in each.text)
    with HttpServer() as server:
        result = await executed(block, server)
    assert result.status == "succeeded"
    (request,) = server.requests
    assert request.path == "/shop/customers/ada/orders"
    told = re.search(r"The shop gets `(.*?)`", page.read_text(encoding="utf-8"))
    assert told is not None
    assert json.loads(request.body) == json.loads(told[1])


@pytest.mark.skipif(find_spec("fastapi") is None, reason="fastapi is not installed")
@pytest.mark.filterwarnings("default")  # those of the test client of another project
def test_web_application(tmp_path, monkeypatch):
    """A run that is begun by a request asks, and goes on when another request answers; what nobody asked is refused."""
    from fastapi.testclient import TestClient

    monkeypatch.chdir(tmp_path)
    with TestClient(program("fastapi.md")["app"]) as client:

        def wait_for(address: str, wanted: Any) -> Any:
            found = None
            found = client.get(address).json()
            for _ in range(5000):
                if wanted(found):
                    return found
                found = client.get(address).json()
            raise AssertionError(found)

        assert client.post("/runs/r1").status_code == 202
        (question,) = wait_for("/questions?run_id=r1", len)
        assert question["diffs"] == [
            "- read: tool: scanner [FAILED]\n+ read~2: tool: camera [PENDING]"
        ]
        address = f"/questions/{question['id']}"
        assert client.post(address, json={"verdict": "perhaps", "by": "ada"}).status_code == 422
        assert client.post(address, json={"verdict": "approve", "by": "ada"}).json() == {
            "accepted": True
        }
        assert client.post(address, json={"verdict": "approve", "by": "ada"}).status_code == 409
        wait_for("/runs/r1", lambda status: status == {"status": "succeeded", "revision": 1})


async def test_messages(tmp_path, monkeypatch):
    """A question is posted with buttons; a click with the right signature answers it, and one with another does not."""
    monkeypatch.chdir(tmp_path)  # the program of the page keeps its runs there
    names = program("slack.md")
    refused = []

    def click(message: Any, signature: str = "") -> None:
        approve, _ = message["blocks"][-1]["elements"]
        action = {"action_id": approve["action_id"], "value": approve["value"]}
        body = urlencode(
            {"payload": json.dumps({"user": {"username": "ada"}, "actions": [action]})}
        ).encode()
        at = str(int(time.time()))  # noqa: TID251 - a signature is good for some minutes
        right = hmac.new(b"secret", b"v0:%s:%s" % (at.encode(), body), hashlib.sha256).hexdigest()
        headers = {"x-slack-request-timestamp": at, "x-slack-signature": signature or f"v0={right}"}
        names["click"](body, headers, "secret")

    def answer(request):
        message = json.loads(request.body)
        try:
            click(message, "v0=wrong")
        except PermissionError as error:
            refused.append(str(error))
        click(message)
        return 200, {}, b"ok"

    async def work(task, context):
        if task.tool == "scanner":
            raise OSError("the scanner does not answer")
        return "done"

    with HttpServer(answer) as server:
        settings = Settings.model_validate({"alternatives": {"require_approval": True}})
        engine = names["engine"] = ReplanningEngine(
            gate=names["SlackGate"](server.url), settings=settings
        )
        result = await engine.execute(PLAN, work)
    assert (result.status, result.revisions[0].by) == ("succeeded", "person:ada")
    assert refused == ["not signed by Slack, or too old"]


def test_attached_framework():
    """A loop of agents is attached in 60 lines: its errors, exceptions and stops arrive as without the engine."""
    page = "attach-a-framework.md"
    names: dict[str, Any] = {"__name__": "page"}
    framework, integration, *_ = blocks(GUIDES / page, "python")
    assert len(integration.text.splitlines()) <= 60
    run(framework, page, names)
    run(integration, page, names)
    error = names["Result"]("the key has expired", is_error=True)
    made = []

    async def tool(what: str) -> Any:
        made.append(what)
        if what == "fail":
            return error
        if what == "stop" and made.count("stop") == 1:
            raise names["StopLoop"]
        if what == "raise":
            raise KeyError(what)
        return names["Result"](what)

    schema = {"properties": {"what": {"type": "string"}}}
    tools = {"tool": names["Tool"](tool, "", schema)}
    loop = names["Loop"]("assistant", tools, names["Replanned"]({}))

    def calls(*texts: str) -> list[Any]:
        return [names["Call"](text, "tool", {"what": text}) for text in texts]

    async def main() -> None:
        [result] = await loop.run("errors", calls("fail"))
        assert result is error
        with pytest.raises(KeyError, match="raise"):
            await loop.run("exceptions", calls("raise"))
        made.clear()
        with pytest.raises(names["StopLoop"]):
            await loop.run("stops", calls("first", "stop"))
        results = await loop.run("stops", calls("first", "stop"))
        assert [each.text for each in results] == ["first", "stop"]
        assert made == ["first", "stop", "stop"]

    anyio.run(main)


REPAIRED = """
goal: {objective: Say hello}
tools:
  - {name: first,  kind: shell, command: "exit 3",     capability: greet}
  - {name: second, kind: shell, command: "echo hello", capability: greet}
tasks: [{id: hello, tool: first, retry: {max_attempts: 1}}]
"""


def installed_exporter(folder: Path, text: str) -> dict[str, str]:
    """Install a module with an exporter in a folder; return the environment of a process that finds it."""
    described = folder / "log-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: log\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[replanning.exporters]\nlog = log:RevisionLog\n")
    (folder / "log.py").write_text(text)
    return {**os.environ, "PYTHONPATH": str(folder)}


def run_with_trace(trace: str, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run a plan that repairs itself, with `--trace`."""
    Path("plan.yaml").write_text(REPAIRED)
    command = [sys.executable, "-m", "replanning", "run", "plan.yaml", "--no-ask", "--trace", trace]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_exporter(tmp_path, monkeypatch):
    """The exporter of the guide is used by `--trace`, with a target and without one."""
    monkeypatch.chdir(tmp_path)
    (text,) = (
        block.text
        for block in blocks(GUIDES / "plugins.md", "python")
        if "RevisionLog" in block.text
    )
    environment = installed_exporter(tmp_path / "installed", text)
    for trace, written in (("log", "revisions.log"), ("log=other.log", "other.log")):
        done = run_with_trace(trace, environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "do 'hello' with 'second'" in Path(written).read_text()


@pytest.mark.parametrize("place", ["command", "engine"])
def test_exporter_that_cannot_be_created(place, tmp_path, monkeypatch):
    """An exporter whose class cannot be created is named with the reason, and without a traceback."""
    monkeypatch.chdir(tmp_path)
    text = "class RevisionLog:\n    def __init__(self, path): ...\n"
    environment = installed_exporter(tmp_path / "installed", text)
    if place == "command":
        done = run_with_trace("log", environment)
    else:
        program = (
            "import replanning\n"
            "try:\n    replanning.ReplanningEngine(exporters=['log'])\n"
            "except replanning.ReplanningError as error:\n    print(error); raise SystemExit(2)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env=environment,
            timeout=120,
        )
    assert done.returncode == 2
    said = " ".join((done.stdout + done.stderr).split())
    assert "the exporter 'log' cannot be created: TypeError" in said
    assert "Traceback" not in said
