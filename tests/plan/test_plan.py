"""The plan document: what it takes, what it refuses, and how it says so."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from replanning.errors import PlanError, UnknownTask
from replanning.plan.checks import TaskScope, check_task
from replanning.plan.document import Plan
from replanning.plan.reading import read_document
from replanning.plan.tasks import (
    CALL_FIELDS,
    Fallback,
    Goal,
    Retry,
    Task,
    ToolSpec,
    for_another_tool,
)
from replanning.plan.types import JsonObject, TaskId


def plan_of(*tasks: JsonObject, **fields: object) -> Plan:
    """A plan of these tasks."""
    return Plan.model_validate({"goal": {"objective": "ship it"}, "tasks": tasks, **fields})


def problems_of(*tasks: JsonObject, **fields: object) -> list[str]:
    """Place and message of everything that is wrong with such a plan."""
    with pytest.raises(PlanError) as refused:
        plan_of(*tasks, **fields)
    return [str(problem) for problem in refused.value.problems]


def places_of(*tasks: JsonObject, **fields: object) -> list[str]:
    """Places of everything that is wrong with such a plan."""
    return [problem.split(": ")[0] for problem in problems_of(*tasks, **fields)]


DESCRIBING_FIELDS = {
    *("name", "capability", "description", "parameters", "optional", "input_schema"),
    *("requires", "adds", "removes", "needs", "produces", "resources", "cost", "available"),
    *("effect", "dangerous", "idempotent", "idempotency_header", "undo", "undo_on_replace"),
    *("confirm", "expect", "transient", "accepted", "timeout", "retry"),
}
"""The fields of a tool that say what its calls do, need and may be done with."""


def test_every_field_of_a_tool_is_classified():
    """A field of a tool either says what is called, so that results depend on it, or describes it."""
    unknown = ToolSpec.model_fields.keys() - CALL_FIELDS - DESCRIBING_FIELDS
    assert not unknown, "add them to CALL_FIELDS of replanning/plan/tasks.py, or to the others here"


def test_parameters_that_a_tool_does_not_declare():
    """A tool without parameters takes the placeholders of its facts, command, address, headers and body."""
    tool = ToolSpec(
        name="book",
        kind="http",
        adds=("booked({seat})",),
        url="https://shop.example/{event}",
        headers={"Accept-Language": "{language}", "Idempotency-Key": "{idempotency_key}"},
        body={"{never}": ["{name}"]},
    )
    assert dict(tool.parameter_types) == dict.fromkeys(("seat", "language", "name", "event"), "any")


def test_frozen():
    """No field of a plan can be set after it was made."""
    plan = plan_of({"id": "a"})
    for part, name in ((plan, "name"), (plan.tasks[0], "priority")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, name, None)


def test_lookup():
    """Tasks and tools are found by name, and a near name is proposed; a copy with others finds its own."""
    plan = plan_of({"id": "build", "tool": "make"}, tools=[{"name": "make"}])
    assert plan.task("build") is plan.tasks[0]
    assert plan.tool("make") is plan.tools[0]
    assert plan.tool("cmake") is plan.tool(None) is None
    with pytest.raises(UnknownTask, match="no task 'biuld'; did you mean 'build'"):
        plan.task("biuld")
    copy = plan.model_copy(
        update={"tasks": (Task(id=TaskId("b")),), "tools": (ToolSpec(name="y"),)}
    )
    assert copy.task("b").id == "b"
    assert copy.tool("make") is None
    with pytest.raises(UnknownTask):
        copy.task("build")


def test_lists_and_included_plans():
    """A task that includes no plan passes nothing on, and the key of an element is about the element."""
    assert problems_of({"id": "a", "with": {"x": 1}, "outputs": {"y": "${b.output}"}}) == [
        "tasks[0].with: task 'a': `with` needs `include`, which is missing",
        "tasks[0].outputs: task 'a': `outputs` needs `include`, which is missing",
    ]
    (problem,) = problems_of({"id": "a", "for_each": [1], "key": "${context.name}"})
    assert problem.startswith("tasks[0].key: '${context.name}' is not a reference here")


@pytest.mark.parametrize(
    ("field", "value"),
    [("key", "${item}"), ("max_items", 2), ("max_parallel", 2), ("on_item_failure", "skip")],
)
def test_fields_of_lists_need_a_list(field, value):
    """What a task states about the elements of a list is refused where it has no `for_each`."""
    problem = f"task 'a': `{field}` needs `for_each`, which is missing"
    assert problems_of({"id": "a", field: value}) == [f"tasks[0].{field}: {problem}"]


@pytest.mark.parametrize(
    ("fields", "place", "found"),
    [
        ({"for_each": "${item.parts}"}, "for_each", "${item.parts}"),
        ({"arguments": {"x": "${item}"}}, "arguments", "${item}"),
        ({"when": "index > 1"}, "when", "the condition 'index > 1'"),
        ({"expect": {"where": ["key != 1"]}}, "expect.where[0]", "the condition 'key != 1'"),
        (
            {"confirm": {"tool": "find", "arguments": {"x": "${item}"}, "when": "output"}},
            "confirm.arguments",
            "${item}",
        ),
        (
            {"confirm": {"tool": "find", "when": "output", "output": {"n": "${key}"}}},
            "confirm.output",
            "${key}",
        ),
        (
            {"confirm": {"tool": "find", "when": "output == item"}},
            "confirm.when",
            "the condition 'output == item'",
        ),
        (
            {"fallbacks": [{"expect": {"where": ["output", "item"]}}]},
            "fallbacks[0].expect.where[1]",
            "the condition 'item'",
        ),
    ],
)
def test_elements_need_a_list(fields, place, found):
    """A task that reads an element is refused where it has no `for_each`, wherever it reads it."""
    problem = f"task 'a': {found} refers to an element: only a task with `for_each` has any"
    assert problems_of({"id": "a", **fields}) == [f"tasks[0].{place}: {problem}"]


@pytest.mark.parametrize(
    ("stated", "found"),
    [
        ({"expect": {"where": ["output", "item > 1"]}}, "the condition 'item > 1'"),
        ({"confirm": {"tool": "find", "when": "output == key"}}, "the condition 'output == key'"),
        ({"undo": {"tool": "find", "arguments": {"x": "${index}"}}}, "${index}"),
    ],
)
def test_tools_that_read_elements(stated, found):
    """A tool that reads the element of a list is only for tasks with `for_each`."""
    tools = [{"name": "make", **stated}, {"name": "find", "effect": "none"}]
    problem = (
        f"{found} of its tool 'make' refers to an element: only a task with `for_each` has any"
    )
    assert problems_of({"id": "a", "tool": "make"}, tools=tools) == [
        f"tasks[0].tool: task 'a': {problem}"
    ]
    assert plan_of({"id": "a", "for_each": [1], "tool": "make"}, tools=tools).task("a").for_each


def test_wrong_parameters_of_an_included_plan():
    """What is wrong with the parameters that an included plan declares is told with its place there."""
    included = {"parameters": {"n": "strng", "9x": "string"}, "tasks": [{"id": "b"}]}
    assert problems_of({"id": "a", "include": included}) == [
        (
            "tasks[0].include.parameters.n.type: expected 'string', 'integer', 'number', 'boolean', "
            "'array' or 'object', got 'strng'; did you mean 'string'?"
        ),
        (
            'tasks[0].include.parameters["9x"]: expected a name of letters, digits, _ and - that '
            "begins with a letter or _, got '9x'"
        ),
    ]


def test_another_tool_is_not_taken_back():
    """That the effect of a task is taken back before another call takes its place is not said of another tool."""
    task = Task.model_validate({"id": "a", "tool": "pay", "undo_on_replace": True})
    assert for_another_tool(task) == {"undo_on_replace": None}


def test_sequential():
    """In a sequential plan each task depends on the one before it, stated once."""
    plan = plan_of({"id": "a"}, {"id": "b"}, {"id": "c", "depends_on": ["b"]}, sequential=True)
    assert [task.depends_on for task in plan.tasks] == [(), ("a",), ("b",)]


@pytest.mark.parametrize("blank", [" ", "\u2003", "\u2028", " \t\n"])
def test_blank_facts(blank):
    """Whitespace around commas makes no other fact; a fact of nothing but whitespace is refused."""
    assert plan_of(facts=["on( a ,  b )"]).facts == ("on( a,b )",)
    assert problems_of(facts=[blank], goal={"objective": "x", "facts": [blank]}) == [
        "goal.facts[0]: must be more than whitespace",
        "facts[0]: must be more than whitespace",
    ]


def test_grounding():
    """Facts before, after and no longer after a use are its tool's patterns filled with the arguments."""
    move = ToolSpec(
        name="move",
        requires=("on({x}, {y})", "idle"),
        adds=("on({x},{z})", "{{x}} ${HOME} {x y} {}"),
        removes=("on({x},{y})",),
        needs=("{x}.key",),
        produces=("log",),
    )
    arguments: JsonObject = {"x": "a, b", "y": 2, "z": {"k": True}}
    assert move.preconditions(arguments) == ("on(a,b,2)", "idle", "artifact(a,b.key)")
    assert move.additions(arguments) == (
        'on(a,b,{"k":true})',
        "{x} ${HOME} {x y} {}",
        "artifact(log)",
    )
    assert move.deletions(arguments) == ("on(a,b,2)",)
    with pytest.raises(
        PlanError, match=r"tool 'move': 'on\(\{x\},\{y\}\)' needs the arguments \['x'\]"
    ):
        move.deletions({"y": 1})


