"""Time of parsers of text that others write: it grows with the text and no faster."""

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import pytest

from replanning import Plan, ToolSpec
from replanning.changes import parse_changes
from replanning.errors import PlanError, ReplanningError
from replanning.history.export import import_history
from replanning.journal.records import normalised_cause
from replanning.llm.provider import extract_json
from replanning.plan.commands import command_problems, command_programs, option_problems
from replanning.plan.conditions import Condition
from replanning.plan.references import fact_problem, find_references, normalise_fact
from replanning.plan.risk import detected_risk
from replanning.planning.outputs import MAX_REPLY_CHARS, ReflectionReply, parse_reply
from replanning.tools.call import parse_json
from replanning.tools.check import check_danger, check_machine, check_tools, check_unused_arguments
from tests.support.cost import processor_seconds

MEGABYTE: Final = 1_000_000

Reader = Callable[[str], object]


def judge_command(text: str) -> None:
    """Look at a command in every way, up to the length of commands."""
    text = text[:100_000]
    tool = ToolSpec.model_construct(name="t", kind="shell", command=text)
    command_problems(text)
    command_programs(text)
    option_problems(text, {"x": "-v"})
    detected_risk(tool, {"x": "rm"})


def read_yaml(text: str) -> None:
    """Read a plan in YAML."""
    Plan.parse(text, "yaml")


def read_json(text: str) -> None:
    """Read a plan in JSON."""
    Plan.parse(text, "json")


TASKS: Final = '{"goal":{"objective":"x"},"tasks":['

TEXTS: Final[Sequence[tuple[Reader, str, str, str]]] = [
    (read_yaml, "", "a", ""),
    (read_yaml, "a: x", "\r? ", ""),
    (read_yaml, "goal: {objective: x}\ncontext: {a: [", "[],", "]}"),
    (read_json, "", "[", ""),
    (read_json, '{"goal":{"objective":"x","facts":[', '"(",', '"("]}}'),
    (read_json, TASKS + '{"id":"a"}', ',{"id":"a"}', "]}"),
    (read_json, TASKS + '{"id":"a","arguments":{"x":[', '"${b.output}",', "1]}}]}"),
    (read_json, TASKS + '{"id":"a","depends_on":[', '"b",', '"b"]}]}'),
    (lambda text: parse_changes(parse_json(text) or [text]), "[", '{"kind":"a"},', "1]"),
    (import_history, "", "{", ""),
    (lambda text: find_references({"x": text}), "${a", ".output", "}"),
    (lambda text: (normalise_fact(text), fact_problem(text)), "a", " ", "b"),
    (lambda text: Condition.parse(text).evaluate({"a": text}, {}), "", "not ", ""),
    (lambda text: list(extract_json(text[:MAX_REPLY_CHARS])), "", '{"a":', ""),
    (lambda text: parse_reply(text[:MAX_REPLY_CHARS], ReflectionReply), "", "{},", ""),
    (normalised_cause, "", "0x", ""),
    (judge_command, "", "$((", ""),
    (judge_command, "x ", "-c {x} ", ""),
    (judge_command, "cat ", "<<A\n", ""),
    (judge_command, "", '"$(a)" ', ""),
]
"""Readers of what others write, each with the beginning, the repeated piece and the end of a bad text."""


Document = dict[str, Any]


def numbered(count: int, part: Callable[[int], Any]) -> list[Any]:
    """Make a list of parts, each with its number."""
    return [part(number) for number in range(count)]


def names(letter: str, count: int) -> list[str]:
    """Make different names."""
    return [f"{letter}{number}" for number in range(count)]


def users(count: int, tool: str = "t", **arguments: str) -> list[Document]:
    """Make tasks that use one tool."""
    return [{"id": name, "tool": tool, "arguments": arguments} for name in names("a", count)]


def shell(command: str, name: str = "t", **fields: Any) -> Document:
    """Make a tool that is a command."""
    return {"name": name, "kind": "shell", "command": command, **fields}


