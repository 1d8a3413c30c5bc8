"""Campaign that kills real processes in planning mode, and checks the journal after each kill and at the end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from replanning import ReplanningEngine
from replanning.journal import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    QuestionAsked,
    Record,
    SqliteStore,
    UsageCharged,
)
from replanning.planning import PlanningHistoryStore, PlanningState
from tests.support.coding import Coder, repository
from tests.support.crash import PATIENCE, ROOT, RUN, journal, text
from tests.support.invariants import invariant_violations
from tests.support.llm_server import LLMRequest, LLMServerReply, ScriptedLLMServer

KILLS_PER_RUN: Final = 7
AIMS: Final = [
    "<planning-noted",
    ">planning-noted",
    "<charged",
    ">attempt-started",
    "<attempt-succeeded",
    ">trigger-fired",
    ">alternatives-considered",
    "<revised",
    ">revised",
    "<decided",
    ">question-asked",
    ">question-answered",
    "<run-ended",
    ">run-resumed",
]
"""Moments at which a process is killed: within an append, and between records that belong together."""


class Sniper:
    """Model that answers as usual, and kills the asking process at a given request."""

    def __init__(self, coder: Coder) -> None:
        self._coder = coder
        self.left = 0
        self.target = 0

    def __call__(self, request: LLMRequest) -> LLMServerReply:
        self.left -= 1
        if self.left == 0:
            with suppress(ProcessLookupError):
                os.kill(self.target, signal.SIGKILL)
        return self._coder(request)


@contextmanager
def living(folder: Path, server: ScriptedLLMServer) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """Run a process that is ended afterwards; it comes with the lines in which it tells of its records."""
    reading, writing = os.pipe()
    arguments = [str(folder / "history"), RUN, str(folder / "work"), str(writing)]
    with (folder / "errors").open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.planning_crash_child", *arguments],
            cwd=ROOT,
            env={**os.environ, **server.environ()},
            pass_fds=[writing],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    os.close(writing)
    try:
        with open(reading, encoding="utf-8", closefd=False) as ticks:  # it has no path
            yield process, ticks
    finally:
        process.kill()
        process.communicate()
        os.close(reading)


@dataclass
class Campaign:
    """Runs that are killed again and again.

    Attributes:
        place: where they work.
        rng: chance.
        kills: how often a process was killed.
        runs: how many tasks were begun.
        after: the last record before each kill.
    """

    place: Path
    rng: Random
    kills: int = 0
    runs: int = 0
    after: Counter[str] = field(default_factory=Counter)

    def play(self, name: str, kills: int) -> tuple[dict[str, Any], list[Record]]:
        """Run a task to its end, killing its process a number of times; return its output and journal."""
        folder = self.place / name
        folder.mkdir()
        repository(folder / "work")
        sniper = Sniper(Coder(folder / "work"))
        self.runs += 1
        before: list[Record] = []
        with ScriptedLLMServer(sniper) as server:
            while True:
                said = self._live(folder, server, sniper, kills=kills)
                records = journal("sqlite", folder)
                check(records, before)
                check_told(folder)
                before = records
                if said is None:
                    kills, self.kills = kills - 1, self.kills + 1
                    self.after[records[-1].body.kind if records else "nothing"] += 1
                elif said["status"] == "needs_human":
                    answer(folder, records)
                else:
                    lost = len(server.requests) - said["calls"]
                    assert 0 <= lost <= self.kills, "calls were not counted"
                    return said, records

    def _live(self, folder: Path, server: ScriptedLLMServer, sniper: Sniper, *, kills: int) -> dict[str, Any] | None:
        """Run a process until it ends, or is killed at a random moment."""
        aim, count = self._aim()
        with living(folder, server) as (process, ticks):
            sniper.target, sniper.left = process.pid, 0
            if kills and aim == "request":
                sniper.left = count
            for tick in ticks:
                count -= tick.startswith(aim)
                if kills and count == 0:
                    process.kill()
                    break
            said, _ = process.communicate(timeout=PATIENCE)
            code = process.returncode
        assert code in (0, -signal.SIGKILL), (folder / "errors").read_text()
        assert code == 0 or kills, "it was killed although nobody killed it"
        found: dict[str, Any] | None = json.loads(said) if code == 0 else None
        return found

    def _aim(self) -> tuple[str, int]:
        """Choose the moment to kill a process: a request to the model, any record, or a kind of record."""
        match self.rng.randrange(5):
            case 0 | 1:
                return "request", self.rng.randint(1, 5)
            case 2 | 3:
                return "", self.rng.randint(1, 50)
        return self.rng.choice(AIMS), 1


def answer(folder: Path, records: Sequence[Record]) -> None:
    """Answer the open question as a person does from another process."""
    with closing(SqliteStore(folder / "history")) as store:
        engine = ReplanningEngine([], store=store)
        (question,) = engine.pending(RUN)
        assert question.id == asked(records)[-1].question
        engine.answer(question.id, "approve", comment="any numbers", by="eve")


def asked(records: Sequence[Record]) -> list[QuestionAsked]:
    """Return the questions to people."""
    return [record.body for record in records if isinstance(record.body, QuestionAsked)]


def check(records: Sequence[Record], before: Sequence[Record]) -> None:
    """Return the violated invariants after a kill."""
    old, new = list(map(text, before)), list(map(text, records))
    assert new[: len(old)] == old, "what was on record is not any more"
    assert invariant_violations(records) == [] or not records
    then, now = PlanningState.from_records(before), PlanningState.from_records(records)
    spent = [(name, getattr(then.counts, name), getattr(now.counts, name)) for name in _COUNTED]
    assert all(earlier <= later for _, earlier, later in spent), f"limits began anew: {spent}"
    known = [plan for plan in then.plans if plan in now.plans]
    assert len(then.plans) - len(known) <= 1, "a plan is lost"  # one that was not in place yet is made again
    assert len(then.records) <= len(now.records)
    texts = Counter(question.text for question in asked(records))
    assert set(texts.values()) <= {1}, f"asked twice: {texts}"
    done = {b.task for b in (r.body for r in before) if isinstance(b, AttemptSucceeded)}
    begun = [b.task for b in (r.body for r in records[len(before) :]) if isinstance(b, AttemptStarted)]
    assert done.isdisjoint(begun), f"done, and begun again: {done & set(begun)}"


def check_told(folder: Path) -> None:
    """Check that no notice is posted twice, there is one checklist, and no line of the history is repeated."""
    told = folder / "notices.md"
    marks = Counter(_MARK.findall(told.read_text(encoding="utf-8")) if told.exists() else ())
    assert set(marks.values()) <= {1}, f"posted twice: {marks}"
    written = folder / "planning_history" / f"{RUN}.jsonl"
    lines = written.read_bytes().splitlines() if written.exists() else []
    whole = [json.loads(line) for line in lines[:-1]]  # the last may be torn
    kept = [(line["seq"], line["type"]) for line in whole]
    assert len(kept) == len(set(kept)), f"kept twice: {kept}"


_MARK: Final = re.compile(r"<!-- replanning (notice=\S+ run=\S+ about=\S*) -->")
_COUNTED: Final = ("considered", "total", "clarifications", "redecompositions", "partial_replans", "plan_revisions")


def story(records: Sequence[Record], folder: Path) -> str:
    """Return the parts of a journal that interruptions must not change, whatever the folder is called."""
    state = PlanningState.from_records(records)
    executed = [record for record in state.records if record.executed]
    parts = {
        "plans": [
            (plan.number, plan.tasks, plan.kept, plan.action_plan.model_dump(mode="json")) for plan in state.plans
        ],
        "replans": [str(record.replan_type) for record in executed if record.replan_type != "retry"],
        "clarified": [(one.questions, one.answer) for one in state.clarified],
        "clarifications": state.counts.clarifications,
        "completion": state.completion,
    }
    return json.dumps(parts).replace(str(folder), "")


def told(folder: Path) -> list[str]:
    """Return the notices at the end, without those for replans that a kill may cause."""
    text = (folder / "notices.md").read_text(encoding="utf-8")
    posts = re.split(r"^<!-- comment .* -->$", text, flags=re.MULTILINE)
    return sorted(title for post in posts for title in _TITLE.findall(post) if "retry" not in post)


_TITLE: Final = re.compile(r"^## .*", re.MULTILINE)


def kept(folder: Path) -> list[str]:
    """Return the kinds of plans in the history at the end."""
    lines = PlanningHistoryStore(folder / "planning_history", task_uuid=RUN).entries()
    return [str(line["type"]) for line in lines if line["type"] in ("plan", "revision", "completion")]


def retries(records: Sequence[Record]) -> tuple[int, int]:
    """Return the numbers of retries that the model decided on, and of failures that were due one."""
    state = PlanningState.from_records(records)
    planned = {task for plan in state.plans for task in plan.tasks.values()}
    ends = (AttemptFailed, AttemptInterrupted, AttemptTimedOut)
    failed = sum(isinstance(record.body, ends) and record.body.task in planned for record in records)
    followed = sum(record.executed and record.phase == "execution" for record in state.records)
    return followed, failed


def charged(records: Sequence[Record]) -> int:
    """Return the number of journaled calls of the model."""
    return sum(record.body.usage.calls for record in records if isinstance(record.body, UsageCharged))
