"""What a failure leaves behind for the person who looks for its cause."""

from __future__ import annotations

import io
import logging
import socket
import subprocess
import sys
from contextlib import closing

import anyio

from replanning import Plan, ReplanningEngine, Settings, open_run
from replanning.journal import AttemptFailed, Failure, MemoryStore, SqliteStore
from replanning.journal.records import load_body
from replanning.testing import ScriptedProvider
from replanning.tools import ToolExecutor
from tests.support.cli import answer, cli
from tests.support.resume import RUN
from tests.support.runs import bodies, chain
from tests.support.tracing import Spans

SECRET = "hunter2hunter2hunter2"
LOG = logging.getLogger("replanning")


async def look_up(task, context):
    """Fail within a task group, with a secret in a variable, in a line of source and in the message of the cause."""
    secret = SECRET
    try:
        {}["hunter2" + f"{secret}"]
    except KeyError as error:
        async with anyio.create_task_group():
            password = "sk-abcdefghijklmnopqrstuvwxyz"  # noqa: F841
            raise KeyError("url") from error


def check(text: str) -> None:
    """The frames of the work and of its cause are shown, and none of a library, and no secret."""
    assert "in look_up" in text
    assert 'raise KeyError("url") from error' in text
    assert "direct cause of the following exception" in text
    assert "KeyError: 'url'" in text
    assert not any(
        hidden in text for hidden in ("anyio/", "replanning/run/", "hunter2hunter2", "sk-abc")
    ), text


async def test_a_traceback_is_shown(tmp_path, caplog):
    """The journal, the log, the span, `why` and `status` show the traceback of a failed attempt, and a key's type."""
    spans = Spans()
    settings = Settings.model_validate({"redaction": {"patterns": [SECRET]}})
    provider = ScriptedProvider([[]])
    with closing(SqliteStore(tmp_path / "h.db")) as store:
        engine = ReplanningEngine(
            [provider], store=store, settings=settings, tracer_provider=spans.provider
        )
        result = await engine.execute(chain("a"), look_up)
        (failed,) = bodies(store, result.run, AttemptFailed)
    assert result.reason.endswith("(1 sub-exception): KeyError: 'url')")
    (event,) = [event for span in spans.finished for event in span.events]
    for arguments in (["why"], ["status", result.run]):
        check(cli(tmp_path, *arguments, "--store", "h.db").stdout)
    check(answer(tmp_path, "why", "--store", "h.db")["triggers"][0]["traceback"])
    check(answer(tmp_path, "status", result.run, "--store", "h.db")["failed"][0]["traceback"])
    for text in (
        failed.failure.traceback,
        caplog.text,
        str((event.attributes or {})["exception.stacktrace"]),
    ):
        check(text)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_a_service_that_does_not_answer():
    """The failure of an HTTP tool tells the reason, and shows no frames of the client."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    plan = Plan.parse(
        f"""
        goal: {{objective: Ask}}
        tools: [{{name: ask, kind: http, url: "{nobody}"}}]
        tasks: [{{id: a, tool: ask, retry: {{max_attempts: 1}}}}]
        """
    )
    store = MemoryStore()
    async with ToolExecutor(plan) as work:
        result = await ReplanningEngine([], store=store).execute(plan, work)
    (failed,) = bodies(store, result.run, AttemptFailed)
    assert "got no answer" in failed.failure.message
    assert failed.failure.traceback == ""


def cut_off(place: int) -> None:
    """Fail without a word about what had failed before."""
    try:
        raise OSError("never told")
    except OSError:
        error = ValueError(f"part {place}")
        error.add_note(f"noted {place}")
        raise error from None


async def fail_in_parts(task, context):
    """Fail with a group whose parts were raised and not raised, after another error."""
    parts: list[Exception] = [KeyError("unraised")]
    for place in (1, 2):
        try:
            cut_off(place)
        except ValueError as error:
            parts.append(error)
    try:
        exec("raise LookupError('first')")  # nobody can show this line
    except LookupError:
        group = ExceptionGroup("in parts", parts)
        parts[1].__context__ = group  # as of a part that is raised again while its group is handled
        parts[1].__suppress_context__ = False
        raise group  # noqa: B904 - an error that happens while another one is handled


async def test_tracebacks_of_groups():
    """A traceback shows what was handled, then the group, then its parts that were raised, each of them once."""
    store = MemoryStore()
    result = await ReplanningEngine([], store=store).execute(chain("a"), fail_in_parts)
    (failed,) = bodies(store, result.run, AttemptFailed)
    text = failed.failure.traceback
    lines = [line for line in text.splitlines() if line]
    places = [
        lines.index(line)
        for line in (
            "LookupError: first",
            "During handling of the above exception, another exception occurred:",
            "ExceptionGroup: in parts (3 sub-exceptions)",
            "  | ValueError: part 1",
            "  | noted 1",
            "  | ValueError: part 2",
        )
    ]
    assert places == sorted(places)
    assert [text.count(name) for name in ("in parts (3", "unraised", "never told")] == [1, 0, 0]
    assert text.count("  |     raise error from None") == 2


async def test_long_and_missing_tracebacks():
    """A long traceback keeps its ends without half a secret; an error that was not raised, or an older journal, has none."""
    store = MemoryStore()
    long = "x" * 10 + "y" * 1_980 + " sk-" + "a" * 40 + " y" * 4_500 + "end"
    async with open_run(chain("a", "b"), store=store, run_id=RUN) as run:
        run.failed(run.started("a"), Failure("Odd", "long", traceback=long))
    (failed,) = bodies(store, RUN, AttemptFailed)
    shown = failed.failure.traceback
    assert (shown[:10], shown[-3:], "sk-" in shown, len(shown) < 4_100) == (
        "x" * 10,
        "end",
        False,
        True,
    )
    older = load_body(
        "attempt-failed", '{"attempt":"a#1","task":"a","failure":{"type":"E","message":"m"}}'
    )
    assert isinstance(older, AttemptFailed)
    assert (older.failure.traceback, str(older.failure)) == ("", "E: m")


async def test_no_log_record_that_nobody_reads(monkeypatch):
    """A failed attempt makes a log record where a handler takes it, and none where the program has no handlers."""
    made: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("replanning.run"), "filters", [made.append])
    for handlers, count in (([], 0), ([logging.StreamHandler(io.StringIO())], 1)):
        monkeypatch.setattr(logging.root, "handlers", handlers)
        async with open_run(chain("a")) as run:
            run.failed(run.started("a"), "broken")
        assert len(made) == count


def test_silent_unless_logging_is_set_up():
    """A program that has not set up logging sees nothing on standard error; with `basicConfig` it sees what happened."""
    for setting, silent in (("", True), ("logging.basicConfig()", False)):
        program = f"import logging, replanning\n{setting}\nlogging.getLogger('replanning.run').error('it broke')"
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
        )
        assert (done.stderr == "") is silent
