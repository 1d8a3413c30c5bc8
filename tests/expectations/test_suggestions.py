"""Suggestions: what is learned from past outputs, and what is not."""

import json
from collections.abc import Callable, Iterable
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning.expectations import ObservedCall, ToolSuggestions, suggest_expectations
from replanning.plan.expectations import broken_expectation
from replanning.plan.tasks import Expectation

NAMES = ("ada", "bo", "cy", "di", "eve", "flo", "gus", "hal", "ivy", "jo", "kim", "lou")
"""Twelve values, enough for every suggestion."""


def called(
    answer: Callable[[int], object], count: int = 24, **arguments: object
) -> list[ObservedCall]:
    """Calls of a tool with the argument `id`, which differs."""
    return [
        ObservedCall("lookup", {"id": f"{NAMES[i % 12]}_{i}", **arguments}, answer(i), f"r{i}", "t")
        for i in range(count)
    ]


def suggested(calls: Iterable[ObservedCall]) -> ToolSuggestions:
    """What is suggested for the only tool."""
    [found] = suggest_expectations(calls).values()
    return found


def schema(found: ToolSuggestions) -> Any:
    """The suggested schema."""
    return found.expect["schema"]


def rejects(found: ToolSuggestions, output: object, **arguments: object) -> bool:
    """Whether an output is not as expected after all proposals were adopted."""
    expectation = Expectation.model_validate(found.expect)
    roots = {"arguments": arguments, "context": {}, "results": {}, "run": {}}
    return broken_expectation([expectation], output, roots) is not None


def record(i: int, **more: object) -> dict[str, Any]:
    """A record that repeats the argument."""
    return {"id": f"{NAMES[i % 12]}_{i}", "state": ("open", "done")[i % 2], **more}


def test_records():
    """Of records, the fields that are always there are required, and the argument that they repeat."""
    calls = called(lambda i: json.dumps(record(i, **({"note": "x"} if i % 3 else {}))))
    found = suggested(calls)
    assert found.expect == {
        "schema": {
            "type": "object",
            "required": ["id", "state"],
            "properties": {"id": {"type": "string"}, "state": {"type": "string"}},
        },
        "where": ["output.id == arguments.id"],
    }
    assert [(one.outputs, one.runs, one.rejected) for one in found.suggestions] == [(24, 24, 0)] * 2
    assert not any(rejects(found, call.output, **call.arguments) for call in calls)
    assert rejects(found, record(1), id="ada_0")
    assert rejects(found, "{}", id="ada_0")
    assert rejects(found, "Service is down", id="ada_0")


def test_optional_fields_are_named():
    """A field that is not always there is described, not required, and named."""
    found = suggested(called(lambda i: record(i, **({"note": "x"} if i < 20 else {}))))
    first, _ = found.suggestions
    assert first.note == "not in all of them: note"
    assert schema(found)["properties"]["note"] == {"type": "string"}


@pytest.mark.parametrize(("count", "fields"), [(4, []), (5, ["schema", "where"])])
def test_support(count, fields):
    """Nothing is learned from a few outputs."""
    found = suggested(called(record, count))
    assert list(found.expect) == fields
    if not fields:
        assert found.notes == (
            "outputs that report no error: 4; to learn from them, at least 5 are needed",
        )


def test_few_outputs_say_nothing_of_values():
    """Types of single values need more outputs than the fields themselves."""
    found = suggested(called(record, 6))
    assert schema(found) == {"type": "object", "required": ["id", "state"]}


def test_same_arguments_are_no_variety():
    """What one call after the other has answered alike says nothing about other arguments."""
    calls = [ObservedCall("lookup", {"id": "a"}, {"id": "a", "n": 1})] * 20
    assert suggested(calls).expect == {"schema": {"type": "object", "minProperties": 1}}


def test_error_texts():
    """Texts that begin like errors are suggested as such, and the schema is for the rest."""
    calls = called(lambda i: f"Error: user {i} not found" if i % 4 == 0 else record(i), 20)
    found = suggested(calls)
    assert found.expect["errors"] == ["Error"]
    assert schema(found)["type"] == "object"
    [errors] = [one for one in found.suggestions if one.field == "errors"]
    assert (errors.outputs, errors.runs, errors.rejected) == (5, 5, 5)


