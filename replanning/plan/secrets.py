"""Rules that find secrets in text: formats of tokens, names of passwords, and headers.

The rules of gitleaks, here called the collection (`secret_rules.json`, written by `scripts/import_secret_rules.py`), are
matched by RE2. Our own rules begin with their hint, a literal text; each reads a bounded number of characters and
continues after its match. So the time is linear in the length of any text. Masking is done by `plan/masking.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property, lru_cache
from importlib import resources
from typing import Any, Final, NamedTuple

import re2

MASK: Final = "[redacted]"
"""Replacement of a secret."""

Span = tuple[int, int]


class SecretRule(NamedTuple):
    """Pattern of a secret that begins with a literal hint; the last named group that matches is redacted.

    A rule that finds a value by the name before it is written for text in lower case.
    """

    hint: str
    pattern: re.Pattern[str]
    accepts: Callable[[re.Match[str]], bool]
    is_by_name: bool = False


def _after(texts: Iterable[str], hint: str) -> str:
    """Return a pattern for a hint behind one of some texts; the hint comes first, because `re` looks for it quickly."""
    return f"{hint}(?:{'|'.join(f'(?<={text}{hint})' for text in texts)})"


def _not_after(texts: Iterable[str], hint: str) -> str:
    return hint + "".join(f"(?<!{text}{hint})" for text in texts)


# Secrets by format
_KEY_PREFIXES: Final = ("sk", "rk", "pk", "whsec")
_NO_WORDS: Final = r"(?=[A-Za-z_-]{0,64}\d|(?:[A-Za-z]{1,8}[_-]){0,3}[A-Za-z]{16,})"
"""Condition on what follows: with a digit, or with more consecutive letters than words have."""

_WHOLE_WORD_PREFIXES: Final = frozenset({"sk-", "rk-", "pk-", "sk_", "rk_", "pk_", "eyJ"})
"""Prefixes that words end in, such as `task-`."""

_WHOLE_WORD_RULES: Final = frozenset({"vault-service-token", "square-access-token"})
"""Rules of the collection that ordinary text fits in the middle of a word."""

_TOKEN_FORMATS: Final = (
    (
        "-----BEGIN ",
        r"[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z0-9 ]{0,60}-{0,5}|\Z)",
    ),
    ("---- BEGIN SSH2 ", r"[A-Z ]{0,20}PRIVATE KEY ----.*?(?:---- END SSH2 [A-Z ]{0,40}-{0,4}|\Z)"),
    *((f"{kind}-", f"{_NO_WORDS}[A-Za-z0-9_-]{{16,}}") for kind in ("sk", "rk", "pk")),
    *(
        (f"{kind}_", r"(?:live_|test_)?(?:(?=[A-Za-z]{0,64}\d)[A-Za-z0-9]{16,}|[A-Za-z]{24,})")
        for kind in _KEY_PREFIXES
    ),
    *((f"gh{kind}_", "[A-Za-z0-9]{20,}") for kind in "pousr"),
    ("github_pat_", f"{_NO_WORDS}[A-Za-z0-9_]{{20,}}"),
    *(
        (f"gl{kind}-", f"{_NO_WORDS}[A-Za-z0-9_-]{{16,}}")
        for kind in ("pat", "ptt", "dt", "rt", "cbt")
    ),
    ("xox", "[abeoprs]-[A-Za-z0-9-]{10,}"),
    ("hooks.slack.com/services/", "[A-Za-z0-9/]{20,}"),
    *((kind, "[A-Z0-9]{16}") for kind in ("AKIA", "ASIA")),
    ("ya29.", "[A-Za-z0-9_-]{20,}"),
    ("hf_", "[A-Za-z0-9]{20,}"),
    ("npm_", "[A-Za-z0-9]{30,}"),
    *(
        (kind, f"{_NO_WORDS}[A-Za-z0-9_-]{{20,}}")
        for kind in ("gsk_", "xai-", "dckr_pat_", "dckr_oat_", "hvs.", "hvb.", "hvr.", "xapp-")
    ),
    (":AA", "(?<=[0-9]{5}:AA)[A-Za-z0-9_-]{32,}"),  # of bots of Telegram
    ("/api/webhooks/", "[0-9]{10,20}/[A-Za-z0-9_-]{30,}"),  # of Discord
    ("pypi-", f"{_NO_WORDS}[A-Za-z0-9_-]{{40,}}"),
    ("eyJ", r"(?<![_-]eyJ)[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+){0,3}"),
)
"""Prefix and rest of the tokens of services."""

# Secrets by name
_QUOTE: Final = r"\\{0,4}[\"']"
_UNQUOTED: Final = r"[^\s\"'\\&;<>\x1b]{0,4096}[^\s\"'\\&;<>\x1b,.)\]}]"
_VALUE: Final = rf"(?:{_QUOTE}(?P<quoted>[^\"'\\\r\n]{{1,4096}})|(?P<plain>{_UNQUOTED}))"
_ASSIGNMENT: Final = rf"(?:{_QUOTE})?(?:(?P<prose>:[ \t]{{1,8}}|[ \t]{{1,8}}[:=][ \t]{{1,8}})|[ \t]{{0,8}}(?:=>|:=|[:=])[ \t]{{0,8}}|>)"
_PLACEHOLDER: Final = re.compile(
    r"\$?\{[^{}]*\}?|\$[a-z_]\w*|\$\(.*|`.*|\[redacted\]?|[*x.…]+|%\(?\w+\)?s?", re.IGNORECASE
)

_CODE: Final = re.compile(
    r"""
    (?:self|this|cls|os|process|settings|config|args|options|request|context|env)\.[a-z_][\w.]*  # self.token
    | [a-z_][\w.]*[(\[](?:.*[(\[])?  # get_token(
    | [a-z][a-z0-9]*(?:[._]+[a-z][a-z0-9]*)+[(\[].*  # vault.read(name
    """,
    re.VERBOSE,
)
"""Expressions of programs that are assigned to a name; they end before a quote or a closing bracket."""

_NUMBER: Final = re.compile(r"[\d.,:%/ -]{1,12}")
_NON_SECRET_WORDS: Final = frozenset(
    {
        "none",
        "null",
        "true",
        "false",
        "required",
        "missing",
        "invalid",
        "incorrect",
        "wrong",
        "expired",
        "empty",
    }
    | {"undefined", "unknown", "unset", "unrecognized"}
)
_MESSAGE: Final = re.compile(
    r"""
    (?:
        access|all|argument|authentication|authorization|bad|broken|can't|cannot|command|
        connection|could|couldn't|denied|device|did|directory|disk|does|error|exec|expected|
        failed|field|file|illegal|input|input/output|interrupted|invalid|is|line|missing|must|
        name|no|not|operation|option|password|permission|read-only|resource|should|stale|string|
        text|the|this|too|unable|unexpected|unknown|unrecognized|unsupported|usage|user|value|
        wrong
    )
    :?[ \t]+['"]?\w
    """,
    re.VERBOSE,
)
"""Beginning of a message about a file or a program with the name of a secret, as in `/etc/passwd: No such file`."""

_WORD_CHAR_LIMIT: Final = 16
"""Letters from which a word in prose may be a secret."""


def is_secret(value: str) -> bool:
    """Return whether the value of a password is a secret, and no placeholder."""
    return (
        bool(value) and not _PLACEHOLDER.fullmatch(value) and value.lower() not in _NON_SECRET_WORDS
    )


def _is_likely_secret(value: str) -> bool:
    """Return whether the value of a key or token is a secret: many other things are called a token."""
    return len(value) >= 4 and not _NUMBER.fullmatch(value) and is_secret(value)


def is_plain_word(value: str) -> bool:
    """Return whether a value has only letters, perhaps after a blank, and is too short for a secret."""
    return value.strip().isalpha() and len(value) < _WORD_CHAR_LIMIT


def _is_likely_token(value: str) -> bool:
    return _is_likely_secret(value) and not is_plain_word(value)


def _is_no_folder(value: str) -> bool:
    return _is_likely_secret(value) and not value.startswith(("/", "~", "."))


_NON_SECRET_TOKENS: Final = ("page", "cursor", "continuation", "next", "sync", "stop", "eos", "bos", "pad", "sep",
                             "unk", "mask", "cls")  # fmt: skip
_SECRET_KEYS: Final = ("api", "access", "secret", "private", "encryption", "signing", "account", "master", "storage",
                       "subscription")  # fmt: skip
_API_KEY: Final = _after(
    (f"{word}{between}" for word in _SECRET_KEYS for between in ("", "[ _-]")), "key"
)
_TOKEN: Final = _not_after(
    (f"{word}{between}" for word in _NON_SECRET_TOKENS for between in ("", "[_-]")), "token"
)
_SECRET_NAMES: Final = (
    ("passw", "passw(?:or)?d", is_secret),
    ("passphrase", "passphrase", is_secret),
    ("pass", _after(["[_-]", "[{,]", "[{,] "], "pass"), _is_likely_secret),
    ("pwd", _after([r"\A", "[_;?&\"'-]", "[_;?&\"'-][ \t]"], "pwd"), _is_no_folder),
    ("secret", "secret(?:[_-]?(?:access[_-]?)?key)?(?:_base)?", _is_likely_secret),
    ("key", f"{_API_KEY}(?:[_-]?id)?", _is_likely_secret),
    ("key", _after(["[?&]"], "key"), _is_likely_token),
    ("token", _TOKEN, _is_likely_secret),
    ("credential", "credentials?", _is_likely_secret),
    ("signature", "signature", _is_likely_secret),
    ("sig", _after([r"\A", "[?&]"], "sig"), _is_likely_token),
    ("code", _after(["[?&]"], "code"), _is_likely_token),
)
"""Names of secrets: hint, name, and test of the value."""

_SINGLE_TOKEN_SCHEME: Final = (
    r"(?:basic|bearer|token|apikey|negotiate|ntlm|ssws)[ \t]{1,8}(?P<word>[^\s\"'\\,;]{1,4096})"  # noqa: S105 # a pattern
)

_PARAMETER_SCHEME: Final = r"(?:digest|oauth|hmac|aws4-hmac-sha256)[ \t](?P<line>[^\r\n]{1,4096})"
_HEADER_SEPARATOR: Final = rf"(?:{_QUOTE})?[ \t]{{0,8}}[:=][ \t]{{0,8}}(?:{_QUOTE})?"
_LOGIN: Final = r"(?!\[)[^\s/:@\"'<>\\]{0,256}+:(?:(?P<word>[^\s/\"'<>\\]{1,512})|(?!\d{1,5}/)(?P<path>[^\s@\"'<>\\]{1,128}+))(?=@)"
"""Name and password before the host of an address; a password with a slash ends at the first `@`."""

_WORD: Final = r"(?:[\"'](?P<quoted>[^\"'\r\n]{1,512})|(?P<word>[^\s\"',.;)-][^\s\"']{2,512}))"
_PASSWORD: Final = r"password\s{1,8}[\"']?(?P<word>[^\s\"']{1,512})"  # noqa: S105 # a pattern


def _option_of(command: str, option: str, value: str = _WORD) -> str:
    """Return a pattern for the value of an option; it reads up to where the command stands again."""
    return rf"{command}(?:(?:(?!{command})[^\r\n]){{0,200}}?[ \t])?{option}{value}"


_SAMBA_LOGIN: Final = r"(?:[\"'][^\s\"'%\[]{1,128}%(?P<line>[^\"'\r\n]{1,512})|[^\s\"'%\[]{1,128}%(?P<word>[^\s\"']{1,512}))"
"""Name and password of a user, as in `smbclient -U eve%…`."""


_SHARE: Final = r"(?:[ \t]{1,8}[a-z*]:?)?[ \t]{1,8}[\"']?\\{1,4}[^\s\"']{1,256}[\"']?"
"""Device and address of a folder of another machine, as in `net use X: \\\\server\\share`."""

_LOGIN_OPTION: Final = _after(
    (
        before + dash
        for before in (r"\A", r"[\s\"'=(\[,]")
        for dash in ("", "-", "-proxy", "--proxy")
    ),
    "-u",
)
_CONTEXT_PATTERNS: Final = (
    (
        "authorization",
        rf"authorization{_HEADER_SEPARATOR}(?:{_SINGLE_TOKEN_SCHEME}|{_PARAMETER_SCHEME}|(?P<bare>[^\s\"'\\,;]{{8,4096}}))",
    ),
    (
        "cookie",
        rf"cookie{_HEADER_SEPARATOR}(?P<line>[^=\"'\\\r\n]{{1,256}}=[^\"'\\\r\n]{{1,4096}})",
    ),
    ("bearer", r"bearer[ \t]{1,8}(?P<bare>[A-Za-z0-9._~+/-]{8,4096}={0,2})"),
    ("://", rf"://(?:{_LOGIN}|(?P<bare>[^\s/:@\"'<>\\]{{16,256}}+))@"),
    (
        "machine",
        rf"machine\s{{1,8}}\S{{1,256}}\s{{1,8}}(?:(?:login|account)\s{{1,8}}\S{{1,256}}\s{{1,8}}){{0,2}}{_PASSWORD}",
    ),
    ("login", rf"login[ \t]{{1,8}}\S{{1,256}}\s{{0,8}}\n\s{{0,8}}{_PASSWORD}"),
    ("default login", rf"default login[ \t]{{1,8}}\S{{1,256}}\s{{1,8}}{_PASSWORD}"),
    ("sshpass", rf"sshpass[ \t]{{1,8}}(?:-[ev][ \t]{{1,8}}){{0,2}}-p[ \t]{{0,8}}{_WORD}"),
    ("mysql", _option_of("mysql(?:dump|admin|import)?[ \t]", "-p")),
    ("redis-cli", _option_of("redis-cli[ \t]", "-a[ \t]{1,8}")),
    *(
        (
            name,
            _option_of(
                rf"{name}[a-z]{{0,8}}[ \t]", r"(?:-u[ \t]{0,8}|--user(?:name)?[= ])", _SAMBA_LOGIN
            ),
        )
        for name in ("smb", "rpcclient")
    ),
    ("sig=", r"sig=(?<![a-z0-9_-]sig=)(?P<bare>[a-z0-9%+/]{24,512})"),  # of Azure
    ("net use", rf"net use{_SHARE}[ \t]{{1,8}}(?![/*]){_WORD}[\"']?[ \t]{{1,8}}/user:"),
    ("net use", rf"net use{_SHARE}[ \t]{{1,8}}/user:\S{{1,256}}[ \t]{{1,8}}(?![/*]){_WORD}"),
    ("docker", _option_of("docker[ \t]{1,8}login[ \t]", "-p[ \t]{1,8}")),
    ("ldap", _option_of("ldap[a-z]{3,12}[ \t]", "-w[ \t]{1,8}")),
    ("openssl", _option_of("openssl[ \t]", "-k[ \t]{1,8}")),
    *((f"-{kind}pass", rf"-{kind}pass[ \t]{{1,8}}{_WORD}") for kind in ("store", "key")),
    ("-pass", r"-pass(?:in|out)?[ \t]{1,8}pass:(?P<word>[^\s\"']{1,512})"),
    ("vault login", r"vault login[ \t]{1,8}(?P<bare>[^\s\"'=-][^\s\"'=]{7,512})"),
    (
        "echo",
        r"echo[ \t]{1,8}[\"']?(?P<word>[^\s\"'|$]{1,512})[\"']?[ \t]{0,8}\|[^\r\n|]{1,200}?--password-stdin",
    ),
    ("jdbc:oracle:", r"jdbc:oracle:[a-z0-9]{1,8}:[^\s/@:]{1,64}/(?P<word>[^\s/@]{1,256})(?=@)"),
    ("passw", r"passw(?:or)?d[ \t]{1,4}(?:is[ \t:]{1,4})?[\"'](?P<bare>[^\"'\r\n]{4,512})[\"']"),
    (
        "passw",
        r"passw(?:or)?d[ \t](?:is|for[ \t][^\r\n]{1,200}?[^\s:]):?[ \t]{1,4}(?P<bare>[^\s\"'=/<>]{8,512})(?=\s|\Z)",
    ),
    *(
        (
            name,
            rf"{name}[\"']?,?\s{{1,40}}[\"']?value[\"']?[ \t]{{0,4}}[:=][ \t]{{0,4}}[\"'](?P<bare>[^\"'\r\n]{{6,4096}})[\"']",
        )
        for name in (
            "password",
            "passwd",
            "secret",
            "token",
            "apikey",
            "api_key",
            "secret_key",
            "access_key",
        )
    ),
    ("-u", rf"{_LOGIN_OPTION}(?:ser)?[ =][^\s:\"']{{1,256}}:(?P<word>[^\s\"']{{1,512}})"),
)
"""Text before secrets without a name: headers, and logins in addresses and options."""


def _accepts_by_context(match: re.Match[str]) -> bool:
    value = match[str(match.lastgroup)]
    if match.lastgroup == "bare":  # it may be a word of a sentence
        return any(c.isdigit() for c in value) or len(value) >= 2 * _WORD_CHAR_LIMIT
    return not _PLACEHOLDER.fullmatch(value) and not value.isdigit()


def _accepts_by_name(accepts: Callable[[str], bool]) -> Callable[[re.Match[str]], bool]:
    def named(match: re.Match[str]) -> bool:
        value, is_plain = match[str(match.lastgroup)], match.lastgroup == "plain"
        if is_plain and _CODE.fullmatch(value):
            return False
        is_prose = (
            match["prose"] is not None if is_plain else value[0] == " "
        )  # as {"token": " word"} of a model
        if is_prose and _MESSAGE.match(match.string, match.start(str(match.lastgroup))):
            return False
        return accepts(value) and not (
            is_prose and accepts is _is_likely_secret and is_plain_word(value)
        )

    return named


def _accepts_option(match: re.Match[str]) -> bool:
    accepts = secret_predicate(match["option"])
    return accepts is not None and accepts(match[str(match.lastgroup)])


def _name_rules() -> Iterator[SecretRule]:
    for hint, name, accepts in _SECRET_NAMES:
        yield SecretRule(
            hint, re.compile(f"{name}{_ASSIGNMENT}{_VALUE}"), _accepts_by_name(accepts), True
        )
    option = (
        rf"{_not_after(['-'], '--')}(?P<option>[a-z0-9_-]{{3,64}}+)[ \t]{{1,4}}(?![-:=]){_VALUE}"
    )
    yield SecretRule("--", re.compile(option), _accepts_option, True)
    for hint, pattern in _CONTEXT_PATTERNS:
        yield SecretRule(hint, re.compile(pattern), _accepts_by_context, True)


def _format_rule(hint: str, rest: str) -> SecretRule:
    start = _not_after(["[A-Za-z0-9]"], hint) if hint in _WHOLE_WORD_PREFIXES else re.escape(hint)
    return SecretRule(hint, re.compile(f"(?P<secret>{start}{rest})", re.DOTALL), lambda match: True)


FORMAT_RULES: Final = tuple(_format_rule(hint, rest) for hint, rest in _TOKEN_FORMATS)
NAME_RULES: Final = tuple(_name_rules())
_SECRET_KEY_SUFFIXES: Final = (
    *((re.compile(rf"{name}\Z"), accepts) for _, name, accepts in _SECRET_NAMES),
    (re.compile(r"(?:authorization|cookie)\Z"), _is_likely_secret),
)


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
_HASH_DIGITS: Final = re.compile(b"[0-9a-f]*")
_MIN_DATA_CHARS: Final = 300
_DATA: Final = re.compile(b"[A-Za-z0-9+/]{%d}" % _MIN_DATA_CHARS)
"""Characters beside a match that tell that it lies in a word of base64, as of an image."""


def _is_by_chance(encoded: bytes, start: int, end: int) -> bool:
    """Return whether a span lies in a hash or in much base64, where formats without boundaries occur by chance."""
    digits = _HASH_DIGITS.match(encoded, start).end()  # type: ignore[union-attr] # it matches nothing as well
    if digits > end or (digits == end and encoded[start - 1 : start].isalnum()):
        return True
    before = start - _MIN_DATA_CHARS
    return bool(_DATA.match(encoded, end) or (before >= 0 and _DATA.match(encoded, before)))


class CollectionRule:
    """Rule of the collection; its pattern is compiled when one of its hints occurs.

    Secrets with a format of their own are also found inside words, but not inside hashes and images: the word boundaries in
    their patterns are removed. A value that is found by the name before it has no format, and must end with its word.

    Args:
        described: the rule in the collection: pattern, keywords, least entropy, and exceptions.
        allowed: exceptions to all rules.
    """

    def __init__(self, described: Mapping[str, Any], allowed: list[Mapping[str, Any]]) -> None:
        self.id: str = described["id"]
        self._described = described
        self._allowed = allowed
        # As little as possible before a secret, so that none before it is passed over.
        self._regex = re.sub(r"\.\*(?!\?)", ".*?", described["regex"])
        self.is_by_name = _BY_NAME.match(self._regex) is not None
        if self.id not in _WHOLE_WORD_RULES:
            end = "(?:[^0-9A-Za-z]|$)" if self.is_by_name else ""
            self._regex = _EDGE.sub(lambda edge: "" if edge[0] == r"\b" else end, self._regex)

    def spans(self, encoded: bytes, known: set[Span]) -> Iterator[Span]:
        """Yield the spans of secrets that are not known yet, in a text with a byte for each character."""
        numbers, position = range(self._described["group"] or 1, self._pattern.groups + 1), 0
        accepted: dict[tuple[bytes, bytes], bool] = {}  # what logs repeat is judged once
        while (match := self._pattern.search(encoded, position)) is not None:
            whole = begin, position = match.span()
            position = max(position, begin + 1)
            groups = map(match.span, numbers)
            start, end = next((span for span in groups if span[1] > span[0]), whole)
            if (start, end) in known:
                continue
            words, value = encoded[slice(*whole)], encoded[start:end]
            accepts = accepted.get((words, value))
            if accepts is None or "line" in self._exceptions:
                accepts = accepted[words, value] = self._accepts(encoded, whole, value)
            if not accepts:
                if self.is_by_name:  # another name may follow its name, or end its value
                    words = encoded[begin:end].lower()
                    last = max(map(words.rfind, self._keywords))
                    position = begin + last if last > 0 else position
            elif self.is_by_name:
                yield start, end
            elif not _is_by_chance(encoded, start, end):
                yield start, _WORD_END.match(encoded, end).end()  # type: ignore[union-attr]

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
    def _keywords(self) -> tuple[bytes, ...]:
        return tuple(word.encode() for word in self._described["keywords"])

    @cached_property
    def _exceptions(self) -> dict[str, Any]:
        """The exceptions for each part of the text: secret, match or line."""
        found: dict[str, list[str]] = {}
        for allowed in (*self._allowed, *self._described["allowed"]):
            words = [f"(?i:{re2.escape(word)})" for word in allowed["stopwords"]]
            found.setdefault(allowed["target"], []).extend(
                (*(f"(?:{regex})" for regex in allowed["regexes"]), *words)
            )
        return {target: _search_set(["|".join(patterns)]) for target, patterns in found.items()}

    def _accepts(self, encoded: bytes, match: Span, value: bytes) -> bool:
        size, counts = len(value), map(value.count, set(value))
        if (
            size * math.log2(size) - sum([n * math.log2(n) for n in counts if n > 1])
            <= size * self._described["entropy"]
        ):
            return False
        parts = {"secret": value, "match": encoded[slice(*match)], "line": b""}
        if "line" in self._exceptions:
            before, after = (
                encoded[max(0, match[0] - _MAX_LINE_CHARS) : match[0]],
                encoded[match[1] : match[1] + _MAX_LINE_CHARS],
            )
            parts["line"] = before.rpartition(b"\n")[2] + parts["match"] + after.partition(b"\n")[0]
        return not any(pattern.Match(parts[target]) for target, pattern in self._exceptions.items())


def _search_set(patterns: Iterable[str]) -> Any:
    """Return a set of patterns whose `Match` tells which of them a text matches, without making objects of matches."""
    found = re2.Set.SearchSet()
    for pattern in patterns:
        found.Add(pattern)
    found.Compile()
    return found


@cache
def _hints() -> tuple[Any, list[SecretRule | CollectionRule]]:
    """Return the hints of all rules as a set, and the rule of each hint."""
    source = json.loads(
        (resources.files("replanning.plan") / "secret_rules.json").read_text(encoding="utf-8")
    )
    no_tokens = {
        "target": "match",
        "regexes": [f"(?i)(?:{'|'.join(_NON_SECRET_TOKENS)})[_-]?token"],
        "stopwords": [],
    }
    collection = [
        CollectionRule(described, [*source["allowed"], no_tokens]) for described in source["rules"]
    ]
    rules: list[tuple[str, SecretRule | CollectionRule]] = [
        *((re2.escape(rule.hint), rule) for rule in FORMAT_RULES),
        *((f"(?i:{re2.escape(rule.hint)})", rule) for rule in NAME_RULES),
        *(("|".join(rule.hints), rule) for rule in collection),
    ]
    return _search_set(hint for hint, _ in rules), [rule for _, rule in rules]


_SIMPLE: Final = re.compile(r"(?:\w{1,12}+[.?!]?+ )*+\w{0,12}+[.?!]?", re.ASCII)
_NAMES_BEFORE_WORDS: Final = re.compile("passw|bearer|vault", re.IGNORECASE)


def is_simple(text: str) -> bool:
    """Return whether a text consists of short words in which no rule can find a secret: a quick look.

    Every token format is longer than these words, or has other characters. A value is found by the name before it only
    where a sign, a line end or an option follows the name, except for three names.
    """
    return _SIMPLE.fullmatch(text) is not None and _NAMES_BEFORE_WORDS.search(text) is None


def find_secrets(text: str, *, by_name: bool = True) -> list[Span]:
    """Return the spans of secrets that the rules find, in any order; they may overlap.

    Args:
        text: the text.
        by_name: whether values are found by the name before them as well, not by their own format alone.
    """
    encoded = text.encode("ascii", "replace")  # a byte for each character
    hints, rules = _hints()
    matched = hints.Match(encoded)
    if not matched:
        return []
    low = text.lower()
    if len(low) != len(text):  # as of İ, which has two characters then
        low = encoded.lower().decode()
    spans: set[Span] = set()
    for index in sorted(set(matched)):
        rule = rules[index]
        if rule.is_by_name and not by_name:
            continue
        if isinstance(rule, SecretRule):
            for match in rule.pattern.finditer(low if rule.is_by_name else text):
                if rule.accepts(match):
                    spans.add(match.span(str(match.lastgroup)))
        else:
            spans.update(rule.spans(encoded, spans))
    return list(spans)


@lru_cache(4096)
def secret_predicate(key: str) -> Callable[[str], bool] | None:
    """Return the test for values under a name of secrets; None for other names."""
    end = key.strip()[-64:].lower()
    return next((accepts for name, accepts in _SECRET_KEY_SUFFIXES if name.search(end)), None)
