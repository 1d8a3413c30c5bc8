from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import contextmanager
from datetime import date
from enum import StrEnum
from typing import Annotated

import anyio
import pytest
from pydantic import BaseModel, Field

from replanning import Environment
from replanning.errors import BudgetExceeded, LLMError, LLMRefusal, LLMResponseInvalid, LLMTimeout, LLMUnavailable
from replanning.llm import Completion, LLMCall, LLMOptions, LLMProvider, Price, PriceTable
from replanning.testing import VirtualClock

KEY = "sk-4f9c2a7be01d4c5e8b3a6f"


class Scribe(LLMProvider):
    """Answers what a function says, and remembers what it was asked."""

    name = "scribe"
    default_model = "quill-1"
    embedding_model = "quill-vectors"

    def __init__(self, answer: Callable[[str], str | BaseException], **kwargs) -> None:
        super().__init__(**kwargs)
        self.answer = answer
        self.asked: list[tuple[str, LLMOptions]] = []

    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        self.asked.append((prompt, options))
        said = self.answer(prompt)
        if isinstance(said, BaseException):
            raise said
        return self.completion(prompt, said, options)

    async def request_embedding(self, text: str, options: LLMOptions) -> tuple[list[float], Completion]:
        self.asked.append((text, options))
        return [1.0, 0.5], self.completion(text, "", options, input_tokens=3)


class Sleeper(LLMProvider):
    """Answers after so many seconds, and says how it ended."""

    name = "sleeper"

    def __init__(self, seconds: float, **kwargs) -> None:
        super().__init__(**kwargs)
        self.seconds = seconds
        self.ended: list[type[BaseException]] = []

    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        try:
            await self.environment.clock.sleep(self.seconds)
        except BaseException as error:
            self.ended.append(type(error))
            raise
        return self.completion(prompt, "at last", options)


class Book:
    """A meter that writes down what it is told."""

    def __init__(self, most: int = 10**9) -> None:
        self.calls: list[LLMCall] = []
        self.answers: list[Completion] = []
        self.most = most

    @contextmanager
    def call(self, call: LLMCall):
        if call.estimate.tokens > self.most:
            raise BudgetExceeded(f"{call.estimate.tokens} tokens do not fit")
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


async def test_options_are_filled_in() -> None:
    """Options override the provider's configuration, which fills the others; the sooner deadline counts."""
    clock = VirtualClock()
    model = Scribe(lambda _: "yes", temperature=0.7, max_tokens=50, environment=Environment(clock=clock))
    assert await model.complete("well?") == "yes"
    await model.complete("well?", LLMOptions(model="quill-2", temperature=0, max_tokens=9, deadline=clock.now() + 3))
    await model.complete("well?", LLMOptions(deadline=clock.now() + 1000))
    filled = [
        (asked.model, asked.temperature, asked.max_tokens, (asked.deadline or 0) - clock.now())
        for _, asked in model.asked
    ]
    assert filled == [("quill-1", 0.7, 50, 30), ("quill-2", 0, 9, 3), ("quill-1", 0.7, 50, 30)]


async def test_secrets_do_not_leave() -> None:
    """Secrets are taken out of the prompt, of what the model is told about its role, and of what is embedded."""
    model, book = Scribe(lambda _: "yes"), Book()
    await model.complete(f"the key is {KEY}", LLMOptions(system=f"never say {KEY}", meter=book))
    await model.embed(f"the key is {KEY}", LLMOptions(meter=book))
    assert KEY not in repr(model.asked) + repr(book.calls)
    assert [asked for asked, _ in model.asked] == ["the key is [redacted]"] * 2
    assert model.asked[0][1].system == "never say [redacted]"


async def test_calls_are_accounted_for() -> None:
    """Each call is announced with an upper bound of what it uses, and its answer is told as it was counted."""
    prices = PriceTable({"quill*": Price(1, 10)})
    model, book = Scribe(lambda _: "yes", max_tokens=100, prices=prices), Book()
    await model.complete("what now?", LLMOptions(system="be brief", meter=book))
    await model.embed("what now?", LLMOptions(meter=book))
    chat, embedding = book.calls
    assert (chat.provider, chat.model, chat.system, chat.operation) == ("scribe", "quill-1", "be brief", "chat")
    assert (chat.temperature, chat.max_tokens) == (0.3, 100)
    assert (embedding.model, embedding.prompt, embedding.operation) == ("quill-vectors", "what now?", "embeddings")
    for call, answer in zip(book.calls, book.answers, strict=True):
        assert call.estimate.calls == answer.usage.calls == 1
        assert call.estimate.tokens >= answer.usage.tokens > 0
        assert call.estimate.money >= answer.usage.money > 0


