"""Resolves arguments of commands: plan files, settings, exporters, stores, runs, questions."""

from __future__ import annotations

import getpass
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from replanning import Plan, Settings
from replanning.cli.app import (
    DEFAULT_STORE,
    RunDisplay,
    RunOptions,
    command_redactor,
    decode_argument,
    fail,
    is_phase_task,
    print_message,
    redactor,
    refuse,
)
from replanning.cli.terminal import program_name
from replanning.config import load_settings
from replanning.decision.answers import closed_error
from replanning.errors import (
    ChangeRejected,
    JournalCorrupt,
    NotRunning,
    PlanError,
    PluginError,
    Problem,
    ReplanningError,
    SettingsError,
    StaleAnswer,
    StoreError,
    UnknownQuestion,
    UnknownRun,
    UnknownTask,
)
from replanning.history.status import open_questions, replay_records
from replanning.history.wording import printable_line
from replanning.journal import store as stores
from replanning.journal.records import Record, RunOpened
from replanning.plan.checks import secret_name_problems
from replanning.plan.included_files import locate_problems
from replanning.plan.inclusion import used_tools
from replanning.plan.messages import did_you_mean, join_names, spoken_id
from replanning.plan.parameters import secret_values
from replanning.plan.reading import format_of, read_document, read_text_file
from replanning.plan.types import JsonObject, JsonValue, QuestionId, RunId
from replanning.plugins import installed_plugins, load_plugin, plugin_hint

if TYPE_CHECKING:
    from replanning import ReplanningEngine
    from replanning.decision import HumanGate, Question
    from replanning.integrations.temporal_store import TemporalStore
    from replanning.journal import InboxMessage, RunInfo, RunStore
    from replanning.llm import LLMProvider
    from replanning.telemetry import Exporter
    from replanning.tools import ToolExecutor

FORGES: Final = ("github", "gitlab")
"""Exporters that write comments on an issue."""

LATEST: Final = "latest"
"""Argument that names the newest run."""

ON_TEMPORAL: Final = "temporal="
"""Prefix of the place of a Temporal server, whose workflows are runs; the address follows."""

NO_RUNS: Final = "the store has no runs yet; run a plan first, or name another store with --store"

_REVISION_PATTERN: Final = re.compile(r"r?[0-9]{1,6}")

_MIN_ID_DIGITS: Final = 4
"""Minimum number of digits that can be the beginning of a run id instead of a revision."""

_QUESTION_PATTERN: Final = re.compile(r"(?:(.+)\.q|q?)([0-9]{1,6})")
"""The id of a question, or its number in its run."""


def open_store(place: str, *, must_exist: bool = False) -> RunStore:
    """Return the store at a place.

    Args:
        place: the place, as for `replanning.journal.open_store`.
        must_exist: refuse a place without a store, instead of creating one.

    Raises:
        StoreError: the place cannot be used, or has no store.
    """
    if is_on_temporal(place):
        return open_temporal(place)
    try:
        missing = _missing_place(place) if must_exist else ""
        if not missing:
            return stores.open_store(place)
    except StoreError as error:
        if type(error) is not StoreError:
            raise
        raise StoreError(f"{error} (--store names the store)") from error
    raise StoreError(
        f"there are no runs in {missing}; run a plan first, or name another store with --store"
    )


def _missing_place(place: str) -> str:
    """Describe a place that has no store; "" if it may have one."""
    name, path = stores.parse_place(place)
    if name not in stores.BUILTIN_STORES:
        return ""
    if name == "memory":
        return "the memory of this process"
    if path and Path(path).exists():
        return ""
    return repr(path)


def is_on_temporal(place: str) -> bool:
    """Return whether a place is a server of Temporal: `temporal=HOST:PORT`."""
    return place.startswith(ON_TEMPORAL)


