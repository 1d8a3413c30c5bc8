"""Expectations for recorded runs: the commands `expect suggest` and `expect check`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import yaml

from replanning.cli.app import (
    DEFAULT_STORE,
    ExitCode,
    JsonOption,
    Program,
    StoreOption,
    console,
    epilog,
    escape_control,
    fail,
    print_json,
    print_message,
    redactor,
)
from replanning.cli.lookup import existing_store, find_run, load_document, read_plan
from replanning.errors import PlanError, ReplanningError
from replanning.expectations import ObservedCall, ToolSuggestions, suggest_expectations
from replanning.expectations.calls import CheckedCall, checked_calls, recorded_calls
from replanning.history.status import replay_records
from replanning.integrations.recorded import recorded_value
from replanning.journal.records import RunOpened
from replanning.journal.store import RunStore
from replanning.plan.messages import pluralise
from replanning.plan.reading import format_of, read_document, read_text_file, write_yaml
from replanning.plan.schemas import invalid_schema
from replanning.plan.tasks import Expectation, Task, TaskBody, ToolSpec, has_no_effect
from replanning.plan.types import JsonObject, JsonValue, RunId, TaskId

commands = Program()

MAX_SHOWN_OUTPUTS: Final = 20
"""Maximum number of rejected outputs that are listed for one tool; JSON has all."""

_epilog = partial(
    epilog, codes="0 done · 1 there is no such run · 2 wrong usage, plan file or store"
)

RunsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--runs",
        metavar="RUN",
        help="The id of a run, or its beginning; latest is the newest run. Several may follow; by"
        " default all runs of the store.",
    ),
]

MoreRunsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="RUN…", show_default=False, help="Further runs.")
]


@commands.command(
    "expect suggest",
    epilog=_epilog(
        "replanning expect suggest    from all runs of the store",
        "replanning expect suggest --runs fix-12 fix-13 > expectations.yaml",
        "replanning expect suggest --runs latest --write plan.yaml",
    ),
)
def expect_suggest(
    more: MoreRunsArgument = None,
    *,
    runs: RunsOption = None,
    write: Annotated[
        Path | None,
        typer.Option(
            "--write",
            metavar="FILE",
            help="Add the suggestions to this plan file, to its tools without an `expect`.",
        ),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Suggest expectations for the outputs of tools, learned from the outputs of recorded runs.

    Each suggestion says how many outputs and runs support it, and how many past outputs it would
    have rejected. It takes effect once it is in a plan file.
    """
    calls: list[ObservedCall] = []
    tools: dict[str, ToolSpec] = {}
    looked_at: list[RunId] = []
    with existing_store(store) as opened:
        for run in _named_runs(opened, runs, more):
            try:
                records = list(opened.read(run))
                observed = list(recorded_calls(records))
            except ReplanningError as error:
                print_message(f"run {run!r} is left out: {error}")
                continue
            looked_at.append(run)
            body = records[0].body
            if isinstance(body, RunOpened):
                tools |= {tool.name: tool for tool in body.plan.tools}
            calls += map(_with_value, observed)
    suggested = suggest_expectations(calls)
    changing = {
        name for name in suggested if name not in tools or not has_no_effect(_ANY_TASK, tools[name])
    }
    written: _Written | None = None
    if write is not None:
        written = _write(write, suggested, changing)
    if as_json:
        listed = [
            {**asdict(learned), "expect": learned.expect, "changes": name in changing}
            for name, learned in suggested.items()
        ]
        document: dict[str, object] = {"runs": looked_at, "tools": listed}
        if written is not None:
            document["written"] = asdict(written)
        print_json(document)
        return
    if written is None:
        console().print(escape_control(_as_yaml(suggested, changing, len(looked_at))), end="")
        return
    for name in written.tools:
        console().print(
            escape_control(f"{written.file}: tool {name} expects: {_summary(suggested[name])}")
        )
    for name, reason in written.skipped.items():
        print_message(f"{written.file}: nothing was written for tool {name!r}: {reason}")


def _with_value(call: ObservedCall) -> ObservedCall:
    """Return a recorded call with its output as expectations see it."""
    try:
        return replace(call, output=recorded_value(call.output))
    except ValueError:
        return replace(call, output=None, kept=False)


