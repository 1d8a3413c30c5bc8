"""Integrations with agent frameworks: the engine retries or replaces calls of tools that fail.

Each module needs its framework, which the extra of the same name installs, and is imported
separately.
"""
