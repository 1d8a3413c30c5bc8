"""What is said about conditions before a plan runs: names that nothing has, and types that never fit."""

from __future__ import annotations

import pytest

from replanning.errors import PlanError
from replanning.plan.document import Plan
from replanning.plan.types import JsonObject
from replanning.tools import check_tools

ORDER: JsonObject = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "id": {"type": "string"},
        "count": {"type": "integer"},
        "lines": {
            "type": "array",
            "items": {"type": "object", "properties": {"n": {"type": "number"}}},
        },
        "note": {"type": ["string", "null"]},
        "paid": {"type": "boolean"},
        "pair": {"type": "array", "prefixItems": [{"type": "string"}]},
        "any": {},
    },
}
PARAMETERS: JsonObject = {"order_id": "string", "limit": "integer", "file": "path"}


def found(condition: str, **fields: object) -> list[str]:
    """What is wrong with a condition that a tool of a function states."""
    tool: JsonObject = {
        "name": "t",
        "kind": "python",
        "callable": "json:dumps",
        "parameters": PARAMETERS,
        "optional": ["limit", "file"],
        "expect": {"schema": ORDER, "where": [condition]},
        **fields,
    }
    task: JsonObject = {"id": "a", "tool": "t", "arguments": {"order_id": "W1"}}
    plan = Plan.model_validate({"goal": {"objective": "x"}, "tools": [tool], "tasks": [task]})
    problems = check_tools(plan)
    assert all(problem.place == "tools[0].expect.where[0]" for problem in problems)
    start = f"tool 't': condition {condition!r}: "
    assert all(problem.message.startswith(start) for problem in problems)
    return [problem.message.removeprefix(start) for problem in problems]


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        (
            "output.id == arguments.ordr_id",
            "the tool has no parameter 'ordr_id'; did you mean 'order_id'?; there is 'order_id', 'limit', 'file'",
        ),
        (
            "output.any or arguments.no",
            "the tool has no parameter 'no'; there is 'order_id', 'limit', 'file'",
        ),
        (
            "output.cuont",
            "output has no 'cuont'; did you mean 'count'?; there is 'id', 'count', 'lines', 'note', 'paid', 'pair', 'any'",
        ),
        ("output[0]", "output is an object, and has no 0"),
        ("output.id.first", "output.id is a text, and has no 'first'"),
        ("output.lines.n > 1", "output.lines is an array, and has no 'n'"),
        (
            "output.count == 'three'",
            "output.count is a number, and 'three' is a text: they are never equal",
        ),
        (
            "output.count != arguments.order_id",
            "output.count is a number, and arguments.order_id is a text: they are never equal",
        ),
        ("output.id < 3", "output.id is a text, and 3 is a number: neither is less than the other"),
        (
            "1 < output.count < text",
            "output.count is a number, and text is a text: neither is less than the other",
        ),
        (
            "not output.lines[-1].n == [1]",
            "output.lines[-1].n is a number, and [1] is an array: they are never equal",
        ),
        (
            "output.id >= -1",
            "output.id is a text, and -1 is a number: neither is less than the other",
        ),
        (
            "run.started == output.count",
            "run.started is a text, and output.count is a number: they are never equal",
        ),
        ("output.id in output.count", "output.count is a number, in which nothing can be"),
        (
            "output.count in output.id",
            "output.count is a number, and output.id is a text: only a text is in a text",
        ),
        ("output.count matches 'W*'", "`matches` compares texts, and output.count is a number"),
        ("output.id matches true", "`matches` compares texts, and true is a boolean"),
        (
            "len(output.count) > 1",
            "len is of a text, an array or an object, and output.count is a number",
        ),
        ("len(output) == 'a'", "len(output) is a number, and 'a' is a text: they are never equal"),
        ("output == 'a'", "output is an object, and 'a' is a text: they are never equal"),
    ],
)
def test_mistakes(condition, problem):
    """A condition that can never be meant is named with its place, what is known, and near names."""
    assert found(condition) == [problem]


@pytest.mark.parametrize(
    "condition",
    [
        "output.id == arguments.order_id and output.count <= arguments.limit",
        "output.note == null or output.note matches '*x*'",
        "output.id == null",
        "output.paid == 1",
        "output.any.thing.other < 3",
        "output.lines[0].m == 1",
        "output.pair[0].x == 1",
        "output.lines == [] or output.any in output.lines",
        "'n' in output and 'limit' in arguments",
        "arguments.file == output.count",
        "context.x == 1 and context.y == 'a'",
        "output.id in ['a', 'b']",
        "len(output.lines) > 0 and len(output.note) > 0",
        "output.id >= run.started",
    ],
)
def test_possible_conditions(condition):
    """What may be meant is no problem."""
    assert found(condition) == []


