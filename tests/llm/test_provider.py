"""The base class of language models, their options, errors and shapes, and JSON in what they say."""

import json
import re
from contextlib import contextmanager
from datetime import date
from enum import StrEnum
from typing import Annotated

import anyio
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from replanning import Environment
from replanning.errors import (
    BudgetExceeded,
    LLMError,
    LLMRefusal,
    LLMResponseInvalid,
    LLMTimeout,
    LLMUnavailable,
)
from replanning.journal import Usage
from replanning.llm import Completion, LLMCall, LLMOptions, LLMProvider, Price, PriceTable
from replanning.llm.provider import extract_json
from replanning.testing import LLMReply, ScriptedLLM, VirtualClock, hangs, returns

KEY = "sk-4f9c2a7be01d4c5e8b3a6f"


class Book:
    """A meter that writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[LLMCall] = []
        self.answers: list[Completion] = []

    @contextmanager
    def call(self, call: LLMCall):
        self.calls.append(call)
        yield self.answers.append

    def note(self, text: str) -> None:
        raise AssertionError("nothing is to be noted")


class Mood(StrEnum):
    GOOD = "good"
    BAD = "bad"


class Verdict(BaseModel):
    replan: bool
    confidence: Annotated[float, Field(ge=0, le=1)]
    mood: Mood = Mood.GOOD
    steps: tuple[str, ...] = ()
    due: date | None = None


def verdict(**changes) -> str:
    """An answer as JSON."""
    return json.dumps({"replan": True, "confidence": 0.5} | changes)


def always(reply: LLMReply, clock: VirtualClock | None = None, **fields) -> ScriptedLLM:
    """A model that always says the same."""
    return ScriptedLLM(
        lambda _: reply, environment=Environment(clock=clock or VirtualClock()), **fields
    )


async def test_options_are_filled_in():
    """Options override the provider's configuration, which fills the others; the sooner deadline counts."""
    clock = VirtualClock()
    model = always("yes", clock, temperature=0.7, max_tokens=50)
    assert await model.complete("well?") == "yes"
    await model.complete(
        "well?", LLMOptions(model="quill-2", temperature=0, max_tokens=9, deadline=clock.now() + 3)
    )
    await model.complete("well?", LLMOptions(deadline=clock.now() + 1000))
    filled = [
        (asked.model, asked.temperature, asked.max_tokens, (asked.deadline or 0) - clock.now())
        for _, asked in model.requests
    ]
    assert filled == [
        ("scripted-1", 0.7, 50, 30),
        ("quill-2", 0, 9, 3),
        ("scripted-1", 0.7, 50, 30),
    ]


async def test_secrets_do_not_leave():
    """Secrets are taken out of the prompt, of what the model is told about its role, and of what is embedded."""
    model, book = always("yes"), Book()
    await model.complete(f"the key is {KEY}", LLMOptions(system=f"never say {KEY}", meter=book))
    await model.embed(f"the key is {KEY}", LLMOptions(meter=book))
    assert KEY not in repr(model.requests) + repr(book.calls)
    assert [*model.prompts, *model.embedded_texts] == ["the key is [redacted]"] * 2
    assert model.requests[0].options.system == "never say [redacted]"


async def test_calls_are_accounted_for():
    """Each call is announced with an upper bound of what it uses, the schema too, and its answer as it was counted."""
    model, book = (
        always("yes", max_tokens=100, prices=PriceTable({"scripted*": Price(1, 10)})),
        Book(),
    )
    await model.complete("what now?", LLMOptions(system="be brief", meter=book))
    await model.embed("what now?", LLMOptions(meter=book))
    await model.complete("what now?", LLMOptions(system="be brief", meter=book, schema=Verdict))
    chat, embedding, shaped = book.calls
    assert (chat.provider, chat.model, chat.system, chat.operation) == (
        "scripted",
        "scripted-1",
        "be brief",
        "chat",
    )
    assert (chat.temperature, chat.max_tokens) == (0.3, 100)
    assert (embedding.model, embedding.prompt, embedding.operation) == (
        "scripted-words",
        "what now?",
        "embeddings",
    )
    assert shaped.estimate.tokens - chat.estimate.tokens > len(
        json.dumps(Verdict.model_json_schema())
    )
    for call, answer in zip(book.calls, book.answers, strict=True):
        assert call.estimate.calls == answer.usage.calls == 1
        assert call.estimate.tokens >= answer.usage.tokens > 0
        assert call.estimate.money >= answer.usage.money > 0


