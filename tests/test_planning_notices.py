"""Notices: what they say, that each is there once whatever comes between, and that a failing forge harms nobody."""

from __future__ import annotations

import io
import json
import logging
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replanning import Environment, ReplanningEngine, Settings, Task
from replanning.events import Contained, PlanningNoted, Record, RunEnded
from replanning.exporters._account import Account
from replanning.exporters._forge import MAX_BODY
from replanning.exporters._markdown import Marker, marker_of
from replanning.exporters._notices import HEADINGS, Notice, NoticeKind
from replanning.exporters.notices import ConsoleNotifier, FileForge, FileNotifier, Forge, ForgeError, Notifier
from replanning.history import MemoryStore
from replanning.interfaces import Exporter, JsonObject, JsonValue, RunId, Surroundings
from replanning.planning import PlanningCoordinator
from replanning.testing import (
    LLMRequest,
    LLMServerReply,
    ScriptedLLM,
    ScriptedLLMServer,
    VirtualClock,
    virtual_environment,
)
from tests.cli_parts import cli
from tests.notice_parts import Issue, read
from tests.planning_parts import TOOLS, Desk, Model, Replies, action, go_on, replan, revision
from tests.resume_parts import cut
from tests.test_planning_checklist import NASTY, TEXTS

pytestmark = pytest.mark.anyio

RUN = RunId("run-1")
MISSING = FileNotFoundError("no such file: news.txt")
UNCLEAR = replan(
    "clarification_request",
    clarification_needed=True,
    clarification_questions=["Which people?", "Which news?"],
    assumptions_to_make=["everybody", "today's"],
)
EVENTFUL: Replies = {
    "decision:goal_understanding": (UNCLEAR, go_on()),
    "decision:action_sequence": (replan("action_regeneration", confidence=0.1), go_on()),
    "decision:execution": (
        replan("retry", issues_found=["the file is missing"], recommended_actions=["look again"], confidence=0.6),
        replan("partial_replan"),
        go_on(),
    ),
    "revision": revision(action("write", "shout"), action("post", "post")),
}
"""A question, a replan that is too unsure, a retry with a warning, and where that fails, a replan."""


def planner(
    replies: Replies,
    clock: VirtualClock,
    *exporters: Exporter,
    failing: int = 0,
    store: MemoryStore | None = None,
    settings: Settings | None = None,
) -> PlanningCoordinator:
    """Planning mode with a scripted model and exporters; its first tool fails as often as is said."""
    environment = virtual_environment(clock=clock)
    return PlanningCoordinator(
        settings or Settings(),
        ScriptedLLM(Model(replies), environment=environment),
        TOOLS,
        "Tell people the news",
        work=Desk({"write": [MISSING] * failing}),
        store=store,
        exporters=exporters,
        environment=environment,
    )


async def carried_out(
    replies: Replies, *exporters: Exporter, failing: int = 0, settings: Settings | None = None
) -> list[Record]:
    """What is on record of a run from its beginning to its end."""
    store = MemoryStore()
    async with VirtualClock() as clock:
        planning = planner(replies, clock, *exporters, failing=failing, store=store, settings=settings)
        await planning.execute_with_planning(RUN)
        await planning.engine.aclose()
    return list(store.read(RUN))


def attached(forge: Forge, records: Sequence[Record], clock: VirtualClock) -> Notifier:
    """A notifier of a new process, whose store holds these records."""
    notifier = Notifier(forge, every=0)
    notifier.attach(Surroundings(cut(records), clock))
    return notifier


def marks(issue: Issue) -> list[Marker]:
    """The marks of all comments, which must have one."""
    found = [marker_of(one.body) for one in issue.kept]
    assert None not in found
    return [one for one in found if one is not None]


# What they say