def test_written_and_validated_again():
    """A plan that is written begins each task with its id; one that is validated again is the same object."""
    plan = plan_of({"tool": "x", "id": "a"})
    assert plan.to_yaml().endswith("tasks:\n- id: a\n  tool: x\n")
    assert Plan.model_validate(plan) is plan


REFUSED = {
    "names that are not unique": """
        tools: [{name: x}, {name: x}]
        tasks: [{id: a}, {id: a}]

        tools[1].name: tool 'x' is already defined as tools[0]; each needs its own name
        tasks[1].id: task 'a' is already defined as tasks[0]; each needs its own id
    """,
    "dangling, own and repeated dependencies": """
        tasks: [{id: build}, {id: b, depends_on: [biuld, b, build, build]}]

        tasks[1].depends_on[0]: task 'b' depends on 'biuld', which is not a task of the plan; did you mean 'build'?
        tasks[1].depends_on[1]: task 'b' depends on itself
        tasks[1].depends_on[3]: task 'b' depends on 'build' twice
    """,
    "the shortest cycle of each set of tasks that wait for one another": """
        tasks:
        - {id: a, depends_on: [b]}
        - {id: b, depends_on: [c, a]}
        - {id: c, depends_on: [a]}
        - {id: d, depends_on: [c, e]}
        - {id: e, depends_on: [d]}
        - {id: f, depends_on: [e]}

        tasks[0].depends_on: dependency cycle: 'a' → 'b' → 'a'; remove one of these
          dependencies
        tasks[3].depends_on: dependency cycle: 'd' → 'e' → 'd'; remove one of these
          dependencies
    """,
    "a dependency against the order of a sequential plan": """
        {sequential: true, tasks: [{id: a, depends_on: [b]}, {id: b}]}

        tasks[0].depends_on: dependency cycle: 'a' → 'b' → 'a'; remove one of these
          dependencies
    """,
    "tools that are not described, in fallbacks and undos as well": """
        tools: [{name: pytest}]
        tasks:
        - {id: a, tool: pyest, fallbacks: [{tool: none, undo: {tool: gone}}]}
        - {id: b, tool: pytest}
        - {id: c}

        tasks[0].tool: task 'a': there is no tool 'pyest'; did you mean 'pytest'?; describe it under `tools`
        tasks[0].fallbacks[0].tool: task 'a': there is no tool 'none'; describe it under `tools`
        tasks[0].fallbacks[0].undo.tool: task 'a': there is no tool 'gone'; describe it under `tools`
    """,
    "what takes the effect of a tool back": """
        tools:
        - {name: book, parameters: {what: string}, undo: {tool: cancel, arguments: {id: "${output.id}", of: "${arguments.what} ${context.x}"}}}
        - {name: cancel, parameters: {id: any, of: any}}
        - {name: a, undo: {tool: cancle, arguments: {id: 1}}}
        - {name: b, undo: {tool: cancel, arguments: {id: "${b.output}", of: 1}}}
        - {name: c, undo: {tool: cancel, arguments: {id: "${output"}}}
        - {name: d, parameters: {what: any}, undo: {tool: cancel, arguments: {id: "${arguments.waht}", of: "$${arguments.waht}"}}}
        - {name: e, undo: {tool: cancel, arguments: {id: "${arguments}", of: "${outputs}"}}}
        - {name: f, undo: {tool: cancel, arguments: {id: "${arguments.any[0]}", of: "${output}"}}}

        tools[2].undo.tool: tool 'a': its undo: there is no tool 'cancle'; did you mean 'cancel'?; describe it under `tools`
        tools[3].undo.arguments: tool 'b': its undo: '${b.output}' is not a reference here: write ${output},
          ${arguments.NAME}, ${context.NAME}, ${parameters.NAME}, or ${results.NAME}
        tools[4].undo.arguments: tool 'c': its undo: tool 'cancel' needs the argument 'of' (any)
        tools[4].undo.arguments: tool 'c': its undo: '${' is not a reference here: write ${output}, ${arguments.NAME},
          ${context.NAME}, ${parameters.NAME}, or ${results.NAME}
        tools[5].undo.arguments: tool 'd': its undo: 'd' has no parameter 'waht'; did you mean 'what'?
        tools[6].undo.arguments: tool 'e': its undo: '${arguments}' is not a reference here: write ${output},
          ${arguments.NAME}, ${context.NAME}, ${parameters.NAME}, or ${results.NAME}
    """,
    "arguments that are missing, unknown or of another type than the parameter": """
        objects: {b1: block, table: surface}
        tools: [{name: t, parameters: {s: string, i: integer, n: number, l: array, b: block, any: any}}]
        tasks:
        - {id: a, tool: t, arguments: {s: 1, i: true, n: '1', l: {}, b: table, colour: red}}
        - {id: b, tool: t, arguments: {s: '', i: 1, n: 1.5, l: [], b: b1, any: null}}
        - id: c
          tool: t
          depends_on: [b]
          arguments: {s: "${b.output}", i: "${b.output}", n: "${b.output}", l: "${b.output}", b: "${b.output}", any: 1}

        tasks[0].arguments.s: task 'a': argument 's' of tool 't' is 1, expected string, not a number
        tasks[0].arguments.i: task 'a': argument 'i' of tool 't' is True, expected integer, not a boolean
        tasks[0].arguments.n: task 'a': argument 'n' of tool 't' is '1', expected number, not a string
        tasks[0].arguments.l: task 'a': argument 'l' of tool 't' is {}, expected array, not an object
        tasks[0].arguments.b: task 'a': argument 'b' of tool 't' is 'table', expected an object of type 'block'
          as `objects` states them
        tasks[0].arguments: task 'a': tool 't' needs the argument 'any' (any)
        tasks[0].arguments.colour: task 'a': tool 't' has no parameter 'colour'; it has ['s', 'i', 'n', 'l',
          'b', 'any']
    """,
    "arguments that the command and patterns of a tool without parameters name, but for the idempotency key": """
        tools:
        - {name: t, kind: shell, command: "awk '{print}' {file}", headers: {H: '{h}', I: '{idempotency_key}'}, adds: ['{f}']}
        tasks: [{id: a, tool: t, arguments: {file: x}}]

        tasks[0].arguments: task 'a': tool 't' names {f} in its adds: add that argument
        tasks[0].arguments: task 'a': tool 't' names {print} in its command: add that argument; write {{print}}
          there if the braces are meant
        tasks[0].arguments: task 'a': tool 't' names {h} in its headers: add that argument
    """,
    "tools that lack what their kind needs, and parameters of types that do not exist": """
        tools:
        - {name: s, kind: shell}
        - {name: h, kind: http, method: GET}
        - {name: p, kind: python, callable: module}
        - {name: q, kind: other, parameters: {x: strin}, adds: ["on({x},{y})"]}
        tasks: [{id: a, tool: q, arguments: {x: 1}}]

        tools[0]: tool 's' is of kind shell and has no command
        tools[1]: tool 'h' is of kind http and has no url
        tools[2].callable: tool 'p': 'module' is not of the form module:function
        tools[3].parameters.x: tool 'q': there is no type 'strin'; did you mean 'string'?; expected one of
          string, path, integer, number, boolean, array, object, any, or a type that `objects` states
        tools[3].adds: tool 'q': {y} in adds is not one of its parameters
    """,
    "commands of servers with NUL, which no program can be given": """
        mcp: {web: {command: ["a\\0"]}}

        mcp.web: MCP server 'web': its command holds the character NUL
    """,
    "an optional parameter that does not exist": """
        tools: [{name: t, parameters: {a: string, b: string, left: string}, optional: [bb, left]}]
        tasks: [{id: x, tool: t, arguments: {a: '1'}}]

        tools[0].optional[0]: tool 't': 'bb' is not one of its parameters; did you mean 'b'?
        tasks[0].arguments: task 'x': tool 't' needs the argument 'b' (string)
    """,
    "demands for resources that the plan has not, or not so much of": """
        resources: {cpu: 4}
        tools: [{name: big, resources: {cpu: 8, disc: 1}}]
        tasks:
        - {id: a, resources: {cpu: 5}}
        - {id: b, tool: big}
        - {id: c, tool: big, resources: {cpu: 4, gpu: 1}}

        tools[0].resources.disc: tool 'big': the plan has no resource 'disc'; state its capacity under
          `resources`
        tasks[0].resources.cpu: task 'a': it takes 5 of 'cpu', but the plan has only 4
        tasks[1].tool: task 'b': its tool 'big' takes 8 of 'cpu', but the plan has only 4
        tasks[2].resources.gpu: task 'c': the plan has no resource 'gpu'; did you mean 'cpu'?; state its
          capacity under `resources`
    """,
    "results of tasks that are not surely done before": """
        tasks:
        - {id: a}
        - {id: d, arguments: {x: ["${a.output.p}"]}, when: results.a.ok}
        - {id: e, arguments: {x: "${e.output}"}, undo: {arguments: {x: "${e.output}"}}}
        - {id: f, depends_on: [a]}
        - {id: g, depends_on: [f], arguments: {x: "${a.output} ${f.output.y}"}, when: results.a}

        tasks[1].arguments: task 'd' refers to ${a.output.p} and does not depend on 'a': add 'a' to its
          depends_on
        tasks[1].when: task 'd' refers to results.a and does not depend on 'a': add 'a' to its depends_on
        tasks[2].arguments: task 'e' refers to its own output with ${e.output}
    """,
    "results that a confirmation reads before they are surely there": """
        tools:
        - {name: t, confirm: {tool: f, when: "results.a.ok and results.b.ok", arguments: {x: "${results.a.id}", y: "${context.a}"}}}
        - {name: u, confirm: {tool: f, when: "output or 'gone' in results", output: "${output} ${results.a.id}"}, expect: {where: [results.b]}}
        - {name: f, effect: none}
        tasks:
        - {id: a}
        - {id: b, tool: t, depends_on: [a], undo: {tool: t, confirm: {tool: f, when: results.b}}}
        - {id: c, tool: u}
        - {id: d, confirm: {tool: f, when: "results.a > output", arguments: {x: ["${results.a.x} ${results.c}"]}, output: "${results.d}"}}
        - {id: e, depends_on: [a, b], tool: u}
        - {id: g, depends_on: [a, b], tool: t}

        tasks[1].tool: task 'b' refers to its own output with results.b in what its tool 't' states under `confirm`
        tasks[2].tool: task 'c' refers to results.b in what its tool 'u' expects and does not depend on 'b': add 'b' to its depends_on
        tasks[2].tool: task 'c' refers to results.a in what its tool 'u' states under `confirm` and does not depend on 'a': add 'a'
          to its depends_on
        tasks[3].confirm.when: task 'd' refers to results.a and does not depend on 'a': add 'a' to its depends_on
        tasks[3].confirm.arguments: task 'd' refers to results.a and does not depend on 'a': add 'a' to its depends_on
        tasks[3].confirm.arguments: task 'd' refers to results.c and does not depend on 'c': add 'c' to its depends_on
        tasks[3].confirm.output: task 'd' refers to its own output with results.d
    """,
    "results that a confirmation reads of tasks that do not exist": """
        tools:
        - {name: t, confirm: {tool: f, when: output, output: "${results.biuld.id}"}}
        - {name: f, effect: none}
        tasks:
        - {id: build}
        - {id: a, tool: t, depends_on: [build], confirm: {tool: f, when: results.buld}}

        tasks[1].confirm.when: task 'a' refers to results.buld, and 'buld' is not a task of the plan; did you mean 'build'?
        tasks[1].tool: task 'a' refers to results.biuld in what its tool 't' states under `confirm`, and 'biuld' is not a task of the
          plan; did you mean 'build'?
    """,
    "conditions and references that cannot be read": """
        tasks: [{id: a, when: "f(1)", arguments: {x: "${HOME}"}}]

        tasks[0].arguments: task 'a': '${HOME}' is not a reference: write ${TASK.output}, ${TASK.output.name[0]},
          ${context.name} or ${parameters.name}, or $${HOME} for the text itself
        tasks[0].when: task 'a': condition 'f(1)', column 1: a condition has no calls but len(…),
          only names, literals, comparisons, matches, len(…), and / or / not over context.*, parameters.*, results.* and status.*
    """,
    "results of tasks that do not exist, in fallbacks as well": """
        tasks:
        - {id: build}
        - {id: d, fallbacks: [{when: results.z}]}
        - {id: e, arguments: {x: "${biuld.output}"}}

        tasks[1].fallbacks[0].when: task 'd' refers to results.z, and 'z' is not a task of the plan
        tasks[2].arguments: task 'e' refers to ${biuld.output}, and 'biuld' is not a task of the plan; did you mean
          'build'?
    """,
}
"""Plans and, after an empty line, what is told of them."""


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_refused(text):
    """Everything that does not fit together is told with its place, and nothing that is right is blamed for it."""
    plan, told = text.split("\n\n")
    fields = read_document(plan, format="yaml")
    assert isinstance(fields, dict)
    assert " ".join(problems_of(**fields)) == " ".join(told.split())


