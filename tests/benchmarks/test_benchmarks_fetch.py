"""Getting the published data: what is fetched, checked, kept and made of it, from a server on this machine."""

import gzip
import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import pytest

pytest.importorskip("benchmarks", reason="benchmarks are part of a checkout, not of a distribution")
from benchmarks import fetch, instances, published, workflows

ROOT = Path(__file__).parents[2]
QUERY = """Here are the actions I can do.

[STATEMENT]
As initial conditions I have that, the red block is clear, the hand is empty and the red block is on the table.
My goal is to have that the blue block is on top of the red block.
My plan is as follows:

[PLAN]
an example, which is passed over
[PLAN END]

[STATEMENT]
As initial conditions I have that, the red block is clear, the blue block is clear, the hand is empty, \
the red block is on the table and the blue block is on the table.
My goal is to have that the red block is on top of the blue block.
My plan is as follows:

[PLAN]
pick up the red block
stack the red block on top of the blue block
[PLAN END]

During execution, an unexpected event has occurred.
After executing the action "pick up the red block" at step 1 in the plan, the following facts unexpectedly became true: \
the hand is empty and the red block is on the table
The following facts became unexpectedly false: the hand is currently holding red block
After re-planning from the new state, the plan is as follows:
[PLAN]"""
ANSWERS = {
    "instances": [
        {
            "instance_id": 4,
            "query": QUERY,
            "ground_truth_plan": "(pick-up red)\n(stack red blue)\n",
            "llm_raw_response": "pick up the red block",
            "llm_correct": False,
        }
    ]
}
TASKS = [{"id": "a1", "name": "a", "parents": []}, {"id": "b1", "name": "b", "parents": ["a1"]}]
TIMES = [{"id": "b1", "runtimeInSeconds": 2.00049}, {"id": "a1", "runtimeInSeconds": 1}]
WORKFLOW = {"name": "small", "workflow": {"specification": {"tasks": TASKS}, "execution": {"tasks": TIMES}}}