async def test_g1_six_moments() -> None:
    """A replan is told of when it is decided, started, done, failed or overridden, and when something must be clarified."""
    kinds = {notice.kind for notice in notices(await carried_out(EVENTFUL, failing=2))}
    assert kinds == {
        NoticeKind.CLARIFICATION,
        NoticeKind.DECIDED,
        NoticeKind.STARTED,
        NoticeKind.DONE,
        NoticeKind.OVERRIDDEN,
    }
    assert [HEADINGS[kind] for kind in list(NoticeKind)[:6]] == [
        "🔄 Plan Revision Decided by AI",
        "🚀 Plan Revision Started",
        "❓ Clarification Needed (AI Decision)",
        "✅ Plan Revision Done",
        "❌ Plan Revision Failed",
        "⚠️ Plan Revision Overridden by a Limit",
    ]


def notices(records: Sequence[Record]) -> list[Notice]:
    """Everything that is to be told of a run."""
    account = Account(RUN)
    for record in records:
        account.take(record)
    return list(account.pending)


def the(records: Sequence[Record], kind: NoticeKind, number: int = 0) -> str:
    """The notice of a kind, as a comment."""
    return [notice.body(RUN) for notice in notices(records) if notice.kind is kind][number]


async def test_g2_decided() -> None:
    """What was decided is told with phase, confidence, reasoning, issues, recommended actions and the time."""
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
        "**Warning**: its confidence is 0.6",
        "",
        "*2023-11-14 22:43:20 UTC*",
        "",
        f"<!-- replanning notice=decided run={RUN} about=p5 -->",
    ]


async def test_g3_clarification() -> None:
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


async def test_g3_nothing_is_assumed_where_that_is_switched_off() -> None:
    """Where settings do not let anything be assumed, the notice says that the work waits."""
    settings = Settings.model_validate(
        {"planning": {"replanning": {"goal_understanding": {"auto_assume_on_no_response": False}}}}
    )
    body = the(await carried_out(EVENTFUL, settings=settings), NoticeKind.CLARIFICATION)
    assert "the work waits; nothing is assumed" in body
    assert "everybody" not in body


async def test_g1_overridden() -> None:
    """A replan that is not done is told with what was wanted, which rule forbade it, and why."""
    body = the(await carried_out(EVENTFUL, failing=2), NoticeKind.OVERRIDDEN)
    assert "**Overridden by**: confidence" in body
    assert "**Rule**: its confidence is 0.1, and 0.3 is needed" in body
    assert "**Revision**: action_regeneration" in body


async def test_e5_what_ends_badly_is_told() -> None:
    """A run that is given up is told of, with the reason; the model's replans in vain before it, too."""
    records = await carried_out({"decision:execution": go_on()}, failing=9)
    body = the(records, NoticeKind.ENDED)
    assert (
        "## ⛔ Execution Ended without Success\n\n**Status**: aborted\n\n**Reason**: write failed, and nothing" in body
    )


async def test_e5_a_person_is_asked_when_revisions_are_used_up() -> None:
    """When the goal was not achieved and nothing is left to try, a person is asked, with how things stand."""
    replies: Replies = {
        "completion": {"summary": {"goal_achieved": False, "tasks_completed": 2, "tasks_failed": 0}},
        "decision:reflection": go_on(recommended_actions=["call them"]),
    }
    body = the(await carried_out(replies), NoticeKind.QUESTION)
    assert "is what there is good enough?" in body
    assert "**Where things stand**: 2 actions are done, 0 have failed" in body
    assert f"**Question id**: {RUN}.q1" in body


def replanned(decision: JsonObject, **record: object) -> Record:
    """The record of a replan's end."""
    considered = {
        "replan_id": "p1",
        "phase": "execution",
        "cause": {"action": "write"},
        "said": decision["replan_decision"],
        "ruling": {"kind": "execute", "reason": "its confidence is 0.9"},
        "timestamp": "2026-01-01T00:00:00Z",
    }
    told = {
        "replan_id": "p1",
        "phase": "execution",
        "llm_decision": decision["replan_decision"],
        "confidence": 0.9,
        "executed": True,
        "override_reason": None,
        "timestamp": "2026-01-01T00:00:00Z",
        "result": "success",
        "duration": 1.25,
        "replan_type": "partial_replan",
        **record,
    }
    body = PlanningNoted("replan", {"stage": "applied", "counts": {}, "considered": considered, "record": told})
    return Record(1, 1_767_225_600.0, body)


