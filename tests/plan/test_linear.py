"""Time of parsers and matchers of text that others write: it grows with the text and no faster.

`python -m tests.plan.test_linear SECONDS` searches for texts that take longest, for all parsers or for those named.
"""

import gc
import json
import random
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from replanning import Plan, ToolSpec
from replanning.changes import parse_changes
from replanning.cli.app import escape_control
from replanning.cli.context import _parse_pair
from replanning.config import load_settings
from replanning.errors import PlanError, ReplanningError
from replanning.exporters._forge import find_marker, parse_time, strip_authorship
from replanning.exporters._forge_issue import _ESCAPED_COMMAND, _SLASH_COMMAND
from replanning.exporters._notices import _BLOCK_START, _EMPHASIS, _REFERENCES, markdown_line
from replanning.exporters.github import GitHubIssue
from replanning.exporters.gitlab import _BOT_LOGIN, GitLabIssue
from replanning.exporters.notices import FileForge
from replanning.history.export import import_history
from replanning.history.reports import _escape_inline
from replanning.http import error_message, retry_after_seconds, same_origin_url, url_problem
from replanning.journal.owner import _OWNER_PATTERN
from replanning.journal.records import load_body, normalised_cause
from replanning.llm.provider import extract_json
from replanning.llm.quoting import encode_data, truncate_value
from replanning.plan.commands import (
    command_problems,
    command_programs,
    env_references,
    option_problems,
)
from replanning.plan.conditions import Condition
from replanning.plan.json_values import as_object
from replanning.plan.messages import parse_path
from replanning.plan.reading import Format
from replanning.plan.references import (
    FactPattern,
    fact_problem,
    find_references,
    normalise_fact,
    placeholders,
)
from replanning.plan.risk import detected_risk
from replanning.planning.decisions import Phase
from replanning.planning.outputs import (
    MAX_REPLY_CHARS,
    Action,
    ActionPlan,
    ReflectionReply,
    Subtask,
    TaskDecomposition,
    parse_planning,
    parse_reply,
)
from replanning.planning.steering import _COMMAND, _COMMENT_AUTHOR, _LEADING_QUOTE
from replanning.planning.tasks import compile_action_plan
from replanning.providers._planner.domain import _parse_value
from replanning.settings import _ADDRESS
from replanning.tools.call import parse_json
from replanning.tools.check import check_danger, check_machine, check_tools, check_unused_arguments
from replanning.tools.http import request_problems
from replanning.tools.mcp import schema_problems
from tests.support.cost import ordinary_seconds

MEGABYTE: Final = 1_000_000
SECONDS_PER_MEGABYTE: Final = 1
"""Processor time of an ordinary machine."""


def read(form: Format, context: str = "{}") -> Callable[[str], object]:
    """Return a reader of plans in this format."""
    return lambda text: Plan.parse(context.replace("{}", text), format=form)


def read_notices(text: str) -> None:
    """Read a file of comments."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "notices.md")
        path.write_text(text, encoding="utf-8")
        FileForge(path)._read()


def judge_command(text: str) -> None:
    """Look at a command in every way, up to the length of commands."""
    text = text[:100_000]
    tool = ToolSpec.model_construct(name="t", kind="shell", command=text)
    command_problems(text)
    command_programs(text)
    option_problems(text, {"x": "-v"})
    detected_risk(tool, {"x": "rm"})


def read_settings(text: str) -> None:
    """Read a settings file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "settings.yaml")
        path.write_text(f"replanning:\n  model: {text}", encoding="utf-8", errors="replace")
        load_settings(path, {}, override=dict)


def compile_strategies(text: str) -> None:
    """Read the fallback strategies of a model's actions, up to the length of one each."""
    chunks = [text[start : start + 20_000] for start in range(0, len(text), 20_000)]
    actions = [Action(task_id="a", tool="t", fallback_strategy=chunk) for chunk in chunks]
    subtasks = TaskDecomposition(subtasks=(Subtask(id="a", description="x"),))
    library = {"t": ToolSpec(name="t", kind="shell", command="true")}
    compile_action_plan(ActionPlan(actions=tuple(actions)), subtasks, library)


