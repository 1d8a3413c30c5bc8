"""What a model is asked in planning mode: our own words from templates, and everything else as data between tags.

A prompt holds the data of its phase first, then what is asked. It never has more characters than it may: data is cut by
whole values, in each kind from the oldest or the last stated, and a line says how much. Single values that are long are
cut at their end, which is marked as well. Secrets are taken out before anything is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from replanning._plan import JsonObject, JsonValue, ToolSpec
from replanning._planning_settings import PlanningSettings
from replanning._quoting import DataSection, encoded, escaped, fitted, trimmed
from replanning.planning._building import parameters_of
from replanning.planning._decision_prompt import decision_data, open_in_words
from replanning.planning._phases import Phase

if TYPE_CHECKING:
    from replanning.planning._deciding import DecisionRequest

SIZE: Final = 24_000
"""Characters of a prompt, if nothing else is said."""

SMALLEST: Final = 10_000
"""With fewer characters than this a model is not told enough to be asked."""

PLAN_TOKENS: Final = 2000
"""Tokens that an answer in the first three phases may have (J38)."""

REFLECTION_TOKENS: Final = 500
"""Tokens that a reflection may have (J38)."""

TOKENS: Final[Mapping[str, int]] = MappingProxyType({"reflection": REFLECTION_TOKENS, "completion": REFLECTION_TOKENS})
"""Tokens that an answer of these kinds may have; any other is one that makes a plan."""

PART: Final = "part"
"""Names the subtasks whose actions are asked for, where a plan is made in parts."""

GIVEN: Final[Mapping[str, str]] = MappingProxyType(
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

CUT_FIRST: Final = (
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
_WHOLE: Final = frozenset({"request", "goal_understanding"})
_LISTS: Final = ("subtasks", "actions")
_MOST: Final = 200
"""Values of a kind that are looked at."""
_PLAIN: Final = 1500
"""Characters of a value; some may have more."""

_MOST_PARTS: Final = 100
"""Lists and objects in a value that is written without looking at how deep it goes."""
_MOST_LINES: Final = 2000
"""Lines that are remembered."""
_JSON: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False)

_BEFORE: Final = frozenset({"comments", "repository", "earlier_runs"})
_LEFT_OUT: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        Phase.TASK_DECOMPOSITION: frozenset({"comments", "earlier_runs"}),
        Phase.ACTION_SEQUENCE: _BEFORE,
        Phase.EXECUTION: _BEFORE | {"request", "replans", "limits", "task_decomposition", "action_plan", "remaining"},
        Phase.REFLECTION: _BEFORE | {"replans", "limits", "task_decomposition"},
        "revision": _BEFORE,
        "completion": _BEFORE | {"replans", "limits", "task_decomposition", "action_plan"},
    }
)
"""What a phase has no use for; a decision is told everything."""

_DEPTHS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "deep": "\nLook deep: also for causes behind the causes, for effects on what was done before, and for better ways.",
        "moderate": "",
        "shallow": "\nBe brief: one sentence is enough for each text.",
    }
)
_SLOT: Final = re.compile(r"\[\[(\w+)\]\]")

Clean = Callable[[JsonValue], JsonValue]
"""Takes secrets out of a value."""


def _as_it_is(value: JsonValue) -> JsonValue:
    return value


class ReplanPromptBuilder:
    """Writes the prompts of planning mode: one method for each phase, and `decision` for what is decided after it.

    What a prompt is made of is given as a JSON object with the keys of `GIVEN`; each value becomes a section, a list with
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
        size: int = SIZE,
        clean: Clean = _as_it_is,
    ) -> None:
        if size < SMALLEST:
            raise ValueError(f"a prompt needs at least {SMALLEST} characters, got {size}")
        self.tools = tuple(tools)
        self._templates = templates
        self._settings = settings or PlanningSettings()
        self._size = size
        self._clean = clean
        self._lines: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<ReplanPromptBuilder {self._settings.strategy}, {len(self.tools)} tools, {self._size} characters>"

    def system(self) -> str:
        """What the model is told about its role (J23); it says nothing of the run."""
        return self._templates["system"]

    def wanted(self, kind: str, given: JsonObject) -> str:
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
        return self._phase(Phase.GOAL_UNDERSTANDING, given, strategy=self._strategy())

    def task_decomposition(self, given: JsonObject) -> str:
        """Asks for the subtasks."""
        level = self._templates[f"level_{self._settings.decomposition_level}"]
        most = str(self._settings.max_subtasks)
        return self._phase(
            Phase.TASK_DECOMPOSITION,
            given,
            strategy=self._strategy(),
            level=_filled(level, {"most": most}),
            tokens=str(PLAN_TOKENS),
        )

    def action_sequence(self, given: JsonObject) -> str:
        """Asks for the actions; with the key `part`, of some subtasks only."""
        part = ", but only for those whose ids <part> lists" if given.get(PART) else ""
        return self._phase(Phase.ACTION_SEQUENCE, given, strategy=self._strategy(), part=part, tokens=str(PLAN_TOKENS))

    def execution(self, given: JsonObject) -> str:
        """Asks for the use of a tool."""
        return self._phase(Phase.EXECUTION, given)

    def reflection(self, given: JsonObject) -> str:
        """Asks what came of an action."""
        depth = _DEPTHS[self._settings.reflection.depth]
        return self._phase(Phase.REFLECTION, given, depth=depth, tokens=str(REFLECTION_TOKENS))

    def revision(self, given: JsonObject) -> str:
        """Asks how the plan is to be changed."""
        return self._phase("revision", given, strategy=self._strategy(), tokens=str(PLAN_TOKENS))

    def completion(self, given: JsonObject) -> str:
        """Asks for the summary."""
        return self._phase("completion", given, tokens=str(REFLECTION_TOKENS))

    def step(self, given: JsonObject) -> str:
        """Asks for the next use of a tool, where there is no plan."""
        return self._phase("step", given)

    def decision(self, request: DecisionRequest) -> str:
        """Asks whether to replan after a phase; with `refused` for another way, with `problem` for a usable reply."""
        given = {**request.given, **decision_data(request, most=_MOST)}
        slots = {
            "types": open_in_words(request),
            "refused": self._templates["refused"] if request.refused else "",
        }
        slots["refused"] = f"\n{slots['refused']}" if slots["refused"] else ""
        end = [self._templates[f"decide_{request.phase}"], _filled(self._templates["decision"], slots)]
        return self._written(given, end)

    def _phase(self, name: str, given: JsonObject, **slots: str) -> str:
        left_out = _LEFT_OUT.get(name, frozenset())
        used = {key: value for key, value in given.items() if key not in left_out}
        return self._written(used, [_filled(self._templates[name], slots)])

    def _strategy(self) -> str:
        return self._templates[f"strategy_{self._settings.strategy}"]

    def _written(self, given: JsonObject, end: list[str]) -> str:
        if given.get("rejected"):
            end.insert(0, self._templates["rejected"])
        asked = "\n\n".join(end)
        told: dict[str, JsonValue] = {kind: given[kind] for kind in GIVEN if kind in given}
        told["tools"] = [_tool(tool) for tool in self.tools]
        told["other"] = [{key: value} for key, value in islice(given.items(), _MOST) if key not in {*GIVEN, "tools"}]
        room = self._size - len(asked)
        return fitted(self._sections(told, room), room, CUT_FIRST) + asked

    def _sections(self, told: Mapping[str, JsonValue], room: int) -> list[DataSection]:
        """What is told, by and large as much as there is room for: what would be cut first is looked at last."""
        found: dict[str, DataSection] = {}
        for kind in reversed(CUT_FIRST):
            if told.get(kind) not in (None, "", [], {}):
                found[kind] = self._section(kind, told[kind], room)
                room -= found[kind].size
        return [found[kind] for kind in told if kind in found]

    def _section(self, kind: str, value: JsonValue, left: int) -> DataSection:
        values = _values(value)
        kept = values[-_MOST:][::-1] if kind in _LATEST_FIRST else values[:_MOST]
        room = min(6 * _PLAIN if kind in _WHOLE else 2 * _PLAIN if len(kept) == 1 else _PLAIN, self._size // 6)
        lines: list[str] = []
        for each in kept:
            if left <= 0:
                break
            lines.append(self._line(each, room))
            left -= len(lines[-1]) + 1
        return DataSection(kind, lines, left_out=len(values) - len(lines))

    def _line(self, value: JsonValue, room: int) -> str:
        """A value as a line; of what stays the same from prompt to prompt, such as a plan, it is remembered."""
        try:
            text = _JSON.encode(value)
        except (ValueError, RecursionError):  # a number that is none, or one or a nesting that is too large
            text = ""
        if text and len(text) <= room and text.count("[") + text.count("{") <= _MOST_PARTS:
            line = self._lines.get(text)
            if line is None:
                if len(self._lines) >= _MOST_LINES:
                    self._lines.clear()
                clean = self._clean(value)
                line = self._lines[text] = escaped(text) if clean == value else encoded(clean)
            if len(line) <= room:
                return line
        return encoded(trimmed(self._clean(trimmed(value, 8 * room)), room))


def _values(value: JsonValue) -> list[JsonValue]:
    """The lines of a section, of which some may be left out: items of a list, also of the list that an output is about."""
    if isinstance(value, dict):
        for name in _LISTS:
            if isinstance(items := value.get(name), list):
                rest: JsonObject = {key: each for key, each in value.items() if key != name and each}
                return [*([rest] if rest else []), *items]
    return list(value) if isinstance(value, list) else [value]


def _filled(template: str, slots: Mapping[str, str]) -> str:
    return _SLOT.sub(lambda match: slots[match[1]], template)


def _tool(tool: ToolSpec) -> JsonObject:
    """A tool without how it is carried out, which is no business of a model."""
    told: JsonObject = {
        "name": tool.name,
        "available": tool.available,
        "parameters": dict(parameters_of(tool)),
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
