"""People steer a run below its issue: they answer what is unclear, give feedback, agree to what may do harm."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from replanning import StoreGate, Task, ToolSpec
from replanning.exporters._forge import ForgeError, Marker
from replanning.exporters.notices import Notifier
from replanning.journal import (
    MemoryStore,
    NoteAdded,
    QuestionAnswered,
    RecordBody,
    ReplanRequested,
)
from replanning.plan import RunId
from replanning.planning import Steering
from replanning.testing import FlakyStore, VirtualClock
from tests.support.forges import FakeForge, FakeGitHub, Fault, on
from tests.support.planning import TOOLS, Desk, Model, Replies, coordinator, go_on, replan

github = pytest.mark.parametrize("fake", [FakeGitHub], indirect=True)

UNCLEAR: Replies = {
    "decision:goal_understanding": (
        replan(
            "clarification_request",
            clarification_needed=True,
            clarification_questions=["To whom?"],
            assumptions_to_make=["to everybody"],
        ),
        go_on(),
    )
}
RISKY: Sequence[ToolSpec] = tuple(
    tool.model_copy(update={"dangerous": tool.name == "post"}) for tool in TOOLS
)
CLARIFY, DECIDE = "Clarification Needed", "Decision Needed"
STRANGER = "its author may not steer this project"


class Scene:
    """A run of planning mode with an issue, where people write when notices appear."""

    def __init__(
        self, fake: FakeForge, clock: VirtualClock, replies: Replies | None = None, **more: Any
    ) -> None:
        self.fake, self.clock, self.forge = fake, clock, on(fake, clock)
        self.desk, self.model, self.told = (
            more.pop("desk", None) or Desk(),
            Model(replies),
            list[str](),
        )
        exporters = [Notifier(on(fake, clock))] if more.pop("notifies", True) else []
        known = more.pop("known", ())
        given = {"gate": StoreGate(), "store": MemoryStore(), **more}
        self.planning = coordinator(self.model, clock, self.desk, exporters=exporters, **given)
        self.steering = Steering(
            self.planning, self.forge, handled=known, on_message=self.told.append
        )

    async def play(self, *script: str | tuple[str, str]) -> bool:
        """Take the goal to its end, while people wait for notices with these texts, and write: who, and what."""
        async with self.steered(*script):
            done = await self.planning.execute_with_planning("r")
            await self.planning.engine.aclose()
        return done

    @asynccontextmanager
    async def steered(self, *script: str | tuple[str, str]) -> AsyncIterator[None]:
        """People write, and are read."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.steering.listen)
            group.start_soon(self._write, script)
            yield
            group.cancel_scope.cancel()

    async def _write(self, script: Sequence[str | tuple[str, str]]) -> None:
        for step in script:
            if isinstance(step, str):
                while not any(step in body for body in self.fake.texts()):
                    await self.clock.sleep(1)
            else:
                author, text = step
                self.fake.says(author, text.replace("/", self.forge.command))

    def answers(self) -> list[tuple[str, str, str]]:
        """Return the answers to questions: verdict, author and comment."""
        found = [one for one in self.bodies() if isinstance(one, QuestionAnswered)]
        return [(one.verdict, one.by, one.comment) for one in found]

    def feedback(self) -> list[str]:
        """Return the feedback on the run; each is judged in a reflection."""
        said = [one for one in self.bodies() if isinstance(one, ReplanRequested)]
        notes = [one for one in self.planning.state.reflections if "feedback" in one]
        assert [one.by for one in said] == [note["by"] for note in notes]
        return [one.reason for one in said]

    def bodies(self) -> list[RecordBody]:
        """Return the records of the run."""
        return [record.body for record in self.planning.engine.store.read(RunId("r"))]

    def ignored(self) -> list[str]:
        """Return the recorded reasons for ignoring comments."""
        heard = [
            one.data for one in self.bodies() if isinstance(one, NoteAdded) and one.type == "heard"
        ]
        return [
            str(data["why"]) for data in heard if data["why"] != "they were written before the run"
        ]


