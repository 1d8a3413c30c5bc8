# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""Journals that an older version wrote, which this version must read and resume: see recorded/README.md."""

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from replanning import (
    Answer,
    CallbackGate,
    ReplanningEngine,
    RunResult,
    tool,
)
from replanning.engine import ComparedRun
from replanning.history import (
    ReplanHistory,
    calibrate,
    export_history,
    import_history,
    markdown_report,
    open_questions,
    run_status,
    text_report,
    why_report,
)
from replanning.journal import RunStore, open_store
from replanning.testing import VirtualClock
from tests.support.planning import Desk, Model, coordinator
from tests.support.postgres import Server
from tests.support.runs import make_engine, perform

FOLDER = Path(__file__).parent / "recorded"

STATUSES = {
    "replans": "succeeded",
    "waiting": "needs_human",
    "answered": "needs_human",
    "session": "paused",
    "session-killed": "running",
    "planning-finished": "succeeded",
    "planning-killed": "running",
    "paused": "paused",
    "resumed": "paused",
    "killed": "running",
    "timers": "running",
    "world": "paused",
    "stale": "succeeded",
    "edits": "paused",
    "unstored": "paused",
    "failed": "failed",
}
AN_HOUR = 3600.0

_schemas = count()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.deep)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunStore]:
    """A copy of the recorded journals in each kind of store."""
    if request.param == "sqlite":
        place = str(tmp_path / "sqlite.db")
        shutil.copy(FOLDER / "sqlite.db", place)
    else:
        place = load_postgres(request.getfixturevalue("postgres_server"))
    with closing(open_store(place)) as opened:
        yield opened


def load_postgres(server: Server) -> str:
    """Load the recorded tables into a schema of their own; return its address."""
    import psycopg

    schema = f"recorded{next(_schemas)}"
    address = server.address(schema)
    statements = (FOLDER / "postgres.sql").read_text().replace("public.", f"{schema}.")
    with psycopg.connect(server.base, autocommit=True) as database:
        database.execute(statements.encode())
    return address


async def resume(
    store: RunStore,
    run_id: str,
    clock: VirtualClock,
    *providers: Any,
    gate: CallbackGate | None = None,
) -> tuple[RunResult, list[str]]:
    """Resume a run with work that returns the ids of the tasks; return its result and the tasks that ran."""
    engine = make_engine(*providers or ["repair"], clock=clock, store=store, gate=gate)

    async def work(task, context):
        return f"new {task.id}"

    async with engine.resume(run_id) as run:
        ran = await perform(run, work)
    return run.result, ran


def later(store: RunStore, run_id: str) -> VirtualClock:
    """A clock an hour after the last record of a run."""
    *_, last = store.read(run_id)
    return VirtualClock(last.at + AN_HOUR)


def approving(asked: list[str]) -> CallbackGate:
    """A person who approves of everything and remembers the questions."""

    def answer(question):
        asked.append(question.id)
        return Answer("approve", by="eve")

    return CallbackGate(answer)


def test_every_run_is_listed(store):
    """The runs of an older version are listed with their status."""
    assert {info.run: info.status for info in store.runs()} == STATUSES


@pytest.mark.parametrize("run_id", STATUSES)
def test_every_reader(store, run_id, tmp_path):
    """Records, status, history, reports, differences and exports of each run can be read."""
    info = next(info for info in store.runs() if info.run == run_id)
    records = list(store.read(run_id))
    assert [record.seq for record in records] == list(range(1, info.records + 1))

    report = run_status(store, info, info.updated + AN_HOUR)
    assert report.status == STATUSES[run_id]
    assert bool(open_questions(records)) == (STATUSES[run_id] == "needs_human")

    history = ReplanHistory.of(store, run_id)
    assert run_id in text_report(history)
    assert markdown_report(history)
    assert history.metrics == history.refresh().metrics
    assert calibrate(history.events).count <= len(history.events)
    for entry in history.entries:
        assert why_report(history, entry)
    for revision in range(1, history.revision + 1):
        assert history.diff(revision - 1, revision)
        assert history.plan_at(revision).tasks
    assert len(list(history.replay())) > 0

    read_again = import_history(export_history(history))
    assert read_again.events == history.events