SCHEMA: Final[dict[str, Any]] = {
    "properties": {"x": {"type": "integer"}},
    "anyOf": [{"required": ["y"]}] * 20,
}

PARSERS: Final[Mapping[str, Callable[[str], object]]] = {
    "yaml plan": read("yaml"),
    "json plan": read("json"),
    "yaml value": read("yaml", 'goal: {objective: "x"}\ncontext:\n  a: {}'),
    "tasks": read("json", '{"goal":{"objective":"x"},"tasks":[{}]}'),
    "task": read("json", '{"goal":{"objective":"x"},"tasks":[{"id":"a",{}}]}'),
    "dependencies": read(
        "json", '{"goal":{"objective":"x"},"tasks":[{"id":"a","depends_on":[{}]}]}'
    ),
    "conditions": lambda text: Plan.model_validate(
        {
            "goal": {"objective": "x"},
            "tasks": [{"id": "a", "when": text[:1_000]}, {"id": "b", "when": text[-1_000:]}],
        }
    ),
    "settings": read_settings,
    "address": lambda text: _ADDRESS.fullmatch(f"http://{text}"),
    "context file": lambda text: [_parse_pair(f"a{line}") for line in text.split("\n")],
    "changes": lambda text: parse_changes(parse_json(text) or [text]),
    "history": import_history,
    "body of a record": lambda text: load_body("run-opened", text),
    "owner of a run": lambda text: _OWNER_PATTERN.fullmatch(f"process 1 on {text}"),
    "time": lambda text: (parse_time(text), retry_after_seconds({"retry-after": text}, 0.0)),
    "link": lambda text: (url_problem(f"http://{text}"), same_origin_url("http://a/", text)),
    "issue": lambda text: [
        pattern.fullmatch(text)
        for forge in (GitHubIssue, GitLabIssue)
        for pattern in (forge._short_pattern, forge._page_pattern)
    ],
    "bot": _BOT_LOGIN.fullmatch,
    "value of a fact": lambda text: _parse_value(text, "array"),
    "fallback strategies": compile_strategies,
    "yaml items": read("yaml", 'goal: {objective: "x"}\ncontext: {a: [{}]}'),
    "goal": lambda text: Plan.model_validate({"goal": {"objective": text, "facts": [text]}}),
    "arguments": lambda text: find_references({"x": text}),
    "references": lambda text: find_references({"x": f"${{{text}}}"}),
    "placeholders": placeholders,
    "fact": lambda text: (normalise_fact(text), fact_problem(text)),
    "fact in a pattern": lambda text: FactPattern("p({a},{b},{c},{d},{e},{f})x").match(
        f"p({text})y"
    ),
    "fact in a limited pattern": lambda text: FactPattern(
        "{a},{b}{a}{p}", {"p": ["x", "ab"]}
    ).match(text),
    "pattern of facts": lambda text: FactPattern(text).match(
        text.replace("{", "").replace("}", "")
    ),
    "condition": lambda text: Condition.parse(text).evaluate({"a": text}, {}),
    "path": parse_path,
    "JSON in a reply": lambda text: list(extract_json(text[:MAX_REPLY_CHARS])),
    "reply": lambda text: parse_reply(text[:MAX_REPLY_CHARS], ReflectionReply),
    "plan in a reply": lambda text: parse_planning(text[:MAX_REPLY_CHARS], Phase.ACTION_SEQUENCE),
    "quoted data": lambda text: encode_data(truncate_value({"a": [text]}, 10_000)),
    "marker": find_marker,
    "authorship": strip_authorship,
    "commands to a forge": lambda text: (
        _SLASH_COMMAND.sub(r"\1&#47;", text),
        _ESCAPED_COMMAND.sub(r"\1/", text),
    ),
    "line for a forge": lambda text: markdown_line(text, 2_000),
    "marks for a forge": lambda text: (
        _REFERENCES.sub("", text),
        _EMPHASIS.sub("", text),
        _BLOCK_START.match(text),
    ),
    "file of notices": read_notices,
    "comment": lambda text: (
        _COMMAND.fullmatch(_LEADING_QUOTE.sub("", text, count=1)),
        _COMMENT_AUTHOR.fullmatch(text),
    ),
    "cause": normalised_cause,
    "report": _escape_inline,
    "terminal": escape_control,
    "error of a service": lambda text: error_message(text.encode()),
    "output of a tool": parse_json,
    "arguments of a server's tool": lambda text: schema_problems(SCHEMA, {"x": text}),
    "schema of a server's tool": lambda text: schema_problems(
        as_object(parse_json(text)) or {"properties": {text: {"enum": [text]}}}, {text: text}
    ),
    "request": lambda text: request_problems(
        ToolSpec.model_construct(
            name="t", kind="http", method="GET", url=f"https://{text}", headers={"A": text}
        )
    ),
    "variables": env_references,
    "command": judge_command,
}

