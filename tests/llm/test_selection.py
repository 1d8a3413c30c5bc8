"""Selection of language models: by name, by key, in order, with circuit breakers and fallbacks."""

from typing import Any

import anyio
import httpx
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from replanning import Environment, Settings
from replanning.errors import (
    BudgetExceeded,
    LLMError,
    LLMRefusal,
    LLMRequestRejected,
    LLMResponseInvalid,
    LLMTimeout,
    LLMUnavailable,
    NoLLMProvider,
    PluginError,
    SettingsError,
)
from replanning.llm import FallbackLLM, LLMCall, LLMOptions, LLMProvider, create_llm_provider
from replanning.llm.provider import CircuitBreaker, GuardedLLM, Permit
from replanning.testing import (
    LLMReply,
    ScriptedLLM,
    VirtualClock,
    hangs,
    raises,
    returns,
    virtual_environment,
)
from tests.support.llm import somebodys_plugins

__all__ = ["somebodys_plugins"]

BUSY = LLMUnavailable("it is busy", provider="one", status=503)
BAD_KEY = LLMRequestRejected("the key is refused", provider="one", status=401)
KEYS = {"GITHUB_COPILOT_TOKEN": "ghu_x", "ANTHROPIC_API_KEY": "sk-ant-x", "OPENAI_API_KEY": "sk-x"}


class Notes:
    """A meter that keeps what is noted, and refuses providers for which there is no money."""

    def __init__(self, *too_dear: str) -> None:
        self.said: list[str] = []
        self.too_dear = too_dear

    def call(self, call: LLMCall):
        """Refuse, or count nothing."""
        if call.provider in self.too_dear:
            raise BudgetExceeded("it would exceed the budget")
        return LLMOptions().meter.call(call)

    def note(self, text: str) -> None:
        """Keep it."""
        self.said.append(text)


def scripted(
    clock: VirtualClock, *script: LLMReply, name: str = "one", **others: Any
) -> ScriptedLLM:
    """A model on a clock."""
    return ScriptedLLM([*script], name=name, environment=Environment(clock=clock), **others)


def always(clock: VirtualClock, reply: LLMReply, name: str = "one") -> ScriptedLLM:
    """A model that always says the same."""
    return ScriptedLLM(lambda prompt: reply, name=name, environment=Environment(clock=clock))


async def outcome(llm: LLMProvider, options: LLMOptions | None = None) -> str:
    """The answer, or the kind of the error."""
    try:
        return await llm.complete("?", options)
    except LLMError as error:
        return type(error).__name__


async def at_once(clock: VirtualClock, llm: LLMProvider, count: int) -> list[tuple[float, str]]:
    """Ask several times at once; when each call ended, and how."""
    ends: list[tuple[float, str]] = []

    async def ask() -> None:
        said = await outcome(llm)
        ends.append((clock.elapsed, said))

    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(ask)
    return ends


# One provider


async def test_left_alone_while_it_fails(clock):
    """After three failures in a row a model is not asked for half a minute; then one call finds out whether it works."""
    model = scripted(clock, BUSY, BUSY, BUSY, returns("better", after=10), "fine")
    guarded = GuardedLLM(model)
    assert [await outcome(guarded) for _ in range(5)] == ["LLMUnavailable"] * 5
    assert len(model.requests) == 3
    assert guarded.unavailable_reason() == "it failed repeatedly; the next call is possible in 30 s"
    await clock.sleep(30)
    assert await at_once(clock, guarded, 3) == [
        (30, "LLMUnavailable"),
        (30, "LLMUnavailable"),
        (40, "better"),
    ]
    assert [await outcome(guarded), guarded.unavailable_reason(), len(model.requests)] == [
        "fine",
        "",
        5,
    ]


async def test_bad_key_is_not_tried_again(clock):
    """A refused key shuts a model off at once, and for five minutes."""
    guarded = GuardedLLM(scripted(clock, BAD_KEY))
    assert [await outcome(guarded), await outcome(guarded)] == [
        "LLMRequestRejected",
        "LLMUnavailable",
    ]
    assert "possible in 5 min" in guarded.unavailable_reason()


