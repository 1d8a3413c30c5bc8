"""The kind `http`, against a real server."""

import gzip
import itertools
import json
import socket
import threading
import tracemalloc
import zlib
from collections.abc import Iterator

import anyio
import anyio.abc
import pytest

from replanning.errors import TransientError
from replanning.tools import (
    HttpConnectionLost,
    HttpStatusFailed,
    HttpUnreachable,
    InvalidArguments,
    InvalidTool,
    ToolExecutor,
    ToolOutputTooLarge,
    TransientHttpStatusFailed,
)
from tests.support.http_server import Answer, HttpServer, Request
from tests.support.tools import PATIENCE, Attempt, spec, task, use


@pytest.fixture
def server() -> Iterator[HttpServer]:
    """A server that is stopped after the test."""
    with HttpServer() as running:
        yield running


def http(url: str, **fields: object):
    """An HTTP tool with this address."""
    return spec(kind="http", url=url, **fields)


async def test_answer_in_json(server):
    """An answer has its status, the headers of interest, its JSON, and what the tool produces."""
    server.answer_json({"id": 7, "tags": []}, status=201, etag='"e"', x_other="no")
    output = await use(http(f"{server.url}/things", method="POST", produces=["id", "other"]))
    assert output == {
        "status": 201,
        "headers": {"content-type": "application/json", "etag": '"e"'},
        "json": {"id": 7, "tags": []},
        "id": 7,
    }


@pytest.mark.parametrize(
    ("content_type", "body", "part"),
    [
        ("text/plain; charset=iso-8859-1", b"caf\xe9", {"text": "caf\xe9"}),
        ("text/plain", "café".encode(), {"text": "café"}),
        ("text/plain", b"\xff", {"text": "\ufffd", "undecodable": ["text"]}),
        ("text/plain; charset=unicode_escape", rb"\ud800", {"text": r"\ud800"}),
        ("application/problem+json", b"[1]", {"json": [1]}),
        ("application/json", b"null", {"json": None}),
        ("application/json", b"{oops", {"text": "{oops"}),
        ("text/html", b"[1]", {"text": "[1]"}),
    ],
)
async def test_answers_of_all_sorts(server, content_type, body, part):
    """What is not JSON is text, in the character set that the server states."""
    server.answer = lambda request: (200, {"content-type": content_type}, body)
    output = await use(http(server.url))
    del output["status"], output["headers"]
    assert output == part


async def test_request(server):
    """Arguments stand in the address as text, in the body with their types; a stated type of the body is kept."""
    tool = http(
        server.url + "/{team}/x?q={q}&all={flag}",
        method="post",
        headers={"X-Team": "team {team}"},
        body={"whole": "{list}", "part": "{team}/{n}", "fixed": [1, None, "{{n}}"]},
    )
    await use(tool, {"team": "a/b c", "q": "ä&b=c", "flag": True, "list": [1, {"a": None}], "n": 2})
    (seen,) = server.requests
    assert (seen.method, seen.path) == ("POST", "/a%2Fb%20c/x?q=%C3%A4%26b%3Dc&all=true")
    assert seen.headers["x-team"] == "team a/b c"
    assert seen.headers["content-type"] == "application/json"
    assert json.loads(seen.body) == {
        "whole": [1, {"a": None}],
        "part": "a/b c/2",
        "fixed": [1, None, "{n}"],
    }
    await use(
        http(
            server.url,
            method="POST",
            headers={"content-type": "application/json-patch+json"},
            body=[],
        )
    )
    assert server.requests[1].headers["content-type"] == "application/json-patch+json"


@pytest.mark.parametrize(
    ("method", "headers", "key"),
    [
        ("POST", {}, "k%20%C3%A4/1"),
        ("DELETE", {}, "k%20%C3%A4/1"),
        ("GET", {}, None),
        ("PUT", {"idempotency-key": "own"}, "own"),
    ],
)
async def test_idempotency_key(server, method, headers, key):
    """Requests that change something carry the idempotency key, unless the tool states its own."""
    await use(
        http(server.url, method=method, headers=headers), attempt=Attempt(idempotency_key="k ä/1")
    )
    assert server.requests[0].headers.get("idempotency-key") == key