@pytest.mark.parametrize("gate", [StoreGate(), None], ids=["waiting", "standing still"])
async def test_a_reply_is_the_answer(fake, clock, gate):
    """A reply to the notice is the answer to what is unclear: it is on record with its author, and the model gets it.

    The run goes on with it, also if it stands still because it has nobody to ask.
    """
    scene = Scene(fake, clock, UNCLEAR, gate=gate)
    assert await scene.play(CLARIFY, ("ada", "To the customers."))
    assert clock.elapsed < 60
    (answer,) = scene.answers()
    number = next(one["id"] for one in scene.fake.comments if one["body"] == "To the customers.")
    assert answer == ("approve", f"ada (comment {number})", "To the customers.")
    (clarified,) = scene.planning.state.clarified
    assert (clarified.questions, clarified.answer) == (("To whom?",), "To the customers.")
    assert scene.feedback() == []


@pytest.mark.parametrize(
    ("author", "text", "feedback", "ignored"),
    [
        *(
            (name, "To me.", [], [f"{name}: {STRANGER}"])
            for name in ("eve", "guest", "news[bot]", "project_5_bot")
        ),
        ("ada", "/replan with less", ["with less"], []),
        ("ada", "/approve", [], ["ada: the pending question needs an answer in words"]),
    ],
)
async def test_what_is_no_reply(fake, clock, *, author, text, feedback, ignored):
    """Strangers and commands answer nothing: `/replan` asks for a new plan; why else nothing counts is on record."""
    scene = Scene(fake, clock, UNCLEAR)
    assert await scene.play(CLARIFY, (author, text), ("ada", "To all."))
    assert [text for _, _, text in scene.answers()] == ["To all."]
    assert (scene.feedback(), scene.ignored()) == (feedback, ignored)
    assert not ignored or any(author in told and "is ignored" in told for told in scene.told)


async def test_nobody_replies(fake, clock):
    """Without a reply in time, the model's assumptions are used, and later comments are feedback."""
    scene = Scene(fake, clock, UNCLEAR)
    assert await scene.play()
    assert clock.elapsed >= 30 * 60
    assert scene.planning.state.clarified[0].assumptions[0] == "to everybody"


@github
async def test_only_after_the_notice(fake, clock):
    """A comment from before the notice is no answer: it is ignored if the request includes it, else feedback."""
    old = fake.says("ada", "It is urgent.")
    fake.says("ada", "By mail, please.")
    scene = Scene(fake, clock, UNCLEAR, known=[old])
    assert await scene.play(CLARIFY, ("bob", "To all."))
    assert [text for _, _, text in scene.answers()] == ["To all."]
    assert scene.feedback() == ["By mail, please."]


async def test_comments_are_feedback(fake, clock):
    """A comment of a person while the plan runs is a reflection: the model judges it, and the plan may change."""

    async def shout(task: Task) -> None:
        if task.tool == "write":
            fake.says("ada", "Shout it as well.")
            await clock.sleep(60)

    scene = Scene(
        fake,
        clock,
        {"decision:reflection": (replan("plan_revision"), go_on())},
        desk=Desk(before=shout),
    )
    await scene.play()
    assert scene.feedback() == ["Shout it as well."]
    (said,) = [one for one in scene.bodies() if isinstance(one, ReplanRequested)]
    assert said.by.startswith("ada (comment ")
    assert "decision:reflection" in scene.model.asked
    assert "revision" in scene.model.asked
    assert "ada has given feedback" in scene.told


async def test_a_review_is_feedback():
    """A review that requests changes, and what it says about lines, count like comments."""
    async with VirtualClock() as clock:
        fake = FakeGitHub(clock.now, pull=True)

        async def review(task: Task) -> None:
            if task.tool == "write":
                fake.lines("bob", "this is wrong", "news.md", 3)
                fake.reviewed("bob", "Not like this.", "CHANGES_REQUESTED")
                await clock.sleep(60)

        scene = Scene(fake, clock, desk=Desk(before=review))
        assert await scene.play()
    assert scene.feedback() == ["news.md:3: this is wrong", "Changes requested. Not like this."]


async def test_danger_takes_a_command(fake, clock):
    """Words do not approve of what may do harm, however much they agree; `/approve` of a member does."""
    scene = Scene(fake, clock, tools=RISKY)
    vague, clear = "Yes, I approve. Do it! /approve", "/approve it is fine"
    assert await scene.play(DECIDE, ("ada", vague), ("eve", "/approve"), ("ada", clear))
    ((verdict, by, text),) = scene.answers()
    assert (verdict, by.partition(" ")[0], text) == ("approve", "ada", "it is fine")
    assert ("post", "post") in scene.desk.used
    assert scene.ignored() == [f"eve: {STRANGER}"]
    assert any("eve" in told and "is ignored" in told for told in scene.told)


