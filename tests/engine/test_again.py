# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""Decisions of recorded runs, made again: by other providers and settings, and by this version alone."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from replanning import (
    Alternative,
    AlternativeGenerator,
    Answer,
    CallbackGate,
    ConfidenceScorer,
    ReplanningEngine,
    ReplanRequest,
    Settings,
    Task,
    TaskContext,
    ToolSpec,
)
from replanning.changes import ReplaceTask, SkipTask
from replanning.decision.policy import Decision
from replanning.engine import ComparedDecision, ComparedRun
from replanning.errors import BudgetExceeded, LLMUnavailable, StoreError
from replanning.history import ReplanHistory, export_history, import_history
from replanning.journal import (
    AlternativesConsidered,
    DecisionMade,
    MemoryStore,
    RecordBody,
    RunOpened,
    RunStore,
    Usage,
)
from replanning.llm import FallbackLLM, Price, PriceTable
from replanning.testing import ScriptedLLM, VirtualClock, virtual_environment
from tests.support.llm import PRICES, Asker
from tests.support.questions import doubtful
from tests.support.resume import RUN, cut
from tests.support.runs import (
    Proposer,
    again,
    alternative,
    chain,
    failing,
    history_of,
    make_engine,
    plan,
    skipping,
)
from tests.support.simulation_world import World
from tests.testing.test_simulation import play

ASKS: dict[str, Any] = {"alternatives": {"human_approval_threshold": 0.95}}
PHOTO = {
    "reason": "the camera reads pages, too",
    "changes": [{"kind": "replace", "task_id": "b", "tasks": [{"id": "photo", "tool": "camera"}]}],
    "confidence": 0.9,
}
CAMERA = json.dumps({"candidates": [PHOTO]})
EQUIPPED = plan(
    Task(id="a"),
    Task(id="b", tool="scanner", depends_on=("a",)),
    tools=[ToolSpec(name="scanner", capability="read"), ToolSpec(name="camera", capability="read")],
)


def nothing(request: ReplanRequest) -> list[Alternative]:
    """Propose nothing."""
    return []


async def ask(
    history: ReplanHistory, *providers: Any, at: int | str | None = None, **settings: Any
) -> ComparedRun:
    """Decide a run again with an engine of these providers and settings."""
    return await make_engine(*providers, **settings).what_if(history, at=at)


def only(found: ComparedRun) -> ComparedDecision:
    """The one decision of a run."""
    (decision,) = found.decisions
    return decision


def edited(
    history: ReplanHistory, kind: type[RecordBody], change: Callable[[Any], RecordBody]
) -> ReplanHistory:
    """A history whose records of a kind are other ones, as an earlier version may have written them."""
    records = list(history.records(0))
    for position, record in enumerate(records):
        if isinstance(record.body, kind):
            records[position] = record._replace(body=change(record.body))
    return ReplanHistory(lambda after: records[after:])


async def test_the_same_engine_decides_alike():
    """An engine like the one that ran decides the same, with the same scores and candidates."""
    history = await history_of(chain("a", "b", "c"), "b")
    found = await ask(history, again)
    decision = only(found)
    assert (decision.same, decision.differences) == (True, ())
    assert (decision.replan, decision.revision) == ("r1", 1)
    assert [trigger.tasks for trigger in decision.triggers] == [("b",)]
    assert decision.again.score == decision.recorded.score
    assert found.changed == ()
    assert found.left_out == ()


async def test_another_provider_chooses_otherwise():
    """Another provider is asked about the plan as it was, and its choice stands beside the recorded one."""
    history = await history_of(chain("a", "b", "c"), "b")
    asked = Proposer(skipping)
    decision = only(await ask(history, asked))
    (request,) = asked.requests
    assert [task.id for task in request.view.tasks() if task.state == "DONE"] == ["a"]
    assert request.view.task("b").state == "FAILED"
    assert decision.differences == ("choice", "candidates")
    assert not decision.same
    assert decision.recorded.chosen is not None
    assert decision.again.chosen is not None
    assert isinstance(decision.recorded.chosen.alternative.changes[0], ReplaceTask)
    assert isinstance(decision.again.chosen.alternative.changes[0], SkipTask)
    assert "+ b~2" in decision.recorded.diff
    assert "b~2" not in decision.again.diff
    assert "SKIPPED" in decision.again.diff


