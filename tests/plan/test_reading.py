"""Plan files: both formats, the places of problems, and the schema."""

import os
import socket
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning.errors import PlanError, Problem
from replanning.plan.document import Plan, plan_schema
from replanning.plan.included_files import locate_problems
from replanning.plan.reading import Format, read_document, read_text_file
from replanning.plan.tasks import Fallback, Goal, McpServer, Retry, Task, ToolSpec

RELEASE = """\
goal:
  objective: Build and check a release candidate
  success_criteria: [an installable wheel in dist/]
  facts: [artifact(wheel)]                     # optional: what must hold at the end
context: {announce: true}
resources: {cpu: 4}
tools:
  - {name: build-tool, kind: shell, capability: wheel, command: "python -m build --outdir {out}", produces: [wheel]}
  - {name: install,    kind: shell, command: "python -m pip install --target {to} {wheel}", needs: [wheel]}
  - {name: post,       kind: http, method: POST, url: "http://localhost:8080/announce", resources: {cpu: 1}}
tasks:
  - {id: build,    tool: build-tool, arguments: {out: dist}, timeout: 120, retry: {max_attempts: 1}}
  - {id: smoke,    tool: install, arguments: {to: out, wheel: "${build.output.wheel}"}, depends_on: [build]}
  - {id: announce, tool: post, depends_on: [smoke], optional: true, when: "context.announce"}
"""


def problems_of(text: str, form: Format = "yaml") -> list[str]:
    """Everything that is wrong with a plan file, as its reader sees it."""
    with pytest.raises(PlanError) as refused:
        Plan.parse(text, format=form, source="plan")
    return [str(problem) for problem in refused.value.problems]


def test_files(tmp_path):
    """A file is read by its name as JSON or YAML, with or without a byte order mark."""
    plan = Plan.parse(RELEASE)
    (tmp_path / "plan.yaml").write_text(RELEASE, encoding="utf-8-sig")
    (tmp_path / "plan.JSON").write_text(plan.to_json())
    assert Plan.load(tmp_path / "plan.yaml") == plan
    assert Plan.load(str(tmp_path / "plan.JSON")) == plan


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, ": the plan cannot be read: No such file or directory"),
        (b"goal:\n  objective: caf\xe9", ":2: byte 23 of the file is not UTF-8"),
        (b" \n", ": a plan is a mapping with the fields goal and tasks; it is empty"),
        (b"# nothing\n", ": a plan is a mapping with the fields goal and tasks; it is empty"),
    ],
)
def test_unreadable_files(tmp_path, content, told):
    """A file that is missing, not UTF-8 or empty is refused by name."""
    path = tmp_path / "plan.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError) as refused:
        Plan.load(path)
    assert [str(problem) for problem in refused.value.problems] == [f"{path}{told}"]


def test_missing_files(tmp_path):
    """A missing file is named with a similar one of its folder, if there is one."""
    (tmp_path / "plan.yaml").write_text(RELEASE)
    with pytest.raises(PlanError, match=r"No such file or directory; did you mean 'plan.yaml'\?$"):
        Plan.load(tmp_path / "plan.yml")
    with pytest.raises(PlanError, match=r"No such file or directory$"):
        Plan.load(tmp_path / "nowhere" / "plan.yml")


def test_folders_and_large_files(tmp_path):
    """A folder, and a file or text that is too large, are no plans."""
    with pytest.raises(PlanError, match="the plan cannot be read: Is a directory"):
        Plan.load(tmp_path)
    (tmp_path / "large").write_text("#" * 31)
    with pytest.raises(PlanError, match="large: the plan is larger than 30 bytes"):
        read_text_file(tmp_path / "large", max_size=30)
    with pytest.raises(PlanError, match="the text has more than 10 characters"):
        read_document("x" * 11, format="yaml", max_size=10)


def test_what_is_no_file(tmp_path):
    """A named pipe, a device and a socket are refused at once; the pipe of `<(…)` is read, and /dev/null is empty."""
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for place, kind in (
            ("pipe", "a named pipe"),
            ("/dev/zero", "a device"),
            ("socket", "a socket"),
        ):
            with pytest.raises(
                PlanError, match=f"the plan cannot be read: it is {kind}; give a file"
            ):
                Plan.load(tmp_path / place)
    read, write = os.pipe()
    os.write(write, b"text")
    os.close(write)
    assert (read_text_file(f"/dev/fd/{read}"), read_text_file("/dev/null")) == ("text", "")
    os.close(read)


def test_commas_in_braces():
    """Of a text that YAML cuts at its comma, it is said what to do."""
    [problem] = problems_of("goal: {objective: Fetch the files, then pack them}")
    assert problem.endswith(
        "there is no field 'then pack them' here; put a text with a comma in quotes"
    )


