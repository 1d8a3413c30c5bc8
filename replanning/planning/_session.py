"""One run of planning mode in this process: what it remembers, whom it asks, and what it puts on record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, TypeVar

from pydantic import BaseModel

from replanning._clock import Environment
from replanning._completions import LLMOptions
from replanning._errors import LLMResponseInvalid, ReplanningError
from replanning._ids import TaskId
from replanning._llm import LLMProvider
from replanning._plan import JsonObject, JsonValue, Task, ToolSpec
from replanning._quoting import is_truncated
from replanning._run import PlanRun
from replanning._secrets import MASK, is_redacted
from replanning._settings import Settings
from replanning.planning._deciding import reply_problem
from replanning.planning._decision import ReplanDecision
from replanning.planning._limits import ReplanCause, ReplanLimits
from replanning.planning._manager import ApplyReplan, ReplanManager
from replanning.planning._people import HumanInput, PlanningFailed
from replanning.planning._phases import Phase
from replanning.planning._prompts import MAX_PLAN_TOKENS, MAX_TOKENS_BY_KIND, ReplanPromptBuilder
from replanning.planning._replan_records import Consideration, DecisionRecord, ReplanNote
from replanning.planning._request import TaskRequest, request_of
from replanning.planning._standing import ExecutionStatus, executed_actions, latest_phase_output
from replanning.planning._state import PlanningState
from replanning.planning._steps import is_tool_loop, planning_metadata
from replanning.planning._templates import prompt_templates

MAX_REPAIRS: Final = 3
"""How often a model is told what is wrong with a plan before that is given up (E2)."""

_MAX_REPLY_CHARS: Final = 2_000
"""Characters of a reply that a model gets to see again."""

ParsedReply = TypeVar("ParsedReply")


class ToolNotAllowed(ReplanningError):
    """An action is to use a tool that may not be used."""


class NoUsableReply(PlanningFailed):
    """The model has not given an answer that can be used, however often it was told why."""


class UnexpectedResult(ReplanningError):
    """An action was executed, but it did not come to what it is for."""


class PlanningSession(HumanInput):
    """What the phases, the actions and the recovery of one run share.

    Args:
        run: the run.
        llm: who is asked.
        config: the settings.
        tools: those that may be used.
        environment: time, chance and ids.
        interactive: whether there is somebody to ask.
        plan_only: whether every argument must be planned, because nothing is executed.
    """

    def __init__(
        self,
        run: PlanRun,
        llm: LLMProvider,
        config: Settings,
        tools: Mapping[str, ToolSpec],
        environment: Environment,
        *,
        interactive: bool,
        plan_only: bool,
    ) -> None:
        self.run, self.llm, self.config, self.tools, self.clock = run, llm, config, tools, environment.clock
        self.settings = settings = config.planning
        self.interactive, self.plan_only = interactive, plan_only
        self.tool_loop_only = is_tool_loop(run.live.plan)
        self.request = request_of(run.live.plan) or TaskRequest(goal=run.live.goal)
        self.prompts = ReplanPromptBuilder(prompt_templates(), settings, tuple(tools.values()), redact=run.redact_value)
        self._state, self.execution_status = PlanningState(), ExecutionStatus()
        meter, self._max_tokens = run.meter("planning"), llm.max_tokens
        self._options = LLMOptions(
            system=self.prompts.system(), meter=meter, max_tokens=min(MAX_PLAN_TOKENS, self._max_tokens)
        )
        state = self.state
        self.manager = ReplanManager(
            llm,
            self.prompts,
            ReplanLimits.from_settings(settings, replans_per_lineage=config.limits.replans_per_lineage),
            counts=state.counts,
            records=state.records,
            on_note=self._on_replan,
            options=self._options,
            environment=environment,
        )

    @property
    def state(self) -> PlanningState:
        """What the journal tells by now."""
        for record in self.run.records(self._state.seq):
            self._state.fold(record)
            self.execution_status.fold(record, self.run.live)
        return self._state

    def note(self, kind: str, data: JsonObject) -> None:
        """Put something on record, as long as the run goes on; how it ends not twice, after an interruption."""
        said = kind == "completion" and self.state.completion == data
        if not (self.run.ended or said):
            self.run.note(kind, data)

    def _on_replan(self, note: ReplanNote) -> None:
        self.note("replan", note.model_dump(mode="json"))

    async def ask(
        self, kind: str, given: JsonObject, schema: type[BaseModel], read: Callable[[str], ParsedReply], *, repairs: int
    ) -> ParsedReply:
        """What a model answers, in the shape that is wanted.

        Raises:
            NoUsableReply: it has not given a usable answer, however often it was told why.
            LLMError: it cannot be asked.
            BudgetExceeded: asking it does not fit what is left of the budget.
        """
        problem, rejected = "", list[JsonValue]()
        options = replace(
            self._options,
            schema=schema,
            max_tokens=min(MAX_TOKENS_BY_KIND.get(kind, MAX_PLAN_TOKENS), self._max_tokens),
        )
        for _ in range(repairs + 1):
            self._refresh_tools()
            completion = await self.llm.complete_detailed(
                self.prompts.build(kind, {**given, "rejected": rejected}), options
            )
            try:
                return read(completion.text)
            except LLMResponseInvalid as error:
                problem = reply_problem(completion, str(error))
            rejected = [{"reply": completion.text[:_MAX_REPLY_CHARS], "problem": problem}]
        raise NoUsableReply(f"the model gave no usable {kind} in {repairs + 1} tries: {problem}")

    def refuse_secrets(self, given: Mapping[str, JsonValue]) -> None:
        """Refuse what looks like a secret in a reply: no record can hold it, and it would be missing where it is used.

        So would what the model was not shown, a secret or the end of a long text: no tool is used with a mark for it.

        Args:
            given: what a model says, by what it is to be.

        Raises:
            LLMReplyInvalid: with everything that looks so; not what it says.
        """
        for why, is_wrong in (
            ("what looks like a secret cannot be kept", lambda value: self.run.redact_value(value) != value),
            (f"{MASK} stands for a secret that you are not shown", is_redacted),
            ("[cut: …] stands for what you are not shown of a text or a list", is_truncated),
        ):
            if wrong := [what for what, value in given.items() if is_wrong(value)]:
                raise LLMResponseInvalid(f"{why}: do without it in {', '.join(wrong)}")

    # What is told of where things stand

    def phase_output(self, phase: Phase) -> JsonObject:
        """What a phase came to last; empty where it did not come to anything yet."""
        return latest_phase_output(self.state, self.run.live, phase)

    def prompt_data(self, task: Task | None = None) -> JsonObject:
        """What every phase is told: what is wanted, what is known, where things stand, and why it is done again."""
        state = self.state
        given: JsonObject = {
            **self.request.model_copy(update={"goal": self.run.live.goal}).prompt_data(),
            "context": dict(self.run.live.context),
            "answers": [{k: v for k, v in one.model_dump(mode="json").items() if v} for one in state.clarified],
            "goal_understanding": self.phase_output(Phase.GOAL_UNDERSTANDING),
            "task_decomposition": self.phase_output(Phase.TASK_DECOMPOSITION),
            "action_plan": state.plan.action_plan if state.plan is not None else {},
            "feedback": [dict(one) for one in state.reflections if "feedback" in one],
            "why": planning_metadata(task).get("reason", "") if task is not None else "",
            "executed": executed_actions(self.run.live, state),
            **self.execution_status.prompt_data(self.run.live, state),
        }
        return {name: value for name, value in given.items() if value}

    def current_tools(self) -> Mapping[str, ToolSpec]:
        """The tools that may be used as they are now, with those that are down marked as not available."""
        live = self.run.live.tools
        return {name: live.get(name, tool) for name, tool in self.tools.items()}

    def _refresh_tools(self) -> None:
        """Tell the model which tools are available now."""
        self.prompts.tools = tuple(self.current_tools().values())

    # What is decided

    async def consider_replan(
        self, task: TaskId, phase: Phase, given: JsonObject, cause: ReplanCause | None = None
    ) -> Consideration:
        """Whether to replan after a task; not asked again where the run was interrupted after that."""
        self._refresh_tools()
        known = self.state.judged.get(task)
        if known is not None:
            return known
        considered = await self.manager.consider(phase, given, cause)
        self.record_consideration(task, considered)
        return considered

    def record_consideration(self, task: str, considered: Consideration) -> None:
        """Put on record what was decided after a task."""
        self.note("judged", {"task": task, "considered": considered.model_dump(mode="json")})

    async def execute_replan(self, considered: Consideration, apply: ApplyReplan | None = None) -> DecisionRecord:
        """Carry out a replan; what was counted, or done, before an interruption is not counted, or done, again.

        Args:
            considered: the replan.
            apply: does what is to be done here; nothing, where the engine changes the plan.
        """
        state = self.state
        for record in reversed(state.records):
            if record.replan_id == considered.replan_id and record.executed:
                return record
        begun = considered.replan_id in state.begun
        return await self.manager.execute_replan(considered, apply or _no_change, resumed=begun)

    async def settle_approvals(self) -> None:
        """Count the replans that people have agreed to, and put on record those that they have not."""
        state = self.state
        recorded = {record.replan_id for record in state.records}
        for held in list(state.held.values()):
            one = held.considered
            if one is None or not held.verdict or one.ruling.kind != "ask" or one.replan_id in recorded:
                continue
            if held.verdict in ("approve", "modify"):
                await self.execute_replan(one)
            else:
                self.manager.record_decision(one, executed=False)


async def _no_change(decision: ReplanDecision) -> None:
    """What is done where the engine changes the plan."""
