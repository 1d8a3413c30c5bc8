"""Leaves word for the process that carries out a run."""

from __future__ import annotations

import getpass

from replanning._clock import SystemClock
from replanning._errors import NotRunning
from replanning._ids import RunId
from replanning.cli._output import show, show_json
from replanning.cli._stores import open_store
from replanning.interfaces import Message


def pause_run(run: str, reason: str, place: str, *, as_json: bool) -> None:
    """Ask for a run to be paused.

    Raises:
        NotRunning: nobody is carrying it out.
        StoreError: the store has no such run, or cannot be used.
    """
    store = open_store(place, must_exist=True)
    try:
        known = {info.run: info for info in store.runs()}
        if run in known and (known[RunId(run)].status != "running"):
            raise NotRunning(f"run {run!r} is {known[RunId(run)].status}; there is nothing to pause")
        by = getpass.getuser()
        payload = {"reason": reason or f"{by} asked for it"}
        store.post(RunId(run), Message("pause", SystemClock().now(), by, dict(payload)))
    finally:
        store.close()
    if as_json:
        show_json({"run": run, "asked": "pause"})
    else:
        show(f"Asked for run {run} to be paused; it stops when what runs has finished.")
