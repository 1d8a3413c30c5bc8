"""Hostile plan files: each is refused in bounded time and memory, with a message that helps."""

import json
import time
import tracemalloc

import pytest

from replanning.errors import PlanError
from replanning.plan.document import Plan
from replanning.plan.reading import Format, read_document
from replanning.plan.types import JsonObject

GENEROUS = 60.0
"""Seconds: far more than any of these takes, far less than what a quadratic walk would."""


def problem_of(text: str, form: Format) -> str:
    """The one problem of a plan file, cut to a line."""
    with pytest.raises(PlanError) as refused:
        Plan.parse(text, format=form, source="plan")
    [problem] = refused.value.problems
    return str(problem)


@pytest.fixture
def in_time():
    """Fail a test that takes unreasonably long."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < GENEROUS


def document(tasks: list[JsonObject]) -> JsonObject:
    """A plan of these tasks."""
    return {"goal": {"objective": "x"}, "tasks": tasks}


@pytest.mark.parametrize("form", ["yaml", "json"])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_deep_nesting(form, opening, closing):
    """A hundred levels are read, one more is refused, and a hundred thousand are refused as fast."""
    levels = 100 // (1 + (opening[-1] == ":" and opening[0] == "["))
    assert read_document(opening * levels + "1" + closing * levels, format=form) is not None
    for deep in (levels + 1, 100_000):
        message = problem_of(opening * deep + "1" + closing * deep, form)
        assert "nested more than 100 deep" in message
        assert message.startswith("plan:1:")


def test_deep_strings_are_no_nesting():
    """Brackets inside strings do not count as nesting."""
    text = json.dumps({**document([]), "context": {"a": '["\\[' * 200, "b": "}" * 200}})
    assert len(Plan.parse(text, format="json").context) == 2


def test_billion_laughs(in_time):
    """Aliases of aliases are refused before they are expanded."""
    lines = ["a0: &a0 [" + ", ".join(["lol"] * 10) + "]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    tracemalloc.start()
    message = problem_of("\n".join(lines), "yaml")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "aliases stand for more than 100000 values; write them out" in message
    assert peak < 10_000_000


DEEP = "nested more than 100 deep"
ALIASES = "\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 200))])


@pytest.mark.parametrize(
    ("text", "form", "told"),
    [
        pytest.param("- " * 5000 + "x", "yaml", DEEP, id="lists by indentation"),
        pytest.param("\n".join(" " * i + "a:" for i in range(300)), "yaml", DEEP, id="indentation"),
        pytest.param(
            ALIASES,
            "yaml",
            f"{DEEP} through the alias *a",
            id="aliases, each step shallow as it may be",
        ),
        pytest.param(
            '{"a": &a ["lol"], "b": [*a, *a]}', "json", "this is not JSON", id="aliases in JSON"
        ),
    ],
)
def test_refused(text, form, told):
    """Neither indentation nor aliases go deeper than brackets, and JSON has no aliases."""
    assert told in problem_of(text, form)


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_control_characters(form):
    """Control characters are refused raw, and escaped wherever a terminal would show them."""
    raw = '{"goal": {"objective": "\x1b[31m"}}'
    escaped = '{"goal": {"objective": "\\u001b[31m"}, "tasks": [{"id": "a\\u0007"}]}'
    assert "\x1b" not in problem_of(raw, form)
    with pytest.raises(PlanError) as refused:
        Plan.parse(escaped, format=form)
    assert [problem.message for problem in refused.value.problems] == [
        "'\\x1b[31m' must not contain control characters",
        "'a\\x07' must not contain control characters",
    ]
    with pytest.raises(PlanError) as refused:
        Plan.parse('{"goal": {"objective": "x"}, "\\u001b[31m": 1}', format=form)
    assert "\x1b" not in str(refused.value)


def test_deep_fallbacks():
    """Fallbacks of fallbacks are checked as far down as they go."""
    body: JsonObject = {"tool": "gone"}
    for _ in range(40):
        body = {"fallbacks": [body]}
    with pytest.raises(PlanError) as refused:
        Plan.model_validate({**document([{"id": "a", **body}]), "tools": [{"name": "x"}]})
    [problem] = refused.value.problems
    assert problem.place == "tasks[0]" + ".fallbacks[0]" * 40 + ".tool"
