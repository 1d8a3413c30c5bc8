"""What refusals of language models mean, in words."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, Final, NamedTuple, TypeVar

import httpx
from anyio.lowlevel import current_token
from pydantic import BaseModel, ConfigDict, ValidationError

from replanning import Environment
from replanning.errors import LLMError, LLMRequestRejected, LLMResponseInvalid, LLMUnavailable
from replanning.http import (
    MAX_ATTEMPTS,
    RequestFailed,
    RetryPolicy,
    create_client,
    read_body,
    retry_after_seconds,
    url_problem,
)
from replanning.llm import PRICES, LLMOptions, LLMProvider, PriceTable
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue

_STATUS_MESSAGES: Final[Mapping[int, str]] = {
    401: "it does not accept the key",
    402: "it wants to be paid",
    403: "it does not let this key do that",
    404: "it has no such model, or its address is wrong",
    408: "it waited too long for the request",
    409: "it is busy with something that is in the way",
    413: "the request is too large for it",
    429: "it is asked too often",
}


def status_message(status: int) -> str:
    """What a status means, in words."""
    if 300 <= status < 400:
        return "it is elsewhere now, and the key is not sent on"
    return _STATUS_MESSAGES.get(status) or ("it fails" if status >= 500 else "it does not take this request")


def error_message(body: bytes) -> str:
    """What an answer says is wrong, in whichever of the usual forms."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return body.decode(errors="replace")
    error = said.get("error", said) if isinstance(said, dict) else said
    message = (error.get("message") or error.get("detail")) if isinstance(error, dict) else error
    return str(message or said)


_DONE_MARKER: Final = "[DONE]"


class _StreamModel(BaseModel):
    model_config = ConfigDict(extra="allow")


class _FunctionDelta(_StreamModel):
    arguments: str | None = None


class _ToolCallDelta(_StreamModel):
    index: int = 0
    function: _FunctionDelta = _FunctionDelta()


class _MessageDelta(_StreamModel):
    content: str | None = None
    refusal: str | None = None
    tool_calls: Sequence[_ToolCallDelta] | None = None


class _ChoiceDelta(_StreamModel):
    index: int = 0
    delta: _MessageDelta = _MessageDelta()
    finish_reason: str | None = None


class _Chunk(_StreamModel):
    model: str | None = None
    choices: Sequence[_ChoiceDelta] = ()
    usage: JsonObject | None = None


class _BlockDelta(_StreamModel):
    text: str = ""
    partial_json: str = ""
    stop_reason: str | None = None


class _Event(_StreamModel):
    type: str
    index: int = 0
    message: JsonObject | None = None
    content_block: JsonObject | None = None
    delta: _BlockDelta = _BlockDelta()
    usage: JsonObject | None = None


def sse_events(data: bytes) -> Iterator[JsonValue]:
    """What the events of a stream say.

    Raises:
        ValueError: one of them is no JSON.
    """
    for line in data.decode(errors="replace").split("\n"):
        name, _, value = line.partition(":")
        if name == "data" and value.strip() != _DONE_MARKER:
            yield json.loads(value)


def merge_chat_chunks(events: Iterator[JsonValue]) -> JsonObject:
    """A chat completion of OpenAI from its pieces.

    Raises:
        ValueError: they are of another form, or the end is missing.
    """
    chunks = [_Chunk.model_validate(event) for event in events]
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == 0]
    finish = next((choice.finish_reason for choice in reversed(choices) if choice.finish_reason), None)
    if finish is None:
        raise ValueError("the end is missing")
    arguments: dict[int, str] = {}
    for call in (call for choice in choices for call in choice.delta.tool_calls or ()):
        arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    message: JsonObject = {
        "content": "".join(choice.delta.content or "" for choice in choices),
        "refusal": "".join(choice.delta.refusal or "" for choice in choices) or None,
        "tool_calls": [{"function": {"arguments": text}} for _, text in sorted(arguments.items())],
    }
    return {
        "model": next((chunk.model for chunk in chunks if chunk.model), None),
        "choices": [{"message": message, "finish_reason": finish}],
        "usage": next((chunk.usage for chunk in reversed(chunks) if chunk.usage), None),
    }


