"""Watchdog: warns of work that blocks the event loop, while it blocks."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from replanning.journal.store import RunStore
from replanning.plan.messages import format_duration, join_names
from replanning.run.attempt import Attempt
from replanning.run.event_loop import LoopThread
from replanning.run.lifecycle import Lifecycle

BLOCKED_SECONDS: Final = 1.0
"""Seconds without an answer after which an event loop counts as blocked."""

_TICK_SECONDS: Final = 0.25
"""Seconds between two checks of the event loops."""

_ADVICE: Final = "run what blocks with `await anyio.to_thread.run_sync(…)`"

_LIBRARIES: Final = str(Path(threading.__file__).parent)
"""The folder of the modules that come with Python."""

_UNKNOWN_PLACE: Final = "an unknown place"

_log = logging.getLogger("replanning")


@dataclass(slots=True, eq=False)
class _WatchedLoop:
    """An event loop with open runs, and whether it answers.

    Attributes:
        loop: the loop.
        now: the clock for the time without an answer, in seconds.
        thread: the thread that ran it last.
        lives: the open runs.
        asked_at: the time of its unanswered question; None if there is none.
        culprit: the cause named in the warning; empty unless it is blocked.
    """

    loop: LoopThread
    now: Callable[[], float]
    thread: int
    lives: set[Lifecycle] = field(default_factory=set)
    asked_at: float | None = None
    culprit: str = ""

    def answer(self) -> None:
        """Show that the loop is running; called in the loop."""
        if self.culprit and self.asked_at is not None:
            seconds = self.now() - self.asked_at
            text = "the event loop continues: %s has blocked it for %.1f s"
            _log.warning(text, self.culprit, seconds)
        self.thread = threading.get_ident()
        self.culprit = ""
        self.asked_at = None

    def look(self) -> None:
        """Ask the loop for an answer, or warn if it has been silent for too long."""
        now = self.now()
        if self.asked_at is None:
            self.asked_at = now
            self.loop.call_soon(self.answer)
            return
        seconds = now - self.asked_at
        if seconds < BLOCKED_SECONDS or self.culprit:
            # Many short tasks that never wait may run without giving others a turn.
            for life in list(self.lives):
                life.dispatcher.ask_for_turn()
            return
        store = _waited_for_store(self.thread)
        if store is not None:
            # It is not the fault of the running task: a database is slow, or gone.
            self.culprit = f"the {type(store).__name__}, which does not answer,"
            _log.warning("%s has blocked the event loop for %.1f s", self.culprit, seconds)
            return
        attempt, place = _find_blocker(self.thread)
        consequence = "no other task, deadline or answer gets a turn meanwhile"
        if attempt is None:
            self.culprit = f"code at {place}{self._running_tasks()}"
        else:
            self.culprit = f"task {attempt.task.id!r}, at {place},"
            timeout = attempt.run.live.entry(attempt.task.id).log.time_limit
            if timeout is not None:
                consequence += f", and its timeout of {format_duration(timeout)} cannot fire"
        text = "%s has blocked the event loop for %.1f s: %s; %s"
        _log.warning(text, self.culprit, seconds, consequence, _ADVICE)

    def _running_tasks(self) -> str:
        """Return a clause that names the running tasks; empty if there are none."""
        running: list[str] = []
        for life in list(self.lives):
            for entry, _ in list(life.attempts.running.values()):
                running.append(repr(entry.id))
        if not running:
            return ""
        return f", maybe that of task {join_names(running, 5)},"


@dataclass(slots=True, repr=False, eq=False)
class LoopWatchdog:
    """Checks the event loops of all runs of this process, from one thread.

    A blocked loop cannot report itself, and its work may never return. The thread ends soon after
    the last run was left.

    Args:
        now: a clock in seconds that any thread may read, unlike those of runs.
    """

    now: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _loops: dict[object, _WatchedLoop] = field(default_factory=dict)
    _thread: threading.Thread | None = None

    def add(self, life: Lifecycle) -> None:
        """Start watching the event loop of a run; call it in that loop."""
        with self._lock:
            key = life.loop.native
            if key not in self._loops:
                thread = threading.get_ident()
                self._loops[key] = _WatchedLoop(life.loop, self.now, thread)
            self._loops[key].lives.add(life)
            # A forked process has this object, but not its thread.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()

    def discard(self, life: Lifecycle) -> None:
        """Stop watching the event loop of a run, unless others are open in it."""
        with self._lock:
            loop = self._loops.get(life.loop.native)
            if loop is not None:
                loop.lives.discard(life)
                if not loop.lives:
                    del self._loops[life.loop.native]

    def _watch(self) -> None:
        pause = threading.Event()
        while True:
            with self._lock:
                loops = list(self._loops.values())
                if not loops:
                    self._thread = None
                    return
            # Without the lock, because a log handler may wait for a loop.
            for loop in loops:
                loop.look()
            pause.wait(_TICK_SECONDS)


WATCHDOG: Final = LoopWatchdog()
"""The watchdog of this process."""


def _waited_for_store(thread: int) -> RunStore | None:
    """Return the store that a thread waits for; None if it is not waiting for one."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        store = frame.f_locals.get("self")
        if isinstance(store, RunStore):
            return store
        frame = frame.f_back
    return None


def _find_blocker(thread: int) -> tuple[Attempt | None, str]:
    """Return the attempt whose body a thread executes, and its current position.

    Workers, sessions and hand-written loops hold the attempt in a variable, around its body.
    """
    places: list[str] = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        # The innermost frame is no help: waiting in a lock says nothing about the program's own
        # code.
        if not code.co_filename.startswith(_LIBRARIES) and "site-packages" not in code.co_filename:
            places.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}")
        for value in list(frame.f_locals.values()):
            if isinstance(value, Attempt) and _is_running(value):
                return value, next(iter(places), _UNKNOWN_PLACE)
        frame = frame.f_back
    return None, next(iter(places), _UNKNOWN_PLACE)


def _is_running(attempt: Attempt) -> bool:
    running = attempt.run._lifecycle.attempts.running
    return attempt.id in running and running[attempt.id][1] is attempt
