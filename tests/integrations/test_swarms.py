"""Workflows of swarms with fake models, attached and alone; `make test-frameworks` runs them."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pytest

os.environ["SWARMS_TELEMETRY_ON"] = "false"
os.environ["WORKSPACE_DIR"] = mkdtemp()  # the framework makes it when it is imported
pytest.importorskip(
    "swarms", reason="swarms is not installed here; make test-frameworks runs these tests"
)

from swarms import Agent, ConcurrentWorkflow, GraphWorkflow, SequentialWorkflow
from swarms.schemas.agent_errors import AgentLLMError

from replanning import Answer, ReplanningEngine, Task
from replanning.changes import AddTask, ModifyTask, SkipTask
from replanning.errors import CallFailed, NeedsHuman
from replanning.integrations.swarms import replanned
from replanning.testing import ScriptedGate
from tests.support.runs import alternative, make_engine, skipping

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning"
)  # of the framework, by itself


@pytest.fixture(scope="module", params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The one event loop that the framework knows."""
    return str(request.param)


KINDS = ("sequential", "concurrent", "graph")
WRITE = {"writer": "write", "editor": "write"}
CALLER: ContextVar[str] = ContextVar("CALLER", default="nobody")


@pytest.fixture(autouse=True, scope="module")
def workspace() -> Iterator[None]:
    """The folder in which the framework keeps files, and which it looks up once."""
    yield
    rmtree(os.environ["WORKSPACE_DIR"])


class Models:
    """The models of agents, which note what each agent is asked.

    Attributes:
        failing: the agents whose model fails, with what it raises.
        asked: the names of the agents, in the order in which they were asked.
        seen: by agent, all that its model was given.
    """

    def __init__(self, *failing: str, **errors: BaseException) -> None:
        self.failing: dict[str, BaseException] = dict(errors)
        for name in failing:
            self.failing[name] = ValueError(f"{name} is down")
        self.asked: list[str] = []
        self.seen: dict[str, list[object]] = {}

    def agent(self, name: str) -> Any:
        """An agent of the framework with such a model."""
        models = self

        class Model:
            def run(self, task: str, **options: Any) -> str:
                models.asked.append(name)
                models.seen.setdefault(name, []).append((task, options.get("messages")))
                if name in models.failing:
                    raise models.failing[name]
                return f"{name} said this"

        return Agent(
            agent_name=name,
            llm=Model(),
            model_name="gpt-4.1",
            max_loops=1,
            print_on=False,
            autosave=False,
            retry_attempts=1,
        )

    def workflow(self, kind: str, **options: Any) -> Any:
        """A workflow of three agents, which follow one another unless it is concurrent."""
        agents = [self.agent(name) for name in ("researcher", "writer", "critic")]
        if kind == "sequential":
            return SequentialWorkflow(agents=agents, autosave=False, **options)
        if kind == "concurrent":
            return ConcurrentWorkflow(agents=agents, autosave=False, **options)
        graph = GraphWorkflow(**options)
        for agent in agents:
            graph.add_node(agent)
        graph.add_edge("researcher", "writer")
        graph.add_edge("writer", "critic")
        return graph

    def attached(
        self,
        kind: str,
        engine: ReplanningEngine | None = None,
        thread: str | None = None,
        *,
        approvals: bool = True,
    ) -> Any:
        """The same workflow with an engine and an editor who can stand in for the writer."""
        return replanned(
            self.workflow(kind),
            engine,
            capabilities=WRITE,
            agents=[self.agent("editor")],
            thread=thread,
            approvals=approvals,
        )