def open_temporal(place: str) -> TemporalStore:
    """Return the store of the runs on a Temporal server.

    Raises:
        PluginError: the SDK of Temporal is missing.
        StoreError: the server cannot be reached.
    """
    try:
        from replanning.integrations.temporal_store import TemporalStore
    except ImportError as error:
        raise PluginError(
            f'Temporal needs its SDK: pip install "replanning[temporal]" ({error})'
        ) from error
    return TemporalStore(place.removeprefix(ON_TEMPORAL))


def can_show_pages() -> bool:
    """Return whether the packages that show runs in the browser are installed."""
    return find_spec("uvicorn") is not None and find_spec("jinja2") is not None


@contextmanager
def existing_store(place: str) -> Iterator[RunStore]:
    """Open a store that must exist; end the command with code 1 if a lookup in it fails."""
    store = open_store(place, must_exist=True)
    try:
        yield store
    except UnknownQuestion as error:
        refuse(f"{spoken_id(error.name)} is not open; {error.hint}")
    except (UnknownRun, UnknownTask, NotRunning, StaleAnswer, ChangeRejected) as error:
        refuse(str(error))
    finally:
        store.close()


def find_run(store: RunStore, name: str | None) -> RunInfo:
    """Return the run with an id, or with a unique beginning of it; by default the newest.

    Raises:
        UnknownRun: no run matches, or several do.
    """
    runs = store.runs()
    if not runs:
        raise UnknownRun(name or LATEST, NO_RUNS)
    if name is None or name == LATEST:
        return runs[0]
    matches: list[RunInfo] = []
    for info in runs:
        if info.run == name:
            return info
        if info.run.startswith(name):
            matches.append(info)
    if len(matches) == 1:
        return matches[0]
    if matches:
        ids = join_names([info.run for info in matches], 5)
        hint = f"{len(matches)} ids begin with it: {ids}; type more of the one you mean"
        raise UnknownRun(name, hint)
    similar = did_you_mean(name, [LATEST, *(info.run for info in runs)])
    raise UnknownRun(name, similar or "replanning status lists the runs")


def split_run(words: Sequence[str], store: RunStore) -> tuple[str | None, list[str]]:
    """Split arguments into the optional run, and the revisions.

    A revision may be written as it is shown: `revision 2`, or `replan 2` for `r2`.
    """
    rest: list[str] = []
    for word in words:
        if rest and rest[-1] in ("replan", "revision"):
            prefix = {"replan": "r", "revision": ""}[rest.pop()]
            rest.append(prefix + word)
        else:
            rest.append(word)
    if not rest:
        return None, rest
    if _REVISION_PATTERN.fullmatch(rest[0]) and not names_run(rest[0], store):
        return None, rest
    return rest[0], rest[1:]


def names_run(digits: str, store: RunStore) -> bool:
    """Return whether digits are a run id, or enough of its beginning."""
    is_enough = len(digits) >= _MIN_ID_DIGITS
    for info in store.runs():
        if info.run == digits:
            return True
        if is_enough and info.run.startswith(digits):
            return True
    return False


def split_question(words: Sequence[str] | None, store: RunStore) -> tuple[str | None, str]:
    """Split arguments into the run and the end of a question id, both optional."""
    if not words:
        return None, ""
    match = _QUESTION_PATTERN.fullmatch(words[-1])
    if len(words) == 1:
        if match is None or names_run(words[0], store):
            return words[0], ""
        return match[1], f".q{match[2]}"
    if len(words) > 2 or match is None or match[1]:
        given = " ".join(words)
        fail(f"expected a run and the number of a question, as pending shows them, got: {given}")
    return words[0], f".q{match[2]}"


def question_words(question_id: str) -> tuple[str, str]:
    """Return the words that name a question in a command: its run, and its number."""
    run, _, number = question_id.rpartition(".q")
    return run, number


def answering_command(place: str, question: Question) -> str:
    """Return the command that answers an open question."""
    return verdict_command(place, question.id, is_approvable=bool(question.candidates))


def verdict_command(place: str, question_id: str, *, is_approvable: bool) -> str:
    """Return the command that approves a question, or rejects one without a candidate."""
    verdict = "approve" if is_approvable else "reject"
    return command_line(place, verdict, *question_words(question_id))


