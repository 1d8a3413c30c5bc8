"""One run of planning mode in this process: what it remembers, whom it asks, and what it puts on record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, TypeVar

from pydantic import BaseModel

from replanning._clock import Environment
from replanning._completions import LLMOptions
from replanning._errors import LLMReplyInvalid, ReplanningError
from replanning._ids import TaskId
from replanning._llm import LLMProvider
from replanning._plan import JsonObject, JsonValue, Task, ToolSpec
from replanning._quoting import is_cut
from replanning._run import PlanRun
from replanning._secrets import MASK, is_marked
from replanning._settings import Settings
from replanning.planning._deciding import explained
from replanning.planning._decision import ReplanDecision
from replanning.planning._limits import Cause, Limits
from replanning.planning._manager import Apply, ReplanManager
from replanning.planning._people import People, PlanningFailed
from replanning.planning._phases import Phase
from replanning.planning._prompts import PLAN_TOKENS, TOKENS, ReplanPromptBuilder
from replanning.planning._replan_records import Consideration, DecisionRecord, ReplanNote
from replanning.planning._request import TaskRequest, request_of
from replanning.planning._standing import Standing, executed, output_of
from replanning.planning._state import PlanningState
from replanning.planning._steps import about, is_loop
from replanning.planning._templates import prompt_templates

REPAIRS: Final = 3
"""How often a model is told what is wrong with a plan before that is given up (E2)."""

_LONGEST: Final = 2_000
"""Characters of a reply that a model gets to see again."""

Answer = TypeVar("Answer")


class ToolNotAllowed(ReplanningError):
    """An action is to use a tool that may not be used."""


class NoUsableReply(PlanningFailed):
    """The model has not given an answer that can be used, however often it was told why."""


class UnexpectedResult(ReplanningError):
    """An action was executed, but it did not come to what it is for."""


class Session(People):
    """What the phases, the actions and the recovery of one run share.

    Args:
        run: the run.
        llm: who is asked.
        config: the settings.
        tools: those that may be used.
        environment: time, chance and ids.
        interactive: whether there is somebody to ask.
        complete: whether every argument must be planned, because nothing is executed.
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
        complete: bool,
    ) -> None:
        self.run, self.llm, self.config, self.tools, self.clock = run, llm, config, tools, environment.clock
        self.settings = settings = config.planning
        self.interactive, self.complete = interactive, complete
        self.loops = is_loop(run.live.plan)
        self.request = request_of(run.live.plan) or TaskRequest(goal=run.live.goal)
        self.prompts = ReplanPromptBuilder(prompt_templates(), settings, tuple(tools.values()), clean=run.redacted)
        self._state, self.standing = PlanningState(), Standing()
        meter, self._most = run.meter("planning"), llm.max_tokens
        self._options = LLMOptions(system=self.prompts.system(), meter=meter, max_tokens=min(PLAN_TOKENS, self._most))
        state = self.state
        self.manager = ReplanManager(
            llm,
            self.prompts,
            Limits.of(settings, replans_per_lineage=config.limits.replans_per_lineage),
            counts=state.counts,
            records=state.records,
            note=self._on_replan,
            options=self._options,
            environment=environment,
        )

    @property
    def state(self) -> PlanningState:
        """What the journal tells by now."""
        for record in self.run.records(self._state.seq):
            self._state.fold(record)
            self.standing.fold(record, self.run.live)
        return self._state

    def note(self, kind: str, data: JsonObject) -> None:
        """Put something on record, as long as the run goes on; how it ends not twice, after an interruption."""
        said = kind == "completion" and self.state.completion == data
        if not (self.run.ended or said):
            self.run.note(kind, data)

    def _on_replan(self, note: ReplanNote) -> None:
        self.note("replan", note.model_dump(mode="json"))

    async def ask(
        self, kind: str, given: JsonObject, schema: type[BaseModel], read: Callable[[str], Answer], *, repairs: int
    ) -> Answer:
        """What a model answers, in the shape that is wanted.

        Raises:
            NoUsableReply: it has not given a usable answer, however often it was told why.
            LLMError: it cannot be asked.
            BudgetExceeded: asking it does not fit what is left of the budget.
        """
        problem, rejected = "", list[JsonValue]()
        options = replace(self._options, schema=schema, max_tokens=min(TOKENS.get(kind, PLAN_TOKENS), self._most))
        for _ in range(repairs + 1):
            self._see_tools()
            completion = await self.llm.complete_detailed(
                self.prompts.wanted(kind, {**given, "rejected": rejected}), options
            )
            try:
                return read(completion.text)
            except LLMReplyInvalid as error:
                problem = explained(completion, str(error))
            rejected = [{"reply": completion.text[:_LONGEST], "problem": problem}]
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
            ("what looks like a secret cannot be kept", lambda value: self.run.redacted(value) != value),
            (f"{MASK} stands for a secret that you are not shown", is_marked),
            ("[cut: …] stands for what you are not shown of a text or a list", is_cut),
        ):
            if wrong := [what for what, value in given.items() if is_wrong(value)]:
                raise LLMReplyInvalid(f"{why}: do without it in {', '.join(wrong)}")

    # What is told of where things stand

    def output(self, phase: Phase) -> JsonObject:
        """What a phase came to last; empty where it did not come to anything yet."""
        return output_of(self.state, self.run.live, phase)

    def basis(self, task: Task | None = None) -> JsonObject:
        """What every phase is told: what is wanted, what is known, where things stand, and why it is done again."""
        state = self.state
        given: JsonObject = {
            **self.request.model_copy(update={"goal": self.run.live.goal}).told(),
            "context": dict(self.run.live.context),
            "answers": [{k: v for k, v in one.model_dump(mode="json").items() if v} for one in state.clarified],
            "goal_understanding": self.output(Phase.GOAL_UNDERSTANDING),
            "task_decomposition": self.output(Phase.TASK_DECOMPOSITION),
            "action_plan": state.plan.action_plan if state.plan is not None else {},
            "feedback": [dict(one) for one in state.reflections if "feedback" in one],
            "why": about(task).get("reason", "") if task is not None else "",
            "executed": executed(self.run.live, state),
            **self.standing.told(self.run.live, state),
        }
        return {name: value for name, value in given.items() if value}

    def available(self) -> Mapping[str, ToolSpec]:
        """The tools that may be used as they are now, with those that are down marked as not available."""
        live = self.run.live.tools
        return {name: live.get(name, tool) for name, tool in self.tools.items()}

    def _see_tools(self) -> None:
        """Tell the model which tools are available now."""
        self.prompts.tools = tuple(self.available().values())

    # What is decided

    async def judge(self, task: TaskId, phase: Phase, given: JsonObject, cause: Cause | None = None) -> Consideration:
        """Whether to replan after a task; not asked again where the run was interrupted after that."""
        self._see_tools()
        known = self.state.judged.get(task)
        if known is not None:
            return known
        considered = await self.manager.consider(phase, given, cause)
        self.keep_judged(task, considered)
        return considered

    def keep_judged(self, task: str, considered: Consideration) -> None:
        """Put on record what was decided after a task."""
        self.note("judged", {"task": task, "considered": considered.model_dump(mode="json")})

    async def execute(self, considered: Consideration, apply: Apply | None = None) -> DecisionRecord:
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
        return await self.manager.execute_replan(considered, apply or _nothing, resumed=begun)

    async def settle(self) -> None:
        """Count the replans that people have agreed to, and put on record those that they have not."""
        state = self.state
        recorded = {record.replan_id for record in state.records}
        for held in list(state.held.values()):
            one = held.considered
            if one is None or not held.verdict or one.ruling.kind != "ask" or one.replan_id in recorded:
                continue
            if held.verdict in ("approve", "modify"):
                await self.execute(one)
            else:
                self.manager.record_decision(one, executed=False)


async def _nothing(decision: ReplanDecision) -> None:
    """What is done where the engine changes the plan."""
