"""Rules that find secrets in text: formats of tokens, names of passwords, and headers.

The rules of gitleaks, here called the collection (`secret_rules.json`, written by `scripts/import_secret_rules.py`), are
matched by RE2. Our own rules are tried only where their hint, a literal text, occurs; each reads a bounded number of
characters and continues after its match. So the time is linear in the length of any text. Masking is done by
`plan/masking.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property, lru_cache
from importlib import resources
from typing import Any, Final, NamedTuple

import re2
from pydantic import JsonValue

from replanning.plan.json_values import iter_strings

MASK: Final = "[redacted]"
"""Replacement of a secret."""

_LOOKBEHIND_CHARS: Final = 40
"""Characters before a hint that a rule may look at."""


Span = tuple[int, int]


class SecretRule(NamedTuple):
    """Pattern of a secret that begins with a literal hint; the last named group that matches is redacted."""

    hint: str
    pattern: re.Pattern[str]
    applies_at: Callable[[str, int], bool]
    accepts: Callable[[re.Match[str]], bool]
    ignores_case: bool = False


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

_WHOLE_WORD_PREFIXES: Final = frozenset({"sk-", "rk-", "pk-", "sk_", "rk_", "pk_", "eyJ"})
"""Prefixes that words end in, such as `task-`."""

_WHOLE_WORD_RULES: Final = frozenset({"vault-service-token", "square-access-token"})
"""Rules of the collection that ordinary text fits in the middle of a word."""

_TOKEN_FORMATS: Final = (
    (
        "-----BEGIN ",
        r"[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)",
    ),
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
    *((kind, "[A-Z0-9]{16}") for kind in ("AKIA", "ASIA")),
    ("AIza", "[A-Za-z0-9_-]{30,}"),
    ("ya29.", "[A-Za-z0-9_-]{20,}"),
    ("hf_", "[A-Za-z0-9]{20,}"),
    ("npm_", "[A-Za-z0-9]{30,}"),
    *(
        (kind, "[A-Za-z0-9_-]{20,}")
        for kind in ("gsk_", "xai-", "dckr_pat_", "dckr_oat_", "hvs.", "hvb.", "hvr.", "xapp-")
    ),
    (":AA", "[A-Za-z0-9_-]{32,}"),  # of bots of Telegram
    ("/api/webhooks/", "[0-9]{10,20}/[A-Za-z0-9_-]{30,}"),  # of Discord
    ("pypi-", "[A-Za-z0-9_-]{40,}"),
    ("eyJ", r"(?<![_-]eyJ)[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+){0,3}"),
)
"""Prefix and rest of the tokens of services."""

# Secrets by name
_QUOTE: Final = r"\\{0,4}[\"']"
_UNQUOTED: Final = r"[^\s\"'\\&;<>\x1b]{0,4096}[^\s\"'\\&;<>\x1b,.)\]}]"
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


def _is_no_folder(value: str) -> bool:
    return _is_likely_secret(value) and not value.startswith(("/", "~", "."))


_NON_SECRET_TOKEN_PREFIXES: Final = "(?:page|cursor|continuation|next|sync|stop|eos|bos|pad|sep|unk|mask|cls)[_-]?"  # noqa: S105 # words beside a token that is none
_SECRET_KEY_PREFIXES: Final = (
    "(?:api|access|secret|private|encryption|signing|account|master|storage|subscription)[ _-]?"  # noqa: S105 # words, no secret
)
_SECRET_NAMES: Final = (
    ("passw", "passw(?:or)?d", _anywhere, is_secret),
    ("passphrase", "passphrase", _anywhere, is_secret),
    ("pass", "pass", _preceded_by("[_-]"), _is_likely_secret),
    ("pwd", "pwd", _preceded_by("[_;?&\"'-][ \t]?|\\A"), _is_no_folder),
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
_LOGIN: Final = (
    r"(?!\[)[^\s/:@\"'<>\\]{0,256}:(?:(?P<word>[^\s/\"'<>\\]{1,512})|(?!\d{1,5}/)(?P<path>[^\s@\"'<>\\]{1,128}))(?=@)"
)
"""Name and password before the host of an address; a password with a slash ends at the first `@`."""

_WORD: Final = r"(?:[\"'](?P<quoted>[^\"'\r\n]{1,512})|(?P<word>[^\s\"',.;)-][^\s\"']{2,512}))"
_PASSWORD: Final = r"password\s{1,8}[\"']?(?P<word>[^\s\"']{1,512})"  # noqa: S105 # a pattern
_CONTEXT_PATTERNS: Final = (
    (
        "authorization",
        rf"authorization{_HEADER_SEPARATOR}(?:{_SINGLE_TOKEN_SCHEME}|{_PARAMETER_SCHEME}|(?P<bare>[^\s\"'\\,;]{{8,4096}}))",
    ),
    ("cookie", rf"cookie{_HEADER_SEPARATOR}(?P<line>[^=\"'\\\r\n]{{1,256}}=[^\"'\\\r\n]{{1,4096}})"),
    ("bearer", r"bearer[ \t]{1,8}(?P<bare>[A-Za-z0-9._~+/-]{8,4096}={0,2})"),
    ("://", rf"://(?:{_LOGIN}|(?P<bare>[^\s/:@\"'<>\\]{{16,256}}))@"),
    (
        "machine",
        rf"machine\s{{1,8}}\S{{1,256}}\s{{1,8}}(?:(?:login|account)\s{{1,8}}\S{{1,256}}\s{{1,8}}){{0,2}}{_PASSWORD}",
    ),
    ("login", rf"login[ \t]{{1,8}}\S{{1,256}}\s{{0,8}}\n\s{{0,8}}{_PASSWORD}"),
    ("default login", rf"default login[ \t]{{1,8}}\S{{1,256}}\s{{1,8}}{_PASSWORD}"),
    ("sshpass", rf"sshpass[ \t]{{1,8}}(?:-[ev][ \t]{{1,8}}){{0,2}}-p[ \t]{{0,8}}{_WORD}"),
    ("mysql", rf"mysql(?:dump|admin|import)?[ \t](?:[^\r\n]{{0,200}}?[ \t])?-p{_WORD}"),
    ("redis-cli", rf"redis-cli[ \t](?:[^\r\n]{{0,200}}?[ \t])?-a[ \t]{{1,8}}{_WORD}"),
    ("docker", rf"docker[ \t]{{1,8}}login[ \t](?:[^\r\n]{{0,200}}?[ \t])?-p[ \t]{{1,8}}{_WORD}"),
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
        after_dashes = SecretRule(hint, option, _preceded_by("--[A-Za-z0-9-]*"), _accepts_by_name(accepts), True)
        yield hint, (SecretRule(hint, assigned, fits, _accepts_by_name(accepts), True), after_dashes)
    login = _preceded_by(r"(?:^|[\s\"'=(\[,])-?(?:-proxy)?")
    for hint, pattern in _CONTEXT_PATTERNS:
        fits = login if hint == "-u" else _anywhere
        yield hint, (SecretRule(hint, re.compile(f"(?i){pattern}"), fits, _accepts_by_context, True),)


def _format_rule(hint: str, rest: str) -> SecretRule:
    fits = _not_preceded_by("[A-Za-z0-9]") if hint in _WHOLE_WORD_PREFIXES else _anywhere
    return SecretRule(hint, re.compile(f"(?P<secret>{re.escape(hint)}{rest})", re.DOTALL), fits, lambda match: True)


FORMAT_RULES: Final = tuple(_format_rule(hint, rest) for hint, rest in _TOKEN_FORMATS)
NAME_RULES: Final = tuple(_name_rules())
_SECRET_KEY_SUFFIXES: Final = (
    *((re.compile(rf"(?i){name}\Z"), fits, accepts) for _, name, fits, accepts in _SECRET_NAMES),
    (re.compile(r"(?i)(?:authorization|cookie)\Z"), _anywhere, _is_likely_secret),
)


def secret_spans(text: str, searched: str, rule: SecretRule) -> Iterator[Span]:
    """Yield the spans that a rule redacts; its hint is searched in `searched`, which may be in lower case."""
    hint, pattern, fits, accepts, _ = rule
    at = searched.find(hint)
    while at >= 0:
        end = at + len(hint)
        match = pattern.match(text, at) if fits(text, at) else None
        if match is not None:
            end = match.end()
            if accepts(match):
                yield match.span(str(match.lastgroup))
        at = searched.find(hint, end)


# Rules of the collection
_EDGE: Final = re.compile(
    r"\\b|\(\?:\^\|\[[^]]*\]\)|\(\?:\$\|\[[^]]*\]\)|\(\?:[^()]*(?:\$|\\z)(?:\|\\b)?\)"  # as \b, (?:^|[\s"]), (?:[\s;]|$)
)
"""Conditions of a pattern of the collection on the characters before and after a secret."""

_BY_NAME: Final = re.compile(r"(?:\(\?i\))?\[\\w\.-\]\{0,50\}\?")
"""Beginning of the patterns that find a value by the name before it."""

_MIN_KEYWORD_CHARS: Final = 3

_MAX_LINE_CHARS: Final = 200
"""Characters on each side of a match in which an exception may look at its line."""

_WORD_END: Final = re.compile(b"[A-Za-z0-9_-]*")


class CollectionRule:
    """Rule of the collection; its pattern is compiled when one of its hints occurs.

    Secrets with a format of their own are also found inside words: the word boundaries in their patterns are removed. A
    value that is found by the name before it has no format, and must end with its word.

    Args:
        described: the rule in the collection: pattern, keywords, least entropy, and exceptions.
        allowed: exceptions to all rules.
    """

    def __init__(self, described: Mapping[str, Any], allowed: list[Mapping[str, Any]]) -> None:
        self.id: str = described["id"]
        self._described = described
        self._allowed = allowed
        self._regex: str = described["regex"]
        self._is_by_name = _BY_NAME.match(self._regex) is not None
        if self.id not in _WHOLE_WORD_RULES:
            end = "(?:[^0-9A-Za-z]|$)" if self._is_by_name else ""
            self._regex = _EDGE.sub(lambda edge: "" if edge[0] == r"\b" else end, self._regex)

    def spans(self, encoded: bytes, known: set[Span]) -> Iterator[Span]:
        """Yield the spans of secrets that are not known yet, in a text with a byte for each character."""
        for match in self._pattern.finditer(encoded):
            groups = (match.span(n) for n in range(self._described["group"] or 1, self._pattern.groups + 1))
            start, end = next((span for span in groups if span[1] > span[0]), match.span())
            if (start, end) not in known and self._accepts(encoded, match.span(), (start, end)):
                yield start, end if self._is_by_name else _WORD_END.match(encoded, end).end()  # type: ignore[union-attr]

    @property
    def hints(self) -> list[str]:
        """The patterns of its keywords; its own pattern in place of keywords that ordinary words contain, such as `ey`."""
        return [
            self._regex if len(word) < _MIN_KEYWORD_CHARS else f"(?i:{re2.escape(word)})"
            for word in self._described["keywords"]
        ]

    @cached_property
    def _pattern(self) -> Any:
        return re2.compile(self._regex.encode())

    @cached_property
    def _exceptions(self) -> dict[str, Any]:
        """The pattern of the exceptions for each part of the text: secret, match or line."""
        found: dict[str, list[str]] = {}
        for allowed in (*self._allowed, *self._described["allowed"]):
            words = [f"(?i:{re2.escape(word)})" for word in allowed["stopwords"]]
            found.setdefault(allowed["target"], []).extend((*(f"(?:{regex})" for regex in allowed["regexes"]), *words))
        return {target: re2.compile("|".join(patterns).encode()) for target, patterns in found.items()}

    def _accepts(self, encoded: bytes, match: Span, secret: Span) -> bool:
        value = encoded[slice(*secret)]
        size, counts = len(value), Counter(value).values()
        if sum([n * math.log2(size / n) for n in counts]) <= size * self._described["entropy"]:
            return False
        parts = {"secret": value, "match": encoded[slice(*match)], "line": b""}
        if "line" in self._exceptions:
            before, after = (
                encoded[max(0, match[0] - _MAX_LINE_CHARS) : match[0]],
                encoded[match[1] : match[1] + _MAX_LINE_CHARS],
            )
            parts["line"] = before.rpartition(b"\n")[2] + parts["match"] + after.partition(b"\n")[0]
        return not any(pattern.search(parts[target]) for target, pattern in self._exceptions.items())


@cache
def _hints() -> tuple[Any, list[SecretRule | CollectionRule]]:
    """Return the hints of all rules as a set, and the rule of each hint."""
    source = json.loads((resources.files("replanning.plan") / "secret_rules.json").read_text(encoding="utf-8"))
    no_tokens = {"target": "match", "regexes": [f"(?i){_NON_SECRET_TOKEN_PREFIXES}token"], "stopwords": []}
    collection = [CollectionRule(described, [*source["allowed"], no_tokens]) for described in source["rules"]]
    rules: list[tuple[str, SecretRule | CollectionRule]] = [
        *((re2.escape(rule.hint), rule) for rule in FORMAT_RULES),
        *((f"(?i:{re2.escape(hint)})", rule) for hint, rules in NAME_RULES for rule in rules),
        *(("|".join(rule.hints), rule) for rule in collection),
    ]
    hints = re2.Set.SearchSet()
    for hint, _ in rules:
        hints.Add(hint)
    hints.Compile()
    return hints, [rule for _, rule in rules]


def find_secrets(text: str) -> list[Span]:
    """Return the spans of secrets that the rules find, in any order; they may overlap."""
    encoded = text.encode("ascii", "replace")  # a byte for each character
    hints, rules = _hints()
    matched = hints.Match(encoded)
    if not matched:
        return []
    low = encoded.lower().decode()
    spans: set[Span] = set()
    for index in sorted(set(matched)):
        rule = rules[index]
        if isinstance(rule, SecretRule):
            spans.update(secret_spans(text, low if rule.ignores_case else text, rule))
        else:
            spans.update(rule.spans(encoded, spans))
    return list(spans)


@lru_cache(4096)
def secret_predicate(key: str) -> Callable[[str], bool] | None:
    """Return the test for values under a name of secrets; None for other names."""
    end = key.strip()[-64:]
    for name, fits, accepts in _SECRET_KEY_SUFFIXES:
        match = name.search(end)
        if match is not None and fits(end, match.start()):
            return accepts
    return None