def test_g1_failed() -> None:
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
    """What is left to be seen of a text."""
    return "".join(c for c in " ".join(text.split()) if c.isprintable() or c in "\u200c\u200d")


def test_a_notice_is_never_too_long() -> None:
    """However much a model writes, a notice fits into a comment, and keeps its mark."""
    much: list[JsonValue] = ["<&" * 9_000] * 100
    decision = replan("partial_replan", issues_found=much, recommended_actions=much)
    body = the([replanned(decision, result="failure", error="`" * 9_000)], NoticeKind.FAILED)
    assert len(body) <= MAX_BODY
    assert marker_of(body) == Marker("failed", RUN, "p1")


@given(st.text(), st.text())
@example("r--1 -->", "a\n-->")
def test_marks_are_read_as_they_were_written(run: str, about: str) -> None:
    """A mark says the same when it is read, whatever it names, and is one HTML comment."""
    run, about = run.encode(errors="ignore").decode(), about.encode(errors="ignore").decode()
    marker = Marker("decided", run, about)
    assert marker_of(f"text\n\n{marker}") == marker
    assert read(str(marker)).html == (str(marker),)


# Once each


async def test_g9_one_checklist_comment() -> None:
    """However often the plan changes, there is one checklist, edited in place, and each notice stands once."""
    issue = Issue()
    await carried_out(EVENTFUL, Notifier(issue), failing=2)
    found = marks(issue)
    assert len(found) == len(set(found))
    assert [mark.kind for mark in found].count("checklist") == 1
    seen = read(issue.body("📋 Execution Plan (Revised #1)"))
    assert seen.ticks == (True, True, False, False)
    assert issue.closed


async def whole() -> tuple[list[Record], Issue]:
    """A run that was told of without a break."""
    issue = Issue()
    records = await carried_out(EVENTFUL, Notifier(issue, every=0), failing=2)
    return records, issue


async def test_cut_off_after_any_record() -> None:
    """Wherever a process ends, the next one goes on: in the end every comment is there, once, and says the same."""
    records, expected = await whole()
    for length in range(1, len(records)):
        issue = Issue()
        async with VirtualClock() as clock:
            first = attached(issue, records[:length], clock)
            for record in records[:length]:
                await first.export(RUN, record)
            second = attached(issue, records, clock)
            for record in records[length:]:
                await second.export(RUN, record)
            await second.aclose()
        assert marks_and_texts(issue) == marks_and_texts(expected), length


def marks_and_texts(issue: Issue) -> dict[Marker, str]:
    """The comments by their marks."""
    assert len(set(marks(issue))) == len(issue.kept)
    return {mark: one.body for mark, one in zip(marks(issue), issue.kept, strict=True)}


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("arrived", [True, False])
async def test_cut_off_within_any_request(arrived: bool) -> None:
    """A process that ends while it writes, whether or not that arrived, leaves nothing doubled and nothing out."""
    records, expected = await whole()
    for number in range(expected.posts):
        issue = Issue([*[None] * number, Killed()], effective=arrived)
        async with VirtualClock() as clock:
            first = attached(issue, records, clock)
            with pytest.raises(Killed):
                await first.export(RUN, records[-1])
            second = attached(issue, records, clock)
            await second.export(RUN, records[-1])
            await second.aclose()
        assert marks_and_texts(issue) == marks_and_texts(expected), number


async def test_marks_of_others_do_not_count() -> None:
    """A person who copies a mark keeps no notice away, and no comment but our own is ever edited."""
    records, expected = await whole()
    issue = Issue()
    for one in expected.kept:
        issue.add(one.body, own=False, author="mallory")
    before = list(issue.kept)
    async with VirtualClock() as clock:
        notifier = attached(issue, records, clock)
        await notifier.export(RUN, records[-1])
    assert issue.kept[: len(before)] == before
    assert [one.body for one in issue.kept[len(before) :]] == [one.body for one in issue.kept if one.own]
    assert len(issue.kept) == 2 * len(before)


