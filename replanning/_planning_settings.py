"""What can be set about planning mode; the names are those of the settings file."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Base of the sections of the settings: immutable, and without fields that nobody knows."""

    # What is wrong may be a secret in the wrong place; errors of the settings file show it, without the secret.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, populate_by_name=True)


class ReflectionSettings(Section):
    """When the model looks back while the plan is carried out; an interval of 0 means never without a cause."""

    enabled: bool = True
    trigger_on_error: bool = True
    trigger_interval: _Count = 3
    depth: Literal["deep", "moderate", "shallow"] = "moderate"


class RevisionSettings(Section):
    """How often a plan may be revised; with replanning on, the smaller of this and `max_plan_revisions` holds."""

    max_revisions: _Count = 3


class HistorySettings(Section):
    """Where what was planned is kept beside the journal, and for how long; without an archive old files are removed."""

    storage_type: Literal["jsonl"] = "jsonl"
    directory: str = Field(default="planning_history", min_length=1)
    retention_days: int = Field(default=90, ge=1)
    archive_directory: str | None = Field(default=None, min_length=1)


class DecisionSettings(Section):
    """What becomes of a decision, by the confidence that the model has in it."""

    min_confidence_threshold: Share = 0.5
    require_user_confirmation_on_low_confidence: bool = True
    user_confirmation_threshold: Share = 0.3
    immediate_execution_threshold: Share = 0.8

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        low, middle, high = (
            self.user_confirmation_threshold,
            self.min_confidence_threshold,
            self.immediate_execution_threshold,
        )
        if not low <= middle <= high:
            raise ValueError(
                "expected user_confirmation_threshold <= min_confidence_threshold <= immediate_execution_threshold,"
                f" got {low:g}, {middle:g}, {high:g}"
            )
        return self


class GoalSettings(Section):
    """How often may be asked what is meant, and what happens when nobody answers."""

    max_clarification_requests: _Count = 2
    auto_assume_on_no_response: bool = True
    auto_assume_timeout_minutes: float = Field(default=30.0, gt=0, allow_inf_nan=False)


class DecompositionSettings(Section):
    """How often the goal may be decomposed again."""

    max_redecomposition_attempts: _Count = 3


class SequenceSettings(Section):
    """How often the actions may be planned again."""

    max_regeneration_attempts: _Count = 3


class ExecutionSettings(Section):
    """How often an action may be tried again, and the plan be changed in part."""

    max_action_retries: _Count = 3
    max_partial_replans: _Count = 2


class PlanRevisionSettings(Section):
    """How often the plan may be revised after a reflection."""

    max_plan_revisions: _Count = 2


class GlobalSettings(Section):
    """What holds for all phases together."""

    max_total_replans: _Count = 10
    infinite_loop_detection: bool = True
    same_trigger_max_count: int = Field(default=2, ge=1)


class PlanningReplanSettings(Section):
    """How planning mode decides on replans, and how often it may."""

    enabled: bool = True
    llm_decision: DecisionSettings = DecisionSettings()
    goal_understanding: GoalSettings = GoalSettings()
    task_decomposition: DecompositionSettings = DecompositionSettings()
    action_sequence: SequenceSettings = SequenceSettings()
    execution: ExecutionSettings = ExecutionSettings()
    reflection: PlanRevisionSettings = PlanRevisionSettings()
    overall: GlobalSettings = Field(default=GlobalSettings(), alias="global")


class PlanningSettings(Section):
    """Everything that can be set about planning mode; the defaults are those of the specification."""

    enabled: bool = True
    strategy: Literal["chain_of_thought", "hierarchical", "simple"] = "chain_of_thought"
    max_subtasks: int = Field(default=100, ge=1)
    decomposition_level: Literal["detailed", "moderate", "minimal"] = "moderate"
    reflection: ReflectionSettings = ReflectionSettings()
    revision: RevisionSettings = RevisionSettings()
    history: HistorySettings = HistorySettings()
    replanning: PlanningReplanSettings = PlanningReplanSettings()