async def test_idempotency_header(server):
    """A tool names another header for the key, or puts the key where it wants it, also for a reading request."""
    attempt = Attempt(idempotency_key="run/pay")
    await use(http(server.url, method="POST", idempotency_header="X-Request-Key"), attempt=attempt)
    body = {"key": "{idempotency_key}"}
    await use(http(server.url, method="POST", body=body), attempt=attempt)
    assert server.requests[0].headers["x-request-key"] == "run/pay"
    assert "idempotency-key" not in server.requests[0].headers
    assert json.loads(server.requests[1].body) == {"key": "run/pay"}


async def test_secrets_travel_late(server):
    """Variables are looked up in headers, address and body, and the output has what the server answered."""
    server.answer = lambda request: (
        200,
        {},
        f"{request.path} {request.headers['authorization']} {request.body.decode()}".encode(),
    )
    tool = http(
        server.url + "/?key={env:TOKEN}",
        method="POST",
        headers={"Authorization": "Bearer {env:TOKEN}"},
        body="{env:TOKEN}",
    )
    output = await use(tool, environ={"TOKEN": "s3 cr3t"})
    assert server.requests[0].path == "/?key=s3%20cr3t"
    assert server.requests[0].headers["authorization"] == "Bearer s3 cr3t"
    assert output["text"] == '/?key=s3%20cr3t Bearer s3 cr3t "s3 cr3t"'


async def test_arguments_are_no_templates(server):
    """An argument that looks like a reference to a secret stays that text."""
    tool = http(server.url, method="POST", headers={"X": "{a}"}, body=["{a}", "<{a}>"])
    await use(tool, {"a": "{env:TOKEN}{b}", "b": "no"}, environ={"TOKEN": "s3cr3t"})
    assert server.requests[0].headers["x"] == "{env:TOKEN}{b}"
    assert json.loads(server.requests[0].body) == ["{env:TOKEN}{b}", "<{env:TOKEN}{b}>"]


async def test_address_from_elsewhere(server):
    """The whole address may come from an argument where no secret is sent, its start from the environment."""
    await use(http("{url}"), {"url": server.url + "/a?b=c"})
    await use(http("{env:BASE}/a"), environ={"BASE": server.url})
    assert [seen.path for seen in server.requests] == ["/a?b=c", "/a"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "it needs a `url`"),
        ({"url": "ftp://x/"}, "must begin with http:// or https:// and a host"),
        ({"url": "http:///x"}, "must begin with http:// or https:// and a host"),
        ({"url": "http://x/a b"}, "holds blanks"),
        ({"url": "http://x/", "method": "GET /"}, "its method 'GET /' is not one of HTTP"),
        ({"url": "http://x/", "headers": {"a b": "c"}}, "'a b' cannot be the name of a header"),
        ({"url": "http://x/", "headers": {"a": "b\nc"}}, "its header 'a' holds control characters"),
        ({"url": "http://x/", "body": {}}, "it has a body, which GET does not send"),
        ({"url": "http://x/", "method": "POST", "body": "a\0"}, "its body holds the character NUL"),
        (
            {"url": "http://x/", "method": "POST", "body": [{"{u}": 1}]},
            "has {u} in the name of a member, where nothing is",
        ),
        ({"url": "{u}/x", "headers": {"Authorization": "abc"}}, "lets an argument choose the host"),
        ({"url": "http://{u}.x/", "headers": {"X": "{env:T}"}}, "lets an argument choose the host"),
    ],
)
async def test_descriptions_that_are_refused(fields, message):
    """A description that makes no request, or would hand out secrets, is refused."""
    with pytest.raises(InvalidTool) as caught:
        await use(spec(kind="http", **fields), {"u": "x"}, environ={"T": "token"})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("url", "value", "message"),
    [
        ("http://x/{v}", "", "'v' is empty, which would make another path"),
        ("http://x/a/{v}", "..", "leads out of its path"),
        ("http://x/a/.{v}/", ".", "leads out of its path"),
        ("http://x/{v}", ["a"], "'v' is a list, which cannot be filled in there"),
        ("http://x/{v}", {"a": 1}, "'v' is an object, which cannot be filled in there"),
        ("http://x/?q={v}", None, "'v' is null"),
        ("{v}", "file:///etc/passwd", "not an http:// or https:// address"),
        ("{v}", "http://x/ y", "not an http:// or https:// address"),
        ("http://{v}/", "x/y", "not an http:// or https:// address"),
        ("http://127.0.0.1:{v}/", 99999, "not an http:// or https:// address"),
        ("http://127.0.0.1:{v}/", "abc", "not an http:// or https:// address"),
        ("http://\u2603.x/{v}", "a", "Invalid IDNA hostname"),
        ("http://{v}.x/", "a@evil", "not an http:// or https:// address"),
    ],
)
async def test_values_that_do_not_fit_the_address(url, value, message):
    """A value that would lead to another address than the tool describes is refused."""
    with pytest.raises(InvalidArguments) as caught:
        await ToolExecutor([http(url)])(
            task().model_copy(update={"arguments": {"v": value}}), Attempt()
        )
    assert message in str(caught.value)