async def test_nothing_is_written():
    """The journal is the same afterwards, and the store has no other run."""
    async with VirtualClock() as clock:
        engine = make_engine(again, clock=clock)
        result = await engine.execute(chain("a", "b", "c"), failing("b"))
        before = list(engine.store.read(result.run))
        await engine.what_if(engine.history(result.run))
        await engine.replay(engine.history(result.run))
    assert list(engine.store.read(result.run)) == before
    assert [info.run for info in engine.store.runs()] == [result.run]


async def test_a_higher_threshold_asks_a_person():
    """With a threshold above the confidence, a person is asked about what was executed."""
    history = await history_of(chain("a", "b", "c"), "b")
    found = await ask(history, again, **ASKS)
    decision = only(found)
    assert decision.differences == ("decision", "rule")
    assert (decision.again.kind, decision.again.rule) == ("ask", "low-confidence")
    assert decision.again.diff == decision.recorded.diff
    assert (found.asked(recorded=True), found.asked()) == (0, 1)


async def test_other_weights_score_otherwise():
    """With other weights the score differs, which alone is no other decision."""
    history = await history_of(chain("a", "b", "c"), "b")
    weights = {
        "self_assessment": 0.7,
        "past_success": 0.0,
        "availability": 0.2,
        "simplicity": 0.1,
    }
    decision = only(await ask(history, again, weights=weights))
    assert decision.differences == ("score", "candidates")
    assert decision.same
    assert decision.again.score is not None
    assert decision.again.score.total == pytest.approx(0.93)


async def test_a_question_to_a_person():
    """Where a person was asked, the answer is told, and a lower threshold does not ask."""
    gate = CallbackGate(lambda question: Answer("approve", by="ada"))
    history = await history_of(chain("a", "b"), "b", propose=doubtful, gate=gate)
    found = await ask(history, doubtful)
    assert only(found).same
    assert only(found).answer == "person-approve by person:ada"
    assert only(found).revision == 1
    bold = await ask(history, doubtful, alternatives={"human_approval_threshold": 0.1})
    assert only(bold).again.kind == "execute"
    assert (bold.asked(recorded=True), bold.asked()) == (1, 0)


async def test_a_run_that_gave_up():
    """Where nothing was found, another provider may know a way."""
    history = await history_of(chain("a", "b"), "b", propose=nothing)
    found = await ask(history, again, at="r1")
    assert only(found).recorded.rule == "no-alternative"
    assert only(found).again.kind == "execute"
    assert (found.gave_up(recorded=True), found.gave_up()) == (1, 0)
    assert only(found).recorded.score is None


async def test_one_decision():
    """One decision is chosen by its revision or by the name of its replan."""
    history = await history_of(chain("a", "b", "c"), "a", "c")
    everything = await ask(history, again)
    assert [decision.revision for decision in everything.decisions] == [1, 2]
    by_revision = await ask(history, again, at=2)
    by_name = await ask(history, again, at="r2")
    assert by_revision == by_name
    assert by_revision.decisions == everything.decisions[1:]


@pytest.mark.parametrize(
    ("at", "problem"),
    [
        (7, "has no revision 7; it has revisions 0 to 1"),
        (0, "revision 0 of run 'run-1' was not made by a replan; its replans are: r1 (revision 1)"),
        ("r9", "run 'run-1' has no replan 'r9'; its replans are: r1 (revision 1)"),
    ],
)
async def test_an_unknown_decision(at, problem):
    """A revision or replan that the run does not have is refused, with those that it has."""
    history = await history_of(chain("a", "b"), "b")
    with pytest.raises(StoreError) as caught:
        await ask(history, again, at=at)
    assert problem in str(caught.value)


async def test_limits():
    """A limit that was reached can be lifted, and a new limit stops what was executed."""
    limited = await history_of(chain("a"), "a", "a~2", limits={"replans_per_lineage": 1})
    first, second = (await ask(limited, again)).decisions[:2]
    assert (second.recorded.rule, second.again.rule) == ("limit-lineage", "confident")
    assert first.same
    stricter = await ask(limited, again, limits={"replans_per_lineage": 0})
    assert stricter.decisions[0].again.rule == "limit-lineage"
    assert stricter.decisions[0].again.candidates == ()


# Costs


def model(**options: Any) -> ScriptedLLM:
    """A language model that knows about the camera."""
    return ScriptedLLM(lambda prompt: CAMERA, prices=PRICES, **options)


async def equipped_run(*providers: Any) -> ReplanHistory:
    """The history of a run whose scanner is broken."""
    return await history_of(EQUIPPED, "b", propose=nothing)