class Server:
    """Serves a few files, counts what is asked, and can break off in the middle of an answer."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.cut = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                span = self.headers.get("Range")
                outer.asked.append((self.path, span))
                text = outer.files.get(self.path)
                if text is None:
                    self.send_error(404)
                    return
                start = int(span.removeprefix("bytes=").removesuffix("-")) if span else 0
                self.send_response(206 if span else 200)
                self.send_header("Content-Length", str(len(text) - start))
                self.end_headers()
                cut, outer.cut = outer.cut, 0
                self.wfile.write(text[start : cut or None])

            def log_message(self, *arguments: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def publish(self, form: Literal["planbench", "workflows"], *documents: object) -> fetch.Dataset:
        """Serve documents as the files of a data set."""
        files = []
        for number, document in enumerate(documents):
            path, text = f"some/where/{number}.json", json.dumps(document).encode()
            self.files[f"/owner/name/c0ffee/{path}"] = text
            files.append((path, len(text), hashlib.sha256(text).hexdigest()))
        return fetch.Dataset(form, "owner/name", "c0ffee", tuple(files))

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    """A server on this machine."""
    made = Server()
    yield made
    made.close()


def test_fetched(tmp_path: Path, server: Server) -> None:
    """What is published is fetched, checked and put into the form that the benchmarks read; once."""
    wanted = {
        "planbench_t6_blocksworld.jsonl": server.publish("planbench", ANSWERS),
        workflows.FILE: server.publish("workflows", WORKFLOW, {**WORKFLOW, "name": "other"}),
    }
    server.files["/owner/name/c0ffee/some/where/0.json"] = json.dumps(ANSWERS).encode()
    told: list[str] = []
    with pytest.raises(fetch.FetchError, match="is not the file that it was"):
        fetch.fetch(tmp_path, host=server.address, wanted=wanted, report=told.append)
    server.files["/owner/name/c0ffee/some/where/0.json"] = json.dumps(WORKFLOW).encode()
    first, second = fetch.fetch(tmp_path, host=server.address, wanted=wanted, report=told.append)

    (instance,) = instances.load(first)
    assert [str(action) for action in instance.plan] == ["pick red", "stack red blue"]
    assert (instance.after, instance.trivial) == (1, False)
    assert instance.holds == {"he", "table(red)"}
    assert instance.ceased == {"hold(red)"}
    assert [workflow.name for workflow in workflows.load(second.parent)] == [
        "small some/where/0.json",
        "other some/where/1.json",
    ]
    assert any(line.startswith("  2/2") for line in told)
    asked = len(server.asked)
    assert fetch.fetch(tmp_path, host=server.address, wanted=wanted) == [first, second]
    assert len(server.asked) == asked
    assert not list((tmp_path / "sources").iterdir())


def test_goes_on_where_it_was_cut_off(tmp_path: Path, server: Server) -> None:
    """A download that breaks off is gone on with where it was, and what was fetched before is not fetched again."""
    wanted = {workflows.FILE: server.publish("workflows", WORKFLOW, {**WORKFLOW, "name": "other"})}
    fetch.fetch(tmp_path / "elsewhere", host=server.address, wanted=wanted)
    server.asked.clear()
    server.cut = 100
    with pytest.raises(fetch.FetchError, match="call it again to go on"):
        fetch.fetch(tmp_path, host=server.address, wanted=wanted)
    fetch.fetch(tmp_path, host=server.address, wanted=wanted)
    assert [span for _, span in server.asked] == [None, "bytes=100-", None]


def test_not_there(tmp_path: Path, server: Server) -> None:
    """A file that is not where it was is named with its address, and nothing is left half made."""
    wanted = {workflows.FILE: server.publish("workflows", WORKFLOW)}
    server.files.clear()
    with pytest.raises(fetch.FetchError, match=r"some/where/0\.json answers 404"):
        fetch.fetch(tmp_path, host=server.address, wanted=wanted)
    assert not (tmp_path / workflows.FILE).exists()


@pytest.mark.parametrize(
    ("form", "document", "why"),
    [
        ("planbench", {"instances": [{**ANSWERS["instances"][0], "query": "[STATEMENT] hello"}]}, "instance 4"),
        ("planbench", {"instances": [{**ANSWERS["instances"][0], "query": QUERY.replace("clear", "blue")}]}, "words"),
        ("workflows", {**WORKFLOW, "workflow": {}}, "specification"),
        ("workflows", json.loads(json.dumps(WORKFLOW).replace('"parents": ["a1"]', '"parents": ["x"]')), "task 'x'"),
    ],
)
def test_of_another_form(
    tmp_path: Path, server: Server, form: Literal["planbench", "workflows"], document: object, why: str
) -> None:
    """A file of another form than it had makes none of ours, and it is said what is wrong with it."""
    with pytest.raises(fetch.FetchError, match=why):
        fetch.fetch(tmp_path, host=server.address, wanted={"file": server.publish(form, document)})
    assert not (tmp_path / "file").exists()


def test_without_network(tmp_path: Path) -> None:
    """Where nothing can be reached, the command says so in a line and ends with 1, and the benchmarks say how to get it."""
    nowhere = "http://127.0.0.1:9"
    command = [sys.executable, "-m", "benchmarks"]
    done = subprocess.run(
        [*command, "fetch", "--data", tmp_path, "--from", nowhere], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr
    left_out = subprocess.run([*command, "workflows", "--data", tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert left_out.returncode == 1
    assert "python -m benchmarks fetch" in left_out.stderr


def test_catalogue() -> None:
    """Everything that the benchmarks read is to be had, each file by its checksum at a whole commit."""
    found = fetch.catalogue()
    assert len(found[workflows.FILE].files) == 104
    for dataset in found.values():
        assert len(dataset.commit) == 40
        assert all(len(checksum) == 64 and size for _, size, checksum in dataset.files)


def test_same_as_before() -> None:
    """Runtimes are kept to the millisecond, and parents are found wherever they stand."""
    text = published.workflows([("w.json", json.dumps(WORKFLOW).encode())])
    assert json.loads(gzip.decompress(text)) == [
        {"name": "small", "file": "w.json", "tasks": [["a", 1.0, []], ["b", 2.0, [0]]]}
    ]
