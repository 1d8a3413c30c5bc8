"""The command `view` and the page beside a run: who is let in, and what a page gets while a run goes on."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import anyio.to_thread
import httpx
import pytest

from tests.support.cli import (
    REPAIRED,
    REPAIRED_TASKS,
    STORE,
    Gate,
    Started,
    Terminal,
    cli,
    write_plan,
    write_settings,
)
from tests.view.runs import asking_run, repaired_run

pytest.importorskip("uvicorn", reason="the extra `view` is not installed")

ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/\S*\?token=\S+")


class Served(Started):
    """The command `view`, with the address that it has printed."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        super().__init__(folder, "view", "--port", "0", *arguments, PYTHONUNBUFFERED="1")
        self._source = self.process.stdout.fileno()
        self.until("Ctrl-C")
        found = ADDRESS.search(self.seen.replace("\n", ""))
        assert found is not None, self.seen
        self.address = found[0].split("Ctrl-C")[0]


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """A folder with the store of two runs."""
    (tmp_path / STORE).parent.mkdir()
    await repaired_run(tmp_path / STORE)
    await asking_run(tmp_path / STORE)
    return tmp_path


def test_needs_a_store(tmp_path: Path) -> None:
    """Without a store there is nothing to show."""
    assert "there are no runs in" in cli(tmp_path, "view", code=2).stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org"])
def test_refuses_strangers(tmp_path: Path, host: str) -> None:
    """An address that others can reach needs a token that was chosen, or a proxy that knows people."""
    told = cli(tmp_path, "view", "--host", host, code=2).stderr
    assert "--token" in told
    assert "--auth-header" in told


async def test_unknown_run(folder: Path) -> None:
    """A run that is not there ends the command before anything is served."""
    told = await anyio.to_thread.run_sync(
        lambda: cli(folder, "view", "nothing", "--store", STORE, code=1).stderr
    )
    assert "nothing" in told


