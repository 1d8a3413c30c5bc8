"""Past outputs of tools: the payload in each, and the texts that report errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from replanning.expectations.calls import ObservedCall
from replanning.plan.expectations import says_error
from replanning.plan.types import JsonObject, JsonValue

ERROR_WORD: Final = re.compile(
    r"\s*((?:(?![Nn]o |[Ww]ithout )[A-Za-z]+ )?(?:[A-Z][A-Za-z]*)?"
    r"(?:[Ee]rror|ERROR|[Ee]xception|EXCEPTION)|Traceback|FAILED|[Ff]ailed|[Ff]ailure)\b"
)
"""Beginning of a text that reports an error."""

ERROR_OBJECT: Final = re.compile(r'\s*\{\s*"(?:error|errors|exception|fault)"', re.IGNORECASE)
"""Beginning of an object whose first field reports an error."""

_REFUSAL: Final = re.compile(
    r"\bnot found\b|\bno such\b|\bdoes not exist\b|\bdoesn't exist\b|\binvalid\b|\bdenied\b"
    r"|\bunauthori[sz]ed\b|\bforbidden\b|\bunavailable\b|\btimed out\b|\btry again\b"
    r"|\btoo many requests\b|\bcannot\b|\bcould not\b|\bunable to\b|\bnot allowed\b|\bfailed\b",
    re.IGNORECASE,
)
"""Words of a short text that reports a refusal."""

_MAX_REFUSAL_CHARS: Final = 150

_MIN_SAME_REFUSALS: Final = 3

Path = tuple[str | int, ...]
"""Path of a part of an output: names of fields, and 0 for every item of an array."""

_TEXT_FIELDS: Final = (frozenset({"exit_code", "stdout"}), frozenset({"status", "headers"}))
"""Fields beside `json` in the output of a command, and of a request."""

_SERVER_FIELDS: Final = frozenset({"text", "json", "content"})
"""Fields in the output of an MCP tool."""

_ReportKind = Literal["word", "object", "refusal"]
"""Sign of an error in an output: its first word, its first field, or words of refusal."""


class Sample(NamedTuple):
    """Output of a call, as conditions see it.

    Attributes:
        call: the call.
        arguments: the arguments of the call, as JSON.
        output: the output; a text that contains a JSON object or array counts as that value.
        text: the output as text.
    """

    call: ObservedCall
    arguments: JsonObject
    output: JsonValue
    text: str

    def roots(self) -> dict[str, object]:
        """Return the values that conditions read."""
        return {"arguments": self.arguments, "output": self.output, "text": self.text}


def count_runs(samples: Iterable[Sample | ObservedCall]) -> int:
    """Return the number of different runs of outputs or calls."""
    runs = set()
    for sample in samples:
        call = sample.call if isinstance(sample, Sample) else sample
        runs.add(call.run)
    return len(runs)


def base_of(samples: Sequence[Sample]) -> Path:
    """Return the path of the payload in the outputs: `json` for commands, requests and servers."""
    for sample in samples:
        if not _has_answer_in_json(sample.output):
            return ()
    return ("json",)


def _has_answer_in_json(output: JsonValue) -> bool:
    """Return whether an output comes from a command, a request or a server, and contains JSON."""
    if not isinstance(output, dict):
        return False
    if not isinstance(output.get("json"), dict | list):
        return False
    for fields in _TEXT_FIELDS:
        if fields <= output.keys():
            return True
    if not isinstance(output.get("text"), str):
        return False
    return output.keys() <= _SERVER_FIELDS


def at_base(sample: Sample, base: Path) -> JsonValue:
    """Return the payload of an output."""
    if base and isinstance(sample.output, dict):
        return sample.output["json"]
    return sample.output


def damaged_outputs(samples: Sequence[Sample]) -> list[Sample]:
    """Return the texts that are truncated JSON, if all other outputs are JSON."""
    damaged = []
    for sample in samples:
        if isinstance(sample.output, str):
            if sample.text.lstrip()[:1] not in ("{", "["):
                return []
            damaged.append(sample)
        elif not isinstance(sample.output, dict | list):
            return []
    return damaged if len(damaged) * 2 < len(samples) else []


def error_texts(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Return the texts that mark outputs as errors, each with the outputs that it matches.

    A text is an error if it begins with a word such as `Error`; an object, if its first field has
    such a name while most outputs have other fields. Short refusals are errors if several begin
    with equal words. A text that would also match other outputs is left out.
    """
    groups: dict[_ReportKind, dict[str, list[Sample]]] = {"word": {}, "object": {}, "refusal": {}}
    for sample in samples:
        report = _report_of(sample)
        if report is not None:
            kind, text = report
            groups[kind].setdefault(text, []).append(sample)
    patterns = dict(groups["word"])
    for text, matching in groups["object"].items():
        # If most outputs have this field, its presence means nothing.
        if len(matching) * 2 < len(samples):
            patterns[text] = matching
    for first, matching in groups["refusal"].items():
        template = _refusal_template([sample.text for sample in matching])
        alike = 0
        for sample in samples:
            alike += sample.text.startswith(first)
        # The template may also match valid outputs that begin with this word.
        if "*" in template and alike > len(matching):
            continue
        if template and len(matching) * 2 < len(samples):
            patterns[template] = matching
    return _without_ambiguous(patterns, samples)


