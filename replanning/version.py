"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("replanning")
except PackageNotFoundError:  # imported from a checkout that is not installed
    __version__ = "0"
