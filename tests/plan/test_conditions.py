"""Conditions and references: what they read, what they refuse, and that they evaluate no code."""

import re
import sys
import tracemalloc
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal
from pathlib import PurePosixPath
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from replanning.errors import ExpressionError, UnknownTask
from replanning.plan.conditions import Condition, matches_wildcards
from replanning.plan.json_form import json_form, shown_form
from replanning.plan.references import Reference, find_references, resolve_references
from replanning.plan.types import JsonObject, JsonValue, TaskId

CONTEXT: JsonObject = {
    "region": "eu",
    "n": 3,
    "on": True,
    "off": False,
    "none": None,
    "list": [1, {"k": "v"}],
    "a b": 1,
}
RESULTS: JsonObject = {"build": {"path": "dist/x.whl", "sizes": [1, 2]}, "a-b": None}


@given(
    st.lists(st.text("ab*", max_size=3), min_size=1, max_size=6).map("".join),
    st.text("ab", max_size=8),
)
def test_wildcards(pattern, text):
    """A pattern fits the texts that a search with a regular expression finds."""
    expected = re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), text) is not None
    assert matches_wildcards(text, pattern) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("context.on", True),
        ("context.off", False),
        ("context.none", False),
        ("not context.off", True),
        ("context.region == 'eu' and context.n > 2", True),
        ("context.region == 'us' or context.n >= 4", False),
        ("context.off and context.missing", False),
        ("context.on or context.missing", True),
        ("1 < context.n < 3", False),
        ("1 < context.n <= 3", True),
        ("context.region in ['eu', 'us']", True),
        ("context.n not in (1, -3, 2.5)", True),
        ("context['a b'] != 2", True),
        ("context.list[0] == 1", True),
        ("context.list[-1].k == 'v'", True),
        ("context.none == null", True),
        ("context.on == true and context.off == false", True),
        ("context.none == None", True),
        ("1or 2", True),
        (r"context.region == '\d'", False),
        ("'region' in context", True),
        ("'zone' in context and context.zone == 1", False),
        ("'zone' not in context", True),
        ("results['a-b'] == null", True),
        ("'build' in results and results.build.path == 'dist/x.whl'", True),
        ("  context.n\n== 3\n", True),
        ("true", True),
        ("(context.region or 'us') == 'eu'", True),
        ("(context.none or 'us') == 'us'", True),
        ("(context.on and context.n) == 3", True),
        ("(context.off or context.none or context.n) in [3]", True),
        ("context.none > 3 or context.none <= 3", False),
        ("results['a-b'] < 3", False),
        ("not 1 <= context.none", True),
        ("0 < context.none < 3", False),
        ("'eu' in context.none", False),
        ("'eu' not in results['a-b']", True),
        ("len(context.list) == 2 and len(context.region) == 2", True),
        ("len(results.build) == 2", True),
        ("len(context.none) == 0", True),
        ("context.region matches 'e*'", True),
        ("context.region matches 'u*'", False),
        ("context.none matches '*'", False),
        ("results.build.path matches 'dist/*.whl' and not context.region matches 'us'", True),
        ("'a matches b' matches 'a matches*'", True),
        ("('x') matches '*x*' or context.missing", True),
        ("'2026-03-01T10:00:00+02:00' < '2026-03-01T09:00:00Z'", True),
        ("'2026-03-01' <= '2026-03-01T00:00' <= '2026-03-01T00:00Z'", True),
        ("'2026-99-01' < '2026-99-02'", True),
    ],
)
def test_evaluate(text, expected):
    """A condition holds as its text says."""
    assert Condition.parse(text).evaluate(CONTEXT, RESULTS) is expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "column 1: cannot be read"),
        ("context.n ==", "column 13: cannot be read"),
        ("  context.n == 1 and ", "column 21: cannot be read"),
        ("len(context.list > 0", "column 4: '(' was never closed, so it cannot be read"),
        ("  context.n = 3", "column 13: write == instead of ="),
        ("context.n =", "column 11: write == instead of ="),
        ("context.n => 3", "column 11: write >= instead of =>"),
        ("context.n =< 3", "column 11: write <= instead of =<"),
        ("context.n === 3", "column 11: write == instead of ==="),
        ("context.n !== 3", "column 11: write != instead of !=="),
        ("context.on && context.n > 1", "column 12: write and instead of &&"),
        ("context.on||context.n > 1", "column 11: write or instead of ||"),
        ("context.n <> 3", "column 11: write != instead of <>"),
        ("context.on and !context.n", "column 16: write not instead of !"),
        ("context.on AND context.n > 1", "column 12: write and instead of AND"),
        ("context.on OR context.n > 1", "column 12: write or instead of OR"),
        ("NOT context.on", "column 1: write not instead of NOT"),
        ("context.on & context.n", "column 1: a condition has no `&`: use and"),
        ("context.n == 1 | context.n == 2", "column 14: a condition has no `|`: use or"),
        ("~context.on", "column 1: a condition has no `~`: use not"),
        ("context.region == 'a && b' or", "column 30: cannot be read"),
        ("context.region == 'a && b", "cannot be read"),
        ("1if context.on else 2", "has no if / else"),
        ("\x00", "cannot be read"),
        ("context.region == '\ud800'", "cannot be read"),
        ("(" * 300, "cannot be read"),
        ("max(context.list)", "column 1: a condition has no calls but len(…)"),
        ("len(context.list, 1)", "column 1: a condition has no calls but len(…)"),
        ("len(context.n)", "'len(context.n)' asks for the length of a number"),
        ("context.n matches '3'", "context.n matches '3'\" compares a number with a string"),
        ("context.region @ 'eu'", "column 16: cannot be read"),
        (
            "context.region matches",
            "column 23: cannot be read as names, literals, comparisons, matches",
        ),
        ("matches == 1", "cannot read 'matches'"),
        (
            "result.test.passed",
            "column 1: a condition cannot read 'result'; did you mean 'results'?",
        ),
        (
            "output.n == 1",
            "cannot read 'output' here: write context.*, parameters.*, results.* or status.*, or quote a text",
        ),
        (
            "results.build-wheel.path == 1",
            'has no arithmetic: a name with a dash is written as results["build-…"]',
        ),
        ("context.on and exec('x')", "column 16: a condition has no calls"),
        ("context.n + 1 == 2", "has no arithmetic"),
        ("-context.n == 2", "has no arithmetic"),
        ("1 if context.on else 2", "has no if / else"),
        ("(lambda: 1)", "has no functions"),
        ("f'{context.n}' == '3'", "has no f-strings"),
        ("[x for x in context.list]", "has no such construct"),
        ("context.none is None", "has no `is`: use == or !="),
        ("region == 'eu'", "column 1: a condition cannot read 'region': write context.region"),
        ("'x' in region", "cannot read 'region'"),
        (
            "status.a == 'done'",
            "compares the status of a task with 'done': expected one of DONE, SKIPPED, FAILED, BLOCKED, CANCELLED",
        ),
        ("status['a'] in ['DONE', 'OK']", "compares the status of a task with 'OK'"),
        ("region.x", "cannot read 'region'"),
        ("context.region == eu", "column 19: a condition cannot read 'eu'"),
        ("context.région == größe", "column 19: a condition cannot read 'größe'"),
        ("context", "names all of context"),
        ("context == results", "names all of context"),
        ("context[0]", "looks up context by a name"),
        ("context[context.n]", "looks up context by a name"),
        ("context.list[context.n]", "looks up by a literal"),
        ("context.list[0:1]", "looks up by a literal"),
        ("context.list[True]", "looks up by a literal"),
        ("context.n == 1j", "has no literals such as 1j"),
        ("context.n == b'x'", "has no literals such as b'x'"),
        ("context.n == 1e999", "has no literals such as"),
        ("not " * 30 + "true", "nested more than 20 deep"),
        ("context.a" + ".b" * 30, "nested more than 20 deep"),
        ("-" * 900 + "1", "has no arithmetic"),
        ("x" * 1001, "has at most 1000 characters, this one has 1001"),
        ("context.zone", "context.zone does not exist; there is 'region', 'n'"),
        ("results.test", "results.test does not exist; there is 'build', 'a-b'"),
        ("results.build.size", "results.build.size does not exist; there is 'path', 'sizes'"),
        ("results.build.sizes[2]", "does not exist; the array has 2 items"),
        ("context.region.x", "does not exist: its parent is a string"),
        ("context.none.x", "does not exist: its parent is null"),
        ("context.n['x']", "does not exist: its parent is a number"),
        ("context.on.x", "does not exist: its parent is a boolean"),
        ("context.list.x", "does not exist: its parent is an array"),
        ("results.build[0]", "does not exist: its parent is an object"),
        ("context.n < context.region", "compares a number with a string"),
        ("context.region in context.n", "compares a string with a number"),
        ("item > 1", "condition 'item > 1': only the task of an element knows its item"),
    ],
)
def test_refused(text, reason):
    """What the language does not have, and a name without a value, is an error that says why; never just false."""
    with pytest.raises(ExpressionError) as refused:
        Condition.parse(text).evaluate(CONTEXT, RESULTS)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("context", "names"),
    [({f"k{i}": 1 for i in range(50)}, "'k0', .*'k9', …"), ({}, "nothing yet")],
)
def test_many_names(context, names):
    """An error lists a few of many names, and says where there is none."""
    with pytest.raises(ExpressionError, match=f"there is {names}"):
        Condition.parse("context.x").evaluate(context, {})


