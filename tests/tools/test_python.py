"""The kind `python`."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum

import anyio
import pytest

from replanning import Plan, ReplanningEngine
from replanning.errors import TransientError
from replanning.journal import MemoryStore
from replanning.judging import JudgedWork, LLMJudge
from replanning.plan.types import TaskId
from replanning.run import Work
from replanning.testing import ScriptedLLM
from replanning.tools import InvalidArguments, InvalidTool, ToolExecutor, ToolUnavailable
from tests.support.tools import PATIENCE, Attempt, call, spec, task

HERE = __name__


def python(name: str, module: str = HERE):
    """A tool that calls a function of this file."""
    return spec(kind="python", callable=f"{module}:{name}")


def double(x: int) -> int:
    """Twice a number."""
    return 2 * x


async def slow_double(x: int, *, plus: int = 0) -> int:
    """Twice a number, after another task had its turn."""
    await anyio.lowlevel.checkpoint()
    return 2 * x + plus


def who(context: Attempt, greeting: str = "for") -> str:
    """Which attempt it works for."""
    return f"{greeting} {context.idempotency_key}"


def thread() -> bool:
    """Whether it runs in another thread than the program."""
    return threading.current_thread() is not threading.main_thread()


def fail(transient: bool) -> None:
    """Fail in one way or the other."""
    raise TransientError("busy") if transient else KeyError("gone")


class Counter:
    def __init__(self, start: int) -> None:
        self.start = start

    async def __call__(self, step: int) -> int:
        return self.start + step

    def down(self, step: int) -> int:
        return self.start - step


counter = Counter(10)
number = 3


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("double", {"x": 2}, 4),
        ("slow_double", {"x": 2}, 4),
        ("slow_double", {"x": 2, "plus": 1}, 5),
        ("who", {}, "for key-1"),
        ("who", {"greeting": "hello"}, "hello key-1"),
        ("thread", {}, True),
        ("counter", {"step": 1}, 11),
        ("counter.down", {"step": 1}, 9),
    ],
)
async def test_functions(name, arguments, result):
    """A function gets the arguments as keywords, and the context of the attempt where it asks for it."""
    assert await call(python(name), arguments) == result


@pytest.mark.parametrize(("transient", "error"), [(True, TransientError), (False, KeyError)])
async def test_failures_of_a_function(transient, error):
    """What a function raises reaches the orchestrator as it is."""
    with pytest.raises(error):
        await call(python("fail"), {"transient": transient})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {},
            f"missing a required argument: 'x'; it is {HERE}:double(x: 'int') -> 'int', the task gives []",
        ),
        ({"x": 1, "y": 2}, "got an unexpected keyword argument 'y'; it is"),
    ],
)
async def test_arguments_that_do_not_fit(arguments, message):
    """Arguments that a function does not take are an error that shows what it takes."""
    with pytest.raises(InvalidArguments) as caught:
        await call(python("double"), arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["json", "json:", ":dumps", "json.dumps", "os path:join", "json:du-mps", "json:dumps()", None],
)
async def test_names_that_are_no_functions(name):
    """A name of another form, or none, is refused with the form that is expected."""
    with pytest.raises(
        InvalidTool, match=r"is not of the form 'package.module:function'|it needs a `callable`"
    ):
        await call(spec(kind="python", callable=name))


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        (
            "no_such_module",
            "f",
            "tool 't' needs the module 'no_such_module'; which is not found; install it",
        ),
        ("json.no_such", "f", "needs the module 'json.no_such'; which is not found"),
        (
            HERE,
            "dubble",
            f"the function 'dubble' of the module '{HERE}'; which has no such name; did you mean 'double'?",
        ),
        (HERE, "number", f"the function 'number' of the module '{HERE}'; which cannot be called"),
    ],
)
async def test_functions_that_are_missing(module, name, message):
    """A module or function that is not there is named, with the nearest one that is."""
    with pytest.raises(ToolUnavailable) as caught:
        await call(python(name, module))
    assert message in str(caught.value)


async def test_module_that_fails(tmp_path, monkeypatch):
    """A module that fails on import is named with its error."""
    (tmp_path / "failing_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ToolUnavailable,
        match="'failing_module'; which fails on import: ZeroDivisionError",
    ):
        await call(python("f", "failing_module"))


running, stop, stopped = threading.Event(), threading.Event(), threading.Event()


def stay() -> None:
    """Run until told to stop."""
    running.set()
    stop.wait(PATIENCE)
    stopped.set()


async def test_cancelled_thread_is_not_waited_for():
    """When a function in a thread is cancelled nobody waits for it, and it runs on to its end."""
    for event in (running, stop, stopped):
        event.clear()
    async with anyio.create_task_group() as group:
        group.start_soon(ToolExecutor([python("stay")]), task(), Attempt())
        assert await anyio.to_thread.run_sync(running.wait, PATIENCE)
        group.cancel_scope.cancel()
    assert not stopped.is_set()
    stop.set()
    assert await anyio.to_thread.run_sync(stopped.wait, PATIENCE)


# Results with types


class Level(Enum):
    LOW = 1


@dataclass
class Part:
    number: int
    level: Level


def make_part() -> Part:
    """A dataclass with an Enum."""
    return Part(1, Level.LOW)


PART = """
goal: {objective: x}
tools:
  - {name: make, kind: python, callable: "tests.tools.test_python:make_part"}
  - {name: double, kind: python, callable: "tests.tools.test_python:double"}
tasks:
  - {id: part, tool: make}
  - {id: twice, tool: double, arguments: {x: "${part.output.number}"}, depends_on: [part]}
"""


@pytest.mark.parametrize("is_judged", [False, True])
async def test_results_have_the_type_of_the_return_annotation(is_judged: bool) -> None:
    """What a function returns is stored as its annotation says, and comes back as that after a resume."""
    plan, store = Plan.parse(PART), MemoryStore()
    executor = ToolExecutor(plan)
    accepting = ScriptedLLM([{"success": True}] * 2)
    work: Work = JudgedWork(executor, LLMJudge(accepting)) if is_judged else executor
    engine = ReplanningEngine(store=store)
    async with engine.open(plan, run_id="r") as run:
        await run.perform(TaskId("part"), work)

    result = await engine.execute(plan, work, run_id="r")

    assert result.outputs == {"part": Part(1, Level.LOW), "twice": 2}
    assert engine.history("r").unstored == {}
