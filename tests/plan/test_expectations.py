"""Expectations: which outputs they find wrong, and what they say of them."""

import sys

import pytest

from replanning import Plan
from replanning.errors import PlanError
from replanning.plan.expectations import broken_expectation
from replanning.plan.tasks import Expectation

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


@pytest.mark.parametrize(
    ("expect", "problem"),
    [
        (
            "{where: [output.a, 'order.a == 1']}",
            "where[1]: condition 'order.a == 1', column 1: a condition knows no 'order': write output",
        ),
        (
            "{where: ['outputs.a']}",
            "column 1: a condition knows no 'outputs'; did you mean 'output'?",
        ),
        (
            "{where: [status.a]}",
            "knows no 'status' here: write output, text, arguments.*, context.*, results.* or run.*",
        ),
        ("{where: ['run.stared < output']}", "knows no run.stared: of a run it knows run.started"),
        ("{where: [arguments == 1]}", "names all of arguments: name one value, arguments.key"),
        (
            "{where: ['f(output)']}",
            "only names, literals, comparisons, matches, len(…), and / or / ",
        ),
        ("{schema: {type: thing}}", "this is no JSON Schema: ['type']: 'thing' is not valid"),
        ("{schema: 1}", "expected a mapping of names to values, got 1"),
        ("{means: not-done}", "`means` says what `errors` mean, and there are no `errors`"),
        ("{schemas: {}}", "schema"),
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


def test_value_named_once():
    """The problem of a condition names the condition itself, and does not repeat it as the value."""
    with pytest.raises(PlanError) as refused:
        Plan.parse("{goal: {objective: x}, tasks: [{id: a, expect: {where: [outputs.a]}}]}")
    [problem] = refused.value.problems
    assert problem.place.endswith("tasks[0].expect.where[0]")
    assert problem.message == (
        "condition 'outputs.a', column 1: a condition knows no 'outputs'; did you mean 'output'?"
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