_ANY_TASK: Final = TaskBody()
"""Task that does not declare the effect of its tool."""


def _named_runs(
    store: RunStore, words: Sequence[str] | None, options: Sequence[str] | None
) -> list[RunId]:
    """Return the named runs without duplicates; by default all runs, oldest first."""
    names = [*(words or ()), *(options or ())]
    if not names:
        return [info.run for info in reversed(store.runs())]
    return list(dict.fromkeys(find_run(store, name).run for name in names))


# Suggestions as YAML


def _as_yaml(suggested: Mapping[str, ToolSuggestions], changing: set[str], runs: int) -> str:
    """Return suggestions as the section `tools` of a plan file, with their support as comments."""
    lines = [f"# Learned from {pluralise(runs, 'run')}. Paste the expectations that you want."]
    if any(learned.expect for learned in suggested.values()):
        lines.append("tools:")
    for name, learned in suggested.items():
        lines.append(f"  # {_counts(name, learned)}")
        lines += [f"  # {note}" for note in learned.notes]
        block = _block(learned, means=name in changing)
        if learned.expect:
            lines.append(f"  - name: {_scalar(name)}")
        lines += [f"    {line}" for line in block]
    if not suggested:
        lines.append("# No tool was called in these runs.")
    return "\n".join(lines) + "\n"


def _counts(name: str, learned: ToolSuggestions) -> str:
    text = f"{name}: {pluralise(learned.outputs, 'output')} of {pluralise(learned.runs, 'run')}"
    if learned.failed:
        text += f"; {pluralise(learned.failed, 'call')} failed"
    if learned.unreadable:
        text += f"; {pluralise(learned.unreadable, 'output')} not kept as JSON, and not examined"
    return text.replace("\n", " ")


def _summary(learned: ToolSuggestions) -> str:
    expect = learned.expect
    parts = []
    if "schema" in expect:
        parts.append("a schema")
    for name, noun in (("where", "condition"), ("errors", "error text")):
        entries = expect.get(name)
        if isinstance(entries, list):
            parts.append(pluralise(len(entries), noun))
    return ", ".join(parts)


def _scalar(value: JsonValue) -> str:
    return write_yaml([value]).removeprefix("- ").rstrip("\n")


def _block(learned: ToolSuggestions, *, means: bool) -> list[str]:
    """Return the lines of `expect` of a tool; only comments if nothing is proposed.

    Args:
        learned: the suggestions for the tool.
        means: whether a comment explains `means: not-done`, for a tool that changes something.
    """
    lines = []
    if learned.expect:
        lines.append("expect:")
    for name in ("schema", "where", "errors"):
        entries = [
            suggestion
            for suggestion in learned.suggestions
            if suggestion.field == name and suggestion.proposed
        ]
        if entries and name != "schema":
            lines.append(f"  {name}:")
        for suggestion in entries:
            comment = "# it would have rejected none"
            if suggestion.rejected:
                comment = f"# it would have rejected {suggestion.rejected}"
            if suggestion.outputs:
                support = pluralise(suggestion.outputs, "output")
                support += f" of {pluralise(suggestion.runs, 'run')}"
                comment = f"# {support}; {comment.removeprefix('# ')}"
            if suggestion.note:
                comment += f"; {suggestion.note}"
            if name == "schema":
                lines.append(f"  {comment}")
                lines += [f"  {line}" for line in write_yaml({name: suggestion.value}).splitlines()]
            else:
                lines.append(f"    {comment}")
                lines += [f"    {line}" for line in write_yaml([suggestion.value]).splitlines()]
        if entries and name == "errors" and means:
            lines.append(
                "  # means: not-done    # add this if such an output means that nothing was changed"
            )
    for suggestion in learned.suggestions:
        if not suggestion.proposed:
            lines.append(f"  # {suggestion.rejected} of the past outputs break {suggestion.value}")
            lines.append(f"  #   ({suggestion.note})")
    return [line.replace("\r", " ") for line in lines]


# Suggestions in a plan file


@dataclass
class _Written:
    """Result of writing suggestions into a plan file.

    Attributes:
        file: the file.
        tools: the tools that have got an `expect`.
        skipped: the other tools with suggestions, each with the reason.
    """

    file: str
    tools: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