def test_long_cycle():
    """A long cycle is shown by its first tasks."""
    tasks: list[JsonObject] = [
        {"id": f"t{i}", "depends_on": [f"t{(i + 1) % 20}"]} for i in range(20)
    ]
    [problem] = problems_of(*tasks)
    assert "'t0' → 't1' → " in problem
    assert "'t8' → … (11 more) … → 't0';" in problem


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"priority": "1"}, "expected a whole number, got '1'"),
        ({"priority": True}, "expected a whole number, got True"),
        ({"timeout": 0}, "must be more than 0, got 0"),
        ({"timeout": float("inf")}, "expected a finite number, got inf"),
        (
            {"optional": "yes"},
            "expected true or false, got 'yes'; yes, no, on and off are text here",
        ),
        ({"name": 5}, "expected text, got 5; put it in quotes"),
        ({"name": "a\x1bb"}, "'a\\x1bb' must not contain control characters"),
        ({"id": " x"}, "' x' must not begin or end with whitespace"),
        ({"id": "x\t"}, "'x\\t' must not begin or end with whitespace"),
        ({"id": "a\x9f"}, "'a\\x9f' must not contain control characters"),
        ({"id": ""}, "must not be empty"),
        ({"id": "x" * 201}, "has 201 characters, at most 200 are allowed"),
        ({"tool": "a\x00b"}, "'a\\x00b' must not contain control characters"),
        ({"depends_on": "a"}, "expected a list, got 'a'; put it in brackets"),
        ({"resources": []}, "expected a mapping of names to values, got []"),
        ({"resources": {"cpu": -1}}, "must be at least 0, got -1"),
        ({"retry": 3}, "expected a mapping of fields to values, got 3"),
        ({"retry": {"max_attempts": 0}}, "must be at least 1, got 0"),
        ({"metadata": {"body": {"x": [float("nan")]}}}, "expected a finite number, got nan"),
        ({"arguments": {"x": {"dict": object}}}, "expected a JSON value, got <class 'object'>"),
        (
            {"name": "\ud800"},
            "Input should be a valid string, unable to parse raw data as a unicode string, got '\\ud800'",
        ),
        ({"dependson": []}, "there is no field 'dependson' here; did you mean 'depends_on'?"),
        ({"fallbacks": [{"id": "b"}]}, "there is no field 'id' here"),
        (
            {"effect": "reversable"},
            "expected 'none', 'reversible', 'partly' or 'irreversible', got 'reversable'; did you mean 'reversible'?",
        ),
        ({"on_stale": 1}, "expected 'ignore', 'warn' or 'redo', got 1"),
    ],
)
def test_field_messages(fields, message):
    """A field that cannot be used is told in plain words: what was expected, and what is there."""
    [problem] = problems_of({"id": "a", **fields})
    assert problem.partition(": ")[2] == message