async def test_a_second_run_has_a_checklist_of_its_own() -> None:
    """Another run about the same issue leaves the comments of the first one as they are."""
    records, issue = await whole()
    before = list(issue.kept)
    async with VirtualClock():
        notifier = Notifier(issue, every=0)
        for record in records:
            await notifier.export(RunId("run-2"), record)
        await notifier.aclose()
    assert issue.kept[: len(before)] == before
    assert len(issue.kept) == 2 * len(before)


async def test_a_fork_is_not_told_what_was_before_it() -> None:
    """Of a run that was forked from another only what happens in it is told; its checklist is whole."""
    store, issue = MemoryStore(), Issue()
    async with VirtualClock() as clock:
        first = planner(EVENTFUL, clock, failing=2, store=store)
        await first.execute_with_planning(RUN)
        revisions = [record.body.number for record in store.read(RUN) if record.body.kind == "revised"]
        fork = first.engine.fork(RUN, revisions[-1], new_id="fork")
        second = planner({}, clock, Notifier(issue), store=store)
        await second.execute_with_planning(fork)
        await second.engine.aclose()
    assert [mark.kind for mark in marks(issue)] == ["checklist"]
    assert read(issue.kept[0].body).details == 1


# Edits


def wide(count: int) -> Replies:
    """A plan of tasks that do not depend on one another."""
    return {
        "task_decomposition": {"subtasks": [{"id": f"t{n}", "description": "Shout"} for n in range(count)]},
        "action_sequence": {"actions": [action(f"t{n}", "shout") for n in range(count)]},
    }


async def test_g12_a_burst_is_one_edit() -> None:
    """Tasks that finish at once become one edit, and the comment ends up with all of them ticked."""
    issue = Issue()
    await carried_out(wide(12), Notifier(issue))
    assert read(issue.body("📋")).ticks == (True,) * 12
    assert issue.edits <= 2


async def test_g12_edits_keep_their_distance_and_the_last_one_arrives() -> None:
    """Tasks that finish one after another are edited in every few seconds, and the latest state is never left out."""
    issue = Issue()
    store = MemoryStore()
    seen: list[tuple[float, int]] = []
    async with VirtualClock() as clock:

        class Slow(Desk):
            async def __call__(self, task: Task, context: object) -> JsonValue:
                seen.append((clock.elapsed, issue.edits))
                await clock.sleep(1)
                return "done"

        environment = virtual_environment(clock=clock)
        planning = PlanningCoordinator(
            Settings(),
            ScriptedLLM(Model(wide(12)), environment=environment),
            TOOLS,
            "Tell people",
            work=Slow(),
            store=store,
            exporters=[Notifier(issue, every=4)],
            environment=environment,
            workers=1,
        )
        await planning.execute_with_planning(RUN)
        await planning.engine.aclose()
    assert read(issue.body("📋")).ticks == (True,) * 12
    assert issue.edits == 4
    assert next(edits for at, edits in seen if at >= 9) >= 1


async def test_a_deleted_checklist_is_written_anew() -> None:
    """When somebody deletes the checklist, the next change writes it again."""
    records, _ = await whole()
    issue = Issue()
    last = next(
        n for n, record in enumerate(records) if isinstance(record.body, PlanningNoted) and record.body.type == "plan"
    )
    async with VirtualClock() as clock:
        store = cut(records[: last + 1])
        notifier = Notifier(issue, every=0)
        notifier.attach(Surroundings(store, clock))
        await notifier.export(RUN, records[last])
        issue.kept = [one for one in issue.kept if "📋" not in one.body]
        notifier.attach(Surroundings(cut(records), clock))
        await notifier.export(RUN, records[last + 1])
    assert issue.body("📋 Execution Plan (Revised #1)")


# Forges that fail


async def test_a_failing_forge_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """A forge that never works is on record once, and what was missed is said at the end; the run is as without it."""
    down = ForgeError("api.github.com cannot be reached")
    issue = Issue([down] * 1_000)
    with caplog.at_level(logging.WARNING):
        records = await carried_out(EVENTFUL, Notifier(issue), failing=2)
    (contained,) = [record.body for record in records if isinstance(record.body, Contained)]
    assert contained.where == "exporter 'notices'"
    assert "api.github.com cannot be reached" in contained.error
    assert isinstance(records[-1].body, RunEnded)
    assert records[-1].body.status == "succeeded"
    (warning,) = [record.message for record in caplog.records]
    assert "notices and the latest checklist could not be posted to fake" in warning
    assert issue.kept == []


