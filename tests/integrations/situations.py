"""Situations of agents: each is a promise that holds for every integration, beside the framework alone.

The docstring of a situation is its row in the table of `docs/integrations/situations.md`.
`python -m tests.integrations.situations` writes the table.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 # the frameworks run on it alone
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from replanning import Answer, ReplanningEngine
from replanning.journal import AttemptSucceeded, MemoryStore, TriggerFired
from replanning.testing import ScriptedGate
from tests.integrations.drivers import (
    INTEGRATIONS,
    Call,
    Driver,
    Fake,
    Outcome,
    Paused,
    Reported,
    Stated,
    cut_off,
)
from tests.support.runs import make_engine

Situation = Callable[[type[Driver]], Awaitable[None]]

SITUATIONS: Final[list[Situation]] = []

PAGE: Final = Path(__file__).parents[2] / "docs" / "integrations" / "situations.md"

WEB: Final[Stated] = {"search": "web", "archive": "web"}
SEARCH: Final = [Call("search")]


def situation(function: Situation) -> Situation:
    """Add a situation to the table."""
    SITUATIONS.append(function)
    return function


def engine_of(**options: Any) -> ReplanningEngine:
    """Return an engine that repairs, and loses no time before it tries a call again."""
    return make_engine("repair", retry={"delay": 0}, **options)


def found(query: str) -> str:
    """Find something."""
    return f"{query}, found"


def archived(query: str) -> str:
    """Find something elsewhere."""
    return f"{query}, from the archive"


def raising(*errors: Exception | None) -> Callable[[str], str]:
    """Return the body of a tool that raises these, one after the other, the last for good; None is a success."""
    left = list(errors)

    def body(query: str) -> str:
        error = left.pop(0) if len(left) > 1 else left[0]
        if error is not None:
            raise error
        return found(query)

    return body


async def hang(query: str) -> str:
    """Never end."""
    await asyncio.get_running_loop().create_future()
    return query


async def play(
    driver: type[Driver],
    tools: Sequence[Fake],
    *messages: Sequence[Call],
    engine: ReplanningEngine | None = None,
    stated: Stated = WEB,
    stream: bool = False,
    **options: Any,
) -> Outcome:
    """Run an agent once, attached where there is an engine."""
    names = {each.name for each in tools}
    stated = {name: stated[name] for name in stated if name in names}
    async with driver(tools, engine, stated, **options) as agent:
        return await agent.run(*messages, stream=stream)


def executions(*tools: Fake) -> list[int]:
    """Return how often each tool was executed."""
    return [len(each.executed) for each in tools]


def assert_nobody_was_asked(engine: ReplanningEngine, outcome: Outcome) -> None:
    """Check that a question neither is open nor is told to those who cannot answer it."""
    assert engine.pending() == []
    assert outcome.waiting is None
    assert "a person must answer" not in f"{outcome.end} {outcome.told}"


def recorded(engine: ReplanningEngine) -> list[Any]:
    """Return what the journals of an engine say."""
    return [record.body for run in engine.store.runs() for record in engine.store.read(run.run)]


async def compare(
    driver: type[Driver],
    make_tools: Callable[[], list[Fake]],
    *messages: Sequence[Call],
    engine: ReplanningEngine | None = None,
    **options: Any,
) -> Outcome:
    """Run an agent alone and attached: ends, results, events and executions are the same."""
    alone_tools = make_tools()
    alone = await play(driver, alone_tools, *messages, **options)
    tools = make_tools()
    attached = await play(driver, tools, *messages, engine=engine or engine_of(), **options)
    assert attached == alone
    assert executions(*tools) == executions(*alone_tools)
    return alone


@situation
async def nothing_fails(driver: type[Driver]) -> None:
    """Nothing fails: answer, results and executions are those without an engine."""
    messages = [Call("search", "a"), Call("archive", "b")], [Call("search", "c")]

    def make() -> list[Fake]:
        return [Fake("search", found), Fake("archive", archived)]

    alone = await compare(driver, make, *messages)
    assert alone.told == ["a, found", "b, from the archive", "c, found"]


@situation
async def events(driver: type[Driver]) -> None:
    """Streams, hooks and spans are those without an engine."""
    alone = await compare(driver, lambda: [Fake("search", found)], SEARCH, stream=True)
    assert len(alone.events) > 1


@situation
async def recorded_results(driver: type[Driver]) -> None:
    """The journal has the arguments and the results of the calls."""
    engine = engine_of()
    await play(driver, [Fake("search", found)], SEARCH, engine=engine)
    outputs = [str(each.output) for each in recorded(engine) if isinstance(each, AttemptSucceeded)]
    assert any("x, found" in output for output in outputs)


@situation
async def stand_in(driver: type[Driver]) -> None:
    """A tool fails for good: another of its capability is executed, and the model sees its result."""
    tools = [Fake("search", raising(PermissionError("no key"))), Fake("archive", archived)]
    outcome = await play(driver, tools, SEARCH, engine=engine_of())
    assert (outcome.end, outcome.told) == ("done", ["x, from the archive"])
    assert executions(*tools) == [1, 1]


@situation
async def no_stand_in(driver: type[Driver]) -> None:
    """No tool can stand in: the framework sees the tool's own exception, and does what it always does."""
    await compare(driver, lambda: [Fake("search", raising(PermissionError("no key")))], SEARCH)


