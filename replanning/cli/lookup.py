"""Finds what a command is about: the store, the run, the question, the revision; and says it when it is not there."""

from __future__ import annotations

import getpass
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from replanning.cli.options import DEFAULT_STORE, ExitCode, fail
from replanning.decision.answers import closed_error
from replanning.errors import (
    ChangeRejected,
    NotRunning,
    StaleAnswer,
    StoreError,
    UnknownQuestion,
    UnknownRun,
    UnknownTask,
)
from replanning.history.status import replay_records
from replanning.plan.messages import did_you_mean
from replanning.plan.types import QuestionId
from replanning.plugins import installed_plugins, load_plugin

if TYPE_CHECKING:
    from replanning.decision import Question
    from replanning.journal import RunInfo, RunStore


_BUILTIN_STORES: Final = ("sqlite", "jsonl", "memory")


def open_store(place: str, *, must_exist: bool = False) -> RunStore:
    """The store at a place.

    Args:
        place: `memory`; a SQLite file; a folder or a name ending in `.jsonl` for a folder of text files; or
            `PLUGIN:PLACE` for an installed store of that name.
        must_exist: whether to refuse a place where nothing is kept yet, instead of making it.

    Raises:
        StoreError: the place cannot be used, or nothing is kept there.
    """
    name, path = _parse_place(place)
    if name in _BUILTIN_STORES and bool(path) == (name == "memory"):
        expected = "expected a SQLite file, a folder, memory, or PLUGIN:PLACE"
        raise StoreError(f"{place!r} is no place for runs; {expected} (--store says where runs are kept)")
    if must_exist and not _path_may_exist(name, path):
        what = "memory of this process" if name == "memory" else repr(path)
        raise StoreError(f"there are no runs in {what}; run a plan first, or say with --store where they are kept")
    try:
        made: RunStore = load_plugin("stores", name)(*([path] if path else []))
    except StoreError as error:
        if type(error) is not StoreError:
            raise
        raise StoreError(f"{error} (--store says where runs are kept)") from error
    return made


def store_may_exist(place: str) -> bool:
    """Whether runs may be kept at a place already; asking makes no store there.

    Raises:
        StoreError: the place cannot be used.
    """
    return _path_may_exist(*_parse_place(place))


def _path_may_exist(name: str, path: str) -> bool:
    return name not in _BUILTIN_STORES or bool(path and Path(path).exists())


def _parse_place(place: str) -> tuple[str, str]:
    """The name of the store plugin and its place.

    Raises:
        StoreError: it looks like the name of a plugin, and none is installed under it.
    """
    name, colon, rest = place.partition(":")
    if colon and name in installed_plugins("stores"):
        return name, rest
    if len(name) > 1 and name.replace("-", "_").isidentifier() and rest:  # one letter may be a drive
        known = ", ".join(installed_plugins("stores"))
        raise StoreError(f"no store {name!r} is installed; installed are: {known}; for a file write {'./' + place!r}")
    if place == "memory":
        return "memory", ""
    if place.endswith((".jsonl", "/")) or Path(place).is_dir():
        return "jsonl", place
    return "sqlite", place


LATEST: Final = "latest"
"""Names the newest run."""

_REVISION_PATTERN: Final = re.compile(r"r?[0-9]{1,6}")

_QUESTION_PATTERN: Final = re.compile(r"(.*)\.(q[0-9]+)")

_LOOKUP_ERRORS: Final = (UnknownRun, UnknownQuestion, UnknownTask, NotRunning, StaleAnswer, ChangeRejected)


def refuse(message: str) -> NoReturn:
    """Say that what was asked about is not there, or cannot be done, and end."""
    fail(message, ExitCode.FAILED)


@contextmanager
def existing_store(place: str) -> Iterator[RunStore]:
    """The store at a place, which must exist; what is not in it ends the command with a sentence."""
    store = open_store(place, must_exist=True)
    try:
        yield store
    except _LOOKUP_ERRORS as error:
        refuse(str(error))
    finally:
        store.close()


def find_run(store: RunStore, wanted: str | None) -> RunInfo:
    """The run with an id, or whose id begins so; the newest when none is named."""
    runs = store.runs()
    if not runs:
        refuse("no run is kept here yet; run a plan first, or say with --store where runs are kept")
    if wanted is None or wanted == LATEST:
        return runs[0]
    exact = [info for info in runs if info.run == wanted]
    found = exact or [info for info in runs if info.run.startswith(wanted)]
    if len(found) > 1:
        shown = ", ".join(info.run for info in found[:5]) + (", …" if len(found) > 5 else "")
        refuse(f"{wanted!r} begins the ids of {len(found)} runs: {shown}; give more of it")
    if not found:
        hint = did_you_mean(wanted, [info.run for info in runs]) or "replanning status lists the runs"
        raise UnknownRun(wanted, hint)
    return found[0]


def split_run(words: Sequence[str], store: RunStore) -> tuple[str | None, list[str]]:
    """The run and the revisions that words name; the run may be left out."""
    if not words or (_REVISION_PATTERN.fullmatch(words[0]) and all(info.run != words[0] for info in store.runs())):
        return None, list(words)
    return words[0], list(words[1:])


def find_question(store: RunStore, wanted: str | None) -> Question:
    """The open question with an id, or of a run that has only one; when none is named, the only one there is."""
    named = _QUESTION_PATTERN.fullmatch(wanted) if wanted is not None else None
    if wanted is None:
        found = [question for _, questions in open_questions_by_run(store, None) for question in questions]
        where = "no run has an open question"
    else:
        info = find_run(store, named[1] if named else wanted)
        found = [question for _, questions in open_questions_by_run(store, info.run) for question in questions]
        where = f"run {info.run!r} has no open question"
        if named is not None:
            asked = QuestionId(f"{info.run}.{named[2]}")
            found = [question for question in found if question.id == asked]
            if not found:
                raise closed_error(asked, replay_records(store.read(info.run)).ledger)
    if not found:
        refuse(where)
    if len(found) > 1:
        refuse(f"{len(found)} questions are open: {', '.join(question.id for question in found[:8])}; say which one")
    return found[0]


def open_questions_by_run(store: RunStore, run: str | None) -> Iterator[tuple[RunInfo, list[Question]]]:
    """The runs, or the one, that may have open questions, with these."""
    from replanning.history import open_questions

    for info in store.runs():
        if (run is None or info.run == run) and info.status not in ("succeeded", "failed", "aborted"):
            yield info, open_questions(store.read(info.run))


def command_line(place: str, *words: str) -> str:
    """A command line to be copied, for the store that is used."""
    where = [] if place == DEFAULT_STORE else ["--store", place]
    return shlex.join(["replanning", *words, *where])


def user_name(name: str | None) -> str:
    """Who decides: the name given, or whoever is logged in."""
    if name is not None:
        return name
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may know no name for its user
        return "somebody"