def test_places():
    """The place of a problem is the path in the document, quoted where a key is no plain name, and cut if it is long."""
    assert places_of(
        {
            "id": "a",
            "arguments": {"a b": {"list": [1, {"dict": float("nan")}]}},
            "resources": {"x y": -1, " ": 1},
        },
        tools=[{"name": "t", "body": {"str": [float("inf")]}}],
    ) == [
        "tools[0].body.str[0]",
        'tasks[0].arguments["a b"].list[1].dict',
        'tasks[0].resources["x y"]',
        'tasks[0].resources[" "]',
    ]
    [problem] = problems_of({"id": "a", "x" * 300: 1})
    assert problem.startswith(f'tasks[0]["{"x" * 200}…"]: ')
    assert len(problem) < 340


def test_missing_fields():
    """A field that must be there is named, and something that is no mapping at all is refused as such."""
    assert problems_of({}, goal={}, tools=[{}]) == [
        "goal.objective: 'objective' is missing",
        "tools[0].name: 'name' is missing",
        "tasks[0].id: 'id' is missing",
    ]
    with pytest.raises(PlanError, match="expected a mapping of fields to values, got 5"):
        Plan.model_validate(5)


def test_misspelt_fields_that_must_be_there():
    """A field that must be there and is misspelt is one mistake, and another one that is missing is told as well."""
    assert problems_of(tools=[{"nmae": "t"}, {"name": "u", "confirm": {"tol": "t"}}]) == [
        "tools[0].nmae: there is no field 'nmae' here; did you mean 'name'?",
        "tools[1].confirm.when: 'when' is missing",
        "tools[1].confirm.tol: there is no field 'tol' here; did you mean 'tool'?",
    ]


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        (
            {"kind": "shell", "commmand": "make"},
            "tools[0].commmand: there is no field 'commmand' here; did you mean 'command'?",
        ),
        (
            {"kind": "http", "ulr": "http://x"},
            "tools[0].ulr: there is no field 'ulr' here; did you mean 'url'?",
        ),
        (
            {"kind": "python", "calable": "json:dumps"},
            "tools[0].calable: there is no field 'calable' here; did you mean 'callable'?",
        ),
        (
            {"kind": "mcp", "sever": "web"},
            "tools[0].sever: there is no field 'sever' here; did you mean 'server'?",
        ),
        (
            {"kind": "shell", "command": 5},
            "tools[0].command: expected text, got 5; put it in quotes",
        ),
        (
            {"undo_on_replace": True, "undoo": {"tool": "t"}},
            "tools[0].undoo: there is no field 'undoo' here; did you mean 'undo'?",
        ),
        (
            {"undo_on_replace": True, "undo": 5},
            "tools[0].undo: expected a mapping of fields to values, got 5; write {tool: …}",
        ),
    ],
)
def test_wrong_fields_that_tools_need(tool, problem):
    """A wrong or misspelt field that a tool needs is one mistake; it is not said to be missing."""
    servers = {"web": {"command": ["web"]}}
    assert problems_of({"id": "a", "tool": "x"}, tools=[{"name": "t", **tool}], mcp=servers) == [
        problem,
        "tasks[0].tool: task 'a': there is no tool 'x'; describe it under `tools`",
    ]


