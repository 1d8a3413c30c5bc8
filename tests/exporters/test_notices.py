"""Notices: their content, and that no text of a model changes their form."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from replanning import Settings
from replanning.exporters._forge import MAX_COMMENT_CHARS, Marker, find_marker
from replanning.exporters._notices import HEADINGS, Notice, NoticeKind, RunNotices
from replanning.journal import PlanningNoted, Record
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from tests.support.notices import EVENTFUL, NASTY, RUN, TEXTS, carried_out, read
from tests.support.planning import Replies, go_on, replan


async def test_six_moments() -> None:
    """A replan is told of when it is decided, started, done, failed or overridden, and when something must be clarified."""
    told = {notice.kind for notice in notices(await carried_out(EVENTFUL, failing=2))}
    six = list(NoticeKind)[:6]
    assert told == {*six} - {NoticeKind.FAILED}
    assert [HEADINGS[kind] for kind in six] == [
        "🔄 Plan Revision Decided by AI",
        "🚀 Plan Revision Started",
        "❓ Clarification Needed (AI Decision)",
        "✅ Plan Revision Done",
        "❌ Plan Revision Failed",
        "⚠️ Plan Revision Overridden by a Limit",
    ]


def notices(records: Sequence[Record]) -> list[Notice]:
    """Everything that is to be told of a run."""
    account = RunNotices(RUN)
    for record in records:
        account.fold(record)
    return list(account.pending)


def the(records: Sequence[Record], kind: NoticeKind, number: int = 0) -> str:
    """The notice of a kind, as a comment."""
    return [notice.body(RUN) for notice in notices(records) if notice.kind is kind][number]


async def test_decided() -> None:
    """A decision is posted with phase, confidence, reasoning, issues, recommended actions and the time."""
    assert the(await carried_out(EVENTFUL, failing=2), NoticeKind.DECIDED).splitlines() == [
        "## 🔄 Plan Revision Decided by AI",
        "",
        "**Phase**: execution",
        "",
        "**Confidence**: 60 %",
        "",
        "**Reasoning**: a retry is needed",
        "",
        "**Issues Found**:",
        "- the file is missing",
        "",
        "**Recommended Actions**:",
        "- look again",
        "",
        "**Revision**: retry (retry the action); it goes on with execution",
        "",
        "**Warning**: its confidence is 0.6, below 0.8",
        "",
        "*2023-11-14 22:43:20 UTC*",
        "",
        f"<!-- replanning notice=decided run={RUN} about=p5 -->",
    ]


async def test_clarification() -> None:
    """A question has its parts numbered, the context, and what is assumed without an answer, and when."""
    assert the(await carried_out(EVENTFUL), NoticeKind.CLARIFICATION).splitlines() == [
        "## ❓ Clarification Needed (AI Decision)",
        "",
        "**Questions**:",
        "1. Which people?",
        "2. Which news?",
        "",
        "**Context**: a clarification_request is needed",
        "",
        "**If no response** by 2023-11-14 22:43:20 UTC, it is assumed:",
        "- everybody",
        "- today's",
        "",
        "*2023-11-14 22:13:20 UTC*",
        "",
        f"<!-- replanning notice=clarification run={RUN} about={RUN}.q1 -->",
    ]


async def test_nothing_is_assumed_where_that_is_switched_off() -> None:
    """If the settings allow no assumptions, the notice says that the work waits."""
    settings = Settings.model_validate(
        {"planning": {"replanning": {"goal_understanding": {"auto_assume_on_no_response": False}}}}
    )
    body = the(await carried_out(EVENTFUL, settings=settings), NoticeKind.CLARIFICATION)
    assert "the work waits; nothing is assumed" in body
    assert "everybody" not in body


async def test_overridden() -> None:
    """A replan that is not done is told with what was wanted, which rule forbade it, and why."""
    body = the(await carried_out(EVENTFUL, failing=2), NoticeKind.OVERRIDDEN)
    assert "**Overridden by**: confidence" in body
    assert "**Rule**: its confidence is 0.1, and 0.3 is needed" in body
    assert "**Revision**: action_regeneration" in body


async def test_what_ends_badly_is_told() -> None:
    """A run that is given up is told of, with the reason and how things stand, and without headings of nothing."""
    records = await carried_out({"decision:execution": go_on()}, failing=9)
    body = the(records, NoticeKind.ENDED)
    assert (
        "## ⛔ Execution Ended without Success\n\n**Status**: aborted\n\n**Reason**: write failed, and no decision helps"
        in body
    )
    assert "**Where things stand**: actions done: 0, failed: 1 (write: no such file: news.txt)" in body
    assert "Recommended Actions" not in body


async def test_a_person_is_asked_when_revisions_are_used_up() -> None:
    """If the goal is not achieved and nothing is left to try, a person is asked, with the current state."""
    replies: Replies = {
        "completion": {"summary": {"goal_achieved": False, "tasks_completed": 2, "tasks_failed": 0}},
        "decision:reflection": go_on(recommended_actions=["call them"]),
    }
    body = the(await carried_out(replies), NoticeKind.QUESTION)
    assert "is what there is good enough?" in body
    assert "**Where things stand**: actions done: 2, failed: 0" in body
    assert f"**Question id**: {RUN}.q1" in body


def replanned(decision: JsonObject, **record: object) -> Record:
    """The record of a replan's end."""
    both = {
        "replan_id": "p1",
        "phase": "execution",
        "llm_decision": decision["replan_decision"],
        "timestamp": "2026-01-01T00:00:00Z",
    }
    considered = {
        **both,
        "cause": {"action": "write"},
        "ruling": {"kind": "execute", "reason": "its confidence is 0.9"},
    }
    told = {
        **both,
        "confidence": 0.9,
        "executed": True,
        "override_reason": None,
        "result": "success",
        "duration": 1.25,
        "replan_type": "partial_replan",
        **record,
    }
    body = PlanningNoted("replan", {"stage": "applied", "counts": {}, "considered": considered, "record": told})
    return Record(1, 1_767_225_600.0, body)


