"""Reads the templates of the prompts, which are files of the package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from replanning.llm.quoting import DataSection, encode_data, escape_markup, fit_sections, truncate_value
from replanning.plan.tasks import ToolSpec
from replanning.plan.types import JsonObject, JsonValue
from replanning.planning.action_plan import tool_parameters
from replanning.planning.decisions import LEVEL_DESCRIPTIONS, REPLAN_TARGETS, Phase, ReplanType
from replanning.planning.limits import ReplanCause, ReplanCounts, ReplanLimits, is_within_limits
from replanning.settings import PlanningSettings

if TYPE_CHECKING:
    from replanning.planning.decision_records import DecisionRecord
    from replanning.planning.manager import DecisionRequest


@cache
def prompt_templates() -> Mapping[str, str]:
    """The templates by their names, such as `goal_understanding` and `decide_execution`; they are read once."""
    folder = resources.files("replanning.planning") / "prompts"
    found = {
        entry.name.removesuffix(".md"): entry.read_text(encoding="utf-8").strip()
        for entry in folder.iterdir()
        if entry.name.endswith(".md")
    }
    return MappingProxyType(found)


def decision_data(request: DecisionRequest, *, max_records: int) -> JsonObject:
    """What a decision adds to what its phase came to: the phase, what is left, what was decided before, and what failed."""
    cause = request.cause
    about = {"action": cause.action, "lineage": cause.lineage, "error": cause.error}
    found: JsonObject = {
        "phase": request.phase.value,
        "limits": _limit_usage(request.limits, request.counts, cause),
        "replans": [_decision_summary(record) for record in request.earlier_decisions[-max_records:]],
    }
    if cause != ReplanCause():
        found["cause"] = {key: value for key, value in about.items() if value}
    if request.refusal:
        found["refused"] = request.refusal
    if request.problem:
        found["rejected"] = [{"reply": request.rejected_reply, "problem": request.problem}]
    return found


def _limit_usage(limits: ReplanLimits, counts: ReplanCounts, cause: ReplanCause) -> JsonObject:
    """How often was replanned, of how often may be."""
    pairs = {name: (getattr(counts, name), getattr(limits, name)) for name in _LIMITED_COUNTS}
    if cause.action is not None:
        pairs["retries_of_this_action"] = (counts.retries.get(cause.action, 0), limits.action_retries)
    if cause.lineage is not None:
        pairs["replans_for_this_action"] = (counts.lineages.get(cause.lineage, 0), limits.replans_per_lineage)
    told: JsonObject = {name: {"used": used, "of": most} for name, (used, most) in pairs.items()}
    return told


_LIMITED_COUNTS: Final = (
    "total",
    "clarifications",
    "redecompositions",
    "regenerations",
    "partial_replans",
    "plan_revisions",
)

_REPLAN_DESCRIPTIONS: Final[Mapping[ReplanType, str]] = MappingProxyType(
    {
        ReplanType.CLARIFICATION_REQUEST: "ask the user, and understand the goal again with the answer",
        ReplanType.PLAN_REVISION: "revise the plan; what is done stays done, and what is missing is added",
    }
)
"""What replans come to whose level says too little."""


def _decision_summary(record: DecisionRecord) -> JsonObject:
    said = record.llm_decision or {}
    went_on = record.replan_type is ReplanType.NONE and record.result == "skipped"
    told: JsonObject = {
        "replan": record.replan_id,
        "phase": record.phase.value,
        "type": record.replan_type.value,
        "confidence": record.confidence,
        "reasoning": said.get("reasoning"),
        "issues": said.get("issues_found"),
        "executed": None if went_on else record.executed,
        "result": None if went_on else record.result,
        "overridden": record.override_reason,
        "because": record.reason,
        "error": record.error,
    }
    return {key: value for key, value in told.items() if value not in (None, "", [])}


def describe_replan_options(request: DecisionRequest) -> str:
    """The replans that limits leave, with their levels and where each returns to."""
    lines = ['- "none": go on (`replan_needed` false)']
    for kind in request.replan_types:
        for level, target in REPLAN_TARGETS[kind].items():
            if is_within_limits(kind, target, request.limits, request.counts, request.cause):
                lines.append(
                    f'- "{kind}", level {level}, target "{target}": {_REPLAN_DESCRIPTIONS.get(kind, LEVEL_DESCRIPTIONS[level])}'
                )
    return "\n".join(lines)


MAX_PROMPT_CHARS: Final = 24_000
"""Characters of a prompt, if nothing else is said."""

MIN_PROMPT_CHARS: Final = 10_000
"""With fewer characters than this a model is not told enough to be asked."""

MAX_PLAN_TOKENS: Final = 2000
"""Tokens that an answer in the first three phases may have."""

MAX_REFLECTION_TOKENS: Final = 500
"""Tokens that a reflection may have."""

MAX_TOKENS_BY_KIND: Final[Mapping[str, int]] = MappingProxyType(
    {"reflection": MAX_REFLECTION_TOKENS, "completion": MAX_REFLECTION_TOKENS}
)
"""Tokens that an answer of these kinds may have; any other is one that makes a plan."""

BATCH_KEY: Final = "part"
"""Names the subtasks whose actions are asked for, where a plan is made in parts."""

SECTION_DESCRIPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "phase": "after which phase is decided",
        "cause": "what is decided about: an action, what it replaced first, an error",
        "request": "what is asked for: the issue or the goal in words",
        "comments": "what people wrote below it, oldest first",
        "repository": "what is known of the place where the work is done",
        "earlier_runs": "plans and executions of the same issue before, oldest first",
        "context": "values and constraints of the run",
        "answers": "what the user answered when asked, and what was assumed where not",
        "feedback": "what people said of the work, oldest first",
        "goal_understanding": "how the goal was understood",
        "task_decomposition": "the subtasks",
        "action_plan": "the plan as it stands",
        "part": "the ids of the subtasks whose actions are wanted now",
        "why": "why this is done again, or the plan is to be revised",
        "progress": "how many actions of how many are done, how many errors there were, and how many in a row",
        "executed": "the actions that were executed and what came of each, oldest first",
        "remaining": "the actions that are still to be executed",
        "state": "what is there now",
        "action": "the action that this is about",
        "result": "what came of the action, or of the work as a whole",
        "reflection": "what the model thought of it",
        "errors": "what went wrong",
        "tool_status": "what is known of tools and their servers beside what each tool states",
        "limits": "how often may still be replanned",
        "replans": "the decisions so far and what became of each, oldest first",
        "refused": "why what the model wanted last cannot be done",
        "rejected": "answers that could not be used, and why",
    }
)
"""The kinds of data that prompts are made of, in the order in which they stand there; the tools come besides."""

CUT_ORDER: Final = (
    "earlier_runs",
    "comments",
    "repository",
    "state",
    "context",
    "executed",
    "remaining",
    "replans",
    "other",
    "answers",
    "feedback",
    "action_plan",
    "task_decomposition",
    "reflection",
    "tool_status",
    "tools",
    "limits",
    "progress",
    "rejected",
    "refused",
    "why",
    "part",
    "errors",
    "result",
    "goal_understanding",
    "action",
    "cause",
    "request",
    "phase",
)
"""The kinds of data, the first to be cut first."""

_LATEST_FIRST: Final = frozenset({"comments", "earlier_runs", "answers", "feedback", "executed", "replans"})
"""Where there is too much of these, the latest are told."""

_LONG_SECTIONS: Final = frozenset({"request", "goal_understanding"})

_LIST_KEYS: Final = ("subtasks", "actions")

_MAX_VALUES: Final = 200
"""Values of a kind that are looked at."""

_MAX_VALUE_CHARS: Final = 1500
"""Characters of a value; some may have more."""

_MAX_CONTAINERS: Final = 100
"""Lists and objects in a value that is written without looking at how deep it goes."""

_MAX_CACHED_LINES: Final = 2000
"""Lines that are remembered."""

_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False)

_BACKGROUND_SECTIONS: Final = frozenset({"comments", "repository", "earlier_runs"})

_OMITTED_SECTIONS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        Phase.TASK_DECOMPOSITION: frozenset({"comments", "earlier_runs"}),
        Phase.ACTION_SEQUENCE: _BACKGROUND_SECTIONS,
        Phase.EXECUTION: _BACKGROUND_SECTIONS
        | {"request", "replans", "limits", "task_decomposition", "action_plan", "remaining"},
        Phase.REFLECTION: _BACKGROUND_SECTIONS | {"replans", "limits", "task_decomposition"},
        "revision": _BACKGROUND_SECTIONS,
        "completion": _BACKGROUND_SECTIONS | {"replans", "limits", "task_decomposition", "action_plan"},
    }
)
"""What a phase has no use for; a decision is told everything."""

_DEPTH_INSTRUCTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "deep": "\nLook deep: also for causes behind the causes, for effects on what was done before, and for better ways.",
        "moderate": "",
        "shallow": "\nBe brief: one sentence is enough for each text.",
    }
)

_SLOT: Final = re.compile(r"\[\[(\w+)\]\]")

Redact = Callable[[JsonValue], JsonValue]
"""Takes secrets out of a value."""


def _unchanged(value: JsonValue) -> JsonValue:
    return value


class ReplanPromptBuilder:
    """Writes the prompts of planning mode: one method for each phase, and `decision` for what is decided after it.

    What a prompt is made of is given as a JSON object with the keys of `SECTION_DESCRIPTIONS`; each value becomes a section, a list with
    one line for each item. What a phase has no use for is left out; what has another key is told as `other`.
    A key `rejected`, with a list of replies and problems, asks for the same once more.

    Args:
        templates: as `prompt_templates` reads them.
        settings: the strategy, the level of decomposition, and how deep reflections are.
        tools: the tools that may be used, with those that are down marked as not available.
        size: characters that a prompt may have.
        clean: takes secrets out of a value.

    Raises:
        ValueError: the size is less than what a model must be told.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        settings: PlanningSettings | None = None,
        tools: Sequence[ToolSpec] = (),
        *,
        max_chars: int = MAX_PROMPT_CHARS,
        redact: Redact = _unchanged,
    ) -> None:
        if max_chars < MIN_PROMPT_CHARS:
            raise ValueError(f"a prompt needs at least {MIN_PROMPT_CHARS} characters, got {max_chars}")
        self.tools = tuple(tools)
        self._templates = templates
        self._settings = settings or PlanningSettings()
        self._max_chars = max_chars
        self._redact = redact
        self._line_cache: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<ReplanPromptBuilder {self._settings.strategy}, {len(self.tools)} tools, {self._max_chars} characters>"

    def system(self) -> str:
        """What the model is told about its role; it says nothing of the run."""
        return self._templates["system"]

    def build(self, kind: str, given: JsonObject) -> str:
        """The prompt of a kind: of a phase, `revision`, `completion` or `step`.

        Raises:
            KeyError: there is no such kind.
        """
        kinds = {
            "goal_understanding": self.goal_understanding,
            "task_decomposition": self.task_decomposition,
            "action_sequence": self.action_sequence,
            "execution": self.execution,
            "reflection": self.reflection,
            "revision": self.revision,
            "completion": self.completion,
            "step": self.step,
        }
        return kinds[kind](given)

    def goal_understanding(self, given: JsonObject) -> str:
        """Asks what is wanted, and how to see that it is reached."""
        return self._build_phase_prompt(Phase.GOAL_UNDERSTANDING, given, strategy=self._strategy())

    def task_decomposition(self, given: JsonObject) -> str:
        """Asks for the subtasks."""
        level = self._templates[f"level_{self._settings.decomposition_level}"]
        most = str(self._settings.max_subtasks)
        return self._build_phase_prompt(
            Phase.TASK_DECOMPOSITION,
            given,
            strategy=self._strategy(),
            level=_fill_template(level, {"most": most}),
            tokens=str(MAX_PLAN_TOKENS),
        )

    def action_sequence(self, given: JsonObject) -> str:
        """Asks for the actions; with the key `part`, of some subtasks only."""
        part = ", but only for those whose ids <part> lists" if given.get(BATCH_KEY) else ""
        return self._build_phase_prompt(
            Phase.ACTION_SEQUENCE, given, strategy=self._strategy(), part=part, tokens=str(MAX_PLAN_TOKENS)
        )

    def execution(self, given: JsonObject) -> str:
        """Asks for the use of a tool."""
        return self._build_phase_prompt(Phase.EXECUTION, given)

    def reflection(self, given: JsonObject) -> str:
        """Asks what came of an action."""
        depth = _DEPTH_INSTRUCTIONS[self._settings.reflection.depth]
        return self._build_phase_prompt(Phase.REFLECTION, given, depth=depth, tokens=str(MAX_REFLECTION_TOKENS))

    def revision(self, given: JsonObject) -> str:
        """Asks how the plan is to be changed."""
        return self._build_phase_prompt("revision", given, strategy=self._strategy(), tokens=str(MAX_PLAN_TOKENS))

    def completion(self, given: JsonObject) -> str:
        """Asks for the summary."""
        return self._build_phase_prompt("completion", given, tokens=str(MAX_REFLECTION_TOKENS))

    def step(self, given: JsonObject) -> str:
        """Asks for the next use of a tool, where there is no plan."""
        return self._build_phase_prompt("step", given)

    def decision(self, request: DecisionRequest) -> str:
        """Asks whether to replan after a phase; with `refused` for another way, with `problem` for a usable reply."""
        given = {**request.prompt_data, **decision_data(request, max_records=_MAX_VALUES)}
        slots = {
            "types": describe_replan_options(request),
            "refused": self._templates["refused"] if request.refusal else "",
        }
        slots["refused"] = f"\n{slots['refused']}" if slots["refused"] else ""
        end = [self._templates[f"decide_{request.phase}"], _fill_template(self._templates["decision"], slots)]
        return self._assemble(given, end)

    def _build_phase_prompt(self, name: str, given: JsonObject, **slots: str) -> str:
        left_out = _OMITTED_SECTIONS.get(name, frozenset())
        used = {key: value for key, value in given.items() if key not in left_out}
        return self._assemble(used, [_fill_template(self._templates[name], slots)])

    def _strategy(self) -> str:
        return self._templates[f"strategy_{self._settings.strategy}"]

    def _assemble(self, given: JsonObject, end: list[str]) -> str:
        if given.get("rejected"):
            end.insert(0, self._templates["rejected"])
        asked = "\n\n".join(end)
        told: dict[str, JsonValue] = {kind: given[kind] for kind in SECTION_DESCRIPTIONS if kind in given}
        told["tools"] = [_tool_data(tool) for tool in self.tools]
        told["other"] = [
            {key: value}
            for key, value in islice(given.items(), _MAX_VALUES)
            if key not in {*SECTION_DESCRIPTIONS, "tools"}
        ]
        room = self._max_chars - len(asked)
        return fit_sections(self._sections(told, room), room, CUT_ORDER) + asked

    def _sections(self, told: Mapping[str, JsonValue], room: int) -> list[DataSection]:
        """What is told, by and large as much as there is room for: what would be cut first is looked at last."""
        found: dict[str, DataSection] = {}
        for kind in reversed(CUT_ORDER):
            if told.get(kind) not in (None, "", [], {}):
                found[kind] = self._section(kind, told[kind], room)
                room -= found[kind].size
        return [found[kind] for kind in told if kind in found]

    def _section(self, kind: str, value: JsonValue, left: int) -> DataSection:
        values = _section_items(value)
        kept = values[-_MAX_VALUES:][::-1] if kind in _LATEST_FIRST else values[:_MAX_VALUES]
        room = min(
            6 * _MAX_VALUE_CHARS
            if kind in _LONG_SECTIONS
            else 2 * _MAX_VALUE_CHARS
            if len(kept) == 1
            else _MAX_VALUE_CHARS,
            self._max_chars // 6,
        )
        lines: list[str] = []
        for each in kept:
            if left <= 0:
                break
            lines.append(self._encode_line(each, room))
            left -= len(lines[-1]) + 1
        return DataSection(kind, lines, omitted=len(values) - len(lines))

    def _encode_line(self, value: JsonValue, room: int) -> str:
        """A value as a line; of what stays the same from prompt to prompt, such as a plan, it is remembered."""
        try:
            text = _ENCODER.encode(value)
        except (ValueError, RecursionError):  # a number that is none, or one or a nesting that is too large
            text = ""
        if text and len(text) <= room and text.count("[") + text.count("{") <= _MAX_CONTAINERS:
            line = self._line_cache.get(text)
            if line is None:
                if len(self._line_cache) >= _MAX_CACHED_LINES:
                    self._line_cache.clear()
                clean = self._redact(value)
                line = self._line_cache[text] = escape_markup(text) if clean == value else encode_data(clean)
            if len(line) <= room:
                return line
        return encode_data(truncate_value(self._redact(truncate_value(value, 8 * room)), room))


def _section_items(value: JsonValue) -> list[JsonValue]:
    """The lines of a section, of which some may be left out: items of a list, also of the list that an output is about."""
    if isinstance(value, dict):
        for name in _LIST_KEYS:
            if isinstance(items := value.get(name), list):
                rest: JsonObject = {key: each for key, each in value.items() if key != name and each}
                return [*([rest] if rest else []), *items]
    return list(value) if isinstance(value, list) else [value]


def _fill_template(template: str, slots: Mapping[str, str]) -> str:
    return _SLOT.sub(lambda match: slots[match[1]], template)


def _tool_data(tool: ToolSpec) -> JsonObject:
    """A tool without how it is carried out, which is no business of a model."""
    told: JsonObject = {
        "name": tool.name,
        "available": tool.available,
        "parameters": dict(tool_parameters(tool)),
        "optional": list(tool.optional),
        "schema": tool.input_schema,
        "description": tool.description,
        "kind": tool.kind,
        "capability": tool.capability,
        "requires": list(tool.requires),
        "needs": list(tool.needs),
        "produces": list(tool.produces),
        "cost": tool.cost,
        "dangerous": tool.dangerous or None,
    }
    return {key: value for key, value in told.items() if value not in (None, "", [], {})}