FRAGMENTS: Final = [
    *"a x0-_ \t\n\r{}[]()<>\"'\\/|&;:,.#@!~`$%*+=?^\0\x1b\u2028é",
    "${", "$${", "{x}", "{{x}}", ".output", "context.a", "$(", "$((", "<<", "<(", ">(", "-c ", "sh ", "| ", "x -c {x} ",
    "- ", "&a ", "*a ", "? ", "a: ", "!!map ", "|\n ", "'a", '"a', '\\"', "\\u0041", "\\ud800", '{"a":', '"a":1,', "null", "1e",
    "```", "```json\n", "<think>", "</think>", "<!-- replanning notice=a run=", " about=", " -->", "<!-- comment 1 at x -->\n",
    "<!-- end of comment 1 -->\n", "/approve ", "> ", " (comment ", "&#47;", " and ", " or ", "not ", "context.a == ", "%41", "@a",
    ":a", "{env:A}", "[],", "{},", "1,", '"a",', "http://", "p(", "data", '{"seq":1,"at":1,"kind":"a","data":',
]  # fmt: skip
"""Pieces that texts are made of."""

Family = tuple[str, str, str]
"""Beginning, repeated piece and end of a text."""

CORPUS: Final[Sequence[tuple[str, Family]]] = [
    ("fact", ("a", " ", "b")),
    ("fact in a pattern", ("", ",", "")),
    ("fact in a limited pattern", ("", "a,", "")),
    ("pattern of facts", ("", "{x}a", "")),
    ("pattern of facts", ("", "{{x}}a", "")),
    ("changes", ("[", '{"kind":"a"},', "1]")),
    ("references", ("a", ".output", "")),
    ("authorship", ("a", "\n", "a")),
    ("commands to a forge", ("a", "\n", "a")),
    ("yaml plan", ("a: x", "\r? ", "")),
    ("json plan", ("", "[", "")),
    ("line for a forge", ("", "é$", "")),
    ("terminal", ("", "\r", "")),
    ("terminal", ("", "\x1b", "")),
    ("references", ("a", ".output.output", "")),
    ("record", ('{"seq":1,"at":1,"kind":"a","data":', " ", "")),
    ("fallback strategies", ("a", " ", "b")),
    ("context file", ("=", " ", "b")),
    ("value of a fact", ("", "[", "")),
    ("yaml items", ("", "[],", "")),
    ("yaml items", ("", "1,", "]}\nx: [")),
    ("yaml plan", ("goal: {objective: x}\n", "? \n", "")),
    ("json plan", ('{"goal":{"objective":"x","facts":[', '"(",', '"("]}}')),
    ("tasks", ("", "1,", "1")),
    ("tasks", ("", '{"id":"a"},', "1")),
    ("tasks", ('{"id":"a"}', ',{"id":"a"}', "")),
    ("task", ('"fallbacks":[', "{},", "{}]")),
    ("task", ('"arguments":{"x":[', '"${",', "1]}")),
    ("task", ('"arguments":{"x":[', '"${b.output}",', "1]}")),
    ("dependencies", ("", '"b",', '"b"')),
    ("reply", ("", "{},", "")),
    ("command", ("", "<(a", "")),
    ("command", ("", "$((", "")),
    ("command", ("x ", "-c {x} ", "")),
    ("command", ("x ", "{x} ", "")),
    ("command", ("ssh ", "-o a ", "{x}")),
    ("command", ("make a=", "{x}", "")),
    ("command", ("docker ", "down ", "")),
    ("command", ("chmod -", "R", ".")),
    ("command", ("timeout ", "{x} ", "")),
    ("command", ("curl ", "-F {x} ", "")),
    ("command", ("", '"$(a)" ', "")),
    ("command", ("cat ", "<<A\n", "")),
]
"""The worst families that were found."""


