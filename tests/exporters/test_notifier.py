"""Each notice is there once whatever comes between, checklists are edited in place, and forges that fail harm nobody."""

import logging

import pytest

from replanning import Task
from replanning.exporters._forge import ForgeError
from replanning.exporters.notices import Notifier
from replanning.journal import ErrorContained, MemoryStore, RunEnded
from replanning.plan import RunId
from replanning.telemetry import ExporterContext
from replanning.testing import VirtualClock
from tests.support.notices import (
    EVENTFUL,
    RUN,
    Issue,
    attached,
    carried_out,
    marks,
    marks_and_texts,
    planner,
    read,
)
from tests.support.planning import Desk, Replies, action, coordinator
from tests.support.resume import cut


class Late(Issue):
    """A forge that takes its time for each comment."""

    def __init__(self, clock: VirtualClock, seconds: float) -> None:
        super().__init__()
        self._clock, self._seconds = clock, seconds

    async def post(self, body: str) -> str:
        """Write one, in the end."""
        await self._clock.sleep(self._seconds)
        return await super().post(body)


BAD_GATEWAY = ForgeError("HTTP 502", status=502)
AT_ONCE = ForgeError("once more", retry_after=0)


@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.deep)])
async def test_cut_off_after_any_record(records, expected, step):
    """Wherever a process ends, the next one continues: in the end every comment is there once, with the same text."""
    for length in range(1, len(records), step):
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


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.deep)])
@pytest.mark.parametrize("arrived", [True, False])
async def test_cut_off_within_any_request(records, expected, arrived, step):
    """A process that ends while it writes, whether or not the request arrived, repeats nothing and omits nothing."""
    for number in range(0, expected.posts, step):
        issue = Issue([*[None] * number, Killed()], effective=arrived)
        async with VirtualClock() as clock:
            first = attached(issue, records, clock)
            with pytest.raises(Killed):
                await first.export(RUN, records[-1])
            second = attached(issue, records, clock)
            await second.export(RUN, records[-1])
            await second.aclose()
        assert marks_and_texts(issue) == marks_and_texts(expected), number


async def test_marks_of_others_do_not_count(records, expected, clock):
    """A person who copies a mark keeps no notice away, and no comment but our own is ever edited."""
    issue = Issue()
    for one in expected.kept:
        issue.add(one.body, own=False, author="mallory")
    before = list(issue.kept)
    notifier = attached(issue, records, clock)
    await notifier.export(RUN, records[-1])
    assert issue.kept[: len(before)] == before
    assert [one.body for one in issue.kept[len(before) :]] == [
        one.body for one in issue.kept if one.own
    ]
    assert len(issue.kept) == 2 * len(before)


async def test_a_second_run_has_a_checklist_of_its_own(records, expected):
    """Another run about the same issue leaves the comments of the first one as they are."""
    issue = expected
    before = list(issue.kept)
    async with VirtualClock():
        notifier = Notifier(issue, edit_interval=0)
        for record in records:
            await notifier.export(RunId("run-2"), record)
        await notifier.aclose()
    assert issue.kept[: len(before)] == before
    assert len(issue.kept) == 2 * len(before)


async def test_a_fork_is_not_told_what_was_before_it(clock):
    """Of a run that was forked from another only what happens in it is told; its checklist is whole."""
    store, issue = MemoryStore(), Issue()
    first = planner(EVENTFUL, clock, failing=2, store=store)
    await first.execute_with_planning(RUN)
    revisions = [record.body.number for record in store.read(RUN) if record.body.kind == "revised"]
    fork = first.engine.fork(RUN, revisions[-1], new_id="fork")
    second = planner({}, clock, Notifier(issue), store=store)
    await second.execute_with_planning(fork)
    await second.engine.aclose()
    assert [mark.kind for mark in marks(issue)] == ["checklist", "finished"]
    assert read(issue.kept[0].body).details == 1


def wide(count: int) -> Replies:
    """A plan of tasks that do not depend on one another."""
    return {
        "task_decomposition": {
            "subtasks": [{"id": f"t{n}", "description": "Shout"} for n in range(count)]
        },
        "action_sequence": {"actions": [action(f"t{n}", "shout") for n in range(count)]},
    }


async def test_edits_keep_their_distance_and_the_last_one_arrives(clock):
    """Tasks that finish one after another are edited in every few seconds, and the latest state is never left out."""
    issue = Issue()
    seen: list[tuple[float, int]] = []

    async def look(task: Task) -> None:
        seen.append((clock.elapsed, issue.edits))

    planning = coordinator(
        wide(12),
        clock,
        Desk(before=look, takes=1),
        max_concurrency=1,
        exporters=[Notifier(issue, edit_interval=4)],
    )
    await planning.execute_with_planning(RUN)
    await planning.engine.aclose()
    assert read(issue.body("📋")).ticks == (True,) * 12
    assert (issue.posts, issue.edits, issue.closed) == (2, 4, True)
    assert next(edits for at, edits in seen if at >= 9) >= 1


