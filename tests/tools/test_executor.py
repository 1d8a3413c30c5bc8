"""The executor: which tool, which kind, how long."""

from datetime import timedelta

import anyio
import pytest
from pydantic import JsonValue

from replanning import ReplanningEngine
from replanning.errors import ReplanningError, ToolError, TransientError
from replanning.plan.document import Plan
from replanning.plan.tasks import Task
from replanning.tools import (
    InvalidArguments,
    InvalidTool,
    ToolCall,
    ToolExecutor,
    ToolTimedOut,
    UnknownTool,
)
from tests.support.tools import PATIENCE, Attempt, call, shell, spec, task

PLAN = Plan.model_validate(
    {
        "goal": {"objective": "test"},
        "tools": [{"name": "t", "kind": "shell", "command": "echo from the plan"}],
        "tasks": [{"id": "a", "tool": "t"}],
    }
)


@pytest.mark.parametrize(
    ("live", "said"), [(None, "the plan"), (shell("echo from the live plan"), "the live plan")]
)
async def test_tools_of_a_plan(live, said):
    """Tasks are executed by the tools that their plan describes, or by those of the live plan where it differs."""
    output = await ToolExecutor(PLAN)(PLAN.task("a"), Attempt(tool=live))
    assert output["stdout"] == f"from {said}"


KNOWN = "known are ['http', 'mcp', 'python', 'shell']"


@pytest.mark.parametrize(
    ("tool", "name", "error", "message"),
    [
        (
            shell("true"),
            "tt",
            UnknownTool,
            "task 'a' names the tool 'tt', which the plan does not describe; described are ['t']; did you mean 't'?",
        ),
        (shell("true"), None, UnknownTool, "task 'a' names no tool; described are ['t']"),
        (spec(), "t", InvalidTool, f"tool 't' cannot be run: it states no `kind`; {KNOWN}"),
        (
            spec(kind="agent"),
            "t",
            InvalidTool,
            f"tool 't' cannot be run: nothing executes its kind 'agent'; {KNOWN}",
        ),
    ],
)
async def test_unknown_tools_and_kinds(tool, name, error, message):
    """A task without a described tool, and a tool of no known kind, are errors that name those that there are."""
    with pytest.raises(error) as caught:
        await ToolExecutor([tool])(task(tool=name), Attempt())
    assert str(caught.value) == message


async def test_kind_of_ones_own():
    """A kind that is added receives the tool, its arguments and the attempt."""

    async def shout(given: ToolCall) -> JsonValue:
        return f"{given.tool.name} {given.arguments['x']} {given.context.idempotency_key}".upper()

    assert await call(spec(kind="mine"), {"x": "hello"}, kinds={"mine": shout}) == "T HELLO KEY-1"


async def test_output_of_a_kind_of_ones_own_is_true():
    """The output of a kind of one's own has the values that it looked up."""

    async def tell(given: ToolCall) -> JsonValue:
        secret = given.secrets.resolve("{env:TOKEN}")
        return {secret: [secret, 1, None, f"<{secret}>"]}

    output = await call(spec(kind="mine"), kinds={"mine": tell}, environ={"TOKEN": "s3cr3t"})
    assert output == {"s3cr3t": ["s3cr3t", 1, None, "<s3cr3t>"]}


async def test_short_values_are_no_secrets():
    """A variable of fewer than four characters is a flag, and is not masked."""
    output = await call(
        shell("echo $V", env={"V": "{env:V}"}), environ={"V": "123", "PATH": "/bin:/usr/bin"}
    )
    assert output == {"exit_code": 0, "stdout": "123", "stderr": ""}


async def test_wrong_types():
    """Arguments of other types than the tool's parameters state are refused, all at once."""
    tool = shell(
        "true",
        parameters={
            "a": "integer",
            "b": "string",
            "c": "number",
            "d": "any",
            "e": "city",
            "f": "array",
        },
    )
    with pytest.raises(InvalidArguments) as caught:
        await call(tool, {"a": True, "b": 1, "c": 1, "d": None, "e": "Rome"})
    assert caught.value.problems == (
        "'a' must be of type integer, it is boolean",
        "'b' must be of type string, it is integer",
    )


@pytest.mark.parametrize("where", ["neither", "task", "tool"])
async def test_default_timeout(where):
    """The default timeout stops a tool only where neither task nor tool states one."""
    tool = spec(kind="mine", timeout=30.0 if where == "tool" else None)
    work = task(timeout=30.0 if where == "task" else None)
    done = anyio.Event()

    async def wait(given: ToolCall) -> JsonValue:
        await done.wait()
        return "done"

    executor = ToolExecutor(
        [tool], kinds={"mine": wait}, default_timeout=timedelta(milliseconds=10)
    )
    if where == "neither":
        with pytest.raises(
            ToolTimedOut, match=r"tool 't' was stopped after 0.01 s, .* give the task or the"
        ) as caught:
            await executor(work, Attempt())
        assert not isinstance(caught.value, TransientError)  # it may have had its effect
        return
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as group:
            group.start_soon(executor, work, Attempt())
            await anyio.wait_all_tasks_blocked()
            done.set()


def test_all_errors_are_of_the_library():
    """Whatever goes wrong with a tool is an error of this library."""
    from replanning import tools

    errors = [
        value
        for name in tools.__all__
        if isinstance(value := getattr(tools, name), type) and issubclass(value, Exception)
    ]
    assert len(errors) == 15
    assert all(
        issubclass(error, ToolError) and issubclass(error, ReplanningError) for error in errors
    )


async def test_one_attempt_at_a_time():
    """A task is not begun again while what was begun for it before is still being stopped; other tasks are."""
    said: list[str] = []
    stopped = anyio.Event()

    async def stubborn(call: ToolCall) -> JsonValue:
        first = not said
        said.append(f"{call.task.id} begins")
        try:
            if first:
                await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                if first:
                    await stopped.wait()
            said.append(f"{call.task.id} is over")
        return None

    execute = ToolExecutor([spec(kind="stubborn")], kinds={"stubborn": stubborn})
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as group:
            first = anyio.CancelScope()
            group.start_soon(run_in, first, execute, task())
            await anyio.wait_all_tasks_blocked()
            first.cancel()
            group.start_soon(execute, task(), Attempt())
            await execute(task(id="b"), Attempt("key-2"))
            await anyio.wait_all_tasks_blocked()
            before = list(said)
            stopped.set()
    assert before == ["a begins", "b begins", "b is over"]
    assert said[3:] == ["a is over", "a begins", "a is over"]


async def run_in(scope: anyio.CancelScope, execute: ToolExecutor, work: Task) -> None:
    """Execute a task until a scope is cancelled."""
    with scope:
        await execute(work, Attempt())


AGREEING = """
goal: {objective: test}
tools:
  - {name: t, kind: shell, command: "echo {n}", effect: none, capability: c, expect: {agrees_with: {tool: u, fields: [stdout]}}}
  - {name: u, kind: python, callable: "tests.tools.test_executor:doubled", effect: none, capability: c}
tasks: [{id: a, tool: t, arguments: {n: 0}}, {id: b, tool: t, arguments: {n: 1}}]
"""


def doubled(n: int) -> dict[str, str]:
    """Say what the double of a number is."""
    return {"stdout": str(n * 2)}


async def test_second_tool():
    """An output is compared with that of another tool, which may be of another kind."""
    plan = Plan.parse(AGREEING)
    engine = ReplanningEngine(providers=["repair"])
    async with ToolExecutor(plan) as execute:
        result = await engine.execute(plan, execute)
    assert [result.outputs[name]["stdout"] for name in "ab"] == ["0", "2"]