async def test_a_model_that_may_cost_too_much_is_not_asked():
    """Without leave to spend, a model with a price is refused before anything is sent."""
    history = await equipped_run()
    asked = model()
    with pytest.raises(BudgetExceeded) as caught:
        await ReplanningEngine([asked]).what_if(history)
    assert "it may cost up to 0.0" in str(caught.value)
    assert asked.requests == []


async def test_a_model_within_its_limit():
    """With leave to spend, the model is asked, and what it has used is told."""
    history = await equipped_run()
    asked = model()
    found = await ReplanningEngine([asked]).what_if(history, max_cost=0.1)
    decision = found.decisions[0]
    assert decision.again.chosen is not None
    assert decision.again.chosen.alternative.source == "scripted"
    assert len(asked.requests) == found.spent.calls == len(found.decisions)
    assert 0 < found.spent.money < 0.1


async def test_the_limit_holds_while_models_are_asked():
    """What would exceed the limit is not asked, also by a provider that gives no estimate; a note says so."""
    history = await equipped_run()
    asked = model()
    found = await ReplanningEngine([Asker(asked)]).what_if(history, at="r1")
    assert asked.requests == []
    assert found.spent == Usage()
    (note,) = only(found).notes
    assert "could not continue asking: it would exceed the budget" in note


async def test_an_unknown_price():
    """A model whose price is not known is refused."""
    history = await equipped_run()
    asked = ScriptedLLM([CAMERA], prices=PriceTable({"another": Price(1, 1)}))
    with pytest.raises(BudgetExceeded, match="the price of the model is not known"):
        await ReplanningEngine([asked]).what_if(history, max_cost=5)
    assert asked.requests == []


async def test_a_model_that_cannot_be_asked():
    """A model without a key costs nothing, and the decision says why it was not asked."""
    history = await equipped_run()
    first = model(name="first", unavailable_reason="its key is not set")
    second = ScriptedLLM([LLMUnavailable("busy")], name="second", prices=PRICES)
    engine = ReplanningEngine([FallbackLLM([first, second])])
    found = await engine.what_if(history, at="r1", max_cost=1)
    assert "its key is not set" in only(found).notes[0]


async def test_an_estimate_of_a_provider():
    """A provider that states what it may use is refused by that, without being asked."""

    class Paid(Proposer):
        def estimate(self, request: ReplanRequest) -> Usage:
            return Usage(calls=1, money=2.0)

    history = await equipped_run()
    paid = Paid(again)
    with pytest.raises(BudgetExceeded, match="it may cost up to 2, and 1 is allowed"):
        await ReplanningEngine([paid]).what_if(history, max_cost=1.0)
    assert paid.requests == []
    found = await ReplanningEngine([paid]).what_if(history, at="r1", max_cost=2.0)
    assert only(found).again.kind == "execute"


# What cannot be decided again


async def test_edits_are_named():
    """A revision by hand is named, because nobody decides it again."""
    async with VirtualClock() as clock:
        engine = make_engine(again, clock=clock)
        async with engine.open(chain("a", "b")) as run:
            run.modify_task("b", priority=3)
            run.pause("enough")
    found = await engine.what_if(engine.history(run.id))
    assert found.decisions == ()
    assert found.left_out == (("revision 1", "an edit by hand"),)


async def test_a_decision_that_was_cut_off():
    """A replan that a kill cut off is named; the others are decided again."""
    history = await history_of(chain("a", "b", "c"), "a", "c")
    records = list(history.records(0))
    last = max(n for n, each in enumerate(records) if isinstance(each.body, AlternativesConsidered))
    store = cut(records[: last + 1])
    found = await ask(ReplanHistory.of(store, RUN), again)
    assert [decision.replan for decision in found.decisions] == ["r1"]
    assert found.left_out == (("replan 2", "its process ended before it was decided"),)


async def test_a_limit_that_is_lifted_in_a_replay():
    """Where a limit kept providers from being asked, the record has no replies for another limit."""
    history = await history_of(chain("a"), "a", "a~2", limits={"replans_per_lineage": 1})
    lifted = edited(history, RunOpened, lambda body: replace(body, settings={}))
    found = await make_engine().replay(lifted)
    assert [decision.replan for decision in found.decisions] == ["r1", "r3"]
    assert found.left_out[0][0] == "replan 2"
    assert found.left_out[0][1].startswith("no provider was asked at that time")


