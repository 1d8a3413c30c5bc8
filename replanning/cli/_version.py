"""Which version this is."""

from __future__ import annotations

import platform

from replanning._version import __version__
from replanning.cli._output import print_json, print_result


def show_version(*, as_json: bool) -> None:
    """Print the version of the library and of what it runs on."""
    if as_json:
        print_json({"replanning": __version__, "python": platform.python_version(), "platform": platform.platform()})
    else:
        print_result(f"replanning {__version__} (Python {platform.python_version()})")
