"""What is said about the tools of a plan before it runs."""

import pytest

from replanning.errors import PlanError, Problem
from replanning.plan.commands import option_problems
from replanning.plan.document import Plan
from replanning.plan.included_files import locate_problems
from replanning.plan.types import JsonObject, JsonValue
from replanning.tools import check_machine, check_tools
from replanning.tools.check import (
    check_danger,
    check_env_arguments,
    check_missing_outputs,
    check_unused_arguments,
)


def plan(*tools: JsonObject, tasks: list[JsonObject] | None = None) -> Plan:
    """A plan with these tools, and a task for each unless it says otherwise."""
    tasks = (
        [{"id": tool["name"], "tool": tool["name"]} for tool in tools] if tasks is None else tasks
    )
    return Plan.model_validate(
        {"goal": {"objective": "test"}, "context": {"x": 1}, "tools": list(tools), "tasks": tasks}
    )


def test_nothing_is_wrong():
    """A plan whose tools can be run has no problems."""
    tools: list[JsonObject] = [
        {"name": "a", "kind": "shell", "command": "echo {x}"},
        {"name": "b", "kind": "http", "url": "http://localhost/{x}"},
        {"name": "c", "kind": "python", "callable": "json:dumps"},
        {"name": "d", "kind": "mine"},
    ]
    tasks: list[JsonObject] = [
        {"id": tool["name"], "tool": tool["name"], "arguments": {"x": "${context.x}"}}
        for tool in tools
    ]
    assert check_tools(plan(*tools, tasks=tasks), kinds=frozenset({"mine"})) == []


def test_a_fallback_that_cannot_be_checked_as_its_task_is():
    """A fallback is held to the commands of its task: one that lacks an argument for them is named, one that expects something itself is not."""
    tool: JsonObject = {"name": "a", "kind": "shell", "command": "echo"}
    fallbacks: list[JsonObject] = [
        {"tool": "a", "arguments": {"y": 1}},
        {"tool": "a", "expect": {"errors": ["E"]}, "fallbacks": [{"tool": "a"}]},
        {"tool": "a", "arguments": {"x": 2}},
    ]
    task: JsonObject = {
        "id": "t",
        "tool": "a",
        "arguments": {"x": 1},
        "expect": {"commands": ["ls {x}"]},
    }
    problems = check_tools(plan(tool, tasks=[{**task, "fallbacks": fallbacks}]))
    why = "task 't': the command 'ls {x}': it needs the arguments ['x'], the task gives ['y']"
    assert problems == [Problem("tasks[0].fallbacks[0]", why)]


def test_retries_after_what_never_fails_so():
    """Numbers and classes under `on` that no failure of the tool can have are named; any class may be one of a function."""
    tools: list[JsonObject] = [
        {"name": "sh", "kind": "shell", "command": "false", "retry": {"on": [1, 503, "timeout"]}},
        {"name": "web", "kind": "http", "url": "http://x"},
        {
            "name": "py",
            "kind": "python",
            "callable": "json:dumps",
            "retry": {"on": [1, 503, "Own"]},
        },
        {"name": "far", "kind": "mcp", "server": "s", "retry": {"on": [1, "McpToolFailed"]}},
    ]
    named: list[JsonValue] = [
        "httpx.ReadTimeout",
        "ReadTimeuot",
        404,
        1,
        "HttpUnreachable",
        "OSError",
    ]
    fallback: JsonObject = {"tool": "sh", "retry": {"on": ["CommandFaild", "ToolError"]}}
    tasks: list[JsonObject] = [
        {"id": "t", "tool": "web", "retry": {"on": named}, "fallbacks": [fallback]},
        {"id": "u", "tool": "none", "retry": {"on": ["Unknown"]}},
    ]
    checked = Plan.model_validate(
        {
            "goal": {"objective": "test"},
            "mcp": {"s": {"command": "server"}},
            "tools": [*tools, {"name": "none"}],
            "tasks": tasks,
        }
    )
    places = {
        str(problem.place): problem.message
        for problem in check_tools(checked)
        if "retry" in problem.place
    }
    assert places == {
        "tools[0].retry.on[1]": "tool 'sh': no failure of tool 'sh' has the number 503: "
        "a command ends with an exit code from 1 to 255",
        "tools[3].retry.on[0]": "tool 'far': no failure of tool 'far' has the number 1: "
        "a tool of an MCP server fails without a number",
        "tasks[0].retry.on[1]": "task 't': no failure of tool 'web' is of a class 'ReadTimeuot'; "
        "did you mean 'ReadTimeout'?",
        "tasks[0].retry.on[3]": "task 't': no failure of tool 'web' has the number 1: "
        "a server refuses with an HTTP status from 400 to 599",
        "tasks[0].fallbacks[0].retry.on[0]": "task 't': no failure of tool 'sh' is of a class "
        "'CommandFaild'; did you mean 'CommandFailed'?",
    }


