"""Leaves word for the process that carries out a run."""

from __future__ import annotations

from replanning._clock import SystemClock
from replanning._errors import NotRunning
from replanning._redaction import Redactor
from replanning.cli._lookup import find_run, looking_into, me
from replanning.cli._output import show, show_json
from replanning.interfaces import Message


def pause_run(wanted: str, reason: str, place: str, *, as_json: bool) -> None:
    """Ask for a run to be paused.

    Args:
        wanted: the id of the run, how it begins, or `latest`.
        reason: why, if there is anything to say.
        place: the store.
        as_json: whether the answer is for a program.
    """
    with looking_into(place) as store:
        info = find_run(store, wanted)
        if info.status != "running":
            raise NotRunning(f"run {info.run!r} is {info.status}; there is nothing to pause")
        by = me(None)
        message = Message("pause", SystemClock().now(), by, {"reason": Redactor().text(reason) or f"{by} asked for it"})
        store.post(info.run, message)
    if as_json:
        show_json({"run": info.run, "asked": "pause"})
    else:
        show(f"Asked for run {info.run} to be paused; it stops when what runs has finished.")