@pytest.mark.parametrize(
    "reply",
    [
        LLMRefusal("declined"),
        LLMResponseInvalid("no JSON"),
        LLMRequestRejected("the prompt is too long", status=400),
        BudgetExceeded("no money"),
    ],
)
async def test_what_says_nothing_about_the_service(reply, clock):
    """Refusals, unusable answers, requests at fault and empty budgets are no reason to leave a model alone."""
    guarded = GuardedLLM(always(clock, reply))
    for _ in range(10):
        with pytest.raises(type(reply)):
            await guarded.complete("?")
    assert guarded.unavailable_reason() == ""


@pytest.mark.parametrize(("patience", "alone"), [(5, True), (4, False)])
async def test_callers_that_give_up(patience, alone, clock):
    """A model that does not answer in time fails, also if its caller gives up then; to give up before counts neither way."""
    guarded = GuardedLLM(always(clock, hangs()), max_concurrency=1)
    for _ in range(3):
        async with anyio.create_task_group() as group:
            group.start_soon(outcome, guarded, LLMOptions(deadline=clock.now() + 5))
            await clock.sleep(patience)
            group.cancel_scope.cancel()
    assert bool(guarded.unavailable_reason()) is alone


async def test_waiting_counts_against_the_deadline(clock):
    """A call that gets no place before its deadline, or has none left, is not made, says so, and is no failure."""
    model = always(clock, returns("yes", after=20))
    guarded = GuardedLLM(model, max_concurrency=1)
    async with anyio.create_task_group() as group:
        group.start_soon(guarded.complete, "?")
        while not model.requests:
            await checkpoint()
        for wait in (10, 0, 0, 0):
            with pytest.raises(LLMTimeout, match="it waited for 1 other call; nothing was sent"):
                await guarded.complete("?", LLMOptions(deadline=clock.now() + wait))
        assert (clock.elapsed, len(model.requests)) == (10, 1)
    assert await guarded.complete("?") == "yes"


# Several


async def test_falls_back_in_order(clock):
    """The next model is asked when one fails for whatever reason, and the record says why."""
    notes = Notes("dear")
    members = [
        scripted(clock, BUSY),
        scripted(clock, LLMRefusal("the model declined", provider="two"), name="two"),
        scripted(clock, LLMResponseInvalid("no JSON", provider="liar"), name="liar"),
        scripted(clock, name="dear"),
        scripted(clock, name="keyless", unavailable_reason="OPENAI_API_KEY is not set"),
        scripted(clock, "yes", name="last", model="own"),
        scripted(clock, "never", name="after"),
    ]
    assert (
        await FallbackLLM(members).complete("?", LLMOptions(meter=notes, model="wanted")) == "yes"
    )
    assert notes.said == [
        "one: it is busy (HTTP 503); last was asked instead",
        "two: the model declined; last was asked instead",
        "liar: no JSON; last was asked instead",
        "dear: it would exceed the budget; last was asked instead",
        "keyless: OPENAI_API_KEY is not set; last was asked instead",
    ]
    # The model that is named in the options is that of the first; the others are asked for their own.
    models = [[asked.options.model for asked in member.requests] for member in members]
    assert models == [["wanted"], ["scripted-1"], ["scripted-1"], [], [], ["own"], []]


async def test_all_keep_to_one_deadline(clock):
    """However many hang, the whole takes no longer than one call may, and everybody gets a share of it."""
    members = [always(clock, hangs(), name=name) for name in ("one", "two", "three")]
    with pytest.raises(LLMUnavailable, match=r"one: no answer.*two: no answer.*three: no answer"):
        await FallbackLLM(members).complete("?")
    assert clock.elapsed == 30
    deadlines = [member.requests[0].options.deadline for member in members]
    assert deadlines == [clock.now() - 20, clock.now() - 10, clock.now()]


async def test_time_that_is_saved_is_there_for_others(clock):
    """One that fails at once, or is left alone, leaves its time to the others."""
    late = always(clock, returns("yes", after=29), name="late")
    fallback = FallbackLLM([GuardedLLM(scripted(clock, BAD_KEY)), late])
    assert [await fallback.complete("?"), await fallback.complete("?")] == ["yes", "yes"]


STEPS = {
    "answers": returns("yes"),
    "hangs": hangs(),
    "fails": raises(BUSY),
    "is slow": returns("yes", after=40),
}