def merge_message_events(events: Iterator[JsonValue]) -> JsonObject:
    """A message of Anthropic from its pieces; likewise."""
    found = [_Event.model_validate(event) for event in events]
    if not found or found[-1].type != "message_stop":
        raise ValueError("the end is missing")
    message = next((event.message for event in found if event.message), {})
    usage = message.get("usage")
    usage = dict(usage) if isinstance(usage, dict) else {}
    stop: JsonValue = None
    blocks: dict[int, JsonObject] = {}
    deltas: defaultdict[int, list[_BlockDelta]] = defaultdict(list)
    for event in found:
        stop = event.delta.stop_reason or stop
        usage |= {name: value for name, value in (event.usage or {}).items() if value is not None}
        deltas[event.index].append(event.delta)
        if event.content_block is not None:
            blocks[event.index] = event.content_block
    content: list[JsonValue] = [_merge_block(block, deltas[index]) for index, block in sorted(blocks.items())]
    return message | {"content": content, "stop_reason": stop, "usage": usage}


def _merge_block(block: JsonObject, deltas: Sequence[_BlockDelta]) -> JsonObject:
    written = "".join(delta.partial_json for delta in deltas)
    block = block | ({"input": json.loads(written)} if written else {})
    return block | {"text": f"{block.get('text') or ''}{''.join(delta.text for delta in deltas)}"}


ModelT = TypeVar("ModelT", bound=BaseModel)

_RETRYABLE_STATUSES: Final = (408, 409, 429)

_INVALID_REQUEST_STATUSES: Final = (400, 422)

_AUTH_STATUSES: Final = (401, 403)

_MASK: Final = "[redacted]"


class ServiceResponse(NamedTuple):
    """What a service answered, and by which id it finds the request."""

    body: JsonObject
    request_id: str