def events(response: httpx.Response) -> Iterator[dict[str, str]]:
    """The parts of a page that are sent, event by event."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


async def test_live(folder: Path) -> None:
    """An open page gets the parts that change, and no others, when another process goes on with the run."""

    def look() -> tuple[str, dict[str, str]]:
        with (
            Served(folder, "asking", "--store", STORE) as served,
            httpx.Client(follow_redirects=True, timeout=30) as browser,
        ):
            page = browser.get(served.address)
            found = re.search(r'data-events="([^"]+)"', page.text)
            assert found is not None
            with browser.stream("GET", str(page.url.join(found[1]))) as stream:
                cli(folder, "reject", "asking", "--store", STORE, "--wait", 0)
                anyio.run(asking_run, folder / STORE)
                sent: dict[str, str] = {}
                for changed in events(stream):
                    sent.update(changed)
                    if "failed" in sent.get("head", ""):
                        return page.text, sent
        raise AssertionError("the stream has ended")

    before, sent = await anyio.to_thread.run_sync(look)
    assert "question waits" in before
    assert "question waits" not in sent["questions"]
    assert "failed" in sent["head"]


async def test_interrupted(folder: Path) -> None:
    """Ctrl-C ends the pages, those that are open as well, without a traceback."""

    def interrupt() -> str:
        with (
            Served(folder, "--store", STORE) as served,
            httpx.Client(follow_redirects=True, timeout=30) as browser,
        ):
            page = browser.get(served.address)
            with browser.stream("GET", str(page.url.join("/events"))) as stream:
                next(events(stream))
                served.process.send_signal(2)
                served.process.wait(30)
            assert served.process.returncode == 0
            return str(served.process.stderr.read())

    assert await anyio.to_thread.run_sync(interrupt) == ""


def address_of(command: Started) -> str:
    """The address of the page beside a run, as the command has printed it."""
    command.until("?token=")
    command.until("\n")
    found = ADDRESS.search(command.seen)
    assert found is not None
    return found[0]


@pytest.mark.deep
@pytest.mark.parametrize("store", [STORE, "memory"])
def test_beside_a_run(tmp_path: Path, store: str) -> None:
    """With `--view`, the page of a run shows it from the beginning to its end, and then the command ends."""
    gate = Gate(tmp_path / "gate")
    plan = write_plan(tmp_path, {"wait": gate.command}, "id: first, tool: wait")
    with (
        Started(tmp_path, "run", plan, "--view", "--store", store) as command,
        httpx.Client(follow_redirects=True, timeout=30) as browser,
    ):
        page = browser.get(address_of(command))
        assert "try it" in page.text
        with browser.stream("GET", f"{page.url}/events") as stream:
            sent = events(stream)
            assert "running" in next(sent)["head"]
            gate.open()
            while "succeeded" not in next(sent).get("head", ""):
                pass
            assert "succeeded" in command.end()
        assert "Traceback" not in command.seen


@pytest.mark.deep
def test_stays_at_a_terminal(tmp_path: Path) -> None:
    """At a terminal the page stays after the run until Ctrl-C, and the exit code is that of the run."""
    plan = write_plan(tmp_path, {"fail": "exit 7"}, "id: first, tool: fail")
    with Terminal(tmp_path, "run", plan, "--view", "--no-replan", COLUMNS="500") as command:
        address = address_of(command)
        command.until("Ctrl-C closes its page")
        assert "exit code 7" in httpx.get(address, follow_redirects=True).text
        command.process.send_signal(2)
        assert "Traceback" not in command.end(1)


@pytest.mark.deep
def test_answered_beside_a_run(tmp_path: Path) -> None:
    """Without a terminal, a run with a page waits for answers that are given there."""
    write_settings(tmp_path, alternatives={"require_approval": True})
    plan = write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)
    with (
        Started(tmp_path, "run", plan, "--view", "--run-id", "asking") as command,
        httpx.Client(follow_redirects=True, timeout=30) as browser,
    ):
        page = browser.get(address_of(command))
        with browser.stream("GET", f"{page.url}/events") as stream:
            for changed in events(stream):
                if "question waits" in changed.get("questions", ""):
                    break
        secret = re.search(r'name="csrf" value="([^"]+)"', changed["questions"])
        assert secret is not None
        answer = {"csrf": secret[1], "by": "Ada", "verdict": "approve", "choice": "0"}
        assert browser.post(f"{page.url}/questions/1", data=answer).status_code == 200
        assert "succeeded" in command.end()


@pytest.mark.deep
def test_open(tmp_path: Path) -> None:
    """With `--open`, the page is opened in a browser as well."""
    browser = tmp_path / "browser"
    browser.write_text('#!/bin/sh\necho "$1" > opened\n')
    browser.chmod(0o700)
    os.mkfifo(tmp_path / "opened")
    plan = write_plan(tmp_path, {"good": "echo fine"}, "id: first, tool: good")
    with Started(tmp_path, "run", plan, "--open", BROWSER=f"{browser} %s &") as command:
        assert (tmp_path / "opened").read_text().strip() == address_of(command)
        command.end()


@pytest.mark.parametrize("words", [("run", "plan.yaml", "--view"), ("view", "--store", STORE)])
def test_missing_extra(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Without the packages of the pages, the command says what to install before it does anything."""
    write_plan(tmp_path, {"good": "echo fine > done"}, "id: first, tool: good")
    missing = tmp_path / "missing"
    missing.mkdir()
    (missing / "jinja2.py").write_text("raise ModuleNotFoundError('jinja2 is missing')")
    path = os.pathsep.join([str(missing), *filter(None, [os.environ.get("PYTHONPATH")])])
    told = cli(tmp_path, *words, code=2, PYTHONPATH=path).stderr
    assert 'pip install "replanning[view]"' in told
    assert not (tmp_path / "done").exists()
