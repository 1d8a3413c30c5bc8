"""Expectations: which outputs they find wrong, and what they say of them."""

import sys
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from replanning import Plan
from replanning.errors import PlanError, UnverifiedOutput
from replanning.plan.document import plan_schema
from replanning.plan.expectations import broken_expectation, disagreement
from replanning.plan.schemas import schema_problems
from replanning.plan.tasks import Agreement, Expectation
from replanning.plan.types import JsonObject, JsonValue

ROOTS = {
    "arguments": {"id": "W1"},
    "context": {"limit": 2},
    "results": {"before": 3},
    "run": {"started": "2026-03-01T10:00:00+00:00"},
}
ORDER = {"type": "object", "required": ["id"], "properties": {"id": {"type": "string"}}}


def expecting(**fields: object) -> list[Expectation]:
    """One expectation."""
    return [Expectation.model_validate(fields)]


@pytest.mark.parametrize(
    ("fields", "output", "reason"),
    [
        ({"schema": ORDER}, {"id": "W1"}, ""),
        ({"schema": ORDER}, '{"id": "W1"}', ""),
        ({"schema": ORDER}, {"id": 1}, "does not fit the schema: id: 1 is not of type 'string'"),
        ({"schema": ORDER}, "W1", "'W1' is not of type 'object'"),
        ({"schema": {"type": "string"}}, "{broken", ""),
        ({"where": ["output.id == arguments.id"]}, {"id": "W1"}, ""),
        (
            {"where": ["output.id == arguments.id"]},
            {"id": "W2"},
            "expected output.id == arguments.id; output.id is 'W2', arguments.id is 'W1'",
        ),
        (
            {"where": ["len(output) > results.before"]},
            [1],
            "expected len(output) > results.before; output is [1], results.before is 3",
        ),
        ({"where": ["output[0] < context.limit", "text == '[1]'"]}, [1], ""),
        ({"where": ["output.id == 'a'"]}, {}, "condition \"output.id == 'a'\": output.id does not"),
        ({"where": ["output.at >= run.started"]}, {"at": "2026-03-01T12:00:00+01:00"}, ""),
        (
            {"where": ["output.at >= run.started"]},
            {"at": "2026-03-01T10:59:00+01:00"},
            "run.started is '2026-03-01T10:00:00+00:00'",
        ),
        ({"where": ["not text matches '*rror*'"]}, "an Error", "text is 'an Error'"),
        (
            {"errors": ["Error"]},
            " Error: no such order",
            "(errors: Error): ' Error: no such order'",
        ),
        ({"errors": ["Error"]}, "No Error", ""),
        ({"errors": ["*not found*"]}, {"message": "not found"}, "(errors: *not found*)"),
        ({"errors": ["Error"]}, {"exit_code": 0, "stdout": "Error: x"}, "(errors: Error)"),
        ({"errors": ["Error"]}, {"status": 200, "text": "Error: x"}, "(errors: Error)"),
        (
            {"errors": ["Error"]},
            {"content": [{"type": "image"}, {"type": "text", "text": "Error: x"}, 1]},
            "(errors: Error)",
        ),
        ({}, object(), "expected an output that is JSON"),
        ({}, "[broken", ""),
        ({"schema": None}, "any", ""),
    ],
)
def test_outputs(fields, output, reason):
    """An output that is not as expected is told with what was expected and what was found."""
    broken = broken_expectation(expecting(**fields), output, ROOTS)
    if not reason:
        assert broken is None
        return
    assert broken is not None
    assert reason in str(broken)
    assert broken.output == output


def test_refusals():
    """An error text may say that nothing was done; other expectations do not."""
    fields = {"errors": ["Error"], "means": "not-done", "where": ["output == 'done'"]}
    said = [broken_expectation(expecting(**fields), output, ROOTS) for output in ("Error", "")]
    assert [each.not_done for each in said if each is not None] == [True, False]


MISSING = "condition 'output.total': output.total does not exist"


