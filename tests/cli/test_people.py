"""People at the command line: questions, answers, and what they see while a plan runs."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from replanning import ReplanningEngine
from replanning.journal import SqliteStore
from tests.support.cli import (
    ASKING,
    ASKING_TASKS,
    REPAIRED,
    REPAIRED_TASKS,
    Gate,
    Started,
    Terminal,
    answer,
    cli,
    lines,
    write_plan,
)

# People


def test_nobody_is_there_to_ask(tmp_path: Path) -> None:
    """A run that needs a decision and has no terminal ends with code 4 and names the question."""
    write_plan(tmp_path, ASKING, ASKING_TASKS)

    done = cli(tmp_path, "run", "plan.yaml", "--run-id", "r")

    assert done.returncode == 4
    assert "replanning approve r.q1" in done.stdout
    assert not (tmp_path / "done.txt").exists()


def test_ask_through_the_store(tmp_path: Path) -> None:
    """With --ask store the run waits for an answer from another process, and then continues."""
    write_plan(tmp_path, ASKING, ASKING_TASKS)

    with Started(tmp_path, "run", "plan.yaml", "--run-id", "r", "--ask", "store") as started:
        started.until("question r.q1")
        store = SqliteStore(tmp_path / ".replanning" / "history.db")
        ReplanningEngine(store=store).answer("r.q1", "approve", by="ada")
        store.close()
        code, out = started.end()

    assert code == 0
    assert "by person:ada" in out
    assert lines(tmp_path / "done.txt") == ["done"]


def test_approve_on_the_terminal(tmp_path: Path) -> None:
    """On a terminal the question is shown with candidates and diff, and the number of one approves it."""
    write_plan(tmp_path, ASKING, ASKING_TASKS)

    with Terminal(tmp_path, "run", "plan.yaml") as terminal:
        terminal.until("1 approves, r rejects")
        terminal.type("what?")
        terminal.until("1 approves, r rejects")
        terminal.type("1")
        code = terminal.end()

    assert code == 0
    assert "needs a person's agreement" in terminal.seen
    assert "self-assessment 0.90" in terminal.seen
    assert "+ work~2: tool: risky" in terminal.seen
    assert lines(tmp_path / "done.txt") == ["done"]


def test_reject_on_the_terminal(tmp_path: Path) -> None:
    """A candidate that is rejected is not applied, also not later."""
    write_plan(tmp_path, ASKING, ASKING_TASKS)
    (tmp_path / "replanning.yaml").write_text("replanning: {approval: {always_for: []}}\n")

    with Terminal(tmp_path, "run", "plan.yaml") as terminal:
        terminal.whenever("r rejects", "r")
        code = terminal.end()

    assert code == 1
    assert not (tmp_path / "done.txt").exists()


def test_modify_on_the_terminal(tmp_path: Path) -> None:
    """Changes of one's own are written in the editor, and applied instead of the candidate."""
    write_plan(tmp_path, ASKING, ASKING_TASKS)
    (tmp_path / "own.json").write_text('[{"kind": "skip", "task_id": "work", "reason": "not today"}]')

    with Terminal(tmp_path, "run", "plan.yaml", "--run-id", "r", EDITOR=f"cp {tmp_path / 'own.json'}") as terminal:
        terminal.until("m makes changes")
        terminal.type("m")
        code = terminal.end()

    assert code == 0
    assert not (tmp_path / "done.txt").exists()
    assert answer(tmp_path, "resume", "r", "--from", "1")["tasks"]["work"] == "SKIPPED"


def test_modify_without_an_editor(tmp_path: Path) -> None:
    """Without an editor the changes are typed as JSON; what does not fit is refused, and asked for again."""
    write_plan(tmp_path, ASKING, ASKING_TASKS)

    with Terminal(tmp_path, "run", "plan.yaml") as terminal:
        terminal.until("m makes changes")
        terminal.type("m")
        terminal.until("as JSON on one line")
        terminal.type('[{"kind": "explode"}]')
        terminal.until("not valid")
        terminal.until("m makes changes")
        terminal.type("m")
        terminal.until("as JSON on one line")
        terminal.type('[{"kind": "skip", "task_id": "work"}]')
        code = terminal.end()

    assert code == 0


