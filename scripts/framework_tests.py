#!/usr/bin/env python3
"""Runs the tests of a framework twice, unchanged and with an engine attached, and compares.

An integration promises that attaching changes nothing if nothing fails. The frameworks' own tests
check it: a test that passes unchanged but fails with every agent or graph attached to an engine
without providers shows a difference, which must be fixed or stated on the integration's page.

Usage: framework_tests.py NAME [--git URL] [--version VERSION] [PYTEST_ARGS ...]. It prints the tests
that fail only when attached, and exits with 1 if there are any. The tests and their environment are
kept below `build/framework_tests`.

A framework is added as a function that attaches it, and an entry in `FRAMEWORKS`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from importlib.metadata import distributions
from io import BytesIO
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
BUILD: Final = ROOT / "build" / "framework_tests"

ATTACH: Final = "REPLANNING_ATTACH"
"""Environment variable with the name of the framework to attach; this file is then a plugin of pytest."""

PYTEST: Final = ("pytest", "pytest-asyncio", "pytest-mock", "pytest-timeout", "pytest-xdist")

TOO_LARGE: Final = (":(exclude)*/cassettes/*", ":(exclude)*/assets/*")
"""Recorded network responses, which most of the selected tests do not read."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Location of a framework's tests, and how to run them.

    Attributes:
        distribution: the package whose installed version is tested, unless another is stated.
        git: address of the repository.
        tag: tag of a version in the repository, with `{version}`.
        tests: files and folders, relative to `folder`.
        requirements: packages that the tests need, with `{version}`.
        attach: from its call on, attaches everything that the tests create to an engine.
        folder: path of the package within the repository.
        paths: files and folders to extract, relative to `folder`.
        left_out: files in `paths` not to extract.
        options: arguments for pytest.
        variables: environment variables, with reasons beside them.
    """

    distribution: str
    git: str
    tag: str
    tests: tuple[str, ...]
    requirements: tuple[str, ...]
    attach: Callable[[], None]
    folder: str = ""
    paths: tuple[str, ...] = ("tests", "pyproject.toml")
    left_out: tuple[str, ...] = TOO_LARGE
    options: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


def attach_agent_framework() -> None:
    """Attach every run of an agent, and every workflow that is built."""
    from agent_framework import Agent, WorkflowBuilder

    from replanning import ReplanningEngine
    from replanning.integrations.agent_framework import Replanned, replanned

    run_agent = Agent.run
    build_workflow = WorkflowBuilder.build

    @wraps(run_agent)
    def run_attached(agent: Any, *args: Any, **kwargs: Any) -> Any:
        attached = Replanned(engine=ReplanningEngine(providers=[]))
        kwargs["middleware"] = [*(kwargs.get("middleware") or ()), attached]
        return run_agent(agent, *args, **kwargs)

    @wraps(build_workflow)
    def build_attached(builder: Any, *args: Any, **kwargs: Any) -> Any:
        return replanned(build_workflow(builder, *args, **kwargs), ReplanningEngine(providers=[]))

    Agent.run = run_attached
    WorkflowBuilder.build = build_attached


def attach_crewai() -> None:
    """Attach every crew for as long as it runs."""
    from crewai import Crew

    from replanning import ReplanningEngine
    from replanning.integrations.crewai import replanned

    run_crew, run_crew_async = Crew.kickoff, Crew.akickoff

    @contextmanager
    def attached(crew: Any) -> Iterator[None]:
        with ExitStack() as stack:
            # An outer run of this crew has already attached it.
            with suppress(ValueError):
                stack.enter_context(replanned(crew, ReplanningEngine(providers=[])))
            yield

    @wraps(run_crew)
    def run_attached(crew: Any, *args: Any, **kwargs: Any) -> Any:
        # A stream runs the crew through another kickoff.
        if crew.stream:
            return run_crew(crew, *args, **kwargs)
        with attached(crew):
            return run_crew(crew, *args, **kwargs)

    @wraps(run_crew_async)
    async def run_attached_async(crew: Any, *args: Any, **kwargs: Any) -> Any:
        if crew.stream:
            return await run_crew_async(crew, *args, **kwargs)
        with attached(crew):
            return await run_crew_async(crew, *args, **kwargs)

    Crew.kickoff, Crew.akickoff = run_attached, run_attached_async


def attach_google_adk() -> None:
    """Attach every runner that is created."""
    from google.adk.runners import Runner

    from replanning import ReplanningEngine
    from replanning.integrations.google_adk import Replanned

    create_runner = Runner.__init__

    @wraps(create_runner)
    def create_attached(runner: Any, *args: Any, **kwargs: Any) -> None:
        create_runner(runner, *args, **kwargs)
        # The runner of an agent used as a tool has the plugins of the calling agent.
        if runner.plugin_manager.get_plugin("replanning") is None:
            runner.plugin_manager.register_plugin(Replanned(engine=ReplanningEngine(providers=[])))

    Runner.__init__ = create_attached


def attach_langgraph() -> None:
    """Attach every graph that is compiled."""
    from langgraph.graph.state import StateGraph

    from replanning import ReplanningEngine
    from replanning.integrations.langgraph import replanned

    compile_graph = StateGraph.compile

    @wraps(compile_graph)
    def compile_attached(*args: Any, **kwargs: Any) -> Any:
        engine = ReplanningEngine(providers=[])
        return replanned(compile_graph(*args, **kwargs), engine, objective="test")

    StateGraph.compile = compile_attached


def attach_openai_agents() -> None:
    """Attach every agent for as long as it runs."""
    from agents import Agent
    from agents.run import AgentRunner

    from replanning import ReplanningEngine
    from replanning.integrations.openai_agents import replanned

    run_agent = AgentRunner.run

    @wraps(run_agent)
    async def run_attached(
        runner: Any, starting_agent: Any, agent_input: Any, **kwargs: Any
    ) -> Any:
        # Tests of wrong arguments pass something else.
        if type(starting_agent) is not Agent:
            return await run_agent(runner, starting_agent, agent_input, **kwargs)
        engine = ReplanningEngine(providers=[])
        async with replanned(starting_agent, engine) as agent:
            return await run_agent(runner, agent, agent_input, **kwargs)

    AgentRunner.run = run_attached


def attach_pydantic_ai() -> None:
    """Attach every agent that is created."""
    from pydantic_ai import Agent

    from replanning import ReplanningEngine
    from replanning.integrations.pydantic_ai import Replanned

    create_agent = Agent.__init__

    @wraps(create_agent)
    def create_attached(agent: Any, *args: Any, **kwargs: Any) -> None:
        stated = list(kwargs.get("capabilities") or [])
        stated.append(Replanned({}, engine=ReplanningEngine(providers=[])))
        kwargs["capabilities"] = stated
        create_agent(agent, *args, **kwargs)

    Agent.__init__ = create_attached


FRAMEWORKS: Final = {
    "agent-framework": Framework(
        distribution="agent-framework-core",
        git="https://github.com/microsoft/agent-framework",
        tag="python-{version}",
        folder="python/packages",
        paths=("core/tests", "orchestrations/tests"),
        tests=(
            "core/tests/core/test_agents.py",
            "core/tests/core/test_as_tool_kwargs_propagation.py",
            "core/tests/core/test_function_invocation_logic.py",
            "core/tests/core/test_harness_agent.py",
            "core/tests/core/test_harness_background_agents.py",
            "core/tests/core/test_harness_loop.py",
            "core/tests/core/test_harness_tool_approval.py",
            "core/tests/core/test_mcp.py",
            "core/tests/core/test_middleware.py",
            "core/tests/core/test_middleware_context_result.py",
            "core/tests/core/test_middleware_with_agent.py",
            "core/tests/core/test_middleware_with_chat.py",
            "core/tests/core/test_observability.py",
            "core/tests/core/test_sessions.py",
            "core/tests/core/test_tools.py",
            "core/tests/workflow",
            "orchestrations/tests",
        ),
        requirements=(
            "agent-framework-core=={version}",
            "agent-framework-orchestrations",
            "mcp",
            "opentelemetry-sdk",
        ),
        attach=attach_agent_framework,
        options=("-o", "asyncio_mode=auto", "--import-mode=importlib"),
    ),
    "crewai": Framework(
        distribution="crewai",
        git="https://github.com/crewAIInc/crewAI",
        tag="{version}",
        # Model responses are recorded; the files that read them are at the root.
        paths=("conftest.py", ".env.test", "pyproject.toml", "lib/crewai/tests"),
        left_out=(),
        tests=(
            "lib/crewai/tests/agents",
            "lib/crewai/tests/crew",
            "lib/crewai/tests/events",
            "lib/crewai/tests/hooks",
            "lib/crewai/tests/task",
            "lib/crewai/tests/test_callback.py",
            "lib/crewai/tests/test_checkpoint.py",
            "lib/crewai/tests/test_crew.py",
            "lib/crewai/tests/test_crew_multimodal.py",
            "lib/crewai/tests/test_crew_thread_safety.py",
            "lib/crewai/tests/test_custom_llm.py",
            "lib/crewai/tests/test_event_record.py",
            "lib/crewai/tests/test_execution_uuid.py",
            "lib/crewai/tests/test_flow_human_input_integration.py",
            "lib/crewai/tests/test_flow_usage_metrics.py",
            "lib/crewai/tests/test_guardrail_serialization.py",
            "lib/crewai/tests/test_markdown_task.py",
            "lib/crewai/tests/test_project.py",
            "lib/crewai/tests/test_streaming.py",
            "lib/crewai/tests/test_streaming_integration.py",
            "lib/crewai/tests/test_task.py",
            "lib/crewai/tests/test_task_guardrails.py",
            "lib/crewai/tests/test_tool_cache_default.py",
            "lib/crewai/tests/tools",
            "lib/crewai/tests/utilities/crew",
            "lib/crewai/tests/utilities/evaluators",
            "lib/crewai/tests/utilities/test_agent_utils.py",
            "lib/crewai/tests/utilities/test_events.py",
            "lib/crewai/tests/utilities/test_planning_handler.py",
            "lib/crewai/tests/utilities/test_structured_planning.py",
        ),
        requirements=(
            "crewai=={version}",
            "pytest-recording",
            "pytest-subprocess",
            "python-dotenv",
            "vcrpy",
        ),
        attach=attach_crewai,
        options=("--import-mode=importlib", "--block-network", "--dist=loadfile"),
        variables=(("CREWAI_DISABLE_VERSION_CHECK", "true"),),
    ),
    "google-adk": Framework(
        distribution="google-adk",
        git="https://github.com/google/adk-python",
        tag="v{version}",
        tests=(
            "tests/unittests/agents",
            "tests/unittests/flows",
            "tests/unittests/plugins",
            "tests/unittests/runners",
            "tests/unittests/test_runners.py",
            "tests/unittests/tools/test_agent_tool.py",
            "tests/unittests/tools/test_base_tool.py",
            "tests/unittests/tools/test_function_tool.py",
            "tests/unittests/workflow",
        ),
        requirements=("google-adk[a2a,mcp]=={version}",),
        attach=attach_google_adk,
        options=("-o", "asyncio_mode=auto"),
    ),
    "langgraph": Framework(
        distribution="langgraph",
        git="https://github.com/langchain-ai/langgraph",
        tag="{version}",
        folder="libs/langgraph",
        tests=(
            "tests/test_graph_callbacks.py",
            "tests/test_interruption.py",
            "tests/test_large_cases.py",
            "tests/test_large_cases_async.py",
            "tests/test_messages_state.py",
            "tests/test_parent_command.py",
            "tests/test_parent_command_async.py",
            "tests/test_pregel.py",
            "tests/test_pregel_async.py",
            "tests/test_pregel_debug.py",
            "tests/test_retry.py",
            "tests/test_runtime.py",
            "tests/test_state.py",
            "tests/test_subgraph_persistence.py",
            "tests/test_subgraph_persistence_async.py",
            "tests/test_time_travel.py",
        ),
        requirements=(
            "langgraph=={version}",
            "httpx",
            "langgraph-checkpoint-postgres",
            "langgraph-checkpoint-sqlite",
            "langgraph-sdk",
            "psycopg[binary]",
            "pycryptodome",
            "pytest-dotenv",
            "pytest-repeat",
            "redis",
            "syrupy",
            "uvloop",
        ),
        attach=attach_langgraph,
        # Without databases in containers.
        variables=(("NO_DOCKER", "true"),),
    ),
    "openai-agents": Framework(
        distribution="openai-agents",
        git="https://github.com/openai/openai-agents-python",
        tag="v{version}",
        tests=(
            "tests/mcp",
            "tests/test_agent_as_tool.py",
            "tests/test_agent_hooks.py",
            "tests/test_agent_runner.py",
            "tests/test_agent_tracing.py",
            "tests/test_call_model_input_filter.py",
            "tests/test_function_tool.py",
            "tests/test_global_hooks.py",
            "tests/test_guardrails.py",
            "tests/test_handoff_tool.py",
            "tests/test_hitl_error_scenarios.py",
            "tests/test_invalid_final_output_handler.py",
            "tests/test_max_turns.py",
            "tests/test_run_hooks.py",
            "tests/test_run_state.py",
            "tests/test_run_step_execution.py",
            "tests/test_tool_guardrails.py",
            "tests/test_tool_use_behavior.py",
        ),
        requirements=(
            "openai-agents=={version}",
            "aiosqlite",
            "fastapi",
            "graphviz",
            "inline-snapshot",
            "sqlalchemy",
            "websockets",
        ),
        attach=attach_openai_agents,
        options=("-o", "asyncio_mode=auto"),
    ),
    "pydantic-ai": Framework(
        distribution="pydantic-ai-slim",
        git="https://github.com/pydantic/pydantic-ai",
        tag="v{version}",
        tests=(
            "tests/test_agent.py",
            "tests/test_capability_stream_teardown.py",
            "tests/test_deps.py",
            "tests/test_exceptions.py",
            "tests/test_history_processor.py",
            "tests/test_mcp.py",
            "tests/test_nested_sync_agent.py",
            "tests/test_run_cancellation.py",
            "tests/test_streaming.py",
            "tests/test_tools.py",
            "tests/test_toolsets.py",
            "tests/test_usage_limits.py",
        ),
        requirements=(
            "pydantic-ai-slim[anthropic,cli,evals,google,mcp,openai,retries]=={version}",
            "clai=={version}",
            "dirty-equals",
            "inline-snapshot",
            "logfire",
            "pytest-examples",
            "pytest-recording",
            "trio",
            "vcrpy",
        ),
        attach=attach_pydantic_ai,
        # Engines created in an event loop look for their settings file there, which blocks.
        variables=(("BLOCKBUSTER_ENABLED", "false"),),
    ),
}


def main() -> int:
    """Run the tests twice and print the difference; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=FRAMEWORKS)
    parser.add_argument("--git", metavar="URL", help="another address, or a local git directory")
    parser.add_argument("--version", help="another version than the installed one")
    arguments, pytest_arguments = parser.parse_known_args()
    framework = FRAMEWORKS[arguments.name]
    version = arguments.version or installed_version(arguments.name)
    folder = BUILD / f"{arguments.name}-{version}"
    python = folder / ".venv" / "bin" / "python"

    if not (folder / "ready").exists():
        say(
            f"Fetching {arguments.name} {version} and its test requirements; this takes minutes ..."
        )
        extract_tests(framework, version, arguments.git or framework.git, folder)
        venv.create(folder / ".venv", clear=True, with_pip=True)
        requirements = [each.format(version=version) for each in framework.requirements]
        pip_install(python, *PYTEST, *requirements, "--editable", str(ROOT))
        (folder / "ready").touch()

    before = failures(arguments.name, folder, python, pytest_arguments, attached=False)
    attached = failures(arguments.name, folder, python, pytest_arguments, attached=True)
    difference = sorted(attached - before)
    say(f"only when attached: {len(difference)}")
    for test in difference:
        say(f"  {test}")
    return int(len(difference) > 0)


