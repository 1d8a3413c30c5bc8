"""Processes that are killed in planning mode, and resumed by others."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

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
from tests.support.coding import RIGHT, Coder, commits, repository
from tests.support.crash import Process, check_kept, journal
from tests.support.llm_server import LLMRequest, LLMServerReply, ScriptedLLMServer
from tests.support.resume import RUN

KILLS = 20
KILLS_PER_RUN: Final = 7
AIMS: Final = (
    *(
        "<planning-noted",
        ">planning-noted",
        "<charged",
        ">attempt-started",
        "<attempt-succeeded",
        ">trigger-fired",
    ),
    *(
        ">alternatives-considered",
        "<revised",
        ">revised",
        "<decided",
        ">question-asked",
        ">question-answered",
    ),
    *("<run-ended", ">run-resumed"),
)
"""Moments at which a process is killed: within an append, and between records that belong together."""

_MARK: Final = re.compile(r"<!-- replanning (notice=\S+ run=\S+ about=\S*) -->")
_COUNTED: Final = (
    "considered",
    "total",
    "clarifications",
    "redecompositions",
    "partial_replans",
    "plan_revisions",
)
_TITLE: Final = re.compile(r"^## .*", re.MULTILINE)


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


def play(folder: Path, rng: Random, kills: int) -> tuple[dict[str, Any], list[Record], int]:
    """Run a task to its end, killing its process a number of times; return its output, its journal and the kills."""
    folder.mkdir()
    repository(folder / "work")
    sniper = Sniper(Coder(folder / "work"))
    before: list[Record] = []
    killed = 0
    with ScriptedLLMServer(sniper) as server:
        while True:
            said = live(folder, server, sniper, rng, armed=killed < kills)
            records = journal("sqlite", folder)
            check(records, before)
            check_told(folder)
            before = records
            if said is None:
                killed += 1
            elif said["status"] == "needs_human":
                answer(folder, records)
            else:
                assert 0 <= len(server.requests) - said["calls"] <= killed, "calls were not counted"
                return said, records, killed


def live(
    folder: Path, server: ScriptedLLMServer, sniper: Sniper, rng: Random, *, armed: bool
) -> dict[str, Any] | None:
    """Run a process until it ends, or is killed at a request to the model, any record, or a kind of record."""
    match rng.randrange(5):
        case 0 | 1:
            aim, count = "request", rng.randint(1, 5)
        case 2 | 3:
            aim, count = "", rng.randint(1, 50)
        case _:
            aim, count = rng.choice(AIMS), 1
    arguments = (folder / "history", RUN, folder / "work")
    with Process("planning_crash_child", folder, *arguments, **server.environ()) as process:
        sniper.target, sniper.left = process.process.pid, count if armed and aim == "request" else 0
        for tick in process.ticks():
            count -= tick.startswith(aim)
            if armed and count == 0:
                process.process.kill()
                break
        said = process.finish()
    assert armed or said is not None, "it was killed although nobody killed it"
    return said


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
    """Check what must hold after every kill."""
    check_kept(records, before)
    then, now = PlanningState.from_records(before), PlanningState.from_records(records)
    spent = [(name, getattr(then.counts, name), getattr(now.counts, name)) for name in _COUNTED]
    assert all(earlier <= later for _, earlier, later in spent), f"limits began anew: {spent}"
    known = [plan for plan in then.plans if plan in now.plans]
    assert len(then.plans) - len(known) <= 1, (
        "a plan is lost"
    )  # one that was not in place yet is made again
    assert len(then.records) <= len(now.records)
    texts = Counter(question.text for question in asked(records))
    assert set(texts.values()) <= {1}, f"asked twice: {texts}"
    done = {b.task for b in (r.body for r in before) if isinstance(b, AttemptSucceeded)}
    begun = [
        b.task for b in (r.body for r in records[len(before) :]) if isinstance(b, AttemptStarted)
    ]
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


def story(records: Sequence[Record], folder: Path) -> str:
    """Return the parts of a journal that interruptions must not change, whatever the folder is called."""
    state = PlanningState.from_records(records)
    executed = [record for record in state.records if record.executed]
    parts = {
        "plans": [
            (plan.number, plan.tasks, plan.kept, plan.action_plan.model_dump(mode="json"))
            for plan in state.plans
        ],
        "replans": [
            str(record.replan_type) for record in executed if record.replan_type != "retry"
        ],
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


def kept(folder: Path) -> list[str]:
    """Return the kinds of plans in the history at the end."""
    lines = PlanningHistoryStore(folder / "planning_history", task_uuid=RUN).entries()
    return [
        str(line["type"]) for line in lines if line["type"] in ("plan", "revision", "completion")
    ]


def retries(records: Sequence[Record]) -> tuple[int, int]:
    """Return the numbers of retries that the model decided on, and of failures that were due one."""
    state = PlanningState.from_records(records)
    planned = {task for plan in state.plans for task in plan.tasks.values()}
    ends = (AttemptFailed, AttemptInterrupted, AttemptTimedOut)
    failed = sum(
        isinstance(record.body, ends) and record.body.task in planned for record in records
    )
    followed = sum(record.executed and record.phase == "execution" for record in state.records)
    return followed, failed


@pytest.mark.deep
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """A run that is killed repeatedly keeps counts, budget, question and plan, repeats nothing, and ends as usual."""
    left, rng, calm = KILLS, Random(20_240_229), tmp_path / "undisturbed"
    undisturbed, records, _ = play(calm, rng, 0)
    expected = story(records, calm)
    assert (undisturbed["status"], undisturbed["differences"]) == ("succeeded", []), undisturbed
    while left > 0:
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        said, records, killed = play(folder, rng, min(KILLS_PER_RUN, left))
        left -= killed
        assert (said["status"], said["reason"], said["differences"]) == (
            "succeeded",
            undisturbed["reason"],
            [],
        )
        assert story(records, folder) == expected
        assert told(folder) == told(calm)
        assert kept(folder) == ["plan", "revision", "completion"]
        followed, failed = retries(records)
        assert followed == failed
        assert said["calls"] == sum(
            r.body.usage.calls for r in records if isinstance(r.body, UsageCharged)
        )
        assert (folder / "work/sums.py").read_text() == RIGHT
        assert commits(folder / "work") == ["Add sums"]
