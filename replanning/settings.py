"""Settings of replanning and of planning mode; fields are named as in the settings file."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from replanning.errors import SettingsError
from replanning.journal.records import trigger_types
from replanning.plan.messages import did_you_mean, validation_problems
from replanning.plan.tasks import Budget, ChangingEffect, Retry, StrictModel, to_seconds
from replanning.plugins import installed_plugins
from replanning.secrets import pattern_problem

__all__ = ["Settings", "Weights"]

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]

_Count = Annotated[int, Field(ge=0)]


class Section(StrictModel):
    """Base of the sections: immutable, and without unknown fields.

    Raises:
        SettingsError: settings are wrong or unknown; the error names all of them.
    """

    model_config = ConfigDict(hide_input_in_errors=True, populate_by_name=True, allow_inf_nan=True)

    @classmethod
    def _construction_error(cls, error: ValidationError) -> SettingsError:
        return SettingsError(validation_problems(error, cls, root=cls.__name__))


class ReflectionSettings(Section):
    """Reflection during execution; with an interval of 0 the model reflects only after errors."""

    enabled: bool = True
    trigger_on_error: bool = True
    trigger_interval: _Count = 3
    depth: Literal["deep", "moderate", "shallow"] = "moderate"


class RevisionSettings(Section):
    """Limit of plan revisions; with replanning enabled, at most `max_plan_revisions` applies."""

    max_revisions: _Count = 3


class HistorySettings(Section):
    """Files of planning history; without an archive directory, old files are deleted."""

    storage_type: Literal["jsonl"] = "jsonl"
    directory: str = Field(default="planning_history", min_length=1)
    retention_days: int = Field(default=90, ge=1)
    archive_directory: str | None = Field(default=None, min_length=1)


_USER_CONFIRMATION: Final = 0.3
_IMMEDIATE: Final = 0.8


class DecisionSettings(Section):
    """Thresholds for the decisions of a model, by its own confidence."""

    min_confidence_threshold: Share = 0.5
    require_user_confirmation_on_low_confidence: bool = True
    user_confirmation_threshold: Share = _USER_CONFIRMATION
    immediate_execution_threshold: Share = _IMMEDIATE

    @model_validator(mode="before")
    @classmethod
    def _follow_minimum(cls, data: Any) -> object:
        """Move thresholds that are not set, so that a minimum alone is always valid."""
        if not isinstance(data, dict):
            return data
        minimum = data.get("min_confidence_threshold")
        # Validation rejects any other value.
        if isinstance(minimum, bool) or not isinstance(minimum, int | float):
            return data
        if not 0 <= minimum <= 1:
            return data
        moved: dict[str, float] = {}
        if minimum < _USER_CONFIRMATION:
            moved["user_confirmation_threshold"] = minimum
        if minimum > _IMMEDIATE:
            moved["immediate_execution_threshold"] = minimum
        return {**moved, **data}

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        low = self.user_confirmation_threshold
        middle = self.min_confidence_threshold
        high = self.immediate_execution_threshold
        if not low <= middle <= high:
            raise ValueError(
                "expected user_confirmation_threshold <= min_confidence_threshold"
                f" <= immediate_execution_threshold, got {low:g}, {middle:g}, {high:g}"
            )
        return self


class GoalSettings(Section):
    """Limit of clarifications in planning mode, and assumptions without an answer."""

    max_clarification_requests: _Count = 2
    auto_assume_on_no_response: bool = True
    auto_assume_timeout_minutes: float = Field(default=30.0, gt=0, allow_inf_nan=False)


class DecompositionSettings(Section):
    """Limit of further decompositions of a goal."""

    max_redecomposition_attempts: _Count = 3


class SequenceSettings(Section):
    """Limit of further plans of the actions."""

    max_regeneration_attempts: _Count = 3


class ExecutionSettings(Section):
    """Limits of retries of an action and of partial replans."""

    max_action_retries: _Count = 3
    max_partial_replans: _Count = 2


class PlanRevisionSettings(Section):
    """Limit of plan revisions after reflections."""

    max_plan_revisions: _Count = 2


class GlobalSettings(Section):
    """Limits for all phases together."""

    max_total_replans: _Count = 10
    infinite_loop_detection: bool = True
    same_trigger_max_count: int = Field(default=2, ge=1)


class PlanningReplanSettings(Section):
    """Decisions about replans in planning mode, and their limits."""

    enabled: bool = True
    llm_decision: DecisionSettings = DecisionSettings()
    goal_understanding: GoalSettings = GoalSettings()
    task_decomposition: DecompositionSettings = DecompositionSettings()
    action_sequence: SequenceSettings = SequenceSettings()
    execution: ExecutionSettings = ExecutionSettings()
    reflection: PlanRevisionSettings = PlanRevisionSettings()
    overall: GlobalSettings = Field(default=GlobalSettings(), alias="global")


class PlanningSettings(Section):
    """Settings of planning mode."""

    enabled: bool = True
    strategy: Literal["chain_of_thought", "hierarchical", "simple"] = "chain_of_thought"
    max_subtasks: int = Field(default=100, ge=1)
    approve_plan: bool = False
    decomposition_level: Literal["detailed", "moderate", "minimal"] = "moderate"
    reflection: ReflectionSettings = ReflectionSettings()
    revision: RevisionSettings = RevisionSettings()
    history: HistorySettings = HistorySettings()
    replanning: PlanningReplanSettings = PlanningReplanSettings()


Duration = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(to_seconds)]


def _listed(value: object) -> object:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        return tuple(value)
    return value


Names = Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_listed)]
"""Names in order; a single name stands for a list of one."""


def _known_trigger(name: str) -> str:
    if name in trigger_types():
        return name
    plugins = installed_plugins("triggers")
    if name in plugins:
        return name
    known = dict.fromkeys((*trigger_types(), *plugins))
    listed = f"known detectors are {', '.join(known)}"
    hint = did_you_mean(name, known)
    if hint:
        listed = f"{hint} {listed}"
    raise ValueError(f"there is no detector with this name; {listed}")


TriggerName = Annotated[str, AfterValidator(_known_trigger)]
"""Kind of trigger: one of this library, or the name of an installed detector."""

DEFAULT_TRIGGERS: tuple[str, ...] = (
    "task-failed",
    "timeout",
    "context-changed",
    "human-request",
    "goal-unreachable",
    "resource-changed",
)

_ADDRESS: Final = re.compile(
    r"https?://(?:\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::\d{1,4}|:[1-5]\d{4}|:6[0-5]\d{3})?(?:/[^\s?#]*)?"
)


class Weights(Section):
    """Weights of the parts of a confidence score; they sum to 1."""

    self_assessment: Share = 0.4
    past_success: Share = 0.3
    availability: Share = 0.2
    simplicity: Share = 0.1

    @model_validator(mode="after")
    def _sum(self) -> Self:
        total = self.self_assessment + self.past_success + self.availability + self.simplicity
        if abs(total - 1) > 1e-6:
            raise ValueError(f"the weights sum to {total:g}; they must sum to 1")
        return self


def _trace_address(url: str | None) -> str | None:
    if url is None or (url.startswith(("http://", "https://")) and "{trace_id}" in url):
        return url
    raise ValueError(
        "expected the address of a trace, such as http://localhost:16686/trace/{trace_id}, got"
        f" {url!r}"
    )


class AlternativeSettings(Section):
    """Number and confidence of alternatives, and when a person must approve one."""

    max_count: int = Field(default=3, ge=1, le=20)
    min_confidence: Share = 0.5
    min_llm_confidence: Share = 0.3
    human_approval_threshold: Share = 0.7
    require_approval: bool = False
    shrink: bool = Field(
        default=False,
        description="Shrink self-assessments towards the past success of their source.",
    )


class BetterPathSettings(Section):
    """Search for a cheaper plan, and the gain that it must bring."""

    min_gain: Share = 0.15
    every: int = Field(default=3, ge=1)
    time_cap: Duration = 5.0


class ApprovalSettings(Section):
    """Time limit for a person, in seconds, and the action when it has passed.

    The default action is `pause` with a durable store, else `abort`.
    """

    timeout: Duration | None = 300.0
    on_timeout: Literal["abort", "skip", "continue", "pause"] | None = None
    always_for: tuple[TriggerName, ...] = ("goal-unreachable",)
    remind_after: Share = Field(
        default=0.8, description="Share of the timeout after which the person is reminded."
    )


class EffectSettings(Section):
    """Effects whose tools need the consent of a person before a change of the plan uses them."""

    ask_before: tuple[ChangingEffect, ...] = ()


class LimitSettings(Section):
    """Limits of replans."""

    replans_per_lineage: int = Field(default=3, ge=0)
    replans_per_run: int | None = Field(default=None, ge=0)


class TimeoutSettings(Section):
    """Timeouts in seconds; `task` is the default of the command line, the library has none."""

    task: Duration = 60.0
    replan: Duration = 30.0


class JudgeSettings(Section):
    """Judging of outputs: attempts at a task, and the time limit of a judgement."""

    enabled: bool = True
    provider: Names | None = Field(
        default=None,
        description="Language model that judges outputs accepted by the checks, on the command"
        " line.",
    )
    max_iterations: int = Field(
        default=3, ge=1, le=10, description="Attempts, including those after feedback."
    )
    timeout_seconds: Annotated[
        float, Field(ge=60, le=600, allow_inf_nan=False), BeforeValidator(to_seconds)
    ] = 300.0


class EscalationSettings(Section):
    """Action of planning mode when a replan cannot run; by default, wait if a person can answer."""

    on_no_alternative: Literal["wait", "assume", "abort"] | None = None


class PriceSettings(Section):
    """Price of a million tokens, in the currency of the budget."""

    input: float = Field(ge=0, allow_inf_nan=False)
    output: float = Field(ge=0, allow_inf_nan=False)


def _plain_address(address: str | None) -> str | None:
    """Reject an address with a possible secret, which would appear in histories and on screens."""
    if address is None:
        return None
    scheme, _, rest = address.partition("://")
    authority = re.split(r"[/?#]", rest)[0]
    has_more = "@" in authority or "?" in rest or "#" in rest
    if has_more and scheme in ("http", "https"):
        raise ValueError(
            "it holds more than an address: names, passwords and keys do not belong here; keys"
            " come from the environment alone"
        )
    if _ADDRESS.fullmatch(address) is None:
        raise ValueError(
            "expected an address that begins with http:// or https://, such as"
            " http://localhost:8000/v1"
        )
    return address


_TRUSTED: Final = re.compile(r"https://.*|http://(?:localhost|127\.0\.0\.1|\[::1\])(?:[:/].*)?")


def _guarded_address(address: str | None) -> str | None:
    """Reject an address whose answers could be changed in transit: they are settings."""
    plain = _plain_address(address)
    if plain is not None and _TRUSTED.fullmatch(plain) is None:
        allowed = "http:// only on this machine (localhost)"
        raise ValueError(f"expected an address that begins with https://; {allowed}")
    return plain


class OverrideSettings(Section):
    """Server with a person's settings for planning mode, and its timeout in seconds."""

    url: Annotated[str | None, AfterValidator(_guarded_address)] = None
    timeout: Duration = 5.0