def find_question(store: RunStore, words: Sequence[str] | None) -> Question:
    """Return the only open question that matches the arguments: its run and number, if given.

    Raises:
        UnknownRun: there is no such run.
        UnknownQuestion, StaleAnswer: the run has no such question, or it is closed.
    """
    name, end = split_question(words, store)
    run = None
    if name is not None:
        run = find_run(store, name).run
    questions: list[Question] = []
    for run_questions in open_questions_by_run(store, run):
        for question in run_questions:
            if question.id.endswith(end):
                questions.append(question)
    if not questions and run is not None:
        if end:
            raise closed_error(QuestionId(f"{run}{end}"), replay_records(store.read(run)).ledger)
        refuse(no_question(store, run))
    if not questions:
        problem = "no run has an open question"
        if end:
            problem += f" {end[2:]}"
        refuse(problem)
    if len(questions) > 1:
        shown = [" ".join(question_words(question.id)) for question in questions[:8]]
        names = ", ".join(shown)
        refuse(f"{len(questions)} questions are open: {names}; name one of them")
    return questions[0]


def find_questions(
    store: RunStore, words: Sequence[str] | None
) -> tuple[RunInfo, QuestionId | None]:
    """Return the run that arguments name, and the question if they name one.

    Without arguments it is the only run with open questions.

    Raises:
        UnknownRun: there is no such run.
        UnknownQuestion, StaleAnswer: the run has no such question, or it is closed.
    """
    name, end = split_question(words, store)
    if end:
        question = find_question(store, words)
        return find_run(store, question.run), question.id
    if name is not None:
        info = find_run(store, name)
        if not open_questions(store.read(info.run)):
            refuse(no_question(store, info.run))
        return info, None
    runs: list[RunId] = []
    for run_questions in open_questions_by_run(store, None):
        if run_questions:
            runs.append(run_questions[0].run)
    if not runs:
        refuse("no run has an open question")
    if len(runs) > 1:
        refuse(f"several runs ask: {', '.join(runs[:8])}; name one of them")
    return find_run(store, runs[0]), None


def no_question(store: RunStore, run: RunId) -> str:
    """Return a message that a run has no open question, with the reason for a pause.

    An agent may wait for an answer to a question of its framework, which no command can give.
    """
    end = replay_records(store.read(run)).ledger.run_end
    text = f"run {run!r} has no open question"
    if end is not None and end.status == "paused" and end.reason:
        text += f"; it is paused: {printable_line(end.reason)}"
    return text


def open_questions_by_run(store: RunStore, run: str | None) -> Iterator[list[Question]]:
    """Yield the open questions of each unfinished run, or only of a named one.

    If no run is named, unreadable runs are reported and skipped.
    """
    unfinished: list[RunInfo] = []
    for info in store.runs():
        if info.status not in stores.FINISHED_STATUSES and run in (None, info.run):
            unfinished.append(info)
    if run is None:
        ask_workers(store, unfinished)
    for info in unfinished:
        try:
            questions = open_questions(store.read(info.run))
        except ReplanningError as error:
            if run is not None:
                raise
            print_message(f"run {info.run} cannot be read: {error}")
        else:
            yield questions


def read_inbox(store: RunStore, run: RunId) -> Sequence[InboxMessage]:
    """Return the pending messages to a run; report unreadable ones and return none."""
    try:
        return store.inbox(run)
    except JournalCorrupt as error:  # the rest of the run can still be shown
        print_message(f"the messages to run {run} cannot be read: {error}")
        return ()


def posted_answers(messages: Iterable[InboxMessage]) -> Mapping[JsonValue, InboxMessage]:
    """Return the answers among messages by question; the run takes the first of several."""
    answers: dict[JsonValue, InboxMessage] = {}
    for message in messages:
        if message.kind == "answer":
            answers.setdefault(message.payload.get("question"), message)
    return answers