@pytest.mark.parametrize(
    ("text", "context", "results"),
    [
        (
            "context.a == 1 and not ('b' in context) or results['x-y'].context == results.z[0]",
            {"a", "b"},
            {"x-y", "z"},
        ),
        ("'x' in ['x'] and 'y' in context.list and 'z' == true", {"list"}, set()),
    ],
)
def test_names(text, context, results):
    """A condition tells which values of the context and which results it reads; other memberships name none."""
    condition = Condition.parse(text)
    assert (condition.names("context"), condition.names("results")) == (context, results)
    assert repr(condition) == f"Condition(text={text!r})"


@given(st.text(max_size=40) | st.text("context.results[]()'\"=<>! andornt019-+*{}:,", max_size=60))
def test_any_text(text):
    """Any text is a condition that gives a truth value, or an ExpressionError; nothing else comes out."""
    try:
        outcome = Condition.parse(text).evaluate(CONTEXT, RESULTS)
    except ExpressionError:
        return
    assert outcome in (True, False)


def result(task_id: TaskId) -> JsonValue:
    """The outputs of three tasks."""
    outputs: JsonObject = {
        "build": RESULTS["build"],
        "a.output": {"x": 1},
        "a": {"output": {"x": 2}},
        "none": None,
    }
    if task_id not in outputs:
        raise UnknownTask(task_id)
    return outputs[task_id]