async def test_header_injection():
    """A value with a line end cannot become a header of its own."""
    with pytest.raises(InvalidArguments, match="the header 'X' would hold a line end"):
        await use(http("http://x/", headers={"X": "{v}"}), {"v": "a\r\nY: b"})


@pytest.mark.parametrize(
    ("statuses", "declared", "transient"),
    [
        ((304, 400, 401, 404, 409, 500), [], False),
        ((404, 500), [404, 500], True),
        ((408, 425, 429, 503), [], True),
    ],
)
async def test_statuses(server, statuses, declared, transient):
    """A status that is no success is an error; those of a busy server, or declared so, may pass."""
    for status in statuses:
        server.answer_json(status=status)
        with pytest.raises(HttpStatusFailed) as caught:
            await use(http(server.url, transient=declared))
        assert (caught.value.status, isinstance(caught.value, TransientError)) == (
            status,
            transient,
        )


async def test_accepted_statuses(server):
    """A status that the tool accepts is a result, also one that could pass."""
    for status in (404, 503):
        server.answer_json({"found": False}, status=status)
        output = await use(http(server.url, accepted=[404, 503]))
        assert isinstance(output, dict)
        assert (output["status"], output["json"]) == (status, {"found": False})


async def test_failure_says_what_the_server_said(server):
    """The error names tool, request, status, request id and the answer, without secrets."""
    server.answer_json(
        "bad key s3cr3t, header was literal-9", status=503, x_request_id="r-1", retry_after="2"
    )
    tool = http(server.url + "/?k={env:K}", headers={"authorization": "Bearer literal-9"})
    with pytest.raises(TransientHttpStatusFailed) as caught:
        await use(tool, environ={"K": "s3cr3t"})
    error = caught.value
    assert (error.request_id, error.retry_after) == ("r-1", 2.0)
    assert error.response_text == '"bad key [redacted], header was [redacted]"'
    assert str(error) == (
        f"tool 't': GET {server.url}/?k=[redacted] answered 503; request id r-1; it asks to wait 2 s: "
        + error.response_text
    )


@pytest.mark.parametrize(
    ("after", "seconds"),
    [
        ("Wed, 21 Oct 2015 07:28:30 GMT", 30.0),
        ("Wed, 21 Oct 2015 07:27:00 GMT", 0.0),
        ("soon", None),
        ("9" * 400, None),
        ("Wed, 21 Oct 99999999 07:27:00 GMT", None),
        ("-1", None),
    ],
)
async def test_retry_after(server, after, seconds):
    """A time to try again is read against the clock of the server that names it."""
    server.answer = lambda request: (
        429,
        {"retry-after": after, "date": "Wed, 21 Oct 2015 07:28:00 GMT"},
        b"",
    )
    with pytest.raises(TransientHttpStatusFailed) as caught:
        await use(http(server.url))
    assert caught.value.retry_after == seconds