def ask_workers(store: RunStore, runs: Iterable[RunInfo]) -> None:
    """Ask workers on Temporal about several runs at once, so that dead ones share a time limit."""
    ask = getattr(store, "ask_workers", None)  # only a store on Temporal has it
    if ask is not None:
        ask([info.run for info in runs])


def check_run_id(run_id: str) -> None:
    """Refuse an id for a new run that later commands could not name."""
    if redactor().is_secret_name(run_id):
        fail(
            "--run-id: an id that looks like a secret is refused, because ids are stored; choose "
            "another"
        )
    problem = ""
    if not run_id:
        problem = "is empty"
    elif run_id == LATEST:
        problem = "means the newest run"
    elif run_id.startswith("-"):
        problem = "would be read as an option"
    if problem:
        fail(f"--run-id: {run_id!r} {problem}; choose another id, or leave the option out")


def shown_place(place: str) -> str:
    """Return the place of a store without the password of its address."""
    if "://" not in place:
        return place
    return redactor().text(place)


def command_line(place: str, *words: str) -> str:
    """Return a command line to copy, with `--store` unless the store is the default one."""
    line = [program_name(), *words]
    if is_on_temporal(place):
        line += ["--on", shown_place(place)]
    elif place != DEFAULT_STORE:
        line += ["--store", shown_place(place)]
    return shlex.join(line)


def belongs_to_program(opened: RunOpened) -> bool:
    """Return whether only the program that started a run can resume it.

    Such a run is a session, or functions of the program execute its plan.
    """
    from replanning.tools.check import TOOL_KINDS  # most commands need no tools

    if opened.open_ended:
        return True
    if any(map(is_phase_task, opened.plan.tasks)):
        return False
    used = used_tools(opened.plan.tasks)
    kinds: set[str | None] = set()
    for tool in opened.plan.tools:
        if tool.name in used:
            kinds.add(tool.kind)
    return not kinds or not kinds <= TOOL_KINDS


def how_a_program_resumes(opened: RunOpened) -> str:
    """Return how the program that started a run resumes it, as the end of a sentence."""
    text = f", with run_id={opened.run!r}"
    if opened.open_ended:
        text += "; an agent of a framework, by continuing its conversation"
    return text


def how_to_resume(store: RunStore, place: str, run: RunId) -> tuple[str | None, str]:
    """Return the command that resumes a run, and advice for a person.

    There is no command for a run that only a program can resume.
    """
    words: list[str] = []
    if not is_on_temporal(place):  # where workers execute functions
        first = next(iter(store.read(run)), None)
        if first is not None and isinstance(first.body, RunOpened):
            if belongs_to_program(first.body):
                how = how_a_program_resumes(first.body)
                return None, f"Only the program that started it can resume it{how}."
            words = secret_words(first.body.plan)
    command = command_line(place, "resume", run, *words)
    return command, f"Resume it with:\n  {command}"


def how_to_retry(store: RunStore, place: str, run: RunId) -> str:
    """Return advice on retrying the failed tasks of a run; empty if that is impossible."""
    if is_on_temporal(place):
        return ""
    opened = next(iter(store.read(run))).body
    assert isinstance(opened, RunOpened)
    if opened.open_ended or any(map(is_phase_task, opened.plan.tasks)):
        return ""
    command = command_line(place, "resume", run, "--retry", *secret_words(opened.plan))
    return f"Once the cause is removed, try the failed tasks again:\n  {command}"


def user_name(name: str | None) -> str:
    """Return the name of the person who decides, without secrets; by default the current user."""
    if name is not None:
        return redactor().text(name)
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container the user may have no name
        return "somebody"


def read_settings(path: str | None, *, quiet: bool = False, replan: bool | None = None) -> Settings:
    """Load the settings for a command.

    Args:
        path: the option `--settings`.
        quiet: print no warnings about settings.
        replan: the option `--replan`; False turns replanning off.

    Raises:
        SettingsError: the settings are invalid.
    """
    from replanning.run.opening import redactor_for  # slow to load, and not always needed

    arguments: JsonObject = {}
    if replan is False:
        arguments["enabled"] = False
    loaded = load_settings(path, arguments=arguments)
    command_redactor.set(redactor_for(loaded.settings))
    if not quiet:
        for warning in loaded.warnings:
            print_message(f"warning: {warning}")
    return loaded.settings