def test_no_answer_in_time(tmp_path: Path) -> None:
    """A question that nobody answers in time is decided by the settings, and the terminal is given back."""
    write_plan(tmp_path, ASKING, ASKING_TASKS)
    (tmp_path / "replanning.yaml").write_text("replanning: {approval: {timeout: 0.3, on_timeout: skip}}\n")

    with Terminal(tmp_path, "run", "plan.yaml") as terminal:
        terminal.until("r rejects")
        code = terminal.end()

    assert code == 0
    assert "skip (by timeout)" in terminal.seen


def test_ctrl_c_while_asked(tmp_path: Path) -> None:
    """Ctrl-C at a question pauses the run, and on resume the same question is asked again."""
    write_plan(tmp_path, ASKING, ASKING_TASKS)

    with Terminal(tmp_path, "run", "plan.yaml", "--run-id", "r") as terminal:
        terminal.until("r rejects")
        terminal.process.send_signal(signal.SIGINT)
        code = terminal.end()
    with Terminal(tmp_path, "resume", "r") as terminal:
        terminal.until("Question r.q1")
        terminal.until("1 approves")
        terminal.type("1")
        again = terminal.end()

    assert (code, again) == (3, 0)
    assert lines(tmp_path / "done.txt") == ["done"]


# Progress


def test_live_progress_on_a_terminal(tmp_path: Path) -> None:
    """On a terminal what runs is shown with the time it takes, and how many tasks are in which state."""
    gate = Gate(tmp_path / "gate")
    write_plan(
        tmp_path, {"hold": gate.command}, "id: hold, tool: hold, timeout: 50\nid: after, tool: hold, depends_on: [hold]"
    )

    with Terminal(tmp_path, "run", "plan.yaml") as terminal:
        terminal.until("of 50 s")
        terminal.until("1 running · 1 waiting · 0 done · revision 0")
        gate.open()
        terminal.until("hold done in")
        gate.open()
        code = terminal.end()

    assert code == 0


def test_quiet_says_nothing(tmp_path: Path) -> None:
    """With --quiet there is no progress, only the result."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)

    done = cli(tmp_path, "run", "plan.yaml", "--quiet")

    assert (done.returncode, done.stderr) == (0, "")
    assert "✓ succeeded" in done.stdout


def test_closed_progress_output(tmp_path: Path) -> None:
    """A reader of the progress that goes away, as `| head` does, does not stop the run."""
    gate = Gate(tmp_path / "gate")
    write_plan(tmp_path, {"hold": gate.command}, "id: hold, tool: hold\nid: after, tool: hold, depends_on: [hold]")

    with Started(tmp_path, "run", "plan.yaml", "--json") as started:
        started.until("hold started")
        started.process.stderr.close()
        gate.open()
        gate.open()
        out = started.process.stdout.read()
        code = started.process.wait(30)

    assert json.loads(out)["status"] == "succeeded"
    assert code == 0


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    """Output of tools cannot steer the terminal."""
    write_plan(tmp_path, {"evil": r"printf '\033]0;owned\007' >&2; exit 1"}, "id: a, tool: evil")

    done = cli(tmp_path, "run", "plan.yaml", "--no-replan")

    assert "owned" in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_output_that_cannot_show_every_character(tmp_path: Path) -> None:
    """On an ASCII-only output, other characters are escaped and nothing fails."""
    write_plan(tmp_path, {"good": "echo ü"}, "id: a, tool: good")

    done = cli(tmp_path, "run", "plan.yaml", PYTHONIOENCODING="ascii")

    assert done.returncode == 0
    assert r"\u2713 succeeded" in done.stdout