def defects(found: ComparedRun) -> list[str]:
    """The decisions of a run that are made otherwise although the rules have the same version."""
    return [
        f"{found.run}, {decision.replan}: {decision.differences}"
        for decision in found.decisions
        if decision.differences and decision.recorded.rules == decision.again.rules
    ]


async def test_every_rule_decides_alike():
    """Runs that an older version decided by every rule, rejecting for every reason, are decided alike."""
    rules: set[str] = set()
    engine = ReplanningEngine([])
    documents = json.loads((FOLDER / "decisions.json").read_text(encoding="utf-8"))
    for document in documents.values():
        found = await engine.replay(import_history(json.dumps(document)))
        assert defects(found) == []
        rules.update(decision.recorded.rule for decision in found.decisions)
    assert rules == {
        "always-ask",
        "approval-required",
        "confident",
        "dangerous-tool",
        "in-doubt",
        "limit-lineage",
        "limit-run",
        "low-confidence",
        "no-alternative",
    }


async def test_decisions_are_made_alike(store):
    """This version decides every run of an older version alike; what it cannot decide again is named."""
    engine = ReplanningEngine([], store=store)
    decisions = 0
    left_out: set[str] = set()
    for run_id in STATUSES:
        found = await engine.replay(engine.history(run_id))
        assert defects(found) == []
        decisions += len(found.decisions)
        left_out.update(f"{run_id}: {name}" for name, _ in found.left_out)
    assert decisions == 11
    assert {name for name in left_out if name.startswith("planning")} == {
        "planning-finished: 8 decisions",
        "planning-finished: revision 1",
        "planning-killed: 4 decisions",
    }


@pytest.mark.parametrize("run_id", ["replans", "planning-finished", "stale", "failed"])
async def test_finished_runs_stay_finished(store, run_id):
    """A run that has ended for good has its result, and nothing of it is executed again."""
    async with later(store, run_id) as clock:
        result, ran = await resume(store, run_id, clock)
    assert (result.status, ran) == (STATUSES[run_id], [])
    assert result.outputs


async def test_a_paused_run(store):
    """A paused run executes the remaining tasks alone, and has the outputs of the others."""
    async with later(store, "paused") as clock:
        result, ran = await resume(store, "paused", clock)
    assert (result.status, ran) == ("succeeded", ["second"])
    assert result.outputs == {"first": {"made by": "first"}, "second": "new second"}


async def test_a_run_that_was_resumed_before(store):
    """A run with an answered question that was resumed once is resumed again, and its last task is executed."""
    async with later(store, "resumed") as clock:
        result, ran = await resume(store, "resumed", clock)
    assert (result.status, ran) == ("succeeded", ["third"])
    assert result.outputs["doubtful"] == "doubtful~2"
    assert [revision.by for revision in result.revisions] == ["person:ada"]


async def test_an_open_question(store):
    """A recorded question can be answered; what it was about is then carried out."""
    async with later(store, "waiting") as clock:
        engine = make_engine("repair", clock=clock, store=store)
        (question,) = engine.pending("waiting")
        assert "doubtful" in question.holds
        engine.answer(question.id, "approve", by="ada")
        result, ran = await resume(store, "waiting", clock)
    assert (result.status, ran) == ("succeeded", ["doubtful~2", "last"])
    assert result.outputs["other"] == "other"


async def test_an_answer_in_the_inbox(store):
    """An answer that was left for the run is carried out by the process that resumes it."""
    async with later(store, "answered") as clock:
        result, ran = await resume(store, "answered", clock)
    assert (result.status, ran) == ("succeeded", ["doubtful~2", "last"])
    assert [revision.by for revision in result.revisions] == ["person:ada"]


async def test_a_killed_process(store):
    """After SIGKILL the idempotent task runs again, and a person is asked about the other one."""
    async with later(store, "killed") as clock:
        result, ran = await resume(store, "killed", clock)
        assert (result.status, ran) == ("needs_human", ["copy"])
        asked: list[str] = []
        result, ran = await resume(store, "killed", clock, gate=approving(asked))
    assert (result.status, len(asked)) == ("succeeded", 1)
    assert (len(ran), ran[-1]) == (2, "last")
    assert ran[0].startswith("charge")
    assert result.outputs["first"] == "first"


