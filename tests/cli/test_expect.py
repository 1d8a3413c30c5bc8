"""Expectations from past runs: `expect suggest` and `expect check`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from replanning import Plan, ReplanningEngine, tool
from replanning.journal import SqliteStore
from tests.support.cli import STORE, answer, call, cli, write_plan

pytestmark = pytest.mark.usefixtures("in_folder")

USERS = {f"u_{i}": f"n{i}" for i in range(10)}


def make_run(run_id: str, users: Mapping[str, Any] = USERS, *missing: str) -> None:
    """A run of an agent that looks users up and greets them."""

    @tool(effect="none")
    async def lookup(user_id: str) -> Any:
        """Find a user."""
        if user_id not in users:
            return f"Error: {user_id} not found"
        return {"id": user_id, "name": users[user_id]}

    @tool
    async def rename(user_id: str, name: str) -> Any:
        """Change the name of a user."""
        return {"id": user_id, "name": name} if user_id in users else "Error: no such user"

    @tool(effect="none")
    async def picture() -> Any:
        """Return what has no stored form."""
        return object()

    async def play() -> None:
        engine = ReplanningEngine(store=SqliteStore(STORE))
        async with engine.session(
            "Greet them", tools=[lookup, rename, picture], run_id=run_id
        ) as session:
            for user_id in [*users, *missing]:
                await session.call(lookup, user_id)
                await session.call(rename, user_id, f"{user_id}!")
            await session.call(picture)
        engine.store.close()

    anyio.run(play)


def data(*words: str, code: int = 0) -> Any:
    """The JSON that a command about the runs in this folder prints."""
    return answer(Path.cwd(), *words, code=code, REPLANNING_STORE=STORE)


LOOKUP: dict[str, Any] = {
    "schema": {"type": "object", "required": ["id", "name"]},
    "where": ["output.id == arguments.user_id"],
    "errors": ["Error"],
}


# expect suggest


def test_suggestions():
    """What is suggested is YAML to paste, with its support as comments, and the same as JSON."""
    make_run("one", USERS, "zoe")
    text = cli(Path.cwd(), "expect", "suggest", REPLANNING_STORE=STORE).stdout
    lookup, rename, picture = yaml.safe_load(text)["tools"]
    assert lookup == {"name": "lookup", "expect": LOOKUP}
    assert rename["expect"]["where"] == [
        "output.id == arguments.user_id",
        "output.name == arguments.name",
    ]
    assert picture == {"name": "picture", "expect": {"errors": ["Error"]}}
    Plan.parse(f"goal: {{objective: x}}\n{text}")
    assert "# lookup: 11 outputs of 1 run\n" in text
    assert "# 10 outputs of 1 run; it would have rejected none\n" in text
    assert "# 1 output of 1 run; it would have rejected 1\n" in text
    assert "picture: 0 outputs of 0 runs; 1 output not kept as JSON, and not examined" in text
    assert text.count("# means: not-done ") == 1
    found = data("expect", "suggest", "--runs", "one")
    assert found["runs"] == ["one"]
    tools = {each["tool"]: each for each in found["tools"]}
    assert tools["lookup"]["expect"] == LOOKUP
    assert [tools[name]["changes"] for name in ("lookup", "rename", "picture")] == [
        False,
        True,
        False,
    ]
    assert tools["lookup"]["suggestions"][1] == {
        "field": "where",
        "value": "output.id == arguments.user_id",
        "outputs": 10,
        "runs": 1,
        "rejected": 0,
        "proposed": True,
        "note": "",
    }


def test_runs_are_named():
    """Runs are named by their ids or beginnings, after each other; without any, all runs count."""
    few = dict(list(USERS.items())[:4])
    for name in ("alpha", "beta", "gamma"):
        make_run(name, few)
    assert data("expect", "suggest")["runs"] == ["alpha", "beta", "gamma"]
    assert data("expect", "suggest", "--runs", "al", "latest", "gamma")["runs"] == [
        "alpha",
        "gamma",
    ]
    assert data("expect", "suggest", "--runs", "beta", "--runs", "alpha")["runs"] == [
        "beta",
        "alpha",
    ]
    one = call("expect", "suggest", "--runs", "beta")
    assert "outputs that report no error: 4; to learn from them, at least 5 are needed" in one
    assert "output.id == arguments.user_id" in call("expect", "suggest", "--runs", "beta", "gamma")
    assert "there is no run 'delta'" in call("expect", "suggest", "--runs", "delta", code=1)


def test_nothing_to_learn_from():
    """Without a store or a call there is nothing to suggest."""
    assert "run a plan first" in call("expect", "suggest", code=2)
    make_run("idle", {})
    assert "picture" in call("expect", "suggest")
    SqliteStore("empty.db").close()
    assert "No tool was called" in call("expect", "suggest", "--store", "empty.db")


def test_shown_and_not_proposed():
    """A condition that some past outputs break is a comment."""
    users: dict[str, Any] = {f"u_{i}": f"name {i}" for i in range(24)}

    @tool(effect="none")
    async def lookup(user_id: str) -> Any:
        """Find a user, and once another one."""
        return {"id": "u_1" if user_id == "u_9" else user_id}

    async def play() -> None:
        engine = ReplanningEngine(store=SqliteStore(STORE))
        async with engine.session("Greet them", tools=[lookup], run_id="odd") as session:
            for user_id in users:
                await session.call(lookup, user_id)
        engine.store.close()

    anyio.run(play)
    text = cli(Path.cwd(), "expect", "suggest", REPLANNING_STORE=STORE).stdout
    assert "where" not in yaml.safe_load(text)["tools"][0]["expect"]
    assert "# 1 of the past outputs break output.id == arguments.user_id\n" in text
    assert "#   (look at these first: lookup-10 of run odd)" in text


# expect suggest --write

FILE = """\
# The desk.
goal: {objective: Greet them}
tools:
  - name: lookup   # reads
    kind: python
    callable: desk:lookup
    parameters:
      user_id: string

  # Changes something.
  - {name: rename, kind: python, callable: "desk:rename", capability: change}
  - name: picture
    kind: python
    callable: desk:picture
    expect: {errors: [Oops]}