@pytest.mark.parametrize(
    ("answer", "errors"),
    [
        (lambda i: "ValueError: bad" if i == 3 else record(i), ["ValueError"]),
        (lambda i: "HTTP Error 503" if i == 3 else record(i), ["HTTP Error"]),
        (lambda i: "Traceback (most recent call last)" if i == 3 else record(i), ["Traceback"]),
        (lambda i: "User not found" if i % 5 == 0 else f"user_{i}", ["User not found"]),
        (lambda i: f"User {i} not found" if i % 5 == 0 else f"u_{i}", ["User * not found"]),
        (lambda i: {"error": f"no {i}"} if i == 3 else record(i), ['{"error"']),
        (lambda i: '{"error":"gone"}' if i == 3 else record(i), ['{"error"']),
        (
            lambda i: {"exit_code": 0, "stderr": "", "stdout": "error: x" if i == 3 else f"{i}"},
            ["error"],
        ),
    ],
)
def test_kinds_of_errors(answer, errors):
    """Errors are recognised by how they begin."""
    assert suggested(called(answer)).expect["errors"] == errors


@pytest.mark.parametrize(
    "answer",
    [
        lambda i: f"No error found in part {i}",
        lambda i: "Password invalid" if i == 3 else f"u_{i}",
        lambda i: f"{NAMES[i % 12]} cannot come" if i % 3 == 0 else f"{NAMES[i % 12]} comes",
        lambda i: {"error": None, "id": i},
        lambda i: f"Go to {NAMES[i % 12]} * not found" if i % 5 == 0 else f"u_{i}",
        lambda i: f"Day {i}: not found" if i % 5 == 0 else f"Day {i}: found",
    ],
)
def test_no_errors(answer):
    """Texts that might be errors are left alone."""
    assert "errors" not in suggested(called(answer)).expect


def test_errors_of_other_tools():
    """What begins the errors of one tool is suggested for the others, unless their outputs begin so."""
    calls = called(lambda i: "Error: no" if i == 0 else record(i))
    calls += [ObservedCall("send", {}, "sent") for _ in range(5)]
    calls += [
        ObservedCall("explain", {}, "Error 404 means that a page is missing") for _ in range(5)
    ]
    calls += [ObservedCall("count", {}, "Error") for _ in range(1)]
    found = suggest_expectations(calls)
    assert found["send"].expect["errors"] == ["Error"]
    [errors] = [one for one in found["send"].suggestions if one.field == "errors"]
    assert errors.note == "it begins the errors of 3 other tools"
    assert found["explain"].expect["errors"] == ["Error"]


def test_messages_of_failed_calls():
    """What begins the messages of failed calls is suggested, and their outputs teach nothing."""
    failed = ObservedCall("lookup", {"id": "x"}, None, failure="Error: no such user")
    odd = ObservedCall("lookup", {"id": "y"}, "odd", failure="its output does not fit")
    found = suggested([*called(record), failed, odd])
    assert found.expect["errors"] == ["Error"]
    assert (found.outputs, found.failed) == (24, 2)
    assert found.suggestions[-1].note == "it begins the messages of calls that failed"
    # Not where proper outputs begin so.
    texts = [*called(lambda i: f"Errors: {i}"), *called(lambda i: f"Error {i} is known"), failed]
    assert suggested(texts).suggestions[-1].note == ""


def test_maps():
    """The keys of a map are no fields."""
    by_id = suggested(
        called(lambda i: record(i, items={f"sku-{i}": {"n": 1}, f"sku-{i}9": {"n": 2}}))
    )
    items = schema(by_id)["properties"]["items"]
    assert items["type"] == "object"
    assert "required" not in items
    assert items["additionalProperties"]["required"] == ["n"]
    varying = suggested(called(lambda i: {NAMES[i % 12]: i, NAMES[(i - 1) % 12]: i}))
    assert schema(varying) == {
        "type": "object",
        "additionalProperties": {"type": "number"},
        "minProperties": 1,
    }
    table = {name: {"name": name, "size": 1} for name in NAMES}
    found = suggested(called(lambda i: {**table, "ada": {"name": "x", "size": i}}))
    assert "required" not in schema(found)