def test_parts_with_few_fields():
    """Of a part with few fields, all are listed after an unknown one; one that is written short is shown in full."""
    text = RELEASE.replace("objective:", "wish:")
    assert problems_of(text)[-1] == (
        "plan:2:3 goal.wish: there is no field 'wish' here; its fields are objective, success_criteria, facts, "
        "stop_when_reached"
    )
    assert problems_of("goal: Release it\ntasks: [{id: a}]") == [
        "plan:1:1 goal: expected a mapping of fields to values, got 'Release it'; write {objective: …}"
    ]


def test_places_in_yaml():
    """A problem in YAML is told with line and column of the field, or of what should have it."""
    text = (
        RELEASE.replace("timeout: 120", "timeout: soon")
        .replace("[smoke]", "[smok]")
        .replace("objective:", "objectiv:")
    )
    assert problems_of(text) == [
        "plan:2:3 goal.objectiv: there is no field 'objectiv' here; did you mean 'objective'?",
        "plan:12:62 tasks[0].timeout: expected a number, got 'soon'",
        (
            "plan:14:45 tasks[2].depends_on[0]: task 'announce' depends on 'smok', which is not a task of the plan; "
            "did you mean 'smoke'?"
        ),
    ]


def test_places_in_json():
    """A problem in JSON is told with line and column too, escaped keys and nested arrays included."""
    text = """{
  "goal": {"objective": "x"},
  "context": {"a\\"b": [[1, 2], [3, NaN]], "c": -1.5e3, "d": "{[\\\\"},
  "tasks": [
    {"id": "a", "retry": {"delay": "1"}}, {"id": "a"}
  ]
}"""
    assert problems_of(text, "json") == [
        'plan:3:36 context["a\\"b"][1][1]: expected a finite number, got nan',
        "plan:5:27 tasks[0].retry.delay: expected a number, got '1'",
        "plan:5:44 tasks[1].id: task 'a' is already defined as tasks[0]; each needs its own id",
    ]


def test_aliases():
    """An alias stands for what its anchor marks, whatever that is; a problem in it is placed where the alias stands."""
    text = "goal: {objective: x}\ntasks:\n- {id: a, retry: &r {delay: -1}}\n- {id: b, retry: *r}\n"
    assert problems_of(text) == [
        "plan:3:22 tasks[0].retry.delay: must be at least 0, got -1",
        "plan:4:11 tasks[1].retry.delay: must be at least 0, got -1",
    ]
    text = "a: &x {k: [1, &y two]}\nb: *x\n*y : *y\nc: &x 3\nd: *x\n"
    document = {"a": {"k": [1, "two"]}, "b": {"k": [1, "two"]}, "two": "two", "c": 3, "d": 3}
    assert read_document(text, format="yaml") == document


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[yes, no, on, off, y, n]", ["yes", "no", "on", "off", "y", "n"]),
        ("[true, False, TRUE, null, ~, ]", [True, False, True, None, None]),
        ("{on: push, no: 1}", {"on": "push", "no": 1}),
        ("[2024-01-01, 12:30:00, 1_000, 0x1F, 0o7, 012, .inf, .nan, 1.2.3, -]", None),
        ("[0, -1, +7, 1.5, .5, 1., 1e3, -1.5E-2]", [0, -1, 7, 1.5, 0.5, 1.0, 1000.0, -0.015]),
        ("['1', \"true\", !!str 5, ! x]", ["1", "true", "5", "x"]),
        ("!!map {a: !!seq [b]}", {"a": ["b"]}),
        ("--- 5\n...\n", 5),
    ],
)
def test_yaml_values(text, value):
    """Only what looks like JSON is no text: yes, dates, octals and the like stay what was written."""
    expected = text.strip("[]").split(", ") if value is None else value
    assert read_document(text, format="yaml") == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "a: 1\nb: {c: 1, c: 2}\na: 2",
            ["2:11 b: duplicate key 'c'", "3:1: duplicate key 'a'"],
        ),
        (
            "1: a\ntrue: b\n~: c",
            [
                f"{n}:1: the key {k} is not text; put it in quotes"
                for n, k in ((1, 1), (2, "true"), (3, "~"))
            ],
        ),
        ("a: [{<<: {b: 1}}]", ["1:6 a[0]: merging with << is not supported; write the fields out"]),
        ("? [a]\n: b", ["1:3: a key is text; this one is an array or an object"]),
        ("a: 1\n--- \nb: 1", ["2:1: a second document begins here; a plan file holds one"]),
        (
            "a: !!set {b}",
            ["1:4 a: the tag tag:yaml.org,2002:set is not supported; a plan holds plain values"],
        ),
        (
            "a: !!python/name:os.system x",
            [
                "1:4 a: the tag tag:yaml.org,2002:python/name:os.system is not supported; a plan holds plain values"
            ],
        ),
        (
            "a: !!int '5'",
            ["1:4 a: the tag tag:yaml.org,2002:int is not supported; a plan holds plain values"],
        ),
        ("a: *b", ["1:4 a: the alias *b is undefined, or refers to a value that contains it"]),
        (
            "a: &b [*b]",
            ["1:8 a[0]: the alias *b is undefined, or refers to a value that contains it"],
        ),
        (
            "a: [1, 2",
            [
                "2:1: this is not YAML: while parsing a flow sequence, did not find expected ',' or ']'"
            ],
        ),
        ("a: b: c", ["1:5: this is not YAML: mapping values are not allowed in this context"]),
        ("a: b\n  \x01", ["2:3: the character '\\x01' is not allowed"]),
        ("a: " + "9" * 5000, ["1:4 a: the number has too many digits"]),
        ("a: 1\nb: \ud800", ["2:4: half of a surrogate pair is not a character"]),
    ],
)
def test_refused_yaml(text, problem):
    """What is ambiguous or has no place in a plan is refused where it stands."""
    assert problems_of(text) == [f"plan:{line}" for line in problem]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            '{"a": 1, "a": {"b": 1, "b": 2}}',
            [":1:10: duplicate key 'a'", ":1:24 a: duplicate key 'b'"],
        ),
        (
            '{"a": 1,}',
            [":1:9: this is not JSON: expecting property name enclosed in double quotes"],
        ),
        ("{}\n{}", [":2:1: this is not JSON: extra data"]),
        ('{"a": "\x01"}', [":1:8: this is not JSON: invalid control character at"]),
        ('{"a": ' + "9" * 5000 + "}", [": a number has too many digits"]),
        ('["\\ud83d\\ude00",\n"\\ud83d"]', [":2:1: half of a surrogate pair is not a character"]),
        ("5", [": a plan is a mapping with the fields goal and tasks; this is a number"]),
        ("", [": a plan is a mapping with the fields goal and tasks; it is empty"]),
    ],
)
def test_refused_json(text, problem):
    """What is ambiguous or no JSON is refused where it stands."""
    assert read_document('["\\ud83d\\ude00"]', format="json") == ["😀"], (
        "a whole pair is a character"
    )
    # Python 3.13 has words of its own for a comma too many.
    own = "illegal trailing comma before end of object"
    assert problems_of(text, "json") in (
        [f"plan{line}" for line in problem],
        [f"plan:1:8: this is not JSON: {own}"],
    )


