"""Language models: the interface that clients implement, their calls, prices and selection."""

from __future__ import annotations

from replanning.llm.completions import (
    Completion,
    FinishReason,
    LLMCall,
    LLMOptions,
    Meter,
    Price,
    PriceTable,
)
from replanning.llm.provider import FallbackLLM, LLMProvider
from replanning.llm.selection import create_llm_provider

__all__ = [
    "Completion",
    "FallbackLLM",
    "FinishReason",
    "LLMCall",
    "LLMOptions",
    "LLMProvider",
    "Meter",
    "Price",
    "PriceTable",
    "create_llm_provider",
]