def spoken(result: Any) -> list[tuple[str, str]]:
    """Who said what at the end of each entry, whatever the type of the result."""
    if isinstance(result, Mapping):
        entries = list(result.items())
    else:
        entries = [(entry["role"], entry["content"]) for entry in result]
    last = []
    for name, content in entries:
        last.append((name, content and content.splitlines()[-1].removeprefix("editor: ")))
    return last


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(
            ("sequential", {"output_type": kind, "max_loops": 2, "team_awareness": True})
            for kind in ("dict", "list", "str", "final", "json", "yaml", "dict-final")
        ),
        *(("concurrent", {"output_type": kind}) for kind in ("dict", "list-final", "all")),
        ("graph", {"max_loops": 1}),
        ("graph", {"max_loops": 2}),
    ],
)
def test_without_failures_all_is_as_in_the_framework_alone(kind, options):
    """Results, agents that are asked, and all that their models are given are equal."""
    alone, attached = Models(), Models()
    result = replanned(
        attached.workflow(kind, **options),
        capabilities=WRITE,
        agents=[attached.agent("editor")],
    ).run("Write about tea")
    assert result == alone.workflow(kind, **options).run("Write about tea")
    assert attached.seen == alone.seen
    if kind != "concurrent":
        assert attached.asked == alone.asked


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_of_the_same_capability_stands_in_under_the_name_of_the_step(kind):
    """The critic sees the output of the editor, and the entries are those of the workflow."""
    models = Models("writer")
    result = models.attached(kind).run("Write about tea")
    expected = [
        ("researcher", "researcher said this"),
        ("writer", "editor said this"),
        ("critic", "critic said this"),
    ]
    assert spoken(result)[-3:] == expected
    if kind != "concurrent":
        assert models.asked == ["researcher", "writer", "editor", "critic"]
        assert "editor said this" in str(models.seen["critic"])


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in KINDS), ("concurrent", {"on_error": "raise"})],
)
def test_without_a_stand_in_what_the_framework_does_alone_happens(kind, options):
    """It raises the agent's exception or has an entry with it, and asks the same agents."""

    def outcome(models: Models, workflow: Any) -> object:
        try:
            return workflow.run("Write about tea"), models.seen
        except Exception as error:  # noqa: BLE001 # it is compared
            return type(error), str(error), models.seen

    alone, attached = Models("writer"), Models("writer")
    assert outcome(attached, replanned(attached.workflow(kind, **options))) == outcome(
        alone, alone.workflow(kind, **options)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_that_is_skipped_says_nothing(kind):
    """The workflow goes on, and the node of a graph has no output."""
    models = Models("writer")
    result = models.attached(kind, make_engine(skipping)).run("Write about tea")
    said = dict(spoken(result))
    assert said.pop("writer", None) is None
    assert said["critic"] == "critic said this"
    assert ("writer" in result) is (kind == "graph")
    if kind != "concurrent":
        assert "writer: " not in str(models.seen["critic"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_person_decides_and_the_workflow_is_resumed(kind):
    """`run` raises the question; after the answer the next one asks nobody who had finished."""
    engine = ReplanningEngine(settings={"alternatives": {"human_approval_threshold": 0.99}})
    models = Models("writer")
    with pytest.raises(NeedsHuman) as raised:
        models.attached(kind, engine, "tea").run("Write about tea")
    (question,) = engine.pending()
    assert raised.value.questions == (question.id,)
    engine.answer(question.id, "approve")
    result = models.attached(kind, engine, "tea").run("Write about tea")
    assert dict(spoken(result))["writer"] == "editor said this"
    assert sorted(models.asked) == ["critic", "editor", "researcher", "writer"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_refuses_leaves_the_failure_to_the_framework(kind):
    """The resumed run asks neither the agent that had failed nor the stand-in."""
    engine = ReplanningEngine(settings={"alternatives": {"human_approval_threshold": 0.99}})
    models = Models("writer")
    with pytest.raises(NeedsHuman):
        models.attached(kind, engine, "tea").run("Write about tea")
    engine.answer(engine.pending()[0].id, "reject")
    try:
        outcome = str(models.attached(kind, engine, "tea").run("Write about tea"))
    except CallFailed as error:
        assert kind == "sequential"
        outcome = str(error)
    assert "writer is down" in outcome
    assert models.asked.count("writer") == 1
    assert "editor" not in models.asked


@pytest.mark.parametrize("kind", KINDS)
def test_a_gate_is_asked_while_the_workflow_runs(kind):
    """The step of the agent that failed waits for the answer."""
    models = Models("writer")
    gate = ScriptedGate([Answer("approve")])
    engine = make_engine("repair", gate=gate, alternatives={"human_approval_threshold": 0.99})
    result = models.attached(kind, engine).run("Write about tea")
    assert dict(spoken(result))["writer"] == "editor said this"
    assert len(gate.questions) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_is_asked_without_approvals(kind):
    """With `approvals=False` the failure of the agent is left to the framework, whoever could be asked."""
    models = Models("writer")
    gate = ScriptedGate([Answer("approve")])
    engine = make_engine("repair", gate=gate, alternatives={"human_approval_threshold": 0.99})
    attached = models.attached(kind, engine, "tea", approvals=False)
    try:
        outcome = str(attached.run("Write about tea"))
    except AgentLLMError as error:
        assert kind == "sequential"
        outcome = str(error)
    assert "writer is down" in outcome
    assert "editor" not in models.asked
    assert (gate.questions, engine.pending()) == ([], [])


@pytest.mark.parametrize("kind", ["sequential", "graph"])
def test_a_workflow_whose_process_was_killed_is_resumed(kind, tmp_path):
    """Agents that had finished are not asked again, and what follows gets their outputs."""
    killed = Models(writer=KeyboardInterrupt())
    engine = ReplanningEngine(store=tmp_path / "runs.db")
    with pytest.raises(KeyboardInterrupt):
        killed.attached(kind, engine, "tea").run("Write about tea")

    models, alone = Models(), Models()
    engine = ReplanningEngine(store=tmp_path / "runs.db")
    result = models.attached(kind, engine, "tea").run("Write about tea")
    assert models.asked == ["writer", "critic"]
    assert result == alone.workflow(kind).run("Write about tea")
    assert models.seen["writer"] == alone.seen["writer"]


def test_an_agent_that_failed_is_asked_again_by_the_next_run_of_the_thread():
    """The run before was left paused by the exception of the agent."""
    engine = ReplanningEngine()
    with pytest.raises(Exception, match="writer is down"):
        replanned(Models("writer").workflow("sequential"), engine, thread="tea").run("Write")
    models = Models()
    replanned(models.workflow("sequential"), engine, thread="tea").run("Write")
    assert models.asked == ["writer", "critic"]


@pytest.mark.parametrize("kind", ["sequential", "graph"])
def test_what_a_provider_inserts_is_done_before_what_follows(kind):
    """The editor is asked something else than the writer, and the critic sees the answer."""
    changes = (
        SkipTask(task_id="writer"),
        AddTask(
            task=Task(
                id="notes", tool="editor", arguments={"task": "Take notes"}, depends_on=("writer",)
            )
        ),
        ModifyTask(task_id="critic", fields={"depends_on": ["notes"]}),
    )
    models = Models("writer")
    engine = make_engine(lambda _: [alternative(*changes)])
    models.attached(kind, engine).run("Write about tea")
    assert models.asked == ["researcher", "writer", "editor", "critic"]
    if kind == "graph":
        assert "Take notes" in str(models.seen["editor"])
    assert "editor: " in str(models.seen["critic"])
    assert "editor said this" in str(models.seen["critic"])


def test_what_has_not_begun_is_in_the_plan():
    """Asked about the first failure, a provider sees the steps after it and their dependencies."""
    plans: list[Any] = []

    def look(request: Any) -> list[Any]:
        plans.append(request.view.original_plan)
        return []

    models = Models("researcher")
    with pytest.raises(Exception, match="researcher is down"):
        models.attached("sequential", make_engine(look)).run("Write about tea")
    plan = plans[0]
    assert plan.goal.objective == "Write about tea"
    assert [(task.id, task.tool, task.depends_on) for task in plan.tasks] == [
        ("researcher", "researcher", ()),
        ("writer", "writer", ("researcher",)),
        ("critic", "critic", ("writer",)),
    ]
    assert {tool.name: tool.capability for tool in plan.tools}["editor"] == "write"


class Recorder:
    """Agent that is no `Agent` of the framework, and notes what it is given."""

    def __init__(self, name: str) -> None:
        self.agent_name = name
        self.given: list[dict[str, Any]] = []
        self.places: list[tuple[int, str]] = []

    def run(self, task: str, **options: Any) -> str:
        """Note how it is asked."""
        self.given.append(options)
        self.places.append((threading.get_ident(), CALLER.get()))
        callback = options.get("streaming_callback")
        if callback is not None:
            callback(f"{self.agent_name} token")
        return f"{self.agent_name} said this"


def test_images_reach_the_agents_in_the_thread_and_context_of_the_caller():
    """The agents of a sequence are asked where `run` was called."""
    writer = Recorder("writer")
    workflow = replanned(SequentialWorkflow(agents=[writer], autosave=False))
    token = CALLER.set("somebody")
    workflow.run("Describe", img="tea.png", imgs=["a.png"])
    CALLER.reset(token)
    assert writer.given == [
        {"messages": writer.given[0]["messages"], "img": "tea.png", "imgs": ["a.png"]}
    ]
    assert writer.places == [(threading.get_ident(), "somebody")]


@pytest.mark.parametrize("kind", ["concurrent", "graph"])
def test_tokens_reach_the_callback_of_the_workflow(kind):
    """Under the name of the agent, as in the framework alone."""

    def tokens(attach: bool) -> list[object]:
        writer = Recorder("writer")
        workflow: Any
        if kind == "concurrent":
            workflow = ConcurrentWorkflow(agents=[writer], autosave=False)
        else:
            workflow = GraphWorkflow()
            workflow.add_node(writer)
        if attach:
            workflow = replanned(workflow)
        seen: list[object] = []
        workflow.run("Write", streaming_callback=lambda *token: seen.append(token))
        return seen

    assert tokens(attach=True) == tokens(attach=False) != []


def test_concurrent_agents_are_asked_at_the_same_time():
    """Each of two agents waits until the other one was asked."""
    barrier = threading.Barrier(2, timeout=30)

    class Waiting(Recorder):
        def run(self, task: str, **options: Any) -> str:
            barrier.wait()
            return super().run(task, **options)

    workflow = replanned(
        ConcurrentWorkflow(agents=[Waiting("writer"), Waiting("editor")], autosave=False)
    )
    assert dict(spoken(workflow.run("Write"))) == {
        "writer": "writer said this",
        "editor": "editor said this",
    }


def test_different_agents_of_one_name_are_all_asked():
    """As in the framework, whose agents have the same name by default."""
    agents = [Recorder("writer"), Recorder("writer")]
    replanned(ConcurrentWorkflow(agents=agents, autosave=False)).run("Write")
    assert [len(agent.given) for agent in agents] == [1, 1]


async def test_a_sequence_is_run_from_an_event_loop_and_in_batches():
    """What the framework builds on `run` is attached, too."""
    models = Models("writer")
    workflow = models.attached("sequential")
    assert ("writer", "editor said this") in spoken(await workflow.run_async("Write about tea"))
    for result in workflow.run_batched(["tea", "coffee"]):
        assert ("writer", "editor said this") in spoken(result)


def test_a_graph_within_a_graph_is_one_step():
    """If the inner graph is attached itself, its agents are replaced."""
    models = Models("writer")
    outer = GraphWorkflow()
    outer.add_node(models.attached("graph"))
    result = replanned(outer).run("Write about tea")
    assert "editor said this" in next(iter(result.values()))


def test_layers_with_a_checkpoint_of_the_framework_are_not_run(tmp_path):
    """A second run of a graph with `checkpoint_dir` asks nobody, as in the framework alone."""
    models = Models()
    workflow = replanned(models.workflow("graph", checkpoint_dir=str(tmp_path / "points")))
    result = workflow.run("Write about tea")
    assert workflow.run("Write about tea") == result
    assert models.asked == ["researcher", "writer", "critic"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_own_workflow_stays_as_it_is(kind):
    """Its agents fail as before, and the attached one keeps the history of its run."""
    models = Models("writer")
    own = models.workflow(kind)
    attached = replanned(own, capabilities=WRITE, agents=[models.agent("editor")])
    assert isinstance(attached, type(own))
    attached.run("Write about tea")
    holder = attached.agent_rearrange if kind == "sequential" else attached
    assert "editor said this" in holder.conversation.get_str()
    models.asked.clear()
    own_holder = own.agent_rearrange if kind == "sequential" else own
    assert own_holder is not holder
    with suppress(Exception):  # a sequence raises it, the others have an entry
        own.run("Write about tea")
    assert "editor" not in models.asked


def test_the_history_that_the_framework_saves_is_that_of_the_run():
    """With `autosave`, the file has the answer of the stand-in."""
    models = Models("writer")
    agents = [models.agent("writer")]
    workflow = ConcurrentWorkflow(agents=agents, autosave=True)
    replanned(workflow, capabilities=WRITE, agents=[models.agent("editor")]).run("Write")
    saved = Path(workflow.swarm_workspace_dir) / "conversation_history.json"
    assert "editor said this" in saved.read_text()


def test_what_cannot_be_attached_is_said_at_once():
    """Another kind of workflow is a TypeError, an unknown agent a ValueError."""
    with pytest.raises(TypeError, match="expected a SequentialWorkflow"):
        replanned(Models().agent("writer"))
    with pytest.raises(ValueError, match="the workflow has another agent called 'writer'"):
        replanned(Models().workflow("concurrent"), agents=[Models().agent("writer")])
    with pytest.raises(ValueError, match="no agent called 'writter'; did you mean 'writer'"):
        replanned(Models().workflow("graph"), capabilities={"writter": "write"})


def test_example() -> None:
    """The example runs as it is: a stand-in, a question to a person, and the resumed run."""
    example = Path(__file__).parents[2] / "examples" / "swarms_workflow.py"
    ran = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=120)
    alone, _, rest = ran.stdout.partition("with a stand-in\n")
    stand_in, _, person = rest.partition("with a person who decides\n")
    assert alone.endswith("the key has expired\n"), ran.stderr
    assert "writer: Tea: a story from China." in stand_in
    assert person.count("researcher is asked") == person.count("editor is asked") == 1
    assert person.endswith("critic: A good story.\n")