def test_types():
    """Whole and other numbers are numbers, null is a type, and a field of many types has none."""
    values: list[Any] = [1, 2.5, 3]
    mixed: list[Any] = ["a", 1, [1]]
    found = suggested(
        called(
            lambda i: record(
                i,
                price=values[i % 3],
                difference=i,
                maybe=None if i % 2 else "x",
                never=None,
                error=None,
                mixed=mixed[i % 3],
                flag=i % 2 == 0,
            )
        )
    )
    properties = schema(found)["properties"]
    assert properties == {
        "id": {"type": "string"},
        "state": {"type": "string"},
        "price": {"type": "number", "minimum": 0},
        "difference": {"type": "number"},
        "maybe": {"type": ["null", "string"]},
        "error": {"type": "null"},
        "flag": {"type": "boolean"},
    }


def test_lists():
    """The items of lists are merged, and lists that were never empty are not."""
    rows = suggested(called(lambda i: [{"id": str(j), "at": "x"} for j in range(1 + i % 3)]))
    assert schema(rows) == {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["id", "at"],
            "properties": {"id": {"type": "string"}, "at": {"type": "string"}},
        },
        "minItems": 1,
    }
    assert rejects(rows, "[]")
    empty = suggested(called(lambda i: ["x"] * (i % 3), 36))
    assert schema(empty) == {"type": "array", "items": {"type": "string"}}
    inner = suggested(called(lambda i: record(i, lines=["x"], tags=["x"] * (i % 2))))
    properties = schema(inner)["properties"]
    assert properties["lines"] == {"type": "array", "items": {"type": "string"}, "minItems": 1}
    assert properties["tags"] == {"type": "array"}  # of too few outputs to say of what


def test_two_kinds_of_records():
    """A tool may answer with records of two kinds; what they repeat is expected where they have it."""
    found = suggested(called(lambda i: record(i) if i % 3 else {"candidates": [str(i)]}, 24))
    first, second = schema(found)["anyOf"]
    assert first["required"] == ["id", "state"]
    assert second["required"] == ["candidates"]
    assert found.expect["where"] == ['"id" not in output or output.id == arguments.id']
    assert not rejects(found, {"candidates": ["a"]}, id="x")
    assert rejects(found, record(1), id="x")


def test_record_or_text():
    """A tool may answer with a record or with a text that is no error."""
    found = suggested(called(lambda i: record(i) if i % 3 else f"{NAMES[i % 12]} is new", 24))
    assert schema(found)["type"] == ["object", "string"]
    assert not rejects(found, "zoe is new", id="x")
    assert rejects(found, record(1), id="x")


@pytest.mark.parametrize(
    ("answer", "arguments", "condition"),
    [
        (lambda i: {"user": {"id": f"{NAMES[i % 12]}_{i}"}}, {}, "output.user.id == arguments.id"),
        (lambda i: f"user {NAMES[i % 12]}_{i} was told", {}, "arguments.id in text"),
        (lambda i: f"{NAMES[i % 12]}_{i}", {}, "text == arguments.id"),
        (lambda i: {"told": f"user {NAMES[i % 12]}_{i}"}, {}, "arguments.id in output.told"),
        (lambda i: {"ids": ["x", f"{NAMES[i % 12]}_{i}"]}, {}, "arguments.id in output.ids"),
        (lambda i: {f"{NAMES[i % 12]}_{i}": 1}, {}, "arguments.id in output"),
        (
            lambda i: [{"id": f"{NAMES[i % 12]}_{i}"}] * (i % 3),
            {"count": 24},
            "len(output) == 0 or output[0].id == arguments.id",
        ),
        (
            lambda i: {"to": f"{NAMES[i % 12]}_{i}" if i else None},
            {},
            "output.to == null or output.to == arguments.id",
        ),
        (
            lambda i: {"exit_code": 0, "stdout": "…", "json": {"from": f"{NAMES[i % 12]}_{i}"}},
            {},
            'output.json["from"] == arguments.id',
        ),
        (
            lambda i: {"text": "…", "json": {"id": f"{NAMES[i % 12]}_{i}"}},
            {},
            "output.json.id == arguments.id",
        ),
        (
            lambda i: {"text": "…", "more": 1, "json": {"id": f"{NAMES[i % 12]}_{i}"}},
            {},
            "output.json.id == arguments.id",
        ),
    ],
)
def test_repeated_arguments(answer, arguments, condition):
    """Arguments are found where outputs repeat them: as fields, in lists, as keys, and in texts."""
    found = suggested(called(answer, **arguments))
    where: Any = found.expect["where"]
    assert condition in where


