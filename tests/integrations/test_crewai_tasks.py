"""Tasks of crews as the plan: stand-ins, skips, people, insertions and resumed crews. `make test-frameworks` runs these tests."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "crewai", reason="CrewAI is not installed here; make test-frameworks runs these tests"
)

from crewai import Crew, Process, Task
from crewai.events.base_events import BaseEvent
from crewai.events.event_bus import crewai_event_bus
from crewai.flow.flow import Flow, start
from crewai.tasks.conditional_task import ConditionalTask
from crewai.utilities.env import get_env_context
from pydantic import BaseModel

from replanning import Answer, ReplanningEngine
from replanning import Task as PlannedTask
from replanning.changes import AddTask, ReplaceTask, SkipTask
from replanning.errors import NeedsHuman
from replanning.integrations.crewai import replanned
from replanning.journal import PlanRevised
from replanning.journal.sqlite import SqliteStore
from replanning.testing import ScriptedGate
from tests.integrations.test_crewai import (
    WAYS,
    ScriptedModel,
    agent_of,
    anyio_backend,
    bodies,
    done,
    repairing,
    statuses,
    storage,
)
from tests.support.runs import alternative, make_engine

__all__ = ["anyio_backend", "storage"]

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")

WRITE = {"writer": "write", "Chief Editor": "write"}
"""Agents that can stand in for one another."""


class Model(ScriptedModel):
    """Model of an agent that answers with its name, or fails."""

    error: Any = None

    def call(self, messages: Any, tools: Any = None, *args: Any, **options: Any) -> Any:
        if self.error is not None:
            self.seen.append(messages)
            raise self.error
        return super().call(messages, tools, *args, **options)


def says(text: str) -> Model:
    """A model that always says the same."""
    return Model(model="scripted", answers=[text] * 9)


def fails(error: Exception | None = None) -> Model:
    """A model that fails whenever it is asked."""
    return Model(model="scripted", answers=[], error=error or RuntimeError("overloaded"))


class Team:
    """A crew that researches, writes and translates, with an editor who could write as well.

    Args:
        models: by role, the models of its agents; the others say their role.
        stated: by role, further fields of the task.
        options: further fields of the crew.
    """

    def __init__(
        self, stated: dict[str, dict[str, Any]] | None = None, options: Any = None, **models: Any
    ) -> None:
        self.models: dict[str, Any] = {}
        self.agents: dict[str, Any] = {}
        for role in ("researcher", "writer", "translator", "Chief Editor"):
            name = role.split()[-1].lower()
            self.models[name] = models.get(name) or says(f"by the {name}")
            self.agents[name] = agent_of(self.models[name], role=role, max_retry_limit=0)
        self.tasks: dict[str, Any] = {}
        for name in ("researcher", "writer", "translator"):
            fields = {
                "name": name[:-2] if name == "writer" else name,
                "description": f"work of the {name}",
                "expected_output": "text",
                "agent": self.agents[name],
                **(stated or {}).get(name, {}),
            }
            self.tasks[name] = fields.pop("type", Task)(**fields)
        self.crew = Crew(
            agents=list(self.agents.values()), tasks=list(self.tasks.values()), **(options or {})
        )

    def asked(self) -> dict[str, int]:
        """How often each agent was asked."""
        return {name: len(model.seen) for name, model in self.models.items() if model.seen}

    def prompt(self, name: str) -> str:
        """What an agent was asked last."""
        return str(self.models[name].seen[-1])


@pytest.mark.parametrize("way", WAYS)
async def test_stand_in(way: str) -> None:
    """A task whose agent fails for good goes to another agent, and the next one gets its output as context."""
    team, engine = Team(writer=fails()), repairing()
    with replanned(team.crew, engine, capabilities=WRITE) as crew:
        output = await WAYS[way](crew)
    assert output.raw == "by the translator"
    assert [(each.raw, each.agent) for each in output.tasks_output] == [
        ("by the researcher", "researcher"),
        ("by the editor", "Chief Editor"),
        ("by the translator", "translator"),
    ]
    assert "by the editor" in team.prompt("translator")
    assert "by the researcher" in team.prompt("editor")
    assert team.asked() == {"researcher": 1, "writer": 1, "editor": 1, "translator": 1}
    assert statuses(engine) == ["succeeded"]
    assert team.tasks["writer"].agent is team.agents["writer"]


def test_no_answer_of_a_model() -> None:
    """An agent whose model did not answer in time is replaced, because asking a model changes nothing."""
    team = Team(writer=fails(TimeoutError("too late")))
    with replanned(team.crew, repairing(), capabilities=WRITE) as crew:
        assert crew.kickoff().tasks_output[1].raw == "by the editor"


def test_guardrail_that_gives_up() -> None:
    """A task whose guardrail refuses every output of its agent goes to another agent."""

    def is_edited(output: Any) -> tuple[bool, Any]:
        return ("editor" in output.raw, output.raw if "editor" in output.raw else "edit it")

    team = Team({"writer": {"guardrail": is_edited, "guardrail_max_retries": 1}})
    with replanned(team.crew, repairing(), capabilities=WRITE) as crew:
        assert crew.kickoff().tasks_output[1].raw == "by the editor"
    assert team.asked() == {"researcher": 1, "writer": 2, "editor": 1, "translator": 1}


class Text(BaseModel):
    """A structured output."""

    words: list[str]


@pytest.mark.parametrize("field", ["output_pydantic", "output_json"])
def test_structured_output(field: str, tmp_path: Path) -> None:
    """Structured outputs of a stand-in are of the type that the task states, also after a resume."""
    store = SqliteStore(tmp_path / "runs.db")
    outputs = []
    team = Team()
    for translator in (fails(), None):
        team = Team(
            {"writer": {field: Text}},
            writer=fails(),
            editor=says('{"words": ["a", "b"]}'),
            translator=translator,
        )
        with (
            pytest.raises(RuntimeError) if translator else nullcontext(),
            replanned(
                team.crew,
                ReplanningEngine(store=store),
                capabilities=WRITE,
                thread="t",
            ) as crew,
        ):
            crew.kickoff()
        outputs.append(team.tasks["writer"].output)
    assert team.asked() == {"translator": 1}
    assert outputs[0].pydantic == outputs[1].pydantic
    assert outputs[0].json_dict == outputs[1].json_dict
    assert (outputs[1].pydantic or Text(**outputs[1].json_dict)) == Text(words=["a", "b"])


def test_optional_task() -> None:
    """An optional task whose agent fails is left out, as CrewAI leaves out a task whose condition does not hold."""
    team, engine = Team(writer=fails()), repairing()
    with replanned(team.crew, engine, optional=["writ"]) as crew:
        output = crew.kickoff()
    assert [each.raw for each in output.tasks_output] == [
        "by the researcher",
        "",
        "by the translator",
    ]
    assert statuses(engine) == ["succeeded"]


def test_unknown_names() -> None:
    """Names that no task, agent or tool has are refused, with a hint."""
    crew = Team().crew
    stated: dict[str, Any]
    for stated, problem in (
        (
            {"capabilities": {"writr": "write"}},
            "no tool or agent called 'writr'; did you mean 'writer'",
        ),
        ({"optional": ["translate"]}, "no task called 'translate'"),
    ):
        with pytest.raises(ValueError, match=problem), replanned(crew, **stated):
            pass


def test_person_through_the_gate() -> None:
    """A person decides through the gate whether another agent stands in, while the task waits."""
    for answer in (Answer("approve"), Answer("reject")):
        team = Team(writer=fails())
        asking = {"human_approval_threshold": 0.99}
        engine = repairing(gate=ScriptedGate([answer]), alternatives=asking)
        with replanned(team.crew, engine, capabilities=WRITE) as crew:
            if answer.verdict == "approve":
                assert crew.kickoff().tasks_output[1].raw == "by the editor"
            else:
                with pytest.raises(RuntimeError, match="overloaded"):
                    crew.kickoff()


@pytest.mark.parametrize("thread", [None, "t"])
def test_nobody_is_asked_without_approvals(thread: str | None) -> None:
    """With `approvals=False` the crew sees the exception of the agent, whoever could be asked."""
    gate = ScriptedGate([Answer("approve")])
    engine = repairing(gate=gate, alternatives={"human_approval_threshold": 0.99})
    crew = Team(writer=fails()).crew
    with (
        pytest.raises(RuntimeError, match="overloaded"),
        replanned(crew, engine, capabilities=WRITE, thread=thread, approvals=False),
    ):
        crew.kickoff()
    assert (gate.questions, engine.pending()) == ([], [])


def test_person_between_two_kickoffs() -> None:
    """With a thread the question is raised; after the answer the crew goes on where it was. Without one nothing is asked."""
    engine = repairing(alternatives={"human_approval_threshold": 0.99})
    crew = Team(writer=fails()).crew
    with (
        pytest.raises(RuntimeError, match="overloaded"),
        replanned(crew, engine, capabilities=WRITE),
    ):
        crew.kickoff()
    assert engine.pending() == []
    with (
        pytest.raises(NeedsHuman) as raised,
        replanned(crew, engine, capabilities=WRITE, thread="t"),
    ):
        crew.kickoff()
    engine.answer(raised.value.questions[0], "approve")
    team = Team(writer=fails())
    with replanned(team.crew, engine, capabilities=WRITE, thread="t"):
        assert team.crew.kickoff().tasks_output[1].raw == "by the editor"
    assert team.asked() == {"editor": 1, "translator": 1}


@pytest.mark.parametrize("way", ["kickoff", "akickoff"])
async def test_resumed_crew(way: str, tmp_path: Path) -> None:
    """Tasks that were done are not done again: their outputs are those of the earlier process."""
    team = Team(translator=fails(), writer=fails())
    engine = ReplanningEngine(store=SqliteStore(tmp_path / "runs.db"))
    with (
        pytest.raises(RuntimeError, match="overloaded"),
        replanned(team.crew, engine, capabilities=WRITE, thread="tea") as crew,
    ):
        await WAYS[way](crew)
    team = Team()
    engine = ReplanningEngine(store=SqliteStore(tmp_path / "runs.db"))
    with replanned(team.crew, engine, capabilities=WRITE, thread="tea") as crew:
        output = await WAYS[way](crew)
    assert team.asked() == {"translator": 1}
    assert "by the editor" in team.prompt("translator")
    assert [(each.raw, each.agent) for each in output.tasks_output] == [
        ("by the researcher", "researcher"),
        ("by the editor", "Chief Editor"),
        ("by the translator", "translator"),
    ]
    assert statuses(engine) == ["succeeded"]


def test_resumed_with_other_inputs() -> None:
    """A crew that is asked for something else in the same thread begins anew."""
    engine = repairing()
    stated = {"writer": {"description": "write about {topic}"}}
    crew = Team(stated, translator=fails()).crew
    with pytest.raises(RuntimeError), replanned(crew, engine, thread="t"):
        crew.kickoff(inputs={"topic": "tea"})
    team = Team(stated)
    with replanned(team.crew, engine, thread="t"):
        team.crew.kickoff(inputs={"topic": "coffee"})
    assert team.asked() == {"researcher": 1, "writer": 1, "translator": 1}


def test_plan_from_the_start() -> None:
    """All tasks are in the plan before the first begins, with what they wait for."""
    seen: list[Any] = []
    team = Team(
        {
            "researcher": {"async_execution": True},
            "writer": {"async_execution": True},
            "translator": {},
        }
    )
    team.tasks["translator"].context = [team.tasks["researcher"], team.tasks["writer"]]
    engine = repairing()
    with replanned(team.crew, engine, capabilities=WRITE) as crew:
        crew.kickoff()
        seen += [body for body in bodies(engine) if isinstance(body, PlanRevised)]
    first = seen[0].changes
    assert [(c.task.id, c.task.tool, list(c.task.depends_on)) for c in first] == [
        ("researcher", "researcher", []),
        ("writ", "writer", []),
        ("translator", "translator", ["researcher", "writ"]),
    ]
    assert statuses(engine) == ["succeeded"]


def test_tasks_at_once() -> None:
    """Of two tasks that run at once, the one whose agent fails is replaced while the other goes on."""
    stated = {name: {"async_execution": True} for name in ("researcher", "writer")}
    team = Team(stated, writer=fails())
    with replanned(team.crew, repairing(), capabilities=WRITE) as crew:
        output = crew.kickoff()
    assert [each.raw for each in output.tasks_output] == [
        "by the researcher",
        "by the editor",
        "by the translator",
    ]


def test_what_providers_change_before_it_begins() -> None:
    """Tasks that have not begun may be skipped, replaced, put to other agents, and get others before them."""
    check = PlannedTask(id="check", tool="Chief Editor", goal="check the facts")
    translate = PlannedTask(id="translate", tool="Chief Editor", goal="translate into French")
    team = Team(researcher=fails())
    engine = make_engine(
        lambda _: [
            alternative(
                SkipTask(task_id="researcher"),
                SkipTask(task_id="writ"),
                AddTask(task=check, before=("translator",)),
                ReplaceTask(task_id="translator", tasks=(translate,)),
                confidence=1.0,
            )
        ]
    )
    team.models["editor"].answers[:] = ["the facts", "la traduction"]
    with replanned(team.crew, engine) as crew:
        output = crew.kickoff()
    assert [each.raw for each in output.tasks_output] == ["", "", "la traduction"]
    assert team.asked() == {"researcher": 1, "editor": 2}
    assert "translate into French" in team.prompt("editor")
    assert "the facts" in team.prompt("editor")
    assert statuses(engine) == ["succeeded"]


def test_conditional_task() -> None:
    """A task that CrewAI leaves out by its condition is left out of the plan, and the rest goes on."""
    stated = {"writer": {"type": ConditionalTask, "condition": lambda _: False}}
    team, engine = Team(stated), repairing()
    with replanned(team.crew, engine) as crew:
        output = crew.kickoff()
    assert [each.raw for each in output.tasks_output] == [
        "by the researcher",
        "",
        "by the translator",
    ]
    assert statuses(engine) == ["succeeded"]
    assert set(done(engine)) == {"researcher", "translator"}


MISSING = LookupError("no such table")


def callback(_: Any) -> None:
    """Fail, once an agent was done."""
    raise MISSING


def test_failure_after_the_agent() -> None:
    """An exception of a callback is none of the agent: nobody stands in, and it arrives as it was."""
    for attached in (False, True):
        team = Team({"writer": {"callback": callback}})
        block = replanned(team.crew, repairing(), capabilities=WRITE) if attached else nullcontext()
        with pytest.raises(LookupError) as raised, block:
            team.crew.kickoff()
        assert raised.value is MISSING
        assert team.asked() == {"researcher": 1, "writer": 1}


@contextmanager
def all_events() -> Iterator[list[Any]]:
    """The types of all events of CrewAI, in the order in which they were emitted."""
    seen, shown = list[Any](), list[Any]()
    kinds = list[type[BaseEvent]]([BaseEvent])
    for kind in kinds:
        kinds += kind.__subclasses__()
    with crewai_event_bus.scoped_handlers():
        for kind in kinds[1:]:
            crewai_event_bus.register_handler(kind, lambda _, event: seen.append(event))
        yield shown
        crewai_event_bus.flush()
    seen.sort(key=lambda each: each.emission_sequence)
    numbers = {event.event_id: number for number, event in enumerate(seen)}
    for event in seen:
        shown.append(
            [
                event.type,
                *(
                    numbers.get(getattr(event, name))
                    for name in ("parent_event_id", "previous_event_id", "started_event_id")
                ),
            ]
        )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
async def test_same_as_without(way: str, failing: bool, at_once: bool) -> None:
    """Without a stand-in all is that of CrewAI alone: prompts, events and their order, outputs, usage and exceptions."""

    async def run(attached: bool) -> list[Any]:
        stated = {"writer": {"async_execution": at_once}}
        team = Team(stated, writer=fails() if failing else None)
        result: list[Any] = []
        block = replanned(team.crew, repairing()) if attached else nullcontext()
        with all_events() as events:
            try:
                with block:
                    output = await WAYS[way](team.crew)
                result += [output.raw, output.token_usage, [e.raw for e in output.tasks_output]]
                result.append([e.messages for e in output.tasks_output])
            except Exception as error:  # noqa: BLE001 - compared
                result += [type(error), str(error), error.__cause__, error.__suppress_context__]
        result += [[model.seen for model in team.models.values()], [event[0] for event in events]]
        return result if at_once else [*result, events]

    get_env_context()  # emits an event the first time
    assert await run(attached=True) == await run(attached=False)


def test_hierarchical_process() -> None:
    """Where the manager fails, a coworker of its capability does the task itself."""
    team = Team()
    manager = agent_of(fails(), role="manager", max_retry_limit=0)
    crew = Crew(
        agents=[team.agents["writer"]],
        tasks=[Task(description="write", expected_output="text")],
        process=Process.hierarchical,
        manager_agent=manager,
    )
    with replanned(crew, repairing(), capabilities={"manager": "write", "writer": "write"}):
        assert crew.kickoff().raw == "by the writer"


def test_copies_of_a_crew() -> None:
    """In the copies that `kickoff_for_each` makes, agents stand in for one another, too."""
    team, engine = Team(writer=fails()), repairing()
    with replanned(team.crew, engine, capabilities=WRITE) as crew:
        outputs = crew.kickoff_for_each([{}, {}])
    assert [output.tasks_output[1].raw for output in outputs] == ["by the editor"] * 2
    assert statuses(engine) == ["succeeded"]


async def test_flow() -> None:
    """A crew that a flow kicks off is attached like any other."""
    team, engine = Team(writer=fails()), repairing()

    class Publish(Flow):  # type: ignore[misc] # its types may not be installed
        @start()
        async def write(self) -> str:
            output = await team.crew.akickoff()
            return str(output.tasks_output[1].raw)

    with replanned(team.crew, engine, capabilities=WRITE):
        assert await Publish().kickoff_async() == "by the editor"
    assert statuses(engine) == ["succeeded"]


def test_kicked_off_again() -> None:
    """A crew that failed and is kicked off again in the block begins anew, and its session succeeds."""
    team, engine = Team(writer=fails()), repairing()
    with replanned(team.crew, engine) as crew:
        with pytest.raises(RuntimeError):
            crew.kickoff()
        team.agents["writer"].llm = says("by the writer")
        assert crew.kickoff().tasks_output[1].raw == "by the writer"
    assert statuses(engine) == ["succeeded"]
    assert team.asked()["researcher"] == 2