def test_arguments_without_effect():
    """An argument that a command or a request has no place for is noted, unless a check or a tool that may stand in has."""
    tools: list[JsonObject] = [
        {"name": "a", "kind": "shell", "capability": "c", "command": "echo {x}"},
        {
            "name": "b",
            "kind": "http",
            "capability": "c",
            "method": "POST",
            "url": "http://h/",
            "body": {"k": "{y}"},
        },
        {"name": "w", "kind": "shell", "command": "make", "produces": ["wheel"]},
        {"name": "p", "kind": "python", "callable": "json:dumps"},
    ]
    given: JsonObject = {"x": 1, "y": 2, "checked": 3, "modes": 4}
    tasks: list[JsonObject] = [
        {"id": "t", "tool": "a", "arguments": given, "expect": {"commands": ["ls {checked}"]}},
        {"id": "w", "tool": "w", "arguments": given},
        {"id": "p", "tool": "p", "arguments": given},
        {"id": "f", "tool": "p", "fallbacks": [{"tool": "b", "arguments": {"z": 1, "y": 1}}]},
    ]
    assert check_unused_arguments(plan(*tools, tasks=tasks)) == [
        Problem("tasks[0].arguments.modes", "task 't': tool 'a' does not use 'modes'"),
        Problem("tasks[3].fallbacks[0].arguments.z", "task 'f': tool 'b' does not use 'z'"),
    ]


def test_variables_in_arguments():
    """An argument with `{env:NAME}`, which would reach the tool as that text, is noted."""
    tools: list[JsonObject] = [
        {
            "name": "a",
            "kind": "http",
            "method": "POST",
            "url": "http://h/",
            "body": {"k": "{token}"},
        }
    ]
    tasks: list[JsonObject] = [
        {"id": "t", "tool": "a", "arguments": {"token": ["Bearer {env:SHOP_TOKEN}"]}},
        {"id": "u", "tool": "a", "arguments": {"token": "${context.x}"}},
    ]
    assert check_env_arguments(plan(*tools, tasks=tasks)) == [
        Problem(
            "tasks[0].arguments.token",
            "task 't': {env:SHOP_TOKEN} is plain text in the argument 'token'; it is filled in where a "
            "tool states `env`, `headers`, `url` or `body`",
        ),
    ]