async def test_redirect_on_the_same_host(server):
    """A redirect that only reads and stays on its host is followed."""
    server.answer = lambda request: (
        (302, {"location": "/b"}, b"") if request.path == "/a" else (200, {}, b"there")
    )
    assert (await use(http(server.url + "/a")))["text"] == "there"


@pytest.mark.parametrize(
    ("method", "location"),
    [
        ("GET", "http://other.invalid/"),
        ("GET", "file:///etc/passwd"),
        ("POST", "/b"),
        ("GET", "/a"),
        ("GET", "http://["),
    ],
    ids=["another host", "another scheme", "not reading", "for ever", "no address"],
)
async def test_redirects_that_are_not_followed(server, method, location):
    """Any other redirect is an error that says where it leads."""
    server.answer = lambda request: (302, {"location": location}, b"")
    with pytest.raises(
        HttpStatusFailed, match=r"it redirects to '.*'; if that is right, make it the `url`"
    ):
        await use(http(server.url + "/a", method=method, headers={"Authorization": "Bearer abc"}))
    assert len(server.requests) <= 6


async def test_nobody_there(server):
    """A server that cannot be reached is an error that may pass; one that breaks its answer off leaves doubt."""
    server.answer = lambda request: (200, {"content-length": "100"}, b"only this")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    for url, kind in ((f"{nobody}/x", HttpUnreachable), (f"{server.url}/x", HttpConnectionLost)):
        with pytest.raises(kind) as caught:
            await use(http(url))
        assert f"tool 't': GET {url} got no answer: " in str(caught.value)
        assert isinstance(caught.value, TransientError) is not caught.value.in_doubt


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(b"text", mtime=0)),
        ("deflate", zlib.compress(b"text")),
        ("identity", b"text"),
    ],
)
async def test_packed_answers(server, encoding, body):
    """Answers may come packed in the ways that we say we can unpack."""
    server.answer = lambda request: (200, {"content-encoding": encoding}, body)
    assert (await use(http(server.url)))["text"] == "text"
    assert server.requests[0].headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, itertools.repeat(b"x" * 1_000)),
        ({"content-encoding": "gzip"}, [gzip.compress(bytes(20_000_000))]),
    ],
    ids=["without end", "large when unpacked"],
)
async def test_large_answers(server, headers, body):
    """An answer above the limit, packed or not, is an error before it fills the memory."""
    server.answer = lambda request: (200, headers, body)
    tracemalloc.start()
    try:
        with pytest.raises(ToolOutputTooLarge, match="the answer exceeded 100000 bytes"):
            await use(http(server.url), output_limit=100_000)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


async def test_cancelled_request(server):
    """A request that is cancelled ends at once, whatever the server does."""
    asked, free = threading.Event(), threading.Event()

    def wait(request: Request) -> Answer:
        asked.set()
        free.wait(PATIENCE)
        return 200, {}, b""

    server.answer = wait
    try:
        async with ToolExecutor([http(server.url)]) as executor, anyio.create_task_group() as group:
            group.start_soon(executor, task(), Attempt())
            assert await anyio.to_thread.run_sync(asked.wait, PATIENCE)
            group.cancel_scope.cancel()
    finally:
        free.set()


async def test_connections_are_shared_and_closed(server):
    """One executor asks many times, also after it was closed, and keeps no cookies from one task to the next."""
    server.answer_json({}, set_cookie="a=b; Path=/")
    executor = ToolExecutor([http(server.url)])
    for _ in range(2):
        async with executor:
            await executor(task(), Attempt())
            await executor(task(), Attempt())
    assert ["cookie" in seen.headers for seen in server.requests] == [False] * 4
