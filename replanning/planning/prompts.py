"""Prompts of planning mode: templates, data sections cut to size, and the decision prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import islice
from typing import Final, get_args

from replanning.llm.quoting import (
    DataSection,
    encode_data,
    encode_excerpt,
    escape_markup,
    fit_sections,
)
from replanning.plan.tasks import ToolSpec
from replanning.plan.types import JsonObject, JsonValue
from replanning.planning.decisions import (
    LEVEL_DESCRIPTIONS,
    REPLAN_TARGETS,
    CountName,
    DecisionRequest,
    Phase,
    ReplanCause,
    ReplanType,
    exhausted_limit,
)
from replanning.settings import PlanningSettings


@cache
def prompt_templates() -> Mapping[str, str]:
    """Return the templates by name, such as `decide_execution`; they are read once."""
    folder = resources.files("replanning.planning") / "prompts"
    files = (entry for entry in folder.iterdir() if entry.name.endswith(".md"))
    return {
        entry.name.removesuffix(".md"): entry.read_text(encoding="utf-8").strip() for entry in files
    }


# Decisions

_REPLAN_DESCRIPTIONS: Final[Mapping[ReplanType, str]] = {
    ReplanType.CLARIFICATION_REQUEST: "ask the user, and understand the goal again with the answer",
    ReplanType.PLAN_REVISION: (
        "revise the plan; finished actions stay finished, and missing ones are added"
    ),
}
"""Descriptions of the replan types that the description of the level does not fit."""


def _decision_data(request: DecisionRequest) -> JsonObject:
    """Return the data of a decision beyond the phase output: cause, limits, earlier decisions."""
    cause = request.cause
    counts = request.counts
    limits = request.limits
    usage: dict[str, tuple[int, int]] = {}
    for name in ("total", *get_args(CountName)):
        usage[name] = (getattr(counts, name), getattr(limits, name))
    if cause.action is not None:
        usage["retries_of_this_action"] = (
            counts.retries.get(cause.action, 0),
            limits.action_retries,
        )
    if cause.lineage is not None:
        usage["replans_for_this_action"] = (
            counts.lineages.get(cause.lineage, 0),
            limits.replans_per_lineage,
        )
    earlier = list[JsonValue]()
    for record in request.earlier_decisions[-_MAX_VALUES:]:
        decision = record.llm_decision or {}
        continued = record.replan_type is ReplanType.NONE and record.result == "skipped"
        summary: JsonObject = {
            "replan": record.replan_id,
            "phase": record.phase.value,
            "type": record.replan_type.value,
            "confidence": record.confidence,
            "reasoning": decision.get("reasoning"),
            "issues": decision.get("issues_found"),
            "executed": None if continued else record.executed,
            "result": None if continued else record.result,
            "overridden": record.override_reason,
            "because": record.reason,
            "error": record.error,
        }
        earlier.append(_without_empty(summary))
    data: JsonObject = {
        "phase": request.phase.value,
        "limits": {name: {"used": used, "of": limit} for name, (used, limit) in usage.items()},
        "replans": earlier,
        "cause": _without_empty(
            {"action": cause.action, "lineage": cause.lineage, "error": cause.error}
        ),
        "refused": request.refusal,
    }
    if request.problem:
        data["rejected"] = [{"reply": request.rejected_reply, "problem": request.problem}]
    return _without_empty(data)


def _without_empty(data: JsonObject) -> JsonObject:
    non_empty: JsonObject = {}
    for name, value in data.items():
        if value not in (None, "", [], {}):
            non_empty[name] = value
    return non_empty


# Sizes and sections

MAX_PROMPT_CHARS: Final = 24_000
"""Default size of a prompt in characters."""

MIN_PROMPT_CHARS: Final = 10_000
"""Minimum size of a prompt, in characters; with less, the model cannot answer."""

MAX_PLAN_TOKENS: Final = 2000
"""Maximum length of a reply in the first three phases, in tokens."""

MAX_TOKENS_BY_KIND: Final[Mapping[str, int]] = {"reflection": 500, "completion": 500}
"""Maximum length of replies of these kinds, in tokens; other kinds have `MAX_PLAN_TOKENS`."""

SECTION_DESCRIPTIONS: Final[Mapping[str, str]] = {
    "tools": "the tools that may be used, with their parameters",
    "request": "the task: the issue, or the goal in words",
    "comments": "people's comments on it, oldest first",
    "repository": "facts about the repository",
    "earlier_runs": "earlier plans and executions for the issue, oldest first",
    "goal_understanding": "the goal as the model understood it",
    "task_decomposition": "the subtasks",
    "action_plan": "the current plan",
    "context": "values and constraints of the run",
    "answers": "the user's answers, and the assumptions where there was none",
    "feedback": "people's feedback, oldest first",
    "part": "the ids of the subtasks whose actions are to be planned now",
    "why": "the reason for repeating this phase or revising the plan",
    "phase": "the phase that the decision follows",
    "cause": "the subject of the decision: an action, its lineage, an error",
    "progress": "numbers of finished actions, all actions, errors, and errors in a row",
    "executed": "the executed actions with their outcomes, oldest first",
    "remaining": "the actions still to be executed",
    "state": "the facts of the world",
    "action": "the action that the prompt is about",
    "result": "the output of the action, or the summary of the run",
    "reflection": "the model's reflection on the result",
    "errors": "errors of the action or the replan",
    "tool_status": "the unavailable tools, with reasons",
    "limits": "replans used and allowed",
    "replans": "the decisions so far and their outcomes, oldest first",
    "refused": "why the last replan that the model wanted is impossible",
    "rejected": "replies that could not be used, and why",
}
"""Sections of data in prompts, with their contents, which no prompt states.