@situation
async def unexpected(driver: type[Driver]) -> None:
    """A result breaks the `expect` of its tool: another tool is executed; if there is none, the model sees the result as it would without an engine."""

    def make() -> list[Fake]:
        return [Fake("search", lambda query: "Error: no page"), Fake("archive", archived)]

    stated: Stated = {
        "search": {"capability": "web", "effect": "none", "expect": {"errors": ["Error"]}},
        "archive": "web",
    }
    tools = make()
    outcome = await play(driver, tools, SEARCH, engine=engine_of(), stated=stated)
    assert outcome.told == ["x, from the archive"]
    assert executions(*tools) == [1, 1]
    engine = engine_of()
    await compare(driver, lambda: make()[:1], SEARCH, engine=engine, stated=stated)
    assert any(isinstance(body, TriggerFired) for body in recorded(engine))


@situation
async def second_source(driver: type[Driver]) -> None:
    """A second tool must agree (`agrees_with`): it is executed with the same arguments, and if it disagrees, the model sees that."""
    stated: Stated = {
        "search": {"capability": "web", "effect": "none", "expect": {"agrees_with": "archive"}},
        "archive": {"capability": "web", "effect": "none"},
    }
    for body, told, times in ((found, "x, found", 1), (archived, "x, from the archive", 2)):
        tools = [Fake("search", found), Fake("archive", body)]
        outcome = await play(driver, tools, SEARCH, engine=engine_of(), stated=stated)
        assert (outcome.end, outcome.told) == ("done", [told])
        assert executions(*tools) == [1, times]
        assert tools[1].executed == ["x"] * times


@situation
async def transient(driver: type[Driver]) -> None:
    """An error that may pass: the call is retried, and the model sees the result."""
    search = Fake("search", raising(ConnectionRefusedError("refused"), None))
    outcome = await play(driver, [search], SEARCH, engine=engine_of())
    assert (outcome.end, outcome.told) == ("done", ["x, found"])
    assert search.executed == ["x", "x"]


@situation
async def lost_answer(driver: type[Driver]) -> None:
    """A call may have taken effect, but its answer is lost: it is executed no more often than without an engine, and no other tool is."""

    def make() -> list[Fake]:
        return [Fake("search", raising(ConnectionResetError("lost"))), Fake("archive", archived)]

    alone = make()
    await play(driver, alone, SEARCH)
    tools = make()
    engine = engine_of()
    outcome = await play(driver, tools, SEARCH, engine=engine)
    assert executions(*tools) == executions(*alone) == [1, 0]
    assert_nobody_was_asked(engine, outcome)