def test_outputs_that_may_be_missing():
    """An argument is noted that may be null although its parameter has a type, and only that one."""
    tools: list[JsonObject] = [
        {
            "name": "a",
            "kind": "shell",
            "command": "x {v}",
            "parameters": {"v": "path", "any": "any"},
        }
    ]

    def reader(task_id: str, *depends_on: str, argument: str, **fields: JsonValue) -> JsonObject:
        arguments: JsonObject = {"v": argument, "any": "${a.output}"}
        needed: list[JsonValue] = [*depends_on]
        return {"id": task_id, "tool": "a", "arguments": arguments, "depends_on": needed, **fields}

    tasks: list[JsonObject] = [
        {"id": "a", "when": "context.x"},
        {"id": "b", "depends_on": ["a"]},
        {"id": "d"},
        {"id": "e", "depends_on": ["a", "d"]},
        reader("same", "b", argument="${a.output}"),
        reader("join", "b", "d", argument="${b.output.path}"),
        reader("text", "b", "d", argument="of ${b.output}"),
        reader("sure", "a", "d", argument="${d.output}"),
        reader("behind", "a", "e", argument="${e.output}"),
        reader("always", "a", "d", argument="${d.output}", run_if="always"),
    ]
    assert check_missing_outputs(plan(*tools, tasks=tasks)) == [
        Problem(
            "tasks[5].arguments.v",
            "task 'join': the argument 'v', ${b.output.path}, is null where 'b' is left out, and the "
            "tool 'a' takes a value of type path",
        ),
        Problem(
            "tasks[9].arguments.v",
            "task 'always': the argument 'v', ${d.output}, is null where 'd' failed or is left out, "
            "and the tool 'a' takes a value of type path",
        ),
    ]
    in_order: list[JsonObject] = [
        {"id": "a", "when": "context.x"},
        {"id": "d"},
        reader("next", "a", "d", argument="${a.output}"),
        reader("last", "a", "d", argument="${d.output}"),
    ]
    document = plan(*tools, tasks=in_order).model_dump(exclude_unset=True) | {"sequential": True}
    found = check_missing_outputs(Plan.model_validate(document))
    assert [problem.place for problem in found] == ["tasks[2].arguments.v"]
    tasks[0] = {"id": "a"}
    assert check_missing_outputs(plan(*tools, tasks=tasks[:9])) == []


@pytest.mark.parametrize(
    "how",
    [
        {"kind": "shell", "command": "echo {v}"},
        {"kind": "http", "method": "GET", "url": "http://localhost/{v}"},
    ],
)
def test_outputs_that_may_be_missing_in_a_command(how):
    """An argument that may be null is noted where it is filled into a command or an address, which null cannot be."""
    tasks: list[JsonObject] = [
        {"id": "a", "when": "context.x"},
        {"id": "d"},
        {
            "id": "say",
            "tool": "say",
            "arguments": {"v": "${a.output}", "other": "${a.output}"},
            "depends_on": ["a", "d"],
        },
    ]
    assert check_missing_outputs(plan({"name": "say", **how}, tasks=tasks)) == [
        Problem(
            "tasks[2].arguments.v",
            "task 'say': the argument 'v', ${a.output}, is null where 'a' is left out, and the tool "
            "'say' cannot fill in null",
        )
    ]


def test_outputs_that_may_be_missing_in_parts_of_arguments():
    """A reference within an object or an array is noted as well, where the schema of the tool states the type there."""
    text: JsonObject = {"type": "string"}
    schema: JsonObject = {
        "properties": {
            "rows": {"type": "array", "items": {"properties": {"id": text, "odd": {}}}},
            "to": {"properties": {"name": text, "note": {"type": ["string", "null"]}}},
            "any": True,
        }
    }
    tool: JsonObject = {
        "name": "send",
        "kind": "mcp",
        "server": "mail",
        "parameters": {"rows": "array", "to": "object", "any": "any"},
        "input_schema": schema,
    }
    missing = "${a.output.id}"
    row: JsonObject = {"id": missing, "odd": missing, "other": missing, "n": 1}
    arguments: JsonObject = {
        "rows": ["${d.output}", row],
        "to": {"name": f"of {missing}", "note": missing},
        "any": {"x": [missing]},
    }
    tasks: list[JsonObject] = [
        {"id": "a", "when": "context.x"},
        {"id": "d"},
        {"id": "e", "tool": "send", "arguments": arguments, "depends_on": ["a", "d"]},
    ]
    document: JsonObject = {
        "goal": {"objective": "test"},
        "context": {"x": 1},
        "mcp": {"mail": {"command": "mail"}},
        "tools": [tool],
        "tasks": list(tasks),
    }
    assert check_missing_outputs(Plan.model_validate(document)) == [
        Problem(
            "tasks[2].arguments.rows[1].id",
            "task 'e': the argument 'rows[1].id', ${a.output.id}, is null where 'a' is left out, "
            "and the tool 'send' takes a value of type string",
        )
    ]