async def test_danger_is_rejected(fake, clock):
    """`/reject` leaves what may do harm undone."""
    scene = Scene(fake, clock, tools=RISKY)
    assert not await scene.play(DECIDE, ("ada", "/reject too risky"))
    assert [verdict for verdict, _, _ in scene.answers()][:1] == ["reject"]
    assert "post" not in [tool for _, tool in scene.desk.used]


@github
async def test_an_early_approval_counts_for_nothing(fake, clock):
    """`/approve` from before the question counts for nothing, also with its id; later it needs a notice or the number."""
    for early in ("/approve", "/approve r.q1"):
        fake.says("ada", early)
    await clock.sleep(5)
    scene = Scene(fake, clock, tools=RISKY, notifies=False)
    async with scene.steered(), anyio.create_task_group() as group:
        group.start_soon(scene.planning.execute_with_planning, "r")
        await clock.sleep(100)
        assert [question.id for question in scene.planning.engine.pending("r")] == ["r.q1"]
        fake.says("ada", "/approve")
        await clock.sleep(100)
        fake.says("ada", "/approve 2 it is fine")
        await clock.sleep(100)
        assert scene.answers() == []
        fake.says("ada", "/approve `1`:\nit is fine")
        await clock.sleep(100)
        assert [(verdict, text) for verdict, _, text in scene.answers()] == [
            ("approve", "it is fine")
        ]
    early, named, late, other = scene.ignored()
    assert early == late == "ada: no question was pending when it was written"
    assert (named, other) == tuple(
        f"ada: question {n} was not pending when it was written" for n in (1, 2)
    )


async def test_a_notice_is_known_by_its_mark(fake, forge, clock):
    """A comment that names a question is not its notice; only the marker makes it one."""
    scene = Scene(fake, clock, tools=RISKY, notifies=False)
    writing = forge
    async with anyio.create_task_group() as group:
        group.start_soon(scene.planning.execute_with_planning, "r")
        await clock.sleep(5)
        for kind_of, about in (("decided", "p1"), ("question", "r.q1")):
            assert scene.answers() == []
            await writing.post(f"About r.q1.\n\n{Marker(kind_of, 'r', about)}")
            fake.says("ada", f"{scene.forge.command}approve")
            await scene.steering.poll()
    assert [verdict for verdict, _, _ in scene.answers()] == ["approve"]
    assert scene.ignored() == ["ada: no question was pending when it was written"]


async def test_a_notice_that_was_deleted(fake, clock):
    """A question can still be decided after its notice is deleted."""
    scene = Scene(fake, clock, tools=RISKY)

    async def tidy() -> None:
        while not any("Decision Needed" in body for body in fake.texts()):
            await clock.sleep(1)
        await clock.sleep(30)
        fake.comments = [one for one in fake.comments if "Decision Needed" not in one["body"]]
        fake.says("ada", f"{scene.forge.command}approve")

    async with anyio.create_task_group() as group:
        group.start_soon(tidy)
        assert await scene.play()
    assert [verdict for verdict, _, _ in scene.answers()] == ["approve"]


@github
async def test_commands_of_others(fake, clock):
    """A command for another program is no feedback, and an empty comment says nothing."""
    scene = Scene(fake, clock, UNCLEAR)
    reply = "/usr/bin is full, so to nobody"
    assert await scene.play(CLARIFY, ("ada", "/deploy now"), ("ada", "  \n"), ("ada", reply))
    assert scene.ignored() == ["ada: its command is for another program", "ada: it is empty"]
    assert [text for _, _, text in scene.answers()] == [reply]


async def test_each_comment_once(fake, clock):
    """After a resume in another process, no comment counts again, whatever it was: answer, feedback, passed over."""
    store = MemoryStore()
    fake.says("ada", "before the run")

    async def comment(task: Task) -> None:
        fake.says("ada", "faster")
        fake.says("eve", "slower")
        await clock.sleep(60)
        scene.planning.run.pause("for the night")

    scene = Scene(
        fake, clock, UNCLEAR, store=store, desk=Desk(before=comment), known=["9000", "400"]
    )
    await scene.play(CLARIFY, ("ada", "To all."))
    again = Scene(fake, clock, store=store)
    assert await again.play()
    assert [text for _, _, text in again.answers()] == ["To all."]
    assert again.feedback() == ["faster"]
    assert again.ignored() == [f"eve: {STRANGER}"]
    assert again.told == []


