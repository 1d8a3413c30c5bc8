"""The kinds of fields that the parts of a plan are made of."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from replanning._ids import TaskId
from replanning._patterns import normalise_fact

MAX_NAME_CHARS: Final = 200
"""Longest id or name, in characters."""

_NAME_PATTERN: Final = r"^[^\s\x00-\x1f\x7f-\x9f](?:[^\x00-\x1f\x7f-\x9f]*[^\s\x00-\x1f\x7f-\x9f])?$"
_TEXT_PATTERN: Final = r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]*$"
_NONBLANK_PATTERN: Final = rf"{_TEXT_PATTERN[:-1]}[^\s\x00-\x1f\x7f-\x9f]{_TEXT_PATTERN[1:]}"
"""Text that is more than whitespace."""

_NameConstraints = StringConstraints(min_length=1, max_length=MAX_NAME_CHARS, pattern=_NAME_PATTERN)
Name = Annotated[str, _NameConstraints]
Id = Annotated[TaskId, _NameConstraints]
Text = Annotated[str, StringConstraints(pattern=_TEXT_PATTERN)]
Fact = Annotated[str, StringConstraints(min_length=1, pattern=_NONBLANK_PATTERN), AfterValidator(normalise_fact)]
NonNegativeFloat = Annotated[float, Field(strict=True, ge=0)]
Seconds = Annotated[float, Field(strict=True, gt=0)]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]
StrictInt = Annotated[int, Field(strict=True)]
StrictBool = Annotated[bool, Field(strict=True)]


class StrictModel(BaseModel):
    """Base of the parts of a plan: immutable, and strict about what it takes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