@situation
async def confirmed(driver: type[Driver]) -> None:
    """The answer of a call is lost, and `confirm` names another tool: it is asked whether the call was done, and the model sees its answer."""
    confirm = {
        "tool": "archive",
        "arguments": {"query": "${arguments.query}"},
        "when": 'text matches "*archive*"',
    }
    stated: Stated = {"search": {"confirm": confirm}, "archive": {"effect": "none"}}
    tools = [Fake("search", raising(ConnectionResetError("lost"))), Fake("archive", archived)]
    outcome = await play(driver, tools, SEARCH, engine=engine_of(), stated=stated)
    assert (outcome.end, outcome.told) == ("done", ["x, from the archive"])
    assert executions(*tools) == [1, 1]


@situation
async def hanging(driver: type[Driver]) -> None:
    """A tool exceeds the time limit stated for it, and nobody can be asked: the model, or the program, is told that it took too long."""
    stated = {"search": {"capability": "web", "timeout": 0.05}, "archive": "web"}
    tools = [Fake("search", hang), Fake("archive", archived)]
    engine = engine_of()
    outcome = await play(driver, tools, SEARCH, engine=engine, stated=stated)
    text = outcome.end + " ".join(outcome.told)
    assert "deadline" in text or "did not answer" in text
    assert executions(*tools) == [1, 0]
    assert_nobody_was_asked(engine, outcome)


@situation
async def words_of_failure(driver: type[Driver]) -> None:
    """A result that only looks like an error is a success."""
    for text in ("Error: upstream 503", '{"error": null, "failed": 0}', "SYNTAX OK"):

        def make(text: str = text) -> list[Fake]:
            return [Fake("search", lambda query: text), Fake("archive", archived)]

        alone = await compare(driver, make, SEARCH)
        assert alone.told == [text]


@situation
async def reported_failure(driver: type[Driver]) -> None:
    """A tool reports a failure in the framework's own way, without raising: that counts as a failure."""

    def refuse(query: str) -> str:
        raise Reported("upstream 503")

    def make() -> list[Fake]:
        return [Fake("search", refuse, reports=True)]

    await compare(driver, make, SEARCH)
    outcome = await play(driver, [*make(), Fake("archive", archived)], SEARCH, engine=engine_of())
    assert (outcome.end, outcome.told) == ("done", ["x, from the archive"])


@situation
async def same_ids(driver: type[Driver]) -> None:
    """Two calls of one message have the same id, or an empty one: each is executed as without an engine."""
    for call_id in ("1", ""):
        for queries in ("ab", "aa"):
            calls = [Call("search", query, call_id) for query in queries]
            await compare(driver, lambda: [Fake("search", found)], calls)


@situation
async def parallel(driver: type[Driver]) -> None:
    """Calls of one message run at once, and each gets its own result, even from a stand-in."""

    def make() -> list[Fake]:
        arrived: list[str] = []

        async def meet(query: str) -> str:
            arrived.append(query)
            # The event loops of two threads share no event.
            async with asyncio.timeout(5):
                while len(arrived) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            if query == "b":
                raise PermissionError("no key")
            return found(query)

        return [Fake("search", meet), Fake("archive", archived)]

    calls = [Call("search", "a"), Call("search", "b")]
    tools = make()
    outcome = await play(driver, tools, calls, engine=engine_of())
    assert outcome.told == ["a, found", "b, from the archive"]
    assert executions(*tools) == [2, 1]


def guarded_tools() -> list[Fake]:
    """Return a tool that fails, and one that a person must approve."""
    return [
        Fake("search", raising(PermissionError("no key"))),
        Fake("archive", archived, needs_approval=True),
    ]