async def test_what_was_quoted(fake, clock):
    """A command after a quotation counts, one within it does not."""
    scene = Scene(fake, clock, tools=RISKY)
    quoted, own = "> /approve\n>\n> or not?\n", "> carry it out?\r\n\r\n/approve certainly"
    assert await scene.play(DECIDE, ("ada", quoted), ("ada", own))
    assert [text for _, _, text in scene.answers()] == ["certainly"]
    assert scene.ignored() == ["ada: it is empty"]


@github
async def test_what_was_there_while_the_run_stood_still(fake, clock):
    """Comments that were there when a run stood still are on record as soon as it goes on, and do not count then."""
    scene = Scene(
        fake,
        clock,
        UNCLEAR,
        gate=None,
        notifies=False,
        desk=Desk(before=lambda task: clock.sleep(60)),
        known=None,
    )
    there = fake.says("ada", "before the run")
    async with anyio.create_task_group() as group:
        group.start_soon(scene.planning.execute_with_planning, "r")
        await clock.sleep(30)
        await scene.steering.poll()
        (question,) = scene.planning.engine.pending("r")
        scene.planning.engine.answer(question.id, "approve", comment="To all.")
        await clock.sleep(30)
        await scene.steering.poll()
    notes = [
        one.data["comments"]
        for one in scene.bodies()
        if isinstance(one, NoteAdded) and one.type == "heard"
    ]
    assert notes == [[there]]
    assert scene.feedback() == []


async def test_a_forge_that_fails_harms_nobody(fake, clock):
    """While the forge fails the run goes on; that is said once, and replies are read when it works again."""
    scene = Scene(fake, clock, UNCLEAR)
    scene.fake.faults = [Fault("GET", 500, path="comments") for _ in range(12)]
    scene.fake.faults += [Fault("GET", 500, path="notes") for _ in range(12)]
    assert await scene.play(CLARIFY, ("ada", "To all."))
    assert sum("cannot be read" in told for told in scene.told) == 1
    assert scene.planning.state.clarified[0].answer == "To all."


@github
async def test_a_store_that_fails_loses_no_reply(fake, clock):
    """A reply that the store does not take now is taken when it works again."""
    broken = anyio.Event()
    mended = anyio.Event()
    store = FlakyStore(
        fails=lambda operation, _: operation == "append" and broken.is_set() and not mended.is_set()
    )
    scene = Scene(fake, clock, UNCLEAR, store=store)

    async def break_it() -> None:
        while not any("Clarification Needed" in body for body in scene.fake.texts()):
            await clock.sleep(1)
        broken.set()
        scene.fake.says("ada", "To all.")
        await clock.sleep(40)
        mended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(break_it)
        assert await scene.play()
    assert [text for _, _, text in scene.answers()] == ["To all."]
    assert scene.ignored() == []


@github
@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (ForgeError("no such issue", final=True), 1),
        (ForgeError("later", retry_after=900), 2),
        (RuntimeError("hm"), 10),
    ],
)
async def test_how_often_is_asked(fake, clock, error, asked):
    """After a final failure polling stops; else it waits as long as the forge demands, or longer each time."""
    scene = Scene(fake, clock, UNCLEAR, notifies=False)
    looks: list[float] = []

    async def comments() -> Sequence[Any]:
        looks.append(clock.now())
        raise error

    scene.steering = Steering(
        scene.planning, SimpleNamespace(comments=comments), on_message=scene.told.append
    )
    assert await scene.play()
    assert len(looks) == asked
    text = str(error) if isinstance(error, ForgeError) else repr(error)
    assert scene.told == [f"comments cannot be read: {text}"]


@github
async def test_a_quiet_issue_costs_nothing(fake, clock):
    """Looking every few seconds at an issue where nobody writes costs one request each time, answered with 304."""
    scene = Scene(fake, clock, UNCLEAR, notifies=False)
    assert await scene.play()
    assert clock.elapsed == pytest.approx(1800, abs=60)
    looks = [one for one in fake.asked if one.path.endswith("/comments")]
    assert 170 < len(looks) < 190
    assert {one.status for one in looks[1:]} == {304}
