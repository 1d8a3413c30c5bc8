"""Orchestrators written on the public protocol of a run."""