def _write(path: Path, suggested: Mapping[str, ToolSuggestions], changing: set[str]) -> _Written:
    """Add suggestions to a plan file; refuse if its comments or layout would change.

    Raises:
        PlanError: the file cannot be read.
    """
    if format_of(path) == "json":
        fail(f"--write: {path} is JSON, and only YAML is changed; paste the output of --json")
    text = read_text_file(path)
    document = read_document(text, format="yaml", source=str(path))
    listed = document.get("tools") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        fail(f"--write: {path} has no section `tools`")
    numbers: dict[str, int] = {}
    for number, tool in enumerate(listed):
        if isinstance(tool, dict) and isinstance(tool.get("name"), str):
            numbers[str(tool["name"])] = number
    written = _Written(str(path))
    blocks: dict[int, list[str]] = {}
    for name, learned in suggested.items():
        number = numbers.get(name, -1)
        if not learned.expect:
            written.skipped[name] = "nothing is suggested for it"
        elif number < 0:
            written.skipped[name] = "the file does not describe it under `tools`"
        elif "expect" in listed[number]:  # type: ignore[operator] # it has a name
            written.skipped[name] = "it has `expect` already"
        else:
            schema = learned.expect.get("schema")
            problem = invalid_schema(schema) if isinstance(schema, dict) else ""
            if problem:
                fail(f"--write: the suggestion for {name!r} cannot be checked here: {problem}")
            Expectation.model_validate(learned.expect)
            blocks[number] = _block(learned, means=name in changing)
            written.tools.append(name)
    changed = _with_blocks(
        text, blocks, {numbers[name]: suggested[name].expect for name in written.tools}
    )
    # A copy without aliases: with an alias, a new value would appear in two places.
    expected: Any = json.loads(json.dumps(document))
    for name in written.tools:
        expected["tools"][numbers[name]]["expect"] = suggested[name].expect
    try:
        is_right = read_document(changed, format="yaml") == expected
    except PlanError:
        is_right = False
    if not is_right:
        fail(
            f"--write: the layout of {path} is too unusual to change it safely; nothing was written:"
            " paste the output of the command without --write"
        )
    if blocks:
        content = path.read_bytes()
        mark = b"\xef\xbb\xbf" if content.startswith(b"\xef\xbb\xbf") else b""
        path.write_bytes(mark + changed.encode())
    return written


def _with_blocks(
    text: str, blocks: Mapping[int, Sequence[str]], values: Mapping[int, JsonObject]
) -> str:
    """Return a YAML text with `expect` added to tools.

    Args:
        text: the text.
        blocks: the lines of `expect` by tool number, used for tools in block style.
        values: the value of `expect` by tool number, used for tools in braces.
    """
    if not blocks:
        return text
    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    (tools,) = (value for key, value in root.value if key.value == "tools")
    newline = "\r\n" if "\r\n" in text else "\n"
    for number in sorted(blocks, reverse=True):
        tool = tools.value[number]
        if tool.flow_style:
            end = tool.end_mark.index - 1
            comma = "" if text[:end].rstrip().endswith(",") else ", "
            added = f"{comma}expect: {json.dumps(values[number], ensure_ascii=False)}"
            text = text[:end].rstrip(" ") + added + text[end:]
            continue
        at = _end_of_mapping(text, tool)
        indent = " " * tool.start_mark.column
        lines = [f"{indent}{line}" for line in blocks[number]]
        before = text[:at]
        if not before.endswith("\n"):
            before += newline
        text = before + newline.join(lines) + newline + text[at:]
    return text


def _end_of_mapping(text: str, mapping: Any) -> int:
    """Return the index of the line where a field can be added to a block-style mapping."""
    for key, value in reversed(mapping.value):
        last = value
        # An alias has the position of its anchor.
        while last.start_mark.index >= key.end_mark.index and last.value and not _ends_here(last):
            last = last.value[-1]
            if isinstance(last, tuple):
                last = last[1]
        is_block_text = isinstance(last, yaml.ScalarNode) and last.style in ("|", ">")
        if last.start_mark.index < key.end_mark.index or is_block_text:
            continue
        end = text.find("\n", last.end_mark.index)
        return len(text) if end < 0 else end + 1
    return len(text)