@pytest.mark.parametrize(
    ("stated", "output", "other", "reason"),
    [
        ("mirror", {"a": [1, {"b": "x"}]}, {"a": [1.0, {"b": "x"}]}, ""),
        ("mirror", '{"a": 1}', {"a": 1}, ""),
        ("mirror", "yes", "no", "from 'mirror'; output is 'yes', and 'no' by 'mirror'"),
        ("mirror", {"a": 1}, {"b": 1}, "output is {'a': 1}, and {'b': 1} by"),
        ("mirror", [1], [1, 2], "output is [1], and [1, 2] by"),
        ("mirror", [True], [1], "output is [True], and [1] by"),
        ({"tool": "mirror", "fields": ["id"]}, {"id": 1, "at": 1}, {"id": 1, "at": 2}, ""),
        (
            {"tool": "mirror", "fields": ["a", "total", "items[0]['no-1']"]},
            {"a": 1, "total": 1, "items": [{"no-1": "x"}]},
            {"a": 1, "total": 2, "items": [{"no-1": "y"}]},
            "output.total is 1, and 2 by 'mirror'; output.items[0]['no-1'] is 'x', and 'y' by",
        ),
        ({"tool": "mirror", "fields": ["[0].id"]}, [{"id": 1}], [{"id": 1}, {}], ""),
        ({"tool": "mirror", "fields": ["total"]}, {}, {"total": 1}, MISSING),
        (
            {"tool": "mirror", "fields": ["total", "id"]},
            {"total": 1, "id": 1},
            {"sum": 1, "id": 2},
            "output.id is 1, and 2 by 'mirror'",
        ),
        ({"tool": "mirror", "tolerance": 0.01}, {"total": 10}, {"total": 10.01}, ""),
        ({"tool": "mirror", "tolerance": 0.01}, 10.0, 10.011, "output is 10.0, and 10.011 by"),
        ({"tool": "mirror", "tolerance": 1}, [True], [False], "output is [True], and [False]"),
        ({"tool": "mirror", "tolerance": 1}, 10**40, 10**40 + 2, "output is 1000"),
        ("mirror", "[NaN, 1e999]", "[NaN, 1e999]", ""),
        ("mirror", "[NaN]", "[1e999]", "output is [nan], and [inf] by"),
        ("mirror", "[1e999]", "[1]", "output is [inf], and [1] by"),
    ],
)
def test_agreement(stated, output, other, reason):
    """Two outputs agree if what is compared is equal; numbers may differ by the tolerance."""
    differs = disagreement(Agreement.model_validate(stated), output, other)
    if not reason:
        assert differs is None
        return
    assert differs is not None
    assert reason in str(differs)
    assert differs.output == output


def test_nothing_to_compare():
    """What the second output lacks verifies nothing, and whose output that is gets told."""
    agreement = Agreement.model_validate({"tool": "mirror", "fields": ["total", "id"]})
    for output in ({"total": 1, "id": 1}, {"id": 1}):
        differs = disagreement(agreement, output, {"sum": 1, "id": 1})
        assert isinstance(differs, UnverifiedOutput)
        assert differs.output == output
        assert str(differs) == (
            f"the output of 'mirror' lacks values to compare; {MISSING}; there is 'sum', 'id'"
        )


SHOP = """
goal: {objective: x}
tools:
  - {name: shop, kind: http, url: "http://a", capability: price, expect: {agrees_with: %s}}
  - {name: mirror, kind: http, url: "http://b", capability: price}
  - {name: other, kind: http, url: "http://b"}
  - {name: buy, kind: http, method: POST, url: "http://b", capability: price}
  - {name: risky, kind: http, url: "http://b", capability: price, dangerous: true}
mcp: {far: {url: "http://c"}}
tasks: [{id: a, tool: shop, expect: {agrees_with: %s}}]
"""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("mirror", ""),
        ("far.price", ""),
        ("miror", "there is no tool 'miror'; did you mean 'mirror'?; describe it under `tools`"),
        ("other", "'other' and 'shop' do not have the same `capability`"),
        ("buy", "'buy' may change something; state `effect: none` if it only reads"),
        ("risky", "'risky' is `dangerous`, and would be used without asking a person"),
    ],
)
def test_second_tools(name, problem):
    """A second tool only reads, and has the capability of the first; a plan file says where it does not."""
    for place, names in (
        ("tools[0]: tool 'shop': ", (name, "mirror")),
        ("tasks[0]: task 'a': ", ("mirror", name)),
    ):
        if not problem:
            assert Plan.parse(SHOP % names).tools[0].expect is not None
            continue
        with pytest.raises(PlanError) as refused:
            Plan.parse(SHOP % names)
        [found] = refused.value.problems
        where, _, which = place.partition(": ")
        assert found.place.endswith(f"{where}.expect.agrees_with")
        assert found.message == which + problem