async def test_what_was_missed_is_posted_later() -> None:
    """What a forge did not take is posted when it works again, at the latest when the notifier is closed."""
    _, expected = await whole()
    for failures in (1, 2):
        issue = Issue([ForgeError("HTTP 502", status=502)] * failures)
        await carried_out(EVENTFUL, Notifier(issue, every=0), failing=2)
        assert marks_and_texts(issue) == marks_and_texts(expected)


async def test_what_was_missed_is_posted_when_the_run_is_resumed() -> None:
    """What never arrived in one process arrives in the next."""
    records, expected = await whole()
    issue = Issue([ForgeError("HTTP 502", status=502)] * 1_000)
    async with VirtualClock() as clock:
        first = attached(issue, records, clock)
        with pytest.raises(ForgeError):
            await first.export(RUN, records[-1])
        with pytest.raises(ForgeError, match="could not be posted to fake: HTTP 502"):
            await first.aclose()
        issue.errors.clear()
        second = attached(issue, records, clock)
        await second.export(RUN, records[-1])
    assert marks_and_texts(issue) == marks_and_texts(expected)


async def test_a_forge_is_left_alone_as_long_as_it_says() -> None:
    """After a rate limit nothing is sent before its time is over, not even at the end; then everything is."""
    records, expected = await whole()
    issue = Issue([ForgeError("slow down", status=403, retry_after=60)] * 2)
    async with VirtualClock() as clock:
        for late in (False, True):
            notifier = attached(issue, records, clock)
            with pytest.raises(ForgeError):
                await notifier.export(RUN, records[-2])
            reads = issue.reads
            await notifier.export(RUN, records[-1])
            assert (issue.posts, issue.reads) == (0, reads)
            if late:
                clock.advance(61)
                await notifier.aclose()
            else:
                with pytest.raises(ForgeError, match="could not be posted to fake: slow down"):
                    await notifier.aclose()
                assert (issue.posts, issue.reads) == (0, reads)
    assert marks_and_texts(issue) == marks_and_texts(expected)


