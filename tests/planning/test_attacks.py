"""Attacks on planning mode: what models, tools and strangers say does not get past people, limits and names."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from replanning import Answer, CallbackGate, Plan, Question, Settings, Task, ToolSpec
from replanning.config import load_settings
from replanning.decision import HumanGate
from replanning.errors import StoreError
from replanning.journal import MemoryStore
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.planning import PlanningCoordinator, PlanningHistoryStore
from replanning.testing import ScriptedGate, VirtualClock
from replanning.tools import ToolExecutor
from tests.exporters.test_forges_steering import Scene
from tests.support.forges import FakeGitHub, FakeGitLab, on
from tests.support.planning import TOOLS, Desk, Model, Replies, action, coordinator, go_on, replan, revision

pytestmark = pytest.mark.anyio

RISKY = (
    *TOOLS,
    ToolSpec(name="wipe", parameters={"text": "any"}, dangerous=True, timeout=60),
    ToolSpec(name="remove", parameters={"path": "string", "mode": "string"}, dangerous=True),
    ToolSpec(name="send", parameters={"text": "any", "to": "string"}),
)
WIPES: JsonObject = {"actions": [action("write", "write"), action("post", "wipe")]}
REMOVES: JsonObject = {
    "actions": [action("write", "write"), {"task_id": "post", "tool": "remove", "arguments": {"path": "old"}}]
}
UNCLEAR = go_on(clarification_needed=True, clarification_questions=["How?"])


class Bench(Desk):
    """Tools that record the arguments of each use, and hang a given number of times."""

    def __init__(self, clock: VirtualClock, *, hangs: int = 0, fails: int = 0) -> None:
        super().__init__({"wipe": [ValueError("no right to")] * fails})
        self.arguments: list[tuple[str, JsonObject]] = []
        self._clock, self._hangs = clock, hangs

    async def __call__(self, task: Task, context: object) -> JsonValue:
        """Use the tool of a task."""
        self.arguments.append((task.tool or "", dict(task.arguments)))
        if task.tool == "wipe" and self._hangs:
            self._hangs -= 1
            await self._clock.sleep(1e6)
        return await super().__call__(task, context)


async def attacked(
    replies: Replies, *verdicts: str, hangs: int = 0, fails: int = 0
) -> tuple[PlanningCoordinator, Bench, list[str]]:
    """Execute the usual goal with these replies; return the coordinator and the questions to people."""

    async def run(clock: VirtualClock, gate: ScriptedGate | None) -> tuple[PlanningCoordinator, Bench]:
        bench = Bench(clock, hangs=hangs, fails=fails)
        person: HumanGate | None = gate
        planning = coordinator(Model(replies), clock, bench, tools=RISKY, gate=person, settings=Settings())
        await planning.execute_with_planning()
        return planning, bench

    answers = [Answer("approve" if verdict == "approve" else "reject", by="ada") for verdict in verdicts]
    async with VirtualClock() as clock:
        gate = ScriptedGate(answers, clock=clock) if verdicts else None
        planning, bench = await run(clock, gate)
    asked = [question.text for question in gate.questions] if gate is not None else []
    return planning, bench, asked


def used(bench: Bench) -> list[str]:
    """Return the used tools, in order."""
    return [tool for tool, _ in bench.arguments]


# J39: what may do harm takes a person who was told of it


async def test_declining_a_replan_approves_nothing_dangerous() -> None:
    """A person who declines a replan keeps the plan, and is still asked about the dangerous tools in it."""
    unsure = replan("action_regeneration", confidence=0.4)
    replies: Replies = {"action_sequence": WIPES, "decision:action_sequence": (unsure, go_on())}
    planning, bench, asked = await attacked(replies, "reject", "reject")
    assert "wipe" not in used(bench)
    assert ["replan?" in asked[0], "may do harm" in asked[1]] == [True, True]
    _, bench, asked = await attacked(replies, "reject", "approve")
    assert (used(bench), len(asked)) == (["write", "wipe"], 2)
    assert planning.result.status != "succeeded"


async def test_people_see_the_arguments_that_they_approve() -> None:
    """The question about a plan with dangerous tools shows their arguments."""
    _, _, (asked,) = await attacked({"action_sequence": WIPES}, "approve")
    assert 'wipe {"text": "news"}' in asked


async def test_people_see_every_action_that_they_approve() -> None:
    """The question about a plan with dangerous tools shows its other actions too, truncated where they are long."""
    long = action("write", "write", arguments={"text": "x" * 900})
    harmful = action("post", "wipe", fallback_strategy="use write")
    _, _, (asked,) = await attacked({"action_sequence": {"actions": [long, harmful]}}, "approve")
    _, first, second = asked.splitlines()
    assert first.startswith('  1. write: write {"text": "xxx')
    assert first.endswith("x [… 712 characters more]")
    assert second == '  2. post: wipe {"text": "news"} (may do harm), else use write'


async def test_arguments_chosen_later_need_approval() -> None:
    """Arguments of a dangerous tool that the model chooses at execution need approval, and are used then."""
    call = {"current_task": "post", "function_call": {"name": "remove", "arguments": {"mode": "all"}}}
    replies: Replies = {"action_sequence": REMOVES, "execution": call}
    planning, bench, asked = await attacked(replies, "approve", "reject")
    assert used(bench) == ["write"]
    assert '"mode": "all"' in asked[1]
    assert planning.result.status != "succeeded"
    planning, bench, asked = await attacked(replies, "approve", "approve")
    assert bench.arguments[1:] == [("remove", {"path": "old", "mode": "all"})]
    assert (planning.result.status, len(asked)) == ("succeeded", 2)


async def test_dangerous_fallbacks_wait_without_a_gate() -> None:
    """Without a gate, the question about arguments of a dangerous fallback is kept, and the fallback is not used."""
    first = action("write", "write", fallback_strategy="use remove")
    call = {"current_task": "x", "function_call": {"name": "remove", "arguments": {"path": "/", "mode": "all"}}}
    planning, bench, _ = await attacked({"action_sequence": {"actions": [first, action("post", "post")]}})
    assert (planning.result.status, used(bench)) == ("needs_human", [])
    assert call["function_call"]


async def test_planned_arguments_are_not_exchanged_later() -> None:
    """A model that chooses missing arguments cannot exchange planned ones."""
    planned: JsonObject = {"task_id": "post", "tool": "send", "arguments": {"text": "${write.output}"}}
    call = {"current_task": "post", "function_call": {"name": "send", "arguments": {"text": "spam", "to": "ada"}}}
    replies: Replies = {"action_sequence": {"actions": [action("write", "write"), planned]}, "execution": call}
    _, bench, _ = await attacked(replies)
    assert bench.arguments[1:] == [("send", {"text": "news", "to": "ada"})]


async def test_arguments_of_the_wrong_kind_are_sent_back() -> None:
    """Arguments that the model chooses at execution are checked against the parameters of the tool."""
    planned: JsonObject = {"task_id": "post", "tool": "send", "arguments": {"text": "news"}}
    wrong = {"current_task": "post", "function_call": {"name": "send", "arguments": {"to": ["x"], "more": 3}}}
    right = {"current_task": "post", "function_call": {"name": "send", "arguments": {"to": "ada"}}}
    plan: JsonObject = {"actions": [action("write", "write"), planned]}
    _, bench, _ = await attacked({"action_sequence": plan, "execution": (wrong, right)})
    assert bench.arguments[1:] == [("send", {"text": "news", "to": "ada"})]


@pytest.mark.parametrize(("hangs", "fails", "told"), [(1, 0, "cut off"), (0, 1, "may do harm")])
async def test_a_free_text_answer_repeats_nothing_dangerous(hangs: int, fails: int, told: str) -> None:
    """A question about an interrupted or dangerous action needs approval, and says so."""
    replies: Replies = {"action_sequence": WIPES, "decision:execution": UNCLEAR}
    planning, bench, asked = await attacked(replies, "approve", "approve", hangs=hangs, fails=fails)
    assert "How?" in asked[1]
    assert told in asked[1]
    assert told in planning.state.held["post"].risk
    assert used(bench) == ["write", "wipe", "wipe"]


async def test_comments_repeat_nothing_dangerous() -> None:
    """A free-text answer does not repeat a dangerous action; `/approve` of a member does, with its text."""
    async with VirtualClock() as clock:
        bench = Bench(clock, fails=1)
        replies: Replies = {"action_sequence": WIPES, "decision:execution": UNCLEAR}
        scene = Scene(FakeGitHub(clock.now), clock, replies, tools=RISKY, work=bench)
        script = [
            ("Decision Needed", "ada", "/approve"),
            ("which may do harm", "ada", "Just do it again!"),
            ("Just do it again!", "ada", "/approve but gently"),
        ]
        assert await scene.play(*script)
    assert [text for _, _, text in scene.answers()] == ["", "but gently"]
    assert scene.feedback() == ["Just do it again!"]
    assert used(bench) == ["write", "wipe", "wipe"]


async def test_a_tool_that_was_taken_away_is_not_used() -> None:
    """A run that is resumed with fewer tools uses none of the removed ones: the model plans something else."""
    store = MemoryStore()
    replies: Replies = {
        "decision:execution": (replan("partial_replan"), go_on()),
        "revision": revision(action("post", "shout")),
    }
    async with VirtualClock() as clock:
        await coordinator(Model(), clock, Desk(), store=store).plan_actions("r")
        left = [tool for tool in TOOLS if tool.name != "post"]
        desk = Desk()
        planning = coordinator(Model(replies), clock, desk, store=store, tools=left)
        assert await planning.execute_with_planning("r")
    assert [tool for _, tool in desk.used] == ["write", "shout"]


async def test_a_tool_that_has_become_dangerous_is_asked_about() -> None:
    """A tool that is declared dangerous after the plan was made needs approval when the run is resumed."""
    store = MemoryStore()
    async with VirtualClock() as clock:
        await coordinator(Model(), clock, Desk(), store=store).plan_actions("r")
        tools = [tool.model_copy(update={"dangerous": tool.name == "post"}) for tool in TOOLS]
        gate = ScriptedGate([Answer("approve", by="ada")], clock=clock)
        alone, asked = Desk(), Desk()
        assert not await coordinator(Model(), clock, alone, store=store, tools=tools).execute_with_planning("r")
        assert [tool for _, tool in alone.used] == ["write"]
        assert await coordinator(Model(), clock, asked, store=store, tools=tools, gate=gate).execute_with_planning("r")
    assert [tool for _, tool in asked.used] == ["post"]
    assert 'post {"text": "news"}' in gate.questions[0].text


async def test_feedback_supersedes_an_open_question() -> None:
    """Feedback on a plan that waits for approval replaces it: the approval is for the new plan, and is asked once."""
    other: JsonObject = {"actions": [action("write", "write"), action("post", "wipe", arguments={"text": "less"})]}
    replies: Replies = {"action_sequence": (WIPES, other), "decision:reflection": (replan("plan_revision"), go_on())}
    asked: list[str] = []
    async with VirtualClock() as clock:
        bench = Bench(clock)

        async def ask(question: Question) -> Answer:
            asked.append(question.text)
            if len(asked) == 1 and planning.run is not None:
                planning.run.request_replan("with less, please", by="eve")
                await clock.sleep(5)
            return Answer("approve", by="ada")

        planning = coordinator(Model(replies), clock, bench, tools=RISKY, gate=CallbackGate(ask))
        assert await planning.execute_with_planning()
    assert ['wipe {"text": "news"}' in text for text in asked] == [True, False]
    assert bench.arguments == [("write", {"text": "news"}), ("wipe", {"text": "less"})]


async def test_a_question_stays_answerable_whatever_else_is_replanned() -> None:
    """If another action fails and is replanned while a person is asked about a plan, that question stays answerable."""
    apart: JsonObject = {"subtasks": [{"id": "write", "description": "Write"}, {"id": "post", "description": "Post"}]}
    causes = (replan("partial_replan", issues_found=["one"]), replan("partial_replan", issues_found=["another"]))
    replies: Replies = {
        "task_decomposition": apart,
        "action_sequence": {"actions": [action("write", "write"), action("post", "post")]},
        "decision:execution": (*causes, go_on()),
        "revision": (revision(action("more", "wipe")), revision(action("most", "shout"))),
    }
    asked: list[str] = []
    async with VirtualClock() as clock:

        async def ask(question: Question) -> Answer:
            asked.append(question.rejection_reason)
            await clock.sleep(100)
            return Answer("approve", by="ada")

        class Late(Desk):
            async def __call__(self, task: Task, context: object) -> JsonValue:
                await clock.sleep(10 if task.tool == "post" else 0)
                return await super().__call__(task, context)

        desk = Late({"write": [ValueError("no ink")], "post": [ValueError("no stamps")]})
        planning = coordinator(Model(replies), clock, desk, tools=RISKY, gate=CallbackGate(ask))
        await planning.execute_with_planning()
    assert set(asked) == {""}
    assert planning.result.status == "succeeded"


# Names


async def test_a_subtask_called_like_a_later_plan() -> None:
    """Subtasks with names like those of a later plan do not prevent that plan."""
    names: JsonObject = {
        "subtasks": [
            {"id": "v2.write", "description": "Write it"},
            {"id": "write", "description": "Write it again", "dependencies": ["v2.write"]},
        ]
    }
    replies: Replies = {
        "task_decomposition": names,
        "action_sequence": {"actions": [action("v2.write", "write"), action("write", "wipe")]},
        "decision:execution": (replan("partial_replan"), go_on()),
        "revision": revision(action("write", "post")),
    }
    planning, bench, _ = await attacked(replies, "approve", fails=1)
    assert (planning.result.status, used(bench)) == ("succeeded", ["write", "wipe", "post"])


# What strangers write


@pytest.mark.parametrize("kind", [FakeGitHub, FakeGitLab])
@pytest.mark.parametrize("title", ["a bell\x07 and \x1b[31mred", "half a \ud83d character", "nothing\x00"])
async def test_titles_with_invalid_characters(
    kind: type[FakeGitHub | FakeGitLab], title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An issue with control characters or lone surrogates in its title and text is handled like any other."""
    async with VirtualClock() as clock:
        fake = kind(clock.now)
        about = {path: _told(said, title) for path, said in fake._about().items()}  # what it answers
        monkeypatch.setattr(fake, "_about", lambda: about)
        fake.says("eve", title)
        request = await on(fake, clock).issue()
        planning = coordinator(Model(), clock, Desk(), task=request)
        assert await planning.execute_with_planning()
    assert request.goal.objective.startswith("Resolve ")