def test_everything_at_once():
    """Wrong fields do not hide what else is wrong with the plan."""
    assert places_of(
        {"id": "a", "timeout": -1, "colour": "red"},
        {"id": "b", "tool": "y"},
        {"id": "c", "depends_on": ["nobody"]},
        tools=[{"name": "x", "cost": -1}],
        budget={"calls": -1},
        goal={},
        sequential=True,
    ) == [
        "goal.objective",
        "tools[0].cost",
        "tasks[0].timeout",
        "tasks[0].colour",
        "budget.calls",
        "tasks[1].tool",
        "tasks[2].depends_on[1]",
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"tasks": [{"id": " a"}, {"id": "b", "depends_on": ["a"]}]},
        {
            "tasks": [
                {"id": "a"},
                {"id": "b", "dependson": ["a"], "arguments": {"x": "${a.output}"}},
            ]
        },
        {"tasks": [{"id": "a", "tool": "x"}], "tools": [{"name": 1}]},
        {"tasks": [{"id": "a", "depends": 5}, {"id": "b", "depends_on": ["nobody"]}]},
        {"tasks": 5},
        {"tasks": [5]},
        {"tasks": (Task(id=TaskId("a")),), "goal": Goal(objective="x"), "name": 5},
    ],
)
def test_no_blame(fields):
    """What is right is not blamed for a wrong field that it depends on."""
    assert len(problems_of(**fields)) == 1


