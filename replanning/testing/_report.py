"""What a simulation found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from replanning.events import RunStatus
from replanning.interfaces import JsonObject

SimulatedStatus = RunStatus | Literal["stuck", "crashed"]


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One run of a simulation.

    Attributes:
        seed: `simulate(..., runs=1, seed=seed)` does the same run again.
        status: as of any run; `stuck` if it had not ended after the time limit, `crashed` if it raised.
        reason: in one sentence, why.
        makespan: seconds from start to end, on the virtual clock.
        revisions: how often the plan was changed.
        questions: how many questions people were asked.
        failures: for each task, how many of its attempts failed.
        broken: promises that were not kept; see `broken_promises`.
    """

    seed: int
    status: SimulatedStatus
    reason: str
    makespan: float
    revisions: int = 0
    questions: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    broken: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Distribution:
    """How numbers are spread."""

    least: float
    median: float
    most: float
    mean: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """The spread of some values, if there are any."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(ordered[0], ordered[len(ordered) // 2], ordered[-1], round(sum(ordered) / len(ordered), 6))


@dataclass(frozen=True, repr=False, slots=True)
class SimulationReport:
    """What came out of simulated runs of a plan.

    Attributes:
        plan: how the plan is called.
        runs: every run, in order.
    """

    plan: str
    runs: tuple[SimulatedRun, ...]

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {status}" for status, count in self.statuses.items()) or "no runs"
        makespan = self.makespan
        took = f", {makespan.median:g} s" if makespan is not None else ""
        broken = f", {len(self.broken)} promises BROKEN" if self.broken else ""
        return f"<SimulationReport of {self.plan!r}: {counts}{took}{broken}>"

    @property
    def statuses(self) -> Mapping[SimulatedStatus, int]:
        """How many runs ended in which way, the most frequent first."""
        return dict(Counter(run.status for run in self.runs).most_common())

    @property
    def success_rate(self) -> float:
        """The share of runs that succeeded; 0 without runs."""
        return sum(run.status == "succeeded" for run in self.runs) / len(self.runs) if self.runs else 0.0

    @property
    def makespan(self) -> Distribution | None:
        """How long the runs took that succeeded, in seconds; None if none did."""
        return Distribution.of([run.makespan for run in self.runs if run.status == "succeeded"])

    @property
    def revisions(self) -> Distribution | None:
        """How often the plan was changed in a run."""
        return Distribution.of([run.revisions for run in self.runs])

    @property
    def questions(self) -> Distribution | None:
        """How many questions people were asked in a run."""
        return Distribution.of([run.questions for run in self.runs])

    @property
    def failures(self) -> Mapping[str, int]:
        """For each task, in how many runs an attempt at it failed; the most frequent first."""
        return dict(Counter(task for run in self.runs for task in run.failures).most_common())

    @property
    def reasons(self) -> Mapping[str, int]:
        """Why runs did not succeed, and how many; the most frequent first."""
        return dict(Counter(run.reason for run in self.runs if run.status != "succeeded").most_common())

    @property
    def broken(self) -> tuple[str, ...]:
        """Promises that were not kept, with the seed of the run; there should be none."""
        return tuple(f"seed {run.seed}: {promise}" for run in self.runs for promise in run.broken)

    def document(self) -> JsonObject:
        """The report as JSON values."""
        spreads = {"makespan": self.makespan, "revisions": self.revisions, "questions": self.questions}
        summary: JsonObject = {
            "plan": self.plan,
            "count": len(self.runs),
            "statuses": {str(status): count for status, count in self.statuses.items()},
            "success_rate": self.success_rate,
            **{name: None if spread is None else asdict(spread) for name, spread in spreads.items()},
            "failures": dict(self.failures),
            "reasons": dict(self.reasons),
            "broken": list(self.broken),
            "runs": [{**asdict(run), "broken": list(run.broken)} for run in self.runs],
        }
        return summary

    def to_json(self) -> str:
        """The report as the text of a JSON object."""
        return json.dumps(self.document(), ensure_ascii=False, indent=2) + "\n"