@situation
async def guarded_stand_in(driver: type[Driver]) -> None:
    """A tool that needs an approval in the framework stands in only if a person agrees."""
    tools = guarded_tools()
    await play(driver, tools, SEARCH, engine=engine_of())
    assert executions(*tools) == [1, 0]
    tools = guarded_tools()
    engine = engine_of(gate=ScriptedGate([Answer("approve", by="ada")]))
    async with driver(tools, engine, WEB, asks=True) as agent:
        outcome = await agent.run(SEARCH)
        # The question goes to the gate, unless the framework insists on its own way to ask.
        if outcome.waiting is not None:
            assert executions(*tools) == [1, 0]
            outcome = await agent.approve(outcome)
    assert outcome.told == ["x, from the archive"]
    assert executions(*tools)[1] == 1


@situation
async def answered_question(driver: type[Driver]) -> None:
    """A question is answered and the agent resumed: calls that are done are not executed again, and nothing more is asked."""
    tools = [Fake("note", found), *guarded_tools()]
    engine = engine_of()
    async with driver(tools, engine, WEB, asks=True) as agent:
        outcome = await agent.run([Call("note", "a"), Call("search", "b")])
        assert outcome.waiting is not None
        assert executions(*tools) == [1, 1, 0]
        outcome = await agent.approve(outcome)
    assert (outcome.end, outcome.told) == ("done", ["a, found", "b, from the archive"])
    assert outcome.waiting is None
    assert executions(*tools) == [1, 1, 1]
    assert engine.pending() == []


@situation
async def approval(driver: type[Driver]) -> None:
    """A call that a person approves is executed once, also if the approval is sent twice."""
    search = Fake("search", found, needs_approval=True)
    async with driver([search], engine_of(), {}, asks=True) as agent:
        waiting = await agent.run(SEARCH)
        assert search.executed == []
        for _ in range(2):
            outcome = await agent.approve(waiting)
            assert outcome.waiting is None
    assert search.executed == ["x"]


@situation
async def cancellation(driver: type[Driver]) -> None:
    """The agent is cancelled: so is its tool, which is not executed again."""
    began = asyncio.Event()
    ended: list[str] = []

    async def wait(query: str) -> str:
        began.set()
        try:
            await hang(query)
        finally:
            ended.append(query)
        return query

    tools = [Fake("search", wait), Fake("archive", archived)]
    engine = engine_of()
    async with driver(tools, engine, WEB) as agent:
        await cut_off(agent, began, SEARCH)
    assert executions(*tools) == [1, 0]
    assert ended == ["x"]


def hanging_once(began: asyncio.Event) -> Fake:
    """Return a tool that never ends the first time."""

    async def search(query: str) -> str:
        if not began.is_set():
            began.set()
            await hang(query)
        return found(query)

    return Fake("search", search)


@situation
async def resumed(driver: type[Driver]) -> None:
    """An agent that was cancelled within a call is resumed: calls that are done are not executed again, and one that may have taken effect only if a person agrees."""
    began = asyncio.Event()
    tools = [Fake("archive", archived), hanging_once(began)]
    async with driver(tools, engine_of(), {}, asks=True) as agent:
        await cut_off(agent, began, [Call("archive")], SEARCH)
        await assert_asked_first(agent, tools)


@situation
async def killed(driver: type[Driver]) -> None:
    """The process of an agent is killed within a call, and another process resumes it: calls that are done are not executed again, and one that may have taken effect only if a person agrees."""
    began = asyncio.Event()
    tools = [Fake("archive", archived), hanging_once(began)]
    engine = engine_of()
    left = MemoryStore()
    async with driver(tools, engine, {}, asks=True) as agent:

        def leave() -> None:
            for run in engine.store.runs():
                lease = left.create(run.run, "killed", 0, 0)
                for record in engine.store.read(run.run):
                    left.append(lease, record)

        await cut_off(agent, began, [Call("archive")], SEARCH, before=leave)
        later = driver(tools, engine_of(store=left), {}, asks=True, after=agent)
        async with later:
            await assert_asked_first(later, tools)


