"""Promises of every command: help without noise, an end without a traceback, all problems at once, true exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from replanning.cli.app import app
from tests.support.cli import ENVIRONMENT, answer, cli
from tests.support.llm_server import LLMRequest, LLMServerReply, ScriptedLLMServer, ServerReply

# A program that is interrupted when a certain module is imported, as by Ctrl-C at that instant.
INTERRUPTED = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
sys.argv = ["replanning", "validate", "plan.yaml"]
from replanning.cli import main
main()
"""


def commands(group=None, lead: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the words of every command of the program, also of those in groups."""
    group = group or get_command(app)
    found = {name: group.resolve_command(None, name.split())[1] for name in group.commands}
    inner = [commands(command, (*lead, name)) for name, command in found.items() if hasattr(command, "commands")]
    return [*((*lead, *name.split()) for name in found), *(words for group in inner for words in group)]


@pytest.mark.parametrize("words", [(), *commands()], ids=" ".join)
def test_flags_have_no_type(words: tuple[str, ...]) -> None:
    """Help shows no type behind an option that takes no value."""
    shown = CliRunner().invoke(app, [*words, "--help"]).stdout
    assert "--help" in shown
    assert "<bool>" not in shown
    assert "BOOLEAN" not in shown


@pytest.mark.parametrize(
    "name", ["replanning.cli.app", "typer", "replanning.cli.plans", "pydantic", "replanning.plan.document", "yaml"]
)
def test_interrupted_while_it_is_loaded(tmp_path: Path, name: str) -> None:
    """Ctrl-C ends the program with code 130 and no traceback, also while its parts are still being imported."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(name=name)],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr in ("", "error: interrupted\n")  # Typer itself says nothing


def test_interrupted_with_nowhere_to_say_it(tmp_path: Path) -> None:
    """The same holds for a program whose streams are closed."""
    program = "import sys; sys.stderr = None\n" + INTERRUPTED.format(name="typer")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=ENVIRONMENT, stdin=subprocess.DEVNULL)
    assert done.returncode == 130


def test_package_alone_loads_little(tmp_path: Path) -> None:
    """Importing the package loads nothing of it; each of its names brings what it needs."""
    program = (
        "import sys, replanning; before = set(sys.modules); plan = replanning.Plan; import replanning as r;"
        "print('pydantic' in before, plan.__name__, all(hasattr(r, n) and n in dir(r) for n in r.__all__));"
        "\ntry: r.nothing\nexcept AttributeError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.stdout == "False Plan True\nmodule 'replanning' has no attribute 'nothing'\n", done.stderr


def test_validate_tells_everything(tmp_path: Path) -> None:
    """Unknown fields keep nothing else from being told: neither wrong references nor tools that nothing executes."""
    (tmp_path / "plan.yaml").write_text(
        """\
goal: {objective: x}
colour: red
tools:
  - {name: a}
  - {name: b, kind: shell, comand: x}
  - {name: c, kind: shel}
tasks:
  - {id: one, tool: a, retries: 3, depends_on: [two]}
  - {id: three, tool: d}
  - {id: four, tool: c}
"""
    )
    told = answer(tmp_path, "validate", "plan.yaml", code=2)["problems"]
    assert sorted(problem["place"].split(" ")[1] for problem in told) == [
        "colour",
        "tasks[0].depends_on[0]",
        "tasks[0].retries",
        "tasks[1].tool",
        "tools[0]",
        "tools[1]",
        "tools[1].comand",
        "tools[2]",
    ]
    places = {problem["place"].split(" ")[1]: problem["place"] for problem in told}
    assert places["tools[2]"] == "plan.yaml:6:5 tools[2]"
    assert places["tools[0]"] == "plan.yaml:4:5 tools[0]"


@pytest.mark.parametrize(
    ("used", "others", "code"), [(True, True, 0), (True, False, 0), (False, True, 1), (False, False, 1)]
)
def test_check_of_providers_fails(tmp_path: Path, used: bool, others: bool, code: int) -> None:
    """A check of language models fails when none answers, or when the one that runs would use does not."""

    def reply(request: LLMRequest) -> LLMServerReply:
        return "yes" if (used if request.path == "/v1/messages" else others) else ServerReply.error(401)

    (tmp_path / "replanning.yaml").write_text("replanning: {provider: anthropic}\n")
    with ScriptedLLMServer(reply) as server:
        found = answer(tmp_path, "providers", "--check", code=code, **server.environ())
    answers = {plugin["name"]: plugin["answers"] for plugin in found}
    assert (answers["anthropic"], answers["openai"]) == (used, others)


def test_check_of_providers_without_any(tmp_path: Path) -> None:
    """The check fails without any language model; the plain list of providers does not."""
    variables = {name: "" for name in os.environ if name.endswith("_API_KEY")}
    assert cli(tmp_path, "providers", "--check", **variables).returncode == 1
    assert cli(tmp_path, "providers", **variables).returncode == 0
    assert "with --check, when no language model answers" in " ".join(
        cli(tmp_path, "providers", "--help").stdout.split()
    )