def test_misspelt_fields_hide_nothing():
    """A misspelt field is taken for the one that was meant, so that all that is wrong is told, and nothing that is right."""
    found = places_of(
        {"id": "a", "tool": "x", "arguments": {"x": 1}},
        {"id": "b", "tool": "x", "dependson": ["a"], "arguments": {"x": "${a.output}"}},
        {"id": "c", "tool": "y", "depend_on": ["nobody"]},
        {"id": "d", "tool": "x", "argument": {"x": "${b.output}"}, "depends_on": ["b"]},
        tools=[{"name": "x", "paramters": {"x": "any"}}],
    )
    assert sorted(found) == [
        "tasks[1].dependson",
        "tasks[2].depend_on",
        "tasks[2].depends_on[0]",
        "tasks[2].tool",
        "tasks[3].argument",
        "tools[0].paramters",
    ]


def test_check_task():
    """One task can be checked by itself, its fallbacks with it."""
    task = Task(
        id=TaskId("a"), tool="x", fallbacks=(Fallback(tool="y", resources={"gpu": 1}), Fallback())
    )
    assert check_task(task, TaskScope({"x": ToolSpec(name="x")}, {}, {})) == [
        "fallbacks[0]: there is no tool 'y'; describe it under `tools`",
        "fallbacks[0]: the plan has no resource 'gpu'; state its capacity under `resources`",
    ]
    assert check_task(Task(id=TaskId("b"), when="("), TaskScope({}, {}, {}))[0].startswith(
        "condition '('"
    )
    assert check_task(Fallback(), TaskScope({}, {}, {})) == []
    assert check_task(Task(id=TaskId("c"), key="${item}"), TaskScope({}, {}, {})) == [
        "`key` needs `for_each`, which is missing"
    ]


names = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Z"]), min_size=1, max_size=12
)
prose = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20)
numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | st.text(st.characters(codec="utf-8"), max_size=20)
tricky = st.sampled_from(
    [
        "yes",
        "on",
        "012",
        "1e3",
        "0x1F",
        "1_000",
        "~",
        "<<",
        "2024-01-01",
        ".5",
        "1.",
        "-",
        "${",
        "=",
    ]
)
escaped = (scalars | tricky).map(
    lambda value: value.replace("${", "$${") if isinstance(value, str) else value
)
values = st.recursive(
    escaped,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text() | tricky, inner, max_size=3)
    ),
    max_leaves=8,
)
objects = st.dictionaries(prose | tricky, values, max_size=3)
amounts = st.floats(0, 1e9)
bodies = {
    "name": prose,
    "tool": names | tricky,
    "arguments": objects,
    "goal": prose,
    "priority": st.integers(-5, 5),
    "timeout": st.floats(0.001, 1e6),
    "retry": st.just({})
    | st.builds(Retry, max_attempts=st.integers(1, 9), delay=amounts, jitter=st.booleans()),
    "optional": st.booleans(),
    "acceptance": st.lists(prose, max_size=2),
    "metadata": objects,
}
fallbacks = st.fixed_dictionaries({}, optional=bodies)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan: a random DAG, each task depending on some of those before it."""
    ids = draw(st.lists(names | st.sampled_from(["a.b-c d", "größe ✓"]), max_size=6, unique=True))
    tasks = []
    for index, name in enumerate(ids):
        before = draw(st.lists(st.sampled_from(ids[:index]), unique=True)) if index else []
        body = draw(
            st.fixed_dictionaries(
                {}, optional={**bodies, "fallbacks": st.lists(fallbacks, max_size=2)}
            )
        )
        tasks.append({"id": name, "depends_on": before, **body})
    optional = {
        "name": prose,
        "context": objects,
        "resources": st.dictionaries(names, amounts, max_size=2),
        "facts": st.lists(names.filter(lambda name: not set("()") & set(name)), max_size=3),
        "objects": st.dictionaries(names, names, max_size=2),
        "sequential": st.booleans(),
        "budget": st.fixed_dictionaries(
            {}, optional={"calls": st.integers(0, 9), "money": amounts}
        ),
    }
    fields = draw(
        st.fixed_dictionaries(
            {"goal": st.fixed_dictionaries({"objective": prose})}, optional=optional
        )
    )
    return Plan.model_validate({**fields, "tasks": tasks})


@settings(max_examples=30)
@given(plans())
def test_round_trip(plan):
    """A plan that is written and read again is the same plan, in both formats."""
    for again in (Plan.parse(plan.to_yaml()), Plan.parse(plan.to_json(), format="json")):
        assert again == plan
        assert again.content_hash() == plan.content_hash()


@given(
    st.integers(2, 9).flatmap(
        lambda n: st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=20)
    )
)
def test_reachability(edges):
    """References are accepted exactly where a path of dependencies leads, and cycles are found exactly where they are."""
    count = 10
    needs = [[f"t{b}" for a, b in dict.fromkeys(edges) if a == i and b != i] for i in range(count)]
    reach = {f"t{i}": set(needed) for i, needed in enumerate(needs)}
    for _ in range(count):
        reach = {
            name: seen.union(*(reach[other] for other in seen)) for name, seen in reach.items()
        }
    tasks: list[JsonObject] = [
        {
            "id": f"t{i}",
            "depends_on": needs[i],
            "arguments": {f"t{j}": f"${{t{j}.output}}" for j in range(count)},
        }
        for i in range(count)
    ]
    circular = {name for name, seen in reach.items() if name in seen}
    found = problems_of(*tasks)
    if circular:
        groups = {
            frozenset(other for other in circular if name in reach[other] and other in reach[name])
            for name in circular
        }
        assert len(found) == len(groups)
        assert all("dependency cycle" in problem for problem in found)
    else:
        assert len(found) == sum(
            f"t{j}" not in reach[f"t{i}"] for i in range(count) for j in range(count)
        )


def test_near_names_are_sought_within_bounds():
    """Of many unknown names the first get a hint and the last none, so that checking does not compare all with all."""
    tasks = [{"id": f"step{n}", "depends_on": [f"stop{n}"]} for n in range(200)]
    with pytest.raises(PlanError) as caught:
        Plan.model_validate({"goal": {"objective": "test"}, "tasks": tasks})
    hints = ["did you mean" in problem.message for problem in caught.value.problems]
    assert (len(hints), hints[0], hints[-1]) == (200, True, False)
