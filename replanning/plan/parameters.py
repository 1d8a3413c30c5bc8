"""Parameters of a plan: their declarations, and their values in a run.

A value never changes during a run. References to it are resolved when a task is handed out, so a
value that contains `${` stays text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    Field,
    GetJsonSchemaHandler,
    JsonValue,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from replanning.errors import PlanError, Problem
from replanning.plan.json_values import json_type_name
from replanning.plan.messages import brief_repr, did_you_mean, format_path
from replanning.plan.tasks import StrictBool, StrictModel, Text
from replanning.plan.types import JsonObject, JsonPath
from replanning.secrets import MASK, MIN_KNOWN_CHARS

PARAMETERS: Final = "parameters"
"""First name in references and conditions: `${parameters.region}`, `parameters.region == "eu"`."""

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,199}")

_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
}


def is_parameter_name(name: str) -> bool:
    """Return whether a parameter may have this name."""
    return _NAME.fullmatch(name) is not None


def _checked_name(name: str) -> str:
    if not is_parameter_name(name):
        raise ValueError(
            "expected a name of letters, digits, _ and - that begins with a letter or _"
        )
    return name


ParameterName = Annotated[str, AfterValidator(_checked_name)]
ParameterType = Literal["string", "integer", "number", "boolean", "array", "object"]


class Parameter(StrictModel):
    """Parameter of a plan: a value to be chosen when the plan is run.

    The JSON form omits the value of a secret, so no journal or file contains it.
    """

    type: ParameterType = Field(default="string", description="The JSON type of its value.")
    description: Text = Field(default="", description="Its purpose, for people and models.")
    default: JsonValue = Field(
        default=None, description="Value if none is passed; without a default, one is required."
    )
    secret: StrictBool = Field(
        default=False,
        description="Keep the value out of journals, logs, prompts and files; a string.",
    )
    value: JsonValue = Field(default=None, description="The passed value, such as one from --set.")

    @property
    def current(self) -> JsonValue:
        """The passed value, or the default; None if there is neither."""
        return self.default if self.value is None else self.value

    def value_problem(self, value: JsonValue) -> str:
        """Return why it cannot have this value; empty if it can."""
        # A boolean is an integer in Python, but not a number in JSON.
        is_boolean = isinstance(value, bool) and self.type != "boolean"
        if is_boolean or not isinstance(value, _TYPES[self.type]):
            if self.secret:
                return f"expected {self.type}, not {json_type_name(value)}"
            return f"expected {self.type}, got {brief_repr(value)}"
        if self.secret and len(str(value).strip()) < MIN_KNOWN_CHARS:
            return (
                f"expected a secret of at least {MIN_KNOWN_CHARS} characters: a shorter one looks"
                " like ordinary text and could not be masked"
            )
        return ""

    @model_validator(mode="before")
    @classmethod
    def _read_type(cls, stated: object) -> object:
        """Read the name of a type as a parameter of that type."""
        if isinstance(stated, str):
            return {"type": stated}
        return stated

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        short = {"type": "string", "enum": list(_TYPES)}
        return {"anyOf": [short, handler.resolve_ref_schema(handler(core_schema))]}

    @model_serializer(mode="wrap")
    def _without_secret(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        if self.secret:
            fields.pop("value", None)
        return fields

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            if name != "value" or not self.secret:
                yield name, value


Parameters = Mapping[str, Parameter]


def declaration_problems(parameters: Parameters) -> Iterator[tuple[JsonPath, str]]:
    """Yield the problems of declared parameters, each with its place in the plan."""
    for name, parameter in parameters.items():
        which = f"parameter {name!r}"
        fields = ["default", "value"]
        if parameter.secret:
            fields = ["value"]
            if parameter.type != "string":
                text = f"{which}: a secret is a string, not {parameter.type}"
                yield (PARAMETERS, name, "type"), text
            if parameter.default is not None:
                text = (
                    f"{which}: a secret cannot have a default, because the plan would show it: pass"
                    f" `--set {name}=…`, or let tools refer to it as {{env:NAME}}"
                )
                yield (PARAMETERS, name, "default"), text
        for field in fields:
            value = getattr(parameter, field)
            if value is not None:
                problem = parameter.value_problem(value)
                if problem:
                    yield (PARAMETERS, name, field), f"the {field} of {which}: {problem}"


def missing_values(parameters: Parameters) -> list[Problem]:
    """Return a problem for each parameter that has neither a value nor a default."""
    problems: list[Problem] = []
    for name, parameter in parameters.items():
        if parameter.current is None:
            problems.append(_missing(name, parameter))
    return problems


def _missing(name: str, parameter: Parameter) -> Problem:
    what: str = parameter.type
    if parameter.secret:
        what = "secret"
    if parameter.description:
        what += f": {parameter.description}"
    text = (
        f"parameter {name!r} has no value ({what}): pass `--set {name}=…`, or in Python use"
        " `plan.with_parameters`"
    )
    return Problem(format_path((PARAMETERS, name)), text)


def with_values(
    parameters: Parameters, values: Mapping[str, JsonValue]
) -> tuple[dict[str, Parameter], list[Problem]]:
    """Return parameters with additional values, and every problem of those values.

    If there are any, the problems also name the parameters that still lack a value.
    """
    changed = dict(parameters)
    problems: list[Problem] = []
    for name, value in values.items():
        place = format_path((PARAMETERS, name))
        parameter = parameters.get(name)
        if parameter is None:
            hint = did_you_mean(name, parameters)
            text = f"the plan has no parameter {name!r}"
            if hint:
                text += f"; {hint}"
            elif parameters:
                text += f"; it has {', '.join(map(repr, parameters))}"
            else:
                text += f" and declares none; `--set context.{name}=…` is a value of the context"
            problems.append(Problem(place, text))
            continue
        problem = parameter.value_problem(value)
        if problem:
            problems.append(Problem(place, f"parameter {name!r}: {problem}"))
            continue
        stated = {field: getattr(parameter, field) for field in parameter.model_fields_set}
        try:
            # A list or an object may contain values without a JSON form.
            changed[name] = Parameter.model_validate({**stated, "value": value})
        except PlanError as error:
            problems.append(Problem(place, f"parameter {name!r}: {error.problems[0].message}"))
    if problems:
        for name, parameter in changed.items():
            if parameter.current is None and name not in values:
                problems.append(_missing(name, parameter))
    return changed, problems


def current_values(parameters: Parameters) -> JsonObject:
    """Return the values of parameters by name, for those that have one."""
    values: JsonObject = {}
    for name, parameter in parameters.items():
        if parameter.current is not None:
            values[name] = parameter.current
    return values


def shown_values(parameters: Parameters) -> JsonObject:
    """Return the values of parameters for people and models, with secrets masked."""
    values = current_values(parameters)
    for name, parameter in parameters.items():
        if parameter.secret:
            values[name] = MASK
    return values


def secret_values(parameters: Parameters) -> Iterator[str]:
    """Yield the values of secret parameters, for a redactor."""
    for parameter in parameters.values():
        if parameter.secret and parameter.value is not None:
            yield str(parameter.value)


def with_values_of(
    parameters: Parameters, others: Parameters, *, secret_only: bool = False
) -> Parameters:
    """Return parameters with missing values taken from others of the same names."""
    found: dict[str, Parameter] = {}
    for name, parameter in parameters.items():
        if parameter.value is not None:
            continue
        if secret_only and not parameter.secret:
            continue
        other = others.get(name, parameter)
        if other.value is None:
            continue
        # The declared type may have changed.
        if not parameter.value_problem(other.value):
            found[name] = parameter.model_copy(update={"value": other.value})
    if not found:
        return parameters
    return {**parameters, **found}
