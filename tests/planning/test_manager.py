"""The replan manager: model calls, rulings, execution and records."""

import json

import anyio
import pytest

from replanning import Environment
from replanning.errors import (
    BudgetExceeded,
    ChangeRejected,
    LLMResponseInvalid,
    LLMUnavailable,
    StoreError,
)
from replanning.llm import LLMOptions
from replanning.plan import JsonObject
from replanning.planning import Phase, ReplanLimits, ReplanManager, ReplanPromptBuilder, ReplanType
from replanning.planning.decisions import DecisionRecord, DecisionRequest, ReplanCause, ReplanCounts
from replanning.planning.manager import Consideration, ReplanNote
from replanning.testing import ScriptedLLM, VirtualClock, hangs, returns, virtual_environment

GOAL, DECOMPOSITION, ACTIONS, EXECUTION, REFLECTION = Phase
FETCH = ReplanCause("HTTP 503", action="fetch#1", lineage="fetch")
GIVEN: JsonObject = {"result": "it failed"}


class Prompts(ReplanPromptBuilder):
    """Writes nothing, and remembers what was to be written."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[DecisionRequest] = []

    def system(self) -> str:
        return "You plan."

    def decision(self, request: DecisionRequest) -> str:
        self.requests.append(request)
        return f"{request.phase}: {request.refusal} {request.problem} {request.rejected_reply}"


class Desk:
    """A manager with a scripted model, and everything that it was asked and noted."""

    def __init__(
        self,
        *replies,
        limits: ReplanLimits | None = None,
        clock: VirtualClock | None = None,
        **others,
    ) -> None:
        self.prompts = Prompts()
        self.notes: list[ReplanNote] = []
        self.clock = clock or VirtualClock()
        environment = Environment(clock=self.clock)
        self.llm = ScriptedLLM(list(replies), environment=virtual_environment(clock=self.clock))
        self.manager = ReplanManager(
            self.llm,
            self.prompts,
            limits,
            on_note=self.notes.append,
            environment=environment,
            **others,
        )

    async def consider(self, phase: Phase = EXECUTION, cause: ReplanCause = FETCH) -> Consideration:
        return await self.manager.consider(phase, GIVEN, cause)

    async def execute(
        self, considered: Consideration, error: Exception | None = None, **others
    ) -> DecisionRecord:
        async def apply(decision) -> None:
            self.clock.advance(2)
            if error is not None:
                raise error

        return await self.manager.execute_replan(considered, apply, **others)

    @property
    def stages(self) -> list[str]:
        return [note.stage for note in self.notes]


def says(kind="partial_replan", confidence=0.9, **changes):
    """A reply that wants something, or nothing."""
    fields = {
        "replan_needed": kind != "none",
        "confidence": confidence,
        "reasoning": "so",
        "replan_type": kind,
    }
    return {"replan_decision": {**fields, **changes}}


async def test_not_needed():
    """If the model wants no replan, the run continues and that is recorded; a model and prompts are enough for it."""
    manager = ReplanManager(ScriptedLLM([says("none", 0.7)]), Prompts())
    assert (await manager.consider(REFLECTION, {})).ruling.kind == "continue"
    assert repr(manager) == "<ReplanManager scripted 0 of 10 replans>"
    (record,) = manager.records
    assert (record.result, record.executed, record.override_reason, record.confidence) == (
        "skipped",
        False,
        None,
        0.7,
    )


async def test_what_the_prompt_is_given():
    """The prompt is given the phase, its result, the cause, what is open, what was spent and all decisions before."""
    desk = Desk(says(), says("none"), options=LLMOptions(temperature=0, max_tokens=77))
    record = await desk.execute(await desk.consider())
    await desk.consider()
    first, second = desk.prompts.requests
    assert (first.phase, first.prompt_data, first.cause, first.earlier_decisions) == (
        EXECUTION,
        GIVEN,
        FETCH,
        (),
    )
    assert ReplanType.RETRY in first.replan_types
    assert (second.counts.total, second.earlier_decisions, second.limits) == (
        1,
        (record,),
        ReplanLimits(),
    )
    options = desk.llm.requests[0].options
    assert (options.system, options.temperature, options.max_tokens) == ("You plan.", 0, 77)


@pytest.mark.parametrize(
    ("limits", "blocks", "reason"),
    [
        ({"total": 0}, None, "no model was asked: the limit of 0 replans in total is reached"),
        (
            {"replans_per_lineage": 0, "action_retries": 0},
            "fetch",
            "the limit of 0 retries of action 'fetch#1' is reached",
        ),
    ],
)
async def test_limits_before_anybody_is_asked(limits, blocks, reason):
    """If the limits allow no replan, no model is asked; the run continues or its task is blocked, with the reason."""
    desk = Desk(limits=ReplanLimits(**limits))
    assert not desk.manager.can_replan(EXECUTION, FETCH)
    considered = await desk.consider()
    ruling = considered.ruling
    assert (desk.llm.requests, ruling.kind, ruling.needs_escalation, ruling.blocks) == (
        [],
        "continue",
        False,
        blocks,
    )
    assert reason in ruling.reason
    (record,) = desk.manager.records
    assert (record.llm_decision, record.override_reason) == (None, "limit")


async def test_should_override():
    """The reason for overriding a decision can be queried in advance."""
    manager = Desk(limits=ReplanLimits(partial_replans=0)).manager
    decision = manager.parse_decision_response(json.dumps(says()), EXECUTION)
    unsure = manager.parse_decision_response(json.dumps(says("retry", 0.1)), EXECUTION)
    contradictory = decision.model_copy(update={"replan_needed": False})
    reasons = [manager.should_override(one, FETCH) for one in (decision, unsure, contradictory)]
    assert reasons == ["limit", "confidence", None]
    assert manager.should_override(unsure) is None
    assert manager.can_replan(EXECUTION, FETCH)
    with pytest.raises(LLMResponseInvalid, match="no JSON object"):
        manager.parse_decision_response("no", EXECUTION)


@pytest.mark.parametrize(
    ("second", "kind", "instead_of", "second_record"),
    [
        (says("action_regeneration"), "execute", "p1", []),
        (says("none"), "continue", "p1", [("p2", None)]),
        (says(), "skip", "p1", [("p2", "limit")]),
        ("I do not know.", "skip", None, []),
        (LLMUnavailable("busy"), "skip", None, []),
    ],
    ids=["other", "none", "same", "unusable", "absent"],
)
async def test_another_way_instead_of_a_limit(second, kind, instead_of, second_record):
    """A replan that a limit forbids is told to the model once, without a repair prompt, and no third time."""
    desk = Desk(says(), second, limits=ReplanLimits(partial_replans=0))
    considered = await desk.consider()
    assert (considered.ruling.kind, considered.instead_of) == (kind, instead_of)
    assert considered.ruling.needs_escalation is (kind == "skip")
    assert instead_of is None or await desk.manager.escalate(considered, GIVEN, "again") is None
    assert len(desk.llm.requests) == 2
    assert desk.prompts.requests[1].refusal == "the limit of 0 partial replans is reached"
    overridden = [(one.replan_id, one.override_reason) for one in desk.manager.records]
    assert overridden == [("p1", "limit"), *second_record]


@pytest.mark.parametrize(
    ("second", "kind", "override"),
    [("partial_replan", "skip", "loop"), ("action_regeneration", "execute", None)],
)
async def test_model_is_told_once(second, kind, override):
    """The third time the model is told that it repeats itself and asked once for another approach; later it is not."""
    desk = Desk(
        says(), says(), says(), says(second), says(), limits=ReplanLimits(partial_replans=9)
    )
    for _ in range(2):
        await desk.execute(await desk.consider())
    third = await desk.consider()
    assert (third.ruling.kind, third.ruling.override, third.decision.replan_type) == (
        kind,
        override,
        second,
    )
    assert [record.override_reason for record in desk.manager.records[:3]] == [None, None, "loop"]
    assert (
        desk.prompts.requests[3].refusal
        == "the same partial_replan has run 2 times for the same cause"
    )
    fourth = await desk.consider()
    assert (fourth.ruling.override, len(desk.llm.requests)) == ("loop", 5)
    assert desk.manager.counts.warned == (fourth.ruling.fingerprint,)


async def test_one_repair_prompt():
    """A reply that cannot be used is shown to the model once, with what is wrong and no more of it than fits."""
    desk = Desk("x" * 9000, says("none"))
    considered = await desk.consider()
    assert considered.ruling.reason == "the model sees no need to replan"
    repair = desk.prompts.requests[1]
    assert (repair.rejected_reply, repair.problem[:31]) == (
        "x" * 4000,
        "the reply holds no JSON object;",
    )
    assert len(desk.manager.records) == 1


async def test_no_replan_after_the_repair():
    """If the second reply is unusable, too, there is no replan, which is recorded with the reason."""
    desk = Desk("hm", says(confidence=85))
    considered = await desk.consider()
    assert (considered.normalised, considered.ruling.kind) == ((None, ()), "continue")
    (record,) = desk.manager.records
    assert (record.llm_decision, record.confidence, record.executed) == (None, None, False)
    assert record.error == "confidence: Input should be less than or equal to 1, got 85"
    assert len(desk.llm.requests) == 2


@pytest.mark.parametrize(
    ("reply", "problem", "seconds"),
    [
        (LLMUnavailable("busy"), "busy", 0),
        (BudgetExceeded("no calls are left"), "no calls are left", 0),
        (hangs(), "", 30),
    ],
)
async def test_model_that_cannot_be_asked(reply, problem, seconds):
    """A model that fails, or does not answer in time, means no replan, and is not asked again at once."""
    async with VirtualClock() as clock:
        desk = Desk(reply, clock=clock)
        considered = await desk.consider()
    assert (considered.ruling.kind, considered.seconds, len(desk.llm.requests)) == (
        "continue",
        seconds,
        1,
    )
    assert problem in considered.problem


async def test_failed_replan_is_told():
    """A replan that failed is on record with its error, told to the model, and another decision may follow."""
    desk = Desk(says(), says("full_replan"))
    considered = await desk.consider()
    record = await desk.execute(considered, ChangeRejected([]))
    assert (record.result, record.executed, desk.stages[-1]) == ("failure", True, "failed")
    other = await desk.manager.escalate(considered, GIVEN, record.error)
    assert other is not None
    assert (other.instead_of, other.ruling.kind) == ("p1", "execute")
    assert desk.prompts.requests[1].refusal == record.error != ""
    assert await desk.manager.escalate(other, GIVEN, "failed, too") is None
    assert (desk.manager.counts.total, desk.manager.counts.partial_replans) == (1, 1)


async def test_a_replan_that_comes_to_nothing_later():
    """A replan that was carried out and of which nothing came fails on its record, in the figures, and costs no more."""
    desk = Desk(says())
    considered = await desk.consider()
    await desk.execute(considered)
    record = desk.manager.record_failure(considered, "no plan")
    assert desk.manager.records == (record,)
    assert (record.executed, record.result, record.error, desk.stages[-1]) == (
        True,
        "failure",
        "no plan",
        "failed",
    )
    assert (desk.manager.get_replan_statistics().failed, desk.manager.counts.total) == (1, 1)


async def test_what_is_left_is_on_record_once():
    """A decision that something else takes the place of is on record as not executed, and not twice."""
    desk = Desk(says())
    considered = await desk.consider()
    desk.manager.record_skipped(considered)
    desk.manager.record_skipped(considered)
    assert [(one.executed, one.result) for one in desk.manager.records] == [(False, "skipped")]


async def test_store_that_fails_is_not_contained():
    """Without its journal a run cannot go on, so that error is not swallowed."""
    desk = Desk(says())
    considered = await desk.consider()
    with pytest.raises(StoreError, match="full"):
        await desk.execute(considered, StoreError("the disk is full"))


async def test_cancelled_replan_is_no_failure():
    """A replan that is cut off by cancellation is not on record as failed, so that it can be resumed."""
    desk = Desk(says())
    considered = await desk.consider()

    async def apply(decision) -> None:
        await anyio.sleep_forever()

    with anyio.CancelScope() as scope:
        scope.cancel()
        await desk.manager.execute_replan(considered, apply)
    assert (desk.manager.records, desk.stages[-1]) == ((), "applying")


async def test_nothing_to_execute():
    """A decision that must not be executed is refused, and nothing is spent."""
    desk = Desk(says("none"), says(confidence=0.1), "?", "?")
    for _ in range(3):
        considered = await desk.consider()
        with pytest.raises(ValueError, match="must not be executed"):
            await desk.execute(considered)
    assert desk.manager.counts.total == 0


async def test_question_without_replan():
    """A question beside a decision is counted when it is decided, a clarification request when it is executed."""
    ask = {"clarification_needed": True, "clarification_questions": ["Which?"]}
    desk = Desk(says("none", **ask), says("clarification_request", **ask), says("none", **ask))
    beside = await desk.consider(GOAL, ReplanCause())
    assert (beside.ruling.questions, desk.manager.counts.clarifications) == (("Which?",), 1)
    request = await desk.consider(GOAL, ReplanCause())
    assert desk.manager.counts.clarifications == 1
    await desk.execute(request)
    assert (desk.manager.counts.clarifications, desk.manager.counts.total) == (2, 1)
    assert (await desk.consider(GOAL, ReplanCause())).ruling.questions == ()


@pytest.mark.parametrize(
    "more", [{}, {"clarification_needed": True, "clarification_questions": ["Which?"]}]
)
async def test_question_beside_a_refused_replan(more):
    """A question beside a replan that a limit forbids is asked with what is decided instead, and counted once."""
    ask = {"clarification_needed": True, "clarification_questions": ["Which?"]}
    desk = Desk(says(**ask), says("retry", **more), limits=ReplanLimits(partial_replans=0))
    considered = await desk.consider()
    assert (considered.ruling.kind, considered.ruling.questions) == ("execute", ("Which?",))
    assert desk.manager.counts.clarifications == 1


async def test_record():
    """A record holds what the model said in full, what counted, what came of it, and how long that took."""
    async with VirtualClock(start=0) as clock:
        desk = Desk(returns(says("retry", 0.6, replan_level=4, mood="calm"), after=3), clock=clock)
        considered = await desk.consider()
        clock.advance(100)  # waiting does not count
        record = await desk.execute(considered)
    assert record.model_dump(mode="json", exclude={"llm_decision"}) == {
        "replan_id": "p1",
        "phase": "execution",
        "confidence": 0.6,
        "executed": True,
        "override_reason": None,
        "timestamp": "1970-01-01T00:00:00.000000Z",
        "result": "success",
        "duration": 5.0,
        "reason": "its confidence is 0.6, below 0.8",
        "notes": ["replan_level was 4, but retry has level 1"],
        "replan_type": "retry",
        "cause": {"error": "HTTP 503", "action": "fetch#1", "lineage": "fetch"},
        "error": "",
        "instead_of": None,
    }
    assert {
        "replan_level": 4,
        "mood": "calm",
        "replan_type": "retry",
    }.items() <= record.llm_decision.items()
    assert DecisionRecord.model_validate_json(record.model_dump_json()) == record


async def test_every_step_is_noted_before_its_effect():
    """Each step is noted with what is spent from then on, before anything is asked or done."""
    desk = Desk(says("retry"))
    considered = await desk.consider()

    async def apply(decision) -> None:
        assert (desk.notes[-1].stage, desk.notes[-1].counts.total) == ("applying", 1)

    await desk.manager.execute_replan(considered, apply)
    desk.manager.action_succeeded("fetch#1")
    desk.manager.action_succeeded("fetch#1")
    assert desk.stages == ["deciding", "generating", "applying", "applied", "idle"]
    assert desk.manager.counts.retries == desk.notes[-1].counts.retries == {}
    for note in desk.notes:
        assert ReplanNote.model_validate_json(note.model_dump_json()) == note


async def test_resumed_in_another_process():
    """With the newest note a replan goes on elsewhere: counts go on, nothing is counted twice, and ids are new."""
    desk = Desk(says(confidence=0.4))
    waiting = Consideration.model_validate_json((await desk.consider()).model_dump_json())
    other = Desk(
        says("none"), counts=ReplanCounts.model_validate_json(desk.manager.counts.model_dump_json())
    )
    await other.execute(waiting)
    assert other.manager.counts.partial_replans == 1

    interrupted = Desk(says("none"), counts=other.manager.counts, records=other.manager.records)
    await interrupted.execute(waiting, resumed=True)
    assert interrupted.manager.counts.partial_replans == 1
    assert (await interrupted.consider()).replan_id == "p2"
    assert len(interrupted.manager.records) == 3


async def test_statistics():
    """The statistics count what was wanted, followed, overridden and how it ended."""
    desk = Desk(
        says("retry", 1.0), says("none"), says(confidence=0.5), says(confidence=0.1), "?", "?"
    )
    empty = desk.manager.get_replan_statistics()
    assert (empty.decisions, empty.success_rate, empty.mean_confidence) == (0, None, None)
    await desk.execute(await desk.consider())
    await desk.consider()
    await desk.execute(await desk.consider(), RuntimeError("no"))
    await desk.consider()
    await desk.consider()
    figures = desk.manager.get_replan_statistics()
    assert (
        figures.decisions,
        figures.wanted,
        figures.executed,
        figures.succeeded,
        figures.failed,
    ) == (5, 3, 2, 1, 1)
    assert figures.success_rate == 0.5
    assert figures.mean_confidence == pytest.approx(1.6 / 3)
    assert figures.by_phase == {EXECUTION: 2}
    assert figures.by_type == {ReplanType.RETRY: 1, ReplanType.PARTIAL_REPLAN: 1}
    assert figures.overridden == {"confidence": 1}
    assert figures.seconds == 4