class RedactionSettings(Section):
    """Secrets besides the formats that are always recognised."""

    environment: tuple[str, ...] = Field(
        default=(), description="Names of environment variables whose values are secrets."
    )
    patterns: tuple[str, ...] = Field(
        default=(),
        max_length=100,
        description="Regular expressions that match secrets, in the syntax of Python's `re`. They"
        " are trusted: a slow one makes every run wait.",
    )

    @model_validator(mode="after")
    def _usable(self) -> Self:
        wrong: list[str] = []
        for pattern in self.patterns:
            problem = pattern_problem(pattern)
            if problem:
                wrong.append(f"{pattern!r} {problem}")
        if wrong:
            raise ValueError(f"redaction.patterns: {'; '.join(wrong)}")
        return self


class LLMSettings(Section):
    """Settings of language models."""

    model: str = Field(default="auto", description="Model; `auto` is the provider's own default.")
    temperature: float = Field(default=0.3, ge=0, le=2, allow_inf_nan=False)
    max_tokens: int = Field(default=2000, ge=1)
    base_url: Annotated[str | None, AfterValidator(_plain_address)] = Field(
        default=None, description="Address of a compatible server."
    )
    fallback: tuple[str, ...] = Field(
        default=(), description="Providers to try when one fails, in order."
    )
    ollama: bool = Field(default=False, description="Let `auto` choose Ollama.")
    max_concurrency: int = Field(
        default=4, ge=1, description="Maximum number of concurrent calls of a provider."
    )
    prices: dict[str, PriceSettings] = Field(
        default={},
        description="By model; a name that ends with * stands for all names with that beginning.",
    )