tasks: [{id: a, tool: lookup, arguments: {user_id: u_0}}]
"""


def test_written_into_a_plan():
    """Suggestions are added to the tools of a plan file, whose other lines stay as they are."""
    make_run("one", USERS, "zoe")
    path = Path("plan.yaml")
    path.write_text(FILE, encoding="utf-8")
    out = call("expect", "suggest", "--write", "plan.yaml")
    assert "plan.yaml: tool lookup expects: a schema, 1 condition, 1 error text" in out
    assert "nothing was written for tool 'picture': it has `expect` already" in out
    text = path.read_text(encoding="utf-8")
    plan = Plan.load(path)
    assert [each.expect is not None for each in plan.tools] == [True, True, True]
    assert plan.model_dump(mode="json")["tools"][0]["expect"]["where"] == LOOKUP["where"]
    for line in FILE.splitlines():
        assert line.rstrip("}") in text
    assert text.index("user_id: string\n    expect:") < text.index("# Changes something.")
    assert "    # means" not in text.partition("rename")[0]
    again = data("expect", "suggest", "--write", "plan.yaml")["written"]
    assert again["tools"] == []
    assert again["skipped"]["lookup"] == "it has `expect` already"
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    "layout",
    [
        "tools:\n- name: lookup\n  kind: x",
        "tools:\n- kind: x\n  name: 'lookup'   # the end",
        "tools:\n-   description: >\n      long\n      text\n    name: lookup\n",
        "tools:\n- name: lookup\n  description: |\n    long\n    text\n\ntasks: []",
        "tools: [{name: lookup, kind: x,}]",
        "tools: [\n  {name: lookup,\n   kind: x}\n]",
        '"tools": [{"name": "lookup"}]',
        "tools:\n- name: lookup\n  retry: &r {max_attempts: 2}\n- name: other\n  retry: *r\n",
        "x: &r {max_attempts: 2}\ntools:\n- name: lookup\n  retry: *r\n# end\n",
        "tools:\r\n- name: lookup\r\n  kind: x\r\n",
        "\ufefftools:\n- name: lookup\n  accepted:\n  - 1\n  - 2\n# end\n",
        "tools:\n- name: lookup\n  cwd:\n- name: other",
    ],
)
def test_layouts(layout):
    """A field is added in any usual layout; nothing else changes."""
    make_run("one")
    path = Path("plan.yaml")
    path.write_bytes(layout.encode())
    assert "tool lookup expects" in call("expect", "suggest", "--write", "plan.yaml")
    written = path.read_bytes().decode()
    expected = yaml.safe_load(layout.lstrip("\ufeff"))
    expected["tools"][0]["expect"] = {**LOOKUP, "errors": ["Error"]}
    del expected["tools"][0]["expect"]["errors"]
    assert yaml.safe_load(written.lstrip("\ufeff")) == expected
    assert written.startswith("\ufeff") is layout.startswith("\ufeff")
    if "\r\n" in layout:
        assert "\n" not in written.replace("\r\n", "")
    for line in layout.splitlines():
        assert line.strip("-}], ") in written


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("plan.json", "{}", "plan.json is JSON, and only YAML is changed"),
        ("plan.yaml", "goal: {objective: x}", "plan.yaml has no section `tools`"),
        ("plan.yaml", "tools: [", "this is not YAML"),
        (
            "plan.yaml",
            "x: &t {name: lookup}\ntools: [*t]",
            "the layout of plan.yaml is too unusual to change it",
        ),
        (
            "plan.yaml",
            "tools:\n- name: |-\n    lookup\n- name: other\n",
            "the layout of plan.yaml is too unusual to change it",
        ),
    ],
)
def test_files_that_are_not_written(name, text, message):
    """A file to which nothing can be added without a risk is left alone, and the reason is said."""
    make_run("one")
    path = Path(name)
    path.write_text(text, encoding="utf-8")
    assert message in call("expect", "suggest", "--write", name, code=2)
    assert path.read_text(encoding="utf-8") == text


def test_written_without_the_package_for_schemas(monkeypatch):
    """Suggestions that cannot be checked here are not written, and the missing package is named."""
    make_run("one")
    path = Path("plan.yaml")
    path.write_text(FILE, encoding="utf-8")
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    out = call("expect", "suggest", "--write", "plan.yaml", code=2)
    assert out.startswith("error: --write: the suggestion for 'lookup' cannot be checked here")
    assert 'pip install "replanning[schema]"' in out
    assert path.read_text(encoding="utf-8") == FILE


def test_tools_that_are_elsewhere():
    """Tools that the file does not describe, and those without suggestions, are named."""
    make_run("one")
    Path("plan.yaml").write_text("tools: [{name: other}]", encoding="utf-8")
    skipped = data("expect", "suggest", "--write", "plan.yaml")["written"]["skipped"]
    assert skipped == {
        "lookup": "the file does not describe it under `tools`",
        "rename": "the file does not describe it under `tools`",
        "picture": "nothing is suggested for it",
    }


# expect check

CHECKED = """\
goal: {objective: x}
tools:
  - name: lookup
    expect: {where: ["len(output.name) < 4"], errors: [Error]}
  - {name: picture, expect: {where: [output]}}
