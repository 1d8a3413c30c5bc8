"""Asks a model for a decision, and says where there is none why not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

from replanning.environment import Environment
from replanning.errors import (
    BudgetExceeded,
    LLMError,
    LLMRequestRejected,
    LLMResponseInvalid,
    LLMTimeout,
    LLMUnavailable,
    StoreError,
)
from replanning.history.wording import format_iso_time
from replanning.llm.completions import Completion, LLMOptions
from replanning.llm.provider import LLMProvider
from replanning.plan.types import JsonObject
from replanning.planning.decision_records import (
    Consideration,
    DecisionRecord,
    ReplanNote,
    ReplanStage,
    ReplanStatistics,
    replan_statistics,
)
from replanning.planning.decisions import Phase, ReplanDecision, ReplanType, decision_model, normalise, parse_decision
from replanning.planning.limits import (
    OverrideReason,
    ReplanCause,
    ReplanCounts,
    ReplanLimits,
    Ruling,
    available_replan_types,
    exhausted_limits,
    exhausted_lineage,
    make_ruling,
)

_MAX_REPLY_CHARS: Final = 4000
"""Characters of a reply that cannot be used that are shown to the model again."""

MODEL_UNAVAILABLE_ERRORS: Final = (LLMUnavailable, LLMTimeout, LLMRequestRejected)
"""Errors that say nothing of what was asked: the model was not there, or took no request."""


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """What a decision prompt is made of.

    Attributes:
        phase: what was done.
        prompt_data: what the phase came to, and what it is to be judged by.
        cause: what the decision is about.
        replan_types: the replans that limits leave.
        counts: what was spent so far.
        limits: how much there is.
        earlier_decisions: the decisions so far, oldest first.
        refusal: why what the model wanted cannot be done; it is asked for another way. Empty at first.
        rejected_reply: its reply that could not be used, cut short; empty at first.
        problem: what is wrong with that reply.
    """

    phase: Phase
    prompt_data: JsonObject
    cause: ReplanCause
    replan_types: tuple[ReplanType, ...]
    counts: ReplanCounts
    limits: ReplanLimits
    earlier_decisions: tuple[DecisionRecord, ...] = ()
    refusal: str = ""
    rejected_reply: str = ""
    problem: str = ""


class DecisionPrompts(Protocol):
    """Writes what a model is asked."""

    def system(self) -> str:
        """What the model is told about its role."""
        ...

    def decision(self, request: DecisionRequest) -> str:
        """The question whether to replan; with `refusal` for another way, with `problem` for a usable reply."""
        ...


class DecisionResponse(NamedTuple):
    """What came of asking a model: its decision, or why there is none."""

    decision: ReplanDecision | None
    problem: str = ""
    model_unavailable: bool = False
    """Whether the model could not be asked at all, so that there may be a decision later."""
    unusable_text: str | None = None
    """What the model said, where that cannot be used."""


class DecisionClient:
    """Asks a model whether to replan.

    Args:
        llm: who is asked.
        prompts: what it is asked.
        options: how.
    """

    def __init__(self, llm: LLMProvider, prompts: DecisionPrompts, options: LLMOptions) -> None:
        self.llm = llm
        self._prompts, self._options = prompts, options

    def __repr__(self) -> str:
        return f"<Deciding by {self.llm.name}>"

    async def ask(self, request: DecisionRequest) -> DecisionResponse:
        """What a model decides; it is told once what was wrong with its reply. Nothing usable is no decision."""
        reply = await self.ask_once(request)
        if reply.unusable_text is None:
            return reply
        return await self.ask_once(
            replace(request, rejected_reply=reply.unusable_text[:_MAX_REPLY_CHARS], problem=reply.problem)
        )

    async def ask_once(self, request: DecisionRequest) -> DecisionResponse:
        """What a single call comes to."""
        options = replace(self._options, system=self._prompts.system(), schema=decision_model(request.phase))
        try:
            completion = await self.llm.complete_detailed(self._prompts.decision(request), options)
        except (LLMError, BudgetExceeded) as error:
            return DecisionResponse(None, str(error), isinstance(error, MODEL_UNAVAILABLE_ERRORS))
        try:
            return DecisionResponse(parse_decision(completion.text, request.phase))
        except LLMResponseInvalid as error:
            return DecisionResponse(None, reply_problem(completion, str(error)), unusable_text=completion.text)


def reply_problem(completion: Completion, problem: str) -> str:
    """What is wrong with a reply, for the model; one that was cut off is that first of all."""
    if completion.finish != "length":
        return problem
    return f"it was cut off after {completion.output_tokens} tokens, so it must be shorter ({problem})"


_MAX_ERROR_CHARS: Final = 2000
"""Characters of an error that are kept."""

ApplyReplan = Callable[[ReplanDecision], Awaitable[None]]
"""Carries out a replan; an exception says that it failed."""


class ReplanManager:
    """Decides on replans with a model, within limits that it cannot escape.

    ::

        manager = ReplanManager(model, prompts, Limits.of(settings.planning))
        considered = await manager.consider(Phase.ACTION_SEQUENCE, {"action_plan": plan})
        if considered.ruling.executes:
            record = await manager.execute_replan(considered, apply)

    Args:
        llm: who is asked.
        prompts: what it is asked.
        limits: how often may be replanned, and how sure the model must be.
        counts: what was spent before, when a run is resumed.
        records: the decisions before, likewise.
        note: is told of every step before it has an effect, to put it on record.
        options: how the model is asked, such as with the meter of the run.
        environment: where time comes from.
    """

    def __init__(
        self,
        llm: LLMProvider,
        prompts: DecisionPrompts,
        limits: ReplanLimits | None = None,
        *,
        counts: ReplanCounts | None = None,
        records: Sequence[DecisionRecord] = (),
        on_note: Callable[[ReplanNote], None] | None = None,
        options: LLMOptions | None = None,
        environment: Environment | None = None,
    ) -> None:
        self.limits = limits or ReplanLimits()
        self._decision_client = DecisionClient(llm, prompts, options or LLMOptions())
        self._counts, self._records = counts or ReplanCounts(), list(records)
        self._on_note = on_note
        self._clock = (environment or Environment()).clock

    def __repr__(self) -> str:
        return f"<ReplanManager {self._decision_client.llm.name} {self._counts.total} of {self.limits.total} replans>"

    @property
    def counts(self) -> ReplanCounts:
        """What was spent so far."""
        return self._counts

    @property
    def records(self) -> tuple[DecisionRecord, ...]:
        """The decisions so far, oldest first."""
        return tuple(self._records)

    def can_replan(self, phase: Phase, cause: ReplanCause | None = None) -> bool:
        """Whether limits leave a phase any replan; where not, no model is asked."""
        return bool(available_replan_types(phase, self.limits, self._counts, cause or ReplanCause()))

    def should_override(self, decision: ReplanDecision, cause: ReplanCause | None = None) -> OverrideReason | None:
        """Why a decision would not be followed; None where it would, or wants nothing."""
        return make_ruling(normalise(decision).decision, self.limits, self._counts, cause or ReplanCause()).override

    def parse_decision_response(self, text: str, phase: Phase) -> ReplanDecision:
        """The decision in a reply.

        Raises:
            LLMReplyInvalid: there is none; says everything that is wrong.
        """
        return parse_decision(text, phase)

    async def consider(self, phase: Phase, given: JsonObject, cause: ReplanCause | None = None) -> Consideration:
        """Whether to replan after a phase, and what becomes of that.

        No model is asked where limits leave nothing. A replan that a limit or a loop forbids is told to the model, once,
        which may decide otherwise. What is not followed is on record at once; what is, when it has been executed.

        Args:
            phase: what was done.
            given: what it came to, for the prompt.
            cause: what is decided about: an action with its error; nothing in particular when left out.
        """
        cause = cause or ReplanCause()
        if closed := exhausted_limits(phase, self.limits, self._counts, cause):
            blocks = exhausted_lineage(self.limits, self._counts, cause)
            ruling = Ruling("continue", f"no model was asked: {closed}", blocks=blocks)
            return self._record_ruling(
                self._build_consideration(phase, cause, DecisionResponse(None), ruling, began=self._clock.now())
            )
        began = self._clock.now()
        self._notify("deciding")
        reply = await self.request_llm_decision(self._decision_request(phase, given, cause))
        first = self._record_ruling(
            self._build_consideration(phase, cause, reply, self._ruling(reply, cause), began=began)
        )
        if not first.ruling.needs_escalation:
            return first
        return await self._request_alternative(first, given, first.ruling.reason, first.ruling.questions) or first

    async def escalate(self, refused: Consideration, given: JsonObject, reason: str) -> Consideration | None:
        """What the model decides instead of a replan that cannot be done, or that failed.

        Args:
            refused: what was wanted.
            given: what the phase came to, for the prompt.
            reason: why it cannot be.

        Returns:
            Another decision; None when the model gives none, or was told already: then a person must know.
        """
        return await self._request_alternative(refused, given, reason, ())

    async def _request_alternative(
        self, refused: Consideration, given: JsonObject, reason: str, questions: tuple[str, ...]
    ) -> Consideration | None:
        mark = refused.ruling.fingerprint
        loops = refused.ruling.override == "loop"
        if refused.instead_of is not None or (loops and mark in self._counts.told):
            return None
        if loops:
            self._counts = self._counts.add_loop_warning(mark)
        began = self._clock.now()
        self._notify("deciding")
        request = replace(self._decision_request(refused.phase, given, refused.cause), refusal=reason)
        reply = await self._decision_client.ask_once(request)
        if reply.decision is None:
            self._notify("idle")
            return None
        other = self._ruling(reply, refused.cause, questions)
        return self._record_ruling(
            self._build_consideration(
                refused.phase, refused.cause, reply, other, began=began, instead_of=refused.replan_id
            )
        )

    async def request_llm_decision(self, request: DecisionRequest) -> DecisionResponse:
        """Ask for a decision; the model is told once what was wrong with its reply. Nothing usable is no decision."""
        return await self._decision_client.ask(request)

    async def execute_replan(
        self, considered: Consideration, apply: ApplyReplan, *, resumed: bool = False
    ) -> DecisionRecord:
        """Carry out a replan: that its ruling lets be executed, or that the user agreed to.

        It is counted before it begins and however it ends. What goes wrong is on record and goes no further. Limits
        that were reached since it was considered hold: then it is skipped.

        Args:
            considered: the replan.
            apply: does it.
            resumed: whether it had begun before the run was interrupted, so that it is counted already.

        Raises:
            ValueError: there is nothing to execute.
            StoreError: the journal could not be written.
        """
        decision = considered.decision
        if decision is None or considered.ruling.kind not in ("execute", "execute_with_warning", "ask"):
            raise ValueError(f"{considered.replan_id} is not to be executed: {considered.ruling.reason}")
        if not resumed:
            ruling = make_ruling(decision, self.limits, self._counts, considered.cause)
            if ruling.needs_escalation:  # while the user thought about it, others were executed
                return self.record_decision(considered.model_copy(update={"ruling": ruling}), executed=False)
            self._counts = self._counts.add_replan(decision, considered.cause)
        self._notify("applying", considered)
        began, error = self._clock.now(), ""
        try:
            await apply(decision)
        except StoreError:  # without its journal a run ends
            raise
        except Exception as caught:  # noqa: BLE001 - a replan that fails leaves the run as it was; who asked is told
            error = str(caught)[:_MAX_ERROR_CHARS] or type(caught).__name__
        return self.record_decision(considered, executed=True, error=error, seconds=self._clock.now() - began)

    def record_decision(
        self, considered: Consideration, *, executed: bool, error: str = "", seconds: float = 0.0
    ) -> DecisionRecord:
        """Put on record what became of a decision.

        Args:
            considered: the decision.
            executed: whether it was followed; one that the user declined was not.
            error: why it failed.
            seconds: how long it took beside deciding; waiting for a person does not count.
        """
        record = DecisionRecord.from_consideration(considered, executed=executed, error=error, seconds=seconds)
        self._records.append(record)
        stage: ReplanStage = "idle" if not executed else "failed" if error else "applied"
        self._notify(stage, considered, record)
        return record

    def record_skipped(self, considered: Consideration) -> None:
        """Put on record that what was decided is not done, because something else is; not twice."""
        if all(record.replan_id != considered.replan_id for record in self._records):
            self.record_decision(considered, executed=False)

    def record_failure(self, considered: Consideration, error: str) -> DecisionRecord:
        """Put on record that a replan that was carried out has failed after all, as no plan came of it.

        Args:
            considered: the replan.
            error: why.

        Raises:
            ValueError: it was not carried out.
        """
        places = [place for place, one in enumerate(self._records) if one.replan_id == considered.replan_id]
        if not places or not self._records[places[-1]].executed:
            raise ValueError(f"{considered.replan_id} was not executed")
        failed: dict[str, object] = {"result": "failure", "error": error[:_MAX_ERROR_CHARS]}
        record = self._records[places[-1]] = self._records[places[-1]].model_copy(update=failed)
        self._notify("failed", considered, record)
        return record

    def action_succeeded(self, action: str) -> None:
        """Take note that an action succeeded, so that its retries begin anew."""
        if action in self._counts.retries:
            self._counts = self._counts.reset_retries(action)
            self._notify("idle")

    def get_replan_statistics(self) -> ReplanStatistics:
        """The decisions so far in figures."""
        return replan_statistics(self._records)

    def _decision_request(self, phase: Phase, given: JsonObject, cause: ReplanCause) -> DecisionRequest:
        left = available_replan_types(phase, self.limits, self._counts, cause)
        return DecisionRequest(phase, given, cause, left, self._counts, self.limits, self.records)

    def _ruling(self, reply: DecisionResponse, cause: ReplanCause, questions: tuple[str, ...] = ()) -> Ruling:
        """What becomes of a reply; questions that are still to be asked, and are counted, stay with it."""
        if reply.decision is None:
            return Ruling("continue", f"there is no decision: {reply.problem}")
        decision = normalise(reply.decision).decision
        ruling = make_ruling(decision, self.limits, self._counts, cause)
        if questions:
            return replace(ruling, questions=ruling.questions or questions)
        if ruling.questions and decision.replan_type is not ReplanType.CLARIFICATION_REQUEST:
            self._counts = self._counts.add_clarification()  # a request is counted when it is executed
        return ruling

    def _record_ruling(self, considered: Consideration) -> Consideration:
        """A decision that is to be executed, or about which a person decides; any other is settled."""
        if considered.ruling.is_executable or considered.ruling.kind == "ask":
            self._notify("awaiting_user" if considered.ruling.kind == "ask" else "generating", considered)
        else:
            self.record_decision(considered, executed=False)
        return considered

    def _build_consideration(
        self,
        phase: Phase,
        cause: ReplanCause,
        reply: DecisionResponse,
        ruling: Ruling,
        *,
        began: float,
        instead_of: str | None = None,
    ) -> Consideration:
        self._counts = self._counts.add_considered()
        return Consideration(
            replan_id=f"p{self._counts.considered}",
            phase=phase,
            cause=cause,
            said=None if reply.decision is None else reply.decision.model_dump(mode="json"),
            problem=reply.problem,
            unasked=reply.model_unavailable,
            ruling=ruling,
            timestamp=format_iso_time(began),
            seconds=self._clock.now() - began,
            instead_of=instead_of,
        )

    def _notify(
        self, stage: ReplanStage, considered: Consideration | None = None, record: DecisionRecord | None = None
    ) -> None:
        if self._on_note is not None:
            self._on_note(ReplanNote(stage=stage, counts=self._counts, considered=considered, record=record))
