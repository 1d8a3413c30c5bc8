"""Journals that are edited behind the back of their store, as by hand or by a newer version."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from replanning.journal.store import checksum

Edit = Callable[[int, str, str], tuple[str, str]]
"""Takes number, kind and JSON text of a record, and returns the new kind and text."""


def edit_records(path: Path, edit: Edit, run: str = "run-1") -> None:
    """Change the records of a run in a SQLite file, with checksums that fit."""
    with closing(sqlite3.connect(path)) as connection, connection:
        (number,) = connection.execute("SELECT number FROM runs WHERE id = ?", (run,)).fetchone()
        rows = connection.execute(
            "SELECT seq, at, kind, data FROM records WHERE run = ?", (number,)
        ).fetchall()
        for seq, at, kind, data in rows:
            new_kind, new_data = edit(seq, kind, data)
            crc = checksum(new_data.encode(), seq, at, new_kind)
            connection.execute(
                "UPDATE records SET kind = ?, data = ?, crc = ? WHERE run = ? AND seq = ?",
                (new_kind, new_data, crc, number, seq),
            )
