"""Asks a model after each phase whether to replan, and keeps to what the rules make of its answer.

The rules are in `_limits`, and how a model is asked in `_deciding`; here is how often, and what is put on record before
anything is done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final

from replanning._clock import Environment
from replanning._completions import LLMOptions
from replanning._errors import StoreError
from replanning._llm import LLMProvider
from replanning._plan import JsonObject
from replanning.history._words import iso
from replanning.planning._deciding import Deciding, DecisionPrompts, DecisionRequest, Reply
from replanning.planning._decision import ReplanDecision, normalise, parse_decision
from replanning.planning._limits import (
    Cause,
    Counts,
    Limits,
    Override,
    Ruling,
    open_types,
    rule,
    spent_lineage,
    why_closed,
)
from replanning.planning._phases import Phase, ReplanType
from replanning.planning._replan_records import (
    Consideration,
    DecisionRecord,
    ReplanNote,
    ReplanStage,
    ReplanStatistics,
    statistics,
)

_LONGEST_ERROR: Final = 2000
"""Characters of an error that are kept."""

Apply = Callable[[ReplanDecision], Awaitable[None]]
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
        limits: Limits | None = None,
        *,
        counts: Counts | None = None,
        records: Sequence[DecisionRecord] = (),
        note: Callable[[ReplanNote], None] | None = None,
        options: LLMOptions | None = None,
        environment: Environment | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._deciding = Deciding(llm, prompts, options or LLMOptions())
        self._counts, self._records = counts or Counts(), list(records)
        self._note = note
        self._clock = (environment or Environment()).clock

    def __repr__(self) -> str:
        return f"<ReplanManager {self._deciding.llm.name} {self._counts.total} of {self.limits.total} replans>"

    @property
    def counts(self) -> Counts:
        """What was spent so far."""
        return self._counts

    @property
    def records(self) -> tuple[DecisionRecord, ...]:
        """The decisions so far, oldest first."""
        return tuple(self._records)

    def can_replan(self, phase: Phase, cause: Cause | None = None) -> bool:
        """Whether limits leave a phase any replan; where not, no model is asked."""
        return bool(open_types(phase, self.limits, self._counts, cause or Cause()))

    def should_override(self, decision: ReplanDecision, cause: Cause | None = None) -> Override | None:
        """Why a decision would not be followed; None where it would, or wants nothing."""
        return rule(normalise(decision).decision, self.limits, self._counts, cause or Cause()).override

    def parse_decision_response(self, text: str, phase: Phase) -> ReplanDecision:
        """The decision in a reply.

        Raises:
            LLMReplyInvalid: there is none; says everything that is wrong.
        """
        return parse_decision(text, phase)

    async def consider(self, phase: Phase, given: JsonObject, cause: Cause | None = None) -> Consideration:
        """Whether to replan after a phase, and what becomes of that.

        No model is asked where limits leave nothing. A replan that a limit or a loop forbids is told to the model, once,
        which may decide otherwise. What is not followed is on record at once; what is, when it has been executed.

        Args:
            phase: what was done.
            given: what it came to, for the prompt.
            cause: what is decided about: an action with its error; nothing in particular when left out.
        """
        cause = cause or Cause()
        if closed := why_closed(phase, self.limits, self._counts, cause):
            blocks = spent_lineage(self.limits, self._counts, cause)
            ruling = Ruling("continue", f"no model was asked: {closed}", blocks=blocks)
            return self._ruled(self._considered(phase, cause, Reply(None), ruling, began=self._clock.now()))
        began = self._clock.now()
        self._tell("deciding")
        reply = await self.request_llm_decision(self._request(phase, given, cause))
        first = self._ruled(self._considered(phase, cause, reply, self._ruling(reply, cause), began=began))
        if not first.ruling.escalates:
            return first
        return await self._another(first, given, first.ruling.reason, first.ruling.questions) or first

    async def escalate(self, refused: Consideration, given: JsonObject, reason: str) -> Consideration | None:
        """What the model decides instead of a replan that cannot be done, or that failed (E1, E3).

        Args:
            refused: what was wanted.
            given: what the phase came to, for the prompt.
            reason: why it cannot be.

        Returns:
            Another decision; None when the model gives none, or was told already: then a person must know.
        """
        return await self._another(refused, given, reason, ())

    async def _another(
        self, refused: Consideration, given: JsonObject, reason: str, questions: tuple[str, ...]
    ) -> Consideration | None:
        mark = refused.ruling.fingerprint
        loops = refused.ruling.override == "loop"
        if refused.instead_of is not None or (loops and mark in self._counts.told):
            return None
        if loops:
            self._counts = self._counts.tell(mark)
        began = self._clock.now()
        self._tell("deciding")
        request = replace(self._request(refused.phase, given, refused.cause), refused=reason)
        reply = await self._deciding.ask_once(request)
        if reply.decision is None:
            self._tell("idle")
            return None
        other = self._ruling(reply, refused.cause, questions)
        return self._ruled(
            self._considered(refused.phase, refused.cause, reply, other, began=began, instead_of=refused.replan_id)
        )

    async def request_llm_decision(self, request: DecisionRequest) -> Reply:
        """Ask for a decision; the model is told once what was wrong with its reply. Nothing usable is no decision."""
        return await self._deciding.ask(request)

    async def execute_replan(self, considered: Consideration, apply: Apply, *, resumed: bool = False) -> DecisionRecord:
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
            ruling = rule(decision, self.limits, self._counts, considered.cause)
            if ruling.escalates:  # while the user thought about it, others were executed
                return self.record_decision(considered.model_copy(update={"ruling": ruling}), executed=False)
            self._counts = self._counts.spend(decision, considered.cause)
        self._tell("applying", considered)
        began, error = self._clock.now(), ""
        try:
            await apply(decision)
        except StoreError:  # without its journal a run ends
            raise
        except Exception as caught:  # noqa: BLE001 - a replan that fails leaves the run as it was; who asked is told
            error = str(caught)[:_LONGEST_ERROR] or type(caught).__name__
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
        record = DecisionRecord.of(considered, executed=executed, error=error, seconds=seconds)
        self._records.append(record)
        stage: ReplanStage = "idle" if not executed else "failed" if error else "applied"
        self._tell(stage, considered, record)
        return record

    def leave(self, considered: Consideration) -> None:
        """Put on record that what was decided is not done, because something else is; not twice."""
        if all(record.replan_id != considered.replan_id for record in self._records):
            self.record_decision(considered, executed=False)

    def came_to_nothing(self, considered: Consideration, error: str) -> DecisionRecord:
        """Put on record that a replan that was carried out has failed after all, as no plan came of it (E3).

        Args:
            considered: the replan.
            error: why.

        Raises:
            ValueError: it was not carried out.
        """
        places = [place for place, one in enumerate(self._records) if one.replan_id == considered.replan_id]
        if not places or not self._records[places[-1]].executed:
            raise ValueError(f"{considered.replan_id} was not executed")
        failed: dict[str, object] = {"result": "failure", "error": error[:_LONGEST_ERROR]}
        record = self._records[places[-1]] = self._records[places[-1]].model_copy(update=failed)
        self._tell("failed", considered, record)
        return record

    def action_succeeded(self, action: str) -> None:
        """Take note that an action succeeded, so that its retries begin anew."""
        if action in self._counts.retries:
            self._counts = self._counts.succeeded(action)
            self._tell("idle")

    def get_replan_statistics(self) -> ReplanStatistics:
        """The decisions so far in figures."""
        return statistics(self._records)

    def _request(self, phase: Phase, given: JsonObject, cause: Cause) -> DecisionRequest:
        left = open_types(phase, self.limits, self._counts, cause)
        return DecisionRequest(phase, given, cause, left, self._counts, self.limits, self.records)

    def _ruling(self, reply: Reply, cause: Cause, questions: tuple[str, ...] = ()) -> Ruling:
        """What becomes of a reply; questions that are still to be asked, and are counted, stay with it."""
        if reply.decision is None:
            return Ruling("continue", f"there is no decision: {reply.problem}")
        decision = normalise(reply.decision).decision
        ruling = rule(decision, self.limits, self._counts, cause)
        if questions:
            return replace(ruling, questions=ruling.questions or questions)
        if ruling.questions and decision.replan_type is not ReplanType.CLARIFICATION_REQUEST:
            self._counts = self._counts.ask()  # a request is counted when it is executed
        return ruling

    def _ruled(self, considered: Consideration) -> Consideration:
        """A decision that is to be executed, or about which a person decides; any other is settled."""
        if considered.ruling.executes or considered.ruling.kind == "ask":
            self._tell("awaiting_user" if considered.ruling.kind == "ask" else "generating", considered)
        else:
            self.record_decision(considered, executed=False)
        return considered

    def _considered(
        self, phase: Phase, cause: Cause, reply: Reply, ruling: Ruling, *, began: float, instead_of: str | None = None
    ) -> Consideration:
        self._counts = self._counts.consider()
        return Consideration(
            replan_id=f"p{self._counts.considered}",
            phase=phase,
            cause=cause,
            said=None if reply.decision is None else reply.decision.model_dump(mode="json"),
            problem=reply.problem,
            unasked=reply.unasked,
            ruling=ruling,
            timestamp=iso(began),
            seconds=self._clock.now() - began,
            instead_of=instead_of,
        )

    def _tell(
        self, stage: ReplanStage, considered: Consideration | None = None, record: DecisionRecord | None = None
    ) -> None:
        if self._note is not None:
            self._note(ReplanNote(stage=stage, counts=self._counts, considered=considered, record=record))
