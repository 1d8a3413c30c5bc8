"""The exporter that shows runs on a terminal."""

import io
import sys
import threading

import anyio
import anyio.to_thread

from replanning import Environment, Plan, ReplanningEngine
from replanning.environment import SystemClock
from replanning.exporters.live import LiveExporter
from tests.support.runs import failing

PLAN = Plan.parse("{goal: {objective: Wait}, tasks: [{id: wait}]}")


class DrawingClock(SystemClock):
    """A clock that tells when a thread other than that of the run has asked for the time, to draw the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.drawing = threading.Event()

    def now(self) -> float:
        """Return the time."""
        if threading.get_ident() != self.thread:
            self.drawing.set()
        return super().now()


class Screen(io.StringIO):
    """A terminal on which writing the line with `a note` takes longer than it takes until the picture is drawn again."""

    def __init__(self, clock: DrawingClock) -> None:
        super().__init__()
        self.clock = clock
        self.drawn_meanwhile: list[bool] = []

    def isatty(self) -> bool:
        """Say that this is a terminal."""
        return True

    def write(self, text: str) -> int:
        """Write a text."""
        if "a note" in text and threading.get_ident() == self.clock.thread:
            self.clock.drawing.clear()
            self.drawn_meanwhile.append(self.clock.drawing.wait(0.4))
        return super().write(text)


async def test_lines_and_pictures_take_turns(monkeypatch):
    """The picture is not drawn anew while a line is written, or it would erase more or fewer lines than it has drawn."""
    monkeypatch.setenv("TERM", "xterm")
    clock = DrawingClock()
    screen = Screen(clock)
    monkeypatch.setattr(sys, "stderr", screen)
    exporter = LiveExporter()
    engine = ReplanningEngine([], exporters=[exporter], environment=Environment(clock=clock))
    async with engine.open(PLAN) as run:
        async for task in run.ready():
            async with run.attempt(task):
                assert await anyio.to_thread.run_sync(clock.drawing.wait, 5)
                exporter.show_note("•", "a note")
    await engine.aclose()
    assert screen.drawn_meanwhile == [False]


async def test_lists_are_told_as_what_they_are(monkeypatch):
    """A line tells how many elements a list has, and others which of them were left out of it."""
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    document = Plan.parse(
        """
        goal: {objective: Convert}
        tasks:
          - {id: convert, for_each: [a, b, c], when: index < 2, on_item_failure: skip}
        """
    )

    async def work(task, context):
        if task.id == "convert[1]":
            raise ValueError("it is broken")

    engine = ReplanningEngine([], exporters=[LiveExporter()])
    await engine.execute(document, work)
    await engine.aclose()
    lines = [line.partition("s ")[2] for line in screen.getvalue().splitlines()]
    assert "• convert: 3 elements" in lines
    assert "• left out of its list: convert[1]" in lines
    assert any(line.startswith("✓ convert[0] done in ") for line in lines)
    assert not any("for_each" in line or "edit" in line or "convert[2]" in line for line in lines)


async def test_capacity_that_grows_is_told_as_it_is(monkeypatch):
    """A line about a resource has its new capacity, whether that has grown or shrunk."""
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    document = Plan.parse(
        "{goal: {objective: Run}, resources: {cpu: 2}, tasks: [{id: t, resources: {cpu: 1}}]}"
    )

    async def work(task, context):
        context.change_resource("cpu", capacity=8, reason="a node came")
        context.change_resource("cpu", capacity=1)

    engine = ReplanningEngine([], exporters=[LiveExporter()])
    await engine.execute(document, work)
    await engine.aclose()
    told = [line.partition("s ")[2].strip() for line in screen.getvalue().splitlines()]
    assert "• cpu is at a capacity of 8: a node came" in told
    assert "• cpu is at a capacity of 1" in told


async def test_long_error_is_cut_between_words(monkeypatch):
    """The line about a failure has the beginning and the end of a long error, both of whole words."""
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    words = [f"word-{number}" for number in range(100)]

    async def work(task, context):
        raise ValueError(" ".join(words))

    engine = ReplanningEngine([], exporters=[LiveExporter()])
    await engine.execute(PLAN, work)
    await engine.aclose()
    told = " ".join(screen.getvalue().split()).partition("wait failed: ")[2]
    beginning, _, end = told.partition(" … ")
    end = end[: end.index("word-99") + len("word-99")]
    assert beginning.split() == words[: len(beginning.split())]
    assert end.split() == words[-len(end.split()) :]
    assert 250 < len(beginning) + len(end) <= 300


async def test_branch_that_is_left_out_is_told_with_its_condition(monkeypatch):
    """One line tells which tasks a condition leaves out, and another which task runs in any case."""
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    document = Plan.parse(
        """
        goal: {objective: Release}
        context: {go: false}
        tasks:
          - {id: deploy, when: context.go}
          - {id: smoke, depends_on: [deploy]}
          - {id: tell, depends_on: [smoke]}
          - {id: alone, when: context.go}
          - {id: build}
          - {id: down, depends_on: [build], run_if: always}
        """
    )
    engine = ReplanningEngine([], exporters=[LiveExporter()])
    await engine.execute(document, failing("build"))
    await engine.aclose()
    told = [line.partition("s ")[2].strip() for line in screen.getvalue().splitlines()]
    assert "↷ deploy skipped: its condition 'context.go' does not hold; with it smoke, tell" in told
    assert "↷ alone skipped: its condition 'context.go' does not hold" in told
    assert "• down runs anyway, although a dependency failed" in told