PLANS: Final[Mapping[str, Callable[[int], Document]]] = {
    "parameters that tasks leave out": lambda n: {
        "tools": [
            shell("true", parameters=dict.fromkeys(names("p", n // 40), "any"), optional=names("p", n // 40)),
        ],
        "tasks": users(n // 100),
    },
    "resources of a tool": lambda n: {
        "resources": dict.fromkeys(names("r", n // 40), 1),
        "tools": [shell("true", resources=dict.fromkeys(names("r", n // 40), 0))],
        "tasks": users(n // 100),
    },
    "one tool, many arguments": lambda n: {
        "tools": [shell("echo " + "{x} " * 20_000)],
        "tasks": users((n - 80_000) // 60, x="1"),
    },
    "checks that fallbacks inherit": lambda n: {
        "tasks": [{"id": "a", "expect": {"commands": ["echo {x}"] * (n // 30)}, "fallbacks": [{"arguments": {"x": 1}}] * (n // 60)}]
    },
    "tools of one capability": lambda n: {
        "tools": numbered(n // 120, lambda i: shell(f"echo {{x{i}}}", f"t{i}", capability="c")),
        "tasks": users(n // 120),
    },
}  # fmt: skip
"""Plans whose parts, multiplied with one another, would be too many."""


def assert_linear(act: Callable[[str], object], text: Callable[[int], str]) -> None:
    """Expect a megabyte to take at most three times as long as half of it, in one of three attempts.

    In quadratic time it would take four times as long.
    """
    half, whole = text(MEGABYTE // 2), text(MEGABYTE)
    assert any(processor_seconds(act, whole) < 3 * processor_seconds(act, half) for _ in range(3))


@pytest.mark.slow
@pytest.mark.parametrize(("read", "start", "unit", "end"), TEXTS)
def test_bad_texts(read, start, unit, end):
    """The time to read a bad text grows with its length and no faster."""

    def act(text: str) -> None:
        with suppress(ReplanningError, ValueError):
            read(text)

    assert_linear(act, lambda length: start + unit * (length // len(unit)) + end)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_products(plan):
    """The time to read and check a plan whose many tasks use many things of its tools grows with its length and no faster."""

    def check(text: str) -> None:
        with suppress(PlanError):
            read_plan = Plan.parse(text, "json")
            for judge in (check_tools, check_unused_arguments, check_danger, check_machine):
                judge(read_plan)

    def text(length: int) -> str:
        return json.dumps(
            {"goal": {"objective": "x"}, **PLANS[plan](length)}, separators=(",", ":")
        )

    assert_linear(check, text)


def test_too_many_tasks():
    """A plan of too many tasks, fallbacks and undo tasks is refused at the list that goes beyond the limit."""
    tasks = [{"id": "a", "undo": {"fallbacks": [{}] * 99_997}}, {"id": "b"}]
    text = json.dumps({"goal": {"objective": "x"}, "tasks": tasks})
    assert len(Plan.parse(text, "json").tasks) == 2
    with pytest.raises(PlanError) as refused:
        Plan.parse(text.replace("[{},", "[{}, {},"), "json", source="plan")
    [problem] = refused.value.problems
    assert str(problem) == (
        "plan:1:61 tasks[0].undo.fallbacks: with these, the plan has more than 100000 tasks, fallbacks and undo tasks; divide it"
    )


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collector(enabled):
    """Reading a plan, which pauses the garbage collector, leaves it as it was."""
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        Plan.parse("goal: {objective: x}")
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("yaml", "1:\n" * 1_001),
        ("yaml", "a:\n" * 1_002),
        ("json", '{"goal": {' + '"a": 1, ' * 1_001 + '"a": 1}}'),
        ("json", '{"tasks": [' + "1," * 20_000 + "1]}"),
        ("json", '{"goal": {"objective": "x", "facts": [' + '"a",' * 1_000 + '"(",' * 20_000 + '"("]}}'),
        ("json", '{"goal": {"objective": "x"}, "tasks": [' + '{"id": "a"},' * 1_001 + '{"id": "a"}]}'),
        ("yaml", "goal: {objective: x}\ntasks: [{id: a, depends_on: [" + "b," * 1_001 + "]}]"),
    ],
)  # fmt: skip
def test_first_problems(form, text):
    """An error lists a thousand problems of a text that has more, and says so."""
    with pytest.raises(PlanError) as refused:
        Plan.parse(text, form)
    *first, last = refused.value.problems
    assert (len(first), str(last)) == (1_000, "<text>: there are further problems")


def test_too_many_tasks_are_counted_as_they_are_read() -> None:
    """A plan file with too many tasks is refused at the first of them that is too many; the rest is not read."""
    text = "goal: {objective: x}\ntasks:\n" + "- {id: a}\n" * 100_001 + "what follows is: [no YAML"
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    [problem] = caught.value.problems
    assert str(problem) == "<text>:100003:9 tasks[100000]: more than 100000 tasks; divide the plan"