def provider_names(named: Sequence[str] | None, settings: Settings) -> list[str]:
    """Return the providers from the options or the settings; none if replanning is off."""
    if not settings.enabled:
        return []
    return list(dict.fromkeys(named or settings.provider))


def read_plan(path: str, options: Sequence[str] | None = None) -> Plan:
    """Load a plan file, with the parameters and the context from `--set` options.

    Raises:
        PlanError: the plan is invalid or lacks the parameters; for a file of tools, the message
            names the commands that take one.
    """
    try:
        plan = Plan.load(path)
        problems = secret_name_problems(plan, redactor())
        if problems:
            raise PlanError(locate_problems(problems, path))
    except PlanError as error:
        others = [problem for problem in error.problems if problem.place != f"{path} goal"]
        has_goal = len(others) == len(error.problems)
        if has_goal or not _is_file_of_tools(path):
            raise
        name = shlex.quote(path)
        what = "this is a file of tools, not a plan: it has neither a goal nor tasks"
        solve = f"replanning solve --goal TEXT --tools {name} achieves a goal with them"
        advice = f"{solve}, replanning tools {name} lists them"
        raise PlanError([Problem(path, f"{what}; {advice}"), *others]) from None
    if not options:
        return plan
    from replanning.cli.context import (  # slow to load
        parse_context_options,
        read_parameters,
        split_set_options,
    )

    context, texts = split_set_options(options)
    changed = {**plan.context, **parse_context_options(context)}
    plan = plan.model_copy(update={"context": changed})
    plan = Plan.model_validate(plan.model_dump(mode="json", exclude_unset=True))
    try:
        plan = plan.with_parameters(read_parameters(plan.parameters, texts))
    except PlanError as error:
        raise PlanError(locate_problems(error.problems, path)) from None
    know_secrets(plan)
    return plan


def _is_file_of_tools(path: str) -> bool:
    """Return whether a file has sections for tools, but neither a goal nor tasks."""
    sections = load_document(path).keys()
    return sections.isdisjoint({"goal", "tasks"}) and not sections.isdisjoint({"tools", "mcp"})


def know_secrets(plan: Plan) -> None:
    """Add the secret parameters of a plan to the redactor of the command."""
    for value in secret_values(plan.parameters):
        redactor().add(value)


def require_secrets(run: RunId, names: Iterable[str]) -> None:
    """End the command if a run needs secret parameters that were not passed again."""
    again = " ".join(f"--set {name}=…" for name in names)
    if again:
        fail(f"the journal of run {run} keeps no secret parameters: give them again with {again}")


def secret_words(plan: Plan) -> list[str]:
    """Return the options that pass the secret parameters of a plan again, without their values."""
    words: list[str] = []
    for name, parameter in plan.parameters.items():
        if parameter.secret:
            words += ["--set", f"{name}=…"]
    return words


def load_document(path: str) -> JsonObject:
    """Read a file; return an empty object if it is not a mapping in YAML or JSON."""
    try:
        document = read_document(read_text_file(path), format=format_of(path))
    except PlanError:
        return {}
    if not isinstance(document, dict):
        return {}
    return document


def read_text_argument(path: Path, argument: str) -> str:
    """Read a text file that an argument names.

    Raises:
        SettingsError: the file cannot be read.
    """
    try:
        return read_text_file(path, noun="file")
    except PlanError as error:
        problems = [Problem(argument, str(problem)) for problem in error.problems]
        raise SettingsError(problems) from error


def create_display(*, picture: bool = True) -> Any:  # both an Exporter and a RunDisplay
    """Create the exporter that shows running runs; without a picture, as lines only."""
    return load_plugin("exporters", "live")(picture=picture, result=False)


