"""Finds what a command is about: the store, the run, the question, the revision; and says it when it is not there."""

from __future__ import annotations

import getpass
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NoReturn

from replanning._answers import closed_error
from replanning._errors import ChangeRejected, NotRunning, StaleAnswer, UnknownQuestion, UnknownRun, UnknownTask
from replanning._ids import QuestionId
from replanning._wording import did_you_mean
from replanning.cli._options import DEFAULT_STORE, ExitCode, fail
from replanning.cli._stores import open_store
from replanning.history._standing import replay_records

if TYPE_CHECKING:
    from replanning.interfaces import Question, RunInfo, RunStore

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