@given(
    st.text() | st.text("{}[]\"',:-&*!|> \n\tab1?#", max_size=60), st.sampled_from(["yaml", "json"])
)
def test_any_text(text, form):
    """No text is a plan by accident: what is wrong is told with its place."""
    assert all(problem.startswith("plan") for problem in problems_of(text, form))


def test_without_libyaml():
    """Where PyYAML came without its C loader, plan files are read and written just the same."""
    program = (
        "import sys; sys.modules['yaml._yaml'] = None\n"
        "import yaml; assert not yaml.__with_libyaml__\n"
        "from replanning.plan.document import Plan\n"
        "plan = Plan.parse(sys.stdin.read()); assert Plan.parse(plan.to_yaml()) == plan\n"
        "print(plan.content_hash())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=RELEASE, capture_output=True, text=True
    )
    assert (done.stderr, done.stdout.strip()) == ("", Plan.parse(RELEASE).content_hash())


def test_schema():
    """The schema names its dialect, describes every field, and knows no other."""
    schema: Any = plan_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["required"] == ["goal"]
    for model in (Task, Fallback, ToolSpec, Goal, Retry, McpServer):
        definition = schema["$defs"][model.__name__]
        assert definition["additionalProperties"] is False
        names = {field.alias or name for name, field in model.model_fields.items()}
        assert set(definition["properties"]) == names
        for field in definition["properties"].values():
            assert field["description"]
            assert "title" not in field


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plan.yaml", "goal: {objective: x}\ntasks:\n- id: a\n  tool: t\n"),
        ("plan.JSON", '{"goal": {"objective": "x"},\n"tasks": [\n{"id": "a",\n  "tool": "t"}]}'),
    ],
)
def test_what_is_found_later_has_its_place(tmp_path, name, text):
    """A problem found after a plan was loaded gets its line and column; if the file cannot be read by now, it stays."""
    path, later = tmp_path / name, Problem("tasks[0].tool", "it is not installed")
    path.write_text(text, encoding="utf-8")
    [found] = locate_problems([later], path)
    assert found.place.startswith(f"{path}:4:")
    assert found.place.endswith(" tasks[0].tool")
    assert found.message == later.message
    path.write_text("5", encoding="utf-8")
    assert [problem.place for problem in locate_problems([later], path)] == [
        f"{path} tasks[0].tool"
    ]
    path.write_text("tasks: [", encoding="utf-8")
    assert locate_problems([later], path) == [later]
    path.unlink()
    assert locate_problems([later], path) == [later]