async def test_a_shape_counts_as_well() -> None:
    """The schema of an answer is sent, too, and so it counts in what is reserved."""
    model, book = Scribe(lambda _: verdict()), Book()
    await model.complete("what now?", LLMOptions(meter=book))
    await model.complete_json("what now?", Verdict, LLMOptions(meter=book))
    plain, shaped = (call.estimate.tokens for call in book.calls)
    assert shaped - plain > len(json.dumps(Verdict.model_json_schema()))


async def test_a_refused_reservation() -> None:
    """A call that does not fit the budget is not made."""
    model = Scribe(lambda _: "yes")
    with pytest.raises(BudgetExceeded, match="do not fit"):
        await model.complete("what now?", LLMOptions(meter=Book(most=10)))
    assert model.asked == []


async def test_prices() -> None:
    """A call costs what the model that was asked for costs, or the one that answered where that alone is known."""
    prices = PriceTable({"quill": Price(1, 1), "feather": Price(5, 5)})
    model = Scribe(lambda _: "", prices=prices)

    def money(asked: str, answered: str) -> tuple[float, bool]:
        used = model.completion(
            "", "", LLMOptions(model=asked), model=answered, input_tokens=10**6, output_tokens=0
        ).usage
        return used.money, used.unpriced

    assert money("quill", "feather") == (1, False)
    assert money("auto", "feather") == (5, False)
    assert money("auto", "router") == (0, True)


async def test_late_answers() -> None:
    """A call ends at its deadline, and what was asked is cancelled."""
    async with VirtualClock() as clock:
        model = Sleeper(100, environment=Environment(clock=clock))
        with pytest.raises(LLMTimeout, match=r"sleeper: no answer came within 30 s \(`timeout.replan`"):
            await model.complete("well?")
        assert clock.elapsed == 30
        with pytest.raises(LLMTimeout):
            await model.complete("well?", LLMOptions(deadline=clock.now() + 5))
        assert clock.elapsed == 35
    assert model.ended == [anyio.get_cancelled_exc_class()] * 2


async def test_no_time_left() -> None:
    """Without time left nothing is reserved or sent."""
    clock, book = VirtualClock(), Book()
    model = Scribe(lambda _: "yes", environment=Environment(clock=clock))
    with pytest.raises(LLMTimeout, match="nothing was sent"):
        await model.complete("well?", LLMOptions(deadline=clock.now(), meter=book))
    assert (model.asked, book.calls) == ([], [])


async def test_in_time() -> None:
    """An answer that comes before the deadline leaves nothing behind that waits for it."""
    async with VirtualClock() as clock:
        model = Sleeper(29, environment=Environment(clock=clock))
        assert await model.complete("well?") == "at last"
        assert clock.elapsed == 29


async def test_cancelled() -> None:
    """A caller that is cancelled gets a cancellation, not a timeout."""
    async with VirtualClock() as clock:
        model = Sleeper(20, environment=Environment(clock=clock))
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(model.complete, "well?")
                await clock.sleep(1)
                scope.cancel()
        assert scope.cancelled_caught
        assert clock.elapsed == 1


@pytest.mark.parametrize("error", [LLMUnavailable("busy", provider="scribe", status=503), BudgetExceeded("too much")])
async def test_errors_of_ours(error) -> None:
    """Errors of the library come out as they are."""
    with pytest.raises(type(error)) as caught:
        await Scribe(lambda _: error).complete("well?")
    assert caught.value is error


@pytest.mark.parametrize("wrap", [lambda error: error, lambda error: ExceptionGroup("of a plugin", [error])])
async def test_errors_of_plugins(wrap) -> None:
    """Any other exception of a plugin becomes an LLMError that names it, without secrets."""
    fault = ZeroDivisionError(f"divided {KEY} by zero")
    with pytest.raises(LLMError) as caught:
        await Scribe(lambda _: wrap(fault)).complete("well?")
    assert str(caught.value) == "scribe: it failed with ZeroDivisionError: divided [redacted] by zero"
    assert caught.value.__cause__ is fault


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
async def test_interruptions(error) -> None:
    """Interruptions pass as they are."""
    try:
        await Scribe(lambda _: error).complete("well?")
    except (KeyboardInterrupt, SystemExit) as caught:
        assert caught is error  # noqa: PT017 - pytest itself would end at these
    else:
        pytest.fail("it did not pass")


