"""Getting the published data: what is fetched, checked, kept and made of it, from a server on this machine."""

import hashlib
import json
from collections.abc import Iterator
from typing import Literal

import pytest

pytest.importorskip("benchmarks", reason="benchmarks are part of a checkout, not of a distribution")
from benchmarks import fetch, instances, workflows
from tests.support.http_server import Answer, HttpServer, Request

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
WORKFLOW = {
    "name": "small",
    "workflow": {"specification": {"tasks": TASKS}, "execution": {"tasks": TIMES}},
}


class Server(HttpServer):
    """Serves a few files, and can break off in the middle of an answer."""

    def __init__(self) -> None:
        super().__init__(self._serve)
        self.files: dict[str, bytes] = {}
        self.cut = 0

    def _serve(self, request: Request) -> Answer:
        text = self.files.get(request.path)
        if text is None:
            return 404, {}, b""
        span = request.headers.get("range")
        start = int(span.removeprefix("bytes=").removesuffix("-")) if span else 0
        cut, self.cut = self.cut, 0
        return (
            206 if span else 200,
            {"content-length": str(len(text) - start)},
            text[start : cut or None],
        )

    def publish(self, form: Literal["planbench", "workflows"], *documents: object) -> fetch.Dataset:
        """Serve documents as the files of a data set."""
        files = []
        for number, document in enumerate(documents):
            path, text = f"some/where/{number}.json", json.dumps(document).encode()
            self.files[f"/owner/name/c0ffee/{path}"] = text
            files.append((path, len(text), hashlib.sha256(text).hexdigest()))
        return fetch.Dataset(form, "owner/name", "c0ffee", tuple(files))


@pytest.fixture
def server() -> Iterator[Server]:
    """A server on this machine."""
    with Server() as made:
        yield made


def test_fetched(tmp_path, server):
    """What is published is fetched, checked and put into the form that the benchmarks read; once."""
    wanted = {
        "planbench_t6_blocksworld.jsonl": server.publish("planbench", ANSWERS),
        workflows.FILE: server.publish("workflows", WORKFLOW, {**WORKFLOW, "name": "other"}),
    }
    server.files["/owner/name/c0ffee/some/where/0.json"] = json.dumps(ANSWERS).encode()
    told: list[str] = []
    with pytest.raises(fetch.FetchError, match="is not the file that it was"):
        fetch.fetch(tmp_path, host=server.url, wanted=wanted, report=told.append)
    server.files["/owner/name/c0ffee/some/where/0.json"] = json.dumps(WORKFLOW).encode()
    first, second = fetch.fetch(tmp_path, host=server.url, wanted=wanted, report=told.append)

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
    asked = len(server.requests)
    assert fetch.fetch(tmp_path, host=server.url, wanted=wanted) == [first, second]
    assert len(server.requests) == asked
    assert not list((tmp_path / "sources").iterdir())


def test_goes_on_where_it_was_cut_off(tmp_path, server):
    """A download that breaks off is gone on with where it was, and what was fetched before is not fetched again."""
    wanted = {workflows.FILE: server.publish("workflows", WORKFLOW, {**WORKFLOW, "name": "other"})}
    fetch.fetch(tmp_path / "elsewhere", host=server.url, wanted=wanted)
    server.requests.clear()
    server.cut = 100
    with pytest.raises(fetch.FetchError, match="call it again to go on"):
        fetch.fetch(tmp_path, host=server.url, wanted=wanted)
    fetch.fetch(tmp_path, host=server.url, wanted=wanted)
    assert [request.headers.get("range") for request in server.requests] == [
        None,
        "bytes=100-",
        None,
    ]


def test_not_there(tmp_path, server):
    """A file that is not where it was is named with its address, and nothing is left half made."""
    wanted = {workflows.FILE: server.publish("workflows", WORKFLOW)}
    server.files.clear()
    with pytest.raises(fetch.FetchError, match=r"some/where/0\.json answers 404"):
        fetch.fetch(tmp_path, host=server.url, wanted=wanted)
    assert not (tmp_path / workflows.FILE).exists()


@pytest.mark.parametrize(
    ("form", "document", "why"),
    [
        (
            "planbench",
            {"instances": [{**ANSWERS["instances"][0], "query": "[STATEMENT] hello"}]},
            "instance 4",
        ),
        (
            "planbench",
            {"instances": [{**ANSWERS["instances"][0], "query": QUERY.replace("clear", "blue")}]},
            "words",
        ),
        ("workflows", {**WORKFLOW, "workflow": {}}, "specification"),
        (
            "workflows",
            json.loads(json.dumps(WORKFLOW).replace('"parents": ["a1"]', '"parents": ["x"]')),
            "task 'x'",
        ),
    ],
)
def test_of_another_form(
    tmp_path,
    server,
    form,
    document,
    why,
):
    """A file of another form than it had makes none of ours, and it is said what is wrong with it."""
    with pytest.raises(fetch.FetchError, match=why):
        fetch.fetch(tmp_path, host=server.url, wanted={"file": server.publish(form, document)})
    assert not (tmp_path / "file").exists()
