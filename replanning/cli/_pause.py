"""Leaves word for the process that carries out a run."""

from __future__ import annotations

from replanning._clock import SystemClock
from replanning._errors import NotRunning
from replanning._redaction import Redactor
from replanning.cli._lookup import existing_store, find_run, user_name
from replanning.cli._output import print_json, print_result
from replanning.interfaces import InboxMessage


def pause_run(wanted: str, reason: str, place: str, *, as_json: bool) -> None:
    """Ask for a run to be paused.

    Args:
        wanted: the id of the run, how it begins, or `latest`.
        reason: why, if there is anything to say.
        place: the store.
        as_json: whether the answer is for a program.
    """
    with existing_store(place) as store:
        info = find_run(store, wanted)
        if info.status != "running":
            raise NotRunning(f"run {info.run!r} is {info.status}; there is nothing to pause")
        by = user_name(None)
        message = InboxMessage(
            "pause", SystemClock().now(), by, {"reason": Redactor().text(reason) or f"{by} asked for it"}
        )
        store.post(info.run, message)
    if as_json:
        print_json({"run": info.run, "asked": "pause"})
    else:
        print_result(f"Asked for run {info.run} to be paused; it stops when what runs has finished.")