def _told(said: Any, title: str) -> Any:
    """Return a response with another title and text."""
    if not isinstance(said, dict) or "title" not in said:
        return said
    return {**said, "title": title, **{name: title for name in ("body", "description") if name in said}}


def test_a_pipe_in_place_of_a_file(tmp_path: Path) -> None:
    """A pipe in place of a task's file is reported without waiting for it."""
    os.mkfifo(tmp_path / "run-1.jsonl")
    store = PlanningHistoryStore(tmp_path, task_uuid="run-1", issue_id="octo/repo#12")
    with pytest.raises(StoreError, match="not a regular file"):
        store.save_plan({"actions": []})


async def test_truncation_leaves_no_half_secret() -> None:
    """The last output of an MCP server is truncated so that no part of a secret is left at its start."""
    said = "import sys; sys.stderr.write('KEY=opensesame-and-more ' * 5_000)"
    server = {"command": [sys.executable, "-c", said], "env": {"KEY": "{env:KEY}"}}
    plan = Plan.model_validate({"goal": {"objective": ""}, "mcp": {"flood": server}})
    async with ToolExecutor(plan, environ={**os.environ, "KEY": "opensesame-and-more"}) as execute:
        await execute.discover(plan)
        (reason,) = execute.unavailable_servers.values()
    assert "KEY=[redacted]" in reason
    assert not re.search("opensesame|sesame|and-more", reason)


def test_a_server_that_trickles_headers() -> None:
    """A server whose headers never end is given up after the configured timeout, with a warning."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        over = threading.Event()

        def trickle() -> None:
            line, _ = listening.accept()
            with line, suppress(OSError):
                line.sendall(b"HTTP/1.1 200 OK\r\nx: ")
                while not over.wait(0.05):
                    line.sendall(b"a")

        server = threading.Thread(target=trickle)
        server.start()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        try:
            said: JsonObject = {"override.url": address, "override.timeout": 0.2}
            (warning,) = load_settings(environ={}, arguments=said).warnings
        finally:
            over.set()
            server.join()
    assert "did not answer within 0.2 s" in warning.message
