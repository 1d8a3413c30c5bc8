"""The executor: which tool, which kind, how long."""

from datetime import timedelta

import anyio
import pytest
from pydantic import JsonValue

from replanning import ReplanningEngine
from replanning.changes import ReplaceTask
from replanning.errors import (
    ReplanningError,
    ToolError,
    TransientError,
    UnexpectedOutput,
    UnverifiedOutput,
)
from replanning.plan import Expectation
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
from tests.support.runs import Proposer, alternative
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


KNOWN = "known kinds are ['http', 'mcp', 'python', 'shell']"


@pytest.mark.parametrize(
    ("tool", "name", "error", "message"),
    [
        (
            shell("true"),
            "tt",
            UnknownTool,
            "task 'a' names the tool 'tt', which the plan does not describe; its tools are ['t']; did you mean 't'?",
        ),
        (shell("true"), None, UnknownTool, "task 'a' names no tool; its tools are ['t']"),
        (spec(), "t", InvalidTool, f"tool 't' cannot be run: it states no `kind`; {KNOWN}"),
        (
            spec(kind="agent"),
            "t",
            InvalidTool,
            f"tool 't' cannot be run: its kind 'agent' is unknown; {KNOWN}",
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
        "'a' must be of type integer, not boolean",
        "'b' must be of type string, not integer",
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
            ToolTimedOut, match=r"tool 't' was stopped after 10 ms, .* give the task or the"
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


async def check(
    executor: ToolExecutor,
    command: str,
    context: Attempt,
    arguments: dict[str, JsonValue] | None = None,
) -> None:
    """Execute a task after which a command must succeed."""
    await executor(task(arguments, expect={"commands": [command]}), context)


async def test_command_works_as_its_tool(tmp_path):
    """A command that must succeed runs where the tool of its task works, with its environment and its arguments as single words."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a b.txt").write_text("x")
    right, wrong = 'grep "$WORD" {name}', "echo no >&2; exit 1"
    tool = shell("true", cwd="sub", env={"WORD": "x"}, expect={"commands": ["test -d ."]})
    executor = ToolExecutor([tool], cwd=tmp_path, commands=[right, wrong])
    attempt = Attempt()
    await check(executor, right, attempt, arguments={"name": "a b.txt"})
    assert attempt.checked
    assert len(attempt.noted) == 3, (
        "their process groups are on record, to be stopped after a crash"
    )
    failed = Attempt()
    with pytest.raises(UnexpectedOutput, match="to succeed: tool 'expect' ended with exit") as told:
        await check(executor, wrong, failed)
    assert (told.value.missed, told.value.output) == (
        True,
        {"exit_code": 0, "stdout": "", "stderr": ""},
    )
    assert not failed.checked


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("test -e {it}", r"it needs the arguments \['it'\], the task gives"),
        ("while :; do :; done", "50 ms"),
        ("kill -9 $$", "SIGKILL"),
    ],
)
async def test_command_without_a_verdict(command, said, tmp_path):
    """A command that cannot be run, or not to its end, says nothing: the tool may have done its work."""
    executor = ToolExecutor([shell("true")], cwd=tmp_path, default_timeout=0.05, commands=[command])
    with pytest.raises(UnverifiedOutput, match=f"it gave no verdict: .*{said}") as told:
        await check(executor, command, Attempt())
    assert not told.value.missed


BUILD = """
goal: {objective: test}
tools:
  - {name: make, kind: shell, command: "touch {out}", expect: {commands: ["test -e {out}"]}}
tasks:
  - {id: a, tool: make, arguments: {out: x}, expect: {commands: ["test -e y"]}, fallbacks: [{tool: make, arguments: {out: y}}]}
"""


async def test_commands_of_a_plan(tmp_path):
    """A command that fails says that its task was not done, so that another way is taken without asking; a fallback must pass it, too."""
    plan = Plan.parse(BUILD)
    engine = ReplanningEngine(providers=["repair"])
    async with ToolExecutor(plan, cwd=tmp_path) as execute:
        result = await engine.execute(plan, execute)
    assert (result.status, len(result.revisions)) == ("succeeded", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]


async def test_commands_that_nobody_stated(tmp_path):
    """A command that is not in the plan, as a model may have written it, is not run, and neither is its task."""
    plan = Plan.parse(BUILD)
    other = Task(id="b", tool="make", arguments={"out": "z"}, expect=Expectation(commands=["rm *"]))
    proposer = Proposer(lambda request: [alternative(ReplaceTask(task_id="a", tasks=(other,)))])
    engine = ReplanningEngine(providers=[proposer])
    async with ToolExecutor(plan, cwd=tmp_path) as execute:
        result = await engine.execute(plan, execute)
    assert "the command 'rm *' is not in the plan that this executor was made with" in result.reason
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


async def test_commands_that_nobody_runs():
    """Work that runs no commands does not pass for work that has passed them."""

    async def work(task: Task, context: object) -> str:
        return "done"

    result = await ReplanningEngine().execute(Plan.parse(BUILD), work)
    assert result.status == "needs_human"
    assert "'test -e {out}' must succeed, but was not run: a `ToolExecutor` runs" in str(
        result.failures
    )
