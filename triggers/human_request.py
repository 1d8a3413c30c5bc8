"""Detects that a person asked for replanning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from replanning.journal import HumanRequest, Observation, RecordBody, ReplanRequested
from replanning.live import PlanView


class HumanRequestDetector:
    """`human-request`: a person, or a program on their behalf, asked for replanning."""

    name = "human-request"
    observes: ClassVar[tuple[type[RecordBody], ...]] = (ReplanRequested,)

    def detect(self, observation: Observation, view: PlanView) -> Iterable[HumanRequest]:
        """Yield one trigger for each request."""
        if not isinstance(observation, ReplanRequested):
            return
        person = observation.by or "a person"
        tasks = ",".join(observation.tasks)
        yield HumanRequest(
            tasks=observation.tasks,
            cause=f"{observation.by}:{tasks}:{observation.reason}",
            reason=f"{person} asked for replanning: {observation.reason}",
            by=observation.by,
        )
