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
        yield HumanRequest(
            tasks=observation.tasks,
            cause=f"{observation.by}:{','.join(observation.tasks)}:{observation.reason}",
            reason=f"{observation.by or 'a person'} asked for replanning: {observation.reason}",
            by=observation.by,
        )