class HTTPLLMProvider(LLMProvider):
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
        self.base_url = self.normalise_url(base_url or variables.get(self.url_variable) or self.default_url)
        self._transport = transport
        self._pool: tuple[object, httpx.AsyncClient] | None = None
        self._unsupported_features: dict[tuple[str, str], frozenset[str]] = {}

    @classmethod
    def normalise_url(cls, given: str) -> str:
        """Where the service is, as paths are added to it."""
        return given.strip().rstrip("/")

    def needs_key(self) -> bool:
        """Whether it cannot be asked without a key."""
        return True

    def headers(self) -> Mapping[str, str]:
        """What is sent along, the key among it."""
        return {"authorization": f"Bearer {self._key}"} if self._key else {}

    def unavailable_reason(self) -> str:
        """Which variable is missing or wrong; empty where all is there."""
        if problem := url_problem(self.base_url):
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

    async def post_with_downgrade(
        self, path: str, body: Callable[[frozenset[str]], JsonObject], may_lack: Mapping[str, str], options: LLMOptions
    ) -> ServiceResponse:
        """Ask with what the model takes: what it objects to is left out, and not tried again for that shape.

        Args:
            path: what is asked for.
            body: makes the request, without some of its features.
            may_lack: features that models may lack, by the word by which an objection is known; an empty one stands
                for every objection.
            options: of the call.

        Raises:
            LLMError: as for `post`.
        """
        asked = options.model or self.model, "" if options.schema is None else options.schema.__name__
        lacks = self._unsupported_features.get(asked, frozenset())
        while True:
            try:
                reply = await self.post(path, body(lacks), options)
            except LLMRequestRejected as error:
                known = error.status in _INVALID_REQUEST_STATUSES
                lacking = [
                    name for name, word in may_lack.items() if known and name not in lacks and word in error.excerpt
                ]
                if not lacking:
                    raise
                lacks |= {lacking[0]}
            else:
                self._unsupported_features[asked] = lacks
                return reply

    async def post(self, path: str, body: JsonObject, options: LLMOptions) -> ServiceResponse:
        """Ask, and again where that may help.

        Raises:
            LLMRequestRejected: it cannot be asked like this, or the service does not take it.
            LLMUnavailable: the service cannot be reached or is overloaded, and stays so.
            LLMResponseInvalid: what it answers is not what such services answer.
        """
        if problem := self.unavailable_reason():
            raise LLMRequestRejected(problem, provider=self.name)
        assert options.deadline is not None
        tries = RetryPolicy(
            self.environment,
            options.deadline,
            self._unavailable_error,
            max_attempts=options.max_attempts or MAX_ATTEMPTS,
        )
        return await tries.call(partial(self._post_once, path, body))

    def _unavailable_error(self, failed: RequestFailed, why: str) -> LLMUnavailable:
        return LLMUnavailable(
            f"{failed.message}; {why}",
            provider=self.name,
            status=failed.status,
            request_id=failed.request_id,
            excerpt=failed.excerpt,
        )

    def merge_stream(self, events: Iterator[JsonValue]) -> JsonObject:
        """An answer that comes in pieces although nobody asked for that, as one.

        Raises:
            ValueError: it is none.
        """
        raise ValueError("it should come whole")

    async def is_reachable(self, path: str, patience: float) -> bool:
        """Whether something is served there at all, within so many seconds."""
        try:
            return await self._with_deadline(
                self._probe, path, LLMOptions(deadline=self.environment.clock.now() + patience)
            )
        except LLMError:
            return False

    async def _probe(self, path: str, options: LLMOptions) -> bool:
        client = await self._http_client()
        async with client.stream("GET", self.base_url + path, headers=dict(self.headers())) as response:
            return response.is_success

    def parse(self, reply: ServiceResponse, shape: type[ModelT]) -> ModelT:
        """A reply as what it should be.

        Raises:
            LLMResponseInvalid: it is something else; says where.
        """
        try:
            return shape.model_validate(reply.body)
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(map(str, wrong["loc"]))
            problem = f"its answer is not of the usual form: {place}: {wrong['msg']}"
            excerpt = self._excerpt(json.dumps(reply.body))
            raise LLMResponseInvalid(
                problem, provider=self.name, request_id=reply.request_id, excerpt=excerpt
            ) from None

    async def _post_once(self, path: str, body: JsonObject) -> ServiceResponse:
        url, headers = self.base_url + path, dict(self.headers())
        client = await self._http_client()
        try:
            async with client.stream("POST", url, json=body, headers=headers) as response:
                data, problem = await read_body(response)
        except (httpx.TransportError, UnicodeError) as error:  # the latter where it sends us to what is no host
            excerpt = self._excerpt(f"{type(error).__name__}: {error}".rstrip(": "))
            raise RequestFailed(f"{httpx.URL(self.base_url).host} cannot be reached", excerpt=excerpt) from error
        request_id = self._excerpt(response.headers.get("x-request-id") or response.headers.get("request-id") or "")
        if not response.is_success:
            raise self._response_error(response, request_id, self._excerpt(error_message(data) or problem))
        return self._parse_response(data, problem, request_id, streamed=_is_event_stream(response))

    def _parse_response(self, data: bytes, problem: str, request_id: str, *, streamed: bool) -> ServiceResponse:
        body: JsonValue = None
        try:
            body = self.merge_stream(sse_events(data)) if streamed else json.loads(data)
        except (ValueError, RecursionError):
            problem = problem or "its answer is no JSON"
        if not isinstance(body, dict):
            excerpt = self._excerpt(data.decode(errors="replace"))
            problem = problem or "its answer is no JSON object"
            raise LLMResponseInvalid(problem, provider=self.name, request_id=request_id, excerpt=excerpt)
        return ServiceResponse(body, request_id)

    def _response_error(self, response: httpx.Response, request_id: str, excerpt: str) -> Exception:
        status = response.status_code
        if status < 500 and status not in _RETRYABLE_STATUSES:
            what = status_message(status) + (f"; look at {self.key_variable}" if status in _AUTH_STATUSES else "")
            return LLMRequestRejected(what, provider=self.name, status=status, request_id=request_id, excerpt=excerpt)
        return RequestFailed(
            status_message(status),
            status=status,
            request_id=request_id,
            excerpt=excerpt,
            retry_after=retry_after_seconds(response.headers, self.environment.clock.now()),
            permanent=response.headers.get("x-should-retry") == "false",
        )

    async def _http_client(self) -> httpx.AsyncClient:
        """The connections of this event loop; those of another one cannot be used here, nor closed."""
        loop = current_token().native_token
        if self._pool is None or self._pool[0] is not loop:
            client = await create_client(self._transport)
            if self._pool is None or self._pool[0] is not loop:  # nobody else made them meanwhile
                self._pool = loop, client
        return self._pool[1]

    def _excerpt(self, text: str) -> str:
        return super()._excerpt(text.replace(self._key, _MASK) if self._key else text)


def _is_event_stream(response: httpx.Response) -> bool:
    kind: str = response.headers.get("content-type", "")
    return kind.startswith("text/event-stream")