def create_gate(
    ask: str | None,
    store: RunStore,
    display: RunDisplay | None,
    *,
    json: bool,
    remote_answers: bool = False,
) -> HumanGate | None:
    """Return the gate that asks a person; None if no person is asked.

    Args:
        ask: the option `--ask`.
        store: of the run.
        display: of the run, which releases the terminal for questions; None without a display.
        json: whether the output is JSON for a program, which cannot answer questions.
        remote_answers: whether people can also answer elsewhere, such as on an issue or a page.

    Raises:
        SettingsError: nobody can be asked that way.
    """
    from replanning import StoreGate  # most commands ask nobody

    at_terminal = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))
    can_answer = store.durable or remote_answers
    if ask == "console" and not at_terminal:
        ways = "use --no-ask"
        if store.durable:
            ways = "use --ask store or --no-ask"
        problem = f"nobody can be asked here, because this is not a terminal; {ways}"
        raise SettingsError.at("--ask", problem)
    if ask == "store" and not can_answer:
        problem = "nobody could answer: the run is kept in the memory of this process only"
        raise SettingsError.at("--ask", f"{problem}; use --ask console or --no-ask")
    if ask is None and at_terminal and not json:
        ask = "console"
    if ask == "console":
        from replanning.cli.gate import ConsoleGate  # only a terminal needs it

        if display is None:
            display = create_display()
        display.questions_on_terminal = True
        return ConsoleGate(display, user_name(None))
    if ask == "store" or remote_answers:
        return StoreGate()
    return None


def find_directory(options: RunOptions, resumed: Iterable[Record] = ()) -> Path:
    """Return the absolute path of the working directory of a run's tools.

    Args:
        options: of the command line, which may name it.
        resumed: the records of a resumed run, whose tools continue in their recorded folder.
    """
    from replanning.run.opening import directory_on_record  # most commands execute no run

    if options.directory is not None:
        text = decode_argument(str(options.directory), "--directory")
        place = _absolute(Path(text))
        if not place.is_dir():
            fail(f"--directory: there is no folder {str(place)!r}")
        return place.resolve()
    records = list(resumed)
    recorded = directory_on_record(records)
    if not recorded:
        place = _absolute(Path())
        if records and not options.quiet:
            print_message(
                f"note: this run has no recorded folder; its tools work in {place} from now on"
            )
        return place
    place = Path(recorded)
    if not place.is_dir():
        fail(
            f"the tools of this run work in the folder {recorded!r}, which does not exist; create"
            " it, or name another one with --directory"
        )
    return place


def _absolute(path: Path) -> Path:
    try:
        return path.absolute()
    except FileNotFoundError:
        fail("the current directory no longer exists; change to another one")


@contextmanager
def working_in(directory: Path) -> Iterator[None]:
    """Change the working directory, and import modules from it, for functions of plans.

    The directory is searched last, so that none of its files shadows an installed module.
    """
    _absolute(Path())  # a deleted directory could not be restored afterwards
    place = str(_absolute(directory))
    with chdir(directory):
        if place in sys.path:
            yield
            return
        sys.path.append(place)
        try:
            yield
        finally:
            sys.path.remove(place)


def create_executor(
    plan: Plan,
    settings: Settings,
    *,
    directory: Path,
    environ: Mapping[str, str] | None = None,
    commands: Collection[str] = (),
) -> ToolExecutor:
    """Return the executor of a plan whose commands may change the context; see `ToolExecutor`."""
    from replanning.cli.context import run_context_shell  # most commands need no tools
    from replanning.tools import ToolExecutor

    return ToolExecutor(
        plan,
        default_timeout=settings.timeout.task,
        output_limit=settings.max_output,
        cwd=directory,
        environ=environ,
        kinds={"shell": run_context_shell},
        commands=commands,
    )


