"""Orchestrators that run plans, with or without an engine attached."""

from __future__ import annotations

from replanning.orchestrators._orchestrators import SequentialOrchestrator, SwarmOrchestrator

__all__ = ["SequentialOrchestrator", "SwarmOrchestrator"]
