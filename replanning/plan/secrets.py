"""Rules that find secrets in text: known values, formats of tokens, names of passwords, and headers.

A rule is tried only where its hint occurs, continues behind its match, and reads a bounded number of characters. So
the time is linear in the length of any text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from pydantic import JsonValue

from replanning.plan.json_values import iter_strings

MASK: Final = "[redacted]"
"""Replacement of a secret."""

_LOOKBEHIND_CHARS: Final = 40
"""Characters before a hint that a rule may look at."""


class SecretRule(NamedTuple):
    """Pattern of a secret from its hint on; the last named group that matches is redacted."""

    hint: str
    pattern: re.Pattern[str]
    applies_at: Callable[[str, int], bool]
    accepts: Callable[[re.Match[str]], bool]


def _preceded_by(pattern: str) -> Callable[[str, int], bool]:
    before = re.compile(rf"(?i)(?:{pattern})\Z")
    return lambda text, at: before.search(text, max(0, at - _LOOKBEHIND_CHARS), at) is not None


def _not_preceded_by(pattern: str) -> Callable[[str, int], bool]:
    fits = _preceded_by(pattern)
    return lambda text, at: not fits(text, at)


_anywhere: Final = _preceded_by("")

# Secrets by format
_KEY_PREFIXES: Final = ("sk", "rk", "pk", "whsec")
_KEY_PATTERN: Final = (
    r"(?:(?=[A-Za-z_-]{0,64}\d)[A-Za-z0-9_-]{16,}|(?:[A-Za-z]{1,8}[_-]){0,3}[A-Za-z]{16,}[A-Za-z0-9_-]*)"
)
"""With a digit, or with more consecutive letters than words have."""

_TOKEN_FORMATS: Final = (
    ("-----BEGIN ", r"[A-Z0-9 ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|\Z)"),
    *((f"{kind}-", _KEY_PATTERN) for kind in ("sk", "rk", "pk")),
    *(
        (f"{kind}_", r"(?:live_|test_)?(?:(?=[A-Za-z]{0,64}\d)[A-Za-z0-9]{16,}|[A-Za-z]{24,})")
        for kind in _KEY_PREFIXES
    ),
    *((f"gh{kind}_", "[A-Za-z0-9]{20,}") for kind in "pousr"),
    ("github_pat_", "[A-Za-z0-9_]{20,}"),
    *((f"gl{kind}-", "[A-Za-z0-9_-]{16,}") for kind in ("pat", "ptt", "dt", "rt", "cbt")),
    ("xox", "[abeoprs]-[A-Za-z0-9-]{10,}"),
    ("hooks.slack.com/services/", "[A-Za-z0-9/]{20,}"),
    *((kind, r"[A-Z0-9]{16}\b") for kind in ("AKIA", "ASIA")),
    ("AIza", "[A-Za-z0-9_-]{30,}"),
    ("ya29.", "[A-Za-z0-9_-]{20,}"),
    ("hf_", "[A-Za-z0-9]{20,}"),
    ("npm_", "[A-Za-z0-9]{30,}"),
    ("pypi-", "[A-Za-z0-9_-]{40,}"),
    ("eyJ", r"(?<![_-]eyJ)[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+){0,3}"),
)
"""Prefix and rest of the tokens of services."""

# Secrets by name
_QUOTE: Final = r"\\{0,4}[\"']"
_UNQUOTED: Final = r"[^\s\"'\\&;<>]{0,4096}[^\s\"'\\&;<>,.)\]}]"
_VALUE: Final = rf"(?:{_QUOTE}(?P<quoted>[^\"'\\\r\n]{{1,4096}})|(?P<plain>{_UNQUOTED}))"
_ASSIGNMENT: Final = rf"(?:{_QUOTE})?(?:(?P<prose>:[ \t]{{1,8}})|[ \t]{{0,8}}(?:=>|:=|[:=])[ \t]{{0,8}}|>)"
_PLACEHOLDER: Final = re.compile(
    r"\$?\{[^{}]*\}?|\$[a-z_]\w*|\$\(.*|`.*|\[redacted\]?|[*x.…]+|%\(?\w+\)?s?", re.IGNORECASE
)

_NUMBER: Final = re.compile(r"[\d.,:%/ -]{1,12}")
_NON_SECRET_WORDS: Final = frozenset(
    {"none", "null", "true", "false", "required", "missing", "invalid", "incorrect", "wrong", "expired", "empty"}
)

_WORD_CHAR_LIMIT: Final = 16
"""Letters from which a word in prose may be a secret."""


def is_redacted(value: JsonValue) -> bool:
    """Return whether a value contains the mark of a redacted secret."""
    return any(MASK in text for text in iter_strings(value))


def is_secret(value: str) -> bool:
    """Return whether the value of a password is a secret, and no placeholder."""
    return bool(value) and not _PLACEHOLDER.fullmatch(value) and value.lower() not in _NON_SECRET_WORDS


def _is_likely_secret(value: str) -> bool:
    """Return whether the value of a key or token is a secret: many other things are called a token."""
    return len(value) >= 4 and not _NUMBER.fullmatch(value) and is_secret(value)


def is_plain_word(value: str) -> bool:
    """Return whether a value has only letters and is too short for a secret."""
    return value.isalpha() and len(value) < _WORD_CHAR_LIMIT


def _is_likely_token(value: str) -> bool:
    return _is_likely_secret(value) and not is_plain_word(value)


_NON_SECRET_TOKEN_PREFIXES: Final = "(?:page|cursor|continuation|next|sync|stop|eos|bos|pad|sep|unk|mask|cls)[_-]?"  # noqa: S105 # words beside a token that is none
_SECRET_KEY_PREFIXES: Final = "(?:api|access|secret|private|encryption|signing)[ _-]?"  # noqa: S105 # words, no secret
_SECRET_NAMES: Final = (
    ("passw", "passw(?:or)?d", _anywhere, is_secret),
    ("passphrase", "passphrase", _anywhere, is_secret),
    ("pass", "pass", _preceded_by("[_-]"), _is_likely_secret),
    ("pwd", "pwd", _preceded_by("[_-]"), _is_likely_secret),
    ("secret", "secret(?:[_-]?(?:access[_-]?)?key)?", _anywhere, _is_likely_secret),
    ("key", "key(?:[_-]?id)?", _preceded_by(_SECRET_KEY_PREFIXES), _is_likely_secret),
    ("key", "key", _preceded_by("[?&]"), _is_likely_token),
    ("token", "token", _not_preceded_by(_NON_SECRET_TOKEN_PREFIXES), _is_likely_secret),
    ("credential", "credentials?", _anywhere, _is_likely_secret),
    ("signature", "signature", _anywhere, _is_likely_secret),
    ("sig", "sig", _preceded_by("[?&]"), _is_likely_token),
    ("code", "code", _preceded_by("[?&]"), _is_likely_token),
)
"""Names of secrets: hint, end of the name, test of the text before it, and test of the value."""

_SINGLE_TOKEN_SCHEME: Final = (
    r"(?:basic|bearer|token|apikey|negotiate|ntlm|ssws)[ \t]{1,8}(?P<word>[^\s\"'\\,;]{1,4096})"  # noqa: S105 # a pattern
)

_PARAMETER_SCHEME: Final = r"(?:digest|oauth|hmac|aws4-hmac-sha256)[ \t](?P<line>[^\r\n]{1,4096})"
_HEADER_SEPARATOR: Final = rf"(?:{_QUOTE})?[ \t]{{0,8}}[:=][ \t]{{0,8}}(?:{_QUOTE})?"
_CONTEXT_PATTERNS: Final = (
    (
        "authorization",
        rf"authorization{_HEADER_SEPARATOR}(?:{_SINGLE_TOKEN_SCHEME}|{_PARAMETER_SCHEME}|(?P<bare>[^\s\"'\\,;]{{8,4096}}))",
    ),
    ("cookie", rf"cookie{_HEADER_SEPARATOR}(?P<line>[^=\"'\\\r\n]{{1,256}}=[^\"'\\\r\n]{{1,4096}})"),
    ("bearer", r"bearer[ \t]{1,8}(?P<bare>[A-Za-z0-9._~+/-]{8,4096}={0,2})"),
    ("://", r"://[^\s/:@\"'<>\\]{0,256}:(?P<word>[^\s/\"'<>\\]{1,512})@"),
    ("-u", r"-u(?:ser)?[ =][^\s:\"']{1,256}:(?P<word>[^\s\"']{1,512})"),
)
"""Text before secrets without a name: headers, and logins in addresses and options."""


def _accepts_by_context(match: re.Match[str]) -> bool:
    value = match[str(match.lastgroup)]
    if match.lastgroup == "bare":  # it may be a word of a sentence
        return any(c.isdigit() for c in value) or len(value) >= 2 * _WORD_CHAR_LIMIT
    return not _PLACEHOLDER.fullmatch(value) and not value.isdigit()


def _accepts_by_name(accepts: Callable[[str], bool]) -> Callable[[re.Match[str]], bool]:
    def named(match: re.Match[str]) -> bool:
        value = match[str(match.lastgroup)]
        in_prose = match.lastgroup == "plain" and match.groupdict().get("prose") is not None
        return accepts(value) and not (in_prose and accepts is _is_likely_secret and is_plain_word(value))

    return named


def _name_rules() -> Iterator[tuple[str, tuple[SecretRule, ...]]]:
    """Yield hints in lower case with their rules."""
    for hint, name, fits, accepts in _SECRET_NAMES:
        assigned = re.compile(rf"(?i){name}{_ASSIGNMENT}{_VALUE}")
        option = re.compile(rf"(?i){name}[ \t]{{1,4}}(?![-:=]){_VALUE}")
        after_dashes = SecretRule(hint, option, _preceded_by("--[A-Za-z0-9-]*"), _accepts_by_name(accepts))
        yield hint, (SecretRule(hint, assigned, fits, _accepts_by_name(accepts)), after_dashes)
    login = _preceded_by(r"(?:^|[\s\"'=(\[,])-?(?:-proxy)?")
    for hint, pattern in _CONTEXT_PATTERNS:
        fits = login if hint == "-u" else _anywhere
        yield hint, (SecretRule(hint, re.compile(f"(?i){pattern}"), fits, _accepts_by_context),)


def literal_rule(hint: str, rest: str = "", fits: Callable[[str, int], bool] = _anywhere) -> SecretRule:
    """Return a rule for text that begins with the hint, under any name."""
    return SecretRule(hint, re.compile(rf"(?P<secret>{re.escape(hint)}{rest})", re.DOTALL), fits, lambda match: True)


FORMAT_RULES: Final = tuple(literal_rule(hint, rest, _not_preceded_by("[A-Za-z0-9]")) for hint, rest in _TOKEN_FORMATS)
NAME_RULES: Final = tuple(_name_rules())
_SECRET_KEY_SUFFIXES: Final = (
    *((re.compile(rf"(?i){name}\Z"), fits, accepts) for _, name, fits, accepts in _SECRET_NAMES),
    (re.compile(r"(?i)(?:authorization|cookie)\Z"), _anywhere, _is_likely_secret),
)


def secret_spans(text: str, searched: str, rule: SecretRule) -> Iterator[tuple[int, int]]:
    """Yield the spans that a rule redacts; its hint is searched in `searched`, which may be in lower case."""
    hint, pattern, fits, accepts = rule
    at = searched.find(hint)
    while at >= 0:
        end = at + len(hint)
        match = pattern.match(text, at) if fits(text, at) else None
        if match is not None:
            end = match.end()
            if accepts(match):
                yield match.span(str(match.lastgroup))
        at = searched.find(hint, end)


@lru_cache(4096)
def secret_predicate(key: str) -> Callable[[str], bool] | None:
    """Return the test for values under a name of secrets; None for other names."""
    end = key.strip()[-64:]
    for name, fits, accepts in _SECRET_KEY_SUFFIXES:
        match = name.search(end)
        if match is not None and fits(end, match.start()):
            return accepts
    return None
