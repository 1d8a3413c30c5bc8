"""The command `view`: who it lets in, and what a page gets while a run goes on."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import anyio.to_thread
import httpx
import pytest

from tests.support.cli import STORE, Started, cli
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
    """Ctrl-C ends the pages at once, without a traceback."""

    def interrupt() -> str:
        with Served(folder, "--store", STORE) as served:
            served.process.send_signal(2)
            served.process.wait(30)
            assert served.process.returncode == 0
            return str(served.process.stderr.read())

    assert await anyio.to_thread.run_sync(interrupt) == ""
