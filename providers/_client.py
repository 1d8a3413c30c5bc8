"""HTTPLLMProvider, the base class of language models over HTTP; strict schemas of answers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import lru_cache, partial
from typing import ClassVar, Final, NamedTuple, TypeVar, cast

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
_NO_CREDIT_CODE: Final = b'"insufficient_quota"'
"""Code of OpenAI, with status 429, for an account without credit; no retry changes that."""

_MASK: Final = "[redacted]"
_SCHEMA_MAPS: Final = ("properties", "$defs")
_NON_STRICT_KEYWORDS: Final = frozenset(
    {"prefixItems", "patternProperties", "propertyNames", "allOf", "not", "if", "contains"}
)
_TYPE_KEYWORDS: Final = frozenset({"type", "enum", "const", "anyOf", "oneOf"})
_UNSUPPORTED_KEYWORDS: Final = frozenset(
    {"default", "examples", "title", "discriminator", "minLength", "maxLength", "uniqueItems"}
)
"""Keywords that a strict schema must not have; answers are validated against them afterwards."""

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
    """JSON answer of a service, and the id that it gave the request."""

    body: JsonObject
    request_id: str


class HTTPLLMProvider(LLMProvider):
    """A language model behind an HTTP API.

    Failures that may be transient are retried: no connection, 408, 409, 429 and 5xx. The delay is
    the one that the service asks for, else one that doubles, with jitter; it never exceeds the
    deadline. Connections are reused until `aclose`, or until the event loop changes. Redirects are
    not followed, so that the key stays with its service.

    Args:
        api_key: the key; by default that of the environment variable `key_variable`.
        base_url: address of the service; by default that of `url_variable`, else `default_url`.
        transport: replaces the network in tests.
        environ: environment variables; by default those of this process.

    The other arguments are those of every `LLMProvider`.

    Attributes:
        key_variable: name of the environment variable with the key.
        url_variable: name of the environment variable with the address.
        default_url: address unless another one is given.
        base_url: address in use.
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
        # The client of the event loop that used it last; other loops can neither use nor close it.
        self._clients: dict[object, httpx.AsyncClient] = {}
        self._unsupported_features: dict[object, frozenset[str]] = {}

    @classmethod
    def normalise_url(cls, address: str) -> str:
        """Return the address in the form that paths are appended to."""
        return address.strip().rstrip("/")

    def needs_key(self) -> bool:
        """Return whether the service requires a key."""
        return True

    def headers(self) -> Mapping[str, str]:
        """Return the headers of its requests, the key included."""
        if not self._key:
            return {}
        return {"authorization": f"Bearer {self._key}"}

    def unavailable_reason(self) -> str:
        """Return which variable is missing or wrong; empty if none is."""
        problem = url_problem(self.base_url)
        if problem:
            advice = f"set {self.url_variable} or base_url to something like {self.default_url}"
            return f"its address {problem}; {advice}"
        if not self._key and self.needs_key():
            return f"{self.key_variable} is not set"
        if not is_valid_token(self._key):
            problem = f"the key in {self.key_variable} has characters that no key has"
            return f"{problem}; check that it was copied exactly"
        return ""

    async def aclose(self) -> None:
        """Close the connections; the next request opens new ones."""
        client = self._clients.get(current_token().native_token)
        self._clients = {}
        if client is not None:
            await client.aclose()

    async def post_with_downgrade(
        self,
        path: str,
        make_body: Callable[[frozenset[str]], JsonObject],
        optional_features: Mapping[str, str],
        options: LLMOptions,
    ) -> ServiceResponse:
        """Send a request with all features that the model supports.

        Features that the model rejects are left out, also of later requests.

        Args:
            path: path of the request.
            make_body: makes the body without the given features.
            optional_features: features that models may lack, each with a word that identifies its
                rejection; an empty word matches every rejection.
            options: options of the call.

        Raises:
            LLMError: as for `post`.
        """
        shape = (options.model, options.schema)
        left_out = self._unsupported_features.get(shape, frozenset())
        while True:
            try:
                response = await self.post(path, make_body(left_out), options)
            except LLMRequestRejected as error:
                if error.status not in _INVALID_REQUEST_STATUSES:
                    raise
                rejected = _rejected_feature(error, optional_features, left_out)
                if rejected is None:
                    raise
                left_out |= {rejected}
            else:
                self._unsupported_features[shape] = left_out
                return response

    async def post(self, path: str, body: JsonObject, options: LLMOptions) -> ServiceResponse:
        """Send a request, and retry it if its failure may be transient.

        Raises:
            LLMRequestRejected: it cannot be sent, or the service does not accept it.
            LLMUnavailable: the service cannot be reached or is overloaded, even after retries.
            LLMResponseInvalid: the response does not have the form of such a service.
        """
        problem = self.unavailable_reason()
        if problem:
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
            LLMResponseInvalid: it has another form; the error names the first difference.
        """
        try:
            return shape.model_validate(response.body)
        except ValidationError as error:
            place = validation_message(error, "the answer", most=1)
            problem = f"its answer is not in the expected form: {place}"
            text = json.dumps(response.body)
            raise self._invalid_response(problem, response.request_id, text) from None

    def _invalid_response(self, problem: str, request_id: str, text: str) -> LLMResponseInvalid:
        return LLMResponseInvalid(
            problem, provider=self.name, request_id=request_id, excerpt=self._excerpt(text)
        )

    async def _post_once(self, path: str, body: JsonObject) -> ServiceResponse:
        """Send a request once.

        Raises:
            RequestFailed: it may be sent again.
            LLMRequestRejected: the service does not accept it.
            LLMResponseInvalid: the response does not have the form of such a service.
        """
        url = self.base_url + path
        headers = dict(self.headers())
        client = await self._http_client()
        try:
            async with client.stream("POST", url, json=body, headers=headers) as response:
                data, problem, _ = await read_body(response)
        # A redirect to an impossible host is a UnicodeError.
        except (httpx.TransportError, UnicodeError) as error:
            excerpt = self._excerpt(f"{type(error).__name__}: {error}".rstrip(": "))
            host = httpx.URL(self.base_url).host
            raise RequestFailed(f"{host} cannot be reached", excerpt=excerpt) from error
        other_id = response.headers.get("request-id", "")
        request_id = self._excerpt(response.headers.get("x-request-id", other_id))
        if not response.is_success:
            excerpt = self._excerpt(error_message(data) or problem)
            has_credit = response.status_code != 429 or _NO_CREDIT_CODE not in data
            raise self._failure(response, request_id, excerpt, has_credit=has_credit)

        try:
            if problem:
                raise ValueError(problem)
            content = _json_object(data, response.headers.get("content-type", ""))
        except ValueError as error:
            text = data.decode(errors="replace")
            raise self._invalid_response(str(error), request_id, text) from None
        return ServiceResponse(content, request_id)

    def _failure(
        self, response: httpx.Response, request_id: str, excerpt: str, *, has_credit: bool
    ) -> RequestFailed | LLMRequestRejected:
        """Return the error of an unsuccessful response: RequestFailed if it may be sent again."""
        status = response.status_code
        if not has_credit:
            message = _STATUS_MESSAGES[402]
        elif 300 <= status < 400:
            message = "the service redirects to another address, and the key is not sent there"
        elif status in _STATUS_MESSAGES:
            message = _STATUS_MESSAGES[status]
        elif status >= 500:
            message = "the service failed"
        else:
            message = "the service does not accept this request"
        if has_credit and (status >= 500 or status in RETRYABLE_STATUSES):
            delay = retry_after_seconds(response.headers, self.environment.clock.now())
            return RequestFailed(
                message,
                status=status,
                request_id=request_id,
                excerpt=excerpt,
                retry_after=delay or 0.0,
                permanent=response.headers.get("x-should-retry") == "false",
            )
        if status in _AUTH_STATUSES:
            message += f"; check {self.key_variable}"
        return LLMRequestRejected(
            message, provider=self.name, status=status, request_id=request_id, excerpt=excerpt
        )

    async def _http_client(self) -> httpx.AsyncClient:
        """Return the client of this event loop."""
        loop = current_token().native_token
        if loop not in self._clients:
            client = await create_client(self._transport)
            # Another call may have created one meanwhile.
            if loop not in self._clients:
                self._clients = {loop: client}
        return self._clients[loop]

    def _excerpt(self, text: str) -> str:
        if self._key:
            text = text.replace(self._key, _MASK)
        return super()._excerpt(text)


def _json_object(data: bytes, content_type: str) -> JsonObject:
    """Return the JSON object in an answer.

    Raises:
        ValueError: the answer is something else.
    """
    if content_type.startswith("text/event-stream"):
        raise ValueError("its answer is an event stream, which was not requested")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("its answer is not JSON") from None
    if not isinstance(content, dict):
        raise ValueError("its answer is not a JSON object")
    return cast(JsonObject, content)


def _rejected_feature(
    error: LLMRequestRejected, optional_features: Mapping[str, str], left_out: frozenset[str]
) -> str | None:
    """Return the first feature that an error rejects; None if it rejects none."""
    for name, word in optional_features.items():
        if name not in left_out and word in error.excerpt:
            return name
    return None


def system_prompt(options: LLMOptions, *, schema_in_prompt: bool) -> str:
    """Return the system prompt, with the schema of the answer if the service takes none."""
    parts: list[str] = []
    if options.system:
        parts.append(options.system)
    if options.schema is not None and schema_in_prompt:
        schema = json.dumps(json_schema(options.schema), ensure_ascii=False)
        parts.append(
            f"Answer with one JSON object and nothing else. It must fit this JSON Schema:\n{schema}"
        )
    return "\n\n".join(parts)


def chat_messages(system: str, prompt: str) -> list[JsonValue]:
    """Return the messages of a chat: the system prompt, if any, and the prompt."""
    messages: list[JsonValue] = [{"role": "user", "content": prompt}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return messages


@lru_cache(maxsize=64)
def strict_schema(schema: type[BaseModel]) -> JsonObject | None:
    """Return a schema in the subset of JSON Schema that services enforce.

    In that subset, an object has all the listed members and no others. None if the schema cannot be
    expressed in it.
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
    elif not _TYPE_KEYWORDS.isdisjoint(node) and _NON_STRICT_KEYWORDS.isdisjoint(node):
        _check_members(node)
    else:
        raise ValueError("the schema accepts any value")

    strict: JsonObject = {}
    for name, value in node.items():
        if name in _SCHEMA_MAPS and isinstance(value, dict):
            named: JsonObject = {}
            for key, inner in value.items():
                named[key] = _strict_node(inner)
            strict[name] = named
        elif name == "oneOf":
            strict["anyOf"] = _strict_node(value)
        elif name not in _UNSUPPORTED_KEYWORDS:
            strict[name] = _strict_node(value)
    members = node.get("properties")
    if node.get("type") == "object" and isinstance(members, dict):
        strict["additionalProperties"] = False
        strict["required"] = list(members)
    return strict


def _check_members(node: JsonObject) -> None:
    """Raise ValueError if an object or array may have members that the schema does not describe."""
    if node.get("type") == "object":
        if node.get("additionalProperties") or not isinstance(node.get("properties"), dict):
            raise ValueError("the schema accepts any member")
    if node.get("type") == "array" and not isinstance(node.get("items"), dict):
        raise ValueError("the schema accepts any item")
