"""Draws the architecture: the packages as layers, and three paths through the code."""

from __future__ import annotations

import ast
import tomllib
from importlib import import_module
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Final

from state_diagrams import picture

ROOT: Final = Path(__file__).parents[1]

FAILURE: Final = (
    # Each step: a file, a name that it defines, and what happens there.
    ("run/attempt.py", "Attempt.__aexit__", "the task has raised an exception"),
    ("run/running.py", "RunningAttempts.failed", "ends the attempt"),
    ("run/retries.py", "FailureKeeper.take", "describes the error, masks its secrets"),
    ("run/retries.py", "FailureKeeper.schedule_retry", "decides not to retry"),
    ("run/journal.py", "RunJournal.append", "AttemptFailed, to the store first"),
    ("live/plan.py", "LivePlan.fold", "the task is FAILED"),
    ("engine/monitor.py", "RunWatch._detect", "shows the record to the detectors"),
    ("triggers/task_failed.py", "TaskFailedDetector.detect", "returns a TaskFailed"),
    ("run/triggers.py", "RunTriggers.fire", "TriggerFired, through RunJournal.append"),
    ("engine/replanner.py", "Replanner.run", "takes triggers, drops stale ones, groups the rest"),
    ("engine/generator.py", "AlternativeGenerator.search", "asks all providers at the same time"),
    ("providers/repair.py", "RepairProvider.propose", "finds a tool of the same capability"),
    ("engine/generator.py", "AlternativeVetter.vet", "checks and scores, see the next picture"),
    ("decision/policy.py", "ReplanPolicy.decide", "executes, asks, keeps the plan, or aborts"),
    ("run/lifecycle.py", "Lifecycle.revise", "PlanRevised, through RunJournal.append"),
    ("live/draft.py", "Draft.commit", "the replacement is READY"),
    ("run/dispatch.py", "Dispatcher.next_task", "hands it to the next worker"),
)

PROPOSAL: Final = (
    ("engine/generator.py", "AlternativeGenerator.search", "one deadline for all providers"),
    ("providers/llm.py", "LLMAlternatives.propose", "writes the prompt"),
    ("llm/provider.py", "LLMProvider.complete_json", "asks the model, extracts JSON"),
    ("run/meter.py", "RunMeter.call", "charges the call to the budget of the run"),
    ("providers/llm.py", "ProposalParser.parse", "reads the reply as changes"),
    ("engine/generator.py", "AlternativeVetter.vet", "one alternative at a time"),
    ("decision/proposal.py", "analyse", "computes the Proposal that all checks read"),
    ("live/draft.py", "Draft", "stages the changes on the live plan"),
    ("plan/checks.py", "check_task", "checks new tasks like those of a file"),
    ("decision/proposal.py", "check_content", "the first of the checks; one may object"),
    ("decision/proposal.py", "ConfidenceScorer.score", "scores what has passed"),
    ("engine/generator.py", "PathGenerator.rank", "orders the candidates"),
    ("decision/policy.py", "ReplanPolicy.decide", "compares the best one with thresholds"),
    ("run/lifecycle.py", "Lifecycle.revise", "applies it, as in the picture of a failure"),
)

COMMAND: Final = (
    ("cli/app.py", "LazyCommandGroup.resolve_command", "imports the command's module"),
    ("cli/run.py", "run", "replanning run plan.yaml"),
    ("config.py", "load_settings", "file, environment and arguments"),
    ("cli/lookup.py", "read_plan", "adds the values of --set"),
    ("plan/document.py", "Plan.load", "reads the file, checks the whole plan"),
    ("tools/check.py", "check_tools", "checks tools and arguments before anything runs"),
    ("journal/store.py", "open_store", "memory, SQLite or PostgreSQL"),
    ("engine/engine.py", "ReplanningEngine", "resolves providers, takes gate and exporters"),
    ("tools/executor.py", "ToolExecutor", "will execute the tasks"),
    ("engine/engine.py", "ReplanningEngine.open", "opens the plan as a run"),
    ("run/opening.py", "RunFactory.create", "takes the lease, records RunOpened"),
    ("engine/engine.py", "run_workers", "starts the number of workers in --concurrency"),
    ("run/execution.py", "Worker.run", "pulls tasks until the run ends"),
    ("run/dispatch.py", "Dispatcher.next_task", "claims a ready task, fills its arguments"),
    ("tools/executor.py", "ToolExecutor.__call__", "calls the function for the kind of tool"),
    ("cli/summary.py", "RunSummary.report", "prints the result, returns the exit code"),
)