async def test_what_a_slow_forge_did_not_take_in_time_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A forge that never answers holds up the end for some seconds, and then it is said how much is missing."""
    async with VirtualClock() as clock:

        class Hanging(Issue):
            async def post(self, body: str) -> str:
                await clock.sleep(float("inf"))
                return ""

        planning = planner({}, clock, Notifier(Hanging()))
        assert await planning.execute_with_planning(RUN)
        await planning.engine.aclose()
        assert clock.elapsed == 10
    assert "the latest checklist could not be posted to fake in time" in caplog.text


async def test_the_last_state_goes_first_when_a_run_ends() -> None:
    """When much is left to be posted at the end, the checklist is brought up to date before anything else."""
    records, expected = await whole()
    issue = Issue()
    async with VirtualClock() as clock:
        await attached(issue, records, clock).export(RUN, records[-1])
    assert marks(issue)[0].kind == "checklist"
    assert marks_and_texts(issue) == marks_and_texts(expected)


@pytest.mark.parametrize("every", [0.0, 2.5])
async def test_a_forge_that_asks_for_no_time_is_asked_again(every: float) -> None:
    """A forge that says to try again at once is tried again, and not in an endless loop."""
    _, expected = await whole()
    issue = Issue([ForgeError("once more", retry_after=0)] * 3)
    await carried_out(EVENTFUL, Notifier(issue, every=every), failing=2)
    assert marks_and_texts(issue) == marks_and_texts(expected)


async def test_an_issue_that_is_not_there_is_not_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    """Where trying again is in vain, it is not tried; that nothing was posted is said at the end."""
    gone = ForgeError("there is no issue owner/repo#12", status=404, final=True)
    issue = Issue([gone] * 1_000)
    await carried_out(EVENTFUL, Notifier(issue), failing=2)
    assert len(issue.errors) == 999
    assert "there is no issue owner/repo#12" in caplog.text


async def test_a_request_that_failed_and_arrived_is_not_repeated() -> None:
    """A comment that was written although its request failed is found, and not written again."""
    _, expected = await whole()
    issue = Issue([ForgeError("cut off"), None, ForgeError("cut off")], effective=True)
    await carried_out(EVENTFUL, Notifier(issue, every=0), failing=2)
    assert marks_and_texts(issue) == marks_and_texts(expected)


# Without a forge


async def test_a_file_holds_the_same_comments(tmp_path: Path) -> None:
    """A file has every comment that a forge would have; a resumed run goes on in it; what people add stays."""
    records, expected = await whole()
    path = tmp_path / "new" / "notices.md"
    async with VirtualClock() as clock:
        for length in (len(records) // 2, len(records)):
            notifier = FileNotifier(path)
            notifier.attach(Surroundings(cut(records[:length]), clock))
            await notifier.export(RUN, records[length - 1])
            await notifier.aclose()
            path.write_text(f"# My notes\n\n{path.read_text()}")
    comments = await FileForge(path).comments()
    hint = "\n\n*Answer with `replanning pending` and then `replanning approve`, `reject` or `modify`.*"
    assert [marker_of(one.body) for one in comments] == marks(expected)
    assert [one.body.replace(hint, "") for one in comments] == [one.body for one in expected.kept]
    assert path.read_text().startswith("# My notes\n\n# My notes\n")
    assert [one.name for one in path.parent.iterdir()] == ["notices.md"]


async def test_a_folder_has_a_file_for_each_run(tmp_path: Path) -> None:
    """In a folder each run has a file under its id, wherever that id points to."""
    records, _ = await whole()
    async with VirtualClock() as clock:
        notifier = FileNotifier.from_target(f"{tmp_path}/notices/")
        notifier.attach(Surroundings(cut(records), clock))
        await notifier.export(RUN, records[-1])
    assert [one.name for one in (tmp_path / "notices").iterdir()] == [f"{RUN}.md"]
    assert notifier._board_of(RunId("../x")).forge.name.endswith("..%2Fx.md")


@given(st.lists(st.text(alphabet=st.characters(blacklist_categories=["Cs"]), max_size=40), max_size=4))
@example(["<!-- comment 1 at 2026-01-01T00:00:00+00:00 -->", "a\n<!-- comment 7 at x -->\nb"])
def test_no_comment_of_a_file_passes_for_two(texts: list[str]) -> None:
    """Whatever comments say, a file has as many as were written, under their ids."""

    async def written(path: Path) -> list[str]:
        forge = FileForge(path)
        ids = [await forge.post(f"x{text}") for text in texts]
        for number, text in zip(ids, texts, strict=True):
            await forge.edit(number, f"y{text}")
        assert [one.id for one in await forge.comments()] == ids
        return ids

    with tempfile.TemporaryDirectory() as folder:
        assert anyio.run(written, Path(folder) / "n.md") == [str(n) for n in range(1, len(texts) + 1)]


async def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """Where the file cannot be written, the error names it and says why."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(ForgeError, match=r"taken/notices.md cannot be (read|written): Not a directory"):
        await FileForge(tmp_path / "taken" / "notices.md").post("x")


async def test_console_lines() -> None:
    """The console has a line for each notice, and one whenever the plan has come further."""
    stream = io.StringIO()
    await carried_out(EVENTFUL, ConsoleNotifier(stream), failing=1)
    assert stream.getvalue().splitlines() == [
        "❓ Clarification Needed (AI Decision): Which people? Which news?",
        "⚠️ Plan Revision Overridden by a Limit: action_regeneration: its confidence is 0.1, and 0.3 is needed",
        "📋 Progress: 0/2 (0%) complete",
        "🔄 Plan Revision Decided by AI: retry after execution, 60 %: a retry is needed",
        "🚀 Plan Revision Started: retry after execution, 60 %: a retry is needed",
        "✅ Plan Revision Done: retry",
        "📋 Progress: 1/2 (50%) complete",
        "📋 Progress: 2/2 (100%) complete",
    ]