def test_everything_is_wrong():
    """Every problem is listed with its place, in the order of the plan."""
    tools: list[JsonObject] = [
        {"name": "a", "kind": "shell", "command": "echo '{x}'"},
        {"name": "b", "kind": "shell", "command": "echo", "produces": ["stdout"]},
        {"name": "c", "kind": "http", "url": "ftp://x"},
        {"name": "d", "kind": "python", "callable": "json:du-mps"},
        {"name": "e", "kind": "shel"},
        {"name": "f"},
        {"name": "unused"},
    ]
    known = "known kinds are ['http', 'mcp', 'python', 'shell']"
    tasks: list[JsonObject] = [
        {"id": tool["name"], "tool": tool["name"], "arguments": {"x": 1}} for tool in tools[:-1]
    ]
    assert check_tools(plan(*tools, tasks=tasks)) == [
        Problem(
            "tools[0].command",
            "tool 'a': {x} is inside quotes; values are quoted for you, remove the quotes, "
            "or write {{x}} for that text itself",
        ),
        Problem(
            "tools[1].produces[0]",
            "tool 'b': 'stdout' is a part of every output; name it otherwise",
        ),
        Problem(
            "tools[2].url",
            "tool 'c': its url 'ftp://x' must begin with http:// or https:// and a host",
        ),
        Problem(
            "tools[3].callable",
            "tool 'd': its callable 'json:du-mps' is not of the form 'package.module:function'",
        ),
        Problem(
            "tools[4].kind",
            f"tool 'e' has the unknown kind 'shel'; {known}; did you mean 'shell'?",
        ),
        Problem("tools[5]", f"tool 'f' states no `kind`; {known}"),
    ]


WRONG_TOOLS = """\
goal: {objective: Publish}
tools:
  - name: build
    kind: shell
    env:
      GOOD: a
      A=B: c
    command: echo '{x}'
  - name: publish
    kind: http
    method: GE T
    url: ftp://x
    headers:
      Accept: text/plain
      X Y: a
    idempotency_header: a b
  - name: ask
    kind: http
    url: http://x
    body: {"{a}": 1}
  - {name: count, kind: python, callable: "json:du-mps"}
  - {name: sort, kind: shel}
tasks:
  - {id: a, tool: sort}
"""


def test_places_of_wrong_fields_of_tools(tmp_path):
    """Each problem of the definition of a tool has the line and column of its field."""
    path = tmp_path / "plan.yaml"
    path.write_text(WRONG_TOOLS)
    problems = locate_problems(check_tools(Plan.load(path)), path)
    assert [problem.place.removeprefix(f"{path}:") for problem in problems] == [
        "8:5 tools[0].command",
        '7:7 tools[0].env["A=B"]',
        "11:5 tools[1].method",
        "12:5 tools[1].url",
        '15:7 tools[1].headers["X Y"]',
        "16:5 tools[1].idempotency_header",
        "20:5 tools[2].body",
        "20:5 tools[2].body",
        "21:33 tools[3].callable",
        "22:18 tools[4].kind",
    ]