def tell_models(
    display: RunDisplay, engine: ReplanningEngine, judge_model: LLMProvider | None = None
) -> None:
    """Tell the user which language models see data of a run."""
    from replanning.llm import LLMProvider  # most commands need none

    for provider in engine.generator.path_generator.providers:
        client = getattr(provider, "client", None)
        if isinstance(client, LLMProvider):
            shown = f"if the plan must change, it is shown to {_model_label(client)}"
            display.show_note("●", f"{shown}; --replan-provider repair asks no model", "dim")
    if judge_model is not None:
        shown = f"the results of tasks are shown to {_model_label(judge_model)}, which judges them"
        display.show_note("●", shown, "dim")


def _model_label(model: LLMProvider) -> str:
    from replanning.llm import FallbackLLM

    if isinstance(model, FallbackLLM):
        return ", else ".join(map(_model_label, model.members))
    return f"{model.name} ({model.model})"


@runtime_checkable
class IssueNotifier(Protocol):
    """Exporter that writes comments on an issue and tells people how to reply."""

    hint: str
    forge: object


def forge_of(issue: str) -> str:
    """Return the forge that an issue belongs to: `github` or `gitlab`."""
    if issue.startswith("gitlab:") or "!" in issue or "/-/" in issue:
        return "gitlab"
    return "github"


def open_notifiers(targets: Sequence[str], option: str = "--notify") -> list[Exporter]:
    """Return the exporters for `--notify` options, one for each place.

    Args:
        targets: values of the options.
        option: name of the option, for messages.

    Raises:
        SettingsError: an option names no exporter, or its target cannot be written.
        PluginError: an exporter cannot be loaded.
    """
    exporters: dict[tuple[str, str], Exporter] = {}
    for target in map(str.strip, targets):
        name, _, place = target.partition("=")
        if not target:
            raise SettingsError([Problem(option, "name a file, console, or github=owner/repo#12")])
        if place and name not in FORGES and name.isidentifier():
            # This is more likely a typo than the name of a file.
            forges = " or ".join(f"{forge}=…" for forge in FORGES)
            expected = f"expected {forges}; for a file write {'./' + target!r}"
            raise SettingsError.at(option, f"{name!r} is not a forge; {expected}")
        exporter: Exporter
        if target == "console":
            exporter = load_plugin("exporters", "notices-console")()
        elif name in FORGES:
            exporter = open_exporter(name, place, option)
        else:
            exporter = open_exporter("notices", target, option)
        write_error = getattr(exporter, "write_error", str)  # optional
        problem = write_error()
        if problem:
            raise SettingsError.at(option, problem)
        endpoint = str(getattr(exporter, "endpoint", ""))
        if exporter.name in FORGES:
            key = endpoint.lower()  # unlike file systems, forges ignore case
        else:
            key = os.path.realpath(endpoint)
        exporters.setdefault((exporter.name, key), exporter)
    return list(exporters.values())


def open_exporter(name: str, target: str, option: str) -> Exporter:
    """Create the exporter for the target of an option.

    Raises:
        SettingsError: the target is not valid.
        PluginError: the exporter cannot be loaded or created.
    """
    from replanning.telemetry.exporter import create_exporter  # slow to load

    try:
        return create_exporter(name, target)
    except SettingsError as error:
        problems = [Problem(option, problem.message) for problem in error.problems]
        raise SettingsError(problems) from None


def open_exporters(
    trace: str | None, notify: Sequence[str] | None, display: Exporter | None
) -> list[Exporter]:
    """Return the exporters of a run in order: spans, if exported, notifiers and the display."""
    exporters: list[Exporter] = []
    if trace:
        exporters.append(open_trace_exporter(trace))
    if notify:
        exporters += open_notifiers(notify)
    if display is not None:
        exporters.append(display)
    return exporters


def open_trace_exporter(text: str) -> Exporter:
    """Create the exporter that `--trace NAME` or `--trace NAME=TARGET` names.

    Raises:
        SettingsError: the exporter is unknown, or does not take the target.
        PluginError: the exporter cannot be loaded or created.
    """
    name, _, target = text.partition("=")
    if name not in installed_plugins("exporters"):
        hint = plugin_hint("exporters", name)
        raise SettingsError.at("--trace", f"there is no exporter {name!r}; {hint}")
    return open_exporter(name, target, "--trace")