Sections that seldom change come first, so that services can cache the beginning of a prompt.
"""

_BACKGROUND_SECTIONS: Final = ("earlier_runs", "comments", "repository")

_SITUATION_SECTIONS: Final = (
    "state",
    "context",
    "executed",
    "remaining",
    "replans",
    "other",
    "answers",
    "feedback",
)

_PLAN_SECTIONS: Final = (
    "action_plan",
    "task_decomposition",
    "reflection",
    "tool_status",
    "tools",
    "limits",
    "progress",
)

_REASON_SECTIONS: Final = ("rejected", "refused", "why", "part", "errors", "result")

_TASK_SECTIONS: Final = ("goal_understanding", "action", "cause", "request", "phase")

CUT_ORDER: Final = (
    *_BACKGROUND_SECTIONS,
    *_SITUATION_SECTIONS,
    *_PLAN_SECTIONS,
    *_REASON_SECTIONS,
    *_TASK_SECTIONS,
)
"""Sections in the order in which they are cut when a prompt is too long."""

_LATEST_FIRST: Final = frozenset(
    {"comments", "earlier_runs", "answers", "feedback", "executed", "replans"}
)
"""Sections that keep their latest entries when they are cut."""

_MAX_VALUES: Final = 200
"""Maximum number of values in a section."""

_MAX_VALUE_CHARS: Final = 1500
"""Maximum length of a value, in characters, except for single values and long sections."""

_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False)

_UNNEEDED_SECTIONS: Final = (*_BACKGROUND_SECTIONS, "replans", "limits", "task_decomposition")

_OMITTED_SECTIONS: Final[Mapping[str, Sequence[str]]] = {
    Phase.TASK_DECOMPOSITION: ("comments", "earlier_runs"),
    Phase.ACTION_SEQUENCE: _BACKGROUND_SECTIONS,
    Phase.EXECUTION: (*_UNNEEDED_SECTIONS, "request", "action_plan", "remaining"),
    Phase.REFLECTION: (*_UNNEEDED_SECTIONS, "request"),
    "revision": _BACKGROUND_SECTIONS,
    "completion": (*_UNNEEDED_SECTIONS, "action_plan"),
}
"""Sections left out of the prompts of a phase; decision prompts have all."""

_DEPTH_INSTRUCTIONS: Final[Mapping[str, str]] = {
    "deep": (
        "\nLook deeper: also for root causes, for effects on what was done before,"
        " and for better approaches."
    ),
    "moderate": "",
    "shallow": "\nBe brief: one sentence per text is enough.",
}

_SLOT: Final = re.compile(r"\[\[(\w+)\]\]")


class ReplanPromptBuilder:
    """Writes the prompts of planning mode.

    Each phase has two prompts: `build` asks for its output, such as the subtasks, and `decision`
    asks whether to replan after it. The methods named after a phase, such as
    `build_execution_prompt`, return its decision prompt with default limits and nothing replanned
    so far::

        prompts = ReplanPromptBuilder(tools=plan.tools)
        prompts.build("task_decomposition", {"request": "Tell the news"})
        prompts.build_task_decomposition_prompt({"task_decomposition": {"subtasks": []}})

    The data of a prompt is a JSON object whose keys are sections, such as `request`, `comments`,
    `goal_understanding`, `task_decomposition`, `action_plan`, `context`, `executed`, `action`,
    `result` and `errors`. Each value becomes a section, with one line for each item of a list. Data
    that the phase does not need is left out; unknown keys go into the section `other`. The key
    `rejected`, with a list of replies and their problems, asks the model to correct its reply.

    Args:
        settings: planning strategy, level of decomposition, and depth of reflections.
        tools: tools that may be used; those that are down are marked as not available.
        max_chars: size of a prompt in characters.
        redact: removes secrets from a value.

    Raises:
        ValueError: `max_chars` is less than `MIN_PROMPT_CHARS`.
    """

    def __init__(
        self,
        settings: PlanningSettings | None = None,
        tools: Sequence[ToolSpec] = (),
        *,
        max_chars: int = MAX_PROMPT_CHARS,
        redact: Callable[[JsonValue], JsonValue] | None = None,
    ) -> None:
        if max_chars < MIN_PROMPT_CHARS:
            raise ValueError(
                f"a prompt needs at least {MIN_PROMPT_CHARS} characters, got {max_chars}"
            )
        self.tools = tuple(tools)
        self._templates = prompt_templates()
        self._settings = settings or PlanningSettings()
        self._max_chars = max_chars
        self._redact = redact or (lambda value: value)
        self._line_cache: dict[str, str] = {}

    def __repr__(self) -> str:
        size = f"{len(self.tools)} tools, {self._max_chars} characters"
        return f"<ReplanPromptBuilder {self._settings.strategy}, {size}>"

    def system(self) -> str:
        """Return the system prompt, which is the same for every run."""
        return self._templates["system"]

    def build(self, kind: str, data: JsonObject) -> str:
        """Return the prompt for the output of a phase, or for a revision, completion or step.

        The prompt of `execution` asks for a tool call, that of `reflection` for the evaluation of
        an action.

        Raises:
            KeyError: there is no such kind.
        """
        level = _fill_template(
            self._templates[f"level_{self._settings.decomposition_level}"],
            {"most": str(self._settings.max_subtasks)},
        )
        part = ""
        if data.get("part"):
            part = ", but only those whose ids are in <part>"
        slots = {
            "strategy": self._templates[f"strategy_{self._settings.strategy}"],
            "level": level,
            "part": part,
            "depth": _DEPTH_INSTRUCTIONS[self._settings.reflection.depth],
            "tokens": str(MAX_TOKENS_BY_KIND.get(kind, MAX_PLAN_TOKENS)),
        }
        omitted = _OMITTED_SECTIONS.get(kind, ())
        used = {key: value for key, value in data.items() if key not in omitted}
        return self._assemble(used, [_fill_template(self._templates[kind], slots)])

    def build_goal_understanding_prompt(self, data: JsonObject) -> str:
        """Return the prompt that asks whether to understand the goal again, or ask the user."""
        return self.decision(DecisionRequest(Phase.GOAL_UNDERSTANDING, data))

    def build_task_decomposition_prompt(self, data: JsonObject) -> str:
        """Return the prompt that asks whether the goal must be decomposed again."""
        return self.decision(DecisionRequest(Phase.TASK_DECOMPOSITION, data))

    def build_action_sequence_prompt(self, data: JsonObject) -> str:
        """Return the prompt that asks whether the actions must be planned again."""
        return self.decision(DecisionRequest(Phase.ACTION_SEQUENCE, data))

    def build_execution_prompt(self, data: JsonObject, cause: ReplanCause | None = None) -> str:
        """Return the prompt that asks how to continue after an action.

        `cause` names the action and its error.
        """
        return self.decision(DecisionRequest(Phase.EXECUTION, data, cause or ReplanCause()))

    def build_reflection_prompt(self, data: JsonObject) -> str:
        """Return the prompt that asks whether the plan must be revised to reach the goal."""
        return self.decision(DecisionRequest(Phase.REFLECTION, data))

    def decision(self, request: DecisionRequest) -> str:
        """Return the prompt that asks whether to replan.

        After a refusal, it asks for another decision; after an unusable reply, for a usable one.
        """
        refused = f"\n{self._templates['refused']}" if request.refusal else ""
        options = ['- "none": continue (`replan_needed` false)']
        for kind in request.replan_types:
            for level, target in REPLAN_TARGETS[kind].items():
                if not exhausted_limit(kind, target, request.limits, request.counts, request.cause):
                    description = _REPLAN_DESCRIPTIONS.get(kind, LEVEL_DESCRIPTIONS[level])
                    options.append(f'- "{kind}", level {level}, target "{target}": {description}')
        slots = {"types": "\n".join(options), "refused": refused}
        closing = [
            self._templates[f"decide_{request.phase}"],
            _fill_template(self._templates["decision"], slots),
        ]
        return self._assemble({**request.prompt_data, **_decision_data(request)}, closing)

    def _assemble(self, data: JsonObject, closing: list[str]) -> str:
        """Return a prompt: sections of data, cut to size, then the question."""
        if data.get("rejected"):
            closing.insert(0, self._templates["rejected"])
        question = "\n\n".join(closing)
        data = {**data, "tools": [_tool_data(tool) for tool in self.tools]}
        values: dict[str, JsonValue] = {}
        for kind in SECTION_DESCRIPTIONS:
            if kind in data:
                values[kind] = data[kind]
        other: list[JsonValue] = []
        for key, value in islice(data.items(), _MAX_VALUES):
            if key not in SECTION_DESCRIPTIONS:
                other.append({key: value})
        values["other"] = other
        room = self._max_chars - len(question)
        # Encode only about as much as fits, beginning with the sections that are cut last.
        sections: dict[str, DataSection] = {}
        left = room
        for kind in reversed(CUT_ORDER):
            if values.get(kind) not in (None, "", [], {}):
                sections[kind] = self._section(kind, values[kind], left)
                left -= len(sections[kind].render())
        in_order = [sections[kind] for kind in values if kind in sections]
        return f"{fit_sections(in_order, room, CUT_ORDER)}{question}"

    def _section(self, kind: str, value: JsonValue, left: int) -> DataSection:
        items = _section_items(value)
        kept = items[:_MAX_VALUES]
        if kind in _LATEST_FIRST:
            kept = items[-_MAX_VALUES:]
            kept.reverse()
        factor = 1
        if kind in ("request", "goal_understanding"):
            factor = 6
        elif len(kept) == 1:
            factor = 2
        room = min(factor * _MAX_VALUE_CHARS, self._max_chars // 6)
        # The latest outputs get more room, so that the model can rewrite a file that it has read.
        latest = 0
        if kind == "executed":
            latest = min(self._max_chars // 3, left // 2)
        lines: list[str] = []
        for item in kept:
            if left <= 0:
                break
            lines.append(self._encode_line(item, max(room, latest)))
            latest -= len(lines[-1])
            left -= len(lines[-1]) + 1
        return DataSection(kind, lines, omitted=len(items) - len(lines))

    def _encode_line(self, value: JsonValue, room: int) -> str:
        """Return a value as one line; lines are cached, as prompts repeat much of a plan."""
        try:
            text = _ENCODER.encode(value)
        except (ValueError, RecursionError):  # NaN or Infinity, a huge number, or deep nesting
            text = ""
        if text and len(text) <= room and text.count("[") + text.count("{") <= 100:
            line = self._line_cache.get(text)
            if line is None:
                if len(self._line_cache) >= 2000:
                    self._line_cache.clear()
                clean = self._redact(value)
                line = escape_markup(text)
                if clean != value:
                    line = encode_data(clean)
                self._line_cache[text] = line
            if len(line) <= room:
                return line
        return encode_excerpt(value, room, self._redact)


def _section_items(value: JsonValue) -> list[JsonValue]:
    """Return the items of a section, one a line.

    An object with subtasks or actions has a line for its other fields, then one for each of them.
    """
    if isinstance(value, list):
        return list(value)
    if not isinstance(value, dict):
        return [value]
    for name in ("subtasks", "actions"):
        items = value.get(name)
        if not isinstance(items, list):
            continue
        rest: JsonObject = {}
        for key, member in value.items():
            if key != name and member:
                rest[key] = member
        if rest:
            return [rest, *items]
        return list(items)
    return [value]


def _fill_template(template: str, slots: Mapping[str, str]) -> str:
    return _SLOT.sub(lambda match: slots[match[1]], template)


def _tool_data(tool: ToolSpec) -> JsonObject:
    """Return the description of a tool without its implementation, which no model needs."""
    return _without_empty(
        {
            "name": tool.name,
            "available": tool.available,
            "parameters": dict(tool.parameter_types),
            "optional": list(tool.optional),
            "schema": tool.input_schema,
            "description": tool.description,
            "kind": tool.kind,
            "capability": tool.capability,
            "requires": list(tool.requires),
            "needs": list(tool.needs),
            "produces": list(tool.produces),
            "cost": tool.cost,
            "accepted": list(tool.accepted),
            "dangerous": tool.dangerous or None,
        }
    )
