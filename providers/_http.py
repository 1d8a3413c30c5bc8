"""What refusals of language models mean, in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

_STATUS_MESSAGES: Final[Mapping[int, str]] = {
    401: "it does not accept the key",
    402: "it wants to be paid",
    403: "it does not let this key do that",
    404: "it has no such model, or its address is wrong",
    408: "it waited too long for the request",
    409: "it is busy with something that is in the way",
    413: "the request is too large for it",
    429: "it is asked too often",
}


def status_message(status: int) -> str:
    """What a status means, in words."""
    if 300 <= status < 400:
        return "it is elsewhere now, and the key is not sent on"
    return _STATUS_MESSAGES.get(status) or ("it fails" if status >= 500 else "it does not take this request")


def error_message(body: bytes) -> str:
    """What an answer says is wrong, in whichever of the usual forms."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return body.decode(errors="replace")
    error = said.get("error", said) if isinstance(said, dict) else said
    message = (error.get("message") or error.get("detail")) if isinstance(error, dict) else error
    return str(message or said)
