"""The commands that look at runs and decide about them, also while another process carries them out."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from replanning.cli._options import DEFAULT_STORE, JsonOption, StoreOption

INSPECT_PANEL: Final = "Look at runs"
DECISION_PANEL: Final = "Decide about runs"


INSPECT_EXIT_CODES_HELP: Final = (
    "0 done · 1 what is asked about is not there, or was refused · 2 wrong usage, file or store"
)
EXAMPLES: Final = {
    "status": ["status", "status 20250131-120000-1a2b3c", "status latest --json"],
    "history": [
        "history",
        "history 20250131 --trigger task-failed --decision execute",
        "history --format markdown > history.md",
        "history --calibration    how far confidence could be trusted, over all runs",
    ],
    "why": ["why    the last replan of the newest run", "why 20250131 2    what led to revision 2", "why r3"],
    "diff": [
        "diff    the plan as it was given, and as it is now",
        "diff 2    what revision 2 changed",
        "diff 20250131 1 3",
    ],
    "pending": ["pending", "pending 20250131-120000-1a2b3c --json"],
    "approve": ["approve", "approve 20250131-120000-1a2b3c.q1 --choice 2 --comment 'cheaper'"],
    "reject": ["reject 20250131-120000-1a2b3c.q1 --comment 'not today'"],
    "modify": ["modify --changes changes.yaml    with lines such as: - {kind: skip, task_id: announce}"],
    "request": [
        "request 'the mirror is slow' --task fetch",
        "request 20250131 'we ship for arm as well' --goal-fact 'built(x86)' --goal-fact 'built(arm)'",
    ],
}


class HistoryFormat(StrEnum):
    """How a history is written."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"
    MERMAID = "mermaid"


OptionalRunArgument = Annotated[
    str | None,
    typer.Argument(metavar="RUN", show_default=False, help="The id of a run, or how it begins; by default the newest."),
]
PendingRunArgument = Annotated[
    str | None,
    typer.Argument(metavar="RUN", show_default=False, help="The id of a run, or how it begins; by default all runs."),
]
QuestionArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="QUESTION",
        show_default=False,
        help="The id of a question, or of a run with one; by default the only one that is open.",
    ),
]
ByOption = Annotated[
    str | None, typer.Option("--by", metavar="NAME", help="Who decides, for the history; by default who is logged in.")
]
CommentOption = Annotated[
    str, typer.Option("--comment", "-m", metavar="TEXT", help="Why, for the history; or the answer to what is unclear.")
]
WaitOption = Annotated[
    float, typer.Option("--wait", metavar="SECONDS", min=0, help="How long to wait for the run to take it.")
]


def add_run_commands(app: typer.Typer) -> None:
    """Give an application the commands of this module."""
    for looking in (status, history, why, diff, pending):
        app.command(rich_help_panel=INSPECT_PANEL, epilog=_epilog(looking.__name__))(looking)
    app.command("questions", hidden=True)(pending)
    for deciding in (approve, reject, modify, request):
        app.command(rich_help_panel=DECISION_PANEL, epilog=_epilog(deciding.__name__))(deciding)


def _epilog(name: str) -> str:
    examples = [f"replanning {line}" for line in EXAMPLES[name]]
    return "\n\n".join(["[bold]Examples[/bold]", *examples, "[bold]Exit codes[/bold]", INSPECT_EXIT_CODES_HELP])


def status(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", show_default=False, help="The id of a run, or how it begins; by default all."),
    ] = None,
    *,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="How many runs to list.")] = 20,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Show how runs stand: tasks by state, what runs and for how long, open questions, what was spent, who is at it."""
    from replanning.cli._standings import show_run, show_runs

    if run is None:
        show_runs(store, limit, as_json=as_json)
    else:
        show_run(store, run, as_json=as_json)


def history(
    run: OptionalRunArgument = None,
    *,
    form: Annotated[HistoryFormat, typer.Option("--format", help="How to write it.")] = HistoryFormat.TEXT,
    trigger: Annotated[
        str | None, typer.Option("--trigger", metavar="KIND", help="Only replans because of this, as task-failed.")
    ] = None,
    decision: Annotated[
        str | None, typer.Option("--decision", metavar="KIND", help="Only replans with this decision, as execute.")
    ] = None,
    calibration: Annotated[
        bool,
        typer.Option(
            "--calibration",
            help="Show how far confidence could be trusted instead: in RUN, or in all runs where none is named.",
        ),
    ] = False,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Show what was replanned in a run: cause, decision, changes and outcome of each replan, and edits by hand.

    As JSON and without a filter it is an export, which ReplanHistory.from_json imports.
    """
    from replanning.cli._histories import show_calibration, show_history

    chosen = HistoryFormat.JSON if as_json else form
    if calibration:
        show_calibration(store, run, trigger=trigger, decision=decision, as_json=chosen is HistoryFormat.JSON)
    else:
        show_history(store, run, chosen.value, trigger=trigger, decision=decision)


