"""Provider for models of pydantic-ai: `PydanticAIProvider("mistral:mistral-large-latest")`."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Final

from replanning import Environment
from replanning.errors import LLMError, LLMRefusal, LLMRequestRejected, LLMUnavailable
from replanning.journal import Usage
from replanning.llm import Completion, FinishReason, LLMOptions, LLMProvider, PriceTable
from replanning.providers._client import RETRYABLE_STATUSES

if TYPE_CHECKING:
    from pydantic_ai.models import Model

_FINISH_REASONS: Final[dict[str | None, FinishReason]] = {
    "stop": "stop",
    "tool_call": "stop",
    "length": "length",
    "content_filter": "refusal",
    None: "stop",
}


class PydanticAIProvider(LLMProvider):
    """Provider for a model of pydantic-ai: `pip install "replanning[pydantic-ai]"`.

    Structured answers come as pydantic-ai gets them from that model: from a tool, natively, or by
    the prompt. Its client makes the retries.

    Args:
        model: a model, or its name with its provider, such as `openai:gpt-5`; for a name,
            pydantic-ai reads the key from the environment.

    The other arguments are those of every `LLMProvider`.
    """

    name: ClassVar[str] = "pydantic-ai"

    def __init__(
        self,
        model: Model | str | None = None,
        *,
        temperature: float = 0.3,
        max_tokens: int | None = None,
        timeout: float | timedelta = 30.0,
        prices: PriceTable | None = None,
        environment: Environment | None = None,
    ) -> None:
        name = model
        if name is not None and not isinstance(name, str):
            name = name.model_name
        super().__init__(
            model=name,
            temperature=temperature,
            max_tokens=max_tokens,
            timeout=timeout,
            prices=prices,
            environment=environment,
        )
        self._model = model

    def unavailable_reason(self) -> str:
        """Return pydantic-ai's reason why the model cannot be created; empty if it can."""
        if find_spec("pydantic_ai") is None:
            return 'it needs pydantic-ai: pip install "replanning[pydantic-ai]"'
        try:
            self._resolve_model(self.model)
        except LLMError as error:
            return str(error)
        return ""

    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        """Ask the model directly, without an agent.

        Raises:
            LLMError: the subclass that fits the error of pydantic-ai.
        """
        assert options.model is not None
        model = self._resolve_model(options.model)
        from pydantic_ai.direct import model_request
        from pydantic_ai.exceptions import (
            AgentRunError,
            ContentFilterError,
            ModelHTTPError,
            UserError,
        )
        from pydantic_ai.messages import (
            ModelRequest,
            SystemPromptPart,
            TextPart,
            ToolCallPart,
            UserPromptPart,
        )
        from pydantic_ai.models import ModelRequestParameters
        from pydantic_ai.output import OutputObjectDefinition
        from pydantic_ai.settings import ModelSettings
        from pydantic_ai.tools import ToolDefinition

        parts: list[SystemPromptPart | UserPromptPart] = [UserPromptPart(prompt)]
        if options.system:
            parts.insert(0, SystemPromptPart(options.system))
        parameters = ModelRequestParameters()
        if options.schema is not None:
            # In both forms: pydantic-ai takes the one that fits the model.
            shape = options.schema.model_json_schema()
            name = options.schema.__name__
            tool = ToolDefinition(
                name="answer",
                parameters_json_schema=shape,
                description="Give the answer.",
                kind="output",
            )
            parameters = ModelRequestParameters(
                output_mode="auto",
                output_object=OutputObjectDefinition(json_schema=shape, name=name),
                output_tools=[tool],
                allow_text_output=False,
            )
        assert options.temperature is not None
        assert options.max_tokens is not None
        settings = ModelSettings(temperature=options.temperature, max_tokens=options.max_tokens)
        try:
            response = await model_request(
                model,
                [ModelRequest(parts=parts)],
                model_settings=settings,
                model_request_parameters=parameters,
                instrument=False,  # the call already has a span
            )
        except ModelHTTPError as error:
            kind: type[LLMUnavailable | LLMRequestRejected] = LLMRequestRejected
            if error.status_code in RETRYABLE_STATUSES or error.status_code >= 500:
                kind = LLMUnavailable
            excerpt = self.redactor.text(str(error.body or ""))[:300]
            raise kind(
                "the request failed", provider=self.name, status=error.status_code, excerpt=excerpt
            ) from error
        except ContentFilterError as error:
            raise LLMRefusal(self._error_text(error), provider=self.name) from error
        except UserError as error:
            raise LLMRequestRejected(self._error_text(error), provider=self.name) from error
        except AgentRunError as error:
            raise LLMUnavailable(self._error_text(error), provider=self.name) from error
        text = ""
        call: ToolCallPart | None = None
        for part in response.parts:
            if isinstance(part, TextPart):
                text += part.content
            elif isinstance(part, ToolCallPart) and call is None:
                call = part
        if call is not None:
            text = call.args_as_json_str()
        return self.completion(
            prompt,
            text,
            self._priced(options),
            model=response.model_name or "",
            input_tokens=response.usage.input_tokens or None,
            output_tokens=response.usage.output_tokens or None,
            finish=_FINISH_REASONS.get(response.finish_reason, "other"),
            request_id=response.provider_response_id or "",
        )

    def estimate(self, prompt: str, options: LLMOptions) -> Usage:
        """Return an upper bound of the usage, at the price of the model, whoever serves it."""
        return super().estimate(prompt, self._priced(options))

    def _priced(self, options: LLMOptions) -> LLMOptions:
        """Return options with the name in price lists, which lacks the provider's prefix."""
        name = options.model or self.model
        _, _, model = name.partition(":")
        return replace(options, model=model or name)

    def _resolve_model(self, name: str) -> Model | str:
        """Return the model with this name.

        Raises:
            LLMRequestRejected: the name is empty, or pydantic-ai cannot create the model.
        """
        if name == self.model and self._model is not None and not isinstance(self._model, str):
            return self._model
        if not name:
            raise LLMRequestRejected(
                "it needs the name of a model with its provider, such as 'openai:gpt-5'"
            )
        try:
            from pydantic_ai.models import infer_model

            return infer_model(name)
        except Exception as error:  # depends on the client of the service
            problem = f"the model {name!r} cannot be used: {self._error_text(error)}"
            raise LLMRequestRejected(problem) from error

    def _error_text(self, error: Exception) -> str:
        return self.redactor.text(str(error) or type(error).__name__)[:500]