@given(st.lists(st.sampled_from([*STEPS]), min_size=1, max_size=5), st.floats(1, 60))
def test_deadline_always_holds(kinds, timeout):
    """Whatever the models do, an answer or an error comes in time, and an answer wherever one answers at once."""

    async def play() -> None:
        async with VirtualClock() as clock:
            members = [
                GuardedLLM(always(clock, STEPS[kind], name=str(n))) for n, kind in enumerate(kinds)
            ]
            found = await outcome(FallbackLLM(members), LLMOptions(deadline=clock.now() + timeout))
            assert clock.elapsed <= min(timeout, 30) + 1e-6
            assert found == "yes" or "answers" not in kinds

    anyio.run(play)


async def test_errors_of_fallbacks(clock):
    """One that fails alone raises its own error; where no call fits the budget, that is what is said."""
    with pytest.raises(LLMRequestRejected):
        await FallbackLLM([scripted(clock, BAD_KEY)]).complete("?")
    pair = [scripted(clock, name="one"), scripted(clock, name="two")]
    with pytest.raises(BudgetExceeded):
        await FallbackLLM(pair).complete("?", LLMOptions(meter=Notes("one", "two")))


async def test_fallback_is_a_provider(clock):
    """A list of models is available when one of them is, embeds with the first that can, and is closed as a whole."""
    gone = scripted(clock, name="gone", unavailable_reason="it is gone")
    here = scripted(clock, "yes", name="here")
    both = FallbackLLM([gone, here])
    assert (both.name, both.unavailable_reason(), await both.is_available()) == (
        "gone,here",
        "",
        True,
    )
    assert FallbackLLM([gone, gone]).unavailable_reason() == "gone: it is gone; gone: it is gone"
    assert not await FallbackLLM([gone]).is_available()
    assert len(await both.embed("text")) == 64
    assert (await both.request("?", LLMOptions())).text == "yes"
    assert repr(both) == f"<FallbackLLM {gone!r}, {here!r}>"
    await both.aclose()
    assert (gone.closed, here.closed) == (True, True)


# By name


def settings(provider: tuple[str, ...] = ("auto",), **llm: object) -> Settings:
    """Settings about language models."""
    return Settings.model_validate({"provider": provider, "llm": llm, "timeout": {"replan": 12}})


def client(llm: LLMProvider) -> Any:
    """The client of a provider that stands alone."""
    assert isinstance(llm, GuardedLLM)
    return llm.client


@pytest.mark.usefixtures("plugins")
def test_by_name():
    """A plugin of anybody's is found by its name, which may say the model, and gets of the settings what it takes."""
    wanted = settings(
        model="plain-2",
        temperature=0.9,
        max_tokens=7,
        prices={"plain-2": {"input": 1, "output": 2}},
    )
    plain = client(create_llm_provider("plain", settings=wanted, environ={}))
    assert (plain.model, plain.temperature, plain.max_tokens, plain.timeout) == (
        "plain-2",
        0.9,
        7,
        12,
    )
    assert (plain.prices.cost("plain-2", 10**6, 0), plain.prices.cost("gpt-4o", 10**5, 0)) == (
        1,
        0.25,
    )
    assert create_llm_provider("plain:tiny:1b", settings=wanted, environ={}).model == "tiny:1b"
    assert create_llm_provider("plain", environ={}).model == "plain-1"


@pytest.mark.usefixtures("plugins")
def test_setting_goes_before_what_is_found():
    """`auto` takes what the setting `provider` names; providers of another kind among them do not matter."""
    assert (
        create_llm_provider(settings=settings(provider=("repair", "plain")), environ=KEYS).name
        == "plain"
    )


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize("names", ["plain,keyed", ["plain", "keyed", "plain"], "plain, keyed ,"])
def test_ordered_list(names):
    """Several names are asked in their order; model and address of the settings are those of the first alone."""
    given = settings(model="plain-9", base_url="http://localhost:1")
    llm = create_llm_provider(names, settings=given, environ={"KEYED_KEY": "k"})
    assert isinstance(llm, FallbackLLM)
    assert [(one.name, one.model) for one in llm.members] == [("plain", "plain-9"), ("keyed", "")]
    assert client(llm.members[1]).base_url == "https://keyed.example"