def _ends_here(node: Any) -> bool:
    """Return whether the end mark of a node is on the line of its last character."""
    return isinstance(node, yaml.ScalarNode) or node.flow_style


@dataclass
class _Checked:
    """Result of checking the outputs of one tool against expectations.

    Attributes:
        tool: the tool.
        checked: number of outputs that were checked.
        not_kept: number of outputs that cannot be checked, because their runs did not keep them.
        rejected: the unexpected outputs.
    """

    tool: str
    checked: int = 0
    not_kept: int = 0
    rejected: list[dict[str, object]] = field(default_factory=list)


@commands.command(
    "expect check",
    epilog=epilog(
        "replanning expect check    all runs of the store, against their current expectations",
        "replanning expect check --runs latest --plan plan.yaml",
        codes="0 all past outputs are as expected · 1 some are not, or there is no such run · 2"
        " wrong usage, plan file or store",
    ),
)
def expect_check(
    more: MoreRunsArgument = None,
    *,
    runs: RunsOption = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            help="A plan file or file of tools with the expectations; by default the current ones of"
            " each run.",
        ),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """List the past outputs that the current expectations would have rejected.

    This finds false alarms before they cost anything. Outputs that were not kept cannot be checked,
    and are counted.
    """
    tools: Mapping[str, ToolSpec] = {}
    tasks: Mapping[TaskId, Task] = {}
    if plan is not None:
        tools, tasks = _expecting(plan)
    results: dict[str, _Checked] = {}
    looked_at: list[RunId] = []
    with existing_store(store) as opened:
        for run in _named_runs(opened, runs, more):
            try:
                records = list(opened.read(run))
                if plan is None:
                    live = replay_records(records).live
                    tools = live.tools
                    tasks = {entry.id: entry.task for entry in live}
                checked = list(checked_calls(records, tools, tasks, recorded_value))
            except ReplanningError as error:
                print_message(f"run {run!r} is left out: {error}")
                continue
            looked_at.append(run)
            for result in checked:
                _count(results.setdefault(result.call.tool, _Checked(result.call.tool)), result)
    rejected = sum(len(result.rejected) for result in results.values())
    if as_json:
        print_json(
            {"runs": looked_at, "rejected": rejected, "tools": list(map(asdict, results.values()))}
        )
    else:
        for line in _check_lines(results, len(looked_at)):
            console().print(escape_control(redactor().text(line)))
    raise typer.Exit(ExitCode.FAILED if rejected else ExitCode.OK)


def _expecting(path: Path) -> tuple[dict[str, ToolSpec], dict[TaskId, Task]]:
    """Return the tools and the tasks of a plan file, or the tools of a file of tools."""
    if "tasks" in load_document(str(path)):
        plan = read_plan(str(path))
    else:
        from replanning.cli.plans import read_tools  # slow to load

        plan = read_tools(path, "--plan", planning=False)
    return {tool.name: tool for tool in plan.tools}, {task.id: task for task in plan.tasks}


def _count(counts: _Checked, checked: CheckedCall) -> None:
    call = checked.call
    if not call.kept:
        counts.not_kept += 1
        return
    counts.checked += 1
    if checked.broken is not None:
        counts.rejected.append(
            {
                "run": call.run,
                "task": call.task,
                "reason": str(checked.broken),
                "failed": bool(call.failure),
            }
        )


def _check_lines(results: Mapping[str, _Checked], runs: int) -> Iterator[str]:
    if not results:
        yield f"{pluralise(runs, 'run')}: no executed tool or task has expectations"
        return
    for name, result in results.items():
        rejected = "none"
        if result.rejected:
            rejected = str(len(result.rejected))
        line = f"{name}: {pluralise(result.checked, 'output')} checked, {rejected} rejected"
        if result.not_kept:
            line += f"; {result.not_kept} not kept as JSON, and not checked"
        yield line
        for output in result.rejected[:MAX_SHOWN_OUTPUTS]:
            then = " (also rejected at the time)" if output["failed"] else ""
            yield f"    run {output['run']}, task {output['task']}: {output['reason']}{then}"
        more = len(result.rejected) - MAX_SHOWN_OUTPUTS
        if more > 0:
            yield f"    and {more} more; --json lists all"
