"""Programs of other people that tests start, installed by npm."""

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

PATIENCE: Final = 120
"""Seconds after which a test gives up waiting for npm, or for what it has installed."""


def npm_program(package: str, version: str, script: str, folder: Path) -> list[str]:
    """The command that runs a script of a package; where it cannot be, skips the test with what is missing."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not on the PATH")
    options = ["--no-audit", "--no-fund", "--prefer-offline", "--ignore-scripts"]
    command: list[str | Path] = [
        npm,
        "install",
        "--prefix",
        folder,
        *options,
        f"{package}@{version}",
    ]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not install {package} within {PATIENCE} s")
    if done.returncode != 0:
        pytest.skip(f"npm cannot install {package}: {done.stderr.strip()[-300:]}")
    return [node, str(folder / "node_modules" / package / "dist" / script)]
