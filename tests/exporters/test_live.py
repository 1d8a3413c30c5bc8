"""The exporter that shows runs on a terminal."""

import io
import sys
import threading

import anyio
import anyio.to_thread

from replanning import Environment, Plan, ReplanningEngine
from replanning.environment import SystemClock
from replanning.exporters.live import LiveExporter

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