@pytest.mark.usefixtures("plugins")
def test_fallback_of_the_settings():
    """`llm.fallback` stands behind whoever is chosen, and one that lacks its key is passed over."""
    llm = create_llm_provider("keyed", settings=settings(fallback=["plain", "keyed"]), environ={})
    assert (llm.name, llm.unavailable_reason()) == ("keyed,plain", "")


@pytest.mark.usefixtures("plugins")
async def test_places_of_the_settings(clock):
    """`llm.max_concurrency` is how many calls a provider gets at once."""
    one = settings(max_concurrency=1)
    llm = create_llm_provider(
        "plain", settings=one, environ={}, environment=Environment(clock=clock)
    )
    assert await at_once(clock, llm, 2) == [(1, "yes"), (2, "yes")]


@pytest.mark.usefixtures("plugins")
def test_address():
    """`llm.base_url` is where the named provider is asked; without a name it is refused, lest a key goes astray."""
    given = settings(base_url="http://localhost:1")
    keyed = client(create_llm_provider("keyed", settings=given, environ={"KEYED_KEY": "k"}))
    assert keyed.base_url == given.llm.base_url
    with pytest.raises(SettingsError, match=r"llm\.base_url: .*name the provider"):
        create_llm_provider(settings=given, environ=KEYS)


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "opnai",
            "there is no plugin 'opnai' among the providers; did you mean 'openai'\\? installed are: .*plain",
        ),
        (
            "repair",
            "the plugin 'repair' is not a language model; installed language models: .*keyed.*plain",
        ),
        ("broken", r"the language model 'broken' cannot be created: RuntimeError\('no luck'\)"),
        ("gone", r"the plugin 'gone' \(somebodys:Gone\) cannot be loaded: "),
        (
            "loner",
            "the plugin 'loner' is not a language model: Loner is not an LLMProvider|'loner' cannot be created",
        ),
        ("keyed", r"^keyed cannot be asked: KEYED_KEY is not set$"),
    ],
)
def test_wrong_names(name, message):
    """An unknown name, a provider of another kind, one that cannot be made and one that lacks its key are told apart."""
    with pytest.raises(NoLLMProvider if name == "keyed" else PluginError, match=message):
        create_llm_provider(name, environ={})


# By what is there


@pytest.mark.parametrize(
    ("gone", "found"), [(0, "github-copilot"), (1, "anthropic"), (2, "openai"), (3, "ollama")]
)
def test_auto_takes_the_first_key(gone, found):
    """`auto` looks for the key of GitHub Copilot, of Anthropic, of OpenAI, and takes Ollama last if it is enabled."""
    llm = create_llm_provider(environ=dict([*KEYS.items()][gone:]), settings=settings(ollama=True))
    names = ["github-copilot", "anthropic", "openai", "ollama"]
    assert llm.name.split(",") == names[names.index(found) :]
    assert not any(key in repr(llm) for key in KEYS.values())