def say(line: str) -> None:
    """Print a line without buffering: the tests take minutes."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def installed_version(name: str) -> str:
    """Return the version of a framework in the test environment of its integration."""
    for environment in (".venv", f".venv-{name}"):
        places = [str(path) for path in ROOT.glob(f"{environment}/lib/python*/site-packages")]
        for each in distributions(name=FRAMEWORKS[name].distribution, path=places):
            return each.version
    sys.exit(f"{name} is installed in no environment of this checkout: state --version")


def extract_tests(framework: Framework, version: str, git: str, folder: Path) -> None:
    """Extract the tests of a version, with their configuration, into a folder."""
    tag = framework.tag.format(version=version)
    repository = Path(git)
    if not repository.is_dir():
        repository = BUILD / f"{framework.distribution}-{version}.git"
        if not repository.exists():
            command = ["git", "clone", "--quiet", "--bare", "--depth=1", "--filter=blob:none"]
            subprocess.run([*command, f"--branch={tag}", git, str(repository)], check=True)
    folder.mkdir(parents=True, exist_ok=True)
    command = ["git", "-C", str(repository), "archive", f"{tag}:{framework.folder}"]
    wanted = [*framework.paths, *framework.left_out]
    archive = subprocess.run([*command, *wanted], check=True, stdout=subprocess.PIPE)
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")


def pip_install(python: Path, *requirements: str) -> None:
    """Install packages into an environment."""
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *requirements], check=True)


def failures(
    name: str, folder: Path, python: Path, arguments: list[str], *, attached: bool
) -> set[str]:
    """Run the tests, print the summary line, and return the failed tests."""
    framework = FRAMEWORKS[name]
    scripts = str(Path(__file__).parent)
    environment = {
        **os.environ,
        **dict(framework.variables),
        ATTACH: name if attached else "",
        "PYTHONPATH": os.pathsep.join([".", scripts]),
    }
    # The framework's options ask for plugins and reports that are not needed. Warnings are not
    # errors here, because only those of the framework's own dependencies should be.
    words = ["-m", "pytest", "-p", Path(__file__).stem, "-p", "no:warnings", "-o", "addopts="]
    words += ["-q", "-n", "2", "--timeout=60", "--tb=no", "--no-header"]
    # The files differ between versions.
    tests = [test for test in framework.tests if (folder / test).exists()]
    ended = subprocess.run(
        [str(python), *words, *framework.options, *tests, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = ended.stdout.splitlines()
    if not re.search(r"\d+ passed", ended.stdout):
        sys.exit(f"no test passed; the end of pytest's output:\n{ended.stdout[-2000:]}")
    title = "attached" if attached else "as it is"
    say(f"{title}: {lines[-1].strip('= ')}")
    failed: set[str] = set()
    for line in lines:
        if line.startswith(("FAILED ", "ERROR ")):
            failed.add(line.partition(" - ")[0])
    return failed


def pytest_configure() -> None:
    """Attach the framework named in the environment, in each test process."""
    name = os.environ.get(ATTACH)
    if name:
        FRAMEWORKS[name].attach()


if __name__ == "__main__":
    sys.exit(main())
