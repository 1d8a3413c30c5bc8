"""Exporter that prints one line for each record of a run."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import ClassVar, Final, Literal, TextIO

from replanning.errors import SettingsError
from replanning.journal import Record, dump_body
from replanning.plan.messages import truncate
from replanning.telemetry import Exporter

MAX_LINE_CHARS: Final = 240
"""Longest line in characters."""


class ConsoleExporter(Exporter):
    """Exporter that prints time, run, number and kind of each record, and its fields as JSON.

    For example::

        14:02:07.310 fix-12 4 attempt-failed
        {"attempt":"build#1","task":"build","failure":{"type":"OSError",…

    Args:
        stream: `stderr`, `stdout` or an open text file.

    Raises:
        SettingsError: the stream is neither.
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
            SettingsError: the stream is neither.
        """
        return cls(target)  # type: ignore[arg-type]  # checked there

    def __repr__(self) -> str:
        stream = self._stream if isinstance(self._stream, str) else "a file"
        return f"<ConsoleExporter to {stream}>"

    async def export(self, run: str, record: Record) -> None:
        """Print a record as one line, without control characters, cut to `MAX_LINE_CHARS`."""
        when = datetime.fromtimestamp(record.at, UTC).strftime("%H:%M:%S.%f")[:-3]
        words = f"{when} {run} {record.seq} {record.body.kind} {dump_body(record.body)}".split()
        line = ""
        for character in " ".join(words):
            line += character if character.isprintable() else "�"
        stream = getattr(sys, self._stream) if isinstance(self._stream, str) else self._stream
        stream.write(f"{truncate(line, MAX_LINE_CHARS)}\n")
        stream.flush()
