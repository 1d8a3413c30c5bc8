"""JSON in what language models say: found as it is, never completed, in time by length alone."""

from __future__ import annotations

import json
import re
from time import process_time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from replanning.llm.provider import extract_json

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)
objects = st.dictionaries(st.text(), values, max_size=5)
words = st.text(alphabet=st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["Sure! ", "{", "}", "]", "[", '"', "`", "```", "{x}", "{ }", "I'd say {maybe}: ", 'he said "no" ', "\\", ": , "]
)
prose = st.lists(words, max_size=6).map("".join).filter(lambda text: not re.search(r'\{\s*"|</?(think|reason)', text))
"""Anything that does not itself begin an object, or thinking."""


@given(values)
def test_json_alone(value) -> None:
    """A text that is JSON means exactly that, and nothing inside of it."""
    assert list(extract_json(json.dumps(value))) == [value]
    assert list(extract_json(f"\n {json.dumps(value, indent=2, ensure_ascii=False)}\n")) == [value]


@given(prose, objects, prose)
def test_object_in_prose(before, value, after) -> None:
    """An object is found in any prose that does not itself begin another one."""
    text = f"{before}{json.dumps(value)}{after}"
    assume(not text.strip().startswith(('"', "[")))  # which may be JSON as a whole
    assert value in list(extract_json(text))


@given(prose, objects, prose, st.sampled_from(["json", "JSON", "", "jsonc"]))
def test_fenced_object(before, value, after, language) -> None:
    """An object in a fenced block is found, whatever is written around it."""
    text = f"{before}\n```{language}\n{json.dumps(value, indent=1)}\n```\n{after}"
    assert value in list(extract_json(text))


@pytest.mark.parametrize("language", ["", "json", "json ", " json\n", "\n", "x-y+z\n"])
def test_fenced_object_is_whole(language) -> None:
    """Nothing is taken out of the strings of an object that begins beside its fence."""
    value = {"two words": "and more of them", "b": 1}
    assert list(extract_json(f"Here: ```{language}{json.dumps(value)}``` That is it.")) == [value]


@given(prose, objects, objects, st.sampled_from(["think", "THINK", "thinking", "reasoning"]), st.booleans())
def test_thoughts_come_last(text, thought, said, tag, opened) -> None:
    """Answers precede thoughts, also if the tag that begins the thinking is missing."""
    begin = f"<{tag}>" if opened else ""
    found = list(extract_json(f"{begin}{text} {json.dumps(thought)}</{tag}> So: {json.dumps(said)}."))
    assert said in found
    if text.count("{") == 0:
        assert found[0] == said
        assert thought in found


@given(objects, objects, prose.filter(lambda text: "{" not in text))
def test_several_objects(first, second, between) -> None:
    """Of several objects all are found, each by itself, and the last one is the likeliest."""
    found = list(extract_json(f"Either {json.dumps(first)}{between} or {json.dumps(second)}"))
    assert found == [second, first]


@given(objects.filter(bool), st.data())
def test_what_is_cut_off_says_nothing(value, data) -> None:
    """Of an object that is cut off nothing is taken: neither completed, nor an object inside of it by itself."""
    text = json.dumps({"decision": value, "reason": "it has to be {so}"})
    cut = text[: data.draw(st.integers(len('{"decision":'), len(text) - 1))]
    assert list(extract_json(cut)) == []
    assert list(extract_json(f"I decided: {cut}")) == []
    assert list(extract_json(f"```json\n{cut}")) == []


def test_a_wrong_object_hides_what_it_holds() -> None:
    """Of an object that is not valid nothing is taken, and what comes after it is found."""
    wrong = '{"wanted": {"replan": true}, "because": unknown, "also": {"replan": true}}'
    assert list(extract_json(f'{wrong} I mean {{"replan": false}}')) == [{"replan": False}]
    form = 'The form is {"alternatives": [...], "note": "..."}. '
    assert list(extract_json(form + '{"alternatives": []}')) == [{"alternatives": []}]


@pytest.mark.parametrize(
    "text",
    [
        '{"confidence": NaN}',
        '{"confidence": Infinity}',
        '{"confidence": -Infinity}',
        '{"confidence": 1e999}',
        '{"replan": false, "replan": true}',
        '{"a": {"replan": false, "replan": true}}',
        "{'a': 1}",
        '{"a": 1,}',
        "",
        "nothing to see",
        "{",
        '{"',
    ],
)
def test_refused(text) -> None:
    """Text that is not JSON by the standard, or contradicts itself, yields nothing."""
    assert list(extract_json(text)) == []
    assert list(extract_json(f"Well: {text}")) == []


def test_order() -> None:
    """Fenced blocks come before objects in prose, and the last of each first; strings keep their line breaks."""
    text = 'See {"n": 1}.\n```json\n{"n": 2}\n```\nor\n```\n[{"n": 3}]\n```\nnot {"n": "4\n\t5"}.'
    assert list(extract_json(text)) == [[{"n": 3}], {"n": 2}, {"n": "4\n\t5"}, {"n": 1}]


def test_fences_and_tags_in_strings() -> None:
    """Fences, tags and braces in a string are text; an object that holds them comes whole."""
    for held in ("```json\n{}\n```", "use </think> and <think> here", "} ] {", 'say "{}"'):
        value = {"text": held, "n": 1}
        assert value in list(extract_json(f"Here it is: {json.dumps(value)}."))
        assert {} not in list(extract_json(f"Here it is: {json.dumps(value)}."))


HOSTILE = (
    *('{"a":', "[", '{"', '{"{', "}", '"', '\\"', "```", "<think>"),
    *('{"a":1}', "{ ", "```\n{}", '{"a":[{', "x", " x"),
)


@pytest.mark.parametrize(
    "unit",
    ["{", "</think>", *(pytest.param(unit, marks=pytest.mark.deep) for unit in HOSTILE)],
)
def test_hostile_input_takes_time_by_length_alone(unit) -> None:
    """Many apparent beginnings take time in proportion and no stack, and megabytes of them are not searched."""

    def seconds(size: int) -> float:
        text = "x" + unit * (size // len(unit))
        start = process_time()
        for _ in zip(range(50), extract_json(text), strict=False):
            pass
        return process_time() - start

    small = min(seconds(40_000) for _ in range(3))
    assert seconds(400_000) < 10 * 3 * (small + 0.01)
    assert seconds(8_000_000) < 2


def test_nesting_is_bounded() -> None:
    """A hundred levels are read; bombs are refused, and what follows them is found."""
    assert len(list(extract_json('{"a":' * 90 + "1" + "}" * 90))) == 1
    assert list(extract_json('{"a":' * 150 + "1" + "}" * 150)) == []
    bomb = '{"a":' * 50_000 + "1" + "}" * 50_000
    assert list(extract_json(bomb)) == []
    assert list(extract_json(f'{bomb} {{"b": 2}}')) == [{"b": 2}]
    assert list(extract_json("[" * 100_000)) == []