@pytest.mark.parametrize(
    ("asked", "answered", "money", "unpriced"),
    [("quill", "feather", 1, False), ("auto", "feather", 5, False), ("auto", "router", 0, True)],
)
def test_prices(asked, answered, money, unpriced):
    """A call costs what the model that was asked for costs, or the one that answered where that alone is known."""
    model = always("", prices=PriceTable({"quill": Price(1, 1), "feather": Price(5, 5)}))
    options = LLMOptions(model=asked)
    used = model.completion(
        "", "", options, model=answered, input_tokens=10**6, output_tokens=0
    ).usage
    assert used == Usage(1, 10**6, money, unpriced=unpriced)


async def test_late_answers(clock):
    """A call ends at its deadline, and what was asked is cancelled; one that is answered in time leaves nothing behind."""
    model = always(returns("at last", after=100), clock)
    with pytest.raises(
        LLMTimeout, match=r"scripted: no answer came within 30 s \(`timeout.replan`"
    ):
        await model.complete("well?")
    assert clock.elapsed == 30
    with pytest.raises(LLMTimeout):
        await model.complete("well?", LLMOptions(deadline=clock.now() + 5))
    assert clock.elapsed == 35
    assert await always(returns("at last", after=29), clock).complete("well?") == "at last"
    assert (clock.elapsed, repr(clock).endswith(" sleepers=0>")) == (64, True)


async def test_no_time_left():
    """Without time left nothing is reserved or sent."""
    clock, book = VirtualClock(), Book()
    model = always("yes", clock)
    with pytest.raises(LLMTimeout, match="nothing was sent"):
        await model.complete("well?", LLMOptions(deadline=clock.now(), meter=book))
    assert (model.requests, book.calls) == ([], [])


async def test_cancelled(clock):
    """A caller that is cancelled gets a cancellation, not a timeout."""
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(always(hangs(), clock).complete, "well?")
            await clock.sleep(1)
            scope.cancel()
    assert (scope.cancelled_caught, clock.elapsed) == (True, 1)


