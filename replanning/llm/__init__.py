"""Language models: the interface of clients, selection, circuit breakers, prices, and data in prompts."""

from __future__ import annotations

from replanning.llm.completions import UNMETERED, Completion, FinishReason, LLMCall, LLMOptions, Meter
from replanning.llm.extraction import extract_json
from replanning.llm.guards import FallbackLLM, GuardedLLM
from replanning.llm.prices import PRICES, Price, PriceTable
from replanning.llm.provider import LLMProvider
from replanning.llm.quoting import DataSection, encode_data, fit_sections, truncate_value
from replanning.llm.selection import create_llm_provider

__all__ = [
    "PRICES",
    "UNMETERED",
    "Completion",
    "DataSection",
    "FallbackLLM",
    "FinishReason",
    "GuardedLLM",
    "LLMCall",
    "LLMOptions",
    "LLMProvider",
    "Meter",
    "Price",
    "PriceTable",
    "create_llm_provider",
    "encode_data",
    "extract_json",
    "fit_sections",
    "truncate_value",
]
