"""Fakes for testing plans, orchestrators and stores without waiting, network or chance.

A plan is tested as a program is: run it with scripted work on a virtual clock, and look at the
result::

    async def test_the_release_survives_a_missing_tool():
        script = {
            "pypa-build": raises(FileNotFoundError("pypa-build")),
            "pip-wheel": returns({"wheel": "a.whl"}),
        }
        async with VirtualClock() as clock:
            work = ScriptedExecutor(script, clock=clock)
            engine = ReplanningEngine(environment=virtual_environment(clock=clock))
            result = await engine.execute(Plan.load("release.yaml"), work)
        assert result.status == "succeeded"

All fakes share one small language: a step `returns` a value, `raises` an error or `hangs`, after
some seconds. `ScriptedProvider`, `ScriptedGate` and `ScriptedLLM` stand in for providers, people
and language models.

`simulate` runs a plan many times with random faults and reports how it fares::

    def test_the_release_survives_most_faults():
        faults = FaultSchedule(fail={"build": 0.2}, flaky={"*": 0.05}, durations={"*": (5, 60)})
        report = simulate(Plan.load("release.yaml"), faults, runs=500)
        assert report.success_rate > 0.95

`replanning.testing.stores` holds the conformance suite for stores.
"""

from __future__ import annotations

from replanning.testing.clock import VirtualClock, virtual_environment
from replanning.testing.faults import FaultSchedule, FlakyStore
from replanning.testing.llm import LLMReply, ScriptedLLM
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
from replanning.testing.simulation import Distribution, SimulationReport, simulate

__all__ = [
    "Distribution",
    "ExecutorCall",
    "FaultSchedule",
    "FlakyStore",
    "LLMReply",
    "RecordingExporter",
    "ScriptStep",
    "ScriptedExecutor",
    "ScriptedGate",
    "ScriptedLLM",
    "ScriptedProvider",
    "SimulationReport",
    "VirtualClock",
    "hangs",
    "raises",
    "returns",
    "simulate",
    "virtual_environment",
]