def test_optional_arguments():
    """A condition about an argument that was left out, or null, holds without it."""

    def calls(missing: dict[str, object]) -> list[ObservedCall]:
        given = [ObservedCall("list", {"city": name}, {"city": name, "n": 1}) for name in NAMES]
        return [*given, ObservedCall("list", missing, {"city": "any", "n": 2})]

    assert suggested(calls({})).expect["where"] == [
        '"city" not in arguments or output.city == arguments.city'
    ]
    assert suggested(calls({"city": None})).expect["where"] == [
        "arguments.city == null or output.city == arguments.city"
    ]


def test_numbers_that_agree_by_chance():
    """A number is expected under its own name alone, and lists only if their order is kept."""

    def answer(call: dict[str, Any]) -> list[ObservedCall]:
        return [
            ObservedCall("put", {"n": i, "rows": [str(i)]}, {**call, "x": i}) for i in range(12)
        ]

    assert "where" not in suggested(answer({})).expect
    kept = [
        ObservedCall("put", {"n": i, "rows": ["b", str(i)]}, {"n": i, "rows": ["b", str(i)]})
        for i in range(12)
    ]
    assert suggested(kept).expect["where"] == [
        "output.n == arguments.n",
        "output.rows == arguments.rows",
    ]
    sorted_rows = [ObservedCall("put", {"rows": [str(i)]}, {"rows": [str(i)]}) for i in range(12)]
    assert "where" not in suggested(sorted_rows).expect


@pytest.mark.parametrize("value", [True, None, "", [], "open"])
def test_arguments_that_say_little(value):
    """Flags, empty values and values that never vary are not expected."""
    calls = [ObservedCall("set", {"to": value}, {"to": value, "i": i}) for i in range(12)]
    assert "where" not in suggested(calls).expect


def test_conditions_that_nearly_hold():
    """What past outputs break is shown and not proposed: they may be the failures."""
    calls = called(lambda i: record(0) if i == 5 else record(i), 24)
    found = suggested(calls)
    assert "where" not in found.expect
    [near] = [one for one in found.suggestions if not one.proposed]
    assert near.value == "output.id == arguments.id"
    assert (near.outputs, near.rejected) == (23, 1)
    assert near.note == "look at these first: t of run r5"


def test_conditions_that_nearly_hold_beside_others():
    """A wrong record is shown, also if another place repeats the argument wherever it exists."""

    def answer(i: int) -> dict[str, Any]:
        name = f"{NAMES[i % 12]}_{i}"
        if i == 7:
            return {"id": "W999", "total": 3}
        return {"id": name, "total": i, "by_id": {name: 1}, "of": {"user": {"id": name}}}

    found = suggested(called(answer, 49))
    proposed, *near = [one for one in found.suggestions if one.field == "where"]
    assert proposed.value == '"of" not in output or output.of.user.id == arguments.id'
    assert proposed.proposed
    assert [(one.value, one.proposed, one.rejected) for one in near] == [
        ("output.id == arguments.id", False, 1)
    ]


def test_places_that_nearly_repeat_an_argument():
    """Of several such places those are shown that other outputs break; the best one comes first."""

    def answer(i: int) -> dict[str, Any]:
        name = f"{NAMES[i % 12]}_{i}"
        user = {"id": "x" if i in (7, 9) else name, "by": {"id": "x" if i == 9 else name}}
        return {"id": "x" if i == 7 else name, "user": user}

    found = suggested(called(answer, 49))
    assert [one.value for one in found.suggestions if one.field == "where"] == [
        "output.id == arguments.id",
        "output.user.by.id == arguments.id",
    ]