def test_tool_that_vouches_for_itself():
    """The output of a tool cannot confirm itself; a task may name its tool, for what stands in."""
    with pytest.raises(PlanError, match="'shop': its output cannot confirm itself; name another"):
        Plan.parse(SHOP % ("shop", "mirror"))
    assert Plan.parse(SHOP % ("mirror", "shop")).tasks[0].expect is not None


@pytest.mark.parametrize(
    ("expect", "problem"),
    [
        ("{agrees_with: {tool: b, fields: [total > 1]}}", "'total > 1' is not a path such as json"),
        ("{agrees_with: {tool: b, fields: ['a b']}}", "column 10: cannot be read as names"),
        (
            "{agrees_with: {tool: b, fields: [output.json.total]}}",
            """starts with `output`, but paths begin inside the output: write 'json.total', or '["output"].json.total' for""",
        ),
        ("{agrees_with: {tool: b, fields: ['output[0]']}}", "write '[0]', or"),
        (
            "{agrees_with: {tool: b, fields: []}}",
            "names nothing to compare; leave it out to compare the whole outputs",
        ),
        ("{agrees_with: {tool: b, tolerance: -1}}", "must be at least 0, got -1"),
        ("{agrees_with: {fields: [a]}}", "tool"),
        (
            "{where: [output.a, 'order.a == 1']}",
            "where[1]: condition 'order.a == 1', column 1: a condition cannot read 'order': write output",
        ),
        (
            "{where: ['outputs.a']}",
            "column 1: a condition cannot read 'outputs'; did you mean 'output'?",
        ),
        (
            "{where: [status.a]}",
            "cannot read 'status' here: write output, text, arguments.*, context.*, parameters.*, results.* or run.*",
        ),
        ("{where: ['run.stared < output']}", "cannot read run.stared, only run.started"),
        ("{where: [arguments == 1]}", "names all of arguments: name one value, arguments.key"),
        (
            "{where: ['f(output)']}",
            "only names, literals, comparisons, matches, len(…), and / or / ",
        ),
        (
            "{schema: {type: thing}}",
            "this is not a valid JSON Schema: ['type']: 'thing' is not valid",
        ),
        ("{schema: 1}", "expected a mapping of names to values, got 1"),
        ("{means: not-done}", "`means` needs `errors`, which are missing"),
        ("{schem: {}}", "there is no field 'schem' here; did you mean 'schema'?"),
        (
            "{agrees_with: {tol: b}}",
            "agrees_with.tol: there is no field 'tol' here; did you mean 'tool'?",
        ),
    ],
)
@pytest.mark.parametrize("place", ["tool", "task"])
def test_mistakes(expect, problem, place):
    """A plan file says what is wrong with an expectation, and where."""
    fields = {"tool": "", "task": "", place: f", expect: {expect}"}
    text = (
        f"goal: {{objective: x}}\ntools: [{{name: t{fields['tool']}}}]\n"
        f"tasks: [{{id: a, tool: t{fields['task']}}}]"
    )
    with pytest.raises(PlanError) as refused:
        Plan.parse(text)
    [problem_found] = refused.value.problems
    assert problem in str(problem_found)
    assert f"{place}s[0].expect" in str(problem_found)


def test_commands_among_words():
    """A command in `acceptance`, where earlier versions had it, is refused with how it is written now."""
    task = "{id: a, acceptance: [fine, '$ ls x'], undo: {acceptance: ['$ ls y', $5 at most]}}"
    with pytest.raises(PlanError) as refused:
        Plan.parse(f"{{goal: {{objective: x}}, tasks: [{task}]}}")
    first, second = refused.value.problems
    assert first.place.endswith("tasks[0].acceptance[1]")
    assert "write it as `expect: {commands: ['ls x']}`" in first.message
    assert second.place.endswith("tasks[0].undo.acceptance[0]")