async def test_the_console_does_not_repeat_itself_after_a_resume() -> None:
    """Of a run that is resumed the console tells what is new."""
    records, _ = await whole()
    stream = io.StringIO()
    notifier = ConsoleNotifier(stream)
    async with VirtualClock() as clock:
        notifier.attach(Surroundings(cut(records), clock))
        for record in records[-4:]:
            await notifier.export(RUN, record)
    assert "Decided" not in stream.getvalue()


@pytest.mark.parametrize("name", ["notices", "notices-console"])
async def test_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are found by their names, as every exporter."""
    monkeypatch.chdir(tmp_path)
    engine = ReplanningEngine([], exporters=[name], environment=Environment())
    assert [exporter.name for exporter in engine.exporters] == [name]
    await engine.aclose()


# On the command line

TOOL = (
    "tools: [{name: write, kind: shell, parameters: {text: string}, command: 'if test -e again; then echo {text}; else"
    " touch again; kill -9 $PPID; fi'}]"
)
"""Ends the program that uses it for the first time, as nothing else could."""

SHORT: Replies = {
    "task_decomposition": {"subtasks": [{"id": "write", "description": "Write to @everybody"}]},
    "action_sequence": {"actions": [action("write", "write")]},
    "decision:execution": (replan("retry"), go_on()),
}


def test_a_run_that_was_killed_goes_on_in_the_same_file(tmp_path: Path) -> None:
    """A program that is killed in the middle is resumed: file and console tell everything once, and the box is ticked."""
    (tmp_path / "tools.yaml").write_text(TOOL, encoding="utf-8")
    model = Model(SHORT)

    def service(request: LLMRequest) -> LLMServerReply:
        return json.dumps(model(request.prompt))

    told = ("--notify", "notices.md", "--notify", "console")
    with ScriptedLLMServer(service) as server:
        wanted = ("--goal", "Tell people", "--tools", "tools.yaml", "--llm", "openai", "--run-id", "r", "-q")
        killed = cli(tmp_path, "solve", *wanted, *told, **server.environ())
        before = anyio.run(FileForge(tmp_path / "notices.md").comments)
        resume = ("resume", "r", "--replan-provider", "openai", "-q", *told)
        asked = cli(tmp_path, *resume, **server.environ())
        approved = cli(tmp_path, "approve", "r.q1")
        again = cli(tmp_path, *resume, **server.environ())

    after = anyio.run(FileForge(tmp_path / "notices.md").comments)
    codes = [one.returncode for one in (killed, asked, approved, again)]
    assert codes == [-signal.SIGKILL, 4, 0, 0], asked.stderr + again.stderr
    assert [read(one.body).ticks for one in before] == [(False,)]
    assert [found.kind for one in after if (found := marker_of(one.body))] == [
        "checklist",
        "decided",
        "started",
        "done",
        "question",
    ]
    assert read(after[0].body).ticks == (True,)
    assert (read(after[0].body).calls, after[0].id) == ((), before[0].id)
    assert killed.stderr.splitlines() == ["📋 Progress: 0/1 (0%) complete"]
    assert "🙋 Decision Needed: task 'write'" in asked.stderr
    assert again.stderr.splitlines()[0] == "📋 Progress: 1/1 (100%) complete"


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("github", "github=owner/repo#12"),
        ("gitlab=", "gitlab=group/project#12"),
        (" ", "name a file"),
        ("github=x", "x"),
    ],
)
def test_wrong_targets(tmp_path: Path, target: str, told: str) -> None:
    """A target that names nothing is refused before anything is run, with an example of what would do."""
    (tmp_path / "tools.yaml").write_text(TOOL, encoding="utf-8")
    wanted = ("--goal", "Tell people", "--tools", "tools.yaml", "--llm", "openai")
    done = cli(tmp_path, "solve", *wanted, "--notify", target, OPENAI_API_KEY="sk-none-of-this-is-used")
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
