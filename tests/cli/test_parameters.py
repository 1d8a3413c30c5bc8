"""Parameters of plan files on the command line: `--set`, and where their values are shown and kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import answer, cli, lines, write_plan

SECRET = "correct-horse-battery"
PARAMETERS = """\
parameters:
  region: {type: string, default: eu, description: where it runs}
  copies: integer
  sizes: {type: array, default: [1]}
  token: {secret: true}
"""
TOOLS = {
    "ship": "echo {to} {copies} {size} >> shipped ## effect: none",
    "pay": "test -e go && echo {key} >> paid ## effect: none",
}
TASKS = """
    id: ship, tool: ship, arguments: {to: "${parameters.region}", copies: "${parameters.copies}", size: "${parameters.sizes[0]}"}, when: parameters.copies > 1
    id: pay, tool: pay, arguments: {key: "${parameters.token}"}, depends_on: [ship]
"""
RUN = ("run", "plan.yaml", "--run-id", "r", "--no-replan")
ALL = ("--set", "copies=2", "--set", f"token={SECRET}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a plan that has parameters, of which two need a value."""
    write_plan(tmp_path, TOOLS, TASKS, more=PARAMETERS)
    return tmp_path


def test_validate_lists_them(folder: Path) -> None:
    """A plan is valid without values; those that a run needs are named, with the option that gives them."""
    told = cli(folder, "validate", "plan.yaml").stdout.splitlines()
    assert told[1:5] == [
        "parameter: region, string: eu by default (where it runs)",
        "parameter: copies, integer: a run needs --set copies=…",
        "parameter: sizes, array: [1] by default",
        "parameter: token, string, secret: a run needs --set token=…",
    ]
    found = answer(folder, "validate", "plan.yaml", *ALL, "--set", "region=us", "--json")
    assert [(row["name"], row["value"], row["needed"]) for row in found["parameters"]] == [
        ("region", "us", False),
        ("copies", 2, False),
        ("sizes", [1], False),
        ("token", "[redacted]", False),
    ]


def test_name_of_a_secret(tmp_path: Path) -> None:
    """A parameter that is called like a secret, and is none, is noted."""
    write_plan(tmp_path, {"say": "true"}, "id: a, tool: say", more="parameters: {api_key: string}")
    told = cli(tmp_path, "validate", "plan.yaml").stdout
    assert "parameter 'api_key' is named like a secret" in told


def test_all_that_is_wrong_at_once(folder: Path) -> None:
    """One error names missing, unknown and wrong values with their places; nothing was run."""
    done = cli(folder, *RUN, "--set", "copies=many", "--set", "regoin=us", code=2)
    places = [line.split(": ", 1) for line in done.stderr.splitlines()[1:]]
    how = "pass `--set token=…`, or in Python use `plan.with_parameters`"
    assert places == [
        ["  plan.yaml:4:3 parameters.copies", "parameter 'copies': expected integer, got 'many'"],
        [
            "  plan.yaml:2:1 parameters.regoin",
            "the plan has no parameter 'regoin'; did you mean 'region'?",
        ],
        ["  plan.yaml:6:3 parameters.token", f"parameter 'token' has no value (secret): {how}"],
    ]
    missing = cli(folder, *RUN, code=2).stderr
    assert "'copies' has no value (integer)" in missing
    assert "'token' has no value (secret)" in missing
    assert not (folder / "shipped").exists()
    assert "--set copies=…" in cli(folder, "simulate", "plan.yaml", code=2).stderr


def test_values_by_type(folder: Path) -> None:
    """A text stays text, whatever it looks like, and other types are read as in a plan file."""
    (folder / "go").touch()
    cli(folder, *RUN, *ALL, "--set", "region=${context.x}", "--set", "sizes=[7, 8]")
    assert lines(folder / "shipped") == ["${context.x} 2 7"]
    cli(folder, "simulate", "plan.yaml", *ALL, "--runs", "1")


def test_shown_and_kept(folder: Path) -> None:
    """The status and the picture of a run show the values, with a mask for a secret, which is in no file."""
    cli(folder, *RUN, *ALL, code=1)
    given = "region=eu, copies=2, sizes=[1], token=[redacted]"
    assert given in cli(folder, "status", "r").stdout
    assert given in cli(folder, "show", "r").stdout
    shown = {"region": "eu", "copies": 2, "sizes": [1], "token": "[redacted]"}
    assert answer(folder, "status", "r", "--json")["parameters"] == shown
    for file in (folder / ".replanning").iterdir():
        assert SECRET.encode() not in file.read_bytes()


def test_secret_on_resume(folder: Path) -> None:
    """A run that still needs a secret is not resumed without it, and the hint names the option; other values stay."""
    done = cli(folder, *RUN, *ALL, code=1)
    assert "replanning resume r --set 'token=…' --plan FILE" in done.stdout
    assert "give them again with --set token=…" in cli(folder, "resume", "r", code=2).stderr
    wrong = cli(folder, "resume", "r", "--set", f"token={SECRET}", "--set", "copies=3", code=2)
    assert "parameter 'copies' is 2 in this run" in wrong.stderr
    write_plan(folder, {**TOOLS, "pay": "echo {key} >> paid"}, TASKS, more=PARAMETERS)
    cli(folder, "resume", "r", "--plan", "plan.yaml", "--set", f"token={SECRET}", "-y", "-q")
    assert (lines(folder / "shipped"), lines(folder / "paid")) == (["eu 2 1"], [SECRET])
    assert (
        "give them again with --set token=…"
        in cli(folder, "rerun", "r", "pay", "-y", code=2).stderr
    )
    assert len(answer(folder, "status", "--json")) == 1
    cli(folder, "rerun", "r", "pay", "--set", f"token={SECRET}", "-y")
    assert lines(folder / "paid") == [SECRET, SECRET]


def test_other_values_of_a_corrected_plan(folder: Path) -> None:
    """With `resume --plan`, another value is a difference: it is shown, and what has used it is run again."""
    cli(folder, *RUN, *ALL, code=1)
    (folder / "go").touch()
    correct = ("resume", "r", "--plan", "plan.yaml", "--set", f"token={SECRET}")
    done = cli(folder, *correct, "--set", "region=us", "-y", "-q")
    assert '- parameters.region: "eu"' in done.stderr
    assert '+ parameters.region: "us"' in done.stderr
    assert "it depends on changed values: parameters.region" in done.stderr
    assert lines(folder / "shipped") == ["eu 2 1", "us 2 1"]
