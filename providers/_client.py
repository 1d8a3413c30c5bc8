"""HTTPLLMProvider: the base class of language models that are reached over HTTP, and schemas as services take them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import lru_cache, partial
from typing import ClassVar, Final, NamedTuple, TypeVar

import httpx
from anyio.lowlevel import current_token
from pydantic import BaseModel, ValidationError

from replanning import Environment
from replanning.errors import LLMRequestRejected, LLMResponseInvalid, LLMUnavailable
from replanning.http import (
    MAX_ATTEMPTS,
    RequestFailed,
    call_with_retries,
    create_client,
    error_message,
    is_valid_token,
    read_body,
    retry_after_seconds,
    url_problem,
)
from replanning.llm import LLMOptions, LLMProvider, PriceTable
from replanning.llm.provider import json_schema, validation_message
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue

ModelT = TypeVar("ModelT", bound=BaseModel)

RETRYABLE_STATUSES: Final = (408, 409, 429)
"""Statuses below 500 of failures that may be transient."""

_INVALID_REQUEST_STATUSES: Final = (400, 422)
_AUTH_STATUSES: Final = (401, 403)
_MASK: Final = "[redacted]"
_SCHEMA_MAPS: Final = ("properties", "$defs")
_NON_STRICT_KEYWORDS: Final = (
    "prefixItems",
    "patternProperties",
    "propertyNames",
    "allOf",
    "not",
    "if",
    "contains",
)
_TYPE_KEYWORDS: Final = ("type", "enum", "const", "anyOf", "oneOf")
_UNSUPPORTED_KEYWORDS: Final = frozenset(
    {"default", "examples", "title", "discriminator", "minLength", "maxLength", "uniqueItems"}
)
"""Keywords that a strict schema may not have; answers are validated against them afterwards."""

_STATUS_MESSAGES: Final[Mapping[int, str]] = {
    401: "the key is not accepted",
    402: "payment required: the account has no credit",
    403: "the key does not permit this request",
    404: "the model does not exist, or the address of the service is wrong",
    408: "the service timed out while it waited for the request",
    409: "the request conflicts with another one",
    413: "the request is too large",
    429: "rate limit reached",
}


class ServiceResponse(NamedTuple):
    """JSON that a service answered, and the id under which it finds the request."""

    body: JsonObject
    request_id: str


class HTTPLLMProvider(LLMProvider):
    """A language model that is reached over HTTP.

    Failures that may be transient are retried: no connection, 408, 409, 429 and 5xx; after the
    delay that the service asks for or one that doubles, with jitter, and never beyond the deadline.
    Connections are reused until `aclose`, or until the event loop is another one. Redirects are not
    followed, so that the key stays with its service.

    Args:
        api_key: by default the value of the service's variable in the environment.
        base_url: address of the service; likewise.
        transport: for tests; by default the network.
        environ: variables of the environment; by default those of this process.

    The other arguments are those of every `LLMProvider`.

    Attributes:
        key_variable: variable with the key.
        url_variable: variable with the address.
        default_url: address unless another one is given.
        base_url: address that is used.
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
        max_tokens: int | None = None,
        timeout: float | timedelta = 30.0,
        prices: PriceTable | None = None,
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
        self.base_url = self.normalise_url(
            base_url or variables.get(self.url_variable) or self.default_url
        )
        self._transport = transport
        self._client: tuple[object, httpx.AsyncClient] | None = None
        self._unsupported_features: dict[tuple[str, str], frozenset[str]] = {}

    @classmethod
    def normalise_url(cls, address: str) -> str:
        """Return the address to which paths are appended."""
        return address.strip().rstrip("/")

    def needs_key(self) -> bool:
        """Return whether it cannot be asked without a key."""
        return True

    def headers(self) -> Mapping[str, str]:
        """Return the headers of its requests, the key included."""
        return {"authorization": f"Bearer {self._key}"} if self._key else {}

    def unavailable_reason(self) -> str:
        """Return which variable is missing or wrong; an empty text if none is."""
        if problem := url_problem(self.base_url):
            return f"its address {problem}; set {self.url_variable} or base_url to something like {self.default_url}"
        if not self._key and self.needs_key():
            return f"{self.key_variable} is not set"
        if not is_valid_token(self._key):
            return f"the key in {self.key_variable} has characters that no key has; check that it was copied exactly"
        return ""

    async def aclose(self) -> None:
        """Close the connections; they are opened again for the next request."""
        client = self._client
        self._client = None
        if client is not None and client[0] is current_token().native_token:
            await client[1].aclose()

    async def post_with_downgrade(
        self,
        path: str,
        make_body: Callable[[frozenset[str]], JsonObject],
        optional_features: Mapping[str, str],
        options: LLMOptions,
    ) -> ServiceResponse:
        """Send a request with all features that the model supports; those it objects to are left out from then on.

        Args:
            path: of the request.
            make_body: makes the body without the given features.
            optional_features: features that models may lack, each with the word by which an
                objection to it is recognised; an empty word matches every objection.
            options: of the call.

        Raises:
            LLMError: as for `post`.
        """
        shape = (
            options.model or self.model,
            "" if options.schema is None else options.schema.__name__,
        )
        left_out = self._unsupported_features.get(shape, frozenset())
        while True:
            try:
                response = await self.post(path, make_body(left_out), options)
            except LLMRequestRejected as error:
                if error.status not in _INVALID_REQUEST_STATUSES:
                    raise
                features = optional_features.items()
                rejected = [
                    name
                    for name, word in features
                    if name not in left_out and word in error.excerpt
                ]
                if not rejected:
                    raise
                left_out |= {rejected[0]}
            else:
                self._unsupported_features[shape] = left_out
                return response

    async def post(self, path: str, body: JsonObject, options: LLMOptions) -> ServiceResponse:
        """Send a request, and retry it if its failure may be transient.

        Raises:
            LLMRequestRejected: it cannot be sent like this, or the service does not accept it.
            LLMUnavailable: the service cannot be reached or is overloaded, also after retries.
            LLMResponseInvalid: the response is not that of such a service.
        """
        if problem := self.unavailable_reason():
            raise LLMRequestRejected(problem, provider=self.name)
        assert options.deadline is not None

        def final_error(failure: RequestFailed, why: str) -> LLMUnavailable:
            return LLMUnavailable(
                f"{failure.message}; {why}",
                provider=self.name,
                status=failure.status,
                request_id=failure.request_id,
                excerpt=failure.excerpt,
            )

        attempt = partial(self._post_once, path, body)
        most = options.max_attempts or MAX_ATTEMPTS
        return await call_with_retries(
            attempt, self.environment, options.deadline, final_error, max_attempts=most
        )

    def parse(self, response: ServiceResponse, shape: type[ModelT]) -> ModelT:
        """Return a response as a model.

        Raises:
            LLMResponseInvalid: it has another form; names the place.
        """
        try:
            return shape.model_validate(response.body)
        except ValidationError as error:
            problem = f"its answer is not of the usual form: {validation_message(error, 'the answer', most=1)}"
            raise self._invalid_response(
                problem, response.request_id, json.dumps(response.body)
            ) from None

    def _invalid_response(self, problem: str, request_id: str, text: str) -> LLMResponseInvalid:
        return LLMResponseInvalid(
            problem, provider=self.name, request_id=request_id, excerpt=self._excerpt(text)
        )

    async def _post_once(self, path: str, body: JsonObject) -> ServiceResponse:
        url = self.base_url + path
        headers = dict(self.headers())
        client = await self._http_client()
        try:
            async with client.stream("POST", url, json=body, headers=headers) as response:
                data, problem, _ = await read_body(response)
        except (
            httpx.TransportError,
            UnicodeError,
        ) as error:  # the latter for a redirect to an impossible host
            excerpt = self._excerpt(f"{type(error).__name__}: {error}".rstrip(": "))
            raise RequestFailed(
                f"{httpx.URL(self.base_url).host} cannot be reached", excerpt=excerpt
            ) from error
        request_id = self._excerpt(
            response.headers.get("x-request-id") or response.headers.get("request-id") or ""
        )
        if not response.is_success:
            excerpt = self._excerpt(error_message(data) or problem)
            status = response.status_code
            fallback = (
                "the service failed"
                if status >= 500
                else "the service does not accept this request"
            )
            message = _STATUS_MESSAGES.get(status, fallback)
            if 300 <= status < 400:
                message = "the service has another address now, and the key is not sent there"
            if status < 500 and status not in RETRYABLE_STATUSES:
                message += f"; check {self.key_variable}" if status in _AUTH_STATUSES else ""
                raise LLMRequestRejected(
                    message,
                    provider=self.name,
                    status=status,
                    request_id=request_id,
                    excerpt=excerpt,
                )
            raise RequestFailed(
                message,
                status=status,
                request_id=request_id,
                excerpt=excerpt,
                retry_after=retry_after_seconds(response.headers, self.environment.clock.now())
                or 0.0,
                permanent=response.headers.get("x-should-retry") == "false",
            )
        content: JsonValue = None
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            problem = problem or "its answer is an event stream, which was not requested"
        else:
            try:
                content = json.loads(data)
            except (ValueError, RecursionError):
                problem = problem or "its answer is not JSON"
        if not isinstance(content, dict):
            problem = problem or "its answer is not a JSON object"
            raise self._invalid_response(problem, request_id, data.decode(errors="replace"))
        return ServiceResponse(content, request_id)

    async def _http_client(self) -> httpx.AsyncClient:
        """Return the client of this event loop; one of another loop can neither be used nor closed here."""
        loop = current_token().native_token
        if self._client is None or self._client[0] is not loop:
            client = await create_client(self._transport)
            if (
                self._client is None or self._client[0] is not loop
            ):  # unless another call created one meanwhile
                self._client = loop, client
        return self._client[1]

    def _excerpt(self, text: str) -> str:
        return super()._excerpt(text.replace(self._key, _MASK) if self._key else text)