def test_parameters_of_servers():
    """The parameters of a tool of a server are known if its schema allows no others."""
    schema: JsonObject = {"properties": {"id": {"type": "string"}, "any": True}}
    fields = {"parameters": {}, "optional": [], "expect": {"where": ["arguments.order_id == 1"]}}
    open_ended = {**fields, "input_schema": schema}
    assert found("arguments.order_id == 1", **open_ended) == []
    closed = {**fields, "input_schema": {**schema, "additionalProperties": False}}
    # The task gives it, but no tool takes it.
    assert found("arguments.order_id == 1", **closed) == [
        "the tool has no parameter 'order_id'; there is 'id', 'any'"
    ]
    patterns = {
        **fields,
        "input_schema": {**schema, "additionalProperties": False, "patternProperties": {}},
    }
    assert found("arguments.order_id == 1", **patterns) == []


def problems(text: str) -> list[str]:
    """What is wrong with a plan, with its places."""
    return [str(problem) for problem in check_tools(Plan.parse(text))]


KINDS = """
goal: {objective: x}
mcp: {shop: {url: "http://localhost"}}
tools:
  - {name: sh, kind: shell, command: make, produces: [wheel]}
  - {name: named, kind: shell, command: "make {what}", produces: ["{what}"]}
  - {name: web, kind: http, url: "http://localhost/"}
  - {name: mcp, kind: mcp, server: shop}
  - {name: one, kind: http, url: "http://localhost/", capability: c}
  - {name: two, kind: shell, command: "true", capability: c}
tasks:
  - id: a
    tool: TOOL
    arguments: {what: x}
    expect: {where: ["CONDITION"]}
  - {id: b, tool: sh, depends_on: [a], when: "WHEN"}
"""


@pytest.mark.parametrize(
    ("tool", "name", "problem"),
    [
        ("sh", "exit_code == 0", ""),
        ("sh", "wheel", ""),
        ("sh", "json.id", ""),
        (
            "sh",
            "stdot",
            "output has no 'stdot'; did you mean 'stdout'?; there is 'exit_code', 'stdout', 'stderr', 'json', 'undecodable', 'wheel'",
        ),
        (
            "sh",
            "exit_code == 'x'",
            "output.exit_code is a number, and 'x' is a text: they are never equal",
        ),
        ("named", "anything", ""),
        ("web", "json.id", ""),
        (
            "web",
            "order_id",
            "output has no 'order_id'; did you mean output.json.order_id?; there is 'status', 'headers', 'json', 'text', 'undecodable'",
        ),
        (
            "mcp",
            "isError",
            "output has no 'isError'; did you mean output.json.isError?; there is 'text', 'json', 'content'",
        ),
        ("one", "anything", ""),
    ],
)
def test_kinds_of_tools(tool, name, problem):
    """The fields of commands, requests and tools of servers are known, also in the conditions of later tasks."""
    text = KINDS.replace("TOOL", tool).replace("CONDITION", f"output.{name}")
    result = f"results.a.{name}"
    expected = []
    if problem:
        expected.append(
            f"tasks[0].expect.where[0]: task 'a': condition {f'output.{name}'!r}: {problem}"
        )
        later = problem.replace("output", "results.a")
        expected.append(f"tasks[1].when: task 'b': condition {result!r}: {later}")
    assert problems(text.replace("WHEN", result)) == expected


AGREEING = """
goal: {objective: x}
tools:
  - {name: shop, kind: http, url: "http://a", capability: c, expect: {agrees_with: {tool: mirror, fields: ['TOOL']}}}
  - {name: mirror, kind: http, url: "http://b", capability: c, expect: {schema: {properties: {json: {type: array}}}}}
  - {name: other, kind: shell, command: ls, effect: none, capability: c}
tasks:
  - {id: a, tool: shop, expect: {agrees_with: {tool: other, fields: ['TASK']}, schema: {properties: {json: {type: object}}}}}
"""
FIELDS = "there is 'status', 'headers', 'json', 'text', 'undecodable'"


@pytest.mark.parametrize(
    ("tool", "task", "expected"),
    [
        ("json[0].total", "json.total", []),
        ("json", '["json"].x', []),
        (
            "total",
            "json",
            [f"tools[0]: 'total': output has no 'total'; did you mean json.total?; {FIELDS}"],
        ),
        (
            "jsn[0]",
            "json",
            [f"tools[0]: 'jsn[0]': output has no 'jsn'; did you mean 'json'?; {FIELDS}"],
        ),
        (
            "json.total",
            "json[0]",
            [
                "tools[0]: 'json.total' in the output of 'mirror': json is an array, and has no 'total'",
                "tasks[0]: 'json[0]': json is an object, and has no 0",
            ],
        ),
        (
            "text",
            "text",
            [
                (
                    "tasks[0]: 'text' in the output of 'other': output has no 'text'; did you mean json.text?; "
                    "there is 'exit_code', 'stdout', 'stderr', 'json', 'undecodable'"
                )
            ],
        ),
    ],
)
def test_compared_fields(tool, task, expected):
    """A path that is compared leads to something in both outputs, whatever else has the capability."""
    text = AGREEING.replace("TOOL", tool).replace("TASK", task)
    told = []
    for each in problems(text):
        place, message = each.split(".expect.agrees_with.fields[0]: ")
        told.append(f"{place}: {message.partition('the path ')[2]}")
    assert told == expected