def test_outputs_that_are_cut_off():
    """JSON that was cut off teaches nothing where all other outputs are JSON, and is named."""
    found = suggested(called(lambda i: json.dumps(record(i))[: 9 if i == 3 else 99]))
    assert found.expect["where"] == ["output.id == arguments.id"]
    schema_suggestion = found.suggestions[0]
    assert schema(found)["type"] == "object"
    assert (schema_suggestion.outputs, schema_suggestion.rejected) == (23, 1)
    assert schema_suggestion.note == "some are JSON that is cut off: t of run r3"
    for other in ("fine", 1):
        mixed = [ObservedCall("t", {}, other if i % 2 else '{"a'[: 1 + i]) for i in range(24)]
        assert all(not one.note for one in suggested(mixed).suggestions)


def test_single_words():
    """An id has no blanks, and most messages do."""
    found = suggested(called(lambda i: f"user_{i}"))
    assert found.expect == {
        "schema": {"type": "string", "minLength": 1},
        "where": ['" " not in text', 'text matches "*_*"'],
    }
    assert rejects(found, "The_service_is down")
    assert rejects(found, "null")
    few = suggested(called(lambda i: f"user_{i}", 6))
    assert few.expect["where"] == ['" " not in text']
    assert suggested(called(lambda i: f"user{i}")).expect["where"] == ['" " not in text']
    assert "where" not in suggested(called(lambda i: f"user {i}")).expect
    for sign in '"*':
        odd = suggested(called(lambda i: f"a{sign}{i}"))  # noqa: B023 # called at once
        assert odd.expect["where"] == ['" " not in text']
    names = suggested(called(lambda i: NAMES[i % 12]))
    assert "where" not in names.expect


def test_names_that_need_quotes():
    """Fields that are no names of the language are written in brackets; others cannot be written."""
    calls = [ObservedCall("t", {"a-b": n}, {"if": n, "x": {"a-b": n}}) for n in NAMES]
    assert suggested(calls).expect["where"] == ['output.x["a-b"] == arguments["a-b"]']
    odd = [ObservedCall("t", {"a" * 600: n}, {"a" * 600: n}) for n in NAMES]
    assert "where" not in suggested(odd).expect


def test_any_outputs():
    """Outputs are anything with a JSON form; others are counted."""
    calls = [ObservedCall("today", {}, date(2026, 1, i + 1)) for i in range(12)]
    calls += [ObservedCall("today", {}, object()), ObservedCall("today", {}, kept=False)]
    found = suggested(calls)
    assert schema(found) == {"type": "string", "minLength": 1}
    assert (found.outputs, found.unreadable) == (12, 2)
    mixed: list[Any] = [1, "a", [], {}, True]
    found = suggested(ObservedCall("t", {}, mixed[i % 5]) for i in range(20))
    assert found.expect == {}
    assert found.notes == ("its outputs have no type in common",)
    assert suggest_expectations([]) == {}


_names = st.sampled_from(["id", "n", "a b", "if", "W1", "W22", "items", "price", "error", 'q"'])
_scalars = st.sampled_from([None, True, 0, 1, -2, 2.5, "", "a", "b c", "Error", "x-1", "W1"])
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=4),
    max_leaves=8,
)


@given(
    shapes=st.lists(_values, min_size=1, max_size=3),
    given_arguments=st.lists(st.dictionaries(_names, _values, max_size=3), min_size=1, max_size=30),
)
def test_past_outputs_are_as_expected(shapes, given_arguments):
    """Whatever tools have answered, only the outputs that a suggestion counts are rejected by it."""
    calls = []
    for number, arguments in enumerate(given_arguments):
        output = shapes[number % len(shapes)]
        if isinstance(output, dict):
            output = {**output, **arguments}
        calls.append(ObservedCall("t", arguments, output))
        calls.append(ObservedCall("t", arguments, json.dumps(output)))
    found = suggested(calls)
    rejected = sum(one.rejected for one in found.suggestions if one.proposed)
    if not found.expect:
        assert not rejected
        return
    assert sum(rejects(found, call.output, **call.arguments) for call in calls) == rejected