def system_prompt(options: LLMOptions, *, schema_in_prompt: bool) -> str:
    """Return the system prompt, with the schema of the answer if the service takes none."""
    parts = [options.system or ""]
    if options.schema is not None and schema_in_prompt:
        schema = json.dumps(json_schema(options.schema), ensure_ascii=False)
        parts.append(
            f"Answer with one JSON object and nothing else. It must fit this JSON Schema:\n{schema}"
        )
    return "\n\n".join(filter(None, parts))


@lru_cache(maxsize=64)
def strict_schema(schema: type[BaseModel]) -> JsonObject | None:
    """Return a shape in the subset of JSON Schema that services can enforce; None if it has no such form.

    In that subset, an object has exactly the members that are listed, all of them.
    """
    try:
        strict = _strict_node(json_schema(schema))
    except ValueError:
        return None
    assert isinstance(strict, dict)
    return strict


def _strict_node(node: JsonValue) -> JsonValue:
    if isinstance(node, list):
        return [_strict_node(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        node = {name: node[name] for name in ("$ref", "$defs") if name in node}
    elif any(name in node for name in _NON_STRICT_KEYWORDS) or not any(
        name in node for name in _TYPE_KEYWORDS
    ):
        raise ValueError("the schema accepts any value")
    strict: JsonObject = {}
    for name, value in node.items():
        if name in _SCHEMA_MAPS and isinstance(value, dict):
            strict[name] = {key: _strict_node(inner) for key, inner in value.items()}
        elif name not in _UNSUPPORTED_KEYWORDS:
            strict["anyOf" if name == "oneOf" else name] = _strict_node(value)
    if node.get("type") == "object":
        members = node.get("properties")
        if node.get("additionalProperties") or not isinstance(members, dict):
            raise ValueError("the schema accepts any member")
        strict |= {"additionalProperties": False, "required": list(members)}
    if node.get("type") == "array" and not isinstance(node.get("items"), dict):
        raise ValueError("the schema accepts any item")
    return strict
