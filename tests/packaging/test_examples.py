"""The examples run as they are."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import pytest

from replanning import Plan, ReplanningEngine
from replanning.tools import ToolExecutor

EXAMPLES = Path(__file__).parents[2] / "examples"
REPAIRED = "{'read': 'to be or not to be', 'count': 6}"


def run(
    *command: object,
    python: Path | str = sys.executable,
    folder: Path | None = None,
    **environ: str,
) -> str:
    """What a Python process says; a failing one fails the test."""
    done = subprocess.run(
        [python, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        env={**os.environ, **environ},
        cwd=folder,
    )
    assert done.returncode == 0 or python != sys.executable, done.stdout
    assert "Traceback" not in done.stdout
    return done.stdout


ATTACHED = [
    (
        "agent_framework_agent",
        "agent_framework_orchestrations",
        "report: a report of changelog, from the archive",
    ),
    ("mcp_proxy", "mcp", "paused after 3 tasks"),
    ("openai_agents_agent", "agents", "['changelog, from the archive', 'published'] done"),
    ("langgraph_agent", "langchain", "'changelog, from the archive', 'found'"),
    ("temporal_demo", "temporalio", "of the same capability 'read-page'"),
    ("pydantic_ai_agent", "pydantic_ai", "found changelog, from the archive"),
]


def test_executor():
    """The workers of a Dask cluster do the work of a plan, and a task that fails there is replaced."""
    pytest.importorskip("distributed", reason="distributed is not installed")
    said = run(EXAMPLES / "dask_executor.py", DASK_LOGGING__DISTRIBUTED="critical")
    # A cluster that is closed on a busy machine may have words of its own.
    assert said.startswith(
        "succeeded 13\ndo 'second' with 'photograph', of the same capability 'read-page'\n"
    )


@pytest.mark.parametrize(("name", "needed", "said"), ATTACHED)
def test_attached_agents(name, needed, said):
    """An agent of another framework is attached by two lines: a tool that fails is replaced, and a person is asked."""
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    assert said in run("-W", "error", EXAMPLES / f"{name}.py")


@pytest.mark.parametrize(
    ("name", "change"), [("own_orchestrator", ""), ("webhook", "+ read~2: tool: camera")]
)
def test_own_parts(name, change):
    """A loop of five lines repairs a plan; a question goes out and its answer comes in by HTTP, and is carried out."""
    said = run("-W", "error", EXAMPLES / f"{name}.py")
    assert change in said
    assert f"succeeded {REPAIRED}" in said


def test_trip_saga():
    """What was booked before the flight failed is taken back in reverse order, by tasks that nobody has listed."""
    said = run("-W", "error", EXAMPLES / "trip_saga.py")
    expected = """\
