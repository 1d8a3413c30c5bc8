"""What the commands that carry out plans have in common: their options, and what their help says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from replanning.cli._options import AskMode, fail

RUN_PANEL: Final = "Run plans"
PLAN_PANEL: Final = "Look at plans"

RUN_EXIT_CODES_HELP: Final = (
    "[bold]Exit codes[/bold]",
    (
        "0 succeeded · 1 failed or aborted · 2 wrong usage, plan, settings or store: nothing was run · 3 paused ·"
        " 4 needs a person's answer · 130 stopped at once by a second Ctrl-C. After 3, 4 and 130 it can be resumed."
    ),
)

PlanArgument = Annotated[
    Path, typer.Argument(metavar="PLAN", help="The plan file: YAML, or JSON where its name ends in .json.")
]
ReplanOption = Annotated[
    bool | None,
    typer.Option("--replan/--no-replan", help="Repair the plan when something goes wrong, or leave it as it is."),
]
ProviderOption = Annotated[
    list[str] | None,
    typer.Option(
        "--replan-provider",
        metavar="NAME",
        help="Who proposes alternatives: repair, or a language model (openai, anthropic, github-copilot, ollama, local;"
        " NAME:MODEL for one of its models; NAME,NAME for one that stands in for the other); repeat for several."
        " auto is repair and the first model whose key is in the environment.",
    ),
]
SequentialOption = Annotated[bool, typer.Option("--sequential", help="One task at a time.")]
ConcurrencyOption = Annotated[
    int | None, typer.Option("--max-concurrency", metavar="N", min=1, help="Tasks that run at once at most (8).")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="context.KEY=VALUE", help="Set a value of the context; repeat for several."),
]
ObserveOption = Annotated[bool, typer.Option("--observe", help="Record what would be changed, and change nothing.")]
TraceOption = Annotated[
    str | None,
    typer.Option(
        "--trace", metavar="WHERE", help="Send spans: console, or otlp=ADDRESS, such as otlp=http://localhost:4318."
    ),
]
AskOption = Annotated[
    AskMode | None,
    typer.Option(
        "--ask",
        help="Who is asked when a person must decide: whoever sits at the console (the default on a terminal);"
        " whoever answers through the store, as replanning approve does; or nobody, and the run ends with code 4.",
    ),
]
NoAskOption = Annotated[bool, typer.Option("--no-ask", help="The same as --ask never.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


def paragraphs(*lines: str) -> str:
    """Lines of an epilog, each on its own."""
    return "\n\n".join(lines)


def worker_count(*, sequential: bool, max_concurrency: int | None) -> int:
    """How many tasks run at once at most."""
    from replanning.cli._run import DEFAULT_WORKERS

    if sequential and max_concurrency is not None:
        fail("--sequential and --max-concurrency contradict each other; give one of them")
    return 1 if sequential else DEFAULT_WORKERS if max_concurrency is None else max_concurrency


def validate_run_id(run_id: str | None) -> str | None:
    """What a run is to be called, which must not stand for something else where it is named later."""
    from replanning.cli._lookup import LATEST

    meanings = {"": "is empty", LATEST: "stands for the newest run"}
    if run_id is None:
        return None
    if problem := "would be taken for an option" if run_id.startswith("-") else meanings.get(run_id, ""):
        fail(f"--run-id: {run_id!r} {problem}; give another name, or leave it out")
    return run_id


def ask_mode(ask: AskMode | None, *, no_ask: bool) -> AskMode | None:
    """Who is asked where a person must decide."""
    if no_ask and ask is not None:
        fail("--ask and --no-ask contradict each other; give one of them")
    return AskMode.NEVER if no_ask else ask