async def test_timers(store):
    """A retry that was due while no process lived is made; the task with a deadline starts again."""
    async with later(store, "timers") as clock:
        result, ran = await resume(store, "timers", clock)
    assert (result.status, sorted(ran)) == ("succeeded", ["last", "later", "slow"])


async def test_a_changed_world(store):
    """Changes of context, resources, tools and facts hold after the resume."""
    async with later(store, "world") as clock:
        result, ran = await resume(store, "world", clock)
    assert (result.status, sorted(ran)) == ("succeeded", ["lift~2", "move"])
    assert result.outputs["measure"] == ["measure", "measure#1"]
    assert result.stale["measure"] == ("context.place",)
    assert result.stale["plan"] == ("measure",)
    live = ReplanHistory.of(store, "world").replay()
    assert dict(live.context) == {"place": "harbour", "go": True}
    assert "wet(yard)" in live.world.facts


async def test_an_edited_plan(store):
    """Edits by a person hold after the resume."""
    async with later(store, "edits") as clock:
        result, ran = await resume(store, "edits", clock)
    assert result.status == "succeeded"
    assert ran == ["second-again", "fifth", "fourth"]


async def test_an_output_that_was_not_stored(store):
    """An idempotent task is run again for a reader that needs its output, which could not be stored."""
    async with later(store, "unstored") as clock:
        result, ran = await resume(store, "unstored", clock)
    assert (result.status, ran) == ("succeeded", ["make", "use"])


async def converse(store: RunStore, run_id: str, gate: CallbackGate | None = None) -> Any:
    """Make the recorded calls under keys again; return their outputs and those that were executed."""
    executed: list[object] = []

    @tool(idempotent=True)
    async def look_up(word: str) -> str:
        executed.append(word)
        return f"new meaning of {word}"

    @tool
    async def pay(amount: int) -> str:
        executed.append(amount)
        return f"paid {amount} again"

    async with later(store, run_id) as clock:
        engine = make_engine("repair", clock=clock, store=store, gate=gate)
        async with engine.session("talk", tools=[look_up, pay], run_id=run_id) as session:
            if run_id == "session":
                outputs = [
                    await session.invoke("look_up", {"word": "leaf"}, key="key-1"),
                    await session.invoke("pay", {"amount": 5}, key="key-2"),
                    await session.call(look_up, "root"),
                ]
            else:
                outputs = [
                    await session.invoke("pay", {"amount": 5}, key="key-1"),
                    await session.invoke("look_up", {"word": "leaf"}, key="key-2"),
                    await session.invoke("pay", {"amount": 7}, key="key-3"),
                ]
    return session.run.result.status, outputs, executed


async def test_calls_under_keys(store):
    """Finished calls under keys return the recorded outputs and are not executed."""
    status, outputs, executed = await converse(store, "session")
    assert outputs == ["meaning of leaf", "paid 5", "new meaning of root"]
    assert (status, executed) == ("succeeded", ["root"])


async def test_interrupted_calls(store):
    """Calls that a killed process left are continued: at once where they are idempotent, else after a person agreed."""
    asked: list[str] = []
    status, outputs, executed = await converse(store, "session-killed", approving(asked))
    assert outputs == ["paid 5", "new meaning of leaf", "paid 7 again"]
    assert (status, executed, len(asked)) == ("succeeded", ["leaf", 7], 1)


async def test_planning_mode(store):
    """Planning mode continues in the phase in which its process died, and asks nothing again."""
    model = Model()
    desk = Desk()
    async with later(store, "planning-killed") as clock:
        planning = coordinator(model, clock, desk, store=store)
        await planning.execute_with_planning("planning-killed")
    assert planning.result.status == "succeeded"
    assert desk.used == [("write", "write"), ("post", "post")]
    assert "goal_understanding" not in model.asked
    assert "task_decomposition" not in model.asked
    assert "action_sequence" in model.asked