class Faulty(ScriptedLLM):
    """A provider that raises whatever it is made of."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [LLMUnavailable("busy"), BudgetExceeded("too much"), KeyboardInterrupt(), SystemExit(3)],
)
async def test_errors_that_pass(error):
    """Errors of the library and interruptions come out as they are."""
    try:
        await Faulty(error).complete("well?")
    except (type(error), KeyboardInterrupt) as caught:
        assert caught is error  # noqa: PT017 - pytest itself would end at some of these
    else:
        pytest.fail("it did not pass")


@pytest.mark.parametrize(
    "wrap", [lambda error: error, lambda error: ExceptionGroup("of a plugin", [error])]
)
async def test_errors_of_plugins(wrap):
    """Any other exception of a plugin becomes an LLMError that names it, without secrets."""
    fault = ZeroDivisionError(f"divided {KEY} by zero")
    with pytest.raises(LLMError) as caught:
        await Faulty(wrap(fault)).complete("well?")
    assert (
        str(caught.value)
        == "scripted: it failed with ZeroDivisionError: divided [redacted] by zero"
    )
    assert caught.value.__cause__ is fault


async def test_refusals():
    """A model that declines is an error that says so, and the call counts."""
    declined = Completion(
        f"I will not say {KEY}.", "scripted", "m", 5, 5, Usage(1, 10), "refusal", "req_1"
    )
    book, said = Book(), r"the model declined \(request req_1\): I will not say \[redacted\]"
    with pytest.raises(LLMRefusal, match=said) as caught:
        await always(declined).complete("well?", LLMOptions(meter=book))
    assert (caught.value.provider, caught.value.request_id, book.answers) == (
        "scripted",
        "req_1",
        [declined],
    )


async def test_a_small_provider():
    """A provider that only answers can be asked, has no embeddings, and is a context that closes it."""

    class Parrot(LLMProvider):
        name = "parrot"
        closed = False

        async def request(self, prompt: str, options: LLMOptions) -> Completion:
            return self.completion(prompt, prompt, options)

        async def aclose(self) -> None:
            self.closed = True

    async with Parrot(model="grey") as model:
        assert (model.unavailable_reason(), await model.is_available()) == ("", True)
        assert repr(model) == "<Parrot parrot grey>"
        assert await model.complete("well?") == "well?"
        with pytest.raises(LLMError, match="parrot: it offers no embeddings"):
            await model.embed("well?")
        assert not model.closed
    assert model.closed


async def test_shapes():
    """An answer of a shape is read as JSON is: lists are tuples, text is an enum or a date where it says so."""
    model = always(verdict(mood="bad", steps=["a", "b"], due="2024-02-29", confidence=1))
    answer = await model.complete_json("well?", Verdict)
    assert answer == Verdict(
        replan=True, confidence=1, mood=Mood.BAD, steps=("a", "b"), due=date(2024, 2, 29)
    )
    assert model.requests[0].options.schema is Verdict


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (verdict(replan="false"), "replan: Input should be a valid boolean"),
        (verdict(replan=0), "replan: Input should be a valid boolean"),
        (verdict(confidence=85), "confidence: Input should be less than or equal to 1"),
        (verdict(confidence="0.5"), "confidence: Input should be a valid number"),
        (verdict(confidence=None), "confidence: Input should be a valid number"),
        ('{"replan": true, "confidence": NaN}', "there is no JSON in the answer"),
        ('{"confidence": 0.5}', "replan: Field required"),
        ("[1]", "the answer: Input should be an object"),
        ("I would\n\n  rather not.", "there is no JSON in the answer"),
        (verdict()[:-1], "there is no JSON in the answer"),
    ],
)
async def test_strictness(said, problem):
    """Nothing is taken for what it is not: the model is told once what was wrong, and then it is an error."""
    model = always(said)
    with pytest.raises(LLMResponseInvalid) as caught:
        await model.complete_json("well?", Verdict)
    first, second = model.prompts
    assert first == "well?"
    assert second.startswith(f"well?\n\nYou answered:\n<answer>\n{said}\n</answer>\n")
    assert problem in second
    assert problem in str(caught.value)
    assert caught.value.excerpt == " ".join(said.split())


async def test_the_value_that_fits():
    """Of several objects in an answer the one that has the shape is taken, be it in the second answer."""
    text = (
        f"From {{}} and {{'x'}} I conclude {verdict(confidence=0.75)}, not {json.dumps({'n': 1})}."
    )
    model = ScriptedLLM(["Let me think.", text])
    assert (await model.complete_json("well?", Verdict)).confidence == 0.75
    assert len(model.prompts) == 2


async def test_cut_answers():
    """A model whose answer was cut at its limit is told so, because repeating it would not help."""
    model = always(Completion(verdict()[:-5], "scripted", "m", 5, 7, Usage(1, 12), "length"))
    with pytest.raises(LLMResponseInvalid, match="cut off after 7 tokens, so it must be shorter"):
        await model.complete_json("well?", Verdict)
    assert "must be shorter" in model.prompts[1]


async def test_one_deadline_for_both_answers(clock):
    """Asking a second time for a shape has no more time than what the first left."""
    with pytest.raises(LLMTimeout):
        await always(returns("no", after=20), clock).complete_json("well?", Verdict)
    assert clock.elapsed == 30


# JSON in what language models say


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
objects = st.dictionaries(st.text(), values, max_size=5)
words = st.text(alphabet=st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    [
        "Sure! ",
        "{",
        "}",
        "]",
        "[",
        '"',
        "`",
        "```",
        "{x}",
        "{ }",
        "I'd say {maybe}: ",
        'he said "no" ',
        "\\",
        ": , ",
    ]
)
prose = (
    st.lists(words, max_size=6)
    .map("".join)
    .filter(lambda text: not re.search(r'\{\s*"|</?(think|reason)', text))
)
"""Anything that does not itself begin an object, or thinking."""


@given(values)
def test_json_alone(value):
    """A text that is JSON means exactly that, and nothing inside of it."""
    assert list(extract_json(json.dumps(value))) == [value]
    assert list(extract_json(f"\n {json.dumps(value, indent=2, ensure_ascii=False)}\n")) == [value]


@given(prose, objects, prose)
def test_object_in_prose(before, value, after):
    """An object is found in any prose that does not itself begin another one."""
    text = f"{before}{json.dumps(value)}{after}"
    assume(not text.strip().startswith(('"', "[")))  # which may be JSON as a whole
    assert value in list(extract_json(text))


@given(prose, objects, prose, st.sampled_from(["json", "JSON", "", "jsonc"]))
def test_fenced_object(before, value, after, language):
    """An object in a fenced block is found, whatever is written around it."""
    text = f"{before}\n```{language}\n{json.dumps(value, indent=1)}\n```\n{after}"
    assert value in list(extract_json(text))


@pytest.mark.parametrize("language", ["", "json", "json ", " json\n", "\n", "x-y+z\n"])
def test_fenced_object_is_whole(language):
    """Nothing is taken out of the strings of an object that begins beside its fence."""
    value = {"two words": "and more of them", "b": 1}
    assert list(extract_json(f"Here: ```{language}{json.dumps(value)}``` That is it.")) == [value]


@given(
    prose,
    objects,
    objects,
    st.sampled_from(["think", "THINK", "thinking", "reasoning"]),
    st.booleans(),
)
def test_thoughts_come_last(text, thought, said, tag, opened):
    """Answers precede thoughts, also if the tag that begins the thinking is missing."""
    begin = f"<{tag}>" if opened else ""
    found = list(
        extract_json(f"{begin}{text} {json.dumps(thought)}</{tag}> So: {json.dumps(said)}.")
    )
    assert said in found
    if text.count("{") == 0:
        assert found[0] == said
        assert thought in found


@given(objects, objects, prose.filter(lambda text: "{" not in text))
def test_several_objects(first, second, between):
    """Of several objects all are found, each by itself, and the last one is the likeliest."""
    found = list(extract_json(f"Either {json.dumps(first)}{between} or {json.dumps(second)}"))
    assert found == [second, first]


@given(objects.filter(bool), st.data())
def test_what_is_cut_off_says_nothing(value, data):
    """Of an object that is cut off nothing is taken: neither completed, nor an object inside of it by itself."""
    text = json.dumps({"decision": value, "reason": "it has to be {so}"})
    cut = text[: data.draw(st.integers(len('{"decision":'), len(text) - 1))]
    assert list(extract_json(cut)) == []
    assert list(extract_json(f"I decided: {cut}")) == []
    assert list(extract_json(f"```json\n{cut}")) == []


def test_a_wrong_object_hides_what_it_holds():
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
def test_refused(text):
    """Text that is not JSON by the standard, or contradicts itself, yields nothing."""
    assert list(extract_json(text)) == []
    assert list(extract_json(f"Well: {text}")) == []


def test_order():
    """Fenced blocks come before objects in prose, and the last of each first; strings keep their line breaks."""
    text = 'See {"n": 1}.\n```json\n{"n": 2}\n```\nor\n```\n[{"n": 3}]\n```\nnot {"n": "4\n\t5"}.'
    assert list(extract_json(text)) == [[{"n": 3}], {"n": 2}, {"n": "4\n\t5"}, {"n": 1}]


def test_fences_and_tags_in_strings():
    """Fences, tags and braces in a string are text; an object that holds them comes whole."""
    for held in ("```json\n{}\n```", "use </think> and <think> here", "} ] {", 'say "{}"'):
        value = {"text": held, "n": 1}
        assert value in list(extract_json(f"Here it is: {json.dumps(value)}."))
        assert {} not in list(extract_json(f"Here it is: {json.dumps(value)}."))


def test_nesting_is_bounded():
    """A hundred levels are read; bombs are refused, and what follows them is found."""
    assert len(list(extract_json('{"a":' * 90 + "1" + "}" * 90))) == 1
    assert list(extract_json('{"a":' * 150 + "1" + "}" * 150)) == []
    bomb = '{"a":' * 50_000 + "1" + "}" * 50_000
    assert list(extract_json(bomb)) == []
    assert list(extract_json(f'{bomb} {{"b": 2}}')) == [{"b": 2}]
    assert list(extract_json("[" * 100_000)) == []