SETTINGS: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS: Final = {each["id"]: each for each in SETTINGS["tool"]["importlinter"]["contracts"]}
PLUGINS: Final = sorted(CONTRACTS["layers"]["exhaustive_ignores"])
LAYERS: Final = [PLUGINS, *(layer.split(" : ") for layer in CONTRACTS["layers"]["layers"])]
"""The packages from top to bottom; packages of one layer do not import one another."""

WIDTH: Final = 800
ROW: Final = 23
STEP: Final = 36
LANE: Final = 44


def diagrams() -> dict[str, str]:
    """Return the pictures, by their paths below `docs/`."""
    return {
        "images/layers.svg": layers(),
        "images/failure.svg": path("The path of a failure", FAILURE),
        "images/proposal.svg": path("The path of a model's proposal", PROPOSAL),
        "images/command.svg": path("The path of a command", COMMAND),
    }


def layers() -> str:
    """Return the picture of the layers: plugins, which no package imports, then the packages."""
    core = {name.removeprefix("replanning.") for name in CONTRACTS["sans-io"]["source_modules"]}
    parts = []
    top = 8
    for names in LAYERS:
        kind = "finished"
        if names == PLUGINS:
            kind = "running"
        elif core.issuperset(names):
            kind = "waiting"
        parts.append(
            f'<rect class="{kind}" x="40" y="{top}" width="112" '
            f'height="{ROW * len(names) - 3}" rx="5"/>'
        )
        for name in names:
            parts.append(f'<text x="48" y="{top + 14}">{name}</text>')
            parts.append(f'<text class="label" x="164" y="{top + 14}">{summary(name)}</text>')
            top += ROW
    parts.append(
        f'<path class="line" d="M24 12V{top - 8}" marker-end="url(#tip)"/>'
        f'<text class="label" transform="translate(16 {top / 2:g}) rotate(-90)" '
        f'text-anchor="middle">may import those below</text>'
    )
    legend = {
        "running": "plugins, found through entry points: no package imports them",
        "waiting": "the core: no I/O, no event loop, no clock",
        "finished": "the rest",
    }
    left = 40
    for kind, text in legend.items():
        parts.append(
            f'<rect class="{kind}" x="{left}" y="{top + 8}" width="14" height="14" rx="3"/>'
            f'<text class="label" x="{left + 20}" y="{top + 19}">{text}</text>'
        )
        left += 40 + 6 * len(text)
    return picture(WIDTH, top + 32, "The packages, each above those that it may import", parts)


def path(title: str, steps: tuple[tuple[str, str, str], ...]) -> str:
    """Return the picture of a path: a lane for each package, a row for each step."""
    passed = {package_of(file) for file, _, _ in steps}
    lanes = [name for names in LAYERS for name in names if name in passed]
    first = 84
    right = LANE * len(lanes) + 24
    parts = []
    for number, package in enumerate(lanes):
        x = 24 + LANE * number
        parts.append(
            f'<path class="line" opacity="0.3" d="M{x} {first - 14}V{first + STEP * len(steps)}"/>'
            f'<text transform="translate({x - 2} {first - 20}) rotate(-40)">{package}</text>'
        )
    points = []
    for number, (file, name, text) in enumerate(steps):
        # An AttributeError says that the table is out of date.
        attrgetter(name)(import_module(f"replanning.{file[:-3].replace('/', '.')}"))
        y = first + STEP * number
        points.append((24 + LANE * lanes.index(package_of(file)), y))
        parts.append(
            f'<text x="{right}" y="{y - 1}">{name}</text>'
            f'<text class="label" x="{right}" y="{y + 14}">{file}: {text}</text>'
        )
    for (x, y), (next_x, next_y) in pairwise(points):
        parts.append(
            f'<path class="line" d="M{x} {y}L{next_x} {next_y - 7}" marker-end="url(#tip)"/>'
        )
    parts += [f'<circle class="from" cx="{x}" cy="{y}" r="5"/>' for x, y in points]
    return picture(WIDTH, first + STEP * len(steps) + 8, title, parts)


def package_of(file: str) -> str:
    """Return the package of a file, or the name of a single module."""
    return file.partition("/")[0].removesuffix(".py")


def summary(name: str) -> str:
    """Return the first paragraph of the docstring of a package or module."""
    source = ROOT / "replanning" / name / "__init__.py"
    if not source.exists():
        source = source.parent.with_suffix(".py")
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].replace("`", "").split())
