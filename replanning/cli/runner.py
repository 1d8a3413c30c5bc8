"""Parts of carrying out a run that `run`, `resume`, `solve` and `plan` share: context files, signals, the summary."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import anyio
from pydantic import JsonValue

from replanning import PlanRun, ReplanningEngine, ReplanningError
from replanning.cli.display import Display
from replanning.cli.options import RunOptions
from replanning.cli.output import print_json, print_message
from replanning.cli.setup import delivery_problems, trace_location
from replanning.cli.summary import RunDetails, RunSummary, run_details, show_summary, summary_json
from replanning.errors import NotRunning, Problem, SettingsError, StoreError, ToolError
from replanning.journal import RunInfo, RunStore
from replanning.plan.messages import brief_repr
from replanning.plan.types import JsonObject
from replanning.tools.call import ToolCall
from replanning.tools.shell import run_shell

CONTEXT_VARIABLE: Final = "REPLANNING_CONTEXT"
"""Names the file to which a command appends lines `key=value`."""

MAX_CONTEXT_BYTES: Final = 64 * 1024
"""Largest context file that a command may write, in bytes."""

_PAIR_PATTERN: Final = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*?)\s*")


class ContextShell:
    """Runner of tools of the kind `shell`, whose commands may change the context of the run.

    A command appends lines `key=value` to the file that `REPLANNING_CONTEXT` names, as in
    `echo region=eu >> "$REPLANNING_CONTEXT"`. A value is JSON where it can be read as JSON, otherwise text; so is a
    number that JSON would write differently. The lines take effect when the command has succeeded. Its output never
    changes the context, because that may hold text from anywhere.

    Attributes:
        on_change: called with the new values; None ignores them.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[JsonObject], None] | None = None

    async def __call__(self, call: ToolCall) -> JsonValue:
        """Run the command of a tool and apply its context file.

        Raises:
            ToolError: the command failed, or its context file is not valid.
        """
        with TemporaryDirectory(prefix="replanning-") as folder:
            file = Path(folder, "context")
            output = await run_shell(replace(call, environ={**call.environ, CONTEXT_VARIABLE: str(file)}))
            changes = _read_context_file(file, call.tool.name)
        if changes and self.on_change is not None:
            self.on_change(call.secrets.redact_json(changes))  # type: ignore[arg-type] # a mapping stays one
        return output


def parse_context_options(options: Sequence[str]) -> JsonObject:
    """Return the values that `--set` options give.

    Raises:
        SettingsError: one of them is not of the form `context.key=value`.
    """
    pairs = {text: _parse_pair(text.removeprefix("context.")) for text in options}
    wrong = [text for text, pair in pairs.items() if pair is None or not text.startswith("context.")]
    if wrong:
        raise SettingsError([Problem("--set", f"expected context.key=value, got {text!r}") for text in wrong])
    return dict(pair for pair in pairs.values() if pair is not None)


def _read_context_file(file: Path, tool: str) -> JsonObject:
    if not file.is_file():
        return {}
    with file.open("rb") as stream:
        content = stream.read(MAX_CONTEXT_BYTES + 1)
    place = f"${CONTEXT_VARIABLE}"
    if len(content) > MAX_CONTEXT_BYTES:
        limit = f"more than {MAX_CONTEXT_BYTES} bytes"
        raise ToolError(f"tool {tool!r} wrote {limit} to {place}; keep large data in a file")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ToolError(f"tool {tool!r} wrote text to {place} that is not UTF-8") from None
    changes: JsonObject = {}
    for line in text.split("\n"):  # a value may contain other characters that end lines
        if line.strip():
            pair = _parse_pair(line)
            if pair is None:
                expected = "expected lines of the form key=value"
                raise ToolError(f"tool {tool!r} wrote {brief_repr(line)} to {place}; {expected}")
            changes[pair[0]] = pair[1]
    return changes


def _parse_pair(text: str) -> tuple[str, JsonValue] | None:
    match = _PAIR_PATTERN.fullmatch(text)
    return None if match is None else (match[1], _parse_value(match[2]))


def _parse_value(text: str) -> JsonValue:
    """Return text as JSON where it is JSON; `1.10` and `12e45`, which may be a version or a hash, stay text."""
    try:
        value: JsonValue = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return text if number and json.dumps(value) != text else value


def check_resumable(info: RunInfo, revision: int | None) -> None:
    """Check that a run can be resumed, or that `--from` names a revision to start a new run from.

    Raises:
        NotRunning: it has succeeded or was aborted.
    """
    if revision is None and info.status in ("succeeded", "aborted"):
        how = "succeeded" if info.status == "succeeded" else "was aborted"
        advice = "start a new run, or one from a revision of this one with --from (0 is the original plan)"
        raise NotRunning(f"run {info.run!r} {how}: {advice}")


async def run_until_stopped(
    work: Callable[[], Awaitable[object]],
    engine: ReplanningEngine,
    display: Display,
    current_run: Callable[[], PlanRun | None],
    background: Callable[[], Awaitable[object]] | None = None,
) -> bool:
    """Do the work while the display is active. The first signal pauses the run, the second one stops it at once.

    Args:
        work: opens the run and carries it out.
        engine: is closed at the end.
        display: shows the progress.
        current_run: returns the run, or None until it is open.
        background: runs at the same time, and is cancelled when the work ends.

    Returns:
        Whether the work was stopped at once.

    Raises:
        KeyboardInterrupt: it was stopped before the run was open.
        ReplanningError: the work raised it.
    """
    failure: ReplanningError | None = None
    scope, background_scope = anyio.CancelScope(), anyio.CancelScope()

    stop_signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup, a closed terminal stops nothing
        stop_signals.append(signal.SIGHUP)

    async def handle_signals() -> None:
        with anyio.open_signal_receiver(*stop_signals) as signals:
            paused = False
            async for number in signals:
                run = current_run()
                if paused or run is None:
                    scope.cancel()
                else:
                    run.pause(f"{number.name} was received")
                    paused = True

    async def run_background(listen: Callable[[], Awaitable[object]]) -> None:
        with background_scope:
            await listen()

    async with display.active(), anyio.create_task_group() as group:
        group.start_soon(handle_signals)
        if background is not None:
            group.start_soon(run_background, background)
        try:
            with scope:
                await work()
        except ReplanningError as error:
            failure = error  # raised below, not wrapped into a group
        finally:
            background_scope.cancel()
            await engine.aclose()
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if current_run() is None:
        raise KeyboardInterrupt
    return scope.cancelled_caught


def summarize(
    run: PlanRun,
    options: RunOptions,
    engine: ReplanningEngine,
    store: RunStore,
    display: Display,
    *,
    interrupted: bool,
) -> RunSummary:
    """Return the summary of a run that has ended or is paused."""
    try:
        details = run_details(store.read(run.id))
    except StoreError as error:
        print_message(f"the history cannot be read: {error}")
        details = RunDetails(run.live.plan, (), run.live)
    return RunSummary(
        result=run.result,
        details=details,
        elapsed=display.elapsed,
        store=options.store,
        durable=store.durable,
        resume_options=options.resume_options(),
        trace_location=trace_location(engine.exporters[0]) if options.trace else "",
        interrupted=interrupted,
        delivery_problems=delivery_problems(engine.exporters),
    )


def report_run(summary: RunSummary, *, json: bool) -> int:
    """Print the summary of a run and return the exit code."""
    if json:
        print_json(summary_json(summary))
    else:
        show_summary(summary)
    return int(summary.exit_code)
