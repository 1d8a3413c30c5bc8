"""What integrations share, without a framework: wrong arguments, descriptions of tools, and runs of threads."""

import sys
from importlib import import_module

import pytest

from replanning import Retry
from replanning.integrations.kit import describe_tools, thread_run, tool_fields
from replanning.testing import VirtualClock
from tests.support.runs import make_engine

SCHEMA = {
    "properties": {
        "query": {"type": "string"},
        "at": {"type": ["string", "null"]},
        "limit": {"default": 2},
        "all": True,
    },
    "required": ["query", "limit"],
}


def test_description() -> None:
    """A tool is described by its schema, and by what is stated of it; every offender is named at once."""
    fields = tool_fields("Search\n the  web.\x00", SCHEMA, dangerous=True)
    [tool] = describe_tools(
        {"search": fields}, {"search": {"capability": "web", "retry": Retry(max_attempts=2)}}
    )
    assert tool.spec.description == "Search the web."
    assert tool.spec.parameters == {"query": "string", "at": "any", "limit": "any", "all": "any"}
    assert (tool.spec.optional, tool.spec.capability) == (("at", "limit", "all"), "web")
    assert (tool.spec.dangerous, tool.spec.retry) == (True, Retry(max_attempts=2))
    [same] = describe_tools({"look": tool_fields("", {}, stated="web")}, {"look": {"cost": 2}})
    assert (same.spec.capability, same.spec.cost) == ("web", 2)
    with pytest.raises(ValueError, match="tool 'look': capability: expected text, got 3"):
        describe_tools({"look": tool_fields("", {}, stated=3)}, None)
    with pytest.raises(ValueError, match="capabilities") as raised:
        describe_tools(
            {"search": fields, "look": {}},
            {"serach": "web", "look": {"capabilty": "web", "cost": -1}},
        )
    assert str(raised.value) == (
        "capabilities: there is no tool called 'serach'; did you mean 'search'?; tool 'look': cost: must be at least 0, "
        "got -1; capabilty: there is no field 'capabilty' here; did you mean 'capability'?"
    )


async def test_threads(clock: VirtualClock) -> None:
    """A thread goes on with its last run while that is unfinished; its parts, and other threads, have their own runs."""
    engine = make_engine(clock=clock)
    run_id = thread_run(engine, "a/b")
    assert run_id.startswith("thread-a%2Fb.")
    async with engine.session("talk", run_id=run_id) as session:
        session.run.pause("the agent waits")
    assert thread_run(engine, "a/b") == run_id
    assert run_id not in (
        thread_run(engine, "a/b", resumes=False),
        thread_run(engine, "a"),
        thread_run(engine, "a/b", part="c"),
    )
    async with engine.session("talk", run_id=run_id):
        pass
    assert thread_run(engine, "a/b") != run_id


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("crewai", "crewai"),
        ("google_adk", "google.adk.plugins.base_plugin"),
        ("magentic", "agent_framework_orchestrations"),
    ],
)
def test_missing_framework(name: str, needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the framework the module names the extra that installs it."""
    module = f"replanning.integrations.{name}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, needed, None)
    with pytest.raises(ImportError, match=rf"replanning\[{name.replace('_', '-')}\]"):
        import_module(module)