async def test_auto_goes_on_where_the_first_refuses(clock):
    """Where the first model that `auto` finds refuses the key, the next one is asked; until then the first has all the time."""
    asked: list[tuple[str, float]] = []

    async def service(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.host, clock.elapsed))
        if request.url.host == "api.githubcopilot.com":
            await clock.sleep(20)
            return httpx.Response(401, json={"message": "no"})
        return httpx.Response(
            200, json={"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}
        )

    environ = {name: KEYS[name] for name in ("GITHUB_COPILOT_TOKEN", "OPENAI_API_KEY")}
    environment = virtual_environment(clock=clock)
    llm = create_llm_provider(
        environ=environ, environment=environment, transport=httpx.MockTransport(service)
    )
    assert [await llm.complete("?") for _ in range(2)] == ["yes", "yes"]
    await llm.aclose()
    assert asked == [("api.githubcopilot.com", 0), ("api.openai.com", 20), ("api.openai.com", 20)]


def test_auto_without_any_key():
    """Without a key `auto` says everything that it looked for."""
    with pytest.raises(NoLLMProvider) as caught:
        create_llm_provider(environ={})
    assert str(caught.value) == (
        "no language model can be used: github-copilot: GITHUB_COPILOT_TOKEN is not set;"
        " anthropic: ANTHROPIC_API_KEY is not set; openai: OPENAI_API_KEY is not set;"
        " to use Ollama, turn on the setting llm.ollama"
    )


def test_what_is_found_gets_the_model_of_the_settings():
    """The model of the settings is that of whoever is found; who stands in has its own."""
    given = settings(model="claude-x", fallback=["openai"], max_tokens=77)
    llm = create_llm_provider(environ=KEYS | {"GITHUB_COPILOT_TOKEN": ""}, settings=given)
    assert isinstance(llm, FallbackLLM)
    members = [(one.name, one.model, one.max_tokens) for one in llm.members]
    assert members == [("anthropic", "claude-x", 77), ("openai", "gpt-4.1-mini", 77)]


# The circuit breaker


OPENED = [("fail", 0), ("fail", 0), ("fail", 0)]


def played(moves: list[tuple[str, float]]) -> CircuitBreaker:
    """A breaker after calls that ended so; `ask` and `late` are for calls that end when it has opened since."""
    breaker = CircuitBreaker()
    open_calls: list[Permit] = []
    for move, now in moves:
        permit = open_calls.pop(0) if move.startswith("late") else breaker.admit(now)
        assert permit is not None, (move, now)
        match move.removeprefix("late "):
            case "ask":
                open_calls.append(permit)
            case "succeed":
                breaker.record_success()
            case "fail":
                breaker.record_failure(permit, now)
            case "give up":
                breaker.release(permit)
    return breaker


@pytest.mark.parametrize(
    ("moves", "now", "state", "left"),
    [
        ([], 0, "closed", 0),
        (OPENED, 20, "open", 10),
        (OPENED, 30, "half-open", 0),
        ([*OPENED[:2], ("succeed", 0), *OPENED[:2]], 0, "closed", 0),
        ([*OPENED, ("succeed", 30)], 30, "closed", 0),
        ([*OPENED, ("succeed", 30), *[("fail", 40)] * 3], 40, "open", 30),
        ([*OPENED, ("fail", 30)], 30, "open", 60),
        (
            [*OPENED, ("fail", 30), ("fail", 90), ("fail", 210), ("fail", 450), ("fail", 750)],
            750,
            "open",
            300,
        ),
        ([*OPENED, ("give up", 30)], 30, "half-open", 0),
        ([*OPENED[:2], ("give up", 0), ("fail", 0)], 0, "open", 30),
        ([("ask", 0), *OPENED, ("late fail", 4)], 4, "open", 26),
        ([("ask", 0), *OPENED, ("late succeed", 1)], 1, "closed", 0),
    ],
    ids=[
        *(
            "new",
            "three failures",
            "after its rest",
            "a success between",
            "trial succeeds",
            "all is as at first",
        ),
        *(
            "trial fails",
            "five minutes at most",
            "trial tells nothing",
            "call tells nothing",
            "late failure",
        ),
        "late success",
    ],
)
def test_state(moves, now, state, left):
    """Three failures in a row open it; each trial that fails doubles its rest; late failures do not prolong that."""
    breaker = played(moves)
    assert (breaker.state(now), breaker.retry_after(now)) == (state, left)
    assert breaker.admit(now) == {"closed": "call", "open": None, "half-open": "probe"}[state]


Moves = st.lists(
    st.tuples(st.sampled_from(["ask", "succeed", "fail", "give up"]), st.integers(0, 50)),
    max_size=60,
)


@given(Moves)
def test_it_never_stays_shut(moves):
    """Whatever happens, there is at most one trial at a time, and in the end a call is let through again."""
    breaker, now, out = CircuitBreaker(), 0.0, []
    for move, seconds in moves:
        now += seconds
        if move == "ask" and (permit := breaker.admit(now)) is not None:
            out.append(permit)
        elif out and move == "succeed":
            out.pop(0)
            breaker.record_success()
        elif out and move == "fail":
            breaker.record_failure(out.pop(0), now)
        elif out and move == "give up":
            breaker.release(out.pop(0))
        assert breaker.retry_after(now) <= 300
    for permit in out:
        breaker.release(permit)
    assert breaker.admit(now + 300) is not None
