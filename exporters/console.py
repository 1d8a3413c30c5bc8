"""Exporter that prints one line for each record of a run; it asks nothing."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import ClassVar, Final, Literal, TextIO

from replanning.errors import SettingsError
from replanning.journal import (
    AlternativesConsidered,
    AttemptFailed,
    AttemptStarted,
    AttemptTimedOut,
    CallMade,
    DecisionMade,
    GoalChanged,
    PlanRevised,
    Record,
    RecordBody,
    RunEnded,
    RunOpened,
    TriggerFired,
)
from replanning.plan.messages import truncate
from replanning.telemetry import Exporter

MAX_LINE_CHARS: Final = 240
"""Longest line in characters."""

# Fields that are printed, in their order.
_SUBJECT_FIELDS: Final = (
    "attempt",
    "question",
    "replan",
    "trigger",
    "task",
    "name",
    "text",
    "where",
    "reason",
    "error",
)


class ConsoleExporter(Exporter):
    """Exporter that prints time, run, number, kind and subject of each record.

    For example::

        14:02:07.310 20260714-140207-3fa9c1d07b52 4 attempt-failed build#1 FileNotFoundError: no such tool

    Args:
        stream: `stderr`, `stdout` or an open text file.

    Raises:
        SettingsError: it is another word.
    """

    name: ClassVar[str] = "console"

    def __init__(self, stream: TextIO | Literal["stderr", "stdout"] = "stderr") -> None:
        if isinstance(stream, str) and stream not in ("stderr", "stdout"):
            raise SettingsError.at(
                "console", f"{stream!r} is not a stream; expected stderr or stdout"
            )
        self._stream = stream

    @classmethod
    def from_target(cls, target: str) -> ConsoleExporter:
        """Return the exporter for a stream named on the command line: `stderr` or `stdout`.

        Raises:
            SettingsError: it is another word.
        """
        return cls(target)  # type: ignore[arg-type]  # checked there

    def __repr__(self) -> str:
        return f"<ConsoleExporter to {self._stream if isinstance(self._stream, str) else 'a file'}>"

    async def export(self, run: str, record: Record) -> None:
        """Print a record as one line, without control characters, cut to `MAX_LINE_CHARS`."""
        when = datetime.fromtimestamp(record.at, UTC).strftime("%H:%M:%S.%f")[:-3]
        words = (
            f"{when} {run} {record.seq} {record.body.kind} {_describe_body(record.body)}".split()
        )
        line = "".join(
            character if character.isprintable() else "�" for character in " ".join(words)
        )
        stream: TextIO = (
            getattr(sys, self._stream) if isinstance(self._stream, str) else self._stream
        )
        stream.write(f"{truncate(line, MAX_LINE_CHARS)}\n")
        stream.flush()


def _describe_body(body: RecordBody) -> str:
    match body:
        case RunOpened():
            return f"{len(body.plan.tasks)} tasks: {body.plan.name or body.plan.goal.objective}"
        case RunEnded():
            return f"{body.status}: {body.reason}"
        case AttemptFailed():
            return f"{body.attempt} {body.failure}"
        case AttemptTimedOut():
            return f"{body.attempt} after {body.timeout:g} s"
        case TriggerFired():
            return f"{body.trigger.id} {body.trigger.kind} {', '.join(body.trigger.tasks[:5])}"
        case AlternativesConsidered():
            usable = sum(not candidate.rejected for candidate in body.candidates)
            return f"{body.replan} {usable} of {len(body.candidates)} usable"
        case DecisionMade():
            return f"{body.replan} {body.decision} ({body.rule}): {body.reason}"
        case CallMade(call=call):
            return f"{call.id} {call.tool or call.name}"
        case AttemptStarted(call=call) if call is not None:
            return f"{body.attempt} {call.tool or call.name}"
        case PlanRevised():
            return f"{body.number}: {', '.join(change.kind for change in body.changes[:10])}: {body.reason}"
        case GoalChanged():
            return f"{body.goal.objective}: {', '.join(body.goal.facts[:10])}"
        case _:
            return " ".join(
                str(getattr(body, field)) for field in _SUBJECT_FIELDS if getattr(body, field, None)
            )
