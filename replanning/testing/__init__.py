"""Public fakes for testing plans: clock, providers, executors, gates, stores and faults.

A plan is tested as a program is: run it with scripted work on a virtual clock, and look at the result::

    async def test_the_release_survives_a_missing_tool():
        async with VirtualClock() as clock:
            work = ScriptedExecutor({"build": raises(FileNotFoundError("pypa-build"))}, clock=clock)
            engine = ReplanningEngine(environment=virtual_environment(clock=clock))
            result = await engine.execute(Plan.load("release.yaml"), work)
        assert result.status == "succeeded"

All fakes speak one small language: a step `returns` a value, `raises` an error or `hangs`, after so many seconds.

How a plan fares when things go wrong at random is found out by running it many times, in no time::

    def test_the_release_survives_most_things():
        faults = FaultSchedule(fail={"build": 0.2}, flaky={"*": 0.05}, durations={"*": (5, 60)})
        report = simulate(Plan.load("release.yaml"), faults, runs=500)
        assert report.success_rate > 0.95 and not report.broken

Language models are scripted as well: `ScriptedLLM` answers in the same process and on the same clock, and
`ScriptedLLMServer` is a real web server in place of the services, for clients and for other processes::

    def test_the_release_asks_for_help():
        with ScriptedLLMServer([ServerReply.error(429, retry_after=1), {"candidates": []}]) as server:
            subprocess.run(["replanning", "run", "release.yaml"], env={**os.environ, **server.environ()})
        assert len(server.requests) == 2

Whoever writes an orchestrator or a store of their own has `broken_promises`, which finds in a journal whatever a run
must never do, and `replay_differences`, which compares a live plan with its journal.
"""

from __future__ import annotations

from replanning.testing.clock import VirtualClock, virtual_environment
from replanning.testing.faults import FaultSchedule, FlakyStore, RunFaults, ScheduledEvent
from replanning.testing.llm import LLMReply, RecordedLLMRequest, ScriptedLLM
from replanning.testing.llm_server import LLMRequest, LLMServerReply, ScriptedLLMServer, ServerReply
from replanning.testing.promises import invariant_violations, replay_differences, snapshot
from replanning.testing.scripted import (
    ExecutorCall,
    RecordingExporter,
    ScriptedExecutor,
    ScriptedGate,
    ScriptedProvider,
    ScriptStep,
    hangs,
    raises,
    returns,
)
from replanning.testing.simulation import Distribution, SimulatedRun, SimulationReport, simulate

__all__ = [
    "Distribution",
    "ExecutorCall",
    "FaultSchedule",
    "FlakyStore",
    "LLMReply",
    "LLMRequest",
    "LLMServerReply",
    "RecordedLLMRequest",
    "RecordingExporter",
    "RunFaults",
    "ScheduledEvent",
    "ScriptStep",
    "ScriptedExecutor",
    "ScriptedGate",
    "ScriptedLLM",
    "ScriptedLLMServer",
    "ScriptedProvider",
    "ServerReply",
    "SimulatedRun",
    "SimulationReport",
    "VirtualClock",
    "hangs",
    "invariant_violations",
    "raises",
    "replay_differences",
    "returns",
    "simulate",
    "snapshot",
    "virtual_environment",
]
