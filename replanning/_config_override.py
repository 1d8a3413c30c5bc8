"""Settings of the person for whom a program runs, from a function or a server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Final

from replanning._config_keys import Given, flat
from replanning._errors import PlanError, Problem
from replanning._loading import read_document
from replanning._plan import JsonValue
from replanning._redaction import Redactor
from replanning._settings import OverrideSettings
from replanning._wording import brief_repr, format_path

MAX_SIZE: Final = 1024 * 1024
"""Largest answer of a server, in bytes."""

_LATE: Final = "the server did not answer within {:g} s"
_MORE: Final = 0.5
"""Seconds in which the client can say by itself why there is no answer."""

EXPECTED: Final = 'expected {"status": "success", "data": {"planning": {…}}}'

Override = Callable[[], object]
"""Answers what the settings of a person are, in the form that `EXPECTED` shows."""


class _Unanswered(Exception):
    """Nobody said what the settings of the person are."""


def from_override(
    override: Override | OverrideSettings, problems: list[Problem], warnings: list[Problem]
) -> dict[str, Given]:
    """What a function or server says, by key.

    Where there is no answer the settings of the person are left out, with a warning: work must not stop because
    somebody else's server does. An answer of another form is a problem, since it would be the same next time.
    """
    source = "override" if callable(override) else f"override {override.url}"
    try:
        answer = _called(override) if callable(override) else _fetched(override)
    except _Unanswered as error:
        warnings.append(Problem(source, f"{error}; the settings of the person are left out"))
        return {}
    except PlanError as error:
        problems += [Problem(source, Redactor().text(f"{EXPECTED}; {one.message}")) for one in error.problems]
        return {}
    match answer:
        case {"status": "success", "data": {"planning": dict(planning)}}:
            return {format_path(steps): Given(value, source) for steps, value in flat(planning, ("planning",))}
        case {"status": "success", "data": {**sections}}:
            got = f"data with {', '.join(map(brief_repr, sections)) or 'nothing'} in it"
        case {"status": status} if status != "success":
            got = f"status {brief_repr(status)}"
        case _:
            got = brief_repr(answer)
    problems.append(Problem(source, f"{EXPECTED}, got {Redactor().text(got)}"))
    return {}


def _called(override: Override) -> JsonValue:
    try:
        answer = override()
    except Exception as error:  # somebody's function may raise anything, and must not stop work
        raise _Unanswered(Redactor().text(f"it failed with {type(error).__name__}: {error}")) from error
    return as_json(answer)


def as_json(value: object) -> JsonValue:
    """A value as JSON has it, with lists for tuples and text for names.

    Raises:
        PlanError: JSON cannot have it.
    """
    try:
        clean: JsonValue = json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        raise PlanError([Problem("", f"got {brief_repr(value)}, which JSON cannot express")]) from None
    return clean


def _fetched(server: OverrideSettings) -> JsonValue:
    """The answer of a server, asked once.

    Raises:
        PlanError: the answer is no JSON.
        _Unanswered: there is none.
    """
    answers: SimpleQueue[bytes | _Unanswered] = SimpleQueue()
    # Headers that trickle keep a request alive, however little each read may take: so somebody else waits for them.
    Thread(target=lambda: answers.put(_content(server)), name="settings of the person", daemon=True).start()
    try:
        content = answers.get(timeout=server.timeout + _MORE)
    except Empty:
        raise _Unanswered(_LATE.format(server.timeout)) from None
    if isinstance(content, _Unanswered):
        raise content
    return read_document(content.decode("utf-8", "replace"), format="json", source="the answer")


def _content(server: OverrideSettings) -> bytes | _Unanswered:
    """What a server sends, or why nothing can be made of it."""
    import httpx

    assert server.url is not None
    until = time.monotonic() + server.timeout
    content = b""
    try:
        with httpx.stream("GET", server.url, timeout=server.timeout, headers={"Accept": "application/json"}) as answer:
            if not answer.is_success:
                return _Unanswered(f"the server answered with {answer.status_code} {answer.reason_phrase}".rstrip())
            for part in answer.iter_bytes():
                content += part
                if len(content) > MAX_SIZE:
                    return _Unanswered(f"the answer is larger than {MAX_SIZE} bytes")
                if time.monotonic() > until:
                    raise httpx.ReadTimeout("the answer is not complete")
    except httpx.TimeoutException:
        return _Unanswered(_LATE.format(server.timeout))
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        told = str(error) or type(error).__name__
        return _Unanswered(Redactor().text(f"the server cannot be asked: {told}"))
    except Exception as error:  # noqa: BLE001 - whatever a server makes the client raise, work must not stop
        return _Unanswered(Redactor().text(f"the server cannot be asked: {type(error).__name__}: {error}"))
    return content