def _report_of(sample: Sample) -> tuple[_ReportKind, str] | None:
    """Return the sign of an error in an output, and its beginning; None if it reports none."""
    word = ERROR_WORD.match(sample.text)
    if word:
        return "word", word[1]
    field = ERROR_OBJECT.match(sample.text)
    if field and isinstance(sample.output, dict):
        value = next(iter(sample.output.values()))
        return ("object", field[0].lstrip()) if value else None
    if not isinstance(sample.output, str):
        return None
    if len(sample.text) > _MAX_REFUSAL_CHARS:
        return None
    if not _REFUSAL.search(sample.text):
        return None
    return "refusal", sample.text.split(None, 1)[0]


def _without_ambiguous(
    patterns: Mapping[str, list[Sample]], samples: Sequence[Sample]
) -> dict[str, list[Sample]]:
    """Return the error texts that match no other outputs."""
    known: set[int] = set()
    for matching in patterns.values():
        known.update(map(id, matching))
    others = [sample for sample in samples if id(sample) not in known]
    kept: dict[str, list[Sample]] = {}
    for pattern, matching in patterns.items():
        if not any(says_error(sample.text, pattern) for sample in others):
            kept[pattern] = matching
    return kept


def _refusal_template(texts: Sequence[str]) -> str:
    """Return the common words of refusals, with `*` where they differ; empty if too few."""
    if len(texts) < 2:
        return ""
    if "*" in "".join(texts):
        return ""
    if len(set(texts)) == 1:
        # Equal texts need more support: two may be a repeated call.
        return texts[0] if len(texts) >= _MIN_SAME_REFUSALS else ""
    lines = [text.split(" ") for text in texts]
    start = _common_words(lines)
    rest = [line[len(start) :][::-1] for line in lines]
    end = _common_words(rest)[::-1]
    if not start:
        return ""
    template = " ".join([*start, "*", *end])
    return template if _REFUSAL.search(template) else ""


def _common_words(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the common first words of all lines."""
    common = []
    for words in zip(*lines, strict=False):
        if len(set(words)) > 1:
            break
        common.append(words[0])
    return common


def failure_texts(
    failures: Sequence[ObservedCall], known: Mapping[str, object], samples: Sequence[Sample]
) -> dict[str, list[ObservedCall]]:
    """Return the first words of failure messages with which no output begins."""
    found: dict[str, list[ObservedCall]] = {}
    for call in failures:
        match = ERROR_WORD.match(call.failure)
        if match and match[1] not in known:
            found.setdefault(match[1], []).append(call)
    for word in list(found):
        if any(says_error(sample.text, word) for sample in samples):
            del found[word]
    return found