class Settings(Section):
    """Settings of replanning."""

    enabled: bool = True
    provider: Names = Field(
        default=("auto",), description="Providers of alternatives, for the command line."
    )
    triggers: tuple[TriggerName, ...] = DEFAULT_TRIGGERS
    alternatives: AlternativeSettings = AlternativeSettings()
    weights: Weights = Weights()
    retry: Retry = Retry()
    timeout: TimeoutSettings = TimeoutSettings()
    failure_threshold: int = Field(default=1, ge=1)
    breaker_threshold: int = Field(
        default=5,
        ge=0,
        description="Number of consecutive tasks that fail for one cause before their tool is"
        " unavailable and another one stands in; 0: never.",
    )
    judge: JudgeSettings = JudgeSettings()
    judge_on: Literal["errors_and_interval", "every_action"] = Field(
        default="errors_and_interval", description="Actions that planning mode has judged."
    )
    escalation: EscalationSettings = EscalationSettings()
    better_path: BetterPathSettings = BetterPathSettings()
    approval: ApprovalSettings = ApprovalSettings()
    effects: EffectSettings = EffectSettings()
    limits: LimitSettings = LimitSettings()
    budget: Budget = Budget()
    llm: LLMSettings = LLMSettings()
    redaction: RedactionSettings = RedactionSettings()
    override: OverrideSettings = OverrideSettings()
    cooldown: Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(to_seconds)] = 30.0
    max_output: int = Field(
        default=1024 * 1024, ge=1, description="Largest output of a task, in bytes of JSON."
    )
    on_store_failure: Literal["pause", "continue_unjournaled"] = "pause"
    store_patience: Annotated[float, Field(ge=0), BeforeValidator(to_seconds)] = Field(
        default=30.0, description="Time limit for retrying a failing store, in seconds."
    )
    capture_content: bool = Field(
        default=False, description="Record arguments, outputs and reasons on spans."
    )
    trace_url: Annotated[str | None, AfterValidator(_trace_address)] = Field(
        default=None,
        description="Address of the page of a trace, with `{trace_id}` in it, for links in the"
        " pages of `replanning view`.",
    )
    planning: PlanningSettings = Field(
        default=PlanningSettings(),
        description="Planning mode; in the file, a section beside this one.",
    )
