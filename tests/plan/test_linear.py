"""Time of parsers and matchers of text that others write: it grows with the text and no faster.

`python -m tests.plan.test_linear SECONDS` searches for texts that take longest, for all parsers or for those named.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from replanning import Plan, ToolSpec
from replanning.cli.app import escape_control
from replanning.errors import PlanError, ReplanningError
from replanning.exporters._forge import find_marker, strip_authorship
from replanning.exporters._forge_issue import _ESCAPED_COMMAND, _SLASH_COMMAND
from replanning.exporters._notices import markdown_line
from replanning.exporters.notices import FileForge
from replanning.history.reports import _escape_inline
from replanning.http import error_message
from replanning.journal.jsonl import _RECORD_LINE
from replanning.journal.records import normalised_cause
from replanning.llm.provider import extract_json
from replanning.llm.quoting import encode_data, truncate_value
from replanning.plan.conditions import Condition
from replanning.plan.danger import command_problems, command_programs, danger_reason, env_references, option_problems
from replanning.plan.messages import parse_path
from replanning.plan.reading import Format
from replanning.plan.references import FactPattern, fact_problem, find_references, normalise_fact, placeholders
from replanning.planning.decisions import Phase
from replanning.planning.outputs import ReflectionReply, parse_planning, parse_reply
from replanning.planning.steering import _COMMAND, _COMMENT_AUTHOR, _LEADING_QUOTE
from replanning.tools.call import parse_json
from replanning.tools.http import request_problems
from replanning.tools.mcp import schema_problems

MEGABYTE: Final = 1_000_000
SECONDS_PER_MEGABYTE: Final = 1.0
NOISE: Final = 8
"""How many times as long a busy machine may take."""


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
    danger_reason(tool, {"x": "rm"})


SCHEMA: Final[dict[str, Any]] = {"properties": {"x": {"type": "integer"}}, "anyOf": [{"required": ["y"]}] * 20}

PARSERS: Final[Mapping[str, Callable[[str], object]]] = {
    "yaml plan": read("yaml"),
    "json plan": read("json"),
    "yaml value": read("yaml", 'goal: {objective: "x"}\ncontext:\n  a: {}'),
    "goal": lambda text: Plan.model_validate({"goal": {"objective": text, "facts": [text]}}),
    "arguments": lambda text: find_references({"x": text}),
    "references": lambda text: find_references({"x": f"${{{text}}}"}),
    "placeholders": placeholders,
    "fact": lambda text: (normalise_fact(text), fact_problem(text)),
    "fact in a pattern": lambda text: FactPattern("p({a},{b},{c},{d},{e},{f})x").match(f"p({text})y"),
    "fact in a limited pattern": lambda text: FactPattern("{a},{b}{a}{p}", {"p": ["x", "ab"]}).match(text),
    "pattern of facts": lambda text: FactPattern(text).match(text.replace("{", "").replace("}", "")),
    "condition": lambda text: Condition.parse(text).evaluate({"a": text}, {}),
    "path": parse_path,
    "JSON in a reply": lambda text: list(extract_json(text)),
    "reply": lambda text: parse_reply(text, ReflectionReply),
    "plan in a reply": lambda text: parse_planning(text, Phase.ACTION_SEQUENCE),
    "quoted data": lambda text: encode_data(truncate_value({"a": [text]}, 10_000)),
    "marker": find_marker,
    "authorship": strip_authorship,
    "commands to a forge": lambda text: (_SLASH_COMMAND.sub(r"\1&#47;", text), _ESCAPED_COMMAND.sub(r"\1/", text)),
    "line for a forge": lambda text: markdown_line(text, len(text)),
    "file of notices": read_notices,
    "comment": lambda text: (
        _COMMAND.fullmatch(_LEADING_QUOTE.sub("", text, count=1)),
        _COMMENT_AUTHOR.fullmatch(text),
    ),
    "record": lambda text: _RECORD_LINE.fullmatch(text.encode()),
    "cause": normalised_cause,
    "report": _escape_inline,
    "terminal": escape_control,
    "error of a service": lambda text: error_message(text.encode()),
    "output of a tool": parse_json,
    "arguments of a server's tool": lambda text: schema_problems(SCHEMA, {"x": text}),
    "request": lambda text: request_problems(
        ToolSpec.model_construct(name="t", kind="http", method="GET", url=f"https://{text}", headers={"A": text})
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
    ":a", "{env:A}", "http://", "p(", "data", '{"seq":1,"at":1,"kind":"a","data":',
]  # fmt: skip
"""Pieces that texts are made of."""

Family = tuple[str, str, str]
"""Beginning, repeated piece and end of a text."""

CORPUS: Final[Sequence[tuple[str, Family]]] = [
    ("fact", ("a", " ", "b")),
    ("fact in a pattern", ("", ",", "")),
    ("fact in a limited pattern", ("", "a,", "")),
    ("pattern of facts", ("", "{x}a", "")),
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
    ("command", ("", "$((", "")),
    ("command", ("x ", "-c {x} ", "")),
    ("command", ("x ", "{x} ", "")),
]
"""The worst families that were found."""


def seconds(parse: Callable[[str], object], family: Family, size: int) -> float:
    """Return the processor time that a parser takes for a text of a family."""
    start, unit, end = family
    text = start + unit * (size // len(unit)) + end
    began = time.process_time()
    with suppress(ReplanningError, ValueError, RecursionError):
        parse(text)
    return time.process_time() - began


@pytest.mark.slow
@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("family", [("", "a", ""), ("a", "\n", "a"), ("", "{", "")])
def test_plain_families(parser: str, family: Family) -> None:
    """A megabyte of the simplest repetitions is read by every parser in about a second."""
    assert seconds(PARSERS[parser], family, MEGABYTE) < SECONDS_PER_MEGABYTE * NOISE


@pytest.mark.slow
@pytest.mark.parametrize(("parser", "family"), CORPUS)
def test_corpus(parser: str, family: Family) -> None:
    """A megabyte of the worst texts that a search has found is read in about a second."""
    assert seconds(PARSERS[parser], family, MEGABYTE) < SECONDS_PER_MEGABYTE * NOISE


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
    """Print families for which a parser takes more than it may per megabyte, each parser for its share of a time."""
    chance = random.Random(seed)
    for name in names:
        until, worst = time.monotonic() + budget / len(names), (0.0, ("", "a", ""))
        while time.monotonic() < until:
            parts = ["".join(chance.choices(FRAGMENTS, k=chance.randint(place == 1, 3))) for place in range(3)]
            kept = chance.randrange(8)  # bits: which parts of the worst family stay
            start, unit, end = (
                old if kept >> place & 1 else new for place, old, new in zip(range(3), worst[1], parts, strict=True)
            )
            size = 32_000
            took = seconds(PARSERS[name], (start, unit, end), size)
            if took > worst[0]:
                worst = took, (start, unit, end)
                longer = seconds(PARSERS[name], worst[1], 3 * size)
                if longer > 0.1 and longer > 5 * took:
                    sys.stdout.write(
                        f"{name}: {worst[1]!r} takes {took:.3f} s, and {longer:.3f} s three times as long\n"
                    )
        sys.stdout.write(f"{name}: {worst[0] * MEGABYTE / 32_000:.2f} s per MB for {worst[1]!r}\n")


if __name__ == "__main__":
    search(sys.argv[2:] or list(PARSERS), float(sys.argv[1]))