async def test_a_deleted_checklist_is_written_anew(records, clock):
    """A deleted checklist is written again with the next change."""
    issue = Issue()
    last = next(n for n, record in enumerate(records) if getattr(record.body, "type", "") == "plan")
    notifier = attached(issue, records[: last + 1], clock)
    await notifier.export(RUN, records[last])
    issue.kept = [one for one in issue.kept if "📋" not in one.body]
    notifier.attach(ExporterContext(cut(records), clock))
    await notifier.export(RUN, records[last + 1])
    assert issue.body("📋 Execution Plan (Revised #1)")


async def test_a_failing_forge_harms_nobody(caplog):
    """A forge that never works is on record once, and what was missed is said at the end; the run is as without it."""
    down = ForgeError("api.github.com cannot be reached")
    issue = Issue([down] * 1_000)
    with caplog.at_level(logging.WARNING):
        records = await carried_out(EVENTFUL, Notifier(issue), failing=2)
    (contained,) = [record.body for record in records if isinstance(record.body, ErrorContained)]
    assert contained.where == "exporter 'notices'"
    assert "api.github.com cannot be reached" in contained.error
    assert isinstance(records[-1].body, RunEnded)
    assert records[-1].body.status == "succeeded"
    (warning,) = [
        record.message for record in caplog.records if record.message.startswith("closing exporter")
    ]
    assert "notices and the latest checklist could not be posted to fake" in warning
    assert issue.kept == []


@pytest.mark.parametrize(
    ("errors", "effective", "every"),
    [
        ([BAD_GATEWAY], False, 0.0),
        ([BAD_GATEWAY] * 2, False, 0.0),
        ([AT_ONCE] * 3, False, 0.0),
        ([AT_ONCE] * 3, False, 2.5),
        ([BAD_GATEWAY, None, BAD_GATEWAY], True, 0.0),
    ],
    ids=[
        "once",
        "until the notifier is closed",
        "try again at once",
        "the same with distance",
        "failed, but arrived",
    ],
)
async def test_what_was_missed_is_posted_later(expected, errors, effective, every):
    """Notices whose requests failed are posted when the forge works again, at the latest at the end, and none twice."""
    issue = Issue(errors, effective=effective)
    await carried_out(EVENTFUL, Notifier(issue, edit_interval=every), failing=2)
    assert marks_and_texts(issue) == marks_and_texts(expected)


async def test_a_forge_is_left_alone_as_long_as_it_says(records, expected, clock):
    """After a rate limit nothing is sent before its time is over, not even at the end; then everything is."""
    issue = Issue([ForgeError("slow down", status=403, retry_after=60)] * 2)
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


async def test_what_a_slow_forge_did_not_take_in_time_is_said(clock, caplog):
    """A forge that never answers holds up the end for five seconds once, and then it is said how much is missing."""
    planning = planner({}, clock, Notifier(Late(clock, float("inf"))))
    assert await planning.execute_with_planning(RUN)
    await planning.engine.aclose()
    assert clock.elapsed == 5
    assert "the latest checklist could not be posted to fake: no response in time" in caplog.text


async def test_an_issue_that_is_not_there_is_not_asked_for_again(
    caplog,
):
    """After a final failure nothing is retried, and the unsent notices are reported at the end."""
    gone = ForgeError("there is no issue owner/repo#12", status=404, final=True)
    issue = Issue([gone] * 1_000)
    await carried_out(EVENTFUL, Notifier(issue), failing=2)
    assert len(issue.errors) == 999
    assert "there is no issue owner/repo#12" in caplog.text


class Choosy(Issue):
    """Does not take what has a word in it."""

    async def post(self, body: str) -> str:
        """Write a comment, or refuse it."""
        if "Which people?" in body:
            raise ForgeError("it does not take this text", status=422, final=True)
        return await super().post(body)


async def test_a_text_that_is_refused_keeps_no_other_away(expected, caplog):
    """A notice that a forge does not take is said to be missing at the end; all others are there."""
    issue = Choosy()
    await carried_out(EVENTFUL, Notifier(issue, edit_interval=0), failing=2)
    assert sorted(issue.titles()) == sorted(
        title for title in expected.titles() if "Clarification" not in title
    )
    assert "1 notice could not be posted to fake: it does not take this text" in caplog.text
