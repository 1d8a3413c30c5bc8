"""Outputs that are no JSON: they come back as they were, in this process and after a resume, or say why they do not."""

import asyncio  # noqa: TID251 - its futures are outputs here
import json
import logging
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Self
from uuid import UUID
from zoneinfo import ZoneInfo

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from replanning import Plan, ReplanningEngine, Task, TaskContext, tool
from replanning.errors import CallFailed
from replanning.journal import AttemptSucceeded, PlanRevised, SqliteStore
from replanning.journal.values import decode, encode
from replanning.secrets import Redactor
from tests.support.runs import bodies

READER = Plan.model_validate(
    {
        "goal": {"objective": "read a value"},
        "tasks": [{"id": "make"}, {"id": "read", "depends_on": ["make"]}],
    }
)

VALUES = (
    date(2026, 1, 31),
    time(12, 30, tzinfo=UTC),
    datetime(2026, 1, 31, 12),  # noqa: DTZ001 - values without a zone as well
    datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
    datetime(2026, 1, 31, tzinfo=timezone(timedelta(hours=5, minutes=30))),
    timedelta(days=-1, seconds=3, microseconds=7),
    Decimal("1.10"),
    UUID(int=7),
    Path("reports/january.pdf"),
    PurePosixPath("/srv"),
    PureWindowsPath("C:\\srv"),
    {1, "a", (2, 3)},
    frozenset({Decimal(1)}),
    (1, [2, (3,)]),
    b"\x00\xff",
    float("inf"),
    10**400,
    {1: "one", None: "none", (1, 2): "pair"},
    "half \ud800 a character",
    {"\ud800": 1},
    {"$replanning": "date", "value": "2026-01-31"},
    {"deep": [{"$replanning": {"at": date(2026, 1, 1)}}]},
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
TABLE = (
    st.dates()
    | st.times()
    | st.datetimes()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.binary(max_size=20)
    | st.frozensets(st.integers() | st.text(), max_size=4)
)
ANY = st.recursive(
    JSON | TABLE,
    lambda inner: (
        st.tuples(inner, inner)
        | st.lists(inner, max_size=3)
        | st.dictionaries(st.integers() | st.text() | st.dates(), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$replanning", "value"]), inner)
    ),
    max_leaves=6,
)


class Connection:
    """An object that nothing can store."""


async def stop_after(store: Path, plan: Plan, outputs: Mapping[str, object]) -> None:
    """Run the tasks that have outputs, and leave the run before the others."""
    engine = ReplanningEngine(store=SqliteStore(store))
    async with engine.open(plan, run_id="r") as run:
        left = set(outputs)
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = outputs[task.id]
            left.discard(task.id)
            if not left:
                break
    await engine.aclose()


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
async def test_value_comes_back_as_it_was(value: object, tmp_path: Path) -> None:
    """A value of the standard library reaches dependents as it was, in its process and after a resume."""
    seen: list[object] = []

    async def work(task: Task, context: TaskContext) -> object:
        if task.id == "make":
            return value
        seen.append(context.results["make"])
        return "read"

    result = await ReplanningEngine().execute(READER, work)
    await stop_after(tmp_path / "r.db", READER, {"make": value})
    engine = ReplanningEngine(store=SqliteStore(tmp_path / "r.db"))
    resumed = await engine.execute(READER, work, run_id="r")
    await engine.aclose()
    for found in (*seen, result.outputs["make"], resumed.outputs["make"]):
        assert found == value
        assert type(found) is type(value)
    assert len(seen) == 2


@given(ANY)
def test_every_value_of_the_table_survives_the_store(value: object) -> None:
    """Decoding the JSON text of an encoded value gives an equal value of the same kinds."""
    stored = json.loads(json.dumps(encode(value, Redactor()).value))
    found = decode(stored)
    assert found == value
    assert type(found) is type(value)


@given(JSON)
def test_plain_json_has_no_tags(value: Any) -> None:
    """What is JSON already is stored as it is, so older journals read the same."""
    encoded = encode(value, None)
    if encoded.is_plain:
        assert encoded.value == value == decode(value)


async def test_reference_and_condition_see_the_json_form() -> None:
    """References and conditions see dates as ISO texts, sets as sorted lists, and objects as their fields."""

    @dataclass
    class Order:
        due: date
        tags: set[str]
        state: Enum

    class State(Enum):
        OPEN = "open"

    plan = Plan.model_validate(
        {
            "goal": {"objective": "g"},
            "tasks": [
                {"id": "make"},
                {
                    "id": "read",
                    "depends_on": ["make"],
                    "when": 'results.make.due == "2026-01-31" and "a" in results.make.tags',
                    "arguments": {
                        "order": "${make.output}",
                        "due": "by ${make.output.due}",
                        "tag": "${make.output.tags}",
                    },
                },
            ],
        }
    )
    arguments: list[object] = []

    async def work(task: Task, context: TaskContext) -> object:
        if task.id == "make":
            return Order(date(2026, 1, 31), {"b", "a"}, State.OPEN)
        arguments.append(task.arguments)
        return None

    result = await ReplanningEngine().execute(plan, work)
    order = {"due": "2026-01-31", "tags": ["a", "b"], "state": "open"}
    assert result.ok, result.reason
    assert arguments == [{"order": order, "due": "by 2026-01-31", "tag": ["a", "b"]}]


async def test_parts_of_an_output_are_looked_up_in_its_json_form() -> None:
    """References and conditions find members by the texts of their keys, and the items of a set by their order."""
    plan = Plan.model_validate(
        {
            "goal": {"objective": "g"},
            "tasks": [
                {"id": "make"},
                {
                    "id": "read",
                    "depends_on": ["make"],
                    "when": 'results.make["7"] == "seven" and results.make.ids[0] == 1',
                    "arguments": {
                        "day": '${make.output["2026-01-31"]}',
                        "id": "${make.output.ids[1]}",
                    },
                },
            ],
        }
    )

    async def work(task: Task, context: TaskContext) -> object:
        if task.id == "make":
            return {(1, object): "no key", 7: "seven", date(2026, 1, 31): "last", "ids": {2, 1}}
        return task.arguments

    result = await ReplanningEngine().execute(plan, work)
    assert result.ok, result.reason
    assert result.outputs["read"] == {"day": "last", "id": 2}


async def test_reference_to_what_has_no_json_form_says_so() -> None:
    """A reference to an object without a JSON form fails its task before the work, and names the reference and the type."""
    plan = Plan.model_validate(
        {
            "goal": {"objective": "g"},
            "tasks": [
                {"id": "make"},
                {"id": "read", "depends_on": ["make"], "arguments": {"x": "${make.output}"}},
            ],
        }
    )

    async def work(task: Task, context: TaskContext) -> object:
        assert task.id == "make"
        return Connection()

    result = await ReplanningEngine().execute(plan, work)
    assert result.status == "failed"
    assert "${make.output}" in result.failures["read"].message
    assert "Connection has no JSON form" in result.failures["read"].message


class Level(Enum):
    LOW = 1


class Report(BaseModel):
    title: str
    at: datetime


@dataclass
class Part:
    number: int
    level: Level


def make_report() -> Report:
    """Return a model."""
    return Report(title="January", at=datetime(2026, 1, 31, tzinfo=UTC))


def make_parts() -> list[Part]:
    """Return dataclasses with an Enum."""
    return [Part(1, Level.LOW)]


def read(value: object = None) -> str:
    """Return a text."""
    return "read"


class Status(StrEnum):
    """State of an order."""

    OPEN = "open"


class Priority(IntEnum):
    """Priority of an order."""

    HIGH = 2


def make_status() -> Status:
    """Return a text that is a member of an Enum."""
    return Status.OPEN


def make_orders() -> dict[str, tuple[Status, Priority]]:
    """Return members of Enums in containers."""
    return {"a": (Status.OPEN, Priority.HIGH)}


def make_anything() -> dict[str, Any]:
    """Return a member of an Enum that the annotation does not name."""
    return {"status": Status.OPEN}


@pytest.mark.parametrize("function", [make_report, make_parts, make_status, make_orders])
async def test_annotated_objects_come_back(function: Any, tmp_path: Path) -> None:
    """An object that the return annotation of its function names comes back after a resume."""
    plan = Plan.model_validate(
        {
            "goal": {"objective": "g"},
            "tasks": [
                {"id": "make", "tool": function.__name__},
                {"id": "read", "tool": "read", "depends_on": ["make"]},
            ],
        }
    )

    async def work(task: Task, context: TaskContext) -> object:
        return function() if task.id == "make" else context.results["make"]

    engine = ReplanningEngine(store=SqliteStore(tmp_path / "r.db"))
    with pytest.raises(EOFError):  # noqa: PT012 - the session must be left by it
        async with engine.session(plan, tools=[function, read], run_id="r") as session:
            await session.run.perform("make", work)
            assert engine.history("r").unstored == {}
            raise EOFError
    await engine.aclose()
    engine = ReplanningEngine(store=SqliteStore(tmp_path / "r.db"))
    async with engine.session(plan, tools=[function, read], run_id="r") as session:
        made = await session.run.perform("make", work)
        assert made == function()
        if function is not make_report:  # pydantic has a class of its own for time zones
            assert repr(made) == repr(function())
        assert await session.run.perform("read", work) == function()
    await engine.aclose()


async def test_member_of_an_enum_without_an_annotation_is_stored_as_its_text(
    tmp_path: Path,
) -> None:
    """Where no annotation names the Enum, a member that is a text comes back as that text."""
    plan = Plan.model_validate(
        {"goal": {"objective": "g"}, "tasks": [{"id": "make", "tool": "make_anything"}]}
    )
    engine = ReplanningEngine(store=SqliteStore(tmp_path / "r.db"))
    await engine.execute(plan, tools=[make_anything], run_id="r")
    again = await engine.execute(plan, tools=[make_anything], run_id="r")
    await engine.aclose()
    assert again.outputs["make"] == {"status": "open"}
    assert type(again.outputs["make"]["status"]) is str


async def test_other_objects_reach_dependents_and_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An object that cannot be stored reaches dependents and the result; one warning names it, and the journal says so."""
    connection = Connection()
    seen: list[object] = []

    async def work(task: Task, context: TaskContext) -> object:
        if task.id == "make":
            return {"connection": connection}
        seen.append(context.results["make"]["connection"])
        return "read"

    engine = ReplanningEngine(store=SqliteStore(tmp_path / "runs.db"))
    with caplog.at_level(logging.WARNING, "replanning"):
        result = await engine.execute(READER, work, run_id="r")
    told = [record.getMessage() for record in caplog.records]
    assert seen == [connection]
    assert result.outputs["make"] == {"connection": connection}
    assert result.reason == "every required task is done"
    assert len(told) == 1
    assert "'make' is not stored" in told[0]
    (made, _) = bodies(engine.store, "r", AttemptSucceeded)
    assert isinstance(made, AttemptSucceeded)
    assert not made.recoverable
    assert "holds a Connection" in made.unstored
    assert engine.history("r").unstored == {"make": made.unstored}
    await engine.aclose()


@pytest.mark.parametrize("refers", [True, False])
@pytest.mark.parametrize("repeatable", [True, False])
async def test_resume_of_an_output_that_was_not_stored(
    tmp_path: Path, *, refers: bool, repeatable: bool
) -> None:
    """After a resume, a task whose output is needed runs again if that does no harm; else its readers are told why."""
    arguments = {"x": "${make.output.name}"} if refers else {}
    plan = Plan.model_validate(
        {
            "goal": {"objective": "g"},
            "tasks": [
                {"id": "source", "idempotent": True},
                {
                    "id": "make",
                    "depends_on": ["source"],
                    "idempotent": repeatable,
                },
                {"id": "other", "idempotent": True},
                {"id": "read", "depends_on": ["make"], "arguments": arguments},
            ],
        }
    )
    lost = Connection()
    given_up = {"source": lost, "make": {"name": "n", "lost": lost}, "other": lost}
    await stop_after(tmp_path / "r.db", plan, given_up)
    done: list[str] = []
    told: list[str] = []

    async def work(task: Task, context: TaskContext) -> object:
        done.append(task.id)
        if task.id != "read":
            return given_up[task.id]
        try:
            assert context.results["make"]["lost"] is lost
        except KeyError as error:
            told.append(str(error))
        return "read"

    engine = ReplanningEngine(store=SqliteStore(tmp_path / "r.db"))
    result = await engine.execute(plan, work, run_id="r")
    revised = bodies(engine.store, "r", PlanRevised)
    await engine.aclose()
    if repeatable:
        assert done == ["source", "make", "read"]
        assert [body.by for body in revised if isinstance(body, PlanRevised)] == ["resume"]
        assert not told
    elif refers:
        assert done == []
        assert result.status == "failed"
        assert "its output was not stored" in result.failures["read"].message
    else:
        assert done == ["read"]
        assert "its output was not stored: it holds a Connection" in told[0]
        with pytest.raises(KeyError, match="was not stored"):
            result.outputs["make"]


@pytest.mark.parametrize("condition", ["results.make == 1", "'make' in results"])
async def test_condition_about_an_output_that_was_not_stored(
    tmp_path: Path, condition: str
) -> None:
    """After a resume, a condition about an output that was not stored fails its task with the reason."""
    tasks = [{"id": "make"}, {"id": "read", "depends_on": ["make"], "when": condition}]
    plan = Plan.model_validate({"goal": {"objective": "g"}, "tasks": tasks})
    await stop_after(tmp_path / "r.db", plan, {"make": Connection()})

    async def work(task: Task, context: TaskContext) -> object:
        return task.id

    engine = ReplanningEngine(store=SqliteStore(tmp_path / "r.db"))
    result = await engine.execute(plan, work, run_id="r")
    await engine.aclose()
    assert result.status == "failed"
    assert "its output was not stored" in result.failures["read"].message


async def test_indirect_reader_waits_for_the_repeated_task(tmp_path: Path) -> None:
    """A task that reads a lost output and follows its task through others waits until it was made again."""
    plan = Plan.model_validate(
        {
            "goal": {"objective": "g"},
            "tasks": [
                {"id": "make", "idempotent": True},
                {"id": "hold", "depends_on": ["make"]},
                {"id": "read", "depends_on": ["hold"], "arguments": {"x": "${make.output.name}"}},
            ],
        }
    )
    made = {"name": "n", "lost": Connection()}
    await stop_after(tmp_path / "r.db", plan, {"make": made, "hold": None})
    arguments: list[object] = []

    async def work(task: Task, context: TaskContext) -> object:
        arguments.append(task.arguments)
        await anyio.wait_all_tasks_blocked()  # until others would have begun
        return made

    engine = ReplanningEngine(store=SqliteStore(tmp_path / "r.db"))
    result = await engine.execute(plan, work, run_id="r")
    await engine.aclose()
    assert result.ok, result.reason
    assert arguments == [{}, {"x": "n"}]


@pytest.mark.parametrize("holds", [lambda made: made, lambda made: {"rows": [made]}])
async def test_forgotten_await_is_a_failure(holds: Callable[[object], object]) -> None:
    """A coroutine or an async generator as output, or in it, fails the attempt, which asks whether `await` was forgotten."""

    async def fetch() -> int:
        return 1

    async def stream() -> AsyncIterator[int]:
        yield 1

    for made, kind in ((fetch, "a coroutine"), (stream, "an async generator")):

        async def work(task: Task, context: TaskContext, made: Any = made) -> object:
            return holds(made())

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = await ReplanningEngine().execute(
                Plan.model_validate({"goal": {"objective": "g"}, "tasks": [{"id": "a"}]}), work
            )
        failure = result.failures["a"]
        assert failure.kind == "output"
        assert f"{kind} of " in failure.message
        assert "was `await` forgotten" in failure.message
        assert made.__name__ in failure.message


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_pending_future_in_an_output_is_a_failure() -> None:
    """A future that nobody has awaited fails the attempt as a coroutine does, alone and as a part of the output."""
    for holds in (lambda future: future, lambda future: [future]):

        async def work(task: Task, context: TaskContext, holds: Any = holds) -> object:
            return holds(asyncio.get_running_loop().create_future())

        result = await ReplanningEngine().execute(
            Plan.model_validate({"goal": {"objective": "g"}, "tasks": [{"id": "a"}]}), work
        )
        assert "was `await` forgotten" in result.failures["a"].message


class Pool:
    """Pool of connections that can be awaited to open it, as those of asyncpg and aiosqlite can."""

    def __await__(self) -> Generator[None, None, "Pool"]:
        yield
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass


async def test_open_pool_reaches_dependents() -> None:
    """An open connection or pool is an output, although its class can be awaited to open one."""
    pool = Pool()

    async def work(task: Task, context: TaskContext) -> object:
        return pool if task.id == "make" else context.results["make"] is pool

    result = await ReplanningEngine().execute(READER, work)
    assert result.ok, result.reason
    assert result.outputs["read"] is True


async def test_result_says_why_there_is_no_output() -> None:
    """The KeyError for a task without an output says what became of the task."""

    async def work(task: Task, context: TaskContext) -> object:
        raise OSError("disk full")

    result = await ReplanningEngine().execute(READER, work)
    with pytest.raises(KeyError, match=r"'make'.*FAILED.*disk full"):
        result.outputs["make"]
    with pytest.raises(KeyError, match=r"'read'.*PENDING"):
        result.outputs["read"]
    with pytest.raises(KeyError, match="no task 'nothing'"):
        result.outputs["nothing"]
    assert result.outputs.get("make") is None


async def test_call_whose_output_was_not_stored_says_why(tmp_path: Path) -> None:
    """A call under the key of one whose output was not stored fails with that reason, and without advice that does not help."""

    @tool(effect="none")
    def login() -> dict[str, str]:
        return {"token": "tok-9f8e7d6c5b4a"}

    engine = ReplanningEngine(store=SqliteStore(tmp_path / "r.db"))
    with pytest.raises(EOFError):  # noqa: PT012 - the session must be left by it
        async with engine.session("log in", tools=[login], run_id="r") as session:
            assert await session.invoke("login", {}, key="1") == {"token": "tok-9f8e7d6c5b4a"}
            raise EOFError
    async with engine.session("log in", tools=[login], run_id="r") as session:
        with pytest.raises(CallFailed) as failed:
            await session.invoke("login", {}, key="1")
        again = await session.invoke("login", {}, key="1", once=False)
    await engine.aclose()
    assert str(failed.value) == (
        "task 'login-1' was done before, and its output was not kept: "
        "a part of it looks like a secret, so the journal has [redacted]"
    )
    assert again == {"token": "tok-9f8e7d6c5b4a"}