tasks: []
"""


def test_check_by_a_plan():
    """The expectations of a plan file are held against past outputs; what they reject is listed."""
    make_run("one", USERS, "zoe")
    make_run("two", {"x": "yyyyy"})
    Path("plan.yaml").write_text(CHECKED, encoding="utf-8")
    out = call("expect", "check", "--plan", "plan.yaml", code=1)
    assert "lookup: 12 outputs checked, 2 rejected\n" in out
    assert "picture: 0 outputs checked, none rejected; 2 not kept as JSON, and not checked" in out
    assert "    run one, task lookup-21: its output says that it failed (errors: Error)" in out
    assert "    run two, task lookup-1: expected len(output.name) < 4" in out
    found = data("expect", "check", "--plan", "plan.yaml", "--runs", "two", code=1)
    assert found["rejected"] == 1
    [lookup, picture] = found["tools"]
    assert (lookup["checked"], picture["not_kept"]) == (1, 1)
    [rejected] = lookup["rejected"]
    assert (rejected["run"], rejected["task"], rejected["failed"]) == ("two", "lookup-1", False)
    assert data("expect", "check", "--plan", "plan.yaml", "--runs", "one", code=1)["rejected"] == 1


def test_check_by_a_file_of_tools():
    """A file of tools has expectations as well."""
    make_run("one")
    Path("tools.yaml").write_text("tools: [{name: lookup, expect: {where: [output.id]}}]", "utf-8")
    assert "lookup: 10 outputs checked, none rejected" in call(
        "expect", "check", "--plan", "tools.yaml"
    )
    # What runs commands, or asks another tool, says nothing about the past.
    Path("tools.yaml").write_text(
        "tools: [{name: lookup, expect: {commands: ['true']}}, {name: rename}]", "utf-8"
    )
    assert "1 run: no executed tool or task has expectations" in call(
        "expect", "check", "--plan", "tools.yaml"
    )


def test_check_by_the_runs_themselves():
    """Without a plan file, each run is held against its own plan, tools and tasks."""
    write_plan(
        Path.cwd(),
        {"say": "echo {text} ## expect: {errors: [Error]}", "twice": "echo {text}; echo more"},
        """
        id: first, tool: say, arguments: {text: fine}
        id: second, tool: say, arguments: {text: Error}, optional: true
        id: third, tool: twice, depends_on: [first], arguments: {text: "${first.output.stdout}"}, expect: {where: ["results.first.stdout in text", "text matches 'fine*'", context.n]}
        id: fourth, tool: twice, arguments: {text: x}
        """,
        more="context: {n: 1}",
    )
    call("run", "plan.yaml", "--no-replan", "--run-id", "mine")
    out = call("expect", "check", code=1)
    assert "say: 2 outputs checked, 1 rejected\n    run mine, task second: its output says" in out
    assert "(also rejected at the time)" in out
    assert "twice: 1 output checked, none rejected" in out


def test_many_rejected_outputs():
    """As text, only the first rejected outputs of a tool are listed."""
    make_run("one", {f"u_{i}": "long name" for i in range(30)})
    Path("plan.yaml").write_text(CHECKED, encoding="utf-8")
    out = call("expect", "check", "--plan", "plan.yaml", code=1)
    assert "    and 10 more; --json lists all" in out


def test_outputs_recorded_as_something_else():
    """Outputs that integrations record as something else than JSON are counted, and neither learned from nor checked."""

    @tool(effect="none")
    async def node(i: int) -> dict[str, Any]:
        """Return what looks like the recorded state of a graph."""
        return {"messages": [{"$langgraph": "message", "value": i}]}

    @tool(effect="none")
    async def message(i: int) -> dict[str, Any]:
        """Return what looks like a recorded message."""
        content = f'{{"i": {i}}}'
        return {"$langgraph": "message", "value": {"data": {"content": content}}}

    async def play() -> None:
        engine = ReplanningEngine(store=SqliteStore(STORE))
        async with engine.session("Look", tools=[node, message], run_id="graph") as session:
            for i in range(12):
                await session.call(node, i)
                await session.call(message, i)
        engine.store.close()

    anyio.run(play)
    first, second = data("expect", "suggest")["tools"]
    assert (first["tool"], first["unreadable"], first["expect"]) == ("node", 12, {})
    assert second["expect"]["where"] == ["output.i == arguments.i"]
    Path("tools.yaml").write_text(
        "tools:\n- {name: node, expect: {where: [output.i]}}\n"
        "- {name: message, expect: {where: [output.i == arguments.i]}}\n",
        encoding="utf-8",
    )
    out = call("expect", "check", "--plan", "tools.yaml")
    assert "node: 0 outputs checked, none rejected; 12 not kept as JSON, and not checked" in out
    assert "message: 12 outputs checked, none rejected" in out