# What a journal lacks


async def test_masked_secrets():
    """Where the journal masks an argument of a task concerned, the comparison says so."""
    secret = "ghp_" + "a1B2" * 9
    document = plan(Task(id="a", tool="post", arguments={"token": secret, "text": "x"}))
    history = await history_of(document, "a")
    found = await ask(history, skipping)
    (note,) = only(found).notes
    assert note.startswith("the journal masks secrets in the arguments of 'a'")
    assert secret not in json.dumps(found.to_json())


async def test_unstored_outputs():
    """Outputs that the journal lacks are named: providers saw them in the run."""

    async def work(task: Task, context: TaskContext) -> object:
        if task.id == "b":
            raise ValueError("b is broken")
        return object()

    async with VirtualClock() as clock:
        engine = make_engine(again, clock=clock)
        result = await engine.execute(chain("a", "b"), work)
    found = await engine.what_if(engine.history(result.run), at="r1")
    assert only(found).notes == ("the journal lacks the outputs of 'a', which providers saw",)
    assert (await engine.replay(engine.history(result.run))).decisions[0].notes == ()


async def test_later_runs_are_no_evidence():
    """A decision is made again on the outcomes of tools before its run, not on later ones."""
    async with VirtualClock() as clock:
        engine = make_engine("repair", clock=clock)
        first = await engine.execute(EQUIPPED, failing("b"))
        for _ in range(5):
            await clock.sleep(60)
            await engine.execute(EQUIPPED, failing("b", "b~2"))
        found = await engine.what_if(engine.history(first.run))
        later = await make_engine("repair", store=engine.store).what_if(
            engine.history(first.run), at=1
        )
    assert found.decisions[0].differences == ()
    assert later.decisions[0].again.score == found.decisions[0].recorded.score


# Replaying


async def test_another_policy_is_found_out():
    """A version that decides otherwise differs from the record, with the version of the rules of each side."""
    history = await history_of(chain("a", "b"), "b")

    class Cautious(type(make_engine().policy)):  # type: ignore[misc]
        def decide(self, *args: Any, **options: Any) -> Decision:
            return Decision("ask", "careful", "a person decides", 0)

    found = await ReplanningEngine([], policy=Cautious(Settings())).replay(history)
    assert only(found).differences == ("decision", "rule")
    assert only(found).recorded.rules == only(found).again.rules


async def test_rules_of_another_version():
    """A decision has the version of the rules on record by which it was made."""
    history = await history_of(chain("a", "b"), "b")
    old = edited(history, DecisionMade, lambda body: replace(body, rules=0, rule="old"))
    decision = only(await make_engine().replay(old))
    assert (decision.recorded.rules, decision.again.rules) == (0, 1)
    assert decision.differences == ("rule",)


async def test_an_exported_history():
    """A history that was exported is decided again without its store."""
    history = await history_of(chain("a", "b"), "b")
    found = await make_engine().replay(import_history(export_history(history)))
    assert only(found).differences == ()


async def test_settings_of_a_resumed_run():
    """A run that was resumed with other settings is replayed with those of each time."""
    async with VirtualClock() as clock:
        engine = make_engine(again, clock=clock, alternatives={"human_approval_threshold": 0.0})
        async with engine.open(chain("a", "b"), run_id=RUN) as run:
            async for task in run.ready():
                async with run.attempt(task):
                    raise ValueError("broken")
                if task.id != "a":
                    break
        strict = make_engine(again, clock=clock, store=engine.store, **ASKS)
        async with strict.resume(RUN) as run:
            async for task in run.ready():
                async with run.attempt(task):
                    if task.id.startswith("b"):
                        raise ValueError("broken")
    found = await strict.replay(strict.history(RUN))
    assert {decision.recorded.kind for decision in found.decisions} == {"execute", "ask"}
    assert [decision.differences for decision in found.decisions] == [()] * len(found.decisions)


async def test_a_call_about_which_nobody_can_be_asked():
    """A call of an agent that nobody could be asked about is decided so again."""
    async with VirtualClock() as clock:
        engine = make_engine(doubtful, clock=clock)

        async def broken() -> str:
            raise ValueError("broken")

        async with engine.session("talk", tools=[broken]) as session:
            with pytest.raises(ValueError, match="broken"):
                await session.call(broken)
    found = await engine.replay(engine.history(session.run.id))
    assert found.decisions[0].recorded.reason.endswith("nobody can be asked")
    assert found.decisions[0].differences == ()