booking car: compact
booking hotel: by the sea
'flight' failed (LH 710 is sold out)
undoing booking of hotel: by the sea
undoing booking of car: compact
aborted the trip is off
revision 1: the trip is off
car was taken back by undo-car
hotel was taken back by undo-hotel
"""
    assert said == expected


def test_pages_of_an_api():
    """Each page after the first is a task, and the one that was busy is asked for again, alone."""
    *asked, last = run("-W", "error", EXAMPLES / "paged_api.py").splitlines()
    assert sorted(asked) == [f"asked for page {page}" for page in (1, 2, 3, 3, 4)]
    assert last == "succeeded ['cup', 'plate', 'fork', 'spoon', 'knife', 'ladle', 'whisk']"


def test_subtasks_of_a_model():
    """Each subtask that a model asks for is done by a tool, and none of them where it asks for too many."""
    said = run("-W", "error", EXAMPLES / "subtasks.py").splitlines()
    assert said == [
        "succeeded History (300 words), Temples (500 words), Food (200 words)",
        (
            "failed 'write' failed (the list has 100 elements, and `max_items` allows 5; "
            "it begins with {'title': 'Street 0', 'words': 10})"
        ),
    ]


async def test_logs_of_a_folder(tmp_path, monkeypatch):
    """Each log is unpacked, and what can be read of the one that is cut off is saved by another tool."""
    monkeypatch.chdir(tmp_path)
    plan = Plan.load(EXAMPLES / "logs.yaml")
    async with ToolExecutor(plan) as work:
        result = await ReplanningEngine(["repair"]).execute(plan, work)
    assert result.status == "succeeded", result.reason
    assert [revision.reason for revision in result.revisions] == [
        "its list has 3 elements",
        "do 'unpack[db.log.gz]' with 'salvage', of the same capability 'unpack'",
    ]
    app, db, web = (int(output["stdout"]) for output in result.outputs["unpack"])
    assert app == web == 1000
    assert 0 < db < 1000
    assert result.outputs["total"]["stdout"] == f"{app + db + web} lines"


BROKEN = """
goal: {objective: say hello}
tools: [{name: first, kind: shell, command: "exit 3"}, {name: second, kind: shell, command: "echo hello"}]
tasks: [{id: hello, tool: first, retry: {max_attempts: 1}}]
"""
INSTEAD = {"kind": "replace", "task_id": "hello", "tasks": [{"id": "new", "tool": "second"}]}
WISDOM = {
    "candidates": [{"reason": "the second one works", "changes": [INSTEAD], "confidence": 0.9}]
}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment, which has what is installed here, and both plugins."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    here = sysconfig.get_path("purelib")
    (site / "shared.pth").write_text(f"import site; site.addsitedir({here!r})")
    for name in ("plugin", "llm_plugin"):
        sources = folder / name  # what building leaves behind must not be taken for the example
        sources.mkdir()
        for path in (*EXAMPLES.glob(f"{name}/*.py"), EXAMPLES / name / "pyproject.toml"):
            shutil.copy(path, sources)
        install = [
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            str(site),
        ]
        subprocess.run(
            [sys.executable, *install, str(sources)], check=True, capture_output=True, timeout=120
        )
    return folder / "bin" / "python"


@pytest.mark.deep
@pytest.mark.parametrize(("name", "module"), [("patience", "plugin"), ("oracle", "llm_plugin")])
def test_plugin_is_found(name, module, elsewhere, tmp_path):
    """A provider and a language model, each a package of ten lines, are installed, found, and reported with their package."""
    (path,) = (EXAMPLES / module).glob("*.py")
    assert len([line for line in path.read_text().splitlines() if line.strip()]) <= 12
    plugins = json.loads(
        run("-m", "replanning", "providers", "--json", python=elsewhere, folder=tmp_path)
    )
    (found,) = (plugin for plugin in plugins if plugin["name"] == name)
    assert (found["group"], found["state"], found["package"]) == (
        "providers",
        "available",
        f"replanning-{name} 0.1",
    )


@pytest.mark.deep
def test_plugin_is_used(elsewhere, tmp_path):
    """What an installed provider proposes, and what an installed language model answers, is considered or done."""
    (tmp_path / "plan.yaml").write_text(BROKEN)
    there: dict[str, Any] = {"python": elsewhere, "folder": tmp_path}
    ask = ["-m", "replanning", "run", "plan.yaml", "--no-ask", "--replan-provider"]
    run(*ask, "oracle", **there, ORACLE=json.dumps(WISDOM))
    said = run("-m", "replanning", "why", **there)
    assert "oracle: the second one works" in said
    assert "outcome: success" in said
    run(*ask, "patience", "--observe", **there)
    assert "patience: it may work in a minute" in run("-m", "replanning", "why", "r1", **there)


PLANS = sorted(set(EXAMPLES.glob("*.yaml")) - {EXAMPLES / "coding-tools.yaml"})
CODING = r"""
goal: {objective: Write a file and keep it}
sequential: true
tasks:
  - {id: write, tool: write-file, arguments: {path: a.txt, text: "it's $HOME; \"quoted\""}}
  - {id: lengthen, tool: replace-text, arguments: {path: a.txt, old: "$HOME", new: "$HOME\n- second\r\n- third"}}
  - {id: change, tool: replace-text, arguments: {path: a.txt, old: "- second\r", new: "- 2nd\r"}}
  - {id: list, tool: list-files}
  - {id: find, tool: find-text, arguments: {text: "- "}}
  - {id: lines, tool: read-lines, arguments: {path: a.txt, first: 2, last: 3}}
  - {id: read, tool: read-file, arguments: {path: a.txt}}
  - {id: commit, tool: commit, arguments: {message: "one; two"}}
"""


async def test_tools_for_coding(tmp_path, monkeypatch):
    """The tools for work on a repository write, change, find, read and commit, and committing counts as dangerous."""
    for name, value in {"AUTHOR": "a", "COMMITTER": "a"}.items():
        monkeypatch.setenv(f"GIT_{name}_NAME", value)
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@b")
    monkeypatch.chdir(tmp_path)
    await anyio.run_process(["git", "init", "-q"])
    for folder in (".replanning", "planning_history"):
        await anyio.Path(folder).mkdir()
        await anyio.Path(folder, "r.jsonl").write_text("- a record of this run")
    plan = Plan.parse(f"{CODING}{(EXAMPLES / 'coding-tools.yaml').read_text()}")
    async with ToolExecutor(plan) as work:
        result = await ReplanningEngine([]).execute(plan, work)
    assert result.status == "succeeded", result.reason
    outputs = [result.outputs[name]["stdout"] for name in ("list", "find", "lines", "read")]
    assert outputs == [
        "a.txt",
        'a.txt:2:- 2nd\r\na.txt:3:- third; "quoted"',
        '- 2nd\r\n- third; "quoted"',
        'it\'s $HOME\n- 2nd\r\n- third; "quoted"',
    ]
    log = await anyio.run_process(["git", "log", "--format=%s", "--name-only"])
    assert log.stdout.decode() == "one; two\n\na.txt\n"
    assert [tool.name for tool in plan.tools if tool.dangerous] == ["commit"]


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.name)
def test_plans_are_valid(path):
    """Every plan file among the examples loads."""
    assert Plan.load(path).tasks