async def assert_asked_first(agent: Driver, tools: Sequence[Fake]) -> None:
    """Go on with a run whose last call was cut off, and check that a person is asked before it is executed again."""
    outcome = await agent.go_on()
    assert executions(*tools) == [1, 1]
    assert outcome.waiting is not None
    outcome = await agent.approve(outcome)
    assert (outcome.end, outcome.told[-1:]) == ("done", ["x, found"])
    assert executions(*tools) == [1, 2]


@situation
async def broken_stream(driver: type[Driver]) -> None:
    """A stream is abandoned halfway: the same process can continue with the conversation."""

    def make() -> list[Fake]:
        return [Fake("search", found)]

    async def talk(engine: ReplanningEngine | None) -> tuple[Outcome, list[int]]:
        tools = make()
        async with driver(tools, engine, {}, asks=True) as agent:
            await agent.break_off(SEARCH)
            return await agent.run([Call("search", "y")]), executions(*tools)

    alone = await talk(None)
    assert await talk(engine_of()) == alone
    assert alone[0].told[-1:] == ["y, found"]


@situation
async def different_arguments(driver: type[Driver]) -> None:
    """A tool has failed for several different arguments: it is still executed for others."""

    def fetch(query: str) -> str:
        if query != "good":
            raise ConnectionError("name or service not known")
        return found(query)

    search = Fake("search", fetch)
    async with driver([search], engine_of(), {}) as agent:
        for query in "abcdefgh":
            await agent.run([Call("search", query)])
        outcome = await agent.run([Call("search", "good")])
    assert (outcome.end, outcome.told[-1:]) == ("done", ["good, found"])


@situation
async def control_flow(driver: type[Driver]) -> None:
    """A tool stops the agent on purpose, as by `interrupt` or a request for an approval: that is no failure, and it reaches the framework."""

    def pause(query: str) -> str:
        raise Paused("may I?")

    ends = []
    engine = engine_of()
    for each in (None, engine):
        tools = [Fake("search", pause), Fake("archive", archived)]
        outcome = await play(driver, tools, SEARCH, engine=each, asks=True)
        is_waiting = outcome.waiting is not None
        ends.append((outcome.end, outcome.told, is_waiting, executions(*tools)))
    assert ends[0] == ends[1]
    assert not [each for each in recorded(engine) if isinstance(each, TriggerFired)]


@situation
async def nobody_watches(driver: type[Driver]) -> None:
    """With `approvals=False` nobody is asked, not even through the gate of the engine, and the agent ends as without an engine."""
    alone = await play(driver, guarded_tools()[:1], SEARCH, asks=True)
    tools = guarded_tools()
    gate = ScriptedGate([Answer("approve", by="ada")])
    engine = engine_of(gate=gate)
    attached = await play(driver, tools, SEARCH, engine=engine, asks=True, approvals=False)
    assert attached == alone
    assert executions(*tools) == [1, 0]
    assert engine.pending() == []
    assert gate.questions == []


BEGIN: Final = "<!-- situations -->\n"
END: Final = "<!-- /situations -->"


def table() -> str:
    """Return the table, and below it why some frameworks cannot do what a situation needs."""
    titles = [f"[{each.title}]({each.page})" for each in INTEGRATIONS]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + ":-:|" * len(titles)]
    reasons: list[str] = []
    for each in SITUATIONS:
        sentence = " ".join((each.__doc__ or "").split()).rstrip(".")
        cells = []
        for integration in INTEGRATIONS:
            cell = "✓"
            if each.__name__ in integration.cannot:
                reason = f"{integration.title}: {integration.cannot[each.__name__]}"
                if reason not in reasons:
                    reasons.append(reason)
                cell = f"{reasons.index(reason) + 1}"
            cells.append(cell)
        lines.append(f"| {sentence} | {' | '.join(cells)} |")
    lines.append("")
    for number, reason in enumerate(reasons, 1):
        lines.append(f"{number}. {reason}")
    return "\n".join(lines)


def written(text: str) -> str:
    """Return the text of the page with the table between its markers renewed."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
