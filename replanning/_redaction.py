"""Takes secrets out of text where it enters, before live plan and journal alike."""

from __future__ import annotations

import re
from collections.abc import Iterable

from replanning._errors import Unstorable
from replanning._plan import JsonValue

MASK = "[redacted]"

_WHOLE = (
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    r"\b(?:sk|rk|pk)-[A-Za-z0-9_-]{16,}",
    r"\b(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,}",
    r"\bgh[pousr]_[A-Za-z0-9]{20,}",
    r"\bgithub_pat_[A-Za-z0-9_]{20,}",
    r"\bglpat-[A-Za-z0-9_-]{16,}",
    r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    r"\bAIza[A-Za-z0-9_-]{30,}",
    r"\bhf_[A-Za-z0-9]{20,}",
    r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",
)
_AFTER = (
    r"(?:\bauthorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|token)\s+)?|\bbearer\s+)",
    r"(?:\b|_)(?:api[_-]?key|access[_-]?key|secret(?:[_-]?key)?|client[_-]?secret|passw(?:or)?d|passphrase"
    r"|(?:access|auth|refresh|id|session)?[_-]?token)[\"']?\s*[:=]\s*[\"']?",
    r"\b[a-z][a-z0-9+.-]*://[^/\s:@]*:",
)
_SECRET_KEY = re.compile(
    r"(?i)^(?:.*[_-])?(?:api[_-]?key|secret|client[_-]?secret|password|passwd|passphrase|authorization"
    r"|private[_-]?key|(?:access|auth|refresh|session)[_-]?token|token)$"
)


class Redactor:
    """Replaces what looks like a secret by a mark.

    Args:
        values: secrets known by value, such as those of configured environment variables; ones shorter than 6
            characters are passed over, because they would be found everywhere.
        patterns: further regular expressions whose matches are secrets.
    """

    def __init__(self, values: Iterable[str] = (), patterns: Iterable[str] = ()) -> None:
        known = sorted({value for value in values if len(value) >= 6}, key=lambda value: (-len(value), value))
        whole = "|".join([*map(re.escape, known), *(f"(?:{pattern})" for pattern in (*_WHOLE, *patterns))])
        self._whole = re.compile(whole, re.DOTALL)
        self._after = re.compile(f"(?i)({'|'.join(_AFTER)})([^\\s\"',;&@]{{4,}})")

    def text(self, text: str) -> str:
        """The text without secrets, and without halves of surrogate pairs, which are no characters."""
        if not text.isascii():
            text = _whole_characters(text)
        if len(text) < 8:
            return text
        return self._after.sub(self._keep_lead, self._whole.sub(MASK, text))

    def value(self, value: JsonValue) -> JsonValue:
        """A JSON value without secrets; the same object where there are none to look for.

        Raises:
            Unstorable: it is nested so deeply that no journal could have it.
        """
        try:
            return self._value(value)
        except RecursionError:
            raise Unstorable("a value is nested too deeply to be kept as JSON") from None

    def _value(self, value: JsonValue) -> JsonValue:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if isinstance(value, dict):
            return {_whole_characters(key): self._member(key, item) for key, item in value.items()}
        return value

    def _member(self, key: str, value: JsonValue) -> JsonValue:
        if isinstance(value, str) and len(value) >= 4 and _SECRET_KEY.match(key):
            return MASK
        return self._value(value)

    @staticmethod
    def _keep_lead(match: re.Match[str]) -> str:
        return match[0] if match[2].startswith((MASK, "{env:", "${")) else match[1] + MASK


def _whole_characters(text: str) -> str:
    """The text as UTF-8 can express it: what stands for bytes that were no text becomes a replacement mark."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