def test_files_of_tools():
    """In a file of tools, a tool of a server may answer through the MCP proxy, by its content alone."""
    text = "goal: {objective: x}\nmcp: {s: {url: 'http://x'}}\ntools: [{name: t, kind: mcp, server: s, expect: {where: [output.id]}}]\n"
    assert problems(text) == []
    assert len(problems(f"{text}tasks: [{{id: a, tool: t}}]")) == 1


TASK = """
goal: {objective: x}
tools: [{name: t, kind: shell, command: "true", expect: {schema: {required: [exit_code]}}}]
tasks:
  - id: a
    tool: t
    arguments: {order_id: W1}
    expect: EXPECT
    fallbacks: [{tool: t, arguments: {id: W1}, expect: {where: [arguments.order_id]}}]
    undo: {tool: t, when: "'x' == 1"}
"""


@pytest.mark.parametrize(
    ("expect", "problem"),
    [
        (
            "{where: [text == arguments.order]}",
            "the task gives no argument 'order'; did you mean 'order_id'?; there is 'order_id'",
        ),
        (
            "{where: [arguments.z or arguments.y]}",
            "the task gives no argument 'z'; there is 'order_id'",
        ),
        ("{where: ['text and not arguments.y']}", ""),
        ("{where: ['\"y\" in arguments and arguments.y']}", ""),
        ("{where: ['\"y\" not in arguments or arguments.y']}", ""),
        ("{where: ['arguments.y or \"y\" in arguments']}", ""),
        (
            "{schema: {properties: {json: {type: array}}}, where: [output.json.x]}",
            "output.json is an array, and has no 'x'",
        ),
    ],
)
def test_tasks(expect, problem):
    """A task is held to its own arguments and schema, where it surely needs them; so are fallbacks and undo tasks."""
    expected = [
        (
            "tasks[0].fallbacks[0].expect.where[0]: task 'a': condition 'arguments.order_id': "
            "the task gives no argument 'order_id'; there is 'id'"
        ),
        (
            "tasks[0].undo.when: task 'a': condition \"'x' == 1\": "
            "'x' is a text, and 1 is a number: they are never equal"
        ),
    ]
    first, *rest = [*problems(TASK.replace("EXPECT", expect))]
    if problem:
        assert first.startswith("tasks[0].expect.where[0]: task 'a': condition ")
        assert first.endswith(f": {problem}")
        assert rest == expected
    else:
        assert [first, *rest] == expected


def test_without_arguments():
    """A task without arguments has none to compare."""
    text = "goal: {objective: x}\ntools: [{name: t, kind: shell, command: 'true'}]\ntasks: [{id: a, tool: t, expect: {where: [arguments.id]}}]"
    [problem] = problems(text)
    assert problem.endswith("the task gives no argument 'id'; there is none")


RESULTS = """
goal: {objective: x}
tools: [{name: t, expect: {where: [TOOL]}}]
tasks:
  - {id: first}
  - {id: second, depends_on: [first], tool: t}
  - {id: third, expect: {where: [TASK]}, undo: {expect: {where: [results.third == 1]}}}
"""


@pytest.mark.parametrize(
    ("tool", "task", "problem"),
    [
        ("results.first == 1", "output", ""),
        ("'\"third\" not in results or results.third < output'", "output", ""),
        (
            "results.third == 1",
            "output",
            (
                "tasks[1].tool: task 'second' refers to results.third in what its tool 't' expects and does not depend on "
                "'third': add 'third' to its depends_on"
            ),
        ),
        (
            "output",
            "results.second == 1",
            (
                "tasks[2].expect.where[0]: task 'third' refers to results.second and does not depend on 'second': add "
                "'second' to its depends_on"
            ),
        ),
        (
            "output",
            "results.secnd == 1",
            (
                "tasks[2].expect.where[0]: task 'third' refers to results.secnd, and 'secnd' is no task of the plan; did you "
                "mean 'second'?"
            ),
        ),
        (
            "output",
            "results.third == 1",
            "tasks[2].expect.where[0]: task 'third' refers to its own output with results.third",
        ),
    ],
)
def test_results(tool, task, problem):
    """Results of tasks that there are not, or that may end later, are no condition on an output."""
    text = RESULTS.replace("TOOL", tool).replace("TASK", task)
    if not problem:
        Plan.parse(text)
        return
    with pytest.raises(PlanError) as refused:
        Plan.parse(text)
    [said] = refused.value.problems
    place, _, message = problem.partition(": ")
    assert said.place.endswith(place)
    assert said.message == message
