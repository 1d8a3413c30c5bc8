"""Lookup of the things that a command names: its store, its run, its question, its revisions."""

from __future__ import annotations

import getpass
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from replanning.cli.options import DEFAULT_STORE
from replanning.cli.output import fail, refuse
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
from replanning.history.status import open_questions, replay_records
from replanning.plan.messages import did_you_mean, join_names
from replanning.plan.types import QuestionId
from replanning.plugins import installed_plugins, load_plugin

if TYPE_CHECKING:
    from replanning.decision import Question
    from replanning.journal import RunInfo, RunStore

LATEST: Final = "latest"
"""Names the newest run."""

FINISHED_STATUSES: Final = ("succeeded", "failed", "aborted")
"""Statuses of runs in which no task will run again, unless they are resumed."""

NO_RUNS: Final = "the store has no runs yet; run a plan first, or name another store with --store"

_BUILTIN_STORES: Final = ("sqlite", "jsonl", "memory")

_REVISION_PATTERN: Final = re.compile(r"r?[0-9]{1,6}")

_QUESTION_PATTERN: Final = re.compile(r"(.*)\.(q[0-9]+)")

_LOOKUP_ERRORS: Final = (UnknownRun, UnknownQuestion, UnknownTask, NotRunning, StaleAnswer, ChangeRejected)


def open_store(place: str, *, must_exist: bool = False) -> RunStore:
    """Return the store at a place.

    Args:
        place: `memory`; a SQLite file; a folder or a name ending in `.jsonl` for a folder of text files; or
            `PLUGIN:PLACE` for an installed store of that name.
        must_exist: refuse a place without a store, instead of creating one.

    Raises:
        StoreError: the place cannot be used, or has no store.
    """
    name, path = _parse_place(place)
    if name in _BUILTIN_STORES and bool(path) == (name == "memory"):
        expected = "expected a SQLite file, a folder, memory, or PLUGIN:PLACE"
        raise StoreError(f"{place!r} cannot be a store; {expected} (--store names the store)")
    if must_exist and not _path_may_exist(name, path):
        what = "the memory of this process" if name == "memory" else repr(path)
        raise StoreError(f"there are no runs in {what}; run a plan first, or name another store with --store")
    try:
        store: RunStore = load_plugin("stores", name)(*([path] if path else []))
    except StoreError as error:
        if type(error) is not StoreError:
            raise
        raise StoreError(f"{error} (--store names the store)") from error
    return store


def store_may_exist(place: str) -> bool:
    """Return whether a place may already hold a store, without creating one.

    Raises:
        StoreError: the place cannot be used.
    """
    return _path_may_exist(*_parse_place(place))


def _path_may_exist(name: str, path: str) -> bool:
    return name not in _BUILTIN_STORES or bool(path and Path(path).exists())


def _parse_place(place: str) -> tuple[str, str]:
    """Split a place into the name of a store plugin and the place that it is given.

    Raises:
        StoreError: it looks like the name of a plugin that is not installed.
    """
    name, colon, rest = place.partition(":")
    if colon and name in installed_plugins("stores"):
        return name, rest
    if len(name) > 1 and name.replace("-", "_").isidentifier() and rest:  # one letter may be a drive
        installed = ", ".join(installed_plugins("stores"))
        hint = f"installed are: {installed}; for a file write {'./' + place!r}"
        raise StoreError(f"no store {name!r} is installed; {hint}")
    if place == "memory":
        return "memory", ""
    if place.endswith((".jsonl", "/")) or Path(place).is_dir():
        return "jsonl", place
    return "sqlite", place


@contextmanager
def existing_store(place: str) -> Iterator[RunStore]:
    """Open a store that must exist; end the command with code 1 when the body looks up something it does not hold."""
    store = open_store(place, must_exist=True)
    try:
        yield store
    except _LOOKUP_ERRORS as error:
        refuse(str(error))
    finally:
        store.close()


def find_run(store: RunStore, name: str | None) -> RunInfo:
    """Return the run with an id, or the only one whose id begins so; the newest for None and `latest`.

    Raises:
        UnknownRun: there is no such run, or there are several.
    """
    runs = store.runs()
    if not runs:
        raise UnknownRun(name or LATEST, NO_RUNS)
    if name is None or name == LATEST:
        return runs[0]
    matches = [info for info in runs if info.run == name] or [info for info in runs if info.run.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        ids = join_names([info.run for info in matches], 5)
        raise UnknownRun(name, f"{len(matches)} ids begin with it: {ids}; give more of the id")
    raise UnknownRun(name, did_you_mean(name, [info.run for info in runs]) or "replanning status lists the runs")


def split_run(words: Sequence[str], store: RunStore) -> tuple[str | None, list[str]]:
    """Split arguments into the run, which may be left out, and the revisions."""
    if not words or (_REVISION_PATTERN.fullmatch(words[0]) and all(info.run != words[0] for info in store.runs())):
        return None, list(words)
    return words[0], list(words[1:])


def find_question(store: RunStore, name: str | None) -> Question:
    """Return the open question with an id, or the only one of a run; for None, the only one of the store.

    Raises:
        UnknownRun: there is no such run.
        UnknownQuestion: the run has no such question, or it is closed.
    """
    if name is None:
        questions = [question for _, open_ in open_questions_by_run(store, None) for question in open_]
        if not questions:
            refuse("no run has an open question")
    else:
        match = _QUESTION_PATTERN.fullmatch(name)
        run = find_run(store, match[1] if match else name).run
        questions = [question for _, open_ in open_questions_by_run(store, run) for question in open_]
        if match is not None:
            question_id = QuestionId(f"{run}.{match[2]}")
            questions = [question for question in questions if question.id == question_id]
            if not questions:
                raise closed_error(question_id, replay_records(store.read(run)).ledger)
        if not questions:
            refuse(f"run {run!r} has no open question")
    if len(questions) > 1:
        ids = ", ".join(question.id for question in questions[:8])
        refuse(f"{len(questions)} questions are open: {ids}; name one of them")
    return questions[0]


def open_questions_by_run(store: RunStore, run: str | None) -> Iterator[tuple[RunInfo, list[Question]]]:
    """Yield each unfinished run, or only the one named, with its open questions."""
    for info in store.runs():
        if (run is None or info.run == run) and info.status not in FINISHED_STATUSES:
            yield info, open_questions(store.read(info.run))


def validate_run_id(run_id: str | None) -> str | None:
    """Return the id for a new run; refuse one that later commands could not name."""
    if run_id is None:
        return None
    problems = {"": "is empty", LATEST: "means the newest run"}
    if problem := "would be read as an option" if run_id.startswith("-") else problems.get(run_id, ""):
        fail(f"--run-id: {run_id!r} {problem}; choose another id, or leave the option out")
    return run_id


def command_line(place: str, *words: str) -> str:
    """Return a command line for the user to copy, with `--store` where the store is not the default one."""
    store = [] if place == DEFAULT_STORE else ["--store", place]
    return shlex.join(["replanning", *words, *store])


def user_name(name: str | None) -> str:
    """Return the name of the person who decides; by default that of the current user."""
    if name is not None:
        return name
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container the user may have no name
        return "somebody"
