"""Recognition and masking of secrets, within the scope of docs/concepts/security.md."""

from __future__ import annotations

from replanning.secrets.masking import (
    MASK,
    Redactor,
    find_known,
    known_texts,
    mask,
    mask_secrets,
    name_fields,
    pattern_problem,
)
from replanning.secrets.rules import secret_predicate

__all__ = [
    "MASK",
    "Redactor",
    "find_known",
    "known_texts",
    "mask",
    "mask_secrets",
    "name_fields",
    "pattern_problem",
    "secret_predicate",
]
