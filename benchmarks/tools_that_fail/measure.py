"""Figures of the tools that fail: every agent with every kind of fault and without, and the cost of a call."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random

import anyio
from pydantic import TypeAdapter

from benchmarks.figures import machine, quiet
from benchmarks.tools_that_fail import agents, expectations
from benchmarks.tools_that_fail.agents import Agent
from benchmarks.tools_that_fail.faults import (
    LOST,
    Case,
    Play,
    cases,
    draw,
    needs_second_source,
    playing,
)
from benchmarks.tools_that_fail.shop import FILE, SOURCE, Conversation, Shop
from replanning import ToolSpec
from replanning.plan import JsonObject

SECOND_SOURCE = "silent, reads, only a second source shows it"
NOT_MADE = "silent, changes not made"
NOTHING_SHOWS = "silent, changes made, nothing shows it"

GROUPS = (
    "explicit, reads",
    "explicit, changes",
    "slow, reads",
    "silent, reads",
    SECOND_SOURCE,
    NOT_MADE,
    "silent, changes made",
    NOTHING_SHOWS,
    "slow, changes",
    LOST,
)
"""The rows of the table, in its order."""

SESSION = "session"
CONFIRMED = "session, second source"
SUGGESTED = "session, suggested"

HEADS = {
    "none": "no handling",
    "tenacity": "tenacity",
    "LangGraph's retries": "LangGraph's retries",
    "pydantic-ai's retries": "pydantic-ai's retries",
    SESSION: "session",
    "LangGraph, attached": "LangGraph, attached",
    "pydantic-ai, attached": "pydantic-ai, attached",
    SUGGESTED: "session, suggested",
    CONFIRMED: "session, second source",
}
"""The agents, and the columns of the table, in its order."""

EVERY = {"LangGraph": 12, "pydantic-ai": 12, SUGGESTED: 2, CONFIRMED: 2}
"""By the beginning of an agent's name, which conversations it has: one of so many."""

FURTHER_SEEDS = 2
"""How many more seeds the session is measured with, in every second conversation."""

COST_BAR = 0.2
"""Maximum overhead of an undisturbed call, in milliseconds."""

ROUNDS = 20
COST_EVERY = 4
"""How often each call is measured, and in which conversations: one of so many."""


@dataclass(frozen=True)
class Row:
    """Results of one agent with one kind of fault.

    Attributes:
        plays: conversations with such a fault.
        noticed: those in which it was noticed.
        right: those that left the database right.
        handled: those that were noticed and right, and in which no change was asked for again that
            had been made.
        sent_again: those in which a change was asked for again that had been made.
        applied_twice: those in which a change was made twice.
    """

    agent: str
    seed: int
    group: str
    kind: str
    passes: bool
    plays: int
    noticed: int
    right: int
    handled: int
    sent_again: int
    applied_twice: int


@dataclass(frozen=True)
class Undisturbed:
    """Conversations of one agent without failing tools.

    Attributes:
        plays: conversations.
        changed: those in which the agent heard, or the shop did, anything else than in the
            reference.
        calls: calls of the agent.
        executions: executions of tools.
    """

    agent: str
    plays: int
    changed: int
    calls: int
    executions: int


@dataclass(frozen=True)
class Cost:
    """Milliseconds that the session adds to an undisturbed call, as a median.

    Attributes:
        bare: of the call without the session.
        without: added where nothing is expected.
        by_hand: added with the expectations written by hand.
        suggested: added with those that are suggested.
    """

    bare: float
    without: float
    by_hand: float
    suggested: float


@dataclass(frozen=True)
class Bar:
    """What a figure should be, and its values by seed."""

    title: str
    values: list[str]
    bar: str
    met: bool


