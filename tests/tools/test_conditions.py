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
        ("output.id < 3", "output.id is a text, and 3 is a number: they have no order"),
        (
            "1 < output.count < text",
            "output.count is a number, and text is a text: they have no order",
        ),
        (
            "not output.lines[-1].n == [1]",
            "output.lines[-1].n is a number, and [1] is an array: they are never equal",
        ),
        (
            "output.id >= -1",
            "output.id is a text, and -1 is a number: they have no order",
        ),
        (
            "run.started == output.count",
            "run.started is a text, and output.count is a number: they are never equal",
        ),
        ("output.id in output.count", "output.count is a number, which cannot contain anything"),
        (
            "output.count in output.id",
            "output.count is a number, and output.id is a text: a text contains only text",
        ),
        ("output.count matches 'W*'", "`matches` compares texts, and output.count is a number"),
        ("output.id matches true", "`matches` compares texts, and true is a boolean"),
        (
            "len(output.count) > 1",
            "len takes a text, an array or an object, and output.count is a number",
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


CONFIRMED = """
goal: {objective: x}
mcp: {shop: {url: "http://a"}}
tools:
  - name: pay
    kind: python
    callable: "json:dumps"
    capability: c
    parameters: {order: string, amount: number, note: string}
    optional: [note]
    confirm: TOOL
  - name: find
    kind: python
    callable: "json:loads"
    capability: c
    effect: none
    expect:
      schema:
        type: object
        additionalProperties: false
        properties: {found: {type: integer}, payment: {type: object}, state: {type: string}, by: {}}
  - {name: look, kind: http, url: "http://a"}
  - {name: other, kind: python, callable: "json:dumps", capability: c, confirm: {tool: find, when: output.found}}
  - {name: same, kind: shell, command: "true", capability: c}
tasks:
  - {id: first, tool: find}
  - {id: a, tool: pay, depends_on: [first], arguments: {order: W1, amount: 5}, confirm: TASK}
  - {id: b, tool: other, depends_on: [first], arguments: {order: W1}, confirm: OTHER}
"""
DONE = "{tool: find, when: output.found > 0}"
FINDS = "there is 'found', 'payment', 'state', 'by'"
TAKES = "there is 'order', 'amount', 'note'"


def confirmed(**stated: str) -> list[str]:
    """What is wrong with confirmations of a tool, of a task, and of a task whose tool takes any arguments."""
    text = CONFIRMED
    for name in ("TOOL", "TASK", "OTHER"):
        text = text.replace(name, stated.get(name, DONE))
    return problems(text)


@pytest.mark.parametrize(
    ("fields", "place", "problem"),
    [
        (
            "when: output.fuond > 0",
            "when",
            f"condition 'output.fuond > 0': output has no 'fuond'; did you mean 'found'?; {FINDS}",
        ),
        (
            "when: output.state > 0",
            "when",
            (
                "condition 'output.state > 0': output.state is a text, and 0 is a number: they have no order"
            ),
        ),
        (
            "when: output.found == arguments.ordr",
            "when",
            (
                "condition 'output.found == arguments.ordr': the tool has no parameter 'ordr'; "
                f"did you mean 'order'?; {TAKES}"
            ),
        ),
        (
            "when: output.found, arguments: {key: ['${arguments.ordr}-${arguments.ordr}']}",
            "arguments.key",
            f"${{arguments.ordr}}: the tool has no parameter 'ordr'; did you mean 'order'?; {TAKES}",
        ),
        (
            "when: output.found, arguments: {key: '${arguments.z}'}",
            "arguments.key",
            f"${{arguments.z}}: the tool has no parameter 'z'; {TAKES}",
        ),
        (
            "when: output.found, arguments: {key: '${results.first.z}'}",
            "arguments.key",
            f"${{results.first.z}}: results.first has no 'z'; {FINDS}",
        ),
        (
            "when: output.found, output: {id: 'no ${output.paymnt.id}'}",
            "output",
            f"${{output.paymnt.id}}: output has no 'paymnt'; did you mean 'payment'?; {FINDS}",
        ),
        (
            "when: output.found, output: '${output.state.id}'",
            "output",
            "${output.state.id}: output.state is a text, and has no 'id'",
        ),
        (
            "when: output.found, output: '${arguments.ordr}'",
            "output",
            f"${{arguments.ordr}}: the tool has no parameter 'ordr'; did you mean 'order'?; {TAKES}",
        ),
    ],
)
def test_confirmations(fields, place, problem):
    """A confirmation is held to the output of the tool that it asks, and to the parameters of the one it is about."""
    stated = f"{{tool: find, {fields}}}"
    assert confirmed(TOOL=stated) == [f"tools[0].confirm.{place}: tool 'pay': {problem}"]
    assert confirmed(TASK=stated) == [f"tasks[1].confirm.{place}: task 'a': {problem}"]


@pytest.mark.parametrize(
    ("fields", "place", "problem"),
    [
        (
            "when: output.found == arguments.ordr",
            "when",
            (
                "condition 'output.found == arguments.ordr': the task gives no argument 'ordr'; "
                "did you mean 'order'?; there is 'order'"
            ),
        ),
        (
            "when: output.found, arguments: {key: '${arguments.ordr}'}",
            "arguments.key",
            "${arguments.ordr}: the task gives no argument 'ordr'; did you mean 'order'?; there is 'order'",
        ),
        (
            "when: output.found, output: 'paid ${arguments.note}'",
            "output",
            "${arguments.note}: the task gives no argument 'note'; there is 'order'",
        ),
    ],
)
def test_confirmations_of_tasks_whose_tools_take_anything(fields, place, problem):
    """Where a tool states no parameters, only a task knows which arguments there are."""
    stated = f"{{tool: find, {fields}}}"
    assert confirmed(OTHER=stated) == [f"tasks[2].confirm.{place}: task 'b': {problem}"]


@pytest.mark.parametrize(
    "stated",
    [
        DONE,
        "{tool: find, when: output.found == 1 and output.by.any > 2, output: '${output}'}",
        "{tool: find, when: output.payment.any and text, output: {id: '${output.payment.id}', at: '${text}'}}",
        "{tool: find, when: 'output.found and context.x', output: '$${output.x} ${context.x}'}",
        "{tool: find, when: output.found, arguments: {key: '${arguments.note}', by: '${idempotency_key}'}}",
        "{tool: find, when: output.found, arguments: {key: ['${arguments.order}'], id: '${arguments.amount}-${arguments.order}'}}",
        "{tool: find, when: 'not output.found or arguments.note', output: '${arguments.order[0]}'}",
        "{tool: look, when: output.json.anything == 1, output: '${output.json.any[0].other}'}",
        "{tool: shop.find, when: output.any > output.other, output: '${output.one}'}",
    ],
)
def test_possible_confirmations(stated):
    """What may be asked is no problem, and an argument that the call may leave out is left out of the question."""
    assert confirmed(TOOL=stated, TASK=stated) == []


UNDONE = """
goal: {objective: x}
mcp: {shop: {url: "http://a"}}
tools:
  - name: book
    kind: python
    callable: "json:dumps"
    expect:
      schema: {additionalProperties: false, properties: {id: {type: string}, at: {type: [object, "null"]}}}
    undo: {tool: cancel, arguments: {id: TOOL}}
  - {name: order, kind: http, method: POST, url: "http://a", undo: {tool: cancel, arguments: {id: "${output.json.id}"}}}
  - name: remote
    kind: mcp
    server: shop
    input_schema: {properties: {id: {}}, additionalProperties: false}
    undo: {tool: cancel, arguments: {id: "${arguments.id}"}}
  - {name: cancel, kind: python, callable: "json:dumps"}
tasks:
  - {id: a.b, tool: book, undo: {tool: cancel, arguments: {id: TASK}}}
  - {id: c, tool: cancel, undo: {tool: cancel, arguments: {id: "${c.output.any}"}}}
"""


def undone(tool: str, task: str) -> list[str]:
    """What is wrong with the arguments by which a tool, and one of its tasks, take a call back."""
    return problems(UNDONE.replace("TOOL", f"'{tool}'").replace("TASK", f"'{task}'"))


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("idd", " has no 'idd'; did you mean 'id'?; there is 'id', 'at'"),
        ("id.first", ".id is a text, and has no 'first'"),
        ("id", ""),
        ("at.any", ""),
    ],
)
def test_undo(path, problem):
    """What takes a call back reads the output of that call, and nothing that the output never has."""
    expected = []
    if problem:
        expected = [
            f"tools[0].undo.arguments.id: tool 'book': ${{output.{path}}}: output{problem}",
            f"tasks[0].undo.arguments.id: task 'a.b': ${{a.b.output.{path}}}: a.b.output{problem}",
        ]
    assert undone(f"no ${{output.{path}}}", f"no ${{a.b.output.{path}}}") == expected


def test_arguments_of_an_undo():
    """What a call never takes cannot be given to what takes it back; values and the context may be anything."""
    assert undone("$${output.idd} ${context.x} ${arguments.any}", "${context.x}") == []
    text = UNDONE.replace("${arguments.id}", "${arguments.idd}").replace("TOOL", "x")
    assert problems(text.replace("TASK", "x")) == [
        (
            "tools[2].undo.arguments.id: tool 'remote': ${arguments.idd}: the tool has no parameter 'idd'; "
            "did you mean 'id'?; there is 'id'"
        )
    ]


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
                "tasks[2].expect.where[0]: task 'third' refers to results.secnd, and 'secnd' is not a task of the plan; did you "
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
