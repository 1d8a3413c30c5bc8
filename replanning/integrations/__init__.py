"""Integrations: agents of other frameworks, whose calls of tools the engine keeps alive.

Each module needs the framework, which the extra of the same name installs, and is imported by itself.
"""
