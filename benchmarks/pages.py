"""Cost of open pages for a run, and their delay after a record.

The run is in one process, the pages are served by another, and each open page is a reader of the
event stream in a third. A task only waits, a hundredth of a second, so that nothing hides what the
pages cost; eight wait at the same time. Runs with open pages and without take turns, since others
use the machine, too. The time is that of the processor in the process of the run; that of the clock
is beside it, and means something on a quiet machine.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread

import anyio
import anyio.to_thread
import httpx

from benchmarks.figures import machine, quiet
from replanning import Goal, Plan, ReplanningEngine, Task, TaskContext
from replanning.plan import JsonObject

PAGES = 10
TASKS = 2_000
WIDTH = 20
"""Tasks of a layer; each depends on one of the layer before."""

WORKERS = 8
SECONDS_OF_A_TASK = 0.01

SHOWN = 20
"""Number of records whose delay until a page shows them is measured."""

TOKEN = secrets.token_urlsafe()

_DONE = re.compile(r"(\d+) of \d+ tasks done")


@dataclass(frozen=True)
class Pages:
    """Figures of open pages: seconds, except where the name says otherwise.

    Attributes:
        tasks: of the large plan.
        cpu: of the process of a run without pages, and with them; medians.
        clock: likewise, by the clock.
        added: what pages add to the former, in percent; the median over pairs of runs.
        shown: after a record, until a page has it: median and highest, by the tasks of the plan.
        page: size of a page of the large plan, in bytes.
        event: size of what an open page gets after a record, in bytes; median.
    """

    where: str
    tasks: int
    cpu: tuple[float, float]
    clock: tuple[float, float]
    added: float
    shown: dict[int, tuple[float, float]]
    page: int
    event: int

    def table(self) -> str:
        """Return the figures as a table."""
        lines = [
            f"{PAGES} open pages; {self.where}",
            "",
            "| | without pages | with pages |",
            "|---|---|---|",
            f"| processor, a run of {self.tasks:,} tasks | {self.cpu[0]:.2f} s | {self.cpu[1]:.2f} s |",
            f"| clock | {self.clock[0]:.2f} s | {self.clock[1]:.2f} s |",
            "",
            f"Pages add {self.added:+.1f} % to the processor time of the run.",
        ]
        for tasks, (median, highest) in self.shown.items():
            lines.append(
                f"A record is shown after {median:.2f} s (highest {highest:.2f} s), {tasks:,} tasks."
            )
        lines.append(f"An open page gets {self.event:,} bytes, not the whole {self.page:,}.")
        return "\n".join(lines)

    def to_json(self) -> JsonObject:
        """Return the figures."""
        return asdict(self)


def measure(
    *, rounds: int = 7, tasks: int = TASKS, report: Callable[[str], None] = lambda line: None
) -> Pages:
    """Measure runs with open pages and without, in turn."""
    pairs: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for number in range(rounds):
        pair = without, with_pages = timed_run(tasks, 0), timed_run(tasks, PAGES)
        pairs.append(pair)
        report(f"round {number + 1}: {without[0]:.2f} s without, {with_pages[0]:.2f} s with pages")
    shown: dict[int, tuple[float, float]] = {}
    page = event = 0
    for count in (50, tasks):
        delays, page, event = anyio.run(timed_records, count)
        shown[count] = (statistics.median(delays), max(delays))
        report(f"{count} tasks: shown after {shown[count][0]:.2f} s")
    medians = [
        [statistics.median(pair[side][kind] for pair in pairs) for side in (0, 1)]
        for kind in (0, 1)
    ]
    added = statistics.median(100 * (after[0] / before[0] - 1) for before, after in pairs)
    cpu, clock = medians
    return Pages(
        machine(), tasks, (cpu[0], cpu[1]), (clock[0], clock[1]), added, shown, page, event
    )


def plan_of(count: int) -> Plan:
    """Return a plan of a number of tasks, in layers."""
    tasks: list[Task] = []
    for number in range(count):
        needs: list[str] = []
        if number >= WIDTH:
            needs.append(f"task-{number - WIDTH}")
        tasks.append(Task(id=f"task-{number}", tool="any", depends_on=needs))
    return Plan(goal=Goal(objective="Do many things"), tasks=tasks)


def timed_run(tasks: int, pages: int) -> tuple[float, float]:
    """Return the seconds of a run: of the processor in its process, and of the clock."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "runs.db"
        spawn = multiprocessing.get_context("spawn")
        with ExitStack() as stack:
            pool = stack.enter_context(ProcessPoolExecutor(1, mp_context=spawn))
            pool.submit(prepare, place).result()
            if pages:
                address = stack.enter_context(served(place))
                stack.enter_context(readers(f"{address}runs/timed/events", pages))
            return pool.submit(carry_out, place, tasks).result()