@pytest.mark.parametrize(
    "output",
    ["x" * 1_000_000, ["x" * 100] * 10_000, {"x" * 1_000_000: None}, {1: "x" * 1_000_000}],
    ids=["text", "items", "key", "no JSON"],
)
@pytest.mark.parametrize("between", ["", "and"])
def test_arguments_that_multiply(output, between):
    """References that would make arguments enormous are refused before anything of that size is made."""
    arguments: JsonObject = {"x": [f"{between}${{a.output}}{between}" for _ in range(1_000)]}
    tracemalloc.start()
    with pytest.raises(
        ExpressionError, match="the arguments would have more than 10000000 characters"
    ):
        resolve_references(arguments, context={}, result_of=lambda name: output)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50_000_000


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("${build.output}", {"path": "dist/x.whl", "sizes": [1, 2]}),
        ("${build.output.path}", "dist/x.whl"),
        ("${build.output['path']}", "dist/x.whl"),
        ('${build.output["path"]}', "dist/x.whl"),
        ("${build.output.sizes[1]}", 2),
        ("${build.output.sizes[-1]}", 2),
        ("${context.region}", "eu"),
        ("${context.list[1].k}", "v"),
        ("${context.a b}", 1),
        ("${none.output}", None),
        ("in ${context.region}: ${build.output.path}", "in eu: dist/x.whl"),
        ("${build.output.sizes} ${none.output} ${context.on}", "[1,2] null true"),
        ("$${build.output}", "${build.output}"),
        ("$${ and ${context.n}", "${ and 3"),
        ("$$${context.n}", "$${context.n}"),
        ("{x} $x $", "{x} $x $"),
        ("${a.output.output.x}", 1),
        ([{"k": ["${context.n}", 5, None]}], [{"k": [3, 5, None]}]),
    ],
)
def test_resolve(argument, expected):
    """A reference alone becomes the value itself; inside text it is written as text."""
    arguments: JsonObject = {"${key}": argument}
    assert resolve_references(arguments, context=CONTEXT, result_of=result) == {"${key}": expected}
    assert arguments == {"${key}": argument}


class Wheel(BaseModel):
    path: str
    built_in: timedelta


class Share(float):
    """Number as numerical libraries have it: a float with more methods."""


class Label(str):
    """Text of another class."""

    __slots__ = ()


