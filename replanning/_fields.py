"""The kinds of fields that the parts of a plan are made of."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from replanning._ids import TaskId
from replanning._patterns import normalise_fact

MAX_NAME: Final = 200
"""Longest id or name, in characters."""

_NAME: Final = r"^[^\s\x00-\x1f\x7f-\x9f](?:[^\x00-\x1f\x7f-\x9f]*[^\s\x00-\x1f\x7f-\x9f])?$"
_TEXT: Final = r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]*$"
_SAID: Final = rf"{_TEXT[:-1]}[^\s\x00-\x1f\x7f-\x9f]{_TEXT[1:]}"
"""Text that is more than whitespace."""

_Name = StringConstraints(min_length=1, max_length=MAX_NAME, pattern=_NAME)
Name = Annotated[str, _Name]
Id = Annotated[TaskId, _Name]
Text = Annotated[str, StringConstraints(pattern=_TEXT)]
Fact = Annotated[str, StringConstraints(min_length=1, pattern=_SAID), AfterValidator(normalise_fact)]
Amount = Annotated[float, Field(strict=True, ge=0)]
Seconds = Annotated[float, Field(strict=True, gt=0)]
Count = Annotated[int, Field(strict=True, ge=0)]
Integer = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]


class Document(BaseModel):
    """Base of the parts of a plan: immutable, and strict about what it takes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