def reading(parse: Callable[[str], object], family: Family, size: int) -> Callable[[], None]:
    """Return an action in which a parser reads a text of a family."""
    start, unit, end = family
    text = start + unit * (size // len(unit)) + end

    def act() -> None:
        with suppress(ReplanningError, ValueError):
            parse(text)

    return act


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
    "servers": lambda n: {
        "mcp": {name: {"command": "true"} for name in names("s", n // 60)},
        "tasks": users(n // 100, f"s{n // 60 - 1}.x"),
    },
    "tools of a server": lambda n: {
        "mcp": {"s": {"command": "true", "tools": names("t", n // 40), "safe": names("t", n // 40)[::-1]}},
        "tasks": users(n // 100, f"s.t{n // 40 - 1}"),
    },
    "objects": lambda n: {
        "objects": {name: name for name in names("o", n // 50)},
        "tools": numbered(n // 200, lambda i: shell("echo {p}", f"t{i}", parameters={"p": f"o{n // 50 - 1}"})),
        "tasks": users(n // 200, "t1", p=f"o{n // 50 - 1}"),
    },
    "one tool in short and long": lambda n: {"tools": [shell("echo " + "a b; " * 9_999 + "{x}")], "tasks": users(n // 60)},
    "one tool, many arguments": lambda n: {
        "tools": [shell("echo " + "{x} " * 20_000)],
        "tasks": users((n - 80_000) // 60, x="1"),
    },
    "one request": lambda n: {
        "tools": [{"name": "t", "kind": "http", "method": "GET", "url": "http://a/", "body": ["{x}"] * (n // 14)}],
        "tasks": users(n // 100, x="1"),
    },
    "checks that fallbacks inherit": lambda n: {
        "tasks": [{"id": "a", "acceptance": ["$ echo {x}"] * (n // 30), "fallbacks": [{"arguments": {"x": 1}}] * (n // 60)}]
    },
    "checks and arguments": lambda n: {
        "tools": [shell("true")],
        "tasks": [{**users(1, **dict.fromkeys(names("x", n // 30), ""))[0], "acceptance": ["$ echo {x1}"] * (n // 30)}],
    },
    "tools of one capability": lambda n: {
        "tools": numbered(n // 120, lambda i: shell(f"echo {{x{i}}}", f"t{i}", capability="c")),
        "tasks": users(n // 120),
    },
    "programs": lambda n: {"tools": [shell("; ".join(names("a", n // 8)))]},
    "unknown fields": lambda n: {"tasks": [{"id": "a", **dict.fromkeys(names("f", n // 14), 1)}]},
    "nested fallbacks": lambda n: {
        "tasks": numbered(n // 1_400, lambda i: {"id": f"a{i}", **json.loads('{"undo":' * 90 + "{}" + "}" * 90)})
    },
}  # fmt: skip
"""Plans whose parts, multiplied with one another, would be too many."""


def assert_quick(act: Callable[[], object], seconds: float) -> None:
    """Expect an action to take about this time in one of three attempts: other work on the machine adds up to half."""
    assert any(ordinary_seconds(act) < 1.5 * seconds for _ in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("family", [("", "a", ""), ("a", "\n", "a"), ("", "{", "")])
def test_plain_families(parser: str, family: Family) -> None:
    """A megabyte of the simplest repetitions is read by every parser within a second."""
    assert_quick(reading(PARSERS[parser], family, MEGABYTE), SECONDS_PER_MEGABYTE)


@pytest.mark.slow
@pytest.mark.parametrize(("parser", "family"), CORPUS)
def test_corpus(parser: str, family: Family) -> None:
    """A megabyte of the worst texts that a search has found is read within a second."""
    assert_quick(reading(PARSERS[parser], family, MEGABYTE), SECONDS_PER_MEGABYTE)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_products(plan: str) -> None:
    """A megabyte of a plan whose many tasks use many things of its tools is read and checked within two seconds."""
    text = json.dumps({"goal": {"objective": "x"}, **PLANS[plan](MEGABYTE)}, separators=(",", ":"))

    def check() -> None:
        with suppress(PlanError):
            read_plan = Plan.parse(text, "json")
            for judge in (check_tools, check_unused_arguments, check_danger, check_machine):
                judge(read_plan)

    assert_quick(check, 2 * SECONDS_PER_MEGABYTE)


def test_too_many_tasks() -> None:
    """A plan of too many tasks, fallbacks and undo tasks is refused at the list that goes beyond the limit."""
    tasks = [{"id": "a", "undo": {"fallbacks": [{}] * 99_997}}, {"id": "b"}]
    text = json.dumps({"goal": {"objective": "x"}, "tasks": tasks})
    assert len(Plan.parse(text, "json").tasks) == 2
    with pytest.raises(PlanError) as refused:
        Plan.parse(text.replace("[{},", "[{}, {},"), "json", source="plan")
    [problem] = refused.value.problems
    assert str(problem) == (
        "plan:1:61 tasks[0].undo.fallbacks: with these there are more than 100000 tasks, fallbacks and undo tasks; divide the plan"
    )


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collector(enabled: bool) -> None:
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
def test_first_problems(form: Format, text: str) -> None:
    """An error lists a thousand problems of a text that has more, and says so."""
    with pytest.raises(PlanError) as refused:
        Plan.parse(text, form)
    *first, last = refused.value.problems
    assert (len(first), str(last)) == (1_000, "<text>: there are further problems")


def search(names: Sequence[str], budget: float, seed: int = 0) -> None:
    """Print the family for which each parser takes longest, and those that take disproportionately longer if longer."""
    chance = random.Random(seed)
    for name in names:
        parse, size = PARSERS[name], 32_000
        worst, family = timeit.timeit(reading(parse, ("", "a", ""), size), number=1), ("", "a", "")
        known = [each for other, each in CORPUS if other == name]
        until = time.monotonic() + budget / len(names)
        while time.monotonic() < until:
            parts = [
                "".join(chance.choices(FRAGMENTS, k=chance.randint(place == 1, 3)))
                for place in range(3)
            ]
            kept = chance.randrange(8)  # bits: which parts of the worst family stay
            start, unit, end = (
                old if kept >> place & 1 else new
                for place, old, new in zip(range(3), family, parts, strict=True)
            )
            start, unit, end = known.pop() if known else (start, unit, end)
            took = timeit.timeit(reading(parse, (start, unit, end), size), number=1)
            if took * MEGABYTE / size < worst:
                continue
            longer = timeit.timeit(reading(parse, (start, unit, end), 3 * size), number=1)
            if longer > 0.1 and longer > 5 * took:
                sys.stdout.write(
                    f"{name}: {(start, unit, end)!r}: {took:.3f} s, and {longer:.3f} s three times as long\n"
                )
            elif (
                whole := timeit.timeit(reading(parse, (start, unit, end), MEGABYTE), number=1)
            ) > worst:
                worst, family = whole, (start, unit, end)
        sys.stdout.write(f"{name}: {worst:.2f} s per MB for {family!r}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    search(sys.argv[2:] or list(PARSERS), float(sys.argv[1]))
