"""Cost of planning mode: calls of the model, characters of prompts, and our own time in each phase."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import anyio

from benchmarks.figures import Figure, Report, machine, quiet, single
from replanning import Environment, Settings, ToolSpec
from replanning.journal import AttemptStarted, AttemptSucceeded, MemoryStore, Record
from replanning.llm import Completion, LLMOptions, LLMProvider, create_llm_provider
from replanning.plan import JsonObject
from replanning.plan.json_values import as_object
from replanning.plan.types import JsonValue
from replanning.planning import Phase, PlanningCoordinator
from replanning.testing import ScriptedLLM
from replanning.testing.llm import estimate_tokens

BAR: Final = 5.0
"""Milliseconds of our own in a phase, of which 95 in 100 are to be below."""
TARGETS: Final = {
    Phase.GOAL_UNDERSTANDING: 5,
    Phase.TASK_DECOMPOSITION: 10,
    Phase.ACTION_SEQUENCE: 5,
}
"""Seconds that a phase is to take with a model in the cloud."""
GOAL: Final = "Say in notes.txt, in one line, what README.md is about"
TASKS: Final = {
    "a simple task": (60, GOAL),
    "a task of several files": (
        300,
        "Say in docs/NAME.md what each of the files a.py, b.py, c.py, d.py and e.py is about",
    ),
    "a complex task": (
        900,
        "Find what the files of the repository repeat, write it once, and say in CHANGES.md what changed",
    ),
}
"""Goals, and the seconds that each is to take with one."""

COSTS: Final = {5: (9, 50_000), 15: (13, 110_000), 100: (26, 966_000)}
"""Most calls of the model, and characters of its prompts, for so many subtasks of which none
fails.
"""

TOKENS: Final = {12: (2_000, 500)}
"""Most tokens of the replies that plan so many subtasks, and of a reflection on one of their
actions.
"""

_EVERY: Final = "all phases and actions together"

_WHOLE_CALLS: Final = 2
"""How often the model is asked in a phase that is done in one piece: for what it is, and for a
judgement of that.
"""

SIZES: Final = (5, 12, 15, 100)
"""Subtasks: few, a usual number, as many as are planned in one answer, and the most there may
be.
"""
TOOLS: Final = (
    ToolSpec(
        name="read_file",
        description="Reads a text file of the repository and puts out what is in it.",
        parameters={"path": "string"},
    ),
    ToolSpec(
        name="write_file",
        description="Writes a text file of the repository; what was there before is gone.",
        parameters={"path": "string", "text": "string"},
    ),
)


def measure(
    *,
    short: bool = False,
    rounds: int | None = None,
    llm: str | None = None,
    sizes: Sequence[int] = SIZES,
    report: Callable[[str], None] = lambda line: None,
) -> Report:
    """Our own time in each phase of short and long plans; with a model's name, also how long that model takes."""
    where = machine()
    rounds = rounds or (3 if short else 7)
    figures: list[Figure] = []
    for subtasks in sizes:
        figures += cost(subtasks)
        figures += tokens(subtasks)
        runs = max(2, (40 if short else 200) // subtasks)
        found: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            times = _round(subtasks, runs)
            if number == 0:  # it warms up
                continue
            for name in times:
                found.setdefault(name, []).append(_p95(times[name]))
        for name, values in found.items():
            figures.append(single(f"{name}, {subtasks} subtasks, p95", values, "ms", BAR))
    if llm:
        figures += _with(llm)
    for figure in figures:
        report(f"{figure.name}: {figure.value:.2f} {figure.unit}")
    return Report(where, rounds, tuple(figures))


def cost(subtasks: int) -> list[Figure]:
    """Calls and characters of a run of so many subtasks, beside their bars; none for a size without bars."""
    model = ScriptedLLM(Answers(subtasks))
    if subtasks not in COSTS:
        return []
    with quiet():
        anyio.run(_run, model, Computing())
    calls = len(model.requests)
    characters = 0
    for request in model.requests:
        characters += len(request.prompt) + len(request.options.system or "")
    most_calls, most_characters = COSTS[subtasks]
    who = f"of the model, {subtasks} subtasks"
    return [
        single(f"calls {who}", [calls], "calls", most_calls),
        single(f"characters {who}", [characters], "characters", most_characters),
    ]


def tokens(subtasks: int) -> list[Figure]:
    """Tokens of the replies that plan so many subtasks, and of one reflection; none for a size without bars.

    They are those of the phases, the decisions after them included, in one reply and in three. The
    prompts are counted in figures of their own, which have no bar. A token is four bytes, as
    everywhere where no service counts them.
    """
    if subtasks not in TOKENS:
        return []
    most, most_of_reflection = TOKENS[subtasks]
    figures: list[Figure] = []
    for name, whole in (("one reply", True), ("three replies", False)):
        sent, received = _planning_tokens(subtasks, whole=whole)
        plan = f"a plan of {subtasks} tasks in {name}"
        figures.append(single(f"output of {plan}", [received], "tokens", most))
        figures.append(single(f"prompts and output of {plan}", [sent + received], "tokens"))
    sent, received = _reflection_tokens(subtasks)
    figures.append(single("output of a reflection", [received], "tokens", most_of_reflection))
    figures.append(single("prompt and output of a reflection", [sent + received], "tokens"))
    return figures


def _planning_tokens(subtasks: int, *, whole: bool) -> tuple[int, int]:
    """Return the tokens that a model is sent, and answers with, until the plan is made."""
    spent = [0, 0]
    for kind, sent, received in _exchanges(subtasks, whole=whole):
        if kind == "Phase reflection.":
            break
        spent[0] += sent
        spent[1] += received
    return spent[0], spent[1]


def _reflection_tokens(subtasks: int) -> tuple[int, int]:
    """Return the tokens of the first reflection: those sent, and those of the answer."""
    for kind, sent, received in _exchanges(subtasks, whole=True):
        if kind == "Phase reflection.":
            return sent, received
    raise LookupError("the model was not asked for a reflection")


def _exchanges(subtasks: int, *, whole: bool) -> list[tuple[str, int, int]]:
    """Return what the model was asked in a run, with the tokens of each prompt and answer."""
    answers = Answers(subtasks, whole=whole)
    model = ScriptedLLM(answers)
    with quiet():
        anyio.run(_run, model, Computing())
    exchanges: list[tuple[str, int, int]] = []
    for request in model.requests:
        sent = estimate_tokens(f"{request.options.system or ''}{request.prompt}")
        received = estimate_tokens(answers(request.prompt))
        exchanges.append((answers.kind(request.prompt), sent, received))
    return exchanges


def _p95(values: Sequence[float]) -> float:
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def _round(subtasks: int, runs: int) -> dict[str, list[float]]:
    """Milliseconds of our own in each phase of so many runs, and in each action."""
    found: dict[str, list[float]] = {}
    for _ in range(runs):
        with quiet():
            ours = anyio.run(_run, ScriptedLLM(Answers(subtasks)), Computing())[0]
        for name, seconds in ours:
            found.setdefault(name, []).append(seconds * 1000)
    return found


def _with(name: str) -> list[Figure]:
    """Measure the time of a real model for each phase, next to the targets."""
    figures = list[Figure]()
    wholes = list[Figure]()
    for task, (seconds, goal) in TASKS.items():
        model = create_llm_provider(name)
        ours, theirs = anyio.run(_run, model, Passing(), goal)
        who = f"{model.name} ({model.model})"
        phases: dict[str, float] = {}
        for phase, spent in theirs:
            phases[phase] = phases.get(phase, 0) + spent
        if not figures:  # the phases of the first task stand for all
            for phase, target in TARGETS.items():
                if phase.value in phases:
                    spent = phases[phase.value]
                    figures.append(single(f"{phase.value}, {who}", [spent], "s", target))
        whole = sum(phases.values())
        for kind, spent in ours:
            if kind == _EVERY:
                whole += spent
        wholes.append(single(f"{task}, {who}", [whole], "s", seconds))
    return [*figures, *wholes]


class Passing:
    """The time that passes."""

    def __init__(self) -> None:
        self._offset = time.time() - time.perf_counter()

    def now(self) -> float:
        """Seconds since the epoch."""
        return self._offset + time.perf_counter()

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await anyio.sleep(seconds)


class Computing(Passing):
    """The computing time of this thread since the beginning: other processes do not count."""

    def now(self) -> float:
        """Seconds since the epoch, of which only those count in which this thread computed."""
        return self._offset + time.thread_time()


Times = list[tuple[str, float]]


async def _run(model: LLMProvider, clock: Passing, goal: str = GOAL) -> tuple[Times, Times]:
    """The seconds that we and the model took, for each phase and action of a run."""
    spans = list[tuple[float, float]]()
    asked = model.request

    async def request(prompt: str, options: LLMOptions) -> Completion:
        begin = clock.now()
        try:
            return await asked(prompt, options)
        finally:
            spans.append((begin, clock.now()))

    setattr(model, "request", request)  # noqa: B010 # whichever model it is
    store = MemoryStore()
    settings = Settings.model_validate({"escalation": {"on_no_alternative": "abort"}})
    environment = Environment(clock=clock)
    planning = PlanningCoordinator(
        settings,
        model,
        TOOLS,
        goal,
        work=_work,
        store=store,
        environment=environment,
        max_concurrency=1,
        wait_for_answers=False,
    )
    await planning.execute_with_planning()
    await model.aclose()
    return _split(list(store.read(planning.result.run)), spans)


async def _work(task: object, context: object) -> JsonValue:
    """Work of a tool: nothing."""
    return "done"


def _split(records: Sequence[Record], spans: Sequence[tuple[float, float]]) -> tuple[Times, Times]:
    begun: dict[str, float] = {}
    ours = Times()
    theirs = Times()
    every = Times()
    for record in records:
        body = record.body
        if isinstance(body, AttemptStarted):
            begun[body.attempt] = record.at
        elif isinstance(body, AttemptSucceeded):
            begin = begun[body.attempt]
            end = record.at
            asked = [right - left for left, right in spans if begin <= left and right <= end]
            stem = body.task.partition("~")[0]
            name = stem if stem in list(Phase) else Phase.EXECUTION.value
            own = end - begin - sum(asked)
            ours.append((name, own))
            every.append((_EVERY, own))
            if len(asked) > _WHOLE_CALLS:
                ours.append((f"{name} for each of {len(asked)} answers", own / len(asked)))
            theirs.append((name, sum(asked)))
    return [*ours, *every], theirs


class Answers:
    """Answers every prompt at once and as planned: so many subtasks, each by one action.

    Fields that are empty are left out, as the prompts ask for it.

    Args:
        subtasks: how many.
        whole: answer with the whole plan at once.
    """

    def __init__(self, subtasks: int, *, whole: bool = False) -> None:
        self._whole = whole
        self._names = [f"part-{number}" for number in range(subtasks)]
        self._goal: JsonObject = {
            "main_objective": "Everything that the request names is written down and can be read.",
            "success_criteria": ["each file is there", "each file says what it is about"],
            "constraints": ["nothing else is changed"],
            "context": "A repository of text files.",
        }
        self._kinds: Sequence[tuple[str, Callable[[str], JsonValue]]] = (
            ("Ask yourself first", lambda prompt: _GO_ON),
            ("Phase goal_understanding.", self._understood),
            ("Phase task_decomposition.", self._subtasks),
            ("Phase action_sequence.", self._actions),
            ("Phase reflection.", lambda prompt: _THOUGHT),
            ("The work has ended.", lambda prompt: _SUMMARY),
        )

    def __call__(self, prompt: str) -> str:
        """The answer to a prompt."""
        return json.dumps(dict(self._kinds)[self.kind(prompt)](prompt))

    def kind(self, prompt: str) -> str:
        """The mark by which a prompt tells what it asks for."""
        return next(mark for mark, _ in self._kinds if mark in prompt)

    def _understood(self, prompt: str) -> JsonValue:
        reply: JsonObject = {"goal_understanding": self._goal}
        if self._whole:
            for part in (self._subtasks(prompt), self._actions(prompt)):
                reply |= as_object(part)
        return reply

    def _subtasks(self, prompt: str) -> JsonValue:
        found: list[JsonValue] = []
        for index, name in enumerate(self._names):
            subtask: JsonObject = {
                "id": name,
                "description": f"Look at what {name} needs, write it down, and leave everything else as it is.",
            }
            if index:
                subtask["dependencies"] = [self._names[index - 1]]
            if not self._whole:  # asked for in a phase of its own alone
                subtask |= {"estimated_complexity": "low", "required_tools": ["write_file"]}
            found.append(subtask)
        return {"task_decomposition": {"reasoning": "One part after another.", "subtasks": found}}

    def _actions(self, prompt: str) -> JsonValue:
        _, _, part = prompt.partition("<part>\n")
        stated = part.partition("</part>")[0].split()
        names = list(map(json.loads, stated)) or self._names
        found: list[JsonValue] = []
        for name in names:
            action: JsonObject = {
                "task_id": name,
                "action_type": "write",
                "tool": "write_file",
                "arguments": {"path": f"{name}.txt", "text": f"This is about {name}."},
                "purpose": f"so that {name} can be read",
                "expected_outcome": f"{name}.txt says what {name} is about",
            }
            found.append(action)
        return {"action_plan": {"actions": found}}


_GO_ON: Final[JsonValue] = {
    "replan_decision": {
        "replan_needed": False,
        "confidence": 0.9,
        "reasoning": "Nothing stands in the way of going on.",
        "replan_type": "none",
    }
}
_THOUGHT: Final[JsonValue] = {
    "reflection": {
        "action_id": "part-0",
        "status": "success",
        "evaluation": "It came to what was expected.",
    }
}
_SUMMARY: Final[JsonValue] = {
    "summary": {
        "goal_achieved": True,
        "tasks_completed": 1,
        "tasks_failed": 0,
        "key_outcomes": ["It is written."],
    }
}