async def test_a_change_that_the_plan_refused():
    """Where the plan refused what was chosen, choosing it again is the same decision."""
    history = await history_of(chain("a", "b"), "b")
    refused = edited(
        history, DecisionMade, lambda body: replace(body, decision="keep", rule="refused")
    )
    found = await make_engine().replay(refused)
    assert only(found).same
    assert found.gave_up(recorded=True) == 0
    kept = await ask(refused, nothing)
    assert "decision" in only(kept).differences


async def test_shrunken_confidence():
    """Self-assessments that were shrunk by the success of their source are taken from the record."""
    settings: dict[str, Any] = {"alternatives": {"shrink": True}}
    async with VirtualClock() as clock:
        engine = make_engine("repair", clock=clock, **settings)
        for _ in range(4):
            await engine.execute(EQUIPPED, failing("b"))
            await clock.sleep(60)
        result = await engine.execute(EQUIPPED, failing("b"))
    history = engine.history(result.run)
    found = await ReplanningEngine([], store=MemoryStore()).replay(history)
    assert found.decisions[0].differences == ()
    plain = await make_engine("repair", store=engine.store).what_if(history)
    assert plain.decisions[0].again.score is not None
    assert plain.decisions[0].again.score.self_assessment == 0.8
    shrunk = await make_engine("repair", store=engine.store, **settings).what_if(history)
    assert shrunk.decisions[0].differences == ()


async def test_a_scorer_of_ones_own():
    """A scorer of one's own scores by itself."""

    class Sure(ConfidenceScorer):
        def score(self, *args: Any, **options: Any) -> Any:
            return replace(super().score(*args, **options), total=1.0)

    history = await history_of(chain("a", "b"), "b")
    generator = AlternativeGenerator([Proposer(again)], scorer=Sure())
    found = await ReplanningEngine(generator).what_if(history)
    assert only(found).again.score is not None
    assert only(found).again.score.total == 1.0
    assert only(found).differences == ("score", "candidates")


async def test_many_proposals():
    """More proposals than a provider may make are on record if several made them, and all are replayed."""

    def several(request: ReplanRequest) -> Sequence[Alternative]:
        return [
            alternative(SkipTask(task_id="b", reason=str(number)), confidence=0.001 * number)
            for number in range(80)
        ]

    async with VirtualClock() as clock:
        providers = [Proposer(several, "one"), Proposer(several, "two")]
        engine = ReplanningEngine(providers, environment=virtual_environment(clock=clock))
        result = await engine.execute(chain("a", "b"), failing("b"))
    decision = (await engine.replay(engine.history(result.run))).decisions[0]
    assert len(decision.recorded.candidates) == len(decision.again.candidates) == 160


async def test_json():
    """A comparison is JSON, with its counts."""
    history = await history_of(chain("a", "b"), "b")
    found = await ask(history, again, **ASKS)
    document = json.loads(json.dumps(found.to_json()))
    assert document["counts"] == {
        "decisions": 1,
        "changed": 1,
        "asked": {"recorded": 0, "again": 1},
        "gave_up": {"recorded": 0, "again": 0},
    }
    (decision,) = document["decisions"]
    assert (decision["same"], decision["differences"]) == (False, ["decision", "rule"])
    assert decision["recorded"]["chosen"]["score"]["total"] == pytest.approx(0.81)
    assert "+ b~2" in "\n".join(decision["again"]["diff"])


async def replayed(seed: int) -> list[str]:
    """Play a random run; return the decisions that a replay of its journal makes otherwise."""
    store: RunStore = MemoryStore()
    await play(World(seed), store)
    engine = ReplanningEngine([], store=store)
    problems: list[str] = []
    for info in store.runs():
        for decision in (await engine.replay(engine.history(info.run))).decisions:
            if decision.differences:
                problems.append(f"seed {seed}, {decision.replan}: {decision.differences}")
    return problems


@pytest.mark.parametrize(
    "seeds",
    [
        range(20),
        # In 2494 a limit is reached while providers are asked; in 3440 the delay of a task ends.
        pytest.param((*range(20, 220), 2494, 3440), marks=pytest.mark.deep),
    ],
    ids=["20", "200"],
)
async def test_random_runs_replay_alike(seeds):
    """Random runs, with resumes, people, masks and bursts, are decided alike by a replay."""
    problems: list[str] = []
    for seed in seeds:
        problems += await replayed(seed)
    assert problems == []