def test_missing_arguments():
    """What a body needs and a task, fallback or undo does not give is listed with its place; the idempotency key is given."""
    body: JsonObject = {"a": ["{x}", "<{y}>"], "key": "{idempotency_key}"}
    tool: JsonObject = {
        "name": "a",
        "kind": "http",
        "method": "POST",
        "url": "http://x",
        "body": body,
    }
    task: JsonObject = {
        "id": "one",
        "tool": "a",
        "arguments": {"x": 1},
        "expect": {"commands": ["grep {idempotency_key} log"]},
        "fallbacks": [
            {"tool": "a", "arguments": {"x": 1, "y": 2}},
            {"tool": "a", "arguments": {"y": 1}},
        ],
        "undo": {"tool": "a", "arguments": {"x": 1, "y": 2}, "fallbacks": [{"tool": "a"}]},
    }
    assert [str(problem) for problem in check_tools(plan(tool, tasks=[task]))] == [
        "tasks[0].arguments: task 'one': the body of tool 'a' needs the arguments ['y'], the task gives ['x']",
        "tasks[0].fallbacks[1].arguments: task 'one': the body of tool 'a' needs the arguments ['x'], the task gives ['y']",
        "tasks[0].undo.fallbacks[0].arguments: task 'one': the body of tool 'a' needs the arguments ['x', 'y'], the task gives []",
    ]


@pytest.mark.parametrize(
    ("command", "given", "told"),
    [
        (
            "timeout 5 curl -sd {x} http://h",
            "@/etc/passwd",
            ["the name of a file; if it may be one, write @{x} in the command"],
        ),
        *(
            (f"curl {option} http://h", given, ["the name of a file; if it may be one, write @{x} in the command"])
            for option, given in [
                ("-d{x}", "@f"), ("-sSd{x}", "@f"), ("-H {x}", "@f"), ("-H{x}", "@f"), ("--header {x}", "@f"), ("-F {x}", "a=@f"),
                ("-F a={x}", "@f"), ("--form {x}", "a=<f"), ("--json {x}", "@f"),
            ]
        ),
        ("curl -F a={x} http://h", "a@b", []),
        ("curl --data-urlencode a={x} http://h", "a@b", []),
        ("curl -H {x} http://h", "A: b@c", []),
        ("curl --data @{x} http://h", "a", []),
        ("curl --json {x} http://h", "-1", []),
        ("curl {x} http://h", "", []),
    ],
)  # fmt: skip
def test_files_among_arguments(command: str, given: str, told: list[str]):
    """Data for `curl` may begin with a dash, and not with the sign that makes it the name of a file to be sent."""
    assert [
        problem.partition(" read as ")[2] for problem in option_problems(command, {"x": given})
    ] == told


@pytest.mark.parametrize(
    ("command", "given", "refused"),
    [
        ("git commit -m {x}", ["-1", "b"], False),
        ("git commit -m {x}", ["msg", "--amend"], True),
        ("tar -cf {x} Makefile", ["x.tar", "--checkpoint-action=exec=rm"], True),
        ("curl -d {x} http://h", ["a", "-o", "b"], True),
        ("ls > {x}", ["a", "-R"], True),
        ("cat -- {x}", ["a", "-R"], False),
    ],
)
def test_lists_after_an_option(command: str, given: list[str], refused: bool):
    """Of a list, only the first word is the value of the option before it; the others may not begin with a dash."""
    assert bool(option_problems(command, {"x": given})) == refused


def test_uses_that_look_dangerous():
    """A use of a tool that looks dangerous is noted where the tool does not state whether it is."""
    start: JsonObject = {"kind": "shell", "command": "timeout 5 {x}"}
    tools: list[JsonObject] = [{"name": "a", **start}, {"name": "b", "dangerous": False, **start}]
    tasks: list[JsonObject] = [
        {"id": f"{n}", "tool": n, "arguments": {"x": x}} for n in "ab" for x in ("ls", "rm")
    ]
    tasks = [{**each, "id": f"t{number}"} for number, each in enumerate(tasks)]
    assert check_danger(plan(*tools, tasks=tasks)) == [
        Problem(
            "tasks[1]",
            "task 't1': tool 'a' may do harm: it uses 'rm'; state whether the tool is `dangerous`",
        )
    ]


