"""The script that holds the core to its limits of density, on a small package made up for it."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_density.py"

PLAIN = '''\
"""A module."""

# One comment for a few lines is enough.
def double(number: int) -> int:
    if number < 0:
        return 0
    result = number
    result += number
    return result
'''

WIDE = '''\
class Wide:
    """Holds much{reason}."""

    def __init__(self) -> None:
        # One after another.
{assignments}
'''

TANGLED = """\
def tangled(number: int) -> int:
    # Many branches,
    # each of them alike.
{branches}
    return number
"""


def check(root: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run the script on a checkout whose package `plan` has one module."""
    package = root / "replanning" / "plan"
    package.mkdir(parents=True)
    (package / "module.py").write_text(code)
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(root)], capture_output=True, text=True, timeout=60
    )


def wide_class(attributes: int, reason: str = "") -> str:
    """Return the code of a class that sets so many attributes."""
    assignments = [f"        self.a{number} = {number}" for number in range(attributes)]
    return WIDE.format(reason=reason, assignments="\n".join(assignments))


def test_packed_forms_are_named_with_their_places(tmp_path):
    """Each packed form is counted, and named with its file and line."""
    packed = "a, b = 1, 2\nc = a if b else 0\nd = [e for e in (a, b)]\nf = a and b\n"
    done = check(tmp_path, PLAIN + packed)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    exceeded = dict(zip(lines[::2], lines[1::2], strict=True))
    assert exceeded == {
        "conditional expressions per 1,000 statements: 90.9, expected at most 25": (
            "  replanning/plan/module.py:11"
        ),
        "comprehensions per 1,000 statements: 90.9, expected at most 32": (
            "  replanning/plan/module.py:12"
        ),
        "and / or per 1,000 statements: 90.9, expected at most 48": (
            "  replanning/plan/module.py:13"
        ),
        "tuples assigned to tuples per 1,000 statements: 90.9, expected at most 3": (
            "  replanning/plan/module.py:10"
        ),
    }


def test_dense_functions_are_named(tmp_path):
    """If statements hold too much on average, the densest functions are named."""
    dense = "def total(a: int, b: int, c: int) -> int:  # dense\n    return (a + b) * (b + c) * (c + a)\n"
    done = check(tmp_path, dense)
    assert done.returncode == 1
    assert done.stdout.splitlines()[1].startswith("  replanning/plan/module.py:1 total: ")


def test_a_large_class_needs_a_reason(tmp_path):
    """More than 15 attributes need a reason in the docstring, and no reason allows more than 20."""
    reason = ". It has many attributes because it is made up"
    assert check(tmp_path / "reasonable", wide_class(16, reason)).returncode == 0
    unexplained = check(tmp_path / "unexplained", wide_class(16))
    assert unexplained.stdout.splitlines()[1] == (
        "  replanning/plan/module.py:1 Wide: 16 attributes"
    )
    too_large = check(tmp_path / "large", wide_class(21, reason))
    assert "classes of more than 20 attributes: 1.0, expected at most 0" in too_large.stdout


def test_a_few_functions_may_have_many_decisions(tmp_path):
    """Functions of more than 20 decisions have a limit for all of them together."""
    branches = ["    if number:\n        number += 1"] * 21
    tangled = TANGLED.format(branches="\n".join(branches))
    assert check(tmp_path / "eight", tangled * 8).returncode == 0
    nine = check(tmp_path / "nine", tangled * 9)
    assert nine.stdout.splitlines()[:2] == [
        "functions of more than 20 decisions: 9.0, expected at most 8",
        "  replanning/plan/module.py:1 tangled: 22 decisions",
    ]


def test_every_other_package_has_limits_of_its_own(tmp_path):
    """Outside the core, each package is measured by itself, and the report begins with its name."""
    package = tmp_path / "replanning" / "llm"
    package.mkdir(parents=True)
    (package / "module.py").write_text("a, b = 1, 2\n" + PLAIN)
    done = check(tmp_path, PLAIN)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "replanning/llm: tuples assigned to tuples per 1,000 statements: 125.0, expected at most 3",
        "  replanning/llm/module.py:1",
    ]