def prepare(place: Path) -> None:
    """Make a store with a short run, with which everything has been loaded once."""
    anyio.run(_carry_out, place, plan_of(WIDTH), "first")


def carry_out(place: Path, tasks: int) -> tuple[float, float]:
    """Carry out a run, and return its seconds."""
    plan = plan_of(tasks)
    with quiet():
        cpu = time.process_time()
        clock = time.perf_counter()
        anyio.run(_carry_out, place, plan, "timed")
        return time.process_time() - cpu, time.perf_counter() - clock


async def _carry_out(place: Path, plan: Plan, run_id: str) -> None:
    async def work(task: Task, context: TaskContext) -> None:
        await anyio.sleep(SECONDS_OF_A_TASK)

    engine = ReplanningEngine([], store=place)
    await engine.execute(plan, work, run_id=run_id, max_concurrency=WORKERS)
    await engine.aclose()


async def timed_records(tasks: int) -> tuple[list[float], int, int]:
    """Return how long records took until a page had them, and the sizes of a page and of an event."""
    delays: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "runs.db"
        await _carry_out(place, plan_of(WIDTH), "first")
        with served(place) as address, readers(f"{address}runs/timed/events", PAGES - 1):
            engine = ReplanningEngine([], store=place)
            async with engine.open(plan_of(tasks), run_id="timed") as run:
                page = _Page(f"{address}runs/timed/events")
                count = 0
                async for task in run.ready():
                    async with run.attempt(task):
                        pass
                    at = time.time()
                    count += 1
                    seen = await anyio.to_thread.run_sync(page.seen, count)
                    # The first ones may wait for the server to have read the journal.
                    if count > 2:
                        delays.append(seen - at)
                    if len(delays) == SHOWN:
                        break
                whole = await anyio.to_thread.run_sync(_get, f"{address}runs/timed")
                run.pause("that is enough")
            await engine.aclose()
    return delays, len(whole), int(statistics.median(page.sizes))


class _Page:
    """An open page, with when it got which number of finished tasks."""

    def __init__(self, address: str) -> None:
        self.sizes: list[int] = []
        self._times: dict[int, float] = {}
        self._news = Event()
        Thread(target=self._read, args=[address], daemon=True).start()

    def _read(self, address: str) -> None:
        while True:
            try:
                self._follow(address)
            except httpx.HTTPStatusError:
                time.sleep(0.1)  # the server has not seen the run yet
            except httpx.HTTPError:
                return  # it has ended

    def _follow(self, address: str) -> None:
        for line in _lines(address):
            if not line.startswith("data: "):
                continue
            at = time.time()
            head = json.loads(line.removeprefix("data: ")).get("head", "")
            found = _DONE.search(head)
            if found is not None:
                self.sizes.append(len(line))
                self._times.setdefault(int(found[1]), at)
                self._news.set()

    def seen(self, count: int) -> float:
        """Wait until so many finished tasks are shown, and return when they were."""
        while count not in self._times:
            self._news.wait(60)
            self._news.clear()
        return self._times[count]


@contextmanager
def served(place: Path) -> Iterator[str]:
    """Serve the pages of a store in a process of their own, and yield their address."""
    words = [sys.executable, "-u", "-m", "replanning", "view", "--port", "0", "--token", TOKEN]
    with subprocess.Popen(  # noqa: S603 - the program of this interpreter
        [*words, "--store", str(place)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        address = re.search(r"http://[^?]+", process.stdout.readline())
        assert address is not None
        try:
            yield address[0]
        finally:
            process.terminate()


@contextmanager
def readers(address: str, count: int) -> Iterator[None]:
    """Keep pages open: each follows its event stream, from when the run is there."""
    ended = Event()

    def read() -> None:
        while not ended.is_set():
            try:
                for _ in _lines(address):
                    if ended.is_set():
                        return
            except httpx.HTTPError:
                ended.wait(0.5)

    threads = [Thread(target=read, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()


def _lines(address: str) -> Iterator[str]:
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.stream("GET", address, headers=headers, timeout=60) as response:
        response.raise_for_status()
        yield from response.iter_lines()


def _get(address: str) -> bytes:
    headers = {"authorization": f"Bearer {TOKEN}"}
    return httpx.get(address, headers=headers, timeout=60).content