@dataclass(frozen=True)
class Report:
    """The figures, with the machine on which they were measured."""

    machine: str
    seed: int
    rows: tuple[Row, ...]
    undisturbed: tuple[Undisturbed, ...]
    cost: Cost
    skipped: tuple[str, ...] = ()

    def to_json(self) -> JsonObject:
        """Figures as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Report:
        """Read figures that `to_json` wrote."""
        return TypeAdapter(cls).validate_python(data)

    def share(self, agent: str, groups: Sequence[str], seed: int | None = None) -> float | None:
        """Return how many percent of some groups of faults an agent has handled; None without any."""
        some = self._rows(agent, groups, self.seed if seed is None else seed)
        plays = sum(row.plays for row in some)
        if not plays:
            return None
        return 100 * sum(row.handled for row in some) / plays

    def _rows(self, agent: str, groups: Sequence[str], seed: int) -> list[Row]:
        return [
            row
            for row in self.rows
            if row.agent == agent and row.group in groups and row.seed == seed
        ]

    @property
    def seeds(self) -> list[int]:
        """The seeds with which the session was measured."""
        return sorted({row.seed for row in self.rows})

    def table(self) -> str:
        """The figures as Markdown tables."""
        present = [name for name in HEADS if any(row.agent == name for row in self.rows)]
        lines = [f"Source: {SOURCE}. {self.machine}.", ""]
        heads = " | ".join(HEADS[name] for name in present)
        lines += [f"| faults handled | {heads} |", "|---|" + "---|" * len(present)]
        for group in GROUPS:
            cells = [_percent(self.share(name, [group])) for name in present]
            lines.append(f"| {group} | {' | '.join(cells)} |")
        lines.append("| | " + " | ".join("" for _ in present) + " |")
        for title, cell in (
            ("plays", self._plays),
            ("a change asked for again that was made", self._sent_again),
            ("changed of undisturbed conversations", self._changed),
            ("executions of their calls", self._executions),
        ):
            lines.append(f"| {title} | {' | '.join(map(cell, present))} |")
        lines += ["", *self._bar_lines(), "", *self._kind_lines()]
        return "\n".join([*lines, *(f"\n{line}" for line in self.skipped)])

    def _plays(self, agent: str) -> str:
        return str(sum(row.plays for row in self._rows(agent, GROUPS, self.seed)))

    def _sent_again(self, agent: str) -> str:
        return str(self._count(agent, GROUPS, self.seed, "sent_again"))

    def _count(self, agent: str, groups: Sequence[str], seed: int, field: str) -> int:
        return sum(getattr(row, field) for row in self._rows(agent, groups, seed))

    def _changed(self, agent: str) -> str:
        (found,) = [each for each in self.undisturbed if each.agent == agent]
        return f"{found.changed}/{found.plays}"

    def _executions(self, agent: str) -> str:
        (found,) = [each for each in self.undisturbed if each.agent == agent]
        return f"{found.executions} of {found.calls}"

    def bars(self) -> list[Bar]:
        """The bars of the session with expectations by hand."""
        found = []
        shares_of: tuple[tuple[str, tuple[str, ...], float], ...] = (
            ("explicit faults handled", ("explicit, reads", "explicit, changes"), 99),
            ("silent faults of reads handled, where the answer shows it", ("silent, reads",), 95),
            ("silent faults of changes handled, where nothing was done", (NOT_MADE,), 95),
        )
        for title, groups, least in shares_of:
            shares = [self.share(SESSION, groups, seed) or 0.0 for seed in self.seeds]
            values = [f"{share:.1f} %" for share in shares]
            found.append(Bar(title, values, f"≥ {least:g} %", min(shares) >= least))

        lost = [self._count(SESSION, [LOST], seed, "sent_again") for seed in self.seeds]
        title = "changes asked for again after their acknowledgement was lost"
        found.append(Bar(title, list(map(str, lost)), "0", not any(lost)))
        twice = [self._count(SESSION, GROUPS, seed, "applied_twice") for seed in self.seeds]
        title = "changes made twice, after any fault"
        found.append(Bar(title, list(map(str, twice)), "0", not any(twice)))

        (calm,) = [each for each in self.undisturbed if each.agent == SESSION]
        alarms = 100 * calm.changed / calm.plays
        title = "undisturbed conversations changed"
        found.append(Bar(title, [f"{alarms:.1f} %"], "≤ 1 %", alarms <= 1))
        cost = self.cost.by_hand
        title = "median added to an undisturbed call"
        found.append(Bar(title, [f"{cost:.2f} ms"], f"≤ {COST_BAR:g} ms", cost <= COST_BAR))
        return found

    def _bar_lines(self) -> list[str]:
        seeds = ", ".join(map(str, self.seeds))
        lines = [f"| session | by seed ({seeds}) | bar | met |", "|---|---|---|---|"]
        for bar in self.bars():
            verdict = "yes" if bar.met else "**no**"
            lines.append(f"| {bar.title} | {' / '.join(bar.values)} | {bar.bar} | {verdict} |")
        cost = self.cost
        lines.append(
            f"\nA bare call takes {cost.bare:.2f} ms as a median. The session adds {cost.without:.2f} ms where nothing is"
            f" expected, {cost.by_hand:.2f} ms with expectations by hand, and {cost.suggested:.2f} ms with suggested ones."
        )
        return lines

    def _kind_lines(self) -> list[str]:
        """The kinds of silent faults by themselves: noticed, and handled, by each way to state expectations."""
        columns = [SESSION, SUGGESTED, CONFIRMED]
        lines = [
            f"| silent faults: noticed / handled | {' | '.join(HEADS[each] for each in columns)} |",
            "|---|" + "---|" * len(columns),
        ]
        kinds = {
            (row.group, row.kind): None
            for row in self.rows
            if row.group.startswith("silent") and row.agent == SESSION
        }
        for group, kind in sorted(kinds, key=lambda each: GROUPS.index(each[0])):
            cells = []
            for agent in columns:
                some = [row for row in self._rows(agent, [group], self.seed) if row.kind == kind]
                plays = sum(row.plays for row in some)
                noticed = sum(row.noticed for row in some)
                handled = sum(row.handled for row in some)
                cells.append(f"{noticed} / {handled} of {plays}" if plays else "")
            lines.append(f"| {group}: {kind} | {' | '.join(cells)} |")
        return lines


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1f} %"


def measure(
    folder: Path,
    *,
    seed: int = 1,
    every: int = 1,
    report: Callable[[str], None] = lambda line: None,
) -> Report:
    """Let every agent have the conversations, undisturbed and with every kind of fault.

    Args:
        folder: where the data lies.
        seed: chooses the calls that fail, and how.
        every: one of so many conversations is had, beside the share of the agent.
        report: takes lines of progress.
    """
    shop = Shop(folder / FILE)
    # Each failure is a warning with a traceback, and thousands are wanted here.
    logging.getLogger("replanning").setLevel(logging.CRITICAL)
    return anyio.run(_measure, shop, seed, every, report)


async def _measure(shop: Shop, seed: int, every: int, report: Callable[[str], None]) -> Report:
    learned = await expectations.suggested(shop, shop.conversations[1::2])
    candidates, skipped = _agents(shop, learned)
    rows: list[Row] = []
    undisturbed = []
    for name, agent in candidates.items():
        step = every * next((each for start, each in EVERY.items() if name.startswith(start)), 1)
        some = shop.conversations[::step]
        undisturbed.append(await _play_undisturbed(shop, name, agent, some))
        began = time.perf_counter()
        rows += await _play(shop, name, agent, some, seed)
        if name == SESSION:
            for further in range(seed + 1, seed + 1 + FURTHER_SEEDS):
                rows += await _play(shop, name, agent, some[::2], further)
        report(f"{name}: {len(some)} conversations, {time.perf_counter() - began:.0f} s")
    cost = await _cost(shop, learned, shop.conversations[:: every * COST_EVERY])
    return Report(machine(), seed, tuple(rows), tuple(undisturbed), cost, tuple(skipped))


def _agents(shop: Shop, learned: Mapping[str, JsonObject]) -> tuple[dict[str, Agent], list[str]]:
    """Return the agents by name, and lines about those whose framework is not installed."""
    by_hand = expectations.by_hand()
    stated = expectations.fields_of(shop, by_hand)
    confirmed = expectations.with_second_source(shop, by_hand)
    suggested = expectations.fields_of(shop, learned)
    made: dict[str, Agent] = {"none": agents.Bare()}
    skipped = []
    frameworks: tuple[tuple[str, str, Callable[[], Agent]], ...] = (
        ("tenacity", "tenacity", agents.Tenacity),
        (
            "LangGraph's retries",
            "langchain",
            lambda: agents.tool_retry_agent(shop, shop.descriptions),
        ),
        (
            "pydantic-ai's retries",
            "pydantic_ai",
            lambda: agents.model_retry_agent(shop, shop.descriptions),
        ),
        ("LangGraph, attached", "langchain", lambda: agents.attached_langgraph(shop, stated)),
        (
            "pydantic-ai, attached",
            "pydantic_ai",
            lambda: agents.attached_pydantic_ai(shop, stated),
        ),
    )
    for name, module, make in frameworks:
        if find_spec(module) is None:
            skipped.append(f"{name} is left out: {module} is not installed")
        else:
            made[name] = make()
    made[SESSION] = agents.Session(shop, stated)
    made[SUGGESTED] = agents.Session(shop, suggested)
    made[CONFIRMED] = agents.Session(shop, confirmed)
    return made, skipped


async def _play_undisturbed(
    shop: Shop, name: str, agent: Agent, conversations: Sequence[Conversation]
) -> Undisturbed:
    changed = 0
    calls = 0
    executions = 0
    for conversation in conversations:
        play = Play(shop, conversation, None, Random(0))
        await agent.play(play)
        changed += not play.is_as_reference
        calls += len(conversation.steps)
        executions += play.executions
    return Undisturbed(name, len(conversations), changed, calls, executions)


async def _play(
    shop: Shop, name: str, agent: Agent, conversations: Sequence[Conversation], seed: int
) -> list[Row]:
    """Let an agent have conversations with every kind of fault."""
    counts: dict[tuple[str, str, bool], list[int]] = {}
    for case in cases():
        for conversation in conversations:
            fault = draw(shop, conversation, case, seed)
            if fault is None:
                continue
            chance = Random(f"{seed}/{conversation.number}/{case} answers")
            play = Play(shop, conversation, fault, chance)
            await agent.play(play)
            handled = play.noticed and play.is_right and not play.sent_again
            key = group_of(case, conversation, fault.step), case.kind, fault.passes
            found = (
                *(1, play.noticed, play.is_right, handled),
                *(play.sent_again > 0, play.applied_twice > 0),
            )
            known = counts.setdefault(key, [0] * len(found))
            for place, count in enumerate(found):
                known[place] += count
    return [Row(name, seed, *key, *each) for key, each in sorted(counts.items())]


def group_of(case: Case, conversation: Conversation, step: int) -> str:
    """Return the row of the table in which a fault at a step counts."""
    if not case.group.startswith("silent"):
        return case.group
    if not needs_second_source(case.kind, conversation.steps[step]):
        return case.group
    # Changes have no second tool that could be asked.
    return NOTHING_SHOWS if case.changing else SECOND_SOURCE


async def _cost(
    shop: Shop, learned: Mapping[str, JsonObject], conversations: Sequence[Conversation]
) -> Cost:
    """Return what a session adds to calls, each as fast as in the fastest of some rounds."""
    specs = [
        agents.Session(shop, expectations.fields_of(shop, expected)).specs
        for expected in ({}, expectations.by_hand(), learned)
    ]
    bare: list[float] = []
    added: list[list[float]] = [[] for _ in specs]
    with quiet():
        for conversation in conversations:
            fastest = [await _fastest(shop, conversation, each) for each in (None, *specs)]
            bare += fastest[0]
            for place, times in enumerate(fastest[1:]):
                added[place] += [
                    with_session - without
                    for with_session, without in zip(times, fastest[0], strict=True)
                ]
    return Cost(statistics.median(bare), *(statistics.median(times) for times in added))


async def _fastest(
    shop: Shop, conversation: Conversation, specs: Sequence[ToolSpec] | None
) -> list[float]:
    """Return the milliseconds of processor time of each call; without descriptions, of bare calls."""
    rounds = []
    for _ in range(ROUNDS):
        play = Play(shop, conversation, None, Random(0))
        playing.set(play)
        times: list[float] = []
        if specs is None:
            await agents.follow(play, _timed(play.execute, times))
        else:
            async with agents.impatient_engine().session("measure", tools=specs) as session:
                await agents.follow(play, _timed(agents.calls_of(session, play), times))
        rounds.append(times)
    return [min(each) for each in zip(*rounds, strict=True)]


def _timed(call: agents.Execute, times: list[float]) -> agents.Execute:
    async def timed(name: str, arguments: Mapping[str, object]) -> str:
        began = time.process_time()
        answer = await call(name, arguments)
        times.append(1000 * (time.process_time() - began))
        return answer

    return timed