async def test_refusals() -> None:
    """A model that declines is an error that says so, and the call counts."""

    class Decliner(Scribe):
        async def request(self, prompt: str, options: LLMOptions) -> Completion:
            return self.completion(prompt, f"I will not say {KEY}.", options, finish="refusal", request_id="req_1")

    book = Book()
    with pytest.raises(
        LLMRefusal, match=r"the model declined \(request req_1\): I will not say \[redacted\]"
    ) as caught:
        await Decliner(lambda _: "").complete("well?", LLMOptions(meter=book))
    assert (caught.value.provider, caught.value.request_id, len(book.answers)) == ("scribe", "req_1", 1)


async def test_no_embeddings() -> None:
    """A model without embeddings says so."""
    with pytest.raises(LLMError, match="sleeper: it offers no embeddings"):
        await Sleeper(0).embed("well?")
    assert await Scribe(lambda _: "").embed("well?") == [1.0, 0.5]


async def test_shapes() -> None:
    """An answer of a shape is read as JSON is: lists are tuples, text is an enum or a date where it says so."""
    model = Scribe(lambda _: verdict(mood="bad", steps=["a", "b"], due="2024-02-29", confidence=1))
    answer = await model.complete_json("well?", Verdict)
    assert answer == Verdict(replan=True, confidence=1, mood=Mood.BAD, steps=("a", "b"), due=date(2024, 2, 29))
    assert model.asked[0][1].schema is Verdict


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
        ("I would rather not.", "there is no JSON in the answer"),
        (verdict()[:-1], "there is no JSON in the answer"),
    ],
)
async def test_strictness(said, problem) -> None:
    """Nothing is taken for what it is not: the model is told once what was wrong, and then it is an error."""
    model = Scribe(lambda _: said)
    with pytest.raises(LLMResponseInvalid) as caught:
        await model.complete_json("well?", Verdict)
    first, second = (prompt for prompt, _ in model.asked)
    assert first == "well?"
    assert second.startswith(f"well?\n\nYou answered:\n<answer>\n{said}\n</answer>\n")
    assert problem in second
    assert problem in str(caught.value)
    assert caught.value.excerpt == said


async def test_second_answer() -> None:
    """An answer that is right the second time is taken."""
    answers = iter(["Let me think.", f"```json\n{verdict(confidence=0.25)}\n```"])
    model = Scribe(lambda _: next(answers))
    assert (await model.complete_json("well?", Verdict)).confidence == 0.25


async def test_the_value_that_fits() -> None:
    """Of several objects in an answer the one that has the shape is taken."""
    text = f"From {{}} and {{'x'}} I conclude {verdict(confidence=0.75)}, not {json.dumps({'n': 1})}."
    model = Scribe(lambda _: text)
    assert (await model.complete_json("well?", Verdict)).confidence == 0.75
    assert len(model.asked) == 1


async def test_cut_answers() -> None:
    """A model whose answer was cut at its limit is told so, because repeating it would not help."""

    class Cut(Scribe):
        async def request(self, prompt: str, options: LLMOptions) -> Completion:
            self.asked.append((prompt, options))
            return self.completion(prompt, verdict()[:-5], options, finish="length", output_tokens=7)

    model = Cut(lambda _: "")
    with pytest.raises(LLMResponseInvalid, match="cut off after 7 tokens, so it must be shorter"):
        await model.complete_json("well?", Verdict)
    assert "must be shorter" in model.asked[1][0]


async def test_one_deadline_for_both_answers() -> None:
    """Asking a second time for a shape has no more time than what the first left."""

    class Slow(Sleeper):
        async def request(self, prompt: str, options: LLMOptions) -> Completion:
            await super().request(prompt, options)
            return self.completion(prompt, "no", options)

    async with VirtualClock() as clock:
        with pytest.raises(LLMTimeout):
            await Slow(20, environment=Environment(clock=clock)).complete_json("well?", Verdict)
        assert clock.elapsed == 30


async def test_closing() -> None:
    """A provider can be used as a context that closes it."""

    class Closing(Scribe):
        closed = False

        async def aclose(self) -> None:
            self.closed = True

    async with Closing(lambda _: "yes") as model:
        assert await model.complete("well?") == "yes"
        assert not model.closed
    assert model.closed
    assert repr(model) == "<Closing scribe quill-1>"


async def test_availability() -> None:
    """A provider that says nothing about it can be asked."""
    model = Scribe(lambda _: "yes")
    assert (model.unavailable_reason(), await model.is_available()) == ("", True)
