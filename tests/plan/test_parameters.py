"""Parameters of plans: how they are declared, given, referred to, and kept out of what leaves a plan."""

import pytest
from jsonschema import Draft202012Validator

from replanning.errors import PlanError
from replanning.plan.conditions import Condition
from replanning.plan.document import Plan, plan_schema
from replanning.plan.parameters import shown_values
from replanning.plan.references import find_references, resolve_references
from replanning.plan.types import JsonObject

TEXT = """\
goal: {objective: ship it}
parameters:
  region: {type: string, default: eu, description: where it runs}
  count: integer
  token: {type: string, secret: true}
tools:
- {name: deploy, kind: shell, command: "deploy {to}", parameters: {to: string}}
tasks:
- {id: a, tool: deploy, arguments: {to: "${parameters.region}"}, when: parameters.count > 2}
"""


def problems_of(text: str = TEXT, parameters: JsonObject | None = None) -> list[str]:
    """Everything that is wrong with a plan file and the values that it is given."""
    with pytest.raises(PlanError) as refused:
        Plan.parse(text, parameters=parameters or {}, source="plan.yaml")
    return [str(problem) for problem in refused.value.problems]


def missing(name: str, what: str) -> str:
    """What is said of a parameter that needs a value."""
    how = f"pass `--set {name}=…`, or in Python use `plan.with_parameters`"
    return f"parameter {name!r} has no value ({what}): {how}"


def test_values():
    """A plan is valid without values, gets them when it is read or later, and keeps its defaults."""
    plan = Plan.parse(TEXT)
    assert plan.parameters["count"].type == "integer"
    assert plan.parameters["region"].current == "eu"
    given = plan.with_parameters({"count": 3})
    assert given == Plan.parse(TEXT, parameters={"count": 3})
    assert plan.parameters["count"].current is None
    assert given.with_parameters({"region": "us"}).parameters["count"].current == 3


def test_wrong_values():
    """One error names values of other types, unknown names, and what still needs a value."""
    assert problems_of(parameters={"region": 4, "cuont": 1}) == [
        "plan.yaml:3:3 parameters.region: parameter 'region': expected string, got 4",
        "plan.yaml:2:1 parameters.cuont: the plan has no parameter 'cuont'; did you mean 'count'?",
        f"plan.yaml:4:3 parameters.count: {missing('count', 'integer')}",
        f"plan.yaml:5:3 parameters.token: {missing('token', 'secret')}",
    ]


@pytest.mark.parametrize(
    ("stated", "values", "problem"),
    [
        ("{}", {"x": 1}, "the plan has no parameter 'x' and declares none; `--set context.x=…` is"),
        ("{region: string, n: integer}", {"x": 1}, "no parameter 'x'; it has 'region', 'n'"),
        ("{all: array}", {"all": [{1, 2}]}, "parameter 'all': "),
        ("{key: {secret: true}}", {"key": 4711}, "parameter 'key': expected string, not a number"),
        ("{n: {type: integer, description: how many}, m: string}", {"m": 1}, "(integer: how many)"),
    ],
)
def test_what_is_said_of_values(stated, values, problem):
    """It is said which parameters there are, why a value cannot be one, and what a missing one is for; no secret is shown."""
    plan = Plan.parse(f"goal: {{objective: x}}\nparameters: {stated}")
    with pytest.raises(PlanError) as refused:
        plan.with_parameters(values)
    assert problem in str(refused.value)
    assert "4711" not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("string", "1", 1),
        ("integer", 1, True),
        ("integer", 1, 1.5),
        ("number", 1.5, "1.5"),
        ("boolean", False, 0),
        ("array", [1], {"a": 1}),
        ("object", {"a": 1}, [1]),
    ],
)
def test_types(kind, right, wrong):
    """A value has the declared JSON type; true is no number, and a number in quotes is text."""
    plan = Plan.parse(f"goal: {{objective: x}}\nparameters: {{p: {kind}}}")
    assert plan.with_parameters({"p": right}).parameters["p"].current == right
    with pytest.raises(PlanError, match=f"expected {kind}"):
        plan.with_parameters({"p": wrong})


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        ("region: strnig", "expected 'string', 'integer'.*; did you mean 'string'"),
        ("count: {type: integer, default: many}", "the default of parameter 'count': expected int"),
        ("token: {secret: true, default: hunter22}", "a secret cannot have a default"),
        ("token: {secret: true, type: integer}", "a secret is a string, not integer"),
        ("1st: string", "expected a name of letters, digits, _ and -"),
        ("a.b: string", "expected a name of letters, digits, _ and -"),
        ("region: {typ: string}", "there is no field 'typ' here; did you mean 'type'"),
    ],
)
def test_wrong_declarations(stated, problem):
    """What a parameter cannot be is said with its place."""
    with pytest.raises(PlanError, match=problem) as refused:
        Plan.parse(f"goal: {{objective: x}}\nparameters:\n  {stated}\n")
    assert "<text>:3:" in refused.value.problems[0].place
    assert "hunter22" not in str(refused.value)


@pytest.mark.parametrize(
    "part",
    [
        "tasks: [{id: a, arguments: {x: '${parameters.regoin}'}}]",
        "tasks: [{id: a, when: 'parameters.regoin == 1'}]",
        "tasks: [{id: a, fallbacks: [{arguments: {x: '${parameters.regoin}'}}]}]",
        "tasks: [{id: a, tool: t, expect: {where: ['output.n == parameters.regoin']}}]",
        "tasks: [{id: a, tool: t, undo: {tool: t, arguments: {x: '${parameters.regoin}'}}}]",
        "tools: [{name: t, expect: {where: ['parameters.regoin == 1']}}]",
        "tools: [{name: t, undo: {tool: t, arguments: {x: '${parameters.regoin}'}}}]",
        "tools: [{name: t, confirm: {tool: t, when: 'parameters.regoin == 1'}}]",
        "tools: [{name: t, confirm: {tool: t, arguments: {x: '${parameters.regoin}'}, when: 'true'}}]",
    ],
)
def test_undeclared(part):
    """A reference to a parameter that the plan does not declare is wrong wherever it stands."""
    text = f"goal: {{objective: x}}\nparameters: {{region: string}}\n{part}\n"
    if "tools" not in part:
        text += "tools: [{name: t}]\n"
    told = " ".join(problems_of(text))
    assert "the plan has no parameter 'regoin'; did you mean 'region'?" in told