def test_dangerous_tools_that_the_plan_names():
    """A task that names a dangerous tool is noted, because nobody is asked before it; a stand-in is not."""
    tools: list[JsonObject] = [
        {"name": "look", "capability": "send"},
        {"name": "send", "capability": "send", "dangerous": True},
    ]
    tasks: list[JsonObject] = [{"id": "a", "tool": "look"}, {"id": "b", "tool": "send"}]
    [problem] = check_danger(plan(*tools, tasks=tasks))
    assert problem.place == "tasks[1]"
    assert "task 'b': nobody is asked before its tool 'send' runs" in problem.message


def test_options_among_arguments():
    """An argument that a command would read as an option is reported before the plan runs; one that is a reference is not."""
    tool: JsonObject = {"name": "a", "kind": "shell", "command": "cat {x}"}
    tasks: list[JsonObject] = [
        {
            "id": "one",
            "tool": "a",
            "arguments": {"x": "${context.x}"},
            "fallbacks": [{"tool": "a", "arguments": {"x": "-n"}}],
        },
        {"id": "two", "tool": "a", "arguments": {"x": "n-"}},
    ]
    [problem] = check_tools(plan(tool, tasks=tasks))
    assert str(problem) == (
        "tasks[0].fallbacks[0].arguments: task 'one': tool 'a': 'x' is '-n', which would be read as an option; "
        "if it may begin with a dash, write -- before {x} in the command, or --option={x}"
    )


def test_what_the_machine_lacks():
    """Programs, modules and variables that are not there are noted."""
    tools: list[JsonObject] = [
        {
            "name": "a",
            "kind": "shell",
            "command": "A=1 no-such-1 --x '|' no-such-0 | no-such-2 2>&1 && if true; then no-such-3; fi; echo $(no-such-4)",
            "env": {"B": "{env:B}"},
        },
        {"name": "b", "kind": "python", "callable": "no_such.module:f"},
        {"name": "c", "kind": "http", "url": "http://x", "headers": {"A": "{env:C}{env:PATH}"}},
        {"name": "d", "kind": "shell", "command": "case x in no) no;; esac; f() { no; }; ls | wc"},
        {"name": "e", "kind": "shell", "command": "{program} x; ls"},
    ]
    assert [
        str(note) for note in check_machine(plan(*tools, tasks=[]), {"PATH": "/bin:/usr/bin"})
    ] == [
        *(
            f"tools[0]: tool 'a' needs the program 'no-such-{n}', which is not on the PATH"
            for n in (1, 2, 3, 4)
        ),
        "tools[0]: tool 'a' needs the environment variables B, which are not set",
        "tools[1]: tool 'b' needs the module 'no_such', which is not found; install it, or put its folder on PYTHONPATH",
        "tools[2]: tool 'c' needs the environment variables C, which are not set",
    ]


def test_workspaces_that_are_not_confined():
    """A command is said to be unconfined where bubblewrap is missing; an argument of type path is one path, or a list."""
    tool: JsonObject = {
        "name": "t",
        "kind": "shell",
        "command": "cat {x}",
        "parameters": {"x": "path"},
        "workspace": ".",
    }
    tasks: list[JsonValue] = [
        {"id": f"t{n}", "tool": "t", "arguments": {"x": x}} for n, x in enumerate(["a", ["a", "b"]])
    ]
    document = {"goal": {"objective": "g"}, "tools": [tool], "tasks": tasks}
    (note,) = [
        one
        for one in check_machine(Plan.model_validate(document), {"PATH": ""})
        if "workspace" in one.message
    ]
    assert note.place == "tools[0]"
    assert (
        "'t' is not confined to its workspace: 'bwrap' (bubblewrap) is not on the PATH"
        in note.message
    )
    two: JsonValue = [tool, {**tool, "name": "u"}]
    noted = [
        one.message
        for one in check_machine(Plan.model_validate({**document, "tools": two}), {"PATH": ""})
    ]
    assert ["'t', 'u' are not confined to their workspace" in text for text in noted].count(
        True
    ) == 1
    with pytest.raises(PlanError, match="expected path, not a number"):
        Plan.model_validate(
            {**document, "tasks": [{"id": "a", "tool": "t", "arguments": {"x": 3}}]}
        )