def test_value_named_once():
    """The problem of a condition names the condition itself, and does not repeat it as the value."""
    with pytest.raises(PlanError) as refused:
        Plan.parse("{goal: {objective: x}, tasks: [{id: a, expect: {where: [outputs.a]}}]}")
    [problem] = refused.value.problems
    assert problem.place.endswith("tasks[0].expect.where[0]")
    assert problem.message == (
        "condition 'outputs.a', column 1: a condition cannot read 'outputs'; did you mean 'output'?"
    )


def test_without_jsonschema(monkeypatch):
    """A schema says what to install where nothing can check it."""
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(PlanError, match=r'pip install "replanning\[schema\]"'):
        Expectation.model_validate({"schema": ORDER})


def test_written_and_read():
    """A plan with expectations reads as it is written."""
    text = "{goal: {objective: x}, tasks: [{id: a, expect: {schema: {type: object}, where: [output.a]}}]}"
    plan = Plan.parse(text)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert plan.model_dump(mode="json")["tasks"][0]["expect"]["schema"] == {"type": "object"}
    agreeing = Plan.parse(SHOP % ("mirror", "{tool: mirror, fields: [a], tolerance: 1}"))
    assert Plan.model_validate_json(agreeing.model_dump_json()) == agreeing
    stated = plan_schema()["$defs"]["Agreement"]["anyOf"]
    assert [each["type"] for each in stated] == ["string", "object"]


PLAIN: JsonObject = {
    "title": "an order",
    "type": "object",
    "required": ["id"],
    "properties": {
        "id": {"type": "string", "minLength": 1},
        "items": {"type": "array", "minItems": 1, "items": {"type": "number", "minimum": 0}},
        "paid": {"type": "boolean"},
        "left": {"type": "null"},
        "count": {"type": "integer"},
    },
    "additionalProperties": {"type": ["string", "null"]},
}


@pytest.mark.parametrize(
    "value",
    [
        {"id": "W1"},
        {"id": "W1", "items": [0, 1.5], "paid": True, "left": None, "count": 2},
        {"id": "W1", "count": 2.0},
        {"id": "W1", "count": True},
        {"id": "W1", "paid": 1},
        {"id": "W1", "left": 0},
        {"id": "W1", "items": []},
        {"id": "W1", "items": [-1]},
        {"id": "W1", "items": [True]},
        {"id": ""},
        {"id": 1},
        {"id": "W1", "more": "text"},
        {"id": "W1", "more": 1},
        {},
        [],
        "W1",
        None,
    ],
    ids=str,
)
def test_schemas_are_checked_as_their_dialect_says(value):
    """What fits a schema of common keywords, and what does not, is as a validator of JSON Schema says."""
    found = schema_problems(PLAIN, value)
    assert bool(found) is not Draft202012Validator(PLAIN).is_valid(value)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"id": True}},
        {"minLength": 9, "minItems": 9, "minimum": 9, "required": ["x"]},
        {"properties": {"id": {"$ref": "#/$defs/id"}}, "$defs": {"id": {"type": "string"}}},
    ],
    ids=str,
)
def test_other_schemas_are_checked_by_a_validator(schema):
    """Keywords that say nothing about a value, and those that are rare, change nothing about it."""
    value: JsonValue = {"id": "W1", "x": 1}
    assert schema_problems(schema, value) == []


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"minLength": 9}, []),
        ({"minItems": 9}, "x"),
        ({"minimum": 9}, True),
        ({"required": ["x"]}, 1),
        ({"minLength": 9, "minItems": 1}, [1]),
    ],
    ids=str,
)
def test_keywords_about_other_types(schema, value):
    """A keyword says nothing about values of a type that it is not about."""
    assert schema_problems(schema, value) == []


def test_a_schema_that_is_none_finds_nothing():
    """What another one has stated as a schema, and what is none, finds no problem."""
    assert schema_problems({"type": "thing", "minimum": "a"}, 1) == []


class Detached(dict[str, object]):
    """A row whose connection is closed."""

    def items(self) -> Any:
        raise RuntimeError("the connection is closed")


def test_output_that_cannot_be_read():
    """What reading an output raises is why it is not as expected."""
    broken = broken_expectation(expecting(where=["output.id == 1"]), Detached(), ROOTS)
    assert str(broken) == (
        "expected an output that is JSON: a value of type Detached cannot be read: RuntimeError: the connection is closed"
    )
