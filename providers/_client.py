"""What clients of language models share: keys, connections, retries within one deadline, and errors that say it all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import ClassVar, Final, NamedTuple, TypeVar

import httpx
from anyio.lowlevel import current_token
from pydantic import BaseModel, ValidationError

from replanning import Environment
from replanning.errors import LLMError, LLMRejected, LLMReplyInvalid, LLMUnavailable
from replanning.http import TRIES, FailedTry, Tries, connections, content, wanted_wait, wrong_address
from replanning.interfaces import JsonObject, JsonValue
from replanning.llm import PRICES, LLMOptions, LLMProvider, PriceTable
from replanning.providers._http import complaint, reason
from replanning.providers._streams import events_of

Shape = TypeVar("Shape", bound=BaseModel)

_MAY_PASS: Final = (408, 409, 429)
_ADAPTABLE: Final = (400, 422)
_KEY: Final = (401, 403)
_MASK: Final = "[redacted]"


class Reply(NamedTuple):
    """What a service answered, and by which id it finds the request."""

    body: JsonObject
    request_id: str


class ServiceProvider(LLMProvider):
    """A language model that is asked over HTTP.

    A request is made again when its failure may pass: no connection, 408, 409, 429 and 5xx; after the time that the
    service asks for or one that doubles, spread by chance, and never where that would pass the deadline. Connections
    are kept and used again until `aclose`, or until the event loop is another one. Redirects are not followed, so
    that the key stays with whom it was meant for.

    Args:
        api_key: by default the value of the service's variable in the environment.
        base_url: where the service is; likewise.
        model: which model; by default the service's `default_model`.
        temperature: from 0, as deterministic as the service can be, upwards.
        max_tokens: most tokens of an answer.
        timeout: seconds that a call may take in total, retries included.
        prices: what models cost.
        environment: where time and chance come from.
        transport: what connects, for tests; by default the network.
        environ: variables of the environment; by default those of this process.

    Attributes:
        key_variable: names the key.
        url_variable: names where the service is.
        default_url: where it is otherwise.
        base_url: where it is asked.
    """

    key_variable: ClassVar[str]
    url_variable: ClassVar[str]
    default_url: ClassVar[str]

    def __init__(
        self,
        api_key: str | None = None,
        *,
        base_url: str | None = None,
        model: str | None = None,
        temperature: float = 0.3,
        max_tokens: int = 2000,
        timeout: float = 30.0,
        prices: PriceTable = PRICES,
        environment: Environment | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            model=model,
            temperature=temperature,
            max_tokens=max_tokens,
            timeout=timeout,
            prices=prices,
            environment=environment,
        )
        variables = os.environ if environ is None else environ
        self._key = (api_key or variables.get(self.key_variable, "")).strip()
        self.base_url = self.address(base_url or variables.get(self.url_variable) or self.default_url)
        self._transport = transport
        self._pool: tuple[object, httpx.AsyncClient] | None = None
        self._learned: dict[tuple[str, str], frozenset[str]] = {}

    @classmethod
    def address(cls, given: str) -> str:
        """Where the service is, as paths are added to it."""
        return given.strip().rstrip("/")

    def needs_key(self) -> bool:
        """Whether it cannot be asked without a key."""
        return True

    def headers(self) -> Mapping[str, str]:
        """What is sent along, the key among it."""
        return {"authorization": f"Bearer {self._key}"} if self._key else {}

    def unavailable(self) -> str:
        """Which variable is missing or wrong; empty where all is there."""
        if problem := wrong_address(self.base_url):
            return f"its address {problem}; set {self.url_variable} or base_url to something like {self.default_url}"
        if not self._key and self.needs_key():
            return f"{self.key_variable} is not set"
        if not (self._key.isascii() and self._key.isprintable()) or " " in self._key:
            return (
                f"the key in {self.key_variable} has characters that no key has; was it copied whole, and nothing else?"
            )
        return ""

    async def aclose(self) -> None:
        """Close the connections; they are made anew when it is asked again."""
        pool, self._pool = self._pool, None
        if pool is not None and pool[0] is current_token().native_token:
            await pool[1].aclose()

    async def adapted(
        self, path: str, body: Callable[[frozenset[str]], JsonObject], may_lack: Mapping[str, str], options: LLMOptions
    ) -> Reply:
        """Ask with what the model takes: what it objects to is left out, and not tried again for that shape.

        Args:
            path: what is asked for.
            body: makes the request, without some of its features.
            may_lack: features that models may lack, by the word by which an objection is known; an empty one stands
                for every objection.
            options: of the call.

        Raises:
            LLMError: as for `ask`.
        """
        asked = options.model or self.model, "" if options.schema is None else options.schema.__name__
        lacks = self._learned.get(asked, frozenset())
        while True:
            try:
                reply = await self.ask(path, body(lacks), options)
            except LLMRejected as error:
                known = error.status in _ADAPTABLE
                lacking = [
                    name for name, word in may_lack.items() if known and name not in lacks and word in error.excerpt
                ]
                if not lacking:
                    raise
                lacks |= {lacking[0]}
            else:
                self._learned[asked] = lacks
                return reply

    async def ask(self, path: str, body: JsonObject, options: LLMOptions) -> Reply:
        """Ask, and again where that may help.

        Raises:
            LLMRejected: it cannot be asked like this, or the service does not take it.
            LLMUnavailable: the service cannot be reached or is overloaded, and stays so.
            LLMReplyInvalid: what it answers is not what such services answer.
        """
        if problem := self.unavailable():
            raise LLMRejected(problem, provider=self.name)
        assert options.deadline is not None
        tries = Tries(self.environment, options.deadline, self._given_up, most=options.tries or TRIES)
        return await tries.made_by(partial(self._once, path, body))

    def _given_up(self, failed: FailedTry, why: str) -> LLMUnavailable:
        return LLMUnavailable(
            f"{failed.what}; {why}",
            provider=self.name,
            status=failed.status,
            request_id=failed.request_id,
            excerpt=failed.excerpt,
        )

    def joined(self, events: Iterator[JsonValue]) -> JsonObject:
        """An answer that comes in pieces although nobody asked for that, as one.

        Raises:
            ValueError: it is none.
        """
        raise ValueError("it should come whole")

    async def answers(self, path: str, patience: float) -> bool:
        """Whether something is served there at all, within so many seconds."""
        try:
            return await self._in_time(self._served, path, LLMOptions(deadline=self.environment.clock.now() + patience))
        except LLMError:
            return False

    async def _served(self, path: str, options: LLMOptions) -> bool:
        client = await self._connections()
        async with client.stream("GET", self.base_url + path, headers=dict(self.headers())) as response:
            return response.is_success

    def read(self, reply: Reply, shape: type[Shape]) -> Shape:
        """A reply as what it should be.

        Raises:
            LLMReplyInvalid: it is something else; says where.
        """
        try:
            return shape.model_validate(reply.body)
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(map(str, wrong["loc"]))
            problem = f"its answer is not of the usual form: {place}: {wrong['msg']}"
            excerpt = self._excerpt(json.dumps(reply.body))
            raise LLMReplyInvalid(problem, provider=self.name, request_id=reply.request_id, excerpt=excerpt) from None

    async def _once(self, path: str, body: JsonObject) -> Reply:
        url, headers = self.base_url + path, dict(self.headers())
        client = await self._connections()
        try:
            async with client.stream("POST", url, json=body, headers=headers) as response:
                data, problem = await content(response)
        except (httpx.TransportError, UnicodeError) as error:  # the latter where it sends us to what is no host
            excerpt = self._excerpt(f"{type(error).__name__}: {error}".rstrip(": "))
            raise FailedTry(f"{httpx.URL(self.base_url).host} cannot be reached", excerpt=excerpt) from error
        request_id = self._excerpt(response.headers.get("x-request-id") or response.headers.get("request-id") or "")
        if not response.is_success:
            raise self._refusal(response, request_id, self._excerpt(complaint(data) or problem))
        return self._reply(data, problem, request_id, streamed=_is_stream(response))

    def _reply(self, data: bytes, problem: str, request_id: str, *, streamed: bool) -> Reply:
        body: JsonValue = None
        try:
            body = self.joined(events_of(data)) if streamed else json.loads(data)
        except (ValueError, RecursionError):
            problem = problem or "its answer is no JSON"
        if not isinstance(body, dict):
            excerpt = self._excerpt(data.decode(errors="replace"))
            problem = problem or "its answer is no JSON object"
            raise LLMReplyInvalid(problem, provider=self.name, request_id=request_id, excerpt=excerpt)
        return Reply(body, request_id)

    def _refusal(self, response: httpx.Response, request_id: str, excerpt: str) -> Exception:
        status = response.status_code
        if status < 500 and status not in _MAY_PASS:
            what = reason(status) + (f"; look at {self.key_variable}" if status in _KEY else "")
            return LLMRejected(what, provider=self.name, status=status, request_id=request_id, excerpt=excerpt)
        return FailedTry(
            reason(status),
            status=status,
            request_id=request_id,
            excerpt=excerpt,
            after=wanted_wait(response.headers, self.environment.clock.now()),
            last=response.headers.get("x-should-retry") == "false",
        )

    async def _connections(self) -> httpx.AsyncClient:
        """The connections of this event loop; those of another one cannot be used here, nor closed."""
        loop = current_token().native_token
        if self._pool is None or self._pool[0] is not loop:
            client = await connections(self._transport)
            if self._pool is None or self._pool[0] is not loop:  # nobody else made them meanwhile
                self._pool = loop, client
        return self._pool[1]

    def _excerpt(self, text: str) -> str:
        return super()._excerpt(text.replace(self._key, _MASK) if self._key else text)


def _is_stream(response: httpx.Response) -> bool:
    kind: str = response.headers.get("content-type", "")
    return kind.startswith("text/event-stream")