def why(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN REVISION",
            show_default=False,
            help="The run, by default the newest; and a revision such as 2, or a replan such as r2, by default the last.",
        ),
    ] = None,
    *,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Explain a revision on one screen: cause, candidates with their scores, what was rejected, rule, and difference."""
    from replanning.cli._histories import show_explanation

    show_explanation(store, what or [], as_json=as_json)


def diff(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN A B",
            show_default=False,
            help="The run, by default the newest; and two revisions, or one for what that revision did; by default the"
            " first and the last.",
        ),
    ] = None,
    *,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Show what differs between two revisions of a run's plan."""
    from replanning.cli._histories import show_diff

    show_diff(store, what or [], as_json=as_json)


def pending(run: PendingRunArgument = None, *, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """Show the questions that wait for a person, what one can choose, and what each choice changes."""
    from replanning.cli._standings import show_questions

    show_questions(store, run, as_json=as_json)


def approve(
    question: QuestionArgument = None,
    *,
    choice: Annotated[
        int, typer.Option("--choice", metavar="N", help="Which candidate, as `pending` numbers them; 1 is the best.")
    ] = 1,
    comment: CommentOption = "",
    by: ByOption = None,
    wait: WaitOption = 5.0,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Agree to a change that a run asks about."""
    from replanning.cli._answers import AnswerOptions, answer_question

    reply = AnswerOptions("approve", by, comment, choice=choice)
    answer_question(store, question, reply, wait, as_json=as_json)


def reject(
    question: QuestionArgument = None,
    *,
    comment: CommentOption = "",
    by: ByOption = None,
    wait: WaitOption = 5.0,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Refuse every change that a run asks about: the plan is kept as it is."""
    from replanning.cli._answers import AnswerOptions, answer_question

    answer_question(store, question, AnswerOptions("reject", by, comment), wait, as_json=as_json)


def modify(
    question: QuestionArgument = None,
    *,
    changes: Annotated[
        Path,
        typer.Option(
            "--changes", metavar="FILE", help="The changes to make instead: a list, in YAML or JSON; - reads the input."
        ),
    ],
    comment: CommentOption = "",
    by: ByOption = None,
    wait: WaitOption = 5.0,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Answer a question with changes of your own."""
    from replanning.cli._answers import AnswerOptions, answer_question, read_changes

    reply = AnswerOptions("modify", by, comment, changes=read_changes(str(changes)))
    answer_question(store, question, reply, wait, as_json=as_json)


def request(
    what: Annotated[
        list[str],
        typer.Argument(metavar="RUN REASON", help="The run, by default the newest, and why, as one word in quotes."),
    ],
    *,
    task: Annotated[
        list[str] | None, typer.Option("--task", metavar="TASK", help="A task it is about; repeat for several.")
    ] = None,
    goal: Annotated[
        str | None, typer.Option("--goal", metavar="TEXT", help="What the plan is for from now on, in words.")
    ] = None,
    goal_fact: Annotated[
        list[str] | None,
        typer.Option(
            "--goal-fact", metavar="FACT", help="What must hold at the end from now on; repeat it, these replace all."
        ),
    ] = None,
    by: ByOption = None,
    wait: WaitOption = 5.0,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Ask a run to replan, or to go for another goal.

    With another goal, the plan is changed where what is left of it does not reach that.
    """
    from replanning.cli._answers import RequestOptions, parse_goal_change, post_replan_request

    wish = RequestOptions(task or [], parse_goal_change(goal, goal_fact or []), by)
    post_replan_request(store, what, wish, wait, as_json=as_json)