@pytest.mark.parametrize(
    ("output", "form"),
    [
        (timedelta(minutes=1, milliseconds=500), 60.5),
        (Decimal("1.10"), "1.10"),
        (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (PurePosixPath("dist/x.whl"), "dist/x.whl"),
        (b"\x00\xff", "AP8="),
        (float("nan"), "NaN"),
        (float("inf"), "Infinity"),
        (float("-inf"), "-Infinity"),
        (Share(0.5), 0.5),
        (Share("inf"), "Infinity"),
        (Label("new"), "new"),
        (Wheel(path="x.whl", built_in=timedelta(seconds=2)), {"path": "x.whl", "built_in": 2.0}),
        # A set has no order of its own, which the name of a test must not depend on.
        pytest.param({(1, 2): {"b", "a"}}, {"[1,2]": ["a", "b"]}, id="set under a tuple"),
    ],
    ids=repr,
)
def test_json_form(output, form):
    """References and conditions see a result that is not JSON in its JSON form."""
    found = resolve_references({"x": "${a.output}"}, context={}, result_of=lambda name: output)
    assert found == {"x": form}
    assert shown_form(output) == form
    assert Condition.parse("results.a == context.form").evaluate({"form": form}, {"a": output})


def test_no_json_form():
    """A result without a JSON form is an error where it is read, and a text for people."""
    with pytest.raises(ExpressionError) as refused:
        Condition.parse("results.a == 1").evaluate({}, {"a": object()})
    assert str(refused.value) == (
        "condition 'results.a == 1': results.a: a value of type object has no JSON form"
    )
    assert shown_form({"a": object()}) == "(a value of type object has no JSON form)"
    deep: list[object] = []
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    with pytest.raises(ValueError, match="a value of type list is nested too deeply"):
        json_form(deep)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        (
            "${build.output.nothing}",
            "${build.output.nothing}: 'nothing' does not exist; there is 'path', 'sizes'",
        ),
        (
            "${build.output.sizes[2]}",
            "${build.output.sizes[2]}: 2 does not exist; the array has 2 items",
        ),
        ("${context.zone}", "${context.zone}: 'zone' does not exist; there is"),
        ("${test.output}", "${test.output}: there is no task 'test'"),
        ("${index}", "${index}: only the task of an element knows its index"),
        (
            "${HOME}",
            "'${HOME}' is not a reference: write ${TASK.output}, ${TASK.output.name[0]}, ${context.name} or ${parameters.name}, or $${HOME}",
        ),
        ("${}", "'${}' is not a reference"),
        ("${.output}", "is not a reference"),
        ("${context.}", "is not a reference"),
        ("${build.outputs}", "is not a reference"),
        ("${build.output.}", "is not a reference"),
        ("${build.output[x]}", "is not a reference"),
        ("a ${build.output", "a ${ is not closed; write $${"),
        ("${a${b}}", "a ${ is not closed"),
    ],
)
def test_wrong_reference(argument, reason):
    """A reference that finds nothing, or a `${` that is none and not escaped, is an error that says what there is."""
    with pytest.raises(ExpressionError) as refused:
        resolve_references({"x": ["fine", argument]}, context=CONTEXT, result_of=result)
    assert reason in str(refused.value)


def test_find_references():
    """References are found in order, wherever they stand in the arguments."""
    found = find_references(
        {"x": ["${a.output} $${no}", {"y": "${context.b.c}"}], "z": "${b.output[0].c d}", "n": 1}
    )
    assert found == (
        Reference("a.output", TaskId("a"), ()),
        Reference("context.b.c", None, ("b", "c"), "context"),
        Reference("b.output[0].c d", TaskId("b"), (0, "c d")),
    )
    assert [str(reference) for reference in found] == [
        "${a.output}",
        "${context.b.c}",
        "${b.output[0].c d}",
    ]


def test_dotted_ids():
    """An id may hold dots, also `.output`: the longest id that the plan has is meant."""
    [first] = find_references("${v1.2-rc.output.path}")
    assert (first.task, first.path) == ("v1.2-rc", ("path",))
    text = "${a.output.output.x}"
    assert [find_references(text, known)[0].task for known in ({"a", "a.output"}, {"a"}, ())] == [
        "a.output",
        "a",
        "a",
    ]


@given(st.text("${}.[]output context'\"\\0a-", max_size=40))
def test_any_argument(text):
    """Any text resolves to a value or is an ExpressionError; escaped, it comes back as it was."""
    with suppress(ExpressionError):
        resolve_references({"x": text}, context=CONTEXT, result_of=result)
    escaped = text.replace("${", "$${")
    assert resolve_references({"x": escaped}, context=CONTEXT, result_of=result) == {"x": text}