def test_declared():
    """Tools and tasks can check, ask and take back with parameters that the plan declares."""
    text = """
        goal: {objective: x}
        parameters: {region: string}
        tools:
        - {name: look, effect: none}
        - name: t
          expect: {where: ["output.region == parameters.region"]}
          confirm: {tool: look, arguments: {x: "${parameters.region}"}, when: "output == parameters.region"}
          undo: {tool: t, arguments: {x: "${parameters.region}"}}
    """
    assert Plan.parse(text).tools[1].confirm is not None


@pytest.mark.parametrize("path", [".", "[x", ".a..b"])
def test_references_that_are_none(path):
    """A reference with a path that is none is refused, and it is said how references are written."""
    problem = f"'${{parameters{path}}}' is not a reference: write ${{TASK.output}}"
    text = f"tasks: [{{id: a, arguments: {{x: '${{parameters{path}}}'}}}}]"
    told = problems_of(f"goal: {{objective: x}}\nparameters: {{region: string}}\n{text}")
    assert problem in told[0]


def test_argument_of_another_type():
    """A parameter of another type than an argument of a tool is refused before anything runs."""
    text = """
        goal: {objective: x}
        parameters: {n: integer, s: string, o: object}
        tools: [{name: t, parameters: {n: number, s: string, p: path, i: integer, a: any}}]
        tasks: [{id: a, tool: t, arguments: {n: "${parameters.n}", s: "${parameters.s}", p: "${parameters.s}",
          i: %s, a: "${parameters.o}"}}]
    """
    for right in ("${parameters.n}", "${parameters.o.i}"):
        Plan.parse(text % f'"{right}"')
    (problem,) = problems_of(text % '"${parameters.s}"')
    assert "is '${parameters.s}', expected integer, and the parameter is of type string" in problem


def test_reserved_word():
    """A task can be called `parameters` in a plan that declares none, and is found by references."""
    tasks = "tasks: [{id: parameters}, {id: b, depends_on: [parameters], arguments: {x: '${parameters.output.n}'}}]"
    plan = Plan.parse(f"goal: {{objective: x}}\n{tasks}")
    (reference,) = find_references(plan.tasks[1].arguments, {"parameters", "b"})
    assert (reference.task, reference.path) == ("parameters", ("n",))
    declaring = f"goal: {{objective: x}}\nparameters: {{region: string}}\n{tasks}"
    assert "no task can be called 'parameters'; choose another id" in problems_of(declaring)[0]


def test_resolving():
    """References have paths, keep the type of a value, and leave `${` in a value as it is."""
    values: JsonObject = {"name": "${context.x}", "sizes": [{"cpu": 2}], "output": 1}

    def no_output(task: str) -> object:
        raise LookupError(f"no task {task!r}")

    resolved = resolve_references(
        {
            "text": "-${parameters.name}-",
            "cpu": "${parameters.sizes[0].cpu}",
            "all": "${parameters.sizes}",
            "odd": "${parameters.output}",
            "escaped": "$${parameters.name}",
        },
        context={"x": "no"},
        result_of=no_output,
        parameters=values,
    )
    assert resolved == {
        "text": "-${context.x}-",
        "cpu": 2,
        "all": [{"cpu": 2}],
        "odd": 1,
        "escaped": "${parameters.name}",
    }
    condition = Condition.parse('"name" in parameters and parameters.sizes[0].cpu == 2')
    assert condition.holds({"parameters": values})
    assert condition.names("parameters") == {"name", "sizes"}


def test_secrets():
    """The value of a secret is in no text that a plan is written as; other values are."""
    plan = Plan.parse(TEXT, parameters={"count": 3, "token": "hunter22"})
    for text in (repr(plan), plan.to_yaml(), plan.to_json(), plan.model_dump_json()):
        assert "hunter22" not in text
    read = Plan.parse(plan.to_yaml())
    assert read.parameters["count"].current == 3
    assert read.parameters["token"].current is None
    # So a journal that lacks it is known to be that of the same plan.
    assert read.content_hash() == plan.content_hash()


def test_shown_values():
    """People and models are shown the values of parameters, with a mask for each secret."""
    plan = Plan.parse(TEXT, parameters={"count": 3, "token": "hunter22"})
    assert shown_values(plan.parameters) == {"region": "eu", "count": 3, "token": "[redacted]"}


def test_short_secret():
    """A secret that is too short to be masked is refused, and not shown."""
    with pytest.raises(PlanError, match="at least 4 characters") as refused:
        Plan.parse(TEXT, parameters={"count": 1, "token": "abc"})
    assert "abc" not in str(refused.value)


def test_schema():
    """The JSON Schema of plan files has both forms of a parameter."""
    document: JsonObject = {
        "goal": {"objective": "x"},
        "parameters": {"region": "string", "count": {"type": "integer", "default": 1}},
    }
    validator = Draft202012Validator(plan_schema())
    assert validator.is_valid(document)
    for wrong in ({"type": "whole"}, "whole"):
        assert not validator.is_valid({**document, "parameters": {"count": wrong}})