def test_failed() -> None:
    """A replan that failed is told with what went wrong."""
    body = the([replanned(replan("partial_replan"), result="failure", error="no such task: x")], NoticeKind.FAILED)
    assert body.startswith("## ❌ Plan Revision Failed\n\n**Phase**: execution\n\n**Revision**: partial_replan")
    assert "**Error**: no such task: x\n\n**Duration**: 1.2 s" in body


@given(TEXTS, st.lists(TEXTS, max_size=3))
@example("".join(NASTY), list(NASTY))
def test_no_text_changes_the_form(reasoning: str, issues: list[str]) -> None:
    """Whatever a model writes, a reader of a notice sees the same headings, blocks, marks and calls as for plain words."""
    spoken = [text for text in issues if read_text(text)]
    shapes = []
    for why, found in ((reasoning, issues), ("word", ["word"] * len(spoken))):
        said: list[JsonValue] = [*found]
        decision = replan("partial_replan", issues_found=said, recommended_actions=said)
        decision["replan_decision"].update(reasoning=why)
        record = replanned(decision, executed=False, override_reason="limit", result="skipped", reason=why)
        shapes.append(read(the([record], NoticeKind.OVERRIDDEN)).shape)
    assert shapes[0] == shapes[1]
    assert shapes[0]["ticks"] == ()


def read_text(text: str) -> str:
    """Return the visible rest of a text."""
    return "".join(c for c in " ".join(text.split()) if c.isprintable() or c in "\u200c\u200d")


def test_a_notice_is_never_too_long() -> None:
    """However much a model writes, a notice fits into a comment, and keeps its mark."""
    much: list[JsonValue] = ["<&" * 9_000] * 100
    decision = replan("partial_replan", issues_found=much, recommended_actions=much)
    body = the([replanned(decision, result="failure", error="`" * 9_000)], NoticeKind.FAILED)
    assert len(body) <= MAX_COMMENT_CHARS
    assert find_marker(body) == Marker("failed", RUN, "p1")


@given(st.text(), st.text())
@example("r--1 -->", "a\n-->")
def test_marks_are_read_as_they_were_written(run: str, about: str) -> None:
    """A mark says the same when it is read, whatever it names, and is one HTML comment."""
    run, about = run.encode(errors="ignore").decode(), about.encode(errors="ignore").decode()
    marker = Marker("decided", run, about)
    assert find_marker(f"text\n\n{marker}") == marker
    assert read(str(marker)).html == (str(marker),)
