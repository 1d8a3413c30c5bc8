"""Names of spans, attributes and metrics."""

from __future__ import annotations

from typing import Final

INSTRUMENTATION_SCOPE: Final = "replanning"
"""The name of the instrumentation, and of the agent that plans."""

# Spans. A request to a provider has the span `propose {provider}`, a call of a language model
# `chat {model}`.
RUN_SPAN: Final = "replanning.run"
ATTEMPT_SPAN: Final = "replanning.attempt"
PLAN_SPAN: Final = f"plan {INSTRUMENTATION_SCOPE}"
SCORE_SPAN: Final = "replanning.score"
ASK_SPAN: Final = "replanning.ask"
APPLY_SPAN: Final = "replanning.apply"

# Attributes of the general conventions
OPERATION_NAME: Final = "gen_ai.operation.name"
AGENT_NAME: Final = "gen_ai.agent.name"
ERROR_TYPE: Final = "error.type"
EXCEPTION_EVENT: Final = "exception"
EXCEPTION_ATTRIBUTES: Final = ("exception.type", "exception.message", "exception.stacktrace")

# Attributes of the general conventions for a call of a language model
LLM_PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
TEMPERATURE: Final = "gen_ai.request.temperature"
MAX_TOKENS: Final = "gen_ai.request.max_tokens"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_ID: Final = "gen_ai.response.id"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
SYSTEM_INSTRUCTIONS: Final = "gen_ai.system_instructions"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"

# Attributes of a run
RUN_ID: Final = "replanning.run.id"
RUN_STATUS: Final = "replanning.run.status"
RUN_REASON: Final = "replanning.run.reason"
STALE_EVENT: Final = "replanning.results.stale"
STALE_TASKS: Final = "replanning.stale.tasks"
STALE_CAUSES: Final = "replanning.stale.causes"
RUN_RESUMED: Final = "replanning.run.resumed"
PLAN_NAME: Final = "replanning.plan.name"
PLAN_TASKS: Final = "replanning.plan.tasks"
PLAN_OBJECTIVE: Final = "replanning.plan.objective"
REVISION: Final = "replanning.revision"
USAGE_ATTRIBUTES: Final = (
    "replanning.usage.calls",
    "replanning.usage.tokens",
    "replanning.usage.money",
)

PROGRESS: Final = "replanning.progress"
"""Share of the tasks that are done.

Spans of attempts and replans state it at their start, the span of a run at its end.
"""

HEALTH: Final = "replanning.health"
REMAINING_SECONDS: Final = "replanning.remaining_seconds"
RECOMMENDATIONS: Final = "replanning.recommendations"

# Attributes of an attempt
TASK_ID: Final = "replanning.task.id"
TASK_ROOT: Final = "replanning.task.root"
TASK_TOOL: Final = "replanning.task.tool"
TASK_ARGUMENTS: Final = "replanning.task.arguments"
TASK_OUTPUT: Final = "replanning.task.output"
ATTEMPT_ID: Final = "replanning.attempt.id"
ATTEMPT_NUMBER: Final = "replanning.attempt.number"
ATTEMPT_OUTCOME: Final = "replanning.attempt.outcome"
ATTEMPT_IN_DOUBT: Final = "replanning.attempt.in_doubt"
ATTEMPT_CONFIRMS: Final = "replanning.attempt.confirms"
"""On an attempt: the id of the earlier attempt that it confirms."""

ASKED_EVENT: Final = "replanning.asked"
"""Event of an attempt: a call of the second tool of `agrees_with`, which the event names."""

LINK_KIND: Final = "replanning.link"
"""On a link to an attempt, its relation to the span: `replaces`, `retries` or `caused-by`."""

# Attributes of a replan and its parts
REPLAN_ID: Final = "replanning.replan.id"
TRIGGER_IDS: Final = "replanning.trigger.ids"
TRIGGER_KINDS: Final = "replanning.trigger.kinds"
CANDIDATE_COUNT: Final = "replanning.candidates"
REJECTED_COUNT: Final = "replanning.candidates.rejected"
ALTERNATIVES: Final = "replanning.alternatives"
DECISION: Final = "replanning.decision"
DECISION_RULE: Final = "replanning.decision.rule"
DECISION_BY: Final = "replanning.decision.by"
DECISION_REASON: Final = "replanning.decision.reason"
CONFIDENCE: Final = "replanning.confidence"
PROVIDER_NAME: Final = "replanning.provider.name"
PROPOSED_COUNT: Final = "replanning.provider.proposed"
QUESTION_ID: Final = "replanning.question.id"
QUESTION_TEXT: Final = "replanning.question.text"
QUESTION_VERDICT: Final = "replanning.question.verdict"
CHANGES: Final = "replanning.changes"
CHANGED_BY: Final = "replanning.changes.by"

# Metrics
REPLANS_METRIC: Final = "replanning.replans"
DECISIONS_METRIC: Final = "replanning.decisions"
DURATION_METRIC: Final = "replanning.replan.duration"
CONFIDENCE_METRIC: Final = "replanning.confidence"
ATTEMPTS_METRIC: Final = "replanning.attempts"
